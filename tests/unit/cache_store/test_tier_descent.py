"""What goes down to a tier that is slower than the engine, away for a while, or too small: the beginnings of prefixes,
without holes; and nobody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.tiers import descent
from cache_store.tiers import lane as lanes
from cache_store.tiers.disk import DiskTier
from cache_store.tiers.host import ENTRY_BYTES, HostTier
from cache_store.tiers.tier import Record, TierError
from tests.unit.cache_store.tier_fixtures import RECORD, Below, ScriptedTier, below, key_of, until

QUICK_PAUSES_S = (0.001, 0.002, 0.004)


class PassingFailures(ScriptedTier):
    """Writes fail so many times before one succeeds."""

    def __init__(self, failures: int, reason: str = "unreachable") -> None:
        super().__init__()
        self.left = failures
        self._reason = reason

    def put(self, key: bytes, record: Record) -> bool:
        if self.left > 0:
            self.left -= 1
            self._pass()
            raise TierError(self._reason, "a server that has just left")
        return super().put(key, record)


def named(first: int, last: int) -> list[tuple[int, bytes]]:
    """Blocks of these numbers, each with the hash of its number."""
    return [(block, key_of(block)) for block in range(first, last)]


def names(pool: Below, first: int, last: int) -> list[bytes]:
    return [pool.store._keys.key(key_of(number)) for number in range(first, last)]


def writes(pool: Below, tier: str = "mooncake") -> dict[str, int]:
    outcomes = ("stored", "refused", "failed", "dropped", "overtaken")
    counted = {outcome: int(pool.count("writes_total", tier=tier, outcome=outcome)) for outcome in outcomes}
    return {outcome: count for outcome, count in counted.items() if count}


def settle(pool: Below) -> None:
    until(lambda: pool.store.idle, "everything is written")


def test_descent_when_a_tier_is_slower_than_the_engine_then_gets_every_block_in_order_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "QUEUE_BYTES", 3 * RECORD)
    shared = ScriptedTier()
    with below(HostTier(1 << 30), shared) as pool:
        shared.gate.clear()
        for first in (1, 8, 15):  # three steps of one prompt
            pool.begin_write(named(first, first + 7))
        until(lambda: pool.count("writes_total", tier="host", outcome="stored") == 21, "the host has everything")
        assert writes(pool) == {} and len(pool.store._lanes[1]._orders) == 3  # no more memory than that
        shared.gate.set()
        settle(pool)
        assert writes(pool) == {"stored": 21}
        assert shared.put_keys == names(pool, 1, 22)


@pytest.mark.parametrize("staged", ["", "threads"])
def test_descent_when_the_pool_gives_the_end_of_a_prefix_away_meanwhile_then_the_tier_has_the_beginning(
    monkeypatch: pytest.MonkeyPatch, staged: str
) -> None:
    monkeypatch.setattr(lanes, "QUEUE_BYTES", 3 * RECORD)
    shared = ScriptedTier()
    with below(shared, staged=staged) as pool:
        shared.gate.clear()
        pool.begin_write(named(1, 21))
        until(lambda: len(pool.store._descent._later["mooncake"]) == 17, "the others are put off")
        for block in range(12, 21):
            pool.versions[block] += 1
        shared.gate.set()
        settle(pool)
        assert writes(pool) == {"stored": 11, "overtaken": 9}
        assert pool.look_up(20, 1).found == 11
        pool.write(range(1, 21), first_hash=1)  # computed again
        assert pool.look_up(20, 1).found == 20


def test_descent_when_a_waiting_block_is_named_again_then_is_written_once_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "QUEUE_BYTES", RECORD)
    shared = ScriptedTier()
    with below(shared) as pool:
        shared.gate.clear()
        pool.begin_write(named(1, 6))
        until(lambda: len(pool.store._descent._later["mooncake"]) == 4, "the others are put off")
        for block in (2, 3):  # now the KV of these two lies elsewhere
            pool.versions[block] += 1
            for layer in pool.memory:
                layer[block + 20] = layer[block]
        pool.begin_write([(1, key_of(1)), (22, key_of(2)), (23, key_of(3)), (4, key_of(4))])
        until(lambda: not pool.store._descent._chains, "they are looked at")
        shared.gate.set()
        settle(pool)
        assert writes(pool) == {"stored": 5}
        assert shared.put_keys == names(pool, 1, 6)


def test_descent_when_more_blocks_wait_for_a_tier_than_may_then_the_end_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "QUEUE_BYTES", 2 * RECORD)
    shared = ScriptedTier()
    with below(shared) as pool:
        shared.gate.clear()
        pool.begin_write(named(1, 3))
        settled = pool.store._descent
        until(lambda: not settled._chains, "two wait in the tier")
        monkeypatch.setattr(descent, "MOST_WRITES", 4)
        pool.begin_write(named(3, 7))
        until(lambda: not settled._chains, "four wait for it")
        pool.begin_write(named(7, 10))
        until(lambda: pool.count("writes_total", tier="mooncake", outcome="dropped") == 3, "three are dropped")
        shared.gate.set()
        settle(pool)
        assert writes(pool) == {"stored": 6, "dropped": 3}
        assert pool.look_up(9, 1).found == 6


def test_store_when_too_many_blocks_wait_then_the_later_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "MOST_WRITES", 4)
    only = ScriptedTier("disk", shared=False)
    with below(only) as pool:
        pool.store.write(named(1, 4))
        pool.store.write(named(4, 12))  # in the same step, so that none of them is copied before
        pool.store.poll()
        settle(pool)
        assert pool.count("skipped_writes_total", reason="queue_full") == 7
        assert only.stats().blocks == 4 and pool.look_up(5, 1).found == 4


@pytest.mark.parametrize("reason", sorted(lanes.PASSING))
def test_lane_when_a_write_fails_for_a_reason_that_passes_then_is_tried_again_and_leaves_no_hole(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(lanes, "PAUSES_S", QUICK_PAUSES_S)
    shared = PassingFailures(3, reason)
    with below(shared) as pool:
        pool.write(range(1, 6), first_hash=1)
        assert writes(pool) == {"stored": 5}
        assert pool.count("errors_total", tier="mooncake", reason=reason) == 3
        assert pool.look_up(5, 1).found == 5


def test_lane_when_writes_go_on_failing_then_each_is_given_up_and_offered_again_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "PAUSES_S", QUICK_PAUSES_S)
    shared = ScriptedTier()
    with below(shared) as pool:
        shared.failure = TierError("unreachable", "nobody is there")
        pool.write([1, 2, 3])
        assert writes(pool) == {"failed": 3}
        # The first one with pauses, the others once: they would only make it longer.
        assert pool.count("errors_total", tier="mooncake", reason="unreachable") == len(QUICK_PAUSES_S) + 3
        shared.failure = None
        pool.write([1, 2, 3])
        assert writes(pool) == {"failed": 3, "stored": 3}


def test_lane_when_a_record_waits_for_another_try_and_the_cache_is_cleared_then_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "PAUSES_S", (60.0,))
    own = PassingFailures(1)
    own.name, own.shared = "disk", False
    with below(own) as pool:
        pool.begin_write(named(1, 3))
        until(lambda: not own.left, "the first try has failed")
        pool.store.clear()
        settle(pool)
        assert own.stats().blocks == 0
        pool.write([3], first_hash=3)
        assert own.stats().blocks == 1


def test_lane_when_its_tier_takes_nothing_then_nothing_is_copied_for_it_until_it_does() -> None:
    shared, host = ScriptedTier(), HostTier(1 << 30)
    with below(shared) as pool:
        shared.takes = False
        read, pool.store._descent._copies.read = pool.store._descent._copies.read, None  # type: ignore[assignment]
        pool.write([1, 2])
        assert pool.count("skipped_writes_total", reason="failed") == 0 and shared.entered == 0
        pool.store._descent._copies.read = read  # type: ignore[method-assign]
        shared.takes = True  # nobody names them again
        settle(pool)
        until(lambda: writes(pool) == {"stored": 2}, "they are written")
    shared = ScriptedTier()
    with below(host, shared) as pool:
        shared.takes = False
        pool.write([1, 2])
        assert writes(pool, "host") == {"stored": 2}
        assert pool.count("skipped_writes_total", reason="present") == 0
        shared.takes = True
        until(lambda: writes(pool) == {"stored": 2}, "they are written")


def test_lane_when_its_tier_takes_nothing_for_long_then_the_memory_of_records_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "PATIENCE_S", 0.0)
    shared = ScriptedTier()
    with below(shared) as pool:
        shared.gate.clear()
        pool.begin_write(named(1, 6))
        until(lambda: len(pool.store._lanes[0]._orders) == 5, "all wait to be written")
        shared.takes = False
        shared.gate.set()
        settle(pool)
        assert writes(pool) == {"stored": 1, "failed": 4}


def test_store_when_the_host_is_full_then_the_disk_still_has_everything(tmp_path: Path) -> None:
    host = HostTier(2 * (RECORD + ENTRY_BYTES))
    with below(host, DiskTier(tmp_path, 1 << 30)) as pool:
        pool.write(range(1, 11))
        assert writes(pool, "host") == {"stored": 2, "refused": 8}
        assert host.find(names(pool, 0, 10)) == 2  # the beginning
        assert pool.load(pool.look_up(10), range(20, 30)) == 10


def test_store_when_a_tier_has_no_room_for_two_prefixes_then_the_end_of_the_older_one_goes(tmp_path: Path) -> None:
    host, disk = HostTier(6 * (RECORD + ENTRY_BYTES)), DiskTier(tmp_path, 6 * (RECORD + ENTRY_BYTES))
    with below(host, disk) as pool:
        pool.write(range(5))
        pool.write(range(10, 13), first_hash=10)
        for tier in (host, disk):
            assert (tier.find(names(pool, 0, 5)), tier.find(names(pool, 10, 13))) == (3, 3)
        pool.write(range(3))  # in use again
        pool.write(range(20, 23), first_hash=20)
        for tier in (host, disk):
            assert (tier.find(names(pool, 0, 3)), tier.find(names(pool, 10, 13))) == (3, 0)
