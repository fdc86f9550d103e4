"""kernels.jit: with Triton, and in an interpreter of its own without it."""

import subprocess
import sys
import textwrap
from importlib import metadata

import pytest
import torch

from kernels import jit
from kernels.jit import tl
from tests.unit.quick_interpreter import VERSION

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


@jit.jit
def _convert_kernel(source, target, count, BLOCK: tl.constexpr):
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        value = tl.load(source + index, mask=index < count)
        tl.store(target + index, value, mask=index < count)


def test_kernels_round_to_bfloat16_as_pytorch_does(device: torch.device) -> None:
    bits = torch.randint(-(2**31), 2**31, (2000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000, 0x7FC00001, -0x7FFFFF], dtype=torch.int32)
    numbers = torch.cat((bits, halfway)).view(torch.float32)
    narrow = torch.empty(numbers.shape, dtype=torch.bfloat16, device=device)
    wide = torch.empty(numbers.shape, device=device)
    _convert_kernel[(1,)](numbers.to(device), narrow, numbers.shape[0], BLOCK=64)
    _convert_kernel[(1,)](narrow, wide, numbers.shape[0], BLOCK=64)
    torch.testing.assert_close(narrow.cpu(), numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(wide.cpu(), numbers.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(
    not jit.interpreted or metadata.version("triton") != VERSION,
    reason=f"needs Triton {VERSION} in its interpreter (TRITON_INTERPRET=1)",
)
def test_interpreter_when_a_type_is_made_again_then_it_is_that_of_the_first_time() -> None:
    first, again = (tl.block_type(tl.float32, [4, tl.constexpr(512)]) for _ in range(2))
    assert first == again and vars(first) == vars(again) and first.shape is again.shape
    assert (again.numel, again.shape.values, again.scalar) == (2048, [4, 512], tl.float32)
    assert tl.block_type(tl.int32, [4, 512]) != again
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [4, 3])
