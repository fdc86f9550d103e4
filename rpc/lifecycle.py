"""Start and end of a process: signals, drain, exit status, the event loop's own health.

First SIGTERM or SIGINT: drain. Second: open requests end at once, exit within 2 s with 143 (130 for SIGINT). SIGHUP:
log files are opened anew.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NoReturn

from rpc.async_log import reopen_logs
from rpc.huge_pages import gather_memory
from rpc.logs import close_logging
from rpc.metrics import Registry
from rpc.time_slice import SHORT_S, set_time_slice

FAST_EXIT_LIMIT_S = 2.0
# What the last log lines get of that, and what they get at the least of a drain that took all its time.
FAST_LOG_S = 0.3
MIN_LOG_S = 0.1
SERVING, DRAINING, DRAINED = 0, 1, 2

_log = logging.getLogger(__name__)


def exit_status(signum: int) -> int:
    return 128 + signum


class OpenWork:
    """Counts what is open (requests, staged KV), so that a drain can wait for its end without polling."""

    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        self._count = 0
        self._on_change = on_change
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """One piece of work, for as long as the `with` body runs."""
        self.add(1)
        try:
            yield
        finally:
            self.add(-1)

    def add(self, change: int) -> None:
        """For work whose ends are not one block of code. Raises ValueError below 0."""
        if self._count + change < 0:
            raise ValueError(f"more work ended than began: {self._count} {change:+d}")
        self._set(self._count + change)

    def set(self, count: int) -> None:
        """For work that another process counts."""
        self._set(max(0, count))

    def _set(self, count: int) -> None:
        self._count = count
        if count:
            self._idle.clear()
        else:
            self._idle.set()
        if self._on_change is not None:
            self._on_change(count)

    async def wait_idle(self) -> None:
        """Until nothing is open. May be true already."""
        await self._idle.wait()


class Lifecycle:
    """What a process has been told by signals.

    `stopping` is set by the first signal, `fast` by the second. From the second on the
    process ends within FAST_EXIT_LIMIT_S whatever it is doing. Belongs to one event loop, which must be
    running.
    """

    def __init__(self, *, exit_process: Callable[[int], object] = os._exit) -> None:
        self.stopping = asyncio.Event()
        self.fast = asyncio.Event()
        self._fast_signal = 0
        self._stopped_at: float | None = None
        self._exit_process = exit_process
        self._watchdog: threading.Timer | None = None
        self._installed: list[signal.Signals] = []

    @property
    def exit_code(self) -> int:
        """0 after a drain, 143 or 130 after a second signal."""
        return exit_status(self._fast_signal) if self._fast_signal else 0

    def install(self) -> None:
        """Takes SIGTERM, SIGINT and SIGHUP over."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.on_signal, signum)
            self._installed.append(signum)
        loop.add_signal_handler(signal.SIGHUP, reopen_logs)
        self._installed.append(signal.SIGHUP)

    def time_left(self, drain_timeout_s: float) -> float:
        """Seconds for what is done at the end, e.g. writing the last log lines: what is left of the drain's time limit
        since the first signal, after a second signal next to nothing."""
        if self.fast.is_set():
            return FAST_LOG_S
        if self._stopped_at is None:
            return drain_timeout_s
        return max(MIN_LOG_S, drain_timeout_s - (time.monotonic() - self._stopped_at))

    def uninstall(self) -> None:
        loop = asyncio.get_running_loop()
        while self._installed:
            loop.remove_signal_handler(self._installed.pop())
        if self._watchdog is not None:
            self._watchdog.cancel()

    def on_signal(self, signum: int) -> None:
        if not self.stopping.is_set():
            _log.info("%s: draining", signal.Signals(signum).name)
            self._stopped_at = time.monotonic()
            self.stopping.set()
            return
        if self.fast.is_set():
            return
        _log.warning("%s again: ending open requests now", signal.Signals(signum).name)
        self._fast_signal = signum
        # A thread, because clean-up may hang or block the loop.
        self._watchdog = threading.Timer(FAST_EXIT_LIMIT_S - 0.1, self._exit_process, (exit_status(signum),))
        self._watchdog.daemon = True
        self._watchdog.start()
        self.fast.set()

    async def drain(
        self,
        work: OpenWork,
        *,
        grace_s: float,
        timeout_s: float,
        begin: Callable[[], Awaitable[None]],
        refuse: Callable[[], Awaitable[None]],
        abort: Callable[[], Awaitable[None]],
        registry: Registry | None = None,
    ) -> bool:
        """The drain of a process that has been told to stop; True when all work ended by itself.

        `begin` turns readiness negative, at once. For `grace_s` requests are still taken, because load
        balancers lag; then `refuse` answers new ones with SERVER_DRAINING. What is still open `timeout_s`
        after the start, or at a second signal, is ended by `abort`.
        """
        limit = time.monotonic() + timeout_s
        if registry is not None:
            registry.set("baton_drain_state", DRAINING)
        await begin()
        await self._wait(asyncio.sleep(min(grace_s, timeout_s)), None)
        await refuse()
        finished = await self._wait(work.wait_idle(), limit - time.monotonic())
        if not finished:
            _log.warning("drain ends with %d open", work.count)
            await abort()
        if registry is not None:
            registry.set("baton_drain_state", DRAINED)
        return finished

    async def _wait(self, work: Coroutine[Any, Any, None], timeout_s: float | None) -> bool:
        """True when `work` ended before the time-out and before a second signal."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self.fast.wait())]
        try:
            timeout = None if timeout_s is None else max(0.0, timeout_s)
            await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].done() and not self.fast.is_set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def watch_loop_lag(
    registry: Registry, interval_s: float = 0.5, clock: Callable[[], float] = time.monotonic
) -> None:
    """Measures how late a timer of this loop comes, until cancelled."""
    while True:
        due = clock() + interval_s
        await asyncio.sleep(interval_s)
        registry.observe("baton_event_loop_lag_seconds", max(0.0, clock() - due))


def settle() -> None:
    """What a process holds when it begins to serve stays: the garbage collector need not look at it again, and it is
    gathered where the processor finds it quickly. Stops the process for some 20 ms."""
    gc.collect()
    gc.freeze()
    gather_memory()


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Runs the `main` coroutine of a process on uvloop and ends the process with the status it returns."""
    import uvloop

    set_time_slice(SHORT_S)
    status = 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(main())
    except KeyboardInterrupt:
        status = exit_status(signal.SIGINT)
    finally:
        close_logging()
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Ends the process after its exit functions, without the interpreter's own tear-down.

    With gRPC's threads that takes a second or more on a busy machine, which a fast exit does not have, and frees
    nothing that the kernel would not.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
