"""What rank 0 tells the cache-store agents of the other ranks, and what they have to say: calls down, events up.

There is one call for each method of `CacheStoreAgent` by which an engine drives its agent, except `publish`: every
rank publishes from the layer hook of its own step, with the shares of the step (`Share`). Protobuf messages travel as
bytes. Times are readings of `time.monotonic_ns()`, which all processes of a host have in common.
"""

from __future__ import annotations

import time
from typing import TypeAlias, assert_never

import msgspec

from cache_store.agent import CacheStoreAgent
from cache_store.events import (
    AgentEvent,
    AgentStats,
    ExpiryCause,
    KvSourceRef,
    LeaseEnded,
    LoadDone,
    LoadFailed,
    Outcome,
)
from engine.messages import EngineError, KvSource, RankStats
from engine.scheduler.news import engine_error
from protos import common_pb2
from rpc.errors import BatonError

Timeline: TypeAlias = list[tuple[str, int]]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one request and group that a step completes: those before `upto_block`, `new_blocks` of them for the
    first time."""

    request_key: str
    upto_block: int
    new_blocks: int


Shares: TypeAlias = dict[str, list[Share]]  # by group tag


# ---- calls


class Admit(msgspec.Struct, frozen=True, array_like=True, tag="admit"):
    request_key: str
    generation: int
    prompt_tokens: int
    blocks: dict[str, list[int]]
    ready_tokens: int


class Computed(msgspec.Struct, frozen=True, array_like=True, tag="computed"):
    request_key: str
    result: bytes  # a PrefillResult
    hold: bool


class Fail(msgspec.Struct, frozen=True, array_like=True, tag="fail"):
    request_key: str
    error: EngineError


class Tombstone(msgspec.Struct, frozen=True, array_like=True, tag="tombstone"):
    request_key: str


class KeepAlive(msgspec.Struct, frozen=True, array_like=True, tag="keep_alive"):
    request_key: str
    source: KvSource


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    request_key: str


class StartLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    request_key: str
    source: KvSource
    prompt_tokens: int
    wanted: dict[str, tuple[int, list[int]]]
    deadline_ns: int  # 0: none
    reload: bool
    traceparent: str


class StopLoad(msgspec.Struct, frozen=True, array_like=True, tag="stop_load"):
    request_key: str
    error: EngineError


class FinishLoad(msgspec.Struct, frozen=True, array_like=True, tag="finish_load"):
    request_key: str


class CancelLoad(msgspec.Struct, frozen=True, array_like=True, tag="cancel_load"):
    request_key: str
    error: EngineError


AgentCall: TypeAlias = (
    Admit | Computed | Fail | Tombstone | KeepAlive | Forget | StartLoad | StopLoad | FinishLoad | CancelLoad
)


def apply(call: AgentCall, agent: CacheStoreAgent) -> None:
    """Does what rank 0 asks. Like the agent's methods it never blocks, and raises nothing for what the network does."""
    key = call.request_key
    match call:
        case Admit():
            agent.admit(key, call.generation, call.prompt_tokens, call.blocks, call.ready_tokens)
        case Computed():
            agent.computed(key, common_pb2.PrefillResult.FromString(call.result), call.hold)
        case Fail():
            agent.fail(key, error_of(call.error))
        case Tombstone():
            agent.tombstone(key)
        case KeepAlive():
            agent.keep_alive(key, source_of(call.source))
        case Forget():
            agent.forget(key)
        case StartLoad():
            left_s = (call.deadline_ns - time.monotonic_ns()) / 1e9 if call.deadline_ns else None
            source = source_of(call.source)
            agent.load(
                key, source, call.prompt_tokens, call.wanted, left_s, call.reload, call.traceparent, together=True
            )
        case StopLoad():
            agent.stop_load(key, error_of(call.error))
        case FinishLoad():
            agent.finish_load(key)
        case CancelLoad():
            agent.cancel_load(key, error_of(call.error))
        case _:
            assert_never(call)


# ---- events


class LeaseEndedHere(msgspec.Struct, frozen=True, array_like=True, tag="lease_ended"):
    """`cache_store.events.LeaseEnded` of one rank."""

    request_key: str
    generation: int
    outcome: Outcome
    cause: ExpiryCause = ""
    error: EngineError | None = None
    publish_seconds: float = 0.0
    held_seconds: float = 0.0
    events: Timeline = []
    load_times: list[tuple[str, int, int]] = []


class LoadDoneHere(msgspec.Struct, frozen=True, array_like=True, tag="load_done"):
    """`cache_store.events.LoadDone` of one rank."""

    request_key: str
    result: bytes  # a PrefillResult
    size_bytes: int
    seconds: float
    exposed_seconds: float
    events: Timeline = []
    transport: str = "grpc"


class LoadFailedHere(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """`cache_store.events.LoadFailed` of one rank."""

    request_key: str
    error: EngineError
    delivered: int
    missing: int
    retriable_here: bool
    foreign: bool = False
    events: Timeline = []
    transport: str = "grpc"


RankEvent: TypeAlias = LeaseEndedHere | LoadDoneHere | LoadFailedHere


def event_message(event: AgentEvent) -> RankEvent:
    """An agent's event, to be sent to rank 0."""
    match event:
        case LeaseEnded():
            return LeaseEndedHere(
                event.request_key,
                event.generation,
                event.outcome,
                event.cause,
                None if event.error is None else engine_error(event.error),
                event.publish_seconds,
                event.held_seconds,
                event.events,
                event.load_times,
            )
        case LoadDone():
            return LoadDoneHere(
                event.request_key,
                event.result.SerializeToString(),
                event.bytes,
                event.seconds,
                event.exposed_seconds,
                event.events,
                event.transport,
            )
        case LoadFailed():
            return LoadFailedHere(
                event.request_key,
                engine_error(event.error),
                event.delivered,
                event.missing,
                event.retriable_here,
                event.foreign,
                event.events,
                event.transport,
            )
        case _:
            assert_never(event)


def agent_event(message: RankEvent) -> AgentEvent:
    """The event that `event_message` was made of."""
    match message:
        case LeaseEndedHere():
            return LeaseEnded(
                message.request_key,
                message.generation,
                message.outcome,
                message.cause,
                None if message.error is None else error_of(message.error),
                message.publish_seconds,
                message.held_seconds,
                message.events,
                message.load_times,
            )
        case LoadDoneHere():
            return LoadDone(
                message.request_key,
                common_pb2.PrefillResult.FromString(message.result),
                message.size_bytes,
                message.seconds,
                message.exposed_seconds,
                message.events,
                message.transport,
            )
        case LoadFailedHere():
            return LoadFailed(
                message.request_key,
                error_of(message.error),
                message.delivered,
                message.missing,
                message.retriable_here,
                message.events,
                message.foreign,
                message.transport,
            )
        case _:
            assert_never(message)


# ---- parts of both


def error_of(error: EngineError) -> BatonError:
    """The failure inside a message."""
    return BatonError.from_number(error.code, error.message, stage=error.stage, metadata=error.metadata)


def source_of(source: KvSource) -> KvSourceRef:
    return KvSourceRef(source.engine_id, source.addresses, source.tp_size)


def source_message(source: KvSourceRef) -> KvSource:
    return KvSource(source.engine_id, source.addresses, source.tp_size)


def rank_stats(rank: int, stats: AgentStats) -> RankStats:
    """An agent's state, as the part of its rank in the engine's figures."""
    return RankStats(
        rank,
        leases=stats.leases,
        transfers_inflight=stats.transfers_inflight,
        transfer_queue_depth=stats.queue_depth,
        tombstones=stats.tombstones,
        peers_connected=stats.peers_connected,
        peers_incompatible=stats.peers_incompatible,
        peers_lost=stats.peers_lost,
        oldest_hold_seconds=dict(stats.oldest_hold_seconds),
    )
