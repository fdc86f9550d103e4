"""Log-probabilities of chosen and of most likely tokens, out of raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages import PromptLogprob, TokenLogprob
from engine.sampling.distribution import SLAB_VALUES


def token_logprobs(
    logits: NDArray[np.float32], token_ids: Sequence[int], counts: Sequence[int]
) -> list[tuple[TokenLogprob, tuple[TokenLogprob, ...]]]:
    """Per row of `logits` [n, vocab] a token's log-probability and those of the counts[i] likeliest tokens.

    Log-probabilities are log_softmax of the logits. Rank 1 is the most likely token; equal logits rank in id
    order.
    """
    found: list[tuple[TokenLogprob, tuple[TokenLogprob, ...]]] = []
    at_once = max(1, SLAB_VALUES // logits.shape[1])
    for begin in range(0, len(logits), at_once):
        slab = slice(begin, begin + at_once)
        ids = np.asarray(token_ids[slab], dtype=np.int64)
        found += _slab_logprobs(logits[slab], ids, counts[slab])
    return found


def _slab_logprobs(
    logits: NDArray[np.float32], ids: NDArray[np.int64], counts: Sequence[int]
) -> list[tuple[TokenLogprob, tuple[TokenLogprob, ...]]]:
    every = np.arange(len(logits))
    peaks = logits.max(axis=1, keepdims=True)
    shifted = logits - peaks
    sums = np.exp(shifted, out=shifted).astype(np.float64).sum(axis=1)
    offsets = peaks[:, 0].astype(np.float64) + np.log(sums)  # log of the sum of exp(logits)
    own = logits[every, ids]
    logprobs = own.astype(np.float64) - offsets
    row, token = np.divmod(np.flatnonzero(logits == own[:, None]), logits.shape[1])
    ranks = 1 + np.bincount(row[token < ids[row]], minlength=len(logits))
    ranks += [np.count_nonzero(likelier) for likelier in logits > own[:, None]]  # by row: axis=1 is slower
    tops = _most_likely(logits, offsets, counts)
    return [
        (TokenLogprob(token_id, logprob, rank), top)
        for token_id, logprob, rank, top in zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), tops, strict=True)
    ]


def _most_likely(
    logits: NDArray[np.float32], offsets: NDArray[np.float64], counts: Sequence[int]
) -> list[tuple[TokenLogprob, ...]]:
    vocab = logits.shape[1]
    wanted = np.clip(np.asarray(counts, dtype=np.int64), 0, vocab)
    most = int(wanted.max(initial=0))
    if most == 0:
        return [()] * len(logits)
    least = np.partition(logits, vocab - most, axis=1)[:, vocab - most]
    # May find more than `most` tokens of a row, when logits are equal.
    row, token = np.divmod(np.flatnonzero(logits >= least[:, None]), vocab)
    values = logits[row, token]
    order = np.lexsort((token, -values, row))
    token, values = token[order], values[order]
    begins = np.searchsorted(row, np.arange(len(logits)))
    tops = []
    for begin, count, offset in zip(begins.tolist(), wanted.tolist(), offsets, strict=True):
        ids = token[begin : begin + count].tolist()
        logprobs = (values[begin : begin + count].astype(np.float64) - offset).tolist()
        tops.append(tuple(map(TokenLogprob, ids, logprobs, range(1, count + 1))))
    return tops


def prompt_logprobs(logits: torch.Tensor, next_ids: Sequence[int], first_position: int, k: int) -> list[PromptLogprob]:
    """Log-probabilities of prompt tokens given the tokens before them.

    logits: [n, vocab], row i computed at position first_position - 1 + i; next_ids[i]: the prompt token that
    follows, which stands at position first_position + i. next_ids may be shorter than n: rows without a next
    token are not looked at. k >= 0: how many of the most likely tokens to add.
    """
    host = logits[: len(next_ids)].detach().to("cpu", torch.float32).contiguous().numpy()
    found = token_logprobs(host, next_ids, [k] * len(next_ids))
    return [PromptLogprob(first_position + i, own, top) for i, (own, top) in enumerate(found)]
