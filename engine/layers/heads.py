"""What becomes of the fused query, key and value product before attention: norm, rotation, and the KV pool."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.norm import RmsNorm
from engine.layers.rotary import Rotary
from engine.models.step import ForwardStep


class Heads(Protocol):
    def __call__(self, qkv: torch.Tensor, layer: int, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalises (Qwen3) and rotates queries and keys, and stores keys and values in the layer's pool.

        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], changed in place. Returns q [tokens, num_heads,
        head_dim] and kv [tokens, 2 * num_kv_heads, head_dim], whose rows may lie apart.
        """


class HostHeads:
    """One pass after the other."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Rotary,
        q_norm: RmsNorm | None,
        k_norm: RmsNorm | None,
    ) -> None:
        self.num_heads = num_heads
        self.num_rotated = num_heads + num_kv_heads
        self.num_all = num_heads + 2 * num_kv_heads
        self.head_dim = head_dim
        self.rotary = rotary
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, qkv: torch.Tensor, layer: int, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        heads = qkv.view(-1, self.num_all, self.head_dim)
        if self.q_norm is not None:
            self.q_norm.apply_(heads[:, : self.num_heads])
        if self.k_norm is not None:
            self.k_norm.apply_(heads[:, self.num_heads : self.num_rotated])
        self.rotary.apply_(heads[:, : self.num_rotated], step.cos, step.sin)
        q, kv = heads[:, : self.num_heads], heads[:, self.num_heads :]
        step.backend.write(step.plan, step.pools[layer], kv)
        return q, kv
