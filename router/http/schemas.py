"""Bodies of requests. Types are checked here (ERROR_GENERATE_CONFIG_FORMAT), values in router/validation.py.

`null` means absent. Fields that are not declared are ignored and logged once per name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from router.grammar.keys import AskedGrammar, read_grammar, unknown_keys
from router.http.body import json_type
from router.tools.request import check_tool_message, read_tools
from router.validation import GenerationParams, out_of_range
from rpc.errors import BatonError, ErrorCode

_log = logging.getLogger(__name__)
_unknown_seen: set[str] = set()
# A client that sends ever new names must not fill the log or this set.
_MAX_UNKNOWN = 256

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


class WrongType(ValueError):
    """`expected` is what the field must be; `inside` the place within it."""

    def __init__(self, expected: str, value: object, inside: str = "") -> None:
        self.expected = expected
        self.value = value
        self.inside = inside
        super().__init__(expected)


def _strings(value: Any) -> Any:
    """A string, or a list of strings, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise WrongType("a string or a list of strings", value)
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise WrongType("a string", item, f"[{index}]")
    return value


def _ids(value: Any, inside: str = "") -> Any:
    """A list of integers; true and false are none."""
    if not isinstance(value, list):
        raise WrongType("a list of integers", value, inside)
    # One pass in C for the good case: prompts can have 100,000 ids.
    if set(map(type, value)) <= {int}:
        return value
    index = next(i for i, item in enumerate(value) if type(item) is not int)
    raise WrongType("an integer", value[index], f"{inside}[{index}]")


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise WrongType("a string, a list of strings, a list of token ids or a list of such lists", value)
    if value and isinstance(value[0], str):
        return _strings(value)
    if value and isinstance(value[0], list):
        return [_ids(item, f"[{index}]") for index, item in enumerate(value)]
    return _ids(value)


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise WrongType("an object of token ids and numbers", value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise WrongType("an object whose keys are token ids", key)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise WrongType("a number", bias, f"[{key}]")
        biases[int(key)] = bias
    return biases


def _messages(value: Any) -> Any:
    """Messages with their content as text: a list of text parts is joined by line breaks."""
    if not isinstance(value, list):
        raise WrongType("a list of messages", value)
    messages = []
    for index, message in enumerate(value):
        place = f"[{index}]"
        if not isinstance(message, dict):
            raise WrongType("an object with role and content", message, place)
        if not isinstance(message.get("role"), str):
            raise WrongType("a string", message.get("role"), f"{place}.role")
        messages.append({**check_tool_message(message, f"messages{place}"), "content": _content(message, place)})
    return messages


def _content(message: dict[str, Any], place: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message.get("tool_calls") or message.get("function_call"):
            return ""
        raise WrongType("a string or a list of parts", content, f"{place}.content")
    if not isinstance(content, list):
        raise WrongType("a string or a list of parts", content, f"{place}.content")
    texts = []
    for index, part in enumerate(content):
        inside = f"{place}.content[{index}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise WrongType("an object with type and text", part, inside)
        if part["type"] != "text":
            error = out_of_range(f"messages{inside}.type", part["type"], "text; other parts are not available")
            error.param = "messages"
            raise error
        if not isinstance(part.get("text"), str):
            raise WrongType("a string", part.get("text"), f"{inside}.text")
        texts.append(part["text"])
    return "\n".join(texts)


Int = Annotated[int | None, Field(strict=True)]
Float = Annotated[float | None, Field(strict=True)]
Bool = Annotated[bool | None, Field(strict=True)]
Text = Annotated[str | None, Field(strict=True)]
Strings = Annotated[list[str] | None, BeforeValidator(lambda v: None if v is None else _strings(v))]
# Checked by the validator in front, so that a long list costs one pass and one error.
Ids = Annotated[Any, BeforeValidator(lambda v: None if v is None else _ids(v))]
PromptField = Annotated[Any, BeforeValidator(lambda v: None if v is None else _prompt(v))]
LogitBias = Annotated[Any, BeforeValidator(lambda v: None if v is None else _logit_bias(v))]
Messages = Annotated[Any, BeforeValidator(lambda v: None if v is None else _messages(v))]


class Body(BaseModel):
    """A JSON object; `parse` is the way in."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Self:
        """ERROR_GENERATE_CONFIG_FORMAT naming the first field of a wrong type and what it must be."""
        try:
            body = cls.model_validate(content)
        except ValidationError as error:
            raise _wrong_type(error) from None
        for name in body.unknown_fields():
            note_unknown(name)
        return body

    def unknown_fields(self) -> Iterable[str]:
        """What the client sent that means nothing here."""
        return self.model_extra or ()


def note_unknown(name: str) -> None:
    """Logs a field that is ignored, once per name."""
    if name not in _unknown_seen and len(_unknown_seen) < _MAX_UNKNOWN:
        _unknown_seen.add(name)
        _log.warning("ignoring the unknown request field %s", ascii(name[:64]))


def _wrong_type(error: ValidationError) -> BatonError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, WrongType):
        expected, value, inside = cause.expected, cause.value, cause.inside
    else:
        expected, value, inside = _EXPECTED.get(first["type"], "of another type"), first["input"], ""
    missing = first["type"] == "missing"
    message = f"{place} is required" if missing else f"{place}{inside} must be {expected}, not {json_type(value)}"
    return BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, message, param=str(first["loc"][0]))


def required(name: str) -> BatonError:
    return BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, f"{name} is required", param=name)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: Bool = None
    continuous_usage_stats: Bool = None


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: Text = None
    max_tokens: Int = None
    temperature: Float = None
    top_p: Float = None
    top_k: Int = None
    min_p: Float = None
    n: Int = None
    best_of: Int = None
    stop: Strings = None
    stop_token_ids: Ids = None
    seed: Int = None
    prompt_logprobs: Int = None
    echo: Bool = None
    presence_penalty: Float = None
    frequency_penalty: Float = None
    repetition_penalty: Float = None
    logit_bias: LogitBias = None
    ignore_eos: Bool = None
    min_tokens: Int = None
    stream: Bool = None
    stream_options: StreamOptions | None = None
    user: Text = None
    priority: Int = None
    cache_salt: Text = None
    request_id: Text = None
    private_request: Bool = None
    response_format: Any = None
    # Grammars, and other names for them; see router/grammar/keys.py.
    json_schema: Any = None
    regex: Any = None
    choice: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    kv_transfer_params: Any = None
    can_use_pd_separation: Bool = None

    def unknown_fields(self) -> Iterable[str]:
        yield from super().unknown_fields()
        if self.stream_options is not None:
            yield from (f"stream_options.{name}" for name in self.stream_options.model_extra or ())
        if self.structured_outputs is not None or self.response_format is not None:
            yield from unknown_keys(self.__dict__)

    def _params(self, api: Literal["chat", "completions"]) -> GenerationParams:
        if self.kv_transfer_params is not None:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                "kv_transfer_params must be null: where KV lies is agreed between the servers only",
                param="kv_transfer_params",
            )
        if self.stream_options is not None and not self.stream:
            raise BatonError(
                ErrorCode.INVALID_PARAMS, "stream_options must be absent without stream: true", param="stream_options"
            )
        grammar = read_grammar(self.__dict__)
        if grammar is not None:
            self._check_no_beams(grammar)
        return GenerationParams(
            api=api,
            model=self.model,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            prompt_logprobs=self.prompt_logprobs,
            n=self.n,
            best_of=self.best_of,
            stream=bool(self.stream),
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            single_server=self.can_use_pd_separation is False,
            grammar=grammar,
        )

    def _check_no_beams(self, grammar: AskedGrammar) -> None:
        """Beam search is not offered, and who asks for it is told of nothing; a grammar would be another matter."""
        extra = self.model_extra or {}
        beams = extra.get("num_beams")
        if extra.get("use_beam_search") is True or (isinstance(beams, int) and beams > 1):
            raise BatonError(
                ErrorCode.INVALID_PARAMS, f"{grammar.field} must be absent with beam search", param=grammar.field
            )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )


class CompletionBody(GenerationBody):
    prompt: PromptField = None
    logprobs: Int = None

    def params(self) -> GenerationParams:
        if self.prompt is None:
            raise required("prompt")
        params = self._params("completions")
        params.prompt = self.prompt
        params.logprobs = self.logprobs
        params.echo = bool(self.echo)
        return params


class ChatBody(GenerationBody):
    messages: Messages = None
    max_completion_tokens: Int = None
    logprobs: Bool = None
    top_logprobs: Int = None
    # Checked in router/tools/request.py.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None

    def params(self) -> GenerationParams:
        if self.messages is None:
            raise required("messages")
        params = self._params("chat")
        params.messages = self.messages
        params.tools = read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.max_completion_tokens is not None:
            params.max_tokens, params.max_tokens_field = self.max_completion_tokens, "max_completion_tokens"
        if self.top_logprobs is not None and not self.logprobs:
            raise BatonError(
                ErrorCode.INVALID_PARAMS, "top_logprobs must be absent without logprobs: true", param="top_logprobs"
            )
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
            params.logprobs_field = "top_logprobs"
        if self.echo:
            raise BatonError(ErrorCode.INVALID_PARAMS, "echo must be false in a chat", param="echo")
        if (self.best_of or 1) > (self.n or 1):
            raise out_of_range("best_of", self.best_of, f"at most n ({self.n or 1}) in a chat")
        return params


class TokenizeBody(Body):
    model: Text = None
    prompt: Text = None
    messages: Messages = None
    add_special_tokens: Bool = None


class DetokenizeBody(Body):
    model: Text = None
    tokens: Ids = None


class AbortBody(Body):
    request_id: Text = None


class WorkerBody(Body):
    role: Text = None
    address: Text = None
