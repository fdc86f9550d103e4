"""The mailbox between the legs of a request, which write, and the one task that serves it, which reads."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Letters in the order in which they came. One reader; belongs to one event loop.

    `limit` is for writers that can wait (a decode stream, whose sender is held back by HTTP/2 flow control when it
    is not read): they `await room()` after each letter. News about the end of something is few and never waits.
    """

    def __init__(self, limit: int = 64) -> None:
        self._letters: deque[T] = deque()
        self._limit = limit
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, letter: T) -> None:
        """Never blocks."""
        self._letters.append(letter)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def room(self) -> None:
        """Waits while `limit` letters or more are unread."""
        while len(self._letters) >= self._limit:
            writer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._writers.append(writer)
            await writer

    async def get(self) -> T:
        """The next letter; waits for it. Who waits must see to it that one comes: legs end, requests have deadlines."""
        while not self._letters:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        letter = self._letters.popleft()
        if self._writers and len(self._letters) < self._limit:
            writers, self._writers = self._writers, []
            for writer in writers:
                if not writer.done():
                    writer.set_result(None)
        return letter
