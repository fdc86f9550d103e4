"""The residual stream: what layers read through a norm, and what their products are added to.

A host adds every product at once. A device leaves it as it is until the next norm, so that one kernel adds and
normalises (`DeviceStream`, engine/layers/device.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.linear import Addend


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, features] -> the same shape, in the compute dtype."""


class ResidualStream(Protocol):
    """float32 [tokens, hidden] of one step."""

    def read(self, norm: Norm) -> torch.Tensor:
        """The normalised stream [tokens, hidden], in the compute dtype."""

    def add(self, linear: Addend, x: torch.Tensor) -> None:
        """stream += linear(x). x: [tokens, in]."""

    def hidden(self) -> torch.Tensor:
        """float32 [tokens, hidden]: all that was added so far."""

    def rows(self, tokens: torch.Tensor) -> ResidualStream:
        """A stream of its own of some tokens. tokens: int64 or int32 [n], indices."""


class HostStream:
    def __init__(self, residual: torch.Tensor) -> None:
        """residual: float32 [tokens, hidden], changed in place."""
        self.residual = residual

    def read(self, norm: Norm) -> torch.Tensor:
        return norm(self.residual)

    def add(self, linear: Addend, x: torch.Tensor) -> None:
        linear.add_to(self.residual, x)

    def hidden(self) -> torch.Tensor:
        return self.residual

    def rows(self, tokens: torch.Tensor) -> HostStream:
        return HostStream(self.residual.index_select(0, tokens))
