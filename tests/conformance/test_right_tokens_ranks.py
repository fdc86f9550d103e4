"""Tokens when servers run over several ranks, and of different numbers: those of `transformers`, and so of one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import httpx
import pytest

from rpc.errors import BatonError, ErrorCode
from tests.conformance.known_answers import (
    GREEDY,
    PATIENT,
    SAMPLED,
    Case,
    check_handovers,
    check_preemptions,
    known,
)
from tests.conformance.reference import reference
from tests.conformance.test_right_tokens import BLOCK, CHUNK
from tests.extent import WHOLE
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import TIMEOUT_S, GenerationClient
from tests.unit.cache_store.shared import needs_nixl
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(400)  # clusters start within it, on busy machines too

TOKENS = 60
BLOCKS = 28  # of a decode server: four whole requests of those below, and seven at their start
FLAGS = ("--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16")
DECODE_FLAGS = (*FLAGS, *PATIENT, "--num-kv-blocks", str(BLOCKS), "--kv-load-failure-policy", "fail")
# Decoding is slow, so that there is a middle of an answer; and the load of some requests fails on one rank.
DECODE_FAULTS = ("engine.step:delay=0.004,kind=decode,rank=0;"
                 "cache_store.load_start:raise=CACHE_STORE_LOAD_BUFFER_TIMEOUT,rank=1,key=broken*")  # fmt: skip


@dataclass
class Ranked:
    """Servers by their number of ranks. The model has two KV heads, so four ranks hold each of them twice.

    `others`: decode servers that get KV in another way than those of `decode`, started when they are first needed.
    """

    cluster: Cluster
    prefill: dict[int, ServerProcess] = field(default_factory=dict)
    decode: dict[int, ServerProcess] = field(default_factory=dict)
    routers: dict[tuple[int, int, str], ServerProcess] = field(default_factory=dict)
    others: dict[tuple[int, str], ServerProcess] = field(default_factory=dict)

    def start_decode(self, ranks: int, transport: str) -> ServerProcess:
        flags = (*DECODE_FLAGS, "--tensor-parallel-size", str(ranks), "--kv-transport", transport)
        return self.cluster.start_decode(flags, env={"BATON_FAULTS": DECODE_FAULTS})

    def decode_by(self, ranks: int, transport: str) -> ServerProcess:
        if transport == TRANSPORT_OF[ranks]:
            return self.decode[ranks]
        if (ranks, transport) not in self.others:
            self.others[ranks, transport] = self.start_decode(ranks, transport).wait_ready(180.0)
        return self.others[ranks, transport]

    def client(self, prefill: int, decode: int, transport: str = "") -> GenerationClient:
        """To a router that knows these two servers alone."""
        transport = transport or TRANSPORT_OF[decode]
        router = self.routers.get((prefill, decode, transport))
        if router is None:
            pair = [self.prefill[prefill], self.decode_by(decode, transport)]
            router = self.routers[prefill, decode, transport] = self.cluster.start_router(among=pair)
            self.cluster.wait_router_ready()
        return GenerationClient(router.grpc)


# How the decode servers of so many ranks get KV, and how further ones do.
TRANSPORT_OF = {1: "grpc", 2: "ipc", 4: "ipc"}
TRANSPORTS = ("ipc", "nixl", "tcp", "grpc")
# In every run: as many ranks on both sides. Agents alone are tested in all sizes.
ALWAYS = {(2, 2)}


def pairs_of(sizes: tuple[int, ...], transports: tuple[str, ...] = ("",)) -> list[Any]:
    """((sizes of the cluster, (ranks of P, ranks of D)), transport); without a transport, that of the decode server."""
    found = []
    for p, d, transport in product(sizes, sizes, transports):
        if (p, d) != (1, 1) and (not transport or transport != TRANSPORT_OF[d]):
            always = (p, d) in ALWAYS and not transport
            name = f"p{p}-d{d}-{transport or TRANSPORT_OF[d]}"
            marks = [] if always else [pytest.mark.extended]
            if transport == "nixl":
                marks.append(needs_nixl)
            found.append(pytest.param((sizes, (p, d)), transport, id=name, marks=marks))
    return found


SMALL = (1, 2)
PAIRS = [*pairs_of(SMALL), *[each for each in pairs_of((1, 2, 4)) if 4 in each.values[0][1]]]
BY_TRANSPORT = [*PAIRS, *pairs_of((1, 2, 4), TRANSPORTS)]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Greedy and sampled: shorter than a block, of whole blocks, of several chunks."""
    model = reference(tiny_model("llama"))
    wanted = ((BLOCK - 1, GREEDY), (3 * BLOCK, SAMPLED), (3 * CHUNK + 5, GREEDY))
    return [known(model, length, TOKENS, options) for length, options in wanted]


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[dict[tuple[int, ...], Ranked]]:
    """Clusters by the sizes of their servers. The larger one starts only for the tests that need it."""
    running: dict[tuple[int, ...], Ranked] = {}
    failed_before = request.session.testsfailed
    yield running
    failed = request.session.testsfailed > failed_before
    for ranked in running.values():
        cluster = ranked.cluster
        try:
            cluster.assert_clean_ledgers()
            assert cluster.errors_without_code() == []
        finally:
            cluster.end(failed=failed)


def ranked_of(started: dict[tuple[int, ...], Ranked], sizes: tuple[int, ...]) -> Ranked:
    if sizes not in started:
        cluster = Cluster(0, 0, model=tiny_model("llama"), router=False, start_limit_s=180.0).__enter__()
        ranked = started[sizes] = Ranked(cluster)
        for size in sizes:
            rank_flags = ("--tensor-parallel-size", str(size))
            if WHOLE or any(size == p for p, _ in ALWAYS):
                ranked.prefill[size] = cluster.start_prefill([*FLAGS, *rank_flags])
            if WHOLE or any(size == d for _, d in ALWAYS):
                ranked.decode[size] = ranked.start_decode(size, TRANSPORT_OF[size])
        for server in cluster.servers:
            server.wait_ready(180.0)
    return started[sizes]


@pytest.mark.parametrize(("sizes_and_pair", "transport"), BY_TRANSPORT)
def test_k13_tokens_when_the_servers_have_ranks_of_their_own_then_those_of_one_also_with_a_prefix_on_the_decode_server(
    started: dict[tuple[int, ...], Ranked],
    cases: list[Case],
    sizes_and_pair: tuple[Any, tuple[int, int]],
    transport: str,
) -> None:
    sizes, pair = sizes_and_pair
    ranked = ranked_of(started, sizes)
    transport = transport or TRANSPORT_OF[pair[1]]
    decode = ranked.decode_by(pair[1], transport)
    with ranked.client(*pair, transport) as client:
        check_handovers(client, decode, cases, salt=f"{pair} {transport}", block=BLOCK, transport=transport)
    times = decode.counted("baton_load_rank_seconds_count", stat="max")
    assert (times >= 2 * len(cases) + 1) == (pair[1] > 1), "each load over several ranks has its times"
    for server in (ranked.prefill[pair[0]], decode):
        ranks = {counts["rank"] for counts in server.ledger()}
        assert ranks == set(range(pair[0] if server.role == "prefill" else pair[1]))
    ranked.cluster.assert_clean_ledgers()


@pytest.mark.parametrize(("sizes_and_pair", "transport"), [each for each in PAIRS if each.values[0][1][1] > 1])
def test_tokens_when_requests_are_preempted_on_several_ranks_then_those_of_a_request_that_is_alone(
    started: dict[tuple[int, ...], Ranked],
    cases: list[Case],
    sizes_and_pair: tuple[Any, tuple[int, int]],
    transport: str,
) -> None:
    sizes, pair = sizes_and_pair
    ranked = ranked_of(started, sizes)
    decode = ranked.decode[pair[1]]
    with ranked.client(*pair) as client:
        check_preemptions(client, decode, cases[1], 7, salt=f"{pair}")
    ranked.cluster.assert_clean_ledgers()


def test_o7_load_when_one_rank_fails_then_its_code_and_rank_reach_the_client_and_the_server_stays_live(
    started: dict[tuple[int, ...], Ranked], cases: list[Case]
) -> None:
    ranked = ranked_of(started, SMALL)
    decode = ranked.decode[2]
    case = cases[0]
    # A router that shows every failure as it comes.
    flags = ("--retry-max-retries", "0", "--migration-limit", "0", "--cb-failure-threshold", "10000")
    router = ranked.cluster.start_router(flags, among=[ranked.prefill[2], decode])
    ranked.cluster.wait_router_ready()
    with (
        GenerationClient(router.grpc) as client,
        ThreadPoolExecutor(4) as callers,
        httpx.Client(base_url=f"http://{decode.http}", timeout=TIMEOUT_S) as pages,
    ):
        quiet_s = max(live_seconds(pages) for _ in range(5))  # on a machine that others use, too

        def fails(number: int) -> BatonError:
            with pytest.raises(BatonError) as caught:
                client.generate(case.prompt, 8, request_id=f"broken-{number}-{time.monotonic_ns()}")
            return caught.value

        waiting = [callers.submit(fails, number) for number in range(4)]
        answers = 0
        while answers < 5 or not all(each.done() for each in waiting):
            assert live_seconds(pages) < 0.5 + 2 * quiet_s
            answers += 1
        for each in waiting:
            error = each.result(TIMEOUT_S)
            assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED, f"{error}\n{router.describe()}"
            assert error.metadata["rank"] == "1"
            assert error.metadata["ranks"] == "1: CACHE_STORE_LOAD_BUFFER_TIMEOUT, "
            assert error.metadata["cause"] == "CACHE_STORE_LOAD_BUFFER_TIMEOUT"
        ranked.cluster.assert_clean_ledgers()
        # Booked by the rank whose load failed, and by no other.
        reason = "CACHE_STORE_LOAD_BUFFER_TIMEOUT"
        wait_for("the figures", lambda: decode.counted("baton_kv_transfer_failures_total", reason=reason) >= 4, 20.0)
        lines = [line for line in decode.metrics().splitlines() if line.startswith("baton_kv_transfer_failures_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in lines) == 4, lines
        # Neither side has lost anything.
        answer = client.generate(case.prompt, TOKENS, salt="after", **case.options)
        assert (answer.token_ids, answer.path) == (case.expected, "pd")


def ready_servers(router: ServerProcess) -> int:
    return sum(worker["state"] == "ready" for worker in router.page("/workers")["workers"])


def live_seconds(pages: httpx.Client) -> float:
    """The best of three."""
    found = []
    for _ in range(3):
        began = time.monotonic()
        assert pages.get("/live").status_code == 200
        found.append(time.monotonic() - began)
    return min(found)


@pytest.mark.extended
def test_tokens_when_a_decode_server_of_several_ranks_is_killed_then_the_answer_goes_on_elsewhere(
    started: dict[tuple[int, ...], Ranked], cases: list[Case]
) -> None:
    """From two ranks to one, in the middle of the answers. Last: the server is gone afterwards."""
    ranked = ranked_of(started, SMALL)
    victim = ranked.decode[2]
    servers = [ranked.prefill[2], *ranked.decode.values()]
    router = ranked.cluster.start_router(among=servers)
    # Both decode servers are to have some of the requests.
    wait_for("all servers", lambda: ready_servers(router) == len(servers), TIMEOUT_S)
    with GenerationClient(router.grpc) as client:
        opened = [client.open(case.prompt, TOKENS, salt="move", **case.options) for case in (*cases, *cases)]
        for generation in opened:
            generation.wait_tokens(5)
        victim.kill()
        came = [len(generation.token_ids) for generation in opened]
        moved = 0
        for generation, case in zip(opened, (*cases, *cases), strict=True):
            answer = generation.answer()
            assert answer.token_ids == case.expected, f"{answer.attempts} attempts"
            moved += answer.attempts > 1
    assert max(came) < TOKENS and moved >= 1
    assert router.counted("baton_migrations_total", result="failed") == 0
    ranked.cluster.assert_clean_ledgers()
