"""The threads of one tier: some that read, one that writes. Whatever the tier does, it does it to them alone.

A tier that is slow keeps its own threads busy. One that hangs keeps them for good: then nothing more is asked of it
until they come back, so that no request waits for what is known not to answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cache_store.observations import Observe
from cache_store.tiers.tier import Tier, TierError, TierStats, reason_of
from rpc.faults import CORRUPT, DROP, FULL, fault
from rpc.log_limit import LogLimit

READERS = 2
MOST_KNOWN = 65536  # keys that are taken to be in a shared tier, without asking it
MOST_READS = 64  # jobs that wait for a reader
QUEUE_BYTES = 64 << 20  # of records that wait to be written, as long as one fits
CLOSE_S = 2.0  # for the threads to end; one that hangs is left behind

_log = logging.getLogger(__name__)


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
        self._records: deque[tuple[bytes, bytes]] = deque()  # to be written
        self._waiting_bytes = 0
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
        return self._cleared == self._epoch and self.tier.has(key)

    def takes_one(self) -> bool:
        """Whether it is worth copying a block to offer it; counts it as refused if not."""
        if self.tier.takes:
            return True
        self._observe("kv_tier_writes_total", tier=self.name, outcome="refused")
        return False

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

    def offer(self, key: bytes, record: bytes, epoch: int, wait_s: float) -> bool:
        """Has the record written, if the last order to clear is the one of `epoch`. Waits up to `wait_s` for room among
        those that wait; False: it was dropped."""
        if self._direct:
            with self._putting:
                if epoch != self._epoch:
                    return False
                self._put(key, record)
            return True
        with self._changed:
            if wait_s > 0 and not self._has_room(record):
                self._changed.wait_for(lambda: self._closed or self._has_room(record), wait_s)
            if epoch != self._epoch and not self.shared:
                return False
            if self._closed or not self._has_room(record):
                self._observe("kv_tier_writes_total", tier=self.name, outcome="dropped")
                return False
            self._records.append((key, record))
            self._note(key)  # or it would be offered again until it is written
            self._waiting_bytes += len(record)
            self._changed.notify_all()
        return True

    def _has_room(self, record: bytes) -> bool:
        return not self._records or self._waiting_bytes + len(record) <= QUEUE_BYTES

    def clear(self, epoch: int) -> None:
        """Forgets every record, and those that wait to be written. Nothing is found from now on until that is done."""
        if self.shared:
            return
        with self._changed, self._putting:
            self._records.clear()
            self._waiting_bytes = 0
            self._epoch = epoch
            self._changed.notify_all()

    def stats(self) -> TierStats:
        return self.tier.stats()

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written or cleared."""
        with self._changed:
            return not self._records and self._cleared == self._epoch

    def close(self) -> None:
        """Ends the threads; what waits to be written is lost. A tier that hangs is not waited for."""
        self._closed = True
        with self._changed:
            self._records.clear()
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
                self._changed.wait_for(lambda: self._closed or self._records or self._cleared != self._epoch)
                if self._closed:
                    return
                epoch = self._epoch
                item = self._records[0] if self._cleared == epoch else None
            if item is None:
                with self._operation("clear"):
                    self.tier.clear()
            else:
                self._put(*item)
            with self._changed:
                if item is None:
                    self._cleared = epoch
                elif self._records and self._records[0] is item:  # taken away only now: `idle` means written
                    self._records.popleft()
                    self._waiting_bytes -= len(item[1])
                self._changed.notify_all()

    def _put(self, key: bytes, record: bytes) -> None:
        outcome = "failed"
        with self._operation("put"):
            full = fault("cache_store.tier", tier=self.name, operation="put") & FULL
            outcome = "stored" if not full and self.tier.put(key, record) else "refused"
        self._observe("kv_tier_writes_total", tier=self.name, outcome=outcome)
        if outcome == "stored":
            self._note(key)
            self._observe("kv_tier_bytes_total", len(record), tier=self.name, direction="written")
        else:
            self._forget((key,))

    @contextmanager
    def _operation(self, operation: str) -> Iterator[None]:
        """Counts the time of a tier's call, and swallows what it fails with."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            reason = reason_of(error)
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
