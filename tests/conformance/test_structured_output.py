"""Answers of a real model that keep to grammars, through real processes, disaggregated.

`BATON_SCHEMA_RUNS=200 pytest tests/conformance/test_structured_output.py -k schemas` makes that many answers over
twenty schemas, every second one streamed; without the variable it is a short run.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pydantic import BaseModel, Field

from protos import generation_pb2, generation_pb2_grpc
from tests.conformance.json_schemas import CASES
from tests.extent import extended, extent
from tests.integration.cluster import Cluster

jsonschema = pytest.importorskip("jsonschema", reason="it validates the answers")
openai = pytest.importorskip("openai", reason="the official client asks")
pytestmark = pytest.mark.timeout(3000)

RUNS = int(os.environ.get("BATON_SCHEMA_RUNS", extent("2", "6")))
TOKENS = 160
LIMIT_S = 200.0
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
            },
        },
    }
]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def cluster(smol: Cluster) -> Iterator[Cluster]:
    yield smol
    assert smol.errors_without_code() == []


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{cluster.router.http}", timeout=LIMIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


def chat(http: httpx.Client, content: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def text(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def streamed(http: httpx.Client, content: str, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of a streamed chat."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0, **fields}
    parts, reason = [], ""
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                parts.append(choice["delta"].get("content") or "")
                reason = choice["finish_reason"] or reason
    return "".join(parts), reason


def test_answers_to_schemas_when_whole_and_streamed_then_all_parse_and_validate(
    cluster: Cluster, http: httpx.Client
) -> None:
    def one(number: int) -> tuple[str, str, int]:
        asked, schema = CASES[number % len(CASES)]
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        fields: dict[str, Any] = {"response_format": form, "seed": number, "temperature": 0.8 if number % 3 else 0}
        if number % 2:
            content, reason = streamed(http, asked, **fields)
            return content, reason, number
        answer = chat(http, asked, **fields)
        assert answer["baton"]["path"] == "pd"
        return text(answer), answer["choices"][0]["finish_reason"], number

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(one, range(RUNS)))
    reasons = Counter(reason for _, reason, _ in answers)
    print(f"{len(answers)} answers over {min(RUNS, len(CASES))} schemas: {dict(reasons)}")
    assert reasons == {"stop": RUNS}, [answer for answer in answers if answer[1] != "stop"]
    for content, _, number in answers:
        schema = CASES[number % len(CASES)][1]
        checker = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(content))
    cluster.assert_clean_ledgers()


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[A-Z][a-z]{2,8}, [0-9]{4}"}, r"[A-Z][a-z]{2,8}, [0-9]{4}"),
    ({"choice": ["Paris", "Größe 🙂", "two\nlines"]}, r"Paris|Größe 🙂|two\nlines"),
    ({"ebnf": 'root ::= "x" y\ny ::= [a-c]{2,5} "."'}, r"x[a-c]{2,5}\."),
    ({"guided_regex": "(yes|no)!"}, r"(yes|no)!"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, r"a|b"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "<é>"}}}, r"<é>"),
]


# Three ways to ask for one thing: each is read in tests of the router's own.
AGAIN = ("choice", "guided_regex", "structured_outputs")


def case_of(fields: dict[str, Any], pattern: str) -> Any:
    name = next(iter(fields))
    return extended(fields, pattern, id=name) if name in AGAIN else pytest.param(fields, pattern, id=name)


@pytest.mark.parametrize(("fields", "pattern"), [case_of(*kind) for kind in KINDS])
def test_answer_when_a_grammar_of_any_kind_is_asked_for_then_keeps_to_it_whole_and_streamed(
    http: httpx.Client, fields: dict[str, Any], pattern: str
) -> None:
    answer = chat(http, "Where and when?", **fields)
    assert re.fullmatch(pattern, text(answer)), text(answer)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert streamed(http, "Where and when?", **fields) == (text(answer), "stop")
    completion = http.post("/v1/completions", json={"prompt": "Where and when?", "max_tokens": TOKENS, **fields}).json()
    assert re.fullmatch(pattern, completion["choices"][0]["text"])


def test_answers_when_several_are_drawn_with_seed_logprobs_and_stop_then_each_keeps_to_the_grammar(
    http: httpx.Client,
) -> None:
    fields = {
        "regex": "[a-z]{3,12}( [a-z]{3,12})?\\.",
        "temperature": 1,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    first = chat(http, "Say something.", n=3, **fields)
    for choice, shown in enumerate(first["choices"]):
        assert re.fullmatch(fields["regex"], text(first, choice))  # type: ignore[arg-type]
        assert all(len(item["top_logprobs"]) == 2 for item in shown["logprobs"]["content"])
    assert first["baton"]["path"] == "colocated"
    again = chat(http, "Say something.", **fields)
    assert text(again) == text(first) and again["baton"]["path"] == "pd"
    assert len({text(first, choice) for choice in range(3)}) > 1
    cut = chat(http, "Say something.", stop=[text(first)[2]], **fields)
    assert text(first).startswith(text(cut)) and len(text(cut)) <= 2
    short = chat(http, "Say something.", max_tokens=2, **fields)
    assert short["choices"][0]["finish_reason"] == "length" and text(first).startswith(text(short))


def test_answer_over_grpc_when_it_has_a_grammar_then_is_that_of_http(cluster: Cluster, http: httpx.Client) -> None:
    messages = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="user", content="Yes or no?")])
    choice = generation_pb2.Choices(texts=["certainly", "never"])
    with grpc.insecure_channel(cluster.router.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        def ask(**grammar: Any) -> str:
            asked = generation_pb2.GenerateRequest(
                messages=messages, structured_output=generation_pb2.StructuredOutput(**grammar)
            )
            asked.sampling.temperature = 0
            return "".join(message.text for message in stub.Generate(asked, timeout=LIMIT_S))

        assert ask(choice=choice) == text(chat(http, "Yes or no?", choice=list(choice.texts)))
        for wrong in ({}, {"json_object": False}, {"regex": "(a"}, {"choice": generation_pb2.Choices()}):
            with pytest.raises(grpc.RpcError) as caught:
                ask(**wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_bad_grammar_when_it_is_asked_for_then_400_with_the_position_and_no_server_hears_of_it(
    cluster: Cluster, http: httpx.Client
) -> None:
    def heard() -> set[str]:
        """The requests that servers know of, which have a record from their beginning."""
        pages = [server.requests() for server in cluster.servers]
        return {entry["request_id"] for page in pages for entry in (*page["open"], *page["finished"])}

    assert http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "good"}
    ).is_success
    before = heard()
    assert "good" in before
    for fields, part, param in (
        ({"ebnf": 'root ::= "a" b'}, "line 1, column 14", "ebnf"),
        ({"guided_regex": "(a"}, "position 3", "guided_regex"),
        ({"json_schema": "{"}, "line 1, column 2", "json_schema"),
        ({"structured_outputs": {"json": {"not": {}}}}, "at /not", "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "exactly one", "choice"),
    ):  # fmt: skip
        for stream in (False, True):
            body = {"prompt": "x", "stream": stream, **fields}
            response = http.post("/v1/completions", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["baton_code"], error["param"]) == (400, 604, param), error
            assert part in error["message"]
    assert heard() == before


@pytest.mark.extended
def test_tools_when_the_official_client_asks_then_calls_come_whole_and_streamed(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "smol", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 80}
    common |= {"tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**common).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None and whole.message.tool_calls
    [call] = whole.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather" and call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])

    name, arguments, ids, reasons, content = "", "", set(), set(), ""
    for chunk in client.chat.completions.create(**common, stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        reasons |= {reason} if reason else set()
        for piece in delta.tool_calls or []:
            assert piece.index == 0 and piece.function is not None
            ids |= {piece.id} if piece.id else set()
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments, content) == ("get_weather", call.function.arguments, "")
    assert len(ids) == 1 and reasons == {"tool_calls"}

    named = {**common, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    with client.chat.completions.stream(**named) as events:
        final = events.get_final_completion().choices[0]
    assert final.message.tool_calls and final.message.tool_calls[0].function.arguments == arguments

    answered = [*ASKED, whole.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "18 C, sunny"}]
    reply = client.chat.completions.create(model="smol", messages=answered, tools=TOOLS, temperature=0, max_tokens=24)
    assert reply.choices[0].message.content
    free = client.chat.completions.create(model="smol", messages=ASKED, tools=TOOLS, tool_choice="none", max_tokens=4)
    assert free.choices[0].message.tool_calls is None

    with pytest.raises(openai.BadRequestError, match="tool_choice needs tools"):
        client.chat.completions.create(model="smol", messages=ASKED, tool_choice="required")


def test_response_format_when_the_official_client_parses_then_gets_its_model(client: openai.OpenAI) -> None:
    class Person(BaseModel):
        name: str = Field(max_length=16)
        age: int = Field(ge=0, le=150)
        pets: list[str] = Field(max_length=0)

    parsed = client.chat.completions.parse(
        model="smol",
        messages=[{"role": "user", "content": "Describe Ada, who is 36."}],
        response_format=Person,
        temperature=0,
        max_tokens=TOKENS,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


@pytest.mark.invariant("RPC-23")
def test_processes_when_grammars_are_on_then_say_so_and_router_and_fronts_have_no_torch(cluster: Cluster) -> None:
    processes = [cluster.router, *cluster.servers]
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps and "xgrammar" not in maps
    assert cluster.router.metric("baton_grammar_validator_available") == 1
    assert (cluster.router.metric("baton_grammar_compile_seconds_count") or 0) > 5
    for server in cluster.servers:
        shown = server.metric("baton_grammar_validator_available")
        assert shown == (1 if server.role == "decode" else None)


@pytest.mark.extended
def test_answer_when_its_decode_server_is_killed_in_the_middle_then_goes_on_within_the_grammar(
    cluster: Cluster, http: httpx.Client
) -> None:
    """Last of all that the cluster is for: one decode server is left."""
    fields = {"regex": "([a-z]{2,9} ){12}end", "temperature": 0.9, "seed": 8, "max_tokens": 90}
    undisturbed = text(chat(http, "Tell me a story.", **fields))
    assert re.fullmatch(str(fields["regex"]), undisturbed)
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], **fields, "stream": True}
    victim, parts, attempts = None, [], 0
    headers = {"x-request-id": "moves"}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            attempts = chunk.get("baton", {}).get("attempts", attempts)
            parts.append(chunk["choices"][0]["delta"].get("content") or "")
            if victim is None and len(parts) == 8:
                victim = next(server for server in cluster.decode if server.open_state("moves") is not None)
                victim.kill()
    assert "".join(parts) == undisturbed and attempts > 1
