"""What a request has to show: the right tokens, or the beginning of them and one typed error, in time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from bench.chaos.workload import Ask, Manner
from rpc.errors import TABLE, ErrorCode


class Ending(StrEnum):
    """How a request ended, as its client saw it."""

    RIGHT = "right"
    TYPED_ERROR = "typed error"
    LEFT = "client left"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    WRONG = "WRONG"
    UNTYPED = "UNTYPED ERROR"
    HUNG = "HUNG"


@dataclass
class Outcome:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)  # gRPC
    text: str = ""
    finish_reason: str = ""  # length, stop, abort; empty: none came
    code: int | None = None  # of the typed error
    code_name: str = ""
    untyped: str = ""  # an end that is none of the protocol's: what was seen
    out_of_order: str = ""  # a token index that was repeated, left out, or came late
    left: bool = False  # the client went away, or its own deadline passed, before the end
    hung: bool = False  # no end within the limit
    attempts: int = 0
    path: str = ""
    began_s: float = 0.0
    first_s: float | None = None  # of the first token, from the beginning
    seconds: float = 0.0


@dataclass(frozen=True)
class Right:
    """The right answer of a case, as a cluster without faults gave it."""

    tokens: tuple[int, ...]
    text: str


def judge(ask: Ask, outcome: Outcome, right: Right) -> tuple[Ending, str]:
    """How the request ended, and what is wrong about it: empty when nothing is."""
    if outcome.out_of_order:
        return Ending.WRONG, outcome.out_of_order
    if ask.door == "grpc":
        shown: Sequence[object] = outcome.tokens
        wanted: Sequence[object] = right.tokens
    else:
        shown, wanted = outcome.text, right.text
    if shown != wanted[: len(shown)] and tuple(shown) != tuple(wanted[: len(shown)]):
        at = next(i for i, token in enumerate(shown) if i >= len(wanted) or token != wanted[i])
        return Ending.WRONG, f"differs from the right answer at {at}: {shown[at]!r} for {_at(wanted, at)!r}"
    if outcome.hung:
        return Ending.HUNG, f"no end within {outcome.seconds:.1f} s, after {len(shown)} tokens or characters"
    if outcome.untyped:
        return Ending.UNTYPED, outcome.untyped
    if outcome.code is not None:
        return _judge_code(ask, outcome)
    if outcome.left:
        return (Ending.DEADLINE if ask.manner is Manner.HURRIES else Ending.LEFT), ""
    if outcome.finish_reason == "abort":
        if ask.manner is Manner.ABORTS:
            return Ending.ABORTED, ""
        return Ending.WRONG, "was aborted, and its client had not asked for that"
    if outcome.finish_reason != "length":
        return Ending.WRONG, f"ended with the finish reason {outcome.finish_reason!r} instead of length"
    if len(shown) != len(wanted):
        return Ending.WRONG, f"ended in order after {len(shown)} of {len(wanted)} tokens or characters"
    return Ending.RIGHT, ""


def _judge_code(ask: Ask, outcome: Outcome) -> tuple[Ending, str]:
    known = {int(code): code for code in TABLE}
    code = known.get(outcome.code or 0)
    if code is None or code.name != outcome.code_name:
        return Ending.UNTYPED, f"code {outcome.code} ({outcome.code_name!r}) is none of the error table"
    if code is ErrorCode.UNKNOWN_ERROR:
        return Ending.UNTYPED, "UNKNOWN_ERROR: a failure that nothing has classified"
    if outcome.finish_reason:
        return Ending.WRONG, f"a finish reason, {outcome.finish_reason}, and an error, {code.name}"
    if ask.manner is Manner.HURRIES and code in (ErrorCode.GENERATE_TIMEOUT, ErrorCode.DEADLINE_EXCEEDED):
        return Ending.DEADLINE, ""
    return Ending.TYPED_ERROR, ""


def _at(values: Sequence[object], at: int) -> object:
    return values[at] if at < len(values) else None
