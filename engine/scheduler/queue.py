"""Requests in the order in which they are served: priority, then arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.requests import Request


class RequestQueue:
    """Sorted by `Request.order`. Look-up and removal are O(log n) beside the move of a list's tail."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int, int], Request]] = []

    def add(self, request: Request) -> None:
        insort(self._items, (request.order, request))

    def remove(self, request: Request) -> None:
        """Raises KeyError if the request is not here."""
        index = bisect_left(self._items, (request.order,))
        if index == len(self._items) or self._items[index][1] is not request:
            raise KeyError(request.key)
        del self._items[index]

    def __iter__(self) -> Iterator[Request]:
        """In order, over what is here now: the queue may change meanwhile."""
        return iter([request for _, request in self._items])

    def __reversed__(self) -> Iterator[Request]:
        return iter([request for _, request in reversed(self._items)])

    def __len__(self) -> int:
        return len(self._items)
