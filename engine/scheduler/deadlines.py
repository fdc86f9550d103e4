"""How long requests may take: the deadlines that they came with, and the limit on their time in the queue."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from engine.requests import Request, RequestState, StepTime
from rpc.errors import BatonError, ErrorCode

# A load may be ended this long before the deadline of its request.
_NEAR_S = 0.5


class Deadlines:
    """Of the requests in `open_requests`. What was set for one that is no more there is dropped."""

    def __init__(self, open_requests: Mapping[str, Request], time: StepTime, queue_limit_s: float) -> None:
        """queue_limit_s: longest wait for the first step; 0: any."""
        self._open = open_requests
        self._time = time
        self._queue_limit_s = queue_limit_s
        self._timers: list[tuple[float, int, str]] = []  # a heap of (when, sequence, key)
        self._sequence = 0

    def add(self, request: Request) -> None:
        """The request has been opened, or given another deadline."""
        if request.deadline_s:
            self._set(request.deadline_s, request.key)

    def limit_wait(self, request: Request) -> None:
        """The request waits for its turn from now on."""
        if self._queue_limit_s > 0:
            request.wait_until_s = self._time.now + self._queue_limit_s
            self._set(request.wait_until_s, request.key)

    def take_passed(self) -> Iterator[tuple[Request, BatonError]]:
        """Open requests that have taken too long, each with what is to end it before the next is asked for."""
        now = self._time.now
        while self._timers and self._timers[0][0] <= now:
            _, _, key = heapq.heappop(self._timers)
            request = self._open.get(key)
            if request is None:
                continue
            if request.deadline_s and now >= request.deadline_s:
                message = "the request's deadline has passed; allow it more time"
                yield request, BatonError(ErrorCode.GENERATE_TIMEOUT, message)
            elif request.wait_until_s and now >= request.wait_until_s and _waits(request):
                message = f"the request waited {now - request.since_s:.1f} s for its turn; send it again"
                yield request, BatonError(ErrorCode.WAIT_TO_RUN_TIMEOUT, message)

    def next_due_s(self) -> float:
        """When `take_passed` may have something; infinity if never."""
        return self._timers[0][0] if self._timers else math.inf

    def ended_load(self, request: Request, error: BatonError) -> bool:
        """Whether a load ended with `error` because of the request's own deadline: no failure of the load's."""
        if error.code is not ErrorCode.GENERATE_TIMEOUT or not request.deadline_s:
            return False
        return self._time.now >= request.deadline_s - _NEAR_S

    def _set(self, at_s: float, key: str) -> None:
        self._sequence += 1
        heapq.heappush(self._timers, (at_s, self._sequence, key))
        if len(self._timers) > 4 * len(self._open) + 64:  # most are about requests that have ended
            self._timers = [timer for timer in self._timers if timer[2] in self._open]
            heapq.heapify(self._timers)


def _waits(request: Request) -> bool:
    """Whether it still waits for its first step here; the time after a preemption is not limited."""
    return request.state is RequestState.READY or (
        request.state is RequestState.WAITING and request.compute_here and request.preemptions == 0
    )
