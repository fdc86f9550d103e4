"""When failing transfers make a prefill server unready, and what makes it ready again."""

from __future__ import annotations

import pytest

from engine.messages import Observation
from front.transfer_health import READERS_FAILURES, TransferHealth


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def failures(count: float = 1, reason: str = "CACHE_STORE_STORE_FAILED") -> Observation:
    return Observation("baton_kv_transfer_failures_total", {"transport": "grpc", "reason": reason}, count)


RELEASED = Observation("baton_kv_lease_hold_seconds", {"outcome": "released"}, 0.5)


def test_failing_when_five_own_failures_come_in_a_row_then_it_is_true_until_one_transfer_is_read() -> None:
    health = TransferHealth(clock=Clock())
    health.note([failures()] * 4)
    assert not health.failing
    health.note([failures()])
    assert health.failing
    health.note([RELEASED])
    assert not health.failing


def test_failing_when_a_success_comes_between_then_the_count_starts_anew() -> None:
    health = TransferHealth(clock=Clock())
    health.note([failures(4), RELEASED, failures(4)])
    assert not health.failing


def test_failing_when_nothing_happens_for_the_window_then_it_is_tried_again() -> None:
    clock = Clock()
    health = TransferHealth(clock=clock)
    health.note([failures(5)])
    clock.now += 29
    assert health.failing
    clock.now += 2
    assert not health.failing
    health.note([failures(1)])
    assert not health.failing


@pytest.mark.parametrize("reason", ["CONNECTION_RESET_BY_PEER", "KV_STALE_REFERENCE", "CACHE_STORE_PUSH_ITEM_FAILED"])
def test_failing_when_the_readers_are_at_fault_then_the_server_stays_ready(reason: str) -> None:
    health = TransferHealth(clock=Clock())
    health.note([failures(50, reason)])
    assert not health.failing


def test_failing_when_a_reader_is_told_of_the_senders_failures_then_it_stays_ready_and_its_own_heal_with_a_load() -> (
    None
):
    health = TransferHealth(own=READERS_FAILURES)
    told = Observation("baton_kv_transfer_failures_total", {"reason": "CACHE_STORE_STORE_FAILED"}, 1)
    health.note([told] * 10)
    assert not health.failing
    own = Observation("baton_kv_transfer_failures_total", {"reason": "CACHE_STORE_LOAD_UNKNOWN_ERROR"}, 1)
    health.note([own] * 5)
    assert health.failing
    health.note([Observation("baton_kv_transfer_seconds", {"transport": "grpc", "outcome": "ok"}, 0.1)])
    assert not health.failing
