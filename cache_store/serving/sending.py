"""P's end of one open load, on the wire: sends what is ready, sleeps until something is, ends with the lease's own end.

How a block gets into an event is the business of the senders: out of host memory (`HostSender`), through the staging
ring of a device (`StagedSender`), or not at all, because the peer reads it where it lies (`NoticeSender`) or it goes
over a socket of its own (`tcp_sending.TcpSender`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from cache_store import checksum, wire
from cache_store.failures import again
from cache_store.geometry.pieces import flat_runs
from cache_store.geometry.rows import Rows
from cache_store.memory.pool import HostKvPool
from cache_store.memory.row_copies import copy_rows
from cache_store.memory.staging import Slot, Staging, settled
from cache_store.observations import Observe
from cache_store.serving.lease import LeaseState
from cache_store.serving.reader import Reader, Run
from cache_store.settings import AgentSettings
from protos import cache_store_pb2 as pb
from rpc import faults
from rpc.errors import BatonError, ErrorCode

HEARTBEAT_S = 0.05  # at most so often RUNNING is repeated while only blocks become ready that the reader does not want
MOST_LAYERS = 256  # of which one event of the one-sided transports speaks
# In the runs of one such event, unless a single layer has more: layers whose blocks differ, as those of several groups
# do, are said one by one, and the events of a long prompt with scattered blocks would be larger than gRPC takes.
MOST_NUMBERS = 1 << 17
# An event of host memory from this size on, a block that is larger than events are otherwise, is put together by a
# worker. For less, the change of threads costs more than the copy: a quarter of the rate of a load.
WORKER_BYTES = 2 << 20
WINDOW = 4  # events of one load that are being copied out of a device, or wait for their turn on the stream

_RUNNING = pb.LoadEvent(state=pb.COMPUTE_STATE_RUNNING)
_COMPUTED = pb.LoadEvent(state=pb.COMPUTE_STATE_COMPUTED)


@dataclass(frozen=True)
class Link:
    """One reader and the call that serves it. `let_go(reader, sent)` ends the reader's hold on the blocks."""

    settings: AgentSettings
    observe: Observe
    clock: Callable[[], float]
    let_go: Callable[[Reader, bool], None]
    reader: Reader
    checksum: str  # mode
    context: grpc.aio.ServicerContext[Any, Any]
    rank: int = 0  # of this side
    workers: Executor | None = None  # put large events together out of host memory


class Sender(ABC):
    """One stream. `run` returns after everything was sent, or raises why not; no copy of a block is under way then."""

    transport = "grpc"

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reader = link.reader
        self._changed = asyncio.Event()
        self._unsaid = pb.LoadEvent()
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.reader.notify = self._notify

    def _notify(self) -> None:
        self._changed.set()
        if self._reader.stop is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            await self._quiet()

    async def _run(self) -> None:
        reader, clock = self._reader, self._link.clock
        lease = reader.lease
        await self._say(pb.LoadEvent(started=self._started()), "started")
        await self._say(_RUNNING, "running")
        if not reader.direct:  # reading the blocks may fail, and only who knows their generation can load again
            await self._flush()
        computed = False
        told = lease.published
        told_at = clock()
        while True:
            self._changed.clear()
            if lease.state is LeaseState.COMPUTED and not computed:
                computed = True
                await self._say(_COMPUTED, "computed")
            if await self._advance():
                told, told_at = lease.published, clock()
            elif computed:
                break
            elif lease.published != told and (wait := told_at + HEARTBEAT_S - clock()) <= 0:
                # The reader's progress limit must not strike while the prompt advances in blocks it already has.
                await self._say(_RUNNING, "running")
                told, told_at = lease.published, clock()
            else:
                until_heartbeat = wait if lease.published != told else None
                await self._flush()
                await self._sleep(until_heartbeat)
        await self._drain()
        result = lease.result
        self._link.let_go(reader, True)
        await self._say(pb.LoadEvent(done=pb.Done(result=result, pieces=reader.pieces_sent)), "done")
        await self._flush()

    async def _sleep(self, until_heartbeat: float | None) -> None:
        """Until the lease changes; raises CACHE_STORE_LOAD_BUFFER_TIMEOUT when nothing happens for too long."""
        limit = self._link.settings.publish_timeout_s
        try:
            async with asyncio.timeout(limit if until_heartbeat is None else until_heartbeat):
                await self._changed.wait()
        except TimeoutError:
            if until_heartbeat is None:
                raise BatonError(
                    ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT,
                    "the prefill published no KV block in time",
                    metadata={"waited_s": f"{limit:g}"},
                ) from None
        self._check_stop()

    # ---- blocks

    @abstractmethod
    async def _advance(self) -> bool:
        """Sends the next event with blocks. False: nothing is ready now."""

    def _started(self) -> pb.Started:
        lease = self._reader.lease
        return pb.Started(generation=lease.generation, cached_blocks=lease.cached_blocks)

    async def _drain(self) -> None:
        """Returns when everything has been handed over."""
        return

    async def _quiet(self) -> None:
        """Returns when no copy reads the blocks. A cancellation takes effect afterwards."""
        return

    async def _chosen(self, run: Run) -> list[int]:
        """The blocks of a run, less what a fault point drops."""
        blocks = list(range(run.first, run.first + run.count))
        if faults.armed():
            blocks = [block for block in blocks if not await self._faulty(run, block)]
            self._check_stop()
        return blocks

    async def _faulty(self, run: Run, block: int) -> int:
        return await faults.fault_async(
            "cache_store.send_piece",
            key=self._reader.lease.key,
            group=run.wanted.layout.tag,
            layer=run.layer,
            block=block,
            rank=self._link.rank,
        )

    def _encode(self, run: Run, blocks: Sequence[int], views: Sequence[memoryview]) -> bytes:
        """The event with `blocks` of `run`, whose bytes are the views. Reads them, once."""
        wanted = run.wanted
        header = pb.PieceHeader(
            group=wanted.layout.tag,
            layer=run.layer,
            blocks=blocks,
            block_bytes=wanted.piece_bytes,
            checksum=checksum.digest(views) if checksum.covered(self._link.checksum, run.layer, blocks[0]) else None,
        )
        message = wire.encode_piece(header, views)
        if self._damaged(run):
            return damaged(message, len(message) - sum(view.nbytes for view in views))  # the payload comes last
        return message

    def _damaged(self, run: Run) -> bool:
        """Whether a fault point wants a byte of the payload to be another one. Asked once the checksum is made."""
        return faults.armed() and bool(
            faults.fault(
                "cache_store.piece_bytes",
                key=self._reader.lease.key,
                group=run.wanted.layout.tag,
                layer=run.layer,
                rank=self._link.rank,
            )
        )

    async def _send(self, message: bytes, pieces: int, size: int) -> None:
        """A piece event."""
        await self._flush()
        effect = await self._fault("pieces")
        if not effect & faults.DROP:
            await self._hand_over(message)
        if effect & faults.DUPLICATE:
            await self._hand_over(message)
        self._count_sent(pieces, size)

    def _count_sent(self, pieces: int, size: int) -> None:
        self._reader.sent(pieces, self._link.clock())
        self._link.observe("kv_transfer_bytes_total", size, transport=self.transport, direction="sent")

    # ---- the stream

    async def _fault(self, kind: str) -> int:
        """What the fault point `cache_store.send_event` does with the event of that kind."""
        if not faults.armed():
            return 0
        key = self._reader.lease.key
        return await faults.fault_async("cache_store.send_event", key=key, kind=kind, rank=self._link.rank)

    async def _say(self, part: pb.LoadEvent, kind: str) -> int:
        """Adds to what the next event says, which `_flush` sends: each costs both ends a turn of their loops. Returns
        what was changed by a fault point; while there are any, each part is an event of its own."""
        effect = await self._fault(kind)
        for _ in range((not effect & faults.DROP) + bool(effect & faults.DUPLICATE)):
            self._unsaid.MergeFrom(part)
            if faults.armed():
                await self._flush()
        return effect

    async def _flush(self) -> None:
        if self._unsaid.ByteSize():
            message = self._unsaid.SerializeToString()
            self._unsaid.Clear()
            await self._hand_over(message)

    async def _hand_over(self, message: bytes) -> None:
        """Hands an event to the transport; returns when it was accepted, raises when the lease ends meanwhile.

        The message is a copy, so the reader lets go of the blocks then, whether or not its peer takes the message.
        """
        self._check_stop()
        write = asyncio.ensure_future(self._link.context.write(message))
        try:
            await asyncio.wait({write, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                await write
            else:
                await self._quiet()
                self._link.let_go(self._reader, False)
            self._check_stop()
        finally:
            if not write.done():
                write.cancel()
                await settled([write])  # of the first one: once the status can follow it (rpc/stream_context.py)
            if not write.cancelled():
                write.exception()

    def _check_stop(self) -> None:
        stop = self._reader.stop
        if stop is not None:
            raise again(stop).with_context(
                delivered=str(self._reader.pieces_sent),
                missing=str(self._reader.pieces_wanted - self._reader.pieces_sent),
            )


def damaged(data: bytes, start: int = 0) -> bytes:
    """`data` with one byte changed in the middle of what begins at `start`: the upper one of a number of K or V that a
    token of the prompt has, whatever their type; the end of a last block may be of no token."""
    at = start + ((len(data) - start) // 2 & ~3) + 3
    return data[:at] + bytes((data[at] ^ 0x81,)) + data[at + 1 :]


class HostSender(Sender):
    """Blocks in host memory: each event is joined from views of the pool, when its turn has come; one that is larger
    than events usually are by a worker, so that the loop serves other peers meanwhile."""

    def __init__(self, link: Link, pool: HostKvPool) -> None:
        super().__init__(link)
        self._pool = pool
        self._copy: asyncio.Future[bytes] | None = None

    async def _advance(self) -> bool:
        run = self._reader.next_run()
        if run is None:
            return False
        blocks = await self._chosen(run)
        if blocks:
            size = run.wanted.piece_bytes * len(blocks)
            workers = self._link.workers
            if workers is None or size < WORKER_BYTES:
                message = self._join(run, blocks)
            else:
                self._copy = asyncio.get_running_loop().run_in_executor(workers, self._join, run, blocks)
                message = await asyncio.shield(self._copy)
                self._copy = None
            await self._send(message, len(blocks), size)
        return True

    async def _quiet(self) -> None:
        copy, self._copy = self._copy, None
        if copy is None:
            return
        try:
            await settled([copy])
        finally:
            if copy.done() and not copy.cancelled():
                copy.exception()  # looked at: the load has its cause already

    def _join(self, run: Run, blocks: list[int]) -> bytes:
        return self._encode(run, blocks, self._views(run, blocks))

    def _views(self, run: Run, blocks: list[int]) -> list[memoryview]:
        """Views of the pool, neighbours in the pool as one; or copies of the wanted share of the heads, or of blocks of
        another size."""
        wanted, layer = run.wanted, run.layer
        tag = wanted.layout.tag
        ids = self._reader.lease.blocks[tag]
        if wanted.positions is not None:
            rows = wanted.rows(layer, blocks, ids)
            gathered = memoryview(bytearray(rows.nbytes))
            into = Rows(tag, layer, rows.unit_bytes, range(len(rows.numbers)))
            copy_rows(self._pool.layer(tag, layer), rows, gathered, into)
            return [gathered]
        piece = self._pool.piece
        if wanted.partition_count > 1:
            ranges = wanted.layout.partition_ranges(wanted.partition_count, wanted.partition_id)
            whole = [piece(tag, layer, ids[block]) for block in blocks]
            return [memoryview(b"".join([view[start:stop] for start, stop in ranges])) for view in whole]
        views = []
        first = ids[blocks[0]]
        count = 1
        for block in blocks[1:]:
            if ids[block] == first + count:
                count += 1
            else:
                views.append(piece(tag, layer, first, count))
                first, count = ids[block], 1
        views.append(piece(tag, layer, first, count))
        return views


@dataclass(frozen=True)
class _Staged:
    """An event that is being copied out of the device; `message` is its bytes."""

    message: asyncio.Future[bytes]
    pieces: int
    size: int


class StagedSender(Sender):
    """Blocks on a device: up to WINDOW events are copied to the host ahead of the stream.

    A slot of the ring is held from the submission of its copy until the event is joined from it, so a peer that reads
    slowly holds none: it costs WINDOW events of host memory.
    """

    def __init__(self, link: Link, staging: Staging) -> None:
        super().__init__(link)
        self._staging = staging
        self._window: deque[_Staged] = deque()
        self._parts: list[asyncio.Future[None]] = []  # copies of a block that has no room in one slot
        self._next: tuple[Run, list[int]] | None = None  # taken from the reader, and no slot for it yet

    async def _advance(self) -> bool:
        ring = self._staging.reads
        while len(self._window) < WINDOW:
            if self._next is None:
                run = self._reader.next_run()
                if run is None:
                    break
                self._next = (run, await self._chosen(run))
            run, blocks = self._next
            if blocks and run.wanted.piece_bytes > ring.slot_bytes:
                if self._window:
                    break
                self._next = None
                await self._send_in_parts(run, blocks)
                return True
            if blocks:
                slot = ring.try_take()
                if slot is None and self._window:
                    break
                self._begin(run, blocks, slot or await ring.take())
            self._next = None
        if not self._window:
            return False
        staged = self._window[0]
        message = await asyncio.shield(staged.message)
        self._window.popleft()
        await self._send(message, staged.pieces, staged.size)
        return True

    async def _send_in_parts(self, run: Run, blocks: list[int]) -> None:
        """One block, of a peer whose blocks are larger than a slot, which is held for a part of it alone."""
        ring, rows = self._staging.reads, run.wanted.rows(run.layer, blocks, self._blocks_of(run))
        whole, unit = memoryview(bytearray(rows.nbytes)), rows.unit_bytes
        step = ring.slot_bytes // unit
        for at in range(0, len(rows.numbers), step):
            part = rows.part(at, step)
            slot = ring.try_take() or await ring.take()
            try:
                self._check_stop()
                ticket = self._staging.copies.read(part, slot)
            except BaseException:
                ring.give(slot)
                raise
            copy: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._parts = [copy]
            into = whole[at * unit : at * unit + part.nbytes]
            self._staging.when_read(ticket, partial(self._part_copied, copy, slot, into))
            await asyncio.shield(copy)
        self._parts = []
        await self._send(self._encode(run, blocks, [whole]), len(blocks), rows.nbytes)

    def _part_copied(
        self, copy: asyncio.Future[None], slot: Slot, into: memoryview, failure: BaseException | None
    ) -> None:
        try:
            if failure is not None:
                raise failure
            into[:] = slot.view[: into.nbytes]
            copy.set_result(None)
        except Exception as error:
            copy.set_exception(error)
        finally:
            self._staging.reads.give(slot)

    def _blocks_of(self, run: Run) -> list[int]:
        return self._reader.lease.blocks[run.wanted.layout.tag]

    def _begin(self, run: Run, blocks: list[int], slot: Slot) -> None:
        wanted = run.wanted
        try:
            self._check_stop()  # the wait for the slot may have been long
            rows = wanted.rows(run.layer, blocks, self._blocks_of(run))
            ticket = self._staging.copies.read(rows, slot)
        except BaseException:
            self._staging.reads.give(slot)
            raise
        message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._window.append(_Staged(message, len(blocks), rows.nbytes))
        self._staging.when_read(ticket, partial(self._copied, message, run, blocks, slot, rows.nbytes))

    def _copied(
        self,
        message: asyncio.Future[bytes],
        run: Run,
        blocks: list[int],
        slot: Slot,
        size: int,
        failure: BaseException | None,
    ) -> None:
        try:
            if failure is not None:
                raise failure
            message.set_result(self._encode(run, blocks, [slot.view[:size]]))
        except Exception as error:
            message.set_exception(error)
        finally:
            self._staging.reads.give(slot)

    async def _quiet(self) -> None:
        copies: list[asyncio.Future[Any]] = [*(staged.message for staged in self._window), *self._parts]
        self._window.clear()
        self._parts = []
        try:
            await settled(copies)
        finally:
            for copy in copies:
                if not copy.cancelled():
                    copy.exception()  # looked at: the load has its cause already


def announce(notices: list[pb.Notice], run: Run, blocks: Sequence[int], ids: Sequence[int] | None = None) -> None:
    """Adds blocks of a run to `notices`: to the last one, when they are the same ones of the next layer. `ids`: of the
    request's blocks at this engine, when the peer reads them there."""
    last = notices[-1] if notices else None
    flat = flat_runs(blocks)
    if (
        last is not None
        and last.group == run.wanted.layout.tag
        and last.layer + last.num_layers == run.layer
        and last.block_runs == flat
    ):
        last.num_layers += 1
        return
    notices.append(
        pb.Notice(
            group=run.wanted.layout.tag,
            layer=run.layer,
            num_layers=1,
            block_runs=flat,
            block_bytes=run.wanted.piece_bytes,
            source_runs=[] if ids is None else flat_runs(run.wanted.sources(blocks, ids)),
        )
    )


class NoticeSender(Sender):
    """Blocks that the peer reads in this engine's memory: events say which are ready, and where they lie."""

    def __init__(self, link: Link, transport: str = "ipc") -> None:
        super().__init__(link)
        self.transport = transport

    def _started(self) -> pb.Started:
        started = super()._started()
        word = self._reader.lease.word
        if word is not None:
            started.word.index, started.word.value = word
        return started

    async def _advance(self) -> bool:
        notices: list[pb.Notice] = []
        pieces = size = layers = numbers = 0
        while layers < MOST_LAYERS and numbers < MOST_NUMBERS and (run := self._reader.next_run()) is not None:
            layers += 1
            blocks = await self._chosen(run)
            if not blocks:
                continue
            before = len(notices)
            announce(notices, run, blocks, self._reader.lease.blocks[run.wanted.layout.tag])
            numbers += sum(len(notice.block_runs) + len(notice.source_runs) for notice in notices[before:])
            taken = 1
            # The layers that follow mostly have the same blocks, unless a fault point has a say in each.
            while layers < MOST_LAYERS and not faults.armed() and self._reader.take_same(run, run.layer + taken):
                layers += 1
                taken += 1
            notices[-1].num_layers += taken - 1
            pieces += taken * len(blocks)
            size += taken * run.wanted.piece_bytes * len(blocks)
        if notices:
            await self._say(pb.LoadEvent(notices=notices), "pieces")
            if numbers >= MOST_NUMBERS:
                await self._flush()
            self._count_sent(pieces, size)
        return bool(notices)
