"""KV memory that the agent cannot address: copies between it and host memory, beside the computation.

An engine's pool on an accelerator is read and written through a `CopyEngine`. Bytes on their way lie in the slots of a
`StagingRing`, host memory that is allocated once and that the device can reach (pinned). Nothing here waits for a copy
on the agent's loop or on the engine's thread: a copy is submitted and gives a `Ticket`, and one thread per direction
waits for the tickets in order, with the interpreter lock released (`Completions`).

A slot is held from the submission of a copy to its completion, and for no longer: how fast a peer reads or sends has no
influence on it, so every waiter for a slot gets one within the time of a few copies.

Nothing here imports torch. `host_copies.py` has a CopyEngine of host threads, `cuda_pool.py` one of CUDA streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cache_store.geometry.rows import Rows
from protos import cache_store_pb2 as pb

CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class Ticket(Protocol):
    """A point in the order of a stream of copies or of computation."""

    def wait(self) -> None:
        """Blocks the calling thread until everything before the point is done, with the interpreter lock released.

        Raises what the copy, or the device, failed with.
        """
        ...


@dataclass(eq=False, slots=True)
class Slot:
    """One buffer of a ring. `view` is its memory ('B', contiguous), `index` its number at the copy engine."""

    index: int
    view: memoryview


class MemoryUnavailable(Exception):
    """Memory of another process cannot be opened here, or own memory not be offered; the text says why."""


class PeerMemory(Protocol):
    """KV memory of another process, opened for reading."""

    def close(self) -> None:
        """Gives the mapping back. No copy may be under way."""
        ...


class CopyEngine(Protocol):
    """Copies between KV memory and host memory, or the KV memory of another process. Calls submit and do not block; any
    thread may make them.

    Copies of one direction (`read`; `write` and `fetch`) complete in the order of submission. A Ticket given as `after`
    must be reached before the copy begins: the device waits for it, not the caller.
    """

    shareable: bool  # whether other processes may be able to open this memory, and this one theirs

    def allocate(self, count: int, slot_bytes: int) -> list[Slot]:
        """Host memory that this engine reaches. Called a few times at start-up, never later."""
        ...

    def mark(self) -> Ticket:
        """The present end of what the calling thread has queued to compute; it writes and reads KV up to there."""
        ...

    def read(self, rows: Rows, slot: Slot) -> Ticket:
        """KV memory -> the first rows.nbytes bytes of the slot."""
        ...

    def write(self, slot: Slot, rows: Rows, after: Ticket | None = None) -> Ticket:
        """The first rows.nbytes bytes of the slot -> KV memory."""
        ...

    def fetch(
        self, memory: PeerMemory, source: Rows, target: Rows, scratch: Slot, after: Ticket | None = None
    ) -> Ticket:
        """Rows of a peer's memory -> as many rows of the same size of this one. The slot is scratch of the copy.

        Raises IndexError for rows that the peer's memory does not have.
        """
        ...

    def share(self) -> pb.SharedPool:
        """How another process of this machine opens this memory. Raises MemoryUnavailable."""
        ...

    def open(self, memory: pb.SharedPool) -> PeerMemory:
        """Opens what a peer's `share` gave; may block for milliseconds. Raises MemoryUnavailable."""
        ...

    def close(self) -> None:
        """Ends threads and gives back what was opened. Everything submitted has been waited for."""
        ...


class StagingRing:
    """Slots, each with one user at a time. Belongs to one loop; nothing in it needs a lock.

    At its bound `take` waits; waiters are served in the order in which they came.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        if not slots:
            raise ValueError("a staging ring needs at least one slot")
        self.slots = len(slots)
        self.slot_bytes = slots[0].view.nbytes
        self._free = deque(slots)
        self._waiting: deque[asyncio.Future[Slot]] = deque()

    @property
    def free(self) -> int:
        return len(self._free)

    def try_take(self) -> Slot | None:
        """A slot at once, or None: there is none, or others came before."""
        return self._free.popleft() if self._free else None

    async def take(self) -> Slot:
        """A slot, after everybody who waits already. Whoever is cancelled while it waits holds none."""
        slot = self.try_take()
        if slot is not None:
            return slot
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(waiter.result())
            raise

    def give(self, slot: Slot) -> None:
        """Its user is done with the slot: no copy that reads or writes it is under way."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self._free.append(slot)


class Completions:
    """Waits for tickets in the order in which they came, on a thread of its own, and says when each is reached.

    `then` is called on that thread with None or the failure of the wait; it must not block.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Ticket | None, Callable[[BaseException | None], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, ticket: Ticket | None, then: Callable[[BaseException | None], None]) -> None:
        """Without a ticket, `then` only keeps its place in the order."""
        self._queue.put((ticket, then))

    def __len__(self) -> int:
        return self._queue.qsize()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, then = item
            failure: BaseException | None = None
            if ticket is not None:
                try:
                    ticket.wait()
                except Exception as error:  # of the device; the one who submitted the copy has to know
                    failure = error
            try:
                then(failure)
            except Exception:
                _log.exception("cache store: what follows a copy failed")
            del item, ticket, then, failure  # nothing of the last copy is kept alive by the wait for the next one

    def close(self) -> None:
        """Ends the thread after what was added so far."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("cache store: a copy is still under way after %g s", CLOSE_S)


async def settled(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Returns when all are done, whatever their ends. A cancellation takes effect only then: what they stand for,
    copies out of or into KV blocks, goes on regardless, and the blocks must not be given back before."""
    cancelled: asyncio.CancelledError | None = None
    pending = {future for future in futures if not future.done()}
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            pending = {future for future in pending if not future.done()}
    if cancelled is not None:
        raise cancelled


class Staging:
    """What the agent's two sides need to move KV through a copy engine. Belongs to the agent's loop once that runs."""

    def __init__(self, copies: CopyEngine, slots: int, slot_bytes: int) -> None:
        """`slots` of `slot_bytes` for each direction."""
        self.copies = copies
        self.reads = StagingRing(copies.allocate(slots, slot_bytes))
        self.writes = StagingRing(copies.allocate(slots, slot_bytes))
        self._reading = Completions("kv-reads")
        self._writing = Completions("kv-writes")
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def when_read(self, ticket: Ticket, then: Callable[[BaseException | None], None]) -> None:
        """Calls `then` on the loop once a `read` is done, or has failed."""
        self._reading.add(ticket, self._on_loop(then))

    def when_written(self, ticket: Ticket, then: Callable[[BaseException | None], None]) -> None:
        """Calls `then` on the loop once a `write` or `fetch` is done, or has failed."""
        self._writing.add(ticket, self._on_loop(then))

    def _on_loop(self, then: Callable[[BaseException | None], None]) -> Callable[[BaseException | None], None]:
        loop = self._loop
        assert loop is not None

        def call(failure: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(then, failure)

        return call

    def close(self) -> None:
        self._reading.close()
        self._writing.close()
        self.copies.close()
