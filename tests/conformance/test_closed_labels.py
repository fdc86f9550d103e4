"""Labels are closed sets: whatever clients and servers send, a router of sixteen servers keeps to the budget of series.

The router's whole code stands between real HTTP and gRPC clients and scripted servers that fail with every code.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from protos import generation_pb2_grpc
from router.grpc_service import SERVICE, GenerationService, GrpcServices, account_for_refused
from router.http.app import build_app
from router.http.request_scope import METHODS, UNMATCHED, WORKER_TEMPLATE
from router.http.services import HttpServices
from router.policies import POLICIES
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.validation import RequestValidator
from rpc.errors import ErrorCode
from rpc.http_server import HttpServer
from rpc.metric_families import FAMILIES, Family, Role
from rpc.metrics import MAX_WORKERS, OTHER, Registry
from rpc.server import UNKNOWN_METHOD, GrpcServer
from rpc.stages import DECODE_STAGES, PREFILL_STAGES
from tests.unit.router.scripted_cluster import Cluster, running_cluster
from tests.unit.router.scripted_server import MODEL, fails
from tests.unit.router.tokenizer_folders import CHATML, byte_level
from tests.unit.rpc.waiting import until

pytestmark = pytest.mark.timeout(120)

MOST_SERIES = 5000
SERVERS = 8  # of each role
LIMIT_S = 30.0
CODES = [code for code in ErrorCode if code is not ErrorCode.NONE_ERROR]


@dataclass
class Running:
    cluster: Cluster
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    routes: frozenset[str]
    calls: int = 0  # over gRPC

    async def booked(self) -> None:
        """Returns once every call over gRPC is counted, which may come after its status."""
        await until(lambda: self.total("baton_rpc_requests_total", "router") >= self.calls, LIMIT_S)
        assert self.total("baton_rpc_requests_total", "router") == self.calls

    def total(self, name: str, role: str) -> float:
        families = text_string_to_metric_families(self.cluster.metrics.render().decode())
        samples = itertools.chain.from_iterable(family.samples for family in families)
        return sum(each.value for each in samples if each.name == name and each.labels["role"] == role)

    def series(self) -> dict[str, list[dict[str, str]]]:
        """Labels of each sample of Baton's own, by the sample's name."""
        found: dict[str, list[dict[str, str]]] = {}
        for family in text_string_to_metric_families(self.cluster.metrics.render().decode()):
            for sample in family.samples:
                if sample.name.startswith("baton_"):
                    found.setdefault(sample.name, []).append(dict(sample.labels))
        return found


@contextlib.asynccontextmanager
async def running(api_keys: tuple[str, ...] = ()) -> AsyncIterator[Running]:
    async with running_cluster(SERVERS, SERVERS, local=True) as cluster:
        tokenizer = Tokenizer(byte_level())
        validator = RequestValidator(
            tokenizer, ChatTemplate(CHATML, source="test", special_tokens={}), cluster.orchestrator.model
        )
        own = GrpcServer(
            cluster.metrics, on_refused=lambda call: account_for_refused(call, cluster.open_requests, cluster.access)
        )
        service = GenerationService(
            GrpcServices(
                serving=cluster.orchestrator, open_requests=cluster.open_requests, validator=validator,
                api_keys=api_keys,
            )
        )  # fmt: skip
        own.add_service(generation_pb2_grpc.add_GenerationServicer_to_server, service, SERVICE)

        async def no_caches() -> list[dict[str, object]]:
            return []

        app = build_app(
            HttpServices(
                serving=cluster.orchestrator, open_requests=cluster.open_requests, validator=validator,
                workers=cluster.registry, metrics=cluster.metrics, flush_cache=no_caches, load=dict, server_info=dict,
                api_keys=api_keys,
            )
        )  # fmt: skip
        server = HttpServer(app)
        port = await server.start("127.0.0.1", 0)
        grpc_port = await own.start("127.0.0.1", 0)
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
                grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
            ):
                async with asyncio.timeout(LIMIT_S):
                    await channel.channel_ready()
                routes = frozenset(route.path for route in app.routes if isinstance(route, Route))
                yield Running(cluster, http, channel, routes)
        finally:
            await server.stop(2)
            await own.stop(0)
            tokenizer.close()


def hostile(rng: random.Random) -> str:
    """A word that nobody has sent before."""
    alphabet = "abcxyzÄ漢0189 \"\\{}=,%#/.:-_'\t"
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(3, 40))) + str(rng.getrandbits(64))


async def attack(router: Running, rng: random.Random) -> None:
    """Every place in which a client can put a word of its own, over both APIs."""
    word = hostile(rng)
    plain = f"id-{rng.getrandbits(64)}"
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "model": MODEL}
    headers = {"X-Request-Id": plain, "X-Session-Id": plain, "x-baton-prefill": plain, "traceparent": plain}
    http = router.http
    for changed in (
        {"model": word}, {"user": word, "cache_salt": word, "request_id": plain}, {word: word}, {"priority": word},
        {"stop": [word]}, {"regex": word}, {"response_format": {"type": word}}, {"max_tokens": rng.getrandbits(80)},
        {"prompt": word, "seed": rng.getrandbits(60)},
    ):  # fmt: skip
        await http.post("/v1/completions", json=body | changed, headers=headers)
    await http.post("/v1/chat/completions", json={"messages": [{"role": word, "content": word}], "model": word})
    await http.post("/v1/completions", content=word.encode(), headers={"Content-Type": f"text/{plain}"})
    await http.post("/v1/completions", json=body, headers={"X-Request-Id": plain + "#"})
    await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {plain}"})
    await http.post("/abort_request", json={"request_id": plain})
    await http.post("/workers", json={"role": word, "address": word})
    for path in (f"/{plain}", f"/v1/{plain}", f"/workers/prefill/{plain}", f"/workers/{plain}/127.0.0.1:1", "/live/"):
        await http.request(f"M{plain[3:12]}".upper(), path, params={plain: plain})
        await http.delete(path)
    for method, metadata in (
        (f"{SERVICE}/{plain}", ()), (plain, (("x-request-id", plain),)),
        (f"{SERVICE}/Generate", (("x-request-id", "#"),)),
    ):  # fmt: skip
        router.calls += 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.channel.unary_unary(f"/{method}")(word.encode(), timeout=LIMIT_S, metadata=metadata)
        assert refused.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)
    await router.booked()


async def fail_in_every_way(router: Running) -> None:
    """Servers of both roles end requests with every code of the table, before and after the first token."""
    for number, code in enumerate(CODES):
        for server in router.cluster.servers:
            server.at = {}
            if server.role == "decode" and number % 3 == 0:
                server.at = {"token:2": fails(code)}
            elif (server.role == "prefill") is (number % 3 == 1):
                server.at = {"start": fails(code)}
        api = ("/v1/completions", "/v1/chat/completions")[number % 2]
        body = {"max_tokens": 6, "ignore_eos": True, "stream": bool(number % 3)}
        given = {"messages": [{"role": "user", "content": "hi"}]} if number % 2 else {"prompt": [5, 6, 7, 8]}
        await router.http.post(api, json=body | given, headers={"X-Request-Id": f"f-{number}"})
    for server in router.cluster.servers:
        server.at = {}


def allowed_values(router: Running) -> dict[str, frozenset[str]]:
    """Of the labels whose values are closed by the router's own state and not by the family."""
    methods = ("Generate", "Abort", "ListModels")
    return {
        "route": router.routes | {UNMATCHED, WORKER_TEMPLATE},
        "method": METHODS | {"other", UNKNOWN_METHOD} | {f"{SERVICE}/{name}" for name in methods},
        "status": frozenset(str(status) for status in range(100, 600)),
        "model_name": frozenset((MODEL, OTHER)),
        "worker": frozenset(server.address for server in router.cluster.servers) | {OTHER},
        "policy": frozenset((*POLICIES, "pin", "none")),
        "role": frozenset(("router", "prefill", "decode")),
    }


def stray(router: Running) -> list[tuple[str, str, str]]:
    """Label values outside of their sets."""
    known = allowed_values(router)
    found = []
    for name, all_labels in router.series().items():
        family = FAMILIES.get(name) or FAMILIES[name.rsplit("_", 1)[0]]
        for labels in all_labels:
            for label, value in labels.items():
                closed = family.values.get(label) or known.get(label)
                if label != "le" and (closed is None or value not in closed):
                    found.append((name, label, value))
    return found


async def test_labels_when_every_word_is_a_clients_or_servers_own_then_they_stay_closed_and_within_the_budget() -> None:
    rng = random.Random(1)
    async with running() as router:
        await fail_in_every_way(router)
        await attack(router, rng)
        assert stray(router) == []
        before = {name: len(labels) for name, labels in router.series().items()}
        assert {"baton_http_requests_total", "baton_retries_total", "baton_router_worker_inflight"} <= before.keys()
        # The same again with other words makes no series: there is one for each kind of thing, not for each word.
        for _ in range(3):
            await attack(router, rng)
        after = {name: len(labels) for name, labels in router.series().items()}
        assert {name: count for name, count in after.items() if count != before.get(name)} == {}
        assert stray(router) == []
        assert 500 < sum(after.values()) <= MOST_SERIES
        await router.cluster.settled()


def test_workers_when_more_come_than_are_told_apart_then_the_rest_is_other_and_one_that_goes_makes_room() -> None:
    metrics = Registry("router", process_metrics=False)
    addresses = [f"10.0.{number // 256}.{number % 256}:9101" for number in range(MAX_WORKERS + 50)]
    for address in addresses:
        metrics.set("baton_router_worker_inflight", 1, role="prefill", worker=address)
        metrics.inc("baton_breaker_transitions_total", role="prefill", worker=address, to="open")
    text = metrics.render().decode()
    for family in ("baton_router_worker_inflight", "baton_breaker_transitions_total"):
        lines = [line for line in text.splitlines() if line.startswith(f"{family}{{")]
        assert len(lines) == MAX_WORKERS + 1
        assert sum('worker="other"' in line for line in lines) == 1
    assert metrics.value("baton_breaker_transitions_total", role="prefill", worker=OTHER, to="open") == 50
    metrics.remove_worker(addresses[0])
    metrics.set("baton_router_worker_inflight", 1, role="prefill", worker=addresses[-1])
    assert metrics.value("baton_router_worker_inflight", role="prefill", worker=addresses[-1]) == 1


# How many values the labels of a server of eight ranks can have whose sets no family closes. A new label has to be
# bounded here, too.
RANKS = 8
BOUNDS = {
    "model_name": 1, "rank": RANKS, "group": 2, "stage": 7, "transport": 2, "reason": 8, "bucket": 16, "mode": 2,
    "status": 12, "op": 3, "path": 2, "kind": 3, "worker": 1, "method": 2,
}  # fmt: skip
SEVERAL = 12  # further methods, which end with few codes
FEW_CODES = 8


def most_values(family: Family, label: str, role: Role) -> list[str]:
    if label == "role":
        return [role]
    if label == "stage":
        return list(PREFILL_STAGES if role == "prefill" else DECODE_STAGES)
    closed = sorted(family.values.get(label, ()))
    if closed and label != "transport":
        return closed
    if family.name in ("baton_build_info", "baton_model_info"):
        return ["one"]
    return (closed or [f"v{number}" for number in range(BOUNDS[label])])[: BOUNDS.get(label)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_series_of_a_server_when_everything_has_happened_on_eight_ranks_then_they_keep_to_the_budget(
    role: Role,
) -> None:
    metrics = Registry(role, colocated=True, tensor_parallel=True, process_metrics=False)
    for name, family in metrics.families.items():
        labels = family.all_labels(role)
        combinations = list(itertools.product(*(most_values(family, label, role) for label in labels)))
        if name in ("baton_rpc_requests_total", "baton_rpc_duration_seconds", "baton_rpc_inflight"):
            codes = sorted(family.values.get("code", [""]))[:FEW_CODES]
            others = [f"o{number}" for number in range(SEVERAL)]
            combinations += [(role, *rest) for rest in itertools.product(others, codes)][: SEVERAL * len(codes)]
        for values in combinations:
            given = dict(zip(labels, values, strict=False))
            if family.kind == "histogram":
                metrics.observe(name, 0.0, **given)
            elif family.kind == "gauge":
                metrics.set(name, 1, **given)
            else:
                metrics.inc(name, **given)
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("baton_")]
    assert 1000 < len(lines) <= 3000
