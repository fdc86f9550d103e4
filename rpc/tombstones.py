"""Tombstones: aborts that arrived before the request they mean.

Such an abort leaves a mark which refuses the late request with REQUEST_TOMBSTONED. Pure: the clock is
injected.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class Tombstones:
    """Keys that must not start any more, each for `ttl_s` seconds from its latest `add`.

    At most `max_entries` are kept: beyond it the oldest is dropped (and counted in `dropped`), because
    refusing a late request is an optimisation, while memory is not to be bought with random ids. Not
    thread-safe.
    """

    def __init__(
        self, ttl_s: float = 60.0, max_entries: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if ttl_s <= 0 or max_entries < 1:
            raise ValueError(f"ttl_s {ttl_s} must be > 0 and max_entries {max_entries} >= 1")
        self.ttl_s = ttl_s
        self.max_entries = max_entries
        self.dropped = 0
        self._clock = clock
        # Every entry lives equally long and `add` moves its key to the end, so the order is that of expiry.
        self._expiry: OrderedDict[str, float] = OrderedDict()

    def add(self, key: str) -> None:
        now = self._clock()
        self._purge(now)
        self._expiry[key] = now + self.ttl_s
        self._expiry.move_to_end(key)
        if len(self._expiry) > self.max_entries:
            self._expiry.popitem(last=False)
            self.dropped += 1

    def hit(self, key: str) -> bool:
        """Whether `key` is refused now. The mark stays: a request may be sent again."""
        self._purge(self._clock())
        return key in self._expiry

    def __len__(self) -> int:
        self._purge(self._clock())
        return len(self._expiry)

    def _purge(self, now: float) -> None:
        while self._expiry:
            key, expiry = next(iter(self._expiry.items()))
            if expiry > now:
                return
            del self._expiry[key]
