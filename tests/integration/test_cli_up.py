"""`baton up` as its user sees it: one command, four servers, and nothing left behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.client import StreamedAnswer, get_json, stream_chat
from tests.extent import extent
from tests.integration.cluster import ROOT, process_exists, wait_for
from tests.unit.engine.tiny_models import tiny_model
from tests.unit.router.tokenizer_folders import CHATML

EACH = extent(1, 2)  # servers of a role
START_S = 90.0
STOP_S = 60.0
SERVER_FLAGS = "--dtype float32 --threads 1 --num-kv-blocks 64"


def chat_model(folder: Path) -> Path:
    """The tiny Llama with a chat template."""
    for file in tiny_model("llama").iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "tokenizer_config.json"
    config.unlink(missing_ok=True)
    config.write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|end|>"}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"))


def descendants(pid: int) -> set[int]:
    """Processes that `pid` has started, and theirs."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child} | descendants(child)
    return found


class Up:
    """A running `baton up` on free ports, and what it has printed."""

    def __init__(self, model: Path, *flags: str, server_flags: str = SERVER_FLAGS) -> None:
        command = [sys.executable, "-u", "-m", "cli", "up", "--model", str(model), "--port", "0", "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [*command, f"--server-flags={server_flags}", *flags],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_line(self, pattern: str, limit_s: float = START_S) -> re.Match[str]:
        def probe() -> re.Match[str] | None:
            found = re.search(pattern, self.text)
            if found is None and self.process.poll() is not None:
                self._reader.join(5)
                raise AssertionError(f"baton up ended with {self.process.returncode}:\n{self.text}")
            return found

        try:
            return wait_for(f"line {pattern!r}", probe, limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.text}") from None

    def base_url(self) -> str:
        return self.wait_line(r"serves at (http://\S+)/v1")[1]

    def wait_end(self, limit_s: float = STOP_S) -> int:
        status = self.process.wait(limit_s)
        self._reader.join(5)
        return status

    def close(self) -> None:
        """Whatever is left, ends."""
        left = descendants(self.process.pid) | {self.process.pid}
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        for pid in left:
            if process_exists(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(5)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running(model: Path, *flags: str) -> Iterator[Up]:
    up = Up(model, *flags)
    try:
        yield up
    finally:
        up.close()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prometheus") / "local.json"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(model: Path, targets: Path, logs: Path) -> Iterator[Up]:
    flags = ("--prefill-servers", str(EACH), "--decode-servers", str(EACH), "--prometheus-targets", str(targets))
    with running(model, *flags, "--access-log-dir", str(logs)) as up:
        base_url = up.base_url()
        # The router alone is ready with a decode server that computes prompts, too.
        wait_for("servers that the router finds ready", lambda: states(base_url) == ["ready"] * 2 * EACH, START_S)
        yield up


def states(base_url: str) -> list[str]:
    """Of all servers, as the router finds them."""
    return [worker["state"] for worker in get_json(base_url, "/workers")["workers"]]


def status_of(base_url: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "cli", "status", "--base-url", base_url, "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(ended.stdout))


def all_ready(base_url: str) -> list[str] | None:
    found = [s["address"] for s in status_of(base_url)["servers"] if s["state"] == "ready" and s["ledger"]]
    return found if len(found) == 2 * EACH else None


def two(found: list[str]) -> list[str] | None:
    return found if len(found) == 2 else None


def chat(base_url: str) -> StreamedAnswer:
    answer = StreamedAnswer()
    model = get_json(base_url, "/v1/models")["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
    list(stream_chat(base_url, {**body, "ignore_eos": True}, answer))
    return answer


def none_exist(pids: Sequence[int] | set[int], limit_s: float) -> None:
    wait_for(f"the end of {sorted(pids)}", lambda: not any(process_exists(pid) for pid in pids), limit_s)


def test_up_when_ready_then_a_chat_is_answered_by_a_pair(cluster: Up) -> None:
    answer = chat(cluster.base_url())
    assert answer.finish_reason == "length"
    assert answer.usage["completion_tokens"] == 12
    assert answer.baton["path"] == "pd"
    timeline = answer.baton["timeline"]
    # Its stages of the router are one after the other; the time to the first decoded token is a part of the last two.
    assert (
        0 < timeline["router.first_decode_token"] < timeline["router.first_token"] + timeline["router.stream"] + 0.001
    )


def test_status_when_up_then_every_server_with_balanced_ledgers(cluster: Up) -> None:
    status = status_of(cluster.base_url())
    assert status["router"]["ready"]
    assert [s["role"] for s in status["servers"]] == ["prefill"] * EACH + ["decode"] * EACH
    for server in status["servers"]:
        assert server["state"] == "ready", server["reasons"]
        [ledger] = server["ledger"]
        blocks = ledger["blocks"]
        assert blocks["total"] == 64
        assert blocks["imbalance"] == 0
        assert blocks["total"] == sum(
            blocks[state] for state in ("free", "cached", "running", "staged", "receiving", "quarantined")
        )


def test_prometheus_targets_when_up_then_the_file_has_the_metrics_of_all_processes(cluster: Up, targets: Path) -> None:
    (group,) = json.loads(targets.read_text())
    roles = []
    for address in group["targets"]:
        text = httpx.get(f"http://{address}/metrics", timeout=5).raise_for_status().text
        roles += re.findall(r'^baton_ready\{role="(\w+)"\}', text, re.MULTILINE)
    assert roles == ["prefill"] * EACH + ["decode"] * EACH + ["router"]


def test_access_logs_when_up_gets_sighup_then_every_process_goes_on_in_a_new_file(cluster: Up, logs: Path) -> None:
    base_url = cluster.base_url()
    names = {"router.log", *(f"{role}-{number}.log" for role in ("prefill", "decode") for number in range(EACH))}
    assert {path.name for path in logs.iterdir()} == names
    for path in list(logs.iterdir()):
        path.rename(f"{path}.old")
    chat(base_url)
    cluster.process.send_signal(signal.SIGHUP)
    wait_for("new files", lambda: names <= {path.name for path in logs.iterdir()}, START_S)
    answer = chat(base_url)
    assert answer.baton["path"] == "pd"
    request_id = answer.headers["x-request-id"]

    def written(role: str) -> dict[str, Any] | None:
        """The line of this request; a writer that is a second behind puts lines of earlier ones into its new file."""
        lines = [line for path in logs.glob(f"{role}*.log") for line in path.read_text().splitlines(keepends=True)]
        whole = (json.loads(line) for line in lines if line.endswith("\n"))  # one may be in the writing
        return next((entry for entry in whole if entry["request_id"] == request_id), None)

    for role in ("router", "prefill", "decode"):
        entry = wait_for(f"a line of {role}", lambda role=role: written(role), START_S)
        assert (entry["log"], entry["role"], entry["code"]) == ("access", role, "NONE_ERROR")
    assert cluster.process.poll() is None


def test_up_when_the_folder_of_the_logs_is_missing_then_said_before_anything_starts(model: Path) -> None:
    with running(model, "--access-log-dir", str(model / "nowhere")) as up:
        assert up.wait_end() == 2
        assert "--access-log-dir" in up.text and "no such folder" in up.text


@pytest.mark.extended
def test_up_when_a_server_is_killed_then_it_runs_again_on_its_ports(cluster: Up) -> None:
    base_url = cluster.base_url()
    before = wait_for("every server", lambda: all_ready(base_url), 20, 0.2)
    pid = int(cluster.wait_line(r"decode-1 +ready .* pid (\d+)")[1])
    engines = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    cluster.wait_line(r"decode-1 ended with status -9")
    none_exist(engines, 10)
    assert chat(base_url).usage["completion_tokens"] == 12, "the others serve meanwhile"
    [_, fresh] = wait_for(
        "its new pid", lambda: two(re.findall(r"decode-1 +ready .* pid (\d+)", cluster.text)), START_S
    )
    assert int(fresh) != pid
    after = wait_for("every server", lambda: all_ready(base_url), 20, 0.2)
    assert after == before


def test_up_when_terminated_then_status_zero_and_nothing_is_left(cluster: Up, targets: Path) -> None:
    cluster.base_url()
    started = descendants(cluster.process.pid)
    assert len(started) >= 1 + 4 * EACH, "router, and a front and an engine for each server"
    cluster.process.terminate()
    assert cluster.wait_end() == 0, cluster.text
    none_exist(started, STOP_S)
    assert not targets.exists()


def test_up_when_terminated_while_starting_then_it_stops_at_once_and_leaves_nothing(model: Path) -> None:
    with running(model, "--prefill-servers", "0") as up:
        started = wait_for("a server process", lambda: descendants(up.process.pid) or None, START_S)
        up.process.terminate()
        assert up.wait_end(10) == 128 + signal.SIGTERM, up.text
        assert "serves at" not in up.text
        none_exist(started, STOP_S)


@pytest.mark.extended
def test_up_when_killed_then_its_servers_end_by_themselves(model: Path) -> None:
    with running(model, "--prefill-servers", "0") as up:
        assert chat(up.base_url()).baton["path"] == "colocated"
        started = descendants(up.process.pid)
        assert len(started) >= 3
        up.process.kill()
        up.process.wait(5)
        none_exist(started, 15)


def test_up_when_the_port_is_taken_then_one_line_names_it_before_a_model_is_loaded(model: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        command = [sys.executable, "-m", "cli", "up", "--model", str(model), "--port", port, "--grpc-port", "0"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"--port {port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_up_when_the_folder_of_the_targets_is_missing_then_said_before_anything_starts(model: Path) -> None:
    with running(model, "--prometheus-targets", "/nowhere/at/all.json") as up:
        assert up.wait_end() == 2
        [line] = up.lines
        assert line.startswith("baton up: --prometheus-targets /nowhere/at/all.json: there is no folder /nowhere/at; ")


def test_prometheus_targets_when_written_where_the_docs_say_then_the_folder_is_there() -> None:
    assert (ROOT / "deploy" / "prometheus" / "targets").is_dir()


def test_up_when_a_flag_is_one_of_the_processes_then_said_where_it_goes(model: Path) -> None:
    with running(model, "--kv-lease-seconds", "60") as up:
        assert up.wait_end() == 2
        [line] = up.lines
        assert "--kv-lease-seconds 60" in line and "--server-flags" in line


def test_up_when_a_server_does_not_start_in_time_then_the_flag_is_named(model: Path) -> None:
    with running(model, "--start-timeout", "0.2") as up:
        assert up.wait_end() == 1
        assert "was not ready within 0.2 s" in up.text and "--start-timeout allows more" in up.text


def test_up_when_a_server_flag_is_wrong_then_its_own_words_are_shown(model: Path) -> None:
    with running(model, "--decode-flags=--block-size 0") as up:
        assert up.wait_end() == 1
        assert "decode-0 ended with status 2" in up.text
        assert "--block-size '0'" in up.text


@pytest.mark.slow
@pytest.mark.extended  # what it asks and shows is in tests/conformance/test_demo.py, its launcher that of `baton up`
def test_demo_when_run_then_paris_with_timeline_and_a_clean_end() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "cli.demo"], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Paris" in ended.stdout
    for label in ("queue", "prefill", "reserve", "transfer", "first decode token"):
        assert re.search(rf"^  {label} +\d+\.\d\d ms", ended.stdout, re.MULTILINE), ended.stdout
    assert re.search(r"^  cached tokens +\d+$", ended.stdout, re.MULTILINE)
    assert re.search(r"^  prefill CUDA graph +\w+$", ended.stdout, re.MULTILINE)
