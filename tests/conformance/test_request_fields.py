"""Every field of a request does what it says on a running cluster, and the same over HTTP and gRPC."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from protos import common_pb2, generation_pb2
from tests.conformance.live_cluster import CHAT, COMPLETIONS, KEY_METADATA, MODEL, PROMPT, Live, frozen
from tests.integration.cluster import wait_for
from tests.unit.engine.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

TOKENS = 16
SEED = 5
# What every request has unless its row says otherwise: sampled, so that each filter can show, and never ended early.
USUAL: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "seed": SEED, "ignore_eos": True}


@dataclass(frozen=True)
class Told:
    """One choice as either API tells of it."""

    text: str
    finish_reason: str
    logprobs: tuple[float, ...]


def over_http(live: Live, **fields: Any) -> Told:
    body = {"model": MODEL, "prompt": PROMPT, "logprobs": 0, **USUAL, **fields}
    answer = live.http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return Told(choice["text"], choice["finish_reason"], tuple(choice["logprobs"]["token_logprobs"]))


def generate(live: Live, request: generation_pb2.GenerateRequest) -> list[generation_pb2.GenerateResponse]:
    stub = live.router.unary_stream("/baton.v1.Generation/Generate")
    messages = stub(request.SerializeToString(), timeout=30, metadata=KEY_METADATA)
    return [generation_pb2.GenerateResponse.FromString(data) for data in messages]


def over_grpc(live: Live, **fields: Any) -> Told:
    of_request = {name: fields[name] for name in ("stop", "cache_salt", "priority") if name in fields}
    sampling = {name: value for name, value in (USUAL | fields).items() if name not in of_request}
    bias = sampling.pop("logit_bias", {})
    request = generation_pb2.GenerateRequest(
        model=MODEL,
        prompt=PROMPT,
        stream=False,
        sampling=common_pb2.SamplingParams(
            logprobs=0, logit_bias={int(token): value for token, value in bias.items()}, **sampling
        ),
        **of_request,
    )
    (message,) = generate(live, request)
    reason = common_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
    # Not a number of JSON, so compared in the precision of the message.
    return Told(message.text, reason, tuple(token.logprob.logprob for token in message.tokens))


@pytest.fixture(scope="module")
def usual(live: Live) -> Told:
    """The answer without any further field."""
    told = over_http(live)
    assert (len(told.logprobs), told.finish_reason) == (TOKENS, "length")
    return told


ACTING = [
    {"max_tokens": 5},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"seed": SEED + 1},
    {"top_k": 1},
    {"top_p": 0.05},
    {"min_p": 0.9},
    {"repetition_penalty": 50.0},
    {"presence_penalty": 2.0, "temperature": 0.2},
    {"frequency_penalty": 2.0, "temperature": 0.2},
    {"logit_bias": {"100": 100.0}},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 2))},
]


@pytest.mark.parametrize("fields", ACTING, ids=lambda fields: ",".join(f"{k}={str(v)[:12]}" for k, v in fields.items()))
def test_field_when_given_then_it_acts_and_in_the_same_way_on_both_apis(
    live: Live, usual: Told, fields: dict[str, Any]
) -> None:
    http, grpc = over_http(live, **fields), over_grpc(live, **fields)
    assert http != usual
    assert (grpc.text, grpc.finish_reason) == (http.text, http.finish_reason)
    assert grpc.logprobs == pytest.approx(http.logprobs, abs=1e-6)


@pytest.mark.parametrize("fields", [{"cache_salt": "fields"}, {"priority": -3}, {"priority": 7}], ids=str)
def test_field_when_it_is_about_serving_alone_then_the_answer_is_the_usual_one(
    live: Live, usual: Told, fields: dict[str, Any]
) -> None:
    for told in (over_http(live, **fields), over_grpc(live, **fields)):
        assert told.text == usual.text
        assert told.logprobs == pytest.approx(usual.logprobs, abs=1e-6)


def test_penalties_when_neutral_and_filters_when_off_then_the_answer_is_the_usual_one(live: Live, usual: Told) -> None:
    neutral = {
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "min_tokens": 0,
    }  # fmt: skip
    assert over_http(live, **neutral) == usual
    assert over_grpc(live, **neutral).text == usual.text
    assert over_http(live, **dict.fromkeys(neutral)).text == usual.text  # null is absent


def test_end_when_the_end_of_sequence_is_certain_then_min_tokens_delays_it_and_ignore_eos_drops_it(live: Live) -> None:
    ending = {"logit_bias": {str(EOS_TOKEN_ID): 100.0}, "ignore_eos": False}
    for ask in (over_http, over_grpc):
        at_once = ask(live, **ending)
        assert (at_once.text, at_once.finish_reason, len(at_once.logprobs)) == ("", "stop", 1)
        delayed = ask(live, **ending, min_tokens=4)
        assert (delayed.finish_reason, len(delayed.logprobs)) == ("stop", 5)
        ignored = ask(live, **(ending | {"ignore_eos": True}))
        assert (ignored.finish_reason, len(ignored.logprobs)) == ("length", TOKENS)


def test_stop_when_a_string_comes_up_then_the_text_ends_before_it_on_both_apis(live: Live, usual: Told) -> None:
    stop = usual.text[5:8]
    for ask in (over_http, over_grpc):
        told = ask(live, stop=[stop])
        assert (told.text, told.finish_reason) == (usual.text[: usual.text.index(stop)], "stop")


def test_prompt_logprobs_when_asked_for_then_completions_chat_and_grpc_agree(live: Live) -> None:
    body = {"model": MODEL, **USUAL, "prompt_logprobs": 2}
    ids = live.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    completion = live.http.post(COMPLETIONS, json={**body, "prompt": ids}).json()["choices"][0]["prompt_logprobs"]
    messages = [{"role": "user", "content": PROMPT}]
    chat_ids = live.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    chat = live.http.post(CHAT, json={**body, "messages": messages}).json()["prompt_logprobs"]
    for prompt, shown in ((ids, completion), (chat_ids, chat)):
        assert len(shown) == len(prompt)
        assert shown[0] is None
        request = generation_pb2.GenerateRequest(
            model=MODEL,
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(max_tokens=3, prompt_logprobs=2),
        )
        entries = [entry for message in generate(live, request) for entry in message.prompt_logprobs]
        assert [entry.position for entry in entries] == list(range(1, len(prompt)))
        for entry, place in zip(entries, shown[1:], strict=True):
            told = {str(top.token_id): (top.logprob, top.rank) for top in (entry.logprob, *entry.top_logprobs)}
            assert {key: (value["logprob"], value["rank"]) for key, value in place.items()} == {
                key: (pytest.approx(logprob, abs=1e-6), rank) for key, (logprob, rank) in told.items()
            }
            assert str(prompt[entry.position]) in place


@pytest.mark.parametrize("stream", [False, True])
def test_echo_when_asked_for_then_the_prompt_comes_before_the_answer(live: Live, usual: Told, stream: bool) -> None:
    body = {"model": MODEL, "prompt": PROMPT, **USUAL, "echo": True, "stream": stream}
    if not stream:
        assert live.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == PROMPT + usual.text
        return
    lines = live.http.post(COMPLETIONS, json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + usual.text


def test_best_of_when_larger_than_n_then_the_likeliest_choices_are_shown_best_first(live: Live, usual: Told) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "logprobs": 0, **USUAL}
    every = live.http.post(COMPLETIONS, json={**body, "n": 4}).json()
    assert every["choices"][0]["text"] == usual.text
    ranked = sorted(
        every["choices"],
        key=lambda choice: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"]),
        reverse=True,
    )
    best = live.http.post(COMPLETIONS, json={**body, "n": 2, "best_of": 4}).json()
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 4 * TOKENS


def test_n_when_asked_for_over_grpc_then_the_choices_are_those_of_http(live: Live) -> None:
    http = live.http.post(COMPLETIONS, json={"model": MODEL, "prompt": PROMPT, **USUAL, "n": 3}).json()
    sampling = common_pb2.SamplingParams(**USUAL)
    request = generation_pb2.GenerateRequest(model=MODEL, prompt=PROMPT, n=3, sampling=sampling)
    texts = ["", "", ""]
    for message in generate(live, request):
        texts[message.index] += message.text
    assert texts == [choice["text"] for choice in http["choices"]]


def test_cache_salt_when_it_differs_then_the_prompt_is_not_found_in_the_cache(live: Live) -> None:
    prompt = "salted " * 20

    def cached(**fields: Any) -> int:
        answer = live.http.post(COMPLETIONS, json={"model": MODEL, "prompt": prompt, **USUAL, **fields}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    assert cached() == 0


@pytest.mark.parametrize(("second", "expected"), [(0, ["first", "second"]), (-1, ["second", "first"])])
def test_priority_when_a_later_request_has_a_lower_number_then_it_is_served_first(
    live: Live, second: int, expected: list[str]
) -> None:
    """Two prompts of which the pool holds one at a time, and one token each, so that one server does all of it."""
    with ThreadPoolExecutor() as threads:
        answers = []
        with frozen(live.p):
            for name, priority in (("first", 0), ("second", second)):
                request_id = f"priority-{second}-{name}"
                body = {
                    "model": MODEL, "prompt": [7 + len(answers)] * 300, "max_tokens": 1, "priority": priority,
                    "request_id": request_id,
                }  # fmt: skip
                answers.append(threads.submit(live.http.post, COMPLETIONS, json=body))
                wait_for(
                    f"{name} waits for the engine",
                    lambda of=request_id: [
                        entry
                        for entry in live.p.requests()["open"]
                        if entry["request_id"] == of and entry["state"] == "engine"
                    ],
                    10,
                )
        assert [answer.result().status_code for answer in answers] == [200, 200]
    finished = [entry["request_id"] for entry in live.p.requests()["finished"]]
    ended = [name for name in reversed(finished) if name.startswith(f"priority-{second}-")]
    assert [name.rpartition("-")[2] for name in ended] == expected


def test_log_when_every_field_was_used_then_it_has_no_defect(live: Live) -> None:
    live.check_serving()
    assert live.defects() == []
