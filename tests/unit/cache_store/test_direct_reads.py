"""A decode server reads KV out of its peer's memory: when it can, what it is told, and when the bytes count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np
import pytest

from cache_store import equipment
from cache_store.agent import GroupLayout
from cache_store.loading import peers as peers_module
from cache_store.memory import fetching
from cache_store.memory.fetching import HostFetcher
from cache_store.memory.pool import HostKvPool
from cache_store.memory.shared_memory import MappedPool, MemoryFile, describe
from cache_store.serving import sending
from cache_store.serving.lease import LeaseState, LeaseTable
from protos import cache_store_pb2 as pb
from protos import cache_store_pb2_grpc
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from rpc.status import from_rpc_error
from tests.unit.cache_store.agents import (
    LAYOUT,
    WINDOW,
    HeldClock,
    Node,
    assert_clean,
    key_of,
    nodes,
    prefill_result,
    settings,
    until,
)
from tests.unit.cache_store.shared import SharedNode, needs_nixl
from tests.unit.cache_store.staged import Gate, Pair, StagedNode, make_pair

KEY = key_of(1)
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def direct() -> Iterator[Pair]:
    """Copies that can be held up, out of the peer's memory."""
    yield from make_pair("threads", "ipc")


def test_transport_when_either_side_cannot_or_will_not_share_then_the_other_way_is_taken() -> None:
    for theirs, own in [("grpc", "auto"), ("auto", "grpc")]:
        with nodes(
            StagedNode("prefill", settings(transport=theirs), seed=1),
            StagedNode("decode", settings(transport=own), seed=2),
        ) as (prefill, decode):
            prefill.stage(KEY, [5])
            decode.load(prefill.source, KEY, [1])
            decode.load_done()
            prefill.lease_ended()
            assert decode.count("kv_transfer_bytes_total", transport="grpc") == 3 * LAYOUT.block_bytes
    with nodes(Node("prefill", seed=1), StagedNode("decode", seed=2)) as (private, decode):
        assert (private.agent.transports, decode.agent.transports) == (("ipc", "tcp", "grpc"),) * 2
        private.stage(KEY, [5])
        decode.load(private.source, KEY, [1])
        assert decode.load_done().transport == "tcp", "its memory is in no file that others could open"
        assert np.array_equal(decode.blocks([1]), private.blocks([5]))
        private.lease_ended()


def test_memory_that_cannot_be_opened_then_the_next_transport_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings()
    with nodes(StagedNode("prefill", chosen, seed=1), StagedNode("decode", chosen, seed=2)) as (prefill, decode):
        assert isinstance(decode, StagedNode)

        def refuse(memory: object) -> None:
            raise peers_module.MemoryUnavailable("not permitted")

        monkeypatch.setattr(decode.copies, "open", refuse)
        with caplog.at_level(logging.WARNING, "cache_store"):
            for number in (1, 2):
                prefill.stage(key_of(number), [5])
                decode.load(prefill.source, key_of(number), [number])
                decode.load_done()
                prefill.lease_ended()
        assert [record.message for record in caplog.records if "ipc" in record.message] == [
            f"peer={prefill.address}: transport ipc is left out: not permitted"
        ]
        assert decode.count("kv_transfer_bytes_total", transport="tcp") == 6 * LAYOUT.block_bytes
        assert_clean(prefill, decode)


def test_memory_that_cannot_be_opened_when_ipc_is_demanded_then_the_peers_do_not_fit() -> None:
    with nodes(
        StagedNode("prefill", settings(), seed=1, shared=False), StagedNode("decode", settings(transport="ipc"), seed=2)
    ) as (prefill, decode):
        decode.load(prefill.source, KEY, [1])
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.INCOMPATIBLE_PEER
        assert failed.error.metadata["transports"] == "ipc / tcp, grpc"


def test_ipc_when_it_is_demanded_between_two_machines_then_the_error_says_what_is_wrong() -> None:
    made = (
        SharedNode(name, settings(transport="ipc"), seed=seed) for seed, name in enumerate(("prefill", "decode"), 1)
    )
    with nodes(*made) as (prefill, decode):
        service = prefill.agent._service
        service.offer = replace(service.offer, host_id="another")  # as on another machine
        decode.load(prefill.source, KEY, [1])
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.INCOMPATIBLE_PEER
        why = "ipc / ipc (ipc: they are on two machines; use --kv-transport auto)"
        assert failed.error.metadata["transports"] == why and why in failed.error.message


def load_of_two(transport: str = "ipc") -> pb.LoadRequest:
    return load_of((LAYOUT,), {"full": [5, 9]}, transport)


def load_of(groups: Sequence[GroupLayout], ids: dict[str, list[int]], transport: str = "ipc") -> pb.LoadRequest:
    return pb.LoadRequest(
        reference=pb.KvReference(engine_id="prefill", request_key=KEY),
        wanted=[
            pb.WantedBlocks(
                group=group.tag, block_size=group.block_size, first_block=0, num_blocks=len(ids[group.tag]),
                num_layers=group.num_layers, block_bytes=group.block_bytes, partition_count=1, partition_id=0,
            )
            for group in groups
        ],
        prompt_tokens=len(ids[groups[0].tag]) * groups[0].block_size,
        checksum="all",
        chunk_bytes=1 << 16,
        transport=transport,
        reader=pb.ReaderRank(rank=0, tp_size=1),
    )  # fmt: skip


def test_load_when_the_transport_is_one_that_is_not_served_then_it_is_refused_with_those_that_are() -> None:
    with nodes(Node("prefill", settings(transport="auto"), seed=1)) as (private,):
        with grpc.insecure_channel(private.address) as channel, pytest.raises(grpc.RpcError) as refused:
            list(cache_store_pb2_grpc.CacheStoreStub(channel).Load(load_of_two("ipc"), timeout=WAIT_S))
        error = from_rpc_error(refused.value, leg="cache_store", deadline_passed=False, was_ready=True)
        assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, "transport")
        assert "tcp, grpc" in error.message
        assert_clean(private)


def test_notices_when_several_layers_are_ready_then_they_travel_in_one_event(direct: Pair) -> None:
    prefill, _ = direct
    prefill.stage(KEY, [5, 9])

    def computed() -> bool:
        lease = prefill.agent._table.get(KEY)
        return lease is not None and lease.state is LeaseState.COMPUTED

    until(computed, "all layers are published and the prompt is computed")
    with grpc.insecure_channel(prefill.address) as channel:
        (event,) = cache_store_pb2_grpc.CacheStoreStub(channel).Load(load_of_two(), timeout=WAIT_S)
    assert event.started.generation and event.state == pb.COMPUTE_STATE_COMPUTED
    assert event.notices == [
        pb.Notice(
            group="full",
            layer=0,
            num_layers=LAYOUT.num_layers,
            block_runs=[0, 2],
            block_bytes=LAYOUT.block_bytes,
            source_runs=[5, 1, 9, 1],
        )
    ]
    assert event.done.pieces == 2 * LAYOUT.num_layers and not event.data and not event.HasField("pieces")
    prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
    prefill.lease_ended()


def test_notices_when_they_are_many_then_no_event_is_larger_than_its_limit_and_all_of_them_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of two groups are about other blocks in each layer, and a long prompt has many scattered ones."""
    monkeypatch.setattr(sending, "MOST_NUMBERS", 8)
    groups, ids = (LAYOUT, WINDOW), {"full": [9, 4, 7, 2], "window": [3, 8]}
    chosen, tokens = settings(transport="ipc"), 4 * LAYOUT.block_size
    with nodes(
        SharedNode("prefill", chosen, seed=1, layouts=groups), SharedNode("decode", chosen, seed=2, layouts=groups)
    ) as (prefill, decode):
        prefill.agent.admit(KEY, 1, tokens, ids, tokens)
        prefill.agent.computed(KEY, prefill_result(), True)
        with grpc.insecure_channel(prefill.address) as channel:
            events = list(cache_store_pb2_grpc.CacheStoreStub(channel).Load(load_of(groups, ids), timeout=WAIT_S))
        sizes = [sum(len(each.block_runs) + len(each.source_runs) for each in event.notices) for event in events]
        assert max(sizes) <= 8 + 10 and sum(size > 0 for size in sizes) > 1, "a layer of four scattered blocks has ten"
        prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()
        prefill.agent.admit(key_of(2), 2, tokens, ids, tokens)
        prefill.agent.computed(key_of(2), prefill_result(), True)
        own = {"full": (0, [1, 3, 5, 7]), "window": (0, [2, 6])}
        decode.agent.load(key_of(2), prefill.source, tokens, own, 60.0)
        decode.load_done()
        for tag, (_, blocks) in own.items():
            np.testing.assert_array_equal(decode.blocks(blocks, tag), prefill.blocks(ids[tag], tag))
        prefill.lease_ended()


@pytest.mark.parametrize("code", [ErrorCode.EXECUTION_EXCEPTION, ErrorCode.REQUEST_TOMBSTONED])
def test_direct_read_when_the_request_ends_before_the_copy_is_done_then_its_cause_comes_and_no_failed_transfer(
    direct: Pair, code: ErrorCode
) -> None:
    prefill, decode = direct
    decode.gate.close()
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    assert decode.gate.reached.wait(WAIT_S)
    # Everything was said, so nothing but D's word keeps the lease; now it ends, and the blocks are used again.
    until(lambda: prefill.agent.stats().readers == 0, "every notice is sent")
    prefill.agent.fail(KEY, BatonError(code))
    assert prefill.lease_ended().outcome == "aborted"
    for layer in prefill.memory["full"]:
        layer[[5, 6]] = 0xEE
    decode.gate.open()
    failed = decode.load_failed()
    assert failed.error.code is code
    assert failed.foreign and failed.delivered == 6
    for reason in (code, ErrorCode.READ_TRANSFER_NOT_DONE):
        assert not decode.count("kv_transfer_failures_total", transport="ipc", reason=reason.name)


def test_k4_direct_read_when_it_takes_several_leases_then_it_renews_them_and_completes() -> None:
    """P has said everything and holds the KV for D's word alone, whose copies are not done."""
    clock, lease_s = HeldClock(), 0.3
    for prefill, decode in make_pair("threads", "ipc", clock, lease_seconds=lease_s):
        decode.gate.close()
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        assert decode.gate.reached.wait(WAIT_S)
        until(lambda prefill=prefill: prefill.agent.stats().readers == 0, "every notice is sent")  # type: ignore[misc]

        def renewed(prefill: Node = prefill) -> float:
            return prefill.count("kv_lease_renewals_total", source="open_load", result="ok")

        for _ in range(4):
            count = renewed()
            until(lambda count=count: renewed() > count, "a renewal")  # type: ignore[misc]
            clock.move(0.9 * lease_s)
        assert prefill.said == []
        decode.gate.open()
        decode.load_done()
        assert np.array_equal(decode.blocks([1, 2]), prefill.blocks([5, 6]))
        assert prefill.lease_ended().outcome == "released"


def test_direct_read_when_the_lease_expires_before_the_copy_is_done_then_the_load_fails() -> None:
    faults.arm("cache_store.renew:drop,side=decode")
    for prefill, decode in make_pair("threads", "ipc", lease_seconds=0.3):
        decode.gate.close()
        prefill.admit(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        until(lambda prefill=prefill: prefill.agent.stats().readers == 1, "the load is open")  # type: ignore[misc]
        prefill.compute(KEY, 2)
        ended = prefill.lease_ended()
        assert (ended.outcome, ended.cause) == ("expired", "never_released")
        decode.gate.open()
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.KV_LEASE_EXPIRED and failed.foreign
        decode.agent.cancel_load(KEY, failed.error)


def test_direct_read_when_the_result_needs_no_hold_then_the_lease_stands_until_it_is_released(direct: Pair) -> None:
    prefill, decode = direct
    decode.gate.close()
    decode.load(prefill.source, KEY, [1])
    prefill.admit(KEY, [5])
    until(lambda: prefill.agent.stats().readers == 1, "the load is open")
    prefill.compute(KEY, 1, hold=False)
    assert decode.gate.reached.wait(WAIT_S)
    until(lambda: prefill.agent.stats().readers == 0, "every notice is sent")
    assert prefill.said == []
    decode.gate.open()
    decode.load_done()
    assert prefill.lease_ended().outcome == "released"


@pytest.mark.invariant("RPC-17")
def test_direct_read_when_asking_fails_then_the_transfer_is_not_proven_and_can_be_repeated(
    direct: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = direct
    renew = LeaseTable.renew
    asked: list[str] = []

    def fail_once(table: LeaseTable, key: str, generation: int | None, source: str = "queued") -> float:
        asked.append(source)
        if len(asked) == 1:
            raise BatonError(ErrorCode.UNKNOWN_ERROR)
        return renew(table, key, generation, source)

    monkeypatch.setattr(LeaseTable, "renew", fail_once)
    faults.arm("cache_store.lease_word:drop")
    prefill.stage(KEY, [5])
    decode.load(prefill.source, KEY, [1])
    failed = decode.load_failed()
    assert (failed.error.code, failed.retriable_here) == (ErrorCode.READ_TRANSFER_NOT_DONE, True)
    decode.load(prefill.source, KEY, [2], reload=True)
    decode.load_done()
    assert asked == ["open_load", "open_load"]
    prefill.lease_ended()
    assert decode.count("kv_lease_proof_calls_total") == 2


def test_notice_when_it_names_a_block_outside_the_peers_memory_then_the_load_fails(direct: Pair) -> None:
    prefill, decode = direct
    prefill.admit(KEY, [5])
    lease_of = prefill.agent._table.get
    until(lambda: lease_of(KEY) is not None, "the lease is there")
    lease_of(KEY).blocks["full"][0] = 1_000_000  # type: ignore[union-attr]
    prefill.compute(KEY, 1)
    decode.load(prefill.source, KEY, [1])
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
    assert "outside" in failed.error.metadata["breach"]
    decode.agent.cancel_load(KEY, failed.error)
    prefill.lease_ended()


def test_memory_of_a_peer_when_it_is_lost_then_it_is_closed_after_its_last_reader() -> None:
    chosen = settings(transport="ipc")
    prefill = StagedNode("prefill", chosen, engine="streams", seed=1)
    with nodes(StagedNode("decode", chosen, engine="streams", seed=2)) as (decode,):
        assert isinstance(decode, StagedNode)
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        decode.load_done()
        prefill.lease_ended()
        (opened,) = decode.device.opened
        assert not opened.closed
        decode.load(prefill.source, key_of(2), [1])
        until(lambda: prefill.agent.stats().parked == 1, "the load is parked")
        prefill.close()
        decode.load_failed()
        until(lambda: opened.closed, "the memory is given back")


def test_fault_point_when_it_drops_a_notice_then_the_load_ends_short(direct: Pair) -> None:
    prefill, decode = direct
    faults.arm("cache_store.send_piece:drop,layer=1,block=0")
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT
    decode.agent.cancel_load(KEY, failed.error)
    prefill.lease_ended()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("transport", ["ipc", pytest.param("nixl", marks=needs_nixl)])
def test_load_when_the_peer_shows_lease_words_then_it_looks_and_else_it_asks_and_either_is_counted(
    monkeypatch: pytest.MonkeyPatch, transport: str, shared: bool
) -> None:
    if not shared:
        monkeypatch.setattr(equipment, "make_lease_words", lambda: None)
    chosen = settings(transport=transport)
    with nodes(SharedNode("prefill", chosen, seed=1), SharedNode("decode", chosen, seed=2)) as (prefill, decode):
        prefill.stage(KEY, [5, 9])
        decode.load(prefill.source, KEY, [1, 2])
        decode.load_done()
        np.testing.assert_array_equal(decode.blocks([1, 2]), prefill.blocks([5, 9]))
        prefill.lease_ended()
        asked = prefill.count("kv_lease_renewals_total", source="open_load", result="ok")
        assert asked == (0 if shared else 1)
        assert decode.count("kv_lease_proof_calls_total") == asked
        assert_clean(prefill, decode)


async def test_memory_of_a_peer_when_whoever_opens_it_is_cancelled_then_it_is_closed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, closed = Gate(), asyncio.Event()
    gate.close()

    class Slow(MappedPool):
        def __init__(self, memory: pb.SharedPool) -> None:
            gate.pass_()
            super().__init__(memory)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr(fetching, "MappedPool", Slow)
    file = MemoryFile(4096)
    with ThreadPoolExecutor(1) as workers:
        fetcher = HostFetcher("ipc", HostKvPool((), {}), workers, 1)
        opening = asyncio.ensure_future(fetcher.open(describe({"full": [file]})))
        assert await asyncio.to_thread(gate.reached.wait, WAIT_S)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        gate.open()
        async with asyncio.timeout(WAIT_S):
            await closed.wait()
    file.close()
