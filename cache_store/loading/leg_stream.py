"""One leg of a load: a `Load` stream of a prefill rank, from its handshake to its last event.

A stream is the only writer of the blocks that it brings. Its task ends only after the copies that it has begun, so
nothing can write them any more when `LegStreams.pull` has returned or raised.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from cache_store import wire
from cache_store.geometry.layout import AgentIdentity
from cache_store.geometry.positions import Positions
from cache_store.loading.job import Job, Leg, reader_rank, reference
from cache_store.loading.landing import FetchLanding, FetchLimits, HostLanding, Landing, Proofs, StagedLanding
from cache_store.loading.load import Load, WantedHere, breach
from cache_store.loading.peers import Peer, Peers, request_metadata
from cache_store.loading.tcp_landing import HostTarget, StagedTarget, Target, TcpLanding
from cache_store.memory.pool import HostKvPool, KvPool
from cache_store.memory.staging import Staging
from cache_store.observations import Observe
from cache_store.settings import AgentSettings
from cache_store.transports import ONE_SIDED, TCP
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode
from rpc.faults import DROP, DUPLICATE, armed, fault, fault_async
from rpc.status import from_rpc_error

SHORTEST_RENEWAL_S = 0.01  # between two renewals, whatever lease a peer names
HELD_UP_S = 0.25  # a timer that is later than this has been held up together with its process

_NO_BYTES = memoryview(b"")
# Found by this side: whether the peer is still there is asked before a reload.
_SILENT = frozenset(
    {
        ErrorCode.LOAD_CACHE_TIMEOUT,
        ErrorCode.CONNECTION_RESET_BY_PEER,
        ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
        ErrorCode.CACHE_STORE_LOAD_RDMA_WRITE_FAILED,
    }
)


class LegStreams:
    """Reads legs into the pool. Belongs to the agent's loop."""

    def __init__(
        self,
        identity: AgentIdentity,
        pool: KvPool,
        staging: Staging | None,
        settings: AgentSettings,
        peers: Peers,
        observe: Observe,
        clock: Callable[[], float] = time.monotonic,
        workers: Executor | None = None,
    ) -> None:
        """`workers` move the bytes of the transport tcp."""
        self._workers = workers
        self._identity = identity
        self._pool = pool
        self._staging = staging
        self._settings = settings
        self._peers = peers
        self._observe = observe
        self._clock = clock

    async def pull(self, job: Job, leg: Leg) -> None:
        """Returns when everything is in the pool and verified, else raises the cause. Nothing writes the leg's blocks
        afterwards, whatever its end is. Fault point `cache_store.load_start`."""
        await fault_async("cache_store.load_start", key=job.key, peer=leg.address, rank=self._identity.rank)
        peer, channel = await self._connect(job, leg)
        leg.transport = peer.transport
        if peer.transport in ONE_SIDED and peer.memory is None:  # lost a moment ago
            raise BatonError(
                ErrorCode.CONNECTION_RESET_BY_PEER, "the prefill server was lost before the load had begun"
            )
        settings = self._settings
        load = leg.load = Load(
            self._wanted(job, leg, peer),
            peer.checksum,
            settings.load_progress_timeout_s,
            settings.publish_timeout_s,
            # What a one-sided transfer has led to is known before the request's deadline, not at it.
            job.deadline - settings.return_before_deadline_s if peer.transport in ONE_SIDED else job.deadline,
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
        landing = self._landing(job, leg, peer, load, call.cancel)
        try:
            await self._receive(job.key, load, call, landing)
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
            self._peers.note_failure(leg.address, error)
            raise load.fail(error) from None
        except BatonError as error:
            if error.code in _SILENT:
                self._peers.note_failure(leg.address, error)
            raise
        finally:
            leg.generation = load.generation if load.generation is not None else leg.generation
            call.cancel()
            if landing.unproven:
                leg.hold_until = self._clock() + settings.quarantine_s
            await landing.quiet()

    def _landing(self, job: Job, leg: Leg, peer: Peer, load: Load, wake: Callable[[], object]) -> Landing:
        staging = self._staging
        if peer.memory is not None:

            async def ask() -> None:
                await self._peers.renew(leg.address, reference(job.key, job.source, load.generation), reading=True)

            async def prove() -> None:
                await fault_async("cache_store.prove", key=job.key, rank=self._identity.rank)
                await ask()

            async def renew() -> None:
                if not await fault_async("cache_store.renew", key=job.key, side="decode", rank=self._identity.rank):
                    await ask()

            words = peer.memory.words

            async def stands(word: pb.LeaseWord) -> bool:
                unseen = armed() and fault("cache_store.lease_word", key=job.key, rank=self._identity.rank)
                return words is not None and not unseen and await words.stands(word)

            limits = FetchLimits(
                steal_at=job.deadline - self._settings.steal_before_deadline_s,
                wait_s=self._settings.transfer_wait_timeout_s,
                renew_s=max(SHORTEST_RENEWAL_S, (peer.lease_seconds or self._settings.lease_seconds) / 3),
                clock=self._clock,
            )
            proofs = Proofs(stands, prove, renew)
            return FetchLanding(peer.memory.fetcher, wake, job.after, peer.memory, leg.shares, proofs, limits)
        if peer.transport == TCP:
            target = self._tcp_target(job)
            assert self._workers is not None
            return TcpLanding(self._peers.dialer, peer, target, self._workers, wake)
        if staging is not None:
            return StagedLanding(staging, wake, job.after)
        assert isinstance(self._pool, HostKvPool)
        return HostLanding(self._pool)

    def _tcp_target(self, job: Job) -> Target:
        if self._staging is not None:
            return StagedTarget(self._staging, job.after)
        assert isinstance(self._pool, HostKvPool)
        return HostTarget(self._pool)

    async def _connect(self, job: Job, leg: Leg) -> tuple[Peer, grpc.aio.Channel]:
        """The peer, after a handshake, and a channel to it that is connected."""
        try:
            async with asyncio.timeout(None if math.isinf(job.deadline) else job.deadline - self._clock()):
                peer = await self._peers.ready(leg.address, job.source.engine_id)
                return peer, (await self._peers.bulk_connection(leg.address)).channel
        except TimeoutError:
            raise BatonError(
                ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed; allow it more time"
            ) from None

    async def _receive(self, key: str, load: Load, call: grpc.aio.UnaryStreamCall[Any, Any], landing: Landing) -> None:
        """Reads the stream to its end, as long as the load allows it to take."""

        def give_up() -> None:
            landing.give_up()
            call.cancel()

        watch = _Watch(load, give_up, self._clock)
        try:
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    break
                effect = (
                    await fault_async("cache_store.read_event", key=key, rank=self._identity.rank) if armed() else 0
                )
                if not effect & DROP:
                    await self._consume(load, cast(bytes, message), landing)
                if effect & DUPLICATE:
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
                header, data = piece
                await landing.store(load, load.read_header(header), data)
                return
            event = pb.LoadEvent.FromString(message)
        except DecodeError:
            load.fail_with(breach("an event that cannot be parsed"))
        if event.HasField("pieces"):
            if event.HasField("started") or event.state or event.notices or event.HasField("done"):
                load.fail_with(breach("a piece event that is another one as well"))
            await landing.store(load, load.read_header(event.pieces), memoryview(event.data))
            return
        if not (event.HasField("started") or event.state or event.notices or event.HasField("done")):
            load.fail_with(breach("an event of no kind"))
        if event.HasField("started"):
            load.on_started(event.started)
            await landing.begin(load, event.started)
        if event.state:
            load.on_state(event.state)
        for notice in event.notices:
            await landing.store(load, load.read_notice(notice), _NO_BYTES)
        if event.HasField("done"):
            await landing.settle(load)
            load.on_done(event.done)

    def _wanted(self, job: Job, leg: Leg, peer: Peer) -> tuple[WantedHere, ...]:
        groups = []
        for tag, share in leg.shares.items():
            first_block, ids = job.wanted[tag]
            layout = self._identity.group(tag)
            assert layout is not None  # the plan is made of the identity's groups
            ranges = layout.partition_ranges(share.dest_count, share.dest_id)
            size = sum(stop - start for start, stop in ranges)
            positions = None
            if peer.transport in ONE_SIDED:
                positions = Positions.between(peer.block_sizes[tag], layout.block_size, job.prompt_tokens)
            groups.append(
                WantedHere(layout, first_block, list(ids), size, ranges, share.dest_count, share.dest_id, positions)
            )
        return tuple(groups)

    def _request(self, job: Job, leg: Leg, load: Load) -> pb.LoadRequest:
        return pb.LoadRequest(
            reference=reference(job.key, job.source, leg.generation),
            wanted=[
                pb.WantedBlocks(
                    group=item.layout.tag,
                    block_size=item.layout.block_size,
                    first_block=item.first_block,
                    num_blocks=len(item.block_ids),
                    block_bytes=item.piece_bytes,
                    num_layers=item.layout.num_layers,
                    partition_count=leg.shares[item.layout.tag].source_count,
                    partition_id=leg.shares[item.layout.tag].source_id,
                )
                for item in load.wanted
            ],
            prompt_tokens=job.prompt_tokens,
            checksum=load.checksum_mode,
            chunk_bytes=self._settings.chunk_bytes_of(leg.transport),
            transport=leg.transport,
            reader=reader_rank(self._identity),
        )


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
