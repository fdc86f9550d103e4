"""Reads of the client's process take turns, and one that hangs keeps nobody."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from cache_store.tiers.mooncake_client import Turns
from tests.unit.cache_store.tier_fixtures import WAIT_S, until


def test_turns_when_several_come_then_they_go_one_after_the_other_in_their_order() -> None:
    turns = Turns(60.0)
    entered: list[int] = []
    inside = threading.Semaphore(1)
    first = threading.Event()

    def read(number: int) -> None:
        with turns.mine():
            assert inside.acquire(blocking=False), "two at once"
            entered.append(number)
            if number == 0:
                assert first.wait(WAIT_S)
            inside.release()

    with ThreadPoolExecutor(5) as pool:
        reads = []
        for number in range(5):
            reads.append(pool.submit(read, number))
            until(lambda number=number: len(turns._here) == number + 1, "it has come")
        assert entered == [0]
        first.set()
        for each in reads:
            each.result(WAIT_S)
    assert entered == [0, 1, 2, 3, 4] and not turns._here


def test_turns_when_one_hangs_then_the_others_pass_it_by() -> None:
    turns = Turns(0.01)
    go_on = threading.Event()

    def hang() -> None:
        with turns.mine():
            assert go_on.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(hang)
        until(lambda: turns._here, "it hangs")
        with turns.mine():
            assert not hanging.done()
        go_on.set()
        hanging.result(WAIT_S)
    with turns.mine():
        assert len(turns._here) == 1
