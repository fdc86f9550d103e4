"""How files of tests go to workers that run side by side (pytest-xdist), and what a run says when a worker has died or
nothing ends any more."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from xdist.scheduler import LoadFileScheduling

# Longer than a test that is alone on the machine may take, and another one that waits for it.
STALL_S = 300.0
STACKS_S = 3.0  # to write them

# Fixtures by which modules of a folder share a cluster, as their modules ask for them.
SHARING = {
    "conformance": ("live: Live", "pairs: Cluster", "smol: Cluster"),
    "chaos": ("crowd: Cluster",),
    "integration": ("direct: Cluster", "observed: Observed"),
}


@functools.cache
def _shared_cluster(file: Path) -> str:
    """What stands for the cluster that the tests of a file share with other files; empty when they do not."""
    asked = SHARING.get(file.parent.name, ())
    text = file.read_text(encoding="utf-8") if asked else ""
    return next((f"tests/{file.parent.name}: {fixture}" for fixture in asked if fixture in text), "")


class Scheduling(LoadFileScheduling):
    """Files go whole to one worker or another, and those that share a cluster to the same one: it starts once.

    What a worker that died had still to run goes to the others, without the test that it died in: that one has failed.
    (xdist, tried: 3.8, also hands out again what it had run; a worker that gets such a file waits for ever.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _shared_cluster(self.config.rootpath / file) or file

    def remove_node(self, node: Any) -> str | None:
        workload = self.assigned_work[node]
        died_in = next((test for unit in workload.values() for test, ended in unit.items() if not ended), None)
        if died_in is not None:
            workload[self._split_scope(died_in)][died_in] = True
        for scope in [scope for scope, unit in workload.items() if all(unit.values())]:
            del workload[scope]
        super().remove_node(node)
        if died_in is not None:  # the tests have not ended before the worker that follows it has joined
            self.registered_collections.pop(node, None)
        return died_in

    def _assign_work_unit(self, node: Any) -> None:
        with contextlib.suppress(OSError):  # it has just died, and will give back what it was assigned
            super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:  # it has yet to say what it has found
            return
        super()._reschedule(node)
        # A worker runs its last test when it hears of a next one, or that there is none.
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


class Watch:
    """Ends a run in which no test begins or ends any more, and says which were running and where the workers are."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._moved = threading.Event()
        self._ends = False
        self._running: dict[str, None] = {}
        self._pids: dict[str, int] = {}
        self._thread = threading.Thread(target=self._watch, name="tests-watch", daemon=True)

    def pytest_sessionstart(self) -> None:
        self._thread.start()

    def pytest_sessionfinish(self) -> None:
        self._ends = True
        self._moved.set()

    def pytest_testnodeready(self, node: Any) -> None:
        self._pids[node.gateway.id] = node.gateway._io.popen.pid
        self._moved.set()

    def pytest_testnodedown(self, node: Any) -> None:
        self._pids.pop(node.gateway.id, None)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None
        self._moved.set()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._moved.set()

    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        self._running.pop(crashitem, None)
        node = report.node
        report.longrepr = f"{report.longrepr}\n{_end_of(node)}\n{_last_words(node.gateway.id)}"

    def _watch(self) -> None:
        while self._moved.wait(self._limit_s):
            self._moved.clear()
            if self._ends:
                return
        running = ", ".join(self._running) or "none"
        workers = dict(self._pids)
        report = f"\nno test has begun or ended for {self._limit_s:.0f} s; running: {running}"
        print(f"{report}; the stacks of {workers} follow", file=sys.__stderr__, flush=True)
        for pid in workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        threading.Event().wait(STACKS_S)
        os.kill(os.getpid(), signal.SIGTERM)


def _end_of(node: Any) -> str:
    process: subprocess.Popen[bytes] = node.gateway._io.popen
    try:
        status = process.wait(5)
    except subprocess.TimeoutExpired:
        return "its process has not ended"
    return f"its process ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"


def _words_file(worker: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{worker}.last_words"


def _last_words(worker: str) -> str:
    """The stacks of its threads when a signal for a fault came, or when its test had taken too long."""
    try:
        return _words_file(worker).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def configure(config: pytest.Config, *, worker: bool) -> None:
    """Of a worker, and of the process that distributes the tests among workers."""
    if worker:
        # Not `sys.stderr`, which pytest captures.
        faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)
        words = _words_file(os.environ["PYTEST_XDIST_WORKER"]).open("w", buffering=1)
        config.add_cleanup(words.close)
        faulthandler.enable(words, all_threads=True)
        # What is said of a test that takes too long (pytest-timeout) would go to nobody: it ends the process.
        config.get_terminal_writer = lambda: TerminalWriter(words)
    elif config.getoption("dist", "no") != "no":
        config.pluginmanager.register(Watch(float(os.environ.get("BATON_TESTS_STALL_S", STALL_S))))


def make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
