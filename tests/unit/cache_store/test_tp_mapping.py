"""Which prefill ranks a decode rank reads: the documented table, and every size that fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.geometry.layout import AgentIdentity, GroupLayout
from cache_store.geometry.tp_mapping import UNMAPPED, PeerShare, head_range, peer_address, peer_map, peers_of, read_plan
from cache_store.handshake import answer, make_request
from cache_store.serving.lease import LeaseState
from cache_store.serving.reader import WantedGroup, make_caller
from cache_store.transports import Offer
from rpc.errors import BatonError, ErrorCode
from rpc.tp_sizes import sizes_fit
from tests.unit.cache_store.lease_fixtures import Clock, make_table, prefill_result

BLOCK_SIZE, HEAD_DIM = 2, 4
KEY = "r#0.00000000"


def layout(heads: int, total: int) -> GroupLayout:
    return GroupLayout.of(
        "full",
        num_layers=1,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype="float16",
        total_kv_heads=total,
    )


@pytest.mark.invariant("RPC-18")
@pytest.mark.parametrize(
    ("heads", "tp", "rank", "peer_tp", "expected"),
    [
        (8, 2, 1, 2, [PeerShare(1)]),
        (16, 8, 5, 2, [PeerShare(1, source_count=4, source_id=1)]),
        (8, 2, 1, 8, [PeerShare(4 + i, dest_count=4, dest_id=i) for i in range(4)]),
        # Two heads on four ranks: each head is held twice; the first holder is read.
        (2, 1, 0, 4, [PeerShare(0, dest_count=2, dest_id=0), PeerShare(2, dest_count=2, dest_id=1)]),
        # One head shared by all (MLA): one peer, whole.
        (1, 4, 3, 2, [PeerShare(1)]),
        (1, 2, 1, 4, [PeerShare(2)]),
    ],
)
def test_read_plan_of_known_sizes_is_the_documented_one(
    heads: int, tp: int, rank: int, peer_tp: int, expected: list[PeerShare]
) -> None:
    assert list(read_plan(heads, tp, rank, peer_tp)) == expected


@pytest.mark.invariant("RPC-18")
@pytest.mark.parametrize(("heads", "tp", "peer_tp"), [(8, 2, 3), (3, 2, 2), (3, 1, 2), (4, 1, 3), (3, 4, 4)])
def test_read_plan_when_sizes_do_not_divide_is_asymmetric_tp(heads: int, tp: int, peer_tp: int) -> None:
    with pytest.raises(BatonError) as caught:
        read_plan(heads, tp, 0, peer_tp)
    assert caught.value.code is ErrorCode.ASYMMETRIC_TP_FAILED


@pytest.mark.invariant("RPC-18")
@pytest.mark.parametrize("rank", [-1, 2])
def test_head_range_of_a_rank_outside_raises(rank: int) -> None:
    with pytest.raises(IndexError):
        head_range(4, 2, rank)


@pytest.mark.invariant("RPC-18")
def test_peer_address_beyond_the_list_is_unmapped_never_another() -> None:
    assert [peer_address(("a:1", "b:2"), rank) for rank in (0, 1, 2, -1)] == ["a:1", "b:2", UNMAPPED, UNMAPPED]


@pytest.mark.invariant("RPC-18")
@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    peer_tp=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([1, 2, 3, 4, 8, 16]),
)
def test_h3_every_destination_byte_is_written_once_and_equals_the_whole_tensor(
    tp: int, peer_tp: int, heads: int
) -> None:
    def fits(size: int) -> bool:
        return heads % size == 0 or size % heads == 0

    if not (fits(tp) and fits(peer_tp)):
        with pytest.raises(BatonError) as caught:
            [read_plan(heads, tp, rank, peer_tp) for rank in range(tp)]
        assert caught.value.code is ErrorCode.ASYMMETRIC_TP_FAILED
        return
    whole = np.arange(2 * heads * BLOCK_SIZE * HEAD_DIM, dtype=np.float16).reshape(2, heads, BLOCK_SIZE, HEAD_DIM)

    def shard(size: int, rank: int) -> np.ndarray:
        start, stop = head_range(heads, size, rank)
        return np.ascontiguousarray(whole[:, start:stop])

    for rank in range(tp):
        own = shard(tp, rank)
        got = np.zeros(own.nbytes, dtype=np.uint8)
        writes = np.zeros(own.nbytes, dtype=np.uint8)
        for share in read_plan(heads, tp, rank, peer_tp):
            source = shard(peer_tp, share.peer_rank)
            raw = source.view(np.uint8).reshape(-1)
            there = layout(source.shape[1], heads).partition_ranges(share.source_count, share.source_id)
            here = layout(own.shape[1], heads).partition_ranges(share.dest_count, share.dest_id)
            payload = np.concatenate([raw[start:stop] for start, stop in there])
            at = 0
            for start, stop in here:
                got[start:stop] = payload[at : at + stop - start]
                writes[start:stop] += 1
                at += stop - start
            assert at == payload.nbytes
        assert (writes == 1).all()
        assert got.tobytes() == own.tobytes()


SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 3, 4, 8, 16)
EVERY = [(prefill, decode, heads) for prefill in SIZES for decode in SIZES for heads in HEADS]


def identities(engine_id: str, tp: int, heads: int) -> list[AgentIdentity]:
    ranges = [head_range(heads, tp, rank) for rank in range(tp)]
    return [
        AgentIdentity(engine_id, "model", "float16", (layout(stop - start, heads),), tp, rank)
        for rank, (start, stop) in enumerate(ranges)
    ]


@pytest.mark.invariant("RPC-18")
def test_h3_router_and_handshake_agree_with_the_mapping_on_which_sizes_pair() -> None:
    whole = AgentIdentity("prefill", "model", "float16", (layout(1, 1),), 1, 0)
    for prefill, decode, heads in EVERY:
        if not sizes_fit(prefill, decode, [heads]):
            with pytest.raises(BatonError) as caught:
                [peer_map({"full": heads}, decode, rank, prefill) for rank in range(decode)]
            assert caught.value.code is ErrorCode.ASYMMETRIC_TP_FAILED
            # An agent of such a server could not be made; the other one refuses all the same.
            group = layout(heads, heads)
            own = replace(whole, groups=(group,), tp_size=prefill)
            request = make_request(replace(own, engine_id="decode", tp_size=decode), "prefill", "all", Offer())
            with pytest.raises(BatonError) as caught:
                answer(own, request, Offer(), "all", 30.0)
            assert caught.value.code is ErrorCode.ASYMMETRIC_TP_FAILED
            continue
        plans = [peer_map({"full": heads}, decode, rank, prefill) for rank in range(decode)]
        assert {reads.peer_rank for plan in plans for reads in plan} == set(range(prefill))


@pytest.mark.invariant("RPC-18")
def test_h3_every_rank_is_the_peer_of_its_peers() -> None:
    for size in SIZES:
        for other in SIZES:
            pairs = {(rank, peer) for rank in range(size) for peer in peers_of(size, rank, other)}
            assert pairs == {(rank, peer) for peer in range(other) for rank in peers_of(other, peer, size)}
    with pytest.raises(IndexError):
        peers_of(2, 2, 4)
    with pytest.raises(BatonError):
        peers_of(2, 0, 3)


@pytest.mark.invariant("RPC-18")
@pytest.mark.parametrize(("prefill", "decode", "heads"), [each for each in EVERY if sizes_fit(*each[:2], each[2:])])
def test_h3_every_lease_is_released_once_when_all_that_have_to_do_with_it_have_released_it(
    prefill: int, decode: int, heads: int
) -> None:
    """Ranks of the decode server load and release in the order of their numbers, each what its plan says."""
    sources = identities("prefill", prefill, heads)
    tables = [make_table(Clock(), layouts=source.groups) for source in sources]
    for rank, table in enumerate(tables):
        lease = table.admit(KEY, 1 + rank, BLOCK_SIZE, {"full": [1]}, 0)
        assert lease is not None
    left = {rank: set(peers_of(prefill, rank, decode)) for rank in range(prefill)}
    for reader in range(decode):
        plan = peer_map(sources[0].heads, decode, reader, prefill)
        for reads in plan:
            table, source = tables[reads.peer_rank], sources[reads.peer_rank]
            caller, shares = make_caller(source, reader, decode)
            assert shares == reads.shares
            if not reads.shares:
                # It reads elsewhere, and may be done before the copies here are computed.
                assert table.release(KEY, None, True, caller=caller)
                assert not table.release(KEY, None, True, caller=caller)
        for reads in plan:
            table, source = tables[reads.peer_rank], sources[reads.peer_rank]
            lease = table.get(KEY)
            assert lease is not None, "a lease ended before everybody had released it"
            if lease.state is LeaseState.RUNNING:
                table.publish(KEY, "full", 0, 1)
                table.computed(KEY, prefill_result(), True)
            left[reads.peer_rank].discard(reader)
            if reads.shares:
                caller, _ = make_caller(source, reader, decode)
                share = reads.shares["full"]
                wanted = WantedGroup(source.groups[0], 0, 1, share.source_count, share.source_id)
                opened = table.open_load(KEY, None, BLOCK_SIZE, (wanted,), 1 << 20, caller=caller)
                assert opened is not None and opened.next_run() is not None
                with pytest.raises(BatonError) as caught:
                    table.open_load(KEY, None, BLOCK_SIZE, (wanted,), 1 << 20, caller=caller)
                assert caught.value.code is ErrorCode.DUPLICATE_REQUEST
                with pytest.raises(BatonError):
                    table.release(KEY, None, True, caller=caller)
                table.close_load(opened, True)
                with pytest.raises(BatonError) as caught:
                    table.open_load(KEY, None, BLOCK_SIZE, (wanted,), 1 << 20, caller=caller)
                assert caught.value.code is ErrorCode.DUPLICATE_REQUEST
                assert table.release(KEY, 1 + reads.peer_rank, True, caller=caller)
            ended = [event.outcome for event in table.take_ended()]
            assert ended == ([] if left[reads.peer_rank] else ["released"])
    assert not any(left.values()) and not any(len(table) for table in tables)
