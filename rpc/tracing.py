"""Traces of requests: which are recorded, and their spans.

A request's spans are made at its end, out of what its stage clocks have measured; until then only ids are drawn, for
the calls to other servers that carry them. So a request that is not recorded costs its two ids, and without a tracer
none of this is reached. How spans leave the process is rpc/trace_export.py.

Times are nanoseconds of this host's monotonic clock, which all its processes share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rpc.trace_context import TraceContext, new_span_id, new_trace_id

Kind = Literal["server", "client", "internal"]
Attribute = str | int | float | bool

_BITS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """`parent` is the id of the span that it is a part of, 0 for none. `error` is the name of a code, "" for none."""

    name: str
    context: TraceContext
    parent: int
    kind: Kind
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""


class Tracer:
    """Decides which requests are recorded. `export` takes finished spans and neither blocks nor raises.

    A caller's decision stands, whichever it was. Of requests without one `ratio` are recorded, by their trace id, so
    that every process of the trace comes to the same result.
    """

    def __init__(
        self,
        export: Callable[[Sequence[Span]], None],
        *,
        ratio: float = 1.0,
        close: Callable[[float], None] = lambda limit_s: None,
    ) -> None:
        self.export = export
        self._bound = round(ratio * 2**_BITS)
        self._close = close

    def begin(self, traceparent: str, tracestate: str = "") -> RequestTrace:
        """The trace of a request that came with these, or with none."""
        caller = TraceContext.read(traceparent, tracestate)
        if caller is not None:
            return RequestTrace(self, caller.child(), caller.span_id)
        trace_id = new_trace_id()
        sampled = trace_id & (2**_BITS - 1) < self._bound
        return RequestTrace(self, TraceContext(trace_id, new_span_id(), sampled), 0)

    def close(self, limit_s: float) -> None:
        """Delivers what waits, for `limit_s` at the most."""
        self._close(limit_s)


class RequestTrace:
    """What one process records of one request: a span of its own in the caller's trace, and those below it."""

    __slots__ = ("_parent", "_spans", "_tracer", "context")

    def __init__(self, tracer: Tracer, context: TraceContext, parent: int) -> None:
        self.context = context
        self._tracer = tracer
        self._parent = parent
        self._spans: list[Span] = []

    @property
    def sampled(self) -> bool:
        return self.context.sampled

    def add(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        *,
        kind: Kind = "internal",
        context: TraceContext | None = None,
        parent: int | None = None,
        attributes: Mapping[str, Attribute | None] | None = None,
        error: str = "",
    ) -> TraceContext:
        """Records a span below the request's own, or below `parent`; with `context` the one whose id went out."""
        context = context if context is not None else self.context.child()
        parent = self.context.span_id if parent is None else parent
        self._spans.append(
            Span(name, context, parent, kind, begin_ns, max(begin_ns, end_ns), _present(attributes), error)
        )
        return context

    def add_stages(self, role: str, intervals_ns: Mapping[str, tuple[int, int]]) -> dict[str, TraceContext]:
        """A span `role.stage` for each stage that was reached; returns them by stage."""
        return {stage: self.add(f"{role}.{stage}", begin, end) for stage, (begin, end) in intervals_ns.items()}

    def call(self, name: str, begin_ns: int, attributes: Mapping[str, Attribute | None]) -> CallSpan:
        """The span of a call that begins now; its context goes with the call."""
        return CallSpan(self, name, begin_ns, attributes)

    def finish(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        *,
        attributes: Mapping[str, Attribute | None] | None = None,
        error: str = "",
    ) -> None:
        """Records the request's own span and hands all of them over. To be called once."""
        own = Span(
            name, self.context, self._parent, "server", begin_ns, max(begin_ns, end_ns), _present(attributes), error
        )
        spans, self._spans = [own, *self._spans], []
        self._tracer.export(spans)


class CallSpan:
    """A call to another server while it is open: the other side knows its id from the start."""

    __slots__ = ("_attributes", "_begin_ns", "_ended", "_name", "_trace", "context")

    def __init__(
        self, trace: RequestTrace, name: str, begin_ns: int, attributes: Mapping[str, Attribute | None]
    ) -> None:
        self.context = trace.context.child()
        self._trace = trace
        self._name = name
        self._begin_ns = begin_ns
        self._attributes = attributes
        self._ended = False

    def finish(self, end_ns: int, *, error: str = "", cancelled: bool = False) -> None:
        """Records it; the first time counts. `cancelled`: the caller gave it up."""
        if self._ended:
            return
        self._ended = True
        attributes = {**self._attributes, "baton.cancelled": True} if cancelled else self._attributes
        self._trace.add(
            self._name,
            self._begin_ns,
            end_ns,
            kind="client",
            context=self.context,
            attributes=attributes,
            error=error,
        )


def _present(attributes: Mapping[str, Attribute | None] | None) -> dict[str, Attribute]:
    return {name: value for name, value in (attributes or {}).items() if value is not None and value != ""}


def to_ns(seconds: float) -> int:
    """A reading of the monotonic clock in seconds, in nanoseconds."""
    return int(seconds * 1e9)
