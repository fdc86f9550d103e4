"""Weights fused while loading, here and nowhere else: projections of one input become one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.head import OutputHead
from engine.layers.linear import Linear, linear
from engine.layers.norm import RmsNorm
from engine.loader.checkpoint import WeightSource
from engine.models.config import ModelConfig


class WeightLoader:
    """Builds layers out of a checkpoint's tensors in the compute dtype."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self.source = source
        self.dtype = dtype

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=self.dtype)
        self.source.read_into(name, out)
        return out

    def linear(self, names: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool) -> Linear:
        """One Linear whose rows are those of the named projections, in order.

        names: checkpoint prefixes; out_features: rows of each; bias: whether each has one.
        """
        weight = torch.empty(sum(out_features), in_features, dtype=self.dtype)
        for name, part in zip(names, weight.split(list(out_features)), strict=True):
            self.source.read_into(f"{name}.weight", part)
        biases = torch.empty(sum(out_features), dtype=self.dtype) if bias else None
        if biases is not None:
            for name, part in zip(names, biases.split(list(out_features)), strict=True):
                self.source.read_into(f"{name}.bias", part)
        return linear(weight, biases)

    def norm(self, name: str, features: int, eps: float) -> RmsNorm:
        return RmsNorm(self.tensor(f"{name}.weight", features), eps)

    def head(self, tied: torch.Tensor | None, config: ModelConfig) -> OutputHead:
        """The output head: its own matrix, or the embedding table `tied` [vocab, hidden].

        A packed head beside the plain table costs a tied model that table's memory again, a fifth of SmolLM2-135M
        and less of larger ones; it saves 0.7 of 2 ms (bfloat16) or 4 of 8.5 ms (float32, 8 rows) of every step.
        """
        if tied is not None:
            return OutputHead(linear(tied))
        return OutputHead(self.linear(["lm_head"], config.hidden_size, [config.vocab_size], bias=False))
