"""Triton where it is installed, and stand-ins that let kernel modules be imported where it is not.

A kernel module begins with `from kernels.jit import jit, tl, triton` and decorates its kernels with `@jit`. Without
Triton the module still imports (its `reference()` is plain PyTorch), `tl.constexpr` still serves in annotations and for
module constants, and launching a kernel raises KernelUnavailable.

Kernels run on CUDA tensors, or on CPU tensors in Triton's interpreter. The interpreter is chosen by TRITON_INTERPRET=1
in the environment **before** the first kernel module is imported, for the whole process; it is for tests, since it runs
every program of a grid one after the other in NumPy.

A scalar argument that changes from step to step (tokens, rows) should be named in `@jit(do_not_specialize=[...])`:
otherwise Triton compiles up to three variants of the kernel (equal to 1, divisible by 16, others), each at its first
use, which may be in the middle of serving. Strides should not be: their divisibility is what allows wide loads.

Programmatic dependent launch (Hopper and later) lets a kernel start while the one before it still runs, so that the
memory does not idle between small kernels. A kernel that takes part has a constexpr PDL: it calls
`tl.extra.cuda.gdc_launch_dependents()` at its very beginning and `tl.extra.cuda.gdc_wait()`, on every path, before it
touches anything that another kernel of the step writes or reads; constants (weights) it may load before. It is launched
with `**pdl_options(tensor)`.
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
    Besides, it searches whole modules for what it has to replace at every call of a function, which takes longer than
    most functions: remembering the names halves the time of kernels with many calls.
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

    names: dict[Any, list[str]] = {}  # of what Triton defines itself, by module or class

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None))]
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not replaced yet by the caller
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_lang_tensor = patch
    interpreter._patch_builtin = patch_builtin
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


def _programmatic_launch(capability: tuple[int, int]) -> bool:
    return capability >= (9, 0) and _pdl_allowed


_pdl_allowed = _installed and not interpreted and os.environ.get("BATON_KERNEL_PDL", "on").lower() not in ("off", "0")
_PDL_ON, _PDL_OFF = {"PDL": True, "launch_pdl": True}, {"PDL": False}
_pdl_options: dict[torch.device, dict[str, bool]] = {}  # by device, looked up once


def pdl_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel with a constexpr PDL: programmatic dependent launch where the device has it.

    BATON_KERNEL_PDL=off in the environment before the import switches it off.
    """
    found = _pdl_options.get(tensor.device)
    if found is None:
        on = tensor.is_cuda and _programmatic_launch(torch.cuda.get_device_capability(tensor.device))
        found = _pdl_options[tensor.device] = _PDL_ON if on else _PDL_OFF
    return found


def pdl(tensor: torch.Tensor) -> bool:
    """Whether kernels on the tensor's device are launched so."""
    return pdl_options(tensor)["PDL"]


def require(tensor: torch.Tensor) -> None:
    """Raises KernelUnavailable when kernels cannot run on `tensor`'s device. For set-up, not for every launch."""
    if not available(tensor.device):
        reason = "Triton runs on CUDA devices" if _installed else _MISSING
        raise KernelUnavailable(f"no kernels for tensors on {tensor.device}: {reason}")
