"""Invariants 2, 32, 33 of docs/cuda_graphs.md: modules import anywhere, fields are read as fields, and tests that need
a GPU say so."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
GRAPH_CODE = sorted(
    [
        *(ROOT / "engine" / "runner").rglob("*.py"),
        *(ROOT / "engine" / "attention").rglob("*.py"),
        ROOT / "engine" / "graph_settings.py",
        ROOT / "engine" / "capture_config.py",
        ROOT / "rpc" / "graph_status.py",
    ]
)
# Without Triton and FlashInfer, whatever is installed, and without CUDA.
_IMPORT_ALL = """
import importlib, os, pkgutil, sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("TRITON_INTERPRET", None)
for name in ("triton", "flashinfer"):
    sys.modules[name] = None
count = 0
for package in ("kernels", "engine"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
        count += 1
assert not [name for name in sys.modules if name.startswith(("triton.", "flashinfer."))]
print(count)
"""


def test_modules_when_there_is_neither_triton_nor_cuda_then_all_of_them_import():
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 60


def test_settings_when_a_front_reads_them_then_torch_is_not_imported():
    code = "import sys, front.settings; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("path", GRAPH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_fields_when_code_reads_them_then_by_name_and_never_with_a_silent_default(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guesses = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) > 2))
    ]
    assert not guesses
    without_none = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and not {"None", "Any"} & set(ast.unparse(node.annotation).replace("|", " ").split())
    ]
    assert not without_none


def test_layouts_when_tests_need_their_constants_then_they_import_them():
    from engine.graph_settings import DEFAULT_BUCKETS

    literal = ", ".join(map(str, DEFAULT_BUCKETS))
    for path in Path(__file__).parent.glob("*.py"):
        assert literal not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.extended
def test_gpu_tests_when_there_is_no_gpu_then_they_skip_and_say_why():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu/test_prefill_graph.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "needs a CUDA device" in done.stdout
    assert "passed" not in done.stdout.splitlines()[-1]
