"""The ways on which the bytes of KV blocks travel from one engine to another, and what one side offers of them.

The stream of `Load` goes over gRPC with each of them: it says what is ready, keeps the order and ends with the result
or a typed error. They differ in where the bytes are:

    grpc   in the events of the stream
    tcp    on a plain socket beside it, in the order of the events, which name them
    ipc    in the memory of the sending engine, on the same machine; the receiver reads them there
    nixl   in the memory of the sending engine; the receiver reads them there through NVIDIA NIXL
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from protos import cache_store_pb2 as pb

GRPC = "grpc"
TCP = "tcp"
IPC = "ipc"
NIXL = "nixl"

TRANSPORTS = (IPC, NIXL, TCP, GRPC)  # best first
# The receiver reads the blocks by itself: it has to ask, once they have been read, whether they were the request's all
# along, and a failed load may leave bytes of other requests in its own.
ONE_SIDED = frozenset({IPC, NIXL})

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """What one side can do: the transports, best first, and what they need.

    `memories`: of each one-sided transport, how the peer reaches this engine's KV memory; one that is not there can be
    used to read from others only. `on_demand`: those of which that is found out when a peer asks. `data_port`: where
    this side listens for connections of tcp; 0: it does not. `absent`: why nixl, which would be allowed, is left out.
    """

    transports: tuple[str, ...] = (GRPC,)
    host_id: str = ""
    memories: Mapping[str, pb.SharedPool] = field(default_factory=dict)
    on_demand: frozenset[str] = frozenset()
    data_port: int = 0
    absent: str = ""

    def serves(self, transport: str) -> bool:
        """Whether peers may read this engine's blocks in that way; ipc from the same machine alone."""
        if transport not in self.transports:
            return False
        if transport in ONE_SIDED:
            return transport in self.memories or transport in self.on_demand
        return transport != TCP or self.data_port > 0

    @property
    def best(self) -> str:
        """The first way on which peers may read this engine's blocks; grpc where there is none."""
        return next((each for each in self.transports if self.serves(each)), GRPC)

    def showing(self, transport: str, memory: pb.SharedPool) -> Offer:
        """With the memory that was found out."""
        return replace(self, memories={**self.memories, transport: memory})

    def without(self, *transports: str) -> Offer:
        return replace(self, transports=tuple(each for each in self.transports if each not in transports))

    def choose(self, theirs: Sequence[str], host_id: str) -> str:
        """The first of the caller's transports that is possible between the two; empty when none is."""
        for transport in theirs:
            same_host = bool(host_id) and host_id == self.host_id
            if self.serves(transport) and (transport != IPC or same_host):
                return transport
        return ""


class AbsentNotice:
    """One warning that nixl is left out, at the first pair of servers that would have used it."""

    def __init__(self, offer: Offer) -> None:
        self._why = offer.absent

    def connected(self, peer: str, transport: str) -> None:
        """A handshake has agreed upon `transport`. With ipc, which is better than nixl, nothing is missed."""
        if self._why and transport in (TCP, GRPC):
            _log.warning("peer=%s: KV goes over %s; transport nixl is left out: %s", peer, transport, self._why)
            self._why = ""


def this_host() -> str:
    """A name of this machine that its processes agree on, also from several containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename
