"""Lines of the access log: what they have, what they leave out."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rpc.access_log import AccessLog, AccessLogSettings, exception_text, traceback_text
from rpc.errors import BatonError, ErrorCode
from rpc.redaction import hide
from rpc.server import says_yes
from rpc.server_settings import CommonSettings
from rpc.settings import SettingsError


def lines_of(log: AccessLog, stream: io.StringIO) -> list[dict[str, Any]]:
    log.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_access_log_when_a_request_ends_then_it_writes_one_json_line(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog("router", AccessLogSettings(path=str(path)))
    log.record(
        request_id="r-1", code="NONE_ERROR", path="pd", stages={"queue": 0.12345678}, prompt="secret text",
        authorization="Bearer x", nothing=None, servers=[{"attempt": 0, "prefill": "p:1", "api_key": "k"}],
        prompt_tokens=3,
    )  # fmt: skip
    log.close()
    log.record(request_id="late", code="NONE_ERROR")
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("log_time").endswith("Z")
    assert entry == {
        "log": "access", "role": "router", "request_id": "r-1", "code": "NONE_ERROR", "path": "pd",
        "stages": {"queue": 0.123457}, "authorization": "***", "prompt_tokens": 3,
        "servers": [{"attempt": 0, "prefill": "p:1", "api_key": "***"}],
    }  # fmt: skip
    assert log.get_stats()["dropped_after_close"] == 1


@pytest.mark.parametrize("content", [True, False])
def test_prompt_and_output_when_content_is_asked_for_are_written_and_otherwise_never(content: bool) -> None:
    stream = io.StringIO()
    log = AccessLog("router", AccessLogSettings(content=content), stream=stream)
    log.record(request_id="r", code="NONE_ERROR", prompt=["grüße \ud83d"], output="b\nc")
    (entry,) = lines_of(log, stream)
    assert {"prompt", "output"} & set(entry) == ({"prompt", "output"} if content else set())
    if content:
        assert (entry["prompt"], entry["output"]) == (["grüße \ud83d"], "b\nc")


def test_access_log_when_disabled_then_it_starts_and_opens_nothing(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of which some of other tests may end meanwhile
    log = AccessLog("router", AccessLogSettings(path=str(tmp_path / "x"), enabled=False, arrival=True))
    log.arrived(request_id="r")
    log.record(request_id="r", code="NONE_ERROR")
    log.flush()
    log.close()
    assert not set(threading.enumerate()) - before
    assert not (tmp_path / "x").exists()
    assert log.get_stats() == {}


def test_arrival_when_asked_for_then_it_has_a_line_of_its_own() -> None:
    for asked in (True, False):
        stream = io.StringIO()
        log = AccessLog("decode", AccessLogSettings(arrival=asked), stream=stream)
        log.arrived(request_id="r", model="m", prompt="never")
        log.record(request_id="r", code="NONE_ERROR")
        found = lines_of(log, stream)
        assert [entry["log"] for entry in found] == (["arrival", "access"] if asked else ["access"])
        assert "code" not in found[0] or not asked
        assert "prompt" not in found[0]


def test_private_request_when_logged_then_there_is_no_line_but_a_failure_with_the_id_only() -> None:
    stream = io.StringIO()
    log = AccessLog("router", AccessLogSettings(arrival=True, content=True), stream=stream)
    log.arrived(request_id="p", private=True, model="m")
    log.record(request_id="p", code="NONE_ERROR", private=True, prompt="x")
    log.record(
        request_id="p", code="MALLOC_FAILED", private=True, prompt="x", message="x",
        error=BatonError(ErrorCode.MALLOC_FAILED, "x"),
    )  # fmt: skip
    (entry,) = lines_of(log, stream)
    del entry["log_time"]
    assert entry == {"log": "access", "role": "router", "request_id": "p", "code": "MALLOC_FAILED"}


def failing(depth: int) -> None:
    if depth:
        failing(depth - 1)
    raise ValueError("quotes: the prompt")


def test_failure_when_it_was_raised_then_the_line_has_exception_and_traceback_without_foreign_text() -> None:
    stream = io.StringIO()
    log = AccessLog("prefill", stream=stream)
    try:
        try:
            failing(60)
        except ValueError as cause:
            raise BatonError(ErrorCode.UNKNOWN_ERROR, "the server failed") from cause
    except BatonError as error:
        log.record(request_id="r", code=error.code.name, error=error)
    log.record(request_id="s", code="CANCELLED", error=BatonError(ErrorCode.CANCELLED, "never raised"))
    raised, given = lines_of(log, stream)
    assert raised["exception"] == "UNKNOWN_ERROR: the server failed"
    trace = raised["traceback"].splitlines()
    assert "test_failure_when_it_was_raised" in trace[0]
    assert trace[1] == "because of ValueError"
    assert trace[-1].endswith("failing") and len(trace) <= 42
    assert "quotes" not in json.dumps(raised)
    assert given["exception"] == "CANCELLED: never raised"
    assert "traceback" not in given


def test_exception_text_when_the_error_is_foreign_then_its_text_is_shown_with_content_only() -> None:
    error = ValueError("the prompt")
    assert exception_text(error) == "ValueError"
    assert exception_text(error, content=True) == "ValueError: the prompt"
    assert traceback_text(error) is None


def test_secrets_when_they_are_anywhere_in_a_line_then_they_are_masked() -> None:
    hide("key-of-this-test")
    stream = io.StringIO()
    log = AccessLog("router", AccessLogSettings(content=True), stream=stream)
    log.record(
        request_id="r", code="X", prompt="my key is key-of-this-test", message="header Bearer abc.def-ghi",
        cause={"Api-Key": "one", "set-cookie": "two", "nested": {"password": "three"}}, completion_tokens=1,
    )  # fmt: skip
    log.close()
    text = stream.getvalue()
    for secret in ("key-of-this-test", "abc.def", "one", "two", "three"):
        assert secret not in text.replace("NONE", ""), text
    assert json.loads(text)["completion_tokens"] == 1


def test_stream_when_it_fails_then_that_is_a_write_error_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("nobody reads")

    log = AccessLog("router", stream=Broken())
    log.record(request_id="r", code="NONE_ERROR")
    log.close()
    assert log.get_stats()["write_errors"] == 1
    assert "1 lines could not be written" in caplog.text and "nobody reads" in caplog.text


def test_file_when_it_cannot_be_opened_then_the_start_ends_with_one_line_that_names_the_flag(tmp_path: Path) -> None:
    settings = CommonSettings(access_log_path=str(tmp_path / "no" / "log"))
    with pytest.raises(SystemExit) as caught:
        settings.open_access_log("decode", lambda: None)
    assert str(caught.value) == (
        f"decode_server: error: --access-log-path {tmp_path}/no/log: cannot be opened: No such file or directory"
    )


@pytest.mark.parametrize(
    ("flag", "bad"),
    [
        ("--access-log-queue-size", "0"),
        ("--access-log-batch-size", "0"),
        ("--access-log-flush-interval-seconds", "0"),
        ("--access-log-max-bytes", "1"),
        ("--access-log-backups", "-1"),
        ("--access-log-close-timeout-seconds", "0.05"),
        ("--access-log-close-timeout-seconds", "61"),
    ],
)
def test_setting_when_out_of_range_then_the_flag_is_named(flag: str, bad: str) -> None:
    with pytest.raises(SettingsError, match=flag):
        CommonSettings.parse([flag, bad], {})


def test_settings_when_not_given_then_they_are_the_documented_ones() -> None:
    settings = CommonSettings()
    assert (settings.access_log_queue_size, settings.access_log_batch_size) == (100_000, 100)
    assert settings.access_log_flush_interval_seconds == 1.0
    assert (int(settings.access_log_max_bytes), settings.access_log_backups) == (100_000_000, 10)
    assert settings.access_log_close_timeout_seconds == 5.0
    assert (settings.access_log_content, settings.access_log_arrival) == (False, False)


@pytest.mark.parametrize(
    ("value", "meant"), [("1", True), ("true", True), ("yes", True), ("0", False), ("False", False), ("", False)]
)
def test_private_header_when_read_then_only_a_word_for_no_means_no(value: str, meant: bool) -> None:
    assert says_yes(value) is meant


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345678, 0.123457), (0.0, 0.0), (1e-7, 0.0), (12.5, 12.5), (-0.25, -0.25), (float("inf"), None), (1e12, 1e12)],
)
def test_duration_when_written_then_it_has_microseconds(value: float, shown: float | None) -> None:
    stream = io.StringIO()
    log = AccessLog("router", stream=stream)
    log.record(request_id="r", code="NONE_ERROR", seconds=value, stages={"queue": value})
    (entry,) = lines_of(log, stream)
    assert (entry["seconds"], entry["stages"]["queue"]) == (shown, shown)
