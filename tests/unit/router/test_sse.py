"""Events put together by hand are JSON as a library would write it, and cheap."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answer import Usage
from router.http.logprobs import chat_logprobs, completion_logprobs
from router.http.request_scope import RequestScope
from router.http.sse import Chunks, EventStream, error_event
from router.requests import Logprob, Token
from router.text.tokenizer import Tokenizer
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry
from tests.unit.router import tokenizer_folders as folders

USAGE = Usage(5, 3, 2)


def parsed(event: bytes) -> dict:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


@given(st.text(), st.text(min_size=1), st.one_of(st.none(), st.text(), st.integers(0, 10**6)))
def test_chunk_when_text_and_names_are_anything_is_their_json(text, model, stop_reason):
    if any(0xD800 <= ord(char) < 0xE000 for char in text + model + str(stop_reason)):
        return
    chunks = Chunks("chat", id="chatcmpl-1", created=7, model=model, usage_mode="none")
    event = parsed(chunks.text(3, text, USAGE, finish_reason="stop", stop_reason=stop_reason))
    assert event == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": model,
        "choices": [
            {
                "index": 3,
                "delta": {"content": text},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": stop_reason,
            }
        ],
    }


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("mode", ["none", "final", "continuous"])
def test_usage_when_its_mode_is_set_is_in_every_kind_of_chunk(kind, mode):
    chunks = Chunks(kind, id="i", created=1, model="m", usage_mode=mode)
    events = [chunks.text(0, "x", USAGE), chunks.text(0, "x", USAGE, finish_reason="length", baton=b'{"path":"pd"}')]
    if kind == "chat":
        events.append(chunks.role(0, USAGE))
    counts = {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    for event in map(parsed, events):
        expected = {"none": "absent", "final": None, "continuous": counts}[mode]
        assert event.get("usage", "absent") == expected
    assert parsed(events[1])["baton"] == {"path": "pd"}
    last = parsed(chunks.usage(USAGE, b"{}"))
    assert (last["choices"], last["usage"], last["baton"]) == ([], counts, {})


def test_error_event_when_written_has_the_error_form():
    event = parsed(error_event(BatonError(ErrorCode.ENGINE_DEAD, "line\none")))
    assert event["error"]["code"] == "ENGINE_DEAD"


def test_logprobs_when_a_probability_is_zero_are_json_numbers():
    tokenizer = Tokenizer(folders.byte_level())
    tokens = [Token(0, 5, Logprob(5, float("-inf")), (Logprob(6, -0.25), Logprob(5, float("-inf"))))]
    assert chat_logprobs(tokens, tokenizer)["content"][0]["logprob"] == -9999.0
    shown = completion_logprobs(tokens, [0], tokenizer)
    assert shown["token_logprobs"] == [-9999.0]
    assert shown["top_logprobs"] == [{tokenizer.token_text(6): -0.25, tokenizer.token_text(5): -9999.0}]


async def test_ping_when_due_is_written_after_the_start_only():
    now = 0.0
    sent: list[dict] = []

    async def send(message) -> None:
        sent.append(dict(message))

    stream = EventStream(send, 15.0, clock=lambda: now)
    now = 100.0
    await stream.ping_if_due()
    assert sent == []
    await stream.start([])
    await stream.write(b"data: x\n\n")
    now = 114.9
    assert stream.silence_left() == pytest.approx(0.1)
    await stream.ping_if_due()
    assert len(sent) == 2
    now = 115.0
    await stream.ping_if_due()
    assert sent[-1] == {"type": "http.response.body", "body": b": ping\n\n", "more_body": True}
    assert stream.silence_left() == 15.0


@pytest.mark.parametrize("left", [True, False])
async def test_write_when_the_loop_has_closed_the_connection_then_the_client_has_left_and_nothing_has_failed(
    left, monkeypatch, caplog
):
    """What uvloop raises between the end of a connection and the news of it; without that news it is an error."""
    monkeypatch.setattr("router.http.request_scope.GONE_LIMIT_S", 0.05)

    async def app(scope, receive, send):
        await EventStream(send, 15.0).start([])

    async def send(message):
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    metrics = Registry("router")
    scoped = RequestScope(app, paths=frozenset(("/x",)), posts={}, metrics=metrics, api_keys=())
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    if left:
        await scoped(scope, receive, send)
    else:
        with pytest.raises(RuntimeError):
            await scoped(scope, receive, send)
    counted = {"route": "/x", "method": "GET", "status": "499" if left else "200"}
    assert metrics.value("baton_http_requests_total", **counted) == 1
    assert ("failed unexpectedly" in caplog.text) is not left


def test_chunk_when_written_costs_less_than_100_microseconds():
    chunks = Chunks("chat", id="chatcmpl-1", created=7, model="m", usage_mode="continuous")
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(1000):
            chunks.text(0, " token", USAGE)
        best = min(best, (time.thread_time() - began) / 1000)
    assert best < 100e-6


def test_http_side_of_the_router_when_imported_brings_no_torch_and_no_transformers():
    code = (
        "import sys, router.http.app, router.answer, router.validation, router.text.chat_template;"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
