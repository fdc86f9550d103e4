from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rpc.errors import BatonError, ErrorCode
from rpc.faults import arm, disarm, fault, fault_async, fired


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    disarm()
    yield
    disarm()


def test_unarmed_point_does_nothing() -> None:
    assert fault("engine.layer", layer=1) is False
    arm("other:drop")
    assert fault("engine.layer", layer=1) is False


def test_raise_when_labels_match() -> None:
    arm("engine.layer:raise=EXECUTION_EXCEPTION,layer=2")
    assert not fault("engine.layer", layer=1)
    with pytest.raises(BatonError) as caught:
        fault("engine.layer", layer=2)
    assert caught.value.code is ErrorCode.EXECUTION_EXCEPTION


def test_raise_by_number() -> None:
    arm("x:raise=8602")
    with pytest.raises(BatonError) as caught:
        fault("x")
    assert caught.value.code is ErrorCode.KV_STALE_REFERENCE


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("x:drop", [True] * 6),
        ("x:drop,nth=3", [False, False, True, False, False, False]),
        ("x:drop,every=2", [False, True, False, True, False, True]),
        ("x:drop,times=2", [True, True, False, False, False, False]),
        ("x:drop,every=2,times=1", [False, True, False, False, False, False]),
    ],
)
def test_which_calls_are_hit(spec: str, expected: list[bool]) -> None:
    arm(spec)
    assert [fault("x") for _ in range(6)] == expected
    assert fired("x") == sum(expected)


def test_delay_blocks_the_caller() -> None:
    arm("x:delay=0.05")
    began = time.monotonic()
    fault("x")
    assert time.monotonic() - began >= 0.05


async def test_async_delay_can_be_cancelled() -> None:
    arm("x:delay=30")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await fault_async("x")


def test_two_faults_of_one_point_both_act() -> None:
    arm("x:drop,k=1;x:raise=602,k=2")
    assert fault("x", k=1)
    with pytest.raises(BatonError):
        fault("x", k=2)


@pytest.mark.parametrize(
    "spec",
    ["x", "x:", ":drop", "x:delay=soon", "x:raise=NO_SUCH", "x:raise=0", "x:nth=1", "x:drop,delay=1", "x:drop,what"],
)
def test_malformed_spec_raises_and_arms_nothing(spec: str) -> None:
    with pytest.raises(ValueError, match="BATON_FAULTS"):
        arm("ok:drop;" + spec)
    assert not fault("ok")


def test_variable_is_read_at_start() -> None:
    code = "from rpc.faults import fault; print(fault('p', rank=1), fault('p', rank=0))"
    env = {**os.environ, "BATON_FAULTS": "p:drop,rank=1"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]


def test_label_that_ends_in_a_star_matches_by_its_beginning() -> None:
    arm("request.admit:raise=MALLOC_FAILED,request_key=short*")
    assert not fault("request.admit", request_key="long#0.1")
    with pytest.raises(BatonError):
        fault("request.admit", request_key="short-7#0.1")
