"""What a process's signals mean for its logs: SIGHUP opens files anew, and the end leaves a bounded time to write."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from rpc.access_log import AccessLog, AccessLogSettings
from rpc.lifecycle import FAST_LOG_S, MIN_LOG_S, Lifecycle
from tests.integration.cluster import wait_for


async def test_sighup_when_a_log_file_was_moved_then_the_next_line_is_in_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog("router", AccessLogSettings(path=str(path), flush_interval_s=0.05))
    lifecycle = Lifecycle()
    lifecycle.install()
    try:
        log.record(request_id="before", code="NONE_ERROR")
        log.flush()
        path.rename(tmp_path / "moved")
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.to_thread(wait_for, "the new file", path.exists, 10)
        log.record(request_id="after", code="NONE_ERROR")
        assert not lifecycle.stopping.is_set()
    finally:
        lifecycle.uninstall()
        log.close()
    assert "before" in (tmp_path / "moved").read_text()
    assert "after" in path.read_text() and "before" not in path.read_text()


async def test_time_left_when_a_drain_goes_on_then_it_is_what_the_time_limit_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lifecycle = Lifecycle(exit_process=lambda status: None)
    assert lifecycle.time_left(120.0) == 120.0, "nobody has asked it to stop: its engine died, or its start failed"
    lifecycle.on_signal(signal.SIGTERM)
    now += 100.0
    assert lifecycle.time_left(120.0) == 20.0
    now += 100.0
    assert lifecycle.time_left(120.0) == MIN_LOG_S
    monkeypatch.undo()
    lifecycle.on_signal(signal.SIGTERM)
    assert lifecycle.time_left(120.0) == FAST_LOG_S
    lifecycle.uninstall()
