"""Bad requests: each gets the documented status, code and field, in one form, and the router serves on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rpc.errors import TABLE, ErrorCode
from tests.conformance.http_router import CONTEXT, MODEL, RunningRouter, running_router

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router() as running:
        yield running


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": [USER], **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": MODEL, "prompt": "hi", **fields}


FORMAT = ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
RANGE = ErrorCode.INVALID_PARAMS
VOCAB = ErrorCode.OUT_OF_VOCAB_RANGE
LONG = ErrorCode.LONG_PROMPT_ERROR

# Request, code, field at fault, what the message must name.
CASES: list[tuple[tuple[str, dict[str, Any]], ErrorCode, str, list[str]]] = [
    # wrong types
    (text(max_tokens="16"), FORMAT, "max_tokens", ["an integer", "a string"]),
    (text(max_tokens=1.5), FORMAT, "max_tokens", ["an integer", "a number"]),
    (text(max_tokens=True), FORMAT, "max_tokens", ["an integer", "a boolean"]),
    (text(max_tokens=[1]), FORMAT, "max_tokens", ["an integer", "a list"]),
    (text(temperature="hot"), FORMAT, "temperature", ["a number", "a string"]),
    (text(temperature=True), FORMAT, "temperature", ["a number", "a boolean"]),
    (text(top_p={}), FORMAT, "top_p", ["a number", "an object"]),
    (text(top_k=1.0), FORMAT, "top_k", ["an integer"]),
    (text(n="2"), FORMAT, "n", ["an integer"]),
    (text(stream="true"), FORMAT, "stream", ["true or false"]),
    (text(stream=1), FORMAT, "stream", ["true or false"]),
    (text(echo=1), FORMAT, "echo", ["true or false"]),
    (text(ignore_eos="no"), FORMAT, "ignore_eos", ["true or false"]),
    (text(seed="x"), FORMAT, "seed", ["an integer"]),
    (text(seed=1.5), FORMAT, "seed", ["an integer"]),
    (text(stop=1), FORMAT, "stop", ["a string or a list of strings"]),
    (text(stop=["a", 1]), FORMAT, "stop", ["stop[1]", "a string"]),
    (text(stop_token_ids=5), FORMAT, "stop_token_ids", ["a list of integers"]),
    (text(stop_token_ids=[1, "2"]), FORMAT, "stop_token_ids", ["stop_token_ids[1]"]),
    (text(stop_token_ids=[True]), FORMAT, "stop_token_ids", ["a boolean"]),
    (text(logit_bias=[1]), FORMAT, "logit_bias", ["an object"]),
    (text(logit_bias={"x": 1}), FORMAT, "logit_bias", ["token ids"]),
    (text(logit_bias={"5": "1"}), FORMAT, "logit_bias", ["[5]", "a number"]),
    (text(logit_bias={"5": True}), FORMAT, "logit_bias", ["a number"]),
    (text(logprobs=True), FORMAT, "logprobs", ["an integer", "a boolean"]),
    (chat(logprobs=3), FORMAT, "logprobs", ["true or false"]),
    (chat(top_logprobs="2", logprobs=True), FORMAT, "top_logprobs", ["an integer"]),
    (text(stream=True, stream_options=[1]), FORMAT, "stream_options", ["an object"]),
    (text(stream=True, stream_options={"include_usage": "yes"}), FORMAT, "stream_options", ["include_usage"]),
    (text(user=7), FORMAT, "user", ["a string"]),
    (text(priority="high"), FORMAT, "priority", ["an integer"]),
    (text(cache_salt=7), FORMAT, "cache_salt", ["a string"]),
    (text(request_id=7), FORMAT, "request_id", ["a string"]),
    (text(model=7), FORMAT, "model", ["a string"]),
    (text(response_format="text"), FORMAT, "response_format", ["an object"]),
    (text(response_format={}), FORMAT, "response_format", ["of type text, json_object"]),
    (text(regex=3), FORMAT, "regex", ["a string"]),
    (text(json_schema=3), FORMAT, "json_schema", ["an object"]),
    (text(choice=["a", ""]), FORMAT, "choice", ["none of them empty"]),
    (text(ebnf=""), FORMAT, "ebnf", ["not empty"]),
    (text(structural_tag=[]), FORMAT, "structural_tag", ["an object"]),
    (text(structured_outputs=[]), FORMAT, "structured_outputs", ["an object"]),
    (text(guided_regex="a", guided_choice=["b"]), FORMAT, "guided_choice", ["exactly one"]),
    (chat(tools=[]), FORMAT, "tools", ["at least one"]),
    (chat(tool_choice="required"), FORMAT, "tool_choice", ["needs tools"]),
    (chat(parallel_tool_calls=1), FORMAT, "parallel_tool_calls", ["true or false"]),
    (text(prompt=7), FORMAT, "prompt", ["a string"]),
    (text(prompt={"a": 1}), FORMAT, "prompt", ["a string"]),
    (text(prompt=["a", 1]), FORMAT, "prompt", ["prompt[1]"]),
    (text(prompt=[1, "a"]), FORMAT, "prompt", ["prompt[1]"]),
    (text(prompt=[1, 2.5]), FORMAT, "prompt", ["prompt[1]", "a number"]),
    (text(prompt=[1, True]), FORMAT, "prompt", ["prompt[1]", "a boolean"]),
    (text(prompt=[[1], 2]), FORMAT, "prompt", ["prompt[1]"]),
    (text(prompt=[[1], ["a"]]), FORMAT, "prompt", ["prompt[1][0]"]),
    (text(prompt=[None]), FORMAT, "prompt", ["prompt[0]", "null"]),
    (text(prompt=None), FORMAT, "prompt", ["required"]),
    ((TEXT, {"model": MODEL}), FORMAT, "prompt", ["required"]),
    ((CHAT, {"model": MODEL}), FORMAT, "messages", ["required"]),
    (chat(messages=None), FORMAT, "messages", ["required"]),
    (chat(messages="hi"), FORMAT, "messages", ["a list"]),
    (chat(messages=["hi"]), FORMAT, "messages", ["messages[0]", "an object"]),
    (chat(messages=[{"content": "hi"}]), FORMAT, "messages", ["messages[0].role"]),
    (chat(messages=[{"role": 5, "content": "hi"}]), FORMAT, "messages", ["messages[0].role"]),
    (chat(messages=[{"role": "user"}]), FORMAT, "messages", ["messages[0].content"]),
    (chat(messages=[{"role": "user", "content": 5}]), FORMAT, "messages", ["messages[0].content"]),
    (chat(messages=[{"role": "user", "content": ["x"]}]), FORMAT, "messages", ["content[0]"]),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), FORMAT, "messages", ["content[0].text"]),
    # out of range
    (text(prompt=""), RANGE, "prompt", ["at least one"]),
    (text(prompt=[]), RANGE, "prompt", ["at least one"]),
    (text(prompt=[[]]), RANGE, "prompt", ["at least one"]),
    (text(prompt=["a", ""]), RANGE, "prompt", ["at least one"]),
    (text(prompt=["a"] * 1025), RANGE, "prompt", ["1025", "1024"]),
    (text(prompt=["a"] * 20, n=128), RANGE, "prompt", ["20 prompts x 128"]),
    (chat(messages=[]), RANGE, "messages", ["at least one"]),
    (chat(messages=[{"role": "alien", "content": "x"}]), RANGE, "messages", ["messages[0].role", "alien", "assistant"]),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        RANGE,
        "messages",
        ["image_url", "not available"],
    ),
    (text(max_tokens=0), RANGE, "max_tokens", ["max_tokens", "0", "[1,"]),
    (text(max_tokens=-5), RANGE, "max_tokens", ["-5"]),
    (text(max_tokens=10**30), RANGE, "max_tokens", ["max_tokens"]),
    (chat(max_completion_tokens=0, max_tokens=5), RANGE, "max_completion_tokens", ["max_completion_tokens"]),
    (text(min_tokens=-1), RANGE, "min_tokens", ["-1"]),
    (text(min_tokens=17), RANGE, "min_tokens", ["17", "max_tokens (16)"]),
    (text(temperature=-0.1), RANGE, "temperature", ["-0.1", "[0, 2]"]),
    (text(temperature=2.1), RANGE, "temperature", ["2.1", "[0, 2]"]),
    (text(top_p=0), RANGE, "top_p", ["(0, 1]"]),
    (text(top_p=1.01), RANGE, "top_p", ["(0, 1]"]),
    (text(top_k=-2), RANGE, "top_k", ["-2"]),
    (text(min_p=1.5), RANGE, "min_p", ["[0, 1]"]),
    (text(n=0), RANGE, "n", ["[1, 128]"]),
    (text(n=129), RANGE, "n", ["129"]),
    (text(n=-1), RANGE, "n", ["-1"]),
    (text(best_of=1, n=2), RANGE, "best_of", ["[2, 128]"]),
    (text(best_of=3, n=2, stream=True), RANGE, "best_of", ["stream"]),
    (chat(best_of=2), RANGE, "best_of", ["chat"]),
    (chat(echo=True), RANGE, "echo", ["chat"]),
    (text(logprobs=-1), RANGE, "logprobs", ["[0, 20]"]),
    (text(logprobs=21), RANGE, "logprobs", ["21"]),
    (chat(logprobs=True, top_logprobs=21), RANGE, "top_logprobs", ["21"]),
    (chat(top_logprobs=2), RANGE, "top_logprobs", ["logprobs: true"]),
    (text(prompt_logprobs=21), RANGE, "prompt_logprobs", ["21"]),
    (text(prompt_logprobs=1, stream=True), RANGE, "prompt_logprobs", ["stream"]),
    (text(presence_penalty=2.5), RANGE, "presence_penalty", ["[-2, 2]"]),
    (text(frequency_penalty=-3), RANGE, "frequency_penalty", ["[-2, 2]"]),
    (text(repetition_penalty=0), RANGE, "repetition_penalty", ["(0, 100]"]),
    (text(stop=[""]), RANGE, "stop", ["1 to 4096"]),
    (text(stop=""), RANGE, "stop", ["1 to 4096"]),
    (text(stop=["x"] * 17), RANGE, "stop", ["17", "16"]),
    (text(stop=["x" * 4097]), RANGE, "stop", ["4096"]),
    (text(seed=2**64), RANGE, "seed", ["2^64"]),
    (text(seed=-(2**63) - 1), RANGE, "seed", ["-2^63"]),
    (text(logit_bias={"5": 101}), RANGE, "logit_bias", ["logit_bias[5]", "101", "[-100, 100]"]),
    (text(priority=2**31), RANGE, "priority", ["2^31"]),
    (text(cache_salt="s" * 1025), RANGE, "cache_salt", ["1024"]),
    (text(stream_options={"include_usage": True}), RANGE, "stream_options", ["stream: true"]),
    (text(stream=False, stream_options={}), RANGE, "stream_options", ["stream: true"]),
    (text(response_format={"type": "json_object"}), RANGE, "response_format", ["structured output", "not available"]),
    (chat(json_schema={}), RANGE, "json_schema", ["not available"]),
    (text(kv_transfer_params={}), RANGE, "kv_transfer_params", ["null"]),
    (text(kv_transfer_params={"remote_host": "10.0.0.1"}), RANGE, "kv_transfer_params", ["null"]),
    (text(request_id="a#b"), RANGE, "request_id", ["request_id"]),
    (text(request_id="x" * 129), RANGE, "request_id", ["128"]),
    # outside of the vocabulary
    (text(prompt=[-1]), VOCAB, "prompt", ["-1"]),
    (text(prompt=[0, 10**6]), VOCAB, "prompt", ["1000000"]),
    (text(prompt=[10**40]), VOCAB, "prompt", ["prompt"]),
    (text(prompt=[[1], [-7]]), VOCAB, "prompt", ["-7"]),
    (text(stop_token_ids=[10**6]), VOCAB, "stop_token_ids", ["1000000"]),
    (text(logit_bias={"-1": 1}), VOCAB, "logit_bias", ["-1"]),
    (text(logit_bias={"999999": 1}), VOCAB, "logit_bias", ["999999"]),
    # too long
    (text(prompt="hello " * 1000), LONG, "prompt", [str(CONTEXT)]),
    (text(prompt=[5] * CONTEXT), LONG, "prompt", [str(CONTEXT)]),
    (text(prompt=[5] * (CONTEXT - 10), max_tokens=11), LONG, "max_tokens", ["257", "246", "11", "10"]),
    (chat(max_completion_tokens=CONTEXT), LONG, "max_completion_tokens", [str(CONTEXT)]),
    (chat(messages=[{"role": "user", "content": "word " * 2000}]), LONG, "messages", [str(CONTEXT)]),
    (text(prompt="x" * 3_000_000), LONG, "prompt", ["3000000 characters"]),
    # unknown
    (text(model="gpt-4"), ErrorCode.MODEL_NOT_FOUND, "model", ["gpt-4", MODEL]),
    (text(model=""), ErrorCode.MODEL_NOT_FOUND, "model", [MODEL]),
]


def check_error(response, code: ErrorCode) -> dict[str, Any]:
    """The one form of every error response; returns the error object."""
    spec = TABLE[code]
    assert response.status_code == spec.http, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-baton-error"] == code.name
    assert response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (spec.http in (429, 503))
    content = response.json()
    assert set(content) == {"error"}
    error = content["error"]
    assert set(error) == {"message", "type", "param", "code", "baton_code"}
    assert error["baton_code"] == int(code)
    assert error["type"] == spec.openai_type
    assert error["code"] == spec.openai_code
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


async def test_every_bad_field_when_sent_is_named_with_its_code_and_the_router_serves_on(router):
    """All cases on one router, streamed where the case does not say otherwise, so that one can break the next."""
    assert len(CASES) > 60
    for (path, content), code, param, parts in CASES:
        response = await router.client.post(path, json=content)
        error = check_error(response, code)
        assert error["param"] == param, (content, error)
        for part in parts:
            assert part in error["message"], (content, error)
        assert router.serving.requests == [], content
        if "stream" not in content and "stream_options" not in content and "best_of" not in content:
            streamed = await router.client.post(path, json={**content, "stream": True})
            if param != "prompt_logprobs":
                assert check_error(streamed, code) == error
    good = await router.client.post(TEXT, json=text()[1])
    assert good.status_code == 200
    assert len(router.open_requests) == 0


RAW: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b'{"prompt": "a"', "not valid JSON"),
    (b'{"prompt": "a"} x', "not valid JSON"),
    (b"[1, 2]", "a list"),
    (b'"text"', "a string"),
    (b"null", "null"),
    (b"7", "an integer"),
    (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
    (b"\xff\xfe{\x00}\x00", "not valid JSON"),
    (b'{"prompt": "\\ud800"}', "half a character"),
    (b'{"regex": "\\ud83d\\ude00\\udc00"}', "half a character"),
    (b'{"prompt": "\\ud83d\\ude00", }', "trailing comma"),
    (b'{"temperature": NaN}', "not valid JSON"),
    (b'{"temperature": Infinity}', "not valid JSON"),
    (b'{"temperature": 1e999}', "not valid JSON"),
    (b'{"seed": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "not valid JSON"),
    (b"\xef\xbb\xbf{}", "not valid JSON"),
    (b"prompt=hello", "not valid JSON"),
]


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize", "/abort_request", "/workers"])
async def test_body_when_it_is_no_json_object_is_refused(router, path):
    for raw, part in RAW:
        response = await router.client.post(path, content=raw, headers={"Content-Type": "application/json"})
        error = check_error(response, FORMAT)
        assert part in error["message"]
        assert "$[" not in error["message"]
    assert (await router.client.post(TEXT, json=text()[1])).status_code == 200


async def test_numbers_when_huge_negative_or_whole_are_handled(router):
    assert (await router.client.post(TEXT, json=text(seed=2**64 - 1)[1])).status_code == 200
    assert (await router.client.post(TEXT, json=text(seed=-(2**63))[1])).status_code == 200
    assert router.serving.requests[-1].sampling.seed == 2**63
    assert (await router.client.post(TEXT, json=text(temperature=1, top_p=1, top_k=-1)[1])).status_code == 200
    assert router.serving.requests[-1].sampling.top_k == 0


async def test_null_when_sent_for_any_field_means_absent(router):
    names = [
        *(
            "max_tokens",
            "max_completion_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "best_of",
        ),
        *("stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "stream", "stream_options", "user"),
        *("priority", "cache_salt", "request_id", "response_format", "kv_transfer_params", "model"),
    ]
    for path, content in (text(), chat()):
        response = await router.client.post(path, json={**content, **dict.fromkeys(names)})
        assert response.status_code == 200, response.text
    sampling = router.serving.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert router.serving.requests[1].sampling.max_tokens == CONTEXT - len(router.serving.requests[1].prompt_token_ids)


async def test_unknown_fields_when_sent_are_ignored_and_logged_once_for_each_name(router, caplog):
    from router.http import schemas

    schemas._unknown_seen.clear()
    for _ in range(3):
        content = text(tools=[], frobnicate=1, **{"stränge\nname": 2})[1]
        assert (await router.client.post(TEXT, json=content)).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "unknown request field" in record.getMessage()]
    assert len(lines) == 3
    assert any("frobnicate" in line for line in lines)
    assert all("\n" not in line for line in lines)


async def test_template_when_it_refuses_the_messages_or_is_missing_is_a_typed_error():
    async with running_router(chat=False) as router:
        error = check_error(await router.client.post(CHAT, json=chat()[1]), RANGE)
        assert "chat template" in error["message"]
        assert error["param"] == "messages"
        assert (await router.client.post(TEXT, json=text()[1])).status_code == 200
        check_error(await router.client.post("/tokenize", json={"messages": [USER]}), RANGE)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/", ErrorCode.PATH_NOT_FOUND),
        ("GET", "/v1", ErrorCode.PATH_NOT_FOUND),
        ("POST", "/v1/completions/", ErrorCode.PATH_NOT_FOUND),
        ("GET", "/v1/models/", ErrorCode.PATH_NOT_FOUND),
        ("POST", "/start_profile", ErrorCode.PATH_NOT_FOUND),
        ("GET", "/../../etc/passwd", ErrorCode.PATH_NOT_FOUND),
        ("DELETE", "/workers/prefill", ErrorCode.PATH_NOT_FOUND),
        ("GET", TEXT, ErrorCode.METHOD_NOT_ALLOWED),
        ("PUT", CHAT, ErrorCode.METHOD_NOT_ALLOWED),
        ("DELETE", "/workers", ErrorCode.METHOD_NOT_ALLOWED),
        ("POST", "/v1/models", ErrorCode.METHOD_NOT_ALLOWED),
        ("POST", "/health", ErrorCode.METHOD_NOT_ALLOWED),
        ("GET", "/abort_request", ErrorCode.METHOD_NOT_ALLOWED),
        ("PATCH", "/metrics", ErrorCode.METHOD_NOT_ALLOWED),
    ],
)
async def test_path_or_method_when_unknown_has_the_error_form(router, method, path, code):
    response = await router.client.request(method, path)
    check_error(response, code)
    if code is ErrorCode.METHOD_NOT_ALLOWED:
        assert response.headers["allow"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/xml"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/abort_request", "/workers"])
async def test_body_when_its_type_is_not_json_is_415(router, path, headers):
    check_error(await router.client.post(path, content=b"{}", headers=headers), ErrorCode.UNSUPPORTED_MEDIA_TYPE)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json", None]
)
async def test_body_when_its_type_is_some_json_or_not_said_is_read(router, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = await router.client.post(TEXT, content=json.dumps(text()[1]).encode(), headers=headers)
    assert response.status_code == 200


async def test_body_when_too_large_is_413_also_when_its_size_is_not_declared():
    async with running_router(max_payload_bytes=10_000) as router:

        async def parts():
            for _ in range(1000):
                yield b" " * 1000

        declared = await router.client.post(TEXT, json=text(prompt="x" * 20_000)[1])
        check_error(declared, ErrorCode.PAYLOAD_TOO_LARGE)
        assert "10000" in declared.json()["error"]["message"]
        chunked = await router.client.post(TEXT, content=parts(), headers={"Content-Type": "application/json"})
        check_error(chunked, ErrorCode.PAYLOAD_TOO_LARGE)
        for path in ("/tokenize", "/abort_request", "/workers"):
            response = await router.client.post(path, json={"prompt": "x" * 20_000})
            check_error(response, ErrorCode.PAYLOAD_TOO_LARGE)
        assert (await router.client.post(TEXT, json=text()[1])).status_code == 200


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({"Authorization": "Bearer wrong"}, b"{}", ErrorCode.UNAUTHENTICATED),
        ({"X-Request-Id": "a b"}, b"{}", RANGE),
        ({"Content-Type": "text/plain"}, b"{}", ErrorCode.UNSUPPORTED_MEDIA_TYPE),
        ({}, b" " * 10_001, ErrorCode.PAYLOAD_TOO_LARGE),
        ({}, b'{"request_id": "a#b"}', RANGE),
        ({}, b"{", FORMAT),
    ],
)
@pytest.mark.parametrize(("path", "api"), [(TEXT, "completions"), (CHAT, "chat")])
async def test_request_when_refused_before_its_body_is_understood_has_its_line_and_counts(
    path, api, headers, body, code
):
    async with running_router(max_payload_bytes=10_000, api_keys=("key",)) as router:
        private = path == CHAT
        headers = {"Content-Type": "application/json", "Authorization": "Bearer key", **headers}
        if private:
            headers["X-Baton-Private"] = "1"
        response = await router.client.post(path, content=body, headers=headers)
        check_error(response, code)
        [line] = router.access_log.records
        assert line["request_id"] == response.headers["x-request-id"]
        assert (line["code"], line["api"], line["outcome"]) == (code.name, api, "error")
        assert line["private"] is private
        assert [arrival["request_id"] for arrival in router.access_log.arrivals] == [line["request_id"]]
        labels = {"model_name": "other", "api": api}
        assert router.figure("baton_requests_total", **labels, stream="false", outcome="error") == 1
        phase = "before_first_token"
        assert router.figure("baton_request_errors_total", **labels, code=code.name, phase=phase) == 1
        status = str(response.status_code)
        assert router.figure("baton_http_requests_total", route=path, method="POST", status=status) == 1
        assert len(router.open_requests) == 0
        await router.client.get(path)  # no request for an answer, and so no line
        assert len(router.access_log.records) == 1


async def test_body_when_its_client_leaves_in_the_middle_is_a_cancelled_request():
    async with running_router() as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        fields = "Host: x\r\nX-Request-Id: half\r\nContent-Length: 50\r\nExpect: 100-continue"
        writer.write(f'POST {TEXT} HTTP/1.1\r\n{fields}\r\n\r\n{{"prompt"'.encode())
        async with asyncio.timeout(10):
            assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")  # the body is being read
        writer.close()
        line = await router.access_log.last()
        assert (line["request_id"], line["code"], line["source"]) == ("half", "CANCELLED", "client_cancel")
        labels = {"model_name": "other", "api": "completions", "stream": "false", "outcome": "error"}
        assert router.figure("baton_requests_total", **labels) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: minus\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_bytes_when_they_are_no_http_are_refused_in_the_error_form(router, raw):
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(raw)
    async with asyncio.timeout(10):
        answer = await reader.read()
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-baton-error: ERROR_GENERATE_CONFIG_FORMAT" in head
    assert b"X-Request-Id: " in head
    assert json.loads(content)["error"]["baton_code"] == 604
    writer.close()
    assert (await router.client.get("/v1/models")).status_code == 200
