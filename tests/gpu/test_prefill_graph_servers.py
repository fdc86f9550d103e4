"""Invariant 26 of docs/cuda_graphs.md on a GPU: router, prefill and decode server tell a client that its prompt was
replayed, in every form of answer. The tests are those of tests/integration/test_prefill_graph_status.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

for package in ("httpx", "jinja2", "starlette", "tokenizers", "uvicorn"):
    pytest.importorskip(package, reason=f"servers need the package {package}")

from tests.integration.cluster import wait_for  # noqa: E402
from tests.integration.generation_client import GenerationClient  # noqa: E402
from tests.integration.test_prefill_graph_status import (  # noqa: E402
    GRAPHS,
    PROMPT,
    TOKENS,
    Running,
    started,
    test_grpc_when_answered_then_every_message_of_every_choice_has_the_status,  # noqa: F401 - run here too
    test_http_when_answered_then_header_and_object_have_the_status,  # noqa: F401
    test_http_when_streamed_then_header_and_last_chunk_have_the_status,  # noqa: F401
    test_records_when_a_request_has_ended_then_both_servers_have_its_status,  # noqa: F401
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLAGS = ["--device=cuda", "--attention-backend=triton", "--prefill-cuda-graph-strict", *GRAPHS]
FLAGS += ["--prefill-cuda-graph-capture-config=16", "--max-num-seqs=4"]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with started("replayed", FLAGS, {}) as running:
        yield running


def test_metrics_when_prompts_were_replayed_then_the_prefill_server_counts_each_once(running: Running) -> None:
    cluster, status = running.cluster, running.status
    server, name = cluster.prefill[0], "baton_prefill_cuda_graph_requests_total"
    before = server.metric(name, status=status) or 0.0
    replays = server.metric("baton_prefill_cuda_graph_replays_total", bucket="16") or 0.0
    with GenerationClient(cluster.router.grpc) as client:
        client.generate(PROMPT, TOKENS)
    wait_for("its count", lambda: server.metric(name, status=status) == before + 1, 10.0)  # told after the tokens
    assert server.metric("baton_prefill_cuda_graph_replays_total", bucket="16") == replays + 1
    assert server.metric("baton_prefill_cuda_graph_init", status="captured") == 1
    assert server.metric("baton_cuda_graph_memory_bytes", rank="0") is not None
