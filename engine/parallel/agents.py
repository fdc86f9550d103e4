"""The cache-store agents of all ranks, as rank 0's engine sees them: one agent.

Every rank stages and loads its own share of the KV in the same blocks. What the engine asks is asked of all; their
events come together here to one for the whole server, once nothing of any rank can change it any more:

* **a load** is done when it is done on every rank; only then the prefill server is told. When it fails on one, the
  others are stopped, and the one failure comes out when each of them has ended, because only then nothing writes the
  blocks. The first cause wins. When every rank may read once more, the load may be repeated.
* **a lease** has ended when it has on every rank. When a rank cannot serve a request any more, the others end it too.

Figures that stand for a load or a lease as a whole are booked here, once each; those of bytes, pieces, connections and
failures are sums over the ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache_store.agent import CacheStoreAgent
from cache_store.events import AgentEvent, AgentStats, KvSourceRef, LeaseEnded, LoadDone, LoadFailed, Observation
from cache_store.failures import again
from cache_store.geometry.layout import AgentIdentity
from cache_store.loading.puller import FAILURE_MARKER, statuses
from cache_store.memory.staging import Ticket
from cache_store.observations import ObservationBuffer
from engine.messages import RankStats
from engine.parallel.agent_messages import (
    Admit,
    AgentCall,
    CancelLoad,
    Computed,
    Fail,
    FinishLoad,
    Forget,
    KeepAlive,
    StartLoad,
    StopLoad,
    Tombstone,
    agent_event,
    rank_stats,
    source_message,
)
from engine.parallel.messages import RankFrame
from engine.scheduler.news import engine_error
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode

# Booked here, once for all ranks.
_OF_ALL = frozenset(
    {
        "baton_kv_transfer_seconds",
        "baton_kv_transfer_exposed_seconds",
        "baton_kv_transfer_size_bytes",
        "baton_kv_lease_hold_seconds",
        "baton_kv_lease_expirations_total",
    }
)
# The same on every rank: those of rank 0 count.
_OF_ONE = _OF_ALL | {"baton_aborts_total", "baton_kv_quarantine_seconds"}

_log = logging.getLogger(__name__)


class OtherRanks(Protocol):
    """The part of `engine.parallel.hub.Hub` that is used here."""

    @property
    def size(self) -> int: ...
    def post(self, call: AgentCall) -> None: ...
    def poll(self) -> Sequence[tuple[int, RankFrame]]: ...


@dataclass(eq=False)
class _Lease:
    """A lease that every rank has for the same request."""

    admitted_at: float
    ended: dict[int, LeaseEnded] = field(default_factory=dict)  # by rank, in the order of their ends
    told: bool = False  # the ranks that still serve it were told to end it


@dataclass(eq=False)
class _Load:
    """A load that every rank has open for the same request."""

    source: KvSourceRef
    began: float
    done: dict[int, LoadDone] = field(default_factory=dict)
    failed: dict[int, LoadFailed] = field(default_factory=dict)  # by rank, in the order of their ends
    cancelled: bool = False  # by the engine


class RankAgents:
    """Has the methods of `CacheStoreAgent` that an engine uses. Belongs to the engine's thread."""

    def __init__(self, agent: CacheStoreAgent, others: OtherRanks, clock: Callable[[], float] = time.monotonic) -> None:
        """agent: rank 0's own."""
        self.local = agent
        self._others = others
        self._size = others.size
        self._clock = clock
        self._leases: dict[tuple[str, int], _Lease] = {}
        self._loads: dict[str, _Load] = {}
        self._events: list[AgentEvent] = []
        self._booked = ObservationBuffer()
        self._theirs: list[Observation] = []
        self._stats: dict[int, RankStats] = {}

    # -- rank 0's own ---------------------------------------------------------------------------------------

    @property
    def identity(self) -> AgentIdentity:
        return self.local.identity

    @property
    def transports(self) -> tuple[str, ...]:
        return self.local.transports

    @property
    def on_device(self) -> bool:
        return self.local.on_device

    def mark(self) -> Ticket | None:
        return self.local.mark()

    def publish(self, request_key: str, group: str, layer: int, upto_block: int, after: Ticket | None = None) -> None:
        """Of rank 0's share; every other rank publishes its own, with the same shares of the step."""
        self.local.publish(request_key, group, layer, upto_block, after)

    def close(self, timeout_s: float) -> None:
        """Closes rank 0's agent. Those of the other ranks end with their processes."""
        self.local.close(timeout_s)

    # -- prefill side ---------------------------------------------------------------------------------------

    def admit(
        self,
        request_key: str,
        generation: int,
        prompt_tokens: int,
        blocks: Mapping[str, Sequence[int]],
        ready_tokens: int,
    ) -> None:
        self._leases[request_key, generation] = _Lease(self._clock())
        own = {tag: list(ids) for tag, ids in blocks.items()}
        self._others.post(Admit(request_key, generation, prompt_tokens, own, ready_tokens))
        self.local.admit(request_key, generation, prompt_tokens, own, ready_tokens)

    def computed(self, request_key: str, result: common_pb2.PrefillResult, hold: bool) -> None:
        self._others.post(Computed(request_key, result.SerializeToString(), hold))
        self.local.computed(request_key, result, hold)

    def fail(self, request_key: str, error: BatonError) -> None:
        self._others.post(Fail(request_key, engine_error(error)))
        self.local.fail(request_key, error)

    def tombstone(self, request_key: str) -> None:
        self._others.post(Tombstone(request_key))
        self.local.tombstone(request_key)

    # -- decode side ----------------------------------------------------------------------------------------

    def keep_alive(self, request_key: str, source: KvSourceRef) -> None:
        self._others.post(KeepAlive(request_key, source_message(source)))
        self.local.keep_alive(request_key, source)

    def forget(self, request_key: str) -> None:
        self._others.post(Forget(request_key))
        self.local.forget(request_key)

    def load(
        self,
        request_key: str,
        source: KvSourceRef,
        prompt_tokens: int,
        wanted: Mapping[str, tuple[int, Sequence[int]]],
        deadline_s: float | None,
        reload: bool = False,
        traceparent: str = "",
    ) -> None:
        """One LoadDone or LoadFailed follows, when every rank has ended its part."""
        if request_key in self._loads:
            _log.error("a load of %s is open already", request_key)
            return
        self._loads[request_key] = _Load(source, self._clock())
        deadline_ns = 0 if deadline_s is None else time.monotonic_ns() + max(0, int(deadline_s * 1e9)) or 1
        own = {tag: (first, list(ids)) for tag, (first, ids) in wanted.items()}
        self._others.post(
            StartLoad(request_key, source_message(source), prompt_tokens, own, deadline_ns, reload, traceparent)
        )
        self.local.load(request_key, source, prompt_tokens, own, deadline_s, reload, traceparent, together=True)

    def cancel_load(self, request_key: str, error: BatonError) -> None:
        load = self._loads.get(request_key)
        if load is not None:
            load.cancelled = True
        self._give_up(request_key, error)

    def _give_up(self, request_key: str, error: BatonError) -> None:
        self._others.post(CancelLoad(request_key, engine_error(error)))
        self.local.cancel_load(request_key, error)

    # -- events ---------------------------------------------------------------------------------------------

    def poll_events(self) -> list[AgentEvent]:
        """News since the last call, in order. Raises what the connections to the other ranks raise."""
        for event in self.local.poll_events():
            self._take(0, event)
        for rank, frame in self._others.poll():
            for message in frame.events:
                self._take(rank, agent_event(message))
            self._theirs += [
                Observation(item.name, item.labels, item.value)
                for item in frame.observations
                if item.name not in _OF_ONE
            ]
            if frame.stats is not None:
                self._stats[rank] = frame.stats
        events, self._events = self._events, []
        return events

    def _take(self, rank: int, event: AgentEvent) -> None:
        if isinstance(event, LeaseEnded):
            self._lease_ended(rank, event)
            return
        load = self._loads.get(event.request_key)
        if load is None or rank in load.done or rank in load.failed:
            _log.error("rank %d says twice how the load of %s ended", rank, event.request_key)
            return
        if isinstance(event, LoadDone):
            load.done[rank] = event
        else:
            load.failed[rank] = event
            if len(load.failed) == 1:
                self._first_failure(rank, event, load)
        if len(load.done) + len(load.failed) == self._size:
            del self._loads[event.request_key]
            self._events.append(self._failed(load) if load.failed else self._done(event.request_key, load))

    def _first_failure(self, rank: int, event: LoadFailed, load: _Load) -> None:
        """Stops what the other ranks still read."""
        if not load.cancelled:
            what = {"rank": str(rank), "cause": event.error.code.name, "cause_code": str(int(event.error.code))}
            message = "the load of another rank failed"
            error = BatonError(ErrorCode.LOAD_KV_CACHE_FAILED, message, metadata=what)
            self._others.post(StopLoad(event.request_key, engine_error(error)))
            self.local.stop_load(event.request_key, error)

    def _done(self, key: str, load: _Load) -> LoadDone:
        own = load.done[0]
        seconds = [event.seconds for event in load.done.values()]
        exposed = max(event.exposed_seconds for event in load.done.values())
        size = sum(event.bytes for event in load.done.values())
        observe = self._booked.observe
        observe("kv_transfer_seconds", max(seconds), transport=own.transport, outcome="ok")
        observe("kv_transfer_exposed_seconds", exposed, transport=own.transport)
        observe("kv_transfer_size_bytes", size, transport=own.transport)
        observe("load_rank_seconds", min(seconds), stat="min")
        observe("load_rank_seconds", max(seconds), stat="max")
        self._others.post(FinishLoad(key))
        self.local.finish_load(key)
        return LoadDone(key, own.result, size, max(seconds), exposed, own.events, own.transport)

    def _failed(self, load: _Load) -> LoadFailed:
        """The one failure of all ranks, with the first cause's code.

        The load may be repeated if that of each failed rank may: those that are done have not let the prefill server go
        yet. Else all of them do now.
        """
        # The news of a consequence may be quicker than that of its cause.
        causes = {each: event for each, event in load.failed.items() if not _follows(event.error)} or load.failed
        rank, first = next(iter(causes.items()))
        own = [(each, event.error.code.name) for each, event in causes.items()]
        error = again(first.error)
        if not load.cancelled:
            error.metadata["rank"] = str(rank)
            error.metadata["ranks"] = statuses(own)
        pieces = first.delivered + first.missing  # of each rank
        delivered = sum(event.delivered for event in load.failed.values()) + pieces * len(load.done)
        missing = pieces * self._size - delivered
        error.metadata.update(delivered=str(delivered), missing=str(missing))
        seconds = self._clock() - load.began
        outcome = "aborted" if load.cancelled else "failed"
        self._booked.observe("kv_transfer_seconds", seconds, transport=first.transport, outcome=outcome)
        if not load.cancelled and (rank or len(own) > 1):  # that of rank 0 alone is in its log already
            self._log_failure(first, load, error, delivered, seconds)
        foreign = any(event.foreign for event in load.failed.values())
        retriable = not load.cancelled and all(event.retriable_here for event in load.failed.values())
        if not retriable:
            self._give_up(first.request_key, error)
        return LoadFailed(
            first.request_key, error, delivered, missing, retriable, first.events, foreign, first.transport
        )

    def _log_failure(self, first: LoadFailed, load: _Load, error: BatonError, delivered: int, seconds: float) -> None:
        key = first.request_key
        _log.warning(
            "%s request_id=%s request_key=%s rank=%s worker=%s peer=%s channel=%s grpc_code=%s remote_code=%d (%s) "
            "finished=%d/%d cost_ms=%.0f ranks=[%s]: %s",
            FAILURE_MARKER,
            key.partition("#")[0],
            key,
            error.metadata["rank"],
            load.source.engine_id,
            error.metadata.get("peer", ""),
            first.transport,
            error.metadata.get("grpc_code", error.spec.grpc.name),
            int(error.code),
            error.code.name,
            delivered,
            (first.delivered + first.missing) * self._size,
            1000 * seconds,
            error.metadata["ranks"],
            error.message,
        )

    def _lease_ended(self, rank: int, event: LeaseEnded) -> None:
        key = (event.request_key, event.generation)
        lease = self._leases.get(key)
        if lease is None or rank in lease.ended:
            _log.error("rank %d says twice how the lease of %s ended", rank, event.request_key)
            return
        lease.ended[rank] = event
        if len(lease.ended) == self._size:
            del self._leases[key]
            self._events.append(self._ended(lease))
        elif event.error is not None and event.error.code is not ErrorCode.KV_LEASE_EXPIRED and not lease.told:
            # Its own failure. Where the decode server gave up, it tells every rank itself.
            lease.told = True
            self.fail(event.request_key, event.error)

    def _ended(self, lease: _Lease) -> LeaseEnded:
        """The one end of all ranks: the worst of them, and the first one with it."""
        ends = sorted(lease.ended.values(), key=lambda end: end.error is not None and _follows(end.error))
        worst = next(
            (end for outcome in ("aborted", "expired") for end in ends if end.outcome == outcome), lease.ended[0]
        )
        held = max(end.held_seconds for end in ends)
        since_admission = self._clock() - lease.admitted_at
        observe = self._booked.observe
        observe("kv_lease_hold_seconds", held or since_admission, outcome=worst.outcome)
        if worst.outcome == "expired":
            observe("kv_lease_expirations_total", cause=worst.cause)
        return LeaseEnded(
            worst.request_key,
            worst.generation,
            worst.outcome,
            worst.cause,
            worst.error,
            max(end.publish_seconds for end in ends),
            held,
            lease.ended[0].events,
            [times for end in ends for times in end.load_times],
        )

    # -- figures --------------------------------------------------------------------------------------------

    def take_observations(self) -> list[Observation]:
        """Metric news of all ranks since the last call."""
        theirs, self._theirs = self._theirs, []
        own = [item for item in self.local.take_observations() if item.name not in _OF_ALL]
        return [*own, *theirs, *self._booked.take()]

    def rank_stats(self) -> list[RankStats]:
        """State of each rank's agent, in the order of the ranks; those of other ranks as they last said."""
        others = (self._stats.get(rank) or RankStats(rank) for rank in range(1, self._size))
        return [rank_stats(0, self.local.stats()), *others]

    def stats(self) -> AgentStats:
        """Of all ranks: what each does beside the others is summed up; a lease or a peer is one for all.

        The others' open transfers, of either kind, are counted among the loads."""
        own = self.local.stats()
        others = [self._stats[rank] for rank in sorted(self._stats)]
        inflight = sum(each.transfers_inflight for each in others)
        return AgentStats(
            leases=max([own.leases, *(each.leases for each in others)]),
            readers=own.readers,
            parked=own.parked,
            loads=own.loads + inflight,
            queue_depth=own.queue_depth + sum(each.transfer_queue_depth for each in others),
            tombstones=own.tombstones,
            peers_connected=own.peers_connected,
            peers_incompatible=max([own.peers_incompatible, *(each.peers_incompatible for each in others)]),
            peers_lost=max([own.peers_lost, *(each.peers_lost for each in others)]),
            oldest_hold_seconds=_oldest([own.oldest_hold_seconds, *(each.oldest_hold_seconds for each in others)]),
        )


def _follows(error: BatonError) -> bool:
    """Whether a rank's part ended only because another one's had: it was told to give up, or its lease ended when the
    other rank gave up."""
    if error.code is ErrorCode.KV_LEASE_EXPIRED:
        return "cause_code" in error.metadata
    return error.code is ErrorCode.LOAD_KV_CACHE_FAILED


def _oldest(holds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    oldest: dict[str, float] = {}
    for hold in holds:
        for state, seconds in hold.items():
            oldest[state] = max(seconds, oldest.get(state, 0.0))
    return oldest
