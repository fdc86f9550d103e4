"""Root-mean-square normalisation."""

from __future__ import annotations

import torch


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Written out, because F.rms_norm takes 1.5 times as long on a CPU (12 against 8 us for one row of 576, 244 against
    159 us for 512 rows, bfloat16). Computed in float32 and rounded once.
    """

    __slots__ = ("dtype", "eps", "per_feature", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [features]."""
        self.dtype = weight.dtype
        self.weight = weight.float()
        self.eps = torch.full((1,), eps)
        self.per_feature = 1.0 / weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features] -> the same shape."""
        x = x.float()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=self.per_feature).rsqrt_()
        return torch.mul(x, scale).mul_(self.weight).to(self.dtype)
