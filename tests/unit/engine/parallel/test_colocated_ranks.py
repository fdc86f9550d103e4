"""An engine of two ranks, as real processes, gives the answers of an engine of one, whatever a request asks for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.client import EngineClient, EngineConfig
from engine.messages import AddRequest, RequestOutput, RunMode, SamplingParams, TokenLogprob
from rpc.grammar import GrammarKind, GrammarSpec
from rpc.input_embeddings import InputEmbedding
from tests.unit.engine.tiny_models import tiny_model

START_S = 90.0
ANSWER_S = 60.0
HIDDEN = 64
ATOL = 1e-4  # of log-probabilities in float32: sums of two parts are rounded in another order


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [5 + (i * 37 + i * i * salt) % 370 for i in range(length)]


def rows_of_embeddings(count: int) -> bytes:
    return np.random.default_rng(7).normal(size=(count, HIDDEN)).astype("<f4").tobytes()


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


GREEDY = {"temperature": 0.0}
# In rounds: a round's requests are open together.
ROUNDS: list[dict[str, Asked]] = [
    {
        "chunked": Asked(prompt_of(150), GREEDY),  # in steps of 64 tokens, beside those that decode
        "short": Asked(prompt_of(5, 1), GREEDY),
        "logprobs": Asked(prompt_of(40, 2), {**GREEDY, "logprobs": 3, "prompt_logprobs": 2}),
        "penalties": Asked(
            prompt_of(20, 3),
            {
                **GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4,
                "logit_bias": {17: 5.0}, "min_tokens": 4,
            },
        ),
        "seeded": Asked(prompt_of(20, 4), {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 1234567}),
        "seeded too": Asked(prompt_of(20, 4), {"temperature": 1.3, "min_p": 0.02, "seed": 99}),
        "grammar": Asked(
            prompt_of(9, 5), {**GREEDY, "ignore_eos": False},
            {"grammar": GrammarSpec(GrammarKind.REGEX, "[a-c]{2,6}(x|yy)")},
        ),
        "embeddings": Asked(
            prompt_of(90, 6), GREEDY, {"input_embeddings": [InputEmbedding(50, rows_of_embeddings(30))]}
        ),
    },
    {"again": Asked(prompt_of(150), GREEDY), "and again": Asked([*prompt_of(128), 9, 8, 7], GREEDY)},  # prefix hits
    # More than the blocks hold: some are preempted and computed again.
    {f"many {n}": Asked(prompt_of(60 + n, 7 + n), {**GREEDY, "max_tokens": 60}) for n in range(7)},
]  # fmt: skip


async def answer(client: EngineClient, key: str, asked: Asked) -> list[RequestOutput]:
    sampling = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **asked.sampling})
    request = AddRequest(
        f"{key}#0.00000001", RunMode.LOCAL, list(asked.prompt), sampling, arrival_ns=time.monotonic_ns(), **asked.more
    )
    async with asyncio.timeout(ANSWER_S):
        return [output async for output in client.submit(request)]


async def answers(
    ranks: int, device: str = "cpu", attention_backend: str = "auto", start_s: float = START_S
) -> dict[str, list[RequestOutput]]:
    config = EngineConfig(
        role="decode", model=str(tiny_model("llama")), dtype="float32", device=device, threads=1, block_size=16,
        num_kv_blocks=44, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, grammars=True,
        attention_backend=attention_backend, tensor_parallel_size=ranks, tp_broadcast_timeout_seconds=30.0,
    )  # fmt: skip
    client = EngineClient(config)
    news = asyncio.Event()
    client.on_step = lambda step: news.set()
    try:
        ready = await client.start(start_s)
        assert [rank.rank for rank in ready.ranks] == list(range(ranks))
        assert [rank.pid for rank in ready.ranks] == client.pids
        assert all(rank.device.startswith(device) for rank in ready.ranks), ready.ranks
        found: dict[str, list[RequestOutput]] = {}
        for each in ROUNDS:
            outputs = await asyncio.gather(*(answer(client, key, asked) for key, asked in each.items()))
            found |= dict(zip(each, outputs, strict=True))
        async with asyncio.timeout(ANSWER_S):
            while not clean(client):
                news.clear()
                await news.wait()
    finally:
        await client.stop(5.0)
    assert client.dead.is_set()
    return found


def clean(client: EngineClient) -> bool:
    [ledger] = client.stats.ledgers  # comes a little after the last token
    return ledger.running == 0 and ledger.free + ledger.cached == ledger.total


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


def logprobs(outputs: list[RequestOutput]) -> list[TokenLogprob]:
    found = [token.logprob for output in outputs for token in output.tokens if token.logprob is not None]
    found += [top for output in outputs for token in output.tokens for top in token.top_logprobs]
    for output in outputs:
        for entry in output.prompt_logprobs or ():
            found += [entry.logprob, *entry.top_logprobs]
    return found


@pytest.mark.extended
async def test_answers_when_the_engine_has_two_ranks_then_they_are_those_of_one() -> None:
    check_answers(await answers(1), await answers(2))


def check_answers(one: dict[str, list[RequestOutput]], two: dict[str, list[RequestOutput]]) -> None:
    """Two ranks say what one says, and the cases are what they are meant to be."""
    for key, expected in one.items():
        last = two[key][-1]
        assert last.error is None, (key, last.error)
        assert tokens(two[key]) == tokens(expected), key
        assert last.finish_reason == expected[-1].finish_reason, key
    wanted, got = logprobs(one["logprobs"]), logprobs(two["logprobs"])
    assert len(wanted) == 24 * 4 + 39 * 3
    assert [(each.token_id, each.rank) for each in got] == [(each.token_id, each.rank) for each in wanted]
    np.testing.assert_allclose([each.logprob for each in got], [each.logprob for each in wanted], atol=ATOL)
    for found in (one, two):
        assert len(set(map(tuple, (tokens(found[key]) for key in ROUNDS[0])))) == len(ROUNDS[0])  # no two alike
        cached = [output.prefill.cached_tokens for output in found["and again"] if output.prefill is not None]
        assert cached == [128]
        assert sum(found[key][-1].preemptions for key in ROUNDS[2]) > 0


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [4])
async def test_answers_when_ranks_share_heads_then_they_are_those_of_one(ranks: int) -> None:
    """More ranks than KV heads: each head is held by two of them."""
    one, four = await answers(1), await answers(ranks)
    assert {key: tokens(outputs) for key, outputs in four.items()} == {
        key: tokens(outputs) for key, outputs in one.items()
    }
