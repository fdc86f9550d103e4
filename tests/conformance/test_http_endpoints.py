"""The endpoints beside the generation, ids, the API key and the figures about requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from router.requests import FinishEvent, RouterRequest, TokensEvent
from rpc.errors import BatonError, ErrorCode
from tests.conformance.http_router import ANSWER, CONTEXT, MODEL, RunningRouter, events_of, running_router
from tests.conformance.test_http_bad_input import check_error
from tests.unit.router.scripted_serving import answering, summary, token

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GOOD = {"model": MODEL, "prompt": "hi"}


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router() as running:
        yield running


def held(router: RunningRouter, taken: asyncio.Event | None = None):
    """A script that gives one token and then waits for ever; `taken` is set once the token was taken."""

    async def script(request: RouterRequest):
        yield TokensEvent([token(request, 0, router.ids("The")[0])], summary(request))
        if taken is not None:
            taken.set()
        await asyncio.Event().wait()
        yield FinishEvent("stop")

    return script


# -- models, tokens


async def test_models_when_listed_are_the_served_names(router):
    content = (await router.client.get("/v1/models")).json()
    assert content["object"] == "list"
    assert [entry["id"] for entry in content["data"]] == [MODEL, "alias"]
    for entry in content["data"]:
        created = entry.pop("created")
        assert isinstance(created, int)
        assert entry == {
            "id": entry["id"],
            "object": "model",
            "owned_by": "baton",
            "root": router.serving.facts.root,
            "max_model_len": CONTEXT,
        }


async def test_alias_when_asked_for_is_the_model_of_the_answer(router):
    response = await router.client.post(TEXT, json={**GOOD, "model": "alias"})
    assert response.json()["model"] == "alias"
    assert (await router.client.post(TEXT, json={"prompt": "hi"})).json()["model"] == MODEL


async def test_text_when_tokenized_and_back_is_the_same(router):
    text = "The capital, 你好 😀<|im_end|>"
    answer = (await router.client.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
    assert answer == {"tokens": router.ids(text), "count": len(router.ids(text)), "max_model_len": CONTEXT}
    back = (await router.client.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})).json()
    assert back == {"prompt": text}


async def test_messages_when_tokenized_are_what_a_chat_generates_from(router):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    answer = (await router.client.post("/tokenize", json={"messages": messages})).json()
    await router.client.post(CHAT, json={"messages": messages})
    assert answer["tokens"] == router.serving.requests[-1].prompt_token_ids
    assert router.tokenizer.decode(answer["tokens"], skip_special_tokens=False).startswith(
        "<|im_start|>system\nBe brief."
    )


@pytest.mark.parametrize(
    ("path", "content", "code", "param"),
    [
        ("/tokenize", {}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "prompt (or messages)"),
        ("/tokenize", {"prompt": 5}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, ErrorCode.INVALID_PARAMS, "messages"),
        ("/tokenize", {"messages": []}, ErrorCode.INVALID_PARAMS, "messages"),
        ("/tokenize", {"prompt": "x", "model": "y"}, ErrorCode.MODEL_NOT_FOUND, "model"),
        (
            "/tokenize",
            {"prompt": "x", "add_special_tokens": 1},
            ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
            "add_special_tokens",
        ),
        ("/detokenize", {}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "tokens"),
        ("/detokenize", {"tokens": "1"}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "tokens"),
        ("/detokenize", {"tokens": [-1]}, ErrorCode.OUT_OF_VOCAB_RANGE, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, ErrorCode.OUT_OF_VOCAB_RANGE, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "y"}, ErrorCode.MODEL_NOT_FOUND, "model"),
        ("/abort_request", {}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "request_id"),
        ("/abort_request", {"request_id": 5}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "request_id"),
        ("/abort_request", {"request_id": "a b"}, ErrorCode.INVALID_PARAMS, "request_id"),
        ("/workers", {}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "role"),
        ("/workers", {"role": "prefill"}, ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "address"),
        ("/workers", {"role": "router", "address": "a:1"}, ErrorCode.INVALID_PARAMS, "role"),
        ("/workers", {"role": "prefill", "address": "a"}, ErrorCode.INVALID_PARAMS, "address"),
    ],
)
async def test_bad_body_when_posted_is_refused_with_its_field(router, path, content, code, param):
    assert check_error(await router.client.post(path, json=content), code)["param"] == param


# -- probes and figures


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_when_asked_is_empty_and_follows_readiness(router, path):
    response = await router.client.get(path)
    assert (response.status_code, response.content) == (200, b"")
    router.serving.not_ready = ["no prefill server is ready"]
    assert (await router.client.get(path)).status_code == 503


@pytest.mark.parametrize("path", ["/ready", "/readiness"])
async def test_readiness_when_asked_says_why_not(router, path):
    assert (await router.client.get(path)).status_code == 200
    router.serving.not_ready = ["no pair fits", "draining"]
    response = await router.client.get(path)
    assert response.status_code == 503
    assert response.json() == {"ready": False, "reasons": ["no pair fits", "draining"]}


@pytest.mark.parametrize("path", ["/live", "/liveness"])
async def test_liveness_when_not_ready_is_200(router, path):
    router.serving.not_ready = ["draining"]
    assert (await router.client.get(path)).status_code == 200


async def test_facts_when_asked_for_are_json(router):
    assert set((await router.client.get("/version")).json()) >= {"version"}
    assert (await router.client.get("/load")).json() == {"inflight": 0, "queued": 0, "workers": []}
    assert (await router.client.get("/server_info")).json() == {"model": MODEL}
    metrics = await router.client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "# TYPE baton_http_requests_total counter" in metrics.text


async def test_figures_when_requests_end_have_route_method_and_status(router):
    await router.client.post(TEXT, json=GOOD)
    await router.client.post(TEXT, json={**GOOD, "n": 0})
    await router.client.get("/nowhere/at/all")
    await router.client.delete("/workers/prefill/h:1")
    await router.client.request("BREW", "/v1/models")
    count = "baton_http_requests_total"
    assert router.figure(count, route=TEXT, method="POST", status="200") == 1
    assert router.figure(count, route=TEXT, method="POST", status="400") == 1
    assert router.figure(count, route="unmatched", method="GET", status="404") == 1
    assert router.figure(count, route="/workers/{role}/{address}", method="DELETE", status="404") == 1
    assert router.figure("baton_http_request_duration_seconds", route=TEXT, method="POST") == 2
    assert router.figure("baton_requests_total", api="completions", outcome="stop", stream="false") == 1
    assert router.figure("baton_requests_total", api="completions", outcome="error", stream="false") == 1


async def test_token_figures_when_an_answer_is_streamed_count_every_token_once(router):
    router.play(answering([*router.ids(ANSWER), router.eos], chunk=3, stop_token_id=router.eos, cached=1))
    await router.client.post(TEXT, json={**GOOD, "stream": True, "max_tokens": 40})
    tokens = len(router.ids(ANSWER)) + 1
    labels = {"model_name": MODEL, "path": "pd"}
    assert router.figure("baton_time_to_first_token_seconds", **labels) == 1
    assert router.figure("baton_inter_token_latency_seconds", **labels) == tokens - 3
    assert router.figure("baton_time_per_output_token_seconds", **labels) == 1
    assert router.figure("baton_e2e_request_latency_seconds", **labels) == 1
    assert router.figure("baton_generation_tokens_total", model_name=MODEL) == tokens
    assert router.figure("baton_cached_prompt_tokens_total", model_name=MODEL) == 1
    assert router.figure("baton_stage_seconds", stage="validate") == 1
    assert router.figure("baton_stage_seconds", stage="tokenize") == 1


async def test_cached_tokens_when_there_are_several_choices_are_counted_once(router):
    router.play(answering(router.ids(ANSWER), reason="length", cached=1))
    response = await router.client.post(TEXT, json={**GOOD, "n": 3})
    assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert router.figure("baton_cached_prompt_tokens_total", model_name=MODEL) == 1
    assert (await router.access_log.last())["cached_tokens"] == 1


@pytest.mark.parametrize("log_content", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_content_when_logging_is_asked_for_is_in_the_access_log_and_otherwise_never(log_content, stream):
    async with running_router(log_content=log_content) as router:
        await router.client.post(TEXT, json={**GOOD, "prompt": ["hi", "you"], "stream": stream})
        record = await router.access_log.last()
        if log_content:
            assert (record["prompt"], record["output"]) == (["hi", "you"], [ANSWER, ANSWER])
        else:
            assert ANSWER not in str(record)
            assert "prompt" not in record


# -- workers, aborts


async def test_workers_when_added_and_removed_are_listed(router):
    added = await router.client.post("/workers", json={"role": "decode", "address": "127.0.0.1:50052"})
    assert added.status_code == 202
    listed = (await router.client.get("/workers")).json()["workers"]
    assert [(one["role"], one["address"]) for one in listed] == [("decode", "127.0.0.1:50052")]
    flushed = (await router.client.post("/flush_cache")).json()
    assert flushed == {"results": [{"role": "decode", "address": "127.0.0.1:50052", "ok": True}]}
    check_error(await router.client.delete("/workers/prefill/127.0.0.1:50052"), ErrorCode.PATH_NOT_FOUND)
    check_error(await router.client.delete("/workers/any/127.0.0.1:50052"), ErrorCode.INVALID_PARAMS)
    assert (await router.client.delete("/workers/decode/127.0.0.1:50052")).status_code == 200
    assert (await router.client.get("/workers")).json() == {"workers": []}


async def test_profiles_when_they_may_not_be_recorded_have_no_paths(router):
    for path in ("/start_profile", "/stop_profile"):
        answer = await router.client.post(path)
        assert (answer.status_code, answer.json()["error"]["baton_code"]) == (404, 40401)
        assert path not in (await router.client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_when_the_request_is_open_ends_it_with_what_it_has(router, stream):
    taken = asyncio.Event()
    router.play(held(router, taken))
    content = {**GOOD, "stream": stream}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(router.client.post(TEXT, json=content, headers={"X-Request-Id": "open-1"}))
        await asyncio.wait_for(taken.wait(), 10)
        response = await router.client.post("/abort_request", json={"request_id": "open-1"})
        assert response.status_code == 200
    answer = task.result()
    assert answer.status_code == 200
    choices = [part["choices"][0] for part in (events_of(answer.text)[:-1] if stream else [answer.json()])]
    assert "".join(choice["text"] for choice in choices) == "The"
    assert choices[-1]["finish_reason"] == "abort"
    assert router.figure("baton_requests_total", api="completions", outcome="abort") == 1


async def test_abort_when_the_id_is_unknown_refuses_the_request_that_comes_late(router):
    assert (await router.client.post("/abort_request", json={"request_id": "late"})).status_code == 200
    response = await router.client.post(TEXT, json=GOOD, headers={"X-Request-Id": "late"})
    check_error(response, ErrorCode.REQUEST_TOMBSTONED)
    assert router.serving.requests == []


async def test_new_requests_when_the_router_drains_are_refused_with_retry_after(router):
    router.open_requests.refuse_new(BatonError(ErrorCode.SERVER_DRAINING, "the router is shutting down"))
    for stream in (True, False):
        response = await router.client.post(TEXT, json={**GOOD, "stream": stream})
        check_error(response, ErrorCode.SERVER_DRAINING)
        assert response.headers["retry-after"] == "1"


# -- ids


@pytest.mark.parametrize("header", ["X-Request-Id", "x-trace-id", "x-correlation-id"])
async def test_id_when_given_in_a_header_is_the_requests_and_echoed(router, header):
    response = await router.client.post(TEXT, json={**GOOD, "request_id": "body-id"}, headers={header: "my.Id:1_-"})
    assert response.headers["x-request-id"] == "my.Id:1_-"
    assert response.json()["id"] == "cmpl-my.Id:1_-"
    assert router.serving.requests[-1].request_id == "my.Id:1_-"
    assert (await router.access_log.last())["request_id"] == "my.Id:1_-"


async def test_id_when_given_in_several_places_is_taken_in_order(router):
    headers = {"x-correlation-id": "third", "x-trace-id": "second", "X-Request-Id": "first"}
    for expected in ("first", "second", "third"):
        response = await router.client.post(TEXT, json={**GOOD, "request_id": "fourth"}, headers=headers)
        assert response.headers["x-request-id"] == expected
        headers = {name: value for name, value in headers.items() if value != expected}
    response = await router.client.post(TEXT, json={**GOOD, "request_id": "fourth"})
    assert response.headers["x-request-id"] == "fourth"
    uuid.UUID((await router.client.post(TEXT, json=GOOD)).headers["x-request-id"])


async def test_id_when_it_cannot_be_used_is_refused_and_not_echoed(router):
    for value in ("a#1", "x" * 129, "", "a b", "é"):
        response = await router.client.post(TEXT, json=GOOD, headers={"X-Request-Id": value.encode("latin-1")})
        error = check_error(response, ErrorCode.INVALID_PARAMS)
        assert error["param"] == "x-request-id"
        uuid.UUID(response.headers["x-request-id"])
    response = await router.client.post(TEXT, json={**GOOD, "request_id": "a#1"})
    uuid.UUID(response.headers["x-request-id"])
    # A probe is not failed for the id that its sender makes up.
    assert (await router.client.get("/health", headers={"X-Request-Id": "a#1"})).status_code == 200


async def test_id_when_any_response_is_sent_is_on_it(router):
    for method, path in (
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/none"),
        ("PUT", TEXT),
    ):
        response = await router.client.request(method, path, headers={"X-Request-Id": "echo-1"})
        assert response.headers.get_list("x-request-id") == ["echo-1"]


async def test_id_when_it_is_open_already_is_refused_and_free_again_afterwards(router):
    router.play(held(router))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(router.client.post(TEXT, json=GOOD, headers={"X-Request-Id": "twice"}))
        await router.serving.until(lambda: router.serving.open == 1)
        for stream in (True, False):
            second = await router.client.post(TEXT, json={**GOOD, "stream": stream}, headers={"X-Request-Id": "twice"})
            check_error(second, ErrorCode.DUPLICATE_REQUEST)
            assert second.headers["x-request-id"] == "twice"
        assert len(router.serving.requests) == 1
        await router.client.post("/abort_request", json={"request_id": "twice"})
    assert task.result().json()["choices"][0]["finish_reason"] == "abort"
    router.play(answering(router.ids("The"), reason="length"))
    assert (await router.client.post(TEXT, json=GOOD, headers={"X-Request-Id": "twice"})).status_code == 200


async def test_headers_when_they_concern_routing_reach_the_orchestrator(router):
    headers = {
        "X-Session-Id": "s-1",
        "x-baton-prefill": "h:1",
        "x-baton-decode": "h:2",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=b",
    }
    await router.client.post(TEXT, json={**GOOD, "priority": -3, "cache_salt": "salt"}, headers=headers)
    request = router.serving.requests[-1]
    assert (request.session_id, request.pin_prefill, request.pin_decode) == ("s-1", "h:1", "h:2")
    assert (request.traceparent, request.tracestate) == (headers["traceparent"], "a=b")
    assert (request.priority, request.cache_salt) == (-3, "salt")
    response = await router.client.post(TEXT, json=GOOD, headers={"X-Session-Id": "s" * 257})
    check_error(response, ErrorCode.INVALID_PARAMS)


# -- API key


async def test_key_when_set_is_needed_but_for_probes_and_figures():
    async with running_router(api_keys=("secret-1", "secret-2")) as router:
        open_paths = ["/health", "/ping", "/live", "/ready", "/version", "/metrics"]
        for path in open_paths:
            assert (await router.client.get(path)).status_code == 200
        closed = [
            ("GET", "/v1/models"),
            ("POST", TEXT),
            ("POST", CHAT),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("POST", "/abort_request"),
            ("POST", "/flush_cache"),
            ("GET", "/workers"),
            ("POST", "/workers"),
            ("DELETE", "/workers/prefill/h:1"),
            ("GET", "/load"),
            ("GET", "/server_info"),
            ("GET", "/unknown"),
        ]
        wrong = [
            {},
            *({"Authorization": value} for value in ("Bearer", "Bearer x", "Basic secret-1", "secret-1")),
        ]
        for method, path in closed:
            for headers in wrong:
                response = await router.client.request(method, path, headers=headers)
                error = check_error(response, ErrorCode.UNAUTHENTICATED)
                assert error["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "secret" not in response.text
        for key in ("secret-1", "secret-2"):
            response = await router.client.get("/v1/models", headers={"Authorization": f"bearer {key}"})
            assert response.status_code == 200


async def test_bug_when_an_endpoint_raises_is_500_in_the_error_form(router, monkeypatch):
    def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(router.serving, "model", broken)
    response = await router.client.get("/v1/models")
    error = check_error(response, ErrorCode.UNKNOWN_ERROR)
    assert "secret detail" not in error["message"]
    assert router.figure("baton_http_requests_total", route="/v1/models", status="500") == 1
    assert router.figure("baton_http_inflight_requests", route="/v1/models") == 0
