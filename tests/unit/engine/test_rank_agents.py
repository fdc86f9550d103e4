"""The cache-store agents of several ranks, as one: real agents, pools and messages between the ranks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from cache_store.events import LeaseEnded, LoadDone, LoadFailed
from cache_store.loading.load import Load
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.extent import extended
from tests.unit.cache_store.agents import HeldClock, Node, key_of, prefill_result, settings, until
from tests.unit.engine.rank_servers import HEAD_BYTES, NUM_LAYERS, RankServer, servers

KEY = key_of(1)
SOURCE, TARGET = [9, 3, 4, 5], [1, 2, 8, 7]
# Equal sizes, more ranks there, more here, copies of heads on both sides, read by none or by several
SIZES = [(2, 2, 4), (2, 1, 4), (1, 2, 4), (4, 2, 4), (2, 4, 4), (4, 1, 2), (1, 4, 1), (4, 2, 1), (2, 4, 2), (4, 4, 1)]


@pytest.fixture(autouse=True)
def no_fault_left() -> Iterator[None]:
    yield
    faults.disarm()


def whole_of(heads: int, blocks: int) -> np.ndarray:
    shape = (NUM_LAYERS, blocks, 2, heads, HEAD_BYTES)
    return np.random.default_rng(heads).integers(0, 256, shape, np.uint8)


def make_pair(prefill_tp: int, decode_tp: int, heads: int = 4, **more: object) -> tuple[RankServer, RankServer]:
    prefill = RankServer("prefill", prefill_tp, heads, seed=1, **more)  # type: ignore[arg-type]
    return prefill, RankServer("decode", decode_tp, heads, seed=100, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "heads", "transport"),
    [*((*sizes, "grpc") for sizes in SIZES), *((*sizes, "ipc") for sizes in SIZES[1:5])],
)
def test_load_of_every_rank_when_done_then_each_has_its_share_and_every_lease_ends_once(
    prefill_tp: int, decode_tp: int, heads: int, transport: str
) -> None:
    with servers(*make_pair(prefill_tp, decode_tp, heads, transport=transport)) as (prefill, decode):
        whole = whole_of(heads, len(SOURCE))
        prefill.put(SOURCE, whole)
        decode.load(prefill.source, KEY, TARGET)  # comes first, as it usually does
        prefill.stage(KEY, SOURCE)
        done = decode.load_done()
        assert decode.holds(TARGET, whole)
        assert done.result == prefill_result()
        assert done.bytes == sum(share.nbytes for share in decode.shares(TARGET))
        ended = prefill.lease_ended()
        assert (ended.request_key, ended.generation, ended.outcome, ended.error) == (KEY, 3, "released", None)
        # Each rank's own, told once.
        for server, kind, ranks in ((prefill, LeaseEnded, prefill_tp), (decode, LoadDone, decode_tp)):
            said = Counter((rank, type(event)) for rank, event in server.others.said)
            assert said == Counter({(rank, kind): 1 for rank in range(1, ranks)})
        assert not [node for node in prefill.nodes if len(node.agent._table)]


def test_prefix_hit_when_blocks_are_here_then_no_rank_loads_them() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        whole = whole_of(4, len(SOURCE))
        prefill.put(SOURCE, whole)
        before = [node.blocks(range(16)) for node in decode.nodes]
        prefill.stage(KEY, SOURCE)
        decode.load(prefill.source, KEY, TARGET[3:], first=3)
        decode.load_done()
        prefill.lease_ended()
        assert decode.holds(TARGET[3:], whole[:, 3:])
        others = [block for block in range(16) if block != TARGET[3]]
        for node, was in zip(decode.nodes, before, strict=True):
            assert np.array_equal(node.blocks(others), was[:, others])


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "transport"), [(2, 2, "grpc"), (2, 2, "ipc"), (1, 2, "grpc"), (2, 4, "ipc")]
)
def test_o7_load_when_one_rank_fails_then_the_first_cause_and_its_rank_come_out_after_all_have_ended(
    prefill_tp: int, decode_tp: int, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    with servers(*make_pair(prefill_tp, decode_tp, transport=transport)) as (prefill, decode):
        prefill.put(SOURCE, whole_of(4, len(SOURCE)))
        faults.arm("cache_store.load_start:raise=READ_BUFFER_MISMATCH,rank=1")
        prefill.admit(KEY, SOURCE)  # and never computed: the streams of the other ranks stay open until they are ended
        decode.load(prefill.source, KEY, TARGET)
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.READ_BUFFER_MISMATCH
        assert failed.error.metadata["rank"] == "1"
        assert failed.error.metadata["ranks"] == "1: READ_BUFFER_MISMATCH, "
        assert not failed.retriable_here
        # Every rank ended its own part before the failure came out, so no load is open, and P is told at once.
        assert all(node.agent.stats().loads == 0 for node in decode.nodes)
        assert prefill.lease_ended().outcome == "aborted"
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("PD_CACHE_KEY_READ_FAILED")]
        # Another rank of the same lease has one too where the end of that was quicker than the word to stop.
        lines = [line for line in lines if "rank=1 " in line]
        assert len(lines) == 2  # the rank's own, and rank 0's of all
        for line in lines:
            for part in (
                "request_id=request-1 ", f"request_key={KEY} ", "rank=1 ", "worker=prefill ", "peer=", "channel=",
                "grpc_code=FAILED_PRECONDITION ", "remote_code=8320 ", "finished=", "cost_ms=",
            ):  # fmt: skip
                assert part in line, line
        assert "ranks=[1: READ_BUFFER_MISMATCH, ]" in lines[-1]
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_load_when_the_failure_of_one_rank_ends_another_then_the_cause_is_told_even_if_its_news_is_slower() -> None:
    with servers(*make_pair(1, 2)) as (prefill, decode):
        prefill.admit(KEY, SOURCE)
        faults.arm("cache_store.load_start:raise=READ_BUFFER_MISMATCH,rank=1")
        decode.others.held = True
        decode.load(prefill.source, KEY, TARGET)
        until(lambda: prefill.nodes[0].agent.stats().readers == 1, "rank 0 reads")
        decode.others.release()
        # The rank that fails lets the lease go, which ends the other one's stream, before anybody looks.
        until(lambda: not any(node.agent.stats().loads for node in decode.nodes), "both ranks have failed")
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.READ_BUFFER_MISMATCH
        assert failed.error.metadata["rank"] == "1"
        assert failed.error.metadata["ranks"] == "1: READ_BUFFER_MISMATCH, "
        ended = prefill.lease_ended()
        assert ended.outcome == "aborted"
        assert ended.error is not None and ended.error.metadata["cause"] == "READ_BUFFER_MISMATCH"


def test_load_when_several_ranks_fail_then_all_are_named_the_first_cause_first() -> None:
    with servers(*make_pair(4, 4)) as (prefill, decode):
        prefill.admit(KEY, SOURCE)
        decode.others.held = True
        decode.load(prefill.source, KEY, TARGET)
        decode.others.release()
        until(lambda: all(node.agent.stats().readers for node in prefill.nodes), "every rank reads")
        prefill.nodes[2].agent.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
        until(lambda: decode.nodes[2].agent.stats().loads == 0, "rank 2 has failed")
        prefill.nodes[3].agent.fail(KEY, BatonError(ErrorCode.CACHE_STORE_STORE_FAILED))
        until(lambda: decode.nodes[3].agent.stats().loads == 0, "rank 3 has failed")
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.EXECUTION_EXCEPTION
        assert failed.error.metadata["rank"] == "2"
        assert failed.error.metadata["ranks"] == "2: EXECUTION_EXCEPTION, 3: CACHE_STORE_STORE_FAILED, "
        assert prefill.lease_ended().outcome == "aborted"


@pytest.mark.invariant("RPC-17")
def test_failure_when_a_rank_still_copies_then_it_is_awaited_and_its_late_piece_writes_nothing_afterwards() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        whole = whole_of(4, len(SOURCE))
        prefill.put(SOURCE, whole)
        slow = decode.nodes[0]
        slow.gate.close()
        prefill.admit(KEY, SOURCE)
        decode.load(prefill.source, KEY, TARGET)
        until(lambda: all(node.agent.stats().readers for node in prefill.nodes), "both ranks read")
        prefill.compute(KEY, 4, ranks=[0])
        assert slow.gate.reached.wait(20)  # a copy into rank 0's blocks is under way
        prefill.nodes[1].agent.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
        decode.until(lambda: decode.others.said and not decode.nodes[1].agent.stats().loads, "rank 1 has failed")
        assert decode.quiet(), "the failure came out while a rank's blocks were being written"
        slow.gate.open()
        failed = decode.load_failed()
        assert (failed.error.code, failed.error.metadata["rank"]) == (ErrorCode.EXECUTION_EXCEPTION, "1")
        # The blocks are another request's now. Whatever is still under way from P is refused.
        for node in decode.nodes:
            for layer in node.memory["full"]:
                layer[TARGET] = 0x5A
        prefill.compute(KEY, 4)
        prefill.agents.computed(KEY, prefill_result(), True)
        assert prefill.lease_ended().outcome == "aborted"
        other = key_of(2)
        decode.load(prefill.source, other, [12])  # a transfer later, nothing of the first has come
        prefill.stage(other, [11])
        decode.load_done()
        prefill.lease_ended()
        assert all((node.blocks(TARGET) == 0x5A).all() for node in decode.nodes)


@pytest.mark.invariant("RPC-17")
@pytest.mark.parametrize("transport", ["grpc", "ipc"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "heads"), [(2, 2, 4), (1, 2, 4), (4, 2, 1)])
def test_reload_when_one_rank_failed_then_all_read_once_more_under_the_same_leases_and_nothing_is_computed_again(
    prefill_tp: int, decode_tp: int, heads: int, transport: str
) -> None:
    with servers(*make_pair(prefill_tp, decode_tp, heads, transport=transport)) as (prefill, decode):
        whole = whole_of(heads, len(SOURCE))
        prefill.put(SOURCE, whole)
        prefill.admit(KEY, SOURCE)
        load_by_all(prefill, decode)
        faults.arm("cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,layer=1,times=1")
        prefill.compute(KEY, 4)
        failed = decode.load_failed()
        assert (failed.error.code, failed.retriable_here) == (ErrorCode.CACHE_STORE_STORE_FAILED, True)
        assert prefill.quiet(), "a lease ended, which the reload needs"
        until(lambda: not any(node.agent.stats().readers for node in prefill.nodes), "no stream is open")
        other = [block + 8 if block < 8 else block - 8 for block in TARGET]
        decode.load(prefill.source, KEY, other, reload=True)
        prefill.agents.computed(KEY, prefill_result(), True)
        decode.load_done()
        assert decode.holds(other, whole)
        assert prefill.lease_ended().outcome == "released"


def load_by_all(prefill: RankServer, decode: RankServer) -> None:
    """Every rank reads, and knows of which allocation: without that it could not name it in a second load."""
    decode.load(prefill.source, KEY, TARGET)
    until(lambda: sum(node.agent.stats().readers for node in prefill.nodes) == decode.tp, "all ranks read")
    until(lambda: all(load.generation for load in open_loads(decode)), "every rank knows the generation")


def fail_on_rank_1(prefill: RankServer, decode: RankServer, times: int) -> None:
    """Every rank reads a prompt that is computed then, of which rank 1 cannot send its part, so many times."""
    prefill.admit(KEY, SOURCE)
    load_by_all(prefill, decode)
    faults.arm(f"cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,rank=1,times={times}")
    prefill.compute(KEY, 4)
    prefill.agents.computed(KEY, prefill_result(), True)


def open_loads(server: RankServer) -> list[Load]:
    jobs = [job for node in server.nodes for job in node.agent._pulling._jobs.values()]
    return [leg.load for job in jobs for leg in job.reading() if leg.load is not None]


def test_reload_when_a_rank_had_everything_already_then_it_reads_again_too() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        whole = whole_of(4, len(SOURCE))
        prefill.put(SOURCE, whole)
        faults.arm("cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,rank=1,times=1")
        decode.others.held = True
        prefill.stage(KEY, SOURCE)
        decode.load(prefill.source, KEY, TARGET)
        until(lambda: KEY in decode.nodes[0].agent._pulling._kept, "rank 0 has its part")
        decode.others.release()
        failed = decode.load_failed()
        assert (failed.error.metadata["rank"], failed.retriable_here) == ("1", True)
        assert prefill.quiet()
        decode.load(prefill.source, KEY, [10, 11, 12, 13], reload=True)
        decode.load_done()
        assert decode.holds([10, 11, 12, 13], whole)
        assert prefill.lease_ended().outcome == "released"


def test_reload_when_it_fails_too_then_there_is_no_other_and_every_lease_is_given_up() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        fail_on_rank_1(prefill, decode, times=2)
        assert decode.load_failed().retriable_here
        until(lambda: not any(node.agent.stats().readers for node in prefill.nodes), "no stream is open")
        decode.load(prefill.source, KEY, [10, 11, 12, 13], reload=True)
        failed = decode.load_failed()
        assert (failed.error.code, failed.retriable_here) == (ErrorCode.CACHE_STORE_STORE_FAILED, False)
        assert prefill.lease_ended().outcome == "aborted"


def test_reload_when_the_engine_wants_none_then_every_lease_is_given_up() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        fail_on_rank_1(prefill, decode, times=1)
        failed = decode.load_failed()
        assert failed.retriable_here
        decode.agents.cancel_load(KEY, failed.error)
        assert prefill.lease_ended().outcome == "aborted"


def test_cancel_when_every_rank_reads_then_one_failure_with_its_cause_and_both_sides_are_clean() -> None:
    with servers(*make_pair(2, 4)) as (prefill, decode):
        prefill.admit(KEY, SOURCE)
        decode.load(prefill.source, KEY, TARGET)
        until(lambda: sum(node.agent.stats().readers for node in prefill.nodes) == 4, "every rank reads")
        decode.agents.cancel_load(KEY, BatonError(ErrorCode.CANCELLED, "the client left"))
        failed = decode.load_failed()
        assert (failed.error.code, failed.retriable_here) == (ErrorCode.CANCELLED, False)
        assert "ranks" not in failed.error.metadata
        assert prefill.lease_ended().outcome == "aborted"
        names = Counter(item.name for item in decode.observed())
        assert names["baton_kv_transfer_seconds"] == names["baton_aborts_total"] == 1


def test_cancel_when_one_rank_has_everything_already_then_its_blocks_count_as_failed_too() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        prefill.admit(KEY, SOURCE)
        decode.load(prefill.source, KEY, TARGET)
        prefill.compute(KEY, 4, ranks=[1])
        prefill.nodes[1].agent.computed(KEY, prefill_result(), True)
        decode.until(lambda: any(isinstance(event, LoadDone) for _, event in decode.others.said), "rank 1 is done")
        assert decode.quiet()
        decode.agents.cancel_load(KEY, BatonError(ErrorCode.GENERATE_TIMEOUT))
        assert decode.load_failed().error.code is ErrorCode.GENERATE_TIMEOUT
        ended = prefill.lease_ended()  # released on rank 1, given up on rank 0
        assert ended.outcome == "aborted"


def test_publish_when_it_fails_on_one_rank_then_all_ranks_end_the_request_with_its_cause() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        faults.arm("cache_store.publish:raise=READ_BUFFER_MISMATCH,rank=1")
        prefill.admit(KEY, SOURCE)
        prefill.compute(KEY, 4, ranks=[1])
        ended = prefill.lease_ended()  # without a reader, and long before its time
        assert ended.outcome == "aborted"
        assert ended.error is not None and ended.error.code is ErrorCode.READ_BUFFER_MISMATCH
        decode.load(prefill.source, KEY, TARGET)
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.READ_BUFFER_MISMATCH


def test_lease_when_nobody_comes_then_it_expires_once_for_all_ranks() -> None:
    with servers(*make_pair(2, 1, agent_settings=settings(lease_seconds=0.3))) as (prefill, _):
        prefill.stage(KEY, SOURCE)
        ended = prefill.lease_ended()
        assert (ended.outcome, ended.cause) == ("expired", "never_loaded")
        counted = [item for item in prefill.observed() if item.name == "baton_kv_lease_expirations_total"]
        assert [(item.labels, item.value) for item in counted] == [({"cause": "never_loaded"}, 1)]


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "heads", "slow"), [extended(2, 1, 1, 0), (2, 2, 4, 1)])
def test_lease_when_a_rank_waits_for_the_load_of_another_then_it_lives_as_long_as_that(
    prefill_tp: int, decode_tp: int, heads: int, slow: int
) -> None:
    """A rank of P whose copies are read elsewhere, or whose KV was read first, is let go with the others, and not
    before: a reload would need it, and its lease has not expired."""
    limits, clock = settings(lease_seconds=0.6), HeldClock()
    pair = (
        RankServer("prefill", prefill_tp, heads, seed=1, agent_settings=limits, clock=clock),
        RankServer("decode", decode_tp, heads, seed=100, agent_settings=limits),
    )
    with servers(*pair) as (prefill, decode):
        decode.nodes[slow].gate.close()
        whole = whole_of(heads, len(SOURCE))
        prefill.put(SOURCE, whole)
        decode.load(prefill.source, KEY, TARGET)
        prefill.stage(KEY, SOURCE)
        assert decode.nodes[slow].gate.reached.wait(20)
        if decode_tp > 1:
            until(lambda: KEY in decode.nodes[1 - slow].agent._pulling._kept, "the other rank has its part")
        for _ in range(5):  # more than three leases
            prefill.until(lambda: all(lease_left(node, clock) > 0.5 for node in prefill.nodes), "renewals")
            clock.move(0.4)
        assert prefill.quiet()
        decode.nodes[slow].gate.open()
        decode.load_done()
        assert decode.holds(TARGET, whole)
        ended = prefill.lease_ended()
        assert (ended.outcome, ended.cause) == ("released", "")
        assert not [item for item in prefill.observed() if item.name == "baton_kv_lease_expirations_total"]


def test_keep_alive_when_the_request_is_queued_then_the_lease_of_every_rank_is_renewed() -> None:
    limits, clock = settings(lease_seconds=0.6), HeldClock()
    pair = (
        RankServer("prefill", 2, 4, agent_settings=limits, clock=clock),
        RankServer("decode", 2, 4, seed=100, agent_settings=settings(lease_seconds=0.9)),  # until it knows that of P
    )
    with servers(*pair) as (prefill, decode):
        prefill.stage(KEY, SOURCE)
        decode.agents.keep_alive(KEY, prefill.source)
        for _ in range(5):  # more than three leases
            prefill.until(lambda: all(lease_left(node, clock) > 0.5 for node in prefill.nodes), "renewals of all")
            clock.move(0.4)
        assert prefill.quiet()
        assert all(len(node.agent._table) == 1 for node in prefill.nodes)
        decode.load(prefill.source, KEY, TARGET)
        decode.load_done()
        assert prefill.lease_ended().outcome == "released"


def lease_left(node: Node, clock: HeldClock) -> float:
    """Seconds until the lease of KEY ends; 0 while its clock has not begun, or it is none."""
    lease = node.agent._table._leases.get(KEY)
    return 0.0 if lease is None or lease.expires_at is None else lease.expires_at - clock()


@pytest.mark.invariant("RPC-19")
def test_rank_times_when_ranks_end_one_after_the_other_then_the_first_and_the_last_are_booked_once() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        prefill.put(SOURCE, whole_of(4, len(SOURCE)))
        prefill.admit(KEY, SOURCE)
        began = time.monotonic()
        decode.load(prefill.source, KEY, TARGET)
        prefill.until(lambda: all(node.agent.stats().readers for node in prefill.nodes), "both ranks read")
        apart_s = time.monotonic() - began  # that their loads began, at most
        for rank in (1, 0):
            prefill.compute(KEY, 4, ranks=[rank])
            prefill.nodes[rank].agent.computed(KEY, prefill_result(), True)
            if rank:
                decode.until(lambda: len(decode.others.said) == 1, "rank 1 is done")
                until_s = time.monotonic() + 0.2 + apart_s
                decode.until(lambda until_s=until_s: time.monotonic() > until_s, "rank 0 takes its time")
        done = decode.load_done()
        prefill.lease_ended()
        seen = decode.observed()
        ((rank, first),) = decode.others.said
        assert isinstance(first, LoadDone) and rank == 1
        times = {item.labels["stat"]: item.value for item in seen if item.name == "baton_load_rank_seconds"}
        assert times == {"min": first.seconds, "max": done.seconds}
        assert times["min"] + 0.15 <= times["max"]
        names = Counter(item.name for item in seen)
        assert names["baton_load_rank_seconds"] == 2
        # Of a load as a whole once; of bytes and pieces the sum over the ranks.
        assert names["baton_kv_transfer_seconds"] == names["baton_kv_transfer_size_bytes"] == 1
        received = sum(item.value for item in seen if item.name == "baton_kv_transfer_bytes_total")
        assert received == done.bytes
        held = [item for item in prefill.observed() if item.name == "baton_kv_lease_hold_seconds"]
        assert [item.labels for item in held] == [{"outcome": "released"}]


def test_stats_when_ranks_are_busy_then_each_is_told_and_the_server_counts_them_all() -> None:
    with servers(*make_pair(1, 2)) as (prefill, decode):
        prefill.admit(KEY, SOURCE)
        decode.load(prefill.source, KEY, TARGET)
        decode.until(lambda: prefill.agents.stats().readers == 2, "both ranks read the one lease")
        assert prefill.agents.stats().leases == 1
        decode.quiet()
        ranks = decode.agents.rank_stats()
        assert [(each.rank, each.transfers_inflight, each.peers_connected) for each in ranks] == [(0, 1, 1), (1, 1, 1)]
        assert decode.agents.stats().transfers_inflight == 2
        assert set(decode.agents.stats().oldest_hold_seconds) == {"receiving"}
        prefill.agents.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
        assert decode.load_failed().error.code is ErrorCode.EXECUTION_EXCEPTION
        prefill.lease_ended()


def test_tombstone_when_the_request_comes_late_then_no_rank_admits_it() -> None:
    with servers(*make_pair(2, 2)) as (prefill, decode):
        decode.load(prefill.source, KEY, TARGET)
        until(lambda: all(node.agent.stats().parked == 1 for node in prefill.nodes), "the loads are parked")
        prefill.agents.tombstone(KEY)
        failed = decode.load_failed()
        assert isinstance(failed, LoadFailed) and failed.error.code is ErrorCode.REQUEST_TOMBSTONED
        prefill.admit(KEY, SOURCE)
        assert prefill.lease_ended().outcome == "aborted"
