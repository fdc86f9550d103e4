"""Records of a slow tier fetched before they are asked for.

Blocks of a prefix are found together and then read in their order, by one reader or several. The first read of such a
run fetches the next few records with it, in one request, and has the batches after that on their way already: a round
trip for each would take several times as long as the bytes do, and while a batch is checked and copied the link would
rest. What was fetched in vain is dropped when its slots are wanted.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from cache_store.tiers.mooncake_link import Call, ClientLink
from cache_store.tiers.tier import TierError

MOST_RUNS = 16  # that are remembered
BATCHES_AHEAD = 2  # on their way while one is read


@dataclass(eq=False, slots=True)
class Batch:
    """Records on their way, or here. `left` are those that nobody has asked for yet."""

    call: Call
    positions: dict[bytes, int]
    left: set[bytes]
    readers: int = 0  # that look at it now


@dataclass(eq=False, slots=True)
class _Run:
    """Keys that were found together."""

    keys: Sequence[bytes]
    positions: dict[bytes, int]
    sent: int = 0  # the first one that was not asked for; those before it were, or need not be


class ReadAhead:
    """Batches of one link. Calls come from several threads."""

    def __init__(self, link: ClientLink, record_bytes: int, batch: int) -> None:
        self._link = link
        self._record_bytes = record_bytes
        self._batch = batch
        self._lock = threading.Lock()
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()  # by their first key
        self._batches: OrderedDict[bytes, Batch] = OrderedDict()  # by key of a record that is not asked for yet
        self.wasted = 0  # records that were fetched in vain

    def found(self, keys: Sequence[bytes]) -> None:
        """These are in the tier, and will be read in this order if at all."""
        if len(keys) < 2:
            return
        with self._lock:
            self._runs[keys[0]] = _Run(keys, {key: number for number, key in enumerate(keys)})
            self._runs.move_to_end(keys[0])
            if len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)

    def claim(self, key: bytes) -> Batch:
        """The batch that has the record, to be given back by `done`. Raises TierError when it cannot be asked for."""
        with self._lock:
            run = self._run_of(key)
            batch = self._batches.pop(key, None)
            if batch is None:
                batch = self._begin(self._from(run, key))
                del self._batches[key]
                if run is not None:
                    run.sent = max(run.sent, run.positions[key] + len(batch.positions))
            batch.left.discard(key)
            batch.readers += 1
            if run is not None:
                last = run.positions.get(next(reversed(batch.positions)), -1)
                with contextlib.suppress(TierError):
                    self._go_ahead(run, last + 1 + BATCHES_AHEAD * self._batch)
            return batch

    def done(self, batch: Batch, *, drop: bool = False) -> None:
        """Its reader has copied what he wanted. drop: nobody is to get anything of this batch any more."""
        with self._lock:
            batch.readers -= 1
            if drop:
                self._forget(batch)
            self._release_if_over(batch)

    def clear(self) -> None:
        """Drops everything that nobody has asked for."""
        with self._lock:
            for batch in set(self._batches.values()):
                self._forget(batch)
                self._release_if_over(batch)
            for run in self._runs.values():
                run.sent = 0

    # -- under the lock ---------------------------------------------------------------------------------------

    def _run_of(self, key: bytes) -> _Run | None:
        """The latest one that has the key."""
        return next((run for run in reversed(self._runs.values()) if key in run.positions), None)

    def _from(self, run: _Run | None, key: bytes) -> list[bytes]:
        """`key` and what is to be fetched with it."""
        return [key] if run is None else [key, *self._lacking(run, run.positions[key] + 1, self._batch - 1)]

    def _lacking(self, run: _Run, first: int, most: int) -> list[bytes]:
        """Up to `most` keys of a run from number `first` on, before one that is on its way."""
        return list(takewhile(lambda key: key not in self._batches, run.keys[first : first + most]))

    def _go_ahead(self, run: _Run, end: int) -> None:
        """Asks for keys of a run up to number `end`, in batches, as long as there are slots."""
        end = min(end, len(run.keys))
        while run.sent < end:
            if run.keys[run.sent] in self._batches:  # of an earlier look-up
                run.sent += 1
                continue
            following = self._lacking(run, run.sent, min(self._batch, len(run.keys) - run.sent))
            if not self._begin_if_free(following):
                return
            run.sent += len(following)

    def _begin(self, keys: list[bytes]) -> Batch:
        slots = self._link.take_slots(len(keys))
        while len(slots) < len(keys) and self._drop_oldest():
            slots += self._link.take_slots(len(keys) - len(slots))
        if not slots:
            raise TierError("timeout", "all slots are held by reads that do not end")
        return self._send(keys, slots)

    def _begin_if_free(self, keys: list[bytes]) -> bool:
        slots = self._link.take_slots(len(keys))
        if len(slots) < len(keys):
            self._link.give_slots(slots)
            return False
        self._send(keys, slots)
        return True

    def _send(self, keys: list[bytes], slots: list[int]) -> Batch:
        keys = keys[: len(slots)]
        call = self._link.begin("get", keys, slots, self._record_bytes)
        batch = Batch(call, {key: number for number, key in enumerate(keys)}, set(keys))
        for key in keys:
            self._batches[key] = batch
        return batch

    def _drop_oldest(self) -> bool:
        """Gives up a batch that nobody waits for. Whether there was one."""
        for batch in self._batches.values():
            if not batch.readers:
                self._forget(batch)
                self._release_if_over(batch)
                return True
        return False

    def _forget(self, batch: Batch) -> None:
        for key in batch.left:
            if self._batches.get(key) is batch:
                del self._batches[key]
        self.wasted += len(batch.left)
        batch.left.clear()

    def _release_if_over(self, batch: Batch) -> None:
        if not batch.readers and not batch.left and not batch.call.released:
            self._link.release(batch.call)
