from __future__ import annotations

import math

import pytest

from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Context:
    def __init__(self, remaining: float | None) -> None:
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining


@pytest.mark.parametrize(
    ("remaining", "max_s", "left"),
    [
        (5.0, 7200, 5.0),
        (5.0, 1, 5.0),
        (None, 7200, 7200.0),
        (None, 0, math.inf),
        (None, -1, math.inf),
        (1e18, 10, 10.0),
    ],
)
def test_from_context_takes_the_callers_deadline_or_the_maximum(
    remaining: float | None, max_s: float, left: float
) -> None:
    assert Deadline.from_context(Context(remaining), max_s, Clock()).remaining() == left


def test_remaining_time_shrinks_and_is_handed_on() -> None:
    clock = Clock()
    deadline = Deadline.after(10, clock)
    clock.now += 4
    assert deadline.remaining() == 6
    assert deadline.timeout() == 6
    assert deadline.timeout(at_most=2) == 2
    assert deadline.earlier(1).remaining() == 1
    assert deadline.earlier(100).remaining() == 6
    assert deadline.at_ns() == 110 * 10**9
    clock.now += 6
    assert deadline.passed()
    assert deadline.remaining() == 0


def test_check_when_passed_is_603() -> None:
    clock = Clock()
    deadline = Deadline.after(1, clock)
    deadline.check("queue")
    clock.now += 1
    with pytest.raises(BatonError) as caught:
        deadline.check("queue")
    assert (caught.value.code, caught.value.stage) == (ErrorCode.GENERATE_TIMEOUT, "queue")


def test_never_has_no_timeout() -> None:
    deadline = Deadline.never()
    assert deadline.timeout() is None
    assert deadline.timeout(at_most=3) == 3
    assert deadline.at_ns() == 0
    assert not deadline.passed()
