"""The tiers of all ranks, as rank 0's scheduler sees them: one store.

Every rank keeps its share of a block in tiers of its own, under a key that names rank and size, and loads it into the
same block of its own pool. Rank 0 decides: a prefix is found as far as every rank has found it, and loaded as far as it
is complete on every rank, and only then a step may use it. A rank that fails, or is late, makes it a miss for all. The
blocks of a fetch are free once nothing writes into them on any rank.

A rank's copy of a block only counts if the block still has the version that it had when rank 0 named it. The other
ranks give out no blocks themselves: each frame of rank 0 tells the versions of those that were given out since the last
one, before anything that writes to them (`Hub.watch_given`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache_store.events import Observation
from cache_store.tiers.store import Fetch, TierStore
from cache_store.tiers.tier import TierStats
from engine.parallel.tier_messages import Clear, FetchEnded, GiveUp, LoadInto, LookUp, TierCall, WriteDown

# Of the other ranks' observations those that are sums; blocks are counted once, on rank 0.
SUMMED = frozenset({"baton_kv_tier_bytes_total", "baton_kv_tier_errors_total", "baton_kv_tier_busy_seconds_total"})


class OtherRanks(Protocol):
    """The part of `engine.parallel.hub.Hub` that is used here."""

    @property
    def size(self) -> int: ...
    def post_tiers(self, call: TierCall) -> None: ...
    def take_tier_ends(self) -> Sequence[tuple[int, FetchEnded]]: ...


class RankFetch(Fetch):
    """A fetch that every rank has a part of."""

    def __init__(self, number: int, local: Fetch, size: int) -> None:
        super().__init__(local.keys, local.epoch)
        self.number = number
        self.local = local  # rank 0's part
        self.loading = False
        self.waiting = set(range(size))  # ranks whose part has not ended
        self.theirs: dict[int, int] = {}  # by rank other than 0: blocks found, or complete, once its part has ended
        self.others = size - 1

    @property
    def found(self) -> int:
        """Leading blocks that every rank has found; 0 as long as another rank has not answered."""
        return self._common(self.local.found)

    @property
    def good(self) -> int:
        """Leading blocks that are complete on every rank; 0 as long as another rank has not ended its part."""
        return self._common(self.local.good)

    def _common(self, own: int) -> int:
        return min([own, *self.theirs.values()]) if len(self.theirs) == self.others else 0


class RankTiers:
    """Has the methods of `TierStore` that an engine uses. Belongs to the engine's thread."""

    def __init__(self, store: TierStore, versions: Sequence[int], others: OtherRanks) -> None:
        """store: rank 0's own. versions: of the blocks, by the pool that gives them out."""
        self.local = store
        self._versions = versions
        self._others = others
        self._number = 0
        self._by_number: dict[int, RankFetch] = {}
        self._by_local: dict[Fetch, RankFetch] = {}
        self._ended: list[Fetch] = []

    # -- down -----------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        versions = self._versions
        self.local.write(blocks)
        self._others.post_tiers(WriteDown([(block, versions[block], name) for block, name in blocks]))

    # -- up -------------------------------------------------------------------------------------------------

    def look_up(self, block_hashes: Sequence[bytes]) -> Fetch | None:
        local = self.local.look_up(block_hashes)
        if local is None:
            return None
        self._number += 1
        self._others.post_tiers(LookUp(self._number, list(block_hashes)))
        return self._keep(RankFetch(self._number, local, self._others.size))

    def take_found(self, fetch: Fetch) -> Fetch:
        """Of a fetch that has found something, so that every other rank has answered."""
        assert isinstance(fetch, RankFetch) and len(fetch.theirs) == fetch.others
        fetch.cancelled = True
        self._forget(fetch)
        taken = RankFetch(fetch.number, self.local.take_found(fetch.local), self._others.size)
        taken.theirs = fetch.theirs
        taken.waiting.clear()
        return self._keep(taken)

    def load(self, fetch: Fetch, offset: int, blocks: Sequence[int]) -> None:
        assert isinstance(fetch, RankFetch)
        fetch.loading = True
        fetch.offset, fetch.blocks = offset, list(blocks)
        fetch.waiting = set(range(self._others.size))
        fetch.theirs = {}
        self._others.post_tiers(LoadInto(fetch.number, offset, list(blocks)))
        self.local.load(fetch.local, offset, blocks)

    def cancel(self, fetch: Fetch) -> bool:
        assert isinstance(fetch, RankFetch)
        fetch.cancelled = True
        if self.local.cancel(fetch.local):
            fetch.waiting.discard(0)
            self._by_local.pop(fetch.local, None)
        if self._by_number.get(fetch.number) is fetch:
            self._others.post_tiers(GiveUp(fetch.number))
        if fetch.waiting:
            return False
        self._forget(fetch)
        return True

    def poll(self) -> list[Fetch]:
        for local in self.local.poll():
            fetch = self._by_local.get(local)
            if fetch is not None:
                self._part_ended(fetch, 0)
        for rank, end in self._others.take_tier_ends():
            fetch = self._by_number.get(end.number)
            if fetch is None or end.loaded != fetch.loading or rank not in fetch.waiting:
                continue  # it was given up meanwhile
            fetch.theirs[rank] = end.blocks
            self._part_ended(fetch, rank)
        ended, self._ended = self._ended, []
        return ended

    def clear(self) -> None:
        self.local.clear()
        self._others.post_tiers(Clear())

    # -- everything else --------------------------------------------------------------------------------------

    def take_observations(self) -> list[Observation]:
        """Rank 0's. Those of the others come with the figures of their agents."""
        return self.local.take_observations()

    def stats(self) -> dict[str, TierStats]:
        """Of rank 0's share."""
        return self.local.stats()

    def close(self, drain_s: float) -> None:
        """Rank 0's. Those of the other ranks end with them."""
        self.local.close(drain_s)

    def _keep(self, fetch: RankFetch) -> RankFetch:
        self._by_number[fetch.number] = self._by_local[fetch.local] = fetch
        return fetch

    def _forget(self, fetch: RankFetch) -> None:
        self._by_local.pop(fetch.local, None)
        if self._by_number.get(fetch.number) is fetch:
            del self._by_number[fetch.number]

    def _part_ended(self, fetch: RankFetch, rank: int) -> None:
        fetch.waiting.discard(rank)
        if not fetch.waiting:
            self._ended.append(fetch)
            if fetch.loading or fetch.cancelled:
                self._forget(fetch)


class FollowedTiers:
    """The tiers of a rank that follows: does what rank 0 says. Belongs to the rank's thread."""

    def __init__(self, store: TierStore, versions: list[int]) -> None:
        """versions: those that the store goes by."""
        self.store = store
        self._versions = versions
        self._numbers: dict[Fetch, int] = {}
        self._fetches: dict[int, Fetch] = {}
        self._loading: set[int] = set()
        self._ends: list[FetchEnded] = []

    def given(self, blocks: Sequence[tuple[int, int]]) -> None:
        """(block, its version now) of blocks that are written to from now on."""
        for block, version in blocks:
            self._versions[block] = version

    def apply(self, call: TierCall) -> None:
        match call:
            case WriteDown():
                named = [(block, name) for block, _, name in call.blocks]
                self.store.write(named, [version for _, version, _ in call.blocks])
            case LookUp():
                fetch = self.store.look_up(call.block_hashes)
                if fetch is None:  # nobody can look in time
                    self._ends.append(FetchEnded(call.number, False, 0))
                    return
                self._numbers[fetch], self._fetches[call.number] = call.number, fetch
            case LoadInto():
                self._loading.add(call.number)
                self.store.load(self._fetches[call.number], call.offset, call.blocks)
            case GiveUp():
                fetch = self._fetches.get(call.number)
                if fetch is not None and self.store.cancel(fetch):
                    self._end(fetch)
                    self._drop(fetch)
            case Clear():
                self.store.clear()

    def take_ends(self) -> list[FetchEnded]:
        """What has ended since the last call; what was named goes down from now on."""
        for fetch in self.store.poll():
            if fetch in self._numbers:
                self._end(fetch)
        ends, self._ends = self._ends, []
        return ends

    def take_observations(self) -> list[Observation]:
        return [item for item in self.store.take_observations() if item.name in SUMMED]

    def close(self, drain_s: float) -> None:
        self.store.close(drain_s)

    def _end(self, fetch: Fetch) -> None:
        number = self._numbers[fetch]
        loaded = number in self._loading
        self._ends.append(FetchEnded(number, loaded, fetch.good if loaded else fetch.found))
        if loaded or fetch.cancelled:
            self._drop(fetch)

    def _drop(self, fetch: Fetch) -> None:
        number = self._numbers.pop(fetch, None)
        if number is not None:
            del self._fetches[number]
            self._loading.discard(number)
