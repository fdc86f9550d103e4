"""Log files: rotation, reopening, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rpc.async_log import AsyncLogHandler, reopen_logs
from rpc.log_sinks import RotatingFile

ROOT = Path(__file__).resolve().parents[3]


def make(sink: RotatingFile) -> AsyncLogHandler:
    return AsyncLogHandler(sink, flush_interval_s=0.05, name="under-test")


def put(handler: AsyncLogHandler, *texts: str) -> None:
    for text in texts:
        handler.write_line(text.encode())


def test_file_when_it_grows_then_it_is_rotated_at_a_line_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    handler = make(RotatingFile(path, 100, 2))
    put(handler, *(f"{number:09d}" for number in range(45)))  # ten bytes each with its line end
    handler.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    kept = [int(line) for name in ("log.2", "log.1", "log") for line in (tmp_path / name).read_text().split()]
    assert kept == list(range(20, 45))
    assert all(p.stat().st_size <= 100 for p in tmp_path.iterdir())


def test_file_when_no_backups_are_kept_then_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    handler = make(RotatingFile(path, 100, 0))
    put(handler, *(f"{number:09d}" for number in range(25)))
    handler.close()
    assert [p.name for p in tmp_path.iterdir()] == ["log"]
    assert [int(line) for line in path.read_text().split()] == list(range(20, 25))


def test_reopen_when_the_file_was_moved_away_then_lines_go_to_a_new_one_and_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "log"
    handler = make(RotatingFile(path, 10_000, 2))
    put(handler, "before")
    handler.flush()
    path.rename(tmp_path / "moved")
    reopen_logs()
    put(handler, "after")
    handler.close()
    assert (tmp_path / "moved").read_text() + path.read_text() == "before\nafter\n"
    assert path.read_text() == "after\n"


def test_reopen_when_it_fails_then_the_old_file_goes_on_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    handler = make(RotatingFile(folder / "log", 10_000, 2))
    put(handler, "before")
    handler.flush()
    folder.rename(tmp_path / "away")
    handler.reopen()
    put(handler, "after")
    handler.close()
    assert (tmp_path / "away" / "log").read_text() == "before\nafter\n"
    assert "cannot be opened anew" in caplog.text


def test_device_when_more_is_written_than_a_file_may_hold_then_it_is_not_renamed(tmp_path: Path) -> None:
    path = tmp_path / "null"
    path.symlink_to("/dev/null")  # a rename would hit the link
    sink = RotatingFile(path, 10, 2)
    assert sink.write([b"0123456789"] * 3) == 3
    sink.close()
    assert path.is_char_device() and [p.name for p in tmp_path.iterdir()] == ["null"]


def test_pipe_when_nobody_reads_it_then_opening_fails_at_once_and_with_a_reader_it_gets_the_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="no process reads this pipe"):
        RotatingFile(path, 100, 2)
    log = tmp_path / "log"
    handler = make(RotatingFile(log, 100, 2))
    os.replace(path, log)
    reopen_logs()
    put(handler, "lost with the file")
    handler.flush()
    assert "no process reads this pipe" in caplog.text
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        reopen_logs()
        put(handler, *(f"{number:09d}" for number in range(20)))
        handler.close()
        assert os.read(reader, 1000).split() == [b"%09d" % number for number in range(20)]
    finally:
        os.close(reader)


def test_disk_when_it_is_full_then_lines_that_do_not_fit_are_counted_and_the_next_one_is_whole(tmp_path: Path) -> None:
    """With a limit on the size of files in place of a full disk."""
    program = """
import resource, signal, sys
from rpc.async_log import AsyncLogHandler
from rpc.log_sinks import RotatingFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
handler = AsyncLogHandler(RotatingFile(sys.argv[1], 10**9, 1), batch_size=10, flush_interval_s=0.05)
resource.setrlimit(resource.RLIMIT_FSIZE, (55, resource.RLIM_INFINITY))
for number in range(10):
    handler.write_line(b"%09d" % number)
handler.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
handler.write_line(b"the last")
handler.close()
stats = handler.get_stats()
print(stats["written"], stats["write_errors"])
"""
    path = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["6", "5"]
    lines = path.read_text().splitlines()
    assert lines == [*(f"{number:09d}" for number in range(5)), "00000", "the last"]
