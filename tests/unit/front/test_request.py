"""The terminal cause of a request, its stages, and the table of open and finished requests."""

from __future__ import annotations

import itertools

import pytest

from engine.messages import (
    FinishReason,
    PrefillInfo,
    RequestOutput,
    RunMode,
    StagedEnd,
    TimelineEvent,
    TokenOutput,
)
from front.request import Request, RequestState, Source, classify
from front.request_table import FINISHED_KEPT, RequestTable
from rpc.errors import BatonError, ErrorCode
from rpc.stages import DECODE_STAGES, PREFILL_STAGES, in_stage
from tests.unit.front.wire_requests import REQUEST_KEY


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def failure(code: ErrorCode = ErrorCode.EXECUTION_EXCEPTION) -> BatonError:
    return BatonError(code, "first")


@pytest.mark.invariant("RPC-5")
@pytest.mark.parametrize(
    ("error", "finish", "cancelled", "source", "code"),
    [
        (None, FinishReason.STOP, False, Source.SUCCESS, ErrorCode.NONE_ERROR),
        (None, FinishReason.LENGTH, False, Source.SUCCESS, ErrorCode.NONE_ERROR),
        # The consumer left after the generation was done: nothing was cancelled.
        (None, FinishReason.STOP, True, Source.SUCCESS, ErrorCode.NONE_ERROR),
        (None, None, True, Source.CLIENT_CANCEL, ErrorCode.CANCELLED),
        (None, FinishReason.ABORT, False, Source.CLIENT_CANCEL, ErrorCode.CANCELLED),
        (None, None, False, Source.CONTEXT_CLEANUP, ErrorCode.CANCELLED),
        (failure(), None, False, Source.CONTEXT_ERROR, ErrorCode.EXECUTION_EXCEPTION),
        (failure(), None, True, Source.CONTEXT_ERROR, ErrorCode.EXECUTION_EXCEPTION),
        (failure(), FinishReason.STOP, True, Source.CONTEXT_ERROR, ErrorCode.EXECUTION_EXCEPTION),
        (failure(ErrorCode.CANCELLED), None, False, Source.CLIENT_CANCEL, ErrorCode.CANCELLED),
    ],
)
def test_classify_when_ends_meet_then_the_error_wins_and_then_the_finish(
    error: BatonError | None, finish: FinishReason | None, cancelled: bool, source: Source, code: ErrorCode
) -> None:
    terminal = classify(error, finish, cancelled)
    assert (terminal.source, terminal.code) == (source, code)
    assert (terminal.error is None) == (source is Source.SUCCESS)


@pytest.mark.invariant("RPC-5")
def test_end_when_further_causes_follow_in_any_order_then_the_first_stays() -> None:
    causes = [
        classify(failure(), None, False),
        classify(None, None, True),
        classify(failure(ErrorCode.GENERATE_TIMEOUT), None, False),
        classify(None, None, False),
    ]
    for order in itertools.permutations(causes):
        request = Request(RunMode.LOCAL, DECODE_STAGES)
        for terminal in order:
            assert request.end(terminal) is order[0]
        assert request.terminal is order[0]


def test_note_when_outputs_come_then_state_tokens_and_stages_follow() -> None:
    clock = Clock()
    request = Request(RunMode.DECODE, DECODE_STAGES, clock=clock)
    with in_stage(request.clock):
        clock.now += 0.5
    request.enter(RequestState.ENGINE)
    request.note(RequestOutput("k", reserved=True))
    assert request.state is RequestState.LOAD
    info = PrefillInfo(cached_tokens=3, cuda_graph_status="eager")
    request.note(RequestOutput("k", loaded=True, tokens=[TokenOutput(0, 5)], prefill=info))
    assert (request.state, request.cached_tokens) == (RequestState.GENERATE, 3)
    request.note(
        RequestOutput(
            "k",
            last=True,
            tokens=[TokenOutput(1, 6), TokenOutput(2, 7)],
            finish_reason=FinishReason.LENGTH,
            stages={"load": 0.25, "generate": 1.0},
            events=[TimelineEvent("load_complete", 5)],
        )
    )
    assert (request.generated_tokens, request.finish_reason) == (3, FinishReason.LENGTH)
    request.close()
    assert request.stages() == {"admit": 0.5, "load": 0.25, "generate": 1.0}
    assert request.page()["events"] == [{"name": "load_complete", "at_ns": 5}]
    assert request.page()["stage"] == "finish"


def test_stages_when_a_decode_server_computed_the_prompt_then_the_prefill_stages_are_in_the_timeline_only() -> None:
    request = Request(RunMode.LOCAL, DECODE_STAGES)
    request.note_stages({"queue": 0.1, "compute": 0.2, "generate": 0.3})
    assert request.stages() == {"queue": 0.1, "compute": 0.2, "generate": 0.3}
    assert request.clock.seconds() == {"generate": 0.3}


def test_note_staged_end_when_reported_twice_then_the_first_counts_once() -> None:
    request = Request(RunMode.PREFILL, PREFILL_STAGES)
    request.note_staged_end(StagedEnd("k", "released", publish_seconds=0.1, held_seconds=2.0))
    request.note_staged_end(StagedEnd("k", "expired", "never_loaded", publish_seconds=1.0, held_seconds=9.0))
    assert request.stages() == {"publish": 0.1, "held": 2.0}
    assert request.page()["kv"] == {
        "outcome": "released", "cause": "", "publish_seconds": 0.1, "held_seconds": 2.0,
    }  # fmt: skip


def opened(table: RequestTable, key: str = REQUEST_KEY) -> Request:
    request = Request(RunMode.LOCAL, DECODE_STAGES)
    table.arrive(request)
    table.open(request, key)
    return request


def refused(table: RequestTable, key: str = REQUEST_KEY) -> ErrorCode:
    with pytest.raises(BatonError) as caught:
        opened(table, key)
    return caught.value.code


def test_open_when_the_key_is_open_then_it_is_a_duplicate() -> None:
    table = RequestTable()
    opened(table)
    assert refused(table) is ErrorCode.DUPLICATE_REQUEST
    assert len(table) == 1


def test_open_when_the_key_was_served_then_it_is_a_duplicate_until_it_is_forgotten() -> None:
    clock = Clock()
    table = RequestTable(clock)
    table.leave(opened(table))
    assert refused(table) is ErrorCode.DUPLICATE_REQUEST
    clock.now += 61
    assert opened(table).request_key == REQUEST_KEY


def test_open_when_the_abort_came_first_then_the_request_is_refused_for_60_seconds() -> None:
    clock = Clock()
    table = RequestTable(clock)
    table.tombstones.add(REQUEST_KEY)
    clock.now += 59
    assert refused(table) is ErrorCode.REQUEST_TOMBSTONED
    clock.now += 2
    assert opened(table).request_key == REQUEST_KEY


def test_leave_when_called_twice_then_the_request_is_in_the_ring_once() -> None:
    table = RequestTable()
    request = opened(table)
    request.end(classify(None, FinishReason.STOP, False))
    table.leave(request)
    table.leave(request)
    page = table.page()
    assert (page["open"], len(page["finished"])) == ([], 1)
    assert page["finished"][0]["code_name"] == "NONE_ERROR"


def test_leave_when_a_duplicate_is_refused_then_the_open_request_stays_open() -> None:
    table = RequestTable()
    first = opened(table)
    second = Request(RunMode.LOCAL, DECODE_STAGES)
    second.request_key = REQUEST_KEY
    table.arrive(second)
    second.end(classify(failure(ErrorCode.DUPLICATE_REQUEST), None, False))
    table.leave(second)
    assert table.find(REQUEST_KEY) is first
    assert table.page()["finished"][0]["code_name"] == "DUPLICATE_REQUEST"


def test_page_when_more_than_a_thousand_ended_then_the_latest_thousand_are_shown_latest_first() -> None:
    table = RequestTable()
    for number in range(FINISHED_KEPT + 5):
        request = opened(table, f"r{number}#0.00000000")
        request.end(classify(None, FinishReason.STOP, False))
        table.leave(request)
    finished = table.page()["finished"]
    assert len(finished) == FINISHED_KEPT
    assert finished[0]["request_key"] == f"r{FINISHED_KEPT + 4}#0.00000000"


def test_page_when_a_request_is_open_then_it_says_for_whom_it_waits_and_since_when() -> None:
    clock = Clock()
    request = Request(RunMode.DECODE, DECODE_STAGES, peer="ipv4:1.2.3.4:5", clock=clock)
    request.waits_for = "10.0.0.1:50061"
    clock.now += 1
    request.enter(RequestState.LOAD)
    clock.now += 2.5
    page = request.page()
    assert page["state"] == "load"
    assert page["waits_for"] == "10.0.0.1:50061"
    assert (page["state_seconds"], page["age_seconds"]) == (2.5, 3.5)
    assert "code" not in page
