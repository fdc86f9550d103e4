"""Reception: takes requests in, watches over them, and writes the terminal record of each.

Every generation RPC runs inside a `RequestScope`. The scope admits the request, submits it to the engine,
carries aborts, deadlines and drains to it, and whatever happens leaves with exactly one terminal cause, no
engine request behind it, one line in the access log and one entry in `/debug/requests`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, cast

import grpc.aio
import msgspec

from engine.client import RequestStream, error_of
from engine.messages import AddRequest, KvSource, RequestOutput, RunMode, StagedEnd
from front.drain import Drain
from front.engine_link import EngineLink, EngineState
from front.request import Request, RequestState, Source, Terminal, classify
from front.request_table import RequestTable
from front.traces import write_trace
from front.validation import read_key, read_request
from protos import common_pb2
from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from rpc.faults import fault
from rpc.logs import request_id_var
from rpc.metrics import Registry
from rpc.server import cancel_code, current_call, tell_timeline
from rpc.stages import DECODE_STAGES, PREFILL_STAGES, StopCheck, in_stage
from rpc.status import decode_view
from rpc.tracing import Tracer

# How long a failed request whose caller waits for the answer is held for the engine's last word on its
# stages.
LAST_WORD_S = 0.05
# The engine ends a request at its deadline; the front steps in this much later.
DEADLINE_SLACK_S = 0.1

# A load that fails because its request was ended on the prefill server: how long the word of who ended it, which is on
# its way here too, is waited for.
WHY_S = 0.5
_ENDED_THERE = frozenset((ErrorCode.REQUEST_TOMBSTONED.name, ErrorCode.GENERATE_TIMEOUT.name))

# Refusals because of another request, or an earlier abort, of the same key.
_OF_ANOTHER = frozenset((ErrorCode.DUPLICATE_REQUEST, ErrorCode.REQUEST_TOMBSTONED))

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)


class Reception:
    """All requests of one server. Belongs to the event loop.

    `access_log` gets one dictionary per request at its end, `arrival_log` one when it was admitted. `stop_wait_s`
    bounds the wait for the engine to let go of a request that was aborted, `why_s` that for the word of who ended a
    request whose load failed by it.
    """

    def __init__(
        self,
        *,
        role: str,
        engine: EngineLink,
        metrics: Registry,
        drain: Callable[[], Drain],
        access_log: Callable[[Mapping[str, object]], None],
        arrival_log: Callable[[Mapping[str, object]], None] | None = None,
        tracer: Tracer | None = None,
        address: Callable[[], str] = lambda: "",
        stop_wait_s: float,
        why_s: float = WHY_S,
    ) -> None:
        self.role = role
        self.engine = engine
        self.metrics = metrics
        self.table = RequestTable()
        self.stop_wait_s = stop_wait_s
        self.why_s = why_s
        self._drain = drain
        self._access_log = access_log
        self._arrival_log = arrival_log
        self._tracer = tracer
        self._address = address
        self._scopes: dict[str, RequestScope] = {}

    def serve(self, context: Context, mode: RunMode) -> RequestScope:
        """The scope of one RPC; to be entered at once with `async with`."""
        # A call without a deadline is limited by the RPC's own maximum, which is not the request's deadline.
        call = current_call()
        limits = (Deadline.never(), call.deadline) if context.time_remaining() is None else (call.deadline, None)
        scope = RequestScope(self, context, mode, *limits)
        request = scope.request
        request.private = call.private
        if self._tracer is not None:
            trace = self._tracer.begin(call.traceparent, call.tracestate)
            if trace.sampled:
                request.trace = trace
                request.clock.keep_intervals()
        return scope

    def check_open(self) -> None:
        """Raises ENGINE_DEAD or SERVER_DRAINING when no request can be taken now."""
        self.engine.require()
        self._drain().check()

    def opened(self, scope: RequestScope) -> None:
        request = scope.request
        self._scopes[request.request_key] = scope
        if self._arrival_log is not None:
            names = ("request_id", "request_key", "attempt", "model", "private", "prompt_tokens")
            self._arrival_log({"mode": request.mode.value, **{name: getattr(request, name) for name in names}})

    def remaining(self) -> int:
        """Requests that a drain waits for: open RPCs and staged KV."""
        return len(self.table)

    def abort(self, request_key: str, error: BatonError, source: str) -> bool:
        """Ends the request in whatever state it is; an unknown key gets a tombstone. True if it was open
        here.
        """
        request = self.table.find(request_key)
        if request is None:
            self.table.tombstones.add(request_key)
            self.metrics.set("baton_tombstones", len(self.table.tombstones))
            # The engine must know as well: its cache store would park a load for this key.
            self.tell_engine(request_key, error.code, source)
            return False
        scope = self._scopes.get(request_key)
        if scope is not None:
            scope.end(error, source, self.stop_wait_s)
        else:
            request.abort_source = request.abort_source or source
            self.tell_engine(request_key, error.code, source)
        return True

    def tell_engine(self, request_key: str, code: ErrorCode, source: str) -> None:
        """Passes an abort on, if there is an engine to hear it."""
        try:
            self.engine.require()
        except BatonError:
            return
        self.engine.client.abort(request_key, code, source)

    def abort_all(self, make_error: Callable[[], BatonError], source: str, wait_s: float) -> None:
        """Ends every open request and all staged KV; RPCs that the engine has not ended after `wait_s` are
        forced.
        """
        for request in self.table:
            scope = self._scopes.get(request.request_key)
            if scope is not None:
                scope.end(make_error(), source, wait_s)
            else:
                request.abort_source = request.abort_source or source
                self.tell_engine(request.request_key, make_error().code, source)

    def engine_died(self) -> None:
        """Staged KV went with the engine; open RPCs learn it from their streams."""
        for request in self.table:
            if request.state is RequestState.HELD:
                request.note_staged_end(_lost_with_engine(request))
                self.finish(request)

    def staged_end(self, end: StagedEnd) -> None:
        """The engine has let go of the staged KV of a request that was, or is just being, answered."""
        request = self.table.find(end.request_key)
        if request is None:
            return
        request.note_staged_end(end)
        if request.state is RequestState.HELD:
            self.finish(request)

    def left(self, scope: RequestScope, held: bool) -> None:
        """The RPC is over. With `held` the request lives on until its staged KV ends."""
        request = scope.request
        if self._scopes.get(request.request_key) is scope:
            del self._scopes[request.request_key]
        if held:
            request.enter(RequestState.HELD)
            request.answered_at = request.state_since
            if self.engine.state is EngineState.DEAD:
                request.note_staged_end(_lost_with_engine(request))
            if request.staged_end is None:
                return
        self.finish(request)

    def finish(self, request: Request) -> None:
        """Writes the terminal record, once."""
        if request.ended_at is not None:
            return
        if request.terminal is None:
            raise AssertionError(f"request {request.request_key!r} has no terminal cause")
        self.table.leave(request)
        metrics, error = self.metrics, request.terminal.error
        for stage, seconds in request.clock.seconds().items():
            metrics.observe("baton_stage_seconds", seconds, stage=stage)
        if request.abort_source and (error is not None or request.kv_aborted):
            metrics.inc("baton_aborts_total", leg=self.role, source=request.abort_source)
        metrics.set("baton_tombstones", len(self.table.tombstones))
        if error is not None:
            if error.code is ErrorCode.REQUEST_TOMBSTONED:
                metrics.inc("baton_tombstone_hits_total")
            if error.breach:
                metrics.inc("baton_contract_breaches_total", kind=error.breach)
        self._access_log(self.access_line(request))
        if request.trace is not None:
            write_trace(request, self.role, self._address())
        self._drain().request_left()

    def access_line(self, request: Request) -> dict[str, object]:
        """The request's line in the access log: no prompt, no output."""
        line = request.page()
        for name in ("state", "stage", "events", "arrival_ns", "ended_seconds_ago"):
            line.pop(name, None)
        line["seconds"] = line.pop("age_seconds")
        line["model"] = request.model
        line["private"] = request.private
        line["error"] = request.terminal.error if request.terminal is not None else None
        line["path"] = "colocated" if request.mode is RunMode.LOCAL else "pd"
        if request.waits_for:
            line["kv_source"] = request.waits_for
        return line


class RequestScope:
    """One generation RPC: `async with reception.serve(context, mode) as scope`.

    Leaving the block ends the engine's request if it is still there, sets the terminal cause and writes the
    record. An error leaves as BatonError with its stage; the caller's own cancel leaves as CancelledError.
    """

    def __init__(
        self, reception: Reception, context: Context, mode: RunMode, deadline: Deadline, rpc_limit: Deadline | None
    ) -> None:
        stages = PREFILL_STAGES if reception.role == "prefill" else DECODE_STAGES
        self.request = Request(mode, stages, peer=context.peer(), deadline=deadline)
        self._reception = reception
        self._context = context
        self._rpc_limit = rpc_limit or Deadline.never()  # the very one at which the call's task is cancelled
        self._stream: RequestStream | None = None
        self._stream_ended = False
        self._held = False
        self._forced: BatonError | None = None
        self._intent: BatonError | None = None
        self._intended = asyncio.Event()
        self._told: set[int] = set()  # codes with which the engine was asked to end it
        self._timers: list[asyncio.TimerHandle] = []
        self._task: asyncio.Task[Any] | None = None
        self._leaving: asyncio.Timeout | None = None
        self._left = False

    async def __aenter__(self) -> RequestScope:
        self._task = asyncio.current_task()
        self._reception.table.arrive(self.request)
        tell_timeline(self.request.stages)
        return self

    def admit(
        self,
        message: common_pb2.GenerateInput,
        *,
        kv_source: Callable[[], KvSource] | None = None,
        check: Callable[[], None] | None = None,
        single_token: bool = False,
    ) -> RequestStream:
        """The admit stage: checks the whole message, opens the key and hands the request to the engine.

        `check` and `kv_source` read what the service's own message holds beside `message`; they run after
        the key was read, so that a refusal is recorded under it.
        """
        request = self.request
        reception = self._reception
        deadline = request.deadline
        with in_stage(request.clock, StopCheck(deadline)):
            key = read_key(message)
            request.request_id, request.attempt = key.request_id, key.attempt
            request_id_var.set(key.request_id)
            request.request_key = message.request_key
            request.model = message.model
            request.prompt_tokens = len(message.prompt_token_ids)
            reception.check_open()
            _, facts = reception.engine.require()
            if check is not None:
                check()
            source = kv_source() if kv_source is not None else None
            add = read_request(
                message,
                facts,
                request.mode,
                arrival_ns=request.arrival_ns,
                deadline_ns=deadline.at_ns(),
                kv_source=source,
                single_token=single_token,
            )
            reception.table.open(request, add.request_key)
            reception.opened(self)
            if source is not None:
                request.waits_for = ",".join(source.addresses)
            fault("request.admit", role=reception.role, request_key=request.request_key)
            return self._submit(self._traced(add))

    def _traced(self, add: AddRequest) -> AddRequest:
        """With what the engine needs of a traced request: the context of the call with which its KV will come."""
        request = self.request
        if request.trace is None:
            return add
        context = request.trace.context
        if request.mode is RunMode.DECODE:
            context = request.load_context = context.child()
        return msgspec.structs.replace(add, traceparent=context.traceparent)

    def _submit(self, add: AddRequest) -> RequestStream:
        self._stream = self._reception.engine.client.submit(add)
        self.request.enter(RequestState.ENGINE)
        timeout_s = self.request.deadline.timeout()
        if timeout_s is not None:
            error = BatonError(ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed; allow it more time")
            self._later(timeout_s + DEADLINE_SLACK_S, lambda: self._force(error, "deadline"))
        return self._stream

    def note(self, output: RequestOutput) -> None:
        """Books one output of the engine; raises its error."""
        self.request.note(output)
        if output.last:
            self._stream_ended = True
        if output.error is not None:
            raise error_of(output.error)

    def answered(self, *, held: bool) -> None:
        """The engine gave its answer. With `held` its KV stays staged and the request lives on after the
        RPC.
        """
        self._held = held
        self.request.enter(RequestState.ANSWER)

    def end(self, error: BatonError, source: str, wait_s: float) -> None:
        """Ends the request from outside: the engine is told at once, the RPC is forced to end after `wait_s`.

        An abort that meets a finished generation changes nothing.
        """
        request = self.request
        request.abort_source = request.abort_source or source
        if self._intent is None:
            self._intent = error
            self._intended.set()
        self._told.add(int(error.code))
        self._reception.tell_engine(request.request_key, error.code, source)
        if wait_s > 0:
            self._later(wait_s, lambda: self._force(error, source))
        else:
            self._force(error, source)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call))

    def _force(self, error: BatonError, source: str) -> None:
        """Interrupts the RPC wherever it waits."""
        if self._left:
            return
        if self._leaving is not None:  # it is on its way out and only waits for the engine's last word
            if not self._leaving.expired():  # both can be due at once, after a process stood still
                self._leaving.reschedule(asyncio.get_running_loop().time())
            return
        if self._forced is None and self._task is not None:
            self._forced = self._intent or error  # whoever asked first
            self.request.abort_source = self.request.abort_source or source
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = await self._hear_why(exc)
        exc = left or exc
        for timer in self._timers:
            timer.cancel()
        forced = self._forced is not None and isinstance(exc, asyncio.CancelledError)
        if forced and self._task is not None:
            self._task.uncancel()
        cancelled = isinstance(exc, asyncio.CancelledError) and not forced
        error = self._cause(exc, cancelled)
        if self._stream is not None and not self._stream_ended:
            word = await self._let_go(error, wait_s=self._reception.stop_wait_s if cancelled else LAST_WORD_S)
            if word is not None and (forced or cancelled) and not _followed(word):
                error = word  # it had failed before it was told to end
        elif error is not None and self._is_of_a_load(error):
            # The engine may have staged KV for an answer that nobody will get; and of a refusal it hears so that the
            # load of this key, which may have come first, ends with it and not at its time limit.
            self._reception.tell_engine(self.request.request_key, error.code, self.request.abort_source or "error")
        terminal = self._terminal(error, cancelled)
        held = self._held and terminal.source is Source.SUCCESS
        self._left = True
        self._reception.left(self, held)
        if held and cancelled:
            self._give_up_staged()
        elif held:
            self._context.add_done_callback(cast(Any, self._answer_done))
        if left is not None and not forced:
            raise left
        if terminal.error is not None and terminal.error is not exc and not cancelled and exc is not None:
            raise terminal.error from (None if isinstance(exc, BatonError | asyncio.CancelledError) else exc)

    async def _hear_why(self, exc: BaseException | None) -> asyncio.CancelledError | None:
        """Waits a moment for the cause of a failure that is only what followed from it. Returns the cancellation of the
        call if that comes."""
        if self._intent is not None or not isinstance(exc, BatonError) or not _followed(exc):
            return None
        try:
            async with asyncio.timeout(self._reception.why_s):
                await self._intended.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError as left:
            return left
        return None

    def _is_of_a_load(self, error: BatonError) -> bool:
        """Whether a decode server may wait for the KV of this request, and of no other one with its key."""
        request = self.request
        if request.mode is not RunMode.PREFILL or not request.request_key or error.code in _OF_ANOTHER:
            return False
        return self._reception.table.find(request.request_key) in (None, request)

    def _cause(self, exc: BaseException | None, cancelled: bool) -> BatonError | None:
        """The error of the RPC, typed; None for a regular end and for the caller's own cancel."""
        request = self.request
        if exc is None:
            return None
        if isinstance(exc, asyncio.CancelledError):
            if not cancelled:
                error = self._forced
            elif self._intent is not None:
                error = self._intent
            elif self._rpc_limit.passed():
                request.abort_source = request.abort_source or "deadline"
                error = BatonError(ErrorCode.DEADLINE_EXCEEDED, "the call took longer than this server's maximum")
            elif cancel_code(self._context) is ErrorCode.GENERATE_TIMEOUT:
                request.abort_source = request.abort_source or "deadline"
                error = BatonError(ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed; allow it more time")
            else:
                if not self._stream_ended:
                    request.abort_source = request.abort_source or "client"
                return None
        elif isinstance(exc, BatonError) and exc is self._reception.engine.client.death:
            # One object for every open request; each gets its own, which takes its own context.
            error = BatonError(ErrorCode.ENGINE_DEAD, exc.message, metadata={"cause": exc.code.name, **exc.metadata})
        elif isinstance(exc, BatonError) and exc.code is ErrorCode.LOAD_KV_CACHE_FAILED and self._intent is not None:
            # Who ends a request ends it on the prefill server too, and what a load then meets there is no cause.
            error = self._intent
        elif isinstance(exc, BatonError):
            error = exc
            if exc.code is ErrorCode.GENERATE_TIMEOUT:
                request.abort_source = request.abort_source or "deadline"
        elif isinstance(exc, Exception):
            _log.error("request failed without a code", exc_info=exc, extra={"request_id": request.request_id})
            error = BatonError(ErrorCode.UNKNOWN_ERROR, "the server failed; this is a defect of the server")
        else:
            raise exc
        if error is None:
            raise AssertionError("a forced end without its error")
        error = self._own_view(error)
        error.stage = error.stage or _stage_of(request)
        return error

    async def _let_go(self, error: BatonError | None, wait_s: float) -> BatonError | None:
        """Makes the engine drop the request, and books its last word if that comes within `wait_s`.

        Returns the failure that the engine reports in place of the end that it was asked for.
        """
        request = self.request
        stream = self._stream
        assert stream is not None
        code = error.code if error is not None else ErrorCode.CANCELLED
        self._told.add(int(code))
        # An engine that is done with the request has nothing to end any more, but KV that it may have staged.
        if code is not ErrorCode.ENGINE_DEAD and (request.mode is RunMode.PREFILL or not stream.complete):
            request.abort_source = request.abort_source or "error"
            self._reception.tell_engine(request.request_key, code, request.abort_source)
        try:
            async with asyncio.timeout(wait_s) as self._leaving:
                async for output in stream:
                    request.note(output)
                    if output.error is not None and output.error.code not in self._told:
                        return self._own_view(error_of(output.error))
        except (TimeoutError, BatonError):
            # The engine did not answer in time, or is gone: what it had measured is lost, the cause is not.
            pass
        except asyncio.CancelledError:
            if self._task is None or not self._task.cancelling():
                raise
        finally:
            self._leaving = None
        return None

    def _own_view(self, error: BatonError) -> BatonError:
        """`error` as this server reports it."""
        return decode_view(error) if self._reception.role == "decode" else error

    def _terminal(self, error: BatonError | None, cancelled: bool) -> Terminal:
        request = self.request
        finish_reason = request.finish_reason
        if error is None and self._held:
            # The prompt is computed: for the prefill server that is the end of the generation.
            return request.end(Terminal(Source.SUCCESS, None, finish_reason))
        return request.end(classify(error, finish_reason, cancelled))

    def _answer_done(self, context: Context) -> None:
        # `cancelled()` of a servicer context stays False in grpcio 1.85; an answer that was not sent is not `done()`.
        if not context.done():
            self._give_up_staged()

    def _give_up_staged(self) -> None:
        """Nobody will load what was staged for a caller that left before its answer."""
        request = self.request
        if self._reception.table.is_open(request):
            self._reception.abort(request.request_key, BatonError(ErrorCode.CANCELLED), "client")


def _followed(error: BatonError) -> bool:
    """Whether this is a load that failed because its request was ended: what followed from the cause, and no cause."""
    return error.metadata.get("cause") in _ENDED_THERE


def _lost_with_engine(request: Request) -> StagedEnd:
    return StagedEnd(request.request_key, "aborted", cause="engine_dead")


def _stage_of(request: Request) -> str:
    """Best name of the stage a request is in, when the engine has not said it."""
    if request.state is RequestState.ADMIT:
        return request.clock.stage
    if request.mode is RunMode.DECODE:
        return {RequestState.ENGINE: "allocate", RequestState.LOAD: "load"}.get(request.state, "generate")
    return (
        "queue" if request.state is RequestState.ENGINE else "generate" if request.mode is RunMode.LOCAL else "sample"
    )
