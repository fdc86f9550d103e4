from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.breaker import Breaker, BreakerSettings, BreakerState
from rpc.errors import TABLE, BatonError, ErrorCode


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(**settings: object) -> tuple[Breaker, Clock, list[BreakerState]]:
    clock, changes = Clock(), []
    defaults = {"failure_threshold": 3, "success_threshold": 2, "open_s": 30.0, "window_s": 60.0}
    return Breaker(BreakerSettings(**defaults | settings), on_change=changes.append, clock=clock), clock, changes


def test_breaker_when_failures_follow_each_other_then_it_opens_and_passes_none():
    breaker, _, changes = make()
    for _ in range(2):
        breaker.failure()
        assert breaker.passes()
    breaker.failure()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.passes()
    assert changes == [BreakerState.OPEN]


def test_breaker_when_a_success_comes_between_then_it_stays_closed():
    breaker, _, changes = make()
    for _ in range(10):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert not changes


def test_breaker_when_failures_are_older_than_the_window_then_they_are_forgotten():
    breaker, clock, changes = make()
    for _ in range(10):
        breaker.failure()
        clock.now += 61
    assert not changes


def test_breaker_when_its_time_is_over_then_one_probe_at_a_time_passes():
    breaker, clock, _ = make()
    for _ in range(3):
        breaker.failure()
    clock.now += 29.9
    assert not breaker.passes()
    clock.now += 0.1
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.passes()
    breaker.begin()
    assert not breaker.passes()
    breaker.neutral()
    assert breaker.passes()


def test_breaker_when_enough_probes_succeed_then_it_closes():
    breaker, clock, changes = make()
    for _ in range(3):
        breaker.failure()
    clock.now += 30
    for expected in (BreakerState.HALF_OPEN, BreakerState.CLOSED):
        breaker.begin()
        breaker.success()
        assert breaker.state is expected
    assert changes == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    breaker.failure()
    assert breaker.passes()


def test_breaker_when_a_probe_fails_then_it_is_open_for_its_whole_time_again():
    breaker, clock, _ = make()
    for _ in range(3):
        breaker.failure()
    clock.now += 30
    breaker.begin()
    breaker.failure()
    assert breaker.state is BreakerState.OPEN
    clock.now += 29
    assert not breaker.passes()
    clock.now += 1
    assert breaker.passes()


def test_breaker_when_another_engine_serves_there_then_it_is_closed():
    breaker, _, _ = make(failure_threshold=1)
    breaker.failure()
    breaker.reset()
    assert breaker.passes()


@pytest.mark.parametrize("code", [code for code in TABLE if code is not ErrorCode.NONE_ERROR])
def test_r4_every_code_counts_as_its_row_says(code):
    """The rule that legs apply, over the whole table."""
    breaker, _, _ = make(failure_threshold=1)
    error = BatonError(code)
    if error.spec.breaker:
        breaker.failure()
    else:
        breaker.neutral()
    assert breaker.passes() == (TABLE[code].breaker_mark != "yes")


events = st.sampled_from(["failure", "success", "neutral", "begin", "wait", "long"])


@given(st.lists(events, max_size=60))
def test_breaker_when_anything_happens_then_it_is_never_stuck(history):
    breaker, clock, _ = make()
    for event in history:
        if event in ("wait", "long"):
            clock.now += 1 if event == "wait" else 100
        else:
            getattr(breaker, event)()
        assert breaker.passes() == (
            breaker.state is BreakerState.CLOSED or (breaker.state is BreakerState.HALF_OPEN and not breaker._probing)
        )
    breaker.neutral()
    clock.now += 31
    assert breaker.passes()
