"""Leases between real agents: renewed while somebody wants the KV, ended by their own clock otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cache_store.agent import AgentSettings, GroupLayout
from protos import cache_store_pb2 as pb
from protos import cache_store_pb2_grpc as pb_grpc
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import HeldClock, Node, assert_clean, key_of, nodes, settings, until

KEY = key_of(1)
LEASE_S = 0.4
SHORT = settings(lease_seconds=LEASE_S)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def clock() -> HeldClock:
    """By which leases end."""
    return HeldClock()


@pytest.fixture
def pair(clock: HeldClock) -> Iterator[tuple[Node, Node]]:
    with nodes(Node("prefill", SHORT, seed=1, clock=clock), Node("decode", SHORT, seed=2)) as (prefill, decode):
        yield prefill, decode
        faults.disarm()
        assert_clean(prefill, decode)


def is_computed(prefill: Node) -> bool:
    """Whether KV is staged, so that the clock of its lease runs."""
    return "staged" in prefill.agent.stats().oldest_hold_seconds


def begin_load(prefill: Node, decode: Node, source: list[int], target: list[int]) -> None:
    """Its stream is open, and nothing is computed yet."""
    prefill.admit(KEY, source)
    decode.load(prefill.source, KEY, target)
    until(lambda: prefill.agent.stats().readers == 1, "the load is open")


@pytest.mark.serial
def test_m1_lease_that_nobody_loads_expires_and_is_no_failed_transfer(
    pair: tuple[Node, Node], clock: HeldClock
) -> None:
    prefill, decode = pair
    clock.run()
    prefill.stage(KEY, [5])
    ended = prefill.lease_ended()
    assert (ended.outcome, ended.cause) == ("expired", "never_loaded")
    assert 0.4 <= ended.held_seconds < 5.0  # that of a machine with little time
    assert prefill.count("kv_lease_expirations_total", cause="never_loaded") == 1
    assert prefill.observed("kv_lease_hold_seconds", outcome="expired")
    decode.load(prefill.source, KEY, [1])
    assert decode.load_failed().error.code is ErrorCode.KV_LEASE_EXPIRED
    # An ended lease is no failed transfer.
    for node in pair:
        assert node.count("kv_transfer_failures_total") == 0
        assert node.count("kv_stale_references_total", kind="expired") == 1


def test_k4_open_load_renews_its_lease_however_slow_it_is() -> None:
    """A load throttled to three times the lease: it completes, under one and the same key."""
    with nodes(Node("prefill", settings(lease_seconds=0.4), seed=1), Node("decode", seed=2)) as (prefill, decode):
        faults.arm("cache_store.send_piece:delay=0.1")
        begin_load(prefill, decode, [5, 6, 7, 8], [1, 2, 3, 4])
        prefill.compute(KEY, 4)
        done = decode.load_done()
        assert done.seconds >= 1.2
        assert np.array_equal(decode.blocks([1, 2, 3, 4]), prefill.blocks([5, 6, 7, 8]))
        assert prefill.lease_ended().outcome == "released"
        assert prefill.count("kv_lease_renewals_total", source="open_load", result="ok") >= 4
        assert prefill.count("kv_lease_renewals_total", result="unknown") == 0
        assert prefill.count("kv_lease_expirations_total") == 0


def test_p4_open_load_whose_renewal_is_cut_ends_with_what_was_delivered(
    pair: tuple[Node, Node], clock: HeldClock, tmp_path: Path
) -> None:
    prefill, decode = pair
    held = tmp_path / "held"  # the last block, until the lease has ended
    held.touch()
    faults.arm(f"cache_store.renew:drop,side=prefill;cache_store.send_piece:delay=60,layer=2,block=3,while={held}")
    begin_load(prefill, decode, [5, 6, 7, 8], [1, 2, 3, 4])
    prefill.compute(KEY, 4)
    until(lambda: decode.count("kv_transfer_pieces_total", result="ok") == 8, "two layers have come")
    until(lambda: is_computed(prefill), "the clock of the lease runs")  # said after the layers, which may be quicker
    clock.move(LEASE_S)
    until(lambda: prefill.count("kv_lease_expirations_total") == 1, "the lease has ended")
    held.unlink()
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.KV_LEASE_EXPIRED
    assert int(failed.error.metadata["delivered"]) + int(failed.error.metadata["missing"]) == 12
    assert failed.missing >= 1 and not failed.retriable_here
    ended = prefill.lease_ended()
    assert (ended.outcome, ended.cause) == ("expired", "load_stalled")


# ---- the sizes of the report: five layers of a hundred blocks, one every 10 ms


PIECES = 500
LONG = GroupLayout.of("full", num_layers=5, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")  # 16 KiB
ROW = list(range(PIECES // LONG.num_layers))


@contextlib.contextmanager
def throttled(transport: str) -> Iterator[tuple[Node, Node]]:
    """A lease of one second, and an open load that takes five. (What a one-sided reader does is its peer's affair.)"""
    limits = settings(lease_seconds=1.0, transport=transport, chunk_bytes=1 << 16)
    size: dict[str, Any] = {"layouts": (LONG,), "pool_blocks": len(ROW)}
    with nodes(Node("prefill", limits, seed=1, **size), Node("decode", limits, seed=2, **size)) as both:
        prefill, decode = both
        faults.arm("cache_store.send_piece:delay=0.01")
        begin_load(prefill, decode, ROW, ROW[::-1])
        prefill.compute(KEY, len(ROW))
        yield prefill, decode
        faults.disarm()
        assert_clean(*both)


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_p4_load_of_500_pieces_over_five_leases_then_it_completes(transport: str) -> None:
    with throttled(transport) as (prefill, decode):
        done = decode.load_done()
        assert (done.transport, done.seconds > 5.0) == (transport, True)
        assert np.array_equal(decode.blocks(ROW[::-1]), prefill.blocks(ROW))
        assert decode.count("kv_transfer_pieces_total", result="ok") == PIECES
        assert prefill.lease_ended().outcome == "released"
        assert prefill.count("kv_lease_expirations_total") == 0


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_p4_load_of_500_pieces_when_its_renewal_is_cut_then_8601_with_both_counts(transport: str) -> None:
    faults.arm("cache_store.renew:drop,side=prefill")
    with throttled(transport) as (prefill, decode):
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.KV_LEASE_EXPIRED
        delivered, missing = (int(failed.error.metadata[name]) for name in ("delivered", "missing"))
        assert (delivered, missing) == (failed.delivered, failed.missing)
        assert delivered + missing == PIECES and 0 < delivered < PIECES
        ended = prefill.lease_ended()
        assert (ended.outcome, ended.cause) == ("expired", "load_stalled")
        assert prefill.count("kv_lease_expirations_total", cause="load_stalled") == 1
        decode.agent.cancel_load(KEY, failed.error)


def test_queued_request_renews_its_lease_until_it_loads(pair: tuple[Node, Node], clock: HeldClock) -> None:
    prefill, decode = pair

    def renewed() -> float:
        return prefill.count("kv_lease_renewals_total", source="queued", result="ok")

    prefill.stage(KEY, [5])
    decode.agent.keep_alive(KEY, prefill.source)
    for _ in range(4):  # of a lease each time nearly all passes
        count = renewed()
        until(lambda count=count: renewed() > count, "a renewal")  # type: ignore[misc]
        clock.move(0.9 * LEASE_S)
    assert prefill.said == []
    decode.load(prefill.source, KEY, [1])
    decode.load_done()
    assert prefill.lease_ended().outcome == "released"
    until(lambda: not decode.agent._tasks, "nothing renews it after the end")


def test_queued_request_before_its_prefill_tolerates_that_it_is_unknown(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.agent.keep_alive(KEY, prefill.source)
    until(lambda: prefill.count("kv_lease_renewals_total", result="unknown") >= 1, "a renewal came too early")
    prefill.stage(KEY, [5])
    until(lambda: prefill.count("kv_lease_renewals_total", result="ok") >= 2, "renewals")
    decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
    assert prefill.lease_ended().outcome == "aborted"
    assert decode.said == []


def test_forget_leaves_the_kv_to_another_decode_server(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with nodes(Node("second", seed=3)) as (second,):
        prefill.stage(KEY, [5])
        decode.agent.keep_alive(KEY, prefill.source)
        until(lambda: prefill.count("kv_lease_renewals_total", result="ok") >= 1, "a renewal")
        decode.agent.forget(KEY)
        second.load(prefill.source, KEY, [1])
        second.load_done()
        assert prefill.lease_ended().outcome == "released"


def test_failed_load_that_is_not_repeated_expires_as_stalled(pair: tuple[Node, Node], clock: HeldClock) -> None:
    prefill, decode = pair
    faults.arm("cache_store.send_piece:raise=8309")
    prefill.stage(KEY, [5])
    decode.load(prefill.source, KEY, [1])
    assert decode.load_failed().retriable_here
    until(lambda: prefill.agent.stats().readers == 0, "the load that failed is closed here too, and renews no lease")
    clock.move(LEASE_S)
    ended = prefill.lease_ended()
    assert (ended.outcome, ended.cause) == ("expired", "load_stalled")


def test_cancel_after_a_failed_load_releases_at_once() -> None:
    with nodes(Node("prefill", settings(lease_seconds=300)), Node("decode", seed=2)) as (prefill, decode):
        faults.arm("cache_store.send_piece:raise=8309")
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        decode.load_failed()
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        assert prefill.lease_ended().outcome == "aborted"


def test_k3_events_in_any_order_and_twice_end_one_lease_once(pair: tuple[Node, Node], clock: HeldClock) -> None:
    prefill, _ = pair
    prefill.stage(KEY, [5])
    for _ in range(2):
        prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.agent.tombstone(KEY)
        prefill.compute(KEY, 1)
    assert prefill.lease_ended().outcome == "aborted"
    prefill.stage(key_of(2), [5])
    until(lambda: is_computed(prefill), "the second one is staged")
    clock.move(LEASE_S)
    ended = prefill.lease_ended()
    assert ended.request_key == key_of(2)


def test_result_that_already_ends_the_request_is_not_kept(pair: tuple[Node, Node]) -> None:
    prefill, _ = pair
    prefill.admit(KEY, [5])
    prefill.compute(KEY, 1, hold=False)
    ended = prefill.lease_ended()
    assert (ended.outcome, ended.cause) == ("released", "")


# ---- a reader that does not read


BIG = settings(lease_seconds=0.5, load_stall_timeout_s=0.8)
LARGE = GroupLayout.of("full", num_layers=3, num_kv_heads=2, head_dim=64, block_size=128, dtype="bfloat16")
SLOW_BLOCKS = 200
TOTAL = SLOW_BLOCKS * LARGE.num_layers * LARGE.block_bytes  # 39 MB
UNDER_WAY = 16 << 20  # more than the buffers of gRPC and of the sockets


def large_node(limits: AgentSettings | None = None) -> Node:
    return Node("prefill", limits, layouts=(LARGE,), pool_blocks=SLOW_BLOCKS, seed=1)


@contextlib.contextmanager
def stuck_reader(prefill: Node) -> Iterator[grpc.Call]:
    """A plain client that opens a load of much KV and takes only its first event."""
    with grpc.insecure_channel(prefill.address) as channel:
        request = pb.LoadRequest(
            reference=pb.KvReference(engine_id="prefill", request_key=KEY),
            wanted=[
                pb.WantedBlocks(
                    group="full",
                    block_size=LARGE.block_size,
                    first_block=0,
                    num_blocks=SLOW_BLOCKS,
                    block_bytes=LARGE.block_bytes,
                    num_layers=LARGE.num_layers,
                    partition_count=1,
                    partition_id=0,
                )
            ],
            prompt_tokens=SLOW_BLOCKS * LARGE.block_size,
            checksum="off",
            chunk_bytes=65536,
            reader=pb.ReaderRank(rank=0, tp_size=1),
        )
        call = pb_grpc.CacheStoreStub(channel).Load(request, timeout=30)
        assert next(call).started.generation == 1
        try:
            yield call
        finally:
            call.cancel()


def test_slow_reader_bounds_what_is_under_way_and_is_served_when_it_reads() -> None:
    limits = settings(lease_seconds=5)
    with nodes(large_node(limits)) as (prefill,):
        prefill.stage(KEY, list(range(SLOW_BLOCKS)))
        with stuck_reader(prefill) as call:
            sent = -1.0
            while (now := prefill.count("kv_transfer_bytes_total")) != sent:
                sent = now
                with contextlib.suppress(AssertionError):
                    prefill.next_event(timeout_s=0.2)
            assert sent < UNDER_WAY, f"{sent} of {TOTAL} bytes are under way"
            assert sum(len(event.data) for event in call) == TOTAL
        prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()


def test_k9_lease_with_a_stuck_reader_is_ended_when_the_request_fails() -> None:
    with nodes(large_node()) as (prefill,):
        prefill.stage(KEY, list(range(SLOW_BLOCKS)))
        with stuck_reader(prefill) as call:
            prefill.agent.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
            assert prefill.lease_ended().outcome == "aborted"
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert_clean(prefill)


def test_stalled_reader_expires_by_the_clock_and_frees_the_blocks() -> None:
    with nodes(large_node(BIG)) as (prefill,):
        prefill.admit(KEY, list(range(SLOW_BLOCKS)))
        with stuck_reader(prefill):
            prefill.compute(KEY, SLOW_BLOCKS)
            ended = prefill.lease_ended()
            assert (ended.outcome, ended.cause) == ("expired", "load_stalled")
        assert_clean(prefill)


def test_reader_that_goes_away_lets_go_of_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with nodes(large_node(settings(lease_seconds=5))) as (prefill,):
        prefill.stage(KEY, list(range(SLOW_BLOCKS)))
        with stuck_reader(prefill):
            until(lambda: prefill.agent.stats().readers == 1, "the reader")
        until(lambda: prefill.agent.stats().readers == 0, "no reader")
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []
        prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()
