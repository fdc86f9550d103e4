"""The HTTP side of a server, by real requests over loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rpc.errors import BatonError, ErrorCode
from rpc.http_server import EXCEPTION_HANDLERS, HttpServer
from rpc.http_side import SideCallbacks, SideServer
from rpc.metrics import Registry
from tests.unit.rpc.waiting import until


class State:
    reasons: list[str]
    scrapes = 0

    def __init__(self) -> None:
        self.reasons = []

    def scrape(self) -> None:
        self.scrapes += 1


@pytest.fixture
async def state() -> State:
    return State()


@pytest.fixture
async def client(state: State) -> AsyncIterator[httpx.AsyncClient]:
    registry = Registry("decode")
    registry.inc("baton_aborts_total", leg="decode", source="client")

    async def requests() -> list[Any]:
        return [{"request_id": "r"}]

    callbacks = SideCallbacks(
        ready=lambda: state.reasons,
        before_scrape=state.scrape,
        server_info=lambda: {"block_size": 16},
        ledger=lambda: {"ranks": []},
        requests=requests,
    )
    server = SideServer(registry, callbacks)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client
    await server.stop()


async def test_metrics_are_prometheus_text_and_fresh(client: httpx.AsyncClient, state: State) -> None:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'baton_aborts_total{leg="decode",role="decode",source="client"} 1.0' in answer.text
    assert state.scrapes == 1


@pytest.mark.parametrize("path", ["/live", "/liveness"])
async def test_live_whatever_the_readiness(client: httpx.AsyncClient, state: State, path: str) -> None:
    state.reasons = ["draining"]
    answer = await client.get(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/ready", "/readiness"])
async def test_ready_says_why_not(client: httpx.AsyncClient, state: State, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reasons": []})
    state.reasons = ["engine starting"]
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "reasons": ["engine starting"]})


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_has_an_empty_body(client: httpx.AsyncClient, state: State, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.content) == (200, b"")
    state.reasons = ["draining"]
    answer = await client.get(path)
    assert (answer.status_code, answer.content) == (503, b"")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/server_info", {"block_size": 16}),
        ("/debug/ledger", {"ranks": []}),
        ("/debug/requests", [{"request_id": "r"}]),
    ],
)
async def test_insides_are_shown(client: httpx.AsyncClient, path: str, body: object) -> None:
    assert (await client.get(path)).json() == body


async def test_version_is_told(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json()["version"]


async def test_unknown_path_is_40401_in_the_error_form(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/nothing", headers={"X-Request-Id": "r-5"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["baton_code"], error["type"], error["code"]) == (40401, "invalid_request_error", "PATH_NOT_FOUND")
    assert answer.headers["x-baton-error"] == "PATH_NOT_FOUND"
    assert answer.headers["x-request-id"] == "r-5"


async def test_wrong_method_is_40500_and_names_the_right_one(client: httpx.AsyncClient) -> None:
    answer = await client.post("/metrics", headers={"X-Request-Id": "not#valid"})
    assert (answer.status_code, answer.json()["error"]["baton_code"]) == (405, 40500)
    assert "GET" in answer.headers["allow"]
    assert len(answer.headers["x-request-id"]) == 36


async def test_busy_port_ends_the_start_with_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = SideServer(Registry("prefill"), SideCallbacks(ready=list))
        with pytest.raises(SystemExit) as caught:
            await server.start("127.0.0.1", port)
        assert caught.value.code == f"--metrics-port: cannot listen on 127.0.0.1:{port}: the port is in use"


async def fail_typed(request: Request) -> Response:
    raise BatonError(ErrorCode.NO_DECODE_WORKER, "no decode server is ready", retry_after_s=2.2)


async def fail_untyped(request: Request) -> Response:
    raise ZeroDivisionError("internal secret")


async def test_errors_of_handlers_have_the_error_form() -> None:
    routes = [Route("/typed", fail_typed), Route("/untyped", fail_untyped)]
    server = HttpServer(Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS))
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        typed = await client.get("/typed")
        untyped = await client.get("/untyped")
    await server.stop()
    assert (typed.status_code, typed.headers["retry-after"]) == (503, "3")
    assert typed.json()["error"]["baton_code"] == 8403
    assert (untyped.status_code, untyped.json()["error"]["baton_code"]) == (500, 514)
    assert "secret" not in untyped.text
    assert untyped.headers["x-request-id"]


async def test_stop_cuts_what_does_not_end_and_leaves_no_task() -> None:
    async def forever(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"x"
            await asyncio.Event().wait()

        return StreamingResponse(body())

    before = len(asyncio.all_tasks())
    server = HttpServer(Starlette(routes=[Route("/", forever)]))
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(trust_env=False) as client:
        async with client.stream("GET", f"http://127.0.0.1:{port}/") as answer:
            reader = answer.aiter_raw()
            assert await anext(reader) == b"x"
            async with asyncio.timeout(20):
                await server.stop(0.05)
                with pytest.raises(httpx.HTTPError):
                    await anext(reader)
    await server.stop()
    assert not server.running
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_signal_handlers_are_left_alone() -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    server = SideServer(Registry("prefill"), SideCallbacks(ready=list))
    await server.start("127.0.0.1", 0)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    await server.stop()
