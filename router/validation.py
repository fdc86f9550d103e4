"""What a client asked for, checked and made into sequences to generate. Shared by HTTP and gRPC.

A surface fills `GenerationParams` with what it was sent, of the right types; here values are checked
against their ranges (INVALID_PARAMS naming field, value and range), the prompt is encoded, and its length
is checked against the model's context.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from router.answer import AnswerRequest, Prompt
from router.grammar.admission import GrammarAdmission
from router.grammar.keys import AskedGrammar, wrong
from router.open_requests import OpenRequest
from router.requests import Api, ModelFacts, RouterRequest, Sampling
from router.text.chat_template import ChatTemplate, missing_template
from router.text.tokenizer import Tokenizer
from router.tools.formats import ToolFormat, format_of, tool_grammar
from router.tools.request import ToolRequest
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import not_offered
from rpc.input_embeddings import InputEmbedding, check_input_embeddings
from rpc.vocabulary import TOOL_MARKERS

# The header, or metadata, by which a client forbids to spread its request over two servers.
SINGLE_SERVER_KEY = "x-baton-single-server"
SESSION_KEY = "x-session-id"
# Addresses of the servers that a client wants, where the router follows such wishes.
PREFILL_PIN_KEY, DECODE_PIN_KEY = "x-baton-prefill", "x-baton-decode"
DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 128
# Sequences of one request: prompts times candidates.
MAX_SEQUENCES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 1024
MAX_SESSION_CHARS = 256
_INT32 = 2**31 - 1

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(slots=True, kw_only=True)
class GenerationParams:
    """A request as its client wrote it. None is absent; types are right, ranges are not checked.

    Exactly one of `prompt` and `messages` is set. `logprobs` and `prompt_logprobs` have the meaning of
    `Sampling`. `max_tokens_field` is the name under which the client gave `max_tokens`.
    """

    api: Api
    model: str | None = None
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    add_special_tokens: bool = True
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    prompt_logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool = False
    stream: bool = False
    priority: int | None = None
    cache_salt: str = ""
    input_embeddings: Sequence[InputEmbedding] = ()  # of a single prompt
    grammar: AskedGrammar | None = None
    tools: ToolRequest | None = None  # of messages
    # One server is to do the whole request, if there is one that can.
    single_server: bool = False
    session_id: str = ""
    pin_prefill: str = ""
    pin_decode: str = ""
    traceparent: str = ""
    tracestate: str = ""


def shown(value: object) -> str:
    """`value` in an error message, short."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 64 else text[:61] + "..."


def out_of_range(name: str, value: object, allowed: str) -> BatonError:
    return BatonError(ErrorCode.INVALID_PARAMS, f"{name} must be {allowed}, got {shown(value)}", param=name)


def _in_range(
    name: str,
    value: float | None,
    low: float,
    high: float,
    *,
    above: bool = False,
    param: str | None = None,
) -> None:
    """Checks `low` <= value <= `high`, or `low` < value with `above`; NaN is outside of every range."""
    if value is None:
        return
    if not (low <= value <= high) or (above and value == low):
        error = out_of_range(name, value, f"in {'(' if above else '['}{low:g}, {high:g}]")
        error.param = param or name
        raise error


def check_model(name: str | None, model: ModelFacts) -> str:
    """The served name that `name` means: itself, or the first one when the client named none."""
    if name is None and model.served_names:
        return model.served_names[0]
    if name is None or name not in model.served_names:
        served = ", ".join(model.served_names) or "none yet"
        raise BatonError(
            ErrorCode.MODEL_NOT_FOUND, f"the model {shown(name)} is not served here; served: {served}", param="model"
        )
    return name


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """OUT_OF_VOCAB_RANGE naming the first id that the model does not have."""
    if not ids or (min(ids) >= 0 and (not vocab_size or max(ids) < vocab_size)):
        return
    bad = next(i for i in ids if i < 0 or i >= vocab_size)
    raise BatonError(
        ErrorCode.OUT_OF_VOCAB_RANGE,
        f"{name} has the token id {shown(bad)}; ids must be in [0, {vocab_size - 1}]",
        param=name,
    )


def check_ranges(params: GenerationParams, vocab_size: int) -> None:
    """Every value but the prompt's against its range."""
    _in_range(params.max_tokens_field, params.max_tokens, 1, _INT32)
    _in_range("min_tokens", params.min_tokens, 0, _INT32)
    _in_range("temperature", params.temperature, 0, 2)
    _in_range("top_p", params.top_p, 0, 1, above=True)
    _in_range("top_k", params.top_k, -1, _INT32)
    _in_range("min_p", params.min_p, 0, 1)
    _in_range("repetition_penalty", params.repetition_penalty, 0, 100, above=True)
    _in_range("presence_penalty", params.presence_penalty, -2, 2)
    _in_range("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise out_of_range("seed", params.seed, "in [-2^63, 2^64 - 1]")
    _in_range(params.logprobs_field, params.logprobs, 0, MAX_LOGPROBS)
    _in_range("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    _in_range("n", params.n, 1, MAX_CHOICES)
    _in_range("best_of", params.best_of, params.n or 1, MAX_CHOICES)
    if params.priority is not None and not -(2**31) <= params.priority <= _INT32:
        raise out_of_range("priority", params.priority, "in [-2^31, 2^31 - 1]")
    if params.stream and params.best_of is not None and params.best_of > (params.n or 1):
        raise out_of_range("best_of", params.best_of, f"at most n ({params.n or 1}) with stream")
    if params.stream and params.prompt_logprobs is not None and params.api != "grpc":
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"prompt_logprobs ({params.prompt_logprobs}) is not available with stream: true",
            param="prompt_logprobs",
        )
    if len(params.stop) > MAX_STOP_STRINGS:
        raise out_of_range("stop", len(params.stop), f"at most {MAX_STOP_STRINGS} strings")
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise out_of_range("stop", stop, f"made of strings of 1 to {MAX_STOP_CHARS} characters")
    if len(params.cache_salt) > MAX_SALT_CHARS:
        raise out_of_range("cache_salt", len(params.cache_salt), f"at most {MAX_SALT_CHARS} characters")
    if len(params.session_id) > MAX_SESSION_CHARS:
        raise out_of_range("X-Session-Id", len(params.session_id), f"at most {MAX_SESSION_CHARS} characters")
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", list(params.logit_bias), vocab_size)
    for token_id, bias in params.logit_bias.items():
        _in_range(f"logit_bias[{token_id}]", bias, -100, 100, param="logit_bias")
    if params.messages is not None:
        _check_messages(params.messages)


def _check_room(min_tokens: int, grammar: AskedGrammar, most_bytes: int | None) -> None:
    """Refuses what no text of a grammar is long enough for; a token has one byte at least. Which text an answer takes,
    only the engine sees."""
    if most_bytes is not None and min_tokens > most_bytes:
        allowed = f"at most {most_bytes} with {grammar.field}, whose texts have no more"
        raise out_of_range("min_tokens", min_tokens, allowed)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise out_of_range("messages", [], "a list of at least one message")
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            error = out_of_range(f"messages[{index}].role", message.get("role"), f"one of {', '.join(ROLES)}")
            error.param = "messages"
            raise error


class RequestValidator:
    """Makes an `AnswerRequest` of a `GenerationParams`: first `check` (stage validate), then `prepare`
    (tokenize)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model: Callable[[], ModelFacts],
        *,
        grammars: GrammarAdmission | None = None,
        tool_format: ToolFormat | None = None,
        log_content: bool = False,
        seed: int | None = None,
    ) -> None:
        """`grammars`: None refuses requests that have one. `seed`: of the seeds drawn for requests that bring none;
        None draws from the system. `tool_format`: None is the chat template's."""
        self.log_content = log_content
        self._grammars = grammars
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self.tokenizer = tokenizer
        self.template = template
        self.tool_format = tool_format or format_of(template.text if template is not None else "")
        self._markers = frozenset(
            token_id for token_id in tokenizer.special_ids if tokenizer.id_to_token(token_id) in TOOL_MARKERS
        )
        self.model = model

    @property
    def vocab_size(self) -> int:
        """Ids below it exist: the servers' word, else the tokenizer's."""
        return self.model().vocab_size or self.tokenizer.vocab_size

    def check(self, params: GenerationParams) -> str:
        """Everything that needs no tokenizer; returns the served name of the model."""
        name = check_model(params.model, self.model())
        check_ranges(params, self.vocab_size)
        if params.messages is not None and self.template is None:
            raise missing_template(name)
        if params.tools is not None:
            self._hold_to_tools(params, params.tools)
        if params.grammar is not None and params.grammar.ends and (params.min_tokens or 0) > 1:
            # A text of one token may be complete, and nothing else may follow it.
            allowed = f"at most 1 with {params.grammar.field}, whose texts end by themselves"
            raise out_of_range("min_tokens", params.min_tokens, allowed)
        return name

    def _hold_to_tools(self, params: GenerationParams, tools: ToolRequest) -> None:
        """The grammar of calls that must be made, beside which there can be no other."""
        if params.grammar is None:
            params.grammar = tool_grammar(tools, self.tool_format)
        elif tools.choice != "auto":
            raise wrong(
                "tool_choice", f"tool_choice and {params.grammar.field} each ask for a grammar; give exactly one"
            )

    async def prepare(self, params: GenerationParams, owner: OpenRequest) -> AnswerRequest:
        """The sequences to generate. LONG_PROMPT_ERROR, with both numbers, when prompt and answer do not
        fit; GENERATE_TIMEOUT when the deadline passes while a grammar waits to be checked."""
        if params.grammar is not None:
            if self._grammars is None:
                raise not_offered(params.grammar.field)
            try:
                async with asyncio.timeout(owner.deadline.timeout()):
                    most_bytes = await self._grammars.admit(params.grammar.spec, params.grammar.field)
            except TimeoutError:
                raise BatonError(
                    ErrorCode.GENERATE_TIMEOUT,
                    "the request's deadline passed while its grammar was checked; allow it more time",
                ) from None
            _check_room(params.min_tokens or 0, params.grammar, most_bytes)
        facts = self.model()
        name = check_model(params.model, facts)
        prompts = [self._fit(prompt, params, facts.max_model_len) for prompt in await self._prompts(params, facts)]
        for prompt in prompts:
            # How long a row is, the servers know.
            check_input_embeddings(params.input_embeddings, len(prompt.token_ids))
        n = params.n or 1
        candidates = max(n, params.best_of or n)
        if len(prompts) * candidates > MAX_SEQUENCES:
            raise out_of_range(
                "prompt", f"{len(prompts)} prompts x {candidates}", f"at most {MAX_SEQUENCES} sequences in all"
            )
        sampling = self._sampling(params, candidates > n)
        owner.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return AnswerRequest(
            template=RouterRequest(
                request_id=owner.request_id,
                model=name,
                prompt_token_ids=[],
                sampling=sampling,
                api=params.api,
                stream=params.stream,
                cache_salt=params.cache_salt,
                priority=params.priority or 0,
                input_embeddings=tuple(params.input_embeddings),
                grammar=None if params.grammar is None else params.grammar.spec,
                session_id=params.session_id,
                pin_prefill=params.pin_prefill,
                pin_decode=params.pin_decode,
                arrival=owner.arrival,
                deadline=owner.deadline,
                single_server="beam_or_n" if candidates > 1 else "requested" if params.single_server else None,
                owner=owner,
                traceparent=params.traceparent,
                tracestate=params.tracestate,
            ),
            prompts=tuple(prompts),
            n=n,
            candidates=candidates,
            stop=tuple(params.stop),
            echo=params.echo,
            eos_token_ids=facts.eos_token_ids,
            seed=None if params.seed is None else params.seed % 2**64,
            drawn_seed=self._seeds.getrandbits(64),
            log_content=self.log_content,
            tool_format=None if params.tools is None else self.tool_format,
            shown_special_ids=self._markers if params.tools is not None or params.grammar is not None else frozenset(),
        )

    async def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int = 0, param: str = "prompt"
    ) -> list[int]:
        try:
            return await self.tokenizer.encode_off_loop(
                text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
            )
        except BatonError as error:
            error.param = param
            raise

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt text of a chat; special tokens are in it."""
        if self.template is None:
            raise missing_template(check_model(None, self.model()))
        return self.template.render(messages, tools=tools)

    async def _prompts(self, params: GenerationParams, facts: ModelFacts) -> list[Prompt]:
        if params.messages is not None:
            text = self.render(params.messages, () if params.tools is None else params.tools.offered)
            ids = await self.encode(text, add_special_tokens=False, max_tokens=facts.max_model_len, param="messages")
            if not ids:
                raise out_of_range("messages", "no text", "messages that give at least one token")
            return [Prompt(ids)]
        prompts: list[Prompt] = []
        for part in split_prompts(params.prompt):
            if isinstance(part, str):
                ids = await self.encode(
                    part, add_special_tokens=params.add_special_tokens, max_tokens=facts.max_model_len
                )
                if not ids:
                    raise out_of_range("prompt", part, "text that gives at least one token")
                prompts.append(Prompt(ids, text=part if params.echo else None))
            else:
                check_token_ids("prompt", part, self.vocab_size)
                decoded = self.tokenizer.decode(part) if params.echo else None
                prompts.append(Prompt(list(part), text=decoded))
        return prompts

    def _fit(self, prompt: Prompt, params: GenerationParams, context: int) -> Prompt:
        """Sets what the answer may have at the most."""
        size = len(prompt.token_ids)
        is_chat = params.messages is not None
        param = "messages" if is_chat else "prompt"
        if context and size + 1 > context:
            raise BatonError(
                ErrorCode.LONG_PROMPT_ERROR,
                f"the model's context is {context} tokens, but the prompt has {size} and the answer needs at "
                "least 1; shorten the prompt",
                param=param,
            )
        asked = params.max_tokens
        if asked is not None:
            if context and size + asked > context:
                raise BatonError(
                    ErrorCode.LONG_PROMPT_ERROR,
                    f"the model's context is {context} tokens, but {size + asked} were asked for ({size} in the "
                    f"prompt, {asked} for the answer); shorten the prompt or lower {params.max_tokens_field} to "
                    f"{context - size}",
                    param=params.max_tokens_field,
                )
            limit = asked
        elif not context:
            limit = DEFAULT_MAX_TOKENS
        else:
            limit = context - size if is_chat else min(DEFAULT_MAX_TOKENS, context - size)
        if params.min_tokens is not None and params.min_tokens > limit:
            allowed = f"at most {params.max_tokens_field} ({limit})"
            raise out_of_range("min_tokens", params.min_tokens, allowed)
        return replace(prompt, max_tokens=limit)

    def _sampling(self, params: GenerationParams, ranked: bool) -> Sampling:
        logprobs = params.logprobs
        prompt_logprobs = params.prompt_logprobs
        if params.echo and logprobs is not None and prompt_logprobs is None:
            prompt_logprobs = logprobs
        if ranked and logprobs is None:
            logprobs = 0  # candidates are ranked by it
        return Sampling(
            max_tokens=1,  # each prompt has its own
            temperature=_or(params.temperature, 1.0),
            top_k=max(0, params.top_k or 0),
            top_p=_or(params.top_p, 1.0),
            min_p=_or(params.min_p, 0.0),
            repetition_penalty=_or(params.repetition_penalty, 1.0),
            presence_penalty=_or(params.presence_penalty, 0.0),
            frequency_penalty=_or(params.frequency_penalty, 0.0),
            logit_bias=dict(params.logit_bias),
            min_tokens=params.min_tokens or 0,
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def split_prompts(
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | None,
) -> list[str | Sequence[int]]:
    """The prompts of a request, one for each sequence of choices; none may be empty."""
    if prompt is None:
        raise BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "prompt is required", param="prompt")
    if isinstance(prompt, str):
        parts: list[str | Sequence[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        parts = [prompt]  # type: ignore[list-item]
    else:
        parts = list(prompt)  # type: ignore[arg-type]
    if not parts:
        raise out_of_range("prompt", [], "text or token ids, at least one")
    for part in parts:
        if not part:
            raise out_of_range("prompt", part, "text or token ids, at least one")
    return parts
