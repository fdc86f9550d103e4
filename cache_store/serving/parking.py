"""Loads that came before their request was admitted. Pure, with an injected clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rpc.errors import BatonError, ErrorCode


class ParkedState(StrEnum):
    PARKED = "parked"
    ADMITTED = "admitted"  # may be opened now
    REFUSED = "refused"  # ends with `error`
    LEFT = "left"  # the caller went away


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Parked:
    """One parked load. `notify` is called once, when it is no longer parked (not when it leaves by itself)."""

    key: str
    rank: int  # of the decode server
    peer: str
    until: float
    state: ParkedState = ParkedState.PARKED
    error: BatonError | None = None
    notify: Callable[[], None] = _nothing


class ParkingTable:
    """At most `max_entries` parked loads, `max_per_peer` of one peer, each for `max_wait_s` seconds.

    Memory must not be for sale to anybody who invents keys: beyond a bound a load is refused at once.
    """

    def __init__(
        self,
        max_entries: int,
        max_per_peer: int,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = max_entries
        self._max_per_peer = max_per_peer
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._parked: dict[tuple[str, int], Parked] = {}
        self._of_key: dict[str, list[Parked]] = {}
        self._per_peer: Counter[str] = Counter()

    def park(self, key: str, peer: str, rank: int = 0) -> Parked:
        """Raises DUPLICATE_REQUEST beside another load of the key by that rank of the decode server,
        CACHE_STORE_PUSH_ITEM_FAILED at a bound."""
        self.expire()
        if (key, rank) in self._parked:
            raise BatonError(ErrorCode.DUPLICATE_REQUEST, "a load of this key is waiting already")
        if len(self._parked) >= self._max_entries or self._per_peer[peer] >= self._max_per_peer:
            raise parking_full(parked=str(len(self._parked)), parked_of_peer=str(self._per_peer[peer]))
        entry = Parked(key, rank, peer, self._clock() + self._max_wait_s)
        self._parked[key, rank] = entry
        self._of_key.setdefault(key, []).append(entry)
        self._per_peer[peer] += 1
        return entry

    def admit(self, key: str) -> None:
        """The request was admitted: its parked loads may be opened."""
        for entry in self._of_key.get(key, ())[:]:
            self._end(entry, ParkedState.ADMITTED, None)

    def refuse(self, key: str, error: BatonError) -> None:
        """The request failed or was aborted before it was admitted."""
        for entry in self._of_key.get(key, ())[:]:
            self._end(entry, ParkedState.REFUSED, error)

    def leave(self, entry: Parked) -> None:
        """The caller went away. Idempotent, and a no-op when the load is no longer parked."""
        entry.notify = _nothing
        self._end(entry, ParkedState.LEFT, None)

    def expire(self) -> None:
        """Refuses the loads whose time is over."""
        now = self._clock()
        # All wait equally long, so the order is that of expiry.
        while self._parked:
            entry = next(iter(self._parked.values()))
            if entry.until > now:
                return
            self._end(
                entry,
                ParkedState.REFUSED,
                BatonError(
                    ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT,
                    "the prefill did not begin in time",
                    metadata={"waited_s": f"{self._max_wait_s:g}"},
                ),
            )

    def next_expiry_in(self) -> float | None:
        """Seconds until `expire` has something to do; None when nothing is parked."""
        for entry in self._parked.values():
            return max(0.0, entry.until - self._clock())
        return None

    def close(self, error: BatonError) -> None:
        for key in list(self._of_key):
            self.refuse(key, error)

    def __len__(self) -> int:
        return len(self._parked)

    def _end(self, entry: Parked, state: ParkedState, error: BatonError | None) -> None:
        if entry.state is not ParkedState.PARKED:
            return
        entry.state = state
        entry.error = error
        del self._parked[entry.key, entry.rank]
        of_key = self._of_key[entry.key]
        of_key.remove(entry)
        if not of_key:
            del self._of_key[entry.key]
        self._per_peer[entry.peer] -= 1
        if not self._per_peer[entry.peer]:
            del self._per_peer[entry.peer]
        entry.notify()


def parking_full(**counts: str) -> BatonError:
    """A load that cannot wait here: what its reader is told."""
    return BatonError(
        ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED,
        "too many loads wait for their prefill; try again later",
        metadata=counts,
    )
