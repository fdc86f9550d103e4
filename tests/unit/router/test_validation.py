"""Checked requests: names, ranges, lengths, and what becomes of them. (The wire's view: tests/conformance.)"""

from __future__ import annotations

import asyncio
import math

import pytest

from router.grammar.keys import AskedGrammar
from router.open_requests import OpenRequests
from router.requests import ModelFacts
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.validation import GenerationParams, RequestValidator, check_model, check_token_ids, split_prompts
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarKind, GrammarSpec
from rpc.metrics import Registry
from tests.unit.router import tokenizer_folders as folders

TOKENIZER = Tokenizer(folders.byte_level(), {"eos_token": "<|im_end|>"})
FACTS = ModelFacts(("tiny", "alias"), "/models/tiny", 64, 400, (2,))
TEMPLATE = ChatTemplate(folders.CHATML, source="test", special_tokens={})
USER = [{"role": "user", "content": "hi"}]


def validator(facts: ModelFacts = FACTS, template: ChatTemplate | None = TEMPLATE, **options) -> RequestValidator:
    return RequestValidator(TOKENIZER, template, lambda: facts, **options)


async def prepare(params: GenerationParams, facts: ModelFacts = FACTS, **options):
    table = OpenRequests(
        Registry("router", process_metrics=False), request_timeout_s=60, served_names=lambda: facts.served_names
    )
    with table.open("id", api=params.api) as owner:
        checker = validator(facts, **options)
        checker.check(params)
        request = await checker.prepare(params, owner)
        owner.finish("stop")
    return request, owner


async def refused(params: GenerationParams, facts: ModelFacts = FACTS) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await prepare(params, facts)
    return caught.value


def test_model_when_absent_is_the_first_served_name():
    assert check_model(None, FACTS) == "tiny"
    assert check_model("alias", FACTS) == "alias"
    for facts, name in ((FACTS, "x"), (FACTS, ""), (ModelFacts((), "/m"), None)):
        with pytest.raises(BatonError) as caught:
            check_model(name, facts)
        assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_token_ids_when_checked_are_in_the_models_vocabulary():
    check_token_ids("prompt", [], 10)
    check_token_ids("prompt", [0, 9], 10)
    for ids in ([10], [-1], [3, 99, 4]):
        with pytest.raises(BatonError) as caught:
            check_token_ids("prompt", ids, 10)
        assert caught.value.code is ErrorCode.OUT_OF_VOCAB_RANGE
        assert "[0, 9]" in caught.value.message
    # Ids of a text are the tokenizer's own; the servers' word counts before the tokenizer's.
    assert validator().vocab_size == 400
    assert validator(ModelFacts(("tiny",), "/m")).vocab_size == TOKENIZER.vocab_size


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_when_split_are_one_for_each_sequence(prompt, parts):
    assert split_prompts(prompt) == parts


async def test_defaults_when_nothing_is_given_are_those_of_the_api():
    request, owner = await prepare(GenerationParams(api="completions", prompt=[5, 6]))
    sampling = request.template.sampling
    assert request.prompts[0].max_tokens == 16
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (request.n, request.candidates, request.stop, request.echo) == (1, 1, (), False)
    assert (request.template.request_id, request.template.model) == ("id", "tiny")
    assert request.template.owner is owner
    assert (request.template.deadline, request.template.arrival) == (owner.deadline, owner.arrival)
    assert owner.prompt_tokens == 2
    assert request.seed is None


async def test_limit_when_absent_is_16_or_what_fits_and_in_a_chat_the_rest_of_the_context():
    assert (await prepare(GenerationParams(api="completions", prompt=[5] * 60)))[0].prompts[0].max_tokens == 4
    chat, _ = await prepare(GenerationParams(api="chat", messages=USER))
    assert chat.prompts[0].max_tokens == 64 - len(chat.prompts[0].token_ids)
    grpc, _ = await prepare(GenerationParams(api="grpc", messages=USER))
    assert grpc.prompts[0].max_tokens == chat.prompts[0].max_tokens
    unknown = ModelFacts(("tiny",), "/m")
    assert (await prepare(GenerationParams(api="chat", messages=USER), unknown))[0].prompts[0].max_tokens == 16


@pytest.mark.parametrize(
    ("size", "asked", "fits"), [(63, None, True), (64, None, False), (63, 1, True), (60, 5, False)]
)
async def test_length_when_prompt_and_answer_meet_the_context_fits_to_the_last_token(size, asked, fits):
    params = GenerationParams(api="completions", prompt=[5] * size, max_tokens=asked)
    if fits:
        assert (await prepare(params))[0].prompts[0].max_tokens == 1
        return
    error = await refused(params)
    assert error.code is ErrorCode.LONG_PROMPT_ERROR
    assert str(size) in error.message
    assert "64" in error.message


async def test_limits_when_there_are_several_prompts_are_each_ones_own():
    request, owner = await prepare(GenerationParams(api="completions", prompt=[[5] * 60, [5] * 10]))
    assert [prompt.max_tokens for prompt in request.prompts] == [4, 16]
    assert owner.prompt_tokens == 70
    assert [request.router_request(i).sampling.max_tokens for i in range(2)] == [4, 16]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
async def test_value_when_not_finite_is_out_of_every_range(field, value):
    error = await refused(GenerationParams(api="grpc", prompt="x", **{field: value}))
    assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"seed": 10**5000}, "seed"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"logit_bias": {5: -100.5}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"stop": ["a", ""]}, "stop"),
        ({"session_id": "s" * 300}, "X-Session-Id"),
    ],
)
async def test_value_when_out_of_range_names_its_field(fields, param):
    error = await refused(GenerationParams(api="grpc", prompt="x", **fields))
    assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, param)
    assert len(error.message) < 300


async def test_prompt_when_missing_or_empty_is_refused():
    missing = await refused(GenerationParams(api="grpc"))
    assert (missing.code, missing.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "prompt")
    assert (await refused(GenerationParams(api="grpc", prompt=""))).code is ErrorCode.INVALID_PARAMS
    assert (await refused(GenerationParams(api="grpc", prompt=[[]]))).code is ErrorCode.INVALID_PARAMS
    assert (await refused(GenerationParams(api="grpc", messages=[]))).param == "messages"


async def test_chat_when_the_model_has_no_template_is_refused_before_it_is_tokenized():
    with pytest.raises(BatonError) as caught:
        validator(template=None).check(GenerationParams(api="chat", messages=USER))
    assert "chat template" in caught.value.message


async def test_candidates_when_more_than_shown_are_ranked_by_logprobs():
    request, _ = await prepare(GenerationParams(api="completions", prompt="x", n=2, best_of=4))
    assert (request.n, request.candidates, request.template.sampling.logprobs) == (2, 4, 0)
    assert request.template.single_server == "beam_or_n"


async def test_echo_when_logprobs_are_wanted_asks_for_the_prompts_as_well():
    params = GenerationParams(api="completions", prompt="hello", echo=True, logprobs=3)
    request, _ = await prepare(params)
    assert request.template.sampling.prompt_logprobs == 3
    assert request.prompts[0].text == "hello"
    ids = TOKENIZER.encode("hello")
    request, _ = await prepare(GenerationParams(api="completions", prompt=ids, echo=True))
    assert request.prompts[0].text == "hello"
    assert request.template.sampling.prompt_logprobs is None


@pytest.mark.parametrize(("given", "used"), [(-1, 2**64 - 1), (0, 0), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)])
async def test_seed_when_negative_is_taken_modulo_2_to_the_64(given, used):
    request, _ = await prepare(GenerationParams(api="completions", prompt="x", seed=given))
    assert request.router_request(0).sampling.seed == used


async def test_content_when_logging_is_on_is_kept_for_the_access_log():
    request, _ = await prepare(GenerationParams(api="completions", prompt="x"))
    assert not request.log_content
    request, _ = await prepare(GenerationParams(api="completions", prompt="x"), log_content=True)
    assert request.log_content


async def test_seed_when_a_request_brings_none_then_it_is_drawn_from_the_routers_own_or_from_the_system():
    async def drawn(**options) -> list[int]:
        table = OpenRequests(
            Registry("router", process_metrics=False), request_timeout_s=60, served_names=lambda: FACTS.served_names
        )
        checker, seeds = validator(**options), []
        for number in range(3):
            with table.open(str(number), api="completions") as owner:
                request = await checker.prepare(GenerationParams(api="completions", prompt="hi"), owner)
                seeds.append(request.router_request(0).sampling.seed)
                owner.finish("stop")
        assert len(set(seeds)) == 3
        return seeds

    assert await drawn(seed=7) == await drawn(seed=7) != await drawn(seed=8)
    assert await drawn() != await drawn()


async def test_prepare_when_the_deadline_passes_while_a_grammar_waits_then_it_is_603():
    class Busy:
        async def admit(self, spec: GrammarSpec, param: str) -> int | None:
            return await asyncio.Event().wait()

    table = OpenRequests(Registry("router", process_metrics=False), request_timeout_s=0.05, served_names=lambda: ())
    params = GenerationParams(api="completions", prompt="hi")
    params.grammar = AskedGrammar(GrammarSpec(GrammarKind.REGEX, "a"), "regex")
    with pytest.raises(BatonError) as caught, table.open("id", api="completions") as owner:
        async with asyncio.timeout(10):
            await validator(grammars=Busy()).prepare(params, owner)
    assert caught.value.code is ErrorCode.GENERATE_TIMEOUT
    assert owner.error is caught.value


@pytest.mark.parametrize(
    ("ends", "most_bytes", "min_tokens", "taken"),
    [
        (True, None, 2, False),
        (True, None, 1, True),
        (False, 8, 9, False),
        (False, 8, 8, True),
        (False, 0, None, True),
        (False, None, 9, True),
    ],
)
async def test_min_tokens_when_a_grammar_has_no_room_for_them_then_they_are_refused_at_admission(
    ends: bool, most_bytes: int | None, min_tokens: int | None, taken: bool
) -> None:
    class Admission:
        async def admit(self, spec: GrammarSpec, param: str) -> int | None:
            return most_bytes

    params = GenerationParams(api="completions", prompt="x", max_tokens=9, min_tokens=min_tokens)
    params.grammar = AskedGrammar(GrammarSpec(GrammarKind.JSON_OBJECT), "its_field", ends)
    checker = validator(grammars=Admission())
    table = OpenRequests(Registry("router", process_metrics=False), request_timeout_s=10, served_names=lambda: ())
    with table.open("id", api="completions") as owner:
        if taken:
            assert checker.check(params) == "tiny"
            assert (await checker.prepare(params, owner)).template.grammar == params.grammar.spec
            owner.finish("stop")
            return
        with pytest.raises(BatonError) as caught:  # noqa: PT012 - which of the two refuses it depends on the case
            checker.check(params)
            await checker.prepare(params, owner)
        owner.finish("stop")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_PARAMS, "min_tokens")
    assert "its_field" in caught.value.message
