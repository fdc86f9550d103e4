"""What SIGHUP does to `baton up`: logs are opened anew, unless a terminal was closed."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cli.up import StopSignals

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("before", "terminal", "opened"),
    [
        (signal.SIG_DFL, False, True),  # a supervisor
        (signal.SIG_DFL, True, False),  # a terminal, which is closed
        (signal.SIG_IGN, False, True),  # nohup
        (signal.SIG_IGN, True, True),  # a terminal whose shell ignores it
    ],
)
def test_sighup_when_received_then_logs_are_opened_anew_or_all_stops(
    before: Any, terminal: bool, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGHUP, before)
    stdin = io.StringIO()
    stdin.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stdin)
    calls: list[int] = []
    signals = StopSignals()
    signals.install(lambda: calls.append(1))
    os.kill(os.getpid(), signal.SIGHUP)
    assert (bool(calls), signals.stop.is_set()) == (opened, not opened)
