"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

LIMIT_S = 10.0


def states_of(pid: int) -> list[str]:
    """Of its threads: R, S, T, ..."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def stand_still(pid: int) -> None:
    """Returns once no thread of it runs any more; the signal alone is not yet that. SIGCONT lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    limit = time.monotonic() + LIMIT_S
    while any(state not in "TtZX" for state in states_of(pid)):
        if time.monotonic() > limit:
            raise TimeoutError(f"process {pid} has not stopped: threads {states_of(pid)}")
        time.sleep(0.001)
