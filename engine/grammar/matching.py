"""Where a request stands in its grammar: which tokens may come next, and whether one that came was allowed.

Nothing of this travels between servers: whoever goes on with a request builds a matcher of the same grammar and leads
it over the tokens that are there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.grammar.compiling import Compiler
from kernels.token_mask import mask_words
from rpc.errors import BatonError, ErrorCode

Mask = NDArray[np.int32]


class GrammarMatching:
    """A request's place in its grammar. Belongs to the engine's main thread, except for `fill`, which one other thread
    may run while the main thread leaves the object alone.

    Until `begin` it is not `ready`, and nothing may be drawn for the request. Once an end of sequence has been
    committed it is terminated, and allows nothing but ends of sequence.
    """

    __slots__ = ("_compiler", "_error", "_fed", "_filled_at", "_mask", "_masks", "_matcher", "_terminated")

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._matcher: Any = None
        self._fed = 0
        self._terminated = False
        self._error: BatonError | None = None
        self._mask: Mask = np.zeros((1, mask_words(compiler.vocab_size)), dtype=np.int32)
        self._masks = True  # whether the mask forbids anything
        self._filled_at = -1  # tokens that had been fed when it was filled

    @property
    def ready(self) -> bool:
        return self._matcher is not None

    @property
    def terminated(self) -> bool:
        return self._terminated

    def begin(self, compiled: Any, outputs: Sequence[int]) -> BatonError | None:
        """Starts with a compiled grammar, behind tokens that were generated already. Answers why that cannot be:
        GRAMMAR_BITMASK_BUFFER_TOO_SMALL for one of a larger vocabulary, or what `commit` does."""
        try:
            needed = mask_words(compiled.tokenizer_info.vocab_size)
            if needed > self._mask.size:
                return BatonError(
                    ErrorCode.GRAMMAR_BITMASK_BUFFER_TOO_SMALL,
                    "the grammar was compiled for a larger vocabulary than the model's",
                    metadata={"words": str(self._mask.size), "needed": str(needed)},
                )
            self._matcher = self._compiler.library.GrammarMatcher(compiled)
        except Exception as error:
            return _exception(error)
        for token in outputs:
            error = self.commit(token)
            if error is not None:
                return error
        return None

    def commit(self, token: int) -> BatonError | None:
        """Takes a generated token. Answers why it must not be given out; the matcher is then where it was.

        GRAMMAR_PARSER_REJECTED_TOKEN: the grammar does not allow it. GRAMMAR_NON_EOS_AFTER_TERMINAL: the grammar is at
        its end. GRAMMAR_VERIFY_EXCEPTION: the matcher failed.
        """
        if self._error is not None:
            return self._error
        if self._terminated:
            if token in self._compiler.stop_token_ids:
                return None
            return BatonError(
                ErrorCode.GRAMMAR_NON_EOS_AFTER_TERMINAL,
                "a token other than the end of sequence was drawn after the end of the grammar",
                metadata={"token_id": str(token), "tokens": str(self._fed)},
            )
        try:
            accepted = self._matcher.accept_token(token)
            terminated = accepted and self._matcher.is_terminated()
        except Exception as error:  # whatever it is, it concerns this request alone
            self._error = _exception(error)
            return self._error
        if not accepted:
            return BatonError(
                ErrorCode.GRAMMAR_PARSER_REJECTED_TOKEN,
                "a token was drawn that the grammar does not allow",
                metadata={"token_id": str(token), "tokens": str(self._fed)},
            )
        self._fed += 1
        self._terminated = terminated
        return None

    def fill(self) -> None:
        """Brings the mask up to date. Work only after a commit; some microseconds to a millisecond."""
        if self._filled_at == self._fed:
            return
        self._filled_at = self._fed
        if not self._terminated and self._error is None:
            try:
                self._masks = bool(self._matcher.fill_next_token_bitmask(self._mask, 0))
                return
            except Exception as error:
                self._error = _exception(error)
        # At the end, and where the matcher cannot be trusted, nothing but an end of sequence.
        self._masks = True
        self._mask[:] = 0
        words = self._mask.view(np.uint32)
        for token in self._compiler.stop_token_ids:
            words[0, token >> 5] |= np.uint32(1 << (token & 31))

    @property
    def mask(self) -> Mask | None:
        """[mask_words] of the next draw, a set bit for each token that is allowed; None when every token is. Filled if
        that was not done before. Not to be changed, and valid until the next commit."""
        self.fill()
        return self._mask[0] if self._masks else None


def _exception(error: Exception) -> BatonError:
    return BatonError(
        ErrorCode.GRAMMAR_VERIFY_EXCEPTION,
        "the grammar's matcher failed; send the request again",
        metadata={"cause": type(error).__name__},
    )
