"""The Generation service over a real channel, with the router's core over scripted servers behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest

from protos import common_pb2, generation_pb2, generation_pb2_grpc
from router.grpc_service import SERVICE, GenerationService, GrpcServices, account_for_refused
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.validation import RequestValidator
from rpc.errors import ErrorCode
from rpc.server import GrpcServer
from rpc.status import details_payload, parse_status
from tests.unit.router.scripted_cluster import Cluster, running_cluster
from tests.unit.router.scripted_server import EOS, MODEL, Hold, answer, fails
from tests.unit.router.tokenizer_folders import CHATML, byte_level

PROMPT = [5, 6, 7, 8]


@dataclass
class Api:
    cluster: Cluster
    stub: generation_pb2_grpc.GenerationStub
    tokenizer: Tokenizer
    channel: grpc.aio.Channel

    async def generate(self, **fields: object) -> list[generation_pb2.GenerateResponse]:
        metadata = fields.pop("metadata", None)
        timeout = fields.pop("timeout", 10)
        request = generation_pb2.GenerateRequest(**fields)
        return [message async for message in self.stub.Generate(request, timeout=timeout, metadata=metadata)]


@contextlib.asynccontextmanager
async def running_api(api_keys: tuple[str, ...] = (), **options: object) -> AsyncIterator[Api]:
    async with running_cluster(**options) as cluster:
        tokenizer = Tokenizer(byte_level())
        template = ChatTemplate(CHATML, source="test", special_tokens={})
        server = GrpcServer(
            cluster.metrics, on_refused=lambda call: account_for_refused(call, cluster.open_requests, cluster.access)
        )
        services = GrpcServices(
            serving=cluster.orchestrator,
            open_requests=cluster.open_requests,
            validator=RequestValidator(tokenizer, template, cluster.orchestrator.model),
            api_keys=api_keys,
            created=1234,
        )
        server.add_service(generation_pb2_grpc.add_GenerationServicer_to_server, GenerationService(services), SERVICE)
        port = await server.start("127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Api(cluster, generation_pb2_grpc.GenerationStub(channel), tokenizer, channel)
        finally:
            await server.stop(0)
            tokenizer.close()


def ids(*numbers: int) -> generation_pb2.TokenIds:
    return generation_pb2.TokenIds(ids=numbers)


def sampling(max_tokens: int = 6, **fields: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=max_tokens, **fields)


def code_of(error: grpc.aio.AioRpcError) -> ErrorCode:
    parsed = parse_status(details_payload(error.trailing_metadata()))
    assert parsed is not None, error
    assert error.code() is parsed.spec.grpc
    return parsed.code


async def test_generate_when_streamed_then_tokens_text_and_the_last_messages_facts_come():
    async with running_api() as api:
        messages = await api.generate(token_ids=ids(*PROMPT), sampling=sampling(), request_id="r1")
        tokens = [t.token_id for m in messages for t in m.tokens]
        assert tokens == answer(PROMPT, 6)
        assert "".join(m.text for m in messages) == api.tokenizer.decode(tokens)
        assert {m.request_id for m in messages} == {"r1"}
        first, last = messages[0], messages[-1]
        assert len(messages) > 2
        assert {(m.baton.path, m.baton.prefill_cuda_graph_status) for m in messages} == {("pd", "not_requested")}
        assert not first.baton.timeline
        assert [m.finish_reason for m in messages[:-1]] == [0] * (len(messages) - 1)
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (4, 6, 2)
        assert last.baton.attempts == 1
        assert {"router.tokenize", "prefill.compute", "decode.load"} <= last.baton.timeline.keys()
        await api.cluster.settled()
        line = api.cluster.access.lines[0]
        assert (line["request_id"], line["api"], line["code"]) == ("r1", "grpc", "NONE_ERROR")


async def test_generate_when_not_streamed_then_one_message_has_everything():
    async with running_api() as api:
        [message] = await api.generate(token_ids=ids(*PROMPT), sampling=sampling(), stream=False)
        assert [t.token_id for t in message.tokens] == answer(PROMPT, 6)
        assert message.text == api.tokenizer.decode(answer(PROMPT, 6))
        assert message.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert message.usage.completion_tokens == 6
        assert message.baton.path == "pd"


async def test_generate_when_it_has_a_session_then_its_requests_go_to_the_same_servers():
    async with running_api(prefills=3, decodes=3, policy="session") as api:

        async def servers_of(session: str) -> list[str]:
            for server in api.cluster.servers:
                server.seen.clear()
            metadata = (("x-session-id", session),)
            await api.generate(token_ids=ids(*PROMPT), sampling=sampling(2), metadata=metadata)
            return [server.address for server in api.cluster.servers if server.seen]

        sessions = [f"session {number}" for number in range(5)]
        first = [await servers_of(session) for session in sessions]
        assert [await servers_of(session) for session in sessions[::-1]] == first[::-1]
        assert len(set(map(tuple, first))) > 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await servers_of("s" * 257)
        assert code_of(caught.value) is ErrorCode.INVALID_PARAMS


async def test_generate_when_it_is_pinned_then_these_servers_serve_it_and_an_unknown_one_is_refused():
    async with running_api(prefills=2, decodes=2, allow_pins=True) as api:
        _, prefill, decode, _ = api.cluster.servers
        for _ in range(3):  # round robin would have come to the others
            pins = (("x-baton-prefill", prefill.address), ("x-baton-decode", decode.address))
            await api.generate(token_ids=ids(*PROMPT), sampling=sampling(2), metadata=pins)
        assert {server for server in api.cluster.servers if server.seen} == {prefill, decode}
        for key in ("x-baton-prefill", "x-baton-decode"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await api.generate(token_ids=ids(*PROMPT), sampling=sampling(2), metadata=((key, "127.0.0.1:1"),))
            assert code_of(caught.value) is ErrorCode.INVALID_ROUTE_REQUEST


@pytest.mark.parametrize("streamed", [True, False])
async def test_generate_when_there_are_choices_then_each_has_its_end_and_the_request_one_usage(streamed):
    async with running_api(local=True) as api:
        messages = await api.generate(token_ids=ids(*PROMPT), sampling=sampling(), n=3, stream=streamed)
        by_choice = {i: [m for m in messages if m.index == i] for i in range(3)}
        for part in by_choice.values():
            assert [t.token_id for m in part for t in m.tokens] == answer(PROMPT, 6)
            assert [m.finish_reason for m in part if m.finish_reason] == [common_pb2.FINISH_REASON_LENGTH]
        usages = [m.usage for m in messages if m.HasField("usage")]
        assert [(u.prompt_tokens, u.completion_tokens) for u in usages] == [(4, 18)]
        assert messages[-1].HasField("usage")
        assert {m.baton.prefill_cuda_graph_status for m in messages} == {"not_requested"}
        seeds = {seen.sampling.seed for server in api.cluster.servers for seen in server.seen}
        assert len(seeds) == 3


async def test_generate_when_it_is_a_chat_then_the_template_makes_the_prompt():
    async with running_api() as api:
        chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="hello")])
        await api.generate(messages=chat, sampling=sampling(2))
        prompt = api.tokenizer.decode(list(api.cluster.servers[0].seen[0].prompt_token_ids), skip_special_tokens=False)
        assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_generate_when_a_stop_string_comes_then_it_ends_before_it_and_the_legs_end():
    async with running_api() as api:
        texts = [api.tokenizer.decode([t]) for t in answer(PROMPT, 40)]
        stop = next(t for t in texts[3:] if t.strip() and "".join(texts).count(t) == 1)
        messages = await api.generate(token_ids=ids(*PROMPT), sampling=sampling(40), stop=[stop])
        assert "".join(m.text for m in messages) == "".join(texts).partition(stop)[0]
        assert messages[-1].finish_reason == common_pb2.FINISH_REASON_STOP
        assert messages[-1].stop_string == stop
        await api.cluster.settled()
        assert api.cluster.access.lines[0]["outcome"] == "stop"
        assert api.cluster.metrics.value("baton_aborts_total", leg="router", source="client") is None


async def test_generate_when_the_model_stops_then_the_stop_token_is_named():
    async with running_api() as api:
        messages = await api.generate(token_ids=ids(EOS, 9), sampling=sampling())
        assert messages[-1].finish_reason == common_pb2.FINISH_REASON_STOP
        assert messages[-1].stop_token_id == EOS
        assert not messages[-1].stop_string


async def test_generate_when_logprobs_are_asked_for_then_they_are_there_also_for_zero():
    async with running_api() as api:
        for top in (0, 1):
            messages = await api.generate(token_ids=ids(*PROMPT), sampling=sampling(logprobs=top))
            assert all(t.HasField("logprob") for m in messages for t in m.tokens)
        messages = await api.generate(token_ids=ids(*PROMPT), sampling=sampling())
        assert not any(t.HasField("logprob") for m in messages for t in m.tokens)


BAD = [
    ({}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT),
    ({"token_ids": ids()}, ErrorCode.INVALID_PARAMS),
    ({"prompt": ""}, ErrorCode.INVALID_PARAMS),
    ({"messages": generation_pb2.ChatMessages()}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(10_000)}, ErrorCode.OUT_OF_VOCAB_RANGE),
    ({"token_ids": ids(*range(10, 4107))}, ErrorCode.LONG_PROMPT_ERROR),
    ({"token_ids": ids(5), "sampling": sampling(0)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(5000)}, ErrorCode.LONG_PROMPT_ERROR),
    ({"token_ids": ids(5), "sampling": sampling(temperature=2.5)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(temperature=float("nan"))}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(top_p=0.0)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(min_p=1.5)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(repetition_penalty=0.0)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(presence_penalty=-3)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(logprobs=21)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(min_tokens=7)}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(logit_bias={5: 101.0})}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "sampling": sampling(stop_token_ids=[10_000])}, ErrorCode.OUT_OF_VOCAB_RANGE),
    ({"token_ids": ids(5), "n": 0}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "n": 129}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "stop": [""]}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "stop": ["x"] * 17}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "model": "other"}, ErrorCode.MODEL_NOT_FOUND),
    ({"token_ids": ids(5), "request_id": "a#b"}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "request_id": "x" * 129}, ErrorCode.INVALID_PARAMS),
    ({"token_ids": ids(5), "metadata": (("x-request-id", "a b"),)}, ErrorCode.INVALID_PARAMS),
]


async def test_generate_when_the_request_is_malformed_then_each_gets_its_code_and_the_router_serves_on():
    async with running_api() as api:
        for fields, code in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await api.generate(**dict(fields))
            assert code_of(caught.value) is code, fields
        assert not any(server.seen for server in api.cluster.servers)
        assert [t.token_id for m in await api.generate(token_ids=ids(*PROMPT)) for t in m.tokens] == answer(PROMPT, 16)
        await api.cluster.settled()


@pytest.mark.parametrize("raw", [b"\x1a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x05a"])
async def test_generate_when_the_bytes_are_no_message_then_604(raw):
    async with running_api() as api:
        call = api.channel.unary_stream(f"/{SERVICE}/Generate", request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(raw, timeout=15).read()
        assert code_of(caught.value) is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
        name = ErrorCode.ERROR_GENERATE_CONFIG_FORMAT.name
        async with asyncio.timeout(15):  # a call is booked when it has ended here, its status may be there before
            labels = {"method": f"{SERVICE}/Generate", "code": name}
            while api.cluster.metrics.value("baton_rpc_requests_total", **labels) != 1:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_generate_when_servers_fail_in_mid_stream_then_the_status_has_the_code():
    async with running_api() as api:
        api.cluster.servers[1].at["token:2"] = fails(ErrorCode.INVALID_PARAMS)
        got = []
        call = api.stub.Generate(generation_pb2.GenerateRequest(token_ids=ids(*PROMPT), sampling=sampling()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 - what came before it counts
            async for message in call:
                got += [t.token_id for t in message.tokens]
        assert code_of(caught.value) is ErrorCode.INVALID_PARAMS
        assert got == answer(PROMPT, 2)


async def test_generate_when_an_id_is_given_then_it_is_echoed_and_metadata_counts_too():
    async with running_api() as api:
        call = api.stub.Generate(
            generation_pb2.GenerateRequest(token_ids=ids(*PROMPT)), metadata=(("x-request-id", "meta-id"),)
        )
        assert ("x-request-id", "meta-id") in tuple(await call.initial_metadata())
        async for message in call:
            assert message.request_id == "meta-id"
        assert api.cluster.servers[0].seen[0].request_id == "meta-id"


async def test_generate_when_the_client_cancels_then_every_leg_ends():
    async with running_api() as api:
        hold = Hold()
        decode = api.cluster.servers[1]
        decode.at["token:3"] = hold
        call = api.stub.Generate(generation_pb2.GenerateRequest(token_ids=ids(*PROMPT), sampling=sampling()))
        await call.read()
        await hold.wait_reached()
        call.cancel()
        await decode.until(lambda: decode.aborted)
        await api.cluster.settled()
        assert api.cluster.access.lines[0]["code"] == "CANCELLED"


async def test_generate_when_the_clients_deadline_passes_then_603():
    async with running_api() as api:
        api.cluster.servers[1].at["token:3"] = Hold()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.generate(token_ids=ids(*PROMPT), sampling=sampling(), timeout=2.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < api.cluster.servers[0].timeouts[0] < 2.6
        await api.cluster.settled()
        assert api.cluster.access.lines[0]["code"] == "GENERATE_TIMEOUT"


async def test_abort_when_the_request_is_open_then_its_stream_ends_with_abort():
    async with running_api() as api:
        api.cluster.servers[1].at["token:3"] = Hold()
        request = generation_pb2.GenerateRequest(token_ids=ids(*PROMPT), sampling=sampling(), request_id="x")
        messages = []
        async for message in api.stub.Generate(request, timeout=10):
            messages.append(message)
            if sum(len(m.tokens) for m in messages) == 3 and not message.finish_reason:
                assert (await api.stub.Abort(generation_pb2.AbortRequest(request_id="x"))).found
        assert messages[-1].finish_reason == common_pb2.FINISH_REASON_ABORT
        assert [t.token_id for m in messages for t in m.tokens] == answer(PROMPT, 3)
        assert not (await api.stub.Abort(generation_pb2.AbortRequest(request_id="later"))).found
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.generate(token_ids=ids(*PROMPT), request_id="later")
        assert code_of(caught.value) is ErrorCode.REQUEST_TOMBSTONED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.stub.Abort(generation_pb2.AbortRequest(request_id="#"))
        assert code_of(caught.value) is ErrorCode.INVALID_PARAMS


async def test_generate_when_its_id_is_none_then_the_refusal_has_its_line_under_the_id_of_the_answer():
    async with running_api() as api:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.generate(token_ids=ids(*PROMPT), request_id="a#b")
        assert code_of(caught.value) is ErrorCode.INVALID_PARAMS
        [line] = api.cluster.access.lines
        assert (line["api"], line["code"], line["outcome"]) == ("grpc", "INVALID_PARAMS", "error")
        parsed = parse_status(details_payload(caught.value.trailing_metadata()))
        assert parsed is not None and line["request_id"] == parsed.metadata["request_id"]


@pytest.mark.parametrize(
    ("method", "message", "key", "request_id", "code"),
    [
        ("Generate", b"", "right", "a b", ErrorCode.INVALID_PARAMS),
        ("Generate", b"\x07garbage", "right", "r-1", ErrorCode.ERROR_GENERATE_CONFIG_FORMAT),
        ("Generate", b"\x1a" + b"x" * (1 << 24), "right", "r-1", ErrorCode.PAYLOAD_TOO_LARGE),
        ("Generate", b"", "wrong", "r-1", ErrorCode.UNAUTHENTICATED),
        ("ListModels", b"", "wrong", "r-1", ErrorCode.UNAUTHENTICATED),
        ("Abort", b"", "wrong", "r-1", ErrorCode.UNAUTHENTICATED),
        ("Nothing", b"", "right", "r-1", ErrorCode.METHOD_NOT_ALLOWED),
    ],
)
async def test_call_when_it_is_refused_before_anything_is_done_then_it_has_one_line_and_counts_if_it_is_a_request(
    method, message, key, request_id, code
):
    async with running_api(api_keys=("right",)) as api:
        call = api.channel.unary_unary(f"/{SERVICE}/{method}")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(message, timeout=10, metadata=(("authorization", f"Bearer {key}"), ("x-request-id", request_id)))
        [line] = api.cluster.access.lines
        assert (line["api"], line["code"]) == ("grpc", code.name)
        assert (line["request_id"] == "r-1") is (request_id == "r-1")
        counted = api.cluster.metrics.value(
            "baton_request_errors_total", model_name="other", api="grpc", code=code.name, phase="before_first_token"
        )
        assert counted == (1 if method == "Generate" else None)


async def test_list_models_when_servers_are_known_then_the_model_is_described():
    async with running_api() as api:
        [model] = (await api.stub.ListModels(generation_pb2.ListModelsRequest())).models
        assert (model.id, model.max_model_len, model.created) == (MODEL, 4096, 1234)


@pytest.mark.parametrize("given", [None, "", "Bearer wrong", "Basic right", "right", "Bearer "])
async def test_api_key_when_it_is_missing_or_wrong_then_every_method_is_refused(given):
    async with running_api(api_keys=("right", "second")) as api:
        metadata = None if given is None else (("authorization", given),)
        for method, message in [
            (api.stub.ListModels, generation_pb2.ListModelsRequest()),
            (api.stub.Abort, generation_pb2.AbortRequest(request_id="x")),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message, metadata=metadata)
            assert code_of(caught.value) is ErrorCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.generate(token_ids=ids(*PROMPT), metadata=metadata, request_id="r1")
        assert code_of(caught.value) is ErrorCode.UNAUTHENTICATED
        *others, line = api.cluster.access.lines
        assert (line["request_id"], line["api"], line["code"]) == ("r1", "grpc", "UNAUTHENTICATED")
        assert [other["method"].rpartition("/")[2] for other in others] == ["ListModels", "Abort"]
        for key in ("right", "second"):
            await api.stub.ListModels(
                generation_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {key}"),)
            )
