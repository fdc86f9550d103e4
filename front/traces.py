"""The spans of one request on this server, out of what its stage clocks and those of its engine have measured."""

from __future__ import annotations

from engine.messages import RunMode, StagedEnd
from front.request import Request
from rpc.errors import ErrorCode
from rpc.trace_context import TraceContext
from rpc.tracing import RequestTrace, to_ns


def write_trace(request: Request, role: str, address: str) -> None:
    """Hands over the spans of a request that has ended; `address` is this server's own."""
    trace, terminal = request.trace, request.terminal
    if trace is None or terminal is None:
        return
    own = {stage: (to_ns(begin), to_ns(end)) for stage, (begin, end) in request.clock.intervals().items()}
    stages = trace.add_stages(role, {**own, **request.stage_times})
    error = "" if terminal.error is None else terminal.error.code.name
    if request.load_context is not None and "load" in stages:
        _add_load(request, trace, request.load_context, stages["load"])
    if request.staged_end is not None:
        _add_staged(request, trace, request.staged_end, role)
    ended = request.answered_at if request.answered_at is not None else request.ended_at
    trace.finish(
        f"{role}.request",
        request.arrival_ns,
        to_ns(ended) if ended is not None else request.arrival_ns,
        attributes={
            "baton.request_id": request.request_id,
            "baton.request_key": request.request_key,
            "baton.attempt": request.attempt,
            "baton.code": terminal.code.name if terminal.error is not None else ErrorCode.NONE_ERROR.name,
            "baton.path": "colocated" if request.mode is RunMode.LOCAL else "pd",
            "baton.kv_source": request.waits_for,
            "baton.prefill_cuda_graph_status": request.graph_status.value,
            "server.address": address,
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": request.generated_tokens,
            "baton.cached_tokens": request.cached_tokens,
        },
        error=error,
    )


def _add_load(request: Request, trace: RequestTrace, context: TraceContext, stage: TraceContext) -> None:
    """The call with which the KV came, below the stage `load`: its id went to the prefill server's cache store."""
    begin, end = request.stage_times["load"]
    at = {event.name: event.at_ns for event in request.events}
    failed = "load_complete" not in at
    trace.add(
        "cache_store.load",
        at.get("load_started", begin),
        at.get("load_complete", end),
        kind="client",
        context=context,
        parent=stage.span_id,
        attributes={"baton.kv_source": request.waits_for, "baton.request_key": request.request_key},
        error=ErrorCode.LOAD_KV_CACHE_FAILED.name if failed else "",
    )


def _add_staged(request: Request, trace: RequestTrace, end: StagedEnd, role: str) -> None:
    """What became of the staged KV after the answer, and each load of it as a span of the decode server's."""
    at = {event.name: event.at_ns for event in end.events}
    computed = at.get("computed")
    if computed is not None:
        trace.add(f"{role}.publish", computed, computed + to_ns(end.publish_seconds))
        held = {"baton.kv_outcome": end.outcome, "baton.kv_cause": end.cause}
        trace.add(f"{role}.held", computed, computed + to_ns(end.held_seconds), attributes=held)
    for load in end.load_times:
        caller = TraceContext.read(load.traceparent)
        if caller is not None and caller.sampled:
            trace.add(
                "cache_store.send",
                load.begin_ns,
                load.end_ns,
                kind="server",
                context=caller.child(),
                parent=caller.span_id,
                attributes={"baton.request_key": request.request_key},
            )
