"""Conversion of a GGUF file of the Llama family into a Hugging Face folder.

Weights are dequantized to float32 by the `gguf` library and stored as bfloat16, the type in which models of this
family are published: half the disk and start-up time of float32. The rounding (relative 2**-9, far below the error
of 4 or 8 bit quantization) happens once, here: the folder, not the GGUF file, is the model of record, and
whatever computes with it, in bfloat16 or widened to float32, sees the same values.

GGUF stores the rows of the query and key projections in the order that interleaved rotary embeddings want, pairs
(2i, 2i+1) rotated together; Hugging Face models rotate i with i + head_dim/2, so the rows are put back in that
order.

Whoever changes what is written here raises FORMAT in cli/model_prepare.py, so that kept folders are made anew.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from engine.loader.errors import ModelLoadError
from engine.loader.gguf_tokenizer import GgufTokenizer, read_tokenizer

STORED_DTYPE = "bfloat16"

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(source: Path, folder: Path, on_progress: Callable[[int, int], None]) -> None:
    """Writes config, weights and tokenizer of the GGUF file `source` into the existing `folder`.

    `on_progress(done, total)` is called after each tensor with quantized bytes. Raises ModelLoadError when the file
    is damaged or holds what would not be reproduced exactly: another architecture, scaled rotary embeddings, tensors
    or a tokenizer of an unknown kind.
    """
    try:
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{source}: not a readable GGUF file: {error}") from error
    try:
        tokenizer = read_tokenizer(fields)
        config = llama_config(fields, {tensor.name: tensor for tensor in reader.tensors}, tokenizer)
        weights = _weights(reader.tensors, config, on_progress)
    except KeyError as error:
        raise ModelLoadError(f"{source}: the file lacks {error}") from error
    except ModelLoadError as error:
        raise ModelLoadError(f"{source}: {error}") from error
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _special_ids(tokenizer))
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "special_tokens_map.json", tokenizer.named_tokens)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields, tokenizer, config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # it is written for its owner only


def _special_ids(tokenizer: GgufTokenizer) -> dict[str, int]:
    return {name: value for name, value in tokenizer.named_ids.items() if name != "unk_token_id"}


def llama_config(fields: Mapping[str, Any], tensors: Mapping[str, Any], tokenizer: GgufTokenizer) -> dict[str, Any]:
    """The content of config.json.

    fields: metadata by key, tensors: by GGUF name. Raises ModelLoadError for models that are not plain Llama and
    KeyError for metadata that is missing.
    """
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ModelLoadError(f"general.architecture {architecture!r} is not supported; supported: 'llama'")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ModelLoadError("scaled rotary embeddings are not supported; use the model's Hugging Face folder instead")
    hidden_size = int(fields["llama.embedding_length"])
    heads = int(fields["llama.attention.head_count"])
    head_dim = int(fields.get("llama.attention.key_length", hidden_size // heads))
    rotated = int(fields.get("llama.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise ModelLoadError(f"rotary embeddings over {rotated} of {head_dim} dimensions are not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": STORED_DTYPE,
        **_special_ids(tokenizer),
    }


def _shortest(value: float) -> float:
    """A float32 read as float64, as the shortest decimal that means the same float32: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))


def _weights(
    tensors: list[Any], config: Mapping[str, Any], on_progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    """All tensors under their Hugging Face names, in the stored type."""
    total, done = sum(int(tensor.n_bytes) for tensor in tensors), 0
    weights = {}
    for tensor in tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name, heads = _place(tensor.name, config)
        if heads:
            values = rotate_half_order(values, heads)
        weights[name] = torch.tensor(values, dtype=torch.bfloat16)  # rounds to nearest, ties to even
        done += int(tensor.n_bytes)
        on_progress(done, total)
    missing = _expected_names(config) - weights.keys()
    if missing:
        raise ModelLoadError(f"{len(missing)} tensors are missing, among them {min(missing)!r}")
    return weights


def _expected_names(config: Mapping[str, Any]) -> set[str]:
    outer = set(_OUTER.values()) - ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    layers = range(config["num_hidden_layers"])
    return outer | {f"model.layers.{i}.{name}.weight" for i in layers for name in _INNER.values()}


def _place(name: str, config: Mapping[str, Any]) -> tuple[str, int]:
    """Hugging Face name of a GGUF tensor, and the number of heads whose rows have to be reordered (0: none)."""
    if name in _OUTER:
        return _OUTER[name], 0
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _INNER or int(match[1]) >= config["num_hidden_layers"]:
        raise ModelLoadError(f"tensor {name!r} has no place in a Llama model")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(match[2], 0)
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.weight", heads


def rotate_half_order(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection [heads * head_dim, in] from interleaved pairs to halves: 0, 2, .., 1, 3, .. per head."""
    by_pair = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)


def _tokenizer_config(fields: Mapping[str, Any], tokenizer: GgufTokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json and nothing else
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **tokenizer.named_tokens,
    }
    if "tokenizer.chat_template" in fields:
        content["chat_template"] = fields["tokenizer.chat_template"]
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
