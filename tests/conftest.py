"""Before any module with a kernel is imported: without an NVIDIA device, kernels run in Triton's interpreter. And how
tests that run side by side (pytest-xdist) share a machine."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import hypothesis
import pytest

from tests import scheduling
from tests.extent import WHOLE

# Triton reads this when a kernel is decorated, so it cannot wait for the first test that needs it. The device file
# tells as much as PyTorch would, without importing PyTorch into tests that do without.
if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Structured output costs each process of a cluster a second at its start; the tests that need it ask for it.
os.environ.setdefault("BATON_GRAMMAR_BACKEND", "none")

BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
if BESIDE_OTHERS:
    # Threads that wait for each other by spinning are many times slower where others want the processors too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# A machine that others use may stand still for longer than the 200 ms that one example is given otherwise.
hypothesis.settings.register_profile("baton", deadline=None)
hypothesis.settings.load_profile("baton")


class Turns:
    """Locks by which a test marked `serial` has the machine for itself, as far as this checkout's tests go.

    Whoever wants a turn passes the gate first, and a serial test waits within it: short tests of another worker, which
    share their turns, cannot overtake it for ever.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._gate: IO[bytes] = (folder / "gate").open("wb")
        self._turn: IO[bytes] = (folder / "turn").open("wb")

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Not left to closing: a process that a test has forked holds the same open file.
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        self._gate.close()
        self._turn.close()


_turns = pytest.StashKey[Turns]()


def pytest_configure(config: pytest.Config) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)
    scheduling.configure(config, worker=BESIDE_OTHERS)
    if BESIDE_OTHERS:
        config.stash[_turns] = Turns(config.rootpath / ".pytest_cache" / "turns")
        config.add_cleanup(config.stash[_turns].close)
    else:
        _keep_temporary_files_together(config)
    if seed := os.environ.get("BATON_TESTS_DISTURBED"):
        from tests.disturbance import disturb

        disturb(seed)


_PID = os.getpid()


def _stop(number: int, _: object) -> None:
    """SIGTERM ends a run as Ctrl-C does: what fixtures have started ends with them."""
    if os.getpid() != _PID:  # a process that a test has forked
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    signal.signal(number, lambda *_: None)  # `timeout` sends it twice
    pytest.exit("told to stop")  # with what has failed until now


def _keep_temporary_files_together(config: pytest.Config) -> None:
    """One folder for all that this run's processes leave, also those that are killed; it goes with the run.

    Folders of `tmp_path` are pytest's to keep: those of failed tests can be looked at.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="baton-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What the tests import (torch, transformers) stays: the collector of garbage need not look through it again, which
    takes a second and holds up every thread of a test meanwhile."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()


def pytest_report_header() -> str:
    return "" if WHOLE else "without tests marked `extended`: `make test-all` (BATON_TESTS=all) runs them too"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WHOLE:
        return
    # Left out and not skipped: there are thousands of them, and each skip is reported from process to process.
    left_out = [item for item in items if item.get_closest_marker("extended") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.get_closest_marker("extended") is None]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.make_scheduler(config, log)


# Outermost, so that waiting for a turn does not count as a part of the test's time.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    turns = item.config.stash.get(_turns, None)
    if turns is None:
        return (yield)
    with turns.take(alone=item.get_closest_marker("serial") is not None):
        return (yield)
