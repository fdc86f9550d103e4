"""W3C trace context of a client, as far as it can be passed on to the servers."""

from __future__ import annotations

import re

# A later version may have more after the flags; https://www.w3.org/TR/trace-context/ asks to take the known part.
_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,200})?", re.ASCII
)
_STATE = re.compile(r"[ -~]{1,512}", re.ASCII)


def trace_context(traceparent: str, tracestate: str) -> tuple[str, str]:
    """`traceparent` and `tracestate` to pass on; "" for one that there is not.

    What is not well-formed is dropped and never an error: it comes from whatever stands before the router. As metadata
    of a call to a server it would be refused, and the request with it.
    """
    if _PARENT.fullmatch(traceparent) is None:
        return "", ""
    return traceparent, tracestate if _STATE.fullmatch(tracestate) is not None else ""
