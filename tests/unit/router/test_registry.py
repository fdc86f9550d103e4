"""The registry against servers on loopback that speak the Worker service."""

from __future__ import annotations

import asyncio
import random

import pytest

from protos import common_pb2, worker_pb2
from router.breaker import BreakerState
from router.choice import Chooser
from router.fan_out import flush_caches
from router.pairing import WorkerFacts
from router.prefix.feed import PrefixFeed
from router.prefix.index import PrefixIndex
from router.registry import HealthSettings, WorkerRegistry
from router.worker import Guard, Worker
from rpc.channels import ChannelPool
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry
from rpc.version import PROTOCOL_VERSION
from tests.unit.router.scripted_cluster import make_request, running_cluster
from tests.unit.router.scripted_server import ScriptedServer, answer


def states(cluster) -> list[str]:
    return [w.state for w in cluster.registry.workers()]


async def test_add_when_the_server_comes_later_then_it_is_found_without_being_added_again():
    async with running_cluster(0, 0) as cluster:
        late = ScriptedServer("prefill", cluster.engines)
        address = await late.start()
        await late.stop()
        cluster.registry.add("prefill", address)
        await cluster.until(lambda: cluster.registry.workers()[0].reasons != ("not reached yet",))
        assert states(cluster) == ["unhealthy"]
        await late.start(address)
        cluster.servers.append(late)
        await cluster.ready(1)
        assert cluster.metrics.value("baton_router_workers", role="prefill", state="ready") == 1


async def test_h6_a_router_with_a_decode_server_alone_refuses_until_a_prefill_server_comes():
    async with running_cluster(0, 1) as cluster:
        for _ in range(3):
            with pytest.raises(BatonError) as caught:
                await cluster.collect(make_request())
            assert caught.value.code is ErrorCode.NO_PREFILL_WORKER
        assert not cluster.servers[0].seen
        await cluster.add("prefill")
        await cluster.ready(2)
        result = await cluster.collect(make_request())
        assert (result.tokens, result.finish.path) == (answer((5, 6, 7, 8), 6), "pd")


async def test_h7_eight_servers_that_load_at_once_are_asked_again_and_again_and_none_is_lost():
    async with running_cluster(4, 4) as cluster:
        registry, lost = cluster.registry, []
        registry.on_lost.append(lost.append)
        for server in cluster.servers:
            await server.set_state(worker_pb2.WORKER_STATE_STARTING)
        await cluster.until(lambda: "ready" not in states(cluster))
        for _ in range(3):
            for worker in registry.workers():
                registry.note_failure(worker, BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))
            await cluster.until(lambda: not any(worker.doubt for worker in registry.workers()))
        assert not any(worker.disconnected for worker in registry.workers())
        for server in cluster.servers:
            await server.set_state(worker_pb2.WORKER_STATE_READY)
        await cluster.ready(8)
        assert lost == []
        assert (await cluster.collect(make_request())).tokens == answer((5, 6, 7, 8), 6)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "h:1:2", "http://h:1", "a b:1"])
async def test_add_when_the_address_is_none_then_it_is_refused(address):
    async with running_cluster(0, 0) as cluster:
        with pytest.raises(BatonError) as caught:
            cluster.registry.add("prefill", address)
        assert caught.value.code is ErrorCode.INVALID_PARAMS
        assert not cluster.registry.workers()


async def test_add_when_it_is_known_then_nothing_changes_and_the_other_role_is_refused():
    async with running_cluster(1, 0) as cluster:
        [worker] = cluster.registry.workers()
        assert cluster.registry.add("prefill", worker.address) is worker
        with pytest.raises(BatonError):
            cluster.registry.add("decode", worker.address)


async def test_remove_when_a_request_is_open_there_then_it_goes_on_and_no_new_one_comes():
    async with running_cluster(1, 2) as cluster:
        _, first, second = cluster.servers
        reached, go = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            reached.set()
            await go.wait()

        first.at["token:2"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await asyncio.wait_for(reached.wait(), 20)
        worker = cluster.worker(first)
        assert cluster.registry.remove("decode", first.address)
        assert not cluster.registry.remove("decode", first.address)
        for _ in range(3):
            await cluster.collect(make_request())
        assert len(second.seen) == 3
        go.set()
        assert (await task).tokens == answer((5, 6, 7, 8), 6)
        assert worker.inflight == 0
        assert cluster.metrics.value("baton_router_worker_inflight", role="decode", worker=first.address) is None


@pytest.mark.invariant("RPC-31")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol_version": 99}, "protocol_version"),
        ({"model_fingerprint": "0" * 32}, "model_fingerprint"),
        ({"role": worker_pb2.ROLE_PREFILL, "cache_store_addresses": ["h:1"]}, "is a prefill server"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype"),
        ({"transports": ["nixl"]}, "transports"),
        (
            {
                "groups": [
                    common_pb2.KvGroup(
                        tag="full", num_layers=2, num_kv_heads=2, head_dim=16, block_size=24, dtype="float32"
                    )
                ]
            },
            "block_size[full]: prefill 16, decode 24 (one must be a multiple of the other)",
        ),
    ],
)
async def test_h2_a_server_that_does_not_fit_gets_no_request_and_says_why(change, reason):
    async with running_cluster(2, 0) as cluster:
        decode = await cluster.add("decode", **change)
        worker = cluster.worker(decode)
        await cluster.until(lambda: worker.state == "incompatible")
        assert reason in "; ".join(worker.reasons)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.INCOMPATIBLE_PEER
        assert not decode.seen
        assert not any(s.seen for s in cluster.servers)
        assert cluster.metrics.value("baton_router_workers", role="decode", state="incompatible") == 1
        [described] = [line for line in cluster.registry.describe() if line["role"] == "decode"]
        assert described["state"] == "incompatible"


@pytest.mark.invariant("RPC-31")
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("decode",)], ids=["a pair", "one server alone"])
async def test_servers_when_they_agree_on_a_version_that_the_router_does_not_speak_then_they_are_refused(roles):
    async with running_cluster(0, 0) as cluster:
        servers = [await cluster.add(role, protocol_version=99, allows_local_prefill=True) for role in roles]
        for server in servers:
            worker = cluster.worker(server)
            await cluster.until(lambda: worker.state == "incompatible")  # noqa: B023
            assert worker.reasons == (f"protocol_version: 99, the router speaks {PROTOCOL_VERSION}",)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.INCOMPATIBLE_PEER
        assert caught.value.metadata["protocol_version"] == f"decode 99, router {PROTOCOL_VERSION}"
        assert not any(server.seen for server in servers)


async def test_choose_when_some_servers_fit_then_only_these_are_paired():
    other = [common_pb2.KvGroup(tag="full", num_layers=2, num_kv_heads=2, head_dim=16, block_size=24, dtype="float32")]
    async with running_cluster(1, 1) as cluster:
        p24 = await cluster.add("prefill", groups=other)
        d24 = await cluster.add("decode", groups=other)
        await cluster.ready(4)
        for _ in range(6):
            await cluster.collect(make_request())
        p16, d16 = cluster.servers[:2]
        keys = [{seen.request_key for seen in server.seen} for server in (p16, d16, p24, d24)]
        assert keys[0] == keys[1]
        assert keys[2] == keys[3]
        assert len(keys[0]) == len(keys[2]) == 3


async def test_status_when_the_server_drains_then_it_gets_no_new_requests_until_it_is_ready_again():
    async with running_cluster(1, 2) as cluster:
        _, first, second = cluster.servers
        await first.set_state(worker_pb2.WORKER_STATE_DRAINING)
        await cluster.until(lambda: cluster.worker(first).state == "draining")
        for _ in range(4):
            await cluster.collect(make_request())
        assert (len(first.seen), len(second.seen)) == (0, 4)
        await first.set_state(worker_pb2.WORKER_STATE_READY)
        await cluster.until(lambda: cluster.worker(first).state == "ready")


async def test_status_when_it_is_older_then_it_is_ignored():
    async with running_cluster(1, 0) as cluster:
        [worker] = cluster.registry.workers()
        server = cluster.servers[0]
        newest = worker.reported

        def status(version: int, engine_id: str, running: int) -> worker_pb2.WorkerStatus:
            return worker_pb2.WorkerStatus(
                state=worker_pb2.WORKER_STATE_READY, engine_id=engine_id, version=version, running=running
            )

        assert not worker.take_status(status(newest.version, server.engine_id, 9))
        assert not worker.take_status(status(0, server.engine_id, 9))
        assert worker.reported is newest
        assert worker.take_status(status(newest.version + 1, server.engine_id, 9))
        assert worker.take_status(status(1, "another engine", 3))
        assert worker.reported.running == 3


async def test_restart_when_a_new_engine_serves_at_the_address_then_its_facts_replace_the_old_ones():
    async with running_cluster(1, 1) as cluster:
        prefill = cluster.servers[0]
        worker = cluster.worker(prefill)
        for _ in range(5):
            worker.breaker.failure()
        assert worker.breaker.state is BreakerState.OPEN
        old = worker.facts.engine_id
        prefill.info_changes["max_model_len"] = 128
        await prefill.restart()
        await cluster.until(lambda: worker.state == "ready" and worker.facts.engine_id != old)
        assert worker.facts.max_model_len == 128
        assert worker.breaker.state is BreakerState.CLOSED
        await cluster.collect(make_request())
        assert cluster.servers[1].requests[-1].kv_source.engine_id == prefill.engine_id


async def test_r6_load_when_the_status_is_fresh_then_requests_of_others_count_and_when_frozen_only_its_own():
    async with running_cluster(1, 2, policy="least_load", health=HealthSettings(interval_s=30.0)) as cluster:
        _, busy, idle = cluster.servers
        busy.running = 7
        await busy.notify()
        await cluster.until(lambda: cluster.worker(busy).load == 7)
        for _ in range(3):
            await cluster.collect(make_request())
        assert (len(busy.seen), len(idle.seen)) == (0, 3)
        # A status that has become old no longer speaks against its server.
        cluster.worker(busy)._status_fresh_s = -1.0
        for _ in range(4):
            await cluster.collect(make_request())
        assert len(busy.seen) == 2


async def test_describe_when_servers_are_known_then_facts_pairs_and_breaker_are_shown():
    async with running_cluster(1, 1) as cluster:
        prefill, decode = cluster.registry.describe()
        assert prefill["pairs"] == [{"address": decode["address"], "differences": []}]
        assert prefill["breaker"] == "closed"
        assert prefill["facts"]["served_model_names"] == ["tiny"]
        assert decode["status"]["version"] >= 1


async def test_note_failure_when_the_connection_is_fine_after_all_then_the_server_is_back_soon():
    async with running_cluster(1, 1) as cluster:
        worker = cluster.worker(cluster.servers[0])
        cluster.registry.note_failure(worker, BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))
        assert worker.state == "unhealthy"
        await cluster.until(lambda: worker.state == "ready")


async def test_flush_caches_when_one_server_is_gone_then_every_result_is_there():
    async with running_cluster(1, 1) as cluster:
        await cluster.servers[1].stop()
        results = await flush_caches(cluster.registry)
        # The scripted servers do not implement it, which is a failure like another.
        assert [r["ok"] for r in results] == [False, False]
        assert results[1]["code"] in ("CONNECT_FAILED", "CONNECTION_RESET_BY_PEER")
        assert {r["role"] for r in results} == {"prefill", "decode"}


async def test_r6_start_and_stop_a_hundred_times_leaks_no_task():
    metrics = Registry("router", process_metrics=False)
    before = len(asyncio.all_tasks())
    for _ in range(100):
        pool = ChannelPool()
        registry = WorkerRegistry(pool, metrics)
        feed = PrefixFeed(registry, pool, metrics, PrefixIndex(10), ("prefill", "decode"))
        registry.add("prefill", "127.0.0.1:1")
        async with registry, feed:
            registry.add("decode", "127.0.0.1:2")
            await asyncio.sleep(0)
        await pool.close()
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("policy", ["least_load", "session", "cache_aware", "cost"])
async def test_r6_members_choices_and_requests_in_any_order_leave_every_count_at_zero(policy):
    rng = random.Random(11)
    metrics = Registry("router", process_metrics=False)
    registry = WorkerRegistry(ChannelPool(), metrics)
    chooser = Chooser(registry, metrics, prefill_policy=policy, decode_policy=policy, index_entries=60)
    PrefixFeed(registry, registry.pool, metrics, chooser.index, chooser.index_roles)
    server = ScriptedServer("prefill")
    facts = {}
    for server.role in ("prefill", "decode"):
        facts[server.role] = WorkerFacts.from_info(server.info())
    open_legs: list[tuple[Worker, Guard]] = []

    def choose() -> None:
        """As an attempt does: one leg on each of the chosen servers."""
        for worker in registry.workers():
            # Whatever the last change of members made of it.
            worker.state, worker.facts = "ready", facts[worker.role]
        prompt = [rng.randrange(3)] * 40 + [rng.randrange(1000)] * 30
        request = make_request(prompt, session_id=f"s{rng.randrange(5)}")
        if not (registry.workers("prefill") and registry.workers("decode")):
            with pytest.raises(BatonError):
                chooser.choose(request, 0)
            return
        choice = chooser.choose(request, 0)
        for worker, tokens in ((choice.prefill, (choice.uncached_tokens, 0)), (choice.decode, (0, 70))):
            assert worker in registry.workers()
            open_legs.append((worker, worker.enter(*tokens)))

    for _ in range(3000):
        address = f"127.0.0.1:{rng.randrange(1, 8)}"
        role = "prefill" if int(address[-1]) % 2 else "decode"
        match rng.choice(["add", "remove", "choose", "choose", "computed", "finish", "finish twice", "fail", "status"]):
            case "add":
                registry.add(role, address)
            case "remove":
                registry.remove(role, address)
            case "choose":
                choose()
            case "computed" if open_legs:
                rng.choice(open_legs)[1].computed()
            case "finish" if open_legs:
                open_legs.pop(rng.randrange(len(open_legs)))[1].release()
            case "finish twice" if open_legs:
                _, guard = open_legs.pop()
                guard.release()
                guard.release()
                guard.computed()
            case "fail" if registry.workers():
                worker = rng.choice(registry.workers())
                registry.note_failure(worker, BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))
            case "status" if registry.workers():
                status = worker_pb2.WorkerStatus(engine_id="e", version=rng.randrange(10), running=rng.randrange(5))
                rng.choice(registry.workers()).take_status(status)
        for worker in registry.workers():
            assert worker.inflight == sum(one is worker for one, _ in open_legs)
        if chooser.index is not None:
            assert set(chooser.index.servers()) == set(registry.workers())
            assert len(chooser.index) == sum(map(chooser.index.entries_of, registry.workers())) <= 60
    for _, guard in open_legs:
        guard.release()
    for worker in {*registry.workers(), *(worker for worker, _ in open_legs)}:
        assert (worker.inflight, worker.queued_tokens, worker.context_tokens) == (0, 0, 0)
    for worker in registry.workers():
        labels = {"role": worker.role, "worker": worker.address}
        assert metrics.value("baton_router_worker_inflight", **labels) == 0
    shown = metrics.render().decode()
    for number in range(1, 8):
        address = f"127.0.0.1:{number}"
        known = any(w.address == address for w in registry.workers())
        assert (f'worker="{address}"' in shown) == known
        registry.remove("prefill" if number % 2 else "decode", address)
    assert chooser.index is None or len(chooser.index) == 0
    await registry.pool.close()


async def test_add_when_the_server_describes_itself_incompletely_then_it_is_not_used_and_the_breach_is_counted():
    async with running_cluster(0, 0) as cluster:
        await cluster.add("prefill", model_fingerprint="")
        await cluster.until(lambda: cluster.metrics.value("baton_contract_breaches_total", kind="absent_field"))
        [worker] = cluster.registry.workers()
        assert (worker.state, worker.facts) == ("unhealthy", None)
        assert worker.reasons == ("the server does not say: model_fingerprint",)
