"""Matrix products with weights: the one place that chooses how a weight is laid out in memory.

A decode step is bound by reading the weights once, so their layout is its speed. Two cores of a Sapphire Rapids
machine, the 120 products of SmolLM2-135M's 30 layers (213 MB in bfloat16, 425 MB in float32), milliseconds:

                                              1 row   8 rows   32 rows   512 rows
    bfloat16  F.linear (row-major weight)      21.0     20.3      24.0        69
              mm with a transposed weight      25.3     21.8      25.2        66
              oneDNN, packed once              13.9     14.3      17.4        71
    float32   F.linear                         19.2     40.5      50.6       336
              mm with a transposed weight      17.2     41.7      48.8       325
              oneDNN, packed once              26.4     33.2      49.1       326
              MKL, packed once                 18.6     29.1      41.4       323

So bfloat16 weights are packed by oneDNN and float32 ones by MKL, where the build and the processor have them. A packed
weight serves any number of rows and replaces the plain one, which is dropped.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

# Rows that a packed weight is laid out for. It serves any number; MKL's layout for fewer rows is slower for many.
_PACKED_FOR_ROWS = 512


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether this build and processor have a packed product for the dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and torch.backends.mkl.is_available()


class Linear:
    """y = x W^T + b for x of any number of rows. Made by `linear`, which chooses the layout."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out]."""
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, in] -> [tokens, out]."""
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x W^T + b): [tokens, out]."""
        return F.silu(self(x), inplace=True)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """(x W^T + b) * factor. factor: [tokens, out], may be overwritten."""
        return factor.mul_(self(x))

    def plus(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        """(x W^T + b) + addend. addend: [tokens, out], may be overwritten."""
        return addend.add_(self(x))


class MklLinear(Linear):
    """float32, the weight packed by MKL."""

    __slots__ = ("shape_only",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        # The operator wants the plain weight too, but reads no more than its shape while the row counts agree
        self.shape_only = weight.new_empty(1).expand(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkl._mkl_linear.default(x, self.weight, self.shape_only, self.bias, x.shape[0])


class OneDnnLinear(Linear):
    """bfloat16, the weight packed by oneDNN, with the element-wise step that follows done on its accumulators."""

    __slots__ = ()

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "swish", [], "")

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")

    def plus(self, x: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, addend, self.weight, self.bias, "add")


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest Linear for the weight's dtype here. weight: [out, in], contiguous; bias: [out]."""
    if not _packs(weight.dtype) or weight.device.type != "cpu":
        return Linear(weight, bias)
    return OneDnnLinear(weight, bias) if weight.dtype == torch.bfloat16 else MklLinear(weight, bias)
