"""Choice of the next token of every row: a pure function of (logits, seed, token index) and parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.distribution import draw
from engine.sampling.failures import every_token_masked, logits_not_finite
from engine.sampling.logprobs import token_logprobs
from engine.sampling.philox import uniforms
from engine.sampling.processors import apply_processors
from engine.sampling.row import SampledToken, SamplingRow
from rpc.errors import BatonError


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Chooses one token per row.

    logits: [rows, vocab], not changed; float32, or a narrower type that is widened. rows: one per row of
    logits. Order: logit bias, min-tokens mask, penalties, the mask of a grammar, then for greedy rows
    (temperature 0) the largest logit, lowest id on ties, and for the others temperature, min-p, top-k, top-p and one
    draw.
    Log-probabilities are those of the raw logits. A row's result depends only on its own logits and its
    SamplingRow: neither on the batch around it nor on any global random state, which is neither read nor
    advanced.

    A row whose logits hold NaN or an infinite maximum gets EXECUTION_EXCEPTION in place of a token, also where a mask
    covers that; one whose every token is masked gets INVALID_PARAMS: such a row has no likeliest token, and any other
    would be a guess.

    The arithmetic runs on the host in one thread: for a few rows of vocabulary it takes less than waking
    other threads does, and the result does not depend on their number. Logits on another device are copied.

    Raises ValueError when the numbers of rows differ.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"sample: {logits.shape[0]} rows of logits, but {len(rows)} rows of parameters")
    if not rows:
        return []
    raw: NDArray[np.float32] = logits.detach().to("cpu", torch.float32).contiguous().numpy()
    processed = raw
    if any(row.changes_logits for row in rows):
        processed = raw.copy()
        apply_processors(processed, rows)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinite logits concern their own row only
        token_ids = _choose(processed, rows)
        results = [
            SampledToken(token_id) if failure is None else SampledToken(None, failure=failure)
            for token_id, failure in zip(token_ids, _failures(raw, processed, rows, token_ids), strict=True)
        ]
        _add_logprobs(raw, rows, results)
    return results


def _failures(
    raw: NDArray[np.float32], processed: NDArray[np.float32], rows: Sequence[SamplingRow], token_ids: Sequence[int]
) -> list[BatonError | None]:
    """Per row why it has no token. Both argmax and max answer NaN where there is one, so the peak shows it. A mask may
    cover it, so that rows whose logits were changed are looked at unchanged too."""
    peaks = [
        logits[token] if row.greedy else logits.max()
        for logits, row, token in zip(processed, rows, token_ids, strict=True)
    ]
    finite = np.isfinite(peaks)
    if processed is not raw:
        changed = [i for i, row in enumerate(rows) if row.changes_logits]
        finite[changed] &= np.isfinite([raw[i].max() for i in changed])
    if finite.all():
        return [None] * len(rows)
    return [None if usable else _unusable(raw[i], rows[i]) for i, usable in enumerate(finite)]


def _unusable(raw: NDArray[np.float32], row: SamplingRow) -> BatonError:
    return every_token_masked(row) if np.isfinite(raw.max()) else logits_not_finite()


def _choose(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> list[int]:
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return [int(token) for token in logits.argmax(axis=1)]  # the first of equal maxima
    params = [rows[i].params for i in drawn]
    numbers = uniforms([p.seed for p in params], [rows[i].token_index for i in drawn])
    if len(drawn) == len(rows):
        return [int(token) for token in draw(logits, params, numbers)]
    token_ids = np.empty(len(rows), dtype=np.int64)
    greedy = [i for i, row in enumerate(rows) if row.greedy]
    token_ids[greedy] = logits[greedy].argmax(axis=1)
    token_ids[drawn] = draw(logits[drawn], params, numbers)
    return [int(token) for token in token_ids]


def _add_logprobs(raw: NDArray[np.float32], rows: Sequence[SamplingRow], results: Sequence[SampledToken]) -> None:
    asking = [
        (i, token_id)
        for i, (row, result) in enumerate(zip(rows, results, strict=True))
        if row.params.logprobs >= 0 and (token_id := result.token_id) is not None
    ]
    if not asking:
        return
    logits = raw if len(asking) == len(rows) else raw[[i for i, _ in asking]]
    found = token_logprobs(logits, [token for _, token in asking], [rows[i].params.logprobs for i, _ in asking])
    for (i, _), (own, top) in zip(asking, found, strict=True):
        results[i].logprob, results[i].top_logprobs = own, top
