"""The router as a process: start, ready line, weight, drain, second signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import generation_pb2, generation_pb2_grpc
from router.server import RouterServer
from router.settings import RouterSettings
from tests.unit.router.scripted_server import Hold, ScriptedServer, answer
from tests.unit.router.tokenizer_folders import byte_level

PROMPT = [5, 6, 7, 8]


@dataclass
class Running:
    process: asyncio.subprocess.Process
    ready: dict[str, object]
    start_cpu_seconds: float

    @property
    def url(self) -> str:
        return f"http://{self.ready['http']}"

    async def exit_code(self) -> int:
        async with asyncio.timeout(30):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def running_router(tmp_path, *flags: str) -> AsyncIterator[Running]:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-m", "router", "--model", str(tmp_path), "--port", "0", "--grpc-port", "0", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield Running(process, json.loads(line), cpu_seconds(process.pid))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def cpu_seconds(pid: int) -> float:
    """What a process has computed, which does not grow with what else runs on the machine."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def weight(pid: int) -> tuple[int, str]:
    """Resident KiB of a process, and what it has mapped."""
    proc = Path(f"/proc/{pid}")
    status = (proc / "status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return resident, (proc / "maps").read_text()


async def answers(client: httpx.AsyncClient, path: str, status: int) -> None:
    """Waits until `path` has this status."""
    async with asyncio.timeout(30):
        while (await client.get(path)).status_code != status:
            pass  # each request is a round trip through the process


async def until_ready(client: httpx.AsyncClient) -> None:
    await answers(client, "/ready", 200)


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[tuple[ScriptedServer, ScriptedServer]]:
    engines: dict[str, ScriptedServer] = {}
    prefill, decode = ScriptedServer("prefill", engines), ScriptedServer("decode", engines)
    try:
        await prefill.start()
        await decode.start()
        yield prefill, decode
    finally:
        await prefill.stop()
        await decode.stop()


async def test_start_when_no_server_is_there_then_it_is_live_light_and_not_ready(tmp_path):
    async with running_router(tmp_path, "--prefill", "127.0.0.1:1", "--drain-grace-secs", "0") as router:
        assert router.ready["event"] == "ready"
        assert router.ready["role"] == "router"
        assert router.ready["pid"] == router.process.pid
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
            assert (await client.get("/live")).status_code == 200
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert any("no decode server" in reason for reason in ready.json()["reasons"])
            refused = await client.post("/v1/completions", json={"prompt": "hi"})
            assert (refused.status_code, refused.json()["error"]["baton_code"]) == (503, 8403)
            assert refused.headers["retry-after"]
        resident, maps = weight(router.process.pid)
        assert resident < 150 * 1024
        assert "torch" not in maps
        assert 0 < router.start_cpu_seconds < 6  # one or two where nothing else runs
        router.process.send_signal(signal.SIGTERM)
        assert await router.exit_code() == 0


async def test_generate_when_servers_are_added_at_run_time_then_both_apis_serve(tmp_path):
    async with servers() as (prefill, decode), running_router(tmp_path) as router:
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
            for role, server in (("prefill", prefill), ("decode", decode)):
                added = await client.post("/workers", json={"role": role, "address": server.address})
                assert added.status_code == 202
            await until_ready(client)
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200
            assert response.json()["usage"]["completion_tokens"] == 5
            assert response.json()["baton"]["path"] == "pd"
            shown = (await client.get("/workers")).json()["workers"]
            assert {w["state"] for w in shown} == {"ready"}
        async with grpc.aio.insecure_channel(str(router.ready["grpc"])) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=PROMPT))
            tokens = [t.token_id async for m in stub.Generate(request, timeout=10) for t in m.tokens]
            assert tokens == answer(PROMPT, 16)
            health = health_pb2_grpc.HealthStub(channel)
            answer_ = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Generation"), timeout=5)
            assert answer_.status == health_pb2.HealthCheckResponse.SERVING


async def test_sigterm_when_a_stream_is_open_then_it_ends_in_order_and_new_requests_get_8608(tmp_path):
    async with servers() as (prefill, decode):
        flags = ["--prefill", prefill.address, "--decode", decode.address, "--drain-grace-secs", "0"]
        hold = Hold()
        decode.at["token:3"] = hold
        async with (
            running_router(tmp_path, *flags) as router,
            httpx.AsyncClient(base_url=router.url, timeout=30) as client,
        ):
            await until_ready(client)
            body = {"prompt": PROMPT, "max_tokens": 6}
            open_request = asyncio.create_task(client.post("/v1/completions", json=body, timeout=30))
            await hold.wait_reached()
            decode.at.clear()
            router.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                while (refused := await client.post("/v1/completions", json=body)).status_code == 200:
                    pass  # the signal is on its way
            assert refused.json()["error"]["baton_code"] == 8608
            assert refused.headers["retry-after"]
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/live")).status_code == 200
            hold.let_go.set()
            response = await open_request
            assert response.status_code == 200
            assert response.json()["usage"]["completion_tokens"] == 6
            assert await router.exit_code() == 0


@pytest.mark.serial
async def test_second_signal_when_a_stream_is_open_then_it_gets_8608_and_the_exit_is_fast(tmp_path):
    async with servers() as (prefill, decode):
        hold = Hold()
        decode.at["token:3"] = hold
        flags = ["--prefill", prefill.address, "--decode", decode.address, "--drain-grace-secs", "0"]
        async with (
            running_router(tmp_path, *flags) as router,
            httpx.AsyncClient(base_url=router.url, timeout=30) as client,
        ):
            await until_ready(client)
            body = {"prompt": PROMPT, "max_tokens": 6}
            open_request = asyncio.create_task(client.post("/v1/completions", json=body, timeout=30))
            await hold.wait_reached()
            router.process.send_signal(signal.SIGTERM)
            await answers(client, "/ready", 503)
            began = time.monotonic()
            router.process.send_signal(signal.SIGTERM)
            response = await open_request
            assert (response.status_code, response.json()["error"]["baton_code"]) == (503, 8608)
            assert await router.exit_code() == 143
            assert time.monotonic() - began < 2 + 3  # what a busy machine adds; a drain takes as long as it is asked to
        await decode.until(lambda: decode.aborted)
        await decode.until(lambda: not decode.open)


async def test_start_when_the_port_is_taken_then_one_line_names_flag_and_port(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    async with running_router(tmp_path) as router:
        port = str(router.ready["http"]).rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "--model", str(tmp_path), "--port", port, "--grpc-port", "0",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        assert out == b""
        [line] = [text for text in err.decode().splitlines() if not text.startswith("{")]
        assert "--port" in line
        assert port in line


async def test_figures_when_a_channel_is_given_up_or_a_log_line_dropped_then_they_are_counted(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        router = RouterServer(RouterSettings(model=str(tmp_path), decode=[address]))
        try:
            channel = router.pool.get(address)
            async with asyncio.timeout(10):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
            assert router.pool.get(address) is not channel
            labels = {"peer_role": "decode", "state": "transient_failure"}
            assert router.metrics.value("baton_channel_evictions_total", **labels) == 1
        finally:
            await router.pool.close()
        assert router.metrics.value("baton_log_dropped_total") is None
        router.log_dropped()
        assert router.metrics.value("baton_log_dropped_total") == 1
