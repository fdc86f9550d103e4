"""The part of a Hugging Face configuration that the engine needs, checked, with family defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelLoadError
from engine.models.rope_config import RopeConfig, parse_rope

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and behaviour of one decoder-only model. Sizes are of the whole model, not of one rank."""

    family: str  # llama, mistral, qwen2, qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: a token sees itself and the window - 1 before it; None: all
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim of each query and key head, before RoPE
    tie_embeddings: bool  # the output head shares the embedding table
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str  # dtype the folder's weights are stored in, as config.json says
    max_model_len: int  # positions (prompt + output) the model can be served with
    pad_token_id: int | None = None  # what fills unused places of a batch, where the model names one


class _Reader:
    """Typed access to config.json whose errors name the key."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        self.source = source

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.source.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ModelLoadError(f"config.json: {key!r} must be an integer of at least {low}, not {value!r}")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.source.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config.json: {key!r} must be a number, not {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.source.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {key!r} must be true or false, not {value!r}")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; ModelLoadError names the file when it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file; a model folder needs {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a tuple."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise ModelLoadError(f"config: {key!r} must be token ids, not {value!r}")
    return tuple(values)


def _pad_token(value: object) -> int | None:
    """An id, or None for everything else: -1 and null mean that there is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _windows(source: Mapping[str, Any], reader: _Reader, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: Mistral has one for all layers, Qwen for those that it names."""
    if family == "llama":
        return (None,) * num_layers
    if family == "mistral":
        # Absent means the family's default of 4096; null means none
        present = "sliding_window" not in source or source["sliding_window"] is not None
        return (reader.integer("sliding_window", 4096) if present else None,) * num_layers
    if not reader.boolean("use_sliding_window") or ("sliding_window" in source and source["sliding_window"] is None):
        return (None,) * num_layers
    window = reader.integer("sliding_window", 4096)
    kinds = source.get("layer_types")
    if kinds is None:
        first = reader.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not set(kinds) <= {"full_attention", "sliding_attention"}
    ):
        raise ModelLoadError(
            f"config.json: 'layer_types' must be full_attention or sliding_attention for each of {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _longest(rope: RopeConfig, max_positions: int) -> int:
    """Positions that the scaled embedding is meant for. Llama-3 folders state the scaled length."""
    if rope.kind == "linear":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def parse_config(source: Mapping[str, Any]) -> ModelConfig:
    """Turn the contents of config.json into a ModelConfig; ModelLoadError names the key at fault."""
    names = source.get("architectures") or []
    known = [name for name in names if name in FAMILIES]
    if not known:
        raise ModelLoadError(
            f"config.json: architectures {names!r} are not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    if source.get("quantization_config"):
        raise ModelLoadError("config.json: quantized checkpoints (quantization_config) are not supported")
    family = FAMILIES[known[0]]
    reader = _Reader(source)
    if source.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"config.json: hidden_act {source['hidden_act']!r} is not supported; supported: silu")
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", 8 if family == "mistral" else num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_dim = reader.integer("head_dim", 128 if family == "qwen3" else max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim ({head_dim}) must be even")
    num_layers = reader.integer("num_hidden_layers")
    max_positions = reader.integer("max_position_embeddings", 2048 if family == "llama" else 32768)
    rope = parse_rope(source, max_positions)
    if rope.sections and sum(rope.sections) != head_dim // 2:
        raise ModelLoadError(
            f"config.json: mrope_section {list(rope.sections)} must add up to half of head_dim ({head_dim // 2})"
        )
    bias = reader.boolean("attention_bias") if family in ("llama", "qwen3") else False
    dtype = str(source.get("dtype") or source.get("torch_dtype") or "float32").removeprefix("torch.")
    return ModelConfig(
        family=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=reader.real("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(source, reader, family, num_layers),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=reader.boolean("mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
        tie_embeddings=reader.boolean("tie_word_embeddings"),
        eos_token_ids=token_ids(source.get("eos_token_id"), "eos_token_id"),
        checkpoint_dtype=dtype,
        max_model_len=_longest(rope, max_positions),
        pad_token_id=_pad_token(source.get("pad_token_id")),
    )


def load_config(folder: Path, max_model_len: int | None = None) -> ModelConfig:
    """Read config.json and generation_config.json of a model folder.

    End-of-sequence ids are those of generation_config.json when it names any, else those of config.json.
    `max_model_len` lowers the model's own limit; above it ModelLoadError is raised.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder}: no such model folder (--model)")
    config = parse_config(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = token_ids(read_json(generation).get("eos_token_id"), "eos_token_id")
        config = replace(config, eos_token_ids=eos or config.eos_token_ids)
    if max_model_len is None:
        return config
    if not 1 <= max_model_len <= config.max_model_len:
        raise ModelLoadError(
            f"--max-model-len {max_model_len} must be between 1 and the model's {config.max_model_len} positions"
        )
    return replace(config, max_model_len=max_model_len)


def resolve_dtype(requested: str, config: ModelConfig) -> str:
    """Name of the compute dtype for `--dtype`: "auto" follows the checkpoint (float16 becomes bfloat16)."""
    if requested == "auto":
        return "float32" if config.checkpoint_dtype == "float32" else "bfloat16"
    if requested not in DTYPES:
        raise ModelLoadError(f"--dtype {requested!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return requested
