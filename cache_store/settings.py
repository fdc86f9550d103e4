"""Limits and choices of an agent. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cache_store.checksum import MODES
from cache_store.transports import TCP, TRANSPORTS

MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 4 << 20
_MAY_BE_ZERO = frozenset({"connect_retries", "return_before_deadline_s", "quarantine_s", "data_port"})


@dataclass(frozen=True)
class AgentSettings:
    """See docs/protocol.md, section Limits, for what each limit guards and which code it ends with."""

    lease_seconds: float = 30.0  # staged KV without renewal lives this long after it was computed
    checksum: str = "all"  # off, sample, all; of two peers the stricter decides
    transport: str = "auto"  # auto: the best that both sides have; a name of `TRANSPORTS`: that one or none
    # Largest payload of one event, with tcp of one layer of a notice; at least one block is always sent whole. None:
    # 4 MiB with tcp, whose bytes are in no message, 1 MiB else.
    chunk_bytes: int | None = None
    queue_size: int = 1000  # parked loads in all, and engine commands not yet taken up by the agent
    parked_per_peer: int = 250  # parked loads of one connection
    connect_timeout_s: float = 1.0  # connection and handshake
    connect_retries: int = 0  # further attempts after CACHE_STORE_LOAD_CONNECT_FAILED
    call_timeout_s: float = 5.0  # RenewLease and Release
    load_progress_timeout_s: float = 5.0  # D: longest time without a new block once P runs the request
    publish_timeout_s: float = 100.0  # P: longest wait of a load for the next publish; D: for P to run the request
    load_stall_timeout_s: float = 60.0  # P: an open load whose reader takes nothing this long stops renewing the lease
    bulk_channels: int = 4  # connections per peer for bulk data
    data_port: int = 0  # transport tcp: where this side listens; 0: any free port
    data_connections: int = 512  # transport tcp: open connections of this side's port
    data_token_timeout_s: float = 10.0  # longest time until a new connection, or that of a load, says a token
    data_idle_s: float = 60.0  # how long a connection is kept for the next load
    threads: int = 4  # workers that move bulk data, or put it together, in host memory
    # A one-sided transport: answer, and begin no further read, this long before the request's deadline.
    return_before_deadline_s: float = 0.1
    steal_before_deadline_s: float = 0.25
    quarantine_s: float = 10.0  # least hold of blocks after copies that were not proven to have ended
    transfer_wait_timeout_s: float = 180.0  # longest wait for copies that have begun
    cancel_timeout_s: float = 1.0  # a word to each peer that a load was given up
    staging_slots: int = 32  # a pool on a device: events on their way from it, and as many on their way to it
    tombstone_s: float = 60.0  # how long an ended, failed or aborted key is remembered
    remembered_keys: int = 100_000  # how many of them at the most

    def __post_init__(self) -> None:
        if self.checksum not in MODES:
            raise ValueError(f"checksum {self.checksum!r} is none of {', '.join(MODES)}")
        if self.transport not in ("auto", *TRANSPORTS):
            raise ValueError(f"transport {self.transport!r} is none of auto, {', '.join(TRANSPORTS)}")
        if self.chunk_bytes is not None and not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes {self.chunk_bytes} is outside [{MIN_CHUNK_BYTES}, {MAX_CHUNK_BYTES}]")
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in _MAY_BE_ZERO
            if isinstance(value, int | float) and (value < 0 if may_be_zero else value <= 0):
                raise ValueError(f"{field.name} must be greater than 0, got {value}")
        if self.return_before_deadline_s >= self.steal_before_deadline_s:
            raise ValueError("return_before_deadline_s must be less than steal_before_deadline_s")

    def chunk_bytes_of(self, transport: str) -> int:
        """Largest payload that this side sends or takes in one piece."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return 4 << 20 if transport == TCP else 1 << 20
