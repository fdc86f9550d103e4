"""One request from admission to its end: attempt after attempt, as one sequence of events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from router import wire
from router.admission import Admission
from router.attempt import Attempt, AttemptContext, Ended
from router.choice import Choice
from router.failover import Failover
from router.merge import TokenMerge
from router.open_requests import LegNote, OpenRequest
from router.requests import MAX_SEED, FinishEvent, FinishReason, RouterRequest, TokensEvent
from router.worker import Worker
from rpc.errors import BatonError, ErrorCode
from rpc.faults import armed, fault, fault_async
from rpc.ids import request_key
from rpc.server import DEADLINE_TOLERANCE_S
from rpc.stages import StopCheck, enter_stage

_log = logging.getLogger(__name__)


class AttemptTable(Protocol):
    """Where running attempts are known, so that they can be told about lost servers and silence."""

    def add(self, attempt: Attempt) -> None: ...
    def discard(self, attempt: Attempt) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """What all requests of a router share."""

    attempts: AttemptContext
    running: AttemptTable
    admission: Admission
    rng: random.Random
    eos_token_ids: Callable[[], Collection[int]]


class Run:
    """Serves one `RouterRequest`. A context manager; within it `next()` is called until it returns a FinishEvent.

    Leaving it closes whatever is open, at once and without waiting. Used by one task.
    """

    def __init__(self, context: RunContext, request: RouterRequest, owner: OpenRequest, failover: Failover) -> None:
        self._context = context
        self._request = request
        self._owner = owner
        self._failover = failover
        self._clock = owner.take_clock()
        seed = request.sampling.seed
        # Drawn once, so that every attempt repeats the same draws.
        self._sampling = wire.sampling_params(
            request.sampling, context.rng.randint(0, MAX_SEED) if seed is None else seed
        )
        self._merge = TokenMerge()
        self._attempt: Attempt | None = None
        self._note: LegNote | None = None
        self._attempts = 0
        self._avoid: set[Worker] = set()
        self._timeline: dict[str, float] = {}
        self._admitted = False
        self._summarized = False
        self._leg_seconds: dict[str, float] = {}
        self._stop: BatonError | None = None
        self._stop_check = StopCheck(request.deadline)
        self._stopped = asyncio.Event()
        self._forget_stop = owner.on_stop(self._on_stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget_stop()
        if isinstance(exc, BatonError):
            cause = exc
        elif self._stop is not None:
            cause = self._stop
        elif self._request.deadline.remaining() <= DEADLINE_TOLERANCE_S:
            # A client that gives its call a deadline cuts it off itself, at the same moment.
            cause = BatonError(ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed")
        else:
            cause = BatonError(ErrorCode.CANCELLED, "request cancelled by client")
        self._end_attempt(cause)
        if self._admitted:
            self._admitted = False
            self._context.admission.leave()
        self._clock.finish_stage()
        for stage, seconds in self._leg_seconds.items():
            self._context.attempts.metrics.observe("baton_stage_seconds", seconds, stage=stage)
        if not self._owner.timeline:
            # Closed by its surface, e.g. on a stop string: what is known so far belongs to the answer as well.
            self._owner.timeline = self._seconds()

    async def next(self) -> TokensEvent | FinishEvent:
        """The next tokens, or the end. Raises what the client is to get."""
        while True:
            try:
                if self._stop is not None:
                    raise self._stop
                if self._attempt is None:
                    await self._begin()
                assert self._attempt is not None
                if armed():
                    await self._reached()
                event = await self._attempt.next()
            except BatonError as error:
                if self._stop is not None:
                    return self._ended_from_outside(self._stop)
                complete = self._complete()
                if complete is not None:
                    # Only the servers' word about the end is missing.
                    self._end_attempt(error)
                    return self._finish_event(*complete)
                await self._failed(error)
                continue
            if isinstance(event, Ended):
                return self._finish(event)
            return self._progress(event)

    # -- attempts

    async def _begin(self) -> None:
        """Waits for a turn, chooses servers and opens the legs."""
        if not self._admitted:
            self._enter_stage()
            await self._admit()
        self._enter_stage()
        chooser = self._context.attempts.chooser
        try:
            if armed():
                await self._reached()
            choice = chooser.choose(self._request, self._merge.next_index, self._avoid)
        except BatonError as error:
            chooser.count_refusal(error)
            error.stage = error.stage or self._clock.stage
            raise
        self._merge.forget_waiting()
        key = request_key(self._request.request_id, self._attempts)
        self._attempts += 1
        self._book_choice(choice, key)
        attempt = Attempt(
            self._context.attempts,
            self._request,
            choice,
            key,
            sampling=self._sampling,
            merge=self._merge,
            may_redirect=self._failover.may_redirect,
            on_redirect=self._redirected,
        )
        self._attempt = attempt
        self._context.running.add(attempt)
        attempt.start()
        self._clock.next_stage()

    def _enter_stage(self) -> None:
        """Looks whether to stop, first at the deadline and then at who ended the request, and enters the next stage."""
        self._stop_check.check(self._clock.stage)
        if self._stop is not None:
            raise self._stop
        enter_stage(self._clock)

    async def _reached(self) -> None:
        """Fault point `router.stage` of the stages from choose on."""
        await fault_async("router.stage", stage=self._clock.stage, request_id=self._request.request_id)

    async def _admit(self) -> None:
        if fault("router.queue", request_id=self._request.request_id):
            raise self._context.admission.full()
        turn = self._context.admission.enter(self._request.priority)
        if turn is not None:
            stop = asyncio.ensure_future(self._stopped.wait())
            stop.add_done_callback(lambda _: turn.cancel())
            try:
                async with asyncio.timeout(self._request.deadline.timeout()):
                    await self._context.admission.wait(turn)
            except TimeoutError:
                message = "the request's deadline has passed; allow it more time"
                raise BatonError(ErrorCode.GENERATE_TIMEOUT, message, stage="queue") from None
            except asyncio.CancelledError:
                if self._stop is None:
                    raise
                raise self._stop from None
            finally:
                stop.cancel()
        self._admitted = True

    def _book_choice(self, choice: Choice, key: str) -> None:
        owner = self._owner
        if self._attempts == 1:
            self._context.attempts.metrics.inc("baton_router_path_total", decision=choice.decision)
        owner.attempts = max(owner.attempts, self._attempts)
        owner.path = choice.path
        self._note = LegNote(
            attempt=self._attempts - 1,
            path=choice.path,
            prefill=choice.prefill.address if choice.prefill is not None else "",
            decode=choice.decode.address if choice.decode is not None else "",
            request_key=key,
        )
        owner.legs.append(self._note)

    def _redirected(self, decode: Worker) -> None:
        assert self._note is not None
        self._note.code = ErrorCode.DECODE_MALLOC_FAILED.name
        self._note = replace(self._note, decode=decode.address, code="")
        self._owner.legs.append(self._note)

    def _end_attempt(self, cause: BatonError | None) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.close(cause)
        self._context.running.discard(attempt)
        # The attempts at one request add up, as those at one stage do.
        _add(self._timeline, attempt.timeline)
        _add(self._leg_seconds, attempt.leg_seconds)
        if cause is not None:
            self._avoid |= attempt.blamed
            if self._note is not None:
                self._note.code = cause.code.name

    async def _failed(self, error: BatonError) -> None:
        """Ends the attempt and waits until the next one is due; raises when there is none."""
        if self._attempt is not None:
            error.stage = error.stage or self._clock.stage
        self._end_attempt(error)
        self._clock.finish_stage()
        recovering = self._context.attempts.registry.recovering()
        wait_s = self._failover.after(error, self._merge.next_index, recovering=recovering)
        wait_s = min(wait_s, self._request.deadline.remaining())
        _log.info(
            "attempt failed, trying again: %s",
            error.code.name if self._owner.private else error,
            extra={"request_id": self._request.request_id, "attempt": self._attempts - 1, "wait_s": wait_s},
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopped.wait()
        self._clock.add_retry_wait(wait_s)
        self._clock.restore_stage("choose" if self._admitted else "queue")

    def _complete(self) -> tuple[FinishReason, int | None] | None:
        """How the answer ended, if its last token is out already; a further attempt would add one too many."""
        token_ids, sampling = self._merge.token_ids, self._request.sampling
        if not token_ids:
            return None
        last = token_ids[-1]
        if len(token_ids) > sampling.min_tokens and (
            last in sampling.stop_token_ids or (not sampling.ignore_eos and last in self._context.eos_token_ids())
        ):
            return "stop", last
        return ("length", None) if len(token_ids) >= sampling.max_tokens else None

    # -- events

    def _progress(self, event: TokensEvent) -> TokensEvent:
        if self._clock.stage == "first_token":
            self._clock.next_stage()
            self._failover.progressed()
        if event.prefill is None:
            return event
        if self._summarized:
            return TokensEvent(event.tokens)
        self._summarized = True
        return event

    def _finish(self, ended: Ended) -> FinishEvent:
        self._end_attempt(None)
        return self._finish_event(ended.reason, ended.stop_token_id, ended.preemptions)

    def _finish_event(
        self, reason: FinishReason, stop_token_id: int | None = None, preemptions: int = 0
    ) -> FinishEvent:
        self._clock.finish_stage()
        timeline = self._owner.timeline = self._seconds()
        return FinishEvent(
            reason=reason,
            stop_token_id=stop_token_id,
            timeline=timeline,
            attempts=self._attempts,
            preemptions=preemptions,
            path=self._owner.path,
        )

    def _seconds(self) -> dict[str, float]:
        """The timeline: seconds by "role.stage"."""
        own = {f"router.{stage}": seconds for stage, seconds in (self._clock.seconds() | self._leg_seconds).items()}
        return own | self._timeline

    def _ended_from_outside(self, stop: BatonError) -> FinishEvent:
        """Aborted through the API: what it has is valid. Given up by the router: an error."""
        self._end_attempt(stop)
        if stop.code is not ErrorCode.CANCELLED:
            raise BatonError(stop.code, stop.message, stage=self._clock.stage, retry_after_s=stop.retry_after_s)
        return self._finish_event("abort")

    def _on_stop(self, error: BatonError) -> None:
        self._stop = error
        self._stopped.set()
        if self._attempt is not None:
            self._attempt.fail(error)


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + seconds
