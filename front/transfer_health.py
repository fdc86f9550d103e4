"""Whether the transfers of this server keep failing through its own fault. Pure; the clock is injected."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from engine.messages import Observation
from rpc.errors import ErrorCode

# Failures that lie with the side that reports them. A reader that left, asked for the wrong thing or came too early is
# not one, and what a reader is told of is the sender's.
OWN_FAILURES = frozenset(
    code.name
    for code in (
        ErrorCode.CACHE_STORE_STORE_FAILED,
        ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR,
        ErrorCode.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED,
        ErrorCode.CACHE_STORE_LOAD_RDMA_WRITE_FAILED,
        ErrorCode.READ_TRANSFER_NOT_DONE,
    )
)
READERS_FAILURES = OWN_FAILURES - {ErrorCode.CACHE_STORE_STORE_FAILED.name}
# A transfer that was read to its end, as the sender and as the reader book it.
_HEALING = frozenset((("baton_kv_lease_hold_seconds", "released"), ("baton_kv_transfer_seconds", "ok")))


class TransferHealth:
    """`threshold` own failures in a row, the last one within `window_s`, make the server unready.

    A transfer that was read to its end heals it at once. So does silence: without new requests nothing could prove it
    healthy, so after `window_s` it is tried again.
    """

    def __init__(
        self,
        threshold: int = 5,
        window_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        own: Collection[str] = OWN_FAILURES,
    ) -> None:
        self._own = own
        self._threshold = threshold
        self._window_s = window_s
        self._clock = clock
        self._failures = 0.0
        self._last_failure = 0.0

    @property
    def failing(self) -> bool:
        return self._failures >= self._threshold and self._clock() - self._last_failure < self._window_s

    def note(self, observations: Iterable[Observation]) -> None:
        """Books the news of one engine step."""
        for item in observations:
            if item.name == "baton_kv_transfer_failures_total" and item.labels.get("reason") in self._own:
                if self._clock() - self._last_failure >= self._window_s:
                    self._failures = 0.0
                self._failures += item.value
                self._last_failure = self._clock()
            elif (item.name, item.labels.get("outcome")) in _HEALING:
                self._failures = 0.0
