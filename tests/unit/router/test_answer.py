"""From tokens to text events: stop strings, ends, several choices, seeds, usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.answer import AnswerRequest, Collected, Prompt, TextEvent, answer, derive_seed
from router.requests import FinishEvent, ModelFacts, RouterRequest, Sampling, TokensEvent
from router.text.tokenizer import Tokenizer
from rpc.errors import BatonError, ErrorCode
from tests.unit.router import tokenizer_folders as folders
from tests.unit.router.scripted_serving import ScriptedServing, answering, summary, token

TOKENIZER = Tokenizer(folders.byte_level(), {"eos_token": "<|im_end|>"})
EOS = TOKENIZER.encode("<|im_end|>")[0]
FACTS = ModelFacts(("tiny",), "/models/tiny", 512, TOKENIZER.vocab_size, (EOS,))
HELLO = TOKENIZER.encode("hello world, hello there")


def request(
    text: str = "Say", *, prompts: int = 1, n: int = 1, candidates: int | None = None, max_tokens: int = 64, **fields
) -> AnswerRequest:
    sampling = fields.pop("sampling", Sampling(max_tokens=1))
    template = RouterRequest("id", "tiny", [], sampling)
    echo_text = text if fields.get("echo") else None
    prompt = Prompt(TOKENIZER.encode(text), max_tokens, echo_text)
    return AnswerRequest(
        template, (prompt,) * prompts, n, n if candidates is None else candidates, eos_token_ids=(EOS,), **fields
    )


def serving(script) -> ScriptedServing:
    return ScriptedServing(FACTS, script)


async def events_of(wanted: AnswerRequest, server: ScriptedServing) -> list[TextEvent]:
    async with aclosing(answer(wanted, server, TOKENIZER)) as events:
        return [event async for event in events]


def text_of(events: list[TextEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if event.choice == choice)


async def test_answer_when_the_model_ends_is_the_text_without_the_end_token():
    events = await events_of(request(), serving(answering([*HELLO, EOS], stop_token_id=EOS)))
    assert text_of(events) == "hello world, hello there"
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1].stop_reason is None
    assert events[-1].tokens[-1].token_id == EOS
    assert events[-1].finish is not None
    assert events[-1].finish.timeline
    assert [event.prefill is not None for event in events] == [True] + [False] * (len(events) - 1)
    assert sum(len(event.tokens) for event in events) == len(HELLO) + 1


async def test_last_tokens_when_the_limit_is_reached_come_together_with_the_end():
    events = await events_of(request(max_tokens=3), serving(answering(HELLO)))
    assert [len(event.tokens) for event in events] == [1, 1, 1]
    assert events[-1].finish_reason == "length"
    assert events[-1].text


async def test_stop_token_when_the_request_named_it_is_the_reason_and_not_in_the_text():
    stop = HELLO[3]
    sampling = Sampling(max_tokens=1, stop_token_ids=(stop,))
    events = await events_of(request(sampling=sampling), serving(answering(HELLO[:4], stop_token_id=stop)))
    assert text_of(events) == TOKENIZER.decode(HELLO[:3])
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)


async def test_end_token_when_ignored_does_not_hold_its_event_back():
    sampling = Sampling(max_tokens=1, ignore_eos=True)
    ids = [HELLO[0], EOS, HELLO[1]]
    events = await events_of(request(sampling=sampling), serving(answering(ids, reason="length")))
    assert [[t.token_id for t in event.tokens] for event in events] == [[HELLO[0]], [EOS], [HELLO[1]], []]
    assert text_of(events) == TOKENIZER.decode([HELLO[0], HELLO[1]])


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
async def test_stop_string_when_it_spans_tokens_ends_text_and_legs(chunk):
    server = serving(answering([*HELLO, EOS], chunk=chunk))
    events = await events_of(request(stop=("rld, he",)), server)
    assert text_of(events) == "hello wo"
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "rld, he")
    assert (server.open, server.closed_early) == (0, 1)
    # Tokens behind the stop string are not counted, however they came.
    counted = [t.token_id for event in events for t in event.tokens]
    assert "rld, he" in TOKENIZER.decode(counted)
    assert "rld, he" not in TOKENIZER.decode(counted[:-1])


async def test_legs_when_a_stop_string_is_found_are_closed_before_the_last_event():
    server = serving(answering([*HELLO, EOS]))
    async with aclosing(answer(request(stop=("world",)), server, TOKENIZER)) as events:
        async for event in events:
            if event.finish_reason:
                assert server.open == 0
                break
        else:
            pytest.fail("no end")


async def test_beginning_of_a_stop_string_when_the_model_ends_is_shown():
    events = await events_of(request(stop=("there!",)), serving(answering([*HELLO, EOS], stop_token_id=EOS)))
    assert text_of(events) == "hello world, hello there"
    assert events[-1].text.endswith("there")
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", None)


async def test_stop_string_when_undecided_at_the_end_cuts_the_text():
    events = await events_of(request(stop=("llo there, you", "there")), serving(answering(HELLO, reason="length")))
    assert text_of(events) == "hello world, hello "
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "there")


async def test_stop_string_when_it_lies_within_min_tokens_is_not_looked_for():
    sampling = Sampling(max_tokens=1, min_tokens=len(TOKENIZER.encode("hello world,")))
    events = await events_of(request(stop=("hello",), sampling=sampling), serving(answering([*HELLO, EOS])))
    assert text_of(events) == "hello world, "
    assert events[-1].stop_reason == "hello"


@given(st.lists(st.sampled_from(HELLO + TOKENIZER.encode("你好 😀")), max_size=20), st.integers(1, 20), st.booleans())
@settings(max_examples=150, deadline=None)
def test_text_when_tokens_come_in_any_chunks_is_the_same(ids, chunk, stops):
    wanted = request(stop=("lo w", "o") if stops else ())

    def final(size: int) -> tuple[str, object, object, int]:
        events = asyncio.run(events_of(wanted, serving(answering([*ids, EOS], chunk=size, stop_token_id=EOS))))
        last = events[-1]
        return text_of(events), last.finish_reason, last.stop_reason, sum(len(event.tokens) for event in events)

    assert final(chunk) == final(1)


async def test_abort_when_it_comes_in_mid_generation_gives_what_there_is():
    events = await events_of(request(), serving(answering(HELLO[:3], reason="abort")))
    assert text_of(events) == TOKENIZER.decode(HELLO[:3])
    assert events[-1].finish_reason == "abort"


async def test_unfinished_character_when_the_generation_ends_is_dropped():
    ids = [*HELLO[:1], *(TOKENIZER._backend.token_to_id(char) for char in "ðŁĺ")]
    events = await events_of(request(), serving(answering(ids, reason="length")))
    assert text_of(events) == TOKENIZER.decode(HELLO[:1])
    assert sum(len(event.tokens) for event in events) == 4


async def test_failure_when_the_last_tokens_wait_for_the_end_shows_them_first():
    error = BatonError(ErrorCode.ENGINE_DEAD, "gone")
    got: list[TextEvent] = []

    async def read() -> None:
        server = serving(answering(HELLO[:3], error=error))
        async with aclosing(answer(request(max_tokens=3), server, TOKENIZER)) as events:
            async for event in events:
                got.append(event)

    with pytest.raises(BatonError) as caught:
        await read()
    assert caught.value is error
    assert text_of(got) == TOKENIZER.decode(HELLO[:3])


async def test_generation_when_it_ends_without_an_end_is_a_failure():
    async def script(wanted: RouterRequest) -> AsyncIterator[TokensEvent]:
        yield TokensEvent([token(wanted, 0, HELLO[0])], summary(wanted))

    with pytest.raises(BatonError) as caught:
        await events_of(request(), serving(script))
    assert caught.value.code is ErrorCode.REMOTE_GENERATE_FAILED


async def test_echo_when_asked_for_puts_the_prompt_in_front_of_the_first_event():
    events = await events_of(request("Say", echo=True), serving(answering(HELLO[:2], reason="length")))
    assert events[0].text == "Say" + TOKENIZER.decode(HELLO[:1])
    assert events[0].offsets == [3]
    assert text_of(events) == "Say" + TOKENIZER.decode(HELLO[:2])


async def test_offsets_when_characters_span_tokens_are_their_places_in_the_text():
    ids = TOKENIZER.encode("a😀b")
    events = await events_of(request(), serving(answering(ids, chunk=2, reason="length")))
    text = text_of(events)
    offsets = [offset for event in events for offset in event.offsets]
    assert text == "a😀b"
    assert offsets[0] == 0
    assert offsets[-1] == 2
    assert set(offsets[1:-1]) == {1}


async def test_choices_when_several_begin_with_the_first_and_come_in_order_each():
    server = serving(answering([*HELLO, EOS], stop_token_id=EOS))
    events = await events_of(request(n=3, prompts=2), server)
    for choice in range(6):
        assert text_of(events, choice) == "hello world, hello there"
        assert [event.finish_reason for event in events if event.choice == choice][-1] == "stop"
    # The first candidate of each prompt is there before any other.
    assert [wanted.sampling.seed for wanted in server.requests[:2]] != [w.sampling.seed for w in server.requests[2:4]]
    assert len(server.requests) == 6
    assert server.open == 0


async def test_later_choices_when_the_first_has_no_token_yet_wait():
    go = asyncio.Event()

    async def script(wanted: RouterRequest):
        await go.wait()
        yield TokensEvent([token(wanted, 0, HELLO[0])], summary(wanted))
        yield FinishEvent("length")

    server = serving(script)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(events_of(request(n=3), server))
        await server.until(lambda: len(server.requests) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(server.requests) == 1
        go.set()
    assert len(server.requests) == 3
    assert len(task.result()) == 6


async def test_failure_of_one_choice_when_others_run_ends_all():
    async def script(wanted: RouterRequest):
        yield TokensEvent([token(wanted, 0, HELLO[0])], summary(wanted))
        if wanted.sampling.seed == derive_seed(7, 1):
            raise BatonError(ErrorCode.ENGINE_DEAD, "gone")
        await asyncio.Event().wait()

    server = serving(script)
    with pytest.raises(BatonError) as caught:
        await asyncio.wait_for(events_of(request(n=3, seed=7), server), 10)
    assert caught.value.code is ErrorCode.ENGINE_DEAD
    assert server.open == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_reader_when_it_leaves_closes_every_leg(n):
    async def script(wanted: RouterRequest):
        for index in range(1000):
            yield TokensEvent([token(wanted, index, HELLO[0])], summary(wanted))
            await asyncio.sleep(0)

    server = serving(script)
    async with aclosing(answer(request(n=n, max_tokens=2000), server, TOKENIZER)) as events:
        async for _ in events:
            if len(server.requests) == n:
                break
    assert server.open == 0
    assert server.closed_early == n


@pytest.mark.parametrize("n", [1, 3])
async def test_reader_when_its_task_is_cancelled_closes_every_leg(n):
    async def script(wanted: RouterRequest):
        yield TokensEvent([token(wanted, 0, HELLO[0])], summary(wanted))
        await asyncio.Event().wait()

    server = serving(script)
    task = asyncio.create_task(events_of(request(n=n), server))
    await server.until(lambda: len(server.requests) == n)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.open == 0


async def test_legs_when_the_reader_is_slow_do_not_run_ahead():
    made = 0

    async def script(wanted: RouterRequest):
        nonlocal made
        for index in range(1000):
            made += 1
            yield TokensEvent([token(wanted, index, HELLO[0])], summary(wanted))

    async with aclosing(answer(request(n=2, max_tokens=2000), serving(script), TOKENIZER)) as events:
        async for _ in events:
            break
        for _ in range(500):
            await asyncio.sleep(0)
        # Two events a choice in the queue, one in each pump's hand, the one that was read, and one being made.
        assert made <= 10


def test_seeds_when_derived_differ_and_the_first_is_the_clients():
    seeds = [derive_seed(7, index) for index in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[:3] == [7, 7191089600892374487, 309689372594955804]


async def test_seeds_when_the_client_gives_one_are_those_of_each_prompt_alone():
    server = serving(answering(HELLO, reason="length"))
    await events_of(request(n=2, prompts=2, seed=7), server)
    by_prompt = sorted(wanted.sampling.seed for wanted in server.requests)
    assert by_prompt == sorted([7, 7, derive_seed(7, 1), derive_seed(7, 1)])


async def test_seeds_when_drawn_differ_for_all_sequences():
    server = serving(answering(HELLO, reason="length"))
    await events_of(request(n=2, prompts=2, drawn_seed=5), server)
    assert len({wanted.sampling.seed for wanted in server.requests}) == 4


async def test_best_of_when_candidates_are_ranked_keeps_the_likeliest():
    likely = {derive_seed(7, 0): -2.0, derive_seed(7, 1): -0.1, derive_seed(7, 2): -1.0}

    async def script(wanted: RouterRequest):
        value = likely[wanted.sampling.seed]
        index = [-2.0, -0.1, -1.0].index(value)
        yield TokensEvent([token(wanted, 0, HELLO[index], value)], summary(wanted))
        yield FinishEvent("length")

    wanted = request(n=2, candidates=3, seed=7, sampling=Sampling(max_tokens=1, logprobs=0))
    collected = Collected(wanted)
    for event in await events_of(wanted, serving(script)):
        collected.add(event)
    choices = collected.choices()
    assert [choice.index for choice in choices] == [0, 1]
    assert [choice.text for choice in choices] == [TOKENIZER.decode([HELLO[1]]), TOKENIZER.decode([HELLO[2]])]
    # What was left out was generated all the same.
    assert collected.usage.completion_tokens == 3


async def test_usage_when_there_are_several_prompts_and_choices_counts_each_once():
    wanted = request(n=2, prompts=2)
    collected = Collected(wanted)
    for event in await events_of(wanted, serving(answering([*HELLO, EOS], cached=1))):
        collected.add(event)
    prompt = len(TOKENIZER.encode("Say"))
    assert collected.usage.prompt_tokens == 2 * prompt
    assert collected.usage.completion_tokens == 4 * (len(HELLO) + 1)
    assert collected.usage.cached_tokens == 2
