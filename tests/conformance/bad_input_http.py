"""Bad requests over HTTP: rows of the table in test_bad_input_table.py."""

from __future__ import annotations

from collections.abc import Iterator

from tests.conformance.bad_input import Row, chat, raw_http, request, text
from tests.conformance.live_cluster import CHAT, COMPLETIONS, CONTEXT, MAX_BODY, MODEL, POOL_TOKENS
from tests.unit.engine.tiny_models import VOCAB_SIZE


def in_parts() -> Iterator[bytes]:
    """A body of twice the allowed size that does not say how large it is."""
    for _ in range(2 * MAX_BODY // 65536):
        yield b" " * 65536


HTTP_ROWS: tuple[Row, ...] = (
    # wrong types
    Row("max_tokens is a string", text(max_tokens="16"), 604, ("an integer", "a string"), "max_tokens"),
    Row("max_tokens is a fraction", text(max_tokens=1.5), 604, ("an integer",), "max_tokens"),
    Row("max_tokens is a boolean", text(max_tokens=True), 604, ("a boolean",), "max_tokens"),
    Row("temperature is a string", text(temperature="hot"), 604, ("a number",), "temperature"),
    Row("top_p is an object", text(top_p={}), 604, ("a number", "an object"), "top_p"),
    Row("n is a string", text(n="2"), 604, ("an integer",), "n"),
    Row("stream is a string", text(stream="true"), 604, ("true or false",), "stream"),
    Row("seed is a fraction", text(seed=0.5), 604, ("an integer",), "seed"),
    Row("stop holds a number", text(stop=["a", 1]), 604, ("stop[1]",), "stop"),
    Row("stop_token_ids holds a string", text(stop_token_ids=[1, "2"]), 604, ("stop_token_ids[1]",), "stop_token_ids"),
    Row("logit_bias is a list", text(logit_bias=[1]), 604, ("an object",), "logit_bias"),
    Row("logit_bias has a word as key", text(logit_bias={"x": 1}), 604, ("token ids",), "logit_bias"),
    Row("logprobs of completions is a boolean", text(logprobs=True), 604, ("an integer",), "logprobs"),
    Row("logprobs of chat is a number", chat(logprobs=3), 604, ("true or false",), "logprobs"),
    Row("prompt is a number", text(prompt=7), 604, ("a string",), "prompt"),
    Row("prompt mixes ids and words", text(prompt=[1, "a"]), 604, ("prompt[1]",), "prompt"),
    Row("prompt holds a fraction", text(prompt=[1, 2.5]), 604, ("prompt[1]",), "prompt"),
    Row("prompts hold a word among ids", text(prompt=[[1], ["a"]]), 604, ("prompt[1][0]",), "prompt"),
    Row("messages is a string", chat(messages="hi"), 604, ("a list",), "messages"),
    Row("a message is a string", chat(messages=["hi"]), 604, ("messages[0]",), "messages"),
    Row("a role is a number", chat(messages=[{"role": 5, "content": "x"}]), 604, ("messages[0].role",), "messages"),
    Row("a content is an object", chat(messages=[{"role": "user", "content": {}}]), 604, (), "messages"),
    Row("stream_options is a list", text(stream=True, stream_options=[1]), 604, ("an object",), "stream_options"),
    Row("model is a number", text(model=7), 604, ("a string",), "model"),
    # absent fields
    Row("prompt is absent", text(prompt=...), 604, ("prompt is required",), "prompt"),
    Row("prompt is null", text(prompt=None), 604, ("prompt is required",), "prompt"),
    Row("messages is absent", chat(messages=...), 604, ("messages is required",), "messages"),
    Row("a role is absent", chat(messages=[{"content": "hi"}]), 604, ("messages[0].role",), "messages"),
    # out of range
    Row("prompt is empty", text(prompt=""), 605, ("prompt",), "prompt"),
    Row("prompt has no ids", text(prompt=[]), 605, ("at least one",), "prompt"),
    Row("messages is empty", chat(messages=[]), 605, ("at least one",), "messages"),
    Row("a role is unknown", chat(messages=[{"role": "alien", "content": "x"}]), 605, ("alien",), "messages"),
    Row("max_tokens is 0", text(max_tokens=0), 605, ("max_tokens", "[1,"), "max_tokens"),
    Row("max_tokens is negative", text(max_tokens=-5), 605, ("-5",), "max_tokens"),
    Row("max_tokens has 30 digits", text(max_tokens=10**30), 605, ("max_tokens",), "max_tokens"),
    Row("max_completion_tokens is 0", chat(max_completion_tokens=0), 605, (), "max_completion_tokens"),
    Row("min_tokens exceeds max_tokens", text(min_tokens=9, max_tokens=8), 605, ("9", "8"), "min_tokens"),
    Row("temperature is negative", text(temperature=-0.1), 605, ("-0.1", "[0, 2]"), "temperature"),
    Row("temperature is too high", text(temperature=2.1), 605, ("2.1", "[0, 2]"), "temperature"),
    Row("top_p is 0", text(top_p=0), 605, ("(0, 1]",), "top_p"),
    Row("top_k is -2", text(top_k=-2), 605, ("-2",), "top_k"),
    Row("min_p is too high", text(min_p=1.5), 605, ("[0, 1]",), "min_p"),
    Row("n is 0", text(n=0), 605, ("[1, 128]",), "n"),
    Row("n is 129", chat(n=129), 605, ("129",), "n"),
    Row("best_of is below n", text(best_of=1, n=2), 605, ("[2, 128]",), "best_of"),
    Row("best_of is streamed", text(best_of=3, n=2, stream=True), 605, ("stream",), "best_of"),
    Row("too many sequences", text(prompt=["a"] * 20, n=128), 605, ("20 prompts x 128",), "prompt"),
    Row("logprobs is 21", text(logprobs=21), 605, ("[0, 20]",), "logprobs"),
    Row("top_logprobs is 21", chat(logprobs=True, top_logprobs=21), 605, ("21",), "top_logprobs"),
    Row("top_logprobs stands alone", chat(top_logprobs=2), 605, ("logprobs: true",), "top_logprobs"),
    Row("presence_penalty is too high", text(presence_penalty=2.5), 605, ("[-2, 2]",), "presence_penalty"),
    Row("frequency_penalty is too low", text(frequency_penalty=-3), 605, ("[-2, 2]",), "frequency_penalty"),
    Row("repetition_penalty is 0", text(repetition_penalty=0), 605, ("(0, 100]",), "repetition_penalty"),
    Row("stop is an empty string", text(stop=[""]), 605, ("stop",), "stop"),
    Row("stop has 17 strings", text(stop=["x"] * 17), 605, ("17", "16"), "stop"),
    Row("seed exceeds 64 bits", text(seed=2**64), 605, ("seed",), "seed"),
    Row("a bias is 101", text(logit_bias={"5": 101}), 605, ("[-100, 100]",), "logit_bias"),
    Row("priority exceeds 32 bits", text(priority=2**31), 605, ("priority",), "priority"),
    Row("cache_salt is too long", text(cache_salt="s" * 1025), 605, ("1024",), "cache_salt"),
    Row("stream_options without stream", text(False, stream_options={}), 605, ("stream: true",), "stream_options"),
    Row("response_format is JSON", text(response_format={"type": "json_object"}), 605, (), "response_format"),
    Row("kv_transfer_params is given", text(kv_transfer_params={"host": "x"}), 605, ("null",), "kv_transfer_params"),
    # token ids that the model does not have
    Row("a prompt id is -1", text(prompt=[-1]), 8101, ("-1",), "prompt"),
    Row("a prompt id is the vocabulary's size", text(prompt=[1, VOCAB_SIZE]), 8101, (str(VOCAB_SIZE),), "prompt"),
    Row("a prompt id has 40 digits", text(prompt=[10**40]), 8101, (), "prompt"),
    Row("an id of a later prompt is -7", text(prompt=[[1], [-7]]), 8101, ("-7",), "prompt"),
    Row("a stop id is out of the vocabulary", text(stop_token_ids=[VOCAB_SIZE]), 8101, (), "stop_token_ids"),
    Row("a bias of id -1", text(logit_bias={"-1": 1}), 8101, ("-1",), "logit_bias"),
    # too long for the model, and for the pool
    Row("the text is too long", text(prompt="hello " * 2000), 511, (str(CONTEXT),), "prompt"),
    Row("the ids fill the context", text(prompt=[5] * CONTEXT), 511, (str(CONTEXT),), "prompt"),
    Row("prompt and answer are too long", text(prompt=[5] * 500, max_tokens=13), 511, ("513", "500"), "max_tokens"),
    Row("the chat is too long", chat(messages=[{"role": "user", "content": "word " * 999}]), 511, (), "messages"),
    *(Row(f"the prompt exceeds the whole pool, stream {stream}", text(
        prompt=[5] * (POOL_TOKENS + 2), max_tokens=2, stream=stream), 607, ("KV cache",)) for stream in (False, True)),
    # unknown names
    Row("the model is unknown", text(model="gpt-4"), 40400, ("gpt-4", MODEL), "model"),
    Row("the model's name is empty", chat(model=""), 40400, (MODEL,), "model"),
    Row("the model's name is endless", text(model="m" * 300_000), 40400, ("mmm",), "model"),
    Row("the path is unknown", request("GET", "/v1/nothing"), 40401, ("/v1/nothing",)),
    Row("the path has a slash too many", request("POST", COMPLETIONS + "/", {}), 40401),
    Row("the path leaves the root", request("GET", "/../../etc/passwd"), 40401),
    Row("profiling is switched off", request("POST", "/start_profile"), 40401),
    Row("the method is GET", request("GET", COMPLETIONS), 40500, ("GET", "POST")),
    Row("the method is PUT", request("PUT", CHAT, {}), 40500, ("PUT",)),
    Row("the method is unknown", request("PROPFIND", "/v1/models"), 40500),
    Row("a prefill server has no such path", request("GET", "/v1/models", of="prefill"), 40401),
    Row("a decode server takes no POST", request("POST", "/debug/ledger", {}, of="decode"), 40500),
    # bodies that cannot be read
    Row("the body is empty", request("POST", COMPLETIONS, b""), 604, ("JSON",)),
    Row("the body is cut off", request("POST", CHAT, b'{"model": "ti'), 604, ("JSON",)),
    Row("the body is a list", request("POST", COMPLETIONS, b"[1, 2]"), 604, ("a list",)),
    Row("the body is not UTF-8", request("POST", COMPLETIONS, b'{"prompt": "\xff\xfe"}'), 604, ("JSON",)),
    Row("the body is UTF-16", request("POST", CHAT, '{"prompt": "a"}'.encode("utf-16")), 604, ("JSON",)),
    Row("the text is half a surrogate pair", request("POST", COMPLETIONS, b'{"prompt": "\\ud800"}'), 604, ("JSON",)),
    Row("a number is NaN", request("POST", COMPLETIONS, b'{"prompt": "a", "top_p": NaN}'), 604, ("JSON",)),
    Row("the body is nested too deep", request("POST", CHAT, b'{"a":' * 90_000 + b"1" + b"}" * 90_000), 604, ("JSON",)),
    Row("the body says it is too large", request("POST", COMPLETIONS, b" " * (MAX_BODY + 1)), 41300, (str(MAX_BODY),)),
    Row("the body turns out too large", request("POST", CHAT, in_parts), 41300, (str(MAX_BODY),)),
    Row("the body is a form", request("POST", COMPLETIONS, b"a=b", headers={"Content-Type": "text/plain"}), 41500),
    Row("the body is compressed", request("POST", CHAT, b"x", headers={"Content-Encoding": "gzip"}), 41500, ("gzip",)),
    *(Row(f"{of}: no HTTP at all", raw_http(b"\x16\x03\x01\x02\x00", of), 604) for of in ("router", "prefill")),
    Row("decode: unknown version of HTTP", raw_http(b"GET /live HTTP/9.9\r\nHost: x\r\n\r\n", "decode"), 604),
    Row("a header of 1 MiB", raw_http(b"GET /live HTTP/1.1\r\nX-A: " + b"a" * (1 << 20) + b"\r\n\r\n", "router"), 604,
        ("65536",)),
    Row("20,000 headers", raw_http(b"GET /live HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n", "prefill"), 604,
        ("65536",)),
    Row("a head that does not end", raw_http(b"GET /live HTTP/1.1\r\nX-A: " + b"a" * 400_000, "decode"), 604,
        ("65536",)),
    Row("a path of 1 MiB", raw_http(b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n", "router"), 604),
    # ids and headers
    Row("the header's id has a #", request("POST", COMPLETIONS, {}, headers={"X-Request-Id": "a#b"}), 605),
    Row("the header's id is too long", request("GET", "/v1/models", headers={"X-Request-Id": "x" * 129}), 605),
    Row("the header's id is not ASCII", request("GET", "/load", headers={"X-Request-Id": b"\xfc"}), 605),
    Row("the body's id has a space", text(request_id="a b"), 605, ("request_id",), "request_id"),
    Row("the body's id is a number", text(request_id=7), 604, ("a string",), "request_id"),
    Row("the session's id is too long", request(
        "POST", COMPLETIONS, {"model": MODEL, "prompt": "a"}, headers={"X-Session-Id": "s" * 257}), 605, ("256",)),
    Row("the pin names no server", request(
        "POST", COMPLETIONS, {"model": MODEL, "prompt": "a"}, headers={"x-baton-prefill": "127.0.0.1:1"}), 8406,
        ("x-baton-prefill",), "x-baton-prefill"),
    # the API key
    Row("no key", request("GET", "/v1/models", key=None), 40100, ("API key",)),
    Row("a wrong key", request("POST", COMPLETIONS, {"model": MODEL, "prompt": "a"}, key="sk-other"), 40100),
    Row("an empty key", request("POST", CHAT, {}, headers={"Authorization": "Bearer"}), 40100),
    Row("a key of another scheme", request("GET", "/workers", headers={"Authorization": "Basic eDp5"}), 40100),
    Row("an unknown path without key", request("GET", "/nothing", key=None), 40100),
    Row("the settings without key", request("GET", "/server_info", key=None), 40100),
    # the other endpoints
    Row("tokenize nothing", request("POST", "/tokenize", {"model": MODEL}), 604),
    Row("tokenize for an unknown model", request("POST", "/tokenize", {"model": "x", "prompt": "a"}), 40400),
    Row("detokenize nothing", request("POST", "/detokenize", {}), 604, ("tokens is required",), "tokens"),
    Row("detokenize a negative id", request("POST", "/detokenize", {"tokens": [-1]}), 8101, ("-1",), "tokens"),
    Row("detokenize words", request("POST", "/detokenize", {"tokens": ["a"]}), 604, ("tokens[0]",), "tokens"),
    Row("abort nothing", request("POST", "/abort_request", {}), 604, ("request_id is required",), "request_id"),
    Row("abort an id that is none", request("POST", "/abort_request", {"request_id": "a#0.0"}), 605, (), "request_id"),
    Row("add a server without address", request("POST", "/workers", {"role": "decode"}), 604, (), "address"),
    Row("add a server of no role", request("POST", "/workers", {"role": "cook", "address": "a:1"}), 605, (), "role"),
    Row("add a server at no address", request("POST", "/workers", {"role": "decode", "address": "a"}), 605, ("'a'",)),
    Row("remove an unknown server", request("DELETE", "/workers/decode/127.0.0.1:1"), 40401, ("127.0.0.1:1",)),
    Row("remove a server of no role", request("DELETE", "/workers/cook/127.0.0.1:1"), 605, ("cook",), "role"),
)  # fmt: skip
