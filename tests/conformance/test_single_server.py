"""A client may forbid to spread its request over two servers: by a field, a header, or metadata."""

from __future__ import annotations

import pytest

from protos import common_pb2, generation_pb2, generation_pb2_grpc
from tests.conformance.live_cluster import CHAT, COMPLETIONS, KEY_METADATA, MODEL, PROMPT, Live, frozen
from tests.integration.cluster import wait_for
from tests.integration.generation_client import GenerationClient, request_of


@pytest.mark.parametrize("way", ["field", "header"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_request_when_it_forbids_separation_then_one_server_serves_it(live: Live, path: str, way: str) -> None:
    body = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPT}]}
    separate = live.http.post(path, json={**body, "can_use_pd_separation": True}).json()
    if way == "field":
        alone = live.http.post(path, json={**body, "can_use_pd_separation": False}).json()
    else:
        alone = live.http.post(path, json=body, headers={"x-baton-single-server": "1"}).json()
    assert (separate["baton"]["path"], alone["baton"]["path"]) == ("pd", "colocated")
    assert separate["choices"] == alone["choices"]
    assert live.cluster.router.metric("baton_router_path_total", decision="requested")


def test_request_when_it_forbids_separation_over_grpc_then_one_server_serves_it(live: Live) -> None:
    request = generation_pb2.GenerateRequest(
        model=MODEL, prompt=PROMPT, sampling=common_pb2.SamplingParams(max_tokens=3, temperature=0.0), stream=False
    )
    stub = generation_pb2_grpc.GenerationStub(live.router)
    paths = [
        next(iter(stub.Generate(request, metadata=(*KEY_METADATA, *more), timeout=15.0))).baton.path
        for more in ((), (("x-baton-single-server", "1"),))
    ]
    assert paths == ["pd", "colocated"]


@pytest.mark.invariant("RPC-3")
def test_gauge_when_requests_are_open_on_a_colocated_server_then_it_counts_them_and_falls_to_zero(live: Live) -> None:
    method = "baton.v1.Decode/Decode"
    asking = (*KEY_METADATA, ("x-baton-single-server", "1"))
    with GenerationClient(live.cluster.router.grpc) as client:
        with frozen(live.d):
            calls = [client.stub.Generate(request_of([5, 6, 7, n], 2), metadata=asking, timeout=15.0) for n in range(3)]
            wait_for("three requests", lambda: live.d.metric("baton_rpc_inflight", method=method) == 3, 20.0)
            calls.pop().cancel()
            wait_for("one less", lambda: live.d.metric("baton_rpc_inflight", method=method) == 2, 20.0)
        for call in calls:
            assert sum(len(message.tokens) for message in call) == 2
    wait_for("none", lambda: live.d.metric("baton_rpc_inflight", method=method) == 0, 20.0)
    live.check_serving()
