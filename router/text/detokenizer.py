"""Token ids to text, one at a time: what is given out is never taken back, and never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.text.tokenizer import Tokenizer

# Without a byte rule a token's text depends on its neighbours; so many of them are looked at.
_CONTEXT_TOKENS = 6
# An unfinished character has at most three tokens of one byte each; a tail that stays unreadable longer is
# shown.
_MAX_HELD_TOKENS = 8


class Detokenizer:
    """Text of one sequence. `feed` costs the same for every token, however long the sequence is.

    The concatenation of what `feed` returns is `Tokenizer.decode` of the same ids, except that the bytes of a
    character that is not complete yet are held back; `held` says whether there are any. Whoever ends the
    sequence drops them by not asking again.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """shown: special tokens that add their names to the text all the same."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        self._rule = tokenizer.rule
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        # Bytes of a character that the prompt ends in the middle of, and what came behind them, until it is decided.
        self._begun = self._behind = b""
        # Without a rule: the last ids, of which the first `_shown` are in the text already.
        self._window: list[int] = []
        self._shown = 0

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Starts the sequence behind a prompt whose text is not wanted: a leading space stays, and a
        character that the prompt ends in the middle of can be completed; left as it is, it is no part of the
        text. Looks at the prompt's last tokens only."""
        if self._rule is None:
            tail = [i for i in prompt_ids[-4 * _CONTEXT_TOKENS :] if i not in self._skipped][-_CONTEXT_TOKENS:]
            self._window = tail
            self._shown = len(tail)
            return
        pieces: list[bytes] = []
        size = 0
        for token_id in reversed(prompt_ids):
            if token_id not in self._skipped:
                self._at_start = False
                pieces.append(self._tokenizer.piece(token_id))
                size += len(pieces[-1])
                if size >= 4:  # no character is longer
                    break
        self._utf8.decode(b"".join(reversed(pieces)))
        self._begun = self._utf8.getstate()[0]

    @property
    def held(self) -> bool:
        if self._rule is None:
            return self._shown < len(self._window)
        return bool(self._utf8.getstate()[0])

    def feed(self, token_id: int) -> str:
        """The text that becomes certain with this token; "" for a special token or half a character."""
        if token_id in self._skipped:
            return ""
        if self._rule is None:
            return self._feed_window(token_id)
        piece = self._tokenizer.piece(token_id)
        if self._at_start and piece:  # an id without a token does not begin the text
            self._at_start = False
            piece = self._tokenizer.first_piece(token_id)
        text = self._utf8.decode(piece)
        return self._decided(text, piece) if self._begun else text

    def _decided(self, text: str, piece: bytes) -> str:
        """`text`, or what the bytes behind the prompt's are by themselves if they did not complete its character."""
        self._behind += piece
        if not text:
            return ""
        begun, behind, self._begun = self._begun, self._behind, b""
        size = 2 + (begun[0] >= 0xE0) + (begun[0] >= 0xF0)
        try:
            (begun + behind)[:size].decode()
        except UnicodeDecodeError:
            self._utf8.reset()
            return self._utf8.decode(behind)
        return text

    def _feed_window(self, token_id: int) -> str:
        before = self._decode(self._window[: self._shown])
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(before):
            return ""
        if text.endswith("\ufffd") and len(self._window) - self._shown < _MAX_HELD_TOKENS:
            return ""
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._shown = len(self._window)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
