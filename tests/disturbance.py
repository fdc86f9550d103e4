"""What a busy machine does to tests, on purpose: calls reach servers late, and event loops stand still.

`BATON_TESTS_DISTURBED=SEED` (`make test-disturbed`) makes each call to a gRPC server of the test's own process late by
a random time, and each event loop of that process stand still now and then. A test that passes only when events come in
the order in which they usually come fails soon; one that states what it waits for passes, only later. Seeds make
another choice of delays, not a repeatable order: threads and the kernel have their part in that.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

LATE_S = (0.0, 0.0, 0.01, 0.05, 0.15)  # one of them for each call
STALLS = 0.001  # share of the turns of a loop before which it stands still
STALL_S = 0.4  # at most


class LateCalls(grpc.aio.ServerInterceptor):
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        await asyncio.sleep(self._rng.choice(LATE_S))
        return await continuation(details)


def disturb(seed: str) -> None:
    """From now on, in this process. `seed` and the name of the test worker choose the delays."""
    rng = random.Random(f"{seed} {os.environ.get('PYTEST_XDIST_WORKER', '')}")
    make_server = grpc.aio.server
    run_once = asyncio.base_events.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def server(*arguments: Any, interceptors: Sequence[Any] | None = None, **options: Any) -> grpc.aio.Server:
        return make_server(*arguments, interceptors=[LateCalls(rng), *(interceptors or ())], **options)

    def run_once_later(loop: asyncio.BaseEventLoop) -> None:
        if rng.random() < STALLS:
            time.sleep(rng.uniform(0.01, STALL_S))
        run_once(loop)

    grpc.aio.server = server
    asyncio.base_events.BaseEventLoop._run_once = run_once_later  # type: ignore[attr-defined]
