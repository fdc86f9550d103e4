"""Where a request's time goes; on a fake clock, so every bucket is exact."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from rpc.stages import (
    DECODE_STAGES,
    PREFILL_STAGES,
    ROUTER_LEG_STAGES,
    ROUTER_STAGES,
    StageClock,
    StopCheck,
    in_stage,
)

LISTS = [PREFILL_STAGES, DECODE_STAGES, ROUTER_STAGES, *((leg,) for leg in ROUTER_LEG_STAGES)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.invariant("RPC-1")
@pytest.mark.parametrize(("stages", "finish"), [(PREFILL_STAGES, 8), (DECODE_STAGES, 8), (ROUTER_STAGES, 7)])
def test_finish_has_the_documented_number(stages: Sequence[str], finish: int) -> None:
    clock = StageClock(stages, Clock())
    while not clock.finished:
        clock.next_stage()
    assert clock.position == finish
    assert clock.stage == "finish"


@pytest.mark.invariant("RPC-1")
@pytest.mark.parametrize("stages", LISTS)
def test_each_stage_gets_its_own_time(stages: Sequence[str]) -> None:
    time = Clock()
    clock = StageClock(stages, time)
    for number, name in enumerate(stages):
        time.now += 0.5  # between stages: belongs to none
        with in_stage(clock) as entered:
            assert entered == name
            time.now += number
    clock.finish()
    assert clock.seconds() == {name: float(number) for number, name in enumerate(stages)}
    assert list(clock.seconds()) == list(stages)
    assert clock.total() == sum(range(len(stages))) + 0.5 * len(stages)


@pytest.mark.invariant("RPC-1")
@pytest.mark.parametrize("stages", LISTS)
def test_early_return_at_every_stage_ends_in_finish_and_not_beyond(stages: Sequence[str]) -> None:
    for reached in range(len(stages) + 1):
        time = Clock()
        clock = StageClock(stages, time)
        for _ in range(reached):
            clock.next_stage()
            time.now += 1
        clock.finish()
        clock.finish()
        assert clock.stage == "finish"
        assert clock.seconds() == dict.fromkeys(stages[:reached], 1.0)
        with pytest.raises(AssertionError, match="beyond finish"):
            clock.next_stage()


@pytest.mark.invariant("RPC-1")
def test_second_finish_stage_adds_nothing() -> None:
    time = Clock()
    clock = StageClock(DECODE_STAGES, time)
    clock.finish_stage()  # in start
    clock.next_stage()
    time.now += 2
    clock.finish_stage()
    time.now += 5
    clock.finish_stage()
    assert clock.seconds() == {"admit": 2.0}
    clock.finish()
    clock.finish_stage()  # in finish
    assert clock.seconds() == {"admit": 2.0}


@pytest.mark.invariant("RPC-2")
def test_measured_zero_is_there_and_an_unreached_stage_is_not() -> None:
    clock = StageClock(PREFILL_STAGES, Clock())
    with in_stage(clock):
        pass
    assert clock.seconds() == {"admit": 0.0}


@pytest.mark.invariant("RPC-1")
def test_error_in_a_stage_books_its_time_and_names_it() -> None:
    time = Clock()
    clock = StageClock(PREFILL_STAGES, time)

    def fail() -> None:
        with in_stage(clock):
            time.now += 3
            raise BatonError(ErrorCode.EXECUTION_EXCEPTION)

    with pytest.raises(BatonError) as caught:
        fail()
    assert caught.value.stage == "admit"
    assert clock.seconds() == {"admit": 3.0}


@pytest.mark.invariant("RPC-1")
@pytest.mark.parametrize("failures", [0, 1, 5])
def test_retries_add_up_in_the_stage_and_sleeps_stand_apart(failures: int) -> None:
    time = Clock()
    clock = StageClock(DECODE_STAGES, time)
    clock.next_stage()
    clock.next_stage()
    for attempt in range(failures + 1):
        with in_stage(clock) as stage:
            assert stage == "allocate"
            time.now += 1
        if attempt < failures:
            time.now += 0.25
            clock.add_retry_wait(0.25)
            clock.restore_stage()
    clock.finish()
    assert clock.seconds()["allocate"] == failures + 1
    assert clock.retries() == ({"allocate": failures} if failures else {})
    assert clock.retry_waits() == ({"allocate": 0.25 * failures} if failures else {})
    assert sum(clock.seconds().values()) + sum(clock.retry_waits().values()) <= clock.total()


@pytest.mark.parametrize(
    ("late", "cancelled", "code"),
    [
        (True, True, ErrorCode.GENERATE_TIMEOUT),
        (True, False, ErrorCode.GENERATE_TIMEOUT),
        (False, True, ErrorCode.CANCELLED),
    ],
)
def test_stop_is_looked_at_before_the_stage_and_the_deadline_comes_first(
    late: bool, cancelled: bool, code: ErrorCode
) -> None:
    time = Clock()
    deadline = Deadline.after(0 if late else 10, time)
    clock = StageClock(PREFILL_STAGES, time)
    with pytest.raises(BatonError) as caught, in_stage(clock, StopCheck(deadline, lambda: cancelled)):
        raise AssertionError("the body must not run")
    assert caught.value.code is code
    assert clock.stage == "start"
    assert clock.seconds() == {}


def test_restore_goes_back_to_a_stage_that_was_reached() -> None:
    clock = StageClock(("a", "b", "c"), Clock())
    clock.next_stage()
    clock.next_stage()
    clock.restore_stage()
    assert clock.next_stage() == "b"
    clock.restore_stage("a")
    assert clock.next_stage() == "a"
    clock.finish()
    clock.restore_stage("c")
    assert clock.next_stage() == "c"
    clock.restore_stage("start")
    assert clock.next_stage() == "a"
    with pytest.raises(ValueError, match="not been reached"):
        clock.restore_stage("c")
    with pytest.raises(ValueError, match="unknown stage"):
        clock.restore_stage("d")


def test_record_adds_what_another_process_measured() -> None:
    clock = StageClock(DECODE_STAGES, Clock())
    clock.record("load", 0.25)
    clock.record("load", 0.5)
    assert clock.seconds() == {"load": 0.75}
    with pytest.raises(ValueError, match="unknown stage"):
        clock.record("compute", 1)


@pytest.mark.parametrize("stages", [(), ("a", "a"), ("start",), ("finish", "a")])
def test_stage_list_is_checked(stages: tuple[str, ...]) -> None:
    with pytest.raises(ValueError):
        StageClock(stages)


@pytest.mark.invariant("RPC-1")
@given(st.lists(st.sampled_from(["next", "finish_stage", "restore", "wait", "retry", "finish"]), max_size=60))
def test_stages_and_sleeps_never_exceed_the_total(steps: list[str]) -> None:
    time = Clock()
    clock = StageClock(DECODE_STAGES, time)
    for step in steps:
        if step == "wait":
            time.now += 1.0
        elif step == "next" and not clock.finished:
            clock.next_stage()
        elif step == "finish_stage":
            clock.finish_stage()
        elif step == "restore":
            clock.restore_stage()
        elif step == "finish":
            clock.finish()
        elif step == "retry" and not clock.finished:
            clock.finish_stage()
            time.now += 0.5
            clock.add_retry_wait(0.5)
        assert 0 <= clock.position <= len(DECODE_STAGES) + 1
    clock.finish()
    assert sum(clock.seconds().values()) + sum(clock.retry_waits().values()) <= clock.total()
