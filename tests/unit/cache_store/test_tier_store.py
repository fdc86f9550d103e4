"""The store of tiers: what goes down is what was in the pool, what comes up is what went down, and a tier that is slow,
full, damaged or gone costs a miss."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cache_store.memory.host_copies import HostCopyEngine
from cache_store.memory.shared_memory import MemoryFile
from cache_store.tiers import lane as lanes
from cache_store.tiers.copies import page_in
from cache_store.tiers.disk import DiskTier
from cache_store.tiers.host import HostTier
from cache_store.tiers.tier import Tier, TierError
from rpc import faults
from tests.unit.cache_store.tier_fixtures import RECORD, ScriptedTier, below, key_of, until


@pytest.mark.parametrize("staged", ["", "threads", "streams"])
@pytest.mark.parametrize("kind", ["host", "disk", "shared"])
def test_store_when_blocks_went_down_then_others_get_their_content(tmp_path: Path, kind: str, staged: str) -> None:
    tiers: dict[str, Tier] = {"host": HostTier(1 << 30), "shared": ScriptedTier()}
    tier = tiers.get(kind) or DiskTier(tmp_path, 1 << 30)
    with below(tier, staged=staged) as pool:
        before = [pool.block(number) for number in range(40)]
        pool.write(range(1, 20))
        fetch = pool.look_up(25)
        assert fetch.found == 19
        assert pool.load(fetch, range(20, 39)) == 19
        assert [pool.block(number) for number in range(20, 39)] == before[1:20]
        assert [pool.block(number) for number in range(20)] == before[:20]
        assert pool.count("hit_blocks_total", tier=tier.name) == 19
        assert pool.count("bytes_total", tier=tier.name, direction="read") == 19 * RECORD


def test_store_when_only_the_end_of_what_was_found_is_wanted_then_loads_that(tmp_path: Path) -> None:
    with below(HostTier(1 << 30)) as pool:
        before = [pool.block(number) for number in range(40)]
        pool.write(range(1, 9))
        assert pool.load(pool.look_up(8), [20, 21, 22], offset=5) == 3
        assert [pool.block(number) for number in (20, 21, 22)] == before[6:9]


def test_store_when_blocks_are_named_then_nothing_is_copied_before_the_engine_polls_again() -> None:
    with below(HostTier(1 << 30)) as pool:
        pool.store.write([(1, key_of(1)), (2, key_of(2))])
        pool.store.write([(3, key_of(3))])
        pool.versions[2] += 1  # given to somebody else before
        assert not pool.store._descent._chains and not pool.store.idle  # what the copying thread sees
        assert pool.store.poll() == []
        until(lambda: pool.store.idle, "everything is written")
        assert pool.count("writes_total", tier="host", outcome="stored") == 2
        assert pool.count("skipped_writes_total", reason="reused") == 1


def test_store_when_many_blocks_are_loaded_then_all_readers_take_part() -> None:
    shared = ScriptedTier()
    with below(shared, blocks=80) as pool:
        before = [pool.block(number) for number in range(80)]
        pool.write(range(40))
        fetch = pool.look_up(40)
        shared.gate.clear()
        entered = shared.entered
        pool.store.load(fetch, 0, range(40, 80))
        until(lambda: shared.entered == entered + lanes.READERS, "every reader is at it")
        shared.gate.set()
        assert pool.ended(fetch).good == 40
        assert [pool.block(number) for number in range(40, 80)] == before[:40]
        assert shared.entered == entered + 40


def test_store_when_the_other_readers_are_busy_then_one_loads_all() -> None:
    shared = ScriptedTier()
    with below(shared, blocks=80) as pool:
        pool.write(range(40))
        fetch = pool.look_up(40)
        go_on = threading.Event()
        for _ in range(lanes.READERS - 1):
            assert pool.store._lanes[0].submit(lambda: go_on.wait(10))
        assert pool.load(fetch, range(40, 80)) == 40
        go_on.set()


def test_store_when_a_block_in_the_middle_is_damaged_then_those_before_it_are_good(tmp_path: Path) -> None:
    with below(DiskTier(tmp_path, 1 << 30), blocks=80) as pool:
        before = [pool.block(number) for number in range(80)]
        pool.write(range(40))
        fetch = pool.look_up(40)
        name = pool.store._keys.key(key_of(23)).hex()
        file = tmp_path / "blocks" / name[:2] / f"{name}.kv"
        record = bytearray(file.read_bytes())
        record[-1] ^= 1
        file.write_bytes(record)
        assert pool.load(fetch, range(40, 80)) == 23
        assert [pool.block(number) for number in range(40, 63)] == before[:23]
        assert pool.block(63) == before[63]


def test_store_when_blocks_lie_in_several_tiers_then_takes_each_from_the_nearest_and_brings_it_nearer(
    tmp_path: Path,
) -> None:
    host, disk, shared = HostTier(1 << 30), DiskTier(tmp_path, 1 << 30), ScriptedTier()
    with below(host, disk, shared) as pool:
        before = [pool.block(number) for number in range(40)]
        pool.write(range(1, 13))
        for tier, lost in ((host, range(3, 11)), (disk, (0, 5, 6, 7, 8, 11))):
            for i in lost:
                tier.discard(pool.store._keys.key(key_of(i)))
        # Now 0 to 2 are in the host, 3 and 4 on disk, 5 to 11 shared, of which 9 to 11 are nearer too
        assert pool.load(pool.look_up(12), range(20, 32)) == 12
        assert [pool.block(number) for number in range(20, 32)] == before[1:13]
        hits = [pool.count("hit_blocks_total", tier=name) for name in ("host", "disk", "mooncake")]
        assert hits == [3, 2, 7]
        pool.write(range(20, 32))  # as the engine does with what a prompt has found
        assert (host.stats().blocks, disk.stats().blocks) == (12, 12)


def test_pool_when_it_gets_a_store_then_its_lowest_blocks_have_pages_and_keep_their_content() -> None:
    files = [MemoryFile(1 << 20) for _ in range(2)]
    files[1].view[5] = 7
    page_in([file.view for file in files], 1 << 20)
    assert [os.fstat(file.descriptor).st_blocks * 512 for file in files] == [1 << 19, 1 << 19]
    assert files[1].view[5] == 7 and not any(files[0].view)
    for file in files:
        file.close()


def test_store_when_every_tier_has_a_block_then_it_is_not_copied_again() -> None:
    shared = ScriptedTier()
    with below(HostTier(1 << 30), shared) as pool:
        pool.write([1, 2])
        asked = shared.entered
        pool.write([1, 2])
        assert shared.entered == asked  # it is taken to have what it got
        assert pool.count("skipped_writes_total", reason="present") == 2
        assert pool.count("writes_total", tier="host", outcome="stored") == 2


def test_store_when_a_shared_tier_has_lost_its_blocks_then_they_are_written_again_after_a_look_up() -> None:
    shared = ScriptedTier()
    with below(shared) as pool:
        pool.write([1, 2, 3])
        shared.clear()
        pool.write([1, 2, 3])
        assert pool.count("writes_total", tier="mooncake", outcome="stored") == 3  # it is still taken to have them
        assert pool.look_up(3).found == 0
        pool.write([1, 2, 3])
        assert pool.count("writes_total", tier="mooncake", outcome="stored") == 6
        assert pool.look_up(3).found == 3


def test_store_when_a_block_is_given_to_somebody_else_before_its_copy_then_nothing_goes_down() -> None:
    shared = ScriptedTier("disk", shared=False)
    with below(shared) as pool:
        shared.gate.clear()
        pool.begin_write([(block, key_of(block)) for block in (1, 2, 3)])
        until(lambda: shared.entered, "the copying thread asks the tier")
        pool.versions[2] += 1  # as the pool does before anything else
        for layer in pool.memory:
            layer[2] = 7
        shared.gate.set()
        until(lambda: pool.store.idle, "everything is written")
        assert pool.count("skipped_writes_total", reason="reused") == 1
        assert [pool.look_up(1, block).found for block in (1, 2, 3)] == [1, 0, 1]


def test_store_when_a_block_is_given_to_somebody_else_during_its_copy_then_nothing_goes_down() -> None:
    with below(HostTier(1 << 30)) as pool:
        read = pool.store._copies.read

        def torn(blocks, payloads, after):  # type: ignore[no-untyped-def]
            read(blocks, payloads, after)
            pool.versions[blocks[0]] += 1

        pool.store._descent._copies.read = torn  # type: ignore[method-assign]
        pool.write([1])
        assert pool.count("skipped_writes_total", reason="reused") == 1
        assert pool.look_up(1, 0).found == 0


@pytest.mark.parametrize("harm", ["bit", "key", "size", "gone"])
def test_store_when_a_record_is_not_what_was_stored_then_it_is_a_miss_and_the_pool_keeps_its_block(
    tmp_path: Path, harm: str
) -> None:
    with below(DiskTier(tmp_path, 1 << 30)) as pool:
        before = [pool.block(number) for number in range(40)]
        pool.write(range(1, 6))
        names = [pool.store._keys.key(key_of(i)).hex() for i in range(5)]
        files = [tmp_path / "blocks" / name[:2] / f"{name}.kv" for name in names]
        record = bytearray(files[3].read_bytes())
        if harm == "bit":
            record[-1] ^= 1
        elif harm == "key":
            record[:] = files[1].read_bytes()
        elif harm == "size":
            del record[-1]
        files[3].write_bytes(record)
        if harm == "gone":
            files[3].unlink()
        assert pool.load(pool.look_up(5), range(20, 25)) == 3
        assert [pool.block(number) for number in range(20, 23)] == before[1:4]
        assert pool.block(23) == before[23]
        reason = "damaged" if harm in ("bit", "key") else "lost"
        assert pool.count("missed_blocks_total", tier="disk", reason=reason) == 1
        assert pool.look_up(5).found == 3  # it is not offered again
        pool.write(range(1, 6))
        assert pool.load(pool.look_up(5), range(20, 25)) == 5


@pytest.mark.parametrize("operation", ["find", "get", "put"])
@pytest.mark.parametrize("error", [TierError("unreachable", "gone"), ValueError("a bug of a library")])
def test_store_when_a_tier_fails_then_counts_it_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, operation: str, error: Exception
) -> None:
    monkeypatch.setattr(lanes, "PAUSES_S", ())
    shared = ScriptedTier()
    with below(shared) as pool:
        if operation != "put":
            pool.write([1, 2, 3])
        fetch = pool.look_up(3) if operation == "get" else None
        shared.failure = error
        if operation == "put":
            pool.write([1, 2, 3])
            assert pool.count("writes_total", tier="mooncake", outcome="failed") == 3
        elif fetch is not None:
            assert pool.load(fetch, [20, 21, 22]) == 0
            assert pool.count("missed_blocks_total", tier="mooncake", reason="failed") == 1
        else:
            assert pool.look_up(3).found == 0
        reason = error.reason if isinstance(error, TierError) else "other"
        assert pool.count("errors_total", tier="mooncake", reason=reason) == (3 if operation == "put" else 1)
        shared.failure = None
        pool.write([4], first_hash=10)
        assert pool.look_up(1, 10).found == 1


def test_store_when_a_tier_hangs_then_the_nearer_ones_serve_and_it_is_asked_no_more() -> None:
    host, shared = HostTier(1 << 30), ScriptedTier()
    with below(host, shared, timeout_s=0.05) as pool:
        pool.write([1, 2])
        shared.gate.clear()
        before = shared.entered
        hanging = []
        for _ in range(lanes.READERS):
            fetch = pool.store.look_up([key_of(i) for i in range(4)])
            assert fetch is not None
            until(lambda fetch=fetch: fetch.found == 2, "the host has answered")
            hanging.append(fetch)
        lane = pool.store._lanes[1]
        until(lambda: shared.entered == before + lanes.READERS, "every reader is in the tier")
        until(lambda: lane.hangs, "every reader of the tier hangs")
        entered = shared.entered
        found = pool.store.take_found(hanging[0])
        assert pool.load(found, [20, 21]) == 2
        assert pool.look_up(4).found == 2  # at once, without the shared tier
        assert shared.entered == entered
        shared.gate.set()
        for fetch in hanging:
            pool.ended(fetch)
        until(lambda: not lane.hangs, "the tier answers again")
        assert pool.look_up(4).found == 2
        assert shared.entered > entered


def test_store_when_every_tier_hangs_then_says_so_at_once() -> None:
    only = ScriptedTier("disk", shared=False)
    with below(only, timeout_s=0.05) as pool:
        only.gate.clear()
        fetches = [pool.store.look_up([key_of(0)]) for _ in range(lanes.READERS)]
        until(lambda: pool.store._lanes[0].hangs, "every reader hangs")
        assert pool.store.look_up([key_of(0)]) is None
        only.gate.set()
        for fetch in fetches:
            assert fetch is not None
            pool.ended(fetch)


def test_store_when_a_fetch_is_cancelled_then_the_blocks_after_the_present_one_stay_as_they_are() -> None:
    shared = ScriptedTier()
    with below(shared) as pool:
        before = [pool.block(number) for number in range(40)]
        pool.write(range(1, 6))
        fetch = pool.look_up(5)
        shared.gate.clear()
        entered = shared.entered
        pool.store.load(fetch, 0, [20, 21, 22, 23, 24])
        until(lambda: shared.entered > entered, "the first block is being read")
        assert pool.store.cancel(fetch)  # the tier hangs, and the pool's blocks are free at once
        shared.gate.set()
        assert pool.ended(fetch).good == 0
        assert [pool.block(number) for number in range(20, 25)] == before[20:25]


def test_store_when_a_fetch_is_cancelled_during_a_copy_into_the_pool_then_says_that_its_blocks_are_in_use() -> None:
    with below(HostTier(1 << 30)) as pool:
        pool.write(range(1, 6))
        write, reached, go_on = pool.store._copies.write, threading.Event(), threading.Event()

        def held(payloads, blocks, after):  # type: ignore[no-untyped-def]
            reached.set()
            assert go_on.wait(10)
            write(payloads, blocks, after)

        pool.store._copies.write = held  # type: ignore[method-assign]
        fetch = pool.look_up(5)
        pool.store.load(fetch, 0, [20, 21, 22, 23, 24])
        assert reached.wait(10)
        assert not pool.store.cancel(fetch)
        go_on.set()
        assert pool.ended(fetch).good == 1
        assert pool.store.cancel(fetch)


def test_store_when_cleared_then_forgets_what_is_there_and_what_was_on_its_way(tmp_path: Path) -> None:
    host, slow, shared = HostTier(1 << 30), ScriptedTier("disk", shared=False), ScriptedTier()
    with below(host, slow, shared) as pool:
        pool.write([1, 2, 3])
        slow.gate.clear()
        entered = slow.entered
        pool.begin_write([(block, key_of(block)) for block in (4, 5)])
        until(lambda: slow.entered > entered, "the copying thread is held up")
        pool.store.clear()
        assert not pool.store.idle
        slow.gate.set()
        until(lambda: pool.store.idle, "it is cleared")
        assert (host.stats().blocks, slow.stats().blocks) == (0, 0)
        assert shared.stats().blocks >= 3  # it belongs to others too
        pool.write([6], first_hash=6)
        assert (host.stats().blocks, slow.stats().blocks) == (1, 1)


def test_store_when_closed_then_writes_what_waits_first(tmp_path: Path) -> None:
    with below(DiskTier(tmp_path, 1 << 30)) as pool:
        pool.store.write([(block, key_of(block)) for block in range(1, 30)])
    assert len(list((tmp_path / "blocks").glob("*/*.kv"))) == 29


def test_store_when_closed_while_a_tier_hangs_then_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CLOSE_S", 0.05)
    shared = ScriptedTier()
    with below(shared, timeout_s=0.05) as pool:
        shared.gate.clear()
        pool.store.look_up([key_of(0)])
        until(lambda: shared.entered, "a reader hangs")
        closed = threading.Event()

        def close() -> None:
            pool.store.close(drain_s=0.05)
            closed.set()

        threading.Thread(target=close).start()
        assert closed.wait(5)


def test_store_when_a_tier_loses_a_block_after_the_look_up_then_takes_it_from_another_one(tmp_path: Path) -> None:
    host = HostTier(1 << 30)
    with below(host, DiskTier(tmp_path, 1 << 30)) as pool:
        before = [pool.block(number) for number in range(40)]
        pool.write(range(1, 5))
        fetch = pool.look_up(4)
        host.discard(pool.store._keys.key(key_of(2)))
        assert pool.load(fetch, [20, 21, 22, 23]) == 4
        assert [pool.block(number) for number in range(20, 24)] == before[1:5]
        assert (pool.count("hit_blocks_total", tier="host"), pool.count("hit_blocks_total", tier="disk")) == (3, 1)


@pytest.mark.parametrize(
    ("fault", "found", "loaded", "stored"),
    [
        ("cache_store.tier:drop,tier=disk,operation=find", 0, None, 4),
        ("cache_store.tier:drop,tier=disk,operation=get,nth=3", 4, 2, 4),
        ("cache_store.tier:corrupt,tier=disk,operation=get,nth=2", 4, 1, 4),
        ("cache_store.tier:raise=UNKNOWN_ERROR,tier=disk,operation=get", 4, 0, 4),
        ("cache_store.tier:full,tier=disk,operation=put,nth=2", 1, 1, 3),
        ("cache_store.tier:raise=UNKNOWN_ERROR,operation=put", 0, None, 0),
    ],
)
def test_store_when_a_fault_is_armed_then_it_costs_a_miss(
    tmp_path: Path, fault: str, found: int, loaded: int | None, stored: int
) -> None:
    faults.arm(fault)
    try:
        with below(DiskTier(tmp_path, 1 << 30)) as pool:
            pool.write([1, 2, 3, 4])
            fetch = pool.look_up(4)
            assert fetch.found == found
            if loaded is not None:
                assert pool.load(fetch, [20, 21, 22, 23][:found]) == loaded
            assert pool.count("writes_total", tier="disk", outcome="stored") == stored
    finally:
        faults.disarm()


@pytest.mark.parametrize("direction", ["down", "up"])
def test_store_when_the_device_fails_then_it_costs_a_miss_and_the_fetch_ends(direction: str) -> None:
    with below(HostTier(1 << 30), staged="threads") as pool:
        assert isinstance(pool.copies, HostCopyEngine)
        submit = pool.copies._submit

        def broken(name, copy):  # type: ignore[no-untyped-def]
            def fail() -> None:
                raise RuntimeError("the device is gone")

            return submit(name, fail)

        if direction == "down":
            pool.copies._submit = broken  # type: ignore[method-assign]
            pool.write([1, 2])
            assert pool.count("skipped_writes_total", reason="failed") == 2
            return
        pool.write([1, 2])
        fetch = pool.look_up(2)
        pool.copies._submit = broken  # type: ignore[method-assign]
        assert pool.load(fetch, [20, 21]) == 0
