"""Drain: what is taken when, and when it is over."""

from __future__ import annotations

import asyncio

import pytest

from front.drain import Drain, DrainState
from rpc.errors import BatonError, ErrorCode


class Requests:
    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1


def make(requests: Requests, *, grace_s: float = 0.0, timeout_s: float = 5.0, **options: object) -> Drain:
    return Drain(
        grace_s=grace_s,
        timeout_s=timeout_s,
        remaining=lambda: requests.count,
        changed=requests.changed,
        **options,
    )


async def test_begin_when_in_the_grace_period_then_requests_are_taken_and_after_it_refused() -> None:
    now = 10.0
    requests = Requests(1)
    drain = make(requests, grace_s=5.0, timeout_s=60.0, clock=lambda: now)
    assert (drain.state, drain.number) == (DrainState.SERVING, 0)
    assert drain.begin()
    assert not drain.begin()
    now = 14.9
    assert (drain.state, drain.number) == (DrainState.LEAVING, 1)
    drain.check()
    now = 15.0
    assert (drain.state, drain.number) == (DrainState.REFUSING, 1)
    with pytest.raises(BatonError) as caught:
        drain.check()
    assert caught.value.code is ErrorCode.SERVER_DRAINING
    assert caught.value.retry_after_s is not None
    requests.count = 0
    assert (drain.state, drain.number) == (DrainState.DRAINED, 2)
    with pytest.raises(BatonError):
        drain.check()


async def test_wait_when_the_last_request_leaves_then_it_ends_at_once() -> None:
    requests = Requests(2)
    drain = make(requests)
    drain.begin()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(drain.wait())
        await asyncio.sleep(0)
        requests.count = 1
        drain.request_left()
        await asyncio.sleep(0)
        assert not waiting.done()
        requests.count = 0
        drain.request_left()
    assert waiting.result() is True


async def test_wait_when_a_request_outlasts_the_limit_then_it_says_so() -> None:
    drain = make(Requests(1), timeout_s=0.05)
    drain.begin()
    async with asyncio.timeout(20):
        assert await drain.wait() is False


async def test_wait_when_nothing_is_open_then_the_grace_period_still_runs() -> None:
    drain = make(Requests(0), grace_s=0.1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    drain.begin()
    async with asyncio.timeout(20):
        assert await drain.wait() is True
    assert loop.time() - began >= 0.09
