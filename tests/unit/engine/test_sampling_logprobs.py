"""Log-probabilities of sampled and of prompt tokens."""

from __future__ import annotations

import pytest
import torch

from engine.messages import SamplingParams, TokenLogprob
from engine.sampling import SamplingRow, prompt_logprobs, sample

VOCAB = 777


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(6)) * 4


def check(found: TokenLogprob, logits: torch.Tensor) -> None:
    expected = torch.log_softmax(logits.double(), 0)
    assert found.logprob == pytest.approx(expected[found.token_id].item(), abs=1e-6)
    assert found.rank == 1 + int((logits > logits[found.token_id]).sum())


@pytest.mark.parametrize("count", [0, 1, 5, 20, VOCAB, VOCAB + 10])
def test_logprobs_are_those_of_the_raw_logits_whatever_changes_them(count):
    logits = logits_of(6)
    changes = [
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_k": 2},
        {"top_p": 0.1},
        {"temperature": 0.0, "logit_bias": {500: 90.0}},
        {"temperature": 0.0, "presence_penalty": 2.0},
    ]
    rows = [
        SamplingRow(SamplingParams(max_tokens=9, logprobs=count, seed=i, **change), 3, [1], [2, 3], [])
        for i, change in enumerate(changes)
    ]
    for values, sampled in zip(logits, sample(logits, rows), strict=True):
        assert sampled.logprob is not None
        assert sampled.logprob.token_id == sampled.token_id
        check(sampled.logprob, values)
        best = torch.sort(values, descending=True, stable=True).indices[:count].tolist()
        assert [top.token_id for top in sampled.top_logprobs] == best
        assert [top.rank for top in sampled.top_logprobs] == list(range(1, len(best) + 1))
        for top in sampled.top_logprobs:
            check(top, values)
    assert sample(logits, rows)[4].token_id == 500


def test_logprobs_when_only_some_rows_ask_come_for_those_rows():
    logits = logits_of(9)
    rows = [
        SamplingRow(SamplingParams(max_tokens=9, temperature=0.0, logprobs=k), 0, [], [], [])
        for k in (-1, 0, 3, -1, 7, -1, -1, 1, 2)
    ]
    for row, sampled in zip(rows, sample(logits, rows), strict=True):
        assert (sampled.logprob is not None) == (row.params.logprobs >= 0)
        assert len(sampled.top_logprobs) == max(row.params.logprobs, 0)


def test_top_logprobs_when_logits_are_equal_are_in_id_order():
    logits = torch.zeros(1, VOCAB)
    logits[0, 400] = 1.0
    row = SamplingRow(SamplingParams(max_tokens=9, temperature=0.0, logprobs=4, logit_bias={9: 5.0}), 0, [], [], [])
    sampled = sample(logits, [row])[0]
    assert [(top.token_id, top.rank) for top in sampled.top_logprobs] == [(400, 1), (0, 2), (1, 3), (2, 4)]
    assert sampled.logprob is not None
    assert (sampled.logprob.token_id, sampled.logprob.rank) == (9, 11)


@pytest.mark.parametrize("k", [0, 3])
def test_prompt_logprobs_of_a_chunk_name_position_token_and_likeliest(k):
    logits = logits_of(11)
    next_ids = [(37 * i) % VOCAB for i in range(10)]  # the last position has no next token
    found = prompt_logprobs(logits, next_ids, 101, k)
    assert [entry.position for entry in found] == list(range(101, 111))
    assert [entry.logprob.token_id for entry in found] == next_ids
    for values, entry in zip(logits, found, strict=False):
        check(entry.logprob, values)
        assert [top.token_id for top in entry.top_logprobs] == torch.topk(values, k).indices.tolist()


def test_prompt_logprobs_do_not_depend_on_the_chunks():
    logits = logits_of(11)
    ids = list(range(50, 61))
    whole = prompt_logprobs(logits, ids, 1, 2)
    parts = prompt_logprobs(logits[:4], ids[:4], 1, 2) + prompt_logprobs(logits[4:], ids[4:], 5, 2)
    assert whole == parts


def test_prompt_logprobs_without_next_tokens_are_none():
    assert prompt_logprobs(logits_of(1), [], 5, 2) == []
