"""The orchestrator when a server breaks the contract between the processes: never a wrong or a silent answer."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import pytest

from protos import common_pb2, decode_pb2, prefill_pb2
from router.failover import FailoverSettings
from rpc.errors import BatonError, ErrorCode
from tests.unit.router.scripted_cluster import Collected, make_request, running_cluster
from tests.unit.router.scripted_server import Hold, answer

PROMPT = (5, 6, 7, 8)


def without_result(message):
    if isinstance(message, prefill_pb2.PrefillResponse):
        message.ClearField("result")
    return message


def without_first_token(message):
    if isinstance(message, prefill_pb2.PrefillResponse):
        message.result.ClearField("first_token")
    return message


def without_cached_tokens(message):
    if isinstance(message, prefill_pb2.PrefillResponse):
        message.result.ClearField("cached_tokens")
    return message


def without_end(message):
    return None if isinstance(message, decode_pb2.DecodeEvent) and message.HasField("finished") else message


def without_reason(message):
    if isinstance(message, decode_pb2.DecodeEvent) and message.HasField("finished"):
        message.finished.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
    return message


def without_token(message):
    """The token with index 3 never comes."""
    return None if isinstance(message, decode_pb2.DecodeEvent) and _index(message) == 3 else message


def without_index(message):
    if isinstance(message, decode_pb2.DecodeEvent) and _index(message) == 3:
        message.tokens.tokens[0].ClearField("index")
    return message


def without_kind(message):
    return decode_pb2.DecodeEvent() if isinstance(message, decode_pb2.DecodeEvent) and _index(message) == 3 else message


def with_another_first_token(message):
    if isinstance(message, decode_pb2.DecodeEvent) and _index(message) == 0:
        message.tokens.tokens[0].token_id += 1
    return message


def _index(event: decode_pb2.DecodeEvent) -> int | None:
    return event.tokens.tokens[0].index if event.tokens.tokens else None


BREACHES = [
    ("prefill", without_result, "missing_result"),
    ("prefill", without_first_token, "missing_result"),
    ("prefill", without_cached_tokens, "absent_field"),
    ("decode", without_end, "missing_result"),
    ("decode", without_reason, "missing_result"),
    ("decode", without_token, "missing_result"),
    ("decode", without_index, "absent_field"),
    ("decode", without_kind, "absent_field"),
    ("decode", with_another_first_token, "missing_result"),
]
IDS = [f"{role} {twist.__name__}" for role, twist, _ in BREACHES]


def twisted(cluster, role):
    return next(server for server in cluster.servers if server.role == role)


@pytest.mark.invariant("RPC-10")
@pytest.mark.parametrize(("role", "twist", "kind"), BREACHES, ids=IDS)
async def test_breach_when_there_is_no_other_server_then_a_typed_error_that_is_counted_and_logged(
    role, twist, kind, caplog
):
    async with running_cluster(failover=FailoverSettings(max_retries=0, migration_limit=0)) as cluster:
        twisted(cluster, role).twist = twist
        if role == "prefill":
            twisted(cluster, "decode").at["loaded"] = Hold()  # it would go on without the prefill server's word
        # Once every token is out, only the servers' word about the end is missing: the answer is whole.
        complete = twist in (without_end, without_reason)
        if complete:
            result = await cluster.collect(make_request(PROMPT, 6))
            assert (result.tokens, result.finish.reason) == (answer(PROMPT, 6), "length")
        else:
            with caplog.at_level(logging.ERROR), pytest.raises(BatonError) as caught:
                await cluster.collect(make_request(PROMPT, 6))
            assert caught.value.code is ErrorCode.REMOTE_GENERATE_FAILED
            assert caught.value.breach == kind
        assert cluster.metrics.value("baton_contract_breaches_total", kind=kind) == 1
        [line] = [record.message for record in caplog.records if "contract breach" in record.message]
        assert f"{role} server {twisted(cluster, role).address}" in line
        await cluster.settled()


@pytest.mark.invariant("RPC-10")
@pytest.mark.parametrize(("role", "twist", "kind"), BREACHES[:3], ids=IDS[:3])
async def test_breach_when_the_decode_server_has_loaded_already_then_its_answer_goes_on_and_the_breach_is_counted(
    role, twist, kind
):
    async with running_cluster() as cluster:
        answering, at_two = Hold(), Hold()
        twisted(cluster, "prefill").at["answer"], twisted(cluster, "decode").at["token:2"] = answering, at_two
        twisted(cluster, "prefill").twist = twist
        async with aclosing(cluster.orchestrator.generate(make_request(PROMPT, 6))) as events:
            collected = Collected()
            while len(collected.tokens) < 2:
                collected.add(await anext(events))
            answering.let_go.set()
            reading = asyncio.ensure_future(anext(events))
            await cluster.until(lambda: cluster.metrics.value("baton_contract_breaches_total", kind=kind))
            at_two.let_go.set()
            collected.add(await reading)
            async for event in events:
                collected.add(event)
        assert collected.tokens == answer(PROMPT, 6)
        assert collected.finish.attempts == 1
        await cluster.settled()


@pytest.mark.parametrize(("role", "twist", "kind"), BREACHES, ids=IDS)
async def test_breach_when_there_are_other_servers_then_they_give_the_whole_answer(role, twist, kind):
    async with running_cluster(2, 2) as cluster:
        twisted(cluster, role).twist = twist
        for _ in range(2):
            result = await cluster.collect(make_request(PROMPT, 6))
            assert result.tokens == answer(PROMPT, 6)
            assert result.indices == list(range(6))
        assert cluster.metrics.value("baton_contract_breaches_total", kind=kind) >= 1
        await cluster.settled()
