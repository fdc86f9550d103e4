"""Cancels, aborts, deadlines and drains: how a request ends before its time, and what is recorded."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from engine.messages import FinishReason, RequestOutput, TokenOutput
from engine.scheduler.news import engine_error
from protos import common_pb2, decode_pb2, prefill_pb2
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from rpc.status import load_failed
from tests.unit.front.scripted_engine import (
    LIMIT_S,
    Front,
    finished,
    first_token,
    prefilled,
)
from tests.unit.front.service_calls import decode_request, error_of, prefill_request, refusal, start
from tests.unit.front.wire_requests import REQUEST_KEY


def progress(state: str) -> list[RequestOutput]:
    """Outputs that bring a decode request into `state`."""
    reserved = RequestOutput(REQUEST_KEY, reserved=True)
    return {"engine": [], "load": [reserved], "generate": [reserved, first_token(loaded=True)]}[state]


async def until_state(front: Front, state: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while front.reception.table.page()["open"][0]["state"] != state:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("state", ["engine", "load", "generate"])
async def test_decode_when_the_caller_cancels_then_the_engine_is_told_and_one_record_has_8100(state: str) -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S):
        rpc = front.stub.Decode(decode_request(), timeout=LIMIT_S)
        await front.engine.until(lambda: front.engine.adds)
        for output in progress(state):
            front.engine.emit(output)
        await until_state(front, state)
        rpc.cancel()
        record = (await front.records())[0]
    assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.CANCELLED, "client")]
    assert (record["code"], record["source"], record["abort_source"]) == (8100, "client_cancel", "client")
    assert record["stages"]["queue"] == 0.25  # the engine's last word was waited for
    assert len(front.access) == 1
    assert front.metrics.value("baton_aborts_total", leg="decode", source="client") == 1
    assert len(front.reception.table) == 0


@pytest.mark.parametrize("state", ["engine", "load", "generate"])
async def test_decode_when_aborted_by_rpc_then_the_stream_ends_with_the_given_code(state: str) -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request())
        await front.engine.until(lambda: front.engine.adds)
        for output in progress(state):
            front.engine.emit(output)
        await until_state(front, state)
        message = decode_pb2.DecodeAbortRequest(request_key=REQUEST_KEY, code=8205, source="peer")
        assert (await front.stub.Abort(message, timeout=LIMIT_S)).found
        error = error_of(await task)
        record = (await front.records())[0]
    assert error.code is ErrorCode.CONNECTION_RESET_BY_PEER
    assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.CONNECTION_RESET_BY_PEER, "peer")]
    assert record["abort_source"] == "peer"
    assert front.metrics.value("baton_aborts_total", leg="decode", source="peer") == 1


async def test_decode_when_its_load_fails_after_the_abort_then_the_cause_is_that_of_the_abort() -> None:
    front = Front("decode")
    front.engine.obeys_aborts = False
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(RequestOutput(REQUEST_KEY, reserved=True))
        await until_state(front, "load")
        message = decode_pb2.DecodeAbortRequest(request_key=REQUEST_KEY, code=603, source="deadline")
        assert (await front.stub.Abort(message, timeout=LIMIT_S)).found
        failure = engine_error(load_failed(BatonError(ErrorCode.REQUEST_TOMBSTONED)))
        front.engine.emit(RequestOutput(REQUEST_KEY, last=True, error=failure))
        error = error_of(await task)
        record = (await front.records())[0]
    assert error.code is ErrorCode.GENERATE_TIMEOUT
    assert (record["code"], record["abort_source"]) == (603, "deadline")


@pytest.mark.parametrize("how", ["abort", "cancel", "nobody"])
async def test_decode_when_its_load_fails_by_an_abort_that_comes_here_later_then_the_cause_is_that_of_the_abort(
    how: str,
) -> None:
    front = Front("decode", why_s=0.05 if how == "nobody" else LIMIT_S)
    front.engine.obeys_aborts = False
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        rpc = front.stub.Decode(decode_request(), timeout=LIMIT_S)
        task = group.create_task(ending(rpc))
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(RequestOutput(REQUEST_KEY, reserved=True))
        await until_state(front, "load")
        failure = engine_error(load_failed(BatonError(ErrorCode.REQUEST_TOMBSTONED)))
        front.engine.emit(RequestOutput(REQUEST_KEY, last=True, error=failure))
        if how == "abort":
            message = decode_pb2.DecodeAbortRequest(request_key=REQUEST_KEY, code=8205, source="peer")
            await front.stub.Abort(message, timeout=LIMIT_S)
        elif how == "cancel":
            rpc.cancel()
        await task
        record = (await front.records())[0]
    assert record["code"] == {"abort": 8205, "cancel": 8100, "nobody": 8212}[how]
    assert front.reception.remaining() == 0


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_decode_when_its_load_has_failed_by_the_abort_that_is_on_its_way_then_the_cause_is_that_of_the_abort(
    how: str,
) -> None:
    front = Front("decode", stop_wait_s=0.0)
    front.engine.had_failed = engine_error(load_failed(BatonError(ErrorCode.REQUEST_TOMBSTONED)))
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        rpc = front.stub.Decode(decode_request(), timeout=LIMIT_S)
        task = group.create_task(ending(rpc))
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(RequestOutput(REQUEST_KEY, reserved=True))
        await until_state(front, "load")
        if how == "abort":
            message = decode_pb2.DecodeAbortRequest(request_key=REQUEST_KEY, code=8205, source="peer")
            await front.stub.Abort(message, timeout=LIMIT_S)
        else:
            rpc.cancel()
        await task
        record = (await front.records())[0]
    assert (record["code"], record["abort_source"]) == {"abort": (8205, "peer"), "cancel": (8100, "client")}[how]


async def ending(rpc: Any) -> None:
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        async for _ in rpc:
            pass


async def test_decode_when_aborted_and_the_engine_ends_it_with_finish_abort_then_the_stream_ends_regularly() -> None:
    front = Front("decode")
    front.engine.obeys_aborts = False
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request(local=True))
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(first_token())
        await front.stub.Abort(decode_pb2.DecodeAbortRequest(request_key=REQUEST_KEY), timeout=LIMIT_S)
        front.engine.emit(finished(reason=FinishReason.ABORT))
        events = await task
    assert events[-1].finished.finish_reason == common_pb2.FINISH_REASON_ABORT
    assert (front.access[0]["code"], front.access[0]["source"]) == (8100, "client_cancel")


async def test_decode_when_aborted_and_the_engine_does_not_react_then_it_is_forced() -> None:
    front = Front("decode", stop_wait_s=0.05)
    front.engine.obeys_aborts = False
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request())
        await front.engine.until(lambda: front.engine.adds)
        message = decode_pb2.DecodeAbortRequest(request_key=REQUEST_KEY, code=8205, source="peer")
        await front.stub.Abort(message, timeout=LIMIT_S)
        error = error_of(await task)
    assert error.code is ErrorCode.CONNECTION_RESET_BY_PEER
    assert len(front.access) == 1


async def test_f4_prefill_when_its_decode_leg_failed_while_it_computes_then_the_engine_is_told_at_once() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        message = prefill_pb2.PrefillAbortRequest(request_key=REQUEST_KEY, code=8211, source="peer")
        assert (await front.stub.Abort(message, timeout=LIMIT_S)).found
        assert set(front.engine.aborts) == {(REQUEST_KEY, ErrorCode.DECODE_MALLOC_FAILED, "peer")}
        error = error_of(await task)
        record = (await front.records())[0]
    assert error.code is ErrorCode.DECODE_MALLOC_FAILED
    assert record["abort_source"] == "peer"
    assert front.metrics.value("baton_aborts_total", leg="prefill", source="peer") == 1


async def test_prefill_when_aborted_while_held_then_the_engine_is_told_and_the_end_of_the_kv_ends_it() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(prefilled())
        await task
        await until_state(front, "held")
        message = prefill_pb2.PrefillAbortRequest(request_key=REQUEST_KEY, source="peer")
        assert (await front.stub.Abort(message, timeout=LIMIT_S)).found
        assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.CANCELLED, "peer")]
        front.staged_end("aborted")
        record = (await front.records())[0]
    assert (record["kv"]["outcome"], record["abort_source"]) == ("aborted", "peer")
    assert front.metrics.value("baton_aborts_total", leg="prefill", source="peer") == 1


async def test_prefill_when_the_caller_is_gone_before_the_answer_then_the_staged_kv_is_given_up() -> None:
    front = Front("prefill")
    faults.arm("prefill.answer:delay=30")
    try:
        async with front.running(), asyncio.timeout(LIMIT_S):
            rpc = front.stub.Prefill(prefill_request(), timeout=LIMIT_S)
            await front.engine.until(lambda: front.engine.adds)
            front.engine.emit(prefilled())
            await until_state(front, "answer")
            rpc.cancel()
            await front.engine.until(lambda: front.engine.aborts)
            assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.CANCELLED, "client")]
            front.staged_end("aborted")
            await front.records()
    finally:
        faults.disarm()
    assert len(front.reception.table) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_abort_when_the_key_is_unknown_then_the_late_request_is_refused(role: Any) -> None:
    front = Front(role)
    make = prefill_pb2.PrefillAbortRequest if role == "prefill" else decode_pb2.DecodeAbortRequest
    async with front.running():
        answer = await front.stub.Abort(make(request_key=REQUEST_KEY), timeout=LIMIT_S)
        assert answer.HasField("found")
        assert not answer.found
        # The engine's cache store has to refuse a late load as well.
        assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.CANCELLED, "client")]
        error = await refusal(front, prefill_request() if role == "prefill" else decode_request())
        await front.records()
    assert error.code is ErrorCode.REQUEST_TOMBSTONED
    assert front.engine.adds == []
    assert front.metrics.value("baton_tombstones") == 1
    assert front.metrics.value("baton_tombstone_hits_total") == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "request_key"),
        ({"request_key": "x"}, "request_key"),
        ({"request_key": REQUEST_KEY, "code": 0}, "code"),
        ({"request_key": REQUEST_KEY, "code": 12345}, "code"),
        ({"request_key": REQUEST_KEY, "source": "nobody"}, "source"),
    ],
)
async def test_abort_when_a_field_is_wrong_then_nothing_happens(fields: dict[str, Any], param: str) -> None:
    front = Front("prefill")
    async with front.running():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await front.stub.Abort(prefill_pb2.PrefillAbortRequest(**fields), timeout=LIMIT_S)
        assert error_of(caught.value).param == param
    assert front.engine.aborts == []
    assert len(front.reception.table.tombstones) == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_when_the_caller_deadline_passes_then_the_record_has_603(role: Any) -> None:
    front = Front(role)
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        message = prefill_request() if role == "prefill" else decode_request()
        task = start(group, front, message, timeout=2.0)
        await front.engine.until(lambda: front.engine.adds)
        outcome = await task
        assert outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        record = (await front.records())[0]
    assert (record["code"], record["source"], record["abort_source"]) == (603, "context_error", "deadline")
    assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.GENERATE_TIMEOUT, "deadline")]
    assert front.metrics.value("baton_aborts_total", leg=role, source="deadline") == 1


async def test_decode_when_a_call_without_a_deadline_lasts_too_long_then_it_is_8204_and_not_the_deadline() -> None:
    front = Front("decode", max_rpc_s=1.0)
    async with front.running(), asyncio.timeout(LIMIT_S):
        rpc = front.stub.Decode(decode_request(local=True))
        await front.engine.until(lambda: front.engine.adds)
        assert front.engine.adds[0].deadline_ns == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.read()
        record = (await front.records())[0]
    assert error_of(caught.value).code is ErrorCode.DEADLINE_EXCEEDED
    assert (record["code"], record["abort_source"]) == (8204, "deadline")


@pytest.mark.invariant("RPC-4")
async def test_decode_when_the_caller_cancels_after_the_last_token_then_it_is_a_success() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S):
        rpc = front.stub.Decode(decode_request(local=True), timeout=LIMIT_S)
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(first_token())
        front.engine.emit(finished())
        async for event in rpc:
            if event.WhichOneof("event") == "tokens":
                rpc.cancel()
                break
        record = (await front.records())[0]
    assert (record["code_name"], record["finish_reason"]) == ("NONE_ERROR", "length")
    assert front.engine.aborts == []
    assert front.metrics.value("baton_aborts_total", leg="decode", source="client") is None


@pytest.mark.invariant("RPC-4")
async def test_decode_when_the_caller_leaves_before_it_has_read_a_finished_answer_then_nothing_was_aborted() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S):
        rpc = front.stub.Decode(decode_request(local=True), timeout=LIMIT_S)
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(first_token())
        await rpc.read()
        # Far more than the connection's window takes: the handler is stuck in the middle of sending.
        many = [TokenOutput(index, 5) for index in range(1, 40_000)]
        for start_ in range(0, len(many), 4000):
            front.engine.emit(RequestOutput(REQUEST_KEY, tokens=many[start_ : start_ + 4000]))
        front.engine.emit(finished())
        rpc.cancel()
        record = (await front.records())[0]
    assert (record["code_name"], record["finish_reason"]) == ("NONE_ERROR", "length")
    assert record["generated_tokens"] == 40_000
    assert front.metrics.value("baton_aborts_total", leg="decode", source="client") is None


async def test_abort_all_when_requests_are_open_and_held_then_each_ends_with_8608() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        held = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(prefilled())
        await held
        other = {"request_id": "b", "request_key": "b#0.00000000"}
        open_one = start(group, front, prefill_request(**other))
        await front.engine.until(lambda: len(front.engine.adds) == 2)
        front.reception.abort_all(lambda: BatonError(ErrorCode.SERVER_DRAINING), "drain", 0.0)
        error = error_of(await open_one)
        assert front.reception.remaining() == 1
        front.staged_end("aborted")
        await front.records(2)
    assert error.code is ErrorCode.SERVER_DRAINING
    assert {code for _, code, _ in front.engine.aborts} == {ErrorCode.SERVER_DRAINING}
    assert front.reception.remaining() == 0


@pytest.mark.invariant("RPC-3")
async def test_rpc_gauges_when_requests_ended_in_every_way_then_they_are_back_at_zero() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request(local=True))
        await front.engine.until(lambda: front.engine.adds)
        assert front.metrics.value("baton_rpc_inflight", method="baton.v1.Decode/Decode") == 1
        front.engine.emit(first_token())
        front.engine.emit(finished())
        await task
        await refusal(front, decode_request(local=True))
        rpc = front.stub.Decode(decode_request(request_id="c", request_key="c#0.00000000"), timeout=LIMIT_S)
        await front.engine.until(lambda: len(front.engine.adds) == 2)
        rpc.cancel()
        await front.records(3)
        async with asyncio.timeout(LIMIT_S):
            while front.metrics.value("baton_rpc_inflight", method="baton.v1.Decode/Decode"):  # noqa: ASYNC110
                await asyncio.sleep(0)
    codes = {record["code_name"] for record in front.access}
    assert codes == {"NONE_ERROR", "DUPLICATE_REQUEST", "CANCELLED"}
