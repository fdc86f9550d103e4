"""What becomes of errors that reach an agent's loop without anybody who waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)


async def guarded(work: Coroutine[Any, Any, None]) -> None:
    """A failing task must not take the agent's other tasks with it."""
    try:
        await work
    except Exception:
        _log.exception("a task of the cache store failed")


def on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio (1.85) has one event queue for all loops of a process. A loop that finds its wake-up taken by another one
    # reports BlockingIOError, and one that finds an event of a loop that is closed RuntimeError. Both mean nothing.
    # Goes when grpc.aio gives each loop a queue of its own.
    of_queue = "PollerCompletionQueue" in repr(context.get("handle"))
    if of_queue and isinstance(context.get("exception"), BlockingIOError | RuntimeError):
        return
    loop.default_exception_handler(context)
