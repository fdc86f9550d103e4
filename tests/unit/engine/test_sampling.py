"""The choice of a token: distribution, filters, purity."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling import SamplingRow, sample
from engine.sampling.philox import uniforms
from rpc.errors import ErrorCode
from tests.extent import extended, extent


def row_of(index: int = 0, prompt=(), output=(), eos=(), **params) -> SamplingRow:
    params.setdefault("max_tokens", 100)
    return SamplingRow(SamplingParams(**params), index, prompt, output, eos)


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, rows)]


def slow_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probabilities after the filters, token by token: 0 for those removed, not normalised."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [token for token in order if weights[token] >= min_p]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1.0:
        total = math.fsum(weights[token] for token in kept)
        nucleus: list[int] = []
        for token in kept:
            nucleus.append(token)
            if math.fsum(weights[t] for t in nucleus) >= top_p * total:
                break
        kept = nucleus
    return [weights[token] if token in set(kept) else 0.0 for token in range(len(logits))]


def slow_draw(weights: list[float], u: float) -> int:
    target, total = u * math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        total += weight
        if total > target:
            return token
    raise AssertionError("the numbers end below 1")


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    expected = probabilities * counts.sum()
    assert (expected > 5).all()
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def draws(logits: torch.Tensor, count: int, **params) -> np.ndarray:
    """Counts per token of `count` draws from one row of logits, in batches."""
    params.setdefault("seed", 99)
    batch = 1000
    repeated = logits.expand(batch, -1)
    found: list[int] = []
    for begin in range(0, count, batch):
        found += tokens(repeated, [row_of(begin + i, **params) for i in range(batch)])
    return np.bincount(found, minlength=logits.shape[-1])


DRAWS = extent(30_000, 100_000)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_s1_draws_when_unfiltered_follow_the_softmax(temperature):
    logits = logits_of(1, 40, seed=3, spread=1.0)
    counts = draws(logits, DRAWS, temperature=temperature)
    statistic, freedom = chi_square(counts, torch.softmax(logits[0].double() / temperature, 0).numpy())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}]
)
def test_draws_when_filtered_follow_the_renormalised_softmax(filters):
    logits = logits_of(1, 40, seed=4, spread=1.0)
    counts = draws(logits, DRAWS, temperature=0.9, **filters)
    full = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    weights = np.array(slow_kept(logits[0].tolist(), **full))
    kept = weights > 0
    assert kept.sum() > 2
    assert counts[~kept].sum() == 0
    statistic, freedom = chi_square(counts[kept], weights[kept] / weights.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [1, 2, 37, 256, 1000, extended(5001)])
def test_tokens_with_any_filters_equal_those_of_a_slow_reference(vocab):
    choice = random.Random(vocab)
    logits = logits_of(40, vocab, seed=vocab)
    rows = [
        row_of(
            i,
            seed=choice.getrandbits(64),
            temperature=choice.choice([0.3, 1.0, 2.5]),
            top_k=choice.choice([0, 0, 1, 3, 50, 2000, 10**6]),
            top_p=choice.choice([1.0, 1.0, 1e-9, 0.5, 0.95, 0.9999]),
            min_p=choice.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
        )
        for i in range(40)
    ]
    for got, row, values in zip(tokens(logits, rows), rows, logits.tolist(), strict=True):
        p = row.params
        weights = slow_kept(values, p.temperature, p.top_k, p.top_p, p.min_p)
        assert got == slow_draw(weights, uniforms([p.seed], [row.token_index])[0]), p


def test_top_p_when_the_nucleus_exceeds_the_first_sorted_part_still_equals_the_slow_reference():
    vocab = 20_000
    logits = logits_of(3, vocab, seed=8, spread=0.5)  # nearly flat: 0.9 of the mass is in some 15,000 tokens
    rows = [row_of(i, seed=i, top_p=p) for i, p in enumerate((0.2, 0.9, 1.0))]
    got = tokens(logits, rows)
    for token, row, values in zip(got, rows, logits.double(), strict=True):
        ranked = torch.sort(values, descending=True, stable=True)
        mass = torch.softmax(ranked.values, 0).cumsum(0)
        kept = int((mass < row.params.top_p).sum()) + 1
        weights = torch.zeros(vocab, dtype=torch.float64)
        ids = ranked.indices[:kept]
        weights[ids] = torch.softmax(values, 0)[ids]
        assert token == slow_draw(weights.tolist(), uniforms([row.params.seed], [row.token_index])[0])


@pytest.mark.parametrize("limit", [{"top_k": 3}, {"top_p": 0.45}])
def test_filters_when_logits_are_equal_keep_the_lower_ids(limit):
    logits = torch.zeros(1, 10)
    logits[0, 7] = 1.0
    logits[0, 0] = -1.0
    counts = draws(logits, 3000, **limit)
    total = math.e + math.exp(-1) + 8  # top_p 0.45 of it: token 7 and three of the equal ones
    expected = {1, 2, 7} if "top_k" in limit else {7, *range(1, 1 + math.ceil(0.45 * total - math.e))}
    assert set(np.flatnonzero(counts).tolist()) == expected


def test_top_k_of_one_gives_the_greedy_token():
    logits = logits_of(16, 500)
    logits[:, 100] = logits[:, 300] = 50.0
    sampled = tokens(logits, [row_of(i, seed=i, top_k=1, temperature=2.0) for i in range(16)])
    assert sampled == [100] * 16


def test_greedy_when_logits_tie_takes_the_lowest_id():
    logits = torch.zeros(3, 1000)
    logits[1, [900, 17, 18]] = 4.0
    logits[2, 999] = 1e-6
    assert tokens(logits, [row_of(temperature=0.0)] * 3) == [0, 17, 999]


def test_very_low_temperature_gives_the_greedy_token():
    logits = logits_of(8, 3000)
    cold = tokens(logits, [row_of(i, seed=i, temperature=1e-40) for i in range(8)])
    assert cold == logits.argmax(-1).tolist()


def mixed_rows(count: int) -> list[SamplingRow]:
    choice = random.Random(11)
    return [
        row_of(
            choice.randrange(2**33),
            prompt=[choice.randrange(1003) for _ in range(20)],
            output=[choice.randrange(1003) for _ in range(9)],
            eos=[2],
            seed=choice.getrandbits(64),
            temperature=choice.choice([0.0, 0.7, 1.3]),
            top_k=choice.choice([0, 0, 5, 300]),
            top_p=choice.choice([1.0, 0.9, 0.99]),
            min_p=choice.choice([0.0, 0.02]),
            repetition_penalty=choice.choice([1.0, 1.3]),
            frequency_penalty=choice.choice([0.0, 0.4]),
            presence_penalty=choice.choice([0.0, -0.5]),
            logit_bias=choice.choice([{}, {3: 5.0}]),
            logprobs=choice.choice([-1, 0, 4]),
        )
        for _ in range(count)
    ]


def test_s1_a_row_alone_and_in_any_batch_and_order_gives_the_same_bits():
    count, vocab = 64, 1003  # a vocabulary that no vector width divides
    logits, rows = logits_of(count, vocab), mixed_rows(count)
    alone = [sample(logits[i : i + 1].clone(), rows[i : i + 1])[0] for i in range(count)]
    assert sample(logits, rows) == alone
    order = list(range(count))
    random.Random(5).shuffle(order)
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    for size in (3, 10):
        parts = [sample(logits[b : b + size], rows[b : b + size]) for b in range(0, count, size)]
        assert [result for part in parts for result in part] == alone


def test_different_seeds_and_indices_give_different_sequences():
    logits = logits_of(1, 5000, spread=0.1).expand(200, -1)
    by_seed = tokens(logits, [row_of(0, seed=s) for s in range(200)])
    by_index = tokens(logits, [row_of(i, seed=0) for i in range(200)])
    assert len(set(by_seed)) > 180
    assert len(set(by_index)) > 180
    assert tokens(logits, [row_of(i, seed=0) for i in range(200)]) == by_index
    assert sum(a == b for a, b in zip(by_seed, by_index, strict=True)) < 5


def test_s1_sampling_touches_neither_logits_nor_global_random_states():
    logits, rows = logits_of(16, 1003), mixed_rows(16)
    untouched = logits.clone()

    def states() -> tuple:
        _, words, position, *_ = np.random.get_state()
        return torch.get_rng_state().tolist(), words.tolist(), position, random.getstate()

    first, before = sample(logits, rows), states()
    assert sample(logits, rows) == first
    assert states() == before
    torch.rand(5), np.random.rand(5), random.random()
    assert states() != before
    assert sample(logits, rows) == first
    assert torch.equal(logits, untouched)


def test_bfloat16_logits_are_widened():
    logits = logits_of(4, 700).bfloat16()
    rows = [row_of(i, seed=i, top_p=0.8, logprobs=3) for i in range(4)]
    assert sample(logits, rows) == sample(logits.float(), rows)


def test_sample_when_row_counts_differ_says_both():
    with pytest.raises(ValueError, match="3 rows of logits, but 2 rows of parameters"):
        sample(torch.zeros(3, 10), [row_of(), row_of()])


def test_sample_of_no_rows_gives_no_tokens():
    assert sample(torch.zeros(0, 10), []) == []


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 4}, {"temperature": 0.0}, {"logprobs": 2}])
@pytest.mark.parametrize("broken", [slice(None), 0, 299], ids=["all", "first", "last"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_when_one_row_is_not_finite_then_it_fails_and_the_others_are_left_alone(params, broken, value):
    logits = logits_of(3, 300)
    rows = [row_of(i, seed=i, **params) for i in range(3)]
    good = sample(logits, rows)
    logits[1, broken] = value
    found = sample(logits, rows)
    assert [found[0], found[2]] == [good[0], good[2]]
    assert found[1].token_id is None
    assert (found[1].logprob, found[1].top_logprobs) == (None, ())
    assert found[1].failure.code is ErrorCode.EXECUTION_EXCEPTION


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_when_they_mask_the_whole_vocabulary_then_the_row_fails_naming_them(temperature):
    rows = [row_of(temperature=temperature, min_tokens=2, stop_token_ids=tuple(range(10))), row_of(seed=3)]
    masked, free = sample(logits_of(2, 10), rows)
    assert (masked.failure.code, masked.failure.param) == (ErrorCode.INVALID_PARAMS, "min_tokens")
    assert masked.token_id is None
    assert free.failure is None
    assert 0 <= free.token_id < 10
