"""Products of 81 to 256 rows with a weight on Hopper GPUs, y[M, N] = x[M, K] W[N, K]^T, with SwiGLU done on the way.

What is computed is y^T, so that the weight is the tall side: a tile is two times `rows` rows of W and all M rows of x,
padded to `columns` + `extra`. A program's warps have different work. One warp asks the tensor memory unit for W and x,
64 columns at a time, into a ring of STAGES places in shared memory. Two groups of four warps multiply them, each its
own `rows` rows of W, and keep their sums in registers.

There are as many programs as multiprocessors, among which the tiles go around. Where tiles are few, each can be cut
along K into 2, 4 or 8 (`shares`), one for each program: they leave their sums in float32 scratch, wait for each other,
and each adds up, in the order of the shares, and finishes its part of the tile's tokens. Such programs must all run at
once, so two such products must not run side by side. A result depends on the shape, the number of rows and the
configuration alone, and a row's on no other row.

Gated, W holds the gate's rows and then as many of up: tiles take them alternately, 8 rows each, so that both sums of an
element are in one thread, which rounds both, as a product of its own would, and stores silu(gate) x up: 2 bytes per
element are written, where a product and a SwiGLU kernel write 6 and read 4.

Bytes: 2 N K of W once, x once for every tile, from the L2 cache. FLOPs: 2 M N K. On an H200, 4.46 TB/s and 727 TFLOP/s,
a product is bound by reading W up to 163 rows: Llama-3.1-8B's gate-up takes 53 us, measured are 64.5 for 128 rows and
70.1 for 160; at 256 rows its 60 GFLOP take 83 us, measured are 93.4. cuBLAS and a SwiGLU kernel take 70.9, 71.5 and
98.8. With programmatic dependent launch the first STAGES tiles of W are on their way before the kernel before ends.

Longer prompts are cuBLAS' alone. With thousands of rows the GPU is at its power limit (700 W; its clock falls from 1.98
to 1.5 GHz), so that the multiplications set the time, and SwiGLU's way through memory, once saved, does not show: with
such a kernel and without, a prompt of 8192 tokens took the same 206 to 207 ms.

Which configuration serves which shape and number of rows is measured (`python -m bench.gpu.wide_gemm`) and listed in
kernels/wide_gemm_table.py. The kernel is in kernels/wide_gemm_kernel.py.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from kernels.wide_gemm_kernel import wide_kernel

if importlib.util.find_spec("triton") is not None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is computed. Another configuration may round differently."""

    rows: int = 64  # of W for each of the two groups of warps: 64 or 128
    columns: int = 256  # of y^T, the rows of x: a power of two
    extra: int = 0  # more of them: a power of two up to `columns`, or none
    stages: int = 4
    stash: int = 8192  # numbers that a group of warps turns over in shared memory at a time on their way out
    shares: int = 1  # 2, 4 or 8: of K, which every tile is cut into
    pdl: bool = True

    @property
    def height(self) -> int:
        """Rows of W in a tile."""
        return 2 * self.rows

    @property
    def width(self) -> int:
        """The most rows of x."""
        return self.columns + self.extra


class _Scratch:
    """Per device: its multiprocessors, and counters of programs that are done with a share, multiples of 8 between
    products. Products that share them must be ordered."""

    def __init__(self) -> None:
        self.counters: dict[torch.device, torch.Tensor] = {}
        self.processors: dict[torch.device, int] = {}

    def multiprocessors(self, device: torch.device) -> int:
        found = self.processors.get(device)
        if found is None:
            cuda = device.type == "cuda"
            found = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 132
            self.processors[device] = found
        return found

    def counters_of(self, device: torch.device) -> torch.Tensor:
        found = self.counters.get(device)
        if found is None:
            found = torch.zeros(2 * self.multiprocessors(device), dtype=torch.int32, device=device)
            self.counters[device] = found
        return found


_scratch = _Scratch()


def prepare(device: torch.device) -> None:
    """Makes what products share; before the first capture of a graph."""
    _scratch.counters_of(device)


@dataclass(frozen=True, slots=True)
class _Base:
    """Memory by its address, so that a descriptor that is kept does not keep the memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


_compiled: dict[tuple[Any, ...], Any] = {}
_MOST_DESCRIPTORS = 4096
_descriptors: dict[tuple[int, ...], Any] = {}


def _described(tensor: torch.Tensor, box: int, paired: bool) -> Any:
    """A tensor descriptor of [rows, K] in boxes of `box` rows; paired: of gate above up, alternately 8 rows of each."""
    rows, k = tensor.shape
    key = (tensor.data_ptr(), rows, k, tensor.stride(0), box, paired)
    found = _descriptors.get(key)
    if found is None:
        if len(_descriptors) >= _MOST_DESCRIPTORS:
            _descriptors.clear()
        base, pitch = _Base(key[0], tensor.dtype), tensor.stride(0)
        if paired:
            found = TensorDescriptor(
                base,
                [rows // 16, 2, 8, k],
                [8 * pitch, rows // 2 * pitch, pitch, 1],
                [box // 16, 2, 8, 64],
                gl.NVMMASharedLayout(128, 16, 4),
            )
        else:
            found = TensorDescriptor(base, [rows, k], [pitch, 1], [box, 64], gl.NVMMASharedLayout(128, 16, 2))
        _descriptors[key] = found
    return found


def linear(x: torch.Tensor, weight: torch.Tensor, *, config: Config, out: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T: bfloat16 [M, N].

    x: bfloat16 [M, K], M up to the configuration's width, K a multiple of 8, rows may lie apart; weight: bfloat16
    [N, K], contiguous. out: [M, N], rows may lie apart by multiples of 8. Raises ValueError for what does not fit.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, config, False)


def gated(x: torch.Tensor, weight: torch.Tensor, *, config: Config, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x Wg^T) * (x Wu^T): bfloat16 [M, inner]. weight: [2 * inner, K], gate first; inner a multiple of 8."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, config, True)


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: Config, is_gated: bool) -> torch.Tensor:
    tokens, k = x.shape
    weight_rows = weight.shape[0]
    n = weight_rows // 2 if is_gated else weight_rows
    if not tokens:
        return out
    if weight.shape[1] != k or out.shape != (tokens, n) or k % 8 or n % 8 or x.stride(0) % 8 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)}, W {tuple(weight.shape)} and y {tuple(out.shape)} do not fit")
    if tokens > config.width:
        raise ValueError(f"{tokens} rows do not fit a configuration for {config.width}")
    if {x.dtype, weight.dtype, out.dtype} != {torch.bfloat16}:
        raise ValueError(f"products of bfloat16 are computed, not {out.dtype} of {x.dtype} and {weight.dtype}")
    if out.stride(1) != 1 or out.stride(0) % 8:
        raise ValueError(f"strides {out.stride()} of y do not fit: its rows lie apart by multiples of 8")
    tiles, steps = -(-weight_rows // config.height), -(-k // 64)
    processors = _scratch.multiprocessors(x.device)
    programs = min(tiles, processors)
    partial = counters = out
    if config.shares > 1:
        programs = tiles * config.shares
        possible = not is_gated and config.shares in (2, 4, 8)
        if not possible or programs > processors or steps < config.shares:
            raise ValueError(
                f"{tiles} tiles of {steps} steps are not cut into {config.shares} shares on {processors} units"
            )
        partial = torch.empty(programs * config.height * config.width, dtype=torch.float32, device=x.device)
        counters = _scratch.counters_of(x.device)
    described = _described(x, config.extra or config.columns, False)
    weight_described = _described(weight, config.rows, is_gated)
    pitch = out.stride(0)
    arguments = (
        described, weight_described, out, partial, counters, tokens, pitch, tiles, n, steps, is_gated, config.rows,
        config.columns, config.extra, config.stages, config.stash, config.shares, config.pdl,
    )  # fmt: skip
    # All that Triton would look at to find the compiled kernel, which takes it as long as the launch
    key = (x.device, config, is_gated, n, steps, pitch % 16, out.data_ptr() % 16)
    kernel = _compiled.get(key)
    if kernel is not None:
        kernel[programs, 1, 1](*arguments)
        return out
    kernel = wide_kernel[(programs,)](
        *arguments,
        num_warps=4,
        maxnreg=168,  # of all warps; at their work the groups have 232, the loading warp 40
        **({"launch_pdl": True} if config.pdl else {}),
    )
    if kernel is not None:
        _compiled[key] = kernel
    return out
