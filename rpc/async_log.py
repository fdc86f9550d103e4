"""A log handler that never makes its caller wait: a bounded queue and one thread that writes.

What may block, and for how long: `emit` and `write_line` never, whatever the destination does. They take no lock at
all, ask for no queue's size and wake the writer once in `batch_size` lines; a full queue costs the line, which is
counted. `flush` waits up to `close_timeout_s`, `close` up to its time limit. Only the writer touches the destination.

Places in the queue are handed out from a deque that holds one entry per place, since `deque.popleft` is a single step
of the interpreter and fails when there is none: a bound without a lock. Every `wake_every`-th place (`batch_size`
by default) is marked, and whoever gets a marked one wakes the writer, which otherwise looks once per interval.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any

from rpc.log_sinks import Sink

request_id_var: ContextVar[str] = ContextVar("baton_request_id", default="")
"""Id of the request that the present task works for; it is added to every log record."""

WARNING_INTERVAL = 10
# A writer that is stuck in its destination is not waited for longer than this, or two intervals.
MIN_JOIN_S = 1.0

_log = logging.getLogger(__name__)
_live: weakref.WeakSet[AsyncLogHandler] = weakref.WeakSet()


class Tally:
    """A count that any thread may raise without a lock: one step of the interpreter."""

    __slots__ = ("_count", "add")

    def __init__(self) -> None:
        self._count = itertools.count()
        # Returns how often it had been called before, each number once.
        self.add: Callable[[], int] = self._count.__next__

    def value(self) -> int:
        return int(repr(self._count)[len("count(") : -1])


class _Writer:
    """The queue and its thread. Knows nothing of the handler, so that a handler that nobody holds can be collected."""

    def __init__(
        self,
        sink: Sink,
        *,
        queue_size: int,
        batch_size: int,
        wake_every: int,
        flush_interval_s: float,
        name: str,
    ) -> None:
        self.sink = sink
        self.formatter: Callable[[logging.LogRecord], str] = logging.Formatter("%(message)s").format
        self.name = name
        self.interval_s = flush_interval_s
        self.batch_size = batch_size
        self.places: deque[bool] = deque()
        self._wake_every = min(wake_every, queue_size)
        self._places_made = 0
        self._give_places(queue_size)
        self.items: SimpleQueue[logging.LogRecord | bytes] = SimpleQueue()
        self.wake: SimpleQueue[None] = SimpleQueue()
        # Counted where lines come in, by any thread.
        self.enqueued, self.reclaimed, self.refused, self.late = Tally(), Tally(), Tally(), Tally()
        # Counted where lines go out, by the one thread that writes.
        self.written = self.write_errors = self.max_depth = self.restarts = 0
        self.note_drops: Callable[[int], bytes] | None = None
        self._noted = self._complaints = 0
        self.reopen_wanted = False
        self.stopping = False  # no line is taken any more
        self.finished = False  # nobody writes any more
        self.abandoned = False  # the writer closes the destination, whenever it gets to it
        self.missing = False  # the thread died and no other one could be started
        self._state = threading.Lock()
        self._running = False
        self.progress = threading.Condition()
        self.thread = self._new_thread()
        self._running = True
        self.thread.start()

    def _give_places(self, count: int) -> None:
        first, every = self._places_made, self._wake_every
        self.places.extend([number % every == every - 1 for number in range(first, first + count)])
        self._places_made = (first + count) % every

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._main, name=self.name, daemon=True)

    @property
    def done(self) -> int:
        return self.written + self.write_errors

    def pending(self) -> int:
        """Lines that were taken and are not out."""
        return max(0, self.enqueued.value() - self.reclaimed.value() - self.done)

    # -- the thread

    def _main(self) -> None:
        try:
            while not self.stopping:
                self._await_work()
                self._write_what_waits()
        finally:
            self._thread_ends()

    def _thread_ends(self) -> None:
        with self._state:
            self._running = False
            left_to_me = self.abandoned
        if not self.stopping:
            self.revive()  # something killed the thread; what it had in hand is counted as a write error
        elif left_to_me:
            self.finish(None)

    def revive(self) -> None:
        """Starts the writer again if it has died. At most one exists, whoever calls this, and none after the stop."""
        if not self._state.acquire(blocking=False):
            return
        try:
            if self._running or self.stopping:
                return
            thread = self._new_thread()
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give
                self.missing = True
                return
            self.thread, self._running, self.missing = thread, True, False
            self.restarts += 1
        finally:
            self._state.release()

    def _await_work(self) -> None:
        with contextlib.suppress(Empty):
            self.wake.get(timeout=self.interval_s)
            while True:
                self.wake.get_nowait()

    def _write_what_waits(self, until: float | None = None) -> None:
        """Writes until the queue is empty, the stop flag comes, or, at the end, the clock reads `until`."""
        if self.reopen_wanted:
            self.reopen_wanted = False
            self._reopen()
        while self._write_batch():
            if until is None and self.stopping and not self.abandoned:
                return
            if until is not None and time.monotonic() >= until:
                return

    def _write_batch(self) -> bool:
        """Writes the next lines, `batch_size` at the most; False when there were none."""
        depth = self.items.qsize()
        if not depth:
            return False
        self.max_depth = max(self.max_depth, depth)
        batch: list[logging.LogRecord | bytes] = []
        written = 0
        problem: Exception | None = None
        try:
            with contextlib.suppress(Empty):
                while len(batch) < self.batch_size:
                    batch.append(self.items.get_nowait())
            lines = [line for line in map(self._line, batch) if line is not None]
            written = min(len(lines), self.sink.write(lines))
            self._write_note()
        except Exception as error:  # a defect of the destination, which must not end the thread for other lines
            problem = error
        finally:
            # Whatever happened to them, their places are free again.
            self.written += written
            self.write_errors += len(batch) - written
            self._give_places(len(batch))
            with self.progress:
                self.progress.notify_all()
        if written < len(batch):
            self._complain(problem or self.sink.problem)
        return bool(batch)

    def _complain(self, problem: Exception | None) -> None:
        """Warns of the first batch that could not be written whole, and of every tenth one after it."""
        if self._complaints % WARNING_INTERVAL == 0 and self.note_drops is None:
            _log.warning("%s: %d lines could not be written, the last ones: %s", self.name, self.write_errors, problem)
        self._complaints += 1

    def _line(self, item: logging.LogRecord | bytes) -> bytes | None:
        if type(item) is bytes:
            return item
        assert isinstance(item, logging.LogRecord)
        try:
            return self.formatter(item).encode("utf-8", "backslashreplace")
        except Exception:  # counted as a write error; arguments that do not fit their format must not stop the log
            return None

    def _write_note(self) -> None:
        """One line about drops, for a log that cannot warn in another one."""
        refused = self.refused.value()
        if self.note_drops is not None and refused >= self._noted + (WARNING_INTERVAL if self._noted else 1):
            self._noted = refused
            self.sink.write([self.note_drops(refused)])

    def _reopen(self) -> None:
        try:
            self.sink.reopen()
        except OSError as error:
            _log.warning("%s: cannot be opened anew, the old file goes on: %s", self.name, error)

    # -- the end

    def stop(self, limit_s: float) -> int:
        """Stops the writer; returns how many lines are not out. The second call does nothing."""
        until = time.monotonic() + limit_s
        with self._state:
            if self.stopping:
                return 0
            self.stopping = True
        self.wake.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(min(limit_s, max(MIN_JOIN_S, 2 * self.interval_s)))
        with self._state:
            if self._running:
                self.abandoned = True
                return self.pending()
        self.finish(until)
        return self.pending()

    def finish(self, until: float | None) -> None:
        """Writes the rest, up to `until` on the monotonic clock, and closes the destination. For the last one that
        writes."""
        try:
            self._write_what_waits(float("inf") if until is None else until)
            self.sink.flush()
        except (OSError, ValueError) as error:
            _log.warning("%s: the last lines could not be written: %s", self.name, error)
        finally:
            for _ in self._left():
                pass  # out of time; they stay counted as taken and not written
            self.finished = True
            try:
                self.sink.close()
            finally:
                # A thread that had passed the check of the stop flag may have put its line in after the last look.
                self.take_back()
                with self.progress:
                    self.progress.notify_all()

    def _left(self) -> Iterator[logging.LogRecord | bytes]:
        with contextlib.suppress(Empty):
            while True:
                yield self.items.get_nowait()

    def take_back(self) -> None:
        """Counts lines that came too late to be written. Called by whoever may have put one in, after `finished`."""
        for _ in self._left():
            self.reclaimed.add()
            self.late.add()

    def let_go(self) -> None:
        """The handler is gone; called by the garbage collector, so it takes no lock."""
        self.abandoned = True
        self.stopping = True
        self.wake.put(None)


class AsyncLogHandler(logging.Handler):
    """Hands records to one writer thread; see the module's text for what blocks.

    `on_drop` is called in the thread that logged, for each line that had no room. The first drop and every tenth one
    after it are warned of: in Baton's log, or with `note_drops` by a line of that text in this one. Closing it, or
    dropping the last reference to it, stops the writer.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        queue_size: int = 100_000,
        batch_size: int = 100,
        wake_every: int | None = None,
        flush_interval_s: float = 1.0,
        close_timeout_s: float = 5.0,
        on_drop: Callable[[], None] | None = None,
        note_drops: Callable[[int], bytes] | None = None,
        name: str = "log",
    ) -> None:
        super().__init__()
        self.set_name(name)
        self.on_drop = on_drop
        self._close_timeout_s = close_timeout_s
        self._warns = note_drops is None
        self._writer = _Writer(
            sink,
            queue_size=queue_size,
            batch_size=batch_size,
            wake_every=batch_size if wake_every is None else wake_every,
            flush_interval_s=flush_interval_s,
            name=name,
        )
        self._writer.note_drops = note_drops
        finalizer = weakref.finalize(self, self._writer.let_go)
        finalizer.atexit = False  # `logging.shutdown` closes what is alive then
        _live.add(self)

    def createLock(self) -> None:
        """None: `emit` needs no lock, and logging would take one around it."""
        self.lock = None

    def setFormatter(self, fmt: logging.Formatter | None) -> None:
        super().setFormatter(fmt)
        if fmt is not None:
            self._writer.formatter = fmt.format

    def emit(self, record: logging.LogRecord) -> None:
        """Hands the record over. Never blocks and takes no lock; without room the record is dropped and counted."""
        # The context variable belongs to the task that logs; the writer thread could not read it.
        if not hasattr(record, "request_id"):
            record.request_id = request_id_var.get()
        self._enqueue(record)

    def write_line(self, line: bytes) -> None:
        """Like `emit`, for a line that is ready, without its line end."""
        self._enqueue(line)

    def _enqueue(self, item: logging.LogRecord | bytes) -> None:
        writer = self._writer
        if writer.stopping:
            writer.late.add()
            return
        try:
            marked = writer.places.popleft()
        except IndexError:
            self._dropped(writer.refused.add())
            return
        writer.enqueued.add()  # before it is put in, so that a flush waits for it
        writer.items.put(item)
        if marked:
            writer.wake.put(None)
        if writer.finished:
            writer.take_back()
        elif writer.missing:
            writer.revive()

    def _dropped(self, before: int) -> None:
        if self.on_drop is not None:
            self.on_drop()
        if before % WARNING_INTERVAL == 0 and self._warns:
            _log.warning("%s: %d lines were dropped, its queue is full", self.name, before + 1)

    def flush(self) -> None:
        """Waits until what was logged before is written, for the close time-out at the most; then says how much is
        left. After the stop it flushes the destination only, and starts nothing."""
        writer = self._writer
        if writer.stopping:
            if writer.finished:
                with contextlib.suppress(OSError, ValueError):
                    writer.sink.flush()
            return
        if writer.missing:
            writer.revive()
        goal = writer.enqueued.value()
        writer.wake.put(None)
        with writer.progress:
            written = writer.progress.wait_for(
                lambda: writer.done + writer.reclaimed.value() >= goal or writer.finished, self._close_timeout_s
            )
        if not written:
            _log.warning("%s: %d lines are not written after %g s", self.name, writer.pending(), self._close_timeout_s)

    def reopen(self) -> None:
        """Has the writer open its file anew before the next line. Never blocks."""
        self._writer.reopen_wanted = True
        self._writer.wake.put(None)

    def close(self, timeout_s: float | None = None) -> None:
        """Stops the writer and writes what waits, within `timeout_s` (the close time-out by default).

        A writer that is stuck in its destination keeps it, and is left alone; what is not out is warned of and
        counted as dropped. Records after this are counted as `dropped_after_close`. May be called again.
        """
        limit_s = self._close_timeout_s if timeout_s is None else min(timeout_s, self._close_timeout_s)
        try:
            left = self._writer.stop(limit_s)
            if left:
                _log.warning("%s: closed with %d lines not written", self.name, left)
        finally:
            _live.discard(self)
            super().close()

    def get_stats(self) -> dict[str, int]:
        """Counts since the start. Once closed, every line is in exactly one of `written`, `write_errors`, `dropped`
        and `dropped_after_close`."""
        writer = self._writer
        left = writer.pending() if writer.stopping else 0
        return {
            "enqueued": writer.enqueued.value() - writer.reclaimed.value(),
            "written": writer.written,
            "dropped": writer.refused.value() + left,
            "dropped_after_close": writer.late.value(),
            "write_errors": writer.write_errors,
            "worker_restarts": writer.restarts,
            "max_queue_depth": writer.max_depth,
        }


def reopen_logs() -> None:
    """Has every handler of this process open its file anew: what SIGHUP asks for after a rotation from outside."""
    for handler in list(_live):
        handler.reopen()


def replace_handlers(logger: logging.Logger, handler: logging.Handler | Any) -> None:
    """Makes `handler` the logger's only one; those it had are closed first."""
    for old in list(logger.handlers):
        logger.removeHandler(old)
        if isinstance(old, AsyncLogHandler):
            old.close()
    logger.addHandler(handler)
