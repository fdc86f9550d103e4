"""A router, a prefill and a decode server as real processes, which the conformance tests of one run share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest

from tests.integration.cluster import Cluster, ServerProcess, process_exists
from tests.integration.generation_client import TIMEOUT_S
from tests.standstill import standing_still
from tests.unit.engine.tiny_models import tiny_model

MODEL = "tiny"
API_KEY = "sk-live-cluster-7d1f"
CONTEXT = 512
BLOCK = 16
POOL_BLOCKS = 31  # less than the context needs
POOL_TOKENS = POOL_BLOCKS * BLOCK
MAX_BODY = 1 << 20
PROMPT = "What is the capital of France?"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
KEY_METADATA = (("authorization", f"Bearer {API_KEY}"),)


@dataclass
class Live:
    """The cluster, and clients of each of its services. `http` sends the API key."""

    cluster: Cluster
    http: httpx.Client
    router: grpc.Channel
    prefill: grpc.Channel
    decode: grpc.Channel
    cache_store: grpc.Channel  # of the prefill server
    decode_cache_store: grpc.Channel
    engine_pids: dict[str, int] = field(default_factory=dict)
    expected: str = ""

    @property
    def p(self) -> ServerProcess:
        return self.cluster.prefill[0]

    @property
    def d(self) -> ServerProcess:
        return self.cluster.decode[0]

    @property
    def processes(self) -> list[ServerProcess]:
        return [*self.cluster.servers, self.cluster.router]

    def complete(self, **fields: Any) -> dict[str, Any]:
        """An ordinary completion of PROMPT, greedy and unaffected by others."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
        response = self.http.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def check_serving(self) -> None:
        """The ordinary request gets the answer it got at first, from the same processes, and leaves nothing behind."""
        answer = self.complete()
        assert answer["choices"][0]["text"] == self.expected
        assert answer["usage"]["completion_tokens"] == 12
        assert (answer["baton"]["path"], answer["baton"]["attempts"]) == ("pd", 1)
        for process in self.processes:
            assert process.alive, process.describe()
        for server in self.cluster.servers:
            server.finished(answer["id"].removeprefix("cmpl-"))  # the KV on the prefill server is let go by then
            assert server.engine_pid == self.engine_pids[server.name], f"{server.name} has another engine"
            assert process_exists(server.engine_pid)
        self.cluster.assert_clean_ledgers()

    def defects(self) -> list[str]:
        """Lines of the logs that a bad request must never lead to: errors of the servers themselves."""
        found = []
        for process in self.processes:
            for line in process.log_lines():
                level, code = line.get("level"), str(line.get("code", line.get("code_name", "")))
                raised = "exception" in line and line.get("log") != "access"  # there every failure has one
                if level in ("error", "critical") or code in ("UNKNOWN_ERROR", "514") or raised:
                    found.append(f"{process.name}: {line}")
            if "Traceback" in process.log():
                found.append(f"{process.name}: {process.log(3000)}")
        return found


@contextmanager
def frozen(server: ServerProcess) -> Iterator[None]:
    """The engine of the server does nothing meanwhile; whatever needs it stays open."""
    with standing_still(server.engine_pid):
        yield


def _start() -> Iterator[Live]:
    names = ("--served-model-name", MODEL)
    servers = (*names, "--block-size", str(BLOCK), "--num-kv-blocks", str(POOL_BLOCKS))
    router = (*names, "--api-key", API_KEY, "--max-payload-size", str(MAX_BODY), "--allow-pins")
    with (
        Cluster(
            1, 1, model=tiny_model("llama"),
            prefill_flags=servers,
            # A load that fails is to be seen, not to be made good by computing the prompt anew.
            decode_flags=(*servers, "--kv-load-failure-policy", "fail"),
            router_flags=router,
            # Whom a client leaves has not come to its end by itself before.
            decode_env={"BATON_FAULTS": "engine.step:delay=0.05,request_key=left-*"},
        ) as cluster,
        httpx.Client(
            base_url=f"http://{cluster.router.http}", timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {API_KEY}"}
        ) as http,
        grpc.insecure_channel(cluster.router.grpc) as to_router,
        grpc.insecure_channel(cluster.prefill[0].grpc) as to_prefill,
        grpc.insecure_channel(cluster.decode[0].grpc) as to_decode,
        grpc.insecure_channel(cluster.prefill[0].cache_store[0]) as to_store,
        grpc.insecure_channel(cluster.decode[0].cache_store[0]) as to_decode_store,
    ):  # fmt: skip
        live = Live(cluster, http, to_router, to_prefill, to_decode, to_store, to_decode_store)
        live.engine_pids = {server.name: server.engine_pid for server in cluster.servers}
        live.expected = live.complete()["choices"][0]["text"]
        yield live


_running: list[tuple[Live, Iterator[Live]]] = []


def _stop() -> None:
    while _running:
        _, life = _running.pop()
        for _ in life:
            raise AssertionError("a cluster ends once")


def _needed_later(items: Sequence[pytest.Item], module: str) -> bool:
    """Whether a module after this one uses the cluster too."""
    users = [item for item in items if "live" in getattr(item, "fixturenames", ())]
    return bool(users) and users[-1].nodeid.partition("::")[0] != module


def shared(request: pytest.FixtureRequest) -> Iterator[Live]:
    """The body of a module's fixture `live`: the cluster starts with the first module and ends with the last."""
    if not _running:
        life = _start()
        _running.append((next(life), life))
        request.config.add_cleanup(_stop)  # for a run that is broken off
    yield _running[0][0]
    if not _needed_later(request.session.items, request.node.nodeid):
        _stop()
