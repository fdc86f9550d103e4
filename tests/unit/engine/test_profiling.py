"""Recording what the step loop does: one trace at a time, for a bounded time, into a file of its own."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.messages import ProfileNews, ProfileOrder
from engine.profiling import StepProfiler, torch_profile
from rpc.errors import ErrorCode

WAIT_S = 60.0


class Recorded:
    """A profile that is written when it is let, or fails."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.moves: list[str] = []
        self.let_go = threading.Event()
        self.let_go.set()

    def _move(self, name: str) -> None:
        self.moves.append(name)
        if name == self.fails_at:
            raise RuntimeError("no")

    def start(self) -> None:
        self._move("start")

    def stop(self) -> None:
        self._move("stop")

    def export_chrome_trace(self, path: str) -> None:
        assert self.let_go.wait(WAIT_S)
        self._move("export")
        Path(path).write_text("{}")


class Bench:
    """A profiler with a clock that the test moves."""

    def __init__(self, folder: Path, made: Callable[[], object]) -> None:
        self.now = 100.0
        self.woken = threading.Event()
        self.profiler = StepProfiler(
            folder, "decode-x", 5.0, self.woken.set, make=made, clock=lambda: self.now  # type: ignore[arg-type]
        )  # fmt: skip
        self._number = 0

    def ask(self, *, start: bool) -> ProfileNews:
        """The answer to an order, which may have to be written first."""
        self._number += 1
        self.profiler.order(ProfileOrder(self._number, start))
        news = self.profiler.turn()
        while not news:
            assert self.woken.wait(WAIT_S)
            self.woken.clear()
            news = self.profiler.turn()
        self.woken.clear()
        (found,) = news
        assert found.number == self._number
        return found


def code_of(news: ProfileNews) -> ErrorCode:
    assert news.error is not None
    return ErrorCode(news.error.code)


def test_profile_when_started_and_stopped_then_its_file_is_there_and_the_next_has_another(tmp_path: Path) -> None:
    made: list[Recorded] = []

    def make() -> Recorded:
        made.append(Recorded())
        return made[-1]

    bench = Bench(tmp_path, make)
    paths = set()
    for _ in range(2):
        assert bench.ask(start=True).error is None
        bench.now += 2.0
        stopped = bench.ask(start=False)
        assert (stopped.error, stopped.seconds, stopped.size_bytes, stopped.by_limit) == (None, 2.0, 2, False)
        assert Path(stopped.path).read_text() == "{}"
        paths.add(stopped.path)
    assert len(paths) == 2
    assert {str(path) for path in tmp_path.iterdir()} == paths
    assert [recorded.moves for recorded in made] == [["start", "stop", "export"]] * 2


def test_orders_when_they_do_not_fit_then_they_are_refused_and_the_recording_goes_on(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.let_go.clear()
    bench = Bench(tmp_path, lambda: recorded)
    assert code_of(bench.ask(start=False)) is ErrorCode.INVALID_PARAMS
    assert bench.ask(start=True).error is None
    assert code_of(bench.ask(start=True)) is ErrorCode.DUPLICATE_REQUEST
    bench.profiler.order(ProfileOrder(90, start=False))
    assert bench.profiler.turn() == []  # it is being written
    assert code_of(bench.ask(start=True)) is ErrorCode.DUPLICATE_REQUEST
    assert code_of(bench.ask(start=False)) is ErrorCode.INVALID_PARAMS
    recorded.let_go.set()
    assert bench.woken.wait(WAIT_S)
    (stopped,) = bench.profiler.turn()
    assert (stopped.number, stopped.error) == (90, None)
    assert code_of(bench.ask(start=False)) is ErrorCode.INVALID_PARAMS


def test_recording_when_its_time_is_over_then_it_ends_by_itself_and_the_next_stop_tells_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Recorded)
    bench.ask(start=True)
    bench.now += 4.9
    assert bench.profiler.turn() == []
    assert not bench.woken.is_set()
    bench.now += 0.1
    assert bench.profiler.turn() == []
    assert bench.woken.wait(WAIT_S)
    bench.now += 60.0
    assert bench.profiler.turn() == []
    stopped = bench.ask(start=False)
    assert (stopped.error, stopped.seconds, stopped.by_limit) == (None, pytest.approx(5.0), True)
    # Nobody has to fetch it: another one may begin.
    bench.ask(start=True)
    bench.now += 5.0
    bench.profiler.turn()
    assert bench.woken.wait(WAIT_S)
    bench.woken.clear()
    assert bench.ask(start=True).error is None
    bench.profiler.close()


def test_orders_when_the_time_is_over_and_no_step_came_since_then_they_find_the_recording_ended(tmp_path: Path) -> None:
    made: list[Recorded] = []

    def make() -> Recorded:
        made.append(Recorded())
        made[-1].let_go.clear()
        return made[-1]

    bench = Bench(tmp_path, make)
    bench.profiler.prepare()
    assert made.pop().moves == ["start", "stop"]
    bench.ask(start=True)
    bench.now += 5.5
    error = bench.ask(start=True).error  # comes before the turn
    assert error is not None and "being written" in error.message
    made[0].let_go.set()
    assert bench.woken.wait(WAIT_S)
    assert bench.ask(start=True).error is None
    bench.now += 5.5
    made[1].let_go.set()
    stopped = bench.ask(start=False)
    assert (stopped.error, stopped.by_limit) == (None, True)


@pytest.mark.parametrize("place", ["start", "stop", "export"])
def test_profile_when_the_profiler_or_the_disk_fails_then_it_is_a_typed_error_and_another_may_begin(
    tmp_path: Path, place: str
) -> None:
    fails = [place]
    bench = Bench(tmp_path, lambda: Recorded(fails.pop() if fails else ""))
    started = bench.ask(start=True)
    failed = started if place == "start" else bench.ask(start=False)
    assert code_of(failed) is ErrorCode.EXECUTION_EXCEPTION
    assert failed.error is not None and failed.error.metadata == {"cause": "RuntimeError"}
    assert bench.ask(start=True).error is None
    assert bench.ask(start=False).error is None
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_close_when_a_profile_is_recorded_then_it_ends_without_a_file(tmp_path: Path) -> None:
    recorded = Recorded()
    bench = Bench(tmp_path, lambda: recorded)
    bench.ask(start=True)
    bench.profiler.close()
    bench.profiler.close()
    assert recorded.moves == ["start", "stop"]
    assert list(tmp_path.iterdir()) == []


def test_torch_profile_when_it_records_then_operators_are_in_the_trace(tmp_path: Path) -> None:
    bench = Bench(tmp_path, torch_profile)
    bench.ask(start=True)
    torch.ones(4, 4) @ torch.ones(4, 4)
    stopped = bench.ask(start=False)
    assert stopped.error is None
    events = json.loads(Path(stopped.path).read_text())["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


def test_torch_profile_when_the_disk_is_full_then_it_is_a_typed_error_and_no_half_trace_is_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path, torch_profile)
    bench.ask(start=True)
    for _ in range(100):
        torch.ones(4, 4) @ torch.ones(4, 4)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        failed = bench.ask(start=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code_of(failed) is ErrorCode.EXECUTION_EXCEPTION
    assert failed.error is not None and str(tmp_path) in failed.error.message
    assert list(tmp_path.iterdir()) == []
