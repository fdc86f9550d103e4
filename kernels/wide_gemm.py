"""Products of many rows with a weight on Hopper GPUs, y[M, N] = x[M, K] W[N, K]^T, with what follows done on the way.

A program's warps have different work. One warp asks the tensor memory unit for tiles of x and W, 64 columns at a time,
into a ring of STAGES places in shared memory. Two or three groups of four warps multiply them, each its own ROWS rows
of the tall side, and keep their sums in registers. Which side is tall is a choice: for many rows x is, for few W is
(`swap`), so that a tile of W is read once and the rows of x, padded to `columns` + `extra`, are what it is multiplied
with.

There are as many programs as multiprocessors, among which the tiles go around. Where tiles are few, each can be cut
along K into 2, 4 or 8 (`shares`), one for each program: they leave their sums in float32 scratch, wait for each other,
and each adds up, in the order of the shares, and finishes its part of the tile's tokens. Such programs must all run at
once, so two such products must not run side by side. A result depends on the shape, the number of rows and the
configuration alone, and a row's on no other row.

What is done with the sums: rounded to bfloat16, or float32, or added to a float32 tensor. Gated, W holds the gate's
rows and then as many of up: tiles take them alternately, 8 rows each, so that both sums of an element are in one
thread, which rounds both, as a product of its own would, and stores silu(gate) x up.

Bytes: W once where all rows of x fit in one tile, x once for every 132 tiles or so from the L2 cache. Llama-3.1-8B at
4.33 TB/s: gate-up 54 us, down 27, qkv 11.6, o 7.7. FLOPs: 2 M N K; at 8192 rows a layer takes 3.5 TFLOP, 4.6 ms at 770
TFLOP/s. With programmatic dependent launch the first STAGES tiles of W are on their way before the kernel before ends.

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

    swap: bool = False  # W is the tall side
    groups: int = 2  # of warps that multiply: 2 or 3
    rows: int = 64  # of the tall side per group: 64, or 128 with two
    columns: int = 256  # of the wide side, a power of two
    extra: int = 0  # more of them: a power of two up to `columns`, or none
    stages: int = 4
    stash: int = 8192  # numbers that a group of warps turns over in shared memory at a time on their way out
    shares: int = 1  # 2, 4 or 8, with `swap`: of K, which every tile is cut into
    group: int = 16  # tiles of the tall side that run at the same time
    pdl: bool = True
    ahead: int = 0  # with `swap`: steps of W, multiples of 4, that are read ahead into the L2 cache


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
    """x W^T: bfloat16 [M, N], or float32 where `out` is.

    x: bfloat16 [M, K], K a multiple of 8, rows may lie apart; weight: bfloat16 [N, K], contiguous. out: [M, N], rows
    may lie apart by multiples of 8. Raises ValueError for what does not fit.
    """
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    mode = 2 if out.dtype == torch.float32 else 0
    return _launch(x, weight, out, config, False, mode)


def gated(x: torch.Tensor, weight: torch.Tensor, *, config: Config, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x Wg^T) * (x Wu^T): bfloat16 [M, inner]. weight: [2 * inner, K], gate first; inner a multiple of 8."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, config, True, 0)


def add_to(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, config: Config) -> None:
    """residual += x W^T, from the sums. residual: float32 [M, N]."""
    _launch(x, weight, residual, config, False, 1)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: Config, is_gated: bool, mode: int
) -> torch.Tensor:
    tokens, k = x.shape
    weight_rows = weight.shape[0]
    n = weight_rows // 2 if is_gated else weight_rows
    if not tokens:
        return out
    if weight.shape[1] != k or out.shape != (tokens, n) or k % 8 or n % 8 or x.stride(0) % 8 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)}, W {tuple(weight.shape)} and y {tuple(out.shape)} do not fit")
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or out.stride(1) != 1 or out.stride(0) % 8:
        raise ValueError(f"products of bfloat16 are computed, not of {x.dtype} and {weight.dtype}")
    columns = config.columns + config.extra
    tall, wide = (weight_rows, tokens) if config.swap else (tokens, weight_rows)
    tall_tiles, wide_tiles = -(-tall // (config.groups * config.rows)), -(-wide // columns)
    tiles, steps = tall_tiles * wide_tiles, -(-k // 64)
    processors = _scratch.multiprocessors(x.device)
    programs = min(tiles, processors)
    partial = counters = out
    if config.shares > 1:
        programs = tiles * config.shares
        possible = config.swap and not is_gated and config.shares in (2, 4, 8)
        if not possible or programs > processors or steps < config.shares:
            raise ValueError(
                f"{tiles} tiles of {steps} steps are not cut into {config.shares} shares on {processors} units"
            )
        partial = torch.empty(programs * config.groups * config.rows * columns, dtype=torch.float32, device=x.device)
        counters = _scratch.counters_of(x.device)
    box = config.extra or config.columns
    described = _described(x, box if config.swap else config.rows, False)
    weight_described = _described(weight, config.rows if config.swap else box, is_gated)
    pitch = out.stride(0)
    arguments = (
        described, weight_described, weight, out, partial, counters, tokens, pitch, tiles, tall_tiles,
        wide_tiles, n, k, steps, config.swap, is_gated, mode, config.groups, config.rows, config.columns, config.extra,
        config.stages, config.stash, config.shares, config.group, config.pdl, config.ahead,
    )  # fmt: skip
    # All that Triton would look at to find the compiled kernel, which takes it as long as the launch
    key = (x.device, config, is_gated, mode, n, k, pitch % 16, out.data_ptr() % 16, weight.data_ptr() % 16)
    kernel = _compiled.get(key)
    if kernel is not None:
        kernel[programs, 1, 1](*arguments)
        return out
    kernel = wide_kernel[(programs,)](
        *arguments,
        num_warps=4,
        # Of all warps; at their work the groups have 232 or 160, the loading warp 40 or 32
        maxnreg=168 if config.groups == 2 else 128,
        **({"launch_pdl": True} if config.pdl else {}),
    )
    if kernel is not None:
        _compiled[key] = kernel
    return out
