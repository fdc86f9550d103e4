"""Random rows to sample, with every parameter that a request can have, and the comparison of two samplers' answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from engine.messages import SamplingParams
from engine.sampling import SampledToken, SamplingRow


class FixedMask:
    """What masks a row in place of a grammar's matcher."""

    def __init__(self, allowed: np.ndarray | None) -> None:
        """allowed: bool [vocab]."""
        self.mask = None
        if allowed is not None:
            padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.uint8)
            padded[: len(allowed)] = allowed
            self.mask = np.packbits(padded, bitorder="little").view(np.int32)


def random_row(choice: random.Random, vocab: int, most_logprobs: int = 20) -> SamplingRow:
    """A row of any kind: greedy or drawn, filtered, biased, masked, penalised, with log-probabilities, or plain; some
    with a grammar."""
    index = choice.randrange(9)
    params: dict[str, object] = {"max_tokens": 100, "seed": choice.getrandbits(64)}
    params["temperature"] = choice.choice([0.0, 0.0, 1e-40, 0.4, 0.7, 1.0, 1.0, 2.0])
    params["top_k"] = choice.choice([0, 0, 0, 1, 4, 50, 700, 5000, 10**6])
    params["top_p"] = choice.choice([1.0, 1.0, 0.95, 0.9, 0.3, 0.9999, 1e-9])
    params["min_p"] = choice.choice([0.0, 0.0, 0.0, 0.01, 0.5, 1.0])
    if choice.random() < 0.4:
        params["repetition_penalty"] = choice.choice([1.0, 1.3, 0.7])
        params["presence_penalty"] = choice.choice([0.0, 1.5, -0.3])
        params["frequency_penalty"] = choice.choice([0.0, 0.7, -2.0])
    if choice.random() < 0.3:
        params["logit_bias"] = {choice.randrange(-2, vocab + 3): choice.uniform(-100, 100) for _ in range(3)}
    if choice.random() < 0.3:
        params["min_tokens"] = choice.choice([0, 5, 50])
        everything = choice.random() < 0.2
        params["stop_token_ids"] = tuple(range(vocab)) if everything else (0, choice.randrange(vocab + 2))
    if choice.random() < 0.4:
        params["logprobs"] = choice.choice([0, 1, most_logprobs])
    return SamplingRow(
        SamplingParams(**params),
        index,
        [choice.randrange(vocab) for _ in range(choice.randrange(1, 30))],
        [choice.randrange(-1, vocab + 2) for _ in range(index)],
        [1, vocab + 7],
        random_mask(choice, vocab) if choice.random() < 0.3 else None,  # type: ignore[arg-type]
    )


def random_mask(choice: random.Random, vocab: int) -> FixedMask:
    """A mask of a grammar that allows many tokens, few, one, or none, or that asks for no masking."""
    if choice.random() < 0.1:
        return FixedMask(None)
    share = choice.choice([0.9, 0.1, 0.0])
    allowed = np.random.default_rng(choice.getrandbits(60)).random(vocab) < share
    if choice.random() < 0.9:
        allowed[choice.randrange(vocab)] = True
    return FixedMask(allowed)


def random_logits(choice: random.Random, rows: int, vocab: int) -> torch.Tensor:
    """float32 rows as models make them and as they should not: flat, peaked, full of equals, masked, not finite."""
    generator = torch.Generator().manual_seed(choice.getrandbits(60))
    logits = torch.randn(rows, vocab, generator=generator)
    for row in logits:
        kind = choice.randrange(8)
        row *= choice.choice([0.3, 1.0, 3.0, 8.0])
        if kind == 0:
            row.copy_(row.round())
        elif kind == 1:
            row.copy_(row.bfloat16())
        elif kind == 2:
            row[torch.randperm(vocab, generator=generator)[: vocab // 2]] = -math.inf
        elif kind == 3 and choice.random() < 0.5:
            row[choice.randrange(vocab)] = choice.choice([math.nan, math.inf])
        elif kind == 3 and choice.random() < 0.2:
            row.fill_(-math.inf)
        elif kind >= 5:
            row[torch.randperm(vocab, generator=generator)[:20]] += 10.0
    return logits


def assert_same(got: Sequence[SampledToken], wanted: Sequence[SampledToken], rows: Sequence[SamplingRow]) -> None:
    """Tokens, failures and ranks are equal; log-probabilities too, up to the rounding of a float64 sum."""
    assert len(got) == len(wanted) == len(rows)
    for mine, other, row in zip(got, wanted, rows, strict=True):
        assert mine.token_id == other.token_id, row
        assert (mine.failure is None) == (other.failure is None), row
        if mine.failure is not None and other.failure is not None:
            assert (mine.failure.code, mine.failure.param) == (other.failure.code, other.failure.param), row
            assert mine.failure.metadata == other.failure.metadata, row
        assert (mine.logprob is None) == (other.logprob is None), row
        mine_all = [mine.logprob, *mine.top_logprobs] if mine.logprob else []
        other_all = [other.logprob, *other.top_logprobs] if other.logprob else []
        assert [(p.token_id, p.rank) for p in mine_all] == [(p.token_id, p.rank) for p in other_all], row
        for a, b in zip(mine_all, other_all, strict=True):
            both_nan = math.isnan(a.logprob) and math.isnan(b.logprob)
            assert both_nan or a.logprob == b.logprob or abs(a.logprob - b.logprob) < 1e-9, row
