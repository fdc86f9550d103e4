"""Which families the code feeds: those that nothing feeds yet are named here, with what they wait for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rpc.metric_families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("rpc", "router", "front", "prefill_server", "decode_server", "cache_store", "engine")
WAITING = {
    "asynchronous decoding": (
        "engine_host_gap_seconds",
        "async_decode_wait_seconds",
        "async_decode_steps_total",
        "async_decode_sync_fallback_total",
        "async_decode_dropped_rows_total",
        "async_decode_pending",
    ),
    "speculative decoding": (
        "spec_rounds_total",
        "spec_proposed_tokens_total",
        "spec_accepted_tokens_total",
        "spec_accepted_tokens_per_position_total",
        "spec_step_seconds",
    ),
    "sparse attention": ("sparse_path_info", "sparse_fallbacks_total", "sparse_aborted_forwards_total"),
}


def fed() -> set[str]:
    """Families whose name stands in code that could book them, with or without its prefix."""
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "metric_families.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add("baton_" + node.value.removeprefix("baton_"))
    return found & set(FAMILIES)


@pytest.mark.invariant("RPC-30")
def test_families_when_declared_then_all_but_those_of_features_to_come_are_fed():
    waiting = {f"baton_{name}" for names in WAITING.values() for name in names}
    assert set(FAMILIES) - fed() == waiting
