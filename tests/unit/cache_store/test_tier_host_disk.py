"""Host memory and the directory as tiers: limits, order of use, damage, other users of the directory, crashes."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_store.tiers.disk import DiskTier
from cache_store.tiers.host import ENTRY_BYTES, HostTier
from cache_store.tiers.record import open_record
from cache_store.tiers.tier import TierError
from rpc.errors import BatonError, ErrorCode
from tests.extent import extent
from tests.unit.cache_store.tier_fixtures import RECORD, key_of, record_of

Embedded = HostTier | DiskTier
ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def disk(path: Path, blocks: int = 100) -> Iterator[DiskTier]:
    tier = DiskTier(path, blocks * RECORD)
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture(params=["host", "disk"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Embedded]:
    """Room for three records."""
    if request.param == "host":
        yield HostTier(3 * (RECORD + ENTRY_BYTES))
        return
    with disk(tmp_path / "kv", 3) as tier:
        yield tier


def held(tier: Embedded, *numbers: int) -> list[int]:
    return [number for number in numbers if tier.find([key_of(number)])]


def read(tier: Embedded, number: int, size: int = RECORD) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if tier.get(key_of(number), memoryview(into)) else None


def files(path: Path) -> list[Path]:
    return sorted((path / "blocks").glob("*/*.kv"))


def file_of(path: Path, number: int) -> Path:
    name = key_of(number).hex()
    return path / "blocks" / name[:2] / f"{name}.kv"


def test_tier_when_it_has_leading_records_then_finds_them_and_gives_them_back(small: Embedded) -> None:
    for number in (1, 2, 4):
        assert small.put(key_of(number), record_of(number))
    assert small.find([key_of(number) for number in (1, 2, 3, 4)]) == 2
    assert [read(small, number) for number in (1, 2, 3)] == [record_of(1), record_of(2), None]
    assert small.stats().blocks == 3


def test_tier_when_full_then_the_least_recently_used_record_goes(small: Embedded) -> None:
    for number in (1, 2, 3):
        small.put(key_of(number), record_of(number))
    read(small, 1)
    small.find([key_of(2)])
    small.put(key_of(3), record_of(3))  # it is there: a use as well
    small.put(key_of(4), record_of(4))
    assert held(small, 1, 2, 3, 4) == [2, 3, 4]
    assert (small.stats().evicted_blocks, small.stats().blocks) == (1, 3)
    assert small.stats().stored_bytes <= small.stats().limit_bytes


def test_tier_when_a_record_is_larger_than_it_then_is_not_taken(small: Embedded) -> None:
    small.put(key_of(1), record_of(1))
    assert not small.put(key_of(2), bytes(4 * RECORD))
    assert held(small, 1, 2) == [1]


def test_tier_when_asked_for_another_size_then_it_is_a_miss(small: Embedded) -> None:
    small.put(key_of(1), record_of(1))
    assert read(small, 1, RECORD + 1) is None


def test_tier_when_cleared_or_told_of_damage_then_forgets(small: Embedded) -> None:
    for number in (1, 2, 3):
        small.put(key_of(number), record_of(number))
    small.discard(key_of(2))
    assert held(small, 1, 2, 3) == [1, 3]
    assert small.put(key_of(2), record_of(2))
    small.clear()
    assert (held(small, 1, 2, 3), small.stats().stored_bytes) == ([], 0)


def test_disk_when_opened_again_then_has_its_records_in_their_order_of_use(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        for number in (1, 2, 3, 4):
            tier.put(key_of(number), record_of(number))
            os.utime(file_of(tmp_path, number), ns=(0, number * 10**9))
    with disk(tmp_path) as tier:
        assert tier.has(key_of(1))
        tier.touch([key_of(1)])  # the latest one now
    with disk(tmp_path, blocks=2) as tier:  # less room than before
        assert held(tier, 1, 2, 3, 4) == [1, 4]
        assert (read(tier, 4), read(tier, 1)) == (record_of(4), record_of(1))
        assert len(files(tmp_path)) == 2


def test_disk_when_a_prefix_was_read_then_its_beginning_is_the_latest_after_a_start(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        for number in (1, 2, 3, 4):
            tier.put(key_of(number), record_of(number))
            os.utime(file_of(tmp_path, number), ns=(0, number * 10**9))
    with disk(tmp_path) as tier:
        assert tier.find([key_of(number) for number in (1, 2, 3)]) == 3
        for number in (1, 2, 3):
            assert read(tier, number) == record_of(number)
        stamps = [file_of(tmp_path, number).stat().st_mtime_ns for number in (1, 2, 3, 4)]
        assert stamps[0] > stamps[1] > stamps[2] > stamps[3]
        assert held(tier, 1) == [1] and read(tier, 1) == record_of(1)
        assert file_of(tmp_path, 1).stat().st_mtime_ns == stamps[0]  # at most once in a while
    with disk(tmp_path, blocks=2) as tier:
        assert held(tier, 1, 2, 3, 4) == [1, 2]


def test_tier_when_a_prefix_was_written_in_order_and_touched_then_its_end_goes_first(small: Embedded) -> None:
    for number in (1, 2, 3):
        small.put(key_of(number), record_of(number))
    small.touch([key_of(number) for number in (1, 2, 7, 3)])
    small.put(key_of(4), record_of(4))
    assert held(small, 1, 2, 3, 4) == [1, 2, 4]


def test_disk_when_a_prefix_was_written_and_touched_then_the_next_server_keeps_its_beginning(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        for number in (1, 2, 3, 4):
            tier.put(key_of(number), record_of(number))
        tier.touch([key_of(number) for number in (1, 2, 3, 4)])
    with disk(tmp_path, blocks=2) as tier:
        assert held(tier, 1, 2, 3, 4) == [1, 2]


def test_disk_when_another_server_uses_the_directory_then_refuses_and_names_the_flag(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        tier.put(key_of(1), record_of(1))
        with pytest.raises(BatonError, match=r"--kv-disk-path .* another server uses it") as refused:
            DiskTier(tmp_path, 1 << 20)
        assert refused.value.code is ErrorCode.INVALID_PARAMS
        assert read(tier, 1) == record_of(1)
    with disk(tmp_path) as tier:
        assert held(tier, 1) == [1]


def test_disk_when_the_path_cannot_be_a_directory_then_refuses_and_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BatonError, match="--kv-disk-path") as refused:
        DiskTier(tmp_path / "file" / "below", 1 << 20)
    assert refused.value.code is ErrorCode.INVALID_PARAMS


def test_disk_when_it_writes_then_nobody_else_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with disk(tmp_path / "kv") as tier:
            tier.put(key_of(1), record_of(1))
    finally:
        os.umask(before)
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_disk_when_files_are_not_its_own_then_leaves_them_alone(tmp_path: Path) -> None:
    folder = tmp_path / "blocks" / "ab"
    folder.mkdir(parents=True)
    strangers = [folder / "notes.txt", folder / "ABCD.kv", tmp_path / "blocks" / "readme"]
    for stranger in strangers:
        stranger.write_text("x" * 100)
    with disk(tmp_path) as tier:
        tier.put(key_of(1), record_of(1))
        tier.clear()
    assert all(stranger.exists() for stranger in strangers)


@pytest.mark.parametrize(
    "harm", ["removed", "shortened", "emptied", "extended", "a folder", "a link", "a link to itself", "a pipe"]
)
def test_disk_when_somebody_harms_a_file_then_it_is_a_miss_and_can_be_written_again(tmp_path: Path, harm: str) -> None:
    with disk(tmp_path) as tier:
        tier.put(key_of(1), record_of(1))
        file = file_of(tmp_path, 1)
        if harm == "removed":
            file.unlink()
        elif harm == "shortened":
            os.truncate(file, RECORD // 2)
        elif harm == "emptied":
            os.truncate(file, 0)
        elif harm == "extended":
            os.truncate(file, RECORD + 1)
        else:
            file.unlink()
            put = {"a folder": file.mkdir, "a pipe": lambda: os.mkfifo(file)}
            other = tmp_path / "other"
            other.write_bytes(record_of(1))
            put.get(harm, lambda: file.symlink_to(file if harm == "a link to itself" else other))()
        with contextlib.suppress(TierError):  # what is no file at all is an error, and a miss too
            assert read(tier, 1) is None
        assert held(tier, 1) == []
        assert file.is_dir() if harm == "a folder" else not file.exists() and not file.is_symlink()
        assert tier.put(key_of(1), record_of(1))
        assert read(tier, 1) == record_of(1)


@pytest.mark.parametrize("place", ["of the file", "of its folder"])
def test_disk_when_something_else_lies_in_the_place_of_a_block_then_it_is_moved_aside_and_kept(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(tmp_path, 1)
    with disk(tmp_path) as tier:
        if place == "of the file":
            file.mkdir(parents=True)
            (file / "notes.txt").write_text("keep me")
            stranger = file
        else:
            stranger = file.parent
            stranger.write_text("keep me")
        for _ in range(2):
            assert tier.put(key_of(1), record_of(1))
            assert read(tier, 1) == record_of(1)
        aside = stranger.with_name(stranger.name + ".aside")
        assert (aside / "notes.txt" if aside.is_dir() else aside).read_text() == "keep me"
        assert sum("is none of ours" in record.message for record in caplog.records) == 1
    with disk(tmp_path) as tier:
        assert held(tier, 1) == [1]
        tier.clear()
    assert aside.exists()


def test_disk_when_folders_lie_in_the_place_of_a_block_again_then_each_is_moved_aside(tmp_path: Path) -> None:
    file = file_of(tmp_path, 1)
    with disk(tmp_path) as tier:
        for number in range(3):
            file.mkdir(parents=True)
            (file / "notes.txt").write_text(str(number))
            assert tier.put(key_of(1), record_of(1))
            tier.discard(key_of(1))
    assert {notes.read_text() for notes in file.parent.glob("*/notes.txt")} == {"0", "1", "2"}


def test_disk_when_a_pipe_or_a_folder_lies_where_it_writes_then_one_write_fails_and_the_next_does_not(
    tmp_path: Path,
) -> None:
    with disk(tmp_path) as tier:
        os.mkfifo(tmp_path / "blocks" / "new" / "1")
        (tmp_path / "blocks" / "new" / "2").mkdir()
        for _ in range(2):
            with pytest.raises(TierError) as failed:
                tier.put(key_of(1), record_of(1))
            assert failed.value.reason == "io"
        assert tier.put(key_of(1), record_of(1))
        assert read(tier, 1) == record_of(1)


def test_disk_when_somebody_empties_its_directory_then_it_goes_on_as_long_as_its_lock_is_there(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        tier.put(key_of(1), record_of(1))
        shutil.rmtree(tmp_path / "blocks")
        assert read(tier, 1) is None
        for number in (1, 2):
            assert tier.put(key_of(number), record_of(number))
            assert read(tier, number) == record_of(number)
        shutil.rmtree(tmp_path / "blocks")
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").touch()  # of another server
        with pytest.raises(TierError):
            tier.put(key_of(3), record_of(3))
        assert not (tmp_path / "blocks").exists()


def test_disk_when_a_bit_flips_then_the_record_says_so(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        tier.put(key_of(1), record_of(1))
    damaged = bytearray(file_of(tmp_path, 1).read_bytes())
    damaged[RECORD // 2] ^= 4
    file_of(tmp_path, 1).write_bytes(damaged)
    with disk(tmp_path) as tier:
        found = read(tier, 1)
        assert found is not None and open_record(key_of(1), found) is None


def test_disk_when_its_folders_are_gone_then_every_call_is_an_error_with_a_reason(tmp_path: Path) -> None:
    with disk(tmp_path / "kv") as tier:
        tier.put(key_of(1), record_of(1))
        (tmp_path / "kv").rename(tmp_path / "elsewhere")
        assert read(tier, 1) is None
        with pytest.raises(TierError) as failed:
            tier.put(key_of(2), record_of(2))
        assert failed.value.reason == "io"
        assert held(tier, 1, 2) == []


def test_disk_when_files_may_not_grow_then_says_full_and_leaves_nothing(tmp_path: Path) -> None:
    with disk(tmp_path) as tier:
        tier.put(key_of(1), record_of(1))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (RECORD // 2, hard))
        try:
            with pytest.raises(TierError) as failed:
                tier.put(key_of(2), record_of(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert failed.value.reason == "full"
        assert (held(tier, 1, 2), list((tmp_path / "blocks" / "new").iterdir())) == ([1], [])
        assert tier.put(key_of(2), record_of(2))


# A child that writes records for ever, and says so after each.
WRITER = """
import sys
from pathlib import Path
from cache_store.tiers.disk import DiskTier
from tests.unit.cache_store.tier_fixtures import RECORD, key_of, record_of

tier = DiskTier(sys.argv[1], 40 * RECORD)
number = int(sys.argv[2])
while True:
    tier.put(key_of(number), record_of(number))
    number += 1
    print(number, flush=True)
"""


def test_disk_when_its_server_is_killed_again_and_again_then_the_next_one_has_whole_records(tmp_path: Path) -> None:
    first = 1
    for turn in range(extent(2, 4)):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(first)], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert child.stdout is not None
        for _ in range(30 + 17 * turn):  # the kill falls anywhere in a write, or in an eviction
            line = child.stdout.readline()
            assert line, "the writer has ended"
            first = int(line)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        first = int((child.stdout.read().split() or [first])[-1])  # how far it came before the signal did
        child.stdout.close()
        litter = tmp_path / "blocks" / "new"
        (litter / "left").write_bytes(record_of(1)[: RECORD // 3])  # what a kill inside of a write leaves
        (file_of(tmp_path, 0).parent / f"{key_of(0).hex()}.kv").write_bytes(b"")  # and what a loss of power does
        with disk(tmp_path, 40) as tier:  # the lock went with its holder
            assert (list(litter.iterdir()), held(tier, 0)) == ([], [])
            here = held(tier, *range(1, first + 2))
            assert 30 <= len(here) <= 40 and max(here) >= first - 1
            assert all(read(tier, number) == record_of(number) for number in here)
            assert len(files(tmp_path)) == len(here)
