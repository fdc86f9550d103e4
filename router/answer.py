"""Text on top of tokens: one client request, all of its choices, as one stream of text events.

The orchestrator yields tokens of one sequence. Here they become text (see router/text/), stop strings are
found, several sequences are merged, and the end of each is stated once. Used by the HTTP and the gRPC
surface alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from router.requests import FinishEvent, FinishReason, PrefillSummary, RouterRequest, Serving, Token
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer
from router.tools.formats import ToolFormat
from rpc.errors import BatonError, ErrorCode

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `text` is set when it is to be echoed; `max_tokens` is the most that an answer may have."""

    token_ids: list[int]
    max_tokens: int = 1
    text: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A client request after validation: `candidates` sequences for each prompt, of which `n` are shown.

    `template` is what all sequences share. `seed` is the client's, `drawn_seed` the one to use without it. With
    `log_content` prompts and answers are put into the owner's `content`, for the access log.
    """

    template: RouterRequest
    prompts: tuple[Prompt, ...]
    n: int = 1
    candidates: int = 1
    stop: tuple[str, ...] = ()
    echo: bool = False
    eos_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    drawn_seed: int = 0
    log_content: bool = False
    tool_format: ToolFormat | None = None  # how calls are written, where the model may make any
    shown_special_ids: frozenset[int] = frozenset()  # tokens that add text although they are special

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.candidates

    def prompt_of(self, choice: int) -> Prompt:
        """The prompt of a sequence: `choice` counts over prompts × candidates."""
        return self.prompts[choice // self.candidates]

    def router_request(self, choice: int) -> RouterRequest:
        """What the orchestrator gets for a sequence.

        The first candidate of every prompt keeps the client's seed, so that it answers as it would alone.
        """
        prompt_index, candidate = divmod(choice, self.candidates)
        prompt = self.prompts[prompt_index]
        base, step = (self.drawn_seed, choice) if self.seed is None else (self.seed, candidate)
        seed = derive_seed(base, step)
        sampling = replace(self.template.sampling, max_tokens=prompt.max_tokens, seed=seed)
        return replace(self.template, prompt_token_ids=prompt.token_ids, sampling=sampling)


def derive_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th sequence: `seed` itself for 0, else step `index` of SplitMix64 (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014) begun at `seed`."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(slots=True)
class TextEvent:
    """News of one choice. `text` is certain: never half a character, never the start of a stop string that
    may still come; `tokens` can be ahead of it. `offsets` has the place of each token in the choice's text,
    in characters.

    The last event of a choice has `finish_reason`. `stop_reason` is the stop string, or the id of the stop
    token that the request named. `finish` is None when a stop string ended the choice. `prefill` comes with
    the first token.
    """

    choice: int
    text: str
    tokens: list[Token]
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prefill: PrefillSummary | None = None
    finish: FinishEvent | None = None


class ChoiceText:
    """Tokens of one choice to its text. Pure: no waiting, no clock."""

    def __init__(self, tokenizer: Tokenizer, request: AnswerRequest, choice: int) -> None:
        prompt = request.prompt_of(choice)
        sampling = request.template.sampling
        self._detokenizer = Detokenizer(tokenizer, shown=request.shown_special_ids)
        self._detokenizer.prime(prompt.token_ids)
        self._stops = StopStrings(request.stop) if request.stop else None
        self._min_tokens = sampling.min_tokens
        self._max_tokens = prompt.max_tokens
        self._named_stops = frozenset(sampling.stop_token_ids)
        eos = () if sampling.ignore_eos else request.eos_token_ids
        self._ending = self._named_stops.union(eos)
        self._prefix = (prompt.text or "") if request.echo else ""
        # Characters of detokenized text so far, the echo included.
        self._place = len(self._prefix)

    def push(self, choice: int, tokens: Sequence[Token]) -> TextEvent:
        """The event of these tokens; with `finish_reason` stop when a stop string is complete, in which
        case the tokens behind it are left out."""
        text, self._prefix = self._prefix, ""
        offsets: list[int] = []
        for count, token in enumerate(tokens, 1):
            offsets.append(self._place)
            # A token that ends the sequence is no part of its text.
            piece = "" if token.token_id in self._ending else self._detokenizer.feed(token.token_id)
            self._place += len(piece)
            if self._stops is None:
                text += piece
            elif token.index < self._min_tokens:
                text += self._stops.pass_through(piece)
            else:
                text += self._stops.feed(piece)
                if self._stops.matched is not None:
                    kept = list(tokens[:count])
                    return TextEvent(choice, text, kept, offsets, "stop", self._stops.matched)
        return TextEvent(choice, text, list(tokens), offsets)

    def ends_with(self, token: Token) -> bool:
        """Nothing can come after this token but the end."""
        return token.token_id in self._ending or token.index + 1 >= self._max_tokens

    def end(self, event: TextEvent, finish: FinishEvent) -> None:
        """Makes `event` the last one: what was held back is in it, cut before a stop string that is
        complete."""
        event.text, self._prefix = self._prefix + event.text, ""
        event.finish = finish
        event.finish_reason = finish.reason
        if finish.stop_token_id in self._named_stops:
            event.stop_reason = finish.stop_token_id
        if self._stops is not None:
            event.text += self._stops.finish()
            if self._stops.matched is not None and finish.reason != "abort":
                event.finish_reason, event.stop_reason = "stop", self._stops.matched


def _merged(earlier: TextEvent | None, later: TextEvent) -> TextEvent:
    if earlier is None:
        return later
    later.text = earlier.text + later.text
    later.tokens = earlier.tokens + later.tokens
    later.offsets = earlier.offsets + later.offsets
    later.prefill = earlier.prefill or later.prefill
    return later


async def _one(
    request: AnswerRequest, choice: int, serving: Serving, tokenizer: Tokenizer
) -> AsyncGenerator[TextEvent, None]:
    """Events of one choice. Closing it, cancelling its reader and a stop string close the orchestrator's
    stream."""
    state = ChoiceText(tokenizer, request, choice)
    # The last tokens wait for the end that must follow, so that both go out together.
    waiting: TextEvent | None = None
    async with aclosing(serving.generate(request.router_request(choice))) as events:
        try:
            async for event in events:
                if isinstance(event, FinishEvent):
                    last = waiting or TextEvent(choice, "", [])
                    state.end(last, event)
                    yield last
                    return
                news = _merged(waiting, state.push(choice, event.tokens))
                news.prefill = news.prefill or event.prefill
                waiting = None
                if news.finish_reason is not None:
                    await events.aclose()
                    yield news
                    return
                if news.tokens and state.ends_with(news.tokens[-1]):
                    waiting = news
                else:
                    yield news
        except BatonError:
            if waiting is not None:
                yield waiting
            raise
    raise BatonError(
        ErrorCode.REMOTE_GENERATE_FAILED, "the generation ended without saying how", metadata={"choice": str(choice)}
    )


def answer(request: AnswerRequest, serving: Serving, tokenizer: Tokenizer) -> AsyncGenerator[TextEvent, None]:
    """The events of all choices, each choice's in order. Raises BatonError when one of them fails; the
    others are ended then. Closing it, or cancelling its reader, ends all legs. Not to be left without
    closing (`aclosing`).

    The first candidate of a prompt begins alone; the others follow with its first token and find its prompt
    in the prefix cache. Choices whose reader is slow wait: the queue between them holds two events a
    choice.
    """
    events = _all(request, serving, tokenizer)
    return _logged(events, request, tokenizer) if request.log_content else events


async def _logged(
    events: AsyncGenerator[TextEvent, None], request: AnswerRequest, tokenizer: Tokenizer
) -> AsyncGenerator[TextEvent, None]:
    """The same events; what was asked and answered goes to the request's owner, whatever ends it."""
    outputs = ["" for _ in range(request.sequences)]
    owner = request.template.owner
    if owner is not None:
        prompts = [tokenizer.decode(prompt.token_ids, skip_special_tokens=False) for prompt in request.prompts]
        owner.content = {"prompt": prompts, "output": outputs}
    async with aclosing(events):
        async for event in events:
            outputs[event.choice] += event.text
            yield event


async def _all(request: AnswerRequest, serving: Serving, tokenizer: Tokenizer) -> AsyncGenerator[TextEvent, None]:
    if request.sequences == 1:
        async with aclosing(_one(request, 0, serving, tokenizer)) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[TextEvent | Exception] = asyncio.Queue(2 * request.sequences)
    begun = [asyncio.Event() for _ in request.prompts]
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        pumps = [
            group.create_task(_pump(request, choice, serving, tokenizer, queue, begun))
            for choice in range(request.sequences)
        ]
        left = len(pumps)
        try:
            while left and failure is None:
                item = await queue.get()
                if isinstance(item, Exception):
                    failure = item
                    break
                left -= item.finish_reason is not None
                yield item
        except GeneratorExit:  # would come out of the group wrapped; leaving quietly closes as well
            return
        finally:
            for pump in pumps:
                pump.cancel()
    if failure is not None:
        raise failure


async def _pump(
    request: AnswerRequest,
    choice: int,
    serving: Serving,
    tokenizer: Tokenizer,
    queue: asyncio.Queue[TextEvent | Exception],
    begun: Sequence[asyncio.Event],
) -> None:
    """Moves one choice's events into the queue. Raises nothing: a failure is the last thing that it puts
    there."""
    prompt, candidate = divmod(choice, request.candidates)
    try:
        if candidate:
            # Ends with the first candidate at the latest, which has the request's deadline.
            await begun[prompt].wait()
        async with aclosing(_one(request, choice, serving, tokenizer)) as events:
            async for event in events:
                if not candidate:
                    begun[prompt].set()
                await queue.put(event)
    except Exception as error:
        await queue.put(error)
    finally:
        if not candidate:
            begun[prompt].set()


@dataclass(slots=True)
class Usage:
    """Tokens of a request. `cached_tokens` is None until a server said how much of the prompt it had."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None

    @classmethod
    def of(cls, request: AnswerRequest) -> Usage:
        return cls(sum(len(prompt.token_ids) for prompt in request.prompts))

    def add(self, event: TextEvent, request: AnswerRequest) -> None:
        """Counts an event. A prompt's cached tokens are its first candidate's: the others find the prompt
        cached because of the first one."""
        self.completion_tokens += len(event.tokens)
        if event.prefill is not None and event.choice % request.candidates == 0:
            self.cached_tokens = (self.cached_tokens or 0) + event.prefill.cached_tokens


@dataclass(slots=True)
class Choice:
    """A whole choice."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prefill: PrefillSummary | None = None
    finish: FinishEvent | None = None

    def mean_logprob(self) -> float:
        """Of the generated tokens; minus infinity for none."""
        values = [token.logprob.logprob for token in self.tokens if token.logprob is not None]
        return sum(values) / len(values) if values else float("-inf")


class Collected:
    """Events gathered into whole choices, for answers that are not streamed."""

    def __init__(self, request: AnswerRequest) -> None:
        self._request = request
        self._parts: list[list[str]] = [[] for _ in range(request.sequences)]
        self._choices = [Choice(index) for index in range(request.sequences)]
        self.usage = Usage.of(request)

    def add(self, event: TextEvent) -> None:
        choice = self._choices[event.choice]
        self._parts[event.choice].append(event.text)
        choice.tokens += event.tokens
        choice.offsets += event.offsets
        choice.prefill = event.prefill or choice.prefill
        if event.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
            choice.finish = event.finish
        self.usage.add(event, self._request)

    def choices(self) -> list[Choice]:
        """The choices to show: of each prompt the `n` with the highest mean log-probability, best first;
        all of them, in order, when none is left out."""
        for choice, parts in zip(self._choices, self._parts, strict=True):
            choice.text = "".join(parts)
        if self._request.candidates == self._request.n:
            return self._choices
        best: list[Choice] = []
        for group in _groups(self._choices, self._request.candidates):
            # Sorting is stable: of equal ones the first stays first.
            best += sorted(group, key=Choice.mean_logprob, reverse=True)[: self._request.n]
        for index, choice in enumerate(best):
            choice.index = index
        return best


def _groups(choices: Sequence[Choice], size: int) -> Iterable[Sequence[Choice]]:
    return (choices[i : i + size] for i in range(0, len(choices), size))
