"""How many retries the router allows itself: a share of its requests, so that retries never become the load.
Pure.

A bucket of tokens, `1000 * ratio` at most and at first. Each request adds `ratio` tokens and each retry takes
one; `100 * ratio` tokens a second come by themselves, so that a quiet router can retry too. Ratio 0: no
retries.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


class RetryBudget:
    """Not thread-safe."""

    def __init__(self, ratio: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 <= ratio <= 10:
            raise ValueError(f"ratio {ratio} must be in [0, 10]")
        self._ratio = ratio
        self._capacity = 1000 * ratio
        self._per_second = 100 * ratio
        self._tokens = self._capacity
        self._clock = clock
        self._filled = clock()

    def deposit(self) -> None:
        """A request came."""
        self._fill()
        self._tokens = min(self._capacity, self._tokens + self._ratio)

    def withdraw(self) -> bool:
        """Takes the price of one retry; False when the budget is used up."""
        self._fill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def left(self) -> float:
        """What is left, 0 to 1."""
        self._fill()
        return self._tokens / self._capacity if self._capacity else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + max(0.0, now - self._filled) * self._per_second)
        self._filled = now


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts: `initial_s * multiplier ** n`, at most `max_s`, each changed by up to ±
    jitter."""

    initial_s: float = 0.05
    max_s: float = 5.0
    multiplier: float = 2.0
    jitter: float = 0.1

    def wait_s(self, retry: int, rng: random.Random) -> float:
        """Seconds before retry number `retry`, from 0."""
        # The exponent is bounded, because a float overflows long before anyone waits that long.
        base = min(self.max_s, self.initial_s * self.multiplier ** min(retry, 64))
        return min(self.max_s, max(0.0, base * (1 + self.jitter * rng.uniform(-1, 1))))
