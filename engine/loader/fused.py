"""Weights fused while loading, here and nowhere else: projections of one input become one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.embedding import Embedding
from engine.layers.heads import Heads
from engine.layers.linear import Gated, Linear
from engine.layers.maker import HostMaker, LayerMaker
from engine.layers.rotary import Angles
from engine.layers.stream import Norm
from engine.loader.checkpoint import WeightSource
from engine.models.config import ModelConfig


class WeightLoader:
    """Builds layers out of a checkpoint's tensors in the compute dtype."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, maker: LayerMaker | None = None) -> None:
        """maker: decides on which device the weights lie, and in which layers; default: the host's."""
        self.source = source
        self.dtype = dtype
        self.maker = maker or HostMaker(dtype)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.maker.device)
        self.source.read_into(name, out)
        return out

    def linear(self, names: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool) -> Linear:
        """One product whose outputs are those of the named projections, in order.

        names: checkpoint prefixes; out_features: outputs of each; bias: whether each has one.
        """
        return self.maker.linear(*self._fused(names, in_features, out_features, bias))

    def gated(self, gate: str, up: str, in_features: int, out_features: int, bias: bool) -> Gated:
        """silu(gate) * up as one product."""
        return self.maker.gated(*self._fused([gate, up], in_features, [out_features] * 2, bias))

    def head(self, tied: torch.Tensor | None, in_features: int, out_features: int) -> Linear:
        """The output head: its own matrix, or the embedding table `tied` [out, in].

        The table stays as it is for look-ups, so a tied model holds it twice, a fifth of SmolLM2-135M and less of
        larger models. Read row-major, the head would take a tenth of every decode step more (bfloat16, 1 row).
        """
        if tied is not None:
            return self.maker.linear(tied)
        return self.linear(["lm_head"], in_features, [out_features], bias=False)

    def norm(self, name: str, features: int, eps: float) -> Norm:
        return self.maker.norm(self.tensor(f"{name}.weight", features), eps)

    def embedding(self, name: str, vocab: int, hidden: int) -> Embedding:
        return self.maker.embedding(self.tensor(name, vocab, hidden))

    def rotary(self, config: ModelConfig) -> Angles:
        return self.maker.rotary(config.rope, config.head_dim)

    def heads(self, config: ModelConfig, rotary: Angles, q_norm: Norm | None, k_norm: Norm | None) -> Heads:
        """What stands between the product of queries, keys and values and their attention."""
        return self.maker.heads(config, rotary, q_norm, k_norm)

    def _fused(
        self, names: Sequence[str], in_features: int, out_features: Sequence[int], bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights and biases of several projections, one below the other."""
        device = self.maker.device
        weight = torch.empty(sum(out_features), in_features, dtype=self.dtype, device=device)
        biases = torch.empty(sum(out_features), dtype=self.dtype, device=device) if bias else None
        first = 0
        for name, count in zip(names, out_features, strict=True):
            self.source.read_into(f"{name}.weight", weight[first : first + count])
            if biases is not None:
                self.source.read_into(f"{name}.bias", biases[first : first + count])
            first += count
        return weight, biases
