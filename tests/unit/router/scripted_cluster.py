"""A router's core over scripted servers, and the requests that it is given."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from router.admission import Admission
from router.attempt import AttemptLimits
from router.breaker import BreakerSettings
from router.budget import Backoff
from router.choice import Chooser
from router.failover import FailoverSettings
from router.open_requests import OpenRequests
from router.orchestrator import Orchestrator, OrchestratorSettings
from router.prefix.feed import PrefixFeed
from router.registry import HealthSettings, WorkerRegistry
from router.requests import FinishEvent, RouterRequest, Sampling, TokensEvent
from rpc import channels as channel_options
from rpc.channels import ChannelPool
from rpc.metrics import Registry
from tests.unit.router.scripted_server import MODEL, WAIT_S, ScriptedServer

# Times that no busy machine needs. A test that waits for one of them to pass has its own (`replace(LIMITS, ...)`).
LIMITS = AttemptLimits(silence_s=WAIT_S, answer_s=WAIT_S, cause_s=WAIT_S, finish_s=WAIT_S)
FAILOVER = FailoverSettings(max_retries=3, migration_limit=3, backoff=Backoff(0.005, 0.02), patience_s=WAIT_S)
HEALTH = HealthSettings(interval_s=1.0, timeout_s=WAIT_S, failure_threshold=2)
# Where a server is gone for good.
HASTY = replace(FAILOVER, patience_s=0.3)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Options:
    failover: FailoverSettings = FAILOVER
    limits: AttemptLimits = LIMITS
    health: HealthSettings = HEALTH
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    retry_budget_ratio: float = 0.1
    request_timeout_s: float = 60.0
    disagg_min_prompt_tokens: int = 0
    policy: str = "round_robin"
    allow_pins: bool = False
    index_entries: int = 1000
    channels: channel_options.Options | None = None  # arguments of channels to the servers; None: the usual ones
    max_concurrent: int = 0
    queue_size: int = 10
    clock: Callable[[], float] = time.monotonic  # of stages, latencies and silence of legs
    registry_clock: Callable[[], float] = time.monotonic  # of breakers and silence of servers


class AccessLines:
    def __init__(self) -> None:
        self.lines: list[dict] = []
        self.arrivals: list[dict] = []

    def arrived(self, **fields: object) -> None:
        self.arrivals.append(fields)

    def record(self, **fields: object) -> None:
        self.lines.append(fields)


class Cluster:
    """A router's core (everything but its surfaces) over scripted servers."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.engines: dict[str, ScriptedServer] = {}
        self.servers: list[ScriptedServer] = []
        self.metrics = Registry("router", process_metrics=False)
        self.pool = ChannelPool(control_options=options.channels)
        self.access = AccessLines()
        self.registry = WorkerRegistry(
            self.pool,
            self.metrics,
            health=options.health,
            breaker=options.breaker,
            rng=random.Random(1),
            clock=options.registry_clock,
        )
        self.chooser = Chooser(
            self.registry,
            self.metrics,
            prefill_policy=options.policy,
            decode_policy=options.policy,
            disagg_min_prompt_tokens=options.disagg_min_prompt_tokens,
            allow_pins=options.allow_pins,
            index_entries=options.index_entries,
            rng=random.Random(2),
        )
        self.feed = PrefixFeed(self.registry, self.pool, self.metrics, self.chooser.index, self.chooser.index_roles)
        self.open_requests = OpenRequests(
            self.metrics,
            request_timeout_s=options.request_timeout_s,
            served_names=lambda: (MODEL,),
            access_log=self.access,
            clock=options.clock,
        )
        self.orchestrator = Orchestrator(
            self.registry,
            self.chooser,
            self.pool,
            self.open_requests,
            self.metrics,
            OrchestratorSettings(
                root="/models/tiny",
                failover=options.failover,
                limits=options.limits,
                retry_budget_ratio=options.retry_budget_ratio,
            ),
            admission=Admission(options.max_concurrent, queue_size=options.queue_size, timeout_s=WAIT_S),
            rng=random.Random(3),
            clock=options.clock,
        )

    async def add(self, role: str, /, **info: object) -> ScriptedServer:
        server = ScriptedServer(role, self.engines)
        server.info_changes = info
        await server.start()
        self.servers.append(server)
        self.registry.add(role, server.address)  # type: ignore[arg-type]
        return server

    async def until(self, condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        """Waits for something in the registry, which says when it changes, or elsewhere, by looking often."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.registry.wait_change(0.02)

    async def ready(self, count: int) -> None:
        await self.until(lambda: sum(w.state == "ready" for w in self.registry.workers()) == count)

    def worker(self, server: ScriptedServer):
        return self.registry.get(server.role, server.address)  # type: ignore[arg-type]

    async def collect(self, request: RouterRequest) -> Collected:
        collected = Collected()
        async for event in self.orchestrator.generate(request):
            collected.add(event)
        return collected

    async def settled(self) -> None:
        """Nothing is open or staged anywhere, and the router holds nothing."""

        def clean() -> bool:
            return (
                not any(s.open or s.staged for s in self.servers)
                and not any(w.inflight for w in self.registry.workers())
                and not len(self.open_requests)
                and not self.orchestrator._attempts
                and not len(self.orchestrator._tasks)
            )

        try:
            await self.until(clean)
        except TimeoutError:
            raise AssertionError(
                f"left open: {[(s.role, s.open, s.staged) for s in self.servers]}, in flight"
                f" {[(w, w.inflight) for w in self.registry.workers()]}, requests {len(self.open_requests)},"
                f" attempts {self.orchestrator._attempts}, tasks {self.orchestrator._tasks._tasks}"
            ) from None


@dataclass
class Collected:
    tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    summaries: list = field(default_factory=list)
    finish: FinishEvent | None = None

    def add(self, event: TokensEvent | FinishEvent) -> None:
        assert self.finish is None, "an event after the end"
        if isinstance(event, FinishEvent):
            self.finish = event
            return
        assert event.tokens
        self.tokens += [t.token_id for t in event.tokens]
        self.indices += [t.index for t in event.tokens]
        if event.prefill is not None:
            self.summaries.append(event.prefill)


@contextlib.asynccontextmanager
async def running_cluster(
    prefills: int = 1, decodes: int = 1, *, local: bool = False, **options: object
) -> AsyncIterator[Cluster]:
    cluster = Cluster(replace(Options(), **options))
    try:
        async with cluster.registry, cluster.feed, cluster.orchestrator:
            for _ in range(prefills):
                await cluster.add("prefill")
            for _ in range(decodes):
                await cluster.add("decode", allows_local_prefill=local)
            await cluster.ready(prefills + decodes)
            yield cluster
    finally:
        await cluster.pool.close()
        for server in cluster.servers:
            server.muted = False
            await server.stop()


def make_request(prompt: Sequence[int] = (5, 6, 7, 8), max_tokens: int = 6, **changes: object) -> RouterRequest:
    sampling = changes.pop("sampling", None) or Sampling(max_tokens=max_tokens, seed=11)
    request = RouterRequest(
        request_id=str(changes.pop("request_id", uuid.uuid4())),
        model=MODEL,
        prompt_token_ids=list(prompt),
        sampling=sampling,  # type: ignore[arg-type]
    )
    return replace(request, **changes)  # type: ignore[arg-type]
