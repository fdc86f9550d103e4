"""Blocks of prefixes that come back from the tiers below the KV pool before a prompt is computed.

A prompt that is to be computed here asks the tiers for what the pool lacks of its beginning as soon as it is queued.
What they have is loaded into blocks that are held as `receiving` meanwhile, enters the prefix cache, and is let go: to
the prompt it is a hit in the prefix cache like any other, and so it is to everything that comes after. Until then the
prompt keeps its place in the queue and holds up nobody. Whatever goes wrong, or takes too long, costs the hit and
nothing else: blocks into which a copy is under way are quarantined until it has ended.

Pure bookkeeping on the engine's thread; the copies are made by threads of `cache_store.tiers.store.TierStore`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from cache_store.tiers.store import Fetch
from engine.kv_cache.cache import Allocation, Chains, KvCache
from engine.requests import Request, StepTime
from engine.scheduler.news import News


class Tiers(Protocol):
    """The part of `TierStore` that the scheduler uses. Nothing here blocks."""

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...
    def look_up(self, block_hashes: Sequence[bytes]) -> Fetch | None: ...
    def take_found(self, fetch: Fetch) -> Fetch: ...
    def load(self, fetch: Fetch, offset: int, blocks: Sequence[int]) -> None: ...
    def cancel(self, fetch: Fetch) -> bool: ...
    def poll(self) -> list[Fetch]: ...
    def clear(self) -> None: ...


class Phase(Enum):
    LOOKING = auto()  # the tiers are asked what they have
    FOUND = auto()  # they have something; blocks are wanted to load it into
    LOADING = auto()  # it is being loaded
    LEAVING = auto()  # nobody waits for it, but its blocks may still be written


@dataclass(eq=False, slots=True)
class PrefixFetch:
    """One prefix on its way, and the requests that wait for it."""

    fetch: Fetch
    tokens: Sequence[int]  # begin with the prefix
    chains: Chains
    key: bytes  # hash of its first block
    first: int  # block of the prefix that the fetch begins with; the pool had those before it
    began_s: float
    deadline_s: float
    phase: Phase = Phase.LOOKING
    requests: list[Request] = field(default_factory=list)
    allocation: Allocation | None = None

    @property
    def waited_for(self) -> bool:
        """Whether its requests cannot be admitted yet, whatever room there is."""
        return self.phase is Phase.LOOKING or self.phase is Phase.LOADING


class PrefixFetches:
    """All fetches of an engine. `request.fetch` is that of a queued request, None once there is nothing to wait for."""

    def __init__(
        self, kv: KvCache, tiers: Tiers, news: News, time: StepTime, *, timeout_s: float, min_tokens: int
    ) -> None:
        """timeout_s: longest delay of a prompt, half of which a look-up may take. min_tokens: that the pool lacks;
        below, to ask is not worth it."""
        if len(kv.groups) != 1:
            raise ValueError("tiers hold the blocks of one cache group")
        self._kv = kv
        self._tiers = tiers
        self._news = news
        self._time = time
        self._timeout_s = timeout_s
        self._tag, self._size = kv.groups[0].tag, kv.groups[0].block_size
        self._min_tokens = max(min_tokens, self._size)
        self._all: dict[Fetch, PrefixFetch] = {}
        self._by_hash: dict[bytes, PrefixFetch] = {}  # those that a prompt with the same missing block may wait for

    # -- down -------------------------------------------------------------------------------------------------

    def committed(self, request: Request, blocks: Sequence[tuple[int, bytes]], start: int) -> None:
        """A step that has computed a request's tokens from `start` on has put these blocks into the prefix cache.

        With the last of a prompt's steps all of its blocks are named: those of each step would else be older to the
        tiers than what follows them, and go before it.
        """
        allocation = request.allocation
        assert allocation is not None
        if allocation.cached_tokens < start < len(request.prompt) <= request.computed:
            held = allocation.groups[self._tag]
            blocks = list(zip(held.blocks[: request.computed // self._size], held.chain.hashes, strict=False))
        if blocks:
            self._tiers.write(blocks)

    def admitted(self, request: Request) -> None:
        """What a prompt found in the pool is in use: where a tier has lost it, it gets it again."""
        allocation = request.allocation
        assert allocation is not None
        count = allocation.cached_tokens // self._size
        if count:
            held = allocation.groups[self._tag]
            self._tiers.write(list(zip(held.blocks[:count], held.chain.hashes, strict=False)))

    # -- up ---------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """The request has been queued to be computed here."""
        if request.wants_prompt_logprobs or not self._kv.prefix_caching:
            return
        tokens, chains, size = request.tokens, request.chains, self._size
        usable = (len(tokens) - 1) // size  # the last token is computed in any case
        if usable * size < self._min_tokens:
            return
        first = self._kv.cached_tokens(tokens, chains, usable * size) // size
        if (usable - first) * size < self._min_tokens:
            return
        hashes = chains[size].extend(tokens, usable)[first:usable]
        active = self._by_hash.get(hashes[0])
        if active is None:
            fetch = self._tiers.look_up(hashes)
            if fetch is None:
                self._count("busy")
                return
            now = self._time.now
            active = PrefixFetch(fetch, tokens, chains, hashes[0], first, now, now + self._timeout_s / 2)
            self._all[fetch] = self._by_hash[hashes[0]] = active
        active.requests.append(request)
        request.fetch = active

    def load(self, request: Request) -> bool:
        """It is the request's turn, and what was found for it wants blocks. False: there are too few now."""
        active = request.fetch
        assert active is not None and active.phase is Phase.FOUND
        return self._load(active)

    def abandon(self, request: Request) -> None:
        """The request has ended."""
        active, request.fetch = request.fetch, None
        if active is None:
            return
        active.requests.remove(request)
        if not active.requests:
            self._settle(active, "abandoned")

    def flush(self) -> None:
        """Nothing that is under way may enter the prefix cache, and the tiers of this server forget everything."""
        for active in list(self._all.values()):
            if active.phase is not Phase.LEAVING:
                self._settle(active, "flushed")
        self._tiers.clear()

    def deliver(self) -> None:
        """Takes note of what threads have done since."""
        for fetch in self._tiers.poll():
            active = self._all.get(fetch)
            if active is None:
                continue  # a look-up that nobody waits for any more
            if active.phase is Phase.LEAVING:
                del self._all[fetch]
                assert active.allocation is not None
                self._kv.free(active.allocation)
            elif active.phase is Phase.LOOKING:
                self._looked_up(active)
            else:
                self._settle(active, "", ended=True)

    def tick(self) -> None:
        """Ends what has taken too long."""
        now = self._time.now
        for active in list(self._all.values()):
            if not active.waited_for or now < active.deadline_s:
                continue
            if active.phase is Phase.LOOKING and active.fetch.found:
                # A farther tier has not answered; what nearer ones have is as good.
                del self._all[active.fetch]
                active.fetch = self._tiers.take_found(active.fetch)
                self._all[active.fetch] = active
                self._looked_up(active)
            else:
                self._settle(active, "timeout")

    def next_due_s(self) -> float:
        """When `tick` has something to do; infinity if never."""
        return min((active.deadline_s for active in self._all.values() if active.waited_for), default=math.inf)

    def holds(self) -> Iterator[tuple[str, float]]:
        """(state of the ledger, since when) of each fetch that holds blocks."""
        for active in self._all.values():
            if active.allocation is not None:
                yield "quarantined" if active.phase is Phase.LEAVING else "receiving", active.began_s

    # -- internals ------------------------------------------------------------------------------------------

    def _looked_up(self, active: PrefixFetch) -> None:
        if not active.fetch.found:
            self._settle(active, "absent")
            return
        active.phase = Phase.FOUND
        # Before its turn it takes no more than half of the room, so that those who run find some.
        if 2 * active.fetch.found <= self._kv.available(self._tag):
            self._load(active)

    def _load(self, active: PrefixFetch) -> bool:
        fetch, size = active.fetch, self._size
        last = active.first + fetch.found
        allocation = self._kv.acquire(active.tokens[: last * size], active.chains, max_hit=last * size, receive=True)
        if allocation is None:
            return False
        held = allocation.groups[self._tag]
        hit = allocation.cached_tokens // size
        if not active.first <= hit < last:  # the pool has lost blocks before them, or got all of them meanwhile
            # What is to be written to these blocks has not begun.
            self._kv.free(allocation)
            self._settle(active, "displaced" if hit < active.first else "computed")
            return True
        active.allocation = allocation
        active.phase = Phase.LOADING
        active.deadline_s = self._time.now + self._timeout_s / 2
        self._tiers.load(fetch, hit - active.first, held.blocks[hit:last])
        return True

    def _settle(self, active: PrefixFetch, outcome: str, ended: bool = False) -> None:
        """Its requests wait no longer. ended: nothing of it is under way. outcome: why, when it is not the tiers'."""
        allocation, fetch, size = active.allocation, active.fetch, self._size
        if self._by_hash.get(active.key) is active:
            del self._by_hash[active.key]
        loaded = 0
        quiet = ended or self._tiers.cancel(fetch)
        if allocation is None:
            del self._all[fetch]
        else:
            if outcome != "flushed":
                loaded = fetch.good
            if loaded:
                hit = allocation.cached_tokens // size
                self._kv.received_leading(allocation, self._tag, loaded)
                self._kv.commit(allocation, active.tokens, (hit + loaded) * size)
            if quiet:
                del self._all[fetch]
                self._kv.free(allocation)
            else:
                active.phase = Phase.LEAVING
                self._kv.quarantine(allocation)
        if not outcome:
            outcome = "loaded" if loaded == len(fetch.blocks) else "partial" if loaded else "failed"
        self._count(outcome)
        self._news.sample("baton_kv_tier_fetch_seconds", self._time.now - active.began_s)
        if loaded:
            self._news.count("baton_kv_tier_fetched_tokens_total", loaded * size)
        for request in active.requests:
            request.fetch = None
            request.tried_at_releases = -1
            if loaded:
                request.event("prefix_fetched")
        active.requests.clear()

    def _count(self, outcome: str) -> None:
        self._news.count("baton_kv_tier_fetches_total", outcome=outcome)
