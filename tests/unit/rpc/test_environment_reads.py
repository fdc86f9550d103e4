"""The environment is read when a process starts: what changes in it afterwards changes nothing, and no step looks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("rpc", "router", "front", "prefill_server", "decode_server", "engine", "cache_store", "kernels")
# Of native libraries that run in processes of their own: their settings are in the environment.
OF_PROCESSES = ("cache_store/tiers/mooncake_client.py", "cache_store/tiers/mooncake_link.py")
# Beside the bodies of modules: what reads settings, makes a process's own libraries, or starts another process.
STARTING = {
    "cache_store/nixl/agent.py": {"load_bindings"},
    "cache_store/nixl/link.py": {"__init__"},
    "engine/loader/digest_cache.py": {"of_user"},
    "engine/rank_processes.py": {"_environment"},
    "kernels/cpu/library.py": {"load", "_folder"},
    "router/grammar/helper_process.py": {"_start"},
    "rpc/settings.py": {"load"},
    "rpc/version.py": {"revision"},
}


def reads(source: str) -> Iterator[str]:
    """The function around each use of `os.environ` or `os.getenv`; "" in a module's body."""

    def visit(node: ast.AST, function: str) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os":
            yield function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    if "environ" in source or "getenv" in source:
        yield from visit(ast.parse(source), "")


def test_environment_when_product_code_reads_it_then_at_the_start_alone() -> None:
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            functions = set(reads(path.read_text(encoding="utf-8"))) - {"", *STARTING.get(name, ())}
            if functions and name not in OF_PROCESSES:
                found[name] = functions
    assert found == {}


def test_checker_when_a_function_reads_the_environment_then_it_is_found() -> None:
    source = "import os\nLIMIT = os.environ.get('A')\ndef step():\n    return os.getenv('B') or [os.environ]\n"
    assert list(reads(source)) == ["", "step", "step"]
