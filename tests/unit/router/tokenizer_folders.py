"""Small tokenizers as Hugging Face folders: byte-level BPE, and pieces with a space sign and byte tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog.",
    "hello world, hello there; stop here and stop now.",
    "Grüße aus München, naïve café, 你好世界 日本語 한국어 😀 👩‍👩‍👧 e\u0301",
] * 20

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 512) -> Tokenizer:
    """Byte-level BPE as GPT-2, Llama 3, Qwen and SmolLM use it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("two words", special=False)])
    return tokenizer


def space_sign(vocab_size: int = 640) -> Tokenizer:
    """BPE with a space sign and byte fallback, as Llama 2 and Mistral use it; puts <s> in front."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer marks byte tokens as special; they are ordinary vocabulary in a model's file.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace(vocab_size: int = 400, prepend_scheme: str = "always") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "</s>"], show_progress=False),
    )
    return tokenizer


def word_piece(vocab_size: int = 400) -> Tokenizer:
    """A decoder whose tokens have no fixed bytes."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=["[UNK]", "[SEP]"], show_progress=False),
    )
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """A folder with `tokenizer.json` and `tokenizer_config.json`, as far as the router reads one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def chat_folder(folder: Path) -> Path:
    """Byte-level BPE with a ChatML template."""
    return write_folder(
        folder,
        byte_level(),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
        tokenizer_class="PreTrainedTokenizerFast",
    )
