"""Servers that end calls as none of ours does: old ones, other software, damaged details. A real router process answers
its client with a typed code all the same, and with nothing of theirs in the message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import httpx
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from rpc.errors import ErrorCode
from tests.conformance import refusals
from tests.unit.router.scripted_server import RawFailure, ScriptedServer
from tests.unit.router.test_router_process import Running, answers, running_router, until_ready

S, E = grpc.StatusCode, ErrorCode
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 4}
FOREIGN = "boom %s %d at 10.1.2.3:50051 \x1b[31m"


def details(code: str | None, *, domain: str = "baton", message: str = "it failed", reason: str = "X") -> bytes:
    metadata = {} if code is None else {"code": code}
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata))
    return status_pb2.Status(code=13, message=message, details=[packed]).SerializeToString()


@dataclass(frozen=True)
class Case:
    """`payload` in place of details; what the client gets when it comes from a prefill and from a decode server."""

    what: str
    status: grpc.StatusCode
    payload: bytes | None
    prefill: ErrorCode
    decode: ErrorCode


CASES = (
    Case("no details, INTERNAL", S.INTERNAL, None, E.REMOTE_LOAD_KV_CACHE_FAILED, E.REMOTE_LOAD_KV_CACHE_FAILED),
    Case("no details, UNKNOWN", S.UNKNOWN, None, E.REMOTE_LOAD_KV_CACHE_FAILED, E.REMOTE_LOAD_KV_CACHE_FAILED),
    Case("no details, no memory", S.RESOURCE_EXHAUSTED, None, E.MALLOC_FAILED, E.DECODE_MALLOC_FAILED),
    Case("no details, deadline", S.DEADLINE_EXCEEDED, None, E.DEADLINE_EXCEEDED, E.DEADLINE_EXCEEDED),
    Case("no details, cancelled", S.CANCELLED, None, E.CONNECTION_RESET_BY_PEER, E.CONNECTION_RESET_BY_PEER),
    Case("empty details", S.RESOURCE_EXHAUSTED, b"", E.MALLOC_FAILED, E.DECODE_MALLOC_FAILED),
    Case("garbage", S.RESOURCE_EXHAUSTED, b"\xff\xfe garbage", E.MALLOC_FAILED, E.DECODE_MALLOC_FAILED),
    Case("code 0", S.RESOURCE_EXHAUSTED, details("0"), E.MALLOC_FAILED, E.DECODE_MALLOC_FAILED),
    Case("no code", S.RESOURCE_EXHAUSTED, details(None), E.MALLOC_FAILED, E.DECODE_MALLOC_FAILED),
    Case("another domain", S.RESOURCE_EXHAUSTED, details("602", domain="x.org"), E.MALLOC_FAILED,
         E.DECODE_MALLOC_FAILED),
    Case("a plain status", S.RESOURCE_EXHAUSTED, status_pb2.Status(code=8, message="m").SerializeToString(),
         E.MALLOC_FAILED, E.DECODE_MALLOC_FAILED),
    # {int32 error_code = 1; string error_message = 2}: the same bytes as a status.
    Case("an old peer's own details", S.INTERNAL, status_pb2.Status(code=8302, message="m").SerializeToString(),
         E.REMOTE_LOAD_KV_CACHE_FAILED, E.REMOTE_LOAD_KV_CACHE_FAILED),
    Case("an unknown code", S.INTERNAL, details("8999"), E.UNKNOWN_ERROR, E.UNKNOWN_ERROR),
    Case("an empty message", S.RESOURCE_EXHAUSTED, details("602", message=""), E.MALLOC_FAILED, E.DECODE_MALLOC_FAILED),
    Case("a foreign message", S.ABORTED, details("8601", message=FOREIGN), E.KV_LEASE_EXPIRED, E.KV_LEASE_EXPIRED),
    # The details decide, whatever the status says.
    Case("another status", S.UNAVAILABLE, details("8602"), E.KV_STALE_REFERENCE, E.KV_STALE_REFERENCE),
)  # fmt: skip


@contextlib.asynccontextmanager
async def cluster(tmp_path) -> AsyncIterator[tuple[Running, httpx.AsyncClient, dict[str, ScriptedServer]]]:
    engines: dict[str, ScriptedServer] = {}
    servers = {"prefill": ScriptedServer("prefill", engines), "decode": ScriptedServer("decode", engines)}
    flags = ["--retry-max-retries", "0", "--migration-limit", "0", "--cb-failure-threshold", "10000"]
    try:
        for role, server in servers.items():
            server.info_changes = {"allows_local_prefill": False}
            flags += [f"--{role}", await server.start()]
        async with (
            running_router(tmp_path, *flags, "--drain-grace-secs", "0") as router,
            httpx.AsyncClient(base_url=router.url, timeout=15) as client,
        ):
            await until_ready(client)
            yield router, client, servers
    finally:
        for server in servers.values():
            await server.stop()


@pytest.mark.invariant("RPC-7", "RPC-8", "RPC-12")
async def test_failure_when_no_server_of_ours_would_end_a_call_so_then_its_code_is_typed_and_clean(tmp_path):
    async with cluster(tmp_path) as (_, client, servers):

        def fail():
            raise failure

        for case in CASES:
            for role, expected in (("prefill", case.prefill), ("decode", case.decode)):
                failure = RawFailure(case.status, case.payload, FOREIGN)

                servers[role].at = {"start": fail}
                response = await client.post("/v1/completions", json=BODY)
                servers[role].at = {}
                where = f"{case.what} from {role}: {response.text}"
                refusal = refusals.of_response(response)
                assert refusal.code == expected, where
                for foreign in ("boom %s %d at 10.1", "10.1.2.3", "\x1b", servers[role].address):
                    assert foreign not in refusal.message, where
                await answers(client, "/ready", 200)  # a connection in doubt is looked at
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        # After the first token: in the stream, and nothing of theirs in it either.
        for payload in (None, b"\xff"):
            failure = RawFailure(S.INTERNAL, payload, FOREIGN)
            servers["decode"].at = {"token:2": fail}
            async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
                text = (await response.aread()).decode()
            servers["decode"].at = {}
            assert response.status_code == 200
            assert '"code":"REMOTE_GENERATE_FAILED","baton_code":8209' in text
            assert text.endswith("data: [DONE]\n\n")
            assert "10.1.2.3" not in text
        metrics = (await client.get("/metrics")).text
        breaches = [line for line in metrics.splitlines() if line.startswith("baton_contract_breaches_total{")]
        assert len(breaches) == 1 and 'kind="unknown_code"' in breaches[0]
        assert breaches[0].endswith(" 2.0")


@pytest.mark.invariant("RPC-31")
async def test_peer_when_it_speaks_another_version_of_the_protocol_then_it_is_refused_before_any_request(tmp_path):
    async with cluster(tmp_path) as (_, client, servers):
        # One that does not say which it speaks is not taken for one of ours, and its word is a breach.
        for version, code in ((99, E.INCOMPATIBLE_PEER), (None, E.NO_DECODE_WORKER)):
            servers["decode"].info_changes = {"protocol_version": version, "allows_local_prefill": False}
            await servers["decode"].restart()
            await answers(client, "/ready", 503)
            seen = len(servers["prefill"].seen) + len(servers["decode"].seen)
            async with asyncio.timeout(10):
                while (await client.post("/v1/completions", json=BODY)).json()["error"]["baton_code"] != code:
                    pass  # until the router has the new facts
            assert len(servers["prefill"].seen) + len(servers["decode"].seen) == seen
            (worker,) = [w for w in (await client.get("/workers")).json()["workers"] if w["role"] == "decode"]
            assert "protocol_version" in str(worker["reasons"])
        servers["decode"].info_changes = {"allows_local_prefill": False}
        await servers["decode"].restart()
        await until_ready(client)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
