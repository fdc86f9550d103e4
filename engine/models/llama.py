"""Llama, and the families that differ from it by configuration alone: Mistral and Qwen2."""

from __future__ import annotations

import torch

from engine.layers.rotary import Angles
from engine.layers.stream import Norm, ResidualStream
from engine.loader.fused import WeightLoader
from engine.models.config import ModelConfig
from engine.models.step import ForwardStep, LastTokens


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, load: WeightLoader, prefix: str, layer: int, rotary: Angles) -> None:
        self.layer = layer
        self.window = config.windows[layer]
        queries, keys = (part.times(config.head_dim) for part in (load.shard.heads, load.shard.kv_heads))
        self.qkv = load.linear(
            [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"],
            config.hidden_size,
            [queries, keys, keys],
            config.qkv_bias,
        )
        self.heads = load.heads(config, rotary, *self.head_norms(config, load, prefix))
        self.o = load.summed(f"{prefix}.o_proj", queries, config.hidden_size, config.o_bias)

    def head_norms(self, config: ModelConfig, load: WeightLoader, prefix: str) -> tuple[Norm | None, Norm | None]:
        """Norms of every query head and every key head before they are rotated."""
        return None, None

    def __call__(
        self, stream: ResidualStream, x: torch.Tensor, step: ForwardStep, lasts: LastTokens | None = None
    ) -> ResidualStream:
        """The stream with what attention adds; of the tokens in `lasts` alone, where that is given."""
        q, kv = self.heads(self.qkv(x), self.layer, step)
        if step.on_layer is not None:
            step.on_layer(self.layer)
        plan = step.plan
        if lasts is not None:
            stream = stream.rows(lasts.tokens)
            if lasts.plan is not None:
                plan, q = lasts.plan, q.index_select(0, lasts.tokens)
        attended = step.backend.attend(plan, step.pools[self.layer], q, kv, self.window)
        if lasts is not None and lasts.plan is None:
            attended = attended.index_select(0, lasts.tokens)
        stream.add(self.o, attended)  # of [tokens, heads * head_dim]
        return stream


class LlamaMlp:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, load: WeightLoader, prefix: str) -> None:
        hidden, inner = config.hidden_size, load.shard.inner
        self.gate_up = load.gated(f"{prefix}.gate_proj", f"{prefix}.up_proj", hidden, inner, config.mlp_bias)
        self.down = load.summed(f"{prefix}.down_proj", inner, hidden, config.mlp_bias)

    def __call__(self, stream: ResidualStream, x: torch.Tensor) -> None:
        stream.add(self.down, self.gate_up(x))


class LlamaLayer:
    attention_class = LlamaAttention

    def __init__(self, config: ModelConfig, load: WeightLoader, prefix: str, layer: int, rotary: Angles) -> None:
        self.attention_norm = load.norm(f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps)
        self.attention = self.attention_class(config, load, f"{prefix}.self_attn", layer, rotary)
        self.mlp_norm = load.norm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self.mlp = LlamaMlp(config, load, f"{prefix}.mlp")

    def __call__(self, stream: ResidualStream, step: ForwardStep, lasts: LastTokens | None = None) -> ResidualStream:
        stream = self.attention(stream, stream.read(self.attention_norm), step, lasts)
        self.mlp(stream, stream.read(self.mlp_norm))
        return stream


class LlamaModel:
    """Embedding, layers, final norm and output head.

    The residual stream is float32 whatever the compute dtype: with bfloat16 weights the logits' distance from the
    float32 model halves (SmolLM2-135M, 306 chat positions: 0.08 rms against 0.16 of a bfloat16 stream), at no cost,
    since the norms compute in float32 anyway.
    """

    layer_class = LlamaLayer
    takes_embeddings = True  # in place of those of tokens
    read_bytes = 0  # of tensors of the checkpoint's files
    weights_digest = ""  # of all weights, or how they were made up; on rank 0
    weights_files = ""  # names the files that were read, and their state; empty without files

    def __init__(self, config: ModelConfig, load: WeightLoader) -> None:
        self.config = config
        self.rotary = load.rotary(config)
        self.embedding = load.embedding("model.embed_tokens.weight", config.hidden_size)
        self.layers = [
            self.layer_class(config, load, f"model.layers.{layer}", layer, self.rotary)
            for layer in range(config.num_layers)
        ]
        self.norm = load.norm("model.norm", config.hidden_size, config.norm_eps)
        tied = self.embedding.table if config.tie_embeddings else None
        self.head = load.head(tied, config.hidden_size, config.vocab_size)

    def forward(self, token_ids: torch.Tensor, step: ForwardStep) -> ResidualStream:
        """token_ids: [tokens] -> the stream [tokens, hidden] before the final norm; with `step.lasts`, theirs: [rows,
        hidden]."""
        stream = self.embedding(token_ids, step.override)
        for layer in self.layers[:-1]:
            layer(stream, step)
        return self.layers[-1](stream, step, step.lasts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: float32 [n, hidden], rows of what `forward` leaves in the stream -> float32 logits [n, vocab].

        With several ranks, all call it, and the logits are there on rank 0; elsewhere it returns [0, vocab].
        """
        return self.head.exact(self.norm(hidden))
