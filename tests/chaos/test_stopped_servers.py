"""Servers that stand still instead of dying (SIGSTOP): found out by their silence, and harmless when they go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from rpc.errors import ErrorCode
from tests.chaos.cases import (
    FLAGS,
    IMPATIENT_ROUTER_FLAGS,
    MODEL,
    TOKENS,
    assert_serves,
    cases,
    lingering,
    wait_busy,
    wait_workers_ready,
)
from tests.conformance.live_cluster import frozen
from tests.extent import extended
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import GenerationClient
from tests.standstill import standing_still
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

# Silence, two checks without an answer, and the search for another server.
LIMIT_S = 8.0


@pytest.fixture(scope="module")
def cluster(crowd: Cluster) -> Iterator[Cluster]:
    """The servers of all, with a router that soon takes a silent one for dead."""
    flags = (*IMPATIENT_ROUTER_FLAGS, "--stream-inactivity-timeout-secs", "2.5")
    with Cluster(0, 0, model=tiny_model(MODEL), router=False, router_flags=flags) as running:
        running.prefill, running.decode = list(crowd.prefill), list(crowd.decode)
        try:
            running.start_router()
            running.wait_router_ready()
            yield running
            assert running.errors_without_code() == [] == crowd.errors_without_code()
        finally:
            running.prefill, running.decode = [], []  # each cluster ends the processes that it has started


@contextmanager
def stopped(server: ServerProcess, parts: str) -> Iterator[float]:
    """The server's `front`, `engine` or `both` stand still within; gives the time of the stop."""
    pids = {"front": [server.pid], "engine": [server.engine_pid], "both": [server.engine_pid, server.pid]}[parts]
    with standing_still(*pids):
        yield time.monotonic()


class HttpStream(threading.Thread):
    """A streamed completion, read on a thread of its own."""

    def __init__(self, cluster: Cluster, prompt: Sequence[int], salt: str) -> None:
        super().__init__()
        self.began = threading.Event()
        self.lines: list[str] = []
        self._url = f"http://{cluster.router.http}/v1/completions"
        self._body = {
            "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "cache_salt": salt,
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        models = httpx.get(self._url.replace("completions", "models"), timeout=30, verify=False).json()
        self._body["model"] = models["data"][0]["id"]
        with httpx.stream("POST", self._url, json=self._body, timeout=60, verify=False) as response:
            for line in response.iter_lines():
                self.lines.append(line)
                self.began.set()


@pytest.mark.parametrize("parts", ["both", extended("engine")])
def test_f1_stop_when_a_decode_server_stands_still_then_its_answers_go_on_elsewhere(
    cluster: Cluster, slow: Path, parts: str
) -> None:
    before = cluster.router.metric("baton_migrations_total", result="ok") or 0.0
    with GenerationClient(cluster.router.grpc) as client, ExitStack() as middle:
        middle.enter_context(lingering(slow))
        streams = [HttpStream(cluster, case.prompt, f"http {parts}") for case in cases()[:2]]
        for stream in streams:
            assert stream.began.wait(30), stream.lines
        opened = [client.open(case.prompt, TOKENS, salt=parts) for case in cases()[:2]]  # one on each server
        for generation in opened:
            generation.wait_tokens(3)
        assert cluster.decode[0].requests()["open"] != []
        with stopped(cluster.decode[0], parts):
            middle.close()
            for generation, case in zip(opened, cases(), strict=False):
                answer = generation.answer()
                assert answer.token_ids == case.expected, f"{answer.attempts} attempts"
            for stream in streams:
                stream.join(30)
                assert stream.lines[-2:] == ["data: [DONE]", ""], stream.lines[-3:]
                assert not any('"error"' in line for line in stream.lines)
            gauge = {"name": "baton_http_inflight_requests", "route": "/v1/completions"}
            wait_for("no open HTTP request", lambda: cluster.router.metric(**gauge) == 0, 20.0)
    assert (cluster.router.metric("baton_migrations_total", result="ok") or 0.0) - before >= 1
    # The one that goes on finds out that nobody waits for it any more.
    wait_workers_ready(cluster)
    cluster.assert_clean_ledgers()
    for number in range(len(cluster.decode)):
        assert_serves(cluster, f"after {parts} {number}")


def test_stop_when_the_only_prefill_server_stands_still_then_a_decode_server_computes_the_prompt(
    cluster: Cluster,
) -> None:
    case = cases()[2]
    with GenerationClient(cluster.router.grpc) as client:
        with frozen(cluster.prefill[0]):
            generation = client.open(case.prompt, 20, salt="prefill")
            wait_busy(cluster.prefill)
            with standing_still(cluster.prefill[0].pid):
                answer = generation.answer()
                assert answer.token_ids == case.expected[:20]
                assert answer.path == "colocated"
    wait_workers_ready(cluster)
    cluster.assert_clean_ledgers()
    assert_serves(cluster, "after prefill")


def test_f1_stop_when_there_is_no_other_decode_server_then_a_typed_error_comes_within_the_limit(
    cluster: Cluster, slow: Path
) -> None:
    case = cases()[3]
    url = f"http://{cluster.router.http}/workers"
    spare = cluster.decode[1].grpc
    httpx.delete(f"{url}/decode/{spare}", timeout=30.0).raise_for_status()
    try:
        with GenerationClient(cluster.router.grpc) as client, lingering(slow):
            generation = client.open(case.prompt, TOKENS, salt="none")
            generation.wait_tokens(3)
            with stopped(cluster.decode[0], "both") as since:
                generation.wait_end(LIMIT_S + 2)
                assert generation.error is not None
                assert generation.error.code in (ErrorCode.NO_DECODE_WORKER, ErrorCode.KEEP_ALIVE_TIMEOUT)
                assert generation.ended_at - since < LIMIT_S
            assert generation.token_ids == case.expected[: len(generation.token_ids)]
    finally:
        httpx.post(url, json={"role": "decode", "address": spare}, timeout=30.0).raise_for_status()
    wait_workers_ready(cluster)
    cluster.assert_clean_ledgers()
    assert_serves(cluster, "after none")


@pytest.mark.extended
def test_ready_when_an_engine_alone_stands_still_then_its_server_is_not_until_it_goes_on() -> None:
    flags = [*FLAGS, "--tp-broadcast-timeout-seconds", "2"]
    with Cluster(0, 1, model=tiny_model(MODEL), decode_flags=flags, router=False) as alone:
        (server,) = alone.decode
        with standing_still(server.engine_pid):
            wait_for("it to be unready", lambda: server.get("/ready").status_code == 503, LIMIT_S)
            assert "said nothing for more than 2 s" in server.get("/ready").text
            assert server.get("/live").status_code == 200
        wait_for("it to be ready again", lambda: server.get("/ready").status_code == 200, LIMIT_S)
