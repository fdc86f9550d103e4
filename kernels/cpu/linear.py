"""Products with packed weights (linear.c).

Shapes: x [rows, k] float32 or bfloat16; weight [n, k] of the same dtype; output [rows, n].
Bytes moved: the weight once, n * k * itemsize, up to about 16 rows; that over the memory's bandwidth is the floor.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from kernels.cpu.memory import HugeArena

_STORE, _ADD, _GATED = 0, 1, 2
_CODES = {torch.float32: 0, torch.bfloat16: 1}


class PackedWeight:
    """A weight in the layout of linear.c, and the products with it. The plain weight is not kept."""

    def __init__(
        self,
        library: ctypes.CDLL,
        arena: HugeArena,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        """weight: [n, k], float32 or bfloat16; bias: [n]. gated: rows are those of the gate, then those of up."""
        rows, self.k = weight.shape
        self.dtype = weight.dtype
        self.gated = gated
        self.n = rows // 2 if gated else rows  # outputs
        halves = weight.view(2, self.n, self.k) if gated else weight.unsqueeze(0)
        self.pairs = -(-self.n // 16) if gated else -(-self.n // 32)
        ordered = _in_pairs(halves, self.pairs)  # [pairs, 2, 16, k]
        self.k_tiles = -(-self.k // 32)
        if self.dtype == torch.bfloat16:
            padded = F.pad(ordered, (0, self.k_tiles * 32 - self.k))
            tiles = padded.view(self.pairs, 2, 16, self.k_tiles, 16, 2).permute(0, 3, 1, 4, 2, 5)
        else:
            tiles = ordered.permute(0, 3, 1, 2)  # [pairs, k, 2, 16]
        self.packed = arena.empty(tiles.shape, self.dtype).copy_(tiles)
        self.bias = None
        if bias is not None:
            parts = bias.float().view(2, self.n, 1) if gated else bias.float().view(1, self.n, 1)
            self.bias = _in_pairs(parts, self.pairs).flatten().contiguous()
        self._pointer = self.packed.data_ptr()
        self._bias_pointer = None if self.bias is None else self.bias.data_ptr()
        self._bf16, self._f32 = library.baton_linear_bf16, library.baton_linear_f32

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x W^T + b [rows, n], or silu(x Wg^T + bg) * (x Wu^T + bu) of a gated weight. out_dtype: x's if not given."""
        out = torch.empty(x.shape[0], self.n, dtype=out_dtype or self.dtype)
        self._run(x, out, _GATED if self.gated else _STORE)
        return out

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b in float32, not rounded: [rows, n]."""
        return self(x, torch.float32)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out += x W^T + b. out: float32 [rows, n]."""
        if out.dtype != torch.float32 or self.gated:
            raise ValueError("add_to needs a float32 output and a weight that is not gated")
        self._run(x, out, _ADD)

    def _run(self, x: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        if x.dtype != self.dtype or x.shape[1] != self.k or x.stride(1) != 1 or out.shape != (x.shape[0], self.n):
            raise ValueError(f"product of [{self.n}, {self.k}] {self.dtype} with {list(x.shape)} {x.dtype}")
        rows = x.shape[0]
        if self.dtype == torch.bfloat16:
            failed = self._bf16(
                x.data_ptr(), rows, self.k, x.stride(0), self._pointer, self.pairs, self.k_tiles, self._bias_pointer,
                out.data_ptr(), out.stride(0), self.n, _CODES[out.dtype], mode,
            )  # fmt: skip
        else:
            if out.dtype != torch.float32:
                raise ValueError("a float32 product has a float32 output")
            failed = self._f32(
                x.data_ptr(), rows, self.k, x.stride(0), self._pointer, self.pairs, self._bias_pointer,
                out.data_ptr(), out.stride(0), self.n, mode,
            )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the rows of a product")


def _in_pairs(halves: torch.Tensor, pairs: int) -> torch.Tensor:
    """[1 or 2, n, ...] -> [pairs, 2, 16, ...], zero padded: one matrix cut in 32s, or 16 of each of two."""
    kinds, n, *rest = halves.shape
    per_pair = 16 if kinds == 2 else 32
    padded = halves.new_zeros(kinds, pairs * per_pair, *rest)
    padded[:, :n] = halves
    if kinds == 1:
        return padded.view(pairs, 2, 16, *rest)
    return padded.view(2, pairs, 16, *rest).transpose(0, 1)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What PackedWeight(weight, bias, gated)(x) computes, in float32 and rounded once."""
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.to(out_dtype or x.dtype)
