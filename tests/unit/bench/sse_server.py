"""A server that answers with scripted bytes, piece by piece, each when the test lets it go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

END_OF_HEADERS = b"\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**chunk: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def completion(text: str, tokens: int | None, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of a completion; `tokens` is the running count of generated tokens."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    usage = None if tokens is None else {"prompt_tokens": 5, "completion_tokens": tokens}
    return event(choices=[choice], usage=usage, **more)


def final_usage(tokens: int, cached: int = 0) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return event(choices=[], usage=usage)


@dataclass
class Received:
    """One request as it came in."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class SseServer:
    """Answers every POST with `pieces`, before each of which `release` is awaited, and a GET with its page, else 404.

    With `together` above 1 no answer begins before so many requests are open.
    """

    pieces: Sequence[bytes]
    status: str = "200 OK"
    pages: dict[str, bytes] = field(default_factory=dict)
    together: int = 1
    release: Callable[[], Any] | None = None
    received: list[Received] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0

    async def __aenter__(self) -> Self:
        self._enough = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(END_OF_HEADERS)).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = head[0].split()
            if method == "GET":
                status = "200 OK" if path in self.pages else "404 Not Found"
                writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n".encode() + self.pages.get(path, b""))
                return
            self.received.append(Received(path, headers, json.loads(body or b"{}")))
            self.open_now += 1
            self.most_open = max(self.most_open, self.open_now)
            try:
                await self._answer(writer)
            finally:
                self.open_now -= 1
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self.open_now >= self.together:
            self._enough.set()
        async with asyncio.timeout(60):
            await self._enough.wait()
        writer.write(f"HTTP/1.1 {self.status}\r\nconnection: close\r\n\r\n".encode())
        for piece in self.pieces:
            if self.release is not None:
                await self.release()
            writer.write(piece)
            await writer.drain()


@contextlib.contextmanager
def in_thread(server: SseServer) -> Iterator[SseServer]:
    """Serves from a loop of its own, for callers that bring one themselves or have none."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
