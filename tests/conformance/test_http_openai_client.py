"""The `openai` client against the router, and the fields that it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.answer import derive_seed
from rpc.errors import BatonError, ErrorCode
from tests.conformance.http_router import ANSWER, MODEL, RunningRouter, running_router
from tests.unit.router.scripted_serving import answering

openai = pytest.importorskip("openai", reason="the official client asks")

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router(api_keys=("key",)) as running:
        yield running


@pytest.fixture
async def client(router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="key", max_retries=0) as client:
        yield client


async def test_chat_when_asked_by_the_sync_client_answers(router):
    def ask() -> tuple[str, list[str]]:
        with openai.OpenAI(base_url=router.url + "/v1", api_key="key") as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return whole.choices[0].message.content, [chunk.choices[0].delta.content or "" for chunk in stream]

    whole, parts = await asyncio.to_thread(ask)
    assert whole == ANSWER == "".join(parts)


async def test_chat_when_asked_has_every_field_of_a_response(client):
    response = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert response.object == "chat.completion"
    assert response.id.startswith("chatcmpl-")
    assert response.model == MODEL
    assert response.choices[0].finish_reason == "stop"
    assert response.choices[0].message.role == "assistant"
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
    assert response.usage.prompt_tokens_details.cached_tokens == 4
    baton = response.model_extra["baton"]
    assert baton["prefill_cuda_graph_status"] == "not_requested"
    assert (baton["path"], baton["attempts"]) == ("pd", 1)
    assert (baton["speculative_draft_rounds"], baton["speculative_accepted_tokens_per_pos"]) == (0, [])
    assert set(baton["timeline"]) >= {"router.validate", "router.tokenize", "prefill.compute", "decode.load"}
    assert all(isinstance(seconds, float) and seconds >= 0 for seconds in baton["timeline"].values())


async def test_stream_when_usage_is_included_ends_with_it(client):
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(chunks) - 2
    assert chunks[0].choices[0].delta.role == "assistant"


async def test_choices_when_several_are_asked_for_have_indices_and_seeds(client, router):
    response = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=11)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert [choice.message.content for choice in response.choices] == [ANSWER] * 3
    seeds = {request.sampling.seed for request in router.serving.requests}
    assert seeds == {11, derive_seed(11, 1), derive_seed(11, 2)}
    assert {request.single_server for request in router.serving.requests} == {"beam_or_n"}
    assert {request.request_id for request in router.serving.requests} == {response.id.removeprefix("chatcmpl-")}
    assert len({id(request.owner) for request in router.serving.requests}) == 1


async def test_seed_when_one_choice_is_asked_for_is_passed_on(client, router):
    await client.completions.create(model=MODEL, prompt="x", seed=11)
    assert router.serving.requests[-1].sampling.seed == 11
    assert router.serving.requests[-1].single_server is None
    await client.completions.create(model=MODEL, prompt="x")
    await client.completions.create(model=MODEL, prompt="x")
    assert router.serving.requests[-1].sampling.seed != router.serving.requests[-2].sampling.seed


async def test_prompts_when_several_are_given_run_over_prompts_times_choices(client, router):
    response = await client.completions.create(model=MODEL, prompt=["The", "capital"], n=2, echo=True)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in response.choices] == ["The" + ANSWER] * 2 + ["capital" + ANSWER] * 2
    prompts = len(router.ids("The")) + len(router.ids("capital"))
    assert response.usage.prompt_tokens == prompts
    assert response.usage.completion_tokens == 4 * (len(router.ids(ANSWER)) + 1)


async def test_prompts_when_given_as_token_ids_are_taken_as_they_are(client, router):
    await client.completions.create(model=MODEL, prompt=[5, 6, 7])
    assert router.serving.requests[-1].prompt_token_ids == [5, 6, 7]
    await client.completions.create(model=MODEL, prompt=[[5], [6, 7]])
    assert sorted(request.prompt_token_ids for request in router.serving.requests[-2:]) == [[5], [6, 7]]


@pytest.mark.parametrize("stream", [True, False])
async def test_chat_logprobs_when_asked_for_have_an_entry_for_each_token(client, router, stream):
    router.play(answering([*router.ids("The 😀"), router.eos], stop_token_id=router.eos))
    arguments = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = await client.chat.completions.create(**arguments)
    if stream:
        choices = [chunk.choices[0] async for chunk in response]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        entries = response.choices[0].logprobs.content
    assert len(entries) == len(router.ids("The 😀")) + 1
    assert b"".join(bytes(entry.bytes) for entry in entries) == "The 😀<|im_end|>".encode()
    assert entries[0].token == "The"
    assert entries[0].logprob == -0.5
    assert [top.token for top in entries[0].top_logprobs] == ["<|endoftext|>", "<|im_start|>"]


@pytest.mark.parametrize("stream", [True, False])
async def test_completion_logprobs_when_asked_for_are_lists_of_one_length(client, router, stream):
    arguments = {"model": MODEL, "prompt": "The capital", "logprobs": 1, "echo": True, "stream": stream}
    response = await client.completions.create(**arguments)
    parts = [chunk.choices[0] async for chunk in response] if stream else [response.choices[0]]
    text = "".join(part.text for part in parts)
    tokens = [item for part in parts for item in part.logprobs.tokens]
    values = [item for part in parts for item in part.logprobs.token_logprobs]
    tops = [item for part in parts for item in part.logprobs.top_logprobs]
    offsets = [item for part in parts for item in part.logprobs.text_offset]
    prompt = len(router.ids("The capital"))
    assert len(tokens) == len(values) == len(tops) == len(offsets) == prompt + len(router.ids(ANSWER)) + 1
    assert text == "The capital" + ANSWER
    assert (values[0], tops[0]) == (None, None)
    assert values[1:prompt] == [-position / 10 for position in range(1, prompt)]
    for token, offset in zip(tokens[:-1], offsets[:-1], strict=True):
        assert text[offset:].startswith(token)
    assert all(token in top for token, top in zip(tokens[1:], tops[1:], strict=True))


async def test_prompt_logprobs_when_asked_for_have_a_place_for_each_prompt_token(client, router):
    response = await client.completions.create(model=MODEL, prompt="The capital", extra_body={"prompt_logprobs": 1})
    shown = response.choices[0].model_extra["prompt_logprobs"]
    ids = router.ids("The capital")
    assert len(shown) == len(ids)
    assert shown[0] is None
    assert shown[1][str(ids[1])] == {
        "logprob": -0.1,
        "rank": 2,
        "decoded_token": router.tokenizer.token_text(ids[1]),
    }
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"prompt_logprobs": 0})
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


async def test_best_of_when_asked_for_gives_the_n_best(client, router):
    response = await client.completions.create(model=MODEL, prompt="x", best_of=3, n=2)
    assert len(response.choices) == 2
    assert response.choices[0].logprobs is None
    assert len(router.serving.requests) == 3
    assert response.usage.completion_tokens == 3 * (len(router.ids(ANSWER)) + 1)


async def test_parameters_when_given_reach_the_orchestrator(client, router):
    await client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"7": -5},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
        },
    )
    sampling = router.serving.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert (dict(sampling.logit_bias), sampling.min_tokens) == ({7: -5}, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((9,), True, None)


async def test_max_completion_tokens_when_given_wins_in_chat(client, router):
    await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=50, max_completion_tokens=3)
    assert router.serving.requests[-1].sampling.max_tokens == 3


async def test_errors_when_answered_are_the_clients_exceptions(client, router):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert (bad.value.code, bad.value.param) == ("INVALID_PARAMS", "temperature")
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt="hello " * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found"
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    router.play(answering([], error=BatonError(ErrorCode.ROUTER_QUEUE_FULL, "busy")))
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model=MODEL, prompt="x")


async def test_failure_in_mid_stream_when_it_comes_is_the_clients_exception(client, router):
    router.play(answering(router.ids("The capital"), error=BatonError(ErrorCode.ENGINE_DEAD, "gone")))
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    seen: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert "".join(seen) == "The capital"
    assert caught.value.body["baton_code"] == 8609


async def test_models_when_listed_by_the_client_are_there(client):
    assert [model.id async for model in client.models.list()] == [MODEL, "alias"]


async def test_client_when_it_closes_its_stream_ends_the_generation(client, router):
    hold = asyncio.Event()

    async def script(request):
        async for event in answering(router.ids("The"))(request):
            yield event
            await hold.wait()

    router.play(script)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await router.serving.until(lambda: router.serving.open == 0)
    assert router.serving.closed_early == 1
