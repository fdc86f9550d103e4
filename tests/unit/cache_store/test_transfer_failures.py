"""A load that goes wrong ends once, with the first cause, soon, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cache_store.memory.pool import HostKvPool
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import (
    LAYOUT,
    HeldClock,
    Node,
    assert_clean,
    key_of,
    nodes,
    prefill_result,
    settings,
    until,
)

KEY = key_of(1)
BLOCKS = 4


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(params=["grpc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(transport: str) -> Iterator[tuple[Node, Node]]:
    chosen = settings(transport=transport)
    with nodes(Node("prefill", chosen, seed=1), Node("decode", chosen, seed=2)) as (prefill, decode):
        yield prefill, decode
        faults.disarm()
        assert_clean(prefill, decode)


class OddPool(HostKvPool):
    """A pool whose blocks can be made to raise."""

    def __init__(self) -> None:
        super().__init__([LAYOUT], {"full": [bytearray(16 * LAYOUT.block_bytes) for _ in range(LAYOUT.num_layers)]})
        self.broken = False

    def piece(self, group: str, layer: int, block_id: int, count: int = 1) -> memoryview:
        if self.broken:
            raise OSError("bad memory %s \xff")
        return super().piece(group, layer, block_id, count)

    def layer(self, group: str, layer: int) -> memoryview:
        if self.broken:
            raise OSError("bad memory %s \xff")
        return super().layer(group, layer)


PIECES = [(layer, block) for layer in range(LAYOUT.num_layers) for block in range(BLOCKS)]


@pytest.mark.parametrize(("layer", "block"), PIECES)
@pytest.mark.parametrize("how", ["drop", "raise=8309"])
def test_o1_each_piece_that_cannot_be_sent_ends_the_load(
    pair: tuple[Node, Node], layer: int, block: int, how: str
) -> None:
    prefill, decode = pair
    faults.arm(f"cache_store.send_piece:{how},layer={layer},block={block}")
    prefill.stage(KEY, [5, 6, 7, 8])
    decode.load(prefill.source, KEY, [1, 2, 3, 4])
    failed = decode.load_failed()
    expected = ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT if how == "drop" else ErrorCode.CACHE_STORE_STORE_FAILED
    assert failed.error.code is expected
    assert failed.delivered + failed.missing == len(PIECES) and failed.missing >= 1
    assert failed.retriable_here
    decode.agent.cancel_load(KEY, failed.error)
    ended = prefill.lease_ended()
    assert ended.outcome == "aborted"
    assert decode.count("kv_transfer_failures_total", reason=expected.name) == 1


@pytest.mark.invariant("RPC-11")
def test_cause_of_the_sender_arrives_with_its_code_and_stage(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    faults.arm("cache_store.send_piece:raise=8320")
    prefill.stage(KEY, [5])
    decode.load(prefill.source, KEY, [1])
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.READ_BUFFER_MISMATCH
    assert failed.error.stage == "publish"
    assert prefill.count("kv_transfer_failures_total", reason="READ_BUFFER_MISMATCH") == 1
    prefill.lease_ended()  # not retriable, so the decode server gave it up by itself


@pytest.mark.invariant("RPC-17")
def test_reload_after_a_failed_load_brings_the_kv_without_a_new_prefill(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    faults.arm("cache_store.send_piece:raise=8309,layer=1,block=2,times=1")
    prefill.stage(KEY, [5, 6, 7, 8])
    decode.load(prefill.source, KEY, [1, 2, 3, 4])
    failed = decode.load_failed()
    assert failed.retriable_here
    decode.load(prefill.source, KEY, [11, 12, 13, 14], reload=True)
    decode.load_done()
    assert np.array_equal(decode.blocks([11, 12, 13, 14]), prefill.blocks([5, 6, 7, 8]))
    assert prefill.lease_ended().outcome == "released"


@pytest.mark.invariant("RPC-17")
def test_reload_is_offered_once(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    faults.arm("cache_store.send_piece:raise=8309")
    prefill.stage(KEY, [5])
    decode.load(prefill.source, KEY, [1])
    assert decode.load_failed().retriable_here
    decode.load(prefill.source, KEY, [2], reload=True)
    assert not decode.load_failed().retriable_here
    assert prefill.lease_ended().outcome == "aborted"


@pytest.mark.parametrize("code", [ErrorCode.EXECUTION_EXCEPTION, ErrorCode.CACHE_STORE_STORE_FAILED])
def test_failure_of_the_prefill_ends_open_parked_and_later_loads(pair: tuple[Node, Node], code: ErrorCode) -> None:
    prefill, decode = pair
    error = BatonError(code, "the step raised")
    for number, admitted in ((1, True), (2, False)):
        decode.load(prefill.source, key_of(number), [number])
        if admitted:
            prefill.admit(key_of(number), [5])
            until(lambda: prefill.agent.stats().readers == 1, "the load is open")
        else:
            until(lambda: prefill.agent.stats().parked == 1, "the load is parked")
        prefill.agent.fail(key_of(number), error)
        failed = decode.load_failed()
        assert (failed.error.code, failed.error.message) == (code, "the step raised")
        assert not failed.retriable_here
    prefill.agent.fail(key_of(3), error)
    decode.load(prefill.source, key_of(3), [3])
    assert decode.load_failed().error.code is code
    ended = prefill.lease_ended()
    assert ended.error is not None and (ended.error.code, ended.error.message) == (code, error.message)
    # The request's failures, whatever their code, and not the transfer's.
    assert decode.count("kv_transfer_failures_total") == prefill.count("kv_transfer_failures_total") == 0


def test_failure_while_the_first_event_is_being_sent_still_arrives(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    agent = prefill.agent
    open_load = agent._table.open_load

    def open_then_fail(key: str, *arguments: object) -> object:
        reader = open_load(key, *arguments)  # type: ignore[arg-type]
        if reader is not None and agent._loop is not None:
            agent._loop.call_soon(agent._staged.fail, key, BatonError(ErrorCode.EXECUTION_EXCEPTION))
        return reader

    agent._table.open_load = open_then_fail  # type: ignore[method-assign, assignment]
    for number in range(5):
        prefill.admit(key_of(number), [5])
        decode.load(prefill.source, key_of(number), [1])
        assert decode.load_failed().error.code is ErrorCode.EXECUTION_EXCEPTION
        assert prefill.lease_ended().outcome == "aborted"


def test_tombstoned_key_refuses_its_load(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    prefill.agent.tombstone(KEY)
    until(lambda: prefill.agent.stats().tombstones == 1, "the tombstone")
    decode.load(prefill.source, KEY, [1])
    assert decode.load_failed().error.code is ErrorCode.REQUEST_TOMBSTONED


def test_tombstone_ends_a_parked_load(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1])
    until(lambda: prefill.agent.stats().parked == 1, "the load is parked")
    prefill.agent.tombstone(KEY)
    assert decode.load_failed().error.code is ErrorCode.REQUEST_TOMBSTONED
    prefill.admit(KEY, [5])
    ended = prefill.lease_ended()
    assert ended.error is not None and ended.error.code is ErrorCode.REQUEST_TOMBSTONED


@pytest.mark.parametrize("moment", ["before_start", "parked", "running", "computed"])
def test_cancel_in_every_state_ends_the_load_and_frees_the_kv(pair: tuple[Node, Node], moment: str) -> None:
    prefill, decode = pair
    error = BatonError(ErrorCode.CANCELLED, "client went away")
    if moment == "computed":
        faults.arm("cache_store.send_piece:delay=30,layer=1")
    if moment in ("running", "computed"):
        prefill.admit(KEY, [5, 6])
        if moment == "computed":
            prefill.compute(KEY, 2)
        until(lambda: prefill.agent.stats().leases == 1, "admitted")
    decode.load(prefill.source, KEY, [1, 2])
    if moment == "parked":
        until(lambda: prefill.agent.stats().parked == 1, "the load is parked")
    elif moment != "before_start":
        until(lambda: prefill.agent.stats().readers == 1, "the load is open")
    decode.agent.cancel_load(KEY, error)
    decode.agent.cancel_load(KEY, BatonError(ErrorCode.GENERATE_TIMEOUT))
    failed = decode.load_failed()
    assert failed.error is error and not failed.retriable_here
    assert decode.count("aborts_total", leg="cache_store", source="client") == 1
    [quarantined_s] = decode.observed("kv_quarantine_seconds")
    assert 0 <= quarantined_s < 10
    if moment in ("running", "computed"):
        ended = prefill.lease_ended()
        assert ended.outcome == "aborted"
        assert prefill.count("aborts_total", leg="cache_store", source="peer") == 1
    assert decode.count("kv_transfer_failures_total") == 0
    until(lambda: prefill.agent.stats().parked == 0, "nothing is parked")
    assert len(decode.said) == 1


def test_cancel_before_the_load_made_its_first_step_ends_it_all_the_same(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with decode.held():
        decode.load(prefill.source, KEY, [1])
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
    assert decode.load_failed().error.code is ErrorCode.CANCELLED


@pytest.mark.invariant("RPC-17")
def test_late_piece_after_a_cancel_changes_no_block(pair: tuple[Node, Node]) -> None:
    """The cancelled load's blocks are given out anew; what P still has under way must not land in them."""
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1, 2])
    prefill.admit(KEY, [5, 6])
    prefill.agent.publish(KEY, "full", 0, 2)
    until(lambda: np.array_equal(decode.memory["full"][0][[1, 2]], prefill.memory["full"][0][[5, 6]]), "layer 0")
    decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
    decode.load_failed()
    for layer in decode.memory["full"]:
        layer[[1, 2]] = 0xEE
    prefill.compute(KEY, 2)
    prefill.lease_ended()
    # The connection is the same, so once a later load has come through, everything before it has too.
    prefill.stage(key_of(2), [7])
    decode.load(prefill.source, key_of(2), [3])
    decode.load_done()
    prefill.lease_ended()
    assert (decode.blocks([1, 2]) == 0xEE).all()


def test_damaged_piece_is_a_checksum_failure_and_can_be_reloaded(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    faults.arm("cache_store.piece_bytes:corrupt,times=1")
    prefill.stage(KEY, [5, 6])
    before = prefill.blocks([5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.KV_CHECKSUM_MISMATCH
    assert failed.retriable_here
    assert decode.count("kv_transfer_pieces_total", result="checksum") == 2  # both blocks of the event
    assert decode.count("kv_transfer_failures_total", reason="KV_CHECKSUM_MISMATCH") == 1
    decode.load(prefill.source, KEY, [3, 4], reload=True)
    decode.load_done()
    assert np.array_equal(decode.blocks([3, 4]), before)
    assert np.array_equal(prefill.blocks([5, 6]), before)


@pytest.mark.invariant("RPC-16")
def test_pool_that_raises_on_the_sending_side_is_a_store_failure() -> None:
    pool = OddPool()
    with nodes(Node("prefill", pool=pool), Node("decode", seed=2)) as (prefill, decode):
        pool.broken = True
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CACHE_STORE_STORE_FAILED
        assert "bad memory" not in failed.error.message
        pool.broken = False
        decode.load(prefill.source, KEY, [1], reload=True)
        decode.load_done()
        assert_clean(prefill, decode)


@pytest.mark.invariant("RPC-16")
def test_pool_that_raises_on_the_receiving_side_is_reported_at_once() -> None:
    pool = OddPool()
    with nodes(Node("prefill", seed=1), Node("decode", pool=pool)) as (prefill, decode):
        pool.broken = True
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1], deadline_s=60)
        assert decode.load_failed().error.code is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()
        assert_clean(prefill, decode)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda node: node.agent.publish(KEY, "full", 0, 99),
        lambda node: node.agent.publish(KEY, "other", 0, 1),
        lambda node: node.agent.computed(KEY, prefill_result(), True),
    ],
)
def test_publish_that_cannot_be_right_fails_the_request_not_the_agent(
    pair: tuple[Node, Node], mistake: Callable[[Node], None]
) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1])
    prefill.admit(KEY, [5])
    mistake(prefill)
    assert decode.load_failed().error.code is ErrorCode.CACHE_STORE_STORE_FAILED
    ended = prefill.lease_ended()
    assert ended.error is not None and ended.error.code is ErrorCode.CACHE_STORE_STORE_FAILED


def test_admission_with_blocks_outside_the_pool_ends_at_once(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1])
    prefill.admit(KEY, [64])
    assert prefill.lease_ended().outcome == "aborted"
    assert decode.load_failed().error.code is ErrorCode.CACHE_STORE_STORE_FAILED


# ---- time limits


@pytest.mark.invariant("RPC-20")
@pytest.mark.serial
def test_load_limit_counts_from_running_not_from_the_queue() -> None:
    limits, clock = settings(load_progress_timeout_s=0.3), HeldClock(running=True)
    with nodes(Node("prefill", seed=1), Node("decode", limits, seed=2, clock=clock)) as (prefill, decode):
        decode.load(prefill.source, KEY, [1, 2])
        until(lambda: prefill.agent.stats().parked == 1, "the load is parked")
        with contextlib.suppress(AssertionError):
            decode.next_event(timeout_s=0.9)  # three times the limit in P's queue
        assert decode.said == []
        clock.hold()  # the rest may take as long as it likes
        prefill.stage(KEY, [5, 6])
        decode.load_done()
        prefill.lease_ended()


@pytest.mark.invariant("RPC-20")
@pytest.mark.serial
def test_stall_of_one_layer_beyond_the_limit_is_a_load_timeout() -> None:
    limits, clock = settings(load_progress_timeout_s=0.3), HeldClock()
    with nodes(Node("prefill", seed=1), Node("decode", limits, seed=2, clock=clock)) as (prefill, decode):
        decode.load(prefill.source, KEY, [1, 2])
        prefill.admit(KEY, [5, 6])
        prefill.agent.publish(KEY, "full", 0, 2)
        until(lambda: decode.count("kv_transfer_pieces_total", result="ok") == 2, "layer 0 has come")
        clock.run()
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.LOAD_CACHE_TIMEOUT
        assert (failed.delivered, failed.missing) == (2, 4)
        assert decode.count("kv_transfer_failures_total", reason="LOAD_CACHE_TIMEOUT") == 1
        until(lambda: prefill.agent.stats().readers == 0, "the stream is closed")
        decode.agent.cancel_load(KEY, failed.error)
        prefill.lease_ended()
        assert_clean(prefill, decode)


@pytest.mark.serial
def test_load_survives_that_its_own_process_stood_still() -> None:
    """As under SIGSTOP or a long collection of garbage: what came meanwhile has only to be read."""
    limits, clock = settings(load_progress_timeout_s=0.5), HeldClock()
    with nodes(Node("prefill", seed=1), Node("decode", limits, seed=2, clock=clock)) as (prefill, decode):
        decode.load(prefill.source, KEY, [1, 2])
        prefill.admit(KEY, [5, 6])
        prefill.agent.publish(KEY, "full", 0, 2)
        until(lambda: decode.count("kv_transfer_pieces_total", result="ok") == 2, "layer 0 has come")
        with decode.held(), contextlib.suppress(AssertionError):
            prefill.compute(KEY, 2)
            clock.move(1.0)
            decode.next_event(timeout_s=0.6)  # and the timer of the limit is due as well
        decode.load_done()
        prefill.lease_ended()


def test_progress_in_blocks_that_are_not_wanted_keeps_the_load_alive() -> None:
    """D holds all but the last block; P takes longer than the limit to compute the others."""
    limits = settings(load_progress_timeout_s=3.0)
    with nodes(Node("prefill", seed=1), Node("decode", limits, seed=2)) as (prefill, decode):
        count = 9
        decode.load(prefill.source, KEY, [1], first=count - 1, tokens=count * LAYOUT.block_size)
        prefill.admit(KEY, list(range(20, 20 + count)))
        for upto in range(1, count):
            prefill.agent.publish(KEY, "full", 0, upto)
            with contextlib.suppress(AssertionError):
                decode.next_event(timeout_s=0.45)
            assert decode.said == []
        prefill.compute(KEY, count)
        decode.load_done()
        prefill.lease_ended()


def test_prefill_that_never_begins_ends_the_load_with_buffer_timeout() -> None:
    with nodes(Node("prefill", settings(publish_timeout_s=0.2)), Node("decode", seed=2)) as (prefill, decode):
        decode.load(prefill.source, KEY, [1])
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT
        assert_clean(prefill)


def test_prefill_that_stops_publishing_ends_the_load_with_buffer_timeout() -> None:
    with nodes(Node("prefill", settings(publish_timeout_s=0.2)), Node("decode", seed=2)) as (prefill, decode):
        prefill.admit(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        assert decode.load_failed().error.code is ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()


@pytest.mark.parametrize("admitted", [False, True])
def test_deadline_of_the_request_ends_the_load_in_time(pair: tuple[Node, Node], admitted: bool) -> None:
    prefill, decode = pair
    if admitted:
        prefill.admit(KEY, [5])
    decode.load(prefill.source, KEY, [1], deadline_s=0.2)
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.GENERATE_TIMEOUT
    assert not failed.retriable_here
    if admitted:
        assert prefill.lease_ended().outcome == "aborted"


def test_closing_an_agent_ends_its_loads_with_draining() -> None:
    with nodes(Node("prefill", seed=1), Node("decode", seed=2)) as (prefill, decode):
        decode.load(prefill.source, KEY, [1])
        until(lambda: prefill.agent.stats().parked == 1, "the load is parked")
        decode.agent.close(10)
        assert decode.load_failed().error.code is ErrorCode.SERVER_DRAINING
        assert_clean(prefill)


def test_port_in_use_is_one_error_that_names_it() -> None:
    with nodes(Node("one")) as (one,):
        port = one.address.rsplit(":", 1)[1]
        second = type(one.agent)(one.identity, one.pool, settings(), wake=lambda: None)
        with pytest.raises(BatonError, match=port) as caught:
            second.start("127.0.0.1", int(port))
        assert caught.value.code is ErrorCode.CONNECT_FAILED
        second.close(5)


def test_commands_beyond_the_queue_are_refused_not_waited_for() -> None:
    with nodes(Node("prefill", settings(queue_size=1)), Node("decode", settings(queue_size=1))) as (
        prefill,
        decode,
    ):
        with prefill.held(), decode.held():
            prefill.admit(KEY, [5])
            for _ in range(100):
                prefill.agent.publish(KEY, "full", 0, 1)
                decode.agent.forget("nothing")
            decode.load(prefill.source, KEY, [1])
            assert decode.load_failed().error.code is ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED
        ended = prefill.lease_ended()
        assert ended.error is not None and ended.error.code is ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED


def test_loop_of_an_agent_reports_no_task_left_after_close() -> None:
    node = Node("one")
    node.close()
    assert node.agent._loop is not None and node.agent._loop.is_closed()
    assert not asyncio.all_tasks(node.agent._loop)


def test_load_when_it_finds_no_room_in_the_queue_then_nobody_renews_its_lease_and_the_prefill_server_is_told(
    pair: tuple[Node, Node],
) -> None:
    prefill, decode = pair
    prefill.stage(KEY, [5])
    decode.agent.keep_alive(KEY, prefill.source)  # it waited for blocks before
    faults.arm("cache_store.queue:full,what=load")
    decode.load(prefill.source, KEY, [1])
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED and not failed.retriable_here
    ended = prefill.lease_ended()
    assert ended.outcome == "aborted"
    assert ended.error is not None and ended.error.metadata["cause"] == "CACHE_STORE_PUSH_ITEM_FAILED"
    assert not decode.agent._pulling._renewals
