"""Requests that are bad only in the state that the cluster is in: a second of one key, one whose abort came first, a
reference to another engine, a caller that leaves half-way."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from protos import common_pb2, decode_pb2, generation_pb2, prefill_pb2
from tests.conformance import refusals
from tests.conformance.bad_input import CALL_LIMIT_S, Send, call, chat, text
from tests.conformance.bad_input_cache_store import staged
from tests.conformance.bad_input_grpc import ENGINE_ID, generate
from tests.conformance.live_cluster import CHAT, COMPLETIONS, CONTEXT, KEY_METADATA, MODEL, Live, frozen
from tests.conformance.refusals import Refusal
from tests.integration.cluster import ServerProcess, wait_for
from tests.integration.wire_client import generate_input, key_of

LONG = 200  # tokens of an answer that is to be interrupted
PROMPT = [7, 8, 9]


@pytest.fixture(autouse=True)
def as_before(live: Live) -> Iterator[None]:
    """After each test the cluster serves as before, and no request is left open anywhere."""
    yield
    live.check_serving()
    wait_for("no open request", lambda: live.http.get("/load").json()["inflight"] == 0, 20.0)
    for server in live.cluster.servers:
        wait_for(f"no open request on {server.name}", lambda server=server: not server.requests()["open"], 20.0)


def generation_call(live: Live, **fields: Any) -> Any:
    """An open `Generate` of LONG tokens."""
    request = generation_pb2.GenerateRequest(
        model=MODEL,
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True),
        **fields,
    )
    stub = live.router.unary_stream("/baton.v1.Generation/Generate")
    return stub(request.SerializeToString(), timeout=CALL_LIMIT_S, metadata=KEY_METADATA)


def completion(**fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**body, **fields}


def data_of(line: str) -> Any:
    assert line.startswith("data: ")
    return json.loads(line.removeprefix("data: "))


# -- one id or key twice -----------------------------------------------------------------------------------------


def check_second(refusal: Refusal, request_id: str) -> None:
    assert refusal.code == 8607
    assert refusal.request_id == request_id


def test_id_when_it_is_open_over_http_then_a_second_request_is_409_on_both_apis(live: Live) -> None:
    request_id = "twice-http"
    with frozen(live.d), live.http.stream("POST", COMPLETIONS, json=completion(request_id=request_id)) as answer:
        lines = (line for line in answer.iter_lines() if line)
        first = data_of(next(lines))  # of the prefill server; the rest waits
        assert first["choices"][0]["finish_reason"] is None
        check_second(text(request_id=request_id)(live), request_id)
        check_second(chat(request_id=request_id)(live), request_id)
        headers = {"X-Request-Id": request_id}
        response = live.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a"}, headers=headers)
        check_second(refusals.of_response(response), request_id)
        assert response.status_code == 409
        second = generate(request_id=request_id)(live)
        check_second(second, request_id)
        assert second.status is grpc.StatusCode.ALREADY_EXISTS
        os.kill(live.engine_pids[live.d.name], signal.SIGCONT)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert data_of(rest[-2])["choices"][0]["finish_reason"] == "length"
    # After its end the id may be used again.
    assert live.complete(request_id=request_id)["id"] == f"cmpl-{request_id}"


def test_id_when_it_is_open_over_grpc_then_a_second_request_is_409_on_both_apis(live: Live) -> None:
    request_id = "twice-grpc"
    with frozen(live.d):
        stream = generation_call(live, request_id=request_id)
        next(stream)
        check_second(text(request_id=request_id)(live), request_id)
        by_metadata = call(
            "router", "Generation/Generate", generation_pb2.GenerateRequest(prompt="a"),
            metadata=(*KEY_METADATA, ("x-request-id", request_id)),
        )  # fmt: skip
        check_second(by_metadata(live), request_id)
    messages = [generation_pb2.GenerateResponse.FromString(data) for data in stream]
    assert messages[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert messages[-1].usage.completion_tokens == LONG


def direct(live: Live, role: str, request: common_pb2.GenerateInput) -> tuple[ServerProcess, str, Any]:
    """Server, method and message that compute a whole request on one server."""
    if role == "prefill":
        return live.p, "Prefill/Prefill", prefill_pb2.PrefillRequest(input=request, hold_kv=False)
    return live.d, "Decode/Decode", decode_pb2.DecodeRequest(input=request, local_prefill=decode_pb2.LocalPrefill())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_key_when_it_is_open_or_was_served_then_the_servers_refuse_a_second_request(live: Live, role: str) -> None:
    request_id = f"twice-{role}"
    server, method, message = direct(live, role, generate_input(request_id, PROMPT, model=MODEL))
    again = call(role, method, message)
    channel = live.prefill if role == "prefill" else live.decode
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with frozen(server):
            path = f"/baton.v1.{method}"
            if role == "prefill":
                first = pool.submit(channel.unary_unary(path), message.SerializeToString(), CALL_LIMIT_S)
            else:
                first = pool.submit(lambda: list(channel.unary_stream(path)(message.SerializeToString(), CALL_LIMIT_S)))
            wait_for("an open request", lambda: server.open_state(request_id) == "engine", 20.0)
            open_already = again(live)
            check_second(open_already, request_id)
            assert open_already.status is grpc.StatusCode.ALREADY_EXISTS
        assert first.result(CALL_LIMIT_S)
    server.finished(request_id)
    served_already = again(live)
    check_second(served_already, request_id)
    assert served_already.message != open_already.message


# -- an abort that came first ------------------------------------------------------------------------------------


def test_id_when_its_abort_came_first_then_the_request_is_refused_on_both_apis(live: Live) -> None:
    answer = live.http.post("/abort_request", json={"request_id": "late-http"})
    assert (answer.status_code, answer.json()["found"]) == (200, False)
    refusal = generate(request_id="late-http")(live)
    assert (refusal.code, refusal.status) == (8606, grpc.StatusCode.CANCELLED)

    abort = live.router.unary_unary("/baton.v1.Generation/Abort")
    request = generation_pb2.AbortRequest(request_id="late-grpc").SerializeToString()
    found = generation_pb2.AbortResponse.FromString(abort(request, timeout=CALL_LIMIT_S, metadata=KEY_METADATA))
    assert found.HasField("found") and not found.found
    refusal = text(False, request_id="late-grpc")(live)
    assert (refusal.code, refusal.status) == (8606, 499)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_key_when_its_abort_came_first_then_the_servers_refuse_the_request(live: Live, role: str) -> None:
    key = key_of(f"late-{role}")
    server, method, message = direct(live, role, generate_input(f"late-{role}", PROMPT, model=MODEL, key=key))
    hits = server.metric("baton_tombstone_hits_total") or 0.0
    kind = prefill_pb2.PrefillAbortRequest if role == "prefill" else decode_pb2.DecodeAbortRequest
    channel = live.prefill if role == "prefill" else live.decode
    abort = channel.unary_unary(f"/baton.v1.{method.partition('/')[0]}/Abort")
    abort(kind(request_key=key).SerializeToString(), timeout=CALL_LIMIT_S)
    assert server.metric("baton_tombstones") >= 1
    refusal = call(role, method, message)(live)
    assert (refusal.code, refusal.status, refusal.request_id) == (8606, grpc.StatusCode.CANCELLED, f"late-{role}")
    assert server.metric("baton_tombstone_hits_total") == hits + 1


# -- references to KV that are wrong -----------------------------------------------------------------------------


def load_through_decode(live: Live, key: str, source: common_pb2.KvSource, prompt: list[int]) -> Send:
    """`Decode` of staged KV."""
    request = generate_input(key.partition("#")[0], prompt, model=MODEL, key=key)
    return call("decode", "Decode/Decode", decode_pb2.DecodeRequest(input=request, kv_source=source))


def staged_prompt() -> list[int]:
    from tests.conformance.bad_input_cache_store import PROMPT as STAGED

    return list(STAGED)


@pytest.mark.parametrize(
    ("what", "cause", "stage"),
    [
        ("another engine id", 8605, "load"),
        ("another engine at the address", 8605, "load"),
        ("no cache store at the address", 8308, "load"),
        ("nobody at the address", 8302, "load"),
        ("another prompt", 8602, "publish"),  # the prefill server found it, and its stage is kept
    ],
)
def test_source_when_it_does_not_hold_the_prompt_then_decode_names_the_cause(
    live: Live, what: str, cause: int, stage: str
) -> None:
    prompt = staged_prompt()
    with staged(live) as (key, _), socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        engine_id, address = live.p.engine_id, live.p.cache_store[0]
        if what == "another engine id":
            engine_id = ENGINE_ID
        elif what == "another engine at the address":
            address = live.d.cache_store[0]
        elif what == "no cache store at the address":
            address = live.p.grpc
        elif what == "nobody at the address":
            address = f"127.0.0.1:{nobody.getsockname()[1]}"
        else:
            prompt = prompt[:-1]
        source = common_pb2.KvSource(engine_id=engine_id, cache_store_addresses=[address], tp_size=1)
        refusal = load_through_decode(live, key, source, prompt)(live)
    assert (refusal.code, refusal.status) == (8212, grpc.StatusCode.INTERNAL)
    assert refusal.metadata["cause_code"] == str(cause), refusal
    assert refusal.metadata["cause"] == refusals.documented()[cause].name
    assert refusal.metadata["stage"] == stage
    assert address not in refusal.message
    if what.startswith("another engine"):
        assert refusal.metadata["expected_engine_id"] == engine_id
        assert refusal.metadata["engine_id"] in (live.p.engine_id, live.d.engine_id)


def test_kv_when_it_is_loaded_after_all_that_then_the_right_source_still_works(live: Live) -> None:
    prompt = staged_prompt()
    with staged(live) as (key, _):
        source = common_pb2.KvSource(engine_id=live.p.engine_id, cache_store_addresses=live.p.cache_store, tp_size=1)
        request = generate_input("staged", prompt, model=MODEL, key=key)
        message = decode_pb2.DecodeRequest(input=request, kv_source=source).SerializeToString()
        stream = live.decode.unary_stream("/baton.v1.Decode/Decode")(message, timeout=CALL_LIMIT_S)
        events = [decode_pb2.DecodeEvent.FromString(data) for data in stream]
    assert [event.WhichOneof("event") for event in events][:2] == ["reserved", "loaded"]
    assert events[-1].finished.finish_reason == common_pb2.FINISH_REASON_LENGTH


# -- callers that leave ------------------------------------------------------------------------------------------


def test_deadline_when_it_passes_in_the_middle_then_everything_ends(live: Live) -> None:
    with frozen(live.d):
        request = generation_pb2.GenerateRequest(
            request_id="too-late", token_ids=generation_pb2.TokenIds(ids=PROMPT),
            sampling=common_pb2.SamplingParams(max_tokens=LONG),
        )  # fmt: skip
        refusal = call("router", "Generation/Generate", request, timeout=3.0)(live)  # by then the servers have it
        assert refusal.status is grpc.StatusCode.DEADLINE_EXCEEDED
    record = live.d.finished("too-late")
    assert record["code_name"] in ("GENERATE_TIMEOUT", "CANCELLED")
    assert record["generated_tokens"] < LONG


def test_body_when_its_sender_leaves_half_way_then_nothing_is_answered_and_nothing_breaks(live: Live) -> None:
    host, _, port = live.cluster.router.http.rpartition(":")

    def left() -> float:
        return live.cluster.router.metric("baton_http_requests_total", route=COMPLETIONS, status="499") or 0.0

    before = left()
    with socket.create_connection((host, int(port)), CALL_LIMIT_S) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: {KEY_METADATA[0][1]}\r\n"
            'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"model": '.encode()
        )
    wait_for("the client's departure", lambda: left() == before + 1, 20.0)


def test_good_requests_when_many_bad_ones_come_at_once_then_they_are_served(live: Live) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt": [-1]}, {"prompt": [5] * CONTEXT}, {"max_tokens": "x"}, {"model": "gpt-4"}, {"n": 0}, {"seed": 0.5},
    ]  # fmt: skip

    def one(number: int) -> int:
        if number % 5 == 0:
            assert live.complete()["choices"][0]["text"] == live.expected
            return 200
        body = {"model": MODEL, "prompt": "a", **bad[number % len(bad)]}
        response = live.http.post(COMPLETIONS, json=body)
        refusals.of_response(response)
        return response.status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(one, range(60)))
    assert statuses.count(200) == 12
    assert set(statuses) == {200, 400, 404}


# -- what is ignored ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": b"\xff\xfe", "tracestate": b"\xff"},
        {"traceparent": "0" * 20_000},
        {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": b"a=\xfc"},
        {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=" + "b" * 30_000},
        {"traceparent": f"00-{'0' * 32}-{'2' * 16}-01"},
        {"x-session-id": b"\xfc\xff"},
        {"user-agent": "u" * 50_000, "accept": b"\xff"},
    ],
    ids=["no ASCII", "endless", "state without ASCII", "endless state", "zeros", "session without ASCII", "others"],
)
def test_headers_when_they_are_of_no_use_then_the_request_is_served_all_the_same(
    live: Live, headers: dict[str, Any]
) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    for path, content in (
        (COMPLETIONS, body),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ):
        answer = live.http.post(path, json=content, headers=headers)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["baton"]["path"], answer.json()["baton"]["attempts"]) == ("pd", 1)


def test_metadata_when_it_is_of_no_use_then_the_call_is_served_all_the_same(live: Live) -> None:
    request = generation_pb2.GenerateRequest(
        model=MODEL, token_ids=generation_pb2.TokenIds(ids=PROMPT), sampling=common_pb2.SamplingParams(max_tokens=2)
    )
    stub = live.router.unary_stream("/baton.v1.Generation/Generate")
    for extra in (("traceparent", "x" * 8000), ("traceparent", "00-a-b-c"), ("x-unknown-bin", b"\xff" * 4000)):
        answers = list(stub(request.SerializeToString(), timeout=CALL_LIMIT_S, metadata=(*KEY_METADATA, extra)))
        assert generation_pb2.GenerateResponse.FromString(answers[-1]).baton.attempts == 1


# -- the API key -------------------------------------------------------------------------------------------------


def test_paths_when_no_key_is_sent_then_exactly_those_of_probes_and_scrapers_answer(live: Live) -> None:
    with httpx.Client(base_url=f"http://{live.cluster.router.http}", verify=False, timeout=CALL_LIMIT_S) as stranger:
        for path in ("/health", "/ping", "/live", "/liveness", "/ready", "/readiness", "/version", "/metrics"):
            assert stranger.get(path).status_code == 200, path
            # A probe whose proxy adds an id that is none is no reason to restart the router.
            assert stranger.get(path, headers={"X-Request-Id": "a b"}).status_code == 200, path
        for method, path in (
            ("GET", "/v1/models"), ("GET", "/load"), ("GET", "/server_info"), ("GET", "/workers"),
            ("POST", "/workers"), ("DELETE", "/workers/decode/127.0.0.1:1"), ("POST", "/tokenize"),
            ("POST", "/detokenize"), ("POST", "/abort_request"), ("POST", "/flush_cache"), ("POST", COMPLETIONS),
        ):  # fmt: skip
            response = stranger.request(method, path)
            assert refusals.of_response(response).code == 40100, path
            assert response.headers["www-authenticate"] == "Bearer"
    assert len(live.http.get("/workers").json()["workers"]) == 2


def test_log_when_all_that_was_refused_then_it_has_no_defect(live: Live) -> None:
    assert live.defects() == []
