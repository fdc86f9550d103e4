"""P's end of an open load with the transport tcp: notices on the stream say what comes, a socket carries the bytes.

Runs are made ready (their blocks found, on a device copied out of it), their notices are sent, and their bytes are
queued for the socket, in the order of the notices. All three go on at once for runs that follow one another: `AHEAD`
batches are being made ready, and so much waits for the socket as `Source` says. Checksums are made while the bytes are
sent (tcp.connection.Outbound), by another worker where there are cores for it, and follow them. Out of host memory no
byte is copied on this side but by the kernel; out of a device each is copied once, into the slot from which it is sent.

A slot is held until its bytes were taken by the socket. When the peer does not keep up within a worker's turn
(tcp.connection.TURN_S), does not connect or does not read the stream, what is left of them is copied aside and the slot
is given back, so a slow peer costs memory for its own load, and no slot. And who has a slot does not wait for another
one.
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
from cache_store.geometry.rows import Rows
from cache_store.memory.pool import HostKvPool
from cache_store.memory.row_copies import check_rows, copy_rows
from cache_store.memory.staging import Slot, Staging, settled
from cache_store.serving.reader import Run
from cache_store.serving.sending import Link, Sender, announce, damaged
from cache_store.tcp.connection import Mover, Outbound, Transfer, sums_apart, views_of
from cache_store.tcp.listener import DataListener
from cache_store.transports import TCP
from protos import cache_store_pb2 as pb
from rpc import faults
from rpc.errors import BatonError, ErrorCode

AHEAD = 2
BATCH_BYTES = 4 << 20
QUEUED_BYTES = 8 << 20
# Views of a pool cost no memory of their own, and each event costs both ends' loops a moment that their workers lack.
VIEWED_BYTES = 64 << 20
INLINE_BYTES = 64 * 1024  # so much is gathered on the loop
GATHERED_ROW_BYTES = 2048  # rows that are smaller are gathered: a system call takes few views
CONNECT_S = 0.05  # for a peer that has been told of the first bytes to come for them
TAKE_S = 0.05  # for the stream to take what it is told
# The word of the peer itself, that it has given up or that the lease has ended, is on its way by the stream.
GRACE_S = 3.0


@dataclass(eq=False)
class Outgoing:
    """A run that is ready to be sent. `slot` is given back when its bytes are out of it."""

    run: Run
    blocks: list[int]
    transfer: Outbound
    slot: Slot | None = None


Chosen = list[tuple[Run, list[int]]]


class Source(ABC):
    """How the bytes of runs become views that can be sent."""

    def batch_bytes(self, run: Run) -> int:
        """Of the runs that are made ready together, from `run` on, once the first ones are under way."""
        return BATCH_BYTES

    def queued_bytes(self, run: Run) -> int:
        """How much may wait for the socket before more is made ready. `run`: the last one."""
        return QUEUED_BYTES

    @abstractmethod
    async def begin(self, sender: TcpSender, chosen: Chosen, wait: bool) -> asyncio.Future[list[Outgoing]] | None:
        """Begins to make runs ready. To cancel the future does not end the copy. None: there is no room now, for which
        it waits only with `wait`, since whoever has room already must not wait for more."""

    def give_back(self, outgoing: Outgoing) -> None:
        """Its bytes are no longer needed, or lie elsewhere. Idempotent."""
        return


class HostSource(Source):
    """Blocks in host memory: views of the pool."""

    def __init__(self, pool: HostKvPool) -> None:
        self._pool = pool

    def batch_bytes(self, run: Run) -> int:
        return BATCH_BYTES if _gathered(run) else VIEWED_BYTES

    def queued_bytes(self, run: Run) -> int:
        return QUEUED_BYTES if _gathered(run) else VIEWED_BYTES

    async def begin(self, sender: TcpSender, chosen: Chosen, wait: bool) -> asyncio.Future[list[Outgoing]]:
        loop = asyncio.get_running_loop()
        workers = sender.link.workers
        rows = [sender.rows(run, blocks) for run, blocks in chosen]
        copied = sum(each.nbytes for each in rows if each.unit_bytes < GATHERED_ROW_BYTES)
        if copied >= INLINE_BYTES and workers is not None:
            return loop.run_in_executor(workers, self._make, sender, chosen, rows)
        made: asyncio.Future[list[Outgoing]] = loop.create_future()
        made.set_result(self._make(sender, chosen, rows))
        return made

    def _make(self, sender: TcpSender, chosen: Chosen, rows: list[Rows]) -> list[Outgoing]:
        return [sender.pack(run, blocks, self._views(each)) for (run, blocks), each in zip(chosen, rows, strict=True)]

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

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def batch_bytes(self, run: Run) -> int:
        return 1  # one run

    async def begin(self, sender: TcpSender, chosen: Chosen, wait: bool) -> asyncio.Future[list[Outgoing]] | None:
        ((run, blocks),) = chosen
        ring, rows = self._staging.reads, sender.rows(run, blocks)
        large = rows.nbytes > ring.slot_bytes
        slot = None if large else ring.try_take()
        if slot is None and not wait:
            return None
        made: asyncio.Future[list[Outgoing]] = asyncio.get_running_loop().create_future()
        if large:
            whole = await self._gather(sender, rows)
            made.set_result([sender.pack(run, blocks, [whole])])
            return made
        slot = slot or await ring.take()
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
        made: asyncio.Future[list[Outgoing]],
        sender: TcpSender,
        chosen: Chosen,
        slot: Slot,
        size: int,
        failure: BaseException | None,
    ) -> None:
        try:
            if failure is not None:
                raise failure
            ((run, blocks),) = chosen
            outgoing = sender.pack(run, blocks, [slot.view[:size]])
            outgoing.slot = slot
            made.set_result([outgoing])
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


def _gathered(run: Run) -> bool:
    """Whether the rows of a run may be so small that they are copied together."""
    return run.wanted.positions is not None or run.wanted.partition_count > 1


class TcpSender(Sender):
    transport = TCP

    def __init__(self, link: Link, listener: DataListener, source: Source) -> None:
        super().__init__(link)
        self.link = link
        self._listener = listener
        self._source = source
        self._expected = listener.expect()
        self._mover: Mover | None = None
        self._making: deque[asyncio.Future[list[Outgoing]]] = deque()
        self._next: Chosen = []  # taken from the reader, and no room for them yet
        self._sending: dict[Transfer, Outgoing] = {}
        self._unsent = 0  # bytes of it
        self._moved: asyncio.Future[None] | None = (
            None  # of whoever waits until there are no more of them than `_limit`
        )
        self._limit = 0
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grace: asyncio.TimerHandle | None = None
        self._held_up = False  # the peer takes nothing now
        self._unread = False  # nor what it is told
        self._clean = False
        self._parted = False  # the connection is the listener's again

    # ---- for the source

    def rows(self, run: Run, blocks: list[int]) -> Rows:
        return run.wanted.rows(run.layer, blocks, self._reader.lease.blocks[run.wanted.layout.tag])

    def check_stop(self) -> None:
        self._check_stop()

    def pack(self, run: Run, blocks: list[int], views: list[memoryview]) -> Outgoing:
        """Called by any thread."""
        transfer = Outbound(views, checksum.covered(self._link.checksum, run.layer, blocks[0]))
        if self._damaged(run):
            transfer.damage([memoryview(damaged(b"".join(views)))])
        return Outgoing(run, blocks, transfer)

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
        while len(self._making) < ahead and (chosen := self._next or await self._next_batch()):
            self._next = []
            made = await self._source.begin(self, chosen, wait=not self._making)
            if made is None:
                self._next = chosen
                break
            self._making.append(made)
            made.add_done_callback(self._made)
            if made.done():
                break  # there is nothing to wait for that could be done meanwhile
        if not self._making:
            return False
        await self._or_stop(self._making[0])
        ready: list[Outgoing] = []
        size = 0
        while self._making and self._making[0].done() and size < BATCH_BYTES:
            for outgoing in self._making.popleft().result():
                self._sending[outgoing.transfer] = outgoing  # whatever happens, its slot is given back
                self._unsent += outgoing.transfer.size
                ready.append(outgoing)
                size += outgoing.transfer.size
        notices: list[pb.Notice] = []
        for outgoing in ready:
            announce(notices, outgoing.run, outgoing.blocks)
        effect = await self._announce(notices, ready)
        if effect & faults.DROP:
            for outgoing in ready:
                self._sent(outgoing.transfer)
            return True
        mover = self._mover or await self._connect()
        for outgoing in ready:
            if sums_apart(outgoing.transfer.views):
                outgoing.transfer.sum_ahead(self._workers())
            mover.put(outgoing.transfer)
        await self._or_moved(self._source.queued_bytes(ready[-1].run))
        return True

    async def _announce(self, notices: list[pb.Notice], ready: list[Outgoing]) -> int:
        """Before the bytes of which they speak, which no worker has yet. What a fault point has changed."""

        def late() -> None:
            self._unread = True
            for outgoing in ready:
                self._set_aside(outgoing)
            self._set_made_aside()

        timer = asyncio.get_running_loop().call_later(TAKE_S, late)
        try:
            effect = await self._say(pb.LoadEvent(notices=notices), "pieces")
            await self._flush()
        finally:
            timer.cancel()
            self._unread = False
        return effect

    async def _next_batch(self) -> Chosen:
        """The next runs that are ready, less what a fault point drops; empty when none is."""
        chosen: Chosen = []
        size, limit = 0, 1
        while size < limit and (run := self._reader.next_run()) is not None:
            limit = 1 if faults.armed() else self._source.batch_bytes(run)
            if self._mover is None:
                limit = min(limit, BATCH_BYTES)
            blocks = await self._chosen(run)
            if blocks:
                chosen.append((run, blocks))
                size += run.wanted.piece_bytes * len(blocks)
        return chosen

    async def _drain(self) -> None:
        await self._or_moved(0)

    async def _connect(self) -> Mover:
        """The peer connects when it has the first notice."""
        self._listener.await_token(self._expected)
        waiting = (self._expected.connection, self._stopped)
        await asyncio.wait(waiting, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._expected.connection.done():
            self._hold_up()
        await self._or_stop(self._expected.connection)
        self._held_up = False
        self._mover = Mover(
            self._expected.connection.result(),
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

    async def _or_moved(self, limit: int) -> None:
        """Until no more bytes than that wait for the socket. Nobody is woken sooner."""
        if self._unsent > limit:
            self._limit = limit
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
        self._unsent -= transfer.size
        if self._unsent <= self._limit and self._moved is not None and not self._moved.done():
            self._moved.set_result(None)
        self._reader.sent(len(outgoing.blocks), self._link.clock())
        self._link.observe("kv_transfer_bytes_total", transfer.size, transport=TCP, direction="sent")

    def _turned(self, moved: int, held_up: bool) -> None:
        if moved:
            self._reader.sent(0, self._link.clock())
        self._held_up = held_up
        if held_up:  # no worker has the transfers now
            self._hold_up()

    def _hold_up(self) -> None:
        self._held_up = True
        for outgoing in self._sending.values():
            self._set_aside(outgoing)
        self._set_made_aside()

    def _set_made_aside(self) -> None:
        for made in self._making:
            if made.done():
                self._made(made)

    def _made(self, made: asyncio.Future[list[Outgoing]]) -> None:
        if (self._held_up or self._unread) and not made.cancelled() and made.exception() is None:
            for outgoing in made.result():
                self._set_aside(outgoing)

    def _set_aside(self, outgoing: Outgoing) -> None:
        """Gives the slot back, because the peer is slow."""
        if outgoing.slot is not None:
            outgoing.transfer.replace([memoryview(b"".join(outgoing.transfer.views))])
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
        self._hold_up()  # no worker has anything any more

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

    def _let_go(self, making: list[asyncio.Future[list[Outgoing]]]) -> None:
        self._making.clear()
        for future in making:
            if not future.cancelled() and future.exception() is None:
                for outgoing in future.result():
                    self._source.give_back(outgoing)
        for outgoing in self._sending.values():
            self._source.give_back(outgoing)
        self._sending.clear()
        arrived = self._expected.connection
        if self._parted or not arrived.done() or arrived.cancelled() or arrived.exception() is not None:
            return
        self._parted = True
        self._listener.give_back(arrived.result(), self._clean)
