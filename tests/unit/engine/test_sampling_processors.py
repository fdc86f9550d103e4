"""Bias, mask and penalties against a slow reference."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling import SamplingRow, sample
from engine.sampling.processors import apply_processors

VOCAB = 211


def slow_processed(logits: list[float], row: SamplingRow) -> list[float]:
    p, values = row.params, [np.float32(x) for x in logits]
    for token, addend in p.logit_bias.items():
        if 0 <= token < len(values):
            values[token] += np.float32(addend)
    if row.token_index < p.min_tokens:
        for token in (*row.eos_token_ids, *p.stop_token_ids):
            values[token] = np.float32("-inf")
    seen = set(row.prompt_token_ids) | set(row.output_token_ids)
    for token in range(len(values)):
        if p.repetition_penalty != 1.0 and token in seen:
            penalty = np.float32(p.repetition_penalty)
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        count = list(row.output_token_ids).count(token)
        if count and (p.frequency_penalty or p.presence_penalty):
            values[token] -= np.float32(p.frequency_penalty) * np.float32(count) + np.float32(p.presence_penalty)
    return [float(value) for value in values]


def random_row(choice: random.Random) -> SamplingRow:
    ids = range(VOCAB)
    params = SamplingParams(
        max_tokens=50,
        temperature=0.0,
        repetition_penalty=choice.choice([1.0, 1.2, 0.8]),
        presence_penalty=choice.choice([0.0, 1.5, -2.0]),
        frequency_penalty=choice.choice([0.0, 0.3, -0.7]),
        logit_bias={t: choice.uniform(-100, 100) for t in choice.sample(ids, choice.choice([0, 5]))},
        min_tokens=choice.choice([0, 10]),
        stop_token_ids=tuple(choice.sample(ids, choice.choice([0, 3]))),
    )
    prompt = choice.choices(ids, k=choice.choice([1, 40]))
    output = choice.choices(range(20), k=choice.choice([0, 30]))
    return SamplingRow(params, choice.choice([0, 9, 10, 30]), prompt, output, choice.sample(ids, 2))


def test_processors_of_mixed_rows_equal_the_slow_reference():
    choice = random.Random(1)
    rows = [random_row(choice) for _ in range(200)]
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    processed = logits.numpy().copy()
    apply_processors(processed, rows)
    expected = np.array([slow_processed(values, row) for values, row in zip(logits.tolist(), rows, strict=True)])
    np.testing.assert_allclose(processed, expected, rtol=1e-6)
    greedy = [sampled.token_id for sampled in sample(logits, rows)]
    assert greedy == processed.argmax(axis=1).tolist()
    assert greedy != logits.argmax(-1).tolist()


@pytest.mark.parametrize(("index", "masked"), [(0, True), (4, True), (5, False), (6, False)])
def test_stop_tokens_before_min_tokens_are_never_chosen(index, masked):
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 8]] = 30.0  # 7 ends the sequence, 8 is a stop token
    params = {"max_tokens": 9, "min_tokens": 5, "stop_token_ids": (8,)}
    greedy = SamplingRow(SamplingParams(temperature=0.0, **params), index, [], [], [7])
    assert (sample(logits, [greedy])[0].token_id in (7, 8)) is not masked
    for seed in range(50):
        drawn = SamplingRow(SamplingParams(seed=seed, **params), index, [], [], [7])
        assert (sample(logits, [drawn])[0].token_id in (7, 8)) is not masked


def test_token_ids_outside_the_vocabulary_are_passed_over():
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(
        max_tokens=5,
        temperature=0.0,
        logit_bias={VOCAB: 50.0, -1: 50.0, 3: 1.0},
        repetition_penalty=2.0,
        presence_penalty=1.0,
        min_tokens=5,
        stop_token_ids=(VOCAB + 7,),
    )
    row = SamplingRow(params, 0, [VOCAB, 10**6], [VOCAB + 1, 4], [2])
    assert sample(logits, [row])[0].token_id == 3


def test_penalties_read_the_output_of_their_own_row_only():
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 1.0
    params = SamplingParams(max_tokens=5, temperature=0.0, presence_penalty=2.0)
    rows = [SamplingRow(params, 1, [], [5], []), SamplingRow(params, 1, [5], [6], [])]
    assert [sampled.token_id for sampled in sample(logits, rows)] == [0, 5]
