"""One owner advances a request's stages: whoever runs inside a stage never does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("rpc", "router", "front", "prefill_server", "decode_server", "cache_store", "engine", "cli")
ADVANCES = frozenset(("next_stage", "finish_stage", "restore_stage", "enter_stage", "in_stage"))
# Stages that end with an event of another process or of an engine step are advanced by the one object that takes the
# event in; all others are blocks of code under `in_stage`.
OWNERS = {
    "rpc/stages.py",
    "router/run.py",  # the router's stages from queue on
    "router/legs.py",  # the two legs, each a clock of its own
    "router/grpc_service.py",  # validate and tokenize, by in_stage
    "router/http/routes/generation.py",  # the same
    "front/reception.py",  # admit, by in_stage
    "engine/requests.py",
    "engine/scheduler/scheduler.py",
    "engine/scheduler/batching.py",
}


def name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def functions_of(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def stage_bodies(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """What runs inside a stage: bodies of `with in_stage(…)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(name_of(call) == "in_stage" for call in calls):
                yield f"line {node.lineno}", node.body


def manual_calls(source: str) -> list[str]:
    """Calls that advance a stage inside stage bodies, or in functions of the same file that these call."""
    tree = ast.parse(source)
    functions = functions_of(tree)
    found = []
    for where, body in stage_bodies(tree):
        waiting, seen = list(body), set[str]()
        while waiting:
            for node in ast.walk(waiting.pop()):
                if not isinstance(node, ast.Call):
                    continue
                name = name_of(node)
                if name in ADVANCES:
                    found.append(f"{where}: {name}, line {node.lineno}")
                elif name in functions and name not in seen:
                    seen.add(name)
                    waiting += functions[name]
    return found


def sources() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@pytest.mark.invariant("RPC-1")
def test_stage_body_when_it_is_read_then_it_never_advances_a_stage() -> None:
    # The function that runs a stage is no body of one. A text without its name needs no parsing, here and below.
    texts = {name: text for name, text in sources() if name != "rpc/stages.py" and "in_stage" in text}
    wrong = {name: manual_calls(text) for name, text in texts.items()}
    assert len(texts) > 2
    assert {name: calls for name, calls in wrong.items() if calls} == {}


@pytest.mark.invariant("RPC-1")
def test_stages_when_they_are_advanced_then_only_by_their_owners() -> None:
    users = {
        name
        for name, text in sources()
        if any(advance in text for advance in ADVANCES)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and name_of(node) in ADVANCES
    }
    assert users == OWNERS


@pytest.mark.invariant("RPC-1")
@pytest.mark.parametrize(
    "source",
    [
        "with in_stage(clock):\n    work()\n    clock.next_stage()",
        "with in_stage(clock, stop) as name:\n    if name:\n        self._clock.finish_stage()",
        "async def run():\n    with in_stage(clock):\n        await work(lambda: clock.restore_stage())",
        "with in_stage(clock):\n    with in_stage(clock):\n        pass",
        "class A:\n async def body(self):\n  self.clock.next_stage()\n async def run(self):\n"
        "  with in_stage(self.clock):\n   await self.body()",
        "def further():\n    clock.finish_stage()\ndef work():\n    further()\nwith in_stage(clock):\n    work()",
    ],
)
def test_manual_call_when_it_stands_in_a_stage_body_then_it_is_found(source: str) -> None:
    assert manual_calls(source)


def test_manual_call_when_it_stands_outside_then_it_is_not_reported() -> None:
    assert manual_calls("clock.next_stage()\nwith in_stage(clock):\n    work()\nclock.finish_stage()") == []
