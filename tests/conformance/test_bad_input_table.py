"""Bad requests to a running cluster: each gets its documented status and code, and the cluster serves on.

The statuses come from docs/error_codes.md; the rows give the codes. See bad_input.py for what a row is.
"""

from __future__ import annotations

import pytest

from tests.conformance.bad_input import Row
from tests.conformance.bad_input_cache_store import CACHE_STORE_ROWS
from tests.conformance.bad_input_grpc import GENERATION_ROWS, SERVER_ROWS
from tests.conformance.bad_input_http import HTTP_ROWS
from tests.conformance.live_cluster import Live
from tests.integration.cluster import wait_for

ROWS = (
    *((f"http: {row.what}", row) for row in HTTP_ROWS),
    *((f"generation: {row.what}", row) for row in GENERATION_ROWS),
    *((row.what, row) for row in SERVER_ROWS),
    *((row.what, row) for row in CACHE_STORE_ROWS),
)
CHECK_EVERY = 10


@pytest.mark.parametrize(
    ("number", "row"), [(n, row) for n, (_, row) in enumerate(ROWS)], ids=[name for name, _ in ROWS]
)
def test_bad_request_when_sent_to_a_running_cluster_then_it_is_refused_as_documented(
    live: Live, number: int, row: Row
) -> None:
    row.check(live)
    if number % CHECK_EVERY == CHECK_EVERY - 1:
        live.check_serving()


def test_table_when_counted_then_it_has_rows_of_every_kind() -> None:
    assert len(HTTP_ROWS) >= 60
    assert min(len(GENERATION_ROWS), len(SERVER_ROWS), len(CACHE_STORE_ROWS)) >= 30
    assert len({name for name, _ in ROWS}) == len(ROWS)


def test_cluster_when_all_of_them_were_refused_then_it_is_as_before(live: Live) -> None:
    live.check_serving()
    assert live.defects() == []
    workers = live.http.get("/workers").json()["workers"]
    assert [(w["role"], w["state"], w["breaker"], w["inflight"]) for w in workers] == [
        ("prefill", "ready", "closed", 0),
        ("decode", "ready", "closed", 0),
    ]
    assert live.http.get("/load").json()["inflight"] == 0
    for process in live.processes:
        assert process.metric("baton_rpc_requests_total", code="UNKNOWN_ERROR") is None
        assert process.metric("baton_contract_breaches_total") is None
    for server in live.cluster.servers:
        wait_for(f"no open request on {server.name}", lambda server=server: server.requests()["open"] == [], 20.0)
        assert server.metric("baton_rpc_requests_total", method="grpc.health.v1.Health/Check", code="PATH_NOT_FOUND")
        assert server.metric("baton_kv_ledger_imbalance_blocks") == 0
    wait_for("no lease", lambda: live.p.metric("baton_kv_leases_active") == 0, 20.0)
