"""The checker of a campaign: what it takes for right, and everything that it must not."""

from __future__ import annotations

from typing import Any

import pytest

from bench.chaos.verdict import Ending, Outcome, Right, judge
from bench.chaos.workload import Ask, Case, Manner
from rpc.errors import TABLE, ErrorCode

CASE = Case(0, (5, 6, 7), 4, None)
RIGHT = Right((11, 12, 13, 14), "abcd")
TIMEOUT = {"code": int(ErrorCode.GENERATE_TIMEOUT), "code_name": "GENERATE_TIMEOUT"}


def verdict(door: str = "grpc", manner: Manner = Manner.STAYS, **seen: Any) -> tuple[Ending, str]:
    return judge(Ask(0, CASE, door, manner, 0.5, ""), Outcome(**seen), RIGHT)


@pytest.mark.parametrize(
    ("ending", "case"),
    [
        (Ending.RIGHT, {"tokens": [11, 12, 13, 14], "finish_reason": "length"}),
        (Ending.RIGHT, {"door": "http", "text": "abcd", "finish_reason": "length"}),
        (Ending.TYPED_ERROR, {"code": 8403, "code_name": "NO_DECODE_WORKER"}),
        (Ending.TYPED_ERROR, {"tokens": [11, 12], "code": 8300, "code_name": ErrorCode(8300).name}),
        (Ending.TYPED_ERROR, {"door": "http", "text": "abc", **TIMEOUT}),
        (Ending.DEADLINE, {"manner": Manner.HURRIES, "tokens": [11], **TIMEOUT}),
        (Ending.DEADLINE, {"manner": Manner.HURRIES, "tokens": [11], "left": True}),
        (Ending.LEFT, {"manner": Manner.CANCELS, "tokens": [11], "left": True}),
        (Ending.LEFT, {"manner": Manner.DISCONNECTS, "door": "http", "text": "ab", "left": True}),
        (Ending.ABORTED, {"manner": Manner.ABORTS, "tokens": [11], "finish_reason": "abort"}),
        (Ending.RIGHT, {"manner": Manner.ABORTS, "tokens": [11, 12, 13, 14], "finish_reason": "length"}),
    ],
)
def test_judge_when_a_request_ends_as_it_may_then_nothing_is_wrong(ending: Ending, case: dict[str, Any]) -> None:
    assert verdict(**case) == (ending, "")


@pytest.mark.parametrize(
    ("ending", "case"),
    [
        # a wrong token: in the middle, at the end, in a stream that failed or was given up afterwards, one too many
        (Ending.WRONG, {"tokens": [11, 99, 13, 14], "finish_reason": "length"}),
        (Ending.WRONG, {"tokens": [11, 12, 13, 99], "finish_reason": "length"}),
        (Ending.WRONG, {"tokens": [11, 99], **TIMEOUT}),
        (Ending.WRONG, {"tokens": [99], "left": True, "manner": Manner.CANCELS}),
        (Ending.WRONG, {"tokens": [99], "hung": True}),
        (Ending.WRONG, {"tokens": [11, 12, 13, 14, 15], "finish_reason": "length"}),
        (Ending.WRONG, {"door": "http", "text": "abXd", "finish_reason": "length"}),
        (Ending.WRONG, {"tokens": [11, 12], "out_of_order": "token index 3 after 1 tokens"}),
        # an end in order that is too early, or that nobody has asked for
        (Ending.WRONG, {"tokens": [11, 12, 13], "finish_reason": "length"}),
        (Ending.WRONG, {"tokens": [], "finish_reason": "length"}),
        (Ending.WRONG, {"tokens": [11, 12, 13, 14], "finish_reason": "stop"}),
        (Ending.WRONG, {"tokens": [11], "finish_reason": "abort"}),
        (Ending.WRONG, {"tokens": [11, 12, 13, 14], "finish_reason": "length", **TIMEOUT}),
        # no end
        (Ending.HUNG, {"tokens": [11], "hung": True, "seconds": 35.0}),
        # errors that are none of the table
        (Ending.UNTYPED, {"untyped": "gRPC status UNAVAILABLE without a code"}),
        (Ending.UNTYPED, {"code": 12345, "code_name": ""}),
        (Ending.UNTYPED, {"code": 603, "code_name": "MALLOC_FAILED"}),
        (Ending.UNTYPED, {"code": int(ErrorCode.UNKNOWN_ERROR), "code_name": "UNKNOWN_ERROR"}),
    ],
)
def test_judge_when_a_request_ends_as_none_may_then_it_says_what_is_wrong(ending: Ending, case: dict[str, Any]) -> None:
    found, wrong = verdict(**case)
    assert found is ending
    assert wrong


def test_judge_when_the_code_is_of_the_table_then_every_one_but_unknown_is_an_answer() -> None:
    for code in TABLE:
        ending, wrong = verdict(code=int(code), code_name=code.name)
        assert bool(wrong) == (code is ErrorCode.UNKNOWN_ERROR), code
        assert ending is (Ending.UNTYPED if wrong else Ending.TYPED_ERROR)
