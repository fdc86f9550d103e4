"""What each field of a request body is, in the words of JSON Schema: types, ranges, what it means.

Ranges are those of router/validation.py. A field may be null, which means that it is absent.
"""

from __future__ import annotations

from typing import Any

from router.tools.request import MAX_TOOLS
from router.validation import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    ROLES,
)

Schema = dict[str, Any]

_INT32 = 2**31 - 1
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
_IDS: Schema = {"type": "array", "items": _TOKEN_ID}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TOOLS: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                    "description": {"type": "string"},
                    "parameters": {"type": "object"},
                    "strict": {"type": "boolean"},
                },
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        },
        "required": ["role", "content"],
    },
}


def integer(low: int, high: int, description: str) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high, "description": description}


def number(low: float, high: float, description: str, **more: Any) -> Schema:
    limits = {"minimum": low, "maximum": high} | more
    return {
        "type": ["number", "null"],
        "description": description,
        **{k: v for k, v in limits.items() if v is not None},
    }


def flag(description: str) -> Schema:
    return {"type": ["boolean", "null"], "description": description}


def text(description: str, **more: Any) -> Schema:
    return {"type": ["string", "null"], "description": description, **more}


def one_of(description: str, *schemas: Schema) -> Schema:
    return {"anyOf": [*schemas, {"type": "null"}], "description": description}


def grammar(description: str, *types: str) -> Schema:
    return {"type": [*types, "null"], "description": f"{description}; at most one grammar in a request"}


FIELDS: dict[str, Schema] = {
    "model": text("a name of /v1/models; absent: the first one"),
    "prompt": one_of(
        "text or token ids, one prompt or several",
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {**_IDS, "minItems": 1},
        {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1},
    ),
    "messages": {**one_of("the conversation so far", MESSAGES)},
    "max_tokens": integer(1, _INT32, "most tokens of an answer; completions: 16, chat: the rest of the context"),
    "max_completion_tokens": integer(1, _INT32, "the same in a chat; wins over max_tokens"),
    "min_tokens": integer(0, _INT32, "tokens before which neither end nor stop tokens are drawn"),
    "temperature": number(0, 2, "0 is greedy; default 1"),
    "top_p": number(0, 1, "share of probability that is drawn from", minimum=None, exclusiveMinimum=0),
    "top_k": integer(-1, _INT32, "tokens that are drawn from; 0 and -1: all"),
    "min_p": number(0, 1, "least probability, relative to the most likely token's"),
    "n": integer(1, MAX_CHOICES, "choices for each prompt"),
    "best_of": integer(1, MAX_CHOICES, "candidates of which the n best are shown"),
    "stop": one_of(
        "the answer ends before one of these", _STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}
    ),
    "stop_token_ids": one_of("the answer ends with one of these", _IDS),
    "seed": integer(-(2**63), 2**64 - 1, "of the random draws; the same request with it gives the same answer"),
    "prompt_logprobs": integer(0, MAX_LOGPROBS, "most likely tokens at each place of the prompt; not with stream"),
    "echo": flag("completions: the prompt stands before the answer"),
    "presence_penalty": number(-2, 2, "taken from tokens that were generated"),
    "frequency_penalty": number(-2, 2, "the same for each time"),
    "repetition_penalty": number(0, 100, "divides; 1 is neutral", minimum=None, exclusiveMinimum=0),
    "logit_bias": {
        "type": ["object", "null"],
        "description": "token id to an addend of its logit",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "ignore_eos": flag("the model's end-of-sequence tokens do not end the answer"),
    "stream": flag("server-sent events, one per step"),
    "stream_options": {
        "type": ["object", "null"],
        "description": "only with stream: true",
        "properties": {
            "include_usage": flag("one more chunk before the end has the usage"),
            "continuous_usage_stats": flag("with include_usage: every chunk has the usage so far"),
        },
    },
    "user": text("taken and ignored"),
    "priority": integer(-(2**31), _INT32, "lower is served first"),
    "cache_salt": text("requests with different ones never share cached KV", maxLength=MAX_SALT_CHARS),
    "request_id": text("id of the request, unless a header has one", pattern="^[A-Za-z0-9._:-]{1,128}$"),
    "private_request": flag("nothing is logged of it but a failure"),
    "response_format": {
        "type": ["object", "null"],
        "description": "form of the answer: text, json_object, json_schema",
        "properties": {"type": {"type": "string"}},
        "required": ["type"],
    },
    "json_schema": grammar("the answer is JSON that fits this schema", "object", "string", "boolean"),
    "regex": grammar("the answer matches this expression", "string"),
    "choice": grammar("the answer is one of these", "array"),
    "ebnf": grammar("the answer follows this grammar", "string"),
    "structural_tag": grammar("parts of the answer follow schemas", "object", "string"),
    "guided_json": grammar("another name of json_schema", "object", "string", "boolean"),
    "guided_regex": grammar("another name of regex", "string"),
    "guided_choice": grammar("another name of choice", "array"),
    "guided_grammar": grammar("another name of ebnf", "string"),
    "structured_outputs": grammar("another form of these", "object"),
    "tools": one_of("functions that the model may call", TOOLS),
    "tool_choice": one_of(
        "whether the model calls one: none, auto, required, or the one to call",
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ),
    "parallel_tool_calls": flag("whether an answer may have more than one call; default true"),
    "can_use_pd_separation": flag("false: one server does the whole request, if there is one that can"),
    "kv_transfer_params": {"type": "null", "description": "must be absent: where KV lies is the servers' affair"},
    "top_logprobs": integer(0, MAX_LOGPROBS, "chat, with logprobs: most likely tokens at each place"),
    "add_special_tokens": flag("whether the tokenizer adds its special tokens"),
    "tokens": one_of("token ids", _IDS),
    "role": {"enum": ["prefill", "decode"], "description": "what the server does"},
    "address": {"type": "string", "description": "its gRPC address, host:port", "pattern": "^[^:/ ]+:[0-9]{1,5}$"},
}
# What a name means in one kind of body alone.
LOGPROBS_NUMBER = integer(0, MAX_LOGPROBS, "most likely tokens at each place of the answer")
LOGPROBS_FLAG = flag("log-probabilities of the answer's tokens")
