"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT_S = 10.0


def states_of(pid: int) -> list[str]:
    """Of its threads: R, S, T, ... Of a process that is gone, none."""
    states = []
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def stand_still(pid: int) -> None:
    """Returns once no thread of it runs any more; the signal alone is not yet that. SIGCONT lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    limit = time.monotonic() + LIMIT_S
    while not set(states := states_of(pid)) <= set("TtZX"):
        if time.monotonic() > limit:
            raise TimeoutError(f"process {pid} has not stopped: threads {states}")
        time.sleep(0.001)


@contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """The processes do nothing meanwhile, and go on afterwards unless they have ended."""
    try:
        for pid in pids:
            stand_still(pid)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
