"""A lint: no server waits for an event without a limit of time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("rpc", "router", "front", "prefill_server", "decode_server", "cache_store", "engine")
# Waits that have no limit of their own, by file and function, and why.
UNLIMITED = {
    ("router/server.py", "_serve"): "the life of the process",
    ("router/answer.py", "_pump"): "ends with the first choice, which has the request's deadline",
    ("engine/rank_processes.py", "_watch"): "the life of a rank",
    ("front/drain.py", "request_gone"): "its callers set the limit",
    ("rpc/lifecycle.py", "wait_idle"): "its callers set the limit",
}
LIMITED_BY_CALLERS = {function for (_, function), why in UNLIMITED.items() if why.startswith("its callers")}
WAITS = {"wait", *LIMITED_BY_CALLERS}


def is_limit(node: ast.AST) -> bool:
    """`async with asyncio.timeout(…)`, of whatever limit."""
    return isinstance(node, ast.AsyncWith) and any(
        "asyncio.timeout" in ast.unparse(item.context_expr) for item in node.items
    )


def bare_waits(node: ast.AST, function: str = "", limited: bool = False) -> Iterator[tuple[int, str]]:
    """Line and function of each `await x.wait()`, and of each wait that its callers have to limit, outside a limit."""
    for child in ast.iter_child_nodes(node):
        inside, bound = function, limited or is_limit(child)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inside, bound = child.name, False
        call = child.value if isinstance(child, ast.Await) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            waits = call.func.attr in WAITS and not call.args and not call.keywords
            if waits and not limited:
                yield child.lineno, inside
        yield from bare_waits(child, inside, bound)


def test_o6_lint_when_it_reads_the_servers_then_every_wait_has_a_limit_of_time() -> None:
    found = {
        (str(path.relative_to(ROOT)), function): line
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if any(f".{name}(" in (text := path.read_text()) for name in WAITS)  # else there is no need to parse it
        for line, function in bare_waits(ast.parse(text))
    }
    assert found.keys() - UNLIMITED.keys() == set(), found
    assert UNLIMITED.keys() - found.keys() == set(), "no longer there"


@pytest.mark.parametrize(
    ("body", "bare"),
    [
        ("await e.wait()", True),
        ("await life.wait_idle()", True),
        ("async with lock:\n    await e.wait()", True),
        ("async with asyncio.timeout(1):\n    async def g(): await e.wait()", True),
        ("async with asyncio.timeout(1):\n    await e.wait()", False),
        ("with suppress(E):\n    async with asyncio.timeout(x):\n      while not y:\n        await e.wait()", False),
    ],
)
def test_o6_lint_when_it_reads_a_wait_then_it_knows_whether_it_has_a_limit(body: str, bare: bool) -> None:
    assert bool(list(bare_waits(ast.parse(f"async def f():\n  {body}".replace("\n    ", "\n     "))))) is bare
