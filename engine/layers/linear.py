"""Matrix products with weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b for x of any number of rows."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out]."""
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, in] -> [tokens, out]."""
        return F.linear(x, self.weight, self.bias)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + (x W^T + b). residual: [tokens, out], may be overwritten."""
        return residual.add_(F.linear(x, self.weight, self.bias))
