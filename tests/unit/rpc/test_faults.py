from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc import fault_points
from rpc.errors import BatonError, ErrorCode
from rpc.fault_points import ACTIONS, FaultPoint
from rpc.faults import CORRUPT, DROP, DUPLICATE, FULL, arm, armed, clock, disarm, fault, fault_async, fired
from tests.integration.cluster import wait_for

for _name in ("x", "ok", "other"):
    fault_points.add(FaultPoint(_name, "", ("k",), ACTIONS, "of this test"))


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    disarm()
    yield
    disarm()


def test_unarmed_point_does_nothing() -> None:
    assert fault("engine.layer", layer=1) == 0
    arm("other:drop")
    assert fault("engine.layer", layer=1) == 0


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
        ("x:drop,probability=0", [False] * 6),
        ("x:drop,probability=1", [True] * 6),
        ("x:drop,probability=0.9,times=1", [True, False, False, False, False, False]),
    ],
)
def test_which_calls_are_hit(spec: str, expected: list[bool]) -> None:
    arm(spec)
    assert [bool(fault("x")) for _ in range(6)] == expected
    assert fired("x") == sum(expected)


def hits(spec: str, calls: int = 400) -> list[int]:
    disarm()
    arm(spec)
    return [fault("x") for _ in range(calls)]


def test_probability_when_the_seed_is_the_same_then_the_same_calls_are_hit() -> None:
    once = hits("x:drop,probability=0.25,seed=7")
    assert once == hits("x:drop,probability=0.25,seed=7")
    assert once != hits("x:drop,probability=0.25,seed=8")
    assert once != hits("ok:drop;x:drop,probability=0.25,seed=7"), "two faults of one seed draw the same"
    assert 60 < sum(once) < 140  # 100 expected, with a deviation of 9


def test_while_when_the_file_comes_and_goes_then_the_fault_does(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    arm(f"x:drop,nth=2,while={file}")
    found = [fault("x")]
    file.touch()
    found += [fault("x"), fault("x")]
    file.unlink()
    assert [*found, fault("x")] == [0, 0, DROP, 0]


async def test_delay_when_its_file_goes_then_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "held"
    file.touch()
    arm(f"x:delay=60,while={file}")
    blocked = asyncio.create_task(asyncio.to_thread(fault, "x"))
    suspended = asyncio.create_task(fault_async("x"))
    await asyncio.to_thread(wait_for, "both to be there", lambda: fired("x") == 2, 30.0)
    assert not blocked.done() and not suspended.done()
    file.unlink()
    async with asyncio.timeout(30.0):
        assert await asyncio.gather(blocked, suspended) == [0, 0]


@pytest.mark.parametrize(
    ("action", "effect"), [("drop", DROP), ("duplicate", DUPLICATE), ("corrupt", CORRUPT), ("full", FULL)]
)
async def test_effect_is_what_the_caller_has_to_do(action: str, effect: int) -> None:
    arm(f"x:{action}")
    assert fault("x") == effect
    assert await fault_async("x") == effect


def test_effects_of_two_faults_of_a_point_come_together() -> None:
    arm("x:drop;x:duplicate")
    assert fault("x") == DROP | DUPLICATE


def test_clock_when_nothing_is_armed_then_it_is_the_clock_itself() -> None:
    assert clock("cache_store.clock", time.monotonic) is time.monotonic


def test_clock_when_it_jumps_then_it_goes_on_from_there() -> None:
    arm("cache_store.clock:jump=40,nth=2;cache_store.clock:jump=2,nth=4,rank=1")
    now = iter(range(10))
    read = clock("cache_store.clock", lambda: float(next(now)), rank=1)
    assert [read() for _ in range(5)] == [0.0, 41.0, 42.0, 45.0, 46.0]
    disarm()
    assert read() == 47.0


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
    [
        "x",
        "x:",
        ":drop",
        "x:delay=soon",
        "x:delay=-1",
        "x:delay=nan",
        "x:raise=NO_SUCH",
        "x:raise=0",
        "x:nth=1",
        "x:drop,delay=1",
        "x:drop,what",
        "x:drop=1",
        "x:drop,probability=2",
        "x:drop,seed=a",
        "x:drop,nth=0",
        "x:drop,every=-2",
        "x:drop,times=0",
        "x:drop,label=1",
        "cache_store.send_pieces:drop",
        "cache_store.clock:drop",
        "engine.step:delai=1",
    ],
)
def test_malformed_spec_raises_and_arms_nothing(spec: str) -> None:
    with pytest.raises(ValueError, match="BATON_FAULTS"):
        arm("ok:drop;" + spec)
    assert not fault("ok")
    assert not armed()


def python(faults: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "BATON_FAULTS": faults}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


def test_variable_is_read_at_start() -> None:
    code = "from rpc.faults import fault; p = 'decode.reserved'; print(fault(p, request_key='a'), fault(p))"
    result = python("decode.reserved:drop,request_key=a", "-c", code)
    assert result.stdout.split() == ["1", "0"], result.stderr


@pytest.mark.parametrize("role", ["router", "prefill_server", "decode_server"])
def test_variable_when_a_point_is_misspelt_then_no_server_starts_and_one_line_says_why(role: str) -> None:
    result = python("cache_store.send_pieces:drop", "-m", role, "--model", "/")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "BATON_FAULTS" in line and "'cache_store.send_pieces'" in line


def test_label_that_ends_in_a_star_matches_by_its_beginning() -> None:
    arm("request.admit:raise=MALLOC_FAILED,request_key=short*")
    assert not fault("request.admit", request_key="long#0.1")
    with pytest.raises(BatonError):
        fault("request.admit", request_key="short-7#0.1")
