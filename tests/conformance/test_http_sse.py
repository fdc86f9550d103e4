"""Streams, byte by byte: what is written, when, in which write, and what happens when either side goes away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import pytest

from router.requests import FinishEvent, RouterRequest, TokensEvent
from rpc.errors import BatonError, ErrorCode
from tests.conformance.http_router import ANSWER, MODEL, RunningRouter, events_of, running_router
from tests.unit.router.scripted_serving import answering, summary, token

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router() as running:
        yield running


def body(path: str, **fields) -> dict:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "The capital"}
    return {"model": MODEL, "stream": True, "max_tokens": 40, **prompt, **fields}


class RawStream:
    """A request over a plain socket; `read_chunk` gives what the server wrote at a time (chunked encoding)."""

    def __init__(self, router: RunningRouter) -> None:
        self._router = router

    async def open(self, path: str, content: dict, **headers: str) -> RawStream:
        raw = json.dumps(content).encode()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._router.port)
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        await self.writer.drain()
        return self

    async def read_head(self) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def read_chunk(self) -> bytes:
        async with asyncio.timeout(10):
            size = int(await self.reader.readline(), 16)
            data = await self.reader.readexactly(size + 2)
            return data[:-2]

    def close(self) -> None:
        self.writer.transport.abort()


def gated(router: RunningRouter, gates: list[asyncio.Event], text: str = "The capital of"):
    """A script whose token i waits for gate i; then it ends."""
    ids = router.ids(text)

    async def script(request: RouterRequest):
        for index, token_id in enumerate(ids):
            if index < len(gates):
                await gates[index].wait()
            yield TokensEvent([token(request, index, token_id)], summary(request) if index == 0 else None)
        yield FinishEvent("stop", path="pd")

    return script


async def test_chat_stream_when_read_whole_has_exactly_these_bytes(router):
    router.play(answering([*router.ids("The capital"), router.eos], stop_token_id=router.eos, cached=4))
    response = await router.client.post(CHAT, json=body(CHAT), headers={"X-Request-Id": "req-1"})
    assert response.status_code == 200
    created = re.search(rb'"created":(\d+)', response.content)[1].decode()
    head = f'{{"id":"chatcmpl-req-1","object":"chat.completion.chunk","created":{created},"model":"tiny","choices":['
    first = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
    texts = [router.tokenizer.decode([i]) for i in router.ids("The capital")]
    middle = [f'{{"index":0,"delta":{{"content":"{t}"}},"logprobs":null,"finish_reason":null}}]}}' for t in texts]
    last = '{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"baton":'
    blocks = response.text.split("\n\n")
    assert blocks[0] == "data: " + head + first
    assert blocks[1:-3] == ["data: " + head + part for part in middle]
    assert blocks[-3].startswith("data: " + head + last)
    assert blocks[-2:] == ["data: [DONE]", ""]


async def test_completion_stream_when_read_whole_has_exactly_these_bytes(router):
    router.play(answering(router.ids("The"), reason="length", cached=0))
    response = await router.client.post(TEXT, json=body(TEXT, max_tokens=1), headers={"X-Request-Id": "req-2"})
    created = re.search(rb'"created":(\d+)', response.content)[1].decode()
    start = (
        f'data: {{"id":"cmpl-req-2","object":"text_completion","created":{created},"model":"tiny","choices":['
        '{"index":0,"text":"The","logprobs":null,"finish_reason":"length","stop_reason":null}],"baton":{'
    )
    assert response.text.startswith(start)
    assert response.text.endswith("}}\n\ndata: [DONE]\n\n")
    assert response.text.count("\n\n") == 2


async def test_stream_headers_when_sent_are_those_of_an_event_stream(router):
    response = await router.client.post(CHAT, json=body(CHAT))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-baton-prefill-cuda-graph"] == "not_requested"
    assert response.headers["x-request-id"]
    assert "content-length" not in response.headers


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_nothing_when_no_token_is_there_is_sent_and_then_the_role_comes_with_it(router, path):
    gate = asyncio.Event()
    router.play(gated(router, [gate]))
    raw = await RawStream(router).open(path, body(path))
    await router.serving.until(lambda: router.serving.open == 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await raw.reader.read(1)
    gate.set()
    assert (await raw.read_head()).startswith(b"HTTP/1.1 200 OK\r\n")
    events = events_of(await raw.read_chunk())
    if path == CHAT:
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[1]["choices"][0]["delta"] == {"content": "The"}
    assert len(events) == (2 if path == CHAT else 1)
    raw.close()


async def test_r4_token_when_it_is_there_is_sent_before_the_next_is_made(router):
    gates = [asyncio.Event() for _ in router.ids("The capital of")]
    router.play(gated(router, gates))
    gates[0].set()
    raw = await RawStream(router).open(TEXT, body(TEXT))
    await raw.read_head()
    # Each token is made only once the one before has arrived here.
    for gate in gates[1:]:
        assert len(events_of(await raw.read_chunk())) == 1
        gate.set()
    await raw.read_chunk()
    raw.close()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (None, "none"),
        ({}, "none"),
        ({"include_usage": False}, "none"),
        ({"include_usage": None, "continuous_usage_stats": None}, "none"),
        ({"continuous_usage_stats": True}, "none"),
        ({"include_usage": True}, "final"),
        ({"include_usage": True, "continuous_usage_stats": False}, "final"),
        ({"include_usage": True, "continuous_usage_stats": True}, "continuous"),
    ],
)
async def test_usage_when_asked_for_in_each_way_is_where_it_belongs(router, path, options, mode):
    fields = {} if options is None else {"stream_options": options}
    router.play(answering([*router.ids(ANSWER), router.eos], chunk=3, stop_token_id=router.eos, cached=4))
    response = await router.client.post(path, json=body(path, **fields))
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    total = len(router.ids(ANSWER)) + 1
    if mode == "none":
        assert all("usage" not in chunk for chunk in chunks)
        assert "baton" in chunks[-1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        return
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == total
    assert usage["total_tokens"] == usage["prompt_tokens"] + total
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "baton" in chunks[-1]
    assert all("baton" not in chunk for chunk in chunks[:-1])
    if mode == "final":
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        return
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    if path == CHAT:
        assert counts.pop(0) == 0
    assert [after - before for before, after in zip([0, *counts], counts, strict=False)] == [3] * (total // 3) + (
        [total % 3] if total % 3 else []
    )


async def test_finish_reason_when_the_stream_runs_is_null_until_the_last_chunk_of_its_index(router):
    response = await router.client.post(TEXT, json=body(TEXT, n=3))
    *chunks, _ = events_of(response.text)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert "".join(choice["text"] for choice in own) == ANSWER
    assert ["baton" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_roles_when_there_are_several_choices_come_once_for_each(router):
    *chunks, _ = events_of((await router.client.post(CHAT, json=body(CHAT, n=2))).text)
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]


async def test_character_when_it_spans_tokens_is_in_one_chunk(router):
    text = "a😀é你"
    router.play(answering(router.ids(text), reason="length"))
    *chunks, _ = events_of((await router.client.post(TEXT, json=body(TEXT))).text)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)
    assert len(texts) >= len(router.ids(text))


@pytest.mark.parametrize("stream", [True, False])
async def test_unfinished_character_when_the_answer_ends_is_dropped(router, stream):
    ids = [*router.ids("a"), *(router.tokenizer._backend.token_to_id(char) for char in "ðŁĺ")]
    router.play(answering(ids, reason="length"))
    response = await router.client.post(TEXT, json=body(TEXT, stream=stream, logprobs=0))
    parts = events_of(response.text)[:-1] if stream else [response.json()]
    assert "".join(part["choices"][0]["text"] for part in parts) == "a"
    tokens = [text for part in parts for text in part["choices"][0]["logprobs"]["tokens"]]
    assert tokens == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98"]


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_string_when_it_spans_tokens_ends_text_and_generation(router, stream):
    content = body(CHAT, stream=stream, stop=["tal of Fra", "never"])
    response = await router.client.post(CHAT, json=content)
    if stream:
        *chunks, _ = events_of(response.text)
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        choice = chunks[-1]["choices"][0]
    else:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"]
    assert text == "The capi"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "tal of Fra")
    assert router.serving.closed_early == 1
    assert router.access_log.records[-1]["outcome"] == "stop"


async def test_ping_when_the_stream_is_silent_comes_between_events_and_not_before_the_first():
    async with running_router(ping_interval_s=0.1) as router:
        gates = [asyncio.Event(), asyncio.Event()]
        router.play(gated(router, gates))
        raw = await RawStream(router).open(TEXT, body(TEXT))
        await router.serving.until(lambda: router.serving.open == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.35):
                await raw.reader.read(1)
        gates[0].set()
        await raw.read_head()
        assert len(events_of(await raw.read_chunk())) == 1
        assert [await raw.read_chunk() for _ in range(3)] == [b": ping\n\n"] * 3
        gates[1].set()
        while (chunk := await raw.read_chunk()) == b": ping\n\n":
            pass
        assert chunk.startswith(b"data: {")
        raw.close()


EARLY = [
    BatonError(ErrorCode.NO_PREFILL_WORKER, "no prefill server is ready"),
    BatonError(ErrorCode.ROUTER_QUEUE_FULL, "too many requests", retry_after_s=2.3),
    BatonError(ErrorCode.LOAD_KV_CACHE_FAILED, "x", metadata={"cause_code": "8603"}),
    BatonError(ErrorCode.GENERATE_TIMEOUT, "x"),
    BatonError(ErrorCode.UNKNOWN_ERROR, "x"),
]


@pytest.mark.parametrize("error", EARLY, ids=lambda error: error.code.name)
async def test_failure_before_the_first_token_when_streamed_or_not_has_the_same_status_and_body(router, error):
    router.play(answering([], error=error))
    answers = [
        await router.client.post(CHAT, json=body(CHAT, stream=stream), headers={"X-Request-Id": f"early-{stream}"})
        for stream in (True, False)
    ]
    assert [answer.status_code for answer in answers] == [error.http_status] * 2
    assert answers[0].json() == answers[1].json()
    assert answers[0].json()["error"]["baton_code"] == int(error.code)
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-baton-error"] == error.code.name
        assert answer.headers["x-request-id"].startswith("early-")
        assert answer.headers.get("retry-after") == ({503: "1", 429: "3"}.get(error.http_status))
    labels = {"api": "chat", "code": error.code.name, "phase": "before_first_token"}
    assert router.figure("baton_request_errors_total", **labels) == 2


async def test_failure_after_the_first_token_when_streamed_is_an_event_and_the_end(router):
    error = BatonError(ErrorCode.KEEP_ALIVE_TIMEOUT, "the decode server was silent for too long")
    router.play(answering(router.ids("The capital"), error=error))
    response = await router.client.post(CHAT, json=body(CHAT), headers={"X-Request-Id": "mid"})
    assert response.status_code == 200
    *chunks, failure, done = events_of(response.text)
    assert done == "[DONE]"
    assert failure == {
        "error": {
            "message": "the decode server was silent for too long",
            "type": "server_error",
            "param": None,
            "code": "KEEP_ALIVE_TIMEOUT",
            "baton_code": 8214,
        }
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    labels = {"api": "chat", "code": "KEEP_ALIVE_TIMEOUT", "phase": "mid_stream"}
    assert router.figure("baton_request_errors_total", **labels) == 1
    assert router.figure("baton_requests_total", api="chat", outcome="error", stream="true") == 1
    assert router.figure("baton_http_requests_total", route=CHAT, status="200") == 1


async def test_failure_after_the_first_token_when_not_streamed_has_its_status(router):
    router.play(answering(router.ids("The"), error=BatonError(ErrorCode.ENGINE_DEAD, "gone")))
    response = await router.client.post(TEXT, json=body(TEXT, stream=False))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "ENGINE_DEAD"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_client_when_it_leaves_in_mid_generation_ends_all_legs(router, stream, n):
    first = asyncio.Event()
    first.set()
    router.play(gated(router, [first, asyncio.Event()]))
    raw = await RawStream(router).open(TEXT, body(TEXT, stream=stream, n=n), **{"X-Request-Id": "leaves"})
    if stream:
        await raw.read_head()
        await raw.read_chunk()
    await router.serving.until(lambda: router.serving.open == n)
    raw.close()
    await router.serving.until(lambda: router.serving.open == 0, 20)
    assert router.serving.closed_early == n
    record = await router.access_log.last()
    assert router.figure("baton_http_requests_total", route=TEXT, status="499") == 1
    assert router.figure("baton_http_requests_total", route=TEXT, status="200") == 0
    assert router.figure("baton_http_inflight_requests", route=TEXT) == 0
    assert (record["request_id"], record["code"]) == ("leaves", "CANCELLED")
    assert router.figure("baton_aborts_total", leg="router", source="client") == 1
    assert len(router.open_requests) == 0


async def test_client_when_it_leaves_before_the_first_token_ends_all_legs(router):
    router.play(gated(router, [asyncio.Event()]))
    raw = await RawStream(router).open(CHAT, body(CHAT))
    await router.serving.until(lambda: router.serving.open == 1)
    raw.close()
    await router.serving.until(lambda: router.serving.open == 0, 20)
    router.play(answering(router.ids("The"), reason="length"))
    assert (await router.client.post(CHAT, json=body(CHAT, stream=False))).status_code == 200


async def test_connection_when_the_client_keeps_it_serves_the_next_request(router):
    for _ in range(3):
        response = await router.client.post(CHAT, json=body(CHAT))
        assert events_of(response.text)[-1] == "[DONE]"
    assert router.serving.open == 0


async def test_client_when_it_does_not_read_is_given_up_after_the_requests_deadline(monkeypatch):
    monkeypatch.setattr("router.http.routes.generation.SLOW_READER_GRACE_S", 0.3)
    async with running_router(request_timeout_s=1.5) as router:
        ids = router.ids("capital")

        async def flood(request: RouterRequest):
            index = 0
            while True:
                yield TokensEvent([token(request, index + i, ids[0]) for i in range(1000)], summary(request))
                index += 1000
                await asyncio.sleep(0)

        router.play(flood)
        monkeypatch.setattr("router.validation.DEFAULT_MAX_TOKENS", 10)
        monkeypatch.setattr(router.serving, "facts", router.serving.facts.__class__((MODEL,), "x", 2**30, 600, ()))
        raw = await RawStream(router).open(TEXT, body(TEXT, max_tokens=2**29))
        await raw.read_head()
        # Reads nothing from here on: the buffers of both sides fill up, and the router waits.
        await router.serving.until(lambda: router.serving.open == 0, 10)
        assert (await router.access_log.last())["code"] == "OUTPUT_QUEUE_FULL"
        raw.close()
