"""A compose file with one thing wrong does not pass as a right one: the launch test can fail.

Each mistake takes a start of its own, so this runs only when it is asked for: BATON_COMPOSE_MUTATIONS=1. What of it can
be seen without starting anything is in tests/unit/deploy/test_compose_files.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import httpx
import pytest

from rpc.errors import BatonError
from tests.integration.compose_file import ComposeError, parse
from tests.integration.deployment import Deployment
from tests.integration.generation_client import GenerationClient
from tests.integration.test_compose_launch import DEPLOY, HAS_PROMETHEUS, TOKENS, VARIABLES, case, volumes
from tests.integration.virtual_host import Host, unavailable

__all__ = ["volumes"]
LIMIT_S = float(os.environ.get("BATON_COMPOSE_MUTATIONS_LIMIT_S", "30"))
LEFT_OUT = ("prefill-1", "decode-1", *(() if HAS_PROMETHEUS else ("prometheus",)))
MISTAKES = {
    "command of a server": ("command: [decode]", "command: [decoder]"),
    "command of the model": ("command: model prepare", "command: models prepare"),
    "role of a command": ("command: [prefill]", "command: [decode]"),
    "health check of a server": ("test: [CMD, baton, health, decode]", "test: [CMD, baton, health, prefill]"),
    "health check that is no command": ("test: [CMD, baton, health, router]", "test: [CMD, batons, health, router]"),
    "health check of Prometheus": ("9090/-/ready", "9091/-/ready"),
    "published port": ("${ROUTER_PORT:-8000}:8000", "${ROUTER_PORT:-8000}:8010"),
    "published gRPC port": ("${ROUTER_GRPC_PORT:-8001}:8001", "${ROUTER_GRPC_PORT:-8001}:8000"),
    "name of a variable": ("BATON_MODEL: /models", "BATON_MODELS: /models"),
    "listening address": ("BATON_HOST: 0.0.0.0", "BATON_HOST: 127.0.0.1"),
    "advertised address": ("BATON_ADVERTISE_HOST: prefill-0", "BATON_ADVERTISE_HOST: prefill-9"),
    "addresses for the router": ("BATON_PREFILL: prefill-0:50051,prefill-1:50051", "BATON_PREFILL: prefill-0:50061"),
    "place of the model": (":/models:ro\n    - cache", ":/model:ro\n    - cache"),
    "config of Prometheus": ("target: /etc/prometheus/targets/compose.yml", "target: /etc/prometheus/compose.yml"),
    "targets of Prometheus": ("- decode-0:9102", "- decode-0:9101"),
    "rules of Prometheus": ("rules.yml:/etc/prometheus/rules.yml:ro", "rules.yml:/etc/prometheus/rule.yml:ro"),
    "volume of Prometheus": ("- prometheus-data:/prometheus", "- prometheus-data:/prometheus:ro"),
}  # fmt: skip

WRONG = (AssertionError, TimeoutError, RuntimeError, ComposeError, BatonError, grpc.RpcError, httpx.HTTPError)

pytestmark = [
    pytest.mark.timeout(6 * LIMIT_S + 120),
    pytest.mark.skipif("BATON_COMPOSE_MUTATIONS" not in os.environ, reason="takes minutes: BATON_COMPOSE_MUTATIONS=1"),
    pytest.mark.skipif(bool(unavailable()), reason=f"network namespaces: {unavailable()}"),
]


def check(text: str, volumes: Path) -> None:
    """Starts a prefill and a decode server, the router and Prometheus, and uses all of them. Raises what is wrong."""
    prompt, expected = case()
    project = parse([text], DEPLOY, {**VARIABLES, "ROUTER_API_KEY": "none"})
    with Host() as host, Deployment(project, host, volumes, leave_out=LEFT_OUT) as deployment:
        deployment.publish()
        deployment.up(LIMIT_S)
        base = f"http://{deployment.outside(8000)}"
        assert httpx.get(f"{base}/ready", timeout=5).status_code == 200
        with GenerationClient(deployment.outside(8001)) as client:
            answer = client.generate(prompt, TOKENS, timeout_s=15)
        assert (answer.token_ids, answer.path) == (expected, "pd")
        if HAS_PROMETHEUS:
            api = f"http://{deployment.outside(9090)}/api/v1"

            def scraped() -> bool:
                found = httpx.get(f"{api}/query", params={"query": "up == 1"}, timeout=5).json()["data"]["result"]
                names = {sample["metric"]["instance"] for sample in found}
                return names >= {"router:8000", "prefill-0:9101", "decode-0:9102"}

            deployment.wait("all processes in Prometheus", scraped, 15)
        assert set(deployment.down(20).values()) == {0}


def test_compose_when_nothing_is_wrong_then_it_passes(volumes: Path) -> None:
    check((DEPLOY / "docker-compose.yml").read_text(encoding="utf-8"), volumes)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_compose_when_a_mistake_is_in_the_file_then_the_launch_fails(mistake: str, volumes: Path) -> None:
    right, wrong = MISTAKES[mistake]
    text = (DEPLOY / "docker-compose.yml").read_text(encoding="utf-8")
    assert right in text
    with pytest.raises(
        (AssertionError, TimeoutError, RuntimeError, ComposeError, httpx.HTTPError, Exception)
    ) as caught:
        check(text.replace(right, wrong), volumes)
    assert not isinstance(caught.value, NameError | AttributeError | KeyError), caught.value
