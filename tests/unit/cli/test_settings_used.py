"""No setting without effect: each one that a process accepts is read by the code that it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from cache_store.settings import AgentSettings
from decode_server.settings import DecodeSettings
from engine.config import EngineConfig
from prefill_server.settings import PrefillSettings
from router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[3]
FRONTS = ("front", "prefill_server", "decode_server", "rpc")
# Reading a setting to check its range, or to hand it on whole, is not what it is for.
NOT_A_USE = {"check", "_grace_within_timeout", "_one_pool_size", "_return_before_steal"}


def attributes_read(packages: Iterable[str]) -> set[str]:
    """Names of all attributes that the packages' code reads."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.name in NOT_A_USE:
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.invariant("RPC-30")
@pytest.mark.parametrize(
    ("settings", "packages"),
    [
        (PrefillSettings.model_fields, FRONTS),
        (DecodeSettings.model_fields, FRONTS),
        (RouterSettings.model_fields, ("router", "rpc")),
        ([field.name for field in msgspec.structs.fields(EngineConfig)], ("engine",)),
        (AgentSettings.__dataclass_fields__, ("cache_store",)),
    ],
    ids=["prefill server", "decode server", "router", "engine", "cache store"],
)
def test_setting_when_a_process_accepts_it_then_its_code_reads_it(settings: Iterable[str], packages: tuple[str, ...]):
    assert set(settings) - attributes_read(packages) == set()


def test_attributes_when_a_name_is_only_written_or_checked_then_it_is_not_read():
    read = attributes_read(("front", "engine"))
    assert "engine_start_timeout_secs" in read
    assert "no_such_setting" not in read
