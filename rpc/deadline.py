"""Deadlines: one point on the process's monotonic clock, handed down as *remaining* time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rpc.errors import BatonError, ErrorCode


class HasTimeRemaining(Protocol):
    """The part of a gRPC servicer context that is read here."""

    def time_remaining(self) -> float | None: ...


@dataclass(frozen=True)
class Deadline:
    """`at` is a reading of `clock` in seconds; infinity means there is none."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """A deadline `seconds` from now; None is never."""
        return cls(math.inf if seconds is None else clock() + seconds, clock)

    @classmethod
    def never(cls) -> Deadline:
        return cls(math.inf)

    @classmethod
    def from_context(
        cls, context: HasTimeRemaining, max_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Deadline:
        """The caller's deadline, or `max_s` from now when the call came without one (`max_s` <= 0: never)."""
        return cls.of_remaining(context.time_remaining(), max_s, clock)

    @classmethod
    def of_remaining(
        cls, remaining: float | None, max_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Deadline:
        """The same from the context's remaining seconds."""
        # gRPC reports a call without a deadline as None or, in some versions, as an absurdly distant one.
        if remaining is not None and remaining < 10 * 365 * 86400:
            return cls.after(remaining, clock)
        return cls.after(max_s if max_s > 0 else None, clock)

    def remaining(self) -> float:
        """Seconds left, at least 0; infinity without a deadline."""
        return max(0.0, self.at - self.clock())

    def timeout(self, at_most: float | None = None) -> float | None:
        """Seconds left as gRPC and asyncio want them: None without a limit. `at_most` caps it."""
        left = self.remaining()
        if at_most is not None:
            left = min(left, at_most)
        return None if math.isinf(left) else left

    def passed(self) -> bool:
        return self.clock() >= self.at

    def earlier(self, seconds: float | None) -> Deadline:
        """This deadline or the one `seconds` from now, whichever comes first."""
        if seconds is None:
            return self
        return Deadline(min(self.at, self.clock() + seconds), self.clock)

    def check(self, stage: str = "") -> None:
        """Raises GENERATE_TIMEOUT when the deadline has passed."""
        if self.passed():
            raise BatonError(
                ErrorCode.GENERATE_TIMEOUT,
                "the request's deadline has passed; allow it more time",
                stage=stage,
            )

    def at_ns(self) -> int:
        """The deadline in nanoseconds of the same clock; 0 when there is none."""
        return 0 if math.isinf(self.at) else max(1, int(self.at * 1e9))
