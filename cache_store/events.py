"""What an agent tells its engine, and what names a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from protos import common_pb2
from rpc.errors import BatonError

Outcome = Literal["released", "aborted", "expired"]
ExpiryCause = Literal["", "never_loaded", "load_stalled", "never_released"]
Timeline: TypeAlias = "list[tuple[str, int]]"  # (name, time.monotonic_ns())


@dataclass(frozen=True)
class KvSourceRef:
    """Where a decode server finds the prompt's KV: addresses ("host:port") of the prefill ranks, in rank order."""

    engine_id: str
    addresses: tuple[str, ...]
    tp_size: int


@dataclass(frozen=True)
class LeaseEnded:
    """P: nothing of the cache store reads or keeps the blocks of this allocation any more. Once per admitted key.

    It may come before `computed` was called (the decode server gave up early); `computed` is then a no-op.
    `publish_seconds` is the time from `computed` to everything being readable, `held_seconds` from there to the end.
    """

    request_key: str
    generation: int
    outcome: Outcome
    cause: ExpiryCause = ""
    error: BatonError | None = None
    publish_seconds: float = 0.0
    held_seconds: float = 0.0
    events: Timeline = field(default_factory=list)
    # Loads that came with a W3C trace context: the context, begin and end in ns of the monotonic clock.
    load_times: list[tuple[str, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class LoadDone:
    """D: every wanted block arrived and is verified. P has been told that it may free its own."""

    request_key: str
    result: common_pb2.PrefillResult
    bytes: int
    seconds: float
    exposed_seconds: float
    events: Timeline = field(default_factory=list)
    transport: str = "grpc"


@dataclass(frozen=True)
class LoadFailed:
    """D: the load is over and nothing can write its blocks any more. `error` has the first cause's code.

    `delivered` and `missing` count pieces (blocks x layers). With `retriable_here`, P still holds the KV: the engine
    answers with `load(..., reload=True)` (once, into new blocks) or `cancel_load`; P's lease bounds how long it may
    take its time. With `foreign` its blocks may hold bytes that nobody has checked, of other requests or damaged ones,
    finite numbers or not: they are to be wiped before they are given out.
    """

    request_key: str
    error: BatonError
    delivered: int
    missing: int
    retriable_here: bool
    events: Timeline = field(default_factory=list)
    foreign: bool = False
    transport: str = "grpc"


AgentEvent: TypeAlias = LeaseEnded | LoadDone | LoadFailed


@dataclass(frozen=True)
class Observation:
    """Increment of a counter or sample of a histogram of the metric family `name` (full name, own role left out)."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class AgentStats:
    """State of an agent at one moment."""

    leases: int = 0
    readers: int = 0  # loads that P is serving
    parked: int = 0
    loads: int = 0  # loads that D has open
    queue_depth: int = 0  # parked loads, and engine commands not yet taken up
    tombstones: int = 0
    peers_connected: int = 0
    peers_incompatible: int = 0
    peers_lost: int = 0
    oldest_hold_seconds: Mapping[str, float] = field(default_factory=dict)  # of staged, receiving

    @property
    def transfers_inflight(self) -> int:
        return self.readers + self.loads
