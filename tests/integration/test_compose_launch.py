"""The compose files as a user starts them: every service's command in a container of its own, and a client outside."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.reference import clear_prompt, reference
from tests.integration.cluster import process_exists, wait_for
from tests.integration.compose_file import load
from tests.integration.containers import Container, named_volume
from tests.integration.deployment import Deployment
from tests.integration.generation_client import GenerationClient
from tests.integration.virtual_host import ROOT, Host, unavailable
from tests.unit.engine.tiny_models import tiny_model

DEPLOY = ROOT / "deploy"
START_LIMIT_S = 100.0
STOP_LIMIT_S = 20.0
TOKENS = 12
SERVERS = {"prefill-0": 9101, "prefill-1": 9101, "decode-0": 9102, "decode-1": 9102}
HAS_PROMETHEUS = shutil.which("prometheus") is not None and shutil.which("wget") is not None
VARIABLES = {
    "MODEL_NAME": "tiny", "DTYPE": "float32", "PREFILL_THREADS": "1", "DECODE_THREADS": "1",
    "PREFILL_KV_CACHE_MEMORY": "4MiB", "DECODE_KV_CACHE_MEMORY": "4MiB", "SHM_SIZE": "24m", "LOG_LEVEL": "info",
    "DRAIN_GRACE_SECS": "0", "DRAIN_TIMEOUT_SECS": "10", "STOP_GRACE_PERIOD": "15s", "ROUTER_API_KEY": "sk-compose",
}  # fmt: skip

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(bool(unavailable()), reason=f"network namespaces: {unavailable()}"),
]


@functools.cache
def case() -> tuple[list[int], list[int]]:
    """A prompt of two blocks, and what `transformers` answers."""
    model = reference(tiny_model("llama"))
    prompt = clear_prompt(model, 37, TOKENS)
    return prompt, model.greedy(prompt, TOKENS)


@pytest.fixture(scope="module")
def volumes() -> Iterator[Path]:
    """Named volumes: a model folder, and the kernels that were compiled on this machine before, if any."""
    with tempfile.TemporaryDirectory(prefix="baton-volumes-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        named_volume(folder, "models", {"tiny": tiny_model("llama")})
        kept = Path(os.environ.get("BATON_KERNEL_CACHE") or "~/.cache/baton/kernels").expanduser()
        if kept.is_dir():
            named_volume(folder, "cache", {"baton/kernels": kept})
            for place in [folder / "cache", *(folder / "cache").rglob("*")]:
                os.chown(place, 10001, 10001)
        yield folder


class Launched:
    """The whole compose file, started once, and where it is reached."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.http = httpx.Client(
            base_url=f"http://{deployment.outside(8000)}", headers={"Authorization": "Bearer sk-compose"}, timeout=20
        )
        # The servers' pages are published nowhere; the test opens a door of its own.
        self.pages = {
            name: deployment.host.publish(20000 + number, _page_of(deployment[name], port)).address
            for number, (name, port) in enumerate(SERVERS.items())
        }

    def page(self, name: str, path: str) -> Any:
        return httpx.get(f"http://{self.pages[name]}{path}", timeout=10).raise_for_status().json()

    def workers(self) -> dict[str, str]:
        """State by address, as the router sees its servers."""
        workers = self.http.get("/workers").raise_for_status().json()["workers"]
        return {worker["address"]: worker["state"] for worker in workers}

    def ask(self, salt: str = "") -> Any:
        """The case through the published gRPC port; the answer has been compared."""
        prompt, expected = case()
        key = (("authorization", "Bearer sk-compose"),)
        with GenerationClient(self.deployment.outside(8001)) as client:
            call = client.stub.Generate
            client.stub.Generate = lambda request, timeout: call(request, timeout=timeout, metadata=key)
            answer = client.generate(prompt, TOKENS, salt=salt)
        assert answer.token_ids == expected
        return answer

    def dirty(self) -> list[str]:
        """What keeps the servers' ledgers from being clean."""
        found = []
        for name in SERVERS:
            for rank in self.page(name, "/debug/ledger")["ranks"]:
                for group in rank["groups"]:
                    held = {state: group[state] for state in ("running", "staged", "receiving", "quarantined")}
                    if any(held.values()) or group["free"] + group["cached"] != group["total"]:
                        found.append(f"{name}: {group}")
        return found

    def assert_clean(self) -> None:
        wait_for("clean ledgers", lambda: not self.dirty(), 20.0, 0.1)


def _page_of(container: Container, port: int) -> Any:
    return lambda: (container.address, port) if container.state == "running" else None


@pytest.fixture(scope="module")
def launched(volumes: Path) -> Iterator[Launched]:
    project = load([DEPLOY / "docker-compose.yml"], VARIABLES)
    left_out = () if HAS_PROMETHEUS else ("prometheus",)
    with Host() as host, Deployment(project, host, volumes, leave_out=left_out) as deployment:
        deployment.publish()
        deployment.up(START_LIMIT_S)
        found = Launched(deployment)
        # The router alone is healthy with a decode server that computes prompts, too.
        deployment.wait(
            "the router to find all servers", lambda: set(found.workers().values()) == {"ready"}, START_LIMIT_S
        )
        yield found
        found.http.close()


# -- one machine ---------------------------------------------------------------------------------------------------


def test_compose_when_up_then_every_server_answers_a_client_outside_with_the_right_tokens(launched: Launched) -> None:
    assert set(launched.workers().values()) == {"ready"}
    assert set(launched.workers()) == {"prefill-0:50051", "prefill-1:50051", "decode-0:50052", "decode-1:50052"}
    answers = [launched.ask(salt=f"up-{number}") for number in range(4)]
    assert {answer.path for answer in answers} == {"pd"}
    response = launched.http.post("/v1/completions", json={"model": "tiny", "prompt": case()[0], "max_tokens": 4})
    assert response.status_code == 200, response.text
    for name in SERVERS:
        finished = launched.page(name, "/debug/requests")["finished"]
        assert finished, f"{name} had no request"
        assert {entry["code_name"] for entry in finished} == {"NONE_ERROR"}
    launched.assert_clean()
    # Names were looked up, as in Docker, by router and by the decode servers that fetched KV.
    assert set(SERVERS) <= launched.deployment.host.names.asked


def test_compose_when_up_then_the_api_key_of_the_variables_is_asked_for(launched: Launched) -> None:
    address = launched.deployment.outside(8000)
    assert httpx.get(f"http://{address}/v1/models").status_code == 401
    assert launched.http.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_compose_when_up_then_processes_have_no_rights_and_the_limits_of_the_file(launched: Launched) -> None:
    container = launched.deployment["decode-0"]
    commands = container.processes()
    assert any("engine.process" in command for command in commands.values())
    for pid in commands:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert status["Uid"].split() == ["10001"] * 4
        assert status["Gid"].split() == ["10001"] * 4
        assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
        assert status["NoNewPrivs"].strip() == "1"
        limits = Path(f"/proc/{pid}/limits").read_text()
        asked = container.service.ulimits["nofile"][0]
        own = int(next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3])
        host = int(next(
            line for line in Path("/proc/self/limits").read_text().splitlines() if line.startswith("Max open files")
        ).split()[4])  # fmt: skip
        assert own == min(asked, host) or own == asked
    text = container.call("sh", "-c", "hostname; df -B1 --output=size /dev/shm | tail -1; touch /models/x 2>&1; exit 0")
    name, shared, refusal = text.splitlines()
    assert (name, int(shared)) == ("decode-0", 24 << 20)
    assert "Read-only file system" in refusal


def test_compose_when_a_server_is_asked_for_another_role_then_its_health_check_fails(launched: Launched) -> None:
    container = launched.deployment["prefill-1"]
    assert container.call("baton", "health", "prefill") == ""
    wrong = container.run("baton", "health", "decode")
    assert "127.0.0.1:9102/ready: no answer" in wrong.communicate(timeout=20)[0]
    assert wrong.returncode == 1


@pytest.mark.skipif(not HAS_PROMETHEUS, reason="needs prometheus and wget (Debian packages of these names)")
def test_compose_when_up_then_prometheus_scrapes_every_process_and_has_the_rules(launched: Launched) -> None:
    launched.ask(salt="prometheus")
    api = f"http://{launched.deployment.outside(9090)}/api/v1"

    def query(text: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{api}/query", params={"query": text}, timeout=10).raise_for_status()
        return list(answer.json()["data"]["result"])

    def scraped() -> bool:
        return {sample["metric"]["instance"]: sample["value"][1] for sample in query('up{job="baton"}')} == {
            "router:8000": "1",
            **{f"{name}:{port}": "1" for name, port in SERVERS.items()},
        }

    launched.deployment.wait("all processes in Prometheus", scraped, 25)
    launched.deployment.wait("requests in Prometheus", lambda: query("sum(baton_requests_total) > 0"), 15)
    groups = httpx.get(f"{api}/rules", timeout=10).json()["data"]["groups"]
    assert {Path(group["file"]).name for group in groups} == {"rules.yml", "recording.yml", "rtp_llm_names.yml"}
    assert all(rule["health"] in ("ok", "unknown") for group in groups for rule in group["rules"])


def test_compose_when_an_engine_dies_then_the_restarted_server_is_found_at_its_new_address(launched: Launched) -> None:
    deployment = launched.deployment
    container = deployment["decode-1"]
    before = container.address
    [engine] = [pid for pid, command in container.processes().items() if "engine.process" in command]
    os.kill(engine, signal.SIGKILL)
    deployment.wait("its end", lambda: container.state == "exited", 10)
    assert container.status == 1
    launched.ask(salt="away")  # the others serve meanwhile
    deployment.wait("its new start", lambda: container.health == "healthy" and container.starts == 2, START_LIMIT_S)
    assert container.address != before
    deployment.wait("the router to find it", lambda: launched.workers()["decode-1:50052"] == "ready", START_LIMIT_S)
    launched.ask(salt="again-0")
    launched.ask(salt="again-1")
    assert launched.page("decode-1", "/debug/requests")["finished"], "the new one got no request"
    launched.assert_clean()


def test_compose_when_down_then_every_service_ends_well_within_its_grace_and_leaves_nothing(launched: Launched) -> None:
    """The last test of the module: it ends the deployment."""
    inside = [pid for container in launched.deployment.containers.values() if container.state == "running"
              for pid in container.processes()]  # fmt: skip
    assert len(inside) >= 13, "fronts and engines of four servers, the router, and an init of each"
    grace = max(container.service.stop_grace_s for container in launched.deployment.containers.values())
    statuses = launched.deployment.down(grace)
    assert set(statuses.values()) == {0}, launched.deployment.describe()
    assert not [pid for pid in inside if process_exists(pid)]
    logs = {name: container.log() for name, container in launched.deployment.containers.items()}
    for name in ("router", *SERVERS):
        defects = [line for line in logs[name].splitlines() if "Traceback" in line or '"level": "critical"' in line]
        assert not defects, defects


# -- several hosts -------------------------------------------------------------------------------------------------


def test_hosts_when_each_starts_its_profile_then_servers_are_reached_at_their_hosts_addresses(volumes: Path) -> None:
    prompt, expected = case()
    addresses = {"prefill": "198.18.0.11", "decode": "198.18.0.12", "router": "198.18.0.13"}
    files = [DEPLOY / "docker-compose.yml", DEPLOY / "docker-compose.hosts.yml"]
    with Host("198.18.0") as lan:
        hosts = {name: Host(lan=(lan, address)) for name, address in addresses.items()}
        with hosts["prefill"] as a, hosts["decode"] as b, hosts["router"] as c:
            deployments = {}
            for name, host in (("prefill", a), ("decode", b), ("router", c)):
                variables = {**VARIABLES, "HOST_ADDRESS": host.address, "ROUTER_API_KEY": "none"}
                if name == "router":
                    variables |= {"PREFILL_ADDRESSES": f"{addresses['prefill']}:50051"}
                    variables |= {"DECODE_ADDRESSES": f"{addresses['decode']}:50052"}
                project = load(files, variables)
                out = ("prometheus", "grafana")
                deployments[name] = Deployment(project, host, volumes, profiles=(name,), leave_out=out)
            with deployments["prefill"] as p, deployments["decode"] as d, deployments["router"] as r:
                assert set(p.containers) == {"model", "prefill-0"}
                assert set(r.containers) == {"model", "router"}

                def all_healthy() -> bool:
                    p.step()
                    d.step()
                    return all(each.health == "healthy" for each in (p["prefill-0"], d["decode-0"], r["router"]))

                r.wait("the three hosts to be healthy", all_healthy, START_LIMIT_S)
                outside = lan.publish(8001, lambda: (addresses["router"], 8001))
                with GenerationClient(outside.address) as client:
                    answer = client.generate(prompt, TOKENS)
                    assert (answer.token_ids, answer.path) == (expected, "pd")
                    for host in (a, b):  # where the kernel can make a network worse, the tokens stay
                        if _worsened(host):
                            answer = client.generate(prompt, TOKENS, salt="netem")
                            assert (answer.token_ids, answer.path) == (expected, "pd")
                for deployment in (r, d, p):
                    statuses = deployment.down(STOP_LIMIT_S)
                    assert set(statuses.values()) == {0}, deployment.describe()


def _worsened(host: Host) -> bool:
    """5 ms of delay and 100 Mbit/s on the cable of a host, by `tc netem` where the kernel has it."""
    command = ["nsenter", f"--net={host.network}", "tc", "qdisc", "add", "dev", "lan0", "root", "netem",
               "delay", "5ms", "rate", "100mbit"]  # fmt: skip
    return shutil.which("tc") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
