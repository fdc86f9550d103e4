"""Blocks on their way from an engine's KV pool down to its tiers.

The engine names blocks that have entered its prefix cache, in the order of their prefix. A thread copies each out of
the pool, once, and gives the record to every tier that lacks it. The block may be given to another request at any time,
so the copy only counts if the block's version, which the pool raises when it gives a block out, is the same after the
copy as when the engine named it.

A tier has room for some megabytes of records that wait to be written. What it has no room for, and what comes while it
cannot be reached, stays in the pool and is remembered: in the order in which it was named the thread comes back to it
when the tier can take more, if the pool has not given the block away by then. So a tier that is slower than the engine
has the beginning of a prefix, which is of use without its end, and lacks the end, which the pool gives away first. A
block that is left out in the middle would cost all that follow it. No tier waits for another one, and the engine for
none.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_store.memory.staging import Ticket
from cache_store.observations import Observe
from cache_store.tiers.copies import BlockCopies
from cache_store.tiers.keys import TierKeys
from cache_store.tiers.lane import TierLane
from cache_store.tiers.record import HEADER_BYTES, record_bytes, seal_record
from rpc.log_limit import LogLimit

MOST_WRITES = 4096  # blocks that wait to be copied out of the pool; as many more for each tier that has no room
TURN_S = 0.25  # between looks at whether a tier that took nothing takes something now

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    block: int
    version: int
    block_hash: bytes
    after: Ticket | None
    epoch: int


@dataclass(eq=False, slots=True)
class _Chain:
    """Blocks that follow each other in a prefix, named together."""

    writes: Sequence[_Write]
    next: int = 0  # the first that was not looked at
    keys: list[bytes] = field(default_factory=list)  # of those that were


class Descent:
    """The copying thread and what waits for it. `name`, `release`, `clear` and `close` are the engine's thread's."""

    def __init__(
        self,
        lanes: Sequence[TierLane],
        copies: BlockCopies,
        keys: TierKeys,
        versions: Sequence[int],
        observe: Observe,
    ) -> None:
        self._lanes = lanes
        self._copies = copies
        self._keys = keys
        self._versions = versions
        self._observe = observe
        self._failures = LogLimit()
        self._record_bytes = record_bytes(copies.payload_bytes)
        self._capacity = {lane.name: lane.capacity(self._record_bytes) for lane in lanes}
        self._closed = False
        self._named: list[_Chain] = []  # by the engine, since it has polled
        self._named_blocks = 0
        self._changed = threading.Condition()
        self._chains: deque[_Chain] = deque()
        self._waiting = 0  # blocks of these that were not looked at
        # By name of the tier, and by key: what it has no room for, in the order in which it is to get it.
        self._later: dict[str, OrderedDict[bytes, _Write]] = {lane.name: OrderedDict() for lane in lanes}
        self._busy = False
        for lane in lanes:
            lane.on_room = self._wake
        self._thread = threading.Thread(target=self._run, name="kv-tiers-copy", daemon=True)
        self._thread.start()

    # -- the engine's thread ----------------------------------------------------------------------------------

    def name(self, blocks: Sequence[tuple[int, bytes]], epoch: int, versions: Sequence[int] | None) -> None:
        """See `TierStore.write`. Begins with `release`. What is too much is left out from the end."""
        if versions is None:
            versions = [self._versions[block] for block, _ in blocks]
        room = max(0, MOST_WRITES - self._waiting - self._named_blocks)
        if len(blocks) > room:
            self._observe("kv_tier_skipped_writes_total", len(blocks) - room, reason="queue_full")
            blocks = blocks[:room]
        if blocks:
            after = self._copies.mark()
            self._named.append(
                _Chain(
                    [
                        _Write(block, version, name, after, epoch)
                        for (block, name), version in zip(blocks, versions, strict=False)
                    ]
                )
            )
            self._named_blocks += len(blocks)

    def release(self) -> None:
        """What was named may be copied from now on."""
        if not self._named:
            return
        named, self._named = self._named, []
        count, self._named_blocks = self._named_blocks, 0
        with self._changed:
            self._chains += named
            self._waiting += count
            self._changed.notify_all()

    def clear(self) -> None:
        """Forgets what waits."""
        self._named.clear()
        self._named_blocks = 0
        with self._changed:
            self._chains.clear()
            self._waiting = 0
            for later in self._later.values():
                later.clear()

    @property
    def idle(self) -> bool:
        """Whether nothing waits but for tiers that cannot take it now."""
        with self._changed:
            if self._named or self._chains or self._busy:
                return False
            return not any(self._later[lane.name] and lane.takes for lane in self._lanes)

    def close(self, timeout_s: float) -> None:
        self._closed = True
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # -- the copying thread -------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        records = [bytearray(self._record_bytes) for _ in range(self._copies.batch)]
        while True:
            with self._changed:
                self._busy = False
                while not (self._closed or self._chains or self._ready()):
                    self._changed.wait(TURN_S if any(self._later.values()) else None)
                if self._closed:
                    return
                self._busy = True
                ready, chain = self._ready(), self._chains[0] if self._chains else None
            for lane in ready:
                self._copy(self._take_later(lane), records, lane)
            if chain is not None:
                self._copy(self._take(chain), records)
                self._go_on(chain)

    def _ready(self) -> list[TierLane]:
        """Tiers that can take something that they could not."""
        return [
            lane
            for lane in self._lanes
            if self._later[lane.name] and lane.takes and lane.has_room(1, self._record_bytes)
        ]

    def _take_later(self, lane: TierLane) -> list[tuple[_Write, bytes, list[TierLane]]]:
        """What the tier gets now of what it had no room for."""
        taken: list[tuple[_Write, bytes, list[TierLane]]] = []
        gone = 0
        with self._changed:
            later = self._later[lane.name]
            while later and len(taken) < self._copies.batch and lane.has_room(len(taken) + 1, self._record_bytes):
                key, write = next(iter(later.items()))
                if taken and write.after is not taken[0][0].after:
                    break
                del later[key]
                if self._versions[write.block] != write.version:
                    gone += 1
                elif not lane.has(key):
                    taken.append((write, key, [lane]))
        if gone:
            self._observe("kv_tier_writes_total", gone, tier=lane.name, outcome="overtaken")
        return taken

    def _take(self, chain: _Chain) -> list[tuple[_Write, bytes, list[TierLane]]]:
        """The next blocks of a chain, as many as are copied at once, each with the tiers that get it now."""
        taken: list[tuple[_Write, bytes, list[TierLane]]] = []
        present = 0
        planned = dict.fromkeys(self._later, 0)
        with self._changed:
            writes = chain.writes[chain.next : chain.next + self._copies.batch]
            if self._chains and self._chains[0] is chain:  # it was not cleared meanwhile
                self._waiting -= len(writes)
        for write in writes:
            number = len(chain.keys)
            key = self._keys.key(write.block_hash)
            chain.keys.append(key)
            lacking = [lane for lane in self._lanes if not lane.has(key)]
            present += not lacking
            now: list[TierLane] = []
            for lane in lacking:
                count = planned[lane.name] + 1
                if number >= self._capacity[lane.name]:  # it would push out what it is to follow
                    self._observe("kv_tier_writes_total", tier=lane.name, outcome="refused")
                elif self._later[lane.name] or not lane.takes or not lane.has_room(count, self._record_bytes):
                    self._put_off(lane, key, write)
                else:
                    planned[lane.name] = count
                    now.append(lane)
            if now:
                taken.append((write, key, now))
        if present:
            self._observe("kv_tier_skipped_writes_total", present, reason="present")
        chain.next += len(writes)
        return taken

    def _put_off(self, lane: TierLane, key: bytes, write: _Write) -> None:
        with self._changed:
            later = self._later[lane.name]
            if write.epoch < lane.epoch and not lane.shared:
                return  # cleared since
            if key in later or len(later) < MOST_WRITES:
                later[key] = write  # keeps its place, if it has one
                return
        self._observe("kv_tier_writes_total", tier=lane.name, outcome="dropped")

    def _go_on(self, chain: _Chain) -> None:
        if chain.next < len(chain.writes):
            return
        # What was used most recently is the last to go, and a beginning is of use without what follows it.
        for lane in self._lanes:
            lane.touch(chain.keys)
        with self._changed:
            if self._chains and self._chains[0] is chain:
                self._chains.popleft()

    def _copy(
        self,
        taken: Sequence[tuple[_Write, bytes, list[TierLane]]],
        records: Sequence[bytearray],
        late: TierLane | None = None,
    ) -> None:
        """Copies blocks out of the pool and offers them. late: a tier that gets now what it could not before."""
        versions, reused = self._versions, 0
        try:
            current = [each for each in taken if versions[each[0].block] == each[0].version]
            reused = len(taken) - len(current)
            if current:
                payloads = [memoryview(record)[HEADER_BYTES:] for record in records[: len(current)]]
                self._copies.read([write.block for write, _, _ in current], payloads, current[0][0].after)
            for (write, key, lanes), record in zip(current, records, strict=False):
                if versions[write.block] != write.version:
                    reused += 1  # given to somebody else while it was copied
                    continue
                seal_record(key, record)
                kept = bytes(record)
                for lane in lanes:
                    lane.offer(key, kept, write.epoch)
        except Exception as error:
            self._observe("kv_tier_skipped_writes_total", len(taken), reason="failed")
            if count := self._failures.occurred("write"):
                _log.warning("KV blocks could not be copied to tiers", exc_info=error, extra={"occurrences": count})
        if reused and late is not None:
            self._observe("kv_tier_writes_total", reused, tier=late.name, outcome="overtaken")
        elif reused:
            self._observe("kv_tier_skipped_writes_total", reused, reason="reused")
