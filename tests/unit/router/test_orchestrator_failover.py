"""The orchestrator when servers fail: retry, migration, budget, breaker, silence, and what is left behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from router.breaker import BreakerSettings, BreakerState
from router.budget import Backoff
from router.failover import FailoverSettings
from router.registry import HealthSettings
from router.requests import FinishEvent, TokensEvent
from rpc.errors import BatonError, ErrorCode
from rpc.status import load_failed
from tests.unit.router.scripted_cluster import (
    HASTY,
    LIMITS,
    Clock,
    Collected,
    make_request,
    running_cluster,
)
from tests.unit.router.scripted_server import WAIT_S, Hold, answer, fails

PROMPT = (5, 6, 7, 8)
# Finds out about a server that is stopped. The others may miss a check, on a machine that stands still for a second.
WATCHFUL = HealthSettings(interval_s=1.0, timeout_s=0.3, failure_threshold=3)


def counted(cluster, name, **labels):
    return cluster.metrics.value(name, **labels) or 0


RETRYABLE_ON_DECODE = [
    ErrorCode.DECODE_MALLOC_FAILED,
    ErrorCode.EXECUTION_EXCEPTION,
    ErrorCode.LOAD_KV_CACHE_FAILED,
    ErrorCode.WAIT_TO_RUN_TIMEOUT,
    ErrorCode.SERVER_DRAINING,
    ErrorCode.OUTPUT_QUEUE_FULL,
]


@pytest.mark.parametrize("code", RETRYABLE_ON_DECODE)
async def test_generate_when_a_decode_server_refuses_then_the_other_one_serves_it(code):
    async with running_cluster(1, 2) as cluster:
        prefill, first, second = cluster.servers
        first.at["start"] = fails(code)
        # Not before the other one is asked, so that no token is out.
        prefill.at["answer"] = lambda: second.until(lambda: second.seen)
        result = await cluster.collect(make_request())
        assert result.tokens == answer(PROMPT, 6)
        assert len(second.seen) == 1
        assert counted(cluster, "baton_retries_total", role="decode", code=code.name) == 1
        await cluster.settled()
        if code is ErrorCode.DECODE_MALLOC_FAILED:
            # Tried elsewhere while the prompt was being computed: once, under one key.
            assert len(prefill.seen) == 1
            assert result.finish.attempts == 1
            assert first.seen[0].request_key == second.seen[0].request_key
        else:
            assert result.finish.attempts == 2
            key = second.seen[0].request_key
            assert key.partition(".")[0].endswith("#1")
            # What is left of the first attempt may come there later.
            assert key in [seen.request_key for seen in prefill.seen]


@pytest.mark.invariant("RPC-7")
async def test_generate_when_decode_reports_602_then_it_is_treated_as_8211():
    async with running_cluster(1, 1) as cluster:
        cluster.servers[0].at["start"] = Hold()  # no token comes out
        cluster.servers[1].at["start"] = fails(ErrorCode.MALLOC_FAILED)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.DECODE_MALLOC_FAILED
        assert caught.value.http_status == 503
        await cluster.settled()


@pytest.mark.parametrize("code", [ErrorCode.MALLOC_FAILED, ErrorCode.EXECUTION_EXCEPTION, ErrorCode.SERVER_DRAINING])
async def test_generate_when_a_prefill_server_fails_then_the_other_one_serves_it_and_decode_is_aborted(code):
    async with running_cluster(2, 1) as cluster:
        first, second, decode = cluster.servers
        first.at["start"] = fails(code)
        result = await cluster.collect(make_request())
        assert (result.tokens, result.finish.attempts) == (answer(PROMPT, 6), 2)
        assert len(second.seen) == 1
        await decode.until(lambda: decode.aborted)
        assert [key for key, _, _ in decode.aborted] == [first.seen[0].request_key]
        assert counted(cluster, "baton_retries_total", role="prefill", code=code.name) == 1
        await cluster.settled()


@pytest.mark.parametrize("point", ["start", "reserved", "loaded"])
@pytest.mark.parametrize("code", [ErrorCode.EXECUTION_EXCEPTION, ErrorCode.INVALID_PARAMS])
async def test_f4_a_failing_decode_leg_aborts_a_running_prefill_leg_at_once(point, code):
    async with running_cluster(1, 1, failover=FailoverSettings(max_retries=0, migration_limit=0)) as cluster:
        prefill, decode = cluster.servers
        prefill.at["answer"] = Hold()
        decode.at[point] = fails(code)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is code
        await prefill.until(lambda: prefill.aborted)
        key, number, source = prefill.aborted[0]
        # Both legs have one key; the prefill server may have heard of its end before its beginning.
        assert (key, number, source) == (decode.seen[0].request_key, int(code), "peer")
        assert counted(cluster, "baton_aborts_total", leg="prefill", source="peer") == 1
        await cluster.settled()


@pytest.mark.parametrize("code", [ErrorCode.INVALID_PARAMS, ErrorCode.LONG_PROMPT_ERROR, ErrorCode.OUT_OF_VOCAB_RANGE])
async def test_generate_when_the_failure_is_the_requests_own_then_it_is_not_tried_again(code):
    async with running_cluster(2, 2) as cluster:
        for server in cluster.servers:
            server.at["start"] = fails(code)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is code
        assert sum(len(s.seen) for s in cluster.servers) <= 2
        await cluster.settled()


async def test_p1_prefill_refuses_and_the_load_fails_with_it_then_the_client_gets_the_refusal():
    async with running_cluster(1, 1) as cluster:
        prefill, decode = cluster.servers
        hold = Hold()

        async def refuse() -> None:
            await hold()
            raise BatonError(ErrorCode.LONG_PROMPT_ERROR, "too long for this server")

        async def load_fails() -> None:
            await hold.wait_reached()
            hold.let_go.set()
            raise load_failed(BatonError(ErrorCode.LONG_PROMPT_ERROR))

        prefill.at["start"] = refuse
        decode.at["reserved"] = load_fails
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.LONG_PROMPT_ERROR
        assert caught.value.message == "too long for this server"
        assert len(prefill.seen) == 1
        await cluster.settled()


async def test_generate_when_every_retry_fails_then_the_servers_code_reaches_the_client():
    async with running_cluster(1, 1) as cluster:
        prefill, decode = cluster.servers
        prefill.at["start"] = Hold()  # no token comes out

        def fail() -> None:
            raise load_failed(BatonError(ErrorCode.KV_CHECKSUM_MISMATCH))

        decode.at["start"] = fail
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.LOAD_KV_CACHE_FAILED
        assert caught.value.metadata["cause"] == "KV_CHECKSUM_MISMATCH"
        assert len(cluster.servers[1].seen) == 4
        await cluster.settled()
        assert len(cluster.access.lines) == 1
        assert [leg["code"] for leg in cluster.access.lines[0]["servers"]] == ["LOAD_KV_CACHE_FAILED"] * 4


async def test_generate_when_it_makes_every_server_fail_then_8513_which_nobody_retries():
    async with running_cluster(1, 2) as cluster:
        cluster.servers[0].at["start"] = Hold()  # no token comes out
        for server in cluster.servers[1:]:
            server.at["start"] = fails(ErrorCode.EXECUTION_EXCEPTION)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.WORKER_EXECUTION_FAILED
        assert caught.value.metadata["first_cause"] == "EXECUTION_EXCEPTION"
        assert not caught.value.spec.retryable


async def test_generate_when_the_retry_budget_is_used_up_then_8610_with_the_first_cause():
    async with running_cluster(1, 1, retry_budget_ratio=0.0) as cluster:
        cluster.servers[0].at["start"] = Hold()  # no token comes out
        cluster.servers[1].at["start"] = fails(ErrorCode.WAIT_TO_RUN_TIMEOUT, where="there")
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.RETRY_BUDGET_EXHAUSTED
        assert caught.value.metadata["first_cause_code"] == "8213"
        assert caught.value.metadata["where"] == "there"
        assert counted(cluster, "baton_retry_budget_exhausted_total", role="decode") == 1
        assert len(cluster.servers[1].seen) == 1
        await cluster.settled()


async def test_generate_when_a_server_drains_then_trying_another_costs_no_budget():
    async with running_cluster(1, 2, retry_budget_ratio=0.0) as cluster:
        cluster.servers[1].at["start"] = fails(ErrorCode.SERVER_DRAINING)
        assert (await cluster.collect(make_request())).tokens == answer(PROMPT, 6)


@pytest.mark.parametrize("point", ["token:1", "token:2", "token:4", "finished"])
@pytest.mark.parametrize("how", ["killed", "typed"])
async def test_generate_when_decode_dies_in_mid_stream_then_the_answer_goes_on_elsewhere(point, how):
    async with running_cluster(1, 2) as cluster:
        prefill, first, second = cluster.servers
        first.at[point] = first.stop if how == "killed" else fails(ErrorCode.EXECUTION_EXCEPTION)
        result = await cluster.collect(make_request())
        if how == "killed":  # perhaps before its word that it had loaded was heard
            await prefill.until(lambda: first.seen[0].request_key in [key for key, _, _ in prefill.aborted])
        assert result.tokens == answer(PROMPT, 6)
        assert result.indices == list(range(6))
        assert len(result.summaries) == 1
        assert result.finish.reason == "length"
        if point == "finished" and not second.seen:
            # Every token was out. (What a killed server sent last may be lost on the way.)
            assert result.finish.attempts == 1
        else:
            emitted = len(second.seen[0].output_token_ids)
            assert emitted == int(point[-1]) or how == "killed"
            assert list(second.seen[0].output_token_ids) == answer(PROMPT, emitted)
            assert second.seen[0].sampling.seed == first.seen[0].sampling.seed
            assert result.finish.attempts == 2
        migrations = result.finish.attempts - 1
        assert counted(cluster, "baton_migrations_total", result="ok") == migrations
        assert how == "killed" or migrations == (0 if point == "finished" else 1)
        await cluster.settled()


async def test_generate_when_prefill_dies_after_its_answer_then_the_answer_goes_on_through_another():
    async with running_cluster(2, 1) as cluster:
        first, second, decode = cluster.servers
        hold = Hold()
        decode.at["reserved"] = hold
        got = []
        async with aclosing(cluster.orchestrator.generate(make_request())) as events:
            got.append(await anext(events))
            await hold.wait_reached()
            decode.at["reserved"] = lambda: None
            await first.stop()
            cluster.engines.pop(first.engine_id)
            hold.let_go.set()
            got += [event async for event in events]
        tokens = [t.token_id for event in got if isinstance(event, TokensEvent) for t in event.tokens]
        assert tokens == answer(PROMPT, 6)
        assert list(second.seen[0].output_token_ids) == answer(PROMPT, 1)
        await cluster.settled()


async def test_generate_when_prefill_dies_after_the_load_then_nobody_notices():
    async with running_cluster(1, 1) as cluster:
        prefill, decode = cluster.servers
        hold, result = Hold(), Collected()
        decode.at["token:2"] = hold
        async with aclosing(cluster.orchestrator.generate(make_request())) as events:
            for _ in range(2):  # the second token says that the load is complete
                result.add(await anext(events))
            await prefill.stop()
            await cluster.until(lambda: cluster.worker(prefill).state == "unhealthy")
            hold.let_go.set()
            async for event in events:
                result.add(event)
        assert (result.tokens, result.finish.attempts) == (answer(PROMPT, 6), 1)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("point", ["before_first_token", "mid_stream"])
async def test_generate_when_the_only_server_dies_then_a_typed_error_comes_soon(victim, point):
    async with running_cluster(1, 1, failover=HASTY) as cluster:
        prefill, decode = cluster.servers
        dying = prefill if victim == "prefill" else decode
        hold = Hold()
        if point == "before_first_token":
            dying.at["start"] = hold
        else:
            (decode.at)["reserved" if victim == "prefill" else "token:3"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        if point == "mid_stream":
            await prefill.until(lambda: prefill.seen and not prefill.open)
        await dying.stop()
        cluster.engines.pop(dying.engine_id)
        hold.let_go.set()
        with pytest.raises(BatonError) as caught:
            async with asyncio.timeout(WAIT_S):
                await task
        expected = ErrorCode.NO_PREFILL_WORKER if victim == "prefill" else ErrorCode.NO_DECODE_WORKER
        assert caught.value.code is expected
        assert caught.value.metadata["first_cause"]
        await cluster.settled()


async def test_generate_when_prefill_is_gone_and_decode_may_serve_alone_then_the_stream_migrates_there():
    async with running_cluster(1, 1, local=True) as cluster:
        prefill, decode = cluster.servers
        hold = Hold()
        decode.at["reserved"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await prefill.until(lambda: prefill.staged and not prefill.open)
        await hold.wait_reached()
        await prefill.stop()
        cluster.engines.pop(prefill.engine_id)
        await cluster.until(lambda: cluster.worker(prefill).state == "unhealthy")
        hold.let_go.set()
        result = await task
        assert result.tokens == answer(PROMPT, 6)
        assert (result.finish.path, result.finish.attempts) == ("colocated", 2)
        await cluster.settled()


async def test_generate_when_streams_break_again_and_again_then_the_migration_limit_ends_it():
    async with running_cluster(1, 2, failover=FailoverSettings(migration_limit=2, backoff=Backoff(0.005))) as cluster:
        for server in cluster.servers[1:]:
            server.at = {f"token:{i}": fails(ErrorCode.LOAD_CACHE_TIMEOUT) for i in range(1, 6)}
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.LOAD_CACHE_TIMEOUT
        assert counted(cluster, "baton_migrations_total", result="limit") == 1
        assert sum(len(s.seen) for s in cluster.servers[1:]) == 3
        await cluster.settled()
        labels = {"model_name": "tiny", "api": "completions", "code": "LOAD_CACHE_TIMEOUT", "phase": "mid_stream"}
        assert counted(cluster, "baton_request_errors_total", **labels) == 1


async def test_generate_when_the_server_comes_back_within_moments_then_the_request_waits_for_it():
    async with running_cluster(1, 1) as cluster:
        decode = cluster.servers[1]
        decode.at["start"] = fails(ErrorCode.EXECUTION_EXCEPTION, times=1)
        hold = Hold()
        decode.at["token:3"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        decode.at.clear()
        await decode.restart()
        hold.let_go.set()
        result = await task
        assert (result.tokens, result.finish.attempts) == (answer(PROMPT, 6), 3)
        await cluster.settled()


async def test_f1_a_decode_server_that_is_stopped_loses_its_stream_within_the_limit():
    async with running_cluster(1, 2, limits=replace(LIMITS, silence_s=0.3), health=WATCHFUL) as cluster:
        _, first, second = cluster.servers
        hold = Hold()
        first.at["token:3"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        first.muted = True
        async with asyncio.timeout(WAIT_S):
            result = await task
        assert result.tokens == answer(PROMPT, 6)
        assert len(second.seen) == 1
        assert cluster.worker(first).state == "unhealthy"
        assert cluster.access.lines[0]["servers"][0]["code"] == "KEEP_ALIVE_TIMEOUT"
        assert not cluster.worker(first).inflight


async def test_f1_a_stopped_decode_server_without_another_gives_a_typed_error():
    limits = replace(LIMITS, silence_s=0.3)
    async with running_cluster(1, 1, failover=HASTY, limits=limits, health=WATCHFUL) as cluster:
        decode = cluster.servers[1]
        hold = Hold()
        decode.at["token:3"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        decode.muted = True
        with pytest.raises(BatonError) as caught:
            await task
        assert caught.value.code is ErrorCode.NO_DECODE_WORKER
        assert caught.value.metadata["first_cause"] == "KEEP_ALIVE_TIMEOUT"


async def test_generate_when_a_live_server_streams_nothing_for_too_long_then_8214():
    limits = replace(LIMITS, silence_s=0.1, inactivity_s=0.4)
    failover = FailoverSettings(migration_limit=0)
    async with running_cluster(1, 1, limits=limits, failover=failover) as cluster:
        cluster.servers[1].at["token:3"] = Hold()
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.KEEP_ALIVE_TIMEOUT
        assert cluster.worker(cluster.servers[1]).state in ("ready", "unhealthy")
        await cluster.settled()


async def test_generate_when_reservation_takes_too_long_then_another_decode_server_is_tried():
    clock, hold = Clock(), Hold()
    async with running_cluster(1, 2, limits=replace(LIMITS, reserve_s=30.0), clock=clock) as cluster:
        cluster.servers[1].at["start"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        clock.now += 31.0
        result = await task
        assert (result.tokens, result.finish.attempts) == (answer(PROMPT, 6), 2)
        await cluster.settled()


async def test_breaker_when_a_server_keeps_failing_then_it_gets_no_requests_until_its_time_is_over():
    clock = Clock()
    breaker = BreakerSettings(failure_threshold=2, success_threshold=1, open_s=30.0)
    async with running_cluster(1, 2, breaker=breaker, registry_clock=clock) as cluster:
        bad = cluster.servers[1]
        bad.at["start"] = fails(ErrorCode.EXECUTION_EXCEPTION)
        for _ in range(8):
            assert (await cluster.collect(make_request())).tokens == answer(PROMPT, 6)
        assert len(bad.seen) == 2
        worker = cluster.worker(bad)
        assert worker.breaker.state is BreakerState.OPEN
        labels = {"role": "decode", "worker": bad.address}
        assert counted(cluster, "baton_breaker_state", **labels) == 1
        bad.at.clear()
        clock.now += 30.0
        assert worker.breaker.state is BreakerState.HALF_OPEN
        for _ in range(2):
            await cluster.collect(make_request())
        assert worker.breaker.state is BreakerState.CLOSED
        assert counted(cluster, "baton_breaker_transitions_total", **labels, to="closed") == 1


async def test_r4_failures_of_the_requests_themselves_never_open_a_breaker():
    async with running_cluster(1, 1) as cluster:
        cluster.servers[0].at["start"] = fails(ErrorCode.LONG_PROMPT_ERROR)
        for _ in range(100):
            with pytest.raises(BatonError) as caught:
                await cluster.collect(make_request())
            assert caught.value.code is ErrorCode.LONG_PROMPT_ERROR
        for server in cluster.servers:
            labels = {"role": server.role, "worker": server.address}
            assert counted(cluster, "baton_breaker_state", **labels) == 0
            assert cluster.worker(server).breaker.state is BreakerState.CLOSED


async def test_breaker_when_the_only_server_has_it_open_then_it_is_used_all_the_same():
    breaker = BreakerSettings(failure_threshold=1, open_s=60)
    async with running_cluster(1, 1, breaker=breaker) as cluster:
        decode = cluster.servers[1]
        decode.at["start"] = fails(ErrorCode.EXECUTION_EXCEPTION, times=1)
        result = await cluster.collect(make_request())
        assert (result.tokens, result.finish.attempts) == (answer(PROMPT, 6), 2)
        policy = {"role": "decode", "policy": "round_robin"}
        assert counted(cluster, "baton_router_decisions_total", **policy, result="fallback") == 1


async def test_generate_when_many_requests_run_while_servers_come_and_go_then_every_answer_is_right():
    async with running_cluster(2, 3, policy="least_load") as cluster:
        rng = random.Random(5)
        prompts = [[rng.randrange(10, 5000) for _ in range(rng.randrange(1, 30))] for _ in range(60)]
        stopping = cluster.servers[2]

        async def one(prompt: list[int]) -> None:
            count = rng.randrange(1, 20)
            result = await cluster.collect(make_request(prompt, count))
            assert result.tokens == answer(prompt, count)
            assert isinstance(result.finish, FinishEvent)

        async def kill() -> None:
            await stopping.until(lambda: len(stopping.seen) >= 5)
            await stopping.stop()
            await stopping.restart()

        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            for prompt in prompts:
                group.create_task(one(prompt))
        await cluster.settled()


async def test_generate_when_the_only_server_is_in_doubt_for_moments_then_a_new_request_waits_for_it():
    async with running_cluster(1, 1) as cluster:
        worker = cluster.worker(cluster.servers[1])
        cluster.registry.note_failure(worker, BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))
        assert worker.state == "unhealthy"
        result = await cluster.collect(make_request())
        assert (result.tokens, result.finish.attempts) == (answer(PROMPT, 6), 1)


async def test_generate_when_a_load_fails_then_the_next_attempt_uses_two_other_servers():
    async with running_cluster(2, 2) as cluster:
        p1, p2, d1, d2 = cluster.servers
        computing = Hold()  # no token comes out
        p1.at["start"] = computing

        async def fail() -> None:
            await computing.wait_reached()  # else the prefill server may never see the request
            raise load_failed(BatonError(ErrorCode.READ_BUFFER_MISMATCH))

        d1.at["start"] = fail
        result = await cluster.collect(make_request())
        assert result.tokens == answer(PROMPT, 6)
        assert [len(s.seen) for s in (p1, p2, d1, d2)] == [1, 1, 1, 1]
        await cluster.settled()


# -- a decode server that computes the prompt itself, after a load that failed


async def test_load_when_it_failed_and_the_decode_server_computes_itself_then_its_result_comes_with_the_token():
    async with running_cluster(limits=replace(LIMITS, answer_s=0.05)) as cluster:
        prefill, decode = cluster.servers
        decode.loads, hold = False, Hold()
        prefill.at["answer"] = hold
        result = await cluster.collect(make_request(PROMPT, 6))
        assert result.tokens == answer(PROMPT, 6)
        assert [summary.cached_tokens for summary in result.summaries] == [2]
        assert result.finish.attempts == 1
        hold.let_go.set()
        await cluster.settled()


async def test_load_when_it_failed_and_both_servers_compute_then_the_token_and_its_result_come_once():
    async with running_cluster() as cluster:
        decode = cluster.servers[1]
        decode.loads, hold = False, Hold()
        decode.at["token:0"] = hold
        async with aclosing(cluster.orchestrator.generate(make_request(PROMPT, 6))) as events:
            collected = Collected()
            collected.add(await anext(events))
            assert collected.tokens == answer(PROMPT, 1)
            hold.let_go.set()
            async for event in events:
                collected.add(event)
        assert collected.tokens == answer(PROMPT, 6)
        assert len(collected.summaries) == 1
        await cluster.settled()


async def test_prefill_server_when_it_fails_after_the_decode_server_began_itself_then_the_answer_goes_on():
    async with running_cluster() as cluster:
        prefill, decode = cluster.servers
        decode.loads, answering, at_two = False, Hold(), Hold()
        prefill.at["answer"], decode.at["token:2"] = answering, at_two
        async with aclosing(cluster.orchestrator.generate(make_request(PROMPT, 6))) as events:
            collected = Collected()
            for _ in range(2):
                collected.add(await anext(events))
            await answering.wait_reached()
            await prefill.stop()
            at_two.let_go.set()
            async for event in events:
                collected.add(event)
        assert collected.tokens == answer(PROMPT, 6)
        assert (collected.finish.attempts, collected.finish.reason) == (1, "length")
        await cluster.settled()
