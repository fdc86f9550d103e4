"""D's side of the cache store: keeps leases alive while requests are queued, and pulls their KV into the pool.

A load has one leg per prefill rank that it reads from; with equal tensor-parallel sizes that is one. Each leg is one
`Load` stream and the only writer of its blocks, and its task ends only after the copies that it has begun, so a load is
quiescent as soon as its legs' tasks have ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cache_store import wire
from cache_store.events import AgentEvent, KvSourceRef, LoadDone, LoadFailed, Timeline
from cache_store.handshake import Offer
from cache_store.landing import FetchLanding, FetchLimits, HostLanding, Landing, StagedLanding
from cache_store.layout import AgentIdentity
from cache_store.load import Load, LoadState, WantedHere, breach
from cache_store.observations import GRPC, IPC, Observe
from cache_store.peers import OpenMemory, Peer, Peers, request_metadata
from cache_store.pool import HostKvPool, KvPool
from cache_store.service import observe_failure
from cache_store.settings import AgentSettings
from cache_store.staging import Staging, Ticket
from cache_store.tp_mapping import UNMAPPED, PeerShare, peer_address, read_plan
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode
from rpc.faults import fault_async
from rpc.status import from_rpc_error

FAILURE_MARKER = "PD_CACHE_KEY_READ_FAILED"

HELD_UP_S = 0.25  # a timer that is later than this has been held up together with its process

_log = logging.getLogger(__name__)

_NO_BYTES = memoryview(b"")

# After these, P still holds the KV as far as D knows, and a second try may succeed.
_RETRIABLE = frozenset(
    {
        ErrorCode.CONNECTION_RESET_BY_PEER,
        ErrorCode.LOAD_CACHE_TIMEOUT,
        ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED,
        ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
        ErrorCode.CACHE_STORE_LOAD_SEND_REQUEST_FAILED,
        ErrorCode.CACHE_STORE_CALL_PREFILL_TIMEOUT,
        ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT,
        ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR,
        ErrorCode.CACHE_STORE_STORE_FAILED,
        ErrorCode.READ_TRANSFER_NOT_DONE,
        ErrorCode.KV_CHECKSUM_MISMATCH,
    }
)
# After these, the key is another load's or another engine's: nothing of it may be released from here.
_NOT_OURS = frozenset({ErrorCode.DUPLICATE_REQUEST, ErrorCode.PEER_RESTARTED, ErrorCode.KV_STALE_REFERENCE})


@dataclass(eq=False)
class _Leg:
    """The part of a load that comes from one prefill rank."""

    address: str
    share: PeerShare
    generation: int | None = None  # of an earlier load of the key, then of this one
    transport: str = GRPC
    load: Load | None = None
    sent: bool = False  # the stream was opened, so P may have counted it
    ended: float = 0.0  # reading of the clock
    hold_until: float = 0.0  # its blocks are given back no sooner: a one-sided copy was not proven to have ended


@dataclass(eq=False)
class _Job:
    """One load of one key."""

    key: str
    source: KvSourceRef
    prompt_tokens: int
    wanted: Mapping[str, tuple[int, Sequence[int]]]
    deadline: float
    reload: bool
    began: float
    after: Ticket | None  # the computation uses the blocks up to this point
    traceparent: str = ""
    legs: list[_Leg] = field(default_factory=list)
    error: BatonError | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)  # peer rank and code of each failed leg, first first
    task: asyncio.Task[None] | None = None
    cancelled_at: float | None = None

    def fail(self, error: BatonError) -> None:
        if self.error is None:
            self.error = error

    @property
    def transport(self) -> str:
        """Label of the load's figures."""
        return next((leg.transport for leg in self.legs if leg.sent), GRPC)


@dataclass(eq=False)
class _Kept:
    """A failed load that may be repeated: what the reload, or the giving up, needs to know."""

    source: KvSourceRef
    generations: dict[str, int | None]
    until: float


class Puller:
    """All loads of an agent. Belongs to the agent's loop; `spawn` runs coroutines in the agent's task group."""

    def __init__(
        self,
        identity: AgentIdentity,
        pool: KvPool,
        staging: Staging | None,
        offer: Offer,
        settings: AgentSettings,
        observe: Observe,
        emit: Callable[[AgentEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._pool = pool
        self._staging = staging
        self._settings = settings
        self._observe = observe
        self._emit = emit
        self._spawn = spawn
        self._clock = clock
        copies = None if staging is None else staging.copies
        self.peers = Peers(identity, settings, offer, copies, observe, clock)
        self._jobs: dict[str, _Job] = {}
        self._renewals: dict[str, tuple[KvSourceRef, asyncio.Task[None]]] = {}
        self._kept: dict[str, _Kept] = {}

    # ---- commands of the engine

    def keep_alive(self, key: str, source: KvSourceRef) -> None:
        if key not in self._renewals and key not in self._jobs:
            self._renewals[key] = (source, self._spawn(self._renew(key, source)))

    def forget(self, key: str) -> None:
        kept = self._renewals.pop(key, None)
        if kept is not None:
            kept[1].cancel()

    def load(
        self,
        key: str,
        source: KvSourceRef,
        prompt_tokens: int,
        wanted: Mapping[str, tuple[int, Sequence[int]]],
        deadline: float,
        reload: bool,
        began: float,
        after: Ticket | None = None,
        traceparent: str = "",
    ) -> None:
        if key in self._jobs:
            raise ValueError(f"a load of {key} is open already")
        self.forget(key)
        job = _Job(key, source, prompt_tokens, wanted, deadline, reload, began, after, traceparent)
        kept = self._kept.pop(key, None)
        try:
            job.legs = self._plan(job, kept)
        except BatonError as error:
            job.fail(error)
        self._jobs[key] = job
        job.task = self._spawn(self._run(job))
        # Not in the task itself: one that is cancelled before its first step runs nothing of its body.
        job.task.add_done_callback(lambda _: self._end(job))

    def cancel_load(self, key: str, error: BatonError) -> None:
        """Ends what there is of the key, and tells P."""
        job = self._jobs.get(key)
        if job is not None and job.task is not None:
            if job.cancelled_at is None:
                job.cancelled_at = self._clock()
                job.fail(error)
                job.task.cancel()
            return
        kept = self._kept.pop(key, None)
        renewal = self._renewals.get(key)
        self.forget(key)
        if kept is not None:
            self._release_all(key, kept.source, kept.generations, error)
        elif renewal is not None:
            source = renewal[0]
            addresses = (leg.address for leg in self._legs(source, None))
            self._release_all(key, source, dict.fromkeys(addresses), error)
        else:
            return
        self._observe("aborts_total", leg="cache_store", source=abort_source(error))

    def cancel_all(self, error: BatonError) -> None:
        for key in [*self._jobs, *self._kept, *self._renewals]:
            self.cancel_load(key, error)

    def tick(self) -> None:
        """Drops what the engine never came back for; P's own clock has ended those leases."""
        now = self._clock()
        for key, kept in list(self._kept.items()):
            if kept.until <= now:
                del self._kept[key]
        self.peers.look_after()

    def next_tick_in(self) -> float:
        return self.peers.next_look_in()

    # ---- state

    def __len__(self) -> int:
        return len(self._jobs)

    def oldest(self) -> float | None:
        """When the oldest open load began; None when none is open."""
        return min((job.began for job in list(self._jobs.values())), default=None)

    # ---- one load

    def _legs(self, source: KvSourceRef, kept: _Kept | None) -> list[_Leg]:
        if not source.addresses or source.tp_size != len(source.addresses):
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"kv_source has {len(source.addresses)} addresses for tp_size {source.tp_size}",
                param="kv_source",
            )
        shares = read_plan(
            self._identity.groups[0].total_kv_heads, self._identity.tp_size, self._identity.rank, source.tp_size
        )
        legs = [_Leg(peer_address(source.addresses, share.peer_rank), share) for share in shares]
        for leg in legs:
            if leg.address == UNMAPPED:
                raise BatonError(ErrorCode.ASYMMETRIC_TP_FAILED, metadata={"peer": UNMAPPED})
            leg.generation = kept.generations.get(leg.address) if kept is not None else None
        return legs

    def _plan(self, job: _Job, kept: _Kept | None) -> list[_Leg]:
        """The legs of a load, after checking what the engine asked for."""
        for tag, (first_block, ids) in job.wanted.items():
            layout = self._identity.group(tag)
            bad = layout is None or first_block < 0 or first_block + len(ids) > layout.num_blocks(job.prompt_tokens)
            if bad or any(not 0 <= block < self._pool.num_blocks(tag) for block in ids) or len(set(ids)) < len(ids):
                raise BatonError(
                    ErrorCode.INVALID_PARAMS,
                    f"the blocks to load of group {tag!r} do not fit the prompt or the pool",
                    param="wanted",
                )
        if set(job.wanted) != {group.tag for group in self._identity.groups}:
            raise BatonError(ErrorCode.INVALID_PARAMS, "every cache group must be named in a load", param="wanted")
        return self._legs(job.source, kept)

    async def _run(self, job: _Job) -> None:
        try:
            if job.error is None:
                async with asyncio.TaskGroup() as legs:
                    for leg in job.legs:
                        legs.create_task(self._run_leg(job, leg))
        except asyncio.CancelledError:
            job.fail(BatonError(ErrorCode.CANCELLED, "the load was cancelled"))
        except BaseExceptionGroup as group:
            if job.error is None:  # every leg sets it before it raises
                job.fail(BatonError(ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, metadata={"error": str(group)}))

    async def _run_leg(self, job: _Job, leg: _Leg) -> None:
        try:
            await self._pull(job, leg)
        except asyncio.CancelledError:
            raise
        except BatonError as error:
            job.failed.append((leg.share.peer_rank, error.code.name))
            job.fail(error.with_context(peer=leg.address, peer_rank=str(leg.share.peer_rank)))
            raise
        except Exception as error:  # of the pool, of gRPC, of a metric: ends the load, never leaks it
            _log.warning("loading %s failed", job.key, exc_info=error)
            job.failed.append((leg.share.peer_rank, ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR.name))
            job.fail(
                BatonError(
                    ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR,
                    "writing the KV into the pool failed",
                    metadata={"error": type(error).__name__, "peer": leg.address},
                )
            )
            raise
        finally:
            leg.ended = self._clock()

    async def _pull(self, job: _Job, leg: _Leg) -> None:
        await fault_async("cache_store.load_start", key=job.key, peer=leg.address)
        peer, channel = await self._connect(job, leg)
        # A peer that was lost a moment ago has no memory any more; whatever else is wrong with it, the call will show.
        memory = peer.memory
        leg.transport = GRPC if memory is None else IPC
        settings = self._settings
        load = leg.load = Load(
            self._wanted(job, leg.share),
            peer.checksum,
            settings.load_progress_timeout_s,
            settings.publish_timeout_s,
            # What a one-sided transfer has led to is known before the request's deadline, not at it.
            job.deadline if memory is None else job.deadline - settings.return_before_deadline_s,
            self._clock,
            observe=self._observe,
            transport=leg.transport,
        )
        timeout = None if math.isinf(job.deadline) else max(0.001, job.deadline - self._clock())
        stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{wire.SERVICE}/Load")
        leg.sent = True
        metadata = request_metadata(job.key)
        if job.traceparent:
            metadata += (("traceparent", job.traceparent),)
        call = stub(self._request(job, leg, load).SerializeToString(), timeout=timeout, metadata=metadata)
        landing = self._landing(job, leg, memory, load, call.cancel)
        try:
            await self._receive(load, call, landing)
        except grpc.RpcError as exc:
            # The call's own deadline is that of the request.
            limited = not math.isinf(job.deadline)
            error = from_rpc_error(exc, leg="cache_store", deadline_passed=limited, was_ready=True)
            if error.code is ErrorCode.CANCELLED and "grpc_code" in error.metadata:  # by the peer, which stops
                error = BatonError(
                    ErrorCode.CONNECTION_RESET_BY_PEER,
                    "the prefill server ended the load",
                    metadata=error.metadata,
                )
            if error.code is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR and "grpc_code" in error.metadata:
                error.with_context(contract_breach="no_code", breach="a failure without a code")
            self.peers.note_failure(leg.address, error)
            raise load.fail(error) from None
        except BatonError as error:
            if error.code is ErrorCode.LOAD_CACHE_TIMEOUT:
                self.peers.note_failure(leg.address, error)
            raise
        finally:
            leg.generation = load.generation if load.generation is not None else leg.generation
            call.cancel()
            if landing.unproven:
                leg.hold_until = self._clock() + settings.quarantine_s
            await landing.quiet()

    def _landing(
        self, job: _Job, leg: _Leg, memory: OpenMemory | None, load: Load, wake: Callable[[], object]
    ) -> Landing:
        staging = self._staging
        if staging is None:
            assert isinstance(self._pool, HostKvPool)
            return HostLanding(self._pool)
        if memory is None:
            return StagedLanding(staging, wake, job.after)
        share = leg.share

        async def prove() -> None:
            await self.peers.renew(leg.address, self._reference(job.key, job.source, load.generation), reading=True)

        limits = FetchLimits(
            steal_at=job.deadline - self._settings.steal_before_deadline_s,
            wait_s=self._settings.transfer_wait_timeout_s,
            clock=self._clock,
        )
        return FetchLanding(staging, wake, job.after, memory, share.source_count, share.source_id, prove, limits)

    async def _connect(self, job: _Job, leg: _Leg) -> tuple[Peer, grpc.aio.Channel]:
        """The peer, after a handshake, and a channel to it that is connected."""
        try:
            async with asyncio.timeout(None if math.isinf(job.deadline) else job.deadline - self._clock()):
                peer = await self.peers.ready(leg.address, job.source.engine_id)
                return peer, (await self.peers.bulk_connection(leg.address)).channel
        except TimeoutError:
            raise BatonError(
                ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed; allow it more time"
            ) from None

    async def _receive(self, load: Load, call: grpc.aio.UnaryStreamCall[Any, Any], landing: Landing) -> None:
        """Reads the stream to its end, as long as the load allows it to take."""
        watch = _Watch(load, call.cancel, self._clock)
        try:
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    break
                await self._consume(load, cast(bytes, message), landing)
                watch.moved()
        except asyncio.CancelledError:
            if watch.fired:
                raise load.on_timeout() from None
            landing.check(load)
            raise
        finally:
            watch.stop()
        load.on_end()

    async def _consume(self, load: Load, message: bytes, landing: Landing) -> None:
        try:
            piece = wire.split_piece(message)
            if piece is not None:
                await landing.store(load, *piece)
                return
            event = pb.LoadEvent.FromString(message)
        except DecodeError:
            load.fail_with(breach("an event that cannot be parsed"))
        kinds = [
            event.HasField("pieces"),
            event.HasField("started"),
            event.HasField("done"),
            event.state != 0,
            len(event.notices) > 0,
        ]
        if sum(kinds) != 1:
            load.fail_with(breach("an event of no kind, or of two"))
        if event.HasField("pieces"):
            await landing.store(load, event.pieces, memoryview(event.data))
        elif event.notices:
            for header in event.notices:
                await landing.store(load, header, _NO_BYTES)
        elif event.HasField("started"):
            load.on_started(event.started)
        elif event.HasField("done"):
            await landing.settle(load)
            load.on_done(event.done)
        else:
            load.on_state(event.state)

    def _wanted(self, job: _Job, share: PeerShare) -> tuple[WantedHere, ...]:
        groups = []
        for tag, (first_block, ids) in job.wanted.items():
            layout = self._identity.group(tag)
            assert layout is not None  # checked by _plan
            ranges = layout.partition_ranges(share.dest_count, share.dest_id)
            size = sum(stop - start for start, stop in ranges)
            groups.append(WantedHere(layout, first_block, list(ids), size, ranges, share.dest_count, share.dest_id))
        return tuple(groups)

    def _request(self, job: _Job, leg: _Leg, load: Load) -> pb.LoadRequest:
        reference = self._reference(job.key, job.source, leg.generation)
        return pb.LoadRequest(
            reference=reference,
            wanted=[
                pb.WantedBlocks(
                    group=item.layout.tag,
                    block_size=item.layout.block_size,
                    first_block=item.first_block,
                    num_blocks=len(item.block_ids),
                    block_bytes=item.piece_bytes,
                    num_layers=item.layout.num_layers,
                    partition_count=leg.share.source_count,
                    partition_id=leg.share.source_id,
                )
                for item in load.wanted
            ],
            prompt_tokens=job.prompt_tokens,
            checksum=load.checksum_mode,
            chunk_bytes=self._settings.chunk_bytes,
            transport=leg.transport,
        )

    @staticmethod
    def _reference(key: str, source: KvSourceRef, generation: int | None) -> pb.KvReference:
        reference = pb.KvReference(engine_id=source.engine_id, request_key=key)
        if generation is not None:
            reference.generation = generation
        return reference

    # ---- its end

    def _end(self, job: _Job) -> None:
        """The tasks of the load have ended. Its end follows at once, unless blocks have to be held."""
        hold_s = max((leg.hold_until for leg in job.legs), default=0.0) - self._clock()
        if hold_s > 0:
            asyncio.get_running_loop().call_later(hold_s, self._finish, job)
        else:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        """The load's one end: figures, word to P, event. No task of the load runs any more.

        Whatever goes wrong here, exactly one event comes out: the engine waits for it.
        """
        if self._jobs.pop(job.key, None) is not job:
            raise AssertionError(f"the load of {job.key} ended twice")
        loads = [leg.load for leg in job.legs if leg.load is not None]
        events = sorted((event for load in loads for event in load.events), key=lambda event: event[1])
        event: AgentEvent | None = None
        try:
            event = self._done(job, loads, events)
        except Exception as error:
            _log.warning("booking the load of %s failed", job.key, exc_info=error)
            what = {"error": type(error).__name__}
            job.fail(BatonError(ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, "booking the load failed", metadata=what))
        self._emit(event if event is not None else self._failed(job, loads, events))

    def _done(self, job: _Job, loads: Sequence[Load], events: Timeline) -> LoadDone | None:
        """The event of a load that is complete; None when it is not."""
        complete = job.error is None and len(loads) == len(job.legs)
        if not complete or any(load.state is not LoadState.COMPLETE for load in loads):
            return None
        result = loads[0].result
        assert result is not None  # COMPLETE
        now = self._clock()
        size = sum(load.bytes_received for load in loads)
        exposed = max(load.exposed_seconds(now) for load in loads)
        self._observe("kv_transfer_seconds", now - job.began, transport=job.transport, outcome="ok")
        self._observe("kv_transfer_exposed_seconds", exposed, transport=job.transport)
        self._observe("kv_transfer_size_bytes", size, transport=job.transport)
        if len(job.legs) > 1:
            ranks = [leg.ended - job.began for leg in job.legs]
            self._observe("load_rank_seconds", min(ranks), stat="min")
            self._observe("load_rank_seconds", max(ranks), stat="max")
        self._release_all(job.key, job.source, {leg.address: leg.generation for leg in job.legs}, None)
        return LoadDone(job.key, result, size, now - job.began, exposed, events)

    def _failed(self, job: _Job, loads: Sequence[Load], events: Timeline) -> LoadFailed:
        """The event of a load that failed. Its figures and its line in the log are worth less than the event."""
        now = self._clock()
        generations = {leg.address: leg.generation for leg in job.legs}
        delivered = sum(load.delivered for load in loads)
        error = job.error or BatonError(ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, "the load ended without a cause")
        wanted = sum(
            len(ids) * layout.num_layers * max(1, len(job.legs))
            for tag, (_, ids) in job.wanted.items()
            if (layout := self._identity.group(tag)) is not None
        )
        missing = wanted - delivered
        error.metadata.update(delivered=str(delivered), missing=str(missing))
        if len(job.legs) > 1 and job.failed:
            error.metadata["ranks"] = ", ".join(f"{rank}: {code}" for rank, code in job.failed)
        try:
            self._report(job, error, delivered, wanted, now)
        except Exception as defect:
            _log.warning("reporting the failed load of %s failed", job.key, exc_info=defect)
        retriable = (
            not job.reload
            and job.cancelled_at is None
            and error.code in _RETRIABLE
            and now < job.deadline
            and all(leg.generation is not None or not leg.sent for leg in job.legs)
        )
        if retriable:
            lease_s = (
                max((self.peers.get(leg.address).lease_seconds for leg in job.legs), default=0.0)
                or self._settings.lease_seconds
            )
            self._kept[job.key] = _Kept(job.source, generations, now + lease_s)
        elif error.code not in _NOT_OURS and job.legs:
            self._release_all(job.key, job.source, generations, error)
        # With ipc, bytes that were read late may be those of another request.
        foreign = any(leg.transport == IPC and leg.sent for leg in job.legs)
        return LoadFailed(job.key, error, delivered, missing, retriable, events, foreign)

    def _report(self, job: _Job, error: BatonError, delivered: int, wanted: int, now: float) -> None:
        outcome = "failed" if job.cancelled_at is None else "aborted"
        self._observe("kv_transfer_seconds", now - job.began, transport=job.transport, outcome=outcome)
        if job.cancelled_at is not None:
            self._observe("aborts_total", leg="cache_store", source=abort_source(error))
            self._observe("kv_quarantine_seconds", now - job.cancelled_at, transport=job.transport)
            return
        observe_failure(self._observe, error, job.transport)
        if error.breach:
            self._observe("contract_breaches_total", kind=error.breach)
            # What is wrong is a peer and not a request, whose own error is logged where it ends.
            _log.error("contract breach by the cache store of %s: %s", job.source.engine_id,
                       error.metadata.get("breach", error.breach), extra={"code": error.code.name})  # fmt: skip
        _log.warning(
            "%s request_id=%s request_key=%s rank=%d worker=%s peer=%s channel=%s grpc_code=%s remote_code=%d (%s) "
            "finished=%d/%d cost_ms=%.0f ranks=[%s]: %s",
            FAILURE_MARKER,
            job.key.partition("#")[0],
            job.key,
            self._identity.rank,
            job.source.engine_id,
            error.metadata.get("peer", ", ".join(leg.address for leg in job.legs)),
            job.transport,
            error.metadata.get("grpc_code", error.spec.grpc.name),
            int(error.code),
            error.code.name,
            delivered,
            wanted,
            1000 * (now - job.began),
            ", ".join(f"{rank}: {code}" for rank, code in job.failed),
            error.message,
        )

    def _release_all(
        self, key: str, source: KvSourceRef, generations: Mapping[str, int | None], error: BatonError | None
    ) -> None:
        for address, generation in generations.items():
            request = pb.ReleaseRequest(reference=self._reference(key, source, generation), complete=error is None)
            if error is not None:
                request.cause.CopyFrom(wire.detail_of(error))
            self._spawn(self._release(address, request))

    async def _release(self, address: str, request: pb.ReleaseRequest) -> None:
        """Told once: when it does not arrive, the lease ends by its own clock."""
        try:
            await self.peers.release(address, request)
        except BatonError as error:
            _log.info("release of %s at %s: %s", request.reference.request_key, address, error)

    # ---- leases of queued requests

    async def _renew(self, key: str, source: KvSourceRef) -> None:
        """Until cancelled. An unknown key is no failure: P may not have admitted the request yet."""
        legs = self._legs(source, None)
        lease_s = self._settings.lease_seconds
        while True:
            await asyncio.sleep(lease_s / 3)
            for leg in legs:
                try:
                    if await fault_async("cache_store.renew", key=key, side="decode"):
                        continue
                    peer = await self.peers.ready(leg.address, source.engine_id)
                    lease_s = peer.lease_seconds
                    await self.peers.renew(leg.address, self._reference(key, source, None))
                except BatonError as error:
                    _log.debug("renewal of %s at %s: %s", key, leg.address, error)


class _Watch:
    """Calls `give_up` once the load has waited too long; looks at the time only when it may have run out."""

    def __init__(self, load: Load, give_up: Callable[[], object], clock: Callable[[], float]) -> None:
        self.fired = False
        self._load = load
        self._give_up = give_up
        self._clock = clock
        self._arm()

    def _arm(self) -> None:
        self._due = max(self._load.wait_until(), self._clock())
        self._timer = asyncio.get_running_loop().call_later(self._due - self._clock(), self._look)

    def _look(self) -> None:
        now = self._clock()
        if now - self._due > HELD_UP_S and now < self._load.deadline:
            self._load.held_up()
        if self._load.wait_until() > now:
            self._arm()
        else:
            self.fired = True
            self._give_up()

    def moved(self) -> None:
        """The limit may have come nearer: the wait for the prefill to run is longer than that for a block."""
        if self._load.wait_until() < self._due:
            self._timer.cancel()
            self._arm()

    def stop(self) -> None:
        self._timer.cancel()


def abort_source(error: BatonError) -> str:
    """Who asked for an abort: the label of baton_aborts_total."""
    if error.code in (ErrorCode.CANCELLED, ErrorCode.REQUEST_TOMBSTONED):
        return "client"
    if error.code in (ErrorCode.GENERATE_TIMEOUT, ErrorCode.DEADLINE_EXCEEDED):
        return "deadline"
    return "drain" if error.code is ErrorCode.SERVER_DRAINING else "error"
