"""Llama, and the families that differ from it by configuration alone: Mistral and Qwen2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.layers.rotary import Rotary
from engine.loader.fused import WeightLoader
from engine.models.config import ModelConfig
from engine.models.step import ForwardStep


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, load: WeightLoader, prefix: str, layer: int) -> None:
        self.layer = layer
        self.window = config.windows[layer]
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_rotated = config.num_heads + config.num_kv_heads
        self.num_all = config.num_heads + 2 * config.num_kv_heads
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = load.linear(
            [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"],
            config.hidden_size,
            [q_size, kv_size, kv_size],
            config.qkv_bias,
        )
        self.o = load.linear([f"{prefix}.o_proj"], q_size, [config.hidden_size], config.o_bias)

    def prepare(self, qkv: torch.Tensor) -> None:
        """What a family does in place to queries and keys before rotation; qkv: [tokens, all heads, dim]."""

    def __call__(self, x: torch.Tensor, rotary: Rotary, step: ForwardStep, residual: torch.Tensor) -> None:
        qkv = self.qkv(x).view(-1, self.num_all, self.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        self.prepare(qkv)
        rotary.apply_(qkv[:, : self.num_rotated], step.cos, step.sin)
        q, kv = qkv[:, : self.num_heads], qkv[:, self.num_heads :]
        pool = step.pools[self.layer]
        step.backend.write(step.plan, pool, kv)
        if step.on_layer is not None:
            step.on_layer(self.layer)
        attended = step.backend.attend(step.plan, pool, q, kv, self.window)  # [tokens, heads * head_dim]
        self.o.add_to(residual, attended)


class LlamaMlp:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, load: WeightLoader, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = load.gated(f"{prefix}.gate_proj", f"{prefix}.up_proj", hidden, inner, config.mlp_bias)
        self.down = load.linear([f"{prefix}.down_proj"], inner, [hidden], config.mlp_bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        self.down.add_to(residual, self.gate_up(x))


class LlamaLayer:
    attention_class = LlamaAttention

    def __init__(self, config: ModelConfig, load: WeightLoader, prefix: str, layer: int) -> None:
        self.attention_norm = load.norm(f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = self.attention_class(config, load, f"{prefix}.self_attn", layer)
        self.mlp_norm = load.norm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = LlamaMlp(config, load, f"{prefix}.mlp")

    def __call__(self, residual: torch.Tensor, rotary: Rotary, step: ForwardStep) -> None:
        self.attention(self.attention_norm(residual), rotary, step, residual)
        self.mlp(self.mlp_norm(residual), residual)


class LlamaModel:
    """Embedding, layers, final norm and output head.

    The residual stream is float32 whatever the compute dtype: with bfloat16 weights the logits' distance from the
    float32 model halves (SmolLM2-135M, 306 chat positions: 0.08 rms against 0.16 of a bfloat16 stream), at no cost,
    since the norms compute in float32 anyway.
    """

    layer_class = LlamaLayer

    def __init__(self, config: ModelConfig, load: WeightLoader) -> None:
        self.config = config
        self.rotary = Rotary(config.rope, config.head_dim)
        self.embedding = load.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [
            self.layer_class(config, load, f"model.layers.{layer}", layer) for layer in range(config.num_layers)
        ]
        self.norm = load.norm("model.norm", config.hidden_size, config.norm_eps)
        tied = self.embedding if config.tie_embeddings else None
        self.head = load.head(tied, config.hidden_size, config.vocab_size)

    def forward(self, token_ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """token_ids: [tokens] -> float32 hidden states before the final norm [tokens, hidden]."""
        residual = F.embedding(token_ids, self.embedding).float()
        for layer in self.layers:
            layer(residual, self.rotary, step)
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden], rows of `forward`'s result -> float32 logits [n, vocab]."""
        return self.head.exact(self.norm(hidden))
