"""The front's end of its engine: starts it, talks to it, and notices its death at once.

Torch-free. Belongs to one asyncio event loop. The front talks to the engine process, with several ranks to that of rank
0, over two `ipc://` sockets in a private folder, which is removed as soon as both are connected, so that nothing is
left on disk whoever dies first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from engine.config import EngineConfig
from engine.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    EngineEnvelope,
    EngineReady,
    EngineStats,
    FrontMessage,
    ProfileNews,
    ProfileOrder,
    RequestOutput,
    StepMessage,
)
from engine.rank_processes import FAILED, STOPPED, RankProcesses, error_of
from engine.sockets import descriptor, has_message
from rpc.errors import BatonError, ErrorCode

__all__ = ["EngineClient", "EngineConfig", "RequestStream", "error_of"]

STREAM_CAPACITY = 1024
CONNECT_RETRY_S = 0.01


class RequestStream:
    """News of one request, in order: an asynchronous iterator of `RequestOutput` that ends after the last
    one.

    Holds at most `capacity` outputs that were not read yet. At that bound the request is aborted and the
    reader gets OUTPUT_QUEUE_FULL after what it had; when the engine dies, ENGINE_DEAD. Errors of the request
    itself are outputs.
    """

    def __init__(self, request_key: str, capacity: int = STREAM_CAPACITY) -> None:
        self.request_key = request_key
        self._capacity = capacity
        self._outputs: deque[RequestOutput] = deque()
        self._failure: BatonError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def complete(self) -> bool:
        """Whether the last output has come, read or not."""
        return self._ended

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Waits for the next output. Cancelling the wait loses nothing. One reader at a time."""
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError(f"two readers of the stream of {self.request_key}")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._outputs.popleft()

    def _put(self, output: RequestOutput) -> bool:
        """False: the bound is reached, and the stream has failed because of it."""
        if self._ended or self._failure is not None:
            return True
        if len(self._outputs) >= self._capacity and not output.last:
            message = "the answer was not read as fast as it was generated; read it faster"
            self._fail(BatonError(ErrorCode.OUTPUT_QUEUE_FULL, message))
            return False
        self._outputs.append(output)
        self._ended = output.last
        self._wake()
        return True

    def _fail(self, error: BatonError) -> None:
        if not self._ended and self._failure is None:
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine and everything that is open on it.

    `on_step` is called with each step's message after the readers of its outputs have had their turn. `stats` are the
    engine's latest. `dead` is set when the engine has ended, for whatever reason, and `death` then says why; every open
    stream fails with it. An engine of several ranks ends with the first of them. Nothing is restarted here: the front
    exits and its supervisor starts both anew.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ready: EngineReady | None = None
        self.stats = EngineStats()
        self.on_step: Callable[[StepMessage], None] | None = None
        self.dead = asyncio.Event()
        self.death: BatonError | None = None
        self._heard_at = 0.0  # when its last message came; 0: not ready yet
        self._streams: dict[str, RequestStream] = {}
        self._profiles: dict[int, asyncio.Future[ProfileNews]] = {}
        self._numbers = itertools.count(1)
        self._pending = FrontMessage()
        self._flush_handle: asyncio.Handle | None = None
        self._ranks = RankProcesses(config, on_death=self._die, last_words=self._last_words)
        self._folder: Path | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._to_engine: zmq.Socket[bytes] | None = None
        self._from_engine: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hello: asyncio.Future[None] | None = None
        self._started: asyncio.Future[EngineReady] | None = None
        self._stopping = False
        self._failed = False  # the engine has said why it ends
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineEnvelope)

    @property
    def pid(self) -> int | None:
        """Of rank 0."""
        return next(iter(self._ranks.pids), None)

    @property
    def pids(self) -> list[int]:
        """Of all ranks, in order."""
        return self._ranks.pids

    @property
    def size(self) -> int:
        """How many ranks the engine has."""
        return self._ranks.size

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    async def start(self, timeout_s: float) -> EngineReady:
        """Starts the engine and waits until it serves.

        Raises the engine's own BatonError when it reports one, ENGINE_DEAD when it exits without a word or is
        not ready in time. After a failure nothing is left running.
        """
        if self._loop is not None:
            raise RuntimeError("an EngineClient starts its engine once")
        self._loop = loop = asyncio.get_running_loop()
        self._hello = loop.create_future()
        self._started = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn(timeout_s)
                await self._hello
                self._remove_folder()
                self.ready = await self._started
                self.stats = self.ready.stats
                self._heard_at = time.monotonic()
                self._ranks.serving = True
        except TimeoutError:
            await self._kill()
            message = f"the engine was not ready within {timeout_s:g} s; see its log on stderr"
            raise BatonError(ErrorCode.ENGINE_DEAD, message) from None
        except BaseException:
            await self._kill()
            raise
        return self.ready

    def submit(self, request: AddRequest) -> RequestStream:
        """Hands a request to the engine and returns its stream. Does not block.

        Raises ENGINE_DEAD, or DUPLICATE_REQUEST for a key that is open.
        """
        if self.death is not None:
            raise self.death
        if self._to_engine is None or self._stopping:
            raise BatonError(ErrorCode.ENGINE_DEAD, "the engine is not running")
        if request.request_key in self._streams:
            message = "a request with this key is open; use a new key per attempt"
            raise BatonError(ErrorCode.DUPLICATE_REQUEST, message)
        stream = RequestStream(request.request_key)
        self._streams[request.request_key] = stream
        self._pending.adds.append(request)
        self._schedule_flush()
        return stream

    def abort(self, request_key: str, code: ErrorCode = ErrorCode.CANCELLED, source: str = "client") -> None:
        """Ends a request in whatever state it is; its stream gets a last output with `code` unless it has
        ended.

        An unknown key is passed on too: KV that stays staged after the answer ends, a load that comes later
        is refused.
        """
        if self._to_engine is None or self.death is not None:
            return
        self._pending.aborts.append(AbortRequest(request_key, int(code), source))
        self._schedule_flush()

    def flush_cache(self) -> None:
        """Drops every prefix-cache block that no request uses."""
        self._pending.flush_cache = True
        self._schedule_flush()

    async def profile(self, *, start: bool) -> ProfileNews:
        """Starts recording what the engine does, or stops it and waits for the file.

        Raises DUPLICATE_REQUEST for a second start, INVALID_PARAMS for a stop without one, EXECUTION_EXCEPTION when the
        profiler or the disk fails, ENGINE_DEAD.
        """
        if self.death is not None:
            raise self.death
        if self._to_engine is None or self._loop is None or self._stopping:
            raise BatonError(ErrorCode.ENGINE_DEAD, "the engine is not running")
        order = ProfileOrder(next(self._numbers), start)
        answer: asyncio.Future[ProfileNews] = self._loop.create_future()
        self._profiles[order.number] = answer
        self._pending.profiles.append(order)
        self._schedule_flush()
        try:
            news = await answer
        finally:
            self._profiles.pop(order.number, None)
        if news.error is not None:
            raise error_of(news.error)
        return news

    async def stop(self, grace_s: float) -> None:
        """Ends every open request with SERVER_DRAINING, and the process: by message, after `grace_s` by
        SIGKILL.

        May be called again, and before `start`.
        """
        self._stopping = True
        if self.ready is not None and not self.dead.is_set() and self._to_engine is not None:
            self._pending.shutdown = True
            self._flush()
            self._ranks.expect_end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.dead.wait()
        await self._kill()

    # -- process ----------------------------------------------------------------------------------------

    async def _spawn(self, timeout_s: float) -> None:
        self._folder = socket_folder()
        inbox, outbox = (f"ipc://{self._folder}/{name}" for name in ("to-engine", "from-engine"))
        self._context = zmq.Context(io_threads=1)
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self._to_engine.bind(inbox)
        self._from_engine.bind(outbox)
        assert self._loop is not None
        self._loop.add_reader(descriptor(self._from_engine), self._receive)
        await self._ranks.start(inbox, outbox, timeout_s)
        # The engine answers this message with its hello: then both sockets are connected.
        self._flush()

    async def _kill(self) -> None:
        await self._ranks.close()
        self._die(BatonError(ErrorCode.ENGINE_DEAD, "the engine was stopped"))
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._from_engine is not None:
            assert self._loop is not None
            self._loop.remove_reader(descriptor(self._from_engine))
            self._from_engine.close(0)
            self._from_engine = None
        if self._to_engine is not None:
            self._to_engine.close(0)
            self._to_engine = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _die(self, cause: BatonError) -> None:
        """Marks the engine dead. The first cause stays."""
        if self.death is None:
            self.death = cause
        for future in (self._hello, self._started, *self._profiles.values()):
            if future is not None and not future.done():
                future.set_exception(self.death)
                future.exception()  # retrieved: whoever waits gets it, nobody is told that nobody waited
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._fail(self.death)
        self.dead.set()

    # -- messages ---------------------------------------------------------------------------------------

    def _schedule_flush(self) -> None:
        """Everything that comes up in one turn of the event loop travels as one message."""
        if self._flush_handle is None and self._loop is not None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends what is pending. While the engine has not connected yet, it stays pending."""
        self._flush_handle = None
        if self._to_engine is None or self._loop is None:
            return
        try:
            self._to_engine.send(self._encoder.encode(self._pending), zmq.NOBLOCK)
        except zmq.Again:
            self._flush_handle = self._loop.call_later(CONNECT_RETRY_S, self._flush)
        else:
            self._pending = FrontMessage()

    def _receive(self) -> None:
        while self._from_engine is not None and has_message(self._from_engine):
            frame = self._from_engine.recv(zmq.NOBLOCK)
            try:
                envelope = self._decoder.decode(frame)
            except msgspec.MsgspecError as error:
                # Nobody can say which request it was about, so none may wait for what it said.
                message = "the engine's message cannot be read; front and engine must be of one version"
                self.death = self.death or BatonError(ErrorCode.ENGINE_DEAD, message, metadata={"cause": str(error)})
                self._ranks.kill()
                return
            self._take(envelope)

    def _last_words(self, status: int) -> bool:
        """Reads on after the engine has ended with `status`; whether it has said all that an end like that brings."""
        self._receive()
        return {STOPPED: not self._streams, FAILED: self._failed}.get(status, True)

    def _take(self, envelope: EngineEnvelope) -> None:
        if envelope.step is not None:
            self._take_step(envelope.step)
        elif envelope.hello is not None:
            if envelope.hello.protocol_version != PROTOCOL_VERSION:
                message = "front and engine are of different versions; install one version"
                self._die(BatonError(ErrorCode.INCOMPATIBLE_PEER, message))
            elif self._hello is not None and not self._hello.done():
                self._hello.set_result(None)
        elif envelope.ready is not None:
            if self._started is not None and not self._started.done():
                self._started.set_result(envelope.ready)
        elif envelope.profile is not None:
            answer = self._profiles.get(envelope.profile.number)
            if answer is not None and not answer.done():
                answer.set_result(envelope.profile)
        elif envelope.failed is not None:
            self._failed = True
            # The process is about to exit; the streams then end with this cause, or with that of a rank that was first.
            self._ranks.failed(0, error_of(envelope.failed.error))

    @property
    def silent_s(self) -> float:
        """Seconds without a word of an engine that is ready: about one at rest, else those of a step."""
        return time.monotonic() - self._heard_at if self._heard_at else 0.0

    def _take_step(self, step: StepMessage) -> None:
        self._heard_at = time.monotonic()
        if step.stats is not None:
            self.stats = step.stats
        streams = self._streams
        for output in step.outputs:
            stream = streams.get(output.request_key)
            if stream is None:
                continue
            if output.last:
                del streams[output.request_key]
            if not stream._put(output):
                self.abort(output.request_key, ErrorCode.OUTPUT_QUEUE_FULL, "error")
        if self._loop is not None:
            self._loop.call_soon(self._step_taken, step)

    def _step_taken(self, step: StepMessage) -> None:
        if self.on_step is not None:
            self.on_step(step)


def socket_folder() -> Path:
    """A new folder for sockets: in the folder for temporary files, or in /tmp where names of sockets in it would be
    longer than the system takes."""
    room = zmq.IPC_PATH_MAX_LEN - len("/baton-engine-12345678/from-engine")
    fits = len(os.fsencode(tempfile.gettempdir())) <= room
    return Path(tempfile.mkdtemp(prefix="baton-engine-", dir=None if fits else "/tmp"))
