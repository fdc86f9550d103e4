"""How many requests are served at a time, and who waits for a turn."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from rpc.errors import BatonError, ErrorCode


class Admission:
    """At most `max_concurrent` turns at a time (0: no limit) and `queue_size` waiting, each `timeout_s` at the most.

    Lower priorities go first, equals in the order in which they came. Belongs to one event loop.
    """

    def __init__(
        self,
        max_concurrent: int = 0,
        *,
        queue_size: int = 1024,
        timeout_s: float = 60.0,
        on_depth: Callable[[int], None] = lambda depth: None,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._queue_size = queue_size
        self._timeout_s = timeout_s
        self._on_depth = on_depth
        self._active = 0
        self._count = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def active(self) -> int:
        return self._active

    @property
    def depth(self) -> int:
        """Requests that wait for a turn."""
        return sum(1 for _, _, turn in self._waiting if not turn.done())

    def enter(self, priority: int) -> asyncio.Future[None] | None:
        """Takes a turn: None when it is there at once, else what to wait for (see `wait`). Raises ROUTER_QUEUE_FULL."""
        if not self._max_concurrent or self._active < self._max_concurrent:
            self._active += 1
            return None
        if self.depth >= self._queue_size:
            raise self.full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (priority, self._count, turn))
        self._on_depth(self.depth)
        return turn

    def full(self) -> BatonError:
        """What a request is told for which there is no room."""
        message = f"{self._queue_size} requests are waiting already; try again later"
        return BatonError(ErrorCode.ROUTER_QUEUE_FULL, message, stage="queue")

    async def wait(self, turn: asyncio.Future[None]) -> None:
        """Waits for a turn. Raises ROUTER_QUEUE_TIMEOUT. Whoever leaves early gives a turn that came meanwhile back."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()
            turn.cancel()
            self._waiting = [waiting for waiting in self._waiting if waiting[2] is not turn]
            heapq.heapify(self._waiting)
            self._on_depth(self.depth)
            if isinstance(error, TimeoutError):
                message = f"no turn within {self._timeout_s:g} s; try again later"
                raise BatonError(ErrorCode.ROUTER_QUEUE_TIMEOUT, message, stage="queue") from None
            raise

    def leave(self) -> None:
        """Gives a turn back, to the first who waits."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                self._on_depth(self.depth)
                return
        self._active -= 1
