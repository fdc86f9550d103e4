"""Between a prefill and its decode servers lies a bad network: slow, narrow, cut, gone for a while.

Whatever it does, a request ends with the right tokens or with one error of the table, nothing is left behind on either
side, and when the network is good again so are the transfers.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rpc.errors import BatonError, ErrorCode
from tests.conformance.reference import clear_prompt, reference
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import Generation, GenerationClient
from tests.integration.tcp_proxy import Impairment, TcpProxy
from tests.unit.engine.tiny_models import tiny_model

TOKENS = 8
LENGTHS = (400, 311, 352, 280)
# Of the tiny model in float32: 3 layers of K and V, 2 heads of 16.
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4
SLOW = Impairment(delay_s=0.005, bytes_per_s=1_500_000)
NARROW = Impairment(delay_s=0.005, bytes_per_s=80_000)  # a load takes four seconds: there is a middle of it
LIMIT_S = 30.0
# What a client may see of a network that fails: never an unknown error, never silence.
TYPED = {
    ErrorCode.LOAD_KV_CACHE_FAILED, ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED, ErrorCode.CONNECTION_RESET_BY_PEER,
    ErrorCode.RETRY_BUDGET_EXHAUSTED, ErrorCode.NO_PREFILL_WORKER, ErrorCode.NO_DECODE_WORKER,
}  # fmt: skip


@functools.cache
def cases() -> tuple[tuple[list[int], list[int]], ...]:
    """Prompts with the answers of `transformers`."""
    model = reference(tiny_model("llama"))
    prompts = [clear_prompt(model, length, TOKENS) for length in LENGTHS]
    return tuple((prompt, model.greedy(prompt, TOKENS)) for prompt in prompts)


@dataclass
class Network:
    """A prefill and a decode server, and the proxy that all KV goes through."""

    cluster: Cluster
    proxy: TcpProxy
    client: GenerationClient

    def open(self, number: int, salt: str) -> Generation:
        # The client's own deadline is later than the test's, which shows what hangs.
        return self.client.open(cases()[number][0], TOKENS, timeout_s=2 * LIMIT_S, salt=salt)

    def wait_end(self, generation: Generation) -> None:
        try:
            generation.wait_end(LIMIT_S)
        except AssertionError as error:
            processes = (*self.cluster.servers, self.cluster.router)
            raise AssertionError("\n".join([str(error), *(each.describe() for each in processes)])) from None

    def answered(self, number: int, generation: Generation) -> bool:
        """The end of a request has been judged; False when it is one of the errors that the network explains."""
        self.wait_end(generation)
        try:
            answer = generation.answer(LIMIT_S)
        except BatonError as error:
            if error.code not in TYPED:
                raise
            return False
        assert answer.token_ids == cases()[number][1]
        return True

    def loaded(self, salt: str) -> float:
        """Seconds that the KV of an ordinary request took; it came through the proxy at the first attempt."""
        before = self.proxy.forwarded
        request = self.open(0, salt)
        self.wait_end(request)
        answer = request.answer(LIMIT_S)
        assert (answer.token_ids, answer.path, answer.attempts) == (cases()[0][1], "pd", 1)
        assert self.proxy.forwarded - before >= LENGTHS[0] // 16 * 16 * BYTES_PER_TOKEN
        self.cluster.assert_clean_ledgers()
        return answer.timeline["decode.load"]

    def failures(self) -> float:
        """Transfers that have failed, as the decode server counts them."""
        text = self.cluster.decode[0].metrics()
        lines = [line for line in text.splitlines() if line.startswith("baton_kv_transfer_failures_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def recovers(self, salt: str) -> None:
        """Within seconds a request is served through both servers again."""

        def served() -> bool:
            request = self.open(1, f"{salt}-{time.monotonic()}")
            self.wait_end(request)
            try:
                answer = request.answer(LIMIT_S)
            except BatonError as error:
                if error.code not in TYPED:
                    raise
                return False
            assert answer.token_ids == cases()[1][1]
            return (answer.path, answer.attempts) == ("pd", 1)

        wait_for("a request through both servers", served, 10.0)
        self.loaded(salt)
        assert all(process.alive for process in (*self.cluster.servers, self.cluster.router))
        assert self.cluster.errors_without_code() == []


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    flags = ("--kv-transport", "grpc", "--load-cache-timeout-ms", "2500")
    with Cluster(
        1, 1, model=tiny_model("llama"), router=False,
        # The proxy listens where the prefill server says that its cache store is: on another loopback address.
        prefill_flags=(*flags, "--advertise-host", "127.0.0.2"), decode_flags=flags,
        router_flags=("--cb-failure-threshold", "1000", "--retry-budget-ratio", "1"),
    ) as cluster:  # fmt: skip
        server = cluster.prefill[0]
        for name in ("grpc", "http"):
            server.ready_line[name] = server.ready_line[name].replace("127.0.0.2", "127.0.0.1")
        port = int(server.cache_store[0].rpartition(":")[2])
        with TcpProxy(("127.0.0.2", port), ("127.0.0.1", port)) as proxy:
            cluster.start_router()
            cluster.wait_router_ready()
            with GenerationClient(cluster.router.grpc) as client:
                yield Network(cluster, proxy, client)


@pytest.fixture(autouse=True)
def _good_again(network: Network) -> Iterator[None]:
    """Each test begins and ends with a good network."""
    network.proxy.impairment = Impairment()
    yield
    network.proxy.impairment = Impairment()
    network.proxy.refuse(False)
    network.proxy.hold(False)


def test_network_when_slow_and_narrow_then_right_tokens_as_late_as_its_width_says(network: Network) -> None:
    network.proxy.impairment = SLOW
    floor = LENGTHS[0] // 16 * 16 * BYTES_PER_TOKEN / SLOW.bytes_per_s
    assert floor + SLOW.delay_s < network.loaded("slow")
    before = time.monotonic()
    together = [network.open(number, "together") for number in range(len(LENGTHS))]
    assert all(network.answered(number, each) for number, each in enumerate(together))
    assert time.monotonic() - before > sum(length // 16 * 16 for length in LENGTHS) * BYTES_PER_TOKEN / SLOW.bytes_per_s
    network.cluster.assert_clean_ledgers()


@pytest.mark.extended
def test_network_when_connections_are_cut_in_the_middle_then_right_tokens_or_one_error_and_it_reconnects(
    network: Network,
) -> None:
    chance = random.Random(7)
    network.proxy.impairment = SLOW
    failures, results = network.failures(), []
    for turn in range(5):
        connections = network.proxy.accepted
        network.proxy.cut_after(chance.randrange(20_000, 250_000))
        number = turn % len(LENGTHS)
        results.append(network.answered(number, network.open(number, f"cut-{turn}")))
        network.cluster.assert_clean_ledgers()
        assert network.proxy.accepted > connections, "the connections were not cut, or not made again"
    assert network.failures() > failures, "no load was hit"
    assert any(results), "a cut is made good by loading or computing again"
    network.recovers("after-cuts")


def test_network_when_cut_again_and_again_under_load_then_every_request_ends_and_nothing_is_left(
    network: Network,
) -> None:
    network.proxy.impairment = Impairment(delay_s=0.005, bytes_per_s=3_000_000)
    open_requests = [(number % 4, network.open(number % 4, f"load-{number}")) for number in range(8)]
    for _ in range(4):
        before = network.proxy.forwarded
        wait_for("bytes on the way", lambda before=before: network.proxy.forwarded > before + 50_000
                 or all(each.ended_at for _, each in open_requests), LIMIT_S)  # fmt: skip
        network.proxy.cut()
    for number, each in open_requests:
        network.answered(number, each)
    network.cluster.assert_clean_ledgers()
    network.recovers("after-load")


def test_network_when_nothing_listens_for_a_while_then_requests_end_soon_and_come_back_by_themselves(
    network: Network,
) -> None:
    network.loaded("before")
    network.proxy.refuse(True)
    network.proxy.cut()
    began = time.monotonic()
    together = [network.open(number, "refused") for number in range(2)]
    for number, each in enumerate(together):
        network.answered(number, each)
    assert time.monotonic() - began < 15.0
    network.cluster.assert_clean_ledgers()
    network.proxy.refuse(False)
    network.recovers("after-refusal")


def test_network_when_it_falls_silent_in_the_middle_then_the_load_is_given_up_in_time(network: Network) -> None:
    for turn in range(4):  # every bulk channel stands: none of them says that the other side is gone
        network.loaded(f"connected-{turn}")
    network.proxy.impairment = NARROW
    before = network.proxy.forwarded
    request = network.open(0, "silent")
    wait_for("the load to be on its way", lambda: network.proxy.forwarded > before + 30_000, LIMIT_S)
    network.proxy.hold(True)
    began = time.monotonic()
    network.answered(0, request)
    assert time.monotonic() - began < 12.0
    network.proxy.impairment = Impairment()
    network.proxy.cut()
    network.proxy.hold(False)
    network.cluster.assert_clean_ledgers()
    network.recovers("after-silence")


def test_network_when_the_client_leaves_in_the_middle_of_a_slow_load_then_both_sides_let_go(network: Network) -> None:
    network.proxy.impairment = NARROW
    before = network.proxy.forwarded
    request = network.open(0, "left")
    wait_for("the load to be on its way", lambda: network.proxy.forwarded > before + 30_000, LIMIT_S)
    request.cancel()
    network.cluster.assert_clean_ledgers()
    assert network.proxy.forwarded - before < LENGTHS[0] * BYTES_PER_TOKEN, "it was loaded to its end all the same"
    network.proxy.impairment = Impairment()
    network.recovers("after-leaving")
