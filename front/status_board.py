"""The server's state as routers see it: one versioned status, pushed at every change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from protos import worker_pb2
from rpc.errors import BatonError


class StatusBoard:
    """Makes statuses with rising versions and wakes their watchers.

    `fill` writes everything but the version and the uptime into a status; it must not block.
    """

    def __init__(
        self, fill: Callable[[worker_pb2.WorkerStatus], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fill = fill
        self._clock = clock
        self._started = clock()
        self._version = 0
        self._changed = asyncio.Event()
        self._closed: BatonError | None = None

    def status(self) -> worker_pb2.WorkerStatus:
        """The status now, with a version of its own."""
        status = worker_pb2.WorkerStatus()
        self._fill(status)
        self._version += 1
        status.version = self._version
        status.uptime_seconds = self._clock() - self._started
        return status

    def notify(self) -> None:
        """Something that matters to a router has changed: every watcher sends a status now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self, error: BatonError) -> None:
        """Ends every watch with `error`, at once."""
        self._closed = error
        self.notify()

    async def watch(self, interval_s: float) -> AsyncIterator[worker_pb2.WorkerStatus]:
        """A status at once, at every change, and at least every `interval_s`; raises the error of `close`."""
        while True:
            if self._closed is not None:
                raise self._closed
            changed = self._changed
            yield self.status()
            try:
                async with asyncio.timeout(interval_s):
                    await changed.wait()
            except TimeoutError:
                pass
