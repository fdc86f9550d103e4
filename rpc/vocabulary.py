"""The tokens of a Hugging Face model folder as bytes: `tokenizer.json`, with the special tokens of
`tokenizer_config.json`.

Only the `tokenizers` library is used. What `transformers` would do to the same folder is kept: a named special token
(`bos_token`, `eos_token`, …) of the vocabulary counts as special.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from rpc.errors import BatonError, ErrorCode
from rpc.token_bytes import byte_rule

# What marks tool calls in the text of an answer. Some tokenizers call these tokens special, but whoever reads the calls
# needs them as text.
TOOL_MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]")

_NAMED_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[id]` are the bytes that a token adds to the text; none for a special token, which adds no text unless it
    marks tool calls, and for an id without a token."""

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Reads a model folder. Raises INVALID_PARAMS naming the file that is missing or broken, and for a tokenizer
        whose tokens do not stand for fixed bytes."""
        backend = load_backend(folder)
        mark_special(backend, read_json(folder / "tokenizer_config.json"))
        rule = byte_rule(backend.decoder)
        if rule is None:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"{folder / 'tokenizer.json'}: its tokens do not stand for fixed bytes, as structured output needs; "
                "use --grammar-backend none",
                param="--grammar-backend",
            )
        special = special_ids(backend)
        pieces = []
        for token_id in range(vocabulary_size(backend)):
            token = backend.id_to_token(token_id)
            if token is None or (token_id in special and token not in TOOL_MARKERS):
                pieces.append(b"")
            else:
                pieces.append(rule.piece(token))
        return cls(tuple(pieces), special)


def load_backend(folder: Path) -> Backend:
    """The tokenizer of `tokenizer.json`. Raises INVALID_PARAMS naming the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BatonError(ErrorCode.INVALID_PARAMS, f"model folder {folder} has no tokenizer.json", param="--model")
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for whatever it cannot read
        raise BatonError(ErrorCode.INVALID_PARAMS, f"{path}: {error}", param="--model") from None


def mark_special(backend: Backend, config: dict[str, Any]) -> None:
    """Makes special tokens of those that `tokenizer_config.json` says are special and the vocabulary has."""
    known = [token for token in _all_special(config) if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])


def special_ids(backend: Backend) -> frozenset[int]:
    return frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)


def vocabulary_size(backend: Backend) -> int:
    """One more than the largest id that the tokenizer itself knows."""
    return 1 + max((backend.get_vocab_size() - 1, *backend.get_added_tokens_decoder()), default=0)


def special_token_strings(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a `tokenizer_config.json`."""
    found = ((name, _token_text(config.get(name))) for name in _NAMED_SPECIAL)
    return {name: text for name, text in found if text is not None}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no file; INVALID_PARAMS naming the file when it is
    broken."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BatonError(ErrorCode.INVALID_PARAMS, f"{path}: {error}", param="--model") from None
    if not isinstance(content, dict):
        raise BatonError(ErrorCode.INVALID_PARAMS, f"{path}: must hold a JSON object", param="--model")
    return content


def _all_special(config: dict[str, Any]) -> list[str]:
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        if isinstance(value, dict):
            value = list(value.values())
        extra += [text for item in value or () if (text := _token_text(item)) is not None]
    marked = [
        text
        for item in (config.get("added_tokens_decoder") or {}).values()
        if isinstance(item, dict) and item.get("special") and (text := _token_text(item)) is not None
    ]
    return list(dict.fromkeys([*special_token_strings(config).values(), *extra, *marked]))


def _token_text(value: Any) -> str | None:
    """A token of a configuration: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
