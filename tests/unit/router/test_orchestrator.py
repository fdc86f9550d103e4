"""The orchestrator against scripted servers that speak the real protocol: the ordinary life of a request."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from router.requests import FinishEvent, Sampling, TokensEvent
from rpc.errors import BatonError, ErrorCode
from tests.unit.router.scripted_cluster import LIMITS, Collected, make_request, running_cluster
from tests.unit.router.scripted_server import EOS, Hold, answer

PROMPT = (5, 6, 7, 8)


async def test_generate_when_a_pair_is_ready_then_every_index_comes_once_and_in_order():
    async with running_cluster() as cluster:
        result = await cluster.collect(make_request(PROMPT, 6))
        assert result.tokens == answer(PROMPT, 6)
        assert result.indices == list(range(6))
        assert result.finish.reason == "length"
        assert result.finish.path == "pd"
        assert result.finish.attempts == 1
        [summary] = result.summaries
        assert (summary.cached_tokens, summary.path) == (2, "pd")
        assert result.finish.timeline["prefill.compute"] == 0.25
        assert result.finish.timeline["decode.load"] == 0.5
        stages = {"router.queue", "router.choose", "router.first_token", "router.stream"}
        assert stages | {"router.reserve", "router.prefill"} <= result.finish.timeline.keys()
        await cluster.settled()
        assert cluster.metrics.value("baton_router_path_total", decision="pd") == 1
        assert not any(s.aborted for s in cluster.servers)


async def test_generate_when_served_then_both_legs_have_one_key_the_id_and_the_remaining_time():
    async with running_cluster() as cluster:
        await cluster.collect(make_request(request_id="abc", traceparent="00-1-2-01"))
        prefill, decode = cluster.servers
        [p], [d] = prefill.seen, decode.seen
        assert p.request_key == d.request_key
        assert p.request_key.startswith("abc#0.")
        assert p == d
        for server in cluster.servers:
            assert server.metadata[0]["x-request-id"] == "abc"
            assert server.metadata[0]["traceparent"] == "00-1-2-01"
            assert 45 < server.timeouts[0] <= 60.1
        assert prefill.requests[0].hold_kv
        assert decode.requests[0].kv_source.engine_id == prefill.engine_id


async def test_generate_when_the_decode_leg_is_slow_then_the_first_token_comes_from_the_prefill_server():
    async with running_cluster() as cluster:
        hold = Hold()
        cluster.servers[1].at["reserved"] = hold
        async with aclosing(cluster.orchestrator.generate(make_request())) as events:
            first = await anext(events)
            assert [t.token_id for t in first.tokens] == answer(PROMPT, 1)
            assert first.prefill is not None
            hold.let_go.set()
            rest = [event async for event in events]
        assert [t.index for event in rest if isinstance(event, TokensEvent) for t in event.tokens] == [1, 2, 3, 4, 5]
        await cluster.settled()


async def test_generate_when_the_prefill_answer_comes_after_the_decode_tokens_then_nothing_is_repeated():
    async with running_cluster() as cluster:
        prefill, decode = cluster.servers
        hold, at_three = Hold(), Hold()
        prefill.at["answer"] = hold
        decode.at["token:3"] = at_three
        async with aclosing(cluster.orchestrator.generate(make_request())) as events:
            got = [await anext(events) for _ in range(3)]
            await at_three.wait_reached()
            hold.let_go.set()
            await prefill.until(lambda: not prefill.open)
            at_three.let_go.set()
            got += [event async for event in events]
        tokens = [t for event in got if isinstance(event, TokensEvent) for t in event.tokens]
        assert [t.index for t in tokens] == list(range(6))
        assert [event.prefill is not None for event in got[:2]] == [True, False]
        assert got[-1].timeline["prefill.compute"] == 0.25
        await cluster.settled()


async def test_generate_when_the_prefill_answer_never_comes_then_the_complete_answer_does_not_wait_for_it():
    async with running_cluster(limits=replace(LIMITS, answer_s=0.05)) as cluster:
        prefill = cluster.servers[0]
        prefill.at["answer"] = Hold()
        result = await cluster.collect(make_request())
        assert result.tokens == answer(PROMPT, 6)
        await prefill.until(lambda: prefill.aborted)
        await cluster.settled()


async def test_generate_when_the_first_token_ends_it_then_it_stops_there():
    async with running_cluster() as cluster:
        result = await cluster.collect(make_request((EOS, 9), 6))
        assert result.tokens == [EOS]
        assert (result.finish.reason, result.finish.stop_token_id) == ("stop", EOS)
        await cluster.settled()


async def test_generate_when_the_first_token_ends_it_and_the_decode_leg_fails_then_it_is_complete_all_the_same():
    async with running_cluster() as cluster:
        decode = cluster.servers[1]

        def fail() -> None:
            raise BatonError(ErrorCode.LOAD_KV_CACHE_FAILED)

        hold = Hold()

        async def fail_later() -> None:
            await hold()
            fail()

        decode.at["reserved"] = fail_later
        async with aclosing(cluster.orchestrator.generate(make_request((EOS, 9), 6))) as events:
            first = await anext(events)
            assert [t.token_id for t in first.tokens] == [EOS]
            hold.let_go.set()
            [finish] = [event async for event in events]
        assert (finish.reason, finish.stop_token_id, finish.attempts) == ("stop", EOS, 1)
        await cluster.settled()


async def test_generate_when_one_token_is_wanted_then_the_prefill_server_does_it_alone():
    async with running_cluster() as cluster:
        result = await cluster.collect(make_request(PROMPT, 1))
        prefill, decode = cluster.servers
        assert result.tokens == answer(PROMPT, 1)
        assert (result.finish.reason, result.finish.path) == ("length", "colocated")
        assert not prefill.requests[0].hold_kv
        assert not decode.seen
        assert cluster.metrics.value("baton_router_path_total", decision="single_token") == 1
        await cluster.settled()


@pytest.mark.parametrize(
    ("options", "changes", "decision"),
    [
        ({}, {"single_server": "beam_or_n"}, "beam_or_n"),
        ({}, {"single_server": "requested"}, "requested"),
        ({"disagg_min_prompt_tokens": 5}, {}, "short_prompt"),
        ({"disagg_min_prompt_tokens": 4}, {}, "pd"),
    ],
)
async def test_generate_when_one_server_is_to_serve_it_then_a_colocated_one_does(options, changes, decision):
    async with running_cluster(local=True, **options) as cluster:
        result = await cluster.collect(make_request(PROMPT, 6, **changes))
        assert result.tokens == answer(PROMPT, 6)
        assert result.finish.path == ("pd" if decision == "pd" else "colocated")
        assert [s.path for s in result.summaries] == [result.finish.path]
        assert cluster.metrics.value("baton_router_path_total", decision=decision) == 1
        assert bool(cluster.servers[0].seen) == (decision == "pd")
        await cluster.settled()


async def test_generate_when_no_server_serves_alone_then_the_pair_does():
    async with running_cluster(local=False, disagg_min_prompt_tokens=100) as cluster:
        result = await cluster.collect(make_request(PROMPT, 6, single_server="beam_or_n"))
        assert (result.tokens, result.finish.path) == (answer(PROMPT, 6), "pd")


async def test_generate_when_there_is_no_pair_then_a_colocated_server_does_it():
    async with running_cluster(prefills=0, local=True) as cluster:
        result = await cluster.collect(make_request(PROMPT, 6))
        assert (result.tokens, result.finish.path) == (answer(PROMPT, 6), "colocated")
        assert cluster.metrics.value("baton_router_path_total", decision="no_pair") == 1


@pytest.mark.parametrize(("prefills", "decodes", "code"), [(0, 1, 8402), (1, 0, 8403), (0, 0, 8403)])
async def test_generate_when_a_role_is_missing_then_it_is_refused_at_once(prefills, decodes, code):
    async with running_cluster(prefills, decodes) as cluster:
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code == code
        assert caught.value.retry_after_s
        name = ErrorCode(code).name
        assert cluster.metrics.value("baton_router_rejections_total", code=name) == 1
        ready, reasons = cluster.orchestrator.ready()
        assert not ready
        assert reasons
        await cluster.settled()


async def test_generate_when_logprobs_are_asked_for_then_they_come_with_every_token():
    async with running_cluster() as cluster:
        request = make_request(sampling=Sampling(max_tokens=3, seed=1, logprobs=1))
        async for event in cluster.orchestrator.generate(request):
            if isinstance(event, TokensEvent):
                for token in event.tokens:
                    assert token.logprob.token_id == token.token_id
                    assert token.logprob.logprob == -0.5
                    assert len(token.top_logprobs) == 1


async def test_generate_when_the_client_gave_no_seed_then_the_router_draws_one():
    async with running_cluster() as cluster:
        request = make_request(sampling=Sampling(max_tokens=3))
        await cluster.collect(request)
        seeds = {seen.sampling.seed for server in cluster.servers for seen in server.seen}
        assert seeds == {random.Random(3).randint(0, 2**64 - 1)}


async def test_generate_when_the_id_is_open_then_the_second_one_is_refused_and_the_first_goes_on():
    async with running_cluster() as cluster:
        hold = Hold()
        cluster.servers[1].at["token:2"] = hold
        async with aclosing(cluster.orchestrator.generate(make_request(request_id="same"))) as events:
            await anext(events)
            with pytest.raises(BatonError) as caught:
                await cluster.collect(make_request(request_id="same"))
            assert caught.value.code is ErrorCode.DUPLICATE_REQUEST
            hold.let_go.set()
            assert [event async for event in events][-1].reason == "length"
        again = await cluster.collect(make_request(request_id="same"))
        assert again.finish.reason == "length"
        await cluster.settled()


async def test_abort_when_the_request_streams_then_it_ends_with_what_it_has_and_the_servers_hear_of_it():
    async with running_cluster() as cluster:
        decode = cluster.servers[1]
        hold = Hold()
        decode.at["token:3"] = hold
        got = []
        async for event in cluster.orchestrator.generate(make_request(request_id="x")):
            got.append(event)
            if isinstance(event, TokensEvent) and event.tokens[-1].index == 2:
                assert cluster.orchestrator.abort("x")
        assert isinstance(got[-1], FinishEvent)
        assert got[-1].reason == "abort"
        assert [t.token_id for event in got[:-1] for t in event.tokens] == answer(PROMPT, 3)
        await decode.until(lambda: decode.aborted)
        assert decode.aborted[0][1:] == (int(ErrorCode.CANCELLED), "client")
        await cluster.settled()
        assert cluster.metrics.value("baton_requests_total", **_labels("abort")) == 1
        assert cluster.metrics.value("baton_aborts_total", leg="router", source="client") == 1


def _labels(outcome: str) -> dict[str, str]:
    return {"model_name": "tiny", "api": "completions", "stream": "false", "outcome": outcome}


async def test_abort_when_the_id_is_unknown_then_the_late_request_is_refused():
    async with running_cluster() as cluster:
        assert not cluster.orchestrator.abort("late")
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request(request_id="late"))
        assert caught.value.code is ErrorCode.REQUEST_TOMBSTONED
        assert not cluster.servers[0].seen


async def test_abort_when_the_request_waits_for_its_turn_then_it_ends_without_a_server():
    async with running_cluster(max_concurrent=1) as cluster:
        hold = Hold()
        cluster.servers[1].at["token:1"] = hold
        running = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        waiting = asyncio.create_task(cluster.collect(make_request(request_id="w")))
        await cluster.until(
            lambda: cluster.metrics.value("baton_router_queue_depth") or len(cluster.open_requests) == 2
        )
        await asyncio.sleep(0)
        assert cluster.orchestrator.abort("w")
        result = await waiting
        assert (result.tokens, result.finish.reason, result.finish.path) == ([], "abort", None)
        hold.let_go.set()
        assert (await running).finish.reason == "length"
        assert (await cluster.collect(make_request())).finish.reason == "length"
        await cluster.settled()


async def test_generate_when_the_queue_is_full_then_it_is_refused_and_priorities_go_first():
    async with running_cluster(max_concurrent=1, queue_size=2) as cluster:
        hold = Hold()
        cluster.servers[1].at["token:1"] = hold
        running = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        later = asyncio.create_task(cluster.collect(make_request(request_id="later", priority=5)))
        sooner = asyncio.create_task(cluster.collect(make_request(request_id="sooner", priority=-5)))
        await cluster.until(lambda: len(cluster.open_requests) == 3)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.ROUTER_QUEUE_FULL
        hold.let_go.set()
        await asyncio.gather(running, later, sooner)
        ids = [seen.request_id for seen in cluster.servers[0].seen]
        assert ids.index("sooner") < ids.index("later")


async def test_generate_when_its_deadline_passes_then_603_and_both_legs_end():
    async with running_cluster(request_timeout_s=1.0) as cluster:
        decode = cluster.servers[1]
        decode.at["token:2"] = Hold()
        collected = Collected()

        async def read() -> None:
            async for event in cluster.orchestrator.generate(make_request()):
                collected.add(event)

        with pytest.raises(BatonError) as caught:
            await read()
        assert caught.value.code is ErrorCode.GENERATE_TIMEOUT
        # Two, unless the machine took all the time for less.
        assert collected.tokens == answer(PROMPT, 2)[: len(collected.tokens)]
        assert cluster.access.lines[0]["generated_tokens"] == len(collected.tokens)
        await cluster.settled()
        assert cluster.metrics.value("baton_aborts_total", leg="router", source="deadline") == 1


async def test_stop_all_when_the_router_gives_up_then_open_requests_end_with_its_error():
    async with running_cluster() as cluster:
        hold = Hold()
        cluster.servers[1].at["token:2"] = hold
        task = asyncio.create_task(cluster.collect(make_request()))
        await hold.wait_reached()
        draining = BatonError(ErrorCode.SERVER_DRAINING, "the router is shutting down")
        cluster.open_requests.refuse_new(draining)
        assert cluster.open_requests.stop_all(draining) == 1
        with pytest.raises(BatonError) as caught:
            await task
        assert caught.value.code is ErrorCode.SERVER_DRAINING
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request())
        assert caught.value.code is ErrorCode.SERVER_DRAINING
        await cluster.settled()


async def test_model_when_servers_are_known_then_it_is_what_all_of_them_can_do():
    async with running_cluster(prefills=0, decodes=0) as cluster:
        unknown = cluster.orchestrator.model()
        assert (unknown.served_names, unknown.max_model_len) == (("tiny",), 0)
        await cluster.add("prefill", max_model_len=512)
        await cluster.add("decode", max_model_len=1024)
        await cluster.ready(2)
        model = cluster.orchestrator.model()
        assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (512, 10_000, (EOS,))


async def test_generate_when_finished_then_the_access_log_and_the_figures_tell_the_same():
    async with running_cluster() as cluster:
        await cluster.collect(make_request(request_id="logged"))
        [line] = cluster.access.lines
        prefill, decode = cluster.servers
        assert line["request_id"] == "logged"
        assert (line["code"], line["outcome"], line["path"]) == ("NONE_ERROR", "length", "pd")
        assert (line["prompt_tokens"], line["cached_tokens"], line["generated_tokens"]) == (4, 2, 6)
        assert (line["servers"][0]["prefill"], line["servers"][0]["decode"]) == (prefill.address, decode.address)
        value = cluster.metrics.value
        assert value("baton_requests_total", **_labels("length")) == 1
        assert value("baton_prompt_tokens_total", model_name="tiny") == 4
        assert value("baton_cached_prompt_tokens_total", model_name="tiny") == 2
        assert value("baton_generation_tokens_total", model_name="tiny") == 6
        assert value("baton_time_to_first_token_seconds_count", model_name="tiny", path="pd") == 1
        assert value("baton_inter_token_latency_seconds_count", model_name="tiny", path="pd") == 5
        assert value("baton_time_per_output_token_seconds_count", model_name="tiny", path="pd") == 1
        for stage in ("queue", "choose", "first_token", "stream", "reserve", "prefill"):
            assert value("baton_stage_seconds_count", stage=stage) == 1
        assert value("baton_stage_seconds_count", stage="tokenize") is None
