"""Tokens when prefill and decode servers have KV blocks of different sizes: those of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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
from tests.extent import extended
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import TIMEOUT_S, GenerationClient
from tests.unit.cache_store.shared import needs_nixl
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(400)  # clusters start within it, on busy machines too

TOKENS = 40
POOL_TOKENS = 384  # of a decode server: three whole requests of those that are preempted, and five at their start
CHUNK = 48
FLAGS = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "16")
DECODE_FLAGS = (*FLAGS, *PATIENT, "--kv-load-failure-policy", "fail")

Server = tuple[int, int, str]  # block size, ranks, transport (of a decode server)


@dataclass
class Sized:
    """Servers by what they are, each started when it is first needed."""

    cluster: Cluster
    prefill: dict[Server, ServerProcess] = field(default_factory=dict)
    decode: dict[Server, ServerProcess] = field(default_factory=dict)
    routers: dict[tuple[Server, Server], ServerProcess] = field(default_factory=dict)

    def pair(
        self, prefill: Server, decode: Server, *decode_flags: str, ready: bool = True
    ) -> tuple[ServerProcess, ServerProcess, ServerProcess]:
        """Both servers, and a router that knows these two alone."""
        new = []
        if prefill not in self.prefill:
            size, ranks, _ = prefill
            flags = [*FLAGS, "--block-size", str(size), "--tensor-parallel-size", str(ranks)]
            new.append(self.cluster.start_prefill(flags))
            self.prefill[prefill] = new[-1]
        if decode not in self.decode:
            size, ranks, transport = decode
            flags = [*DECODE_FLAGS, *decode_flags, "--block-size", str(size), "--tensor-parallel-size", str(ranks)]
            flags += ["--num-kv-blocks", str(POOL_TOKENS // size), "--kv-transport", transport]
            new.append(self.cluster.start_decode(flags))
            self.decode[decode] = new[-1]
        for server in new:
            server.wait_ready(180.0)
        found = self.prefill[prefill], self.decode[decode]
        if (prefill, decode) not in self.routers:
            self.routers[prefill, decode] = self.cluster.start_router(among=list(found))
            if ready:
                self.cluster.wait_router_ready()
        return *found, self.routers[prefill, decode]


@pytest.fixture(scope="module")
def sized(request: pytest.FixtureRequest) -> Iterator[Sized]:
    failed_before = request.session.testsfailed
    cluster = Cluster(0, 0, model=tiny_model("llama"), router=False, start_limit_s=180.0).__enter__()
    failed = True
    try:
        yield Sized(cluster)
        cluster.assert_clean_ledgers()
        assert cluster.errors_without_code() == []
        failed = request.session.testsfailed > failed_before
    finally:
        cluster.end(failed=failed)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Greedy: within the first block, of whole blocks of every size, of several chunks. Sampled: short of a block."""
    model = reference(tiny_model("llama"))
    wanted = ((7, GREEDY), (64, GREEDY), (3 * CHUNK + 5, GREEDY), (60, SAMPLED))
    return [known(model, length, TOKENS, options) for length, options in wanted]


def name_of(pair: tuple[Server, Server]) -> str:
    (p_size, p_ranks, _), (d_size, d_ranks, transport) = pair
    return f"p{p_size}x{p_ranks}-d{d_size}x{d_ranks}-{transport}"


# In every run: larger blocks on the decode server. Agents alone are tested with all sizes and transports.
ALWAYS = [((16, 1, ""), (32, 1, "ipc"))]
WHOLE = [
    ((64, 1, ""), (32, 1, "tcp")),
    ((32, 1, ""), (16, 1, "ipc")),
    ((64, 1, ""), (16, 1, "grpc")),
    ((64, 1, ""), (16, 1, "tcp")),
    ((8, 1, ""), (32, 1, "grpc")),
    ((16, 2, ""), (32, 1, "ipc")),
    ((32, 2, ""), (16, 1, "grpc")),
    ((64, 1, ""), (16, 2, "ipc")),
    ((16, 1, ""), (32, 2, "grpc")),
]
PAIRS = [
    *(pytest.param(pair, id=name_of(pair)) for pair in ALWAYS),
    pytest.param(((16, 1, ""), (32, 1, "nixl")), id="p16x1-d32x1-nixl", marks=[needs_nixl, pytest.mark.extended]),
    *(extended(pair, id=name_of(pair)) for pair in WHOLE),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_when_block_sizes_differ_then_those_of_one_server_also_with_a_prefix_on_the_decode_server_and_preempted(
    sized: Sized, cases: list[Case], pair: tuple[Server, Server]
) -> None:
    _, decode, router = sized.pair(*pair)
    size, _, transport = pair[1]
    with GenerationClient(router.grpc) as client:
        check_handovers(client, decode, cases, salt=name_of(pair), block=size, transport=transport)
        check_preemptions(client, decode, cases[3], 6, salt=name_of(pair))
    sized.cluster.assert_clean_ledgers()


@pytest.mark.extended
def test_tokens_when_sizes_do_not_fit_then_no_request_and_the_reason_is_said(sized: Sized, cases: list[Case]) -> None:
    *_, router = sized.pair((16, 1, ""), (24, 1, "auto"), "--no-allow-local-prefill", ready=False)
    why = "block_size[full]: prefill 16, decode 24 (one must be a multiple of the other)"

    def reasons() -> list[str]:
        return [reason for worker in router.page("/workers")["workers"] for reason in worker.get("reasons", [])]

    wait_for("the router's verdict", lambda: any(why in reason for reason in reasons()), TIMEOUT_S)
    with GenerationClient(router.grpc) as client, pytest.raises(BatonError) as caught:
        client.generate(cases[0].prompt, 4)
    assert caught.value.code is ErrorCode.INCOMPATIBLE_PEER
    assert why.partition(": ")[2] in caught.value.metadata.values()
