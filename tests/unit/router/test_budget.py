from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.budget import Backoff, RetryBudget


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_budget_when_it_is_new_then_a_burst_is_allowed_and_no_more():
    budget = RetryBudget(0.1, clock=Clock())
    assert budget.left() == 1
    assert sum(budget.withdraw() for _ in range(500)) == 100
    assert budget.left() == 0


def test_budget_when_requests_come_then_retries_are_their_share():
    budget = RetryBudget(0.1, clock=Clock())
    while budget.withdraw():
        pass
    granted = 0
    for _ in range(1000):
        budget.deposit()
        granted += budget.withdraw()
    assert granted in (99, 100)


def test_budget_when_time_passes_then_a_quiet_router_can_retry_again():
    clock = Clock()
    budget = RetryBudget(0.1, clock=clock)
    while budget.withdraw():
        pass
    clock.now = 1.0
    assert sum(budget.withdraw() for _ in range(50)) == 10
    clock.now = 1000.0
    assert budget.left() == 1


def test_budget_when_the_ratio_is_zero_then_there_are_no_retries():
    clock = Clock()
    budget = RetryBudget(0, clock=clock)
    budget.deposit()
    clock.now = 100.0
    assert not budget.withdraw()
    assert budget.left() == 0


@pytest.mark.parametrize("ratio", [-0.1, 11, float("nan")])
def test_budget_when_the_ratio_is_out_of_range_then_it_is_refused(ratio):
    with pytest.raises(ValueError):
        RetryBudget(ratio)


@given(st.lists(st.tuples(st.sampled_from(["deposit", "withdraw", "wait"]), st.floats(0, 10)), max_size=100))
def test_budget_when_anything_happens_then_what_is_left_is_a_share(history):
    clock = Clock()
    budget = RetryBudget(0.2, clock=clock)
    for action, seconds in history:
        if action == "wait":
            clock.now += seconds
        else:
            getattr(budget, action)()
        assert 0 <= budget.left() <= 1


def test_backoff_when_retries_go_on_then_waits_grow_to_the_limit():
    backoff = Backoff(0.05, 5.0, 2.0, jitter=0.0)
    rng = random.Random(1)
    waits = [backoff.wait_s(n, rng) for n in range(10)]
    assert waits[:4] == [0.05, 0.1, 0.2, 0.4]
    assert waits[-1] == 5.0
    assert backoff.wait_s(10**6, rng) == 5.0


@given(st.integers(0, 200), st.integers(0, 1000))
def test_backoff_when_there_is_jitter_then_it_stays_within_its_share(retry, seed):
    backoff = Backoff(0.05, 5.0, 2.0, jitter=0.1)
    exact = min(5.0, 0.05 * 2.0 ** min(retry, 64))
    assert exact * 0.9 - 1e-9 <= backoff.wait_s(retry, random.Random(seed)) <= min(5.0, exact * 1.1 + 1e-9)
