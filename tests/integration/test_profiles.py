"""/start_profile and /stop_profile of a router: what each server's engine does, in a file on its host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefill_server.settings import PrefillSettings
from tests.integration.cluster import Cluster
from tests.unit.engine.tiny_models import tiny_model

BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(
        1, 1, model=tiny_model("llama"), router_flags=("--enable-profiling",),
        prefill_flags=("--enable-profiling", "--profile-dir", str(folder)),  # and the decode server is not to record
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{cluster.router.http}", timeout=60.0) as client:
        yield client


def results(http: httpx.Client, path: str) -> dict[str, dict[str, Any]]:
    """By role, what each server said."""
    answer = http.post(path)
    assert answer.status_code == 200, answer.text
    found = answer.json()["results"]
    assert sorted(result["role"] for result in found) == ["decode", "prefill"]
    return {result["role"]: result for result in found}


@pytest.mark.extended
def test_profile_when_requests_run_meanwhile_then_each_server_tells_of_its_own_and_the_file_has_the_steps(
    cluster: Cluster, http: httpx.Client, folder: Path
) -> None:
    expected = http.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    before = results(http, "/stop_profile")
    assert (before["prefill"]["ok"], before["prefill"]["code"]) == (False, "INVALID_PARAMS")
    assert "/start_profile" in before["prefill"]["message"]
    started = results(http, "/start_profile")
    assert started["prefill"] == {
        "role": "prefill", "address": cluster.prefill[0].grpc, "ok": True, "max_seconds": 60.0,
    }  # fmt: skip
    assert (started["decode"]["ok"], started["decode"]["code"]) == (False, "INVALID_PARAMS")
    assert "--enable-profiling" in started["decode"]["message"]
    again = results(http, "/start_profile")
    assert (again["prefill"]["ok"], again["prefill"]["code"]) == (False, "DUPLICATE_REQUEST")
    answer = http.post("/v1/completions", json={**BODY, "cache_salt": "recorded"})
    assert answer.json()["choices"][0]["text"] == expected
    stopped = results(http, "/stop_profile")["prefill"]
    assert (stopped["ok"], stopped["ended_by_limit"]) == (True, False)
    assert 0 < stopped["seconds"] < 60
    path = Path(stopped["path"])
    assert [path] == list(folder.iterdir())
    assert path.stat().st_size == stopped["size_bytes"]
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)
    assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == expected
    cluster.assert_clean_ledgers()


@pytest.mark.extended
def test_document_when_profiles_may_be_recorded_then_it_has_their_paths(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/start_profile", "/stop_profile"} <= paths.keys()
    assert http.get("/start_profile").status_code == 405


@pytest.mark.extended
def test_server_when_it_dies_while_it_records_then_the_others_results_still_come(
    cluster: Cluster, http: httpx.Client, folder: Path
) -> None:
    assert results(http, "/start_profile")["prefill"]["ok"]
    cluster.prefill[0].kill()
    stopped = results(http, "/stop_profile")
    assert stopped["prefill"]["ok"] is False
    assert stopped["prefill"]["code"] in ("CONNECT_FAILED", "CONNECTION_RESET_BY_PEER")
    assert stopped["decode"]["code"] == "INVALID_PARAMS"
    assert len(list(folder.iterdir())) == 1


def test_start_when_the_folder_cannot_be_used_then_one_line_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--profile-dir", str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as caught:
            PrefillSettings.load(["--model", str(tiny_model("llama")), "--enable-profiling", *flags])
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--profile-dir" in line
