"""A TCP proxy that makes a network worse: delay, a bandwidth limit, connections cut, refused, silent or forgotten.

    with TcpProxy(("127.0.0.1", 0), ("127.0.0.1", port), Impairment(delay_s=0.005)) as proxy:
        proxy.address                      # "127.0.0.1:port"
        proxy.cut()                        # every open connection is reset

It runs on an event loop of its own in a thread of its own; its methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

READ_BYTES = 16 << 10
MOST_QUEUED_BYTES = 4 << 20  # on the way in one direction of a connection; a sender waits above it
CONNECT_LIMIT_S = 5.0
START_LIMIT_S = 5.0
BURST_S = 0.002  # what the bandwidth limit lets through at once


@dataclass(frozen=True)
class Impairment:
    """Of each direction: seconds that a byte takes longer, and bytes per second of all connections together."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit


class _Line:
    """What all connections share in one direction."""

    def __init__(self) -> None:
        self._free_at = 0.0  # when it has sent what it was given

    def clear(self) -> None:
        self._free_at = 0.0

    async def send(self, count: int, rate: float) -> None:
        if rate:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now - BURST_S) + count / rate
            await asyncio.sleep(max(0.0, self._free_at - now))


class _Direction:
    """One direction of a connection: a pipe with the length `delay_s`."""

    def __init__(
        self,
        proxy: TcpProxy,
        line: _Line,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        forgotten: Callable[[], bool],
    ) -> None:
        self._proxy = proxy
        self._forgotten = forgotten
        self._line = line
        self._reader = reader
        self._writer = writer
        self._waiting: deque[tuple[float, bytes]] = deque()  # when a piece is to leave, at the earliest; b"" is the end
        self._bytes = 0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take())
            group.create_task(self._give())

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await self._reader.read(READ_BYTES)
            async with self._changed:
                await self._changed.wait_for(lambda: self._bytes < MOST_QUEUED_BYTES)
                self._waiting.append((loop.time() + self._proxy.impairment.delay_s, data))
                self._bytes += len(data)
                self._changed.notify_all()
            if not data:
                return

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting)
                due, data = self._waiting.popleft()
            if not data:
                if self._forgotten():
                    raise ConnectionResetError("one side has given up a connection that was forgotten")
                with contextlib.suppress(OSError):
                    self._writer.write_eof()
                return
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._line.send(len(data), self._proxy.impairment.bytes_per_s)
            await self._proxy.passing.wait()
            if not self._forgotten():
                self._proxy.forwarded += len(data)
                self._writer.write(data)
                await self._writer.drain()
            async with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()
            self._proxy.passed(len(data))


class TcpProxy:
    """Listens at `listen` and passes on to `target`, each `(address, port)`; port 0 takes a free one.

    `enter` is called on the proxy's thread after the listening socket exists and before any connection to the target
    is made: it may move the thread to another network namespace.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        target: tuple[str, int] | Callable[[], tuple[str, int] | None],
        impairment: Impairment | None = None,
        *,
        enter: Callable[[], None] | None = None,
    ) -> None:
        self._impairment = impairment or Impairment()
        self.forwarded = 0  # bytes, of both directions
        self.accepted = 0  # connections
        self._target = target if callable(target) else lambda: target
        self._enter = enter
        self._out, self._back = _Line(), _Line()
        self._refusing = False
        self._cut_after: int | None = None
        self._socket = socket.create_server(listen, backlog=256)
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._forgotten: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._end = asyncio.Event()
        self.passing = asyncio.Event()
        self.passing.set()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)

    # -- what a test does ------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def impairment(self) -> Impairment:
        return self._impairment

    @impairment.setter
    def impairment(self, value: Impairment) -> None:
        self._impairment = value
        self._loop.call_soon_threadsafe(self._clear_lines)

    def _clear_lines(self) -> None:
        self._out.clear()
        self._back.clear()

    def hold(self, holding: bool) -> None:
        """Whether bytes are kept, in silence, in place of being passed on."""
        self._loop.call_soon_threadsafe(self.passing.clear if holding else self.passing.set)

    def forget(self) -> int:
        """From now on what comes on the connections that are open goes nowhere, and nobody is told, as behind a
        firewall that has dropped its state; new ones work. Returns how many there were."""

        def forget_all() -> int:
            self._forgotten |= self._connections
            return len(self._forgotten)

        return self._on_loop(forget_all)

    @property
    def forgotten(self) -> int:
        """Connections of `forget` that neither side has given up yet."""
        return len(self._forgotten)

    def cut(self) -> int:
        """Resets every open connection on both sides; returns how many there were."""
        return self._on_loop(self._cut_all)

    def cut_after(self, count: int) -> None:
        """Resets every open connection once `count` more bytes have passed; once."""
        self._cut_after = self.forwarded + count

    def refuse(self, refusing: bool) -> None:
        """Whether new connections are reset at once, as by a host on which nothing listens."""
        self._refusing = refusing

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        if not self._started.wait(START_LIMIT_S):
            raise TimeoutError("the proxy did not start")
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_LIMIT_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            if self._enter is not None:
                self._enter()
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accepted, sock=self._socket)
        self._started.set()
        await self._end.wait()
        server.close()
        self._cut_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_loop(self, call: Callable[[], int]) -> int:
        done = threading.Event()
        result = [0]

        def run() -> None:
            result[0] = call()
            done.set()

        self._loop.call_soon_threadsafe(run)
        if not done.wait(START_LIMIT_S):
            raise TimeoutError("the proxy does not answer")
        return result[0]

    # -- connections -----------------------------------------------------------------------------------------------

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._connect(reader, writer))
        self._tasks.add(task)  # `_serve` cancels and awaits what is left
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        target = self._target()
        if self._refusing or target is None:
            _reset(writer)
            return
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                there_reader, there_writer = await asyncio.open_connection(*target)
        except (OSError, TimeoutError):
            _reset(writer)
            return
        pair = (writer, there_writer)
        self._connections.add(pair)
        for each in pair:
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.TaskGroup() as group:
                forgotten = partial(self._forgotten.__contains__, pair)
                group.create_task(_Direction(self, self._out, reader, there_writer, forgotten).run())
                group.create_task(_Direction(self, self._back, there_reader, writer, forgotten).run())
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one side is gone; so shall be the other
        finally:
            self._connections.discard(pair)
            self._forgotten.discard(pair)
            for each in pair:
                each.transport.abort()

    def passed(self, count: int) -> None:
        """A piece has left; called by the directions."""
        if self._cut_after is not None and self.forwarded >= self._cut_after:
            self._cut_after = None
            self._cut_all()

    def _cut_all(self) -> int:
        found = list(self._connections)
        for pair in found:
            for writer in pair:
                _reset(writer)
        return len(found)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with a reset, as a host does that has forgotten it."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
