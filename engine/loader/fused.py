"""Weights fused while loading, here and nowhere else: projections of one input become one matrix.

Of each tensor only what this rank holds is read (engine/parallel/shards.py). Products whose outputs are shared out need
nothing of other ranks; those whose inputs are, are summed over ranks; the vocabulary is shared out by its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.embedding import Embedding
from engine.layers.heads import Heads
from engine.layers.linear import Addend, Gated, Head, Linear
from engine.layers.maker import HostMaker, LayerMaker
from engine.layers.rotary import Angles
from engine.layers.stream import Norm
from engine.loader.checkpoint import WeightSource
from engine.models.config import ModelConfig
from engine.parallel.communicator import Communicator, single
from engine.parallel.shards import Part, Shard


class WeightLoader:
    """Builds layers out of a checkpoint's tensors in the compute dtype."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        shard: Shard,
        maker: LayerMaker | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """shard: what this rank holds. maker: decides on which device the weights lie, and in which layers; default:
        the host's. communicator: to the shard's other ranks."""
        self.source = source
        self.dtype = dtype
        self.shard = shard
        self.maker = maker or HostMaker(dtype)
        self.communicator = communicator or single()

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A whole one, which every rank has."""
        out = self._empty(*shape)
        self.source.read_into(name, out)
        return out

    def linear(self, names: Sequence[str], in_features: int, out_features: Sequence[Part], bias: bool) -> Linear:
        """One product whose outputs are those that this rank holds of the named projections, in order.

        names: checkpoint prefixes; out_features: outputs of each; bias: whether each has one.
        """
        return self.maker.linear(*self._fused(names, in_features, out_features, bias))

    def gated(self, gate: str, up: str, in_features: int, out_features: Part, bias: bool) -> Gated:
        """silu(gate) * up as one product."""
        return self.maker.gated(*self._fused([gate, up], in_features, [out_features] * 2, bias))

    def summed(self, name: str, in_features: Part, out_features: int, bias: bool) -> Addend:
        """A product with the inputs that this rank holds; what is added to the stream is the sum over all ranks.

        The bias is rank 0's, so that it is added once.
        """
        weight = self._empty(out_features, in_features.count)
        alone = self.shard.size == 1
        self.source.read_into(f"{name}.weight", weight, None if alone else in_features, dim=1)
        bias_of = self.tensor(f"{name}.bias", out_features) if bias and self.shard.rank == 0 else None
        linear = self.maker.linear(weight, bias_of)
        return linear if alone else self.maker.summed(linear, self.communicator)

    def head(self, tied: torch.Tensor | None, in_features: int, out_features: int) -> Head:
        """The output head: its own matrix, or the embedding table `tied` [rows, in]. Logits are there on rank 0.

        The table stays as it is for look-ups, so a tied model holds it twice, a fifth of SmolLM2-135M and less of
        larger models. Read row-major, the head would take a tenth of every decode step more (bfloat16, 1 row).
        """
        table = self._vocabulary("lm_head.weight", in_features) if tied is None else tied
        linear = self.maker.linear(table[: self.shard.padded_rows])
        return linear if self.shard.size == 1 else self.maker.gathered(linear, out_features, self.communicator)

    def embedding(self, name: str, hidden: int) -> Embedding:
        table = self._vocabulary(name, hidden)
        if self.shard.size == 1:
            return self.maker.embedding(table)
        return self.maker.shared_embedding(table, self.shard.vocabulary, self.communicator)

    def norm(self, name: str, features: int, eps: float) -> Norm:
        return self.maker.norm(self.tensor(f"{name}.weight", features), eps)

    def rotary(self, config: ModelConfig) -> Angles:
        return self.maker.rotary(config.rope, config.head_dim)

    def heads(self, config: ModelConfig, rotary: Angles, q_norm: Norm | None, k_norm: Norm | None) -> Heads:
        """What stands between the product of queries, keys and values and their attention."""
        return self.maker.heads(self.shard.local(config), rotary, q_norm, k_norm)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.maker.device)

    def _vocabulary(self, name: str, features: int) -> torch.Tensor:
        """The rank's rows of a matrix [vocabulary, features]. With several ranks, rows of zeros follow up to one more
        than any rank holds: the last one stands for the tokens of other ranks."""
        own = self.shard.vocabulary
        if self.shard.size == 1:
            return self.tensor(name, own.total, features)
        table = self._empty(self.shard.padded_rows + 1, features)
        table[own.count :].zero_()
        self.source.read_into(name, table[: own.count], own)
        return table

    def _fused(
        self, names: Sequence[str], in_features: int, out_features: Sequence[Part], bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights and biases of several projections, one below the other."""
        outputs = sum(part.count for part in out_features)
        weight = self._empty(outputs, in_features)
        biases = self._empty(outputs) if bias else None
        first = 0
        for name, part in zip(names, out_features, strict=True):
            read = None if self.shard.size == 1 else part
            last = first + part.count
            self.source.read_into(f"{name}.weight", weight[first:last], read)
            if biases is not None:
                self.source.read_into(f"{name}.bias", biases[first:last], read)
            first = last
        return weight, biases
