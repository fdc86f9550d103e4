"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU (see tests/conftest.py)."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kernels import jit


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device on which kernels can run here."""
    for name in ("cuda", "cpu"):
        if jit.available(name):
            return torch.device(name)
    pytest.skip("kernels need Triton, and a CUDA device or TRITON_INTERPRET=1")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> list[dict[str, object]]:
    """What the test's module prints as a program: kernels as compiled for a GPU. The tests' own process may be the
    interpreter's, which compiles nothing."""
    if not jit.available("cpu") and not jit.available("cuda"):
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.getcwd()}
    program = [sys.executable, str(request.path)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found
