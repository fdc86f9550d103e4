"""Which prefill ranks a decode rank reads: the documented table, and every size that fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.layout import GroupLayout
from cache_store.tp_mapping import UNMAPPED, PeerShare, head_range, peer_address, read_plan
from rpc.errors import BatonError, ErrorCode

BLOCK_SIZE, HEAD_DIM = 2, 4


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
