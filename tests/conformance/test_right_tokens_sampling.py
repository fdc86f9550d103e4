"""Sampling, stop rules and log-probabilities through real processes: what one request alone gets, everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from engine.messages import SamplingParams
from tests.conformance.live_cluster import frozen
from tests.conformance.reference import MIN_MARGIN, prompt_of, reference
from tests.conformance.test_right_tokens import BLOCK
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import GenerationClient, request_of
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

TOKENS = 24
# Options of one request each, as the API names them.
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    {"temperature": 0.9, "top_k": 40, "seed": 2**64 - 1},
    {"temperature": 1.3, "min_p": 0.02, "seed": 11},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.3, "seed": 13},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4, "seed": 17},
    {"temperature": 0.7, "logit_bias": {5: 4.0, 6: -100.0, 17: 3.0}, "seed": 19},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "seed": 23},
    {"temperature": 1.0, "seed": 29},
)
PROMPTS = tuple(prompt_of(length, salt=length) for length in (1, 15, 16, 17, 33, 50, 64, 100))


@dataclasses.dataclass
class Sampled:
    """A cluster, and the tokens that each of SAMPLED draws from the logits of `transformers`."""

    cluster: Cluster
    client: GenerationClient
    expected: list[list[int]]


@pytest.fixture(scope="module")
def sampled(pairs: Cluster) -> Iterator[Sampled]:
    model = reference(tiny_model("llama"))
    expected = [
        model.sampled(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options))
        for prompt, options in zip(PROMPTS, SAMPLED, strict=True)
    ]
    with (
        pairs.lent(pairs.prefill[1:], pairs.decode[1:2]) as cluster,
        GenerationClient(cluster.router.grpc) as client,
    ):
        yield Sampled(cluster, client, expected)
        cluster.assert_clean_ledgers()
        assert cluster.errors_without_code() == [] == pairs.errors_without_code()


def test_sampling_when_alone_and_again_with_its_prefix_cached_then_the_same_draws_of_the_reference(
    sampled: Sampled,
) -> None:
    for prompt, options, expected in zip(PROMPTS, SAMPLED, sampled.expected, strict=True):
        for cached in (0, (len(prompt) - 1) // BLOCK * BLOCK):
            answer = sampled.client.generate(prompt, TOKENS, salt="alone", **options)
            assert answer.token_ids == expected, f"{options}, {cached} cached tokens"
            assert (answer.path, answer.cached_tokens) == ("pd", cached)


def test_sampling_when_colocated_then_the_same_draws_and_other_choices_draw_others(sampled: Sampled) -> None:
    for prompt, options, expected in zip(PROMPTS, SAMPLED, sampled.expected, strict=True):
        first, second = sampled.client.open(prompt, TOKENS, salt="colocated", n=2, **options).answers()
        assert first.path == second.path == "colocated"
        assert first.token_ids == expected, f"{options}"
        assert (second.token_ids == expected) == (options["temperature"] == 0.0)


def test_sampling_when_eight_requests_run_at_once_then_each_draws_as_if_alone(sampled: Sampled) -> None:
    decode = sampled.cluster.decode[0]
    with frozen(decode):
        opened = [
            sampled.client.open(prompt, TOKENS, salt="batch", **options)
            for prompt, options in zip(PROMPTS, SAMPLED, strict=True)
        ]
        ids = [generation.request_id for generation in opened]
        wait_for("eight requests on the decode server", lambda: decode.has_open(ids), 10.0)
    for generation, options, expected in zip(opened, SAMPLED, sampled.expected, strict=True):
        assert generation.answer().token_ids == expected, f"{options}"


def test_sampling_when_only_the_seed_differs_then_the_tokens_do_and_a_missing_seed_is_drawn(sampled: Sampled) -> None:
    prompt = PROMPTS[4]
    seen = {
        tuple(sampled.client.generate(prompt, TOKENS, temperature=1.0, seed=seed).token_ids)
        for seed in (1, 2, 3, None, None)
    }
    assert len(seen) == 5


def test_end_when_a_stop_token_comes_then_it_is_the_last_token_on_every_path(sampled: Sampled) -> None:
    prompt = PROMPTS[5]
    whole = reference(tiny_model("llama")).greedy(prompt, TOKENS)
    # A token that does not come earlier: generation ends where it comes.
    for end in (0, max(i for i in range(TOKENS) if whole[i] not in whole[:i])):
        for n, path in ((1, "pd"), (2, "colocated")):
            opened = sampled.client.open(prompt, TOKENS, n=n, salt=f"stop-{end}", stop_token_ids=[whole[end]])
            for answer in opened.answers():
                assert answer.token_ids == whole[: end + 1]
                assert (answer.finish_reason, answer.stop_token_id, answer.path) == ("stop", whole[end], path)
        # Held off until a minimum is reached, it cannot even be chosen.
        held = sampled.client.generate(prompt, TOKENS, stop_token_ids=[whole[end]], min_tokens=end + 4)
        assert whole[end] not in held.token_ids[: end + 4]
        assert len(held.token_ids) >= end + 4


def test_end_when_the_end_of_sequence_is_the_choice_then_generation_stops_there_unless_it_is_ignored(
    sampled: Sampled,
) -> None:
    prompt = PROMPTS[6]
    model = reference(tiny_model("llama"))
    # A bias brings the end-of-sequence token (id 0) within a few draws, with some seed in the middle of the answer.
    for seed in range(50):
        options: dict[str, Any] = {"logit_bias": {0: 4.0}, "temperature": 0.9, "seed": seed}
        whole = model.sampled(prompt, SamplingParams(max_tokens=TOKENS, **options))
        end = whole.index(0) if 0 in whole else 0
        if 2 < end < TOKENS - 2:
            break
    else:
        raise AssertionError("no seed draws the end-of-sequence token")
    answer = sampled.client.generate(prompt, TOKENS, ignore_eos=False, **options)
    assert (answer.token_ids, answer.finish_reason) == (whole[: end + 1], "stop")
    ignoring = sampled.client.generate(prompt, TOKENS, ignore_eos=True, **options)
    assert (ignoring.token_ids, ignoring.finish_reason) == (whole, "length")


@pytest.mark.parametrize("path", ["pd", "colocated"])
def test_logprobs_when_asked_for_then_those_of_transformers_for_prompt_and_answer(sampled: Sampled, path: str) -> None:
    prompt = PROMPTS[7]
    model = reference(tiny_model("llama"))
    whole = model.greedy(prompt, TOKENS)
    assert model.margin(prompt, whole) > MIN_MARGIN
    expected = model.forced(prompt[:1], [*prompt[1:], *whole]).log_softmax(dim=-1)
    options = {"n": 1 if path == "pd" else 2, "salt": f"logprobs-{path}", "logprobs": 5, "prompt_logprobs": 2}
    messages = list(sampled.client.stub.Generate(request_of(prompt, TOKENS, **options), timeout=30))
    tokens = [token for message in messages if message.index == 0 for token in message.tokens]
    assert [token.token_id for token in tokens] == whole
    assert messages[-1].baton.path == path
    for position, token in enumerate(tokens, len(prompt) - 1):
        row = expected[position]
        assert token.logprob.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [top.token_id for top in token.top_logprobs] == row.topk(5).indices.tolist()
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
    of_prompt = [entry for message in messages if message.index == 0 for entry in message.prompt_logprobs]
    assert [entry.position for entry in of_prompt] == list(range(1, len(prompt)))
    for entry in of_prompt:
        row = expected[entry.position - 1]
        assert entry.logprob.token_id == prompt[entry.position]
        assert entry.logprob.logprob == pytest.approx(float(row[entry.logprob.token_id]), abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
