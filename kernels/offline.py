"""Compiles kernels for a GPU that is not in this machine, to see that they compile and what became of them.

    with compiled_for(90) as kernels:
        swiglu(torch.empty(8, 4096, dtype=torch.bfloat16))  # on the CPU; nothing is launched
    print(kernels[0].name, kernels[0].registers, kernels[0].spilled_bytes)

Needs Triton on Linux, with the compiler that its package carries, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels import jit as jit_module
from kernels.jit import KernelUnavailable, interpreted, jit, triton


@dataclass(frozen=True)
class CompiledKernel:
    """One variant of a kernel, as the GPU would get it."""

    name: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    registers: int  # per thread
    spilled_bytes: int  # local memory per thread
    shared_bytes: int
    warps: int

    def count(self, instruction: str) -> int:
        """Occurrences of a regular expression in the PTX, e.g. r"ld\\.global.*\\.v4\\.b32"."""
        return len(re.findall(instruction, self.ptx))

    def sass(self) -> str:
        """The machine code, disassembled."""
        return _with_binary(self.cubin, "nvdisasm", "-g")


class _AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_for(capability: int, pdl: bool = False) -> Iterator[list[CompiledKernel]]:
    """Inside, a launch compiles for compute capability `capability` (90: Hopper) and runs nothing.

    With `pdl`, as for programmatic dependent launch. Yields the list of variants, in the order of their first launches.
    Raises KernelUnavailable without Triton or in its interpreter. Not thread-safe: the whole process launches so.
    """
    if interpreted:
        raise KernelUnavailable("Triton's interpreter compiles nothing; unset TRITON_INTERPRET")

    @jit
    def probe():
        pass

    jit_function = type(probe)
    run, active = jit_function.run, triton.runtime.driver._active
    found: list[CompiledKernel] = []
    known: set[str] = set()

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        options.pop("warmup", None)
        kernel = run(self, *args, warmup=True, **options)
        if kernel.hash not in known:
            known.add(kernel.hash)
            found.append(_described(self.__name__, kernel))

    options = dict(jit_module._pdl_options)
    jit_module._pdl_options[torch.device("cpu")] = jit_module._PDL_ON if pdl else jit_module._PDL_OFF
    triton.runtime.driver.set_active(_AbsentGpu(capability))
    jit_function.run = compile_only
    try:
        yield found
    finally:
        jit_function.run = run
        triton.runtime.driver._active = active
        jit_module._pdl_options.clear()
        jit_module._pdl_options.update(options)


def _described(name: str, kernel: Any) -> CompiledKernel:
    usage = _with_binary(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    registers, local, stack = (_number(usage, key) for key in ("REG", "LOCAL", "STACK"))
    return CompiledKernel(
        name=name,
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        registers=registers,
        spilled_bytes=max(local, stack),
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
    )


def _number(usage: str, key: str) -> int:
    match = re.search(rf"\b{key}:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"no {key} in the resource usage: {usage!r}")
    return int(match[1])


def _with_binary(cubin: bytes, tool: str, option: str) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], check=True, capture_output=True, text=True).stdout
