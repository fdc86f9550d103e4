"""From logits to a token: temperature, min-p, top-k, top-p, and the draw, vectorised over rows.

Probabilities are held as integer weights, w = round(exp((x - max) / temperature) * 2**b), in floating point.
The number of bits b is chosen so that the sum over the vocabulary stays within 2**53, so every float64 sum of
weights is exact whatever the order of the additions. A row's result is therefore bitwise the same alone, in a
batch, and for any way to split the sums. With a vocabulary of 49,152 b is 37: a token less likely than the
likeliest by more than 2**38 is never drawn.

Only as much is sorted as the filters keep, and only values: rows without top-k and top-p are not sorted at
all, and which tokens the sorted values belong to follows from one comparison with the least value kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.messages import SamplingParams

_Floats = NDArray[np.float32]
_Weights = NDArray[np.float64]
_Ints = NDArray[np.int64]

_EXACT_BITS = 53  # integers up to 2**53 are exact in float64
_DRAW_BLOCK = 256  # tokens per partial sum of the draw
_FIRST_PREFIX = 1024  # sorted tokens that top-p looks at first
SLAB_VALUES = 200_000  # logits worked on at once: their scratch stays in a core's second-level cache
_SMALLEST_TEMPERATURE = np.float32(1e-30)


def draw(logits: _Floats, params: Sequence[SamplingParams], uniforms: NDArray[np.float64]) -> _Ints:
    """Draws one token per row: [rows, vocab] float32 and as many numbers in [0, 1) to [rows] token ids.

    The token is the inverse of the cumulative distribution over token ids in ascending order, after all
    filters.
    """
    vocab = logits.shape[1]
    tokens = np.empty(len(logits), dtype=np.int64)
    at_once = max(1, SLAB_VALUES // vocab)
    selects = [0 < p.top_k < vocab or p.top_p < 1.0 for p in params]
    for choose, rows in (
        (_draw_from_selection, [i for i, s in enumerate(selects) if s]),
        (_draw_from_all, [i for i, s in enumerate(selects) if not s]),
    ):
        for begin in range(0, len(rows), at_once):
            slab = rows[begin : begin + at_once]
            adjacent = slab[-1] - slab[0] == len(slab) - 1
            part = logits[slab[0] : slab[-1] + 1] if adjacent else logits[slab]
            tokens[slab] = choose(_Rows.of(part, [params[i] for i in slab]), uniforms[slab])
    np.minimum(tokens, vocab - 1, out=tokens)  # matters only for rows of NaN, whose token nobody uses
    return tokens


@dataclass(slots=True)
class _Rows:
    """Some rows of logits and their map to weights, which is elementwise and increasing."""

    logits: _Floats  # [rows, vocab]
    peaks: _Floats  # [rows, 1], largest logit
    temperatures: _Floats  # [rows, 1]
    one: float  # weight of the most likely token: a power of two
    least: _Weights  # [rows, 1], min-p removes smaller weights
    top_k: _Ints  # [rows], the vocabulary where there is no limit
    top_p: _Weights  # [rows], 1 where there is no limit

    @classmethod
    def of(cls, logits: _Floats, params: Sequence[SamplingParams]) -> _Rows:
        vocab = logits.shape[1]
        one = 2.0 ** (_EXACT_BITS - (vocab - 1).bit_length())
        temperatures = np.array([[p.temperature] for p in params], dtype=np.float32)
        top_k = np.array([p.top_k if p.top_k > 0 else vocab for p in params], dtype=np.int64)
        return cls(
            logits=logits,
            peaks=logits.max(axis=1, keepdims=True),
            temperatures=np.maximum(temperatures, _SMALLEST_TEMPERATURE),
            one=one,
            least=np.array([[p.min_p * one] for p in params]),
            top_k=np.minimum(top_k, vocab),
            top_p=np.array([p.top_p for p in params]),
        )

    def weights(self, values: _Floats) -> _Weights:
        """Whole numbers from 0 to `one` for logits [rows, any] of these rows; 0 where min-p removes them."""
        scaled = values - self.peaks
        scaled /= self.temperatures
        np.exp(scaled, out=scaled)
        scaled *= np.float32(self.one)
        weights: _Weights = np.rint(scaled, out=scaled).astype(np.float64)
        if self.least.any():
            weights[weights < self.least] = 0.0
        return weights


def _draw_from_all(rows: _Rows, uniforms: NDArray[np.float64]) -> _Ints:
    return _invert_cumulative(rows.weights(rows.logits), uniforms)


def _draw_from_selection(rows: _Rows, uniforms: NDArray[np.float64]) -> _Ints:
    """Draws from the tokens that top-k and then top-p keep. Of equal logits, those with lower ids are kept.

    Top-p keeps the smallest set of most likely tokens that holds at least the share p of what min-p and top-k
    left.
    """
    count, vocab = rows.logits.shape
    every = np.arange(count)
    limited = rows.top_k < vocab
    length = int(rows.top_k[limited].max(initial=0))
    totals = np.zeros(count)
    if not limited.all():
        length = max(length, _FIRST_PREFIX)
        totals = rows.weights(rows.logits).sum(axis=1)
    while True:
        length = min(length, vocab)
        prefix = _largest(rows.logits, length)  # [rows, length], descending
        cumulative = rows.weights(prefix).cumsum(axis=1)
        wanted = rows.top_p * np.where(limited, cumulative[every, np.minimum(rows.top_k, length) - 1], totals)
        if length == vocab or (cumulative[:, -1] >= wanted).all():
            break
        length *= 8  # the share p reaches beyond the prefix
    kept = np.count_nonzero(cumulative < wanted[:, None], axis=1) + 1
    kept = np.minimum(np.where(rows.top_p < 1.0, kept, rows.top_k), np.minimum(rows.top_k, length))
    row, token = _first_tokens(rows.logits, prefix[every, kept - 1], kept)
    column = np.arange(len(row)) - np.searchsorted(row, every)[row]
    ids = np.zeros((count, int(kept.max())), dtype=np.int64)
    ids[row, column] = token
    values = np.full(ids.shape, -np.inf, dtype=np.float32)
    values[row, column] = rows.logits[row, token]
    return ids[every, np.minimum(_invert_cumulative(rows.weights(values), uniforms), ids.shape[1] - 1)]


def _largest(logits: _Floats, count: int) -> _Floats:
    """The `count` largest values of each row, descending: [rows, count]."""
    vocab = logits.shape[1]
    part = logits if count == vocab else np.partition(logits, vocab - count, axis=1)[:, vocab - count :]
    return np.sort(part, axis=1)[:, ::-1]


def _first_tokens(logits: _Floats, thresholds: _Floats, counts: _Ints) -> tuple[_Ints, _Ints]:
    """The counts[i] most likely tokens of each row i, thresholds[i] being the least of their logits.

    Returns row numbers and token ids, [sum of counts] each, both ascending. Rows of NaN have no tokens.
    """
    row, token = np.divmod(np.flatnonzero(logits >= thresholds[:, None]), logits.shape[1])
    if (np.bincount(row, minlength=len(counts)) > counts).any():  # equal logits on both sides of the limit
        tied = logits[row, token] == thresholds[row]
        place = np.lexsort((token, tied, row))  # in each row the tied ones last, in id order
        begins = np.searchsorted(row, np.arange(len(counts)))
        chosen = np.sort(place[np.arange(len(row)) - begins[row] < counts[row]])
        row, token = row[chosen], token[chosen]
    return row, token


def _invert_cumulative(weights: _Weights, uniforms: NDArray[np.float64]) -> _Ints:
    """First column whose cumulative weight exceeds u * total: [rows, columns] weights to [rows] columns."""
    count, columns = weights.shape
    blocks = -(-columns // _DRAW_BLOCK)
    if columns % _DRAW_BLOCK:
        padded = np.zeros((count, blocks * _DRAW_BLOCK))
        padded[:, :columns] = weights
        weights = padded
    weights = weights.reshape(count, blocks, _DRAW_BLOCK)
    row = np.arange(count)
    block_sums = weights.sum(axis=2)
    block_ends = block_sums.cumsum(axis=1)
    targets = np.floor(uniforms * block_ends[:, -1])
    block = np.minimum(np.count_nonzero(block_ends <= targets[:, None], axis=1), blocks - 1)
    targets -= block_ends[row, block] - block_sums[row, block]
    ends = weights[row, block].cumsum(axis=1)
    column: _Ints = block * _DRAW_BLOCK + np.count_nonzero(ends <= targets[:, None], axis=1)
    return column
