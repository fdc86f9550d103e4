"""Serves requests: chooses servers, runs attempts, retries and migrates, until the answer is complete or cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from router.admission import Admission
from router.attempt import Attempt, AttemptContext, AttemptLimits
from router.budget import RetryBudget
from router.choice import Chooser
from router.failover import Failover, FailoverSettings
from router.legs import Aborts, LegTasks
from router.open_requests import OpenRequest, OpenRequests
from router.pairing import WorkerFacts
from router.registry import WorkerRegistry
from router.requests import FinishEvent, ModelFacts, RouterRequest, TokensEvent
from router.run import Run, RunContext
from router.worker import Worker
from rpc.channels import ChannelPool
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry as Metrics

TICK_S = 0.25
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """`served_names`: what the router was told; empty: the names that its servers have, else `root`'s own."""

    root: str = ""
    served_names: tuple[str, ...] = ()
    failover: FailoverSettings = field(default_factory=FailoverSettings)
    limits: AttemptLimits = field(default_factory=AttemptLimits)
    retry_budget_ratio: float = 0.1


class Orchestrator:
    """Implements `router.requests.Serving`. An async context manager; belongs to one event loop."""

    def __init__(
        self,
        registry: WorkerRegistry,
        chooser: Chooser,
        pool: ChannelPool,
        open_requests: OpenRequests,
        metrics: Metrics,
        settings: OrchestratorSettings | None = None,
        *,
        admission: Admission | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings if settings is not None else OrchestratorSettings()
        self._registry = registry
        self._chooser = chooser
        self._open_requests = open_requests
        self._metrics = metrics
        self._rng = rng if rng is not None else random.Random()
        self._clock = clock
        self._budget = RetryBudget(self.settings.retry_budget_ratio, clock=clock)
        metrics.set("baton_retry_budget_ratio", self._budget.left())
        self._tasks = LegTasks()
        aborts = Aborts(pool, metrics, self._tasks)
        context = AttemptContext(pool, registry, chooser, metrics, self._tasks, aborts, self.settings.limits, clock)
        self._attempts: set[Attempt] = set()
        self._run_context = RunContext(
            context,
            self._attempts,
            admission if admission is not None else Admission(),
            self._rng,
            lambda: self.model().eos_token_ids,
        )
        self._ticker: asyncio.Task[None] | None = None
        self._model: ModelFacts | None = None
        self._model_of: Sequence[WorkerFacts] = ()
        self._draining = False
        registry.on_lost.append(self._lost)

    async def __aenter__(self) -> Self:
        self._ticker = asyncio.create_task(self._tick(), name="orchestrator-tick")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        error = BatonError(ErrorCode.SERVER_DRAINING, "the router is shutting down; ask another one")
        self._open_requests.refuse_new(error)
        self._open_requests.stop_all(error)
        await self._tasks.close(CLOSE_S)

    # -- what surfaces ask

    def abort(self, request_id: str) -> bool:
        """Ends the open request with finish reason abort and what it has. Unknown: leaves a tombstone, False."""
        return self._open_requests.abort(request_id)

    def ready(self) -> tuple[bool, Sequence[str]]:
        """Whether a request can be served now, and if not, why."""
        if self._draining:
            return False, ["the router is shutting down"]
        return self._chooser.ready()

    def drain(self) -> None:
        """From now on it is not ready; requests are still served."""
        self._draining = True

    def model(self) -> ModelFacts:
        facts = self._registry.known_facts()
        # Asked several times for each request; the facts are the same objects until a server starts anew.
        if self._model is None or facts != self._model_of:
            self._model, self._model_of = self._make_model(facts), facts
        return self._model

    def _make_model(self, facts: Sequence[WorkerFacts]) -> ModelFacts:
        names = self.settings.served_names
        if not names:
            names = tuple(dict.fromkeys(name for f in facts for name in f.served_model_names))
        root = self.settings.root
        return ModelFacts(
            served_names=names or (root.rstrip("/").rpartition("/")[2],),
            root=root,
            # What every server can hold, so that a request fits wherever it is served.
            max_model_len=min((f.max_model_len for f in facts), default=0),
            vocab_size=min((f.vocab_size for f in facts), default=0),
            eos_token_ids=facts[0].eos_token_ids if facts else (),
        )

    async def generate(self, request: RouterRequest) -> AsyncGenerator[TokensEvent | FinishEvent, None]:
        """Serves `request`: TokensEvents, then one FinishEvent. Raises BatonError, also after some tokens.

        Closing it early ends every leg at once: the calls are cancelled and `Abort`s follow. Without an owner the
        request is opened, and accounted, here.
        """
        with contextlib.ExitStack() as stack:
            owner = request.owner
            opened: OpenRequest | None = None
            if owner is None:
                owner = opened = stack.enter_context(self._open(request))
            if owner.deadline.at < request.deadline.at:
                request = replace(request, deadline=owner.deadline)
            self._budget.deposit()
            failover = Failover(
                self.settings.failover, self._budget, self._metrics, self._rng, request.deadline, clock=self._clock
            )
            run = stack.enter_context(Run(self._run_context, request, owner, failover))
            while True:
                event = await run.next()
                if isinstance(event, FinishEvent):
                    if opened is not None:
                        opened.finish(event.reason)
                    yield event
                    return
                if opened is not None:
                    if event.prefill is not None:
                        opened.cached_tokens = event.prefill.cached_tokens
                    opened.tokens_written(len(event.tokens))
                yield event

    def _open(self, request: RouterRequest) -> OpenRequest:
        opened = self._open_requests.open(
            request.request_id,
            api=request.api,
            model=request.model,
            stream=request.stream,
            arrival=request.arrival,
            deadline=request.deadline,
        )
        opened.prompt_tokens = len(request.prompt_token_ids)
        return opened

    # -- watching

    def _lost(self, worker: Worker) -> None:
        for attempt in list(self._attempts):
            attempt.lost(worker)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for attempt in list(self._attempts):
                attempt.check(now)
            self._metrics.set("baton_retry_budget_ratio", self._budget.left())
