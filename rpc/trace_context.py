"""W3C trace context (https://www.w3.org/TR/trace-context/): what is passed on from a client to the servers."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

# A later version may have more after the flags; the specification asks to take the known part.
_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,200})?", re.ASCII
)
_STATE = re.compile(r"[ -~]{1,512}", re.ASCII)
_SAMPLED = 0x01
# Ids need to be unlike those of other processes, not unguessable.
_random = random.Random()


def trace_context(traceparent: str, tracestate: str) -> tuple[str, str]:
    """`traceparent` and `tracestate` to pass on; "" for one that there is not.

    What is not well-formed is dropped and never an error: it comes from whatever stands before the router. As metadata
    of a call to a server it would be refused, and the request with it.
    """
    if _PARENT.fullmatch(traceparent) is None:
        return "", ""
    return traceparent, tracestate if _STATE.fullmatch(tracestate) is not None else ""


def new_trace_id() -> int:
    return _random.getrandbits(128) or 1


def new_span_id() -> int:
    return _random.getrandbits(64) or 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place in its trace. `sampled`: whether the trace is recorded, which whoever began it has decided."""

    trace_id: int
    span_id: int
    sampled: bool
    tracestate: str = ""

    @classmethod
    def read(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """The caller's span; None when the text is not well-formed."""
        traceparent, tracestate = trace_context(traceparent, tracestate)
        if not traceparent:
            return None
        _, trace_id, span_id, flags = traceparent.split("-", 4)[:4]
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED), tracestate)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.sampled, self.tracestate)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """As metadata of a call."""
        state = (("tracestate", self.tracestate),) if self.tracestate else ()
        return (("traceparent", self.traceparent), *state)
