"""Lines of the ordinary log."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from rpc.async_log import AsyncLogHandler
from rpc.logs import close_logging, log_stats, request_id_var, setup_logging
from rpc.redaction import hide


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
    before = set(threading.enumerate())  # of which some of other tests may end meanwhile
    for _ in range(20):
        setup_logging("router", stream=io.StringIO())
    assert len(set(threading.enumerate()) - before) == 1
    assert len([h for h in logging.getLogger().handlers if isinstance(h, AsyncLogHandler)]) == 1


@pytest.mark.usefixtures("restored")
def test_secrets_when_they_stand_in_a_message_then_neither_form_shows_them() -> None:
    hide("s3cr3t-of-this-test")
    for form in ("json", "text"):
        stream = io.StringIO()
        handler = setup_logging("router", format=form, stream=stream)  # type: ignore[arg-type]
        logging.getLogger("x").info("got Bearer abcdef.ghij and s3cr3t-of-this-test", extra={"x-api-key": "k"})
        handler.flush()
        text = stream.getvalue()
        assert "abcdef" not in text and "s3cr3t" not in text, text
        assert text.count("***") == 3


@pytest.mark.usefixtures("restored")
def test_dropped_lines_when_the_log_has_room_again_then_it_says_how_many() -> None:
    gate = threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            assert gate.wait(10)
            return super().write(text)

    stream = Slow()
    drops: list[int] = []
    handler = setup_logging("router", stream=stream, queue_size=100, on_drop=lambda: drops.append(1))
    log = logging.getLogger("x")
    for number in range(300):
        log.info("%d", number)
    gate.set()
    handler.flush()
    stats = handler.get_stats()
    assert stats["dropped"] == len(drops) > 0
    assert stats["enqueued"] + stats["dropped"] == 300
    assert log_stats() == stats
    notes = [json.loads(line) for line in stream.getvalue().splitlines() if "were dropped" in line]
    assert (notes[0]["level"], notes[0]["role"]) == ("warning", "router")
    assert notes[0]["message"].startswith(f"{len(drops)} lines")
