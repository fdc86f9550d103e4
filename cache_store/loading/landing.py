"""D's end of one leg of a load, towards the pool: how the blocks of an event get to their places.

Into host memory at once (`HostLanding`), through the staging ring of a device (`StagedLanding`), or out of the memory
of the peer's engine (`FetchLanding`). A load counts a block when it is in the pool, and ends when nothing writes any
more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cache_store.failures import blames_request
from cache_store.geometry.pieces import Piece
from cache_store.geometry.rows import Rows, block_rows
from cache_store.geometry.tp_mapping import PeerShare
from cache_store.loading.load import Load, WantedHere, breach
from cache_store.loading.peers import OpenMemory
from cache_store.memory.fetching import Fetcher
from cache_store.memory.pool import HostKvPool
from cache_store.memory.staging import Staging, Ticket, settled
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode

_log = logging.getLogger(__name__)

# What the question after a one-sided copy may answer, other than that the copy is good.
_NOT_THEIRS = frozenset({ErrorCode.KV_LEASE_EXPIRED, ErrorCode.KV_STALE_REFERENCE, ErrorCode.PEER_RESTARTED})


class Landing(ABC):
    """Used by one task. Whoever made it calls `quiet` at the end, whatever the end is.

    `unproven`: a one-sided copy was given up before it was known to have ended.
    """

    unproven = False

    @abstractmethod
    async def store(self, load: Load, piece: Piece, data: memoryview) -> None:
        """Checks an event and begins to put its blocks into the pool. May wait for room. Raises the load's failure."""

    async def begin(self, load: Load, started: pb.Started) -> None:
        """The stream has begun. Raises the load's failure."""
        return

    def give_up(self) -> None:
        """The load has waited too long: `store` and `settle` end soon, with the load's failure."""
        return

    def check(self, load: Load) -> None:
        """Raises the load's failure after a copy has failed."""
        return

    async def settle(self, load: Load) -> None:
        """Returns when everything stored is in the pool, and proven where that is needed. Raises the load's failure."""
        return

    async def quiet(self) -> None:
        """Returns when nothing writes the blocks any more. A cancellation takes effect afterwards."""
        return


class HostLanding(Landing):
    """Host memory: an event's blocks are in the pool when it has been looked at."""

    def __init__(self, pool: HostKvPool) -> None:
        self._pool = pool

    async def store(self, load: Load, piece: Piece, data: memoryview) -> None:
        wanted = load.expect(piece, data.nbytes)
        load.verify(piece, data)
        write_blocks(self._pool, wanted, piece.layer, piece.blocks, data)
        load.on_taken(piece)
        load.on_delivered(piece)


class _CopyLanding(Landing):
    """Blocks reach the pool by copies that complete later. `wake` ends the wait for the next event after a failure."""

    _in_order = True

    def __init__(self, wake: Callable[[], object], after: Ticket | None) -> None:
        """`after`: a point of the computation up to which the blocks may still be in use."""
        self.failure: BatonError | None = None
        self._wake = wake
        self._after = after
        self._copies: set[asyncio.Future[None]] = set()

    def _expect_completion(self, load: Load, piece: Piece) -> Callable[[BaseException | None], None]:
        """To be called on the loop once a copy that has begun, of a piece that was taken, is done or has failed."""
        if self._in_order:  # the first one waits for all
            self._after = None
        copy: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._copies.add(copy)
        return partial(self._completed, load, piece, copy)

    def _completed(self, load: Load, piece: Piece, copy: asyncio.Future[None], failure: BaseException | None) -> None:
        if failure is None:
            try:
                load.on_delivered(piece)
                self._delivered(load)
            except Exception as error:  # of a metric; the load ends, and does not wait for what was not counted
                failure = error
        if failure is not None and self.failure is None:
            _log.warning("a copy into the KV pool failed: %s", failure)  # the load's end is the one ERROR
            self.failure = (
                failure
                if isinstance(failure, BatonError)
                else BatonError(
                    ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR,
                    "writing the KV into the pool failed",
                    metadata={"error": type(failure).__name__},
                )
            )
            self._wake()
        self._copies.discard(copy)
        copy.set_result(None)

    def _delivered(self, load: Load) -> None:
        """Something more is in the pool."""

    def check(self, load: Load) -> None:
        if self.failure is not None:
            load.fail_with(self.failure)

    async def settle(self, load: Load) -> None:
        await settled(self._copies)
        self.check(load)

    async def quiet(self) -> None:
        await settled(self._copies)


class StagedLanding(_CopyLanding):
    """Events arrive in host memory; their bytes are verified in the slot from which they are copied to the device."""

    def __init__(self, staging: Staging, wake: Callable[[], object], after: Ticket | None) -> None:
        super().__init__(wake, after)
        self._staging = staging

    async def store(self, load: Load, piece: Piece, data: memoryview) -> None:
        self.check(load)
        wanted = load.expect(piece, data.nbytes)
        ring = self._staging.writes
        if data.nbytes > ring.slot_bytes:
            load.fail_with(
                BatonError(
                    ErrorCode.READ_BUFFER_MISMATCH,
                    "an event is larger than agreed",
                    metadata={"bytes": f"{data.nbytes} / {ring.slot_bytes}"},
                )
            )
        slot = ring.try_take() or await ring.take()
        try:
            view = slot.view[: data.nbytes]
            view[:] = data
            load.verify(piece, view)
            ticket = self._staging.copies.write(slot, places(wanted, piece), self._after)
        except BaseException:
            ring.give(slot)
            raise
        load.on_taken(piece)
        completed = self._expect_completion(load, piece)

        def written(failure: BaseException | None) -> None:
            ring.give(slot)
            completed(failure)

        self._staging.when_written(ticket, written)


@dataclass(frozen=True)
class FetchLimits:
    """Of a one-sided transfer: from `steal_at` (a reading of `clock`) on no copy begins, so that none is under way at
    the request's deadline; `wait_s` is the longest wait for those that have begun. Meanwhile nothing else holds the
    KV, so the lease is renewed every `renew_s`."""

    steal_at: float
    wait_s: float
    renew_s: float
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Proofs:
    """How a reader knows whether the lease stood. `stands` looks at its word, which may say nothing (False); `prove`
    asks the peer, and raises why not; `renew` asks it to keep the lease, while copies go on after its last event.
    """

    stands: Callable[[pb.LeaseWord], Awaitable[bool]]
    prove: Callable[[], Awaitable[object]]
    renew: Callable[[], Awaitable[object]]


class FetchLanding(_CopyLanding):
    """Events say which blocks are ready; they are copied out of the memory of the peer's engine.

    Nothing keeps the peer from giving the blocks to another request meanwhile, so once everything is here the lease's
    word says whether it stood all the time (`memory.lease_words`). Where there is none, or it says nothing, the peer is
    asked; that overlaps with the end of the prefill. A failed load may leave bytes of other requests in the blocks.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        wake: Callable[[], object],
        after: Ticket | None,
        memory: OpenMemory,
        shares: Mapping[str, PeerShare],
        proofs: Proofs,
        limits: FetchLimits,
    ) -> None:
        """shares: of each group, the part of the peer's heads to read."""
        super().__init__(wake, after)
        self._in_order = fetcher.in_order
        self._fetcher = fetcher
        self._limits = limits
        self._memory = memory
        self._shares = shares
        self._proofs = proofs
        self._proof: asyncio.Task[None] | None = None
        self._word: pb.LeaseWord | None = None
        memory.hold()

    async def begin(self, load: Load, started: pb.Started) -> None:
        self._word = started.word if started.HasField("word") else None

    async def store(self, load: Load, piece: Piece, data: memoryview) -> None:
        self._check_time(load)
        wanted = load.expect(piece, data.nbytes)
        source, target = _paired(wanted, piece, self._shares[piece.group])
        load.on_taken(piece)
        try:
            async for layers, copy in self._fetcher.begin(
                self._memory.memory, piece.layers, source, target, self._after
            ):
                completed = self._expect_completion(load, piece.of(layers))
                copy.add_done_callback(partial(_tell, completed))
                if layers.stop < piece.layers.stop:  # the wait for room may have been long
                    self._check_time(load)
        except IndexError as error:
            load.fail_with(breach(f"a block outside the peer's memory: {error}"))

    def _check_time(self, load: Load) -> None:
        """Raises the load's failure when no further copy may begin."""
        self.check(load)
        if self._limits.clock() >= self._limits.steal_at:
            late = "the request's deadline is too near for another read; allow it more time"
            load.fail_with(BatonError(ErrorCode.GENERATE_TIMEOUT, late))

    def _delivered(self, load: Load) -> None:
        if not load.missing and self._proof is None:
            # Its owner is this landing: `settle` takes its result, `quiet` ends it.
            self._proof = asyncio.get_running_loop().create_task(self._prove(load))

    async def _prove(self, load: Load) -> None:
        """Returns when the lease is known to have stood up to now."""
        if self._word is not None and await self._proofs.stands(self._word):
            load.observe("kv_lease_proof_calls_total", 0)  # the series is there, and says that nobody was asked
            return
        load.observe("kv_lease_proof_calls_total")
        try:
            await self._proofs.prove()
        except BatonError as error:
            if error.code in _NOT_THEIRS or blames_request(error):
                raise
            raise BatonError(
                ErrorCode.READ_TRANSFER_NOT_DONE,
                "whether the blocks that were read are those of the request is not known",
                metadata={"cause": error.code.name, "cause_code": str(int(error.code))},
            ) from None

    async def settle(self, load: Load) -> None:
        try:
            async with asyncio.timeout(self._limits.wait_s):
                while self._copies:
                    # Given up or not, the copies themselves go on.
                    await asyncio.wait(set(self._copies), timeout=self._limits.renew_s)
                    if self._copies:
                        await self._keep()
        except TimeoutError:
            self.unproven = True
            load.fail_with(
                BatonError(
                    ErrorCode.READ_TRANSFER_NOT_DONE,
                    "copies out of the prefill server's memory did not end in time",
                    metadata={"waited_s": f"{self._limits.wait_s:g}", "copies": str(len(self._copies))},
                )
            )
        await super().settle(load)
        if self._proof is not None:
            try:
                await asyncio.shield(self._proof)
            except BatonError as error:
                load.fail_with(error)

    async def _keep(self) -> None:
        """The peer has said everything, and would end the lease while copies go on."""
        try:
            await self._proofs.renew()
        except BatonError as error:  # what it means for the load is known when the copies are done
            _log.debug("the renewal of a lease whose blocks are being read: %s", error)

    async def quiet(self) -> None:
        try:
            if self._copies:
                self._fetcher.give_up(self._memory.memory)
            await super().quiet()
        finally:
            try:
                await self._end_proof()
            finally:
                self._memory.drop()

    async def _end_proof(self) -> None:
        proof = self._proof
        if proof is None:
            return
        proof.cancel()
        await settled([proof])
        if not proof.cancelled():
            proof.exception()  # looked at: the load has its cause already


def _tell(completed: Callable[[BaseException | None], None], copy: asyncio.Future[None]) -> None:
    completed(copy.exception())


def _paired(wanted: WantedHere, piece: Piece, share: PeerShare) -> tuple[Rows, Rows]:
    """Where the blocks of a notice lie in the memory of the peer's engine, and where they go in the pool: as many rows,
    of one size. Those of its first layer; they are the same in the others."""
    tag, layer, size, positions = piece.group, piece.layer, wanted.piece_bytes, wanted.positions
    from_, count = piece.sources, share.source_count
    if positions is None:
        halves = count > 1 or wanted.partition_count > 1
        source = block_rows(tag, layer, from_, size, count, share.source_id, halves=halves)
        return source, places(wanted, piece, halves=halves)
    heads = wanted.layout.num_kv_heads // wanted.partition_count
    source = positions.source_rows(tag, layer, piece.blocks, from_, size, heads, count, share.source_id)
    ids = _ids(wanted, piece)
    target = positions.target_rows(tag, layer, ids, size, heads, wanted.partition_count, wanted.partition_id)
    return source, target


def _ids(wanted: WantedHere, piece: Piece) -> list[int]:
    return [wanted.block_ids[block - wanted.first_block] for block in piece.blocks]


def places(wanted: WantedHere, piece: Piece, *, halves: bool = False) -> Rows:
    """Where the blocks of an event go in the pool, in its first layer."""
    return block_rows(
        wanted.layout.tag,
        piece.layer,
        _ids(wanted, piece),
        wanted.piece_bytes,
        wanted.partition_count,
        wanted.partition_id,
        halves=halves,
    )


def write_blocks(pool: HostKvPool, wanted: WantedHere, layer: int, blocks: Sequence[int], data: memoryview) -> None:
    """Copies the payload of a piece event to its places: blocks that are neighbours in the pool in one go."""
    tag, size = wanted.layout.tag, wanted.piece_bytes
    ids = [wanted.block_ids[block - wanted.first_block] for block in blocks]
    if size < wanted.layout.block_bytes:
        for index, block_id in enumerate(ids):
            target = pool.piece(tag, layer, block_id)
            at = index * size
            for start, stop in wanted.ranges:
                target[start:stop] = data[at : at + stop - start]
                at += stop - start
        return
    at = 0
    while at < len(ids):
        stop = at + 1
        while stop < len(ids) and ids[stop] == ids[stop - 1] + 1:
            stop += 1
        pool.piece(tag, layer, ids[at], stop - at)[:] = data[at * size : stop * size]
        at = stop
