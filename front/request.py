"""One request on this server: what it is, where it stands, how long each stage took, and how it ended.

Pure bookkeeping: no sockets, no tasks, the clock is injected. A request has exactly one terminal cause; the
first one stays, whatever its clean-up meets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from engine.messages import FinishReason, RequestOutput, RunMode, StagedEnd, TimelineEvent
from rpc.deadline import Deadline
from rpc.graph_status import StickyStatus, status_from_wire
from rpc.stages import FINISH, StageClock
from rpc.terminal import Source, Terminal, classify
from rpc.trace_context import TraceContext
from rpc.tracing import RequestTrace

__all__ = ["Request", "RequestState", "Source", "Terminal", "classify"]


class RequestState(StrEnum):
    """Where a request stands as the front knows it."""

    ADMIT = "admit"  # being validated
    ENGINE = "engine"  # queued, reserving blocks or computing its prompt
    LOAD = "load"  # decode: blocks are reserved, the KV is arriving
    GENERATE = "generate"  # tokens are coming
    ANSWER = "answer"  # the engine is done, the answer is on its way to the caller
    HELD = "held"  # prefill: answered; the KV stays staged under its lease
    ENDED = "ended"


class Request:
    """One request from its arrival to its terminal record.

    `arrival_ns` is a reading of `time.monotonic_ns()`. Ids are empty until the message was read; a request
    that is refused before that has none.
    """

    def __init__(
        self,
        mode: RunMode,
        stages: Sequence[str],
        *,
        peer: str = "",
        deadline: Deadline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode = mode
        self.peer = peer
        self.deadline = deadline if deadline is not None else Deadline.never()
        self.clock = StageClock(stages, clock)
        self.request_id = ""
        self.request_key = ""
        self.attempt = 0
        self.model = ""
        self.private = False  # nothing is logged of it but a failure
        self.trace: RequestTrace | None = None  # what is recorded of it; None unless it is
        self.load_context: TraceContext | None = None  # of the span that the load of its KV is
        self.stage_times: dict[str, tuple[int, int]] = {}  # by the engine, of a traced request
        self.answered_at: float | None = None  # prefill: its call ended, its KV stays staged
        self.waits_for = ""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cached_tokens: int | None = None
        self.graph_status = StickyStatus()
        self.finish_reason: FinishReason | None = None
        self.events: list[TimelineEvent] = []
        self.all_stages: dict[str, float] = {}
        self.staged_end: StagedEnd | None = None
        self.terminal: Terminal | None = None
        self.abort_source = ""
        self._now = clock
        self._stages = frozenset(stages)
        self.arrival = clock()
        self.state = RequestState.ADMIT
        self.state_since = self.arrival
        self.ended_at: float | None = None

    @property
    def arrival_ns(self) -> int:
        return int(self.arrival * 1e9)

    def enter(self, state: RequestState) -> None:
        if state is not self.state:
            self.state = state
            self.state_since = self._now()

    def note(self, output: RequestOutput) -> None:
        """Books what an engine step brought: progress, and with the last output stages and events."""
        if output.prefill is not None:
            self.cached_tokens = output.prefill.cached_tokens
            self.graph_status.decide(status_from_wire(output.prefill.cuda_graph_status))
        if output.tokens:
            self.generated_tokens += len(output.tokens)
            self.enter(RequestState.GENERATE)
        elif output.reserved:
            self.enter(RequestState.LOAD)
        elif output.loaded:
            self.enter(RequestState.GENERATE)
        self.note_stages(output.stages)
        self.stage_times.update(output.stage_times)
        self.events.extend(output.events)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason

    def note_stages(self, stages: Mapping[str, float]) -> None:
        """Adds seconds that the engine measured. Stages of another role (colocated) count in the timeline
        alone.
        """
        for name, seconds in stages.items():
            self.all_stages[name] = self.all_stages.get(name, 0.0) + seconds
            if name in self._stages:
                self.clock.record(name, seconds)

    def note_staged_end(self, end: StagedEnd) -> None:
        """Books the end of the staged KV; the first report counts."""
        if self.staged_end is None:
            self.staged_end = end
            self.note_stages({"publish": end.publish_seconds, "held": end.held_seconds})
            self.events.extend(end.events)

    @property
    def kv_aborted(self) -> bool:
        """The staged KV was given up after the answer."""
        return self.staged_end is not None and self.staged_end.outcome == "aborted"

    def end(self, terminal: Terminal) -> Terminal:
        """Sets the terminal cause unless there is one, and returns the one that counts."""
        if self.terminal is None:
            self.terminal = terminal
        return self.terminal

    def close(self) -> None:
        """The request's life is over: final stage, final time. May be called again."""
        if self.ended_at is None:
            self.clock.finish()
            self.enter(RequestState.ENDED)
            self.ended_at = self._now()

    def stages(self) -> dict[str, float]:
        """Seconds per stage, those of the other role included where this server did its work."""
        return {**self.all_stages, **self.clock.seconds()}

    def page(self, now: float | None = None) -> dict[str, object]:
        """This request's entry of `/debug/requests`; events are absolute readings of the monotonic clock."""
        now = self._now() if now is None else now
        age = (now if self.ended_at is None else self.ended_at) - self.arrival
        entry: dict[str, object] = {
            "request_id": self.request_id,
            "request_key": self.request_key,
            "attempt": self.attempt,
            "mode": self.mode.value,
            "peer": self.peer,
            "state": self.state.value,
            "stage": self.clock.stage if self.ended_at is None else FINISH,
            "age_seconds": round(age, 6),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "cached_tokens": self.cached_tokens,
            "prefill_cuda_graph_status": self.graph_status.value or None,
            "arrival_ns": self.arrival_ns,
            "stages": {name: round(seconds, 6) for name, seconds in self.stages().items()},
            "events": [{"name": event.name, "at_ns": event.at_ns} for event in self.events],
        }
        if self.ended_at is None:
            entry["state_seconds"] = round(now - self.state_since, 6)
            if self.waits_for and self.state is RequestState.LOAD:
                entry["waits_for"] = self.waits_for
        if self.ended_at is not None:
            entry["ended_seconds_ago"] = round(now - self.ended_at, 6)
        if self.terminal is not None:
            entry.update(self.outcome())
        if self.staged_end is not None:
            end = self.staged_end
            entry["kv"] = {
                "outcome": end.outcome,
                "cause": end.cause,
                "publish_seconds": end.publish_seconds,
                "held_seconds": end.held_seconds,
            }
        return entry

    def outcome(self) -> dict[str, object]:
        """Code, source and finish reason of the terminal cause; empty while there is none."""
        terminal = self.terminal
        if terminal is None:
            return {}
        outcome: dict[str, object] = {
            "code": int(terminal.code),
            "code_name": terminal.code.name,
            "finish_reason": None if terminal.finish_reason is None else str(terminal.finish_reason),
        }
        if terminal.source is not Source.SUCCESS:
            outcome["source"] = terminal.source.value
        if terminal.error is not None:
            outcome["message"] = terminal.error.message
            outcome["error_stage"] = terminal.error.stage
            outcome["error_metadata"] = dict(terminal.error.metadata)
        if self.abort_source:
            outcome["abort_source"] = self.abort_source
        return outcome
