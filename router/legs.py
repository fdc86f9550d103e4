"""The two calls that serve a request: `Prefill.Prefill` and `Decode.Decode`, and the aborts that end them early.

A leg is complete only by its own terminal status. Whoever gives one up leaves it to `Aborts`: an `Abort` tells the
server why, so that nothing stays staged or reserved however the call itself fares, and then the call is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import grpc
import grpc.aio

from protos import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from router.mailbox import Mailbox
from router.pairing import Role
from router.worker import Worker
from rpc.channels import ChannelPool, Connection
from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry as Metrics
from rpc.server import DEADLINE_TOLERANCE_S
from rpc.stages import StageClock, enter_stage
from rpc.status import details_payload, from_rpc_error, parse_status
from rpc.timeline import read_timeline
from rpc.tracing import CallSpan, to_ns

AbortSource = Literal["client", "deadline", "peer", "error", "drain"]
RpcMetadata = tuple[tuple[str, str], ...]

_log = logging.getLogger(__name__)


class End:
    """What a leg that ended in order says last."""


END = End()

Payload = prefill_pb2.PrefillResponse | decode_pb2.DecodeEvent | BatonError | End
Letter = tuple["Leg | None", Payload]


def abort_source(cause: BatonError) -> AbortSource:
    """Who asked for the end of a request that failed, or was left, with `cause`."""
    match cause.code:
        case ErrorCode.CANCELLED:
            return "client"
        case ErrorCode.GENERATE_TIMEOUT:
            return "deadline"
        case ErrorCode.SERVER_DRAINING:
            return "drain"
    return "peer"


class LegTasks:
    """The tasks of all legs and aborts of a router: none outlives it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, timeout_s: float) -> None:
        """Lets aborts that are on their way arrive, then cancels what is left."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Aborts:
    """Sends `Abort` to servers on tasks of its own, so that giving up never waits.

    A server hears why its request ends before it sees what follows from that, a cancelled call or KV that is gone: it
    would take it for a cause. So a call is cancelled once the server has been told, and the next server is told then;
    one that does not answer holds this up for `tell_s`.
    """

    def __init__(
        self,
        pool: ChannelPool,
        metrics: Metrics,
        tasks: LegTasks,
        *,
        timeout_s: float = 2.0,
        attempts: int = 2,
        pause_s: float = 0.2,
        tell_s: float = 0.1,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._tell_s = tell_s
        self._attempts = attempts
        self._pause_s = pause_s

    def give_up(self, legs: Sequence[Leg], code: ErrorCode, source: AbortSource) -> None:
        """Ends legs that were left, in this order. Never blocks. A server that is gone needs no abort; one that cannot
        be reached has its lease and deadline."""
        for leg in legs:
            self._metrics.inc("baton_aborts_total", leg=leg.role, source=source)
        if legs:
            self._tasks.spawn(self._give_up(legs, int(code), source))

    async def _give_up(self, legs: Sequence[Leg], code: int, source: str) -> None:
        try:
            for leg in legs:
                tried = asyncio.Event()
                self._tasks.spawn(self._send(leg.role, leg.worker.address, leg.key, code, source, tried))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._tell_s):
                        await tried.wait()
                leg.cut()
        finally:
            for leg in legs:
                leg.cut()

    async def _send(self, role: Role, address: str, key: str, code: int, source: str, tried: asyncio.Event) -> None:
        """Sets `tried` once the server has answered, or could not be reached."""
        try:
            await self._send_until_heard(role, address, key, code, source, tried)
        finally:
            tried.set()

    async def _send_until_heard(
        self, role: Role, address: str, key: str, code: int, source: str, tried: asyncio.Event
    ) -> None:
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._pause_s)
            try:
                channel = self._pool.get(address)
                if role == "prefill":
                    await prefill_pb2_grpc.PrefillStub(channel).Abort(
                        prefill_pb2.PrefillAbortRequest(request_key=key, code=code, source=source),
                        timeout=self._timeout_s,
                    )
                else:
                    await decode_pb2_grpc.DecodeStub(channel).Abort(
                        decode_pb2.DecodeAbortRequest(request_key=key, code=code, source=source),
                        timeout=self._timeout_s,
                    )
                return
            except grpc.RpcError as exc:
                self._pool.check(address)
                _log.debug("abort of %s at %s failed: %s", key, address, exc)
                tried.set()
            except BatonError as error:  # the pool is closed
                _log.debug("abort of %s not sent: %s", key, error)
                return


class Leg:
    """One call to one server. Its news go to the mailbox as `(leg, payload)`; the last is END, an answer or an error.

    `ended` is set by whoever takes the last letter out (`end`); until then the leg has to be left, and cut off.
    """

    role: Role

    def __init__(
        self,
        worker: Worker,
        key: str,
        *,
        pool: ChannelPool,
        tasks: LegTasks,
        mailbox: Mailbox[Letter],
        deadline: Deadline,
        max_rpc_s: float | None,
        metadata: RpcMetadata,
        clock: Callable[[], float] = time.monotonic,
        span: CallSpan | None = None,
        queued: int = 0,
        context: int = 0,
    ) -> None:
        """queued, context: tokens to compute there, and of the prompt that is generated after there."""
        self.worker = worker
        self.key = key
        self._span = span
        self.began = clock()
        self.last_event = self.began
        # The server itself ended it: there is nothing left to abort there.
        self.ended_by_server = False
        self.ended = False
        self._pool = pool
        self._deadline = deadline
        self._mailbox = mailbox
        self._clock = clock
        self._left = False
        # It has the prompt's KV, loaded or computed by itself, and generates.
        self.generating = False
        # Of the stage of the router that this leg is; None when it is none of them.
        self.clock: StageClock | None = None
        stage = self._stage()
        if stage is not None:
            self.clock = StageClock((stage,), clock)
            enter_stage(self.clock)
        # What the server told about its own stages when it failed, if the client asked for that.
        self.told_seconds: dict[str, float] = {}
        self._guard = worker.enter(queued, context)
        self.worker.breaker.begin()
        try:
            self._connection = pool.connection(worker.address)
            self._call = self._open(self._connection, deadline.timeout(max_rpc_s), metadata)
        except BaseException:
            self._guard.release()
            self.worker.breaker.neutral()
            raise
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        # Not at once: the leg that is opened next is to be on its way before this one is listened to.
        asyncio.get_running_loop().call_soon(self._listen)

    def _listen(self) -> None:
        if not self._left:
            self._task = self._tasks.spawn(self._run())

    def _stage(self) -> str | None:
        """The stage of the router that this leg is."""
        raise NotImplementedError

    def _open(self, connection: Connection, timeout_s: float | None, metadata: RpcMetadata) -> Any:
        raise NotImplementedError

    async def _read(self) -> None:
        raise NotImplementedError

    async def _run(self) -> None:
        try:
            await self._read()
        except asyncio.CancelledError:
            if not self._left:
                # Nobody here cancelled the call, so the loop is ending.
                self._mailbox.put((self, BatonError(ErrorCode.CANCELLED, "the router is shutting down")))
            raise
        except grpc.RpcError as exc:
            self._mailbox.put((self, self._typed(exc)))
        except Exception as exc:
            _log.exception("reading the %s leg of %s failed", self.role, self.key)
            error = BatonError(ErrorCode.UNKNOWN_ERROR, metadata={"exception": type(exc).__name__})
            self._mailbox.put((self, error))

    def _typed(self, exc: grpc.RpcError) -> BatonError:
        self._pool.check(self.worker.address)
        self.ended_by_server = parse_status(_details(exc)) is not None
        self.told_seconds = read_timeline(_trailers(exc))
        error = from_rpc_error(
            exc,
            leg=self.role,
            deadline_passed=self._deadline.remaining() <= DEADLINE_TOLERANCE_S,
            was_ready=self._connection.was_ready(),
            loaded=self.generating,
        )
        if error.code is ErrorCode.CANCELLED and not self.ended_by_server:
            # The router did not ask for it: the server's process cut its calls.
            message = f"the {self.role} server gave the request up"
            error = BatonError(ErrorCode.CONNECTION_RESET_BY_PEER, message, metadata=error.metadata)
        return error.with_context(peer=self.worker.address, leg=self.role)

    def end(self, error: BatonError | None, *, blamed: bool = True) -> None:
        """The leg ended, in order or with `error`; `blamed` False when the failure was another server's doing."""
        if self.ended:
            return
        self.ended = True
        if self._span is not None:
            self._span.finish(to_ns(self._clock()), error="" if error is None else error.code.name)
        self._guard.release()
        breaker = self.worker.breaker
        if error is None:
            breaker.success()
        elif blamed and error.spec.breaker:
            breaker.failure()
        else:
            breaker.neutral()

    def computed(self) -> None:
        """The prompt is computed. May be called again."""
        self._guard.computed()

    def leave(self) -> None:
        """Nobody waits for the call any more, which has to be cut off unless the server has ended it. Idempotent."""
        self._left = self._left or not self.ended_by_server
        if not self.ended:
            self.ended = True
            if self._span is not None:
                self._span.finish(to_ns(self._clock()), cancelled=True)
            self._guard.release()
            self.worker.breaker.neutral()

    def cut(self) -> None:
        """Cancels the call of a leg that was left, if the server has not ended it. Idempotent."""
        if self._left and not self.ended_by_server:
            self._call.cancel()
            if self._task is not None:
                self._task.cancel()

    def silent_s(self, now: float) -> float:
        return now - self.last_event


def _trailers(exc: grpc.RpcError) -> Iterable[tuple[str, str | bytes]]:
    metadata_of = getattr(exc, "trailing_metadata", None)
    return (metadata_of() if callable(metadata_of) else None) or ()


def _details(exc: grpc.RpcError) -> bytes | None:
    return details_payload(_trailers(exc))


class PrefillLeg(Leg):
    """`Prefill.Prefill`: one answer. `hold_kv`: the prompt's KV stays staged there after it."""

    role: Role = "prefill"

    def __init__(self, request: prefill_pb2.PrefillRequest, worker: Worker, key: str, **common: Any) -> None:
        self.hold_kv = request.hold_kv
        self.answered = False
        self._request = request
        super().__init__(worker, key, **common)

    def _stage(self) -> str | None:
        return "prefill"

    def _open(self, connection: Connection, timeout_s: float | None, metadata: RpcMetadata) -> Any:
        stub = connection.stub(prefill_pb2_grpc.PrefillStub)
        return stub.Prefill(self._request, timeout=timeout_s, metadata=metadata)

    async def _read(self) -> None:
        response = await self._call
        self.last_event = self._clock()
        self.worker.heard()
        # From here on something may be staged, also if nobody takes the letter any more.
        self.ended_by_server = self.answered = True
        self._mailbox.put((self, response))


class DecodeLeg(Leg):
    """`Decode.Decode`: a stream of events. Not read, it is held back by flow control."""

    role: Role = "decode"

    def __init__(self, request: decode_pb2.DecodeRequest, worker: Worker, key: str, **common: Any) -> None:
        self.local = request.HasField("local_prefill")
        self.reserved = False
        # The KV came from the prefill server, which has freed its own.
        self.loaded = False
        self._request = request
        super().__init__(worker, key, **common)

    def _stage(self) -> str | None:
        return None if self.local else "reserve"

    def _open(self, connection: Connection, timeout_s: float | None, metadata: RpcMetadata) -> Any:
        stub = connection.stub(decode_pb2_grpc.DecodeStub)
        return stub.Decode(self._request, timeout=timeout_s, metadata=metadata)

    async def _read(self) -> None:
        mailbox, worker, clock = self._mailbox, self.worker, self._clock
        async for event in self._call:
            self.last_event = clock()
            worker.heard()
            mailbox.put((self, event))
            await mailbox.room()
        self.ended_by_server = True
        mailbox.put((self, END))
