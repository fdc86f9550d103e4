"""Which layers a model is built of: those of the host, or the fused ones of a device (engine/layers/device.py)."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.embedding import Embedding, HostEmbedding
from engine.layers.heads import Heads, HostHeads
from engine.layers.linear import Addend, Gated, Head, Linear, LinearMaker
from engine.layers.norm import RmsNorm
from engine.layers.rotary import Angles, Rotary
from engine.layers.sharded import GatheredHead, SharedEmbedding, SummedLinear
from engine.layers.stream import Norm
from engine.models.config import ModelConfig
from engine.models.rope_config import RopeConfig
from engine.parallel.communicator import Communicator
from engine.parallel.shards import Part


class LayerMaker(Protocol):
    """Builds layers from weights on its device, of its compute dtype."""

    device: torch.device

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight: [out, in], bias: [out]."""

    def gated(self, gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> Gated:
        """gate_up: [2 * inner, in], the gate's rows first; bias: [2 * inner]."""

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """weight: [features]."""

    def embedding(self, table: torch.Tensor) -> Embedding:
        """table: [vocab, hidden]."""

    def rotary(self, rope: RopeConfig, head_dim: int) -> Angles: ...

    def heads(self, config: ModelConfig, rotary: Angles, q_norm: Norm | None, k_norm: Norm | None) -> Heads:
        """config: with the heads that this rank has."""

    # With several ranks only

    def summed(self, linear: Linear, communicator: Communicator) -> Addend:
        """linear: with this rank's part of the inputs."""

    def gathered(self, linear: Linear, vocab_size: int, communicator: Communicator) -> Head:
        """linear: with this rank's part of the vocabulary, padded to as many rows on every rank."""

    def shared_embedding(self, table: torch.Tensor, part: Part, communicator: Communicator) -> Embedding:
        """table: [rows + 1, hidden]: the rank's part of the vocabulary, then zeros."""


class HostMaker(LinearMaker):
    """Layers for the CPU."""

    device = torch.device("cpu")

    def norm(self, weight: torch.Tensor, eps: float) -> RmsNorm:
        return RmsNorm(weight, eps)

    def embedding(self, table: torch.Tensor) -> HostEmbedding:
        return HostEmbedding(table)

    def rotary(self, rope: RopeConfig, head_dim: int) -> Rotary:
        return Rotary(rope, head_dim)

    def heads(self, config: ModelConfig, rotary: Rotary, q_norm: RmsNorm | None, k_norm: RmsNorm | None) -> HostHeads:
        return HostHeads(config.num_heads, config.num_kv_heads, config.head_dim, rotary, q_norm, k_norm)

    def summed(self, linear: Linear, communicator: Communicator) -> SummedLinear:
        return SummedLinear(linear, communicator)

    def gathered(self, linear: Linear, vocab_size: int, communicator: Communicator) -> GatheredHead:
        return GatheredHead(linear, vocab_size, communicator)

    def shared_embedding(self, table: torch.Tensor, part: Part, communicator: Communicator) -> SharedEmbedding:
        return SharedEmbedding(table, part, communicator)
