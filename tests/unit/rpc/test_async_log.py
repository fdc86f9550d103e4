"""The log handler with a writer thread: what it promises to those who log, and to those who stop it."""

from __future__ import annotations

import ast
import contextlib
import dis
import gc
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import rpc.async_log
from rpc.async_log import AsyncLogHandler, Tally, _Writer, replace_handlers
from rpc.log_sinks import RotatingFile

LIMIT_S = 10.0


class Gate:
    """A destination that writes once it is let go, and can be told to fail."""

    def __init__(self, *, open_: bool = False) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.lines: list[bytes] = []
        self.threads: set[threading.Thread] = set()
        self.fail: BaseException | None = None
        self.flush_fails = False
        self.closed = 0
        self.problem: Exception | None = None
        if open_:
            self.go.set()

    def write(self, lines: Sequence[bytes]) -> int:
        self.threads.add(threading.current_thread())
        self.entered.set()
        if not self.go.wait(LIMIT_S):
            raise TimeoutError("the test did not let it go")
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.lines.extend(lines)
        return len(lines)

    def reopen(self) -> None:
        raise OSError("it has no file")

    def flush(self) -> None:
        if self.flush_fails:
            raise OSError("flush fails")

    def close(self) -> None:
        self.closed += 1


def until(what: str, probe: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not probe():
        assert time.monotonic() < limit, what
        time.sleep(0.002)


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "under-test"]


def make(sink: Gate | RotatingFile, **settings: object) -> AsyncLogHandler:
    return AsyncLogHandler(
        sink, **{"name": "under-test", "flush_interval_s": 0.05, "close_timeout_s": LIMIT_S, **settings}
    )  # type: ignore[arg-type]


def put(handler: AsyncLogHandler, *texts: object) -> None:
    for text in texts:
        handler.write_line(str(text).encode())


def conserved(handler: AsyncLogHandler, total: int) -> dict[str, int]:
    """Each line is in exactly one of the counts."""
    stats = handler.get_stats()
    parts = ("written", "write_errors", "dropped", "dropped_after_close")
    assert sum(stats[name] for name in parts) == total, stats
    return stats


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    yield
    until("writers that are left", lambda: not writers())


# -- the queue


def test_emit_when_the_queue_is_full_then_it_drops_and_counts_and_does_not_wait() -> None:
    sink, drops = Gate(), []
    handler = make(sink, queue_size=2, batch_size=1, on_drop=lambda: drops.append(1))
    put(handler, 0)
    assert sink.entered.wait(LIMIT_S)
    began = time.monotonic()
    put(handler, 1, 2, 3, 4, 5)
    assert time.monotonic() - began < LIMIT_S / 2
    # The place of the line that is being written is taken too.
    assert len(drops) == handler.get_stats()["dropped"] == 4
    sink.go.set()
    handler.close()
    assert sink.lines == [b"0", b"1"]
    assert conserved(handler, 6)["written"] == 2


def test_drops_when_they_go_on_then_the_first_and_every_tenth_after_it_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Gate()
    handler = make(sink, queue_size=1)
    put(handler, 0)
    for number in range(31):
        put(handler, number)
    warned = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in warned] == ["1", "11", "21", "31"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    sink.go.set()
    handler.close()


def test_lines_when_fewer_than_a_batch_wait_then_they_are_written_after_the_interval() -> None:
    sink = Gate(open_=True)
    handler = make(sink, batch_size=100)
    put(handler, "a", "b")
    until("the lines", lambda: sink.lines == [b"a", b"b"])
    handler.close()


def test_lines_when_a_batch_is_full_then_the_writer_does_not_wait_for_its_interval() -> None:
    sink = Gate(open_=True)
    handler = make(sink, batch_size=10, flush_interval_s=60.0)
    put(handler, *range(25))
    until("two batches", lambda: len(sink.lines) >= 20)
    handler.flush()
    assert len(sink.lines) == 25
    assert 0 < handler.get_stats()["max_queue_depth"] <= 25
    handler.close()


def test_record_when_its_arguments_do_not_fit_then_it_is_a_write_error_and_the_next_one_is_written() -> None:
    sink = Gate(open_=True)
    handler = make(sink)
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": (7,)}))
    handler.close()
    assert sink.lines == [b"7"]
    assert conserved(handler, 2)["write_errors"] == 1


@pytest.mark.invariant("RPC-25")
def test_write_that_raises_when_lines_follow_then_its_places_come_back_and_they_are_written() -> None:
    sink = Gate(open_=True)
    handler = make(sink, queue_size=3, batch_size=3)
    for round_ in range(4):
        sink.fail = OSError("disk") if round_ < 3 else None
        put(handler, "a", "b", "c")
        handler.flush()
    handler.close()
    # Had the places of the failed batches been lost, the later ones would have been dropped.
    stats = conserved(handler, 12)
    assert (stats["write_errors"], stats["written"], stats["dropped"]) == (9, 3, 0)


# -- invariant: bounded flush


@pytest.mark.invariant("RPC-24")
@pytest.mark.parametrize("state", ["blocked", "dead"])
def test_flush_and_close_when_the_writer_is_blocked_or_dead_then_they_return_in_time(
    state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Gate(open_=state == "dead")
    handler = make(sink, batch_size=1, close_timeout_s=0.2)
    if state == "dead":
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        no_thread(monkeypatch)
        sink.fail = SystemExit()
        put(handler, 0)
        until("the end of the writer", lambda: not writers())
    else:
        put(handler, 0)
        assert sink.entered.wait(LIMIT_S)
        put(handler, 1)
    began = time.monotonic()
    handler.flush()
    handler.close()
    assert time.monotonic() - began < LIMIT_S / 2
    if state == "blocked":
        assert "2 lines are not written after 0.2 s" in caplog.text
        assert "closed with 2 lines not written" in caplog.text
        assert conserved(handler, 2)["dropped"] == 2
    monkeypatch.undo()
    threads = len(writers())
    put(handler, "late")
    handler.flush()
    assert len(writers()) == threads, "nothing is started after the stop"
    assert handler.get_stats()["dropped_after_close"] == 1
    sink.go.set()


def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.invariant("RPC-25")
def test_close_when_the_blocked_writer_gets_free_then_it_writes_the_rest_and_closes_the_file_itself() -> None:
    sink = Gate()
    handler = make(sink, batch_size=1, close_timeout_s=0.1)
    put(handler, 0, 1, 2)
    assert sink.entered.wait(LIMIT_S)
    handler.close()
    assert (sink.closed, handler.get_stats()["dropped"]) == (0, 3)
    sink.go.set()
    until("the file to be closed", lambda: sink.closed)
    assert sink.lines == [b"0", b"1", b"2"]
    assert conserved(handler, 3)["dropped"] == 0


@pytest.mark.invariant("RPC-24")
def test_close_when_its_time_is_over_with_lines_left_then_they_are_counted_as_dropped() -> None:
    sink = Gate(open_=True)
    handler = make(sink, batch_size=1, flush_interval_s=60.0, close_timeout_s=30.0)
    block = threading.Event()
    original = sink.write

    def slow(lines: Sequence[bytes]) -> int:
        block.wait(0.02)
        return original(lines)

    sink.write = slow  # type: ignore[method-assign]
    put(handler, *range(500))
    until("a line", lambda: sink.lines)
    handler.close(0.3)
    stats = conserved(handler, 500)
    assert stats["written"] > 0 and stats["dropped"] > 0, stats
    assert sink.closed == 1


# -- invariant: close order


@pytest.mark.invariant("RPC-25")
@pytest.mark.parametrize("broken", ["flush", "write", "kill"])
def test_close_when_writing_or_flushing_raises_then_it_is_stopped_the_file_closed_and_a_later_flush_returns(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    sink = Gate()
    handler = make(sink, batch_size=1)
    put(handler, "a")
    assert sink.entered.wait(LIMIT_S)
    put(handler, "b", "c")
    sink.flush_fails = broken == "flush"
    sink.fail = {"flush": None, "write": RuntimeError("write fails"), "kill": SystemExit()}[broken]
    sink.go.set()
    handler.close()
    assert sink.closed == 1
    assert handler not in logging._handlerList
    handler.flush()
    handler.close()
    assert sink.closed == 1
    assert conserved(handler, 3)["write_errors"] == (0 if broken == "flush" else 1)


class Watched(_Writer):
    """Does something just before it says that nobody writes any more."""

    at_end: Callable[[], None] = staticmethod(lambda: None)

    @property
    def finished(self) -> bool:
        return bool(self.__dict__.get("finished"))

    @finished.setter
    def finished(self, value: bool) -> None:
        if value:
            type(self).at_end()
        self.__dict__["finished"] = value


@pytest.mark.invariant("RPC-25")
@pytest.mark.parametrize("moment", ["after the last look", "after the close"])
def test_line_between_check_and_enqueue_when_the_handler_is_closed_then_it_is_counted_and_not_lost(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Gate(open_=True)
    handler = make(sink)
    barrier = threading.Barrier(2)
    places = handler._writer.places

    class Held:
        """Stops the thread that logs after its check of the stop flag, before it puts its line in."""

        def popleft(self) -> bool:
            marked = places.popleft()
            barrier.wait(LIMIT_S)  # it has passed the check
            barrier.wait(LIMIT_S)  # now it goes on
            return marked

        def extend(self, marks: Sequence[bool]) -> None:
            places.extend(marks)

    def let_it_in() -> None:
        barrier.wait(LIMIT_S)
        thread.join(LIMIT_S)

    handler._writer.places = Held()  # type: ignore[assignment]
    thread = threading.Thread(target=put, args=(handler, "late"))
    thread.start()
    barrier.wait(LIMIT_S)
    if moment == "after the last look":
        monkeypatch.setattr(Watched, "at_end", staticmethod(let_it_in))
        handler._writer.__class__ = Watched
        handler.close()
    else:
        handler.close()
        assert sink.closed == 1
        let_it_in()
    assert not thread.is_alive()
    assert (sink.lines, sink.closed) == ([], 1)
    stats = conserved(handler, 1)
    assert (stats["dropped_after_close"], stats["enqueued"]) == (1, 0)


@pytest.mark.invariant("RPC-25")
def test_logging_shutdown_when_handlers_are_open_blocked_or_closed_then_it_returns_and_closes_them() -> None:
    sinks = [Gate(open_=True), Gate(), Gate(open_=True)]
    handlers = [make(sink, close_timeout_s=0.2 if sink is sinks[1] else LIMIT_S, batch_size=1) for sink in sinks]
    put(handlers[0], "a")
    put(handlers[1], "b")
    handlers[2].close()
    logging.shutdown([weakref.ref(handler) for handler in handlers])
    assert sinks[0].lines == [b"a"]
    assert [sink.closed for sink in sinks] == [1, 0, 1]
    sinks[1].go.set()
    until("the blocked one to close its file", lambda: sinks[1].closed)


# -- invariant: one writer


@pytest.mark.invariant("RPC-26")
def test_fifty_threads_when_they_emit_and_flush_then_one_thread_writes_every_line() -> None:
    sink = Gate(open_=True)
    handler = make(sink, batch_size=7)
    barrier = threading.Barrier(50)

    def work(number: int) -> None:
        barrier.wait(LIMIT_S)
        for line in range(40):
            put(handler, f"{number}.{line}")
            if line % 10 == 0:
                handler.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    handler.flush()
    assert len(writers()) == len(sink.threads) == 1
    assert sorted(sink.lines) == sorted(f"{n}.{line}".encode() for n in range(50) for line in range(40))
    assert handler.get_stats()["worker_restarts"] == 0
    for number in range(50):  # the lines of one thread keep their order
        mine = [line for line in sink.lines if line.startswith(b"%d." % number)]
        assert mine == [b"%d.%d" % (number, line) for line in range(40)]
    handler.close()


@pytest.mark.invariant("RPC-26")
def test_writer_that_dies_when_lines_follow_then_one_other_writes_them_and_the_restart_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    sink = Gate(open_=True)
    handler = make(sink, batch_size=1)
    for round_ in range(1, 4):
        sink.fail = SystemExit()
        put(handler, "killer")
        until("a restart", lambda: handler.get_stats()["worker_restarts"] == round_)  # noqa: B023
        put(handler, round_)
        handler.flush()
    until("one writer", lambda: len(writers()) == 1)
    handler.close()
    assert sink.lines == [b"1", b"2", b"3"]
    assert conserved(handler, 6)["write_errors"] == 3


@pytest.mark.invariant("RPC-26")
def test_writer_that_dies_when_no_thread_can_be_had_then_the_next_line_starts_it_and_only_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    sink = Gate(open_=True)
    handler = make(sink, batch_size=1)
    sink.fail = SystemExit()
    with monkeypatch.context() as patch:
        no_thread(patch)
        put(handler, "killer")
        until("the end of the writer", lambda: not writers())
        put(handler, "waits")
        assert handler.get_stats()["worker_restarts"] == 0
    put(handler, "starts it")
    until("both lines", lambda: sink.lines == [b"waits", b"starts it"])
    # Another thread that had found it missing just before comes too late to start a second one.
    handler._writer.revive()
    assert len(writers()) == 1
    assert handler.get_stats()["worker_restarts"] == 1
    handler.close()


@pytest.mark.invariant("RPC-26")
def test_logger_when_it_is_set_up_twenty_times_then_threads_and_files_stay_as_many(tmp_path: Path) -> None:
    logger = logging.Logger("of this test")

    def open_files() -> list[str]:
        """The log's, and not those of this process, of which other tests may have left some that are closed later."""
        found = []
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing, say
                found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return [path for path in found if path.startswith(str(tmp_path))]

    def set_up() -> None:
        replace_handlers(logger, make(RotatingFile(tmp_path / "log", 10_000, 1)))

    set_up()
    threads, files = len(writers()), open_files()
    for number in range(20):
        logger.warning("%d", number)
        set_up()
    assert (len(writers()), open_files()) == (threads, files) == (1, [str(tmp_path / "log")])
    assert (tmp_path / "log").read_text() == "".join(f"{number}\n" for number in range(20))
    logger.handlers[0].close()


@pytest.mark.invariant("RPC-26")
def test_handler_when_nobody_holds_it_and_it_was_not_closed_then_the_collector_is_not_kept_and_its_thread_ends() -> (
    None
):
    sink = Gate()
    handler = make(sink, batch_size=1, close_timeout_s=60.0)
    put(handler, "a", "b")
    assert sink.entered.wait(LIMIT_S)
    gone = weakref.ref(handler)
    began = time.monotonic()
    del handler
    gc.collect()
    assert gone() is None
    assert time.monotonic() - began < 5
    sink.go.set()
    until("the writer to end", lambda: not writers())
    assert (sink.lines, sink.closed) == ([b"a", b"b"], 1)


# -- invariant: durability


@pytest.mark.invariant("RPC-27")
def test_ten_thousand_lines_when_closed_twice_then_each_is_on_disk_or_counted_as_dropped(tmp_path: Path) -> None:
    handler = make(RotatingFile(tmp_path / "log", 10_000_000, 1), queue_size=500)
    put(handler, *range(10_000))
    handler.close()
    handler.close()
    written = [int(line) for line in (tmp_path / "log").read_bytes().splitlines()]
    assert len(written) == conserved(handler, 10_000)["written"]
    assert written == sorted(set(written))


@pytest.mark.invariant("RPC-27")
def test_many_threads_when_the_handler_is_closed_under_them_then_no_line_is_lost_uncounted(tmp_path: Path) -> None:
    for round_ in range(5):
        path = tmp_path / str(round_)
        handler = make(RotatingFile(path, 100_000_000, 1), queue_size=2000, batch_size=50)
        stop, counts, started = threading.Event(), [0] * 8, threading.Barrier(9)

        def work(number: int) -> None:
            started.wait(LIMIT_S)  # noqa: B023
            while not stop.is_set():  # noqa: B023
                put(handler, f"{number} {counts[number]}")  # noqa: B023
                counts[number] += 1  # noqa: B023

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        started.wait(LIMIT_S)
        until("some lines", lambda: handler.get_stats()["written"] > 500)  # noqa: B023
        handler.close()
        until("a line after the close", lambda: handler.get_stats()["dropped_after_close"])  # noqa: B023
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S)
        stats = conserved(handler, sum(counts))
        lines = path.read_bytes().splitlines()
        assert len(lines) == len(set(lines)) == stats["written"]


# -- invariant: hot path


def called_names(function: Callable[..., object]) -> set[str]:
    return {str(i.argval) for i in dis.get_instructions(function) if i.opname in ("LOAD_METHOD", "LOAD_ATTR")}


@pytest.mark.invariant("RPC-28")
def test_emit_when_read_then_it_takes_no_lock_and_asks_for_no_size_of_the_queue() -> None:
    """A lock around `emit`, or a second one in it, would make all threads that log wait for one of them."""
    handler = make(Gate(open_=True))
    assert handler.lock is None, "logging would take it around every emit"
    names = called_names(AsyncLogHandler.emit) | called_names(AsyncLogHandler._enqueue)
    names |= called_names(AsyncLogHandler.write_line)
    forbidden = {"acquire", "lock", "_state", "progress", "qsize", "empty", "full", "join", "wait", "is_alive"}
    assert not names & forbidden
    for function in (AsyncLogHandler.emit, AsyncLogHandler._enqueue):
        assert not any(i.opname == "BEFORE_WITH" for i in dis.get_instructions(function))
    tree = ast.parse(inspect.getsource(rpc.async_log))
    sized = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(n, ast.Attribute) and n.attr == "qsize" for n in ast.walk(function))
    ]
    assert sized == ["_write_batch"], "the depth is looked at once in a batch"
    handler.close()


@pytest.mark.invariant("RPC-28")
def test_emit_when_every_lock_of_the_handler_is_held_then_it_returns() -> None:
    sink = Gate(open_=True)
    handler = make(sink, batch_size=1)
    with handler._writer._state, handler._writer.progress:
        thread = threading.Thread(target=put, args=(handler, *range(100)))
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    handler.close()
    assert len(sink.lines) == 100


@pytest.mark.invariant("RPC-28")
def test_docstrings_when_read_then_they_say_what_blocks() -> None:
    for function in (AsyncLogHandler.emit, AsyncLogHandler.reopen):
        assert "never blocks" in (function.__doc__ or "").lower()
    for function in (AsyncLogHandler.flush, AsyncLogHandler.close):
        assert "time-out" in (function.__doc__ or "")


def test_tally_when_many_threads_add_then_each_number_is_given_once() -> None:
    tally, seen = Tally(), []
    threads = [threading.Thread(target=lambda: seen.extend(tally.add() for _ in range(2000))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(seen) == list(range(16_000))
    assert tally.value() == 16_000
