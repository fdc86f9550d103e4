"""The command line's own API client: streamed answers, errors with and without a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cli.chat import main as chat
from cli.client import ApiError, StreamedAnswer, get_json, stream_chat
from tests.unit.bench.sse_server import DONE, SseServer, event, in_thread


def piece(text: str | None = None, finish: str | None = None, **more: object) -> bytes:
    delta = {} if text is None else {"content": text}
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}], usage=None, **more)


ERROR = {
    "error": {"message": "no such model", "type": "x", "param": "model", "code": "model_not_found", "baton_code": 40400}
}


@pytest.fixture
def server() -> Iterator[SseServer]:
    with in_thread(SseServer([])) as running:
        yield running


def test_stream_when_it_ends_well_then_text_usage_and_details(server: SseServer) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    server.pieces = [
        *(b": ping\n\n", piece(""), piece("Pa"), piece("ris")),
        piece(finish="stop", baton={"path": "pd", "timeline": {"prefill.compute": 0.5}}),
        *(event(choices=[], usage=usage), DONE),
    ]
    answer = StreamedAnswer()
    assert list(stream_chat(server.url, {"model": "m"}, answer, "key")) == ["Pa", "ris"]
    assert answer.text == "Paris"
    assert answer.finish_reason == "stop"
    assert answer.usage == usage
    assert answer.baton == {"path": "pd", "timeline": {"prefill.compute": 0.5}}
    [request] = server.received
    assert request.headers["authorization"] == "Bearer key"
    assert request.body == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


def test_stream_when_refused_then_the_errors_name_and_number(server: SseServer) -> None:
    server.status, server.pieces = "404 Not Found", [json.dumps(ERROR).encode()]
    with pytest.raises(ApiError) as raised:
        list(stream_chat(server.url, {}, StreamedAnswer()))
    assert (raised.value.status, raised.value.name, raised.value.code) == (404, "model_not_found", 40400)
    assert "no such model" in str(raised.value)


def test_stream_when_the_key_is_missing_then_the_flag_of_the_command_line_is_named() -> None:
    body = json.dumps({"error": {"message": "no", "code": "invalid_api_key", "baton_code": 40100}}).encode()
    with in_thread(SseServer([body], status="401 Unauthorized")) as server, pytest.raises(ApiError) as caught:
        list(stream_chat(server.url, {}, StreamedAnswer()))
    assert caught.value.code == 40100 and "--api-key" in str(caught.value)


def test_get_when_there_is_no_such_page_then_said_that_it_may_be_no_router() -> None:
    with in_thread(SseServer([])) as server, pytest.raises(ApiError, match="no router's answer"):
        get_json(server.url, "/v1/models")


def test_stream_when_it_fails_in_mid_stream_then_what_came_and_the_error(server: SseServer) -> None:
    server.pieces = [piece("Par"), event(**ERROR), DONE]
    answer = StreamedAnswer()
    with pytest.raises(ApiError, match="no such model"):
        list(stream_chat(server.url, {}, answer))
    assert answer.text == "Par"


def test_stream_when_it_breaks_off_then_an_error(server: SseServer) -> None:
    server.pieces = [piece("Par")]
    with pytest.raises(ApiError, match="broke off"):
        list(stream_chat(server.url, {}, StreamedAnswer()))


def test_get_when_the_error_is_not_the_routers_then_its_body_is_shown(server: SseServer) -> None:
    with pytest.raises(ApiError, match="HTTP 404"):
        get_json(server.url, "/v1/models")


def test_chat_when_no_router_answers_then_one_line_names_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with in_thread(SseServer([])) as gone:
        url = gone.url
    assert chat(["--base-url", url, "hello"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"baton chat: no router answers at {url} ") and "--base-url" in line
