"""A request's timeline on demand: seconds per stage, as text in metadata and in an HTTP header.

Whoever sends `x-baton-timeline: 1` gets the same key back: as trailing metadata of a gRPC call, as a header of an HTTP
response that is not a stream. It is a JSON object of seconds by "role.stage"; a server speaks of its own stages alone
and leaves the role out. Each figure is an interval of one process's own monotonic clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

TIMELINE_KEY = "x-baton-timeline"
MAX_STAGES = 64
MAX_BYTES = 3000  # of the text; the details of an error have to fit beside it


def asks(value: str) -> bool:
    """Whether the value of the key, or header, asks for the timeline."""
    return value.strip().lower() in ("1", "true")


def asks_for_timeline(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    return any(key == TIMELINE_KEY and isinstance(value, str) and asks(value) for key, value in metadata)


def timeline_text(seconds: Mapping[str, float]) -> str:
    """The stages with their seconds, to the microsecond, as far as they fit."""
    text = "{}"
    shown: dict[str, float] = {}
    for stage, value in list(seconds.items())[:MAX_STAGES]:
        shown[stage] = round(value, 6)
        longer = json.dumps(shown, separators=(",", ":"))
        if len(longer) > MAX_BYTES:
            break
        text = longer
    return text


def read_timeline(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, float]:
    """The stages in a server's trailing metadata; empty when there are none. What is not well-formed is left out."""
    for key, value in metadata:
        if key == TIMELINE_KEY and isinstance(value, str):
            try:
                content = json.loads(value)
            except ValueError:
                return {}
            if not isinstance(content, dict):
                return {}
            return {
                stage: float(seconds)
                for stage, seconds in list(content.items())[:MAX_STAGES]
                if stage.isidentifier() and type(seconds) in (int, float) and 0 <= seconds < math.inf
            }
    return {}
