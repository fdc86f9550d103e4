"""Root-mean-square normalisation."""

from __future__ import annotations

import torch

from kernels.cpu import elementwise, library


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Computed in float32 and rounded once, to the weight's dtype.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [features]."""
        self.dtype = weight.dtype
        self.weight = weight.float()
        self.eps = eps
        self.eps_tensor = torch.full((1,), eps)
        self.per_feature = 1.0 / weight.shape[0]
        self.kernels = library.load()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, features] -> the same shape."""
        if self.kernels is not None:
            out = torch.empty(x.shape, dtype=self.dtype)
            elementwise.rms_norm(self.kernels, x, self.weight, self.eps, out)
            return out
        return self._normalised(x).to(self.dtype)

    def apply_(self, x: torch.Tensor) -> None:
        """The same in place for every head of x [rows, heads, features], whose rows may lie apart."""
        if self.kernels is not None:
            elementwise.rms_norm(self.kernels, x, self.weight, self.eps, x)
        else:
            x.copy_(self._normalised(x))

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        """Written out, because F.rms_norm takes 1.5 times as long (12 against 8 us for one row of 576)."""
        x = x.float()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps_tensor, length, length, value=self.per_feature).rsqrt_()
        return torch.mul(x, scale).mul_(self.weight)
