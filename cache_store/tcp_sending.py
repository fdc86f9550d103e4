"""P's end of an open load with the transport tcp: notices on the stream say what comes, a socket carries the bytes.

Runs are made ready (their blocks found, on a device copied out of it, their checksums made), their notices are sent,
and their bytes are queued for the socket, in the order of the notices. All three go on at once for runs that follow one
another: `AHEAD` batches are being made ready, and `QUEUED_BYTES` wait for the socket. Out of host memory no byte is
copied on this side but by the kernel; out of a device each is copied once, into the slot from which it is sent.

A slot is held until its bytes were taken by the socket. When the peer does not keep up within a worker's turn
(data_connection.TURN_S), what is left of them is copied aside and the slot is given back, so a slow peer costs memory
for its own load, and no slot.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cache_store import checksum
from cache_store.data_connection import DataConnection, Mover, Transfer, views_of
from cache_store.data_listener import DataListener
from cache_store.pool import HostKvPool
from cache_store.reader import Run
from cache_store.row_copies import check_rows, copy_rows
from cache_store.rows import Rows
from cache_store.sending import Link, Sender, damaged
from cache_store.staging import Slot, Staging, settled
from cache_store.transports import TCP
from protos import cache_store_pb2 as pb
from rpc import faults
from rpc.errors import BatonError, ErrorCode

AHEAD = 2
BATCH_BYTES = 4 << 20
QUEUED_BYTES = 8 << 20
NOTICE_BYTES = 4 << 20  # an event that speaks of so much is sent
INLINE_BYTES = 64 * 1024  # checksums of so much are made on the loop
GATHERED_ROW_BYTES = 2048  # rows that are smaller are gathered: a system call takes few views
# The word of the peer itself, that it has given up or that the lease has ended, is on its way by the stream.
GRACE_S = 1.0


@dataclass(frozen=True)
class Part:
    """Blocks of a run, and what is said of them."""

    run: Run
    blocks: list[int]
    sums: list[int]


@dataclass(eq=False)
class Outgoing:
    """Runs that are ready to be sent, one after the other. `slot` is given back when their bytes are out of it."""

    parts: list[Part]
    transfer: Transfer
    slot: Slot | None = None


Chosen = list[tuple[Run, list[int]]]


class Source(ABC):
    """How the bytes of runs become views that can be sent. `batch_bytes`: of the runs that are made ready together."""

    batch_bytes: int

    @abstractmethod
    async def begin(self, sender: TcpSender, chosen: Chosen) -> asyncio.Future[Outgoing]:
        """Begins to make runs ready. May wait for room. To cancel the future does not end the copy."""

    def give_back(self, outgoing: Outgoing) -> None:
        """Its bytes are no longer needed, or lie elsewhere. Idempotent."""
        return


class HostSource(Source):
    """Blocks in host memory: views of the pool."""

    batch_bytes = BATCH_BYTES

    def __init__(self, pool: HostKvPool) -> None:
        self._pool = pool

    async def begin(self, sender: TcpSender, chosen: Chosen) -> asyncio.Future[Outgoing]:
        loop = asyncio.get_running_loop()
        rows = [sender.rows(run, blocks) for run, blocks in chosen]
        workers = sender.link.workers
        work = sum(
            each.nbytes
            for each, (run, blocks) in zip(rows, chosen, strict=True)
            if each.unit_bytes < GATHERED_ROW_BYTES or sender.covered(run, blocks)
        )
        if work >= INLINE_BYTES and workers is not None:
            return loop.run_in_executor(workers, self._make, sender, chosen, rows)
        made: asyncio.Future[Outgoing] = loop.create_future()
        made.set_result(self._make(sender, chosen, rows))
        return made

    def _make(self, sender: TcpSender, chosen: Chosen, rows: list[Rows]) -> Outgoing:
        return sender.pack(chosen, [self._views(each) for each in rows])

    def _views(self, rows: Rows) -> list[memoryview]:
        layer = self._pool.layer(rows.group, rows.layer)
        if rows.unit_bytes >= GATHERED_ROW_BYTES:
            return views_of(layer, rows)
        check_rows(rows, layer.nbytes)
        gathered = memoryview(bytearray(rows.nbytes))
        copy_rows(layer, rows, gathered, Rows(rows.group, rows.layer, rows.unit_bytes, range(len(rows.numbers))))
        return [gathered]


class StagedSource(Source):
    """Blocks on a device: copied into a slot, and sent from there. A block that is larger than a slot goes through it
    in parts."""

    batch_bytes = 1  # one run

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    async def begin(self, sender: TcpSender, chosen: Chosen) -> asyncio.Future[Outgoing]:
        ((run, blocks),) = chosen
        ring, rows = self._staging.reads, sender.rows(run, blocks)
        made: asyncio.Future[Outgoing] = asyncio.get_running_loop().create_future()
        if rows.nbytes > ring.slot_bytes:
            whole = await self._gather(sender, rows)
            made.set_result(sender.pack(chosen, [[whole]]))
            return made
        slot = ring.try_take() or await ring.take()
        self._read(sender, rows, slot, partial(self._copied, made, sender, chosen, slot, rows.nbytes))
        return made

    def _read(self, sender: TcpSender, rows: Rows, slot: Slot, then: Callable[[BaseException | None], None]) -> None:
        try:
            sender.check_stop()  # the wait for the slot may have been long
            ticket = self._staging.copies.read(rows, slot)
        except BaseException:
            self._staging.reads.give(slot)
            raise
        self._staging.when_read(ticket, then)

    def _copied(
        self,
        made: asyncio.Future[Outgoing],
        sender: TcpSender,
        chosen: Chosen,
        slot: Slot,
        size: int,
        failure: BaseException | None,
    ) -> None:
        try:
            if failure is not None:
                raise failure
            outgoing = sender.pack(chosen, [[slot.view[:size]]])
            outgoing.slot = slot
            made.set_result(outgoing)
        except Exception as error:
            self._staging.reads.give(slot)
            made.set_exception(error)

    async def _gather(self, sender: TcpSender, rows: Rows) -> memoryview:
        ring, unit = self._staging.reads, rows.unit_bytes
        whole = memoryview(bytearray(rows.nbytes))
        step = ring.slot_bytes // unit
        for at in range(0, len(rows.numbers), step):
            part = Rows(rows.group, rows.layer, unit, rows.numbers[at : at + step])
            slot = ring.try_take() or await ring.take()
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            into = whole[at * unit : at * unit + part.nbytes]
            self._read(sender, part, slot, partial(self._part_copied, done, slot, into))
            await settled([done])
            done.result()
        return whole

    def _part_copied(
        self, done: asyncio.Future[None], slot: Slot, into: memoryview, failure: BaseException | None
    ) -> None:
        if failure is None:
            into[:] = slot.view[: into.nbytes]
            done.set_result(None)
        else:
            done.set_exception(failure)
        self._staging.reads.give(slot)

    def give_back(self, outgoing: Outgoing) -> None:
        slot, outgoing.slot = outgoing.slot, None
        if slot is not None:
            self._staging.reads.give(slot)


class TcpSender(Sender):
    transport = TCP

    def __init__(self, link: Link, listener: DataListener, source: Source) -> None:
        super().__init__(link)
        self.link = link
        self._listener = listener
        self._source = source
        self._expected = listener.expect()
        self._connection: DataConnection | None = None
        self._mover: Mover | None = None
        self._making: deque[asyncio.Future[Outgoing]] = deque()
        self._sending: dict[Transfer, Outgoing] = {}
        self._moved: asyncio.Future[None] | None = None  # of whoever waits for something to leave `_sending`
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grace: asyncio.TimerHandle | None = None
        self._held_up = False  # the peer takes nothing now
        self._clean = False

    # ---- for the source

    def rows(self, run: Run, blocks: list[int]) -> Rows:
        return run.wanted.rows(run.layer, blocks, self._reader.lease.blocks[run.wanted.layout.tag])

    def covered(self, run: Run, blocks: list[int]) -> bool:
        return checksum.covered(self._link.checksum, run.layer, blocks[0])

    def check_stop(self) -> None:
        self._check_stop()

    def pack(self, chosen: Chosen, views: list[list[memoryview]]) -> Outgoing:
        """views: of each run. Reads those once that have checksums. Called by any thread."""
        parts: list[Part] = []
        all_views: list[memoryview] = []
        for (run, blocks), each in zip(chosen, views, strict=True):
            sums = checksum.BlockSums(run.wanted.piece_bytes)
            if self.covered(run, blocks):
                for view in each:
                    sums.add(view)
            parts.append(Part(run, blocks, sums.sums))
            all_views += self._spoilt(each) if self._damaged(run) else each
        return Outgoing(parts, Transfer.of(all_views))

    def _spoilt(self, views: list[memoryview]) -> list[memoryview]:
        return [memoryview(damaged(b"".join(views)))]

    # ---- the stream

    def _started(self) -> pb.Started:
        started = super()._started()
        started.data_token = self._expected.token
        return started

    async def _run(self) -> None:
        await super()._run()
        self._clean = True

    async def _advance(self) -> bool:
        ahead = 1 if faults.armed() else AHEAD  # a fault point that delays one run delays no other
        while len(self._making) < ahead and (chosen := await self._next_batch()):
            made = await self._source.begin(self, chosen)
            self._making.append(made)
            made.add_done_callback(self._made)
        if not self._making:
            return False
        await self._or_stop(self._making[0])
        ready: list[Outgoing] = []
        size = 0
        while self._making and self._making[0].done() and size < NOTICE_BYTES:
            outgoing = self._making.popleft().result()
            self._sending[outgoing.transfer] = outgoing  # whatever happens, its slot is given back
            ready.append(outgoing)
            size += outgoing.transfer.size
        notices = [
            self._header(part.run, part.blocks, checksums=part.sums) for outgoing in ready for part in outgoing.parts
        ]
        effect = await self._write(pb.LoadEvent(notices=notices).SerializeToString(), "pieces")
        if effect & faults.DROP:
            for outgoing in ready:
                self._sent(outgoing.transfer)
            return True
        mover = self._mover or await self._connect()
        for outgoing in ready:
            mover.put(outgoing.transfer)
        while sum(transfer.size for transfer in self._sending) > QUEUED_BYTES:
            await self._or_moved()
        return True

    async def _next_batch(self) -> Chosen:
        """The next runs that are ready, less what a fault point drops; empty when none is."""
        chosen: Chosen = []
        size = 0
        limit = 1 if faults.armed() else self._source.batch_bytes
        while size < limit and (run := self._reader.next_run()) is not None:
            blocks = await self._chosen(run)
            if blocks:
                chosen.append((run, blocks))
                size += run.wanted.piece_bytes * len(blocks)
        return chosen

    async def _drain(self) -> None:
        while self._sending:
            await self._or_moved()

    async def _connect(self) -> Mover:
        """The peer connects when it has the first notice."""
        self._listener.await_token(self._expected)
        await self._or_stop(self._expected.connection)
        self._connection = self._expected.connection.result()
        self._mover = Mover(
            self._connection,
            self._workers(),
            sending=True,
            done=self._sent,
            failed=self._fail,
            turned=self._turned,
        )
        return self._mover

    def _workers(self) -> Any:
        assert self._link.workers is not None
        return self._link.workers

    async def _or_moved(self) -> None:
        self._moved = asyncio.get_running_loop().create_future()
        await self._or_stop(self._moved)

    async def _or_stop(self, future: asyncio.Future[Any]) -> None:
        """Returns when the future is done; raises when the lease ends or the connection breaks before."""
        waiting: set[asyncio.Future[Any]] = {future, self._stopped, self._broken}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        self._check_stop()
        if self._broken.done() and not future.done():
            self._broken.result()

    # ---- of the mover

    def _sent(self, transfer: Transfer) -> None:
        outgoing = self._sending.pop(transfer)
        self._source.give_back(outgoing)
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)
        self._reader.sent(sum(len(part.blocks) for part in outgoing.parts), self._link.clock())
        self._link.observe("kv_transfer_bytes_total", transfer.size, transport=TCP, direction="sent")

    def _turned(self, moved: int, held_up: bool) -> None:
        if moved:
            self._reader.sent(0, self._link.clock())
        self._held_up = held_up
        if held_up:  # no worker has the transfers now
            for outgoing in self._sending.values():
                self._set_aside(outgoing)
            for made in self._making:
                if made.done():
                    self._made(made)

    def _made(self, made: asyncio.Future[Outgoing]) -> None:
        if self._held_up and not made.cancelled() and made.exception() is None:
            self._set_aside(made.result())

    def _set_aside(self, outgoing: Outgoing) -> None:
        """Gives the slot back, because the peer is slow."""
        if outgoing.slot is not None:
            views = outgoing.transfer.views
            rest = memoryview(b"".join(views))
            views.clear()
            if rest.nbytes:
                views.append(rest)
            self._source.give_back(outgoing)

    def _fail(self, error: Exception) -> None:
        def give_up() -> None:
            if not self._broken.done():
                self._broken.set_exception(
                    BatonError(
                        ErrorCode.CONNECTION_RESET_BY_PEER,
                        "the decode server closed the data connection",
                        metadata={"error": str(error)[:128]},
                    )
                )
                self._broken.exception()  # looked at: perhaps nobody waits any more

        self._grace = asyncio.get_running_loop().call_later(GRACE_S, give_up)

    # ---- the end

    async def _quiet(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        self._listener.forget(self._expected)
        mover, making = self._mover, list(self._making)
        try:
            if mover is not None:
                if not self._clean:
                    mover.stop()
                await mover.ended()
        finally:
            try:
                await settled(making)
            finally:
                self._let_go(making)

    def _let_go(self, making: list[asyncio.Future[Outgoing]]) -> None:
        self._making.clear()
        for future in making:
            if not future.cancelled() and future.exception() is None:
                self._source.give_back(future.result())
        for outgoing in self._sending.values():
            self._source.give_back(outgoing)
        self._sending.clear()
        arrived = self._expected.connection
        if self._connection is None and arrived.done() and not arrived.cancelled() and arrived.exception() is None:
            self._connection = arrived.result()
        connection, self._connection = self._connection, None
        if connection is not None:
            self._listener.give_back(connection, self._clean)
