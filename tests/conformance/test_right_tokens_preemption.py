"""Tokens while KV blocks run out: requests lose their blocks, are computed again, and answer as if alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.known_answers import GREEDY, PATIENT, Case, known
from tests.conformance.live_cluster import frozen
from tests.conformance.reference import reference
from tests.conformance.test_right_tokens import BLOCK
from tests.extent import extended
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import TIMEOUT_S, GenerationClient
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

TOKENS = 60
PROMPT = 40
BLOCKS = 24  # of a decode server: three whole requests, and five at their start
FLAGS = ("--block-size", str(BLOCK), "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
DECODE_FLAGS = (*FLAGS, *PATIENT, "--num-kv-blocks", str(BLOCKS))
OPTIONS: tuple[dict[str, Any], ...] = (
    GREEDY,
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
def cases() -> list[Case]:
    model = reference(tiny_model("llama"))
    return [known(model, PROMPT + number, TOKENS, OPTIONS[number % 2]) for number in range(16)]


def preemptions(server: ServerProcess) -> float:
    return server.counted("baton_preemptions_total", reason="blocks")


def all_are_there(cluster: Cluster) -> bool:
    """Whether either decode server knows its half of the requests, whose choices it counts as one."""
    return [len(server.requests()["open"]) for server in cluster.decode] == [8, 8]


@pytest.mark.parametrize("n", [pytest.param(1, id="pd"), extended(2, id="colocated")])
def test_tokens_when_requests_are_preempted_then_those_of_a_request_that_is_alone(
    cluster: Cluster, cases: list[Case], n: int
) -> None:
    before = [preemptions(server) for server in cluster.decode]
    with GenerationClient(cluster.router.grpc) as client:
        # The engines begin when all requests are there, so that each has too many of them however fast they come.
        with frozen(cluster.decode[0]), frozen(cluster.decode[1]):
            opened = [client.open(case.prompt, TOKENS, n=n, salt=f"n-{n}", **case.options) for case in cases]
            wait_for("the requests on both decode servers", lambda: all_are_there(cluster), TIMEOUT_S)
        for generation, case in zip(opened, cases, strict=True):
            first = generation.answers()[0]
            assert first.token_ids == case.expected, f"prompt of {len(case.prompt)}, {case.options}"
            assert (first.path, first.attempts) == ("pd" if n == 1 else "colocated", 1)
    after = [preemptions(server) for server in cluster.decode]
    assert all(late > early for late, early in zip(after, before, strict=True)), f"preemptions {before} to {after}"
    cluster.assert_clean_ledgers()
