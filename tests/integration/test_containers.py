"""The containers of the compose tests are containers, and nothing of them outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.cluster import process_exists, wait_for
from tests.integration.compose_file import parse
from tests.integration.deployment import Deployment
from tests.integration.dockerfile import Image
from tests.integration.virtual_host import ROOT, Host, unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=f"network namespaces: {unavailable()}")

COMPOSE = """
name: alone
services:
  sleeper:
    image: shell:1
    command: [-c, "{script}"]
    restart: {restart}
    init: {init}
"""
ORPHAN = """
import sys
from tests.integration.test_containers import alone
with alone("sleep 60 & sleep 60") as deployment:
    print(deployment.host.holder, deployment["sleeper"].pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def alone(script: str, *, restart: str = '"no"', init: bool = True) -> Iterator[Deployment]:
    """A host with one container that runs a shell script."""
    text = COMPOSE.format(script=script, restart=restart, init=str(init).lower())
    project = parse([text], ROOT, {})
    with (
        Host() as host,
        Deployment(project, host, Path("/nonexistent"), images={"shell": Image(("sh",))}) as deployment,
    ):
        deployment.wait("its start", lambda: deployment["sleeper"].state != "created", 10)
        yield deployment


def test_container_when_it_runs_then_it_sees_its_own_processes_network_and_files_only() -> None:
    with alone("sleep 60") as deployment:
        container = deployment["sleeper"]
        assert container.call("sh", "-c", "cd /proc; echo [0-9]*").split()[:2] == ["1", "2"]
        assert container.call("cat", "/proc/net/route").count("eth0") == 2
        assert "boot" not in container.call("ls", "/").split()
        assert container.call("cat", "/etc/hosts").count(container.address) == 1
        assert container.call("getent", "hosts", "sleeper").split()[0] == container.address
        unknown = container.run("getent", "hosts", "nobody")
        unknown.communicate(timeout=10)
        assert unknown.returncode == 2
        assert deployment.host.names.asked >= {"nobody"}


@pytest.mark.parametrize(("init", "ends"), [(True, True), (False, False)])
def test_container_when_terminated_then_only_an_init_passes_the_signal_on(init: bool, ends: bool) -> None:
    """The kernel keeps signals from the first process of a PID namespace that has no handler for them."""
    with alone("sleep 60; exit 3", init=init) as deployment:
        container = deployment["sleeper"]
        container.signal(signal.SIGTERM)
        if ends:
            deployment.wait("its end", lambda: container.state == "exited", 5)
            assert container.status == 128 + signal.SIGTERM
        else:
            with pytest.raises(TimeoutError):
                deployment.wait("its end", lambda: container.state == "exited", 0.3)


@pytest.mark.parametrize(("restart", "status", "starts"), [('"no"', 1, 1), ("on-failure", 0, 1), ("on-failure", 1, 2)])
def test_container_when_it_ends_then_the_restart_policy_decides(restart: str, status: int, starts: int) -> None:
    with alone(f"exit {status}", restart=restart) as deployment:
        container = deployment["sleeper"]
        deployment.wait("its end", lambda: container.state == "exited" and container.starts == starts, 10)
        assert container.status == status


def test_containers_when_the_test_process_is_killed_then_no_process_and_no_namespace_is_left() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    holder, first = map(int, process.stdout.readline().split())

    def all_there() -> list[int] | None:
        found = [pid for pid in _same_namespace(first) if process_exists(pid)]
        return found if len(found) >= 3 else None

    inside = wait_for("an init and two sleeping processes", all_there, 10.0)
    network = os.stat(f"/proc/{holder}/ns/net").st_ino
    process.kill()
    process.communicate(timeout=10)
    wait_for("the container's end", lambda: not any(map(process_exists, [holder, *inside])), 10.0)
    assert not [each for each in _networks() if each == network]


def _same_namespace(pid: int) -> list[int]:
    own = os.stat(f"/proc/{pid}/ns/pid").st_ino
    return [each for each in _pids() if _inode(each, "pid") == own]


def _networks() -> set[int]:
    return {_inode(pid, "net") for pid in _pids()}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _inode(pid: int, kind: str) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino
    except OSError:
        return 0
