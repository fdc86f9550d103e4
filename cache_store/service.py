"""The CacheStore service of one agent: what peers may ask of the KV that is staged here.

Handlers take and give raw bytes (see wire.py) and run on the agent's loop, which owns all state. Memory per reader is
bounded by the transport: the next event is put together only after the last one was accepted, which HTTP/2 flow control
delays when the reader is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio

from cache_store import checksum, handshake, wire
from cache_store.layout import AgentIdentity
from cache_store.lease import LeaseState, LeaseTable, again
from cache_store.observations import TRANSPORT, Observe
from cache_store.parking import ParkedState, ParkingTable
from cache_store.pool import KvPool
from cache_store.reader import Reader, Run, WantedGroup
from cache_store.settings import AgentSettings
from protos import cache_store_pb2 as pb
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from rpc.ids import valid_request_id
from rpc.logs import request_id_var

HEARTBEAT_S = 0.05  # at most so often RUNNING is repeated while only blocks become ready that the reader does not want
STAGE = "publish"

_Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)

_STARTED_RUNNING = pb.LoadEvent(state=pb.COMPUTE_STATE_RUNNING).SerializeToString()
_COMPUTED = pb.LoadEvent(state=pb.COMPUTE_STATE_COMPUTED).SerializeToString()

# Codes that count as failures of the transfer itself; ended leases, aborts and the request's own failures do not.
TRANSFER_FAILURES = frozenset(
    code
    for code in ErrorCode
    if 8300 <= code < 8400
    or code
    in (
        ErrorCode.CONNECTION_RESET_BY_PEER,
        ErrorCode.KEEP_ALIVE_TIMEOUT,
        ErrorCode.KV_STALE_REFERENCE,
        ErrorCode.KV_CHECKSUM_MISMATCH,
        ErrorCode.INCOMPATIBLE_PEER,
        ErrorCode.PEER_RESTARTED,
    )
)

STALE_KINDS = {
    ErrorCode.KV_LEASE_EXPIRED: "expired",
    ErrorCode.KV_STALE_REFERENCE: "reused",
    ErrorCode.PEER_RESTARTED: "peer_restarted",
}


def _note_request(reference: pb.KvReference) -> None:
    """Errors and log lines of the call name the request by its end-to-end id."""
    request_id = reference.request_key.partition("#")[0]
    if valid_request_id(request_id):
        request_id_var.set(request_id)


def observe_failure(observe: Observe, error: BatonError) -> None:
    """Books a failed transfer by its code, and a reference that was not valid by its kind."""
    if error.code in TRANSFER_FAILURES:
        observe("kv_transfer_failures_total", transport=TRANSPORT, reason=error.code.name)
    kind = STALE_KINDS.get(error.code)
    if kind is not None:
        observe("kv_stale_references_total", kind=error.metadata.get("kind") or kind)


class CacheStoreService:
    """Handlers of the service. `changed` is called after the state of a lease may have changed."""

    def __init__(
        self,
        identity: AgentIdentity,
        pool: KvPool,
        settings: AgentSettings,
        table: LeaseTable,
        parking: ParkingTable,
        observe: Observe,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._pool = pool
        self._settings = settings
        self._table = table
        self._parking = parking
        self._observe = observe
        self._changed = changed
        self._clock = clock

    def add_to(self, _servicer: object, server: grpc.aio.Server) -> None:
        """Registers the handlers under the service's name; the signature is that of the generated functions."""
        unary = grpc.unary_unary_rpc_method_handler
        handlers: dict[str, Any] = {
            "Handshake": unary(cast(Any, self.handshake)),
            "Load": grpc.unary_stream_rpc_method_handler(cast(Any, self.load)),
            "RenewLease": unary(cast(Any, self.renew_lease)),
            "Release": unary(cast(Any, self.release)),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, cast(Any, handlers)),))

    # ---- control

    async def handshake(self, data: bytes, context: _Context) -> bytes:
        began = self._clock()
        result = "failed"
        try:
            response = handshake.answer(
                self._identity,
                wire.parse(pb.HandshakeRequest, data),
                self._settings.checksum,
                self._settings.lease_seconds,
            )
            result = "ok"
            return response.SerializeToString()
        except BatonError as error:
            result = handshake_result(error)
            raise
        finally:
            self._observe("handshakes_total", result=result)
            self._observe("handshake_seconds", self._clock() - began, result=result)

    async def renew_lease(self, data: bytes, context: _Context) -> bytes:
        request = wire.parse(pb.RenewLeaseRequest, data)
        _note_request(request.reference)
        wire.require(request, "", "reference")
        generation = wire.check_reference(request.reference)
        try:
            self._check_engine(request.reference)
            remaining = self._table.renew(request.reference.request_key, generation)
        except BatonError as error:
            if error.code is not ErrorCode.KV_LEASE_EXPIRED:  # the table has counted it as a renewal
                observe_failure(self._observe, error)
            raise
        return pb.RenewLeaseResponse(remaining_seconds=remaining).SerializeToString()

    async def release(self, data: bytes, context: _Context) -> bytes:
        request = wire.parse(pb.ReleaseRequest, data)
        _note_request(request.reference)
        wire.require(request, "", "reference", "complete")
        generation = wire.check_reference(request.reference)
        cause = wire.error_of(request.cause) if request.HasField("cause") else None
        try:
            self._check_engine(request.reference)
            found = self._table.release(request.reference.request_key, generation, request.complete, cause)
        except BatonError as error:
            observe_failure(self._observe, error)
            raise
        if found and not request.complete:
            self._observe("aborts_total", leg="cache_store", source="peer")
        self._changed()
        return pb.ReleaseResponse(found=found).SerializeToString()

    # ---- data

    async def load(self, data: bytes, context: _Context) -> None:
        """Parks the load if it came first, then streams (docs/protocol.md, section "Load")."""
        request = wire.parse(pb.LoadRequest, data)
        _note_request(request.reference)
        wire.check_load(request)
        try:
            self._check_engine(request.reference)
            reader = await self._open(request, context.peer())
            await self._serve(reader, request.checksum, context)
        except BatonError as error:
            error.stage = error.stage or STAGE
            observe_failure(self._observe, error)
            raise

    def _check_engine(self, reference: pb.KvReference) -> None:
        if reference.engine_id != self._identity.engine_id:
            raise handshake.restarted(reference.engine_id, self._identity.engine_id)

    def _wanted(self, request: pb.LoadRequest) -> tuple[WantedGroup, ...]:
        groups = []
        for index, item in enumerate(request.wanted):
            layout = self._identity.group(item.group)
            if layout is None:
                raise BatonError(
                    ErrorCode.INCOMPATIBLE_PEER,
                    "the two servers differ in their cache groups; pair servers of one model",
                    metadata={
                        "group": item.group[:64],
                        "groups": ", ".join(group.tag for group in self._identity.groups),
                    },
                )
            differing = {
                name: f"{theirs} / {own}"
                for name, theirs, own in (
                    ("block_size", item.block_size, layout.block_size),
                    ("num_layers", item.num_layers, layout.num_layers),
                    ("block_bytes", item.block_bytes * item.partition_count, layout.block_bytes),
                    ("heads_per_partition", layout.num_kv_heads % item.partition_count, 0),
                )
                if theirs != own
            }
            if differing:
                raise BatonError(
                    ErrorCode.READ_BUFFER_MISMATCH,
                    f"wanted[{index}] differs from what is staged in {', '.join(differing)}",
                    metadata=differing,
                )
            groups.append(
                WantedGroup(layout, item.first_block, item.num_blocks, item.partition_count, item.partition_id)
            )
        return tuple(groups)

    async def _open(self, request: pb.LoadRequest, peer: str) -> Reader:
        wanted = self._wanted(request)
        reference = request.reference
        generation = reference.generation if reference.HasField("generation") else None
        chunk_bytes = min(request.chunk_bytes, self._settings.chunk_bytes)

        def try_open() -> Reader | None:
            return self._table.open_load(reference.request_key, generation, request.prompt_tokens, wanted, chunk_bytes)

        reader = try_open()
        if reader is not None:
            return reader
        entry = self._parking.park(reference.request_key, peer)
        woken = asyncio.Event()
        entry.notify = woken.set
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, entry.until - self._clock())):
                    await woken.wait()
            self._parking.expire()
        finally:
            self._parking.leave(entry)
        if entry.error is not None:
            raise again(entry.error)
        reader = try_open() if entry.state is ParkedState.ADMITTED else None
        if reader is None:
            raise BatonError(ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT, "the prefill did not begin in time")
        return reader

    async def _serve(self, reader: Reader, mode: str, context: _Context) -> None:
        try:
            await _Sender(self, reader, mode, context).run()
        except BatonError:
            raise
        except Exception as error:  # of the pool or of gRPC: the peer gets a cause, the log the rest
            _log.exception("sending the KV of %s failed", reader.lease.key)
            raise BatonError(
                ErrorCode.CACHE_STORE_STORE_FAILED,
                "reading the staged KV failed",
                metadata={"error": type(error).__name__},
            ) from error
        finally:
            self.let_go(reader, sent=False)

    def let_go(self, reader: Reader, sent: bool) -> None:
        """The reader holds the blocks no longer. Idempotent."""
        self._table.close_load(reader, sent)
        self._changed()

    def encode(self, reader: Reader, run: Run, blocks: list[int], mode: str) -> tuple[bytes, int]:
        """The event with `blocks` of `run`, and the number of its payload bytes. Reads the pool, once."""
        wanted = run.wanted
        layout = wanted.layout
        views = self._views(reader.lease.blocks[layout.tag], wanted, run.layer, blocks)
        sums: list[int] = []
        if checksum.covered(mode, run.layer, blocks[0]):
            for view in views:
                sums += checksum.checksums(view, wanted.piece_bytes)
        header = pb.PieceHeader(
            group=layout.tag,
            layer=run.layer,
            blocks=blocks,
            block_bytes=wanted.piece_bytes,
            checksums=sums,
        )
        return wire.encode_piece(header, views), wanted.piece_bytes * len(blocks)

    def _views(self, ids: list[int], wanted: WantedGroup, layer: int, blocks: list[int]) -> list[memoryview]:
        """Views of the pool, neighbours in the pool as one; or copies of the wanted share of the heads."""
        tag = wanted.layout.tag
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


class _Sender:
    """One stream: sends what is ready, sleeps until something is, and ends with the lease's own end."""

    def __init__(self, service: CacheStoreService, reader: Reader, mode: str, context: _Context) -> None:
        self._service = service
        self._reader = reader
        self._mode = mode
        self._context = context
        self._changed = asyncio.Event()
        self._begun = False
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reader.notify = self._notify

    def _notify(self) -> None:
        self._changed.set()
        if self._reader.stop is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def run(self) -> None:
        reader = self._reader
        lease = reader.lease
        started = pb.Started(generation=lease.generation, cached_blocks=lease.cached_blocks)
        await self._write(pb.LoadEvent(started=started).SerializeToString())
        await self._write(_STARTED_RUNNING)
        computed = False
        told = lease.published
        told_at = self._service._clock()
        while True:
            self._changed.clear()
            if lease.state is LeaseState.COMPUTED and not computed:
                computed = True
                await self._write(_COMPUTED)
            run = reader.next_run()
            if run is not None:
                await self._send(run)
                told, told_at = lease.published, self._service._clock()
            elif computed:
                break
            elif lease.published != told and (wait := told_at + HEARTBEAT_S - self._service._clock()) <= 0:
                # The reader's progress limit must not strike while the prompt advances in blocks it already has.
                await self._write(_STARTED_RUNNING)
                told, told_at = lease.published, self._service._clock()
            else:
                await self._sleep(wait if lease.published != told else None)
        result = lease.result
        self._service.let_go(reader, sent=True)
        done = pb.Done(result=result, pieces=reader.pieces_sent)
        await self._write(pb.LoadEvent(done=done).SerializeToString())

    async def _sleep(self, until_heartbeat: float | None) -> None:
        """Until the lease changes; raises CACHE_STORE_LOAD_BUFFER_TIMEOUT when nothing happens for too long."""
        limit = self._service._settings.publish_timeout_s
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

    async def _send(self, run: Run) -> None:
        blocks = list(range(run.first, run.first + run.count))
        if faults.armed():
            blocks = [block for block in blocks if not await self._faulty(run, block)]
            if not blocks:
                return
            self._check_stop()
        message, size = self._service.encode(self._reader, run, blocks, self._mode)
        await self._write(message)
        self._reader.sent(len(blocks), self._service._clock())
        self._service._observe("kv_transfer_bytes_total", size, transport=TRANSPORT, direction="sent")

    async def _faulty(self, run: Run, block: int) -> bool:
        return await faults.fault_async(
            "cache_store.send_piece",
            key=self._reader.lease.key,
            group=run.wanted.layout.tag,
            layer=run.layer,
            block=block,
        )

    async def _write(self, message: bytes) -> None:
        """Hands an event to the transport; returns when it was accepted, raises when the lease ends meanwhile.

        The message is a copy, so the reader lets go of the blocks then, whether or not its peer takes the message.
        """
        self._check_stop()
        write = asyncio.ensure_future(self._context.write(message))
        try:
            await asyncio.wait({write, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not write.done():
                self._service.let_go(self._reader, sent=False)
            if write.done() or not self._begun:
                # The first write carries the headers, and gRPC takes no status while it does not know them as sent.
                await write
            self._begun = True
            self._check_stop()
        finally:
            if not write.done():
                write.cancel()
            elif not write.cancelled():
                write.exception()

    def _check_stop(self) -> None:
        stop = self._reader.stop
        if stop is not None:
            raise again(stop).with_context(
                delivered=str(self._reader.pieces_sent),
                missing=str(self._reader.pieces_wanted - self._reader.pieces_sent),
            )


def handshake_result(error: BatonError) -> str:
    if error.code in (ErrorCode.INCOMPATIBLE_PEER, ErrorCode.ASYMMETRIC_TP_FAILED):
        return "incompatible"
    return "restarted" if error.code is ErrorCode.PEER_RESTARTED else "failed"
