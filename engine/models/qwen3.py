"""Qwen3: Llama with an RMSNorm over every query head and key head before they are rotated."""

from __future__ import annotations

import torch

from engine.loader.fused import WeightLoader
from engine.models.config import ModelConfig
from engine.models.llama import LlamaAttention, LlamaLayer, LlamaModel


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, load: WeightLoader, prefix: str, layer: int) -> None:
        super().__init__(config, load, prefix, layer)
        self.q_norm = load.norm(f"{prefix}.q_norm", config.head_dim, config.norm_eps)
        self.k_norm = load.norm(f"{prefix}.k_norm", config.head_dim, config.norm_eps)

    def prepare(self, qkv: torch.Tensor) -> None:
        self.q_norm.apply_(qkv[:, : self.num_heads])
        self.k_norm.apply_(qkv[:, self.num_heads : self.num_rotated])


class Qwen3Layer(LlamaLayer):
    attention_class = Qwen3Attention


class Qwen3Model(LlamaModel):
    layer_class = Qwen3Layer
