"""One-sided reads: copies that this side makes by itself out of KV memory that a peer has shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Protocol

from cache_store.geometry.rows import Rows
from cache_store.memory.lease_words import WordReader, open_words
from cache_store.memory.pool import HostKvPool
from cache_store.memory.row_copies import RowCopy, check_rows
from cache_store.memory.shared_memory import MappedPool
from cache_store.memory.staging import PeerMemory, Staging, Ticket, settled
from protos import cache_store_pb2 as pb

Part = tuple[range, asyncio.Future[None]]

_NUMBERS_BYTES = 16  # of a pair of row numbers
_LEAST_JOB_BYTES = 2 << 20  # of one worker, where there are more layers than workers
_MOST_JOB_BYTES = 64 << 20  # each that ends is a sign of progress
_JOBS_PER_WORKER = 2  # so that one that is slow has the others take its share


class Fetcher(Protocol):
    """Reads out of the memory of peers, for one transport. Belongs to the agent's loop."""

    transport: str
    in_order: bool  # copies begin in the order of `begin`, so that what the first one waits for holds for all

    async def open(self, memory: pb.SharedPool) -> PeerMemory:
        """What a peer of the handshake offers. Raises MemoryUnavailable, whose text says why."""
        ...

    def begin(
        self, memory: PeerMemory, layers: range, source: Rows, target: Rows, after: Ticket | None
    ) -> AsyncIterator[Part]:
        """Begins to copy rows of the peer's memory to as many rows, of the same size, of this engine's pool, in each of
        the layers (`source` and `target` are those of the first one). Gives each copy that has begun, with its layers.

        May wait for room. A copy's future is done when the bytes are there, or when none of them comes any more and
        why; to cancel it does not end the copy. `after`: a point of the computation up to which the rows are still in
        use. Raises IndexError, before the first copy, for rows that the peer's memory does not have.
        """
        ...

    def words(self, memory: PeerMemory, shared: pb.SharedPool) -> WordReader | None:
        """Those of the leases of a peer that shows some and whose memory is open. None: it has to be asked."""
        ...

    def usable(self, memory: PeerMemory) -> bool:
        """False: what was opened is of no use any more, and the peer has to be asked anew."""
        ...

    def give_up(self, memory: PeerMemory) -> None:
        """A load has ended while copies from there are under way, for which its blocks are held."""
        ...

    def close(self) -> None:
        """No copy is under way."""
        ...


async def _opened(opens: Callable[[pb.SharedPool], PeerMemory], memory: pb.SharedPool) -> PeerMemory:
    """What a thread opens. Of a caller that is cancelled meanwhile it is closed again."""
    opening = asyncio.ensure_future(asyncio.to_thread(opens, memory))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_opened)
        raise


def _close_opened(opening: asyncio.Future[PeerMemory]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class DeviceFetcher:
    """Out of the peer's memory into a pool that only its copy engine reaches, or through it on the host.

    The engine keeps the row numbers of a copy in its slot, so a copy of more rows than have room there is several ones.
    """

    in_order = True

    def __init__(self, transport: str, staging: Staging) -> None:
        self.transport = transport
        self._staging = staging

    async def open(self, memory: pb.SharedPool) -> PeerMemory:
        return await _opened(self._staging.copies.open, memory)

    async def begin(
        self, memory: PeerMemory, layers: range, source: Rows, target: Rows, after: Ticket | None
    ) -> AsyncIterator[Part]:
        for layer in layers:
            yield range(layer, layer + 1), await self._copy(memory, source.at(layer), target.at(layer), after)
            after = None

    async def _copy(self, memory: PeerMemory, source: Rows, target: Rows, after: Ticket | None) -> asyncio.Future[None]:
        step = max(1, self._staging.writes.slot_bytes // _NUMBERS_BYTES)
        count = len(source.numbers)
        if count <= step:
            return await self._begin(memory, source, target, after)
        parts: list[asyncio.Future[None]] = []
        try:
            for at in range(0, count, step):
                parts.append(await self._begin(memory, source.part(at, step), target.part(at, step), after))
        except BaseException:
            await settled(parts)  # the caller knows of no copy yet
            for part in parts:
                part.exception()  # looked at: there is a cause already
            raise
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(_: asyncio.Future[None]) -> None:
            if all(part.done() for part in parts):
                settle(done, next(filter(None, [part.exception() for part in parts]), None))

        for part in parts:
            part.add_done_callback(ended)
        return done

    async def _begin(
        self, memory: PeerMemory, source: Rows, target: Rows, after: Ticket | None
    ) -> asyncio.Future[None]:
        ring = self._staging.writes
        slot = ring.try_take() or await ring.take()
        try:
            ticket = self._staging.copies.fetch(memory, source, target, slot, after)
        except BaseException:
            ring.give(slot)
            raise
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def completed(failure: BaseException | None) -> None:
            ring.give(slot)
            settle(done, failure)

        self._staging.when_written(ticket, completed)
        return done

    def words(self, memory: PeerMemory, shared: pb.SharedPool) -> WordReader | None:
        return open_words(shared)

    def usable(self, memory: PeerMemory) -> bool:
        return True

    def give_up(self, memory: PeerMemory) -> None:
        return  # they end by themselves

    def close(self) -> None:
        return  # the copies are the staging's


class HostFetcher:
    """Out of memory files of the peer into a pool in host memory, by workers."""

    in_order = False

    def __init__(self, transport: str, pool: HostKvPool, workers: Executor, threads: int) -> None:
        """threads: how many workers there are."""
        self.transport = transport
        self._pool = pool
        self._workers = workers
        self._threads = threads

    async def open(self, memory: pb.SharedPool) -> PeerMemory:
        return await _opened(MappedPool, memory)

    async def begin(
        self, memory: PeerMemory, layers: range, source: Rows, target: Rows, after: Ticket | None
    ) -> AsyncIterator[Part]:
        assert isinstance(memory, MappedPool)
        pairs = [(memory.layers[source.group, layer], self._pool.layer(target.group, layer)) for layer in layers]
        check_rows(source, min(theirs.nbytes for theirs, _ in pairs))
        copy = RowCopy(source.numbers, target.numbers, source.unit_bytes)
        size = source.nbytes * len(layers)
        jobs = max(1, min(_JOBS_PER_WORKER * self._threads, size // _LEAST_JOB_BYTES), size // _MOST_JOB_BYTES)
        step = max(1, len(layers) // jobs)
        for at in range(0, len(layers), step):
            yield layers[at : at + step], self._submit(copy, pairs[at : at + step], after)

    def _submit(
        self, copy: RowCopy, pairs: list[tuple[memoryview, memoryview]], after: Ticket | None
    ) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            failure: BaseException | None = None
            try:
                if after is not None:
                    after.wait()
                for theirs, own in pairs:
                    copy(theirs, own)
            except Exception as error:
                failure = error
            _post(loop, done, failure)

        self._workers.submit(run)
        return done

    def words(self, memory: PeerMemory, shared: pb.SharedPool) -> WordReader | None:
        return open_words(shared)

    def usable(self, memory: PeerMemory) -> bool:
        return True

    def give_up(self, memory: PeerMemory) -> None:
        return  # they end by themselves

    def close(self) -> None:
        return  # the workers are the agent's


def settle(done: asyncio.Future[None], failure: BaseException | None) -> None:
    """Ends a copy's future, on the loop. A future that was cancelled stays so."""
    if done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)


def _post(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None], failure: BaseException | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
        loop.call_soon_threadsafe(settle, done, failure)
