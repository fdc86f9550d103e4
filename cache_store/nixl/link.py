"""The agent's end of its NIXL process: it is started when it is first needed, and again after it has ended.

`NixlLink` belongs to the agent's loop and never blocks it. All that was under way in a process has ended when that
process has; that is what `restart` is for. On a device a thread takes the place of the process (`process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from cache_store.geometry.rows import Rows
from cache_store.memory.lease_words import LeaseWords
from cache_store.memory.regions import CUDA, Regions
from cache_store.memory.staging import MemoryUnavailable, settled
from cache_store.nixl import frames as frames
from cache_store.nixl.process import serve
from cache_store.observations import Observe, ignore
from cache_store.transports import NIXL
from protos import cache_store_pb2 as pb

KIND = "nixl"
KIND_CUDA = "nixl-cuda"
START_S = 20.0  # to load the library and register the memory
FIRST_READ_S = 5.0  # for a peer to answer the first read of its memory
RETRY_S = 60.0  # after a start that failed
CLOSE_S = 5.0
MODULE = "cache_store.nixl.process"
LOG_SETTINGS = ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL")  # whoever sets one wants to see what the library says
MAX_WRITTEN_BYTES = 64 << 10

_log = logging.getLogger(__name__)

Place = tuple[str, int]


class NixlUnavailable(MemoryUnavailable):
    """There is no NIXL agent here. `reason`: absent, failed."""

    def __init__(self, text: str, reason: str = "failed") -> None:
        super().__init__(text)
        self.reason = reason


class NotYet(MemoryUnavailable):
    """There is none yet: it is being started, and another transport has to do until then."""


class ReadFailed(Exception):
    """A read ended without its bytes; none of it is written any more."""


class Body(Protocol):
    """What runs `serve`."""

    def kill(self) -> None: ...

    def wait(self) -> str:
        """Blocks until it has ended; how."""
        ...


class _Process:
    def __init__(self, theirs: socket.socket, descriptors: Sequence[int]) -> None:
        # What the library writes when it ends its process is told with the end; it is no line of the server's log.
        told = any(name in os.environ for name in LOG_SETTINGS)
        self._written = None if told else tempfile.TemporaryFile()  # noqa: SIM115 - closed by `wait`
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *descriptors],
            stdin=subprocess.DEVNULL,
            stderr=self._written,
            start_new_session=True,  # Ctrl-C is the engine's; the process ends with its socket
        )
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> str:
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        if self._written is not None:
            with self._written as written:
                written.seek(0)
                lines = written.read(MAX_WRITTEN_BYTES).decode(errors="replace").split("\n")
            said = next((line.strip() for line in lines if "atal" in line or "rror" in line), "")
            how += f": {said[:200]}" if said else ""
        return how


class _Thread:
    def __init__(self, theirs: socket.socket, attach: Callable[[], None]) -> None:
        own = socket.socket(fileno=os.dup(theirs.fileno()))
        self._thread = threading.Thread(target=serve, args=(own, attach), name="kv-nixl", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """It ends with its socket."""

    def wait(self) -> str:
        self._thread.join()
        return "its thread ended"


class _Session(asyncio.Protocol):
    """One life of the process."""

    def __init__(self, on_end: Callable[[_Session, str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[frames.Ready] = loop.create_future()
        self.over: asyncio.Future[str] = loop.create_future()
        self.opening: dict[int, asyncio.Future[None]] = {}
        self.reads: dict[int, tuple[int, float, asyncio.Future[int]]] = {}  # peer, begun, done
        self.ended: dict[int, float] = {}  # when the last read of a peer that is over has ended, by peer
        self.body: Body | None = None
        self._on_end = on_end
        self._loop = loop
        self._frames = frames.Frames(frames.Answer)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: frames.Request) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(request))

    def data_received(self, data: bytes) -> None:
        try:
            for answer in self._frames.feed(data):
                self._take(answer)
        except Exception:
            _log.exception("cache store: an answer of the NIXL process cannot be understood")
            self.kill()

    def _take(self, answer: object) -> None:
        if isinstance(answer, frames.Ended):
            entry = self.reads.pop(answer.number, None)
            if entry is not None:
                self.ended[entry[0]] = self._loop.time()
                _settle(entry[2], ReadFailed(answer.problem) if answer.problem else answer.word)
        elif isinstance(answer, frames.Opened):
            opening = self.opening.pop(answer.peer, None)
            if opening is not None:
                _settle(opening, MemoryUnavailable(answer.problem) if answer.problem else None)
        elif isinstance(answer, frames.Ready):
            if not self.ready.done():
                self.ready.set_result(answer)
        elif isinstance(answer, frames.Failed):
            _settle(self.ready, NixlUnavailable(answer.text, answer.reason))

    def kill(self) -> None:
        """Everything in it ends; that it has, `over` says."""
        if self.body is not None:
            self.body.kill()
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.body is not None
        self._loop.run_in_executor(None, self.body.wait).add_done_callback(self._ended)

    def _ended(self, how: asyncio.Future[str]) -> None:
        text = f"the NIXL process has ended ({how.result()})" if not how.cancelled() and not how.exception() else "?"
        _settle(self.ready, NixlUnavailable(text))
        for opening in self.opening.values():
            _settle(opening, MemoryUnavailable(text))
        for _, _, done in self.reads.values():
            _settle(done, ReadFailed(text))
        self.opening.clear()
        self.reads.clear()
        if not self.over.done():
            self.over.set_result(text)
        self._on_end(self, text)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    """With a result, or an exception as a failure."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
        future.exception()  # somebody may have stopped to wait for it
    else:
        future.set_result(result)


class NixlPeer:
    """A peer's memory in one life of the process."""

    def __init__(self, session: _Session, number: int, layers: dict[Place, tuple[int, int]]) -> None:
        """layers: index and bytes of each."""
        self.session = session
        self.number = number
        self.layers = layers
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """No read may be under way. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
            self._loop.call_soon_threadsafe(self.session.send, frames.Shut(self.number))


class NixlLink:
    """`name` has to differ from that of every other agent in the fleet."""

    def __init__(
        self,
        name: str,
        regions: Regions,
        observe: Observe = ignore,
        clock: Callable[[], float] = time.monotonic,
        words: LeaseWords | None = None,
    ) -> None:
        """`words`: those of this engine's leases, for peers to look at."""
        self._name = name
        self._words = None if words is None else words.file
        self._observe = observe
        self._regions = regions
        self._places = list(regions.sizes)
        self._index = {place: index for index, place in enumerate(self._places)}
        self._clock = clock
        self._session: _Session | None = None
        self._begun: _Session | None = None  # the last one, ready or not
        self._starting: asyncio.Task[_Session] | None = None
        self._failed: NixlUnavailable | None = None
        self._failed_at = 0.0
        self._numbers = itertools.count(1)
        self._restarting = False
        self._closing = False

    # ---- its life

    @property
    def session(self) -> _Session | None:
        """The process that runs and is ready; None when there is none."""
        session = self._session
        return session if session is not None and not session.over.done() else None

    def begin(self) -> None:
        """Starts it, unless it runs or is being started. Raises NixlUnavailable within RETRY_S of a failure."""
        if self._failed is not None:
            if self._clock() - self._failed_at < RETRY_S or self._failed.reason == "absent":
                raise self._failed
            self._failed = None
        if self.session is None and self._starting is None:
            # Its owner is this link: `close` ends it.
            self._starting = asyncio.get_running_loop().create_task(self._start())
            self._starting.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[_Session]) -> None:
        self._starting = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._session = task.result()
        else:
            failed = (
                error if isinstance(error, NixlUnavailable) else NixlUnavailable(f"{type(error).__name__}: {error}")
            )
            self._failed = failed
            self._failed_at = self._clock()
            self._observe("kv_transport_fallbacks_total", transport=NIXL, reason=failed.reason)
            _log.warning("cache store: transport nixl is not possible: %s", failed)

    async def running(self) -> _Session:
        """Starts it if need be, and waits until it is ready. Raises NixlUnavailable."""
        session = self.session
        if session is not None:
            return session
        self.begin()
        assert self._starting is not None
        try:
            return await asyncio.shield(self._starting)
        except NixlUnavailable:
            raise
        except Exception as error:
            raise NixlUnavailable(f"{type(error).__name__}: {error}") from error

    async def _start(self) -> _Session:
        loop = asyncio.get_running_loop()
        own, theirs = socket.socketpair()
        session = _Session(self._ended)
        making = loop.run_in_executor(None, self._make_body, theirs)
        try:
            own.setblocking(False)
            await settled([making])  # also when this is cancelled: it uses the socket
            session.body = making.result()
        except BaseException:
            own.close()
            if making.done() and not making.cancelled() and making.exception() is None:
                body = making.result()
                body.kill()
                await loop.run_in_executor(None, body.wait)
            raise
        finally:
            theirs.close()
        await loop.create_unix_connection(lambda: session, sock=own)
        self._begun = session
        regions = self._regions
        layers = [
            (regions.files[place].descriptor if place in regions.files else -1, regions.addresses.get(place, 0), size)
            for place, size in regions.sizes.items()
        ]
        words = (-1, 0, 0) if self._words is None else (self._words.descriptor, 0, self._words.view.nbytes)
        session.send(
            frames.Start(f"{self._name}-{secrets.token_hex(8)}", regions.memory, regions.device, layers, words)
        )
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(session.ready)
        except TimeoutError:
            raise NixlUnavailable(f"the NIXL process was not ready within {START_S:g} s") from None
        finally:
            if not session.ready.done() or session.ready.exception() is not None:
                session.kill()
        return session

    def _make_body(self, theirs: socket.socket) -> Body:
        if self._regions.memory == CUDA:
            return _Thread(theirs, self._regions.attach)
        files = [*self._regions.files.values(), *([] if self._words is None else [self._words])]
        return _Process(theirs, [file.descriptor for file in files])

    def _ended(self, session: _Session, how: str) -> None:
        if session is not self._session:
            return
        self._session = None
        if self._closing:
            return
        if not self._restarting:
            _log.warning("cache store: %s; it is started anew", how)
        self._restarting = False
        with contextlib.suppress(NixlUnavailable):
            self.begin()  # peers that use it come back at once

    def restart(self, why: str) -> None:
        """Ends everything that is under way, by the end of the process; a new one is started."""
        session = self.session
        if session is not None and not self._restarting:
            _log.warning("cache store: the NIXL process is ended and started anew: %s", why)
            self._restarting = True
            session.kill()

    async def close(self) -> None:
        """Returns when nothing is read or served any more; after CLOSE_S in any case."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._starting is not None:
                    self._starting.cancel()
                    await asyncio.wait([self._starting])
                session = self._begun
                if session is not None and not session.over.done():
                    session.kill()
                    await session.over

    # ---- the own memory

    def describe(self) -> pb.SharedPool:
        """How peers reach this memory. Raises NotYet while it is being started, NixlUnavailable when it cannot be."""
        session = self.session
        if session is None:
            self.begin()
            raise NotYet("the NIXL process is being started")
        ready = session.ready.result()
        regions = self._regions
        return pb.SharedPool(
            kind=KIND_CUDA if regions.memory == CUDA else KIND,
            agent=ready.agent,
            device=regions.device,
            layers=[
                pb.SharedLayer(group=group, layer=layer, offset=address, bytes=size)
                for ((group, layer), size), address in zip(regions.sizes.items(), ready.addresses, strict=True)
            ],
            words=None if self._words is None else pb.SharedLayer(offset=ready.words, bytes=self._words.view.nbytes),
        )

    # ---- memory of peers

    async def open(self, memory: pb.SharedPool) -> NixlPeer:
        """Opens a peer's memory and reads the first bytes of it. Raises MemoryUnavailable."""
        if memory.kind not in (KIND, KIND_CUDA):
            raise MemoryUnavailable(f"the peer's memory is of kind {memory.kind[:32]!r}, this one is {KIND!r}")
        if any(layer.offset + layer.bytes >= 1 << 64 for layer in (*memory.layers, memory.words)):
            raise MemoryUnavailable("a layer or the words of the peer are at no address")
        session = await self.running()
        number = next(self._numbers)
        layers = {(layer.group, layer.layer): (index, layer.bytes) for index, layer in enumerate(memory.layers)}
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        session.opening[number] = opened
        session.send(
            frames.Open(
                number,
                memory.agent,
                CUDA if memory.kind == KIND_CUDA else "",
                memory.device,
                [(layer.offset, layer.bytes) for layer in memory.layers],
                (memory.words.offset, memory.words.bytes),
                FIRST_READ_S,
            )
        )
        try:
            async with asyncio.timeout(2 * FIRST_READ_S):
                await asyncio.shield(opened)
        except (TimeoutError, asyncio.CancelledError) as error:
            session.opening.pop(number, None)
            session.send(frames.Shut(number))
            if isinstance(error, TimeoutError):
                raise MemoryUnavailable("the peer's memory could not be read in time") from None
            raise
        return NixlPeer(session, number, layers)

    def read(self, peer: NixlPeer, layers: range, source: Rows, target: Rows) -> asyncio.Future[int]:
        """Begins to read the same rows of each layer. The future is done, or fails with ReadFailed, once nothing of it
        is written any more."""
        rows = [np.asarray(each.numbers, np.int64).tobytes() for each in (source, target)]
        pairs = [(peer.layers[source.group, layer][0], self._index[target.group, layer]) for layer in layers]
        return self._ask(peer, lambda number: frames.Read(number, peer.number, pairs, source.unit_bytes, *rows))

    def look(self, peer: NixlPeer, index: int) -> asyncio.Future[int]:
        """Begins to read a word of the peer's leases. The future has it, or fails with ReadFailed."""
        return self._ask(peer, lambda number: frames.Look(number, peer.number, index))

    def _ask(self, peer: NixlPeer, request: Callable[[int], frames.Request]) -> asyncio.Future[int]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()
        session = peer.session
        if session.over.done() or (self._restarting and session is self._session):
            _settle(done, ReadFailed("the NIXL process has ended"))
            return done
        number = next(self._numbers)
        session.reads[number] = (peer.number, loop.time(), done)
        session.send(request(number))
        return done

    @staticmethod
    def under_way(peer: NixlPeer, since: float) -> int:
        """Reads of the peer that began at `since` (a time of the loop) or before, and have not ended."""
        reads = peer.session.reads.values()
        return sum(1 for number, begun, _ in reads if number == peer.number and begun <= since)

    @staticmethod
    def moved(peer: NixlPeer, since: float) -> bool:
        """Whether a read of the peer has ended after `since`."""
        return peer.session.ended.get(peer.number, 0.0) > since
