"""Tokens while KV blocks run out: requests lose their blocks, are computed again, and answer as if alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.conformance.known_answers import COUNT_S, GREEDY, Case, known
from tests.conformance.live_cluster import frozen
from tests.conformance.reference import reference
from tests.conformance.token_servers import small_servers
from tests.extent import extended
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import TIMEOUT_S, GenerationClient
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

TOKENS = 60
PROMPT = 40
EACH = 8  # requests to a decode server, which has room for three of them, and for five at their start
OPTIONS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 5},
)


@pytest.fixture(scope="module")
def cluster(pairs: Cluster) -> Iterator[Cluster]:
    with pairs.lent(pairs.prefill[1:], small_servers(pairs)) as running:
        yield running
        running.assert_clean_ledgers()
        assert running.errors_without_code() == [] == pairs.errors_without_code()


@pytest.fixture(scope="module")
def cases(cluster: Cluster) -> list[Case]:
    model = reference(tiny_model("llama"))
    count = EACH * len(cluster.decode)
    return [known(model, PROMPT + number, TOKENS, OPTIONS[number % 2]) for number in range(count)]


def preemptions(server: ServerProcess) -> float:
    return server.counted("baton_preemptions_total", reason="blocks")


def all_are_there(cluster: Cluster) -> bool:
    """Whether each decode server knows its part of the requests, whose choices it counts as one."""
    return [len(server.requests()["open"]) for server in cluster.decode] == [EACH] * len(cluster.decode)


@pytest.mark.parametrize("n", [pytest.param(1, id="pd"), extended(2, id="colocated")])
def test_tokens_when_requests_are_preempted_then_those_of_a_request_that_is_alone(
    cluster: Cluster, cases: list[Case], n: int
) -> None:
    before = [preemptions(server) for server in cluster.decode]
    with GenerationClient(cluster.router.grpc) as client:
        # The engines begin when all requests are there, so that each has too many of them however fast they come.
        with ExitStack() as still:
            for server in cluster.decode:
                still.enter_context(frozen(server))
            opened = [client.open(case.prompt, TOKENS, n=n, salt=f"n-{n}", **case.options) for case in cases]
            wait_for("the requests on every decode server", lambda: all_are_there(cluster), TIMEOUT_S)
        for generation, case in zip(opened, cases, strict=True):
            first = generation.answers()[0]
            assert first.token_ids == case.expected, f"prompt of {len(case.prompt)}, {case.options}"
            assert (first.path, first.attempts) == ("pd" if n == 1 else "colocated", 1)
    for server, early in zip(cluster.decode, before, strict=True):  # told after the tokens
        wait_for(f"preemptions on {server.name}", lambda of=server, early=early: preemptions(of) > early, COUNT_S)
    cluster.assert_clean_ledgers()
