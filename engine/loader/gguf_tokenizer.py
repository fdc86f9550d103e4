"""The tokenizer of a GGUF file as a `tokenizers` object: byte-level BPE with the pre-tokenizer that the file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.loader.errors import ModelLoadError


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type` that matter here."""

    CONTROL = 3  # special: matched whole in a prompt, left out of decoded text
    USER_DEFINED = 4  # matched whole, part of decoded text


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


# `tokenizer.ggml.pre`: how text is split before merging. Others would tokenize wrongly, so they are refused.
PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _single_digits,
    "gpt-2": _byte_level,
}

_NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    tokenizer: Tokenizer
    named_tokens: dict[str, str]  # bos_token, eos_token, ...: text of the token, for those the file has
    named_ids: dict[str, int]  # the same as ids, keyed bos_token_id, eos_token_id, ...


def read_tokenizer(fields: Mapping[str, Any]) -> GgufTokenizer:
    """Builds the tokenizer out of a GGUF file's metadata (key to value).

    Raises ModelLoadError when the vocabulary is of a kind that this cannot reproduce exactly.
    """
    kind, pre = str(fields.get("tokenizer.ggml.model")), str(fields.get("tokenizer.ggml.pre"))
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"tokenizer.ggml.model {kind!r} with tokenizer.ggml.pre {pre!r} is not supported; supported: 'gpt2' "
            f"with one of {', '.join(map(repr, PRE_TOKENIZERS))}. Use the model's Hugging Face folder instead"
        )
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelLoadError(f"tokenizer.ggml.tokens names {len(tokens) - len(vocab)} tokens twice")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types: Sequence[int] = fields.get("tokenizer.ggml.token_type", ())
    # One call each, in id order: consecutive kinds may alternate, and ids must not move.
    for token, kind_of_token in zip(tokens, types, strict=False):
        if kind_of_token == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind_of_token == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    named_ids = {f"{name}_id": int(fields[key]) for name, key in _NAMED_TOKENS.items() if key in fields}
    for name, token_id in named_ids.items():
        if not 0 <= token_id < len(tokens):
            raise ModelLoadError(f"{name} {token_id} is not in the vocabulary of {len(tokens)} tokens")
    _surround(tokenizer, fields, tokens, named_ids)
    return GgufTokenizer(
        tokenizer=tokenizer,
        named_tokens={name.removesuffix("_id"): tokens[i] for name, i in named_ids.items()},
        named_ids=named_ids,
    )


def _surround(tokenizer: Tokenizer, fields: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int]) -> None:
    """Puts bos before and eos after an encoded text when the file asks for it."""
    before = ["bos_token_id"] if fields.get("tokenizer.ggml.add_bos_token") else []
    after = ["eos_token_id"] if fields.get("tokenizer.ggml.add_eos_token") else []
    missing = [name for name in before + after if name not in ids]
    if missing:
        raise ModelLoadError(f"the tokenizer is to add a token, but the file has no {missing[0]}")
    if before or after:
        template = [tokens[ids[name]] for name in before] + ["$A"] + [tokens[ids[name]] for name in after]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(tokens[ids[name]], ids[name]) for name in before + after]
        )
