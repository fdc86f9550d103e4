"""Drain: how a server stops taking requests and waits for those it has.

States: serving -> leaving (not ready any more, requests are still taken because load balancers lag) ->
refusing (new requests get SERVER_DRAINING) -> drained (nothing is open). Only the process's own signal ends
the process; a drain by RPC stays in `drained`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum

from rpc.errors import BatonError, ErrorCode


class DrainState(StrEnum):
    SERVING = "serving"
    LEAVING = "leaving"
    REFUSING = "refusing"
    DRAINED = "drained"


class Drain:
    """The drain of one server; `begin` is idempotent. Belongs to the event loop.

    `remaining` counts what is still open; `changed` is called after each change of state.
    """

    def __init__(
        self,
        *,
        grace_s: float,
        timeout_s: float,
        remaining: Callable[[], int],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grace_s = grace_s
        self.timeout_s = timeout_s
        self._remaining = remaining
        self._changed = changed
        self._clock = clock
        self._began: float | None = None
        self._gone = asyncio.Event()

    @property
    def state(self) -> DrainState:
        if self._began is None:
            return DrainState.SERVING
        if self._clock() < self._began + self.grace_s:
            return DrainState.LEAVING
        return DrainState.REFUSING if self._remaining() else DrainState.DRAINED

    @property
    def number(self) -> int:
        """Value of `baton_drain_state`: 0 serving, 1 draining, 2 drained."""
        return {DrainState.SERVING: 0, DrainState.DRAINED: 2}.get(self.state, 1)

    def begin(self) -> bool:
        """Starts the drain; False when it had begun before."""
        if self._began is not None:
            return False
        self._began = self._clock()
        self._changed()
        return True

    def check(self) -> None:
        """Raises SERVER_DRAINING for a request that comes too late."""
        if self.state in (DrainState.REFUSING, DrainState.DRAINED):
            raise BatonError(
                ErrorCode.SERVER_DRAINING,
                "the server is shutting down; send the request to another one",
                retry_after_s=1.0,
            )

    def request_left(self) -> None:
        """To be called when a request has ended, so that nobody who waits for that need poll."""
        self._gone.set()

    async def request_gone(self) -> None:
        """Until the next request ends. The caller sets the time limit."""
        self._gone.clear()
        await self._gone.wait()

    async def wait(self) -> bool:
        """Waits until new requests are refused and none is open; False when `timeout_s` from `begin` passed
        before.

        The grace period runs to its end even if nothing is open: a late request must find a server.
        """
        if self._began is None:
            raise AssertionError("wait() before begin()")
        await asyncio.sleep(max(0.0, min(self.grace_s, self.timeout_s) - (self._clock() - self._began)))
        self._changed()
        try:
            async with asyncio.timeout(max(0.0, self.timeout_s - (self._clock() - self._began))):
                while self._remaining():
                    await self.request_gone()
        except TimeoutError:
            return False
        self._changed()
        return True
