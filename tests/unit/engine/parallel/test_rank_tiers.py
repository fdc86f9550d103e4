"""Tiers of two ranks as one: what one rank lacks is a miss for both; blocks are free once neither writes into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from cache_store.tiers.host import HostTier
from cache_store.tiers.store import Fetch
from cache_store.tiers.tier import Tier, TierError
from engine.parallel.messages import FollowerFrame, RankFrame
from engine.parallel.tier_messages import FetchEnded, TierCall
from engine.parallel.tiers import FollowedTiers, RankFetch, RankTiers
from tests.unit.cache_store.tier_fixtures import Below, ScriptedTier, key_of, until


class Link:
    """Frames between rank 0 and rank 1, which arrive when a test says so."""

    size = 2

    def __init__(self) -> None:
        self.posted: list[TierCall] = []
        self.ends: list[tuple[int, FetchEnded]] = []

    def post_tiers(self, call: TierCall) -> None:
        self.posted.append(call)

    def take_tier_ends(self) -> list[tuple[int, FetchEnded]]:
        ends, self.ends = self.ends, []
        return ends


class Ranks:
    """Two pools of 40 blocks with a store below each; blocks are given out by rank 0."""

    def __init__(self, first: Tier, second: Tier) -> None:
        self.pools = [Below([first], seed=1), Below([second], seed=2)]
        self.link = Link()
        self.first = RankTiers(self.pools[0].store, self.pools[0].versions, self.link)
        self.second = FollowedTiers(self.pools[1].store, self.pools[1].versions)
        self.given: list[tuple[int, int]] = []
        self.polled: list[Fetch] = []

    def give_out(self, block: int) -> None:
        """As the scheduler does before it has something else written to a block."""
        self.pools[0].versions[block] += 1
        self.given.append((block, self.pools[0].versions[block]))

    def exchange(self) -> None:
        """A frame in each direction."""
        frame = FollowerFrame(1, given=self.given, tiers=self.link.posted)
        self.given, self.link.posted = [], []
        frame = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=FollowerFrame)
        self.second.given(frame.given)
        for call in frame.tiers:
            self.second.apply(call)
        answer = msgspec.msgpack.encode(RankFrame(tier_ends=self.second.take_ends()))
        self.link.ends += [(1, end) for end in msgspec.msgpack.decode(answer, type=RankFrame).tier_ends]
        self.polled += self.first.poll()

    def write(self, count: int) -> None:
        """Blocks 1 to `count`, whose hashes are their numbers."""
        self.first.write([(block, key_of(block)) for block in range(1, count + 1)])
        self.settle()

    def settle(self) -> None:
        def settled() -> bool:
            self.exchange()
            return all(pool.store.idle for pool in self.pools)

        until(settled, "everything is written")

    def look_up(self, count: int) -> RankFetch:
        fetch = self.first.look_up([key_of(number) for number in range(1, count + 1)])
        assert isinstance(fetch, RankFetch)
        return fetch

    def ended(self, fetch: Fetch) -> Fetch:
        def ended() -> bool:
            self.exchange()
            return fetch in self.polled

        until(ended, "the fetch ends on both ranks")
        self.polled.remove(fetch)
        return fetch

    def contents(self, rank: int, blocks: range) -> list[bytes]:
        return [self.pools[rank].block(block) for block in blocks]


@contextmanager
def ranks(first: Tier | None = None, second: Tier | None = None) -> Iterator[Ranks]:
    tiers = [first or HostTier(1 << 30), second or HostTier(1 << 30)]
    made = Ranks(*tiers)
    try:
        yield made
        assert not made.second._fetches and not made.first._by_number and not made.first._by_local
    finally:
        for tier in tiers:
            if isinstance(tier, ScriptedTier):
                tier.gate.set()
        for pool in made.pools:
            pool.close()


def test_ranks_when_both_have_a_prefix_then_each_loads_its_own_share() -> None:
    with ranks() as both:
        shares = [both.contents(rank, range(1, 10)) for rank in (0, 1)]
        both.write(9)
        fetch = both.look_up(12)
        assert both.ended(fetch).found == 9
        both.first.load(fetch, 2, range(20, 27))
        assert both.ended(fetch).good == 7
        for rank, share in enumerate(shares):
            assert both.contents(rank, range(20, 27)) == share[2:]
        assert shares[0] != shares[1]


def test_ranks_when_one_lacks_a_block_then_the_prefix_ends_before_it_for_both() -> None:
    second = HostTier(1 << 30)
    with ranks(second=second) as both:
        both.write(9)
        second.discard(both.pools[1].store._keys.key(key_of(5)))
        fetch = both.look_up(9)
        assert both.ended(fetch).found == 4
        assert fetch.local.found == 9
        both.first.load(fetch, 0, range(20, 24))
        assert both.ended(fetch).good == 4


def test_ranks_when_one_cannot_read_a_block_then_it_is_a_miss_for_both() -> None:
    second = ScriptedTier()
    with ranks(second=second) as both:
        both.write(9)
        fetch = both.ended(both.look_up(9))
        second.failure = TierError("io", "the medium failed")
        both.first.load(fetch, 0, range(20, 29))
        assert both.ended(fetch).good == 0
        assert isinstance(fetch, RankFetch) and fetch.local.good == 9


def test_ranks_when_one_has_not_answered_then_nothing_is_found_and_the_look_up_can_be_given_up() -> None:
    second = ScriptedTier()
    with ranks(second=second) as both:
        both.write(9)
        second.gate.clear()
        late = both.look_up(9)
        until(lambda: late.local.found == 9, "rank 0 has found all")
        both.exchange()
        assert late.found == 0 and late not in both.polled
        assert not both.first.cancel(late)
        both.ended(late)  # though the other rank's thread still hangs
        second.gate.set()
        again = both.look_up(9)
        assert both.ended(again).found == 9
        both.first.cancel(again)
        both.exchange()


def test_ranks_when_one_hangs_in_a_load_and_it_is_given_up_then_its_blocks_are_free_on_both() -> None:
    second = ScriptedTier()
    with ranks(second=second) as both:
        both.write(9)
        fetch = both.ended(both.look_up(9))
        before = both.contents(1, range(20, 29))
        second.gate.clear()
        entered = second.entered
        both.first.load(fetch, 0, range(20, 29))
        both.exchange()
        until(lambda: second.entered > entered, "the other rank reads")
        assert not both.first.cancel(fetch), "rank 0 cannot know that the other rank is quiet"
        assert both.ended(fetch).good == 0
        second.gate.set()
        until(lambda: both.pools[1].store.poll(), "its thread comes back")
        assert both.contents(1, range(20, 29)) == before


def test_ranks_when_a_farther_tier_of_rank_0_is_late_then_what_is_found_can_be_taken() -> None:
    with ranks() as both:
        both.write(6)
        late = both.look_up(6)
        until(lambda: late.local.found == 6, "rank 0 has found all")
        both.first._by_local.pop(late.local)  # as if its look-up had not ended: it is not seen to come out
        until(lambda: both.exchange() or late.found == 6, "the other rank has answered")
        taken = both.first.take_found(late)
        both.first.load(taken, 0, range(20, 26))
        assert both.ended(taken).good == 6


def test_ranks_when_a_block_is_given_out_before_a_rank_has_copied_it_then_that_rank_leaves_it_out() -> None:
    with ranks() as both:
        both.first.write([(block, key_of(block)) for block in range(1, 6)])
        both.give_out(4)  # in the frame that tells what to write down, which was named before
        both.settle()
        assert both.pools[1].count("skipped_writes_total", reason="reused") == 1
        fetch = both.ended(both.look_up(5))
        assert fetch.found == 3
        both.first.cancel(fetch)
        both.exchange()
        both.write(5)  # with another content, whose hash is named now
        fetch = both.ended(both.look_up(5))
        assert fetch.found == 5
        both.first.cancel(fetch)
        both.exchange()


def test_ranks_when_cleared_then_both_forget() -> None:
    with ranks() as both:
        both.write(5)
        both.first.clear()
        both.settle()
        assert [pool.store.stats()["host"].blocks for pool in both.pools] == [0, 0]
