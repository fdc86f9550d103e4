"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU (see tests/conftest.py)."""

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
