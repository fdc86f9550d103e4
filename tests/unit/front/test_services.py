"""The life of a request on a front: every way in, every way out, one terminal record each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.client import STREAM_CAPACITY
from engine.messages import EngineError, FinishReason, RequestOutput, RunMode, TokenOutput
from protos import common_pb2, decode_pb2, prefill_pb2
from rpc.errors import BatonError, ErrorCode
from tests.unit.front.scripted_engine import (
    ENGINE_ID,
    LIMIT_S,
    Front,
    failed,
    finished,
    first_token,
    prefilled,
)
from tests.unit.front.service_calls import decode_request, error_of, prefill_request, refusal, start
from tests.unit.front.wire_requests import REQUEST_ID, REQUEST_KEY, generate_input, sampling
from tests.unit.rpc.waiting import until

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


async def test_decode_when_it_computes_the_prompt_after_a_failed_load_then_the_result_comes_with_the_first_token() -> (
    None
):
    front = Front("decode")
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, decode_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(RequestOutput(REQUEST_KEY, reserved=True))
        front.engine.emit(first_token())
        front.engine.emit(finished(tokens=[TokenOutput(1, 9)]))
        events = await task
    assert [event.WhichOneof("event") for event in events] == ["reserved", "tokens", "tokens", "finished"]
    assert events[1].tokens.prefill.cached_tokens == 2
    assert not events[2].tokens.HasField("prefill")


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
        labels = {"method": _method(role), "code": seen.name}
        # A call is booked when it has ended here; its status may be there before.
        await until(lambda: front.metrics.value("baton_rpc_requests_total", **labels) == 1)
    assert (error.code, error.stage, error.message) == (seen, "allocate", "it failed")
    assert error.metadata["request_id"] == REQUEST_ID  # although no metadata of the call named it
    assert (record["code"], record["source"]) == (int(seen), "context_error")


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


@pytest.mark.invariant("RPC-10")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_request_when_the_engine_fails_it_without_a_code_then_it_is_514_named_so(role: Any) -> None:
    front = Front(role)
    async with front.running(), asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = start(group, front, prefill_request() if role == "prefill" else decode_request())
        await front.engine.until(lambda: front.engine.adds)
        front.engine.emit(RequestOutput(REQUEST_KEY, last=True, error=EngineError(0, "")))
        error = error_of(await task)
        (record,) = await front.records()
    # The server's own defect: no peer broke a contract, and never is it a success.
    assert (error.code, error.message) == (ErrorCode.UNKNOWN_ERROR, "UNKNOWN_ERROR")
    assert (record["code"], record["source"]) == (514, "context_error")
    assert front.metrics.value("baton_contract_breaches_total", kind="no_code") is None


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
