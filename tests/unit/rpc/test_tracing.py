"""Which requests are traced, what their spans are, and what tracing costs those that are not."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rpc import trace_export
from rpc.server_settings import CommonSettings
from rpc.settings import SettingsError
from rpc.stages import StageClock
from rpc.trace_context import TraceContext
from rpc.trace_export import QUEUE_SPANS, open_tracer
from rpc.tracing import Span, Tracer, to_ns
from tests.integration.trace_collector import running_collector

ROOT = Path(__file__).resolve().parents[3]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Exported(list[Span]):
    def tracer(self, ratio: float = 1.0) -> Tracer:
        return Tracer(self.extend, ratio=ratio)


# -- context


def test_context_when_written_then_it_reads_back_the_same() -> None:
    context = TraceContext.read(PARENT, "a=b")
    assert context is not None
    assert (context.traceparent, context.tracestate, context.sampled) == (PARENT, "a=b", True)
    assert context.metadata() == (("traceparent", PARENT), ("tracestate", "a=b"))
    child = context.child()
    assert (child.trace_id, child.sampled, child.tracestate) == (context.trace_id, True, "a=b")
    assert child.span_id != context.span_id


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
def test_sampled_flag_when_read_then_only_its_bit_counts(flags: str, sampled: bool) -> None:
    context = TraceContext.read(PARENT[:-2] + flags)
    assert context is not None
    assert context.sampled is sampled


def test_context_when_of_a_later_version_then_its_known_part_is_taken() -> None:
    context = TraceContext.read("cc" + PARENT[2:] + "-more")
    assert context is not None
    assert context.traceparent == PARENT


@pytest.mark.parametrize("text", ["", "nonsense", PARENT[:-1], PARENT.upper()])
def test_context_when_malformed_then_there_is_none(text: str) -> None:
    assert TraceContext.read(text) is None


# -- decisions


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("flag", ["00", "01"])
def test_caller_that_has_decided_when_a_request_begins_then_that_stands_whatever_the_ratio(
    ratio: float, flag: str
) -> None:
    trace = Exported().tracer(ratio).begin(PARENT[:-2] + flag)
    assert trace.sampled is (flag == "01")
    assert f"{trace.context.trace_id:032x}" == PARENT.split("-")[1]


def test_ratio_when_many_requests_come_without_a_caller_then_that_share_is_recorded() -> None:
    for ratio in (0.0, 0.25, 1.0):
        tracer = Exported().tracer(ratio)
        found = sum(tracer.begin("").sampled for _ in range(4000)) / 4000
        assert found == pytest.approx(ratio, abs=0.04)
        assert ratio not in (0.0, 1.0) or found == ratio


def test_trace_ids_when_requests_begin_without_a_caller_then_each_has_its_own() -> None:
    tracer = Exported().tracer(0.0)
    traces = [tracer.begin("bad") for _ in range(1000)]
    assert len({trace.context.trace_id for trace in traces}) == 1000
    assert traces[0].context.traceparent.endswith("-00"), "the servers are told not to record it either"


# -- spans


def test_spans_when_a_request_ends_then_stages_and_calls_are_below_its_own_which_is_below_the_callers() -> None:
    exported = Exported()
    trace = exported.tracer().begin(PARENT)
    call = trace.call("router.decode", 20, {"server.address": "d:1", "nothing": None})
    stages = trace.add_stages("router", {"queue": (10, 20), "stream": (20, 50)})
    trace.add("inner", 21, 22, parent=stages["stream"].span_id)
    call.finish(40, error="MALLOC_FAILED")
    call.finish(45)
    given_up = trace.call("router.prefill", 20, {})
    given_up.finish(15, cancelled=True)
    assert not exported, "nothing leaves before the end"
    trace.finish("router.request", 5, 60, attributes={"baton.path": None, "n": 0, "empty": ""}, error="MALLOC_FAILED")
    spans = {span.name: span for span in exported}
    own = spans["router.request"]
    assert (own.parent, own.kind, own.begin_ns, own.end_ns) == (int("00f067aa0ba902b7", 16), "server", 5, 60)
    assert own.attributes == {"n": 0}
    assert own.error == "MALLOC_FAILED"
    for name in ("router.queue", "router.stream", "router.decode", "router.prefill"):
        assert spans[name].parent == own.context.span_id
    assert spans["inner"].parent == spans["router.stream"].context.span_id
    decode = spans["router.decode"]
    assert (decode.context, decode.kind, decode.end_ns) == (call.context, "client", 40)
    assert (decode.attributes, decode.error) == ({"server.address": "d:1"}, "MALLOC_FAILED")
    assert spans["router.prefill"].attributes == {"baton.cancelled": True}
    assert spans["router.prefill"].end_ns == 20, "never before its begin"
    assert len({span.context.span_id for span in exported}) == len(exported) == 6


def test_intervals_when_kept_then_a_stage_has_its_first_begin_and_last_end() -> None:
    now = 100.0
    clock = StageClock(("a", "b", "c"), lambda: now)
    clock.keep_intervals()
    for step in (1.0, 2.0):
        clock.next_stage()
        now += step
    clock.restore_stage()  # b again, after a pause
    now += 5.0
    clock.next_stage()
    now += 3.0
    clock.finish()
    assert clock.intervals() == {"a": (100.0, 101.0), "b": (101.0, 111.0)}
    assert clock.seconds() == {"a": 1.0, "b": 5.0}


def test_intervals_when_not_asked_for_then_none_are_kept() -> None:
    clock = StageClock(("a",))
    clock.next_stage()
    clock.finish()
    assert clock.intervals() == {}


# -- on and off


def test_tracing_when_off_then_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, router.server, front.server, rpc.trace_export;"
        "from rpc.server_settings import CommonSettings;"
        "assert CommonSettings().open_tracer('router') is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tracing_when_its_packages_are_missing_then_the_start_ends_with_a_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    settings = CommonSettings(otlp_traces_endpoint="http://127.0.0.1:4317")
    with pytest.raises(SystemExit) as caught:
        settings.open_tracer("decode")
    assert str(caught.value) == (
        "decode_server: error: --otlp-traces-endpoint needs packages that are not installed; "
        "install Baton with its extra tracing (pip install '.[tracing]')"
    )


@pytest.mark.parametrize(
    ("flags", "fine"),
    [
        (["--otlp-traces-endpoint", "http://collector:4317"], True),
        (["--otlp-traces-endpoint", "https://collector"], True),
        (["--otlp-traces-endpoint", "http://[::1]:4317/"], True),
        (["--otlp-traces-endpoint", "collector:4317"], False),
        (["--otlp-traces-endpoint", "http://collector:4317/v1/traces"], False),
        (["--tracing-sample-ratio", "0.5"], True),
        (["--tracing-sample-ratio", "1.5"], False),
        (["--tracing-sample-ratio", "-0.1"], False),
    ],
)
def test_settings_when_given_then_a_wrong_one_is_named(flags: list[str], fine: bool) -> None:
    if fine:
        CommonSettings.parse(flags, {})
    else:
        with pytest.raises(SettingsError, match=flags[0]):
            CommonSettings.parse(flags, {})


# -- the way out


def request_spans(tracer: Tracer, count: int) -> None:
    for number in range(count):
        trace = tracer.begin(PARENT)
        trace.add("router.queue", to_ns(time.monotonic()), to_ns(time.monotonic()))
        trace.finish("router.request", number, number + 1, attributes={"number": number}, error="X" if number else "")


def test_close_when_spans_wait_then_they_are_delivered_with_kind_status_and_time_of_day() -> None:
    with running_collector() as collector:
        tracer = open_tracer(collector.address, 1.0, service="baton-router", role="router")
        request_spans(tracer, 2)
        tracer.close(10)
        first, second = [span for span in collector.spans() if span.name == "router.request"]
        [stage, _] = [span for span in collector.spans() if span.name == "router.queue"]
    if first.attributes["number"] != 0:
        first, second = second, first
    assert (first.trace_id, first.parent_id, first.kind) == (*PARENT.split("-")[1:3], "server")
    assert (first.error, second.error, second.attributes["error.type"]) == ("", "X", "X")
    assert abs(stage.begin_ns - time.time_ns()) < 60e9
    assert stage.parent_id in (first.span_id, second.span_id)
    assert first.service == "baton-router"


def test_collector_that_is_away_when_spans_come_then_the_caller_does_not_wait_and_memory_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        tracer = open_tracer("http://127.0.0.1:9", 1.0, service="baton-router", role="router")
        began = time.monotonic()
        request_spans(tracer, QUEUE_SPANS)  # twice as many spans as there is room for
        assert time.monotonic() - began < 10
        began = time.monotonic()
        tracer.close(0.5)
        assert time.monotonic() - began < 5
    assert {record.levelname for record in caplog.records} <= {"WARNING"}
    assert len(caplog.records) < 20


def test_exporter_that_raises_when_spans_come_then_nobody_hears_of_it_but_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    def fail(self: object, spans: Sequence[object]) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(OTLPSpanExporter, "export", fail)
    monkeypatch.setattr(trace_export, "DELAY_MS", 60_000)  # the close alone delivers, both spans together
    tracer = open_tracer("http://127.0.0.1:9", 1.0, service="baton-router", role="router")
    request_spans(tracer, 1)
    tracer.close(5)
    assert "2 spans could not be delivered, failure 1: RuntimeError('defect')" in caplog.text
