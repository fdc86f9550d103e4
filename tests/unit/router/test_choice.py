"""Which servers a request gets: pins, avoided servers, and how a choice is counted."""

from __future__ import annotations

import pytest

from rpc.errors import BatonError, ErrorCode
from tests.unit.router.scripted_cluster import HASTY, make_request, running_cluster
from tests.unit.router.scripted_server import answer

PROMPT = (5, 6, 7, 8)


async def test_r2_a_pin_belongs_to_one_role_and_is_followed():
    async with running_cluster(2, 2, allow_pins=True) as cluster:
        p1, p2, d1, d2 = cluster.servers
        for pins, prefills, decodes in [
            ({"pin_decode": d2.address}, {p1, p2}, {d2}),
            ({"pin_prefill": p2.address}, {p2}, {d1, d2}),
            ({"pin_prefill": p1.address, "pin_decode": d1.address}, {p1}, {d1}),
        ]:
            for server in cluster.servers:
                server.seen.clear()
            for _ in range(4):
                assert (await cluster.collect(make_request(**pins))).tokens == answer(PROMPT, 6)
            assert {s for s in (p1, p2) if s.seen} == prefills
            assert {s for s in (d1, d2) if s.seen} == decodes
        legs = cluster.access.lines[-1]["servers"][0]
        assert (legs["prefill"], legs["decode"]) == (p1.address, d1.address)
        pinned = {"role": "decode", "policy": "round_robin", "result": "pinned"}
        assert cluster.metrics.value("baton_router_decisions_total", **pinned) == 8
        for role in ("prefill", "decode"):
            name = "baton_router_decision_seconds_count"
            assert cluster.metrics.value(name, role=role, policy="round_robin") == 12


@pytest.mark.parametrize("pin", ["pin_prefill", "pin_decode"])
async def test_r2_a_pin_that_names_no_server_of_its_role_is_refused(pin):
    async with running_cluster(1, 1, allow_pins=True) as cluster:
        prefill, decode = cluster.servers
        wrong_role = decode.address if pin == "pin_prefill" else prefill.address
        for address in ("127.0.0.1:9", "nonsense", wrong_role):
            with pytest.raises(BatonError) as caught:
                await cluster.collect(make_request(**{pin: address}))
            assert caught.value.code is ErrorCode.INVALID_ROUTE_REQUEST
        assert not any(s.seen for s in cluster.servers)


async def test_r2_a_pin_of_a_server_that_is_not_ready_is_typed_by_its_role():
    async with running_cluster(1, 2, allow_pins=True, failover=HASTY) as cluster:
        gone = cluster.servers[1]
        await gone.stop()
        await cluster.until(lambda: cluster.worker(gone).state == "unhealthy")
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request(pin_decode=gone.address))
        assert caught.value.code is ErrorCode.NO_DECODE_WORKER


async def test_pins_when_they_are_not_allowed_then_they_change_nothing():
    async with running_cluster(1, 1) as cluster:
        result = await cluster.collect(make_request(pin_prefill="nonsense", pin_decode="nonsense"))
        assert result.finish.reason == "length"


async def test_pins_when_one_server_would_do_then_a_pinned_pair_still_serves():
    async with running_cluster(1, 2, local=True, allow_pins=True, disagg_min_prompt_tokens=100) as cluster:
        prefill, _, d2 = cluster.servers
        assert (await cluster.collect(make_request(pin_prefill=prefill.address))).finish.path == "pd"
        assert (await cluster.collect(make_request(pin_decode=d2.address))).finish.path == "colocated"
        assert len(d2.seen) >= 1


async def test_choose_when_servers_are_to_be_avoided_then_they_come_last():
    async with running_cluster(1, 3) as cluster:
        _, d1, d2, d3 = cluster.servers
        avoid = {cluster.worker(d1), cluster.worker(d3)}
        for _ in range(3):
            choice = cluster.chooser.choose(make_request(), 0, avoid)
            assert choice.decode.address == d2.address
        avoid.add(cluster.worker(d2))
        assert cluster.chooser.choose(make_request(), 0, avoid).decode in avoid


async def test_another_decode_when_all_were_tried_then_there_is_none():
    async with running_cluster(1, 2) as cluster:
        p, d1, d2 = (cluster.worker(s) for s in cluster.servers)
        assert cluster.chooser.another_decode(p, make_request(), {d1}) is d2
        assert cluster.chooser.another_decode(p, make_request(), {d1, d2}) is None


@pytest.mark.parametrize(("remaining", "decision"), [(1, "single_token"), (2, "pd")])
async def test_choose_when_tokens_are_out_already_then_what_is_left_counts(remaining, decision):
    async with running_cluster(1, 1) as cluster:
        assert cluster.chooser.choose(make_request(max_tokens=6), 6 - remaining).decision == decision
