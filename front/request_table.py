"""The requests of this server: open ones by key, aborted ones by tombstone, finished ones in a ring."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from front.request import Request
from rpc.errors import BatonError, ErrorCode
from rpc.tombstones import Tombstones

FINISHED_KEPT = 1000
KEY_MEMORY_S = 60.0


class RequestTable:
    """Who is here and who was. A key is open at most once and is not served again for 60 s after its end.

    Not thread-safe: it belongs to the event loop. Bounds: open requests by the server's RPC limit,
    tombstones and served keys by the limits of `Tombstones`, finished requests by `FINISHED_KEPT`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: dict[str, Request] = {}
        self._anonymous: set[Request] = set()
        self._finished: deque[Request] = deque(maxlen=FINISHED_KEPT)
        self.tombstones = Tombstones(KEY_MEMORY_S, clock=clock)
        self._served = Tombstones(KEY_MEMORY_S, clock=clock)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._open.values()))

    def find(self, request_key: str) -> Request | None:
        return self._open.get(request_key)

    def arrive(self, request: Request) -> None:
        """A request that has not named itself yet; `leave` ends that."""
        self._anonymous.add(request)

    def open(self, request: Request, request_key: str) -> None:
        """Gives `request` its key. Raises REQUEST_TOMBSTONED or DUPLICATE_REQUEST, and then nothing has
        changed.
        """
        if self.tombstones.hit(request_key):
            raise BatonError(ErrorCode.REQUEST_TOMBSTONED, "the request was aborted before it arrived")
        if request_key in self._open:
            raise BatonError(ErrorCode.DUPLICATE_REQUEST, "a request with this key is open; use a new key per attempt")
        if self._served.hit(request_key):
            raise BatonError(
                ErrorCode.DUPLICATE_REQUEST,
                "a request with this key was served already; use a new key per attempt",
            )
        self._anonymous.discard(request)
        request.request_key = request_key
        self._open[request_key] = request

    def is_open(self, request: Request) -> bool:
        return self._open.get(request.request_key) is request

    def leave(self, request: Request) -> None:
        """The request has its terminal record: it moves to the ring. May be called again."""
        self._anonymous.discard(request)
        if request.ended_at is not None:
            return
        if self.is_open(request):
            del self._open[request.request_key]
            self._served.add(request.request_key)
        request.close()
        self._finished.append(request)

    def page(self) -> dict[str, object]:
        """The `/debug/requests` page: open requests, oldest first; finished ones, latest first."""
        waiting = sorted((*self._open.values(), *self._anonymous), key=lambda request: request.arrival)
        return {
            "open": [request.page() for request in waiting],
            "finished": [request.page() for request in reversed(self._finished)],
            "tombstones": len(self.tombstones),
        }
