"""A lean HTTP client for load generation: POST, and the answer's body piece by piece, or event by event, with the time
of each socket read.

A client of the general kind spends milliseconds of processor time on a request, which on a small machine the server
lacks, and sees a piece some layers after it was read. Connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import SplitResult, urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
END_OF_EVENTS = b"[DONE]"  # data of the last event
_DATA = b"data: "


class HttpFailed(Exception):
    """The connection could not be made, broke, or carried no HTTP."""


class _Connection(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.begin()

    def begin(self) -> None:
        """Forgets the last answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._read_at: float | None = None
        self._news = asyncio.Event()
        self._ends_with_connection = True
        self._keeps_alive = False
        self.status = 0
        self.complete = False
        self.failure = ""

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._read_at = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failure = f"no HTTP: {error}"
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.status and self._ends_with_connection and exc is None:
            self.complete = True
        if not self.complete:
            self.failure = self.failure or "the connection was closed before the end of the answer"
        self._news.set()

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._news.set()

    def on_body(self, body: bytes) -> None:
        if self._read_at is None:
            self._read_at = self._clock()
        self._pieces.append((self._read_at, body))
        self._news.set()

    def on_message_complete(self) -> None:
        self.complete = True
        self._keeps_alive = bool(self._parser.should_keep_alive())
        self._news.set()

    # -- for the request

    @property
    def reusable(self) -> bool:
        return self.complete and self._keeps_alive and not self.closed and not self.failure

    async def wait_status(self) -> int:
        """Raises HttpFailed when none comes."""
        while not self.status:
            if self.failure:
                raise HttpFailed(self.failure)
            await self._wait()
        return self.status

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """(clock reading at the socket read, bytes) until the end of the answer. Raises HttpFailed when it breaks off.

        An answer without a length ends with its connection.
        """
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self.complete:
                return
            if self.failure:
                raise HttpFailed(self.failure)
            await self._wait()

    async def events(self) -> AsyncIterator[tuple[float, bytes]]:
        """(clock reading at the socket read, data) of each server-sent event, as `pieces`. Comments are none."""
        pending = b""
        async for at, piece in self.pieces():
            *events, pending = (pending + piece).split(b"\n\n")
            for event in events:
                if event.startswith(_DATA):
                    yield at, event[len(_DATA) :]

    async def body(self) -> bytes:
        """The whole of an answer, as `pieces`."""
        return b"".join([piece async for _, piece in self.pieces()])

    async def finish(self, timeout_s: float) -> None:
        """Waits for the end of an answer of which nothing more is wanted, so that its connection can be used again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self.complete or self.failure):
                    await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class HttpPool:
    """Connections to one server. Belongs to one event loop; as many as there are requests at a time."""

    def __init__(self, base_url: str, headers: Mapping[str, str], clock: Callable[[], float]) -> None:
        """Raises HttpFailed for an address that is none."""
        self._url = _split(base_url)
        self._clock = clock
        self._idle: list[_Connection] = []
        self._headers = {
            "Host": self._url.netloc,
            "Content-Type": "application/json",
            "Accept": "*/*",
            **headers,
        }

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[_Connection]:
        """Sends the request; within the context its answer is read. Leaving it early drops the connection.

        Raises HttpFailed. Has no time limit of its own but that of connecting.
        """
        connection = await self._take()
        transport = connection.transport
        assert transport is not None
        head = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        request = f"POST {self._url.path}{path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n"
        try:
            transport.write(request.encode("latin-1") + body)
            yield connection
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                transport.abort()

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                connection.begin()
                return connection
        secure = ssl.create_default_context() if self._url.scheme == "https" else None
        port = self._url.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._clock), str(self._url.hostname), port, ssl=secure
                )
        except (OSError, TimeoutError) as error:
            raise HttpFailed(f"no connection to {self._url.netloc}: {error or type(error).__name__}") from None
        return made

    def close(self) -> None:
        while self._idle:
            transport = self._idle.pop().transport
            if transport is not None:
                transport.abort()


def _split(base_url: str) -> SplitResult:
    try:
        url = urlsplit(base_url)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise HttpFailed(f"{base_url}: write http://host:port")
    return url
