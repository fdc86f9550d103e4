"""Invariant 23 of docs/cuda_graphs.md: what a failure before, and what one during a capture leads to."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref

import pytest

from engine.runner.graph_session import CaptureSession, capture_graphs
from rpc.errors import BatonError, ErrorCode
from rpc.graph_status import GraphRole


class Runner:
    role = GraphRole.GENERATIVE_PREFILL

    def __init__(self, fails: dict[str, BaseException]) -> None:
        self.fails = fails
        self.done: list[str] = []
        self._at("make")

    def _at(self, point: str) -> None:
        self.done.append(point)
        if point in self.fails:
            raise self.fails[point]

    def prepare(self) -> None:
        self._at("prepare")

    def capture(self, session: CaptureSession) -> None:
        self._at("warm_up")
        session.begin_capture()
        self._at("capture")
        self._at("next_warm_up")
        self._at("test_replay")

    def release(self) -> None:
        self.done.append("release")


class NoException(BaseException):
    pass


def start(fails: dict[str, BaseException]) -> tuple[CaptureSession, list[Runner], object]:
    session, made = CaptureSession(), []

    def make() -> Runner:
        runner = Runner(fails)
        made.append(runner)
        return runner

    return session, made, lambda: capture_graphs(make, session)


def test_capture_when_all_goes_well_then_the_session_is_clean():
    session, made, run = start({})
    runner, problem = run()
    assert runner is made[0]
    assert problem == ""
    assert not session.dirty
    session.require_clean()
    assert "release" not in runner.done


@pytest.mark.parametrize("point", ["make", "prepare", "warm_up"])
def test_capture_when_it_fails_before_one_begins_then_everything_is_given_back(point):
    session, made, run = start({point: RuntimeError("no room")})
    runner, problem = run()
    assert runner is None
    assert problem == "RuntimeError: no room"
    assert not session.dirty
    session.require_clean()
    assert all(item.done[-1] == "release" for item in made)


@pytest.mark.parametrize("error", [RuntimeError("lost"), NoException("lost"), KeyboardInterrupt(), SystemExit(0)])
@pytest.mark.parametrize("point", ["capture", "next_warm_up", "test_replay"])
def test_capture_when_it_fails_after_one_has_begun_then_the_process_must_end(point, error, caplog):
    caplog.set_level(logging.ERROR)
    session, made, run = start({point: error})
    with pytest.raises(BatonError) as failure:
        run()
    assert failure.value.code is ErrorCode.GRAPH_CAPTURE_DIRTY
    assert failure.value.__cause__ is error
    assert failure.value.metadata["cause"] == type(error).__name__
    assert "release" not in made[0].done  # kept alive: the half-captured graph refers to its memory
    with pytest.raises(BatonError) as refusal:
        session.require_clean()
    assert refusal.value.code is ErrorCode.GRAPH_CAPTURE_DIRTY
    assert [record.code for record in caplog.records] == ["GRAPH_CAPTURE_DIRTY"]


def test_runner_when_its_capture_failed_after_it_had_begun_then_it_is_never_collected(monkeypatch):
    monkeypatch.setattr("engine.runner.graph_session._log.disabled", True)  # a log record would hold it too
    _, made, run = start({"capture": RuntimeError("half captured")})
    with contextlib.suppress(BatonError):
        run()
    runner = weakref.ref(made.pop())
    del run
    gc.collect()
    assert runner() is not None


def test_capture_when_something_that_is_no_failure_comes_before_one_begins_then_it_goes_on_its_way():
    _, made, run = start({"warm_up": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run()
    assert made[0].done[-1] == "release"
