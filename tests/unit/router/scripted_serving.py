"""The orchestrator's seam, played by a script: what the router's surfaces do is tested against it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from router.open_requests import OpenRequests
from router.requests import (
    FinishEvent,
    FinishReason,
    Logprob,
    ModelFacts,
    PrefillSummary,
    PromptLogprob,
    RouterRequest,
    Token,
    TokensEvent,
)
from rpc.errors import BatonError

Event = TokensEvent | FinishEvent
Script = Callable[[RouterRequest], AsyncIterator[Event]]
TIMELINE = {"router.choose": 0.001, "prefill.compute": 0.02, "decode.load": 0.003}


def summary(request: RouterRequest, cached: int = 0) -> PrefillSummary:
    """The prefill's news; prompt log-probabilities as asked for: position p has -p / 10."""
    asked = request.sampling.prompt_logprobs
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    if asked is not None:
        ids = request.prompt_token_ids
        prompt_logprobs = tuple(
            PromptLogprob(
                position,
                Logprob(ids[position], -position / 10, 2),
                tuple(Logprob(rank, -rank / 100, rank + 1) for rank in range(asked)),
            )
            for position in range(1, len(ids))
        )
    return PrefillSummary(cached, "not_requested", "pd", prompt_logprobs)


def token(request: RouterRequest, index: int, token_id: int, logprob: float = -0.5) -> Token:
    asked = request.sampling.logprobs
    if asked is None:
        return Token(index, token_id)
    top = tuple(Logprob(rank, -rank / 100, rank + 1) for rank in range(asked))
    return Token(index, token_id, Logprob(token_id, logprob, 1), top)


def answering(
    ids: Sequence[int],
    *,
    chunk: int = 1,
    reason: FinishReason = "stop",
    stop_token_id: int | None = None,
    cached: int = 0,
    error: BatonError | None = None,
    logprob: float = -0.5,
) -> Script:
    """Yields `ids` in chunks, up to the request's max_tokens, then the end, or `error` in its place."""

    async def script(request: RouterRequest) -> AsyncIterator[Event]:
        limit = request.sampling.max_tokens
        shown = list(ids)[:limit]
        for start in range(0, len(shown), chunk):
            part = shown[start : start + chunk]
            tokens = [token(request, start + i, token_id, logprob) for i, token_id in enumerate(part)]
            await asyncio.sleep(0)
            yield TokensEvent(tokens, summary(request, cached) if start == 0 else None)
        if error is not None:
            raise error
        cut = len(shown) < len(ids)
        yield FinishEvent("length" if cut else reason, None if cut else stop_token_id, TIMELINE, attempts=1, path="pd")

    return script


@dataclass
class ScriptedServing:
    """Plays `script` for every request. `requests` are those that came; `open` counts unfinished generators, and
    `closed_early` those that were closed before their last event."""

    facts: ModelFacts
    script: Script
    requests: list[RouterRequest] = field(default_factory=list)
    open: int = 0
    closed_early: int = 0
    open_requests: OpenRequests | None = None
    not_ready: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: RouterRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.open += 1
        self._notify()
        ended = False
        stop = asyncio.Event()
        owner = request.owner
        forget = owner.on_stop(lambda error: stop.set()) if owner is not None else lambda: None
        try:
            events = self.script(request)
            while True:
                try:
                    event = await self._next(events, stop)
                except StopAsyncIteration:
                    ended = True
                    return
                if owner is not None and isinstance(event, TokensEvent) and event.prefill is not None:
                    owner.path = event.prefill.path
                    owner.attempts = 1
                    owner.timeline |= TIMELINE
                    owner.cached_tokens = event.prefill.cached_tokens
                ended = isinstance(event, FinishEvent)
                yield event
                if ended:
                    return
        except BatonError:
            ended = True
            raise
        finally:
            forget()
            self.open -= 1
            self.closed_early += not ended
            self._notify()

    async def _next(self, events: AsyncIterator[Event], stop: asyncio.Event) -> Event:
        """The script's next event, or the end by abort."""
        following = asyncio.ensure_future(anext(events))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else FinishEvent("abort", None, TIMELINE)
        finally:
            following.cancel()
            stopped.cancel()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        """Waits for a state of this object."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.changed.wait()

    def abort(self, request_id: str) -> bool:
        assert self.open_requests is not None
        return self.open_requests.abort(request_id)

    def model(self) -> ModelFacts:
        return self.facts

    def ready(self) -> tuple[bool, Sequence[str]]:
        return not self.not_ready, self.not_ready
