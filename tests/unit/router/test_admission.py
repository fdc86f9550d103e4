from __future__ import annotations

import asyncio

import pytest

from router.admission import Admission
from rpc.errors import BatonError, ErrorCode


async def test_enter_when_there_is_no_limit_then_nobody_waits():
    admission = Admission(0)
    assert all(admission.enter(0) is None for _ in range(1000))
    assert admission.active == 1000


async def test_enter_when_all_turns_are_taken_then_the_lowest_priority_number_goes_first():
    admission = Admission(1, queue_size=3, timeout_s=5)
    assert admission.enter(0) is None
    turns = {name: admission.enter(priority) for name, priority in [("late", 5), ("first", -1), ("second", -1)]}
    with pytest.raises(BatonError) as caught:
        admission.enter(0)
    assert caught.value.code is ErrorCode.ROUTER_QUEUE_FULL
    order = []

    async def take(name: str) -> None:
        await admission.wait(turns[name])
        order.append(name)
        admission.leave()

    async with asyncio.TaskGroup() as group:
        for name in turns:
            group.create_task(take(name))
        admission.leave()
    assert order == ["first", "second", "late"]
    assert (admission.active, admission.depth) == (0, 0)


async def test_wait_when_no_turn_comes_then_8503_and_the_place_is_free_again():
    depths: list[int] = []
    admission = Admission(1, queue_size=1, timeout_s=0.01, on_depth=depths.append)
    admission.enter(0)
    with pytest.raises(BatonError) as caught:
        await admission.wait(admission.enter(0))
    assert caught.value.code is ErrorCode.ROUTER_QUEUE_TIMEOUT
    assert admission.depth == 0
    assert depths[-1] == 0
    admission.leave()
    assert admission.active == 0


@pytest.mark.parametrize("granted_meanwhile", [False, True])
async def test_wait_when_the_waiter_leaves_then_its_turn_is_not_lost(granted_meanwhile):
    admission = Admission(1, queue_size=2, timeout_s=5)
    admission.enter(0)
    leaving = asyncio.create_task(admission.wait(admission.enter(0)))
    await asyncio.sleep(0)
    if granted_meanwhile:
        admission.leave()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    if not granted_meanwhile:
        admission.leave()
    assert (admission.active, admission.depth) == (0, 0)
    assert admission.enter(0) is None
