"""The access logs of real processes: rotated by SIGHUP while they serve, and written to the end at SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.observed import Observed

CLIENTS = 4
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def logs(observed: Observed) -> Path:
    return observed.logs


@pytest.fixture(scope="module")
def cluster(observed: Observed) -> Cluster:
    return observed.cluster


class Load:
    """Clients that send one request after the other; `ok` has the ids that were answered with 200."""

    def __init__(self, router: ServerProcess, name: str) -> None:
        self.ok: set[str] = set()
        self.other: Counter[str] = Counter()
        self._url = f"http://{router.http}/v1/completions"
        self._name = name
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    def _work(self, number: int) -> None:
        with httpx.Client(timeout=30.0, verify=False) as client:
            for count in range(100_000):
                if self._stop.is_set():
                    return
                name = f"{self._name}-{number}-{count}"
                body = {"prompt": "rotate me", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
                try:
                    answer = client.post(self._url, json=body, headers={"X-Request-Id": name})
                except httpx.HTTPError as error:
                    self.other[type(error).__name__] += 1
                    return
                if answer.status_code == 200:
                    self.ok.add(name)
                else:
                    self.other[str(answer.status_code)] += 1

    def wait(self, count: int) -> None:
        goal = len(self.ok) + count
        wait_for(f"{goal} answers, {self.other} others", lambda: len(self.ok) >= goal, LIMIT_S)


def entries(*files: Path, kind: str = "access") -> list[dict[str, Any]]:
    """Every line must be a whole JSON object, but for one that is being written."""
    lines = [
        json.loads(line)
        for file in files
        if file.exists()
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return [line for line in lines if line["log"] == kind]


def own(lines: list[dict[str, Any]]) -> list[str]:
    """Ids of the requests of the load; the files have earlier ones too."""
    return [line["request_id"] for line in lines if line["request_id"].startswith("hup-")]


def test_sighup_when_files_are_rotated_under_load_then_each_request_has_one_line_and_none_is_lost(
    cluster: Cluster, logs: Path
) -> None:
    processes = {"router": cluster.router, "prefill": cluster.prefill[0], "decode": cluster.decode[0]}
    with Load(cluster.router, "hup") as load:
        for number in range(3):
            load.wait(8)
            for server in cluster.servers:
                os.kill(server.engine_pid, signal.SIGHUP)  # as `kill -HUP` of a whole group does
            for role, process in processes.items():
                wait_for(f"a line in the file of {role}", lambda role=role: own(entries(logs / f"{role}.log")), 10)
                (logs / f"{role}.log").rename(logs / f"{role}.{number}")
                process.signal(signal.SIGHUP)
                wait_for(f"the new file of {role}", (logs / f"{role}.log").exists, 10)
        load.wait(8)
    assert not load.other
    for role in processes:
        files = [logs / f"{role}.{number}" for number in range(3)] + [logs / f"{role}.log"]

        def all_written(files: list[Path] = files) -> bool:
            return len(own(entries(*files))) >= len(load.ok)

        wait_for(f"all lines of {role}", all_written, 10)
        assert Counter(own(entries(*files))) == Counter(load.ok), role
        assert Counter(own(entries(*files, kind="arrival"))) == Counter(load.ok), role
        assert all(own(entries(file)) for file in files), "each file has its share"
    for role, process in processes.items():
        files = [logs / f"{role}.{number}" for number in range(3)] + [logs / f"{role}.log"]

        def all_counted(process: ServerProcess = process, files: list[Path] = files) -> dict[str, Any] | None:
            stats = dict(process.page("/server_info")["access_log"])
            lines = len(entries(*files)) + len(entries(*files, kind="arrival"))
            return stats if stats["enqueued"] == stats["written"] == lines >= 2 * len(load.ok) else None

        stats = wait_for("the count of what was written", all_counted, 10)
        assert (stats["dropped"], stats["write_errors"], stats["worker_restarts"]) == (0, 0, 0)


def test_private_request_when_served_then_no_process_has_a_line_of_it_and_its_failure_has_the_id_only(
    cluster: Cluster, logs: Path
) -> None:
    url = f"http://{cluster.router.http}/v1/completions"
    body = {"prompt": "not to be seen", "max_tokens": 2, "temperature": 0}
    private = {"x-baton-private": "1"}
    with httpx.Client(timeout=30.0, verify=False) as client:
        by_header = {**private, "X-Request-Id": "private-1"}
        assert client.post(url, json=body, headers=by_header).status_code == 200
        by_field = {**body, "private_request": True}
        assert client.post(url, json=by_field, headers={"X-Request-Id": "private-2"}).status_code == 200
        bad = {**body, "temperature": 9, "private_request": True}
        assert client.post(url, json=bad, headers={"X-Request-Id": "private-3"}).status_code == 400
        assert client.post(url, json=body, headers={"X-Request-Id": "after"}).status_code == 200
    for role, server in (("prefill", cluster.prefill[0]), ("decode", cluster.decode[0])):
        server.finished("after")
        path = logs / f"{role}.log"
        wait_for(f"the line of {role}", lambda path=path: '"after","code"' in path.read_text(), 10)
        assert "private-" not in path.read_text()
    router = logs / "router.log"
    wait_for("the router's line", lambda: '"after","code"' in router.read_text(), 10)
    [line] = [json.loads(text) for text in router.read_text().splitlines() if "private-" in text]
    assert line.pop("log_time")
    assert line == {"log": "access", "role": "router", "request_id": "private-3", "code": "INVALID_PARAMS"}


@pytest.mark.invariant("RPC-27")
def test_sigterm_when_it_comes_under_load_then_every_answered_request_is_in_every_log(
    cluster: Cluster, logs: Path
) -> None:
    """The last test: it ends the cluster, the router first."""
    for role in ("router", "prefill", "decode"):
        (logs / f"{role}.log").rename(logs / f"{role}.before")
    for process in (cluster.router, *cluster.servers):
        process.signal(signal.SIGHUP)
    wait_for("new files", lambda: all((logs / f"{r}.log").exists() for r in ("router", "prefill", "decode")), 10)
    with Load(cluster.router, "term") as load:
        load.wait(20)
        began = time.monotonic()
        assert cluster.router.terminate() == 0
        assert time.monotonic() - began < 10
    for server in cluster.servers:
        assert server.terminate() == 0
    for role in ("router", "prefill", "decode"):
        found = Counter(entry["request_id"] for entry in entries(logs / f"{role}.log") if entry["code"] == "NONE_ERROR")
        assert not load.ok - found.keys(), f"{role} lost lines of answered requests"
        assert set(found.values()) == {1}
    # What was refused while draining has its line in the router as well.
    refused = [entry for entry in entries(logs / "router.log") if entry["code"] != "NONE_ERROR"]
    assert {entry["code"] for entry in refused} <= {"SERVER_DRAINING", "CANCELLED"}
    assert all(entry["exception"].startswith(entry["code"]) for entry in refused)
