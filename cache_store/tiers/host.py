"""Blocks in host memory, up to a limit in bytes; the least recently used one goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from cache_store.tiers.tier import Record, TierStats, leading

ENTRY_BYTES = 256  # what the table needs beside a record, about


class HostTier:
    """A `Tier` of this process, which ends with it. Safe to use from several threads; nothing in it blocks for long."""

    name = "host"
    shared = False
    takes = True

    def __init__(self, limit_bytes: int) -> None:
        """limit_bytes: of records and of the table that finds them."""
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, bytes] = OrderedDict()  # the least recently used one first
        self._bytes = 0
        self._evicted = 0

    def find(self, keys: Sequence[bytes]) -> int:
        """Counts as a use of what it finds, of the last one first: a beginning is of use without what follows."""
        with self._lock:
            records = self._records
            count = leading(keys, records)
            for key in reversed(keys[:count]):
                records.move_to_end(key)
            return count

    def has(self, key: bytes) -> bool:
        return key in self._records

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in reversed(keys):
                if key in self._records:
                    self._records.move_to_end(key)

    def get(self, key: bytes, into: memoryview) -> bool:
        """Is no use: `find` comes before it, in the right order."""
        record = self._records.get(key)
        if record is None or len(record) != into.nbytes:
            return False
        into[:] = record
        return True

    def lent(self, key: bytes) -> bytes | None:
        return self._records.get(key)

    def put(self, key: bytes, record: Record) -> bool:
        """A record of type `bytes` is kept as it is, without a copy."""
        kept = bytes(record)
        size = len(kept) + ENTRY_BYTES
        if size > self._limit:
            return False
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
                return True
            while self._bytes + size > self._limit:
                _, old = self._records.popitem(last=False)
                self._bytes -= len(old) + ENTRY_BYTES
                self._evicted += 1
            self._records[key] = kept
            self._bytes += size
        return True

    def discard(self, key: bytes) -> None:
        with self._lock:
            record = self._records.pop(key, None)
            if record is not None:
                self._bytes -= len(record) + ENTRY_BYTES

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self._bytes = 0

    def stats(self) -> TierStats:
        return TierStats(len(self._records), self._bytes, self._limit, self._evicted)

    def close(self) -> None:
        self.clear()
