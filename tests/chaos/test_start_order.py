"""Processes start, end and come back in any order; the cluster serves as soon as a pair is there."""

from __future__ import annotations

import time

import httpx
import pytest

from rpc.errors import BatonError, ErrorCode
from tests.chaos.cases import FLAGS, MODEL, ROUTER_FLAGS, assert_serves, cases, wait_workers_ready
from tests.extent import WHOLE
from tests.integration.cluster import Cluster, free_port, wait_for
from tests.integration.generation_client import GenerationClient
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)  # clusters start within it, on busy machines too


def refused(cluster: Cluster) -> ErrorCode:
    """The code with which the router refuses a request, at once."""
    began = time.monotonic()
    with GenerationClient(cluster.router.grpc) as client, pytest.raises(BatonError) as caught:
        client.generate(cases()[0].prompt, 4)
    assert time.monotonic() - began < 5.0
    assert caught.value.spec.http == 503
    return caught.value.code


def post(cluster: Cluster) -> httpx.Response:
    body = {"prompt": cases()[0].prompt[:20], "max_tokens": 2}
    return httpx.post(f"http://{cluster.router.http}/v1/completions", json=body, timeout=10.0, verify=False)


def test_h6_start_when_the_router_is_first_and_servers_come_and_go_in_any_order_then_it_serves_with_each_pair() -> None:
    prefill_port, decode_port = free_port(), free_port()
    known = ["--prefill", f"127.0.0.1:{prefill_port}", "--decode", f"127.0.0.1:{decode_port}"]
    cases()  # the reference's time is not the cluster's
    with Cluster(
        0,
        0,
        model=tiny_model(MODEL),
        router=False,
        prefill_flags=FLAGS,
        decode_flags=[*FLAGS, "--no-allow-local-prefill"],
        router_flags=[*ROUTER_FLAGS, *known],
    ) as cluster:
        # Router, decode, prefill.
        cluster.start_router()
        assert cluster.router.get("/ready").status_code == 503
        assert refused(cluster) is ErrorCode.NO_DECODE_WORKER
        cluster.start_decode(["--port", str(decode_port)]).wait_ready()
        wait_workers_ready(cluster)
        assert cluster.router.get("/ready").status_code == 503
        assert refused(cluster) is ErrorCode.NO_PREFILL_WORKER
        for _ in range(20):
            response = post(cluster)
            assert response.status_code == 503
            assert response.json()["error"]["baton_code"] == ErrorCode.NO_PREFILL_WORKER
            assert int(response.headers["Retry-After"]) >= 1
        assert cluster.decode[0].requests()["finished"] == [], "the decode server has heard of none of them"
        cluster.start_prefill(["--port", str(prefill_port)]).wait_ready()
        cluster.wait_router_ready()
        assert_serves(cluster, "router first")

        if WHOLE:
            # Both end; prefill, decode come back. Their engines are others now, and are found out as such.
            for server in (cluster.decode[0], cluster.prefill[0]):
                assert server.terminate() == 0
            wait_for("the router to miss its servers", lambda: cluster.router.get("/ready").status_code == 503, 20.0)
            cluster.restart(cluster.prefill[0])
            wait_workers_ready(cluster)
            assert refused(cluster) is ErrorCode.NO_DECODE_WORKER
            cluster.restart(cluster.decode[0])
            wait_workers_ready(cluster)
            assert_serves(cluster, "prefill first")

        # The router comes back last.
        cluster.router.kill()
        cluster.start_router()
        cluster.wait_router_ready()
        assert_serves(cluster, "router last")
        assert cluster.errors_without_code() == []
