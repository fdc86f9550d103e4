"""A server's spans of one request, out of what its front and its engine have measured."""

from __future__ import annotations

from engine.messages import LoadTime, RequestOutput, RunMode, StagedEnd, TimelineEvent
from front.request import Request
from front.traces import write_trace
from rpc.errors import BatonError, ErrorCode
from rpc.stages import DECODE_STAGES, PREFILL_STAGES, in_stage
from rpc.terminal import Source, Terminal
from rpc.trace_context import TraceContext
from rpc.tracing import Span, Tracer

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LOAD = "00-4bf92f3577b34da6a3ce929d0e0e4736-1111111111111111-01"
S = 1_000_000_000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(mode: RunMode, spans: list[Span]) -> tuple[Request, Clock]:
    """A request that arrived at 100 s and was admitted at 101 s."""
    clock = Clock()
    request = Request(mode, PREFILL_STAGES if mode is RunMode.PREFILL else DECODE_STAGES, clock=clock)
    request.trace = Tracer(spans.extend).begin(PARENT)
    request.clock.keep_intervals()
    with in_stage(request.clock):
        clock.now = 101.0
    request.request_id, request.request_key, request.waits_for = "id", "id#0.1", "p:1"
    return request, clock


def written(request: Request, clock: Clock, spans: list[Span], role: str, error: BatonError | None = None) -> dict:
    source = Source.SUCCESS if error is None else Source.CONTEXT_ERROR
    request.end(Terminal(source, error))
    clock.now = 110.0
    request.close()
    write_trace(request, role, "d:2")
    by_name = {span.name: span for span in spans}
    assert len(by_name) == len(spans)
    return by_name


def test_decode_request_when_its_kv_was_loaded_then_the_load_is_below_its_stage_and_has_the_id_that_went_out() -> None:
    spans: list[Span] = []
    request, clock = make(RunMode.DECODE, spans)
    assert request.trace is not None
    context = request.load_context = request.trace.context.child()
    request.note(
        RequestOutput(
            "id#0.1",
            last=True,
            stages={"load": 2.0, "generate": 3.0},
            stage_times={"load": (102 * S, 104 * S), "generate": (104 * S, 107 * S)},
            events=[TimelineEvent("load_started", 102 * S + 5), TimelineEvent("load_complete", 104 * S - 5)],
        )
    )
    found = written(request, clock, spans, "decode")
    assert set(found) == {"decode.request", "decode.admit", "decode.load", "decode.generate", "cache_store.load"}
    own, load = found["decode.request"], found["cache_store.load"]
    assert (own.begin_ns, own.end_ns, own.kind, own.parent) == (100 * S, 110 * S, "server", 0x00F067AA0BA902B7)
    assert (found["decode.admit"].begin_ns, found["decode.admit"].end_ns) == (100 * S, 101 * S)
    assert (found["decode.generate"].begin_ns, found["decode.generate"].end_ns) == (104 * S, 107 * S)
    assert {found[name].parent for name in found if name.startswith("decode.") and name != "decode.request"} == {
        own.context.span_id
    }
    assert (load.context, load.kind, load.parent) == (context, "client", found["decode.load"].context.span_id)
    assert (load.begin_ns, load.end_ns, load.error) == (102 * S + 5, 104 * S - 5, "")
    assert own.attributes["baton.kv_source"] == "p:1"


def test_decode_request_when_its_load_failed_then_the_load_and_the_request_have_an_error() -> None:
    spans: list[Span] = []
    request, clock = make(RunMode.DECODE, spans)
    assert request.trace is not None
    request.load_context = request.trace.context.child()
    started = [TimelineEvent("load_started", 102 * S)]
    request.note(RequestOutput("id#0.1", last=True, stage_times={"load": (102 * S, 104 * S)}, events=started))
    found = written(request, clock, spans, "decode", BatonError(ErrorCode.LOAD_KV_CACHE_FAILED))
    assert found["cache_store.load"].error == found["decode.request"].error == "LOAD_KV_CACHE_FAILED"
    assert found["cache_store.load"].end_ns == 104 * S


def test_prefill_request_when_its_kv_was_loaded_then_publish_held_and_the_callers_load_are_there() -> None:
    spans: list[Span] = []
    request, clock = make(RunMode.PREFILL, spans)
    request.note(RequestOutput("id#0.1", last=True, stage_times={"compute": (102 * S, 103 * S)}))
    request.answered_at = 103.5
    ended = [TimelineEvent("computed", 103 * S), TimelineEvent("lease_ended", 106 * S)]
    loads = [LoadTime(LOAD, 102 * S, 105 * S), LoadTime(LOAD[:-2] + "00", 0, 1), LoadTime("nonsense", 0, 1)]
    request.note_staged_end(StagedEnd("id#0.1", "released", "", 0.5, 3.0, ended, loads))
    found = written(request, clock, spans, "prefill")
    stages = {"prefill.admit", "prefill.compute", "prefill.publish", "prefill.held"}
    assert set(found) == {"prefill.request", "cache_store.send", *stages}
    assert found["prefill.request"].end_ns == int(103.5 * S), "the call ended with the answer"
    assert (found["prefill.publish"].begin_ns, found["prefill.publish"].end_ns) == (103 * S, int(103.5 * S))
    assert (found["prefill.held"].begin_ns, found["prefill.held"].end_ns) == (103 * S, 106 * S)
    assert found["prefill.held"].attributes == {"baton.kv_outcome": "released"}
    send, caller = found["cache_store.send"], TraceContext.read(LOAD)
    assert caller is not None
    assert (send.parent, send.context.trace_id, send.kind) == (caller.span_id, caller.trace_id, "server")
    assert (send.begin_ns, send.end_ns) == (102 * S, 105 * S)


def test_colocated_request_when_it_ends_then_stages_of_both_roles_are_there_and_no_load() -> None:
    spans: list[Span] = []
    request, clock = make(RunMode.LOCAL, spans)
    times = {"queue": (101 * S, 102 * S), "compute": (102 * S, 103 * S), "generate": (103 * S, 109 * S)}
    request.note(RequestOutput("id#0.1", last=True, stage_times=times))
    found = written(request, clock, spans, "decode")
    assert set(found) == {
        "decode.request", "decode.admit", "decode.queue", "decode.compute", "decode.generate",
    }  # fmt: skip
    assert found["decode.request"].attributes["baton.path"] == "colocated"


def test_request_when_it_is_not_traced_then_nothing_is_written() -> None:
    spans: list[Span] = []
    request, clock = make(RunMode.DECODE, spans)
    request.trace = None
    assert written(request, clock, spans, "decode") == {}
