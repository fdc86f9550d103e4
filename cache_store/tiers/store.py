"""The tiers below one engine's KV pool, as the engine sees them: blocks go down when they are computed and come back
when a prompt asks for them. No call of the engine's thread waits for anything here.

Down: the engine names blocks that have entered its prefix cache, and a thread gives them to the tiers (descent.py). It
begins when the engine polls next, after the step in which the blocks were named: its copies would take processors and
memory from the very step that a first token waits for.

Up: a `Fetch` is first looked up, which tells how many leading blocks the tiers have, nearest tier first; then loaded
into blocks that the engine has reserved. A record is copied into memory of the reading thread, or lies in memory of
this process that nobody changes; its key and checksum are compared there, and only then is it copied on into the pool.
All readers of a tier that are free take part in a load, each taking the next blocks of it. `Fetch.good` tells the
leading blocks that are complete.
The engine may give a fetch up at any time by `cancel`. Nothing writes into its blocks once it has come out of `poll`,
or once `cancel` has said so: a tier that hangs has the reading thread's memory alone. Once its prompt is admitted, the
engine names its blocks again, and tiers that lack one get it: so what was found far away comes nearer, and what one
tier has lost comes back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_store.events import Observation
from cache_store.memory.staging import Ticket
from cache_store.observations import ObservationBuffer
from cache_store.tiers.copies import BlockCopies
from cache_store.tiers.descent import Descent
from cache_store.tiers.host import HostTier
from cache_store.tiers.keys import TierKeys
from cache_store.tiers.lane import READERS, TierLane
from cache_store.tiers.record import open_record, record_bytes
from cache_store.tiers.tier import Tier, TierStats
from rpc.log_limit import LogLimit

MOST_HOPS = 64  # turns from tier to tier of one look-up
BLOCKS_FOR_A_READER = 8  # of a load; fewer are not worth another one
DRAIN_S = 2.0  # for what waits to be written when the engine ends

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Segment:
    """Blocks [first, last) of a fetch, which lie in one tier."""

    lane: TierLane
    first: int
    last: int


@dataclass(eq=False, slots=True)
class _Part:
    """Blocks [next, last) of a load that no reader has begun with, of those that lie in one tier. Under the lock."""

    lane: TierLane
    next: int
    last: int
    readers: int = 0  # at work

    @property
    def over(self) -> bool:
        return self.next >= self.last and not self.readers


@dataclass(eq=False, slots=True)
class Fetch:
    """Consecutive blocks of one prefix on their way up. Threads write `segments`, `complete` and `failed`."""

    keys: Sequence[bytes]
    epoch: int
    segments: list[Segment] = field(default_factory=list)
    cancelled: bool = False
    offset: int = 0  # of the block that blocks[0] is for
    blocks: Sequence[int] = ()
    after: Ticket | None = None
    complete: bytearray = field(default_factory=bytearray)  # by block: 1 once its KV is in the pool
    failed: int = 0  # the first block that will not come; those after it are of no use
    pending: int = 0  # parts of the load that are under way
    writing: int = 0  # of these, those that copy into the pool now

    @property
    def found(self) -> int:
        """Leading blocks that a tier has, as far as is known."""
        segments = self.segments
        return segments[-1].last if segments else 0

    @property
    def good(self) -> int:
        """Blocks that are complete, from blocks[0] on without a gap."""
        gap = self.complete.find(0)
        return len(self.complete) if gap < 0 else gap


class TierStore:
    """The tiers of one engine, nearest first. All calls are the engine's thread's."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        copies: BlockCopies,
        keys: TierKeys,
        versions: Sequence[int],
        *,
        timeout_s: float,
        wake: Callable[[], None],
    ) -> None:
        """versions: by block; the pool raises a block's before anything else may be written to it. timeout_s: after
        which nobody waits for a fetch any more. wake: called by threads when `poll` has something new."""
        self._copies = copies
        self._keys = keys
        self._versions = versions
        self._wake = wake
        self._news = ObservationBuffer()
        self._lanes = [
            TierLane(tier, self._news.observe, hung_s=timeout_s, writes=not isinstance(tier, HostTier))
            for tier in tiers
        ]
        self._record_bytes = record_bytes(copies.payload_bytes)
        self._buffers = threading.local()
        self._epoch = 0
        self._lock = threading.Lock()  # of what threads count in fetches; never held while a tier or a copy works
        self._ended: deque[Fetch] = deque()
        self._failures = LogLimit()
        self._told = {lane.name: TierStats() for lane in self._lanes}
        self._closed = False
        self._descent = Descent(self._lanes, copies, keys, versions, self._news.observe)

    # -- down -----------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[tuple[int, bytes]], versions: Sequence[int] | None = None) -> None:
        """(block, its hash) of blocks whose KV is complete and which are in the prefix cache now, in a prefix's order.

        Those that a tier has already are in use there; the others are copied, or left out if too many wait. Begins when
        `poll` is called next. versions: that the blocks had when their KV was complete, one for each; None: the present
        ones.
        """
        self._descent.name(blocks, self._epoch, versions)

    # -- up -------------------------------------------------------------------------------------------------

    def look_up(self, block_hashes: Sequence[bytes]) -> Fetch | None:
        """Asks which leading blocks the tiers have; comes out of `poll`. None: nobody can look in time."""
        fetch = Fetch(self._keys.keys(block_hashes), self._epoch)
        if self._lanes[0].submit(lambda: self._look(fetch, 0)):
            return fetch
        # The nearest tier hangs. The next one may not.
        return fetch if self._hop(fetch, 1) else None

    def load(self, fetch: Fetch, offset: int, blocks: Sequence[int]) -> None:
        """Fills `blocks`, of which the first is block `offset` of a fetch that was looked up; comes out of `poll`
        again. At most as many as were found."""
        count = len(blocks)
        fetch.offset, fetch.blocks = offset, blocks
        fetch.after = self._copies.mark()
        fetch.complete = bytearray(count)
        fetch.failed = count
        parts = [
            _Part(segment.lane, max(segment.first - offset, 0), min(segment.last - offset, count))
            for segment in fetch.segments
            if segment.last > offset and segment.first < offset + count
        ]
        fetch.pending = len(parts) + 1
        for part in parts:
            self._begin_part(fetch, part)
        self._part_ended(fetch)

    def _begin_part(self, fetch: Fetch, part: _Part) -> None:
        """Asks several readers: whoever is free first does the most."""
        wanted = min(READERS, -(-(part.last - part.next) // BLOCKS_FOR_A_READER))
        asked = 0
        while asked < wanted and part.lane.submit(lambda: self._load(fetch, part)):
            asked += 1
        if not asked:
            self._fail(fetch, part.next)
            self._part_ended(fetch)

    def take_found(self, fetch: Fetch) -> Fetch:
        """What a look-up has found so far, as one that has ended. It is cancelled itself."""
        fetch.cancelled = True
        return Fetch(fetch.keys, fetch.epoch, list(fetch.segments))

    def cancel(self, fetch: Fetch) -> bool:
        """Nobody wants it any more; it comes out of `poll` when its last thread has noticed. True: nothing writes into
        its blocks from now on, even if a tier hangs. False: a copy into them is under way."""
        with self._lock:
            fetch.cancelled = True
            return fetch.writing == 0

    def poll(self) -> list[Fetch]:
        """Fetches whose look-up or load has ended since the last call. What was named before goes down from now on."""
        self._descent.release()
        ended: list[Fetch] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    # -- everything else ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets every block, also those on their way down; shared tiers keep theirs. Fetches are to be cancelled."""
        self._epoch += 1
        for lane in self._lanes:
            lane.clear(self._epoch)
        self._descent.clear()

    def take_observations(self) -> list[Observation]:
        for lane in self._lanes:
            told, stats = self._told[lane.name], lane.stats()
            if stats.evicted_blocks > told.evicted_blocks:
                new = stats.evicted_blocks - told.evicted_blocks
                self._news.observe("kv_tier_evicted_blocks_total", new, tier=lane.name)
            if stats.wasted_blocks > told.wasted_blocks:
                new = stats.wasted_blocks - told.wasted_blocks
                self._news.observe("kv_tier_wasted_blocks_total", new, tier=lane.name)
            self._told[lane.name] = stats
        return self._news.take()

    def stats(self) -> dict[str, TierStats]:
        """By name of the tier."""
        return {lane.name: lane.stats() for lane in self._lanes}

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way down."""
        return self._descent.idle and all(lane.idle for lane in self._lanes)

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Ends the threads, after what is on its way down if that takes no longer than `drain_s`."""
        self._descent.release()
        until = time.monotonic() + drain_s
        while not self.idle and time.monotonic() < until:
            time.sleep(0.01)  # the engine has ended
        self._closed = True
        self._descent.close(DRAIN_S)
        for lane in self._lanes:
            lane.close()

    # -- threads: up ------------------------------------------------------------------------------------------

    def _look(self, fetch: Fetch, number: int) -> None:
        """Runs on a reader of lane `number`. Tiers of this server answer at once and may be asked by any reader."""
        hops = 0
        while not fetch.cancelled and fetch.found < len(fetch.keys) and number < len(self._lanes):
            lane = self._lanes[number]
            before = fetch.found
            count = lane.find(fetch.keys[before:] if before else fetch.keys)
            if count:
                fetch.segments.append(Segment(lane, before, before + count))
                number = -1  # a nearer tier may have what follows
            number += 1
            hops += 1
            if hops > MOST_HOPS:
                break
            if number < len(self._lanes) and self._lanes[number].shared and fetch.found < len(fetch.keys):
                if fetch.cancelled or not self._hop(fetch, number):
                    break
                return
        self._end(fetch)

    def _hop(self, fetch: Fetch, number: int) -> bool:
        """Goes on with the look-up on a lane from `number` on that answers; False if there is none."""
        for following in range(number, len(self._lanes)):
            if self._lanes[following].submit(lambda following=following: self._look(fetch, following)):  # type: ignore[misc]
                return True
        return False

    def _load(self, fetch: Fetch, part: _Part) -> None:
        """Runs on readers of the part's lane, on several at once: takes blocks of the part until none is left."""
        if not self._join(fetch, part):
            return  # others were quicker
        numbers = range(0)
        try:
            records = self._own_records()
            while numbers := self._take(fetch, part):
                payloads: list[memoryview] = []
                for number, record in zip(numbers, records, strict=False):
                    payload = None if self._useless(fetch, number) else self._get(fetch, part.lane, number, record)
                    if payload is None:
                        self._fail(fetch, number)
                        break
                    payloads.append(payload)
                if payloads:
                    self._fill(fetch, numbers[: len(payloads)], payloads)
        except Exception as error:
            if count := self._failures.occurred("load"):
                _log.warning("KV blocks could not be copied from a tier", exc_info=error, extra={"occurrences": count})
            self._fail(fetch, numbers.start)
        finally:
            self._leave(fetch, part)

    def _join(self, fetch: Fetch, part: _Part) -> bool:
        with self._lock:
            if part.over:
                return False
            part.readers += 1
            return True

    def _take(self, fetch: Fetch, part: _Part) -> range:
        """The next blocks of a part, as many as are copied at once; none when the others are of no use."""
        with self._lock:
            if self._useless(fetch, part.next):
                part.next = part.last
            first, part.next = part.next, min(part.next + self._copies.batch, part.last)
            return range(first, part.next)

    def _leave(self, fetch: Fetch, part: _Part) -> None:
        with self._lock:
            part.readers -= 1
            if self._useless(fetch, part.next):
                part.next = part.last
            over = part.over
        if over:
            self._part_ended(fetch)

    def _fill(self, fetch: Fetch, numbers: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copies payloads into the pool, unless nobody wants them any more."""
        with self._lock:
            if self._useless(fetch, numbers[0]):
                return
            fetch.writing += 1
        try:
            self._copies.write(payloads, [fetch.blocks[number] for number in numbers], fetch.after)
            for number in numbers:
                fetch.complete[number] = 1
        finally:
            with self._lock:
                fetch.writing -= 1

    def _useless(self, fetch: Fetch, number: int) -> bool:
        return fetch.cancelled or number >= fetch.failed

    def _get(self, fetch: Fetch, lane: TierLane, number: int, record: bytearray) -> memoryview | None:
        """The payload of a block, checked; it lies in `record`, or in memory of a tier that does not change. Where the
        tier has lost it since the look-up, another one of this server may have it."""
        key = fetch.keys[fetch.offset + number]
        for each in (lane, *(other for other in self._lanes if not other.shared and other is not lane)):
            got = each.get(key, memoryview(record))
            if got is None:
                continue
            payload = open_record(key, got)
            if payload is not None:
                self._news.observe("kv_tier_hit_blocks_total", tier=each.name)
                return payload
            each.damaged(key)
        return None

    def _own_records(self) -> list[bytearray]:
        records: list[bytearray] | None = getattr(self._buffers, "records", None)
        if records is None:
            records = self._buffers.records = [bytearray(self._record_bytes) for _ in range(self._copies.batch)]
        return records

    def _fail(self, fetch: Fetch, number: int) -> None:
        with self._lock:
            fetch.failed = min(fetch.failed, number)

    def _part_ended(self, fetch: Fetch) -> None:
        with self._lock:
            fetch.pending -= 1
            ended = fetch.pending == 0
        if ended:
            self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        self._ended.append(fetch)
        if not self._closed:
            self._wake()
