"""Invariants 25, 26 of docs/cuda_graphs.md: router, prefill and decode server tell a client how its prompt was
computed, in every form of answer. `replayed` is reached without a GPU by Triton's interpreter."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import httpx
import pytest

from tests.extent import extended
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import Answer, GenerationClient, assert_same_answer
from tests.unit.engine.tiny_models import VOCAB_SIZE, tiny_model

HEADER = "x-baton-prefill-cuda-graph"
MODEL = "tiny"
PROMPT = [(17 * i + 5) % (VOCAB_SIZE - 2) + 2 for i in range(15)]
TOKENS = 2
GRAPHS = ["--enable-prefill-cuda-graph", "--prefill-cuda-graph-max-requests=2"]
# Interpreted kernels are slow, so that one graph of each kind has to do.
INTERPRETED = [*GRAPHS, "--enable-cuda-graph", "--attention-backend=triton", "--prefill-cuda-graph-capture-config=16"]
INTERPRETED += ["--decode-capture-config=1", "--max-num-seqs=2"]


@dataclass
class Case:
    status: str
    flags: list[str]
    env: dict[str, str]


CASES = [
    extended(Case("not_requested", [], {}), id="not_requested"),
    extended(Case("feature_disabled", GRAPHS, {}), id="feature_disabled"),
    extended(Case("unsupported_backend", [*GRAPHS, "--enable-cuda-graph"], {}), id="unsupported_backend"),
    Case("replayed", [*INTERPRETED, "--prefill-cuda-graph-strict"], {"TRITON_INTERPRET": "1"}),
]


COUNTED = "baton_prefill_cuda_graph_requests_total"


@dataclass
class Running:
    """A cluster, the status of its requests, and what came of the first one: its answer, and how many requests each
    server had counted then."""

    cluster: Cluster
    status: str
    first: Answer
    counted: list[float]


@contextlib.contextmanager
def started(status: str, flags: list[str], env: dict[str, str]) -> Iterator[Running]:
    """A pair whose requests have that status, once the first one is answered."""
    flags = ["--served-model-name", MODEL, "--block-size", "16", "--no-enable-prefix-caching", *flags]
    with Cluster(
        model=tiny_model("llama"), prefill_flags=flags, decode_flags=flags, env=env, start_limit_s=120
    ) as cluster:
        servers = (cluster.prefill[0], cluster.decode[0])

        def counted() -> list[float]:
            return [server.counted(COUNTED, status=status) for server in servers]

        assert counted() == [0, 0]
        with GenerationClient(cluster.router.grpc) as client:
            first = client.generate(PROMPT, TOKENS)
        with contextlib.suppress(TimeoutError):  # what engines count comes once a second at the latest; a test says it
            wait_for("the count of the first request", lambda: counted() == [1, 0], 30.0)
        yield Running(cluster, status, first, counted())
        assert cluster.errors_without_code() == []


@pytest.fixture(scope="module", params=CASES, ids=lambda case: getattr(case, "status", None))
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    case: Case = request.param
    if case.env and find_spec("triton") is None:
        pytest.skip("needs Triton")
    with started(case.status, case.flags, case.env) as running:
        yield running


def body(**changes: object) -> dict[str, object]:
    settings = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**settings, **changes}


def events(text: str) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("choices", [1, extended(2)])
def test_http_when_answered_then_header_and_object_have_the_status(running, choices):
    cluster, status = running.cluster, running.status
    answer = httpx.post(f"http://{cluster.router.http}/v1/completions", json=body(n=choices), timeout=60, verify=False)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == status
    assert answer.json()["baton"]["prefill_cuda_graph_status"] == status
    assert answer.json()["baton"]["path"] == ("pd" if choices == 1 else "colocated")


@pytest.mark.parametrize("choices", [extended(1), 2])
def test_http_when_streamed_then_header_and_last_chunk_have_the_status(running, choices):
    cluster, status = running.cluster, running.status
    url = f"http://{cluster.router.http}/v1/completions"
    with httpx.stream("POST", url, json=body(n=choices, stream=True), timeout=60, verify=False) as answer:
        assert answer.status_code == 200
        assert answer.headers[HEADER] == status  # with the first token
        text = "".join(answer.iter_text())
    chunks = events(text)
    assert chunks[-1]["baton"]["prefill_cuda_graph_status"] == status
    assert not any("baton" in chunk for chunk in chunks[:-1])


def test_grpc_when_answered_then_every_message_of_every_choice_has_the_status(running):
    cluster, status = running.cluster, running.status
    with GenerationClient(cluster.router.grpc) as client:
        disaggregated = running.first
        again = client.generate(PROMPT, TOKENS)
        assert (disaggregated.path, disaggregated.graph_status) == ("pd", status)
        assert_same_answer(again, disaggregated)
        # The first choice draws as the single one does. The second begins when the first has a token: its prompt shares
        # a step with a row that decodes, unless the first has ended by then. Each choice has the status of its own.
        first, second = client.open(PROMPT, TOKENS, n=2).answers()
        assert first.path == second.path == "colocated"
        assert_same_answer(first, disaggregated)
        assert second.graph_status in ({"replayed", "prefix_not_supported"} if status == "replayed" else {status})


def test_metrics_when_prompts_were_computed_then_the_server_that_did_it_counts_each_once(running):
    cluster, status = running.cluster, running.status
    assert running.counted == [1, 0]
    for server in (cluster.prefill[0], cluster.decode[0]):
        init = "captured" if status == "replayed" else status
        assert server.metric("baton_prefill_cuda_graph_init", status=init) == 1
        if status == "replayed":
            assert server.metric("baton_cuda_graphs_captured", kind="generative_prefill") == 1
            assert server.metric("baton_cuda_graph_capture_seconds_count", kind="generative_prefill") == 1
            assert server.metric("baton_cuda_graph_memory_bytes", rank="0") == 0  # of a CPU


def test_records_when_a_request_has_ended_then_both_servers_have_its_status(running):
    cluster, status = running.cluster, running.status
    for server in (cluster.prefill[0], cluster.decode[0]):
        assert server.finished(running.first.request_id)["prefill_cuda_graph_status"] == status


def test_comparison_when_only_the_status_differs_then_it_fails():
    found, expected = Answer("a", graph_status="replayed"), Answer("b", graph_status="not_requested")
    with pytest.raises(AssertionError, match="graph_status"):
        assert_same_answer(found, expected)
