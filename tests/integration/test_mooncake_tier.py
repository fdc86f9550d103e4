"""The tier on Mooncake Store, with a real master and the real client: what is there is a hit on every server, what is
damaged, full, slow or gone is a miss in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count

import pytest

from cache_store.tiers import mooncake_link
from cache_store.tiers.mooncake import READ_SLOTS, MooncakeTier, open_tier
from cache_store.tiers.record import HEADER_BYTES, open_record, record_bytes, seal_record
from cache_store.tiers.tier import TierError
from tests.extent import extent
from tests.integration.mooncake_master import (
    MooncakeMaster,
    alive,
    environment_of,
    kill,
    needs_mooncake,
    running_master,
)
from tests.standstill import stand_still

pytestmark = needs_mooncake()

PAYLOAD_BYTES = 200_000
RECORD_BYTES = record_bytes(PAYLOAD_BYTES)
SEGMENT_BYTES = 32 << 20
TIMEOUT_S = 0.5  # where it is to be exceeded
CALM_S = 20.0  # where it is not
LATE_S = 3.0  # that a call may take beyond its limit on a machine that is busy
RECOVER_S = 60.0
LONG_TTL_S = 60  # of the clients of a store that is to forget none of them, on a machine that stands still for a while
_numbers = count(1)


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with running_master(client_ttl_s=LONG_TTL_S) as master:
        yield master


@pytest.fixture(scope="module")
def shared(master: MooncakeMaster) -> Iterator[list[MooncakeTier]]:
    """A server that has a part of the store, and one that has none."""
    with tiers(master, SEGMENT_BYTES, 0, timeout_s=CALM_S) as opened:
        yield opened


@contextmanager
def tiers(master: MooncakeMaster, *segments: int, timeout_s: float = TIMEOUT_S) -> Iterator[list[MooncakeTier]]:
    """Connected ones, each with a process and a part of the store of its own."""
    opened: list[MooncakeTier] = []
    try:
        for segment in segments:
            opened.append(open_tier(f"{master.address}?segment_bytes={segment}", RECORD_BYTES, timeout_s))
        for tier in opened:
            eventually(lambda tier=tier: usable(tier))  # type: ignore[misc]
        yield opened
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(MooncakeTier.close, opened))


def usable(tier: MooncakeTier) -> bool:
    return tier.link.usable(tier.link.reads) and tier.link.usable(tier.link.writes)


def eventually(condition: Callable[[], bool], limit_s: float = RECOVER_S) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            stacks = sys._current_frames()
            raise AssertionError(f"not within {limit_s} s; threads: {[str(frame) for frame in stacks.values()]}")
        time.sleep(0.02)


def keys_of(number: int) -> list[bytes]:
    """Names that no other test uses."""
    return [next(_numbers).to_bytes(16, "big") for _ in range(number)]


def record_of(key: bytes) -> bytearray:
    record = bytearray(RECORD_BYTES)
    record[HEADER_BYTES:] = (key * (PAYLOAD_BYTES // len(key) + 1))[:PAYLOAD_BYTES]
    seal_record(key, record)
    return record


def right(key: bytes, record: bytearray) -> bool:
    payload = open_record(key, record)
    return payload is not None and bytes(payload[:16]) == key


def read(tier: MooncakeTier, key: bytes) -> bytearray | None:
    into = bytearray(RECORD_BYTES)
    return into if tier.get(key, memoryview(into)) else None


def test_tier_when_one_server_has_put_blocks_then_another_one_reads_them(shared: list[MooncakeTier]) -> None:
    writer, reader = shared
    keys = keys_of(40)
    assert all(writer.put(key, record_of(key)) for key in keys)
    (absent,) = keys_of(1)
    assert reader.find([*keys, absent]) == len(keys)
    assert reader.find([absent, *keys]) == 0
    assert reader.find(keys) == len(keys)
    for key in keys:
        record = read(reader, key)
        assert record is not None and right(key, record)
    everything = reader.link.take_slots(1000)
    assert len(everything) == READ_SLOTS, "nothing is kept once everything was read"
    reader.link.give_slots(everything)
    # In another order than they were found in, and once more.
    for key in reversed(keys):
        record = read(reader, key)
        assert record is not None and right(key, record)
    assert read(reader, absent) is None


def test_tier_when_reads_are_given_up_then_later_ones_have_their_slots(shared: list[MooncakeTier]) -> None:
    writer, reader = shared
    keys = keys_of(60)
    assert all(writer.put(key, record_of(key)) for key in keys)
    for start in range(0, 60, 2):  # each begins to fetch what follows, which nobody asks for
        assert reader.find(keys[start:]) == 60 - start
        record = read(reader, keys[start])
        assert record is not None and right(keys[start], record)
    assert reader.stats().wasted_blocks > 0


def test_tier_when_a_record_is_damaged_then_its_reader_sees_it_and_it_can_be_written_anew(
    shared: list[MooncakeTier],
) -> None:
    writer, reader = shared
    damaged, other = keys_of(2)
    record = record_of(damaged)
    record[-1] ^= 1
    assert writer.put(damaged, record)
    assert writer.put(other, record_of(damaged))  # a whole record under another one's name
    for key in (damaged, other):
        found = read(reader, key)
        assert found is not None and not right(key, found)
        reader.discard(key)
        assert read(reader, key) is None
        assert writer.put(key, record_of(key))
        found = read(reader, key)
        assert found is not None and right(key, found)


def test_tier_when_a_record_of_another_size_has_the_name_then_it_is_no_hit(
    master: MooncakeMaster, shared: list[MooncakeTier]
) -> None:
    tier = shared[0]
    (key,) = keys_of(1)
    assert not tier.put(key, bytes(10)), "that is no record of this model"
    for size in (RECORD_BYTES // 2, RECORD_BYTES * 2):
        other = open_tier(f"{master.address}?segment_bytes=0", size, CALM_S)
        try:
            eventually(lambda other=other: usable(other))  # type: ignore[misc]
            assert other.put(key, bytes(size))
            with suppress(TierError):
                assert read(tier, key) is None
        finally:
            other.close()
        tier.discard(key)


def test_tier_when_there_is_no_room_then_takes_nothing_more_and_keeps_what_it_has() -> None:
    with running_master(client_ttl_s=LONG_TTL_S) as master, tiers(master, 16 << 20, 0, timeout_s=CALM_S) as (_, tier):
        keys = keys_of(150)  # 30 MB
        kept: list[bytes] = []
        for key in keys:
            if not tier.put(key, record_of(key)):
                break
            # Which the store takes as a use: it evicts nothing of late. It may have been quicker, just below its end.
            if tier.find([key]) == 1:
                kept.append(key)
        assert 40 < len(kept) < 84
        for key in kept:
            record = read(tier, key)
            assert record is not None and right(key, record)


class Load:
    """Two threads that read and one that writes, all the time, and note what is wrong."""

    def __init__(self, reader: MooncakeTier, writer: MooncakeTier, keys: Sequence[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._keys = keys
        self._ends = threading.Event()
        self.hits = self.misses = 0
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._read) for _ in range(2)]
        self._threads.append(threading.Thread(target=self._write))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive(), "a call of the tier does not end"
        assert self.wrong == []

    def _read(self) -> None:
        into = bytearray(RECORD_BYTES)
        while not self._ends.is_set():
            found = self._timed(lambda: self._reader.find(self._keys))
            for key in self._keys[: found or 0]:
                if self._timed(lambda key=key: self._reader.get(key, memoryview(into))):  # type: ignore[misc]
                    self.hits += 1
                    if not right(key, into):
                        self.wrong.append("a record that is another one's, or damaged")
                else:
                    self.misses += 1
            if not found:
                self.misses += 1
                self._ends.wait(0.02)

    def _write(self) -> None:
        for key in (key for _ in count() for key in self._keys):
            if self._ends.is_set():
                return
            self._timed(lambda key=key: self._writer.put(key, record_of(key)), limit_s=2.0)  # type: ignore[misc]
            self._ends.wait(0.005)

    def _timed(self, call: Callable[[], int], limit_s: float = TIMEOUT_S) -> int:
        began = time.monotonic()
        result = 0
        try:
            result = call()
        except TierError:
            pass
        except Exception as error:
            self.wrong.append(repr(error))
        took = time.monotonic() - began
        if took > limit_s + LATE_S:
            self.wrong.append(f"a call took {took:.1f} s")
        return result

    def wait_for_hits(self) -> None:
        before = self.hits
        eventually(lambda: self.hits >= before + 10 or bool(self.wrong))

    def wait_for_misses(self) -> None:
        before = self.misses
        eventually(lambda: self.misses >= before + 10 or bool(self.wrong))


@pytest.mark.extended
def test_master_when_killed_and_stopped_under_load_then_there_are_only_misses_and_it_recovers() -> None:
    with running_master() as master, tiers(master, SEGMENT_BYTES, 0) as (writer, reader):
        keys = keys_of(12)
        with Load(reader, writer, keys) as load:
            load.wait_for_hits()
            for _ in range(extent(1, 5)):
                master.kill()
                load.wait_for_misses()
                assert reader.find(keys) == 0, "while nothing answers, nothing is found, at once"
                master.start()
                load.wait_for_hits()
                with master.stopped():
                    eventually(lambda: not reader.link.reads.closed)
                    load.wait_for_misses()
                load.wait_for_hits()
        assert reader.link.starts == writer.link.starts == 1, "the clients have connected themselves anew"


def test_client_when_killed_under_load_then_there_are_only_misses_and_another_one_takes_its_place() -> None:
    with running_master() as master, tiers(master, SEGMENT_BYTES, 0) as (writer, reader):
        with Load(reader, writer, keys_of(12)) as load:
            load.wait_for_hits()
            for tier in (writer, reader):  # the first one takes its part of the store with it
                pid = tier.link.pid
                assert pid is not None
                kill(pid)
                eventually(lambda tier=tier, pid=pid: tier.link.pid not in (None, pid))  # type: ignore[misc]
                eventually(lambda tier=tier: usable(tier))  # type: ignore[misc]
                load.wait_for_hits()


@pytest.mark.extended
def test_client_when_it_stops_then_its_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_link, "HANG_OF_PROBE_S", 1.0)
    with running_master() as master, tiers(master, SEGMENT_BYTES) as (tier,):
        keys = keys_of(3)
        assert all(tier.put(key, record_of(key)) for key in keys)
        pid = tier.link.pid
        assert pid is not None
        stand_still(pid)
        began = time.monotonic()
        with pytest.raises(TierError) as caught:
            tier.find(keys)
        assert caught.value.reason == "timeout"
        assert tier.find(keys) == 0
        assert time.monotonic() - began < TIMEOUT_S + LATE_S
        eventually(lambda: tier.link.starts == 2 and usable(tier))
        assert not alive(pid)
        assert tier.put(keys[0], record_of(keys[0]))


def test_client_when_a_holder_of_blocks_stops_then_reads_end_in_time_and_others_go_on() -> None:
    limit_s = 2.0
    with (
        running_master(client_ttl_s=LONG_TTL_S) as master,  # which does not notice
        tiers(master, SEGMENT_BYTES, 0, timeout_s=limit_s) as (holder, reader),
    ):
        keys = keys_of(4)
        assert all(holder.put(key, record_of(key)) for key in keys)
        pid = holder.link.pid
        assert pid is not None
        stand_still(pid)
        try:
            assert reader.find(keys) == len(keys)
            began = time.monotonic()
            with pytest.raises(TierError) as caught:
                read(reader, keys[0])
            assert caught.value.reason == "timeout"
            assert reader.find(keys) == 0
            assert time.monotonic() - began < limit_s + LATE_S
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: usable(reader) and usable(holder))

        def comes_back() -> bool:
            with suppress(TierError):
                if holder.put(keys[1], record_of(keys[1])):
                    record = read(reader, keys[1])
                    return record is not None and right(keys[1], record)
            return False

        eventually(comes_back)


OWNER = """
import sys
from cache_store.tiers.mooncake import open_tier
tier = open_tier(sys.argv[1], 4096, 0.5)
print(tier.link.pid, flush=True)
sys.stdin.read()
"""


def test_client_when_its_engine_is_killed_then_ends_too_and_it_never_knew_the_engines_secrets(
    master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "secret")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"{master.address}?segment_bytes=0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert "PATH" in environment_of(pid) and "BATON_API_KEY" not in environment_of(pid)
        stand_still(pid)  # as if the library hung
    finally:
        owner.kill()
        owner.communicate()
    eventually(lambda: not alive(pid))


LEAVER = """
import os, sys, time
from cache_store.tiers.mooncake import open_tier
tier = open_tier(sys.argv[1], int(sys.argv[2]), 20.0)
print(tier.link.pid, flush=True)
sys.stdin.read()
tier.close()
os._exit(0)
"""


def test_client_when_its_engine_ends_in_order_then_nobody_is_sent_to_its_part_of_the_store_any_more() -> None:
    with (
        running_master(client_ttl_s=600) as master,  # which would not notice by itself that one is gone
        tiers(master, 0, timeout_s=CALM_S) as (reader,),
    ):
        owner = subprocess.Popen(
            [sys.executable, "-c", LEAVER, f"{master.address}?segment_bytes={SEGMENT_BYTES}", str(RECORD_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            keys = keys_of(3)

            def stored() -> bool:
                with suppress(TierError):
                    return all(reader.put(key, record_of(key)) for key in keys)
                return False

            eventually(stored)  # in the only part that there is
            assert reader.find(keys) == len(keys)
        finally:
            owner.communicate()
        eventually(lambda: reader.find(keys) == 0)
        eventually(lambda: not alive(pid))


@pytest.mark.extended
def test_tier_when_the_master_comes_after_the_server_then_works_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_master() as master:
        master.kill()
        tier = open_tier(f"{master.address}?segment_bytes={SEGMENT_BYTES}", RECORD_BYTES, TIMEOUT_S)
        try:
            (key,) = keys_of(1)
            assert tier.find([key]) == 0 and not tier.put(key, record_of(key)) and read(tier, key) is None
            eventually(lambda: any("no Mooncake master answers" in message for message in caplog.messages))
            master.start()
            eventually(lambda: usable(tier))
            assert tier.put(key, record_of(key))
            warnings = [record for record in caplog.records if record.levelname == "WARNING"]
            assert len(warnings) == 1, "one for the change, however often it was tried"
        finally:
            tier.close()
