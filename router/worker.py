"""One registered server as the router sees it: facts, reported status, own count of open requests,
breaker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from protos import worker_pb2
from router.breaker import Breaker
from router.pairing import Role, WorkerFacts

WorkerState = Literal["ready", "draining", "unhealthy", "incompatible"]
STATES: tuple[WorkerState, ...] = ("ready", "draining", "unhealthy", "incompatible")

_REPORTED = {
    worker_pb2.WORKER_STATE_STARTING: "starting",
    worker_pb2.WORKER_STATE_READY: "ready",
    worker_pb2.WORKER_STATE_DRAINING: "draining",
    worker_pb2.WORKER_STATE_UNHEALTHY: "unhealthy",
}


@dataclass(frozen=True, slots=True)
class Reported:
    """The newest status that a server sent. `others` are its requests that are not this router's."""

    state: str
    reasons: tuple[str, ...]
    engine_id: str
    version: int
    running: int
    waiting: int
    loading: int
    others: int
    at: float
    uptime_seconds: float = 0.0


class Guard:
    """One request that is open on a server, with the tokens that it brings there. `release` counts it down, once."""

    __slots__ = ("_context", "_queued", "_worker")

    def __init__(self, worker: Worker, queued: int, context: int) -> None:
        self._worker: Worker | None = worker
        self._queued = queued
        self._context = context

    def computed(self) -> None:
        """The prompt is computed; the request stays open."""
        queued, self._queued = self._queued, 0
        if self._worker is not None:
            self._worker.queued_tokens -= queued

    def release(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.leave(self._queued, self._context)


class Worker:
    """A registered server. Its state is derived by the registry (`state`, `reasons`); the rest is news about
    it.

    `status_fresh_s` is the age up to which a reported load counts; an older one is ignored in favour of the
    router's own count. Belongs to one event loop.
    """

    def __init__(
        self,
        role: Role,
        address: str,
        order: int,
        breaker: Breaker,
        *,
        status_fresh_s: float,
        on_inflight: Callable[[Worker], None] = lambda worker: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role: Role = role
        self.address = address
        self.order = order
        self.breaker = breaker
        self.facts: WorkerFacts | None = None
        self.reported: Reported | None = None
        self.state: WorkerState = "unhealthy"
        self.reasons: tuple[str, ...] = ("not reached yet",)
        # Why it is not connected at the moment; empty while it is.
        self.disconnected = "not reached yet"
        # Why it is not trusted although it is connected: a call to it failed and no check has passed since.
        self.doubt = ""
        self.last_heard = clock()
        # When it was last disconnected after having been connected.
        self.lost_at = -math.inf
        self.removed = False
        # Of this router's open requests: what is not computed yet, and the prompts after which it generates.
        self.queued_tokens = 0
        self.context_tokens = 0
        self._inflight = 0
        self._status_fresh_s = status_fresh_s
        self._on_inflight = on_inflight
        self._clock = clock

    def __repr__(self) -> str:
        return f"<{self.role} {self.address} {self.state}>"

    @property
    def inflight(self) -> int:
        """Requests that this router has open there."""
        return self._inflight

    @property
    def load(self) -> int:
        """Requests that are open there: the router's own, and those of others as long as the status is
        fresh."""
        reported = self.reported
        if reported is None or self._clock() - reported.at > self._status_fresh_s:
            return self._inflight
        return self._inflight + reported.others

    @property
    def block_sizes(self) -> frozenset[int]:
        """Tokens per KV block, of its groups of layers; empty until it has said what it is."""
        return frozenset(group.block_size for group in self.facts.groups) if self.facts is not None else frozenset()

    def enter(self, queued: int = 0, context: int = 0) -> Guard:
        """One more request: with `queued` prompt tokens to compute, and a prompt of `context` to generate after."""
        self._inflight += 1
        self.queued_tokens += queued
        self.context_tokens += context
        self._on_inflight(self)
        return Guard(self, queued, context)

    def leave(self, queued: int = 0, context: int = 0) -> None:
        self._inflight -= 1
        self.queued_tokens -= queued
        self.context_tokens -= context
        self._on_inflight(self)

    def heard(self) -> None:
        """Something came from the server."""
        self.last_heard = self._clock()

    def lost_s(self) -> float:
        """Seconds since it was lost; infinite when it never was."""
        return self._clock() - self.lost_at

    def silence_s(self) -> float:
        return self._clock() - self.last_heard

    def take_status(self, status: worker_pb2.WorkerStatus) -> bool:
        """Takes a status in; False when it is older than the one that is known (and was ignored).

        Another engine's status starts a new count of versions.
        """
        old = self.reported
        if old is not None and old.engine_id == status.engine_id and status.version <= old.version:
            return False
        total = status.running + status.waiting + status.loading
        self.reported = Reported(
            state=_REPORTED.get(status.state, "unhealthy"),
            reasons=tuple(status.reasons),
            engine_id=status.engine_id,
            version=status.version,
            running=status.running,
            waiting=status.waiting,
            loading=status.loading,
            others=max(0, total - self._inflight),
            at=self._clock(),
            uptime_seconds=status.uptime_seconds,
        )
        return True

    def condition(self) -> tuple[WorkerState, tuple[str, ...]]:
        """State and reasons by what this server alone says; whether it fits the others is the registry's
        matter."""
        if self.disconnected:
            return "unhealthy", (self.disconnected,)
        if self.facts is None or self.reported is None:
            return "unhealthy", ("has not said yet what it is",)
        if self.facts.role != self.role:
            return "incompatible", (f"is a {self.facts.role} server, registered as {self.role}",)
        reported = self.reported
        if reported.engine_id != self.facts.engine_id:
            return "unhealthy", ("its engine restarted",)
        if reported.state == "draining":
            return "draining", reported.reasons or ("is shutting down",)
        if reported.state != "ready":
            return "unhealthy", reported.reasons or (f"is {reported.state}",)
        if self.doubt:
            return "unhealthy", (self.doubt,)
        return "ready", ()

    def describe(self) -> dict[str, Any]:
        """For `/workers`: plain values only."""
        reported, facts = self.reported, self.facts
        described: dict[str, Any] = {
            "role": self.role,
            "address": self.address,
            "state": self.state,
            "reasons": list(self.reasons),
            "breaker": self.breaker.state.name.lower(),
            "inflight": self._inflight,
            "load": self.load,
        }
        if reported is not None:
            described["status"] = {
                "running": reported.running,
                "waiting": reported.waiting,
                "loading": reported.loading,
                "version": reported.version,
                "age_seconds": round(self._clock() - reported.at, 3),
                "uptime_seconds": reported.uptime_seconds,
            }
        if facts is not None:
            described["facts"] = {
                "engine_id": facts.engine_id,
                "version": facts.version,
                "protocol_version": facts.protocol_version,
                "served_model_names": list(facts.served_model_names),
                "model_fingerprint": facts.model_fingerprint,
                "dtype": facts.dtype,
                "kv_dtype": facts.kv_dtype,
                "groups": [
                    {
                        "tag": g.tag,
                        "num_layers": g.num_layers,
                        "num_kv_heads": g.num_kv_heads,
                        "head_dim": g.head_dim,
                        "block_size": g.block_size,
                        "dtype": g.dtype,
                    }
                    for g in facts.groups
                ],
                "tp_size": facts.tp_size,
                "transports": list(facts.transports),
                "cache_store_addresses": list(facts.cache_store_addresses),
                "draft_model_fingerprint": facts.draft_model_fingerprint,
                "max_model_len": facts.max_model_len,
                "vocab_size": facts.vocab_size,
                "max_num_seqs": facts.max_num_seqs,
                "num_kv_blocks": facts.num_kv_blocks,
                "allows_local_prefill": facts.allows_local_prefill,
                "attention_backend": facts.attention_backend,
                "http_address": facts.http_address,
                "keeps_to_grammars": facts.keeps_to_grammars,
            }
        return described
