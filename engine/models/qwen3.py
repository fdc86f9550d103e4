"""Qwen3: Llama with an RMSNorm over every query head and key head before they are rotated."""

from __future__ import annotations

from engine.layers.stream import Norm
from engine.loader.fused import WeightLoader
from engine.models.config import ModelConfig
from engine.models.llama import LlamaAttention, LlamaLayer, LlamaModel


class Qwen3Attention(LlamaAttention):
    def head_norms(self, config: ModelConfig, load: WeightLoader, prefix: str) -> tuple[Norm | None, Norm | None]:
        q_norm, k_norm = (
            load.norm(f"{prefix}.{name}", config.head_dim, config.norm_eps) for name in ("q_norm", "k_norm")
        )
        return q_norm, k_norm


class Qwen3Layer(LlamaLayer):
    attention_class = Qwen3Attention


class Qwen3Model(LlamaModel):
    layer_class = Qwen3Layer
