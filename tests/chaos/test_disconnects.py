"""Clients that leave at any moment, and aborts: whatever they leave open ends on every server, and blocks come back."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from rpc.errors import BatonError, ErrorCode
from tests.chaos.cases import TOKENS, Case, assert_serves, cases, lingering
from tests.conformance.live_cluster import frozen
from tests.extent import extent
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import GenerationClient

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too

SEED = 20250301
CLIENTS = extent(12, 40)
AT_ONCE = 8
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def cluster(crowd: Cluster) -> Cluster:
    return crowd


def nothing_open(cluster: Cluster) -> bool:
    """Neither on the servers nor, by the router's count, on its legs."""
    if any(server.requests()["open"] for server in cluster.servers):
        return False
    lines = [line for line in cluster.router.metrics().splitlines() if line.startswith("baton_router_worker_inflight{")]
    return all(line.endswith((" 0", " 0.0")) for line in lines)


def leave_grpc(client: GenerationClient, case: Case, number: int, after_s: float) -> None:
    generation = client.open(case.prompt, TOKENS, request_id=f"leaves-{number}", salt=f"{number % 3}")
    left = threading.Event()

    def leave() -> None:
        left.set()
        generation.cancel()

    timer = threading.Timer(after_s, leave)
    timer.start()
    try:
        generation.wait_end()
    except Exception:
        assert left.is_set(), "the stream broke before its client left"
    finally:
        timer.cancel()


def leave_http(address: str, case: Case, number: int, after_s: float) -> None:
    """A plain socket, closed when the time has come, whatever was read by then."""
    body = json.dumps({
        "prompt": case.prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": number % 2 == 0,
        "cache_salt": f"{number % 3}",
    }).encode()  # fmt: skip
    host, _, port = address.rpartition(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: leaves-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    until = time.monotonic() + after_s
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        connection.sendall(head + body)
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                if not connection.recv(65536):
                    break
            except TimeoutError:
                break


def leave_computing(cluster: Cluster, client: GenerationClient) -> None:
    """A client that leaves while its prompt waits for the prefill server's engine."""
    with frozen(cluster.prefill[0]):
        generation = client.open(cases()[0].prompt, TOKENS, request_id="leaves-computing", salt="computing")
        wait_for("its prompt", lambda: cluster.prefill[0].open_state("leaves-computing"), 30.0)
        generation.cancel()
        wait_for("the router to let go", lambda: cluster.router.page("/load")["inflight"] == 0, 30.0)


def leave_reading(cluster: Cluster, client: GenerationClient, slow: Path) -> None:
    """A client that leaves in the middle of its answer."""
    with lingering(slow):
        generation = client.open(cases()[1].prompt, TOKENS, request_id="leaves-reading", salt="reading")
        generation.wait_tokens(3)
        generation.cancel()
        wait_for("the end of everything that was left open", lambda: nothing_open(cluster), LIMIT_S)


def test_disconnect_when_clients_leave_at_random_moments_then_nothing_stays_and_the_cluster_serves(
    cluster: Cluster, slow: Path
) -> None:
    numbers = random.Random(SEED)
    moments = [numbers.uniform(0.0, 1.5) for _ in range(CLIENTS)]
    with GenerationClient(cluster.router.grpc) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        left: list[Any] = []
        for number, after_s in enumerate(moments):
            case = cases()[number % len(cases())]
            if number % 4 < 2:
                left.append(pool.submit(leave_grpc, client, case, number, after_s))
            else:
                left.append(pool.submit(leave_http, cluster.router.http, case, number, after_s))
        for future in left:
            future.result(timeout=60)
        leave_reading(cluster, client, slow)  # whatever the moments above have met
        leave_computing(cluster, client)
    wait_for("the end of everything that was left open", lambda: nothing_open(cluster), LIMIT_S)
    cluster.assert_clean_ledgers()
    # They left in all stages: while the prompt was computed, and while the answer came.
    ended = [entry for server in cluster.servers for entry in server.requests()["finished"]]
    left_early = [entry for entry in ended if entry["request_id"].startswith("leaves-") and entry["code"] != 0]
    assert {entry["mode"] for entry in left_early} == {"prefill", "decode"}
    assert {entry["code_name"] for entry in left_early} <= {"CANCELLED", "REQUEST_TOMBSTONED"}, left_early
    assert any(entry["generated_tokens"] > 1 for entry in left_early)
    for number in range(len(cluster.decode)):
        assert_serves(cluster, f"after {number}")
    assert cluster.errors_without_code() == []


def abort(cluster: Cluster, request_id: str) -> bool:
    answer = httpx.post(f"http://{cluster.router.http}/abort_request", json={"request_id": request_id}, timeout=30.0)
    return bool(answer.raise_for_status().json()["found"])


def test_abort_when_the_answer_is_in_its_middle_then_it_ends_with_what_it_has(cluster: Cluster, slow: Path) -> None:
    case = cases()[1]
    with GenerationClient(cluster.router.grpc) as client:
        for surface in ("http", "grpc"):
            with lingering(slow):
                generation = client.open(case.prompt, TOKENS, salt=surface)
                generation.wait_tokens(5)
                given = abort if surface == "http" else lambda _, key: client.abort(key)
                assert given(cluster, generation.request_id)
                answer = generation.answer(LIMIT_S)
            assert answer.finish_reason == "abort"
            assert 5 <= len(answer.token_ids) < TOKENS
            assert answer.token_ids == case.expected[: len(answer.token_ids)]
            wait_for("the end of its legs", lambda: nothing_open(cluster), LIMIT_S)
            cluster.assert_clean_ledgers()
            assert not abort(cluster, generation.request_id)  # it is not open any more


def test_abort_when_the_prompt_is_being_computed_then_both_servers_let_go(cluster: Cluster) -> None:
    prefill = cluster.prefill[0]
    with GenerationClient(cluster.router.grpc) as client:
        with ExitStack() as held:
            # Several at once, so that some compute, some wait, and all have blocks reserved for them.
            with frozen(prefill):
                opened = [client.open(case.prompt, TOKENS, salt="aborted") for case in cases()]
                for role in (cluster.prefill, cluster.decode):
                    wait_for(
                        "all of them on both servers",
                        lambda role=role: sum(len(server.requests()["open"]) for server in role) == len(opened),
                        30.0,
                    )
                for decode in cluster.decode:  # none of them comes to its end before its abort
                    held.enter_context(frozen(decode))
            found = [abort(cluster, generation.request_id) for generation in opened]
            assert found == [True] * len(opened)
        for generation in opened:
            answer = generation.answer(LIMIT_S)
            assert answer.finish_reason == "abort"
            assert len(answer.token_ids) < TOKENS
    wait_for("the end of their legs", lambda: nothing_open(cluster), LIMIT_S)
    cluster.assert_clean_ledgers()
    assert_serves(cluster, "after aborts")


def test_abort_when_it_comes_before_its_request_then_the_request_is_refused(cluster: Cluster) -> None:
    assert not abort(cluster, "late-1")
    with GenerationClient(cluster.router.grpc) as client:
        with pytest.raises(BatonError) as caught:
            client.generate(cases()[0].prompt, 4, request_id="late-1")
        assert caught.value.code is ErrorCode.REQUEST_TOMBSTONED
        assert client.generate(cases()[0].prompt, 4, request_id="late-2").token_ids == cases()[0].expected[:4]
    cluster.assert_clean_ledgers()
