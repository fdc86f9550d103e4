"""Nothing on the way of a device step waits for the device, but the functions that say so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATHS = (
    "engine/runner/device_*.py",
    "engine/runner/decode_*.py",
    "engine/runner/capture.py",
    "engine/runner/pinned.py",
    "engine/runner/position_ids.py",
    "engine/runner/prefill_graph/*.py",
    "engine/layers/device*.py",
    "engine/layers/override.py",
    "engine/attention/device_backend.py",
    "engine/attention/measured_backend.py",
    "engine/attention/triton_backend.py",
    "engine/attention/flashinfer_backend.py",
    "engine/sampling/device.py",
    "engine/sampling/biases.py",
    "engine/sampling/masks.py",
    "engine/sampling/penalties.py",
    "kernels/*.py",
)
WAITS = {"item", "cpu", "tolist", "synchronize", "nonzero"}  # methods that wait for a device's tensor, or for all of it
# Functions that wait, or that call these methods of host arrays. Of a step's functions only those wait that read its
# results, and staging whose copy of two steps ago is long done.
ALLOWED = {
    "engine/attention/flashinfer_backend.py": {"wait", "_prefill_wrappers"},
    "engine/runner/capture.py": {"warm_up", "record", "settle"},  # at start-up
    "engine/runner/device_inputs.py": {"wait", "prefill"},
    "engine/runner/device_steps.py": {"wait"},
    "engine/runner/pinned.py": {"send"},
    "engine/runner/prefill_graph/runner.py": {"next"},
    "engine/sampling/device.py": {"_learn", "_pack", "_send_staged", "collect", "_add_logprobs"},
    "engine/sampling/masks.py": {"apply"},
    "kernels/jit.py": {"patch"},  # Triton's interpreter
}


def calls(path: Path) -> Iterator[tuple[str, str]]:
    """(enclosing function, method) of each call of one of WAITS, outside kernels' references and main programs."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            yield function, node.func.attr
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def modules() -> list[Path]:
    return sorted({path for pattern in PATHS for path in ROOT.glob(pattern)})


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_of_a_device_step_when_read_then_waits_nowhere_but_where_allowed(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    found = [(function, method) for function, method in calls(path) if function not in allowed]
    assert not [entry for entry in found if not entry[0].endswith("reference")]


def test_allowed_functions_when_listed_then_exist_and_need_it() -> None:
    for name, functions in ALLOWED.items():
        assert functions <= {function for function, _ in calls(ROOT / name)}, name


def test_checker_when_a_module_waits_then_finds_it(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def step(x):\n    if x.isfinite().all().item():\n        return x.cpu()\n")
    assert set(calls(module)) == {("step", "item"), ("step", "cpu")}
