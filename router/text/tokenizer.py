"""The tokenizer of a Hugging Face model folder: `tokenizer.json`, with the special tokens of
`tokenizer_config.json`.

Only the `tokenizers` library is used. What `transformers` would do to the same folder is kept: a named
special token (`bos_token`, `eos_token`, …) of the vocabulary counts as special, `add_special_tokens` runs
the post-processor of `tokenizer.json`, and `add_bos_token` / `add_eos_token` of the configuration are
ignored beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from rpc.errors import BatonError, ErrorCode
from rpc.token_bytes import ByteRule, byte_rule
from rpc.vocabulary import (
    load_backend,
    mark_special,
    read_json,
    special_ids,
    special_token_strings,
    vocabulary_size,
)

# Encoding runs at about 1 MB/s and more, so this much text holds the event loop for 2 ms at the most.
INLINE_CHARS = 2048
# Text that is longer than this many times the longest token per token of context cannot fit; it is not even
# encoded. The factor leaves room for normalizers that shorten text.
SHRINK_FACTOR = 4


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads; `close()` ends its own.

    `vocab_size` is one more than the largest id that the tokenizer itself knows; a model's vocabulary may
    be padded beyond it, and such ids have no text.
    """

    def __init__(self, backend: Backend, config: dict[str, Any] | None = None, name: str = "") -> None:
        config = config or {}
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self.special_tokens = special_token_strings(config)
        mark_special(backend, config)
        self._backend = backend
        self.special_ids = special_ids(backend)
        self.vocab_size = vocabulary_size(backend)
        self.rule: ByteRule | None = byte_rule(backend.decoder)
        self._pieces: dict[int, bytes] = {}
        self._longest_token = max((len(self.id_to_token(i) or "") for i in range(self.vocab_size)), default=1)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `folder`; raises INVALID_PARAMS naming the file that is missing or broken."""
        return cls(load_backend(folder), read_json(folder / "tokenizer_config.json"), name=folder.name)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    # -- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    async def encode_off_loop(self, text: str, *, add_special_tokens: bool = True, max_tokens: int = 0) -> list[int]:
        """Like `encode`, in a thread when the text is long, so that the event loop goes on.

        `max_tokens` > 0 is the most that the caller can use: text that cannot be that short is refused with
        LONG_PROMPT_ERROR before any work. Cancelling does not stop an encoding that has begun; two run at a
        time.
        """
        if max_tokens and len(text) > max_tokens * self._longest_token * SHRINK_FACTOR:
            raise BatonError(
                ErrorCode.LONG_PROMPT_ERROR,
                f"the prompt has {len(text)} characters, which cannot fit into the context of {max_tokens} "
                "tokens; shorten it",
                param="prompt",
            )
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_unlocked, text, add_special_tokens)

    def _encode_unlocked(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library's `encode` keeps Python's lock from beginning to end, and so stops every thread; encoding a batch
        # does not. This kind works out no offsets, which saves a third of the time.
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    # -- ids to text

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; what is not UTF-8 becomes U+FFFD."""
        if self.rule is None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        skipped = self.special_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in ids if token_id not in skipped and self.piece(token_id)]
        pieces = [self.piece(token_id) for token_id in shown]
        if shown:
            pieces[0] = self.first_piece(shown[0])
        return b"".join(pieces).decode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; of a special token its name, of an unknown id none."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self.id_to_token(token_id)
            if token is None:
                piece = b""
            elif self.rule is not None:
                piece = self.rule.piece(token)
            else:
                piece = self._backend.decode([token_id], skip_special_tokens=False).encode()
            self._pieces[token_id] = piece
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """The piece of a token that the text begins with: some tokenizers drop a leading space there."""
        token = self.id_to_token(token_id)
        return self.piece(token_id) if token is None or self.rule is None else self.rule.first_piece(token)

    def token_text(self, token_id: int) -> str:
        """The token for a log-probability list: its text, or `bytes:\\xNN…` when it is no whole character."""
        piece = self.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
