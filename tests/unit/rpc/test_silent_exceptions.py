"""A lint: nothing in the project passes over an exception that it did not expect."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# What a text has in which there is something to find: most others need not be parsed.
_SUSPECT = re.compile(r"\bexcept[\s\\]*:|Exception")
_SILENT = "an exception that nobody hears of; name the types that are expected, or say what happened"


def does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def silent_handlers(text: str) -> list[int]:
    """Lines of `except Exception` (or all) whose body does nothing, and of `suppress(Exception)`."""
    if not _SUSPECT.search(text):
        return []
    broad = {"Exception", "BaseException"}
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type is not None else broad
            if names & broad and all(map(does_nothing, node.body)):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and "suppress" in text and "suppress" in ast.unparse(node.func):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if names & broad:
                found.append(node.lineno)
    return found


@pytest.mark.invariant("RPC-29")
def test_lint_when_it_reads_the_project_then_no_broad_exception_is_passed_over_in_silence() -> None:
    servers = ("rpc", "router", "front", "prefill_server", "decode_server", "cache_store")
    rooms = (*servers, "engine", "kernels", "cli", "bench")
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        for line in silent_handlers(path.read_text())
    ]
    assert not found, _SILENT


@pytest.mark.invariant("RPC-29")
@pytest.mark.parametrize(
    "text",
    [
        "try:\n  f()\nexcept Exception:\n  pass",
        "try:\n  f()\nexcept:\n  ...",
        "try:\n  f()\nexcept (OSError, Exception) as e:\n  'why'",
        "with contextlib.suppress(BaseException):\n  f()",
    ],
)
def test_lint_when_it_reads_a_silent_except_then_it_finds_it(text: str) -> None:
    assert silent_handlers(text)
