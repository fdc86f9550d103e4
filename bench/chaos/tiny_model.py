"""A tiny random Llama model: enough to tell right KV from wrong, and computed in no time.

Its attention is sharp and its logits are far from uniform, so that an answer depends on every part of the prompt's KV
and its choices are clear.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MAX_POSITIONS = 512
HIDDEN, FEATURES, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 3, 4, 2, 16
_SPECIAL = ("<|end|>", "<|start|>")
_SEED = 20240611
_STD = 0.1
_SHARPNESS = 3.0  # of query and key projections, over those of the others


def make_tiny_model(folder: Path) -> Path:
    """Writes config.json, tokenizer files and float32 weights into `folder`, which is made; returns it."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": FEATURES,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "model_max_length": MAX_POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    save_file(_weights(vocabulary), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer() -> Tokenizer:
    """One token per byte, after the special ones: every text can be encoded."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*_SPECIAL, *signs])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _weights(vocabulary: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(_SEED)

    def matrix(rows: int, columns: int, std: float = _STD) -> np.ndarray:
        return draws.normal(0.0, std, (rows, columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return draws.normal(1.0, 0.2, HIDDEN).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, HIDDEN),
        "lm_head.weight": matrix(vocabulary, HIDDEN, 4 * _STD),
        "model.norm.weight": norm(),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, _SHARPNESS * _STD),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, _SHARPNESS * _STD),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2 * _STD),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 2 * _STD),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.mlp.gate_proj.weight": matrix(FEATURES, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(FEATURES, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, FEATURES),
        }
    return weights
