"""A load ends exactly once and everything that it held comes back, whatever raises on the way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cache_store.agent import LoadDone, LoadFailed
from cache_store.loading import puller as puller_module
from cache_store.loading.load import Load
from cache_store.serving.sending import HostSender, Sender
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import LAYOUT, HeldClock, Node, assert_clean, key_of, nodes, settings, until
from tests.unit.cache_store.staged import StagedNode, make_pair

KEY = key_of(1)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    chosen = settings(transport="grpc")
    with nodes(Node("prefill", chosen, seed=1), Node("decode", chosen, seed=2)) as (prefill, decode):
        yield prefill, decode
        faults.disarm()


def boom(*unused: object, **also: object) -> Any:
    raise RuntimeError("boom")


def raising_for(name: str, observe: Callable[..., None]) -> Callable[..., None]:
    """A metric whose end raises."""

    def raising(metric: str, *values: Any, **labels: Any) -> None:
        if metric == name:
            raise RuntimeError("boom")
        observe(metric, *values, **labels)

    return raising


@pytest.mark.invariant("RPC-13")
@pytest.mark.parametrize("place", ["copy", "piece counter", "end of the metric", "log of the failure", "callback"])
def test_end_when_something_raises_then_there_is_one_completion_and_nothing_is_left(
    pair: tuple[Node, Node], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    puller = decode.agent._pulling
    expected = ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
    if place == "copy":
        monkeypatch.setattr(decode.pool, "piece", boom)
    elif place == "piece counter":
        streams = puller._streams
        monkeypatch.setattr(streams, "_observe", raising_for("kv_transfer_pieces_total", streams._observe))
    elif place == "end of the metric":
        monkeypatch.setattr(puller, "_observe", raising_for("kv_transfer_size_bytes", puller._observe))
    elif place == "log of the failure":
        faults.arm("cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED")
        monkeypatch.setattr(puller_module.Puller, "_report", boom)
        expected = ErrorCode.CACHE_STORE_STORE_FAILED
    else:
        wake = decode.agent._wake
        monkeypatch.setattr(decode.agent, "_wake", lambda: (wake(), boom()))
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    event = decode.next_event()
    if place == "callback":
        assert isinstance(event, LoadDone)
    else:
        assert isinstance(event, LoadFailed)
        assert event.error.code is expected
        decode.agent.cancel_load(KEY, event.error)
    monkeypatch.undo()
    prefill.lease_ended()
    assert_clean(prefill, decode)
    assert len(decode.said) == 1
    # The key is free again, and the agents serve on.
    other = key_of(2)
    faults.disarm()
    prefill.stage(other, [7])
    decode.load(prefill.source, other, [3])
    decode.load_done()
    assert np.array_equal(decode.blocks([3]), prefill.blocks([7]))
    prefill.lease_ended()


@pytest.mark.invariant("RPC-13", "RPC-14")
def test_end_when_notifications_follow_it_then_they_are_ignored(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    faults.arm("cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,layer=1")
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    failed = decode.load_failed()
    for _ in range(3):
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.agent.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
        prefill.agent.publish(KEY, LAYOUT.tag, 0, 2)
        prefill.agent.computed(KEY, Load.result, True)  # type: ignore[arg-type]
    prefill.lease_ended()
    assert_clean(prefill, decode)
    assert (len(decode.said), len(prefill.said)) == (1, 1)
    assert failed.error.code is ErrorCode.CACHE_STORE_STORE_FAILED
    assert len(decode.observed("kv_transfer_seconds")) == 1


@pytest.mark.invariant("RPC-16")
def test_publish_when_it_fails_then_the_load_ends_with_its_own_code_at_once(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    faults.arm("cache_store.publish:raise=READ_BUFFER_MISMATCH,nth=2")
    decode.load(prefill.source, KEY, [1, 2], deadline_s=60.0)
    began = time.monotonic()
    prefill.admit(KEY, [5, 6])
    prefill.compute(KEY, 2)
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.READ_BUFFER_MISMATCH
    assert time.monotonic() - began < 10  # not at the caller's deadline
    assert prefill.lease_ended().outcome == "aborted"


def test_failure_line_when_a_load_fails_then_it_says_who_where_and_how_far(
    pair: tuple[Node, Node], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    faults.arm("cache_store.send_piece:raise=CACHE_STORE_LOAD_RDMA_WRITE_FAILED,layer=2")
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    failed = decode.load_failed()
    decode.agent.cancel_load(KEY, failed.error)
    prefill.lease_ended()
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("PD_CACHE_KEY_READ_FAILED")]
    for part in (
        "request_id=request-1 ", f"request_key={KEY} ", "rank=0 ", "worker=prefill ", f"peer={prefill.address} ",
        "channel=grpc ", "grpc_code=UNAVAILABLE ", "remote_code=8306 (CACHE_STORE_LOAD_RDMA_WRITE_FAILED) ",
        "finished=4/6 ", "cost_ms=", "peer_ranks=[0: CACHE_STORE_LOAD_RDMA_WRITE_FAILED, ]",
    ):  # fmt: skip
        assert part in line, line
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]  # where the request ends it is an error


def test_ranks_when_one_of_several_fails_then_the_others_are_ended_and_it_is_named() -> None:
    wide = LAYOUT.__class__.of("full", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
    half = LAYOUT.__class__.of(
        "full", num_layers=3, num_kv_heads=1, head_dim=8, block_size=4, dtype="bfloat16", total_kv_heads=2
    )
    with nodes(
        Node("prefill", seed=1, layouts=(half,), tp_size=2, rank=0),
        Node("prefill", seed=2, layouts=(half,), tp_size=2, rank=1),
        Node("decode", seed=3, layouts=(wide,)),
    ) as (first, second, decode):
        source = first.source.__class__("prefill", (first.address, second.address), 2)
        first.admit(KEY, [5])  # and never published: its stream stays open
        second.admit(KEY, [5])
        decode.load(source, KEY, [1])
        until(lambda: first.agent.stats().readers and second.agent.stats().readers, "both streams are open")
        second.agent.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.EXECUTION_EXCEPTION
        assert failed.error.metadata["peer_ranks"] == "1: EXECUTION_EXCEPTION, "
        second.lease_ended()
        assert first.lease_ended().outcome == "aborted"  # told at once, not by its clock
        assert_clean(first, second, decode)


# -- large events, by workers ---------------------------------------------------------------------------------


def test_large_event_when_a_worker_puts_it_together_then_the_loop_serves_others_and_the_bytes_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cache_store.serving.sending.WORKER_BYTES", 1)
    original = Sender._encode
    inside, go = threading.Event(), threading.Event()

    def held(self: HostSender, *arguments: Any) -> bytes:
        if self._reader.lease.key == KEY and not inside.is_set():
            inside.set()
            assert go.wait(20)
        return original(self, *arguments)

    monkeypatch.setattr(Sender, "_encode", held)
    chosen = settings(threads=2, transport="grpc")
    with nodes(Node("prefill", chosen, seed=1), Node("decode", chosen, seed=2)) as (prefill, decode):
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        assert inside.wait(20)
        other = key_of(2)
        prefill.stage(other, [7])
        decode.load(prefill.source, other, [3])
        assert decode.load_done().request_key == other
        # Its lease ends under the copy, which holds the blocks until it is done.
        prefill.lease_ended()
        prefill.agent.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
        until(lambda: prefill.agent.stats().queue_depth == 0, "the failure was taken in")
        assert len(prefill.said) == 1
        go.set()
        assert decode.load_failed().error.code is ErrorCode.EXECUTION_EXCEPTION
        prefill.lease_ended()
        assert np.array_equal(decode.blocks([3]), prefill.blocks([7]))
        assert_clean(prefill, decode)


# -- the one-sided transport ------------------------------------------------------------------------------------


def held_blocks_until(decode: Node) -> float:
    """Until when the blocks of its one load are held, because its copies were not done in time; 0 before that."""
    (job,) = decode.agent._pulling._jobs.values()
    return job.legs[0].hold_until


@pytest.mark.invariant("RPC-17")
def test_read_when_it_does_not_end_in_time_then_8325_and_the_blocks_are_held_until_it_has_and_the_time_is_over() -> (
    None
):
    for prefill, decode in make_pair("threads", "ipc", transfer_wait_timeout_s=0.2, quarantine_s=0.3):
        decode.gate.close()
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        assert decode.gate.reached.wait(20)
        # The copy goes on: nothing may be given back.
        held_until = until(lambda decode=decode: held_blocks_until(decode), "the wait is over")  # type: ignore[misc]
        until(lambda until=held_until: time.monotonic() > until + 0.2, "the quarantine is over")  # type: ignore[misc]
        assert decode.said == []
        decode.gate.open()
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.READ_TRANSFER_NOT_DONE
        assert failed.error.metadata["waited_s"] == "0.2"
        decode.agent.cancel_load(KEY, failed.error)
        prefill.lease_ended()
    for prefill, decode in make_pair("threads", "ipc", transfer_wait_timeout_s=0.1, quarantine_s=0.5):
        decode.gate.close()
        prefill.stage(KEY, [5, 6])
        began = time.monotonic()
        decode.load(prefill.source, KEY, [1, 2])
        assert decode.gate.reached.wait(20)
        until(lambda decode=decode: held_blocks_until(decode), "the wait is over")  # type: ignore[misc]
        decode.gate.open()
        # Proven soon, but held for the least time.
        assert decode.load_failed().error.code is ErrorCode.READ_TRANSFER_NOT_DONE
        assert time.monotonic() - began >= 0.5
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()


def test_read_when_the_deadline_is_near_then_none_begins_and_the_answer_comes_before_it() -> None:
    limits = {"steal_before_deadline_s": 30.0, "return_before_deadline_s": 20.0}
    for prefill, decode in make_pair("threads", "ipc", **limits):
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2], deadline_s=25.0)
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.GENERATE_TIMEOUT
        assert decode.copies.copies == 0  # type: ignore[union-attr]
        prefill.lease_ended()
        # Nothing comes of a prompt that is not computed in time: said before the deadline, not at it.
        began = time.monotonic()
        other = key_of(2)
        prefill.admit(other, [7])
        decode.load(prefill.source, other, [3], deadline_s=20.5)
        assert decode.load_failed().error.code is ErrorCode.GENERATE_TIMEOUT
        assert time.monotonic() - began < 15
        prefill.lease_ended()


def test_read_of_several_layers_when_the_deadline_comes_near_in_its_middle_then_no_further_copy_begins() -> None:
    clock = HeldClock()
    limits = settings(transport="ipc", staging_slots=1, steal_before_deadline_s=30.0, return_before_deadline_s=20.0)
    with nodes(StagedNode("prefill", limits, seed=1), StagedNode("decode", limits, seed=2, clock=clock)) as (
        prefill,
        decode,
    ):
        assert isinstance(decode, StagedNode)
        decode.gate.close()
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2], deadline_s=100.0)
        assert decode.gate.reached.wait(20)  # the copy of one layer is under way, and the next one waits for its slot
        clock.move(75.0)
        decode.gate.open()
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.GENERATE_TIMEOUT and failed.missing > 0
        prefill.lease_ended()
        assert_clean(prefill, decode)
