"""Triton where it is installed, and stand-ins that let kernel modules be imported where it is not.

A kernel module begins with `from kernels.jit import jit, tl, triton` and decorates its kernels with `@jit`. Without
Triton the module still imports (its `reference()` is plain PyTorch), `tl.constexpr` still serves in annotations and for
module constants, and launching a kernel raises KernelUnavailable.

Kernels run on CUDA tensors, or on CPU tensors in Triton's interpreter. The interpreter is chosen by TRITON_INTERPRET=1
in the environment **before** the first kernel module is imported, for the whole process; it is for tests, since it runs
every program of a grid one after the other in NumPy.

A scalar argument that changes from step to step (tokens, rows) should be named in `@jit(do_not_specialize=[...])`:
otherwise Triton compiles up to three variants of the kernel (equal to 1, divisible by 16, others), each at its first
use, which may be in the middle of serving.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, NoReturn, overload

import torch


class KernelUnavailable(RuntimeError):
    """A kernel was called that cannot run here: Triton is not installed, or the tensors are on a device without it."""


_MISSING = "this needs Triton, which is not installed (Linux: pip install triton); or choose --attention-backend torch"


class _NoTriton:
    """What `triton` and `tl` are without Triton: any attribute exists, calling one raises KernelUnavailable."""

    def __getattr__(self, name: str) -> _NoTriton:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise KernelUnavailable(_MISSING)


class _NoLanguage(_NoTriton):
    """`tl` without Triton. A module constant `tl.constexpr(3)` is then 3."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


class _NoKernel:
    """A decorated function without Triton: `kernel[grid](...)` raises KernelUnavailable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> _NoKernel:
        return self

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise KernelUnavailable(f"{self.__name__}: {_MISSING}")


_installed = importlib.util.find_spec("triton") is not None
triton: Any
tl: Any
if _installed:
    import triton
    import triton.language as tl
else:
    triton, tl = _NoTriton(), _NoLanguage()

# Fixed with the first import, as Triton fixes it when it decorates
interpreted = _installed and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


def _repair_interpreter() -> None:
    """Lets Triton 3.6's interpreter compute what the GPU computes. Each half can go with the first Triton that does.

    Loop bounds: it makes an int of a one-element array, which NumPy 2.4 and later refuse.
    Conversion of float32 to bfloat16: it cuts the number off instead of rounding it to the nearest, ties to even.
    """
    import numpy as np
    from triton.runtime import interpreter

    patch_tensor, convert_float = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            words = np.ascontiguousarray(data).view(np.uint32)
            rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
            return np.where(np.isnan(data), (words >> 16) | 0x40, rounded).astype(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.left_shift(data, 16, dtype=np.uint32)
        return convert_float(data, source, target, rounding_mode)

    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = convert


if interpreted:
    _repair_interpreter()


@overload
def jit(function: Callable[..., Any], /) -> Any: ...
@overload
def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]: ...
def jit(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`@jit` or `@jit(do_not_specialize=["tokens"])`: triton.jit where Triton is installed."""
    if function is None:
        return lambda decorated: _decorated(decorated, options)
    return _decorated(function, options)


def _decorated(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    return triton.jit(function, **options) if _installed else _NoKernel(function)


def available(device: torch.device | str = "cuda") -> bool:
    """Whether kernels can run on tensors of `device`, without starting CUDA for any device but a CUDA one."""
    if not _installed:
        return False
    kind = torch.device(device).type
    if kind == "cpu":
        return interpreted
    return kind == "cuda" and torch.cuda.is_available()


def require(tensor: torch.Tensor) -> None:
    """Raises KernelUnavailable when kernels cannot run on `tensor`'s device. For set-up, not for every launch."""
    if not available(tensor.device):
        reason = "Triton runs on CUDA devices" if _installed else _MISSING
        raise KernelUnavailable(f"no kernels for tensors on {tensor.device}: {reason}")
