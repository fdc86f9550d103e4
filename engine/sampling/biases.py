"""Biases and masks of rows as one list of (row, token, bias) for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling.row import SamplingRow
from kernels.logit_changes import ENTRY_WORDS

_Words = NDArray[np.int64]
_NONE = np.empty((0, ENTRY_WORDS), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _OfRow:
    """A row's entries with row number 0. Holds the row, so that its id stays its own."""

    row: SamplingRow
    free: _Words  # while the stop tokens are not masked
    masking: _Words


class BiasEntries:
    """Makes kernels.logit_changes' entries of rows, and remembers those of a request from token to token.

    A row's parameters and end-of-sequence tokens must not change.
    """

    def __init__(self, vocab: int, remembered: int) -> None:
        """remembered: rows that are remembered at once."""
        self._vocab = vocab
        self._remembered = remembered
        self._known: dict[int, _OfRow] = {}

    def of(self, rows: Sequence[tuple[int, SamplingRow]]) -> _Words:
        """Entries [n, ENTRY_WORDS] of (number in the batch, row); one per row and token.

        Token ids outside the vocabulary have no logit and are passed over.
        """
        parts = []
        for number, row in rows:
            known = self._known.get(id(row)) or self._learn(row)
            part = known.masking if row.masks_stop_tokens else known.free
            if len(part):
                part = part.copy()
                part[:, 0] |= number << 32
                parts.append(part)
        return np.concatenate(parts) if parts else _NONE

    def _learn(self, row: SamplingRow) -> _OfRow:
        if len(self._known) >= self._remembered:
            self._known.clear()
        bias = {t: float(value) for t, value in row.params.logit_bias.items() if 0 <= t < self._vocab}
        stops = [t for t in (*row.eos_token_ids, *row.params.stop_token_ids) if 0 <= t < self._vocab]
        masking = bias | dict.fromkeys(stops, -np.inf)
        found = self._known[id(row)] = _OfRow(row, _entries(bias), _entries(masking))
        return found


def _entries(bias: dict[int, float]) -> _Words:
    values = np.fromiter(bias.values(), np.float32, len(bias))
    return np.stack((np.fromiter(bias, np.int64, len(bias)), values.view(np.uint32).astype(np.int64)), axis=1)
