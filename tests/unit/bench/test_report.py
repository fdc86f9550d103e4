"""`make bench` as a process: what it leaves when it is told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.integration.cluster import ROOT, process_exists, wait_for
from tests.unit.engine.tiny_models import tiny_model

LIMIT_S = 60.0


def children(pid: int) -> dict[int, str]:
    """Command lines of the processes that `pid` has started."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            for child in map(int, (task / "children").read_text().split()):
                with suppress(FileNotFoundError, ProcessLookupError):
                    found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def test_report_when_told_to_stop_then_every_process_that_it_has_started_ends() -> None:
    command = [sys.executable, "-m", "bench.report", "--model", str(tiny_model("llama")), "--threads", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as report:
        try:

            def all_started() -> dict[int, str]:
                found = children(report.pid)
                wanted = ("transformers_baseline", "prefill_server", "decode_server")
                return found if all(any(each in line for line in found.values()) for each in wanted) else {}

            started = wait_for("processes of the report", all_started, LIMIT_S)
            report.send_signal(signal.SIGTERM)
            status = report.wait(LIMIT_S)
            assert report.stderr is not None
            assert status == 128 + signal.SIGTERM, report.stderr.read()
            wait_for("the ends of its processes", lambda: not any(map(process_exists, started)), LIMIT_S)
        finally:
            report.kill()
