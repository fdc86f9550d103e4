"""Accounting of client requests on a fake clock: every figure exact."""

from __future__ import annotations

import pytest

from router.open_requests import OpenRequests
from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry
from rpc.stages import in_stage
from rpc.tombstones import Tombstones


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lines(list):
    def arrived(self, **fields: object) -> None:
        self.arrivals = [*getattr(self, "arrivals", ()), fields]

    def record(self, **fields: object) -> None:
        self.append(fields)


def make() -> tuple[OpenRequests, Clock, Registry, Lines]:
    clock, lines = Clock(), Lines()
    metrics = Registry("router", process_metrics=False)
    table = OpenRequests(
        metrics,
        request_timeout_s=60,
        served_names=lambda: ("tiny",),
        access_log=lines,
        tombstones=Tombstones(clock=clock),
        clock=clock,
    )
    return table, clock, metrics, lines


LABELS = {"model_name": "tiny", "path": "pd"}


def test_m1_m2_latencies_when_chunks_are_written_then_sums_and_counts_are_exact():
    table, clock, metrics, _ = make()
    with table.open("a", api="chat", model="tiny", stream=True) as request:
        request.path, request.prompt_tokens = "pd", 30
        clock.now += 0.2
        request.tokens_written(3)  # the first chunk
        for size in (1, 4):
            clock.now += 0.08
            request.tokens_written(size)
        request.tokens_written(0)  # held-back text is no token
        request.finish("length")
    value = metrics.value
    assert value("baton_time_to_first_token_seconds_sum", **LABELS) == pytest.approx(0.2)
    assert value("baton_time_to_first_token_seconds_count", **LABELS) == 1
    assert value("baton_inter_token_latency_seconds_count", **LABELS) == 5
    assert value("baton_inter_token_latency_seconds_sum", **LABELS) == pytest.approx(0.08 + 4 * 0.02)
    assert value("baton_time_per_output_token_seconds_sum", **LABELS) == pytest.approx(0.16 / 7)
    assert value("baton_e2e_request_latency_seconds_sum", **LABELS) == pytest.approx(0.36)
    assert value("baton_request_generation_tokens_sum", model_name="tiny") == 8
    assert value("baton_generation_tokens_total", model_name="tiny") == 8
    assert value("baton_prompt_tokens_total", model_name="tiny") == 30
    assert value("baton_cached_prompt_tokens_total", model_name="tiny") == 0  # a measured 0


def test_m1_latencies_when_each_part_takes_its_time_then_sum_count_and_bucket_are_exact():
    """Queue 30 ms, prefill 120 ms, 40 ms a token; nearly, for the sums to be exact: 1/32, 1/8 and 3/64 s."""
    table, clock, metrics, _ = make()
    queue, prefill, gap, tokens = 1 / 32, 1 / 8, 3 / 64, 9
    for _ in range(2):
        with table.open("a", api="chat", model="tiny", stream=True) as request:
            request.path, request.prompt_tokens = "pd", 30
            for stage, seconds in (("validate", 0.0), ("tokenize", 0.0), ("queue", queue), ("choose", 0.0)):
                with in_stage(request.clock):
                    assert request.clock.stage == stage
                    clock.now += seconds
            with in_stage(request.clock):
                clock.now += prefill
                request.tokens_written(1)
            with in_stage(request.clock):
                for _ in range(tokens - 1):
                    clock.now += gap
                    request.tokens_written(1)
                request.finish("length")
    figures = {
        "time_to_first_token": (2, 2 * (queue + prefill), ("0.1", "0.25")),
        "inter_token_latency": (2 * (tokens - 1), 2 * (tokens - 1) * gap, ("0.04", "0.05")),
        "time_per_output_token": (2, 2 * gap, ("0.04", "0.05")),
        "e2e_request_latency": (2, 2 * (queue + prefill + (tokens - 1) * gap), ("0.5", "1.0")),
    }
    for name, (count, total, (below, upper)) in figures.items():
        family = f"baton_{name}_seconds"
        assert metrics.value(f"{family}_count", **LABELS) == count, name
        assert metrics.value(f"{family}_sum", **LABELS) == total, name
        assert metrics.value(f"{family}_bucket", le=below, **LABELS) == 0, name
        assert metrics.value(f"{family}_bucket", le=upper, **LABELS) == count, name
    stages = {"validate": 0.0, "queue": queue, "first_token": prefill, "stream": (tokens - 1) * gap}
    for stage, seconds in stages.items():
        assert metrics.value("baton_stage_seconds_sum", stage=stage) == 2 * seconds, stage
        assert metrics.value("baton_stage_seconds_count", stage=stage) == 2, stage


@pytest.mark.invariant("RPC-6")
def test_open_when_the_body_raises_then_the_request_failed_with_it():
    table, _, metrics, lines = make()
    with pytest.raises(BatonError), table.open("a", api="completions", model="tiny"):
        raise BatonError(ErrorCode.INVALID_PARAMS, "temperature must be in [0, 2], got 3")
    labels = {"model_name": "tiny", "api": "completions"}
    assert metrics.value("baton_requests_total", **labels, stream="false", outcome="error") == 1
    failed = metrics.value("baton_request_errors_total", **labels, code="INVALID_PARAMS", phase="before_first_token")
    assert failed == 1
    assert (lines[0]["code"], lines[0]["outcome"], lines[0]["phase"]) == (
        "INVALID_PARAMS",
        "error",
        "before_first_token",
    )
    assert len(table) == 0


@pytest.mark.invariant("RPC-6")
def test_open_when_something_unexpected_is_raised_then_it_is_514():
    table, _, _, lines = make()
    with pytest.raises(KeyError), table.open("a", api="completions", model="tiny"):
        raise KeyError("x")
    assert lines[0]["code"] == "UNKNOWN_ERROR"


def test_open_when_the_body_ends_without_a_word_then_the_client_has_gone():
    table, _, metrics, lines = make()
    with table.open("a", api="chat", model="tiny") as request:
        request.path = "pd"
        request.tokens_written(1)
    assert lines[0]["code"] == "CANCELLED"
    assert metrics.value("baton_aborts_total", leg="router", source="client") == 1
    error = {"model_name": "tiny", "api": "chat", "code": "CANCELLED", "phase": "mid_stream"}
    assert metrics.value("baton_request_errors_total", **error) == 1
    assert metrics.value("baton_e2e_request_latency_seconds_count", **LABELS) is None


def test_open_when_the_deadline_has_passed_then_leaving_is_a_timeout():
    table, clock, metrics, lines = make()
    with table.open("a", api="grpc", model="tiny", deadline=Deadline.after(5, clock)):
        clock.now += 5
    assert lines[0]["code"] == "GENERATE_TIMEOUT"
    assert metrics.value("baton_aborts_total", leg="router", source="deadline") == 1


@pytest.mark.invariant("RPC-5")
def test_fail_when_an_error_is_set_then_a_later_one_does_not_replace_it():
    table, _, _, lines = make()
    with table.open("a", api="chat", model="tiny") as request:
        request.fail(BatonError(ErrorCode.EXECUTION_EXCEPTION))
        request.fail(BatonError(ErrorCode.CANCELLED))
        request.finish("stop")
    assert lines[0]["code"] == "EXECUTION_EXCEPTION"


@pytest.mark.parametrize("request_id", ["", "a#b", "ä", "x" * 129, "a b"])
def test_open_when_the_id_is_none_then_605(request_id):
    table, _, _, _ = make()
    with pytest.raises(BatonError) as caught:
        table.open(request_id, api="chat")
    assert caught.value.code is ErrorCode.INVALID_PARAMS


def test_open_when_the_id_is_open_then_8607_and_after_its_end_it_may_be_used_again():
    table, _, metrics, _ = make()
    with table.open("a", api="chat", model="tiny") as request:
        with pytest.raises(BatonError) as caught:
            table.open("a", api="chat", model="tiny")
        assert caught.value.code is ErrorCode.DUPLICATE_REQUEST
        assert len(table) == 1
        request.finish("stop")
    with table.open("a", api="chat", model="tiny") as request:
        request.finish("stop")
    labels = {"model_name": "tiny", "api": "chat", "stream": "false"}
    assert metrics.value("baton_requests_total", **labels, outcome="stop") == 2
    assert metrics.value("baton_requests_total", **labels, outcome="error") == 1


def test_open_when_the_answer_is_on_its_way_to_the_client_then_the_id_may_be_used_again():
    table, _, metrics, lines = make()
    with table.open("a", api="chat", model="tiny") as first:
        first.finish("stop")
        with table.open("a", api="chat", model="tiny") as second:
            assert len(table) == 1
            assert table.abort("a")
            assert second.stopped is not None
            assert first.stopped is None
    assert len(table) == 0
    assert [line["code"] for line in lines] == ["CANCELLED", "NONE_ERROR"]
    assert metrics.value("baton_requests_total", model_name="tiny", api="chat", stream="false", outcome="stop") == 1


def test_abort_when_the_id_is_unknown_then_it_is_refused_for_a_while():
    table, clock, _, _ = make()
    assert not table.abort("a")
    for seconds in (0, 59.9):
        clock.now += seconds
        with pytest.raises(BatonError) as caught:
            table.open("a", api="chat")
        assert caught.value.code is ErrorCode.REQUEST_TOMBSTONED
    clock.now += 0.2
    with table.open("a", api="chat") as request:
        request.finish("stop")


def test_stop_when_it_comes_before_somebody_listens_then_it_is_told_at_once_and_once():
    table, _, _, _ = make()
    heard: list[BatonError] = []
    with table.open("a", api="chat") as request:
        forget = request.on_stop(heard.append)
        request.on_stop(heard.append)
        forget()
        assert table.abort("a")
        assert table.abort("a")
        request.on_stop(heard.append)
        request.finish("abort")
    assert [e.code for e in heard] == [ErrorCode.CANCELLED] * 2


def test_refuse_new_when_the_router_drains_then_open_requests_go_on():
    table, _, _, _ = make()
    with table.open("a", api="chat") as request:
        table.refuse_new(BatonError(ErrorCode.SERVER_DRAINING, retry_after_s=1))
        with pytest.raises(BatonError) as caught:
            table.open("b", api="chat")
        assert (caught.value.code, caught.value.retry_after_s) == (ErrorCode.SERVER_DRAINING, 1)
        assert table.work.count == 1
        request.finish("stop")
    assert table.work.count == 0


def test_labels_when_the_client_names_a_model_that_is_not_served_then_the_label_is_other():
    table, _, metrics, _ = make()
    with pytest.raises(BatonError), table.open("a", api="chat", model="secret-name"):
        raise BatonError(ErrorCode.MODEL_NOT_FOUND)
    assert metrics.value("baton_requests_total", model_name="other", api="chat", stream="false", outcome="error") == 1
    assert "secret-name" not in metrics.render().decode()


def test_take_clock_when_there_are_several_choices_then_each_has_one_and_the_first_has_the_requests():
    table, _, metrics, _ = make()
    with table.open("a", api="chat", model="tiny") as request:
        for _ in range(2):
            with in_stage(request.clock):
                pass
        first, second = request.take_clock(), request.take_clock()
        assert first is request.clock
        assert second is not first
        assert (first.next_stage(), second.next_stage()) == ("queue", "queue")
        request.finish("stop")
    assert metrics.value("baton_stage_seconds_count", stage="tokenize") == 1
    assert metrics.value("baton_stage_seconds_count", stage="queue") == 1


def test_take_clock_when_the_surface_did_nothing_then_its_stages_are_absent():
    table, _, metrics, _ = make()
    with table.open("a", api="chat", model="tiny") as request:
        assert request.take_clock().next_stage() == "queue"
        request.finish("stop")
    assert metrics.value("baton_stage_seconds_count", stage="validate") is None
