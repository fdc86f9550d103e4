"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [features]."""
        self.weight = weight
        self.shape = tuple(weight.shape)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features] -> the same shape."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)
