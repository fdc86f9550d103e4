"""One load of one key on the decode server, and its legs: what each prefill rank has to do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cache_store.events import KvSourceRef
from cache_store.geometry.layout import AgentIdentity
from cache_store.geometry.tp_mapping import UNMAPPED, PeerShare, peer_address, peer_map
from cache_store.loading.load import Load
from cache_store.memory.staging import Ticket
from cache_store.transports import GRPC
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode


@dataclass(eq=False)
class Leg:
    """The part of a load that comes from one prefill rank: of each cache group the share of the heads that is read.

    Without shares nothing is read, and the rank is told of the end of the load because it holds copies of the heads.
    """

    peer_rank: int
    address: str
    shares: Mapping[str, PeerShare]
    generation: int | None = None  # of an earlier load of the key, then of this one
    transport: str = GRPC
    load: Load | None = None
    sent: bool = False  # the stream was opened, so P may have counted it
    ended: float = 0.0  # reading of the clock
    hold_until: float = 0.0  # its blocks are given back no sooner: a one-sided copy was not proven to have ended

    @property
    def reads(self) -> bool:
        return bool(self.shares)


@dataclass(eq=False)
class Job:
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
    together: bool = False  # with other ranks of this server, whose loads decide about this one's lease too
    legs: list[Leg] = field(default_factory=list)
    error: BatonError | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)  # peer rank and code of each failed leg, first first
    task: asyncio.Task[None] | None = None
    cancelled_at: float | None = None
    stopped: bool = False  # because another rank's load has failed

    def fail(self, error: BatonError) -> None:
        if self.error is None:
            self.error = error

    def reading(self) -> Iterator[Leg]:
        """The legs with a stream."""
        return (leg for leg in self.legs if leg.reads)

    @property
    def transport(self) -> str:
        """Label of the load's figures."""
        return next((leg.transport for leg in self.legs if leg.sent), GRPC)


def make_legs(identity: AgentIdentity, source: KvSourceRef, generations: Mapping[str, int | None]) -> list[Leg]:
    """One leg for each prefill rank that `identity` has to do with. generations: by address, of an earlier load.

    Raises INVALID_PARAMS for a source that is not complete, ASYMMETRIC_TP_FAILED for sizes that cannot pair.
    """
    if not source.addresses or source.tp_size != len(source.addresses):
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"kv_source has {len(source.addresses)} addresses for tp_size {source.tp_size}",
            param="kv_source",
        )
    legs = []
    for reads in peer_map(identity.heads, identity.tp_size, identity.rank, source.tp_size):
        address = peer_address(source.addresses, reads.peer_rank)
        if address == UNMAPPED:
            raise BatonError(ErrorCode.ASYMMETRIC_TP_FAILED, metadata={"peer": UNMAPPED})
        legs.append(Leg(reads.peer_rank, address, reads.shares, generations.get(address)))
    return legs


def reference(key: str, source: KvSourceRef, generation: int | None) -> pb.KvReference:
    """Names the staged KV of a key; without a generation, of its present allocation."""
    named = pb.KvReference(engine_id=source.engine_id, request_key=key)
    if generation is not None:
        named.generation = generation
    return named


def reader_rank(identity: AgentIdentity) -> pb.ReaderRank:
    return pb.ReaderRank(rank=identity.rank, tp_size=identity.tp_size)
