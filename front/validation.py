"""Checks of a request's fields: from the wire message to the engine's `AddRequest`, or the code that
refuses it.

A field that must be there and is not is ERROR_GENERATE_CONFIG_FORMAT, a value out of range INVALID_PARAMS
naming field, value and range, a token id beyond the vocabulary OUT_OF_VOCAB_RANGE, a prompt beyond the
model's length LONG_PROMPT_ERROR, a model that is not served MODEL_NOT_FOUND. Nothing absent is read as a
number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.messages import AddRequest, KvSource, RunMode, SamplingParams
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec, not_offered
from rpc.ids import RequestKey, check_request_id, split_request_key
from rpc.input_embeddings import InputEmbedding, check_input_embeddings

_SamplingField = Literal["max_tokens", "seed", "temperature", "top_p", "repetition_penalty"]

MAX_LOGPROBS = 20
# Host names, IPv4, IPv6 in brackets; none of the other schemes that gRPC knows (unix:, dns:///, …).
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%]{2,64}\]):([0-9]{1,5})", re.ASCII)
_ENGINE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_REQUIRED_SAMPLING: tuple[_SamplingField, ...] = (
    "max_tokens",
    "seed",
    "temperature",
    "top_p",
    "repetition_penalty",
)


@dataclass(frozen=True)
class ModelFacts:
    """What a request is checked against. `max_model_len` counts prompt and generated tokens."""

    served_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    embedding_size: int = 0  # numbers of an input embedding's row; 0: the model takes none
    grammars: bool = False  # whether the engine can keep to grammars


def missing(name: str) -> BatonError:
    """The refusal of a request that lacks a required field."""
    return BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, f"{name} is required and was not set", param=name)


def out_of_range(name: str, value: object, allowed: str) -> BatonError:
    """The refusal of a value; the message names field, value and range."""
    return BatonError(ErrorCode.INVALID_PARAMS, f"{name} is {value}; it must be {allowed}", param=name)


def read_key(message: common_pb2.GenerateInput) -> RequestKey:
    """The request's key, which must belong to its id."""
    if not message.request_id:
        raise missing("input.request_id")
    check_request_id(message.request_id)
    if not message.request_key:
        raise missing("input.request_key")
    key = split_request_key(message.request_key)
    if key.request_id != message.request_id:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"request_key belongs to request {key.request_id}, not to {message.request_id}",
            param="input.request_key",
        )
    return key


def read_request(
    message: common_pb2.GenerateInput,
    facts: ModelFacts,
    mode: RunMode,
    *,
    arrival_ns: int,
    deadline_ns: int,
    kv_source: KvSource | None = None,
    single_token: bool = False,
) -> AddRequest:
    """`message` as the engine takes it. `single_token` ends the request with its next token, whatever it
    asks for.

    The key is not checked here (see `read_key`). Times are readings of `time.monotonic_ns()`.
    """
    if not message.model:
        raise missing("input.model")
    if message.model not in facts.served_names:
        raise BatonError(
            ErrorCode.MODEL_NOT_FOUND,
            f"the model {message.model!r} is not served here; served: {', '.join(facts.served_names)}",
            param="input.model",
        )
    prompt = list(message.prompt_token_ids)
    output = list(message.output_token_ids)
    if not prompt:
        raise out_of_range("input.prompt_token_ids", "empty", "at least one token id")
    needed = len(prompt) + len(output) + 1
    if needed > facts.max_model_len:
        raise BatonError(
            ErrorCode.LONG_PROMPT_ERROR,
            f"the prompt of {len(prompt)} tokens and {len(output) + 1} generated ones need {needed} tokens; "
            f"the model's length is {facts.max_model_len}",
            param="input.prompt_token_ids",
        )
    _check_vocabulary("input.prompt_token_ids", prompt, facts.vocab_size)
    _check_vocabulary("input.output_token_ids", output, facts.vocab_size)
    sampling = _read_sampling(message, facts.vocab_size, len(output), single_token)
    embeddings = read_embeddings(message.input_embeddings)
    check_input_embeddings(embeddings, len(prompt), facts.embedding_size)
    return AddRequest(
        request_key=message.request_key,
        mode=mode,
        prompt_token_ids=prompt,
        sampling=sampling,
        output_token_ids=output,
        cache_salt=message.cache_salt,
        priority=message.priority,
        arrival_ns=arrival_ns,
        deadline_ns=deadline_ns,
        kv_source=kv_source,
        input_embeddings=embeddings,
        grammar=_read_grammar(message, facts),
    )


def _read_grammar(message: common_pb2.GenerateInput, facts: ModelFacts) -> GrammarSpec | None:
    if not message.HasField("grammar"):
        return None
    if not facts.grammars:
        raise not_offered("input.grammar")
    kind, text = message.grammar.kind, message.grammar.text
    if kind not in tuple(GrammarKind):
        raise out_of_range("input.grammar.kind", repr(kind[:64]), f"one of {', '.join(GrammarKind)}")
    if len(text) > MAX_GRAMMAR_BYTES:
        raise out_of_range("input.grammar.text", f"{len(text)} characters", f"at most {MAX_GRAMMAR_BYTES} long")
    return GrammarSpec(GrammarKind(kind), text)


def read_embeddings(messages: Iterable[common_pb2.InputEmbedding]) -> list[InputEmbedding]:
    found = []
    for message in messages:
        if not message.HasField("location"):
            raise missing("input_embeddings.location")
        found.append(InputEmbedding(message.location, message.values, message.dtype or "float32"))
    return found


def read_kv_source(message: common_pb2.KvSource) -> KvSource:
    """Where to load from; every address is `host:port` and there is one per rank."""
    if not message.engine_id:
        raise missing("kv_source.engine_id")
    if _ENGINE_ID.fullmatch(message.engine_id) is None:
        raise out_of_range("kv_source.engine_id", repr(message.engine_id[:64]), "32 lower-case hex digits")
    if not message.cache_store_addresses:
        raise missing("kv_source.cache_store_addresses")
    if not message.HasField("tp_size"):
        raise missing("kv_source.tp_size")
    addresses = tuple(message.cache_store_addresses)
    for address in addresses:
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[1]) < 65536:
            raise out_of_range("kv_source.cache_store_addresses", repr(address[:64]), "host:port")
    if message.tp_size != len(addresses):
        raise out_of_range("kv_source.tp_size", message.tp_size, f"the number of addresses, {len(addresses)}")
    return KvSource(message.engine_id, addresses, message.tp_size)


def _check_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    # Ids are unsigned on the wire, so the largest decides; max() runs in C over prompts of any length.
    if ids and (largest := max(ids)) >= vocab_size:
        raise BatonError(
            ErrorCode.OUT_OF_VOCAB_RANGE,
            f"{name} has the id {largest}; the vocabulary has the ids 0 to {vocab_size - 1}",
            param=name,
        )


def _within(name: str, value: float, low: float, high: float, allowed: str, *, open_low: bool = False) -> float:
    # Written so that NaN fails.
    if not (low < value <= high if open_low else low <= value <= high):
        raise out_of_range(name, value, allowed)
    return value


def _read_sampling(
    message: common_pb2.GenerateInput, vocab_size: int, generated: int, single_token: bool
) -> SamplingParams:
    if not message.HasField("sampling"):
        raise missing("input.sampling")
    s = message.sampling
    for name in _REQUIRED_SAMPLING:
        if not s.HasField(name):
            raise missing(f"sampling.{name}")
    if s.max_tokens < 1:
        raise out_of_range("sampling.max_tokens", s.max_tokens, "at least 1")
    if s.max_tokens <= generated:
        raise out_of_range(
            "sampling.max_tokens",
            s.max_tokens,
            f"more than the {generated} tokens that were generated already",
        )
    if s.min_tokens > s.max_tokens:
        raise out_of_range("sampling.min_tokens", s.min_tokens, f"at most max_tokens, {s.max_tokens}")
    bias = dict(s.logit_bias)
    _check_vocabulary("sampling.logit_bias", list(bias), vocab_size)
    for addend in bias.values():
        _within("sampling.logit_bias", addend, -100, 100, "in [-100, 100]")
    _check_vocabulary("sampling.stop_token_ids", s.stop_token_ids, vocab_size)
    logprobs = s.logprobs if s.HasField("logprobs") else -1
    prompt_logprobs = s.prompt_logprobs if s.HasField("prompt_logprobs") else -1
    _within("sampling.logprobs", logprobs, -1, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]")
    _within("sampling.prompt_logprobs", prompt_logprobs, -1, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]")
    penalty = s.repetition_penalty
    if not (penalty > 0 and math.isfinite(penalty)):
        raise out_of_range("sampling.repetition_penalty", penalty, "a finite number above 0")
    return SamplingParams(
        max_tokens=generated + 1 if single_token else s.max_tokens,
        seed=s.seed,
        temperature=_within("sampling.temperature", s.temperature, 0, 2, "in [0, 2]"),
        top_k=s.top_k,
        top_p=_within("sampling.top_p", s.top_p, 0, 1, "in (0, 1]", open_low=True),
        min_p=_within("sampling.min_p", s.min_p, 0, 1, "in [0, 1]"),
        repetition_penalty=penalty,
        presence_penalty=_within("sampling.presence_penalty", s.presence_penalty, -2, 2, "in [-2, 2]"),
        frequency_penalty=_within("sampling.frequency_penalty", s.frequency_penalty, -2, 2, "in [-2, 2]"),
        logit_bias=bias,
        min_tokens=s.min_tokens,
        stop_token_ids=tuple(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
