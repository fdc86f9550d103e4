"""A tiny random Llama, written as a GGUF file the way the llama.cpp converter writes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, LAYERS = 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ġ t", "h e", "Ġt he", "1 2"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), "<tool>"]
TYPES = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama(tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    """Weights are bfloat16 values in float32, so that storing them as bfloat16 loses nothing."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """The model's tensors under their GGUF names, query and key rows in interleaved order."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name.startswith("model.layers."):
            layer, inner = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(inner)
            if heads:
                halves = values.reshape(heads, 2, -1, values.shape[1])
                values = np.ascontiguousarray(np.swapaxes(halves, 1, 2).reshape(values.shape))
            tensors[f"blk.{layer}.{_NAMES[inner]}.weight"] = values
        elif name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = values
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = values
        elif not model.config.tie_word_embeddings:
            tensors["output.weight"] = values
    return tensors


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    change: Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None] | None = None,
) -> Path:
    """Writes `model` to `file`; `change` may alter the tensors and add metadata before that."""
    config, writer, tensors = model.config, gguf.GGUFWriter(file, architecture), gguf_tensors(model)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if change is not None:
        change(writer, tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
