"""Changes of the logits before a token is chosen: bias, mask of stop tokens, penalties, mask of a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.sampling.row import SamplingRow


def apply_processors(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> None:
    """Applies bias, min-tokens mask, penalties and grammars, in this order, to contiguous `logits` [rows, vocab].

    Changes `logits` in place. Work is proportional to the number of tokens named by the rows, and to the vocabulary
    only for rows with a grammar. Token ids outside the vocabulary have no logit and are passed over.
    """
    _add_bias(logits, rows)
    _mask_stop_tokens(logits, rows)
    _penalize_repetition(logits, rows)
    _penalize_output(logits, rows)
    _mask_by_grammar(logits, rows)


def _add_bias(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> None:
    biased = [(i, row.params.logit_bias) for i, row in enumerate(rows) if row.params.logit_bias]
    if biased:
        at, named = _places([(i, list(bias)) for i, bias in biased], logits.shape[1])
        addends = np.concatenate([np.fromiter(bias.values(), np.float32, len(bias)) for _, bias in biased])
        logits.reshape(-1)[at] += addends[named]


def _mask_stop_tokens(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> None:
    masked = [
        (i, [*row.eos_token_ids, *row.params.stop_token_ids]) for i, row in enumerate(rows) if row.masks_stop_tokens
    ]
    if masked:
        at, _ = _places(masked, logits.shape[1])
        logits.reshape(-1)[at] = -np.inf


def _penalize_repetition(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> None:
    """Divides positive and multiplies negative logits of seen tokens (prompt and output), once per token.

    Formula: Keskar et al., "CTRL", 2019, section 4.1, with the sign rule that later became common.
    """
    penalized = [(i, row) for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if penalized:
        vocab = logits.shape[1]
        at, _ = _places(
            [(i, ids) for i, row in penalized for ids in (row.prompt_token_ids, row.output_token_ids)], vocab
        )
        penalty = np.array([row.params.repetition_penalty for row in rows], dtype=np.float32)[at // vocab]
        flat = logits.reshape(-1)
        seen = flat[at]  # read before written: a token named twice is penalized once
        flat[at] = np.where(seen > 0, seen / penalty, seen * penalty)


def _penalize_output(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> None:
    """Subtracts frequency_penalty * count + presence_penalty from the logits of generated tokens."""
    penalized = [
        (i, row.output_token_ids)
        for i, row in enumerate(rows)
        if row.params.presence_penalty != 0.0 or row.params.frequency_penalty != 0.0
    ]
    if penalized:
        vocab = logits.shape[1]
        at, counts = np.unique(_places(penalized, vocab)[0], return_counts=True)
        frequency = np.array([row.params.frequency_penalty for row in rows], dtype=np.float32)[at // vocab]
        presence = np.array([row.params.presence_penalty for row in rows], dtype=np.float32)[at // vocab]
        logits.reshape(-1)[at] -= frequency * counts.astype(np.float32) + presence


def _mask_by_grammar(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> None:
    vocab = logits.shape[1]
    for i, row in enumerate(rows):
        mask = None if row.grammar is None else row.grammar.mask
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab)
            logits[i, allowed == 0] = -np.inf


def _places(named: Sequence[tuple[int, Sequence[int]]], vocab: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where the logits of (row, token ids) pairs lie in the flattened logits.

    Returns the offsets of the ids that are in the vocabulary, and of all ids whether they are.
    """
    row = np.repeat(np.array([i for i, _ in named], dtype=np.int64), [len(ids) for _, ids in named])
    token = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in named])
    inside = (token >= 0) & (token < vocab)
    return row[inside] * vocab + token[inside], inside
