"""What rows change of their logits, as one list of (row, token) changes for the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling.row import SamplingRow
from kernels.sampling import ENTRY_WORDS

_Ints = NDArray[np.int64]
_KNOWN_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Entries:
    """Changes of single logits, one per (row, token). A logit x becomes x + bias (masked: minus infinity), then is
    divided or multiplied by the penalty as its sign says, then has the subtrahend taken off."""

    rows: _Ints
    tokens: _Ints
    biases: NDArray[np.float32]  # minus infinity: masked
    penalties: NDArray[np.float32]  # 1: none
    subtrahends: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.rows)

    def write(self, words: _Ints) -> int:
        """Writes kernels.sampling's form of the entries to the start of `words`; returns how many words."""
        used = len(self) * ENTRY_WORDS
        table = words[:used].reshape(len(self), ENTRY_WORDS)
        table[:, 0] = (self.rows << 32) | self.tokens
        table[:, 1] = (_bits(self.biases) << 32) | _bits(self.penalties)
        table[:, 2] = _bits(self.subtrahends)
        return used


class EntryBuilder:
    """Collects the changes that bias, mask and penalties of rows make, in engine.sampling.processors' arithmetic.

    Work is proportional to the number of tokens that the rows name. The distinct tokens of a prompt are remembered by
    the identity of the prompt, which must not change.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._prompts: OrderedDict[int, tuple[Sequence[int], _Ints]] = OrderedDict()

    def build(self, rows: Sequence[tuple[int, SamplingRow]]) -> Entries:
        """rows: (number in the batch, row). Token ids outside the vocabulary have no logit and are passed over."""
        parts = [self._of_row(number, row) for number, row in rows]
        return Entries(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _of_row(self, number: int, row: SamplingRow) -> tuple[NDArray[np.generic], ...]:
        params = row.params
        none = np.empty(0, dtype=np.int64)
        biased, addends = none, np.empty(0, dtype=np.float32)
        if params.logit_bias:
            biased = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
            addends = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
            inside = (biased >= 0) & (biased < self._vocab)
            biased, addends = biased[inside], addends[inside]
        masked = self._inside([*row.eos_token_ids, *params.stop_token_ids]) if row.masks_stop_tokens else none
        repeats = params.repetition_penalty != 1.0
        outputs = counts = none
        if repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            outputs, counts = np.unique(self._inside(row.output_token_ids), return_counts=True)
        prompt = self._prompt(row.prompt_token_ids) if repeats else none
        tokens = np.unique(np.concatenate((biased, masked, outputs, prompt)))
        biases = np.zeros(len(tokens), dtype=np.float32)
        penalties = np.ones(len(tokens), dtype=np.float32)
        subtrahends = np.zeros(len(tokens), dtype=np.float32)
        biases[np.searchsorted(tokens, biased)] = addends
        biases[np.searchsorted(tokens, masked)] = -np.inf
        if repeats:
            for seen in (prompt, outputs):
                penalties[np.searchsorted(tokens, seen)] = params.repetition_penalty
        frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        subtrahends[np.searchsorted(tokens, outputs)] = frequency * counts.astype(np.float32) + presence
        return np.full(len(tokens), number, dtype=np.int64), tokens, biases, penalties, subtrahends

    def _inside(self, token_ids: Sequence[int]) -> _Ints:
        tokens = np.asarray(token_ids, dtype=np.int64)
        return tokens[(tokens >= 0) & (tokens < self._vocab)]

    def _prompt(self, token_ids: Sequence[int]) -> _Ints:
        """Distinct tokens, ascending. Keeps the prompt it remembers, so that its identity is not given to another."""
        found = self._prompts.get(id(token_ids))
        if found is None or len(found[0]) != len(token_ids):
            if len(self._prompts) >= _KNOWN_PROMPTS:
                self._prompts.popitem(last=False)
            found = self._prompts[id(token_ids)] = (token_ids, np.unique(self._inside(token_ids)))
        return found[1]


def _bits(values: NDArray[np.float32]) -> _Ints:
    return values.view(np.uint32).astype(np.int64)
