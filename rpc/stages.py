"""The stage clock: where a request spent its time on one process.

A request runs through a fixed list of stages. One function runs a stage, the context manager `in_stage`: check whether
to stop, `next_stage()`, body, `finish_stage()`. A body never advances the clock itself. Where a stage ends with an
event and not with a block of code, the one object that takes the event in does the same (`enter_stage`). Seconds come
from one monotonic clock of one process; the clock is injected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode

PREFILL_STAGES = ("admit", "queue", "match", "compute", "sample", "publish", "held")
DECODE_STAGES = ("admit", "prepare", "allocate", "load", "wait_to_run", "generate", "release")
ROUTER_STAGES = ("validate", "tokenize", "queue", "choose", "first_token", "stream")
# The router's two legs overlap each other and its own stages, so each has a clock of its own.
ROUTER_LEG_STAGES = ("reserve", "prefill")

START = "start"
FINISH = "finish"


class StageClock:
    """Position and time buckets of one request: `start` (0), the stages (1 …), `finish` (number of stages +
    1).

    Not thread-safe: a request belongs to one event loop or one thread.
    """

    def __init__(self, stages: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        if len(set(stages)) != len(stages) or START in stages or FINISH in stages or not stages:
            raise ValueError(f"stages must be distinct and other than {START} and {FINISH}: {list(stages)}")
        self._names = (START, *stages, FINISH)
        self._clock = clock
        self._position = 0
        self._began: float | None = None
        self._created = clock()
        self._ended: float | None = None
        self._seconds: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._retries: dict[str, int] = {}
        self._intervals: dict[str, tuple[float, float]] | None = None

    @property
    def stage(self) -> str:
        """Name of the present position; the `stage` of an error that happens now."""
        return self._names[self._position]

    @property
    def position(self) -> int:
        return self._position

    @property
    def finished(self) -> bool:
        return self._position == len(self._names) - 1

    def next_stage(self) -> str:
        """Enters the next stage and starts its time. Raises AssertionError beyond `finish`."""
        last = len(self._names) - 1
        if self._position == last:
            raise AssertionError(f"next_stage() beyond {FINISH}")
        self.finish_stage()
        self._position += 1
        if self._position == last:
            self._ended = self._clock()
        else:
            self._began = self._clock()
        return self.stage

    def finish_stage(self) -> None:
        """Adds the time since the present stage began to its bucket, once: a second call adds nothing."""
        if self._began is None:
            return
        now, stage = self._clock(), self.stage
        if self._intervals is not None:
            self._intervals[stage] = (self._intervals.get(stage, (self._began,))[0], now)
        elapsed = max(0.0, now - self._began)
        self._began = None
        self._seconds[stage] = self._seconds.get(stage, 0.0) + elapsed

    def restore_stage(self, stage: str | None = None) -> None:
        """Steps back so that `next_stage()` enters `stage` (the present one by default) again.

        What was measured stays in the buckets: attempts of a retried stage add up. Raises ValueError for a
        stage that has not been reached.
        """
        self.finish_stage()
        target = self._position if stage is None else self._index(stage)
        if target > self._position:
            raise ValueError(f"stage {stage} has not been reached; the request is in {self.stage}")
        self._position = max(0, target - 1)
        self._ended = None

    def finish(self) -> None:
        """Ends the present stage and goes to `finish` from wherever the request stands. May be called
        again."""
        self.finish_stage()
        if not self.finished:
            self._position = len(self._names) - 1
            self._ended = self._clock()

    def add_retry_wait(self, seconds: float) -> None:
        """Counts a retry of the present stage, and the sleep before it, which belongs to no stage's own
        time."""
        self._retries[self.stage] = self._retries.get(self.stage, 0) + 1
        self._waits[self.stage] = self._waits.get(self.stage, 0.0) + max(0.0, seconds)

    def record(self, stage: str, seconds: float) -> None:
        """Adds time that another process of this host measured for `stage` with its own monotonic clock."""
        self._index(stage)
        self._seconds[stage] = self._seconds.get(stage, 0.0) + max(0.0, seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds per stage that was reached and left, in stage order; a measured 0 is there, an unreached
        one not."""
        return {name: self._seconds[name] for name in self._names if name in self._seconds}

    def keep_intervals(self) -> None:
        """From now on remembers when each stage began and ended, for a trace."""
        self._intervals = {}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """First begin and last end, on this clock, of each stage that was left since `keep_intervals`; a retried one
        has the waits between its attempts in it."""
        return dict(self._intervals or {})

    def retry_waits(self) -> dict[str, float]:
        """Seconds slept between attempts, per stage that was retried."""
        return dict(self._waits)

    def retries(self) -> dict[str, int]:
        return dict(self._retries)

    def total(self) -> float:
        """Seconds from creation to `finish`, or to now."""
        return max(0.0, (self._clock() if self._ended is None else self._ended) - self._created)

    def _index(self, stage: str) -> int:
        try:
            return self._names.index(stage)
        except ValueError:
            raise ValueError(f"unknown stage {stage!r}; stages: {', '.join(self._names)}") from None


class StopCheck:
    """Whether a request must stop: its deadline first (GENERATE_TIMEOUT), then its cancellation
    (CANCELLED)."""

    def __init__(self, deadline: Deadline | None = None, cancelled: Callable[[], bool] | None = None) -> None:
        self.deadline = deadline
        self._cancelled = cancelled

    def check(self, stage: str) -> None:
        if self.deadline is not None:
            self.deadline.check(stage)
        if self._cancelled is not None and self._cancelled():
            raise BatonError(ErrorCode.CANCELLED, "request cancelled by client", stage=stage)


def enter_stage(clock: StageClock, stop: StopCheck | None = None) -> str:
    """Looks whether to stop, then enters the next stage: for an owner whose stage ends with an event and not with a
    block of code."""
    if stop is not None:
        stop.check(clock.stage)
    return clock.next_stage()


@contextmanager
def in_stage(clock: StageClock, stop: StopCheck | None = None) -> Iterator[str]:
    """Runs the `with` body as the next stage. An error that leaves it takes the stage's name if it has
    none."""
    name = enter_stage(clock, stop)
    try:
        yield name
    except BatonError as error:
        error.stage = error.stage or name
        raise
    finally:
        clock.finish_stage()
