"""Tokens while KV blocks run out: requests lose their blocks, are computed again, and answer as if alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.messages import SamplingParams
from tests.conformance.live_cluster import frozen
from tests.conformance.reference import clear_prompt, reference
from tests.conformance.test_right_tokens import BLOCK
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import TIMEOUT_S, GenerationClient
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

TOKENS = 60
PROMPT = 40
BLOCKS = 24  # of a decode server: three whole requests, and five at their start
FLAGS = ("--block-size", str(BLOCK), "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
DECODE_FLAGS = (*FLAGS, "--num-kv-blocks", str(BLOCKS), "--decode-retry-times", "10000",
                "--decode-retry-timeout-ms", "30000")  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 5},
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        1, 1, model=tiny_model("llama"), router=False, prefill_flags=FLAGS, decode_flags=DECODE_FLAGS
    ) as running:
        # One of the two cannot even find in its prefix cache what it lost.
        running.start_decode(["--no-enable-prefix-caching"]).wait_ready()
        running.start_router()
        running.wait_router_ready()
        yield running
        running.assert_clean_ledgers()
        assert running.errors_without_code() == []


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], dict[str, Any], list[int]]]:
    """Sixteen requests: prompt, options and the right tokens."""
    model = reference(tiny_model("llama"))
    found = []
    for number in range(16):
        prompt, options = clear_prompt(model, PROMPT + number, TOKENS), OPTIONS[number % 2]
        answer = model.sampled(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options))
        if not options["temperature"]:
            assert model.greedy(prompt, TOKENS) == answer
        found.append((prompt, options, answer))
    return found


def preemptions(server: ServerProcess) -> float:
    return server.metric("baton_preemptions_total", reason="blocks") or 0.0


def all_are_there(cluster: Cluster) -> bool:
    """Whether either decode server knows its half of the requests, whose choices it counts as one."""
    return [len(server.requests()["open"]) for server in cluster.decode] == [8, 8]


@pytest.mark.parametrize("n", [1, 2], ids=["pd", "colocated"])
def test_tokens_when_requests_are_preempted_then_those_of_a_request_that_is_alone(
    cluster: Cluster, expected: list[tuple[list[int], dict[str, Any], list[int]]], n: int
) -> None:
    before = [preemptions(server) for server in cluster.decode]
    with GenerationClient(cluster.router.grpc) as client:
        # The engines begin when all requests are there, so that each has too many of them however fast they come.
        with frozen(cluster.decode[0]), frozen(cluster.decode[1]):
            opened = [client.open(prompt, TOKENS, n=n, salt=f"n-{n}", **options) for prompt, options, _ in expected]
            wait_for("the requests on both decode servers", lambda: all_are_there(cluster), TIMEOUT_S)
        for generation, (prompt, options, answer) in zip(opened, expected, strict=True):
            first = generation.answers()[0]
            assert first.token_ids == answer, f"prompt of {len(prompt)}, {options}"
            assert (first.path, first.attempts) == ("pd" if n == 1 else "colocated", 1)
    after = [preemptions(server) for server in cluster.decode]
    assert all(late > early for late, early in zip(after, before, strict=True)), f"preemptions {before} to {after}"
    cluster.assert_clean_ledgers()
