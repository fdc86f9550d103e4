"""The circuit breaker of one server: a server that keeps failing gets no requests for a while. Pure.

closed: requests pass; `failure_threshold` failures in a row, each within `window_s` of the one before, open
it. open: none pass for `open_s`. half-open: one probe at a time passes; `success_threshold` successes close
it, one failure opens it again. Only failures whose row of the error table says so are reported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class BreakerState(IntEnum):
    """Values are those of `baton_breaker_state`."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    failure_threshold: int = 5
    success_threshold: int = 2
    open_s: float = 30.0
    window_s: float = 60.0


class Breaker:
    """`on_change(state)` runs at each transition. Not thread-safe."""

    def __init__(
        self,
        settings: BreakerSettings,
        *,
        on_change: Callable[[BreakerState], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_change = on_change
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._successes = 0
        self._probing = False
        self._last_failure = 0.0
        self._opened = 0.0

    @property
    def state(self) -> BreakerState:
        """The present state; an open breaker whose time is over is half-open from the moment it is looked
        at."""
        if self._state is BreakerState.OPEN and self._clock() - self._opened >= self._settings.open_s:
            self._successes = 0
            self._probing = False
            self._become(BreakerState.HALF_OPEN)
        return self._state

    def passes(self) -> bool:
        """Whether a request may go to the server now."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probing)

    def begin(self) -> None:
        """A request goes to the server (also one that is sent although the breaker is open)."""
        if self.state is BreakerState.HALF_OPEN:
            self._probing = True

    def success(self) -> None:
        state = self.state
        self._failures = 0
        if state is BreakerState.HALF_OPEN:
            self._probing = False
            self._successes += 1
            if self._successes >= self._settings.success_threshold:
                self._become(BreakerState.CLOSED)

    def failure(self) -> None:
        """A failure that counts."""
        state, now = self.state, self._clock()
        if now - self._last_failure > self._settings.window_s:
            self._failures = 0
        self._failures += 1
        self._last_failure = now
        if state is BreakerState.HALF_OPEN or (
            state is BreakerState.CLOSED and self._failures >= self._settings.failure_threshold
        ):
            self._opened = now
            self._become(BreakerState.OPEN)

    def neutral(self) -> None:
        """The request ended in a way that says nothing about the server: a probe's place is free again."""
        self._probing = False

    def reset(self) -> None:
        """Another engine serves there now."""
        self._failures = self._successes = 0
        self._probing = False
        self._become(BreakerState.CLOSED)

    def _become(self, state: BreakerState) -> None:
        if state is not self._state:
            self._state = state
            if state is BreakerState.CLOSED:
                self._failures = 0
            self._on_change(state)
