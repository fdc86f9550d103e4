"""Tokens when servers fail on the way: after a retry, after a failed load, after the answer has moved in its middle."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.known_answers import GREEDY, Case, known
from tests.conformance.reference import reference
from tests.conformance.token_servers import HELD, LATE, MIDDLE
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import Answer, GenerationClient
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

TOKENS = 80
OPTIONS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 0.9, "top_p": 0.95, "top_k": 60, "seed": 3},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 4},
    {"temperature": 0.0, "repetition_penalty": 1.3},
)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Greedy and sampled requests, by number: the right tokens of each."""
    model = reference(tiny_model("llama"))
    return [known(model, 20 + 13 * number, TOKENS, OPTIONS[number % len(OPTIONS)]) for number in range(8)]


@pytest.fixture(scope="module")
def cluster(pairs: Cluster) -> Iterator[Cluster]:
    """Two pairs, whose first servers have served nothing before."""
    with pairs.lent(pairs.prefill, pairs.decode[:2]) as running:
        yield running
        running.assert_clean_ledgers()
        assert running.errors_without_code() == [] == pairs.errors_without_code()


def computes(cluster: Cluster, request_id: str) -> bool:
    """Whether a prefill server has the first attempt at the request open, and was not told that it is given up."""
    found = [entry for server in cluster.prefill for entry in server.requests()["open"]]
    return any(
        entry["request_id"] == request_id and entry["attempt"] == 0 and not entry.get("abort_source") for entry in found
    )


def test_tokens_when_attempts_fail_before_the_first_token_then_those_of_transformers_after_a_retry(
    cluster: Cluster, cases: list[Case], holding: Path
) -> None:
    def ask() -> list[Answer]:
        return [
            client.generate(
                case.prompt,
                20,
                salt="retry",
                request_id={0: "begins", 4: "twice", 6: "once"}.get(number),
                **case.options,
            )
            for number, case in enumerate(cases)
        ]

    with GenerationClient(cluster.router.grpc) as client, ThreadPoolExecutor(1) as caller, ExitStack() as files:
        for name in (LATE, HELD):
            (holding / name).touch()
            files.callback((holding / name).unlink, missing_ok=True)
        asked = caller.submit(ask)
        # Neither is held any longer once the router has given up what is to fail meanwhile.
        for role, name in (("decode", LATE), ("prefill", HELD)):
            retries = functools.partial(cluster.router.counted, "baton_retries_total", role=role)
            wait_for(f"a retry of {role}", lambda retries=retries: retries() or asked.done(), 30.0)
            # Before its step ends the server has heard that the attempt was given up, or its answer fails for nobody.
            wait_for("the end of what was given up", lambda: asked.done() or not computes(cluster, "begins"), 30.0)
            (holding / name).unlink()
        answers = asked.result()
    for answer, case in zip(answers, cases, strict=True):
        assert answer.token_ids == case.expected[:20], f"{case.options}, {answer.attempts} attempts"
        assert answer.path == "pd"
    assert max(answer.attempts for answer in answers) > 1
    router, decodes = cluster.router, cluster.decode
    for role in ("prefill", "decode"):
        lines = [line for line in router.metrics().splitlines() if line.startswith("baton_retries_total")]
        assert router.counted("baton_retries_total", role=role, code="EXECUTION_EXCEPTION") == 1, (role, lines)
    # Both failed loads were repeated by the decode server itself, and the one that failed again was computed there.

    def retries() -> float:
        return sum(decode.counted("baton_stage_retries_total", stage="load") for decode in decodes)

    wait_for("two loads that were repeated", lambda: retries() == 2, 10.0)
    records = [record for decode in decodes for record in decode.requests()["finished"] if record["mode"] == "decode"]
    recomputed = [record for record in records if record["code"] == 0 and {"load", "compute"} <= set(record["stages"])]
    assert [record["request_id"] for record in recomputed] == ["twice"]
    assert router.counted("baton_migrations_total", result="ok") == 0
    cluster.assert_clean_ledgers()


def test_tokens_when_the_decode_server_is_killed_in_the_middle_then_those_of_transformers_go_on_elsewhere(
    cluster: Cluster, cases: list[Case], holding: Path
) -> None:
    victim, other = cluster.decode
    with GenerationClient(cluster.router.grpc) as client, ExitStack() as middle:
        (holding / MIDDLE).touch()
        middle.callback((holding / MIDDLE).unlink)
        # Every second one is served by the victim, of disaggregated and of colocated requests alike.
        opened = [
            client.open(case.prompt, TOKENS, request_id=f"slow-{number}", salt="move", **case.options)
            for number, case in enumerate(cases)
        ]
        doubled = [
            client.open(case.prompt, TOKENS, request_id=f"slow-double-{number}", salt="double", n=2, **case.options)
            for number, case in enumerate(cases[:2])
        ]
        for generation in (*opened, *doubled):
            generation.wait_tokens(5)
        victim.kill()
        came = [len(generation.token_ids) for generation in opened]
        middle.close()
        moved = 0
        for generation, case in zip((*opened, *doubled), (*cases, *cases[:2]), strict=True):
            answer = generation.answers()[0]
            assert answer.token_ids == case.expected, f"{case.options}, {answer.attempts} attempts"
            assert answer.finish_reason == "length"
            moved += answer.attempts > 1
    assert max(came) < TOKENS, "no answer was in its middle"
    assert moved >= 4
    assert cluster.router.counted("baton_migrations_total", result="ok") >= 4
    assert cluster.router.counted("baton_migrations_total", result="failed") == 0
    assert not victim.alive
    assert other.alive
    cluster.assert_clean_ledgers()
