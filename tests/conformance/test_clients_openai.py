"""The `openai` client against a running cluster, synchronous and asynchronous, streaming and not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from protos import common_pb2, generation_pb2
from tests.conformance import refusals
from tests.conformance.live_cluster import API_KEY, CONTEXT, KEY_METADATA, MAX_BODY, MODEL, PROMPT, Live, frozen
from tests.integration.cluster import wait_for
from tests.unit.engine.tiny_models import VOCAB_SIZE

openai = pytest.importorskip("openai", reason="the official client asks")

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
TOKENS = 24
LONG = 300  # tokens of an answer that its client gives up


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{live.cluster.router.http}/v1", api_key=API_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def aclient(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{live.cluster.router.http}/v1", api_key=API_KEY, max_retries=0
    ) as client:
        yield client


def decoded(live: Live, ids: list[int]) -> str:
    answer = live.http.post("/detokenize", json={"tokens": ids})
    return str(answer.raise_for_status().json()["prompt"])


def ids_of(live: Live, prompt: list[int], count: int) -> list[int]:
    """The greedy tokens of an answer, by the gRPC API."""
    request = generation_pb2.GenerateRequest(
        model=MODEL, token_ids=generation_pb2.TokenIds(ids=prompt), stream=False,
        sampling=common_pb2.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True),
    )  # fmt: skip
    stub = live.router.unary_stream("/baton.v1.Generation/Generate")
    (data,) = stub(request.SerializeToString(), timeout=20, metadata=KEY_METADATA)
    return [token.token_id for token in generation_pb2.GenerateResponse.FromString(data).tokens]


def certain(text: str) -> str:
    """Without an incomplete character at the end, which an answer drops."""
    return text.rstrip("\ufffd")


# -- answers -----------------------------------------------------------------------------------------------------


async def test_chat_when_asked_in_four_ways_then_the_answers_are_one(
    client: openai.OpenAI, aclient: openai.AsyncOpenAI
) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, **GREEDY}
    whole = client.chat.completions.create(**options)
    parts = list(client.chat.completions.create(stream=True, **options))
    awhole = await aclient.chat.completions.create(**options)
    aparts = [chunk async for chunk in await aclient.chat.completions.create(stream=True, **options)]
    text = whole.choices[0].message.content
    assert text
    assert awhole.choices[0].message.content == text
    for chunks in (parts, aparts):
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)


def test_chat_when_answered_then_every_field_is_there(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=TOKENS, **GREEDY)
    assert (response.object, response.model) == ("chat.completion", MODEL)
    assert response.id.startswith("chatcmpl-")
    (choice,) = response.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    usage = response.usage
    assert usage.completion_tokens == TOKENS
    assert usage.total_tokens == usage.prompt_tokens + TOKENS
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    baton = response.model_extra["baton"]
    assert (baton["path"], baton["attempts"], baton["prefill_cuda_graph_status"]) == ("pd", 1, "not_requested")
    assert {"router.choose", "router.first_token", "prefill.compute", "decode.load", "decode.generate"} <= set(
        baton["timeline"]
    )


def test_answer_when_a_prompt_is_asked_again_then_its_cached_tokens_are_counted(client: openai.OpenAI) -> None:
    prompt = "Grüße aus Köln. " * 8
    first, second = (client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, **GREEDY) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (second.usage.prompt_tokens - 1) // 16 * 16 > 0


def test_usage_when_it_is_included_then_it_comes_last_and_running_usage_counts_up(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "stream": True, **GREEDY}
    chunks = list(client.chat.completions.create(stream_options={"include_usage": True}, **options))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], TOKENS)
    assert chunks[-1].model_extra["baton"]["path"] == "pd"
    running: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens for chunk in client.chat.completions.create(stream_options=running, **options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == TOKENS


def test_token_ids_when_given_as_a_prompt_then_they_mean_the_text(live: Live, client: openai.OpenAI) -> None:
    ids = live.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    options: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, **GREEDY}
    by_text = client.completions.create(prompt=PROMPT, **options)
    by_ids = client.completions.create(prompt=ids, **options)
    several = client.completions.create(prompt=[ids, ids[:3]], **options)
    assert by_text.choices[0].text == by_ids.choices[0].text == several.choices[0].text
    assert certain(by_ids.choices[0].text) == certain(decoded(live, ids_of(live, ids, TOKENS)))
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.usage.prompt_tokens == len(ids) + 3
    assert several.usage.completion_tokens == 2 * TOKENS
    echoed = client.completions.create(prompt=PROMPT, echo=True, **options)
    assert echoed.choices[0].text == PROMPT + by_text.choices[0].text


def test_max_tokens_when_given_then_it_bounds_the_answer(live: Live, client: openai.OpenAI) -> None:
    for count, path in ((1, "colocated"), (2, "pd"), (17, "pd")):
        response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=count, **GREEDY)
        assert response.usage.completion_tokens == count
        assert response.choices[0].finish_reason == "length"
        assert response.model_extra["baton"]["path"] == path
    assert client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY).usage.completion_tokens == 16
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=50, max_completion_tokens=3, **GREEDY
    )
    assert chat.usage.completion_tokens == 3
    # A chat without a limit has the rest of the context, as far as the end of sequence lets it.
    rest = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"stop_token_ids": [5]}
    )
    assert rest.usage.total_tokens <= CONTEXT


# -- sampling ----------------------------------------------------------------------------------------------------


def test_seed_when_given_then_it_decides_the_answer_alone_and_in_a_crowd(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0}
    one, again, other = (client.completions.create(seed=seed, **options).choices[0].text for seed in (7, 7, 8))
    assert one == again != other

    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=API_KEY, max_retries=0) as aclient:
            answers = await asyncio.gather(*(aclient.completions.create(seed=7 + i % 2, **options) for i in range(8)))
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(crowd()) == [one, other] * 4


def test_choices_when_several_are_asked_for_then_the_first_is_that_of_the_seed_and_all_repeat(
    client: openai.OpenAI,
) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 1.0, "seed": 11,
    }  # fmt: skip
    alone = client.chat.completions.create(**options)
    several = client.chat.completions.create(n=3, **options)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone.choices[0].message.content
    assert len(set(texts)) == 3
    assert several.model_extra["baton"]["path"] == "colocated"
    streamed = ["", "", ""]
    ends: list[int] = []
    for chunk in client.chat.completions.create(n=3, stream=True, **options):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.append(choice.index)
    assert streamed == texts
    assert sorted(ends) == [0, 1, 2]


def test_stop_strings_when_one_comes_up_then_the_answer_ends_before_it(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, **GREEDY}
    text = client.completions.create(**options).choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    assert len(stop) == 3
    expected = text[: text.index(stop)]
    for given in (stop, ["never to come up", stop]):
        response = client.completions.create(stop=given, **options)
        assert (response.choices[0].text, response.choices[0].finish_reason) == (expected, "stop")
        assert response.choices[0].model_extra["stop_reason"] == stop
        assert response.usage.completion_tokens <= TOKENS
        chunks = list(client.completions.create(stop=given, stream=True, **options))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_tokens_when_one_is_drawn_then_it_ends_the_answer(live: Live, client: openai.OpenAI) -> None:
    ids = live.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    answer = ids_of(live, ids, TOKENS)
    stop = answer[5]
    end = answer.index(stop) + 1
    response = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=TOKENS, temperature=0, logprobs=0,
        extra_body={"ignore_eos": True, "stop_token_ids": [stop]},
    )  # fmt: skip
    (choice,) = response.choices
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
    assert response.usage.completion_tokens == len(choice.logprobs.tokens) == end
    ignored = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=TOKENS, temperature=0,
        extra_body={"ignore_eos": True, "stop_token_ids": [stop], "min_tokens": TOKENS},
    )  # fmt: skip
    assert ignored.usage.completion_tokens == TOKENS


def test_bias_when_given_then_it_forces_and_forbids_tokens(live: Live, client: openai.OpenAI) -> None:
    (wanted,) = live.http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    forced = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, logit_bias={str(wanted): 100}, **GREEDY
    )
    assert forced.choices[0].text == "aaaaa"
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "logprobs": 0, **GREEDY}
    forbidden = {str(token): -100 for token in range(VOCAB_SIZE) if token != wanted}
    assert client.completions.create(logit_bias=forbidden, **options).choices[0].text == "a" * 8


# -- log-probabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_when_asked_for_then_each_token_has_its_own_and_the_best(
    client: openai.OpenAI, stream: bool
) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS, "logprobs": True, "top_logprobs": 4, **GREEDY,
    }  # fmt: skip
    if stream:
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **options)]
        text = "".join(choice.delta.content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        (choice,) = client.chat.completions.create(**options).choices
        text, entries = choice.message.content, choice.logprobs.content
    assert len(entries) == TOKENS
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert certain(joined.decode("utf-8", "replace")) == certain(text)
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 4
        assert tops == sorted(tops, reverse=True)
        assert all(value < 0 for value in tops)
        # Greedy: the token is the best one.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, tops[0])


def test_completion_logprobs_when_echoed_then_the_prompt_has_them_too(live: Live, client: openai.OpenAI) -> None:
    ids = live.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    response = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, logprobs=2, echo=True, temperature=0,
        extra_body={"ignore_eos": True, "prompt_logprobs": 2},
    )  # fmt: skip
    (choice,) = response.choices
    shown = choice.logprobs
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.top_logprobs) == len(ids) + 6
    assert shown.token_logprobs[0] is None
    assert all(value < 0 for value in shown.token_logprobs[1:])
    assert "".join(shown.tokens[: len(ids)]) == PROMPT
    prompt = choice.model_extra["prompt_logprobs"]
    assert prompt[0] is None
    for place, value, token_id in zip(prompt[1:], shown.token_logprobs[1:], ids[1:], strict=False):
        assert place[str(token_id)]["logprob"] == pytest.approx(value, abs=1e-6)


def test_logprobs_when_a_generated_token_is_part_of_the_next_prompt_then_they_agree(
    live: Live, client: openai.OpenAI
) -> None:
    """What the decode server says of a token that it draws, the prefill server says of it in a prompt."""
    ids = live.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    options: dict[str, Any] = {"model": MODEL, "temperature": 0}
    drawn = client.completions.create(prompt=ids, max_tokens=10, logprobs=0, extra_body={"ignore_eos": True}, **options)
    answer = ids_of(live, ids, 10)
    again = client.completions.create(
        prompt=[*ids, *answer], max_tokens=1, extra_body={"prompt_logprobs": 0}, **options
    )
    places = again.choices[0].model_extra["prompt_logprobs"][len(ids) :]
    found = [place[str(token)]["logprob"] for place, token in zip(places, answer, strict=True)]
    assert found == pytest.approx(drawn.choices[0].logprobs.token_logprobs, abs=1e-4)


# -- errors ------------------------------------------------------------------------------------------------------


def failure(client: openai.OpenAI, kind: type[openai.APIStatusError], code: int, **fields: Any) -> Any:
    """The exception of a request, the same without and with streaming."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, **fields}
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.completions.create(stream=stream, **body)
        error = caught.value
        assert type(error) is kind
        assert error.body["baton_code"] == code
        assert error.status_code == refusals.documented()[code].http
        assert error.request_id == error.response.headers["x-request-id"]
    return error


def test_errors_when_the_request_is_bad_then_they_are_the_clients_exceptions(client: openai.OpenAI) -> None:
    bad = failure(client, openai.BadRequestError, 605, temperature=9)
    assert (bad.code, bad.param, bad.type) == ("INVALID_PARAMS", "temperature", "invalid_request_error")
    assert failure(client, openai.BadRequestError, 511, prompt="hello " * 2000).code == "context_length_exceeded"
    assert failure(client, openai.BadRequestError, 604, extra_body={"min_p": "x"}).param == "min_p"
    assert failure(client, openai.BadRequestError, 8101, prompt=[VOCAB_SIZE]).param == "prompt"
    assert failure(client, openai.NotFoundError, 40400, model="gpt-4").code == "model_not_found"
    assert failure(client, openai.APIStatusError, 41300, prompt="x" * MAX_BODY).status_code == 413
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model=MODEL, input="a")
    assert unknown.value.body["baton_code"] == 40401
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_when_the_key_is_wrong_then_it_is_an_authentication_error(client: openai.OpenAI) -> None:
    stranger = client.with_options(api_key="sk-wrong")
    for ask in (
        lambda: stranger.models.list(),
        lambda: stranger.chat.completions.create(model=MODEL, messages=MESSAGES),
        lambda: stranger.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True),
    ):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask()
        assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")


def test_errors_when_an_id_is_in_use_or_aborted_then_they_are_conflict_and_499(
    live: Live, client: openai.OpenAI
) -> None:
    headers = {"X-Request-Id": "client-twice"}
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "extra_headers": headers}
    with (
        frozen(live.d),  # only the first token, of the prefill server, comes
        client.completions.create(stream=True, max_tokens=LONG, **GREEDY, **options) as stream,
    ):
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as conflict:
            client.completions.create(**options)
        assert (conflict.value.code, conflict.value.param) == ("DUPLICATE_REQUEST", "request_id")
    wait_for("the end of the first", lambda: live.http.get("/load").json()["inflight"] == 0, 20.0)
    assert live.http.post("/abort_request", json={"request_id": "client-late"}).json()["found"] is False
    with pytest.raises(openai.APIStatusError) as aborted:
        client.completions.create(model=MODEL, prompt=PROMPT, extra_headers={"X-Request-Id": "client-late"})
    assert (aborted.value.status_code, aborted.value.code) == (499, "REQUEST_TOMBSTONED")
    live.check_serving()


# -- clients that leave ------------------------------------------------------------------------------------------


class Departures:
    """What the processes count and note when a client leaves."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._before = self._counts()

    def _counts(self) -> tuple[float, float]:
        router = self._live.cluster.router
        aborts = router.metric("baton_aborts_total", leg="router", source="client") or 0.0
        cancelled = sum(
            router.metric("baton_http_requests_total", route=route, status="499") or 0.0
            for route in ("/v1/completions", "/v1/chat/completions")
        )
        return aborts, cancelled

    def counted(self) -> None:
        """Returns when the router has noticed that one client left."""
        aborts, cancelled = self._before
        wait_for("the count of the departure", lambda: self._counts() == (aborts + 1, cancelled + 1), 20.0)

    def check(self, request_id: str, at_least: int) -> None:
        """One client left: it was counted, its request ended early on the decode server, and nothing is held."""
        self.counted()
        record = self._live.d.finished(request_id)
        assert (record["code_name"], record["source"]) == ("CANCELLED", "client_cancel"), record
        assert at_least <= record["generated_tokens"] < LONG
        self._live.check_serving()
        assert self._live.http.get("/load").json()["inflight"] == 0


def test_stream_when_closed_in_the_middle_then_every_leg_ends(live: Live, client: openai.OpenAI) -> None:
    departures = Departures(live)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        max_tokens=LONG,
        extra_headers={"X-Request-Id": "left-sync"},
        **GREEDY,
    )
    chunks = iter(stream)
    for _ in range(3):
        next(chunks)
    with frozen(live.d):  # else it may have the whole answer before the router has noticed
        stream.close()
        departures.counted()
    departures.check("left-sync", 2)


async def test_stream_when_its_task_is_cancelled_then_every_leg_ends(live: Live, aclient: openai.AsyncOpenAI) -> None:
    departures = Departures(live)
    begun = asyncio.Event()
    chunks: list[Any] = []

    async def read() -> None:
        stream = await aclient.completions.create(
            model=MODEL,
            prompt=PROMPT,
            stream=True,
            max_tokens=LONG,
            extra_headers={"X-Request-Id": "left-async"},
            **GREEDY,
        )
        async with stream:
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 3:
                    begun.set()

    task = asyncio.create_task(read())
    async with asyncio.timeout(20):
        await begun.wait()
    with frozen(live.d):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(departures.counted)
    await asyncio.to_thread(departures.check, "left-async", 2)


def test_answer_when_its_client_runs_out_of_patience_then_every_leg_ends(live: Live, client: openai.OpenAI) -> None:
    departures = Departures(live)
    with frozen(live.d):
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=LONG, extra_headers={"X-Request-Id": "left-early"},
                timeout=httpx.Timeout(20, read=3.0), **GREEDY,  # by then the servers have it
            )  # fmt: skip
        departures.counted()  # else the decode server may have the whole answer before the router has noticed
    departures.check("left-early", 0)


def test_stream_when_aborted_by_its_id_then_the_client_gets_what_there_is(live: Live, client: openai.OpenAI) -> None:
    with frozen(live.d):  # else it may have the whole answer before the abort
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, stream=True, max_tokens=LONG, extra_headers={"X-Request-Id": "cut-off"},
            **GREEDY,
        )  # fmt: skip
        chunks = [next(stream)]
        assert live.http.post("/abort_request", json={"request_id": "cut-off"}).json()["found"] is True
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "abort"
    live.check_serving()


# -- the rest ----------------------------------------------------------------------------------------------------


def test_models_when_listed_then_the_served_one_is_there(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "baton")
    assert model.model_extra["max_model_len"] == CONTEXT


def test_headers_when_answered_then_they_carry_the_id_and_the_graph_status(client: openai.OpenAI) -> None:
    for stream in (False, True):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=2, stream=stream, extra_headers={"X-Request-Id": f"id-{stream}"}
        )
        assert raw.headers["x-request-id"] == f"id-{stream}"
        assert raw.headers["x-baton-prefill-cuda-graph"] == "not_requested"
        list(raw.parse())


def test_log_when_all_clients_have_been_served_then_it_has_no_defect(live: Live) -> None:
    live.check_serving()
    assert live.defects() == []
