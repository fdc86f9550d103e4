"""`baton status` against pages as a router and its servers give them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from cli.status import main, read_status, render
from tests.unit.bench.sse_server import SseServer, in_thread

LEDGER = {
    "role": "decode",
    "ranks": [
        {
            "rank": 0,
            "running_requests": 2,
            "waiting_requests": 3,
            "loading_requests": 0,
            "groups": [
                {
                    "group": "full",
                    "total": 100,
                    "free": 60,
                    "cached": 30,
                    "running": 7,
                    "staged": 0,
                    "receiving": 3,
                    "quarantined": 0,
                    "reserved": 1,
                    "imbalance": 0,
                }
            ],
        }
    ],
}


def worker(role: str, address: str, http_address: str, **changes: Any) -> dict[str, Any]:
    return {
        "role": role,
        "address": address,
        "state": "ready",
        "reasons": [],
        "breaker": "closed",
        "inflight": 2,
        "load": 3,
        "status": {"running": 1, "waiting": 4, "loading": 5, "uptime_seconds": 3725.0},
        "facts": {"http_address": http_address},
        **changes,
    }


@pytest.fixture
def server() -> Iterator[SseServer]:
    with in_thread(SseServer([], pages={"/debug/ledger": json.dumps(LEDGER).encode()})) as running:
        yield running


@pytest.fixture
def router() -> Iterator[SseServer]:
    pages = {
        "/version": b'{"version": "1.2"}',
        "/ready": b'{"ready": true, "reasons": []}',
        "/v1/models": b'{"data": [{"id": "m"}]}',
        "/load": b'{"inflight": 6, "queued": 1}',
    }
    with in_thread(SseServer([], pages=pages)) as running:
        yield running


def serve_workers(router: SseServer, *workers: dict[str, Any]) -> None:
    router.pages["/workers"] = json.dumps({"workers": list(workers)}).encode()


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_json_when_all_answer_then_router_servers_and_ledgers(
    router: SseServer, server: SseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_workers(router, worker("decode", "127.0.0.1:50052", server.url.removeprefix("http://")))
    assert main(["--base-url", router.url + "/v1/", "--json"]) == 0
    status = shown(capsys)
    expected = {"version": "1.2", "ready": True, "reasons": [], "models": ["m"], "inflight": 6, "queued": 1}
    assert status["router"] == {"url": router.url, **expected}
    [found] = status["servers"]
    assert (found["role"], found["address"], found["state"]) == ("decode", "127.0.0.1:50052", "ready")
    assert (found["inflight"], found["running"], found["waiting"], found["loading"]) == (2, 2, 3, 0), (
        "the server's own figures are fresher"
    )
    [ledger] = found["ledger"]
    assert (ledger["rank"], ledger["group"]) == (0, "full")
    assert ledger["blocks"]["free"] == 60
    assert ledger["blocks"]["receiving"] == 3
    assert found["ledger_error"] == ""


def test_json_when_a_server_does_not_answer_then_the_others_are_shown_and_it_says_why(
    router: SseServer, server: SseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_thread(SseServer([])) as gone:
        dead = gone.url.removeprefix("http://")
    lost = worker("prefill", "h:1", dead, state="unhealthy", reasons=["does not answer"])
    unknown = {"role": "prefill", "address": "h:2", "state": "unhealthy", "reasons": ["not reached yet"], "inflight": 0}
    serve_workers(router, lost, unknown, worker("decode", "h:3", server.url.removeprefix("http://")))
    assert main(["--base-url", router.url, "--json"]) == 0
    first, second, third = shown(capsys)["servers"]
    assert dead in first["ledger_error"]
    assert first["reasons"] == ["does not answer"]
    assert (first["running"], first["waiting"], first["loading"]) == (1, 4, 5), "what the router was told last"
    assert second["ledger_error"]
    assert second["running"] is None
    assert third["ledger"][0]["blocks"]["total"] == 100


async def test_tables_when_rendered_then_every_server_with_load_and_blocks(
    router: SseServer, server: SseServer
) -> None:
    address = server.url.removeprefix("http://")
    serve_workers(
        router,
        worker(
            "prefill", "10.0.0.1:50051", address, state="draining", reasons=["is shutting down"], breaker="half_open"
        ),
        worker("decode", "10.0.0.2:50052", address),
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(await read_status(router.url)))
    lines = console.export_text().splitlines()
    assert any("ready" in line and "in flight 6, queued 1" in line for line in lines)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│ 10.0" in line or "10.0.0" in line]
    assert rows[0] == [
        *("prefill", "10.0.0.1:50051", "draining", "2", "2", "3", "0", "1h02m"),
        "is shutting down; breaker half-open",
    ]
    assert rows[1][:8] == ["decode", "10.0.0.2:50052", "ready", "2", "2", "3", "0", "1h02m"]
    assert rows[2] == ["prefill", "10.0.0.1:50051", "full", "100", "60", "30", "7", "0", "3", "0", "0"]


async def test_tables_when_a_server_has_two_ranks_then_they_are_counted_and_each_has_its_blocks(
    router: SseServer, server: SseServer
) -> None:
    [one] = LEDGER["ranks"]
    page = {**LEDGER, "ranks": [one, {**one, "rank": 1}]}
    with in_thread(SseServer([], pages={"/debug/ledger": json.dumps(page).encode()})) as two:
        serve_workers(
            router,
            worker("prefill", "10.0.0.1:50051", server.url.removeprefix("http://")),
            worker("decode", "10.0.0.2:50052", two.url.removeprefix("http://")),
        )
        console = Console(width=160, record=True, file=io.StringIO())
        console.print(render(await read_status(router.url), console.width))
    lines = [line for line in console.export_text().splitlines() if "10.0.0" in line]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert [row[:5] for row in rows[:2]] == [
        ["prefill", "10.0.0.1:50051", "ready", "1", "2"],
        ["decode", "10.0.0.2:50052", "ready", "2", "2"],
    ]
    assert [row[2] for row in rows[2:]] == ["full", "full rank 0", "full rank 1"]


async def test_tables_when_the_terminal_is_narrow_then_no_figure_is_cut(router: SseServer, server: SseServer) -> None:
    serve_workers(router, worker("prefill", "10.0.0.1:50051", server.url.removeprefix("http://")))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(await read_status(router.url), console.width))
    text = console.export_text()
    rows = [line.split() for line in text.splitlines() if " 10.0.0.1" in line]
    assert rows[0] == ["prefill", "10.0.0.1:50051", "ready", "2", "2", "3", "0", "1h02m"]
    assert rows[1] == ["prefill", "10.0.0.1:50051", "full", "100", "60", "30", "7", "0", "3", "0", "0"]
    assert "…" not in text


def test_status_when_piped_then_the_tables_are_as_wide_as_they_need(
    router: SseServer, server: SseServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    serve_workers(router, worker("prefill", "10.0.0.1:50051", server.url.removeprefix("http://")))
    assert main(["--base-url", router.url]) == 0
    shown = capsys.readouterr().out
    assert "quarantined" in shown and "…" not in shown


async def test_tables_when_no_server_is_registered_then_said(router: SseServer) -> None:
    serve_workers(router)
    router.pages["/ready"] = b'{"ready": false, "reasons": ["no decode server is ready"]}'
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(await read_status(router.url)))
    text = console.export_text()
    assert "not ready" in text
    assert "no decode server is ready" in text
    assert "no server is registered" in text


def test_status_when_no_router_answers_then_one_line_and_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(SseServer([])) as gone:
        url = gone.url
    for more in ([], ["--json"], ["--watch", "1"]):
        assert main(["--base-url", url, *more]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"baton status: no router answers at {url} ")
        assert shown.err.count("\n") == 1


@pytest.mark.parametrize("page", [b"<html>", b"[]", b'{"workers": 3}'])
def test_status_when_the_address_is_no_router_then_one_line_and_status_one(
    router: SseServer, page: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    router.pages["/workers"] = page
    assert main(["--base-url", router.url]) == 1
    error = capsys.readouterr().err
    assert router.url in error
    assert error.count("\n") == 1


def test_status_when_a_page_is_missing_then_the_error_is_shown(
    router: SseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--base-url", router.url]) == 1
    assert "HTTP 404" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_watch_when_not_above_zero_then_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--watch", seconds]) == 2
    assert "--watch" in capsys.readouterr().err
