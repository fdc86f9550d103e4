"""The client requests that are open: from the moment their id is known to their last byte.

An `OpenRequest` is what is refused as a duplicate, aborted, drained and accounted. The surfaces open one per
client request, before they validate it, and hand it to the orchestrator inside each `RouterRequest`:

    with open_requests.open(request_id, api="chat", model=name, stream=True) as open_request:
        with in_stage(open_request.clock): validate
        with in_stage(open_request.clock): tokenize
        async for event in orchestrator.generate(RouterRequest(..., owner=open_request)):
            write; open_request.tokens_written(len(event.tokens))
        open_request.finish("stop")

A `with` body that ends by an exception fails the request with it; one that ends without `finish()` was left
by its client. Metrics and the access log line are written once, at the end of the `with` body. A request that a surface
refuses before it can be opened gets them by `refused`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from router.request_figures import RequestFigures
from router.requests import Api, FinishReason, Path
from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from rpc.ids import check_request_id
from rpc.lifecycle import OpenWork
from rpc.logs import request_id_var
from rpc.metrics import HistogramSeries, Registry
from rpc.server import DEADLINE_TOLERANCE_S
from rpc.stages import ROUTER_STAGES, StageClock, StopCheck
from rpc.terminal import Source, Terminal, classify
from rpc.tombstones import Tombstones
from rpc.trace_context import trace_context
from rpc.tracing import RequestTrace, Tracer, to_ns

# validate and tokenize are the surface's, the rest is the orchestrator's.
_SURFACE_STAGES = 2
_SERVING_STAGES = ROUTER_STAGES[_SURFACE_STAGES:]
_ABORT_SOURCES = {
    ErrorCode.CANCELLED: "client",
    ErrorCode.GENERATE_TIMEOUT: "deadline",
    ErrorCode.SERVER_DRAINING: "drain",
}

_log = logging.getLogger(__name__)


class AccessRecord(Protocol):
    """Where the lines about a request go (rpc.access_log.AccessLog)."""

    def arrived(self, *, request_id: str, private: bool = False, **fields: Any) -> None: ...

    def record(
        self, *, request_id: str, code: str, private: bool = False, error: BaseException | None = None, **fields: Any
    ) -> None: ...


@dataclass
class LegNote:
    """What one attempt did, for the access log."""

    attempt: int
    path: Path
    prefill: str = ""
    decode: str = ""
    code: str = ""
    request_key: str = ""


@dataclass
class _Writing:
    """Times of the written chunks of one choice."""

    first: float
    last: float
    tokens: int


class OpenRequest:
    """One client request. Made by `OpenRequests.open`; a context manager, used once."""

    def __init__(
        self,
        table: OpenRequests,
        request_id: str,
        *,
        api: Api,
        model: str,
        stream: bool,
        arrival: float,
        deadline: Deadline,
        private: bool = False,
        trace: RequestTrace | None = None,
    ) -> None:
        self._table = table
        self.request_id = request_id
        self.api: Api = api
        self.model = model
        self.stream = stream
        self.arrival = arrival
        self.deadline = deadline
        # Nothing is logged of it but a failure.
        self.private = private
        # What is recorded of it; None unless it is.
        self.trace = trace
        self.clock = StageClock(ROUTER_STAGES, table.clock)
        if trace is not None:
            self.clock.keep_intervals()
        # W3C trace context for the servers: the client's, or with tracing what the router made of it.
        self.traceparent = self.tracestate = ""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.attempts = 0
        self.path: Path | None = None
        self.legs: list[LegNote] = []
        self.timeline: dict[str, float] = {}
        # The client asked for the timeline, which its servers tell of a failure only then.
        self.wants_timeline = False
        # Prompts and answers by name, for the access log; empty unless it is told to write them.
        self.content: dict[str, list[str]] = {}
        self.outcome: FinishReason | None = None
        self.error: BatonError | None = None
        self.terminal: Terminal | None = None
        self.was_open = False
        # Looked up once: it is needed with every token.
        self.gap_series: HistogramSeries | None = None
        self._clock_taken = False
        self._writing: dict[int, _Writing] = {}
        self._stop: BatonError | None = None
        self._stoppers: list[Callable[[BatonError], None]] = []

    # -- for the surfaces

    def tokens_written(self, tokens: int, choice: int = 0) -> None:
        """A chunk with `tokens` new tokens of `choice` went to the client (or, not streamed, into the
        answer)."""
        if tokens <= 0:
            return
        now = self._table.clock()
        writing = self._writing.get(choice)
        if writing is None:
            if not self._writing:
                self._table.first_token(self, now)
            self._writing[choice] = _Writing(now, now, tokens)
            return
        self._table.later_tokens(self, (now - writing.last) / tokens, tokens)
        writing.last = now
        writing.tokens += tokens

    @property
    def tokens(self) -> int:
        """Generated tokens written so far, over all choices."""
        return sum(w.tokens for w in self._writing.values())

    def seconds(self) -> dict[str, float]:
        """The timeline so far: seconds by "role.stage", each by the clock of one process."""
        return {f"router.{stage}": seconds for stage, seconds in self.clock.seconds().items()} | self.timeline

    @property
    def stop_check(self) -> StopCheck:
        """What is looked at before each stage of the surface; an abort is the orchestrator's affair."""
        return StopCheck(self.deadline)

    def finish(self, outcome: FinishReason) -> None:
        """The request ended as it should. With several choices: the last one's reason; an error that is set
        stays."""
        if self.error is None:
            self.outcome = outcome

    def fail(self, error: BatonError) -> None:
        """The request failed; the first cause stays."""
        if self.error is None:
            self.error = error
            self.outcome = None

    # -- for the orchestrator

    def take_clock(self) -> StageClock:
        """The clock of one choice, standing before `queue`: the request's own for the first one."""
        if self._clock_taken:
            return StageClock(_SERVING_STAGES, self._table.clock)
        self._clock_taken = True
        if self.clock.stage != ROUTER_STAGES[_SURFACE_STAGES - 1]:
            # Opened by a caller that has nothing to validate or to tokenize.
            self.clock = StageClock(_SERVING_STAGES, self._table.clock)
            if self.trace is not None:
                self.clock.keep_intervals()
        return self.clock

    @property
    def stopped(self) -> BatonError | None:
        """CANCELLED once the request was aborted through the API, SERVER_DRAINING once the router gave it
        up."""
        return self._stop

    def on_stop(self, stopper: Callable[[BatonError], None]) -> Callable[[], None]:
        """Calls `stopper` when the request is stopped; at once when it already is. Returns what takes it
        back."""
        if self._stop is not None:
            stopper(self._stop)
            return lambda: None
        self._stoppers.append(stopper)
        return lambda: self._stoppers.remove(stopper) if stopper in self._stoppers else None

    def stop(self, error: BatonError) -> None:
        """Ends every choice: with finish reason abort for CANCELLED, else with `error`. The first cause
        stays."""
        if self._stop is None:
            self._stop = error
            stoppers, self._stoppers = self._stoppers, []
            for stopper in stoppers:
                stopper(error)

    # -- the scope

    def __enter__(self) -> OpenRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, BatonError):
            self.fail(exc)
        elif isinstance(exc, Exception):
            error = BatonError(ErrorCode.UNKNOWN_ERROR, metadata={"exception": type(exc).__name__})
            error.__cause__ = exc
            self.fail(error)
        left = False
        if self.outcome is None and self.error is None:
            if self.deadline.remaining() <= DEADLINE_TOLERANCE_S:
                # A client that gives its call a deadline cuts it off itself, at the same moment.
                self.fail(BatonError(ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed"))
            else:
                left = True
        self.end(left)
        self._table.closed(self)

    def end(self, left: bool) -> None:
        """Sets the terminal cause, once; `left`: the client went away before its answer was complete."""
        if self.terminal is None:
            self.terminal = classify(self.error, self.outcome, left)
            # An answer that was cut short by an abort is an answer: its cause is no error of the client's.
            if self.outcome is None and self.terminal.error is not None:
                self.fail(self.terminal.error)


class OpenRequests:
    """All open client requests of the router."""

    def __init__(
        self,
        metrics: Registry,
        *,
        request_timeout_s: float | None,
        served_names: Callable[[], Sequence[str]],
        access_log: AccessRecord | None = None,
        work: OpenWork | None = None,
        tracer: Tracer | None = None,
        tombstones: Tombstones | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.clock = clock
        self.request_timeout_s = request_timeout_s
        self._served_names = served_names
        self._access_log = access_log
        self._figures = RequestFigures(metrics)
        self._tracer = tracer
        self._tombstones = tombstones if tombstones is not None else Tombstones(clock=clock)
        self._open: dict[str, OpenRequest] = {}
        self._refuse: BatonError | None = None
        # Counts them for the drain of the process.
        self.work = work if work is not None else OpenWork()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(
        self,
        request_id: str,
        *,
        api: Api,
        model: str = "",
        stream: bool = False,
        arrival: float | None = None,
        deadline: Deadline | None = None,
        private: bool = False,
        traceparent: str = "",
        tracestate: str = "",
    ) -> OpenRequest:
        """Opens a client request; its deadline is the earlier of `deadline` and the router's own limit. Of a `private`
        one nothing is logged but a failure.

        Raises INVALID_PARAMS (id), DUPLICATE_REQUEST (open already), REQUEST_TOMBSTONED (aborted before it
        came) and SERVER_DRAINING. `model` can be set later, once the body is read, by assigning to the
        attribute.
        """
        check_request_id(request_id)
        request = self._arrived(
            request_id,
            api=api,
            model=model,
            stream=stream,
            arrival=arrival,
            deadline=deadline,
            private=private,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        refusal = self._refusal(request_id)
        if refusal is not None:
            self._end_unopened(request, refusal)
            raise refusal
        self._open[request_id] = request
        request.was_open = True
        self.work.set(len(self._open))
        return request

    def refused(
        self,
        request_id: str,
        error: BatonError | None,
        *,
        api: Api,
        model: str = "",
        stream: bool = False,
        arrival: float | None = None,
        private: bool = False,
        traceparent: str = "",
        tracestate: str = "",
    ) -> None:
        """Accounts for a client request that a surface refused with `error` before it could be opened: without the API
        key, with an id that is none, with a body that cannot be read. None: its client left while it sent it.
        `request_id` is the one that the answer carries."""
        request = self._arrived(
            request_id,
            api=api,
            model=model,
            stream=stream,
            arrival=arrival,
            deadline=None,
            private=private,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        self._end_unopened(request, error)

    def _arrived(
        self,
        request_id: str,
        *,
        api: Api,
        model: str,
        stream: bool,
        arrival: float | None,
        deadline: Deadline | None,
        private: bool,
        traceparent: str,
        tracestate: str,
    ) -> OpenRequest:
        request_id_var.set(request_id)
        trace = None if self._tracer is None else self._tracer.begin(traceparent, tracestate)
        request = OpenRequest(
            self,
            request_id,
            api=api,
            model=model,
            stream=stream,
            arrival=self.clock() if arrival is None else arrival,
            deadline=(deadline or Deadline.never()).earlier(self.request_timeout_s),
            private=private,
            trace=trace if trace is not None and trace.sampled else None,
        )
        request.traceparent, request.tracestate = trace_context(traceparent, tracestate)
        if trace is not None:
            request.traceparent, request.tracestate = trace.context.traceparent, trace.context.tracestate
        if self._access_log is not None:
            self._access_log.arrived(request_id=request_id, private=private, api=api, model=model, stream=stream)
        return request

    def _end_unopened(self, request: OpenRequest, error: BatonError | None) -> None:
        if error is not None:
            request.fail(error)
        request.end(left=error is None)
        self._account(request)

    def _refusal(self, request_id: str) -> BatonError | None:
        if self._refuse is not None:
            refusal = self._refuse
            return BatonError(refusal.code, refusal.message, retry_after_s=refusal.retry_after_s)
        before = self._open.get(request_id)
        # One whose answer is complete is over for its client, who may have it already, before it is closed here.
        if before is not None and before.outcome is None:
            return BatonError(
                ErrorCode.DUPLICATE_REQUEST,
                f"a request with the id {request_id} is open; use another id",
                param="request_id",
            )
        if self._tombstones.hit(request_id):
            message = f"the request {request_id} was aborted before it came"
            return BatonError(ErrorCode.REQUEST_TOMBSTONED, message)
        return None

    def abort(self, request_id: str) -> bool:
        """Stops the open request; for an unknown id leaves a tombstone and returns False."""
        request = self._open.get(request_id)
        if request is None:
            self._tombstones.add(request_id)
            return False
        request.stop(BatonError(ErrorCode.CANCELLED, "the request was aborted"))
        return True

    def refuse_new(self, error: BatonError) -> None:
        """From now on every new request gets `error`."""
        self._refuse = error

    def stop_all(self, error: BatonError) -> int:
        """Ends every open request with `error`; returns how many there were."""
        requests = list(self._open.values())
        for request in requests:
            request.stop(error)
        return len(requests)

    # -- accounting

    def first_token(self, request: OpenRequest, now: float) -> None:
        labels = (self._model_label(request), request.path or "pd")
        self._figures.first_token[labels].observe(max(0.0, now - request.arrival))

    def later_tokens(self, request: OpenRequest, gap_s: float, tokens: int) -> None:
        series = request.gap_series
        if series is None:
            series = request.gap_series = self._figures.gap[self._model_label(request), request.path or "pd"]
        series.observe(gap_s, tokens)

    def closed(self, request: OpenRequest) -> None:
        if self._open.get(request.request_id) is request:
            del self._open[request.request_id]
            self.work.set(len(self._open))
        request.clock.finish()
        self._account(request)

    def _model_label(self, request: OpenRequest) -> str:
        """The label is a closed set: whatever else a client asked for is `other`."""
        return request.model if request.model in self._served_names() else "other"

    def _account(self, request: OpenRequest) -> None:
        figures, error = self._figures, request.error
        model, api = self._model_label(request), request.api
        outcome = "error" if error is not None else str(request.outcome)
        figures.requests[model, api, "true" if request.stream else "false", outcome].inc()
        phase = "mid_stream" if request.tokens else "before_first_token"
        if error is not None:
            figures.errors[model, api, error.code.name, phase].inc()
        ended_by = request.stopped or error
        if ended_by is not None and ended_by.code in _ABORT_SOURCES and request.was_open:
            figures.aborts["router", _ABORT_SOURCES[ended_by.code]].inc()
        for stage, seconds in request.clock.seconds().items():
            figures.stages[(stage,)].observe(seconds)
        if request.prompt_tokens and error is None:
            figures.prompt_lengths[(model,)].observe(request.prompt_tokens)
            figures.answer_lengths[(model,)].observe(request.tokens)
            figures.prompt_tokens[(model,)].inc(request.prompt_tokens)
            figures.cached_tokens[(model,)].inc(request.cached_tokens)
        if request.tokens:
            figures.generated_tokens[(model,)].inc(request.tokens)
        if request._writing and error is None and request.path is not None:
            last = max(w.last for w in request._writing.values())
            figures.answer[model, request.path].observe(last - request.arrival)
            longest = max(request._writing.values(), key=lambda w: w.tokens)
            if longest.tokens > 1:
                figures.output_token[model, request.path].observe((longest.last - longest.first) / (longest.tokens - 1))
        if error is not None and error.http_status >= 500:
            # Here it ends, so here it is logged; attempts before it were only noted. Of a private request, id and code.
            told = {} if request.private else {"cause": dict(error.metadata)}
            _log.log(
                # How much time a request has is its client's choice.
                logging.WARNING if error.code is ErrorCode.GENERATE_TIMEOUT else logging.ERROR,
                "request failed: %s",
                error.code.name if request.private else error,
                extra={"request_id": request.request_id, "code": error.code.name, **told},
            )
        if self._access_log is not None:
            code = error.code.name if error is not None else ErrorCode.NONE_ERROR.name
            self._access_log.record(
                request_id=request.request_id,
                code=code,
                private=request.private,
                error=error,
                **self._fields(request, phase),
            )
        if request.trace is not None:
            self._finish_trace(request, request.trace)

    def _finish_trace(self, request: OpenRequest, trace: RequestTrace) -> None:
        """Hands over the spans of the request, of its stages and of its calls to servers."""
        intervals = request.clock.intervals()
        trace.add_stages("router", {name: (to_ns(begin), to_ns(end)) for name, (begin, end) in intervals.items()})
        trace.finish(
            "router.request",
            to_ns(request.arrival),
            to_ns(self.clock()),
            attributes={
                "baton.request_id": request.request_id,
                "baton.api": request.api,
                "baton.code": (request.error.code if request.error is not None else ErrorCode.NONE_ERROR).name,
                "baton.path": request.path,
                "baton.attempts": request.attempts,
                "baton.stream": request.stream,
                "gen_ai.request.model": request.model,
                "gen_ai.response.finish_reasons": request.outcome,
                "gen_ai.usage.input_tokens": request.prompt_tokens,
                "gen_ai.usage.output_tokens": request.tokens,
                "baton.cached_tokens": request.cached_tokens,
            },
            error=request.error.code.name if request.error is not None else "",
        )

    def _fields(self, request: OpenRequest, phase: str) -> dict[str, Any]:
        """What the access log says beside id and code."""
        error = request.error
        fields: dict[str, Any] = {
            "api": request.api,
            "model": request.model,
            "stream": request.stream,
            "path": request.path,
            "attempts": request.attempts,
            "servers": [vars(leg) for leg in request.legs],
            "outcome": "error" if error is not None else request.outcome,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "generated_tokens": request.tokens,
            "seconds": max(0.0, self.clock() - request.arrival),
            "stages": request.clock.seconds(),
            "timeline": request.timeline,
            **request.content,
        }
        if request.terminal is not None and request.terminal.source is not Source.SUCCESS:
            fields["source"] = request.terminal.source.value
        if error is not None:
            fields |= {"phase": phase, "message": error.message, "stage": error.stage, "cause": dict(error.metadata)}
        return fields
