"""kernels.jit: with Triton, and in an interpreter of its own without it."""

import subprocess
import sys
import textwrap

import pytest
import torch

from kernels import jit

_WITHOUT_TRITON = textwrap.dedent(
    """
    import importlib.util
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
    import importlib, pkgutil, sys
    import torch
    import kernels
    from kernels import jit

    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"kernels.{module.name}")
    assert "triton" not in sys.modules
    assert not jit.available("cpu") and not jit.available("cuda") and not jit.interpreted

    @jit.jit(do_not_specialize=["n"])
    def kernel(x, n, BLOCK: jit.tl.constexpr):
        pass

    assert jit.tl.constexpr(3) == 3
    for call in (lambda: kernel[(1,)](None, 1, BLOCK=2), lambda: jit.triton.cdiv(3, 2)):
        try:
            call()
        except jit.KernelUnavailable as error:
            assert "triton" in str(error)
        else:
            raise AssertionError("a kernel ran without Triton")
    """
)


def test_kernel_modules_when_triton_is_missing_import_and_refuse_to_launch() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TRITON], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_available_says_where_kernels_run(device: torch.device) -> None:
    assert jit.available(device)
    jit.require(torch.empty(1, device=device))
    assert not jit.available("meta")
    with pytest.raises(jit.KernelUnavailable, match="meta"):
        jit.require(torch.empty(1, device="meta"))
