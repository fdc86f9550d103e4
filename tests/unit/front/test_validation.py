"""Each field of a request that can be wrong, with the code that refuses it and the field that the message names."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from engine.messages import KvSource, RunMode
from front.validation import ModelFacts, read_key, read_kv_source, read_request
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode
from tests.unit.front.wire_requests import MODEL, REQUEST_KEY, generate_input, kv_source, sampling

FACTS = ModelFacts(served_names=(MODEL, "alias"), vocab_size=100, max_model_len=32)
FORMAT = ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
PARAMS = ErrorCode.INVALID_PARAMS
VOCAB = ErrorCode.OUT_OF_VOCAB_RANGE
LONG = ErrorCode.LONG_PROMPT_ERROR


def read(message: common_pb2.GenerateInput, **options: object):
    return read_request(message, FACTS, RunMode.LOCAL, arrival_ns=1, deadline_ns=2, **options)


def cleared(field: str) -> Callable[[common_pb2.GenerateInput], None]:
    return lambda message: message.sampling.ClearField(field)


def with_sampling(**fields: object) -> Callable[[common_pb2.GenerateInput], None]:
    return lambda message: message.sampling.CopyFrom(sampling(**fields))


def prompt(ids: list[int], output: list[int] = ()) -> Callable[[common_pb2.GenerateInput], None]:
    def change(message: common_pb2.GenerateInput) -> None:
        del message.prompt_token_ids[:]
        message.prompt_token_ids.extend(ids)
        message.output_token_ids.extend(output)

    return change


BAD_INPUTS: dict[str, tuple[Callable[[common_pb2.GenerateInput], object], ErrorCode, str]] = {
    "no sampling": (lambda m: m.ClearField("sampling"), FORMAT, "input.sampling"),
    "no max_tokens": (cleared("max_tokens"), FORMAT, "sampling.max_tokens"),
    "no seed": (cleared("seed"), FORMAT, "sampling.seed"),
    "no temperature": (cleared("temperature"), FORMAT, "sampling.temperature"),
    "no top_p": (cleared("top_p"), FORMAT, "sampling.top_p"),
    "no repetition_penalty": (cleared("repetition_penalty"), FORMAT, "sampling.repetition_penalty"),
    "no model": (lambda m: m.ClearField("model"), FORMAT, "input.model"),
    "other model": (lambda m: setattr(m, "model", "gpt-7"), ErrorCode.MODEL_NOT_FOUND, "input.model"),
    "empty prompt": (prompt([]), PARAMS, "input.prompt_token_ids"),
    "prompt id = vocabulary": (prompt([1, 100]), VOCAB, "input.prompt_token_ids"),
    "output id beyond vocabulary": (prompt([1], [4_000_000_000]), VOCAB, "input.output_token_ids"),
    "prompt fills the model": (prompt([1] * 32), LONG, "input.prompt_token_ids"),
    "prompt and outputs fill the model": (prompt([1] * 30, [1, 1]), LONG, "input.prompt_token_ids"),
    "max_tokens 0": (with_sampling(max_tokens=0), PARAMS, "sampling.max_tokens"),
    "max_tokens used up": (
        lambda m: m.output_token_ids.extend([1] * 8),
        PARAMS,
        "sampling.max_tokens",
    ),
    "temperature below": (with_sampling(temperature=-0.1), PARAMS, "sampling.temperature"),
    "temperature above": (with_sampling(temperature=2.01), PARAMS, "sampling.temperature"),
    "temperature NaN": (with_sampling(temperature=math.nan), PARAMS, "sampling.temperature"),
    "top_p 0": (with_sampling(top_p=0.0), PARAMS, "sampling.top_p"),
    "top_p above": (with_sampling(top_p=1.5), PARAMS, "sampling.top_p"),
    "top_p NaN": (with_sampling(top_p=math.nan), PARAMS, "sampling.top_p"),
    "min_p below": (with_sampling(min_p=-0.5), PARAMS, "sampling.min_p"),
    "min_p above": (with_sampling(min_p=1.1), PARAMS, "sampling.min_p"),
    "repetition_penalty 0": (with_sampling(repetition_penalty=0.0), PARAMS, "sampling.repetition_penalty"),
    "repetition_penalty inf": (
        with_sampling(repetition_penalty=math.inf),
        PARAMS,
        "sampling.repetition_penalty",
    ),
    "presence_penalty": (with_sampling(presence_penalty=2.5), PARAMS, "sampling.presence_penalty"),
    "frequency_penalty": (with_sampling(frequency_penalty=-2.5), PARAMS, "sampling.frequency_penalty"),
    "logit_bias value": (with_sampling(logit_bias={3: 101.0}), PARAMS, "sampling.logit_bias"),
    "logit_bias NaN": (with_sampling(logit_bias={3: math.nan}), PARAMS, "sampling.logit_bias"),
    "logit_bias id": (with_sampling(logit_bias={100: 1.0}), VOCAB, "sampling.logit_bias"),
    "stop token id": (with_sampling(stop_token_ids=[5, 100]), VOCAB, "sampling.stop_token_ids"),
    "min_tokens above max_tokens": (with_sampling(min_tokens=9), PARAMS, "sampling.min_tokens"),
    "logprobs": (with_sampling(logprobs=21), PARAMS, "sampling.logprobs"),
    "prompt_logprobs": (with_sampling(prompt_logprobs=21), PARAMS, "sampling.prompt_logprobs"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_read_request_when_a_field_is_wrong_then_its_code_and_name_come_back(name: str) -> None:
    spoil, code, param = BAD_INPUTS[name]
    message = generate_input()
    spoil(message)
    with pytest.raises(BatonError) as caught:
        read(message)
    assert caught.value.code is code
    assert caught.value.param == param
    assert param in caught.value.message or code in (LONG, ErrorCode.MODEL_NOT_FOUND)


def test_read_request_when_everything_is_set_then_the_engine_gets_all_of_it() -> None:
    fields = {
        "max_tokens": 9, "seed": 2**64 - 1, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.25, "presence_penalty": -1.0, "frequency_penalty": 1.0,
        "logit_bias": {7: -2.0}, "min_tokens": 2, "stop_token_ids": [4, 5], "ignore_eos": True,
        "logprobs": 0, "prompt_logprobs": 3,
    }  # fmt: skip
    message = generate_input(
        sampling=sampling(**fields), output_token_ids=[9, 8], cache_salt="s", priority=-3, model="alias"
    )
    source = KvSource("ab" * 16, ("h:1",), 1)
    add = read_request(message, FACTS, RunMode.DECODE, arrival_ns=11, deadline_ns=12, kv_source=source)
    assert add.request_key == REQUEST_KEY
    assert (add.mode, add.kv_source, add.arrival_ns, add.deadline_ns) == (RunMode.DECODE, source, 11, 12)
    assert (add.prompt_token_ids, add.output_token_ids) == ([1, 2, 3], [9, 8])
    assert (add.cache_salt, add.priority) == ("s", -3)
    expected = {**fields, "stop_token_ids": (4, 5)}
    assert {name: getattr(add.sampling, name) for name in expected} == expected


def test_read_request_when_logprobs_are_absent_then_none_are_asked_for() -> None:
    add = read(generate_input())
    assert (add.sampling.logprobs, add.sampling.prompt_logprobs) == (-1, -1)


def test_read_request_when_the_last_place_of_the_model_is_free_then_it_passes() -> None:
    message = generate_input()
    prompt([99] * 31)(message)
    assert len(read(message).prompt_token_ids) == 31


def test_read_request_when_single_token_is_asked_for_then_the_next_token_is_the_last() -> None:
    message = generate_input(output_token_ids=[1, 2])
    assert read(message, single_token=True).sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"request_id": ""}, FORMAT, "input.request_id"),
        ({"request_id": "a#b"}, PARAMS, "request_id"),
        ({"request_id": "x" * 129}, PARAMS, "request_id"),
        ({"request_key": ""}, FORMAT, "input.request_key"),
        ({"request_key": "req-1"}, PARAMS, "request_key"),
        ({"request_key": "req-1#0.0123ABCD"}, PARAMS, "request_key"),
        ({"request_key": "other#0.0123abcd"}, PARAMS, "input.request_key"),
    ],
)
def test_read_key_when_id_or_key_is_wrong_then_it_is_refused(
    fields: dict[str, str], code: ErrorCode, param: str
) -> None:
    with pytest.raises(BatonError) as caught:
        read_key(generate_input(**fields))
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"engine_id": ""}, FORMAT, "kv_source.engine_id"),
        ({"engine_id": "AB" * 16}, PARAMS, "kv_source.engine_id"),
        ({"engine_id": "ab"}, PARAMS, "kv_source.engine_id"),
        ({"cache_store_addresses": []}, FORMAT, "kv_source.cache_store_addresses"),
        ({"cache_store_addresses": ["nowhere"]}, PARAMS, "kv_source.cache_store_addresses"),
        ({"cache_store_addresses": [":50061"]}, PARAMS, "kv_source.cache_store_addresses"),
        ({"cache_store_addresses": ["h:0"]}, PARAMS, "kv_source.cache_store_addresses"),
        ({"cache_store_addresses": ["h:65536"]}, PARAMS, "kv_source.cache_store_addresses"),
        ({"cache_store_addresses": ["unix:/tmp/socket:80"]}, PARAMS, "kv_source.cache_store_addresses"),
        ({"cache_store_addresses": ["a b:80"]}, PARAMS, "kv_source.cache_store_addresses"),
        ({"cache_store_addresses": ["h:1", "h:2"]}, PARAMS, "kv_source.tp_size"),
        ({"tp_size": 2}, PARAMS, "kv_source.tp_size"),
    ],
)
def test_read_kv_source_when_a_field_is_wrong_then_it_is_refused(
    fields: dict[str, object], code: ErrorCode, param: str
) -> None:
    with pytest.raises(BatonError) as caught:
        read_kv_source(kv_source(**fields))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_read_kv_source_when_tp_size_is_absent_then_it_is_not_read_as_zero() -> None:
    message = kv_source()
    message.ClearField("tp_size")
    with pytest.raises(BatonError) as caught:
        read_kv_source(message)
    assert (caught.value.code, caught.value.param) == (FORMAT, "kv_source.tp_size")


def test_read_kv_source_when_it_is_right_then_addresses_keep_their_order() -> None:
    message = kv_source(cache_store_addresses=["a:1", "[::1]:2"], tp_size=2)
    assert read_kv_source(message) == KvSource("ab" * 16, ("a:1", "[::1]:2"), 2)
