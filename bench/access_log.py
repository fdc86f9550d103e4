"""What the access log costs those who log, and what it loses at a SIGTERM under load.

    python -m bench.access_log                       # tables in Markdown
    python -m bench.access_log --lines 20000 --no-sigterm

`emit`: one line of a usual size is handed over again and again by 1, 8 and 64 threads, once with room in the queue and
once with a queue that is full because the destination does not take anything. Each call is timed by itself; lines per
second are those of all threads together. `record` is the whole of it: fields to JSON, secrets masked, handed over.

SIGTERM: a process that logs as fast as it can on 8 threads gets SIGTERM and closes its log. What it says it handed over
is compared with what stands in the file and with what its counts say.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rpc.access_log import AccessLog, AccessLogSettings
from rpc.async_log import AsyncLogHandler
from rpc.log_sinks import RotatingFile

THREADS = (1, 8, 64)
LINES = 200_000
FILE_BYTES = 1 << 40  # never rotated here
BEGUN = 1000  # lines after which a process that logs is under load
ROOT = Path(__file__).resolve().parents[1]
FIELDS = {
    "api": "chat", "model": "SmolLM2-135M-Instruct", "stream": True, "path": "pd", "attempts": 1,
    "servers": [{"attempt": 0, "path": "pd", "prefill": "10.0.0.1:9101", "decode": "10.0.0.2:9102", "code": ""}],
    "outcome": "length", "prompt_tokens": 512, "cached_tokens": 0, "generated_tokens": 128, "seconds": 1.23456789,
    "stages": dict.fromkeys(("validate", "tokenize", "queue", "choose", "first_token", "stream"), 0.0123456),
    "timeline": {f"decode.{name}": 0.0123456 for name in ("admit", "prepare", "allocate", "load", "generate")},
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Microseconds of a call, and calls per second of all threads together; `dropped` of `lines` had no room."""

    p50_us: float
    p99_us: float
    per_s: float
    lines: int
    dropped: int


class Stuck:
    """A destination that takes nothing until it is let go."""

    problem: Exception | None = None

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, lines: Sequence[bytes]) -> int:
        self.go.wait()
        return len(lines)

    def reopen(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def time_calls(call: Callable[[], None], threads: int, lines: int) -> tuple[list[int], float]:
    """Nanoseconds of each of `lines` calls, spread over `threads`, and the seconds that all took."""
    share = lines // threads
    taken: list[list[int]] = [[] for _ in range(threads)]
    barrier = threading.Barrier(threads + 1)

    def work(mine: list[int]) -> None:
        clock = time.perf_counter_ns
        barrier.wait()
        for _ in range(share):
            began = clock()
            call()
            mine.append(clock() - began)
        barrier.wait()

    workers = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for worker in workers:
        worker.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    return [value for mine in taken for value in mine], seconds


def figures_of(times_ns: list[int], seconds: float, dropped: int) -> Figures:
    cuts = statistics.quantiles(times_ns, n=100)
    return Figures(cuts[49] / 1000, cuts[98] / 1000, len(times_ns) / seconds, len(times_ns), dropped)


def measure_emit(threads: int, lines: int, *, full: bool) -> Figures:
    """Of `write_line`, which is `emit` without logging's own work around it."""
    line = b"x" * 700
    with tempfile.TemporaryDirectory() as folder:
        stuck = Stuck()
        sink = stuck if full else RotatingFile(Path(folder) / "log", FILE_BYTES, 1)
        # A full queue would be warned of in every tenth line; here that is no part of the question.
        handler = AsyncLogHandler(sink, queue_size=1 if full else lines + 1, note_drops=lambda count: b"", name="bench")
        handler.write_line(line)
        times, seconds = time_calls(lambda: handler.write_line(line), threads, lines)
        dropped = handler.get_stats()["dropped"]
        stuck.go.set()
        handler.close()
    return figures_of(times, seconds, dropped)


def measure_record(threads: int, lines: int) -> Figures:
    """Of a whole line of the access log."""
    with tempfile.TemporaryDirectory() as folder:
        settings = AccessLogSettings(path=str(Path(folder) / "log"), queue_size=lines + 1, max_bytes=FILE_BYTES)
        log = AccessLog("router", settings)
        times, seconds = time_calls(
            lambda: log.record(request_id="0af7651916cd43dd", code="NONE_ERROR", **FIELDS), threads, lines
        )
        log.close()
        dropped = log.get_stats()["dropped"]
    return figures_of(times, seconds, dropped)


def log_until_sigterm(path: str) -> None:
    """The process that gets SIGTERM; prints its counts as JSON."""
    log = AccessLog("router", AccessLogSettings(path=path, max_bytes=FILE_BYTES))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    counts = [0] * 8

    def work(number: int) -> None:
        while not stop.is_set():
            log.record(request_id=f"{number}.{counts[number]}", code="NONE_ERROR", **FIELDS)
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    while sum(counts) < BEGUN:
        time.sleep(0.001)
    print("ready", flush=True)
    while not stop.wait(0.5):
        pass
    began = time.perf_counter()
    log.close()
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    print(json.dumps({"handed_over": sum(counts), "close_s": seconds, **log.get_stats()}), flush=True)


def measure_sigterm(after_s: float = 1.0) -> dict[str, float]:
    """Lines lost at SIGTERM under load: those that are neither in the file nor in a count."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        command = [sys.executable, "-m", "bench.access_log", "--log-until-sigterm", str(path)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(after_s)
            child.send_signal(signal.SIGTERM)
            output, _ = child.communicate(timeout=60)
        finally:
            child.kill()
            child.wait()
        counts: dict[str, float] = json.loads(output)
        with path.open("rb") as file:
            counts["in_file"] = sum(1 for _ in file)
    known = sum(counts[name] for name in ("in_file", "write_errors", "dropped", "dropped_after_close"))
    counts["lost"] = counts["handed_over"] - known
    return counts


def page(lines: int, *, sigterm: bool) -> str:
    """The tables."""
    rows = [
        "| what | threads | p50 µs | p99 µs | lines/s | dropped |",
        "|---|---|---|---|---|---|",
    ]

    def row(what: str, threads: int, found: Figures) -> str:
        share = f"{found.dropped / found.lines:.0%}" if found.dropped else "0"
        return f"| {what} | {threads} | {found.p50_us:.2f} | {found.p99_us:.2f} | {found.per_s:,.0f} | {share} |"

    for threads in THREADS:
        rows.append(row("`emit`, room in the queue", threads, measure_emit(threads, lines, full=False)))
    for threads in THREADS:
        rows.append(row("`emit`, queue full", threads, measure_emit(threads, lines, full=True)))
    for threads in THREADS:
        rows.append(row("`record`, a whole line", threads, measure_record(threads, lines // 4)))
    if sigterm:
        counts = measure_sigterm()
        rows += [
            "",
            f"SIGTERM while 8 threads log as fast as they can: {counts['handed_over']:,.0f} lines handed over, "
            f"{counts['in_file']:,.0f} in the file, {counts['dropped']:,.0f} counted as dropped, "
            f"{counts['dropped_after_close']:,.0f} as too late, {counts['write_errors']:,.0f} as write errors, "
            f"**{counts['lost']:,.0f} lost**; closing took {counts['close_s']:.2f} s.",
        ]
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.access_log", description="What the access log costs.")
    parser.add_argument("--lines", type=int, default=LINES, help=f"calls that are timed per figure (default {LINES})")
    parser.add_argument("--no-sigterm", action="store_true", help="leave out what a SIGTERM under load loses")
    parser.add_argument("--log-until-sigterm", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.log_until_sigterm:
        log_until_sigterm(arguments.log_until_sigterm)
        return 0
    if arguments.lines < 6400:
        parser.error("--lines must be 6400 or more: 64 threads share them")
    print(page(arguments.lines, sigterm=not arguments.no_sigterm))
    return 0


if __name__ == "__main__":
    sys.exit(main())
