"""The launcher with a real router process, which needs no model to be loaded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.launch import Launcher, LaunchError, LaunchStopped
from cli.process import Process
from tests.integration.cluster import free_port, process_exists, wait_for
from tests.standstill import stand_still
from tests.unit.router.tokenizer_folders import byte_level

LIMIT_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> str:
    """What a router reads of a model."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def launcher(model: str, said: list[str]) -> Iterator[Launcher]:
    ports = {"port": free_port(), "grpc_port": free_port()}  # nobody takes them while the router is away
    made = Launcher(model, prefill_servers=0, decode_servers=0, **ports, max_restarts=1, say=said.append)
    yield made
    made.stop(grace_s=0.0)


def pid_of(process: Process) -> int:
    assert process.child is not None
    return process.child.pid


def test_supervise_when_a_process_dies_again_and_again_then_it_is_given_up(launcher: Launcher, said: list[str]) -> None:
    launcher.start()
    router = launcher.router
    first, address = pid_of(router), router.ready["http"]
    statuses: list[int] = []
    supervisor = threading.Thread(target=lambda: statuses.append(launcher.supervise(threading.Event())))
    supervisor.start()
    os.kill(first, signal.SIGKILL)
    wait_for("a second ready line", lambda: sum("ready" in line for line in said) == 2 or None, LIMIT_S)
    assert pid_of(router) != first
    assert router.ready["http"] == address, "clients find it where it was"
    assert httpx.get(f"http://{address}/live", timeout=5).status_code == 200
    os.kill(pid_of(router), signal.SIGKILL)
    supervisor.join(LIMIT_S)
    assert statuses == [1]
    assert "router ended with status -9 (SIGKILL): " in said[-1]
    assert "giving up" in said[-1]


def test_supervise_when_told_to_stop_then_it_returns_and_stop_ends_all_with_status_zero(launcher: Launcher) -> None:
    launcher.start()
    pid = pid_of(launcher.router)
    stop = threading.Event()
    stop.set()
    assert launcher.supervise(stop) == 0
    assert launcher.stop() == [0]
    assert not process_exists(pid)


def test_stop_when_a_process_ignores_signals_then_it_is_killed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.launch.FAST_EXIT_S", 0.2)
    launcher.start()
    stand_still(pid_of(launcher.router))  # a process that hangs
    assert launcher.stop(grace_s=0.1) == [-signal.SIGKILL]


def test_start_when_stopped_meanwhile_then_nothing_is_left(launcher: Launcher) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(LaunchStopped):
        launcher.start(stop)
    assert [process.alive() for process in launcher.processes] == [False]


def test_start_when_a_process_is_too_slow_then_said_and_nothing_is_left(launcher: Launcher) -> None:
    launcher.start_timeout_s = 0.01
    with pytest.raises(LaunchError, match=r"router was not ready within 0\.01 s"):
        launcher.start()
    assert [process.alive() for process in launcher.processes] == [False]


def test_start_when_the_router_would_refuse_its_flags_then_nothing_is_started(launcher: Launcher) -> None:
    launcher.router_flags = ["--policy", "best"]
    with pytest.raises(LaunchError, match=r"router: --policy 'best'"):
        launcher.start()
    assert launcher.processes == []


def test_start_when_a_process_refuses_its_flags_then_its_own_line_is_the_message(launcher: Launcher) -> None:
    # The value of a flag is well-formed, and only the process itself finds out that it cannot do it.
    launcher.router_flags = ["--access-log-path", "/no/such/folder/log"]
    with pytest.raises(LaunchError, match=r"router ended with status \d: .*--access-log-path /no/such/folder/log"):
        launcher.start()


def test_process_when_the_user_stands_beside_a_folder_of_the_same_name_then_it_is_not_taken(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "__main__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    launcher.start()
    assert launcher.router.alive()
