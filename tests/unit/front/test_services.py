"""The life of a request on a front: every way in, every way out, one terminal record each."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from engine.client import STREAM_CAPACITY
from engine.messages import EngineError, FinishReason, RequestOutput, RunMode, TokenOutput
from protos import common_pb2, decode_pb2, prefill_pb2
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from rpc.status import details_payload, parse_status
from tests.unit.front.scripted_engine import (
    ENGINE_ID,
    LIMIT_S,
    Front,
    failed,
    finished,
    first_token,
    prefilled,
)
from tests.unit.front.wire_requests import REQUEST_ID, REQUEST_KEY, generate_input, kv_source, sampling


def prefill_request(hold_kv: bool | None = True, **fields: object) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(input=generate_input(**fields), hold_kv=hold_kv)


def decode_request(local: bool = False, **fields: object) -> decode_pb2.DecodeRequest:
    if local:
        return decode_pb2.DecodeRequest(input=generate_input(**fields), local_prefill=decode_pb2.LocalPrefill())
    return decode_pb2.DecodeRequest(input=generate_input(**fields), kv_source=kv_source())


async def call(front: Front, message: Any, timeout: float = LIMIT_S) -> Any:
    """The answer, or the list of events, of one generation RPC."""
    if front.role == "prefill":
        return await front.stub.Prefill(message, timeout=timeout)
    return [event async for event in front.stub.Decode(message, timeout=timeout)]


def start(group: asyncio.TaskGroup, front: Front, message: Any, timeout: float = LIMIT_S) -> asyncio.Task[Any]:
    async def outcome() -> Any:
        try:
            return await call(front, message, timeout)
        except grpc.aio.AioRpcError as error:
            return error

    return group.create_task(outcome())


def error_of(outcome: Any) -> BatonError:
    assert isinstance(outcome, grpc.aio.AioRpcError), outcome
    error = parse_status(details_payload(outcome.trailing_metadata()))
    assert error is not None, outcome
    assert outcome.code() is error.spec.grpc
    return error


async def refusal(front: Front, message: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(front, message)
    return error_of(caught.value)


# -- the good ways -------------------------------------------------------------------------------------------


async def test_prefill_when_the_kv_is_held_then_the_record_comes_with_the_end_of_the_lease() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        assert front.engine.adds[0].mode is RunMode.PREFILL
        assert front.engine.adds[0].deadline_ns > 0
        front.engine.emit(prefilled())
        answer = await task
        assert answer.result.first_token.token_id == 42
        assert answer.result.first_token.HasField("index")
        assert (answer.result.cached_tokens, answer.kv_generation, answer.engine_id) == (2, 77, ENGINE_ID)
        assert answer.result.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
        assert set(answer.timeline.stages) == {"admit", "queue", "match", "compute", "sample"}
        assert (front.access, len(front.reception.table)) == ([], 1)
        page = front.reception.table.page()["open"][0]
        assert page["state"] in ("answer", "held")
        front.staged_end("released")
        record = (await front.records())[0]
    assert (record["code_name"], record["kv"]["outcome"]) == ("NONE_ERROR", "released")
    assert record["stages"]["held"] == 1.5
    assert len(front.reception.table) == 0
    assert front.metrics.value("baton_stage_seconds_sum", stage="held") == 1.5
    assert front.metrics.value("baton_stage_seconds_count", stage="admit") == 1


async def test_prefill_when_the_kv_ends_before_the_answer_is_sent_then_the_request_still_ends_once() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        # Both in the same turn of the loop: the decode server was as fast as the answer.
        front.engine.emit(prefilled())
        front.staged_end("released")
        await task
        await front.records()
    assert [record["kv"]["outcome"] for record in front.access] == ["released"]


async def test_prefill_when_the_kv_is_not_held_then_the_engine_serves_one_token_and_no_reference_is_given() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request(hold_kv=False, sampling=sampling(max_tokens=1)))
        await front.engine.until(lambda: front.engine.adds)
        add = front.engine.adds[0]
        assert (add.mode, add.sampling.max_tokens) == (RunMode.LOCAL, 1)
        front.engine.emit(first_token(last=True, finish_reason=FinishReason.LENGTH))
        answer = await task
    assert answer.result.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not answer.HasField("kv_generation")
    assert answer.engine_id == ""
    assert front.access[0]["finish_reason"] == "length"


async def test_prefill_when_one_of_many_tokens_was_computed_then_the_request_is_not_reported_as_finished() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request(hold_kv=False))
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(first_token(last=True, finish_reason=FinishReason.LENGTH))
        answer = await task
    assert answer.result.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED


async def test_prefill_when_the_first_token_stops_the_request_then_the_answer_names_it() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(prefilled(finish_reason=FinishReason.STOP, stop_token_id=42))
        answer = await task
        front.staged_end("aborted")
        await front.records()
    assert answer.result.finish_reason == common_pb2.FINISH_REASON_STOP
    assert answer.result.stop_token_id == 42


async def test_decode_when_kv_is_loaded_then_the_events_come_in_order_with_one_tokens_event_per_step() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request())
        await front.engine.until(lambda: front.engine.adds)
        assert front.engine.adds[0].kv_source is not None
        front.engine.emit(RequestOutput(REQUEST_KEY, reserved=True, blocks_in_cache=3))
        front.engine.emit(first_token(loaded=True))
        front.engine.emit(RequestOutput(REQUEST_KEY, tokens=[TokenOutput(1, 5), TokenOutput(2, 6)]))
        front.engine.emit(finished(tokens=[TokenOutput(3, 7)], preemptions=2))
        events = await task
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["reserved", "loaded", "tokens", "tokens", "tokens", "finished"]
    assert events[0].reserved.blocks_in_cache == 3
    assert events[1].loaded.prefill.first_token.token_id == 42
    indices = [[token.index for token in event.tokens.tokens] for event in events[2:5]]
    assert indices == [[0], [1, 2], [3]]
    assert not events[2].tokens.HasField("prefill")
    assert events[5].finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert events[5].finished.preemptions == 2
    assert set(events[5].finished.timeline.stages) == {"admit", "generate"}
    assert front.access[0]["generated_tokens"] == 4
    assert front.access[0]["path"] == "pd"


async def test_decode_when_colocated_then_the_prompt_result_comes_with_the_first_token() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request(local=True))
        await front.engine.until(lambda: front.engine.adds)
        assert (front.engine.adds[0].mode, front.engine.adds[0].kv_source) == (RunMode.LOCAL, None)
        front.engine.emit(first_token())
        front.engine.emit(finished(reason=FinishReason.STOP, stop_token_id=9, tokens=[TokenOutput(1, 9)]))
        events = await task
    assert [event.WhichOneof("event") for event in events] == ["tokens", "tokens", "finished"]
    assert events[0].tokens.prefill.cached_tokens == 2
    assert events[2].finished.stop_token_id == 9
    assert front.access[0]["path"] == "colocated"


# -- refusals ------------------------------------------------------------------------------------------------


async def test_decode_when_colocated_is_switched_off_then_it_is_8406_and_the_engine_hears_nothing() -> None:
    front = Front("decode", allow_local_prefill=False)
    async with front.running():
        error = await refusal(front, decode_request(local=True))
        record = (await front.records())[0]
    assert (error.code, error.param) == (ErrorCode.INVALID_ROUTE_REQUEST, "local_prefill")
    assert front.engine.adds == []
    assert (record["request_id"], record["code_name"]) == (REQUEST_ID, "INVALID_ROUTE_REQUEST")


async def test_decode_when_neither_source_nor_local_is_set_then_it_is_604() -> None:
    front = Front("decode")
    async with front.running():
        error = await refusal(front, decode_pb2.DecodeRequest(input=generate_input()))
    assert error.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT


async def test_prefill_when_hold_kv_is_absent_then_it_is_604_naming_it() -> None:
    front = Front("prefill")
    async with front.running():
        error = await refusal(front, prefill_pb2.PrefillRequest(input=generate_input()))
    assert (error.code, error.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "hold_kv")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_when_a_field_is_wrong_then_it_fails_in_admit_and_is_recorded(role: Any) -> None:
    front = Front(role)
    message = prefill_request(prompt_token_ids=[100]) if role == "prefill" else decode_request(prompt_token_ids=[100])
    async with front.running():
        error = await refusal(front, message)
        record = (await front.records())[0]
    assert (error.code, error.stage) == (ErrorCode.OUT_OF_VOCAB_RANGE, "admit")
    assert (record["code"], record["source"], record["error_stage"]) == (8101, "context_error", "admit")
    assert front.engine.adds == []
    assert len(front.reception.table) == 0
    page = front.reception.table.page()["finished"][0]
    assert (page["request_id"], page["code"]) == (REQUEST_ID, 8101)


async def test_request_when_even_its_id_is_wrong_then_the_ring_has_it_all_the_same() -> None:
    front = Front("decode")
    async with front.running():
        error = await refusal(front, decode_request(request_id="a#b"))
        await front.records()
    assert error.code is ErrorCode.INVALID_PARAMS
    assert front.reception.table.page()["finished"][0]["code"] == 605
    assert front.reception.table.page()["open"] == []


async def test_request_when_its_key_is_open_then_it_is_8607_and_the_first_goes_on() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        first = start(group, front, decode_request(local=True))
        await front.engine.until(lambda: front.engine.adds)
        error = await refusal(front, decode_request(local=True))
        assert error.code is ErrorCode.DUPLICATE_REQUEST
        front.engine.emit(first_token())
        front.engine.emit(finished())
        assert len(await first) == 2
        assert (await refusal(front, decode_request(local=True))).code is ErrorCode.DUPLICATE_REQUEST


async def test_request_when_the_server_drains_then_it_is_8608_with_retry_info() -> None:
    front = Front("prefill")
    front.drain.begin()
    async with front.running():
        error = await refusal(front, prefill_request())
    assert (error.code, error.retry_after_s) == (ErrorCode.SERVER_DRAINING, 1.0)


async def test_request_when_the_engine_is_gone_then_it_is_8609() -> None:
    front = Front("prefill")
    front.link.died(BatonError(ErrorCode.ENGINE_DEAD, "the engine process was killed by signal 9"))
    async with front.running():
        first = await refusal(front, prefill_request())
        second = await refusal(front, prefill_request())
    assert (first.code, second.code) == (ErrorCode.ENGINE_DEAD, ErrorCode.ENGINE_DEAD)


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "raised", "seen"),
    [
        ("decode", ErrorCode.MALLOC_FAILED, ErrorCode.DECODE_MALLOC_FAILED),
        ("prefill", ErrorCode.MALLOC_FAILED, ErrorCode.MALLOC_FAILED),
        ("decode", ErrorCode.LOAD_KV_CACHE_FAILED, ErrorCode.LOAD_KV_CACHE_FAILED),
        ("decode", ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN, ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN),
        ("prefill", ErrorCode.WAIT_TO_RUN_TIMEOUT, ErrorCode.WAIT_TO_RUN_TIMEOUT),
        ("prefill", ErrorCode.EXECUTION_EXCEPTION, ErrorCode.EXECUTION_EXCEPTION),
    ],
)
async def test_request_when_the_engine_fails_it_then_its_code_and_stage_leave_the_server(
    role: Any, raised: ErrorCode, seen: ErrorCode
) -> None:
    front = Front(role)
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request() if role == "prefill" else decode_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(failed(raised))
        error = error_of(await task)
        record = (await front.records())[0]
    assert (error.code, error.stage, error.message) == (seen, "allocate", "it failed")
    assert error.metadata["request_id"] == REQUEST_ID  # although no metadata of the call named it
    assert (record["code"], record["source"]) == (int(seen), "context_error")
    assert front.metrics.value("baton_rpc_requests_total", method=_method(role), code=seen.name) == 1


def _method(role: str) -> str:
    return "baton.v1.Prefill/Prefill" if role == "prefill" else "baton.v1.Decode/Decode"


async def test_request_when_the_engine_reports_an_unknown_number_then_it_is_514_and_a_breach() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(RequestOutput(REQUEST_KEY, last=True, error=EngineError(9999, "news from the future")))
        error = error_of(await task)
    assert (error.code, error.metadata["remote_code"]) == (ErrorCode.UNKNOWN_ERROR, "9999")
    assert front.metrics.value("baton_contract_breaches_total", kind="unknown_code") == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_when_the_engine_dies_then_every_open_one_gets_8609(role: Any) -> None:
    front = Front(role)
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        tasks = []
        for number in range(3):
            fields = {"request_id": f"r{number}", "request_key": f"r{number}#0.00000000"}
            message = prefill_request(**fields) if role == "prefill" else decode_request(**fields)
            tasks.append(start(group, front, message))
        await front.engine.until(lambda: len(front.engine.adds) == 3)
        front.engine.die()
        codes = [error_of(await task).code for task in tasks]
        await front.records(3)
    assert codes == [ErrorCode.ENGINE_DEAD] * 3
    assert len({record["request_id"] for record in front.access}) == 3


async def test_held_kv_when_the_engine_dies_then_the_request_ends() -> None:
    front = Front("prefill")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(prefilled())
        await task
        front.engine.die()
        front.reception.engine_died()
        record = (await front.records())[0]
    assert (record["code_name"], record["kv"]["cause"]) == ("NONE_ERROR", "engine_dead")
    assert len(front.reception.table) == 0


async def test_decode_when_the_engine_gives_no_result_with_the_load_then_it_fails_and_is_let_go() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(RequestOutput(REQUEST_KEY, loaded=True))
        error = error_of(await task)
    assert error.code is ErrorCode.UNKNOWN_ERROR
    assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.UNKNOWN_ERROR, "error")]
    assert front.metrics.value("baton_aborts_total", leg="decode", source="error") == 1


async def test_decode_when_the_reader_is_too_slow_then_it_gets_8102_after_what_it_had() -> None:
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request(local=True))
        await front.engine.until(lambda: front.engine.adds)
        for index in range(STREAM_CAPACITY + 1):  # all in one turn of the loop: nothing can be read meanwhile
            front.engine.emit(RequestOutput(REQUEST_KEY, tokens=[TokenOutput(index, 5)]))
        error = error_of(await task)
        record = (await front.records())[0]
    assert error.code is ErrorCode.OUTPUT_QUEUE_FULL
    assert record["generated_tokens"] == STREAM_CAPACITY
    assert front.engine.aborts[-1][0] == REQUEST_KEY


# -- cancel, abort, deadline ---------------------------------------------------------------------------------


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
        task = start(group, front, message, timeout=0.2)
        outcome = await task
        assert outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        record = (await front.records())[0]
    assert (record["code"], record["source"], record["abort_source"]) == (603, "context_error", "deadline")
    assert front.engine.aborts == [(REQUEST_KEY, ErrorCode.GENERATE_TIMEOUT, "deadline")]
    assert front.metrics.value("baton_aborts_total", leg=role, source="deadline") == 1


async def test_decode_when_a_call_without_a_deadline_lasts_too_long_then_it_is_8204_and_not_the_deadline() -> None:
    front = Front("decode", max_rpc_s=0.2)
    async with front.running(), asyncio.timeout(LIMIT_S):
        rpc = front.stub.Decode(decode_request(local=True))
        await front.engine.until(lambda: front.engine.adds)
        assert front.engine.adds[0].deadline_ns == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.read()
        record = (await front.records())[0]
    assert error_of(caught.value).code is ErrorCode.DEADLINE_EXCEEDED
    assert (record["code"], record["abort_source"]) == (8204, "deadline")


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
