"""Lines of the log and of the access log, and what happens when the writer cannot keep up."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc.logs import AccessLog, AsyncLogHandler, close_logging, request_id_var, setup_logging


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    token = request_id_var.set("")  # another test may have left one
    yield
    request_id_var.reset(token)
    close_logging()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("restored")
def test_json_line_has_the_documented_fields() -> None:
    stream = io.StringIO()
    handler = setup_logging("decode", "info", "json", rank=2, stream=stream)
    log = logging.getLogger("some.module")
    log.debug("not shown")
    token = request_id_var.set("r-1")
    log.warning("went %s", "wrong", extra={"code": "MALLOC_FAILED", "api_key": "hush"})
    request_id_var.reset(token)
    log.info("outside")
    handler.flush()
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert first["message"] == "went wrong"
    assert (first["level"], first["role"], first["rank"], first["request_id"]) == ("warning", "decode", 2, "r-1")
    assert (first["code"], first["api_key"], first["logger"]) == ("MALLOC_FAILED", "***", "some.module")
    assert first["process"].startswith("decode:")
    assert first["time"].endswith("Z")
    assert "request_id" not in second


@pytest.mark.usefixtures("restored")
def test_exception_is_in_the_line_and_the_line_is_one() -> None:
    stream = io.StringIO()
    handler = setup_logging("router", stream=stream)
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("x").exception("failed")
    handler.flush()
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: a\nb" in json.loads(line)["exception"]


@pytest.mark.usefixtures("restored")
def test_text_form_is_for_people() -> None:
    stream = io.StringIO()
    handler = setup_logging("prefill", format="text", rank=0, stream=stream)
    token = request_id_var.set("r-9")
    logging.getLogger("x").error("oh", extra={"peer": "h:1"})
    request_id_var.reset(token)
    handler.flush()
    assert stream.getvalue().rstrip().endswith("ERROR   prefill[0] r-9 x: oh peer=h:1")


@pytest.mark.usefixtures("restored")
def test_second_set_up_replaces_the_first_and_leaves_one_writer() -> None:
    before = threading.active_count()
    for _ in range(20):
        setup_logging("router", stream=io.StringIO())
    assert threading.active_count() == before + 1
    assert len([h for h in logging.getLogger().handlers if isinstance(h, AsyncLogHandler)]) == 1


class Blocked(logging.Handler):
    """A target that writes only once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.entered = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.go.wait(10)
        self.lines.append(record.getMessage())


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text})


def test_emit_when_the_queue_is_full_drops_counts_and_does_not_wait() -> None:
    target, drops = Blocked(), []
    handler = AsyncLogHandler(target, queue_size=2, on_drop=lambda: drops.append(1))
    handler.handle(record("0"))
    assert target.entered.wait(5)
    began = time.monotonic()
    for number in range(1, 6):
        handler.handle(record(str(number)))
    assert time.monotonic() - began < 0.5
    assert len(drops) == handler.get_stats()["dropped"] == 3
    target.go.set()
    handler.close()
    assert target.lines == ["0", "1", "2"]
    assert handler.get_stats()["written"] == 3


def test_close_when_the_writer_hangs_returns_in_time_and_counts_what_is_left() -> None:
    target = Blocked()
    handler = AsyncLogHandler(target, queue_size=10, close_timeout_s=0.1)
    handler.handle(record("0"))
    handler.handle(record("1"))
    began = time.monotonic()
    handler.close()
    handler.close()
    assert time.monotonic() - began < 2
    assert handler.get_stats()["dropped"] == 2
    handler.handle(record("2"))
    assert handler.get_stats()["dropped_after_close"] == 1
    target.go.set()


def test_write_error_is_counted_and_the_next_line_is_written() -> None:
    class Failing(logging.Handler):
        seen: list[str] = []  # noqa: RUF012

        def emit(self, item: logging.LogRecord) -> None:
            if item.getMessage() == "bad":
                raise OSError("disk full")
            self.seen.append(item.getMessage())

    handler = AsyncLogHandler(Failing())
    handler.handle(record("bad"))
    handler.handle(record("good"))
    handler.close()
    assert Failing.seen == ["good"]
    assert (handler.get_stats()["write_errors"], handler.get_stats()["written"]) == (1, 1)


def test_stream_that_fails_is_a_write_error() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = AccessLog("router", stream=Broken())
    log.record(request_id="r", code="NONE_ERROR")
    log.close()
    assert log.get_stats()["write_errors"] == 1


def test_access_log_writes_one_json_line_per_request(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog("router", str(path))
    log.record(
        request_id="r-1", code="NONE_ERROR", path="pd", stages={"queue": 0.12345678}, prompt="secret text",
        authorization="Bearer x", nothing=None,
    )  # fmt: skip
    log.close()
    log.record(request_id="late", code="NONE_ERROR")
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("log_time").endswith("Z")
    assert entry == {
        "log": "access", "role": "router", "request_id": "r-1", "code": "NONE_ERROR", "path": "pd",
        "stages": {"queue": 0.123457}, "authorization": "***",
    }  # fmt: skip


def test_access_log_with_content_writes_prompt_and_output(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog("router", str(path), content=True)
    log.record(request_id="r", code="NONE_ERROR", prompt="a", output="b")
    log.close()
    entry = json.loads(path.read_text())
    assert (entry["prompt"], entry["output"]) == ("a", "b")


def test_access_log_when_disabled_starts_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    log = AccessLog("router", str(tmp_path / "x"), enabled=False)
    log.record(request_id="r", code="NONE_ERROR")
    log.close()
    assert threading.active_count() == before
    assert not (tmp_path / "x").exists()


def test_every_line_is_on_disk_or_counted_after_close(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog("decode", str(path), queue_size=500)
    for number in range(10_000):
        log.record(request_id=str(number), code="NONE_ERROR")
    log.close()
    lines = [json.loads(line)["request_id"] for line in path.read_text().splitlines()]
    assert len(lines) + log.get_stats()["dropped"] == 10_000
    assert lines == sorted(lines, key=int)
