"""One attempt to serve a request on the servers that were chosen for it.

Disaggregated: the decode leg and the prefill leg are opened together under one request key. The decode server reserves
and pulls the KV while the prompt is computed; the first token goes out as soon as the prefill server answers (or the
decode server says that its load is complete), the rest as the decode server streams it. Alone: one leg does it all.

Whose failure ends the attempt: any, until the decode server generates (it has loaded, or it has computed the prompt
itself because a load failed); after that only the decode server's, because the prefill server has done its part. Ending
it closes every leg that is open and frees what is staged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protos import common_pb2, decode_pb2, prefill_pb2
from router import wire
from router.choice import Choice, Chooser
from router.legs import (
    END,
    Aborts,
    DecodeLeg,
    Leg,
    LegTasks,
    Letter,
    Payload,
    PrefillLeg,
    RpcMetadata,
    abort_source,
)
from router.mailbox import Mailbox
from router.merge import TokenMerge, breach, to_prompt_logprobs
from router.pairing import Role
from router.registry import WorkerRegistry
from router.requests import FinishReason, PrefillSummary, RouterRequest, Token, TokensEvent
from router.worker import Worker
from rpc.channels import ChannelPool
from rpc.errors import BatonError, ErrorCode
from rpc.graph_status import status_from_wire
from rpc.metrics import Registry as Metrics
from rpc.server import PRIVATE_KEY
from rpc.timeline import TIMELINE_KEY
from rpc.tracing import CallSpan, to_ns

_log = logging.getLogger(__name__)

# Causes of a failed load that are about reaching the prefill server or its data. Others are its own failures, which
# its own leg reports.
_TRANSFER_CAUSES = frozenset(range(8200, 8400)) | frozenset(
    (
        int(ErrorCode.KV_LEASE_EXPIRED),
        int(ErrorCode.KV_STALE_REFERENCE),
        int(ErrorCode.KV_CHECKSUM_MISMATCH),
        int(ErrorCode.INCOMPATIBLE_PEER),
        int(ErrorCode.PEER_RESTARTED),
        int(ErrorCode.DUPLICATE_REQUEST),
    )
)
# Of these, the ones that say nothing about the decode server which reports them.
_PREFILL_CAUSES = frozenset(
    (
        ErrorCode.CONNECTION_RESET_BY_PEER,
        ErrorCode.CONNECT_FAILED,
        ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
        ErrorCode.CACHE_STORE_LOAD_SEND_REQUEST_FAILED,
        ErrorCode.CACHE_STORE_CALL_PREFILL_TIMEOUT,
        ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT,
        ErrorCode.CACHE_STORE_STORE_FAILED,
        ErrorCode.PEER_RESTARTED,
    )
)


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Seconds. `silence_s`: a leg that is silent for this long leads to a check of its server.

    What is waited for at most: `answer_s`: after the decode server finished, the prefill server's answer (its timings);
    `cause_s`: after a load failed because the prefill server did, its own word about it; `finish_s`: after a first
    token that ends the request, the decode server's end in order.
    """

    max_rpc_s: float | None = 7200.0
    reserve_s: float = 30.0
    inactivity_s: float = 60.0
    silence_s: float = 2.0
    answer_s: float = 0.25
    cause_s: float = 0.5
    finish_s: float = 2.0


@dataclass(frozen=True)
class AttemptContext:
    """What all attempts of a router share."""

    pool: ChannelPool
    registry: WorkerRegistry
    chooser: Chooser
    metrics: Metrics
    tasks: LegTasks
    aborts: Aborts
    limits: AttemptLimits = field(default_factory=AttemptLimits)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt served the request to its end."""

    reason: FinishReason
    stop_token_id: int | None
    preemptions: int = 0


class Attempt:
    """`start()`, then `next()` until it returns `Ended` or raises; `close()` in any case.

    `merge` has the tokens of earlier attempts. `may_redirect(error)` is asked before a failed reservation is tried
    on another decode server. `blamed` are the servers that a failure is about. Used by one task; belongs to one loop.
    """

    def __init__(
        self,
        context: AttemptContext,
        request: RouterRequest,
        choice: Choice,
        key: str,
        *,
        sampling: common_pb2.SamplingParams,
        merge: TokenMerge,
        may_redirect: Callable[[BatonError], bool] = lambda error: False,
        on_redirect: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        self.choice = choice
        self.key = key
        self.blamed: set[Worker] = set()
        # Seconds by "role.stage" as the servers tell them, and those of the two legs, by this router's clock.
        self.timeline: dict[str, float] = {}
        self.leg_seconds: dict[str, float] = {}
        self.closed = False
        self._context = context
        self._request = request
        self._sampling = sampling
        self._merge = merge
        self._emitted = list(merge.token_ids)
        self._may_redirect = may_redirect
        self._on_redirect = on_redirect
        self._mailbox: Mailbox[Letter] = Mailbox()
        self._prefill: PrefillLeg | None = None
        self._decode: DecodeLeg | None = None
        self._tried_decodes: set[Worker] = set()
        self._out: deque[TokensEvent | Ended] = deque()
        self._summarized = False
        # When the prompt's token came; None again once the next one has come.
        self._first_token_at: float | None = None
        # Set when the first token ends the request: its end, whatever becomes of the decode leg.
        self._early_end: Ended | None = None
        # The decode server's end, held back until the prefill server has answered too.
        self._late_end: Ended | None = None
        # A failed load whose cause the prefill server is about to tell itself.
        self._unexplained: BatonError | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- for the orchestrator

    def start(self) -> None:
        """Opens the legs, the decode leg first. Never blocks."""
        if self.choice.decode is not None:
            self._open_decode(self.choice.decode)
        if self.choice.prefill is not None:
            self._open_prefill(self.choice.prefill)

    async def next(self) -> TokensEvent | Ended:
        """The next tokens or the end. Raises BatonError when the attempt failed."""
        while not self._out:
            leg, payload = await self._mailbox.get()
            try:
                self._take(leg, payload)
            except BatonError as error:
                if error.breach and leg is not None:
                    self._note_breach(leg, error)
                    self.blamed.add(leg.worker)
                    leg.end(error)
                raise
        return self._out.popleft()

    def fail(self, error: BatonError) -> None:
        """Ends the attempt from outside: `next()` raises `error`."""
        self._mailbox.put((None, error))

    def close(self, cause: BatonError | None) -> None:
        """Gives up what is still open, because of `cause`, and frees what is staged. Idempotent, never blocks.

        Without a cause the request was served; at most an answer that nobody waits for is still open then.
        """
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        source = abort_source(cause) if cause is not None else "peer"
        code = cause.code if cause is not None else ErrorCode.CANCELLED
        prefill, decode = self._prefill, self._decode
        # It may have died before its word that it has loaded reached the prefill server.
        lost = decode is not None and decode.ended and not decode.ended_by_server
        for leg in (prefill, decode):
            self._end_leg_stage(leg)
        given_up: list[Leg] = []
        # The decode server first: what it sees of the prefill server's end is no cause of its own.
        if decode is not None:
            decode.leave()
            if not decode.ended_by_server:
                given_up.append(decode)
        if prefill is not None:
            prefill.leave()
            # Nobody but the router can end what is staged before the decode server has loaded it.
            released = decode is not None and decode.loaded and not lost
            staged = prefill.answered and prefill.hold_kv and not released
            if staged or not prefill.ended_by_server:
                given_up.append(prefill)
        self._context.aborts.give_up(given_up, code, source)

    def lost(self, worker: Worker) -> None:
        """`worker` does not answer any more."""
        leg = next((g for g in (self._prefill, self._decode) if g is not None and g.worker is worker), None)
        if leg is not None and not leg.ended:
            self._mailbox.put((leg, self._silent(leg)))

    def check(self, now: float) -> None:
        """Looks for silence; called every fraction of a second."""
        limits = self._context.limits
        for leg in (self._prefill, self._decode):
            if leg is None or leg.ended:
                continue
            if leg.silent_s(now) > limits.silence_s and leg.worker.silence_s() > limits.silence_s:
                self._context.registry.suspect(leg.worker)
        decode = self._decode
        if decode is None or decode.ended:
            return
        unreserved = not (decode.local or decode.reserved) and now - decode.began > limits.reserve_s
        if unreserved or (decode.generating and decode.silent_s(now) > limits.inactivity_s):
            self._mailbox.put((decode, self._silent(decode)))

    # -- legs

    def _input(self, worker: Worker) -> common_pb2.GenerateInput:
        return wire.generate_input(self._request, self.key, self._sampling, self._emitted, worker)

    def _metadata(self, span: CallSpan | None) -> RpcMetadata:
        request = self._request
        metadata: RpcMetadata = (("x-request-id", request.request_id),)
        if request.owner is not None and request.owner.wants_timeline:
            metadata += ((TIMELINE_KEY, "1"),)
        if span is not None:
            metadata += span.context.metadata()
        elif request.traceparent:
            metadata += (("traceparent", request.traceparent),)
            if request.tracestate:
                metadata += (("tracestate", request.tracestate),)
        if request.owner is not None and request.owner.private:
            metadata += ((PRIVATE_KEY, "1"),)
        return metadata

    def _open_decode(self, worker: Worker) -> None:
        message = decode_pb2.DecodeRequest(input=self._input(worker))
        if self.choice.prefill is None:
            message.local_prefill.SetInParent()
        else:
            message.kv_source.CopyFrom(wire.kv_source(self.choice.prefill))
        self._tried_decodes.add(worker)
        common = self._common("decode", worker)
        alone = self.choice.prefill is None
        self._decode = DecodeLeg(
            message,
            worker,
            self.key,
            queued=self.choice.uncached_tokens if alone else 0,
            context=self.choice.prompt_tokens,
            **common,
        )

    def _open_prefill(self, worker: Worker) -> None:
        hold_kv = self.choice.decode is not None
        message = prefill_pb2.PrefillRequest(input=self._input(worker), hold_kv=hold_kv)
        common = self._common("prefill", worker)
        self._prefill = PrefillLeg(message, worker, self.key, queued=self.choice.uncached_tokens, **common)

    def _common(self, role: Role, worker: Worker) -> dict[str, Any]:
        """What both legs get."""
        context = self._context
        owner = self._request.owner
        span: CallSpan | None = None
        if owner is not None and owner.trace is not None:
            attributes = {"baton.request_key": self.key, "server.address": worker.address}
            span = owner.trace.call(f"router.{role}", to_ns(context.clock()), attributes)
        return {
            "pool": context.pool,
            "tasks": context.tasks,
            "mailbox": self._mailbox,
            "deadline": self._request.deadline,
            "max_rpc_s": context.limits.max_rpc_s,
            "metadata": self._metadata(span),
            "clock": context.clock,
            "span": span,
        }

    def _silent(self, leg: Leg) -> BatonError:
        return BatonError(
            ErrorCode.KEEP_ALIVE_TIMEOUT,
            f"the {leg.role} server was silent for too long",
            metadata={"peer": leg.worker.address, "leg": leg.role},
        )

    def _after(self, seconds: float) -> None:
        """Wakes `next()` after a grace period; at most one runs at a time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._mailbox.put, (None, END))

    # -- news

    def _take(self, leg: Leg | None, payload: Payload) -> None:
        if leg is None:
            if isinstance(payload, BatonError):
                raise payload
            self._grace_over()
        elif leg.ended:
            pass  # a letter that crossed with the leg's end, or of a decode leg that was replaced
        elif isinstance(payload, BatonError):
            self._leg_failed(leg, payload)
        elif isinstance(payload, prefill_pb2.PrefillResponse):
            self._answered(payload)
        elif isinstance(payload, decode_pb2.DecodeEvent):
            self._decode_event(payload)
        else:
            self._leg_failed(leg, breach("a decode stream that ended without its Finished event"))

    def _answered(self, response: prefill_pb2.PrefillResponse) -> None:
        leg = self._prefill
        assert leg is not None
        try:
            _check_result(response)
        except BatonError as error:
            self._leg_failed(leg, error)
            return
        leg.end(None)
        self._end_leg_stage(leg)
        self._note_stages(leg, response.timeline.stages)
        if self._unexplained is not None:
            raise self._unexplained
        self._prompt_computed(response.result)
        if self._late_end is not None:
            self._out.append(self._late_end)
        elif self._decode is None:
            result = response.result
            reason = wire.finish_reason(result.finish_reason)
            if reason is None:
                raise breach("an only token that does not end its request")
            self._out.append(Ended(reason, _stop_token(result)))
        elif self._early_end is not None:
            if self._decode.ended:
                self._out.append(self._early_end)
            else:
                self._after(self._context.limits.finish_s)

    def _decode_event(self, event: decode_pb2.DecodeEvent) -> None:
        leg = self._decode
        assert leg is not None
        kind = event.WhichOneof("event")
        if kind == "tokens":
            leg.generating = True
            self._note_first_decode_token(event.tokens)
            if event.tokens.HasField("prefill") and not self._summarized:
                _check_result(event.tokens)
                self._summarize(event.tokens.prefill, event.tokens.tokens)
            elif self.choice.prefill is None and not self._summarized:
                raise breach("a first token without its prefill result")
            else:
                self._emit(self._merge.add(event.tokens.tokens))
        elif kind == "reserved":
            leg.reserved = True
            self._end_leg_stage(leg)
        elif kind == "loaded":
            leg.loaded = leg.generating = True
            _check_result(event.loaded)
            self._prompt_computed(event.loaded.prefill)
        elif kind == "finished":
            self._finished(leg, event.finished)
        else:
            raise breach("an empty event on a decode stream", kind="absent_field")

    def _finished(self, leg: DecodeLeg, finished: decode_pb2.Finished) -> None:
        leg.ended_by_server = True
        leg.end(None)
        self._note_stages(leg, finished.timeline.stages)
        reason = wire.finish_reason(finished.finish_reason)
        if reason is None or not self._merge.complete:
            raise breach("a stream that finished without a reason or with tokens missing")
        end = Ended(reason, _stop_token(finished), finished.preemptions)
        if self._prefill is None or self._prefill.ended:
            self._out.append(end)
        else:
            self._late_end = end
            self._after(self._context.limits.answer_s)

    def _leg_failed(self, leg: Leg, error: BatonError) -> None:
        self._end_leg_stage(leg)
        self._note_stages(leg, leg.told_seconds)
        if leg is self._prefill:
            self._prefill_failed(leg, error)
        else:
            self._decode_failed(error)

    def _prefill_failed(self, leg: Leg, error: BatonError) -> None:
        leg.end(error)
        self._context.registry.note_failure(leg.worker, error, told=leg.ended_by_server)
        if self._late_end is None and (self._decode is None or not self._decode.generating):
            self.blamed.add(leg.worker)
            raise error
        if error.breach:
            self._note_breach(leg, error)
        if self._late_end is not None:
            self._out.append(self._late_end)

    def _decode_failed(self, error: BatonError) -> None:
        leg, prefill = self._decode, self._prefill
        assert leg is not None
        cause = _cause_of(error)
        theirs = cause in _PREFILL_CAUSES and prefill is not None
        leg.end(error, blamed=not theirs)
        self._context.registry.note_failure(leg.worker, error, told=leg.ended_by_server)
        if self._early_end is not None:
            self._out.append(self._early_end)
            return
        if error.code is ErrorCode.DECODE_MALLOC_FAILED and prefill is not None and not leg.reserved:
            other = self._context.chooser.another_decode(
                prefill.worker, self._request, self._tried_decodes, len(self._emitted)
            )
            if other is not None and self._may_redirect(error):
                self._open_decode(other)
                self._on_redirect(other)
                return
        if not theirs:
            self.blamed.add(leg.worker)
        if cause is not None and prefill is not None:
            # A load has two ends, and the next attempt had better use two others.
            self.blamed.add(prefill.worker)
        if theirs and prefill is not None:
            if cause is ErrorCode.PEER_RESTARTED:
                self._context.registry.note_failure(prefill.worker, BatonError(cause))
            else:
                self._context.registry.suspect(prefill.worker)
        if cause is not None and int(cause) not in _TRANSFER_CAUSES and prefill is not None and not prefill.ended:
            self._unexplained = error
            self._after(self._context.limits.cause_s)
            return
        raise error

    def _note_breach(self, leg: Leg, error: BatonError) -> None:
        where, what = leg.worker.address, error.metadata.get("breach") or error.code.name
        code = error.code.name
        _log.error("contract breach by the %s server %s: %s", leg.role, where, what, extra={"code": code})
        self._context.metrics.inc("baton_contract_breaches_total", kind=error.breach)

    def _grace_over(self) -> None:
        if self._late_end is not None:
            self._out.append(self._late_end)
        elif self._unexplained is not None:
            raise self._unexplained
        elif self._early_end is not None:
            self._out.append(self._early_end)

    # -- tokens

    def _prompt_computed(self, result: common_pb2.PrefillResult) -> None:
        """The prompt's result, from whichever server says it first; the second time it changes nothing."""
        reason = wire.finish_reason(result.finish_reason)
        if reason is not None and self._decode is not None:
            self._early_end = Ended(reason, _stop_token(result))
        if self._summarized:
            self._emit(self._merge.add([result.first_token]))
        else:
            self._summarize(result, [result.first_token])

    def _summarize(self, result: common_pb2.PrefillResult, tokens: Iterable[common_pb2.TokenOutput]) -> None:
        self._summarized = True
        self._first_token_at = self._context.clock()
        if self.choice.prefill is None and self._decode is not None:
            self._decode.computed()
        # After a fail-over tokens of the answer are part of what is computed, and may be cached as well.
        cached = min(result.cached_tokens, len(self._request.prompt_token_ids))
        self._context.chooser.computed(self.choice, cached)
        summary = PrefillSummary(
            cached_tokens=cached,
            prefill_cuda_graph_status=status_from_wire(result.prefill_cuda_graph_status),
            path=self.choice.path,
            prompt_logprobs=to_prompt_logprobs(result.prompt_logprobs),
        )
        ready = self._merge.add(tokens)
        if ready:
            self._out.append(TokensEvent(ready, summary))

    def _emit(self, ready: list[Token]) -> None:
        if ready:
            self._out.append(TokensEvent(ready))

    def _note_first_decode_token(self, message: decode_pb2.Tokens) -> None:
        """Books the time from the prompt's token to the first one after it, on this router's clock."""
        first = len(self._emitted)
        if self._first_token_at is not None and any(token.index > first for token in message.tokens):
            self.timeline["router.first_decode_token"] = self._context.clock() - self._first_token_at
            self._first_token_at = None

    def _end_leg_stage(self, leg: Leg | None) -> None:
        """The leg's stage is over, whether it came to its end or not. May be called again."""
        if leg is None or leg.clock is None or leg.clock.finished:
            return
        leg.clock.finish()
        for stage, seconds in leg.clock.seconds().items():
            self.leg_seconds[stage] = self.leg_seconds.get(stage, 0.0) + seconds

    def _note_stages(self, leg: Leg, stages: Mapping[str, float]) -> None:
        """Books what a server says about its own stages, by its own clock."""
        for stage, seconds in stages.items():
            name = f"{leg.role}.{stage}"
            self.timeline[name] = self.timeline.get(name, 0.0) + seconds


def _check_result(message: prefill_pb2.PrefillResponse | decode_pb2.Loaded | decode_pb2.Tokens) -> None:
    """Raises the breach of a message whose prefill result is absent or lacks what it must have."""
    name = "result" if isinstance(message, prefill_pb2.PrefillResponse) else "prefill"
    if not message.HasField(name):  # type: ignore[arg-type]
        raise breach("an answer without a prefill result")
    result: common_pb2.PrefillResult = getattr(message, name)
    if not result.HasField("first_token"):
        raise breach("a prefill result without its token")
    if not result.HasField("cached_tokens"):
        raise breach("a prefill result without its cached tokens", kind="absent_field")


def _stop_token(message: common_pb2.PrefillResult | decode_pb2.Finished) -> int | None:
    return message.stop_token_id if message.HasField("stop_token_id") else None


def _cause_of(error: BatonError) -> ErrorCode | None:
    """The code behind a failed load."""
    if error.code is not ErrorCode.LOAD_KV_CACHE_FAILED:
        return None
    try:
        return ErrorCode(int(error.metadata.get("cause_code", "")))
    except ValueError:
        return None
