"""Tiny random models of every family, as Hugging Face folders that can be served.

Made from transformers configurations with fixed seeds and kept in the checkout (.pytest_cache/tiny-models), so that all
test modules and later runs share them. Set BATON_TINY_MODELS to keep them elsewhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 384
EOS_TOKEN_ID = 0
MAX_POSITIONS = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,  # far from uniform logits, so that greedy choices are clear
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
# name: (configuration class of transformers, its arguments besides _COMMON)
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_attention_heads": 8, "head_dim": 16}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-rope-yarn": ("LlamaConfig", {"rope_parameters": _YARN_ROPE}),
    "llama-rope-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("MistralConfig", {"sliding_window": 21}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3Config", {"head_dim": 16, "rope_parameters": _YARN_ROPE}),
}
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "A prefill server computes the prompt; a decode server streams the tokens.",
    "What is the capital of France? Paris is the capital of France.",
    "Grüße aus Köln, 你好，世界, привет, emoji 🙂 and accents: àéîõü.",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_SEED = 20240611
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def tiny_model(name: str) -> Path:
    """Folder of the named model of TINY_MODELS: config, generation config, weights (float32), tokenizer.

    Its weights' biases and norms are random too, so that a layer that ignores one is caught.
    """
    import transformers

    class_name, arguments = TINY_MODELS[name]
    recipe = json.dumps([class_name, _COMMON | arguments, _SEED, transformers.__version__], sort_keys=True)
    key = hashlib.sha256((recipe + Path(__file__).read_text()).encode()).hexdigest()[:12]
    default = Path(__file__).resolve().parents[3] / ".pytest_cache" / "tiny-models"  # for later runs too
    root = Path(os.environ.get("BATON_TINY_MODELS", default))
    folder = root / f"{name}-{key}"
    if not _complete(folder):
        root.mkdir(parents=True, exist_ok=True)
        with _turn(root / f"{folder.name}.lock"):
            if not _complete(folder):  # of many processes that ask at once, one makes it
                _make(getattr(transformers, class_name)(**(_COMMON | arguments)), folder)
    return folder


def _complete(folder: Path) -> bool:
    return all((folder / name).exists() for name in _FILES)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Not left to closing: a process that a test has forked holds the same open file.
            fcntl.flock(lock, fcntl.LOCK_UN)


def _make(config: Any, folder: Path) -> None:
    """Only whole folders get the name; one that has lost files is made anew."""
    building = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _save_model(config, building)
        _save_tokenizer(building)
        building.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _save_model(config: Any, folder: Path) -> None:
    import torch
    import transformers

    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.normal_(std=0.2)
                elif "norm" in parameter_name:
                    parameter.normal_(mean=1.0, std=0.2)
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    """Byte-level BPE trained on a few sentences: every text can be encoded, characters span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
