"""Records of a slow tier are asked for in batches, each once, and some batches ahead of who reads them."""

from __future__ import annotations

import pytest

from cache_store.tiers import read_ahead
from cache_store.tiers.mooncake_link import Call
from cache_store.tiers.read_ahead import Batch, ReadAhead
from cache_store.tiers.tier import TierError
from tests.unit.cache_store.tier_fixtures import RECORD, key_of

BATCH = 4


class Link:
    """What a read-ahead asks of its link. Calls end at once."""

    def __init__(self, slots: int = 64) -> None:
        self.free = list(range(slots))
        self.asked: list[list[int]] = []

    def take_slots(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_slots(self, slots: list[int]) -> None:
        self.free += slots

    def begin(self, operation: str, keys: list[bytes], slots: list[int], size: int) -> Call:
        assert (operation, len(keys), size) == ("get", len(slots), RECORD)
        self.asked.append([int.from_bytes(key, "big") for key in keys])
        call = Call(slots)
        call.end([0] * len(keys), False)
        return call

    def release(self, call: Call) -> None:
        call.released = True
        self.free += call.slots
        call.slots = ()


def reading(slots: int = 64) -> tuple[Link, ReadAhead]:
    link = Link(slots)
    return link, ReadAhead(link, RECORD, BATCH)  # type: ignore[arg-type]


def claim(ahead: ReadAhead, number: int) -> Batch:
    batch = ahead.claim(key_of(number))
    assert key_of(number) in batch.positions
    return batch


def test_read_ahead_when_a_run_is_read_then_each_record_is_asked_for_once_and_in_time() -> None:
    link, ahead = reading()
    ahead.found([key_of(number) for number in range(18)])
    for number in range(18):
        batch = claim(ahead, number)
        end = (number // BATCH + 1 + read_ahead.BATCHES_AHEAD) * BATCH
        assert sum(map(len, link.asked)) >= min(18, end)
        ahead.done(batch)
    assert [number for asked in link.asked for number in asked] == list(range(18))
    assert len(link.asked) == 5 and len(link.free) == 64 and ahead.wasted == 0


def test_read_ahead_when_readers_are_in_two_batches_at_once_then_asks_for_nothing_twice() -> None:
    link, ahead = reading()
    ahead.found([key_of(number) for number in range(16)])
    slow = [claim(ahead, number) for number in range(3)]
    quick = [claim(ahead, number) for number in (4, 5, 3, 8, 6, 7)]
    for batch in (*slow, *quick):
        ahead.done(batch)
    for number in range(9, 16):
        ahead.done(claim(ahead, number))
    assert sorted(number for asked in link.asked for number in asked) == list(range(16))
    assert len(link.free) == 64 and ahead.wasted == 0


def test_read_ahead_when_a_read_failed_then_the_next_one_asks_again() -> None:
    link, ahead = reading()
    ahead.found([key_of(number) for number in range(16)])
    ahead.done(claim(ahead, 0), drop=True)
    ahead.clear()
    assert len(link.free) == 64 and ahead.wasted == 3 * BATCH - 1
    link.asked.clear()
    ahead.done(claim(ahead, 1))
    assert [number for asked in link.asked for number in asked] == list(range(1, 13))


def test_read_ahead_when_slots_are_few_then_waits_with_what_follows_and_gives_up_what_nobody_reads() -> None:
    link, ahead = reading(slots=BATCH + 1)
    ahead.found([key_of(number) for number in range(12)])
    first = claim(ahead, 0)
    assert link.asked == [[0, 1, 2, 3]]
    ahead.done(first)
    other = claim(ahead, 100)  # of no run; one slot is free
    assert link.asked[1:] == [[100]]
    claim(ahead, 1)  # now both are looked at, and nothing can go
    with pytest.raises(TierError):
        claim(ahead, 101)
    ahead.done(other)
    ahead.done(claim(ahead, 101))
    assert ahead.wasted == 0 and len(link.free) == 1
