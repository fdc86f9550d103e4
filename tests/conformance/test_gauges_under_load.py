"""Gauges of open work show what is held, and 0 again however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos import common_pb2, generation_pb2, prefill_pb2, prefill_pb2_grpc
from tests.conformance.live_cluster import BLOCK, KEY_METADATA, MODEL, POOL_BLOCKS, Live, frozen
from tests.integration.cluster import ServerProcess, wait_for
from tests.integration.wire_client import generate_input, key_of

HELD = 4
PROMPT = 5 * BLOCK
GENERATE = "baton.v1.Generation/Generate"
LIMIT_S = 20.0
WORK = (
    "baton_num_requests_running", "baton_num_requests_waiting", "baton_num_requests_loading", "baton_kv_leases_active",
    "baton_kv_transfer_inflight", "baton_router_worker_inflight", "baton_router_queue_depth",
)  # fmt: skip


def gauges(process: ServerProcess) -> dict[str, float]:
    """Gauges of open work that are not 0; the RPCs of generation by method."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(process.metrics()):
        for sample in family.samples:
            method = sample.labels.get("method", "")
            if sample.name == "baton_rpc_inflight" and method.endswith(("/Generate", "/Prefill", "/Decode")):
                found[method] = found.get(method, 0) + sample.value
            elif sample.name in WORK:
                found[sample.name] = found.get(sample.name, 0) + sample.value
    assert all(value >= 0 for value in found.values()), found
    return {name: value for name, value in found.items() if value}


@contextmanager
def barrier(live: Live) -> Iterator[None]:
    """Nothing is computed on the prefill server meanwhile: somebody else's KV is staged in nearly all of its pool."""
    stub = prefill_pb2_grpc.PrefillStub(live.prefill)
    key = key_of("barrier")
    prompt = [(7 * i) % 380 + 2 for i in range((POOL_BLOCKS - 4) * BLOCK - 1)]
    message = prefill_pb2.PrefillRequest(input=generate_input("barrier", prompt, model=MODEL, key=key), hold_kv=True)
    stub.Prefill(message, timeout=LIMIT_S)
    try:
        yield
    finally:
        stub.Abort(prefill_pb2.PrefillAbortRequest(request_key=key), timeout=LIMIT_S)


def start(live: Live, name: str, *, n: int = 1, timeout_s: float = 30.0) -> list[Any]:
    """HELD calls whose prompts and salts differ, under way."""
    stub = live.router.unary_stream(f"/{GENERATE}")
    calls = []
    for number in range(HELD):
        request = generation_pb2.GenerateRequest(
            request_id=f"gauges-{name}-{number}", model=MODEL, cache_salt=f"{name}-{number}", n=n,
            token_ids=generation_pb2.TokenIds(ids=[(number * 31 + 7 * i) % 380 + 2 for i in range(PROMPT)]),
            sampling=common_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
        )  # fmt: skip
        calls.append(stub(request.SerializeToString(), timeout=timeout_s, metadata=KEY_METADATA))
    return calls


def codes(calls: Sequence[Any]) -> list[str]:
    """How the calls end."""
    found = []
    for call in calls:
        try:
            found.append("ok" if list(call) else "nothing")
        except grpc.RpcError as error:
            found.append(error.code().name)
    return found


def abort_all(live: Live, name: str, calls: Sequence[Any]) -> list[str]:
    for number in range(HELD):
        answer = live.http.post("/abort_request", json={"request_id": f"gauges-{name}-{number}"})
        assert answer.status_code == 200
    return codes(calls)


def cancel_all(live: Live, name: str, calls: Sequence[Any]) -> list[str]:
    for call in calls:
        call.cancel()
    return codes(calls)


ENDS: dict[str, Callable[[Live, str, Sequence[Any]], list[str]]] = {
    "cancel": cancel_all,
    "deadline": lambda live, name, calls: codes(calls),
    "abort": abort_all,
}


def idle(live: Live) -> bool:
    return not any(gauges(process) for process in live.processes)


@pytest.mark.invariant("RPC-3")
@pytest.mark.parametrize("how", ["finish", *ENDS])
def test_3_gauges_when_loads_are_held_then_they_count_them_and_are_0_after(live: Live, how: str) -> None:
    """The decode server's loads are open and wait for prompts that nobody computes."""
    wait_for("an idle cluster", lambda: idle(live), LIMIT_S, poll_s=0.05)
    with barrier(live):
        calls = start(live, how, timeout_s=10.0 if how == "deadline" else 30.0)
        held = {"baton.v1.Decode/Decode": HELD, "baton_num_requests_loading": HELD, "baton_kv_transfer_inflight": HELD}
        wait_for(f"{HELD} loads", lambda: gauges(live.d) == held, LIMIT_S, poll_s=0.05)
        # An engine without steps tells its figures once a second.
        queued = {"baton.v1.Prefill/Prefill": HELD, "baton_num_requests_waiting": HELD, "baton_kv_leases_active": 1}
        wait_for(f"{HELD} prompts in the queue", lambda: gauges(live.p) == queued, LIMIT_S, poll_s=0.05)
        router = gauges(live.cluster.router)
        assert router == {GENERATE: HELD, "baton_router_worker_inflight": 2 * HELD}
        if how != "finish":
            ended = ENDS[how](live, how, calls)
            wait_for("an idle router", lambda: not gauges(live.cluster.router), LIMIT_S, poll_s=0.05)
    if how == "finish":
        ended = codes(calls)
    expected = {"finish": "ok", "cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED", "abort": "ok"}
    assert ended == [expected[how]] * HELD
    wait_for("an idle cluster", lambda: idle(live), LIMIT_S, poll_s=0.05)
    live.cluster.assert_clean_ledgers()


@pytest.mark.invariant("RPC-3")
@pytest.mark.parametrize("how", ["finish", "cancel"])
def test_3_gauges_when_a_colocated_server_is_held_then_its_calls_are_in_flight(live: Live, how: str) -> None:
    wait_for("an idle cluster", lambda: idle(live), LIMIT_S, poll_s=0.05)
    with frozen(live.d):
        calls = start(live, f"colocated-{how}", n=2)  # its choices are computed on one server, one by one
        wait_for("calls in flight", lambda: gauges(live.d).get("baton.v1.Decode/Decode") == HELD, LIMIT_S, poll_s=0.05)
        if how == "cancel":
            assert cancel_all(live, how, calls) == ["CANCELLED"] * HELD
    if how == "finish":
        assert codes(calls) == ["ok"] * HELD
    wait_for("an idle cluster", lambda: idle(live), LIMIT_S, poll_s=0.05)
    live.cluster.assert_clean_ledgers()


def test_log_when_work_was_held_and_ended_then_it_has_no_defect(live: Live) -> None:
    assert live.defects() == []
    live.check_serving()
