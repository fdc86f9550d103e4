"""D's end of one leg of a load with the transport tcp: bytes of the socket go straight to their places in the pool.

Notices say which blocks come next, so their places are known before the bytes are there: in host memory the kernel
writes them to these (`HostTarget`); on the way to a device it writes them into a slot (`StagedTarget`). What lies there
is hashed, and its blocks count only when that is what the checksum behind them says. A failed load may leave half of a
block behind, or a damaged one, whose numbers may be none (NaN): in host memory its blocks have to be wiped
(`events.LoadFailed.foreign`).

A slot is held while bytes flow. When the sender does not keep up within a worker's turn (tcp.connection.TURN_S), what
has come is copied aside and the slot is given back until the rest is here, so a slow peer holds memory and no slot.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from cache_store.checksum import digest
from cache_store.geometry.pieces import Piece
from cache_store.loading.landing import Landing, places
from cache_store.loading.load import Load, LoadState, WantedHere, breach
from cache_store.loading.peers import Peer
from cache_store.memory.pool import HostKvPool
from cache_store.memory.staging import Slot, Staging, Ticket, settled
from cache_store.tcp.connection import (
    TOKEN_BYTES,
    ConnectionEnded,
    Inbound,
    Mover,
    Transfer,
    sums_apart,
    views_of,
)
from cache_store.tcp.dialer import DataDialer
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode

AHEAD = 4  # events of one load that have a slot
# The peer's own cause, which says more than the end of its socket does, is on its way by the stream. It ends its socket
# first, and may be held up before it says why; one that has gone ends the stream at once as well.
GRACE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Incoming:
    """Blocks of one layer whose bytes are on their way."""

    piece: Piece
    wanted: WantedHere
    written: asyncio.Future[None]  # done when nothing of it is under way any more, whatever became of it
    transfer: Inbound | None = None  # once there is memory for it
    views: list[memoryview] = field(default_factory=list)  # where all its bytes are to be found when they have come
    slot: Slot | None = None
    aside: memoryview | None = None

    @property
    def size(self) -> int:
        return self.piece.nbytes


class Target(ABC):
    """Where bytes go from the socket."""

    def try_place(self, incoming: Incoming, placed: int) -> list[memoryview] | None:
        """Memory for the bytes of an event, when so many events have some; None: `place` has to wait for it."""
        return None

    @abstractmethod
    async def place(self, incoming: Incoming) -> list[memoryview]:
        """Memory for the bytes of an event. May wait for room."""

    @abstractmethod
    def finish(self, incoming: Incoming, then: Callable[[BaseException | None], None]) -> None:
        """They are there and verified. Calls `then` once they are in the pool, or with why they are not."""

    def set_aside(self, incoming: Incoming) -> None:
        """The peer is slow. No worker has the transfer now."""
        return

    def drop(self, incoming: Incoming) -> None:
        """Nothing more comes, and no worker has the transfer. Idempotent."""
        return


class HostTarget(Target):
    """Host memory: bytes are in the pool as soon as they are read."""

    def __init__(self, pool: HostKvPool) -> None:
        self._pool = pool

    def try_place(self, incoming: Incoming, placed: int) -> list[memoryview]:
        rows = places(incoming.wanted, incoming.piece)
        return views_of(self._pool.layer(rows.group, rows.layer), rows)

    async def place(self, incoming: Incoming) -> list[memoryview]:
        return self.try_place(incoming, 0)

    def finish(self, incoming: Incoming, then: Callable[[BaseException | None], None]) -> None:
        then(None)


class StagedTarget(Target):
    """A device: bytes are read into a slot, from which they are copied."""

    def __init__(self, staging: Staging, after: Ticket | None) -> None:
        """`after`: a point of the computation up to which the blocks may still be in use."""
        self._staging = staging
        self._after = after
        self._late: set[asyncio.Task[None]] = set()

    def try_place(self, incoming: Incoming, placed: int) -> list[memoryview] | None:
        ring = self._staging.writes
        if incoming.size > ring.slot_bytes:
            raise BatonError(
                ErrorCode.READ_BUFFER_MISMATCH,
                "an event is larger than agreed",
                metadata={"bytes": f"{incoming.size} / {ring.slot_bytes}"},
            )
        if placed >= AHEAD or (slot := ring.try_take()) is None:
            return None
        incoming.slot = slot
        return [slot.view[: incoming.size]]

    async def place(self, incoming: Incoming) -> list[memoryview]:
        slot = incoming.slot = await self._staging.writes.take()
        return [slot.view[: incoming.size]]

    def finish(self, incoming: Incoming, then: Callable[[BaseException | None], None]) -> None:
        if incoming.slot is not None:
            self._write(incoming, then)
            return
        # Its owner is this target until it has called `then`, which the landing waits for.
        task = asyncio.get_running_loop().create_task(self._write_later(incoming, then))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _write_later(self, incoming: Incoming, then: Callable[[BaseException | None], None]) -> None:
        assert incoming.aside is not None
        try:
            slot = incoming.slot = await self._staging.writes.take()
            slot.view[: incoming.size] = incoming.aside
        except BaseException as error:
            self.drop(incoming)
            then(error)
            raise
        self._write(incoming, then)

    def _write(self, incoming: Incoming, then: Callable[[BaseException | None], None]) -> None:
        slot = incoming.slot
        assert slot is not None
        try:
            ticket = self._staging.copies.write(slot, places(incoming.wanted, incoming.piece), self._after)
        except Exception as error:
            self.drop(incoming)
            then(error)
            return
        self._after = None  # copies into the pool keep their order, so the first one waits for all

        def written(failure: BaseException | None) -> None:
            self.drop(incoming)
            then(failure)

        self._staging.when_written(ticket, written)

    def set_aside(self, incoming: Incoming) -> None:
        if incoming.slot is None:
            return
        assert incoming.transfer is not None
        views = incoming.transfer.views
        incoming.aside = memoryview(bytearray(incoming.size))
        come = incoming.size - incoming.transfer.left
        incoming.aside[:come] = incoming.slot.view[:come]
        incoming.views = [incoming.aside]
        views.clear()
        if come < incoming.size:
            views.append(incoming.aside[come:])
        self.drop(incoming)

    def drop(self, incoming: Incoming) -> None:
        slot, incoming.slot = incoming.slot, None
        if slot is not None:
            self._staging.writes.give(slot)


class TcpLanding(Landing):
    def __init__(
        self,
        dialer: DataDialer,
        peer: Peer,
        target: Target,
        workers: Executor,
        wake: Callable[[], object],
    ) -> None:
        """`wake` ends the wait for the stream's next event after a failure."""
        self._dialer = dialer
        self._address, self._port, self._engine_id = peer.address, peer.data_port, peer.engine_id
        self._target = target
        self._workers = workers
        self._wake = wake
        self._load: Load | None = None
        self._token = b""
        self._mover: Mover | None = None
        self._open: dict[Transfer, Incoming] = {}  # not in the pool yet
        self._waiting: deque[Incoming] = deque()  # for memory
        self._placing: asyncio.Task[None] | None = None
        self._left: list[asyncio.Future[None]] = []  # of those who wait for one to leave `_open`
        self._failure: BatonError | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._broken = False  # nothing is received any more
        self._cause: BatonError | None = None  # why, unless the stream says more
        self._over = False

    async def begin(self, load: Load, started: pb.Started) -> None:
        """The peer's data port is not needed before the first block is ready, which may take as long as the prompt."""
        if len(started.data_token) != TOKEN_BYTES:
            load.fail_with(breach("a data token that is none"))
        self._load, self._token = load, started.data_token

    async def _connect(self, load: Load) -> Mover:
        try:
            connection = await self._dialer.take(self._address, self._port, self._engine_id)
        except BatonError as error:
            load.fail_with(error)
        mover = self._mover = Mover(
            connection,
            self._workers,
            sending=False,
            done=self._received,
            failed=self._fail,
            turned=self._turned,
        )
        try:
            connection.say(self._token)
        except ConnectionEnded as error:
            load.fail_with(_reset(error))
        return mover

    async def store(self, load: Load, piece: Piece, data: memoryview) -> None:
        self.check(load)
        wanted = load.expect(piece, data.nbytes)
        load.on_taken(piece)
        if self._broken:
            return  # the stream brings the cause, or its end does
        mover = self._mover or await self._connect(load)
        for part in piece.each_layer():
            self._await_bytes(load, mover, Incoming(part, wanted, asyncio.get_running_loop().create_future()))

    def _await_bytes(self, load: Load, mover: Mover, incoming: Incoming) -> None:
        views = None
        if not self._waiting:
            try:
                views = self._target.try_place(incoming, len(self._open))
            except BatonError as error:
                load.fail_with(error)
        if views is not None:
            self._receive(mover, incoming, views)
            return
        # The stream is read on, for the end of the load may be the next that it says.
        self._waiting.append(incoming)
        if self._placing is None:
            self._placing = asyncio.get_running_loop().create_task(self._place_waiting(mover))

    def _receive(self, mover: Mover, incoming: Incoming, views: list[memoryview]) -> None:
        assert self._load is not None
        incoming.views = views
        transfer = incoming.transfer = Inbound(views, self._load.covers(incoming.piece), sums_apart(views))
        self._open[transfer] = incoming
        mover.put(transfer)
        if mover.held_up:  # no turn is under way at whose end it would be noticed
            self._target.set_aside(incoming)

    async def _place_waiting(self, mover: Mover) -> None:
        """Its owner is this landing, which ends it in `quiet`."""
        while self._waiting:
            while len(self._open) >= AHEAD:
                await self._one_left()
            views = await self._target.place(self._waiting[0])
            self._receive(mover, self._waiting.popleft(), views)
        self._placing = None

    async def _one_left(self) -> None:
        left = asyncio.get_running_loop().create_future()
        self._left.append(left)
        await left

    def check(self, load: Load) -> None:
        if self._failure is not None:
            load.fail_with(self._failure)
        if self._over:
            raise load.on_timeout()

    def give_up(self) -> None:
        self._over = True
        self._notify()

    def _notify(self) -> None:
        for left in self._left:
            if not left.done():
                left.set_result(None)
        self._left.clear()

    async def settle(self, load: Load) -> None:
        while self._open or self._waiting:
            if self._broken:
                self._fail_now()
            self.check(load)
            await self._one_left()
        self.check(load)
        if self._mover is not None and not self._mover.connection.silent():
            load.fail_with(breach("bytes on the data connection that were not announced, or its end too soon"))

    # ---- of the mover

    def _received(self, transfer: Transfer) -> None:
        incoming = self._open[transfer]
        assert isinstance(transfer, Inbound)
        if not transfer.summed:
            self._target.finish(incoming, partial(self._finished, incoming))
        elif transfer.apart:
            hashing = asyncio.get_running_loop().run_in_executor(self._workers, digest, list(incoming.views))
            hashing.add_done_callback(partial(self._hashed, incoming, transfer.said))
        else:
            self._verify(incoming, *transfer.sums())

    def _hashed(self, incoming: Incoming, said: int, hashing: asyncio.Future[int]) -> None:
        failure = None if hashing.cancelled() else hashing.exception()
        if hashing.cancelled() or failure is not None or self._failure is not None:
            self._target.drop(incoming)
            self._end(incoming)
            if failure is not None:
                self._fail_with(_not_written(failure))
            return
        self._verify(incoming, hashing.result(), said)

    def _verify(self, incoming: Incoming, have: int, said: int) -> None:
        load = self._load
        assert load is not None
        try:
            if load.state is LoadState.FAILED:
                raise load.error or _not_written(RuntimeError())
            load.compare(incoming.piece, have, said)
        except BatonError as error:
            self._target.drop(incoming)
            self._end(incoming)
            self._fail_with(error)
            return
        self._target.finish(incoming, partial(self._finished, incoming))

    def _finished(self, incoming: Incoming, failure: BaseException | None) -> None:
        load = self._load
        assert load is not None
        if failure is None and load.state is not LoadState.FAILED:
            try:
                load.on_delivered(incoming.piece)
            except Exception as error:  # of a metric; the load ends, and does not wait for what was not counted
                failure = error
        self._end(incoming)
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            self._fail_with(_not_written(failure))

    def _end(self, incoming: Incoming) -> None:
        if incoming.transfer is not None:
            self._open.pop(incoming.transfer, None)
        if not incoming.written.done():
            incoming.written.set_result(None)
        self._notify()

    def _turned(self, moved: int, held_up: bool) -> None:
        assert self._load is not None and self._mover is not None
        if moved:
            self._load.moved()
        if held_up:
            for transfer in self._mover.queued:
                self._target.set_aside(self._open[transfer])

    def _fail(self, error: Exception) -> None:
        """Nothing comes any more, and no worker has anything."""
        self._broken = True
        if self._placing is not None:
            self._placing.cancel()
        if self._mover is not None:
            for transfer in self._mover.queued:
                self._target.drop(self._open[transfer])
        if isinstance(error, ConnectionEnded):
            self._cause = _reset(error)
            self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._fail_now)
        else:
            _log.error("receiving KV failed", exc_info=error)
            self._cause = _not_written(error)
            self._fail_now()
        self._notify()

    def _fail_now(self) -> None:
        assert self._cause is not None
        self._fail_with(self._cause)

    def _fail_with(self, error: BatonError) -> None:
        if self._failure is None:
            self._failure = error
            self._wake()
        self._notify()

    # ---- the end

    async def quiet(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        mover, load = self._mover, self._load
        if mover is None or load is None:
            return
        complete = load.state is LoadState.COMPLETE and not self._open and not self._waiting
        if not complete:
            mover.stop()
        if self._placing is not None:
            self._placing.cancel()
        try:
            if self._placing is not None:
                await settled([self._placing])
            await mover.ended()
        finally:
            for transfer in mover.queued:
                incoming = self._open[transfer]
                self._target.drop(incoming)
                self._end(incoming)
            if complete and mover.idle and mover.connection.silent():
                mover.connection.proven = True
                self._dialer.give(self._address, self._engine_id, mover.connection)
            else:
                mover.stop()
                mover.connection.close()
            self._mover = None
            await settled([incoming.written for incoming in self._open.values()])


def _reset(error: Exception) -> BatonError:
    return BatonError(
        ErrorCode.CONNECTION_RESET_BY_PEER,
        "the prefill server closed the data connection",
        metadata={"error": str(error)[:128]},
    )


def _not_written(error: BaseException) -> BatonError:
    return BatonError(
        ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR,
        "writing the KV into the pool failed",
        metadata={"error": type(error).__name__},
    )
