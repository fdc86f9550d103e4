"""Exactly one terminal cause per request: the first one, whatever follows it, on every path through the servers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import grpc.aio
import pytest

from engine.messages import FinishReason, RequestOutput
from front.reception import RequestScope
from front.request import Source, classify
from rpc.errors import BatonError, ErrorCode
from tests.unit.front.scripted_engine import LIMIT_S, Front, failed, finished, first_token, prefilled
from tests.unit.front.service_calls import decode_request, error_of, prefill_request, start
from tests.unit.front.wire_requests import REQUEST_KEY

MODES = ("local", "decode", "prefill")
X = ErrorCode.KV_LEASE_EXPIRED  # no later cause has this code


def front_of(mode: str, **options: Any) -> tuple[Front, Any]:
    if mode == "prefill":
        return Front("prefill", **options), prefill_request()
    return Front("decode", **options), decode_request(local=mode == "local")


def later_causes(front: Front) -> dict[str, Any]:
    """What ends a request that somebody else has ended before."""
    reception = front.reception
    timeout = BatonError(ErrorCode.GENERATE_TIMEOUT, "too late")
    draining = BatonError(ErrorCode.SERVER_DRAINING, "closing")
    return {
        "cancel": lambda: reception.abort(REQUEST_KEY, BatonError(ErrorCode.CANCELLED), "client"),
        "deadline": lambda: reception._scopes[REQUEST_KEY]._force(timeout, "deadline"),
        "cleanup": lambda: reception.abort_all(lambda: draining, "drain", 0.0),
    }


@pytest.mark.invariant("RPC-5")
@pytest.mark.parametrize("order", list(itertools.permutations(("cancel", "deadline", "cleanup"))), ids="-".join)
@pytest.mark.parametrize("mode", MODES)
async def test_cause_when_an_error_is_followed_by_others_in_any_order_then_the_error_stays(
    mode: str, order: tuple[str, ...]
) -> None:
    front, message = front_of(mode)
    front.engine.obeys_aborts = False
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        rpc = start(group, front, message)
        await front.engine.until(lambda: front.engine.adds)
        # All within one turn of the loop: nobody has looked at the error when the others come.
        front.engine.emit(failed(X))
        causes = later_causes(front)
        for name in order:
            causes[name]()
        assert error_of(await rpc).code is X
        (record,) = await front.records()
    assert (record["code"], record["source"]) == (int(X), "context_error")
    (entry,) = front.reception.table.page()["finished"]  # type: ignore[misc]
    assert entry["code"] == int(X)


@pytest.mark.invariant("RPC-5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["cancel", "deadline", "cleanup"])
async def test_cause_when_an_end_from_outside_is_followed_by_others_then_it_stays(mode: str, first: str) -> None:
    front, message = front_of(mode)
    expected = {"cancel": 8100, "deadline": 603, "cleanup": 8608}[first]
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        rpc = start(group, front, message)
        await front.engine.until(lambda: front.engine.adds)
        causes = later_causes(front)
        causes.pop(first)()
        for cause in causes.values():
            cause()
        await rpc
        (record,) = await front.records()
    assert record["code"] == expected
    assert record["source"] == ("client_cancel" if first == "cancel" else "context_error")


@pytest.mark.invariant("RPC-6")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["admit", "note"])
async def test_exit_when_something_raises_unexpectedly_in_a_stage_then_it_has_a_cause_and_a_record(
    mode: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, message = front_of(mode)

    def defect(*unused: object, **also: object) -> None:
        raise RuntimeError("boom!")

    if place == "admit":
        monkeypatch.setattr(RequestScope, "_submit", defect)
    else:
        monkeypatch.setattr(RequestScope, "note", defect)
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        rpc = start(group, front, message)
        if place == "note":
            await front.engine.until(lambda: front.engine.adds)
            front.engine.emit(first_token())
        assert error_of(await rpc).code is ErrorCode.UNKNOWN_ERROR
        (record,) = await front.records()
    assert (record["code"], record["source"]) == (514, "context_error")
    (entry,) = front.reception.table.page()["finished"]  # type: ignore[misc]
    assert (entry["code"], entry["source"]) == (514, "context_error")
    assert "boom!" not in entry["message"]
    assert len(front.reception.table) == 0


@pytest.mark.invariant("RPC-4")
@pytest.mark.parametrize("mode", MODES)
async def test_success_when_the_consumer_leaves_right_after_its_final_output_then_it_is_quiet(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    front, message = front_of(mode)
    async with front.running(), asyncio.timeout(LIMIT_S):
        stub = front.stub.Prefill if mode == "prefill" else front.stub.Decode
        rpc = stub(message, timeout=LIMIT_S)
        await front.engine.until(lambda: front.engine.adds)
        if mode == "prefill":
            front.engine.emit(prefilled())
            await rpc
        else:
            if mode == "decode":
                front.engine.emit(RequestOutput(REQUEST_KEY, reserved=True))
            front.engine.emit(first_token(loaded=mode == "decode"))
            front.engine.emit(finished(reason=FinishReason.STOP))
            async for event in rpc:
                if event.WhichOneof("event") == "tokens":
                    break
        rpc.cancel()
        if mode == "prefill":
            front.staged_end()
        (record,) = await front.records()
    assert record["code_name"] == "NONE_ERROR"
    assert "source" not in record
    assert front.engine.aborts == []
    assert front.metrics.value("baton_aborts_total", leg=front.role, source="client") is None
    assert [
        r for r in caplog.records if r.levelno >= logging.WARNING and r.name.split(".")[0] in ("front", "rpc")
    ] == []


@pytest.mark.invariant("RPC-6")
@pytest.mark.parametrize("mode", MODES)
async def test_early_failure_when_the_request_was_never_admitted_then_the_ring_has_it_with_its_peer(mode: str) -> None:
    front, message = front_of(mode)
    message.input.prompt_token_ids[:] = []
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        outcome = await start(group, front, message)
        assert isinstance(outcome, grpc.aio.AioRpcError)
    (entry,) = front.reception.table.page()["finished"]  # type: ignore[misc]
    assert (entry["code"], entry["error_stage"], entry["stage"]) == (605, "admit", "finish")
    assert entry["peer"]
    assert list(entry["stages"]) == ["admit"]


def test_classify_when_it_is_asked_for_any_role_then_it_is_one_function() -> None:
    import front.request
    import router.open_requests
    import rpc.terminal

    assert front.request.classify is rpc.terminal.classify is router.open_requests.classify
    for finish in (*FinishReason, None):  # the engine's words are the wire's
        assert classify(None, finish, False).source is classify(None, finish and str(finish), False).source
    assert classify(None, None, False).source is Source.CONTEXT_CLEANUP


@pytest.mark.invariant("RPC-5")
@pytest.mark.parametrize(
    ("error", "finish", "cancelled", "source", "code"),
    [
        (None, "stop", False, Source.SUCCESS, 0),
        (None, "length", True, Source.SUCCESS, 0),  # its consumer left before it was collected
        (ErrorCode.EXECUTION_EXCEPTION, "stop", False, Source.CONTEXT_ERROR, 606),
        (ErrorCode.EXECUTION_EXCEPTION, None, True, Source.CONTEXT_ERROR, 606),
        (ErrorCode.CANCELLED, "length", False, Source.CLIENT_CANCEL, 8100),
        (None, "abort", False, Source.CLIENT_CANCEL, 8100),
        (None, None, True, Source.CLIENT_CANCEL, 8100),
        (None, None, False, Source.CONTEXT_CLEANUP, 8100),
    ],
)
def test_classify_when_there_are_several_causes_then_error_success_cancel_and_cleanup_count_in_this_order(
    error: ErrorCode | None, finish: str | None, cancelled: bool, source: Source, code: int
) -> None:
    terminal = classify(None if error is None else BatonError(error), finish, cancelled)
    assert (terminal.source, int(terminal.code)) == (source, code)
    assert (terminal.error is None) == (source is Source.SUCCESS)
