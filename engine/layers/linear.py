"""Products with weights: the one place that chooses how a weight is laid out in memory, and with it the kernel.

A decode step is bound by reading the weights once, so their layout is its speed. The products of SmolLM2-135M's 30
layers (213 MB in bfloat16, 425 MB in float32) on two Sapphire Rapids cores, milliseconds, medians of interleaved runs:

                                                  1 row   8 rows   32 rows   512 rows
    bfloat16  F.linear (row-major weight)          21.0     20.3      24.0        69
              mm with a transposed weight          25.3     21.8      25.2        66
              oneDNN, packed once                  13.9     14.3      17.4        71
              kernels/cpu, packed, huge pages       9.5     10.2      12.5        60
    float32   F.linear                             19.2     40.5      50.6       336
              mm with a transposed weight          17.2     41.7      48.8       325
              oneDNN, packed once                  26.4     33.2      49.1       326
              MKL, packed once                     18.6     29.1      41.4       323
              kernels/cpu, packed, huge pages      16.1     20.8      38.0       330

So the C kernels are taken where they can be built, else oneDNN for bfloat16 and MKL for float32, else plain F.linear. A
packed weight serves any number of rows and replaces the plain one, which is dropped.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.cpu import library
from kernels.cpu.linear import PackedWeight
from kernels.cpu.memory import HugeArena

# Rows that oneDNN and MKL lay a weight out for. It serves any number; MKL's layout for fewer rows is slower for many.
_PACKED_FOR_ROWS = 512
# Neighbouring bfloat16 numbers are at most this fraction of their size apart
_BFLOAT16_STEP = 2.0**-7


class Addend(Protocol):
    """What a residual stream can add."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += x W^T + b. residual: float32 [tokens, out], contiguous."""


class Head(Protocol):
    """What gives logits."""

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, out], for logits: ranked as if not rounded to the weight's dtype, where that can be had."""


class Linear(Addend, Head, Protocol):
    """y = x W^T + b for x of any number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, in] -> [tokens, out], in the weight's dtype."""


class Gated(Protocol):
    """silu(x Wg^T + bg) * (x Wu^T + bu): SwiGLU's inner half."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, in] -> [tokens, inner]."""


class PlainLinear:
    """The weight as it came."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual.add_(self(x))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()


class MklLinear(PlainLinear):
    """float32, packed by MKL."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        super().__init__(packed, bias)
        # The operator wants the plain weight too, but reads no more than its shape while the row counts agree
        self.shape_only = weight.new_empty(1).expand(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkl._mkl_linear.default(x, self.weight, self.shape_only, self.bias, x.shape[0])


class OneDnnLinear(PlainLinear):
    """bfloat16, packed by oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS), bias)

    def __call__(self, x: torch.Tensor, then: str = "none") -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, then, [], "")

    def with_other(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        """(x W^T + b) operation other, on the accumulators. operation: add or mul; other: [tokens, out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, operation)

    def with_remainder(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, out] of 16 bits, as `exact` makes them for rows that need it."""
        rounded = self(x)
        return rounded.float().add_(self.with_other(x, rounded.neg(), "add"))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """Eight bits cannot rank tokens: at a logit of 25 the next bfloat16 is 0.125 away, and the two most likely
        tokens share one number in 3 % of a chat's positions. Rows whose leading logits lie within one rounding step
        therefore get the product's remainder too: the accumulators once more, less the rounded logits, which makes 16
        bits. What a row gets depends on that row alone.
        """
        rounded = self(x)
        logits = rounded.float()
        best = logits.amax(dim=-1, keepdim=True)
        close = (logits >= best - best.abs() * _BFLOAT16_STEP).sum(dim=-1) > 1
        if not close.any():
            return logits
        rows = close.nonzero()[:, 0]
        remainder = self.with_other(x[rows], rounded[rows].neg_(), "add")
        return logits.index_add_(0, rows, remainder.float())


class PlainGated:
    """Gate and up in one product, then element by element."""

    def __init__(self, gate_up: Linear) -> None:
        self.gate_up = gate_up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class OneDnnGated:
    """Two products, because each then does its element-wise step on the accumulators (saves a tenth at 512 rows)."""

    def __init__(self, gate: OneDnnLinear, up: OneDnnLinear) -> None:
        self.gate = gate
        self.up = up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.up.with_other(x, self.gate(x, "swish"), "mul")


class LinearMaker:
    """Lays out the weights of one model. Weights that are read one after the other lie so in memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.kernels = library.load()
        self.arena = HugeArena()
        packs = torch.backends.mkldnn.is_available()
        self.onednn = packs and dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.mkl = packs and dtype == torch.float32 and torch.backends.mkl.is_available()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight: [out, in], bias: [out], of the maker's dtype."""
        if self.kernels is not None:
            return PackedWeight(self.kernels, self.arena, weight, bias)
        if self.onednn:
            return OneDnnLinear(weight, bias)
        return MklLinear(weight, bias) if self.mkl else PlainLinear(weight, bias)

    def gated(self, gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> Gated:
        """gate_up: [2 * inner, in], the gate's rows first; bias: [2 * inner]."""
        if self.kernels is not None:
            return PackedWeight(self.kernels, self.arena, gate_up, bias, gated=True)
        if not self.onednn:
            return PlainGated(self.linear(gate_up, bias))
        gate, up = gate_up.chunk(2)
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        return OneDnnGated(OneDnnLinear(gate, gate_bias), OneDnnLinear(up, up_bias))
