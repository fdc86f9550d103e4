"""Configurations: both spellings, family defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.layers.rotary import Rotary, attention_factor, inverse_frequencies
from engine.loader.errors import ModelLoadError
from engine.models.config import load_config, parse_config, resolve_dtype
from engine.models.rope_config import parse_rope

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3 from its model's length": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    "yarn": YARN,
    "yarn with attention_factor": YARN | {"attention_factor": 1.25},
    "yarn with mscale pair": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn with betas, not truncated": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn without factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 256},
}


@pytest.mark.parametrize("spelling", ["new", "old", "oldest"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_when_scaled_then_frequencies_and_factor_equal_transformers(rope: dict[str, Any], spelling: str) -> None:
    theta = 50000.0
    if spelling == "new":
        source = BASE | {"rope_parameters": rope | {"rope_theta": theta}}
    elif spelling == "old":
        source = BASE | {"rope_scaling": rope, "rope_theta": theta}
    else:
        renamed = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
        source = BASE | {"rope_scaling": renamed, "rope_theta": theta}
    found = parse_config(source)
    reference = transformers.LlamaConfig(**(BASE | {"rope_parameters": rope | {"rope_theta": theta}}))
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(found.rope, 16), frequencies, rtol=1e-6, atol=0)
    assert attention_factor(found.rope) == pytest.approx(factor, rel=1e-9)


def test_rope_when_unscaled_then_both_spellings_give_the_same() -> None:
    old = parse_config(BASE | {"rope_theta": 1e6, "rope_scaling": None})
    new = parse_config(BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert old.rope == new.rope
    assert old.rope.theta == 1e6
    assert parse_config(BASE).rope.theta == 10000.0


def test_rotary_when_applied_then_turns_pairs_by_position_times_frequency() -> None:
    rotary = Rotary(parse_rope({}, 64), 8)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    turned = x.clone()
    positions = torch.tensor([0, 5, 63])
    rotary.apply_(turned, *rotary.angles(positions))
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angle = positions[:, None, None] * (10000.0 ** (-torch.arange(4) / 4))
    expected = pairs * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 100}, (None,) * 4),  # Llama knows no window
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 7),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": [
                    "sliding_attention",
                    "full_attention",
                    "full_attention",
                    "sliding_attention",
                ],
            },
            (7, None, None, 7),
        ),
    ],
)
def test_windows_when_family_and_keys_differ_then_follow_the_family(
    changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert parse_config(BASE | changes).windows == expected


def test_config_when_family_has_defaults_then_they_fill_what_is_absent() -> None:
    qwen3 = parse_config(BASE | {"architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.o_bias) == (128, True, False, False)
    qwen2 = parse_config(BASE | {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.head_dim, qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias) == (16, False, True, False)
    llama = parse_config(BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 32})
    assert (llama.head_dim, llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (32, True, True, True)
    assert parse_config({k: v for k, v in BASE.items() if k != "num_key_value_heads"}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "RoPE"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types",
        ),
    ],
)
def test_config_when_a_key_is_bad_then_error_names_it(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        parse_config(BASE | changes)


def write_folder(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_eos_when_generation_config_names_ids_then_they_win(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, BASE | {"eos_token_id": 2}, {"eos_token_id": [5, 7]})
    assert load_config(folder).eos_token_ids == (5, 7)
    write_folder(tmp_path, BASE | {"eos_token_id": 2}, {"temperature": 0.6})
    assert load_config(folder).eos_token_ids == (2,)


def test_max_model_len_when_above_the_models_then_error_names_flag_and_limit(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, BASE)
    assert load_config(folder).max_model_len == 1024
    assert load_config(folder, 100).max_model_len == 100
    with pytest.raises(ModelLoadError, match=r"--max-model-len 1025.*1024"):
        load_config(folder, 1025)
    yarn = write_folder(tmp_path, BASE | {"max_position_embeddings": 256, "rope_scaling": YARN})
    assert load_config(yarn).max_model_len == 1024


def test_folder_when_missing_or_not_json_then_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such model folder"):
        load_config(tmp_path / "absent")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_dtype_when_auto_then_follows_the_checkpoint(stored: str, requested: str, expected: str) -> None:
    assert resolve_dtype(requested, parse_config(BASE | {"torch_dtype": stored})) == expected
    with pytest.raises(ModelLoadError, match="int3"):
        resolve_dtype("int3", parse_config(BASE))
