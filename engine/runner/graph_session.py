"""The rule for captures that fail, in one place for graphs of every role.

Before the first capture begins, a failure is harmless: what was taken is given back and the engine runs eagerly. From
then on the device's allocator and stream may hold the remains of a half-captured graph. A failure then, of whatever
kind, ends the process: nothing more runs on the device, and the objects that the graph refers to stay alive until the
process is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from rpc.errors import BatonError, ErrorCode
from rpc.graph_status import GraphRole

_log = logging.getLogger(__name__)

_kept: list[object] = []  # runners of captures that failed; never emptied


class CaptureSession:
    """Whether the device may be dirty. One per engine process; a runner sets it when its first capture begins."""

    def __init__(self) -> None:
        self.dirty = False

    def begin_capture(self) -> None:
        """From here on a failure is not harmless."""
        self.dirty = True

    def end(self) -> None:
        """Every capture has succeeded, test replays included."""
        self.dirty = False

    def require_clean(self) -> None:
        """Raises GRAPH_CAPTURE_DIRTY when nothing may run on the device any more."""
        if self.dirty:
            raise BatonError(
                ErrorCode.GRAPH_CAPTURE_DIRTY, "a graph capture failed in this process; start the server again"
            )


class GraphRunner(Protocol):
    """A runner of captured graphs, as `capture_graphs` builds it."""

    role: GraphRole

    def prepare(self) -> None:
        """Buffers and checks; captures nothing. May fail."""

    def capture(self, session: CaptureSession) -> None:
        """Captures every graph; calls `session.begin_capture` before the first one."""

    def release(self) -> None:
        """Gives everything back. Called once, and never in a dirty session."""


Runner = TypeVar("Runner", bound=GraphRunner)


def capture_graphs(make: Callable[[], Runner], session: CaptureSession) -> tuple[Runner | None, str]:
    """A runner with its graphs captured; or None, and why there is none, when it failed before a capture began.

    Raises GRAPH_CAPTURE_DIRTY for a failure of any type, also one that is no Exception, after that.
    """
    runner: Runner | None = None
    try:
        runner = make()
        runner.prepare()
        runner.capture(session)
        session.end()
    except BaseException as error:
        if session.dirty:
            _kept.append((runner, error))
            code = ErrorCode.GRAPH_CAPTURE_DIRTY.name
            _log.error("a graph capture failed after it had begun", exc_info=error, extra={"code": code})
            raise BatonError(
                ErrorCode.GRAPH_CAPTURE_DIRTY,
                "capturing a graph failed after it had begun; see the engine's log, or leave the graphs off",
                metadata={"cause": type(error).__name__, "detail": str(error)[:200]},
            ) from error
        if runner is not None:
            runner.release()
        if not isinstance(error, Exception):
            raise
        return None, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return runner, ""
