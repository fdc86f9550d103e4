"""The CacheStore service of one agent: what peers may ask of the KV that is staged here.

Handlers take and give raw bytes (see wire.py) and run on the agent's loop, which owns all state. Memory per reader is
bounded: the next event is put together only after the last one was accepted (on a device, sending.WINDOW events
earlier), which HTTP/2 flow control delays when the reader is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, cast

import grpc
import grpc.aio

from cache_store import handshake, wire
from cache_store.failures import again, observe_failure
from cache_store.geometry.layout import AgentIdentity
from cache_store.geometry.positions import Positions
from cache_store.geometry.tp_mapping import PeerShare
from cache_store.memory.pool import HostKvPool, KvPool
from cache_store.memory.staging import Staging
from cache_store.nixl.link import NixlLink, NixlUnavailable, NotYet
from cache_store.observations import Observe
from cache_store.serving.lease import LeaseTable
from cache_store.serving.parking import ParkedState, ParkingTable, parking_full
from cache_store.serving.reader import Reader, WantedGroup, make_caller
from cache_store.serving.sending import HostSender, Link, NoticeSender, Sender, StagedSender
from cache_store.serving.tcp_sending import HostSource, Source, StagedSource, TcpSender
from cache_store.settings import AgentSettings
from cache_store.tcp.listener import DataListener
from cache_store.transports import GRPC, NIXL, ONE_SIDED, TCP, AbsentNotice, Offer
from protos import cache_store_pb2 as pb
from rpc.block_sizes import block_sizes_fit
from rpc.errors import BatonError, ErrorCode
from rpc.faults import DROP, DUPLICATE, fault, fault_async
from rpc.ids import valid_request_id
from rpc.logs import request_id_var
from rpc.server import current_traceparent

STAGE = "publish"
MAX_NOTICE_BYTES = 1 << 30  # what one event of a one-sided transport speaks of
RELOAD_WAIT_S = 1.0

_Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)


def _note_request(reference: pb.KvReference) -> None:
    """Errors and log lines of the call name the request by its end-to-end id."""
    request_id = reference.request_key.partition("#")[0]
    if valid_request_id(request_id):
        request_id_var.set(request_id)


class CacheStoreService:
    """Handlers of the service. `changed` is called after the state of a lease may have changed.

    `staging` is there when the pool is a StagedKvPool; `offer` is what is said of this side in handshakes, `listener`
    what its transport tcp needs, `nixl` what nixl does.
    """

    def __init__(
        self,
        identity: AgentIdentity,
        pool: KvPool,
        staging: Staging | None,
        offer: Offer,
        settings: AgentSettings,
        table: LeaseTable,
        parking: ParkingTable,
        observe: Observe,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        workers: Executor | None = None,
        listener: DataListener | None = None,
        nixl: NixlLink | None = None,
    ) -> None:
        self._nixl = nixl
        self._workers = workers
        self._listener = listener
        self._identity = identity
        self._pool = pool
        self._staging = staging
        self.offer = offer
        self._absent = AbsentNotice(offer)
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
            await fault_async("cache_store.handshake", side="prefill", peer=context.peer(), rank=self._identity.rank)
            request = wire.parse(pb.HandshakeRequest, data)
            offer, better_soon = await self._offer_to(request)
            response = handshake.answer(
                self._identity,
                request,
                offer,
                self._settings.checksum,
                self._settings.lease_seconds,
                better_soon,
            )
            if NIXL in request.transports:
                self._absent.connected(context.peer(), response.transport)
            result = "ok"
            return response.SerializeToString()
        except BatonError as error:
            result = handshake.result_of(error)
            raise
        finally:
            self._observe("handshakes_total", result=result)
            self._observe("handshake_seconds", self._clock() - began, result=result)

    async def _offer_to(self, request: pb.HandshakeRequest) -> tuple[Offer, bool]:
        """What is said to this caller, and whether more can be said soon: nixl is made ready by the first caller for
        whom it is the best. Only one who can use no other transport waits for it."""
        offer, caller = self.offer, (request.transports, request.host_id)
        if self._nixl is None or offer.choose(*caller) != NIXL:
            return offer, False
        try:
            if not offer.without(NIXL).choose(*caller):
                await self._nixl.running()
            return offer.showing(NIXL, self._nixl.describe()), False
        except NotYet:
            return offer.without(NIXL), True
        except NixlUnavailable:
            return offer.without(NIXL), False

    async def renew_lease(self, data: bytes, context: _Context) -> bytes:
        request = wire.parse(pb.RenewLeaseRequest, data)
        _note_request(request.reference)
        wire.require(request, "", "reference")
        generation = wire.check_reference(request.reference)
        try:
            self._check_engine(request.reference)
            source = "open_load" if request.reading else "queued"
            remaining = self._table.renew(request.reference.request_key, generation, source)
        except BatonError as error:
            if error.code is not ErrorCode.KV_LEASE_EXPIRED:  # the table has counted it as a renewal
                observe_failure(self._observe, error)
            raise
        return pb.RenewLeaseResponse(remaining_seconds=remaining).SerializeToString()

    async def release(self, data: bytes, context: _Context) -> bytes:
        request = wire.parse(pb.ReleaseRequest, data)
        _note_request(request.reference)
        wire.require(request, "", "reference", "complete", "reader")
        generation = wire.check_reference(request.reference)
        wire.check_reader(request.reader)
        cause = wire.error_of(request.cause) if request.HasField("cause") else None
        try:
            key = request.reference.request_key
            effect = await fault_async("cache_store.release", key=key, side="prefill", rank=self._identity.rank)
            self._check_engine(request.reference)
            caller, _ = make_caller(self._identity, request.reader.rank, request.reader.tp_size)
            found = False
            if not effect & DROP:
                found = self._table.release(key, generation, request.complete, cause, caller)
            if effect & DUPLICATE:
                self._table.release(key, generation, request.complete, cause, caller)
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
        called_ns = time.monotonic_ns()
        request = wire.parse(pb.LoadRequest, data)
        _note_request(request.reference)
        wire.check_load(request)
        try:
            self._check_engine(request.reference)
            rank = str(self._identity.rank)
            await fault_async("cache_store.load_open", key=request.reference.request_key, rank=rank)
            reader = await self._open(request, context.peer())
            reader.traceparent, reader.called_ns = current_traceparent(), called_ns
            await self._serve(reader, request, context)
        except BatonError as error:
            error.stage = error.stage or STAGE
            observe_failure(self._observe, error, request.transport or GRPC)
            raise

    def _check_engine(self, reference: pb.KvReference) -> None:
        if reference.engine_id != self._identity.engine_id:
            raise handshake.restarted(reference.engine_id, self._identity.engine_id)

    def _wanted(self, request: pb.LoadRequest, shares: Mapping[str, PeerShare]) -> tuple[WantedGroup, ...]:
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
            size = item.block_size
            fits = block_sizes_fit(layout.block_size, size)
            differing = {
                name: f"{theirs} / {own}"
                for name, theirs, own in (
                    ("block_size", size, size if fits else layout.block_size),
                    ("num_layers", item.num_layers, layout.num_layers),
                    (
                        "block_bytes",
                        item.block_bytes * item.partition_count,
                        layout.block_bytes * size // layout.block_size if fits else layout.block_bytes,
                    ),
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
            share = shares.get(item.group)
            if share is None or (item.partition_count, item.partition_id) != (share.source_count, share.source_id):
                raise wire.out_of_range(
                    f"wanted[{index}].partition_id",
                    f"{item.partition_id} of {item.partition_count}",
                    "nothing" if share is None else f"{share.source_id} of {share.source_count} for this reader",
                )
            positions = Positions.between(layout.block_size, size, request.prompt_tokens)
            groups.append(
                WantedGroup(
                    layout, item.first_block, item.num_blocks, item.partition_count, item.partition_id, positions
                )
            )
        return tuple(groups)

    async def _open(self, request: pb.LoadRequest, peer: str) -> Reader:
        caller, shares = make_caller(self._identity, request.reader.rank, request.reader.tp_size)
        wanted = self._wanted(request, shares)
        reference = request.reference
        generation = reference.generation if reference.HasField("generation") else None
        transport = request.transport or GRPC
        if not self.offer.serves(transport):
            served = [each for each in self.offer.transports if self.offer.serves(each)]
            raise wire.out_of_range("transport", transport, ", ".join(served))
        direct = transport in ONE_SIDED
        # A notice has no payload: all blocks of a layer that are ready together are one event.
        chunk_bytes = MAX_NOTICE_BYTES if direct else min(request.chunk_bytes, self._settings.chunk_bytes_of(transport))

        def try_open() -> Reader | None:
            return self._table.open_load(
                reference.request_key,
                generation,
                request.prompt_tokens,
                wanted,
                chunk_bytes,
                direct,
                caller,
            )

        if generation is not None:
            await self._end_of_last(reference.request_key, caller.rank, generation)
        reader = try_open()
        if reader is not None:
            return reader
        if fault("cache_store.queue", key=reference.request_key, what="park", rank=self._identity.rank):
            raise parking_full()
        entry = self._parking.park(reference.request_key, peer, caller.rank)
        woken = asyncio.Event()
        entry.notify = woken.set
        try:
            while entry.state is ParkedState.PARKED:  # by the table's clock, whatever that of the event loop says
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

    async def _end_of_last(self, key: str, rank: int, generation: int) -> None:
        """Before a reload: its caller has ended the load before it, but by another connection, and what that one moves
        has to stop first. Returns when it is closed, or after RELOAD_WAIT_S; a load of another generation is none of
        the caller's."""
        last = self._table.open_reader(key, rank)
        if last is None or last.lease.generation != generation:
            return
        closed = asyncio.Event()
        last.on_close.append(closed.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELOAD_WAIT_S):
                    await closed.wait()
        finally:
            last.on_close.remove(closed.set)

    def _sender(self, reader: Reader, request: pb.LoadRequest, context: _Context) -> Sender:
        link = Link(
            self._settings,
            self._observe,
            self._clock,
            self.let_go,
            reader,
            request.checksum,
            context,
            self._identity.rank,
            self._workers,
        )
        if reader.direct:
            return NoticeSender(link, request.transport)
        if request.transport == TCP:
            assert self._listener is not None  # the offer serves tcp
            return TcpSender(link, self._listener, self._tcp_source())
        if self._staging is not None:
            return StagedSender(link, self._staging)
        assert isinstance(self._pool, HostKvPool)
        return HostSender(link, self._pool)

    def _tcp_source(self) -> Source:
        if self._staging is not None:
            return StagedSource(self._staging)
        assert isinstance(self._pool, HostKvPool)
        return HostSource(self._pool)

    async def _serve(self, reader: Reader, request: pb.LoadRequest, context: _Context) -> None:
        try:
            await self._sender(reader, request, context).run()
        except BatonError:
            raise
        except Exception as error:  # of the pool or of gRPC: the peer gets a cause, the log the rest
            _log.exception(
                "sending the KV of %s failed",
                reader.lease.key,
                extra={"code": ErrorCode.CACHE_STORE_STORE_FAILED.name},
            )
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
