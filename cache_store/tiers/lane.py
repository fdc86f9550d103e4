"""The threads of one tier: some that read, one that writes. Whatever the tier does, it does it to them alone.

A tier that is slow keeps its own threads busy. One that hangs keeps them for good: then nothing more is asked of it
until they come back, so that no request waits for what is known not to answer.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cache_store.observations import Observe
from cache_store.tiers.tier import Tier, TierError, TierStats, reason_of
from rpc.faults import CORRUPT, DROP, FULL, fault
from rpc.log_limit import LogLimit

READERS = 2
MOST_KNOWN = 65536  # keys that are taken to be in a shared tier, without asking it
MOST_READS = 64  # jobs that wait for a reader
QUEUE_BYTES = 64 << 20  # of records that wait to be written, as long as one fits
# Between tries of a record that could not be written for one of the reasons that pass: longer in all than a store takes
# to notice that one of its servers is gone.
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0)
PASSING = frozenset(("unreachable", "timeout"))
PATIENCE_S = 30.0  # that records wait for a tier which takes nothing; then they are given up, and their memory is free
TURN_S = 0.25  # between looks at whether it does
ENTRY_BYTES = 256  # that a tier may need beside a record
CLOSE_S = 2.0  # for the threads to end; one that hangs is left behind

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Order:
    """For the writing thread: to put the record of one key, or to touch keys."""

    keys: Sequence[bytes]
    record: bytes | None


@dataclass(slots=True)
class _Failure:
    reason: str = ""  # of an operation that failed


class TierLane:
    """One tier with its threads. Calls never raise: what fails is counted, logged now and then, and a miss."""

    def __init__(self, tier: Tier, observe: Observe, *, hung_s: float, writes: bool = True) -> None:
        """hung_s: after which a call counts as one that hangs. writes: by a thread, and not by who offers a record."""
        self.tier = tier
        self.name = tier.name
        self.shared = tier.shared
        self._observe = observe
        self._hung_s = hung_s
        self._failures = LogLimit()
        self._closed = False
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_READS)
        self._busy_since = [0.0] * READERS  # 0: the reader waits for work
        self._changed = threading.Condition()
        self._orders: deque[_Order] = deque()
        self._queued: set[bytes] = set()  # keys of records among them
        self._waiting_bytes = 0  # of all of them
        self._tries = 0  # of the record at the front
        self._given_up = False  # the last record that failed for a reason that may pass
        self._takes_nothing_since = 0.0  # 0: it does
        self.on_room: Callable[[], None] = lambda: None  # called by the writing thread when a record is off the queue
        self._epoch = self._cleared = 0  # of the last order to clear, and of the last one that was carried out
        self._putting = threading.Lock()  # `put` by those who offer
        self._direct = not writes
        self._known: OrderedDict[bytes, None] = OrderedDict()  # of a shared tier: written or seen there of late
        self._knowing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._read, args=(number,), name=f"kv-{self.name}-read-{number}", daemon=True)
            for number in range(READERS)
        ]
        self._threads.append(threading.Thread(target=self._write, name=f"kv-{self.name}-write", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def hangs(self) -> bool:
        """Whether every reader has been in one job for longer than anybody waits."""
        before = time.monotonic() - self._hung_s
        return all(0.0 < since < before for since in self._busy_since)

    def submit(self, job: Callable[[], None]) -> bool:
        """Has a reader do the job, which may call `find` and `get`. False: there is none to do it in time."""
        if self._closed or self.hangs:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def find(self, keys: Sequence[bytes]) -> int:
        """Leading ones of `keys` that are here."""
        found = 0
        with self._operation("find"):
            if not fault("cache_store.tier", tier=self.name, operation="find") & DROP and self._cleared == self._epoch:
                found = max(0, min(len(keys), self.tier.find(keys)))
        if found < len(keys):
            self._observe("kv_tier_missed_blocks_total", tier=self.name, reason="absent")
            self._forget(keys[found:])
        return found

    def get(self, key: bytes, into: memoryview) -> memoryview | None:
        """The record, unchecked: in `into`, or where the tier has it for good."""
        record: memoryview | None = None
        failed = True
        with self._operation("get"):
            effect = fault("cache_store.tier", tier=self.name, operation="get")
            if not effect & DROP and self._cleared == self._epoch:
                lent = self.tier.lent(key) if not effect & CORRUPT else None
                if lent is not None and len(lent) == into.nbytes:
                    record = memoryview(lent)
                elif self.tier.get(key, into):
                    record = into
            if record is not None and effect & CORRUPT:
                into[into.nbytes // 2] ^= 1
            failed = False
        if record is not None:
            self._observe("kv_tier_bytes_total", into.nbytes, tier=self.name, direction="read")
            self._note(key)
        else:
            self._forget((key,))
            self._observe("kv_tier_missed_blocks_total", tier=self.name, reason="failed" if failed else "lost")
        return record

    def damaged(self, key: bytes) -> None:
        """What `get` gave was not the record of the key."""
        self._observe("kv_tier_missed_blocks_total", tier=self.name, reason="damaged")
        count = self._failures.occurred("damaged")
        if count:
            _log.warning("a record of a tier is damaged", extra={"tier": self.name, "occurrences": count})
        self._forget((key,))
        with self._operation("discard"):
            self.tier.discard(key)

    # -- writing ----------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether a record need not be offered. A shared tier is taken to have what it had until it lacks it."""
        if self.shared:
            return key in self._known
        return key in self._queued or (self._cleared == self._epoch and self.tier.has(key))

    @property
    def takes(self) -> bool:
        """Whether it is worth copying a block to offer it."""
        return self.tier.takes

    @property
    def epoch(self) -> int:
        """Of the last order to clear."""
        return self._epoch

    def capacity(self, record_bytes: int) -> float:
        """How many records it can hold at all; infinity if it cannot tell."""
        limit = self.tier.stats().limit_bytes
        return limit // (record_bytes + ENTRY_BYTES) if limit else math.inf

    def has_room(self, count: int, record_bytes: int) -> bool:
        """Whether so many records may be offered now."""
        if self._direct:
            return True
        with self._changed:
            return self._waiting_bytes + count * record_bytes <= QUEUE_BYTES or (count == 1 and not self._queued)

    def _note(self, key: bytes) -> None:
        if self.shared:
            with self._knowing:
                self._known[key] = None
                if len(self._known) > MOST_KNOWN:
                    self._known.popitem(last=False)

    def _forget(self, keys: Sequence[bytes]) -> None:
        if self.shared:
            with self._knowing:
                for key in keys:
                    self._known.pop(key, None)

    def offer(self, key: bytes, record: bytes, epoch: int) -> bool:
        """Has the record written, if the last order to clear is the one of `epoch`. The one who offers has seen that
        there is room."""
        if self._direct:
            with self._putting:
                if epoch != self._epoch:
                    return False
                self._book(key, record, self._put(key, record)[0])
            return True
        with self._changed:
            if self._closed or (epoch != self._epoch and not self.shared):
                return False
            self._orders.append(_Order((key,), record))
            self._queued.add(key)  # or it would be offered again until it is written
            self._note(key)
            self._waiting_bytes += len(record)
            self._changed.notify_all()
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used, the first one of late; once those that were offered before are written."""
        if self.shared:
            return  # its own affair
        if self._direct:
            with self._putting, self._operation("touch"):
                self.tier.touch(keys)
            return
        with self._changed:
            self._orders.append(_Order(keys, None))
            self._changed.notify_all()

    def clear(self, epoch: int) -> None:
        """Forgets every record, and those that wait to be written. Nothing is found from now on until that is done."""
        if self.shared:
            return
        with self._changed, self._putting:
            self._drop_orders()
            self._epoch = epoch
            self._changed.notify_all()

    def stats(self) -> TierStats:
        return self.tier.stats()

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written or cleared."""
        with self._changed:
            return not self._orders and self._cleared == self._epoch

    def _drop_orders(self) -> None:
        self._orders.clear()
        self._queued.clear()
        self._waiting_bytes = 0

    def close(self) -> None:
        """Ends the threads; what waits to be written is lost. A tier that hangs is not waited for."""
        self._closed = True
        with self._changed:
            self._drop_orders()
            self._changed.notify_all()
        for _ in range(READERS):
            try:
                self._jobs.put_nowait(None)
            except queue.Full:
                break  # readers look at `_closed` after each job
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("a tier still hangs", extra={"tier": self.name})
            return
        with self._operation("close"):
            self.tier.close()

    # -- threads ----------------------------------------------------------------------------------------------

    def _read(self, number: int) -> None:
        while not self._closed:
            job = self._jobs.get()
            if job is None:
                return
            self._busy_since[number] = time.monotonic()
            try:
                job()
            except Exception:
                _log.exception("a read of a tier failed", extra={"tier": self.name})
            self._busy_since[number] = 0.0
            del job

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._orders or self._cleared != self._epoch)
                if self._closed:
                    return
                epoch = self._epoch
                order = self._orders[0] if self._cleared == epoch else None
            pause_s = 0.0
            if order is None:
                with self._operation("clear"):
                    self.tier.clear()
            elif order.record is None:
                with self._operation("touch"):
                    self.tier.touch(order.keys)
            else:
                pause_s = self._try_to_put(order.keys[0], order.record)
            with self._changed:
                if order is None:
                    self._cleared = epoch
                elif pause_s:
                    self._changed.wait_for(lambda: self._closed or self._epoch != epoch, pause_s)  # noqa: B023
                elif self._orders and self._orders[0] is order:  # taken away only now: `idle` means written
                    self._orders.popleft()
                    if order.record is not None:
                        self._queued.discard(order.keys[0])
                        self._waiting_bytes -= len(order.record)
                self._changed.notify_all()
            if not pause_s:
                self.on_room()

    def _try_to_put(self, key: bytes, record: bytes) -> float:
        """Writes the record at the front, or gives it up: 0. Else how long to wait before it is tried again: a hole in
        a prefix makes what follows it useless, and many a reason passes, as when a server has just left a store."""
        now = time.monotonic()
        if not self.tier.takes:
            self._takes_nothing_since = self._takes_nothing_since or now
            if now - self._takes_nothing_since < PATIENCE_S:
                return TURN_S
            self._book(key, record, "failed")
            return 0.0
        self._takes_nothing_since = 0.0
        outcome, reason = self._put(key, record)
        passes = reason in PASSING if outcome == "failed" else outcome == "refused" and not self.tier.takes
        if passes and not self._given_up and self._tries < len(PAUSES_S):
            self._tries += 1
            return PAUSES_S[self._tries - 1]
        self._given_up = passes  # then those that follow are tried once, until one is written
        self._tries = 0
        self._book(key, record, outcome)
        return 0.0

    def _put(self, key: bytes, record: bytes) -> tuple[str, str]:
        """The outcome, and the reason of a failure."""
        outcome = "failed"
        with self._operation("put") as failure:
            full = fault("cache_store.tier", tier=self.name, operation="put") & FULL
            outcome = "stored" if not full and self.tier.put(key, record) else "refused"
        return outcome, failure.reason

    def _book(self, key: bytes, record: bytes, outcome: str) -> None:
        """What has become of a record in the end."""
        self._observe("kv_tier_writes_total", tier=self.name, outcome=outcome)
        if outcome == "stored":
            self._note(key)
            self._observe("kv_tier_bytes_total", len(record), tier=self.name, direction="written")
        else:
            self._forget((key,))

    @contextmanager
    def _operation(self, operation: str) -> Iterator[_Failure]:
        """Counts the time of a tier's call, and swallows what it fails with."""
        began = time.monotonic()
        failure = _Failure()
        try:
            yield failure
        except Exception as error:
            reason = failure.reason = reason_of(error)
            self._observe("kv_tier_errors_total", tier=self.name, reason=reason)
            count = self._failures.occurred(reason)
            if count:
                known = isinstance(error, TierError)
                _log.warning(
                    "a tier failed: %s",
                    error,
                    exc_info=None if known else error,
                    extra={"tier": self.name, "operation": operation, "reason": reason, "occurrences": count},
                )
        finally:
            self._observe("kv_tier_busy_seconds_total", time.monotonic() - began, tier=self.name)
