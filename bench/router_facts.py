"""What the load generator reads from a server beside its answers: readiness, model, topology, counters.

Servers of other projects lack some of these pages; what is missing is left out of the record.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import generation_pb2, generation_pb2_grpc

GENERATION_SERVICE = "baton.v1.Generation"
POLL_S = 0.2
PAGE_TIMEOUT_S = 5.0
SILENT_S = 2.0


class NotReady(Exception):
    """Nothing serves at the address."""


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _say_waiting(began: float, address: str, reason: str, timeout_s: float) -> float:
    """One line for a wait that takes longer than SILENT_S; returns when to say it, never once it has been said."""
    if time.monotonic() - began < SILENT_S:
        return began
    print(
        f"waiting for {address} to be ready, at most {timeout_s:g} s (--ready-check-timeout-sec): {reason}",
        file=sys.stderr,
        flush=True,
    )
    return math.inf


def first_model(base_url: str, api_key: str, timeout_s: float) -> str:
    """Waits until a server is ready; returns the first served model name. Raises NotReady with the last reason."""
    began = time.monotonic()
    deadline = began + timeout_s
    with httpx.Client(headers=_headers(api_key), timeout=PAGE_TIMEOUT_S, trust_env=False) as client:
        while True:
            try:
                response = client.get(base_url + "/v1/models")
                health = client.get(base_url + "/health")
                if response.status_code == 200 and health.status_code == 200:
                    return str(response.json()["data"][0]["id"])
                reason = f"/v1/models answers {response.status_code}, /health {health.status_code}"
            except httpx.InvalidURL as error:
                raise NotReady(f"--base-url {base_url}: {error}") from None
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                reason = str(error) or type(error).__name__
            began = _say_waiting(began, base_url, reason, timeout_s)
            if time.monotonic() > deadline:
                raise NotReady(f"{base_url} was not ready within {timeout_s:g} s: {reason}")
            time.sleep(POLL_S)


def model_length(base_url: str, api_key: str, model: str) -> int:
    """Tokens of the longest sequence of the served model; 0 where the server does not say."""
    try:
        with httpx.Client(headers=_headers(api_key), timeout=PAGE_TIMEOUT_S, trust_env=False) as client:
            models = client.get(base_url + "/v1/models").json()["data"]
        return next(int(found["max_model_len"]) for found in models if found["id"] == model)
    except (httpx.HTTPError, LookupError, TypeError, ValueError, StopIteration):
        return 0


def grpc_model_length(address: str, api_key: str, model: str) -> int:
    """The same over gRPC; without a name that of the first model."""
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    with grpc.insecure_channel(address.removeprefix("http://"), options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        try:
            models = stub.ListModels(
                generation_pb2.ListModelsRequest(), timeout=PAGE_TIMEOUT_S, metadata=metadata
            ).models
        except grpc.RpcError:
            return 0
    return next((int(found.max_model_len) for found in models if model in ("", found.id)), 0)


def wait_grpc_ready(address: str, timeout_s: float) -> None:
    """Waits until the router's Generation service says SERVING. Raises NotReady."""
    began = time.monotonic()
    deadline = began + timeout_s
    request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
    with grpc.insecure_channel(address.removeprefix("http://"), options=[("grpc.enable_http_proxy", 0)]) as channel:
        while True:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(request, timeout=PAGE_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                reason = f"{GENERATION_SERVICE} is not serving"
            except grpc.RpcError as error:
                reason = str(error.details())
            began = _say_waiting(began, address, reason, timeout_s)
            if time.monotonic() > deadline:
                raise NotReady(f"{address} was not ready within {timeout_s:g} s: {reason}")
            time.sleep(POLL_S)


async def _page(base_url: str, path: str, api_key: str) -> httpx.Response | None:
    try:
        async with httpx.AsyncClient(headers=_headers(api_key), timeout=PAGE_TIMEOUT_S, trust_env=False) as client:
            response = await client.get(base_url + path)
    except httpx.HTTPError:
        return None
    return response if response.status_code == 200 else None


async def topology(base_url: str, api_key: str) -> dict[str, Any]:
    """`topology` (xPyD: servers that are ready) and `transport`; empty for a server that has no /workers."""
    page = await _page(base_url, "/workers", api_key)
    try:
        workers = page.json()["workers"] if page is not None else []
        ready = [worker for worker in workers if worker["state"] == "ready"]
        counts = {role: sum(worker["role"] == role for worker in ready) for role in ("prefill", "decode")}
        transports = sorted({t for worker in ready for t in worker["facts"]["transports"]})
    except (LookupError, TypeError, ValueError):
        return {}
    if not workers:
        return {}
    return {"topology": f"{counts['prefill']}P{counts['decode']}D", "transport": ",".join(transports)}


async def counters(base_url: str, api_key: str) -> dict[str, float]:
    """Every `_total` sample of /metrics, under its name with labels."""
    page = await _page(base_url, "/metrics", api_key)
    found: dict[str, float] = {}
    for line in page.text.splitlines() if page is not None else ():
        sample, _, value = line.rpartition(" ")
        if not line.startswith("#") and sample.partition("{")[0].endswith("_total"):
            found[sample] = float(value)
    return found


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each counter that rose rose by."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value > before.get(name, 0.0)}
