"""Bad requests to the router's gRPC API and to the servers behind it: rows of the table in test_bad_input_table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import Message

from protos import common_pb2, decode_pb2, generation_pb2, prefill_pb2, worker_pb2
from tests.conformance.bad_input import Row, Send, call
from tests.conformance.live_cluster import CONTEXT, KEY_METADATA, MODEL, POOL_TOKENS, Live
from tests.conformance.refusals import Refusal
from tests.integration.wire_client import generate_input
from tests.unit.engine.tiny_models import VOCAB_SIZE

INF, NAN = float("inf"), float("nan")
ENGINE_ID = "0" * 32  # of the right form, but nobody's
NO_UTF8 = b"\xff\xfe"
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED
HUGE = b"\x80\x80\x80\x08" + b"x" * (1 << 24)  # length and content of a field beyond the largest message


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field on the wire."""
    assert number < 16 and len(content) < 128
    return bytes((number << 3 | 2, len(content))) + content


def put(message: Message, path: str, value: Any) -> None:
    """Sets the field at a dotted path; ... clears it, a list or dictionary replaces its elements."""
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    message.ClearField(name)
    if value is ...:
        return
    if isinstance(value, dict):
        getattr(message, name).update(value)
    elif isinstance(value, list):
        getattr(message, name).extend(value)
    elif isinstance(value, Message):
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


# -- the router's Generation ------------------------------------------------------------------------------------


def generate(**changes: Any) -> Send:
    """`Generate` of token ids, which is good but for `changes` (dots are written as __)."""
    request = generation_pb2.GenerateRequest(model=MODEL, token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    for path, value in changes.items():
        put(request, path.replace("__", "."), value)
    return call("router", "Generation/Generate", request)


def messages(*roles: str) -> generation_pb2.ChatMessages:
    return generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role=r, content="x") for r in roles])


GENERATION_ROWS: tuple[Row, ...] = (
    Row("no input", generate(token_ids=...), 604, ("prompt is required",), "prompt"),
    Row("an empty prompt", generate(prompt=""), 605, ("at least one",), "prompt"),
    Row("no token ids", generate(token_ids=generation_pb2.TokenIds()), 605, ("at least one",), "prompt"),
    Row("no messages", generate(messages=messages()), 605, ("at least one",), "messages"),
    Row("an unknown role", generate(messages=messages("alien")), 605, ("alien",), "messages"),
    Row("an id beyond the vocabulary", generate(token_ids__ids=[VOCAB_SIZE]), 8101, (str(VOCAB_SIZE),), "prompt"),
    Row("the largest id there is", generate(token_ids__ids=[2**32 - 1]), 8101, (str(2**32 - 1),), "prompt"),
    Row("a long text", generate(prompt="hello " * 2000), 511, (str(CONTEXT),), "prompt"),
    Row("a million ids", generate(token_ids__ids=[5] * 1_000_000), 511, (str(CONTEXT), "1000000"), "prompt"),
    Row("a prompt beyond the pool", generate(
        token_ids__ids=[5] * (POOL_TOKENS + 2), sampling__max_tokens=2), 607, ("KV cache",)),
    Row("an unknown model", generate(model="gpt-4"), 40400, ("gpt-4", MODEL), "model"),
    Row("an endless model", generate(model="m" * 1_000_000), 40400, ("mmm",), "model"),
    Row("an id with #", generate(request_id="a#1"), 605, ("request_id",), "request_id"),
    Row("n is 0", generate(n=0), 605, ("[1, 128]",), "n"),
    Row("n is 129", generate(n=129), 605, ("129",), "n"),
    Row("max_tokens is 0", generate(sampling__max_tokens=0), 605, ("[1,",), "max_tokens"),
    Row("max_tokens is 2^32 - 1", generate(sampling__max_tokens=2**32 - 1), 605, (), "max_tokens"),
    Row("min_tokens is too high", generate(sampling__min_tokens=17), 605, ("17", "16"), "min_tokens"),
    Row("temperature is 2.5", generate(sampling__temperature=2.5), 605, ("[0, 2]",), "temperature"),
    Row("temperature is NaN", generate(sampling__temperature=NAN), 605, ("nan",), "temperature"),
    Row("top_p is 0", generate(sampling__top_p=0.0), 605, ("(0, 1]",), "top_p"),
    Row("top_k is 2^32 - 1", generate(sampling__top_k=2**32 - 1), 605, (), "top_k"),
    Row("min_p is infinite", generate(sampling__min_p=INF), 605, ("inf",), "min_p"),
    Row("repetition_penalty is NaN", generate(sampling__repetition_penalty=NAN), 605, (), "repetition_penalty"),
    Row("presence_penalty is -3", generate(sampling__presence_penalty=-3.0), 605, ("-3",), "presence_penalty"),
    Row("a bias is infinite", generate(sampling__logit_bias={5: INF}), 605, ("[-100, 100]",), "logit_bias"),
    Row("a bias of an unknown id", generate(sampling__logit_bias={VOCAB_SIZE: 1.0}), 8101, (), "logit_bias"),
    Row("an unknown stop id", generate(sampling__stop_token_ids=[VOCAB_SIZE]), 8101, (), "stop_token_ids"),
    Row("logprobs is 21", generate(sampling__logprobs=21), 605, ("[0, 20]",), "logprobs"),
    Row("prompt_logprobs is 21", generate(sampling__prompt_logprobs=21), 605, ("[0, 20]",), "prompt_logprobs"),
    Row("an empty stop string", generate(stop=[""]), 605, ("stop",), "stop"),
    Row("17 stop strings", generate(stop=["x"] * 17), 605, ("17", "16"), "stop"),
    Row("a long cache_salt", generate(cache_salt="s" * 1025), 605, ("1024",), "cache_salt"),
    Row("a prompt that is not UTF-8", call("router", "Generation/Generate", field(3, NO_UTF8)), 604, ("UTF-8",)),
    Row("bytes that are no message", call("router", "Generation/Generate", b"\x07garbage"), 604, ("protobuf",)),
    Row("an abort without an id", call("router", "Generation/Abort", b""), 605, (), "request_id"),
    Row("an abort that is not UTF-8", call("router", "Generation/Abort", field(1, NO_UTF8)), 604),
    Row("the metadata's id is none", call(
        "router", "Generation/ListModels", b"", metadata=(*KEY_METADATA, ("x-request-id", "a b"))), 605, (),
        "request_id"),
    Row("no key", call("router", "Generation/Generate", b"", metadata=()), 40100, ("API key",)),
    Row("a wrong key", call("router", "Generation/ListModels", b"", metadata=(("authorization", "Bearer x"),)), 40100),
    Row("a key without scheme", call("router", "Generation/Abort", b"", metadata=(("authorization", "x"),)), 40100),
    Row("an unknown method", call("router", "Generation/Nothing", b""), 0, status=UNIMPLEMENTED),
    Row("a service that is elsewhere", call("router", "Prefill/Prefill", b""), 0, status=UNIMPLEMENTED),
    Row("17 MiB at once", call("router", "Generation/Generate", b"\x1a" + HUGE), 41300, ("16777216",)),
)  # fmt: skip


# -- Prefill and Decode ------------------------------------------------------------------------------------------


def good_input() -> common_pb2.GenerateInput:
    return generate_input("direct", [1, 2, 3], model=MODEL)


def named(request_id: str, changes: Mapping[str, Any], inner: Send) -> Send:
    """The refusal names the request, unless it is the name that is bad."""

    def send(live: Live) -> Refusal:
        refusal = inner(live)
        assert "request_id" in changes or "request_key" in changes or refusal.request_id == request_id
        return refusal

    return send


def prefill(**changes: Any) -> Send:
    """`Prefill`, which is good but for `changes` of its input (dots are written as __)."""

    def message() -> Message:
        request = prefill_pb2.PrefillRequest(input=good_input(), hold_kv=True)
        for path, value in changes.items():
            put(request, path.replace("__", ".") if path == "hold_kv" else f"input.{path.replace('__', '.')}", value)
        return request

    return named("direct", changes, call("prefill", "Prefill/Prefill", message))


def decode(source: common_pb2.KvSource | None = None, **changes: Any) -> Send:
    """`Decode` with a KV source, or without one colocated."""

    def message() -> Message:
        request = decode_pb2.DecodeRequest(input=good_input(), local_prefill=decode_pb2.LocalPrefill())
        if source is not None:
            request.kv_source.CopyFrom(source)
        for path, value in changes.items():
            put(request.input, path.replace("__", "."), value)
        return request

    return named("direct", changes, call("decode", "Decode/Decode", message))


def source_of(**changes: Any) -> common_pb2.KvSource:
    source = common_pb2.KvSource(engine_id=ENGINE_ID, cache_store_addresses=["127.0.0.1:1"], tp_size=1)
    for path, value in changes.items():
        put(source, path, value)
    return source


def input_rows(send: Callable[..., Send], who: str) -> tuple[Row, ...]:
    """What both services refuse in the same way."""
    return tuple(
        Row(f"{who}: {what}", send(**changes), code, says, param)
        for what, changes, code, says, param in (
            ("request_id is absent", {"request_id": ...}, 604, ("input.request_id is required",), "input.request_id"),
            ("request_id has a #", {"request_id": "a#b"}, 605, (), "request_id"),
            ("request_key is absent", {"request_key": ...}, 604, ("is required",), "input.request_key"),
            ("request_key has no nonce", {"request_key": "direct#0"}, 605, ("id#attempt.nonce",), "request_key"),
            ("request_key is another's", {"request_key": "other#0.01234567"}, 605, ("other",), "input.request_key"),
            ("request_key is endless", {"request_key": "k" * 1_000_000}, 605, ("kkk",), "request_key"),
            ("model is absent", {"model": ...}, 604, ("input.model is required",), "input.model"),
            ("model is unknown", {"model": "gpt-4"}, 40400, ("gpt-4", MODEL), "input.model"),
            ("the prompt is empty", {"prompt_token_ids": ...}, 605, ("prompt_token_ids",), "input.prompt_token_ids"),
            ("the prompt has an unknown id", {"prompt_token_ids": [VOCAB_SIZE]}, 8101, (str(VOCAB_SIZE),),
             "input.prompt_token_ids"),
            ("an earlier output has one", {"output_token_ids": [2**32 - 1]}, 8101, (), "input.output_token_ids"),
            ("the prompt is too long", {"prompt_token_ids": [5] * CONTEXT}, 511, (str(CONTEXT),),
             "input.prompt_token_ids"),
            ("the prompt has a million ids", {"prompt_token_ids": [5] * 1_000_000}, 511, ("1000000",),
             "input.prompt_token_ids"),
            ("the prompt exceeds the pool", {"prompt_token_ids": [5] * (POOL_TOKENS + 2)}, 607, ("KV cache",), None),
            ("sampling is absent", {"sampling": ...}, 604, ("input.sampling is required",), "input.sampling"),
            *((f"{name} is absent", {f"sampling__{name}": ...}, 604, ("is required",), f"sampling.{name}")
              for name in ("max_tokens", "seed", "temperature", "top_p", "repetition_penalty")),
            ("max_tokens is 0", {"sampling__max_tokens": 0}, 605, ("at least 1",), "sampling.max_tokens"),
            ("max_tokens are generated", {"output_token_ids": [1] * 8}, 605, ("8",), "sampling.max_tokens"),
            ("min_tokens is too high", {"sampling__min_tokens": 9}, 605, ("9", "8"), "sampling.min_tokens"),
            ("temperature is NaN", {"sampling__temperature": NAN}, 605, ("[0, 2]",), "sampling.temperature"),
            ("top_p is 1.5", {"sampling__top_p": 1.5}, 605, ("(0, 1]",), "sampling.top_p"),
            ("min_p is -1", {"sampling__min_p": -1.0}, 605, ("[0, 1]",), "sampling.min_p"),
            ("repetition_penalty is 0", {"sampling__repetition_penalty": 0.0}, 605, (), "sampling.repetition_penalty"),
            ("frequency_penalty is 3", {"sampling__frequency_penalty": 3.0}, 605, (), "sampling.frequency_penalty"),
            ("a bias is 1000", {"sampling__logit_bias": {5: 1000.0}}, 605, (), "sampling.logit_bias"),
            ("a bias of an unknown id", {"sampling__logit_bias": {VOCAB_SIZE: 1.0}}, 8101, (), "sampling.logit_bias"),
            ("an unknown stop id", {"sampling__stop_token_ids": [VOCAB_SIZE]}, 8101, (), "sampling.stop_token_ids"),
            ("logprobs is 21", {"sampling__logprobs": 21}, 605, ("[0, 20]",), "sampling.logprobs"),
        )
    )  # fmt: skip


def abort_rows(where: str, service: str, kind: type[Message]) -> tuple[Row, ...]:
    def abort(**fields: Any) -> Send:
        return call(where, f"{service}/Abort", kind(**{"request_key": "gone#0.01234567", **fields}))

    return (
        Row(f"{where}: an abort of nothing", abort(request_key=""), 604, ("request_key is required",), "request_key"),
        Row(f"{where}: an abort of no key", abort(request_key="gone"), 605, ("id#attempt.nonce",), "request_key"),
        Row(f"{where}: an abort with code 0", abort(code=0), 605, ("code is 0",), "code"),
        Row(f"{where}: an abort with an unknown code", abort(code=12345), 605, ("12345",), "code"),
        Row(f"{where}: an abort by nobody", abort(source="cook"), 605, ("cook", "client"), "source"),
    )


def worker_rows(where: str) -> tuple[Row, ...]:
    def watch(seconds: float) -> Send:
        return call(where, "Worker/WatchStatus", worker_pb2.WatchStatusRequest(interval_seconds=seconds))

    return (
        *(Row(f"{where}: a status every {seconds:g} s", watch(seconds), 605, ("(0, 60]",))
          for seconds in (0, 61, NAN, -INF)),
        Row(f"{where}: a status that is no message", call(where, "Worker/WatchStatus", b"\x0a\xff"), 604),
        Row(f"{where}: info under a bad id", call(
            where, "Worker/GetInfo", b"", metadata=(("x-request-id", "a/b"),)), 605),
        Row(f"{where}: an unknown method", call(where, "Worker/Explode", b""), 0, status=UNIMPLEMENTED),
        Row(f"{where}: the health of an unknown service", call(
            where, "/grpc.health.v1.Health/Check", field(1, b"baton.v1.Cook")), 0, status=grpc.StatusCode.NOT_FOUND),
    )  # fmt: skip


SERVER_ROWS: tuple[Row, ...] = (
    *input_rows(prefill, "prefill"),
    *input_rows(decode, "decode"),
    Row("prefill: hold_kv is absent", prefill(hold_kv=...), 604, ("hold_kv is required",), "hold_kv"),
    Row("prefill: the input is absent", call("prefill", "Prefill/Prefill", b"\x10\x01"), 604, ("input.",)),
    Row("prefill: text is not UTF-8", call("prefill", "Prefill/Prefill", field(1, field(1, NO_UTF8))), 604, ("UTF-8",)),
    Row("prefill: bytes are no message", call("prefill", "Prefill/Prefill", b"\x0a\xff\xff"), 604, ("protobuf",)),
    Row("prefill: an id of -1", call("prefill", "Prefill/Prefill", lambda: prefill_pb2.PrefillRequest(
        input=good_input(), hold_kv=True).SerializeToString() + field(1, field(3, b"\xff" * 9 + b"\x01"))), 8101,
        (str(2**32 - 1),)),
    Row("prefill: Decode is elsewhere", call("prefill", "Decode/Decode", b""), 0, status=UNIMPLEMENTED),
    Row("prefill: 17 MiB at once", call("prefill", "Prefill/Prefill", b"\x0a" + HUGE), 41300, ("16777216",)),
    Row("decode: neither source nor local", call("decode", "Decode/Decode", lambda: decode_pb2.DecodeRequest(
        input=good_input())), 604, ("kv_source or local_prefill",)),
    Row("decode: text is not UTF-8", call("decode", "Decode/Decode", field(1, field(2, NO_UTF8))), 604, ("UTF-8",)),
    Row("decode: engine_id is absent", decode(source_of(engine_id=...)), 604, (), "kv_source.engine_id"),
    Row("decode: engine_id is no id", decode(source_of(engine_id="P")), 605, ("32",), "kv_source.engine_id"),
    Row("decode: the addresses are absent", decode(source_of(cache_store_addresses=...)), 604, (),
        "kv_source.cache_store_addresses"),
    Row("decode: an address has no port", decode(source_of(cache_store_addresses=["a"])), 605, ("host:port",),
        "kv_source.cache_store_addresses"),
    Row("decode: a port is too high", decode(source_of(cache_store_addresses=["a:99999"])), 605, ("host:port",),
        "kv_source.cache_store_addresses"),
    *(Row(f"decode: the address is {address[:24]!r}", decode(source_of(cache_store_addresses=[address])), 605,
          ("host:port",), "kv_source.cache_store_addresses")
      for address in ("a b:80", "unix:/tmp/socket:80", "dns:///a:80", "127.0.0.1:80#:80", "ü:80", "[::1:80", "a:0",
                      "x" * 5000 + ":80", "a:8٣")),
    Row("decode: the host is unknown", decode(source_of(cache_store_addresses=["h" * 200 + ".invalid:80"])), 8212),
    Row("decode: tp_size is absent", decode(source_of(tp_size=...)), 604, (), "kv_source.tp_size"),
    Row("decode: tp_size is 0", decode(source_of(tp_size=0)), 605, ("the number of addresses",), "kv_source.tp_size"),
    Row("decode: tp_size is 2 of 1", decode(source_of(tp_size=2)), 605, (), "kv_source.tp_size"),
    Row("decode: the source cannot be reached", decode(source_of()), 8212, ("KV",)),
    *abort_rows("prefill", "Prefill", prefill_pb2.PrefillAbortRequest),
    *abort_rows("decode", "Decode", decode_pb2.DecodeAbortRequest),
    *worker_rows("prefill"),
    *worker_rows("decode"),
)  # fmt: skip
