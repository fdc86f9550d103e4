"""D's side of the cache store: keeps leases alive while requests are queued, and pulls their KV into the pool.

A load has one leg per prefill rank that it has to do with; with equal tensor-parallel sizes that is one. Each leg that
reads is one `Load` stream (`leg_stream.py`) and the only writer of its blocks, so a load is quiescent as soon as its
legs' tasks have ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from cache_store import wire
from cache_store.events import AgentEvent, KvSourceRef, LoadDone, LoadFailed, Timeline
from cache_store.failures import abort_source, blames_request, observe_failure
from cache_store.geometry.layout import AgentIdentity
from cache_store.loading.job import Job, Leg, make_legs, reader_rank, reference
from cache_store.loading.leg_stream import SHORTEST_RENEWAL_S, LegStreams
from cache_store.loading.load import Load, LoadState
from cache_store.loading.peers import Peers
from cache_store.memory.fetching import Fetcher
from cache_store.memory.pool import KvPool
from cache_store.memory.staging import Staging, Ticket
from cache_store.observations import Observe
from cache_store.settings import AgentSettings
from cache_store.transports import ONE_SIDED, TCP, Offer
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode
from rpc.faults import DROP, DUPLICATE, fault_async

FAILURE_MARKER = "PD_CACHE_KEY_READ_FAILED"

_log = logging.getLogger(__name__)

# After these, P still holds the KV as far as D knows, and a second try may succeed.
_RETRIABLE = frozenset(
    {
        ErrorCode.CONNECTION_RESET_BY_PEER,
        ErrorCode.LOAD_CACHE_TIMEOUT,
        ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED,
        ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
        ErrorCode.CACHE_STORE_LOAD_SEND_REQUEST_FAILED,
        ErrorCode.CACHE_STORE_CALL_PREFILL_TIMEOUT,
        ErrorCode.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED,
        ErrorCode.CACHE_STORE_LOAD_RDMA_WRITE_FAILED,
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
class _Kept:
    """A load that has ended without a word to P: one that failed and may be repeated, or one of several ranks. What its
    reload, its end, or the giving up needs to know."""

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
        fetchers: Mapping[str, Fetcher],
        settings: AgentSettings,
        observe: Observe,
        emit: Callable[[AgentEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float] = time.monotonic,
        workers: Executor | None = None,
    ) -> None:
        self._identity = identity
        self._pool = pool
        self._staging = staging
        self._settings = settings
        self._observe = observe
        self._emit = emit
        self._spawn = spawn
        self._clock = clock
        self.peers = Peers(identity, settings, offer, fetchers, observe, clock)
        self._streams = LegStreams(identity, pool, staging, settings, self.peers, observe, clock, workers)
        self._jobs: dict[str, Job] = {}
        self._renewals: dict[str, tuple[KvSourceRef, asyncio.Task[None]]] = {}
        self._kept: dict[str, _Kept] = {}
        self._holds: dict[str, asyncio.Task[None]] = {}  # renewals of leases of a load that no stream renews

    # ---- commands of the engine

    def keep_alive(self, key: str, source: KvSourceRef) -> None:
        if key not in self._renewals and key not in self._jobs:
            self._renewals[key] = (source, self._spawn(self._renew(key, source, None)))

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
        together: bool = False,
    ) -> None:
        if key in self._jobs:
            raise ValueError(f"a load of {key} is open already")
        self.forget(key)
        job = Job(key, source, prompt_tokens, wanted, deadline, reload, began, after, traceparent, together)
        kept = self._kept.pop(key, None)
        try:
            job.legs = self._plan(job, kept)
        except BatonError as error:
            job.fail(error)
        self._jobs[key] = job
        self._hold(job, [leg for leg in job.legs if not leg.reads])
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
            addresses = (leg.address for leg in make_legs(self._identity, source, {}))
            self._release_all(key, source, dict.fromkeys(addresses), error)
        else:
            return
        self._observe("aborts_total", leg="cache_store", source=abort_source(error))

    def refuse_load(self, key: str, source: KvSourceRef, error: BatonError) -> None:
        """A load that was not taken in: nothing keeps its lease alive any more, and P is told."""
        if key in self._jobs:
            return
        kept = self._kept.pop(key, None)
        self.forget(key)
        if kept is None:
            generations = dict.fromkeys((leg.address for leg in make_legs(self._identity, source, {})), None)
        else:
            generations = kept.generations
        self._release_all(key, source, generations, error)

    def stop_load(self, key: str, error: BatonError) -> None:
        """Ends an open load because another rank's has failed, without a word to P: both may be repeated."""
        job = self._jobs.get(key)
        if job is not None and job.task is not None and job.error is None:
            job.stopped = True
            job.fail(error)
            job.task.cancel()

    def finish_load(self, key: str) -> None:
        """Every rank has its part: P may free the KV."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._release_all(key, kept.source, kept.generations, None)

    def cancel_all(self, error: BatonError) -> None:
        for key in [*self._jobs, *self._kept, *self._renewals]:
            self.cancel_load(key, error)

    def tick(self) -> None:
        """Drops what the engine never came back for; P's own clock has ended those leases."""
        now = self._clock()
        for key, kept in list(self._kept.items()):
            if kept.until <= now:
                del self._kept[key]
                self._let_go(key)
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

    def _plan(self, job: Job, kept: _Kept | None) -> list[Leg]:
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
        return make_legs(self._identity, job.source, kept.generations if kept is not None else {})

    async def _run(self, job: Job) -> None:
        try:
            if job.error is None:
                async with asyncio.TaskGroup() as legs:
                    for leg in job.reading():
                        legs.create_task(self._run_leg(job, leg))
        except asyncio.CancelledError:
            job.fail(BatonError(ErrorCode.CANCELLED, "the load was cancelled"))
        except BaseExceptionGroup as group:
            if job.error is None:  # every leg sets it before it raises
                job.fail(BatonError(ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, metadata={"error": str(group)}))

    async def _run_leg(self, job: Job, leg: Leg) -> None:
        try:
            await self._streams.pull(job, leg)
        except asyncio.CancelledError:
            raise
        except BatonError as error:
            job.failed.append((leg.peer_rank, error.code.name))
            job.fail(error.with_context(peer=leg.address, peer_rank=str(leg.peer_rank)))
            raise
        except Exception as error:  # of the pool, of gRPC, of a metric: ends the load, never leaks it
            _log.warning("loading %s failed", job.key, exc_info=error)
            job.failed.append((leg.peer_rank, ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR.name))
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

    # ---- its end

    def _end(self, job: Job) -> None:
        """The tasks of the load have ended. Its end follows at once, unless blocks have to be held."""
        hold_s = max((leg.hold_until for leg in job.legs), default=0.0) - self._clock()
        if hold_s > 0:
            asyncio.get_running_loop().call_later(hold_s, self._finish, job)
        else:
            self._finish(job)

    def _finish(self, job: Job) -> None:
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
        _log.debug("a load has ended", extra={"request_key": job.key, "outcome": "failed" if event is None else "ok"})
        if event is None:
            self._emit(self._failed(job, loads, events))
            return
        self._emit(event)  # the engine goes on, whatever P is told
        generations = {leg.address: leg.generation for leg in job.legs}
        if job.together:
            self._keep(job, generations, self._clock())
        else:
            self._release_all(job.key, job.source, generations, None)

    def _done(self, job: Job, loads: Sequence[Load], events: Timeline) -> LoadDone | None:
        """The event of a load that is complete; None when it is not."""
        complete = job.error is None and len(loads) == sum(1 for _ in job.reading())
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
        return LoadDone(job.key, result, size, now - job.began, exposed, events, job.transport)

    def _failed(self, job: Job, loads: Sequence[Load], events: Timeline) -> LoadFailed:
        """The event of a load that failed. Its figures and its line in the log are worth less than the event."""
        now = self._clock()
        generations = {leg.address: leg.generation for leg in job.legs}
        delivered = sum(load.delivered for load in loads)
        error = job.error or BatonError(ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, "the load ended without a cause")
        wanted = self._pieces_wanted(job)
        missing = wanted - delivered
        error.metadata.update(delivered=str(delivered), missing=str(missing))
        error.with_context(channel=job.transport)
        if len(job.legs) > 1 and job.failed:
            error.metadata["peer_ranks"] = statuses(job.failed)
        try:
            self._report(job, error, delivered, wanted, now)
        except Exception as defect:
            _log.warning("reporting the failed load of %s failed", job.key, exc_info=defect)
        retriable = (
            not job.reload
            and job.cancelled_at is None
            and (job.stopped or error.code in _RETRIABLE)
            and not blames_request(error)
            and now < job.deadline
            and all(leg.generation is not None or not leg.sent for leg in job.legs)
        )
        if retriable:
            self._keep(job, generations, now)
        elif error.code not in _NOT_OURS and job.legs:
            self._release_all(job.key, job.source, generations, error)
        else:
            self._let_go(job.key)
        foreign = any(leg.sent and self._unchecked_bytes(leg.transport) for leg in job.legs)
        return LoadFailed(job.key, error, delivered, missing, retriable, events, foreign, job.transport)

    def _unchecked_bytes(self, transport: str) -> bool:
        """Whether a failed load may leave bytes in its blocks that nobody has checked: read late, they may be those of
        another request; over tcp they are in host memory before their checksums are compared, damaged ones too."""
        return transport in ONE_SIDED or (transport == TCP and self._staging is None)

    def _keep(self, job: Job, generations: dict[str, int | None], now: float) -> None:
        """Says nothing to P yet. What is kept is forgotten when P's own clock has ended the lease; of one of several
        ranks it is renewed until the slowest of them has ended its part, and the engine says what becomes of it."""
        if job.together:
            self._kept[job.key] = _Kept(job.source, generations, math.inf)
            self._hold(job, job.legs)
            return
        lease_s = max((self.peers.get(leg.address).lease_seconds for leg in job.legs), default=0.0)
        self._kept[job.key] = _Kept(job.source, generations, now + (lease_s or self._settings.lease_seconds))

    def _pieces_wanted(self, job: Job) -> int:
        """Blocks x layers of all streams; one stream's worth when the load was refused before it had any."""
        layers = {group.tag: group.num_layers for group in self._identity.groups}
        groups = [tag for leg in job.reading() for tag in leg.shares] or list(job.wanted)
        return sum(len(job.wanted[tag][1]) * layers.get(tag, 0) for tag in groups)

    def _report(self, job: Job, error: BatonError, delivered: int, wanted: int, now: float) -> None:
        outcome = "failed" if job.cancelled_at is None and not job.stopped else "aborted"
        self._observe("kv_transfer_seconds", now - job.began, transport=job.transport, outcome=outcome)
        if job.stopped:
            return  # the rank that failed reports it
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
            "finished=%d/%d cost_ms=%.0f peer_ranks=[%s]: %s",
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
            statuses(job.failed),
            error.message,
        )

    def _release_all(
        self, key: str, source: KvSourceRef, generations: Mapping[str, int | None], error: BatonError | None
    ) -> None:
        self._let_go(key)
        for address, generation in generations.items():
            request = pb.ReleaseRequest(
                reference=reference(key, source, generation),
                complete=error is None,
                reader=reader_rank(self._identity),
            )
            if error is not None:
                request.cause.CopyFrom(wire.detail_of(error))
            self._spawn(self._release(address, request))

    async def _release(self, address: str, request: pb.ReleaseRequest) -> None:
        """Told once: when it does not arrive, the lease ends by its own clock."""
        key = request.reference.request_key
        try:
            effect = await fault_async("cache_store.release", key=key, side="decode", rank=self._identity.rank)
            if not effect & DROP:
                await self.peers.release(address, request)
            if effect & DUPLICATE:
                await self.peers.release(address, request)
        except BatonError as error:
            _log.info("release of %s at %s: %s", key, address, error)

    # ---- leases that no stream renews: of queued requests, and of a load's other ranks

    def _hold(self, job: Job, legs: Sequence[Leg]) -> None:
        """Renews the leases of these legs alone until `_let_go`: of ranks with copies of what is read elsewhere, and of
        those that have been read while other ranks' loads go on."""
        self._let_go(job.key)
        if legs:
            self._holds[job.key] = self._spawn(self._renew(job.key, job.source, legs))

    def _let_go(self, key: str) -> None:
        task = self._holds.pop(key, None)
        if task is not None:
            task.cancel()

    async def _renew(self, key: str, source: KvSourceRef, loaded: Sequence[Leg] | None) -> None:
        """Until cancelled. An unknown key is no failure: P may not have admitted the request yet. loaded: legs of an
        open load; None: the request is queued."""
        legs = make_legs(self._identity, source, {}) if loaded is None else loaded
        lease_s = own_s = self._settings.lease_seconds
        if loaded is not None:
            lease_s = min(self.peers.get(leg.address).lease_seconds or own_s for leg in legs)
        while True:
            await asyncio.sleep(max(SHORTEST_RENEWAL_S, lease_s / 3))
            for leg in legs:
                try:
                    if await fault_async("cache_store.renew", key=key, side="decode", rank=self._identity.rank):
                        continue
                    peer = await self.peers.ready(leg.address, source.engine_id)
                    lease_s = peer.lease_seconds
                    named = reference(key, source, leg.generation)
                    await self.peers.renew(leg.address, named, reading=loaded is not None)
                except BatonError as error:
                    _log.debug("renewal of %s at %s: %s", key, leg.address, error)


def statuses(failed: Iterable[tuple[int, str]]) -> str:
    """`"<rank>: <status>, "` for each rank that failed, in the order in which they did."""
    return "".join(f"{rank}: {status}, " for rank, status in failed)
