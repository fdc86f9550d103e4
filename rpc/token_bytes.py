"""Which bytes a token adds to the text.

For the decoders of today's language models every token stands for fixed bytes, and the text is those bytes
joined and read as UTF-8. Two rules cover them: byte-level tokens, in which each character stands for one
byte, and pieces with a sign for the space (`▁`) and `<0xNN>` for single bytes. Decoders that fit neither
have no rule (None).

One deliberate difference from the `tokenizers` library: there a run of `<0xNN>` tokens that is not UTF-8 as
a whole loses its good characters as well (each byte becomes U+FFFD), which a stream that never takes text
back cannot do. Here only the bad bytes do.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte, as byte-level BPE spells bytes: printable Latin-1 stands for itself, the other 68
    bytes for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_alphabet()


class ByteRule(Protocol):
    """How a token's spelling becomes bytes."""

    def piece(self, token: str) -> bytes: ...

    def first_piece(self, token: str) -> bytes:
        """The bytes of a token that the text begins with."""
        ...


class ByteLevelRule:
    def piece(self, token: str) -> bytes:
        try:
            return bytes([BYTE_LEVEL[char] for char in token])
        except KeyError:  # an added token is spelled as text
            return token.encode()

    def first_piece(self, token: str) -> bytes:
        return self.piece(token)


class SpaceSignRule:
    """Pieces with `sign` for a space. `byte_tokens`: `<0xNN>` is a byte. `first`: what the first token of a
    text loses: nothing, one leading space, or every sign in it."""

    def __init__(self, sign: str, *, byte_tokens: bool, first: Literal["keep", "space", "signs"]) -> None:
        self._sign = sign
        self._byte_tokens = byte_tokens
        self._first = first

    def piece(self, token: str) -> bytes:
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(self._sign, " ").encode()

    def first_piece(self, token: str) -> bytes:
        if self._first == "signs":
            return token.replace(self._sign, "").encode()
        piece = self.piece(token)
        return piece[1:] if self._first == "space" and piece.startswith(b" ") else piece


def byte_rule(decoder: Any) -> ByteRule | None:
    """The rule of a `tokenizers` decoder, or None when its tokens do not stand for fixed bytes."""
    if decoder is None:
        return None
    config = json.loads(decoder.__getstate__())
    steps = config["decoders"] if config["type"] == "Sequence" else [config]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelRule()
    if kinds == ["Metaspace"]:
        first: Literal["keep", "signs"] = "keep" if steps[0].get("prepend_scheme") == "never" else "signs"
        return SpaceSignRule(steps[0]["replacement"], byte_tokens=False, first=first)
    if (
        not kinds
        or kinds[0] != "Replace"
        or kinds[1:]
        not in (
            ["ByteFallback", "Fuse"],
            ["ByteFallback", "Fuse", "Strip"],
        )
    ):
        return None
    pattern = steps[0]["pattern"].get("String")
    if pattern is None or len(pattern) != 1 or steps[0]["content"] != " ":
        return None
    strip = kinds[-1] == "Strip"
    if strip and (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) != (" ", 1, 0):
        return None
    return SpaceSignRule(pattern, byte_tokens=True, first="space" if strip else "keep")
