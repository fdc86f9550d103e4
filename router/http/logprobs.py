"""Log-probabilities in the forms of the two APIs, and of the prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.requests import Logprob, PromptLogprob, Token
from router.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes so for a token of probability 0.
LOWEST = -9999.0


def _value(logprob: Logprob | None) -> float | None:
    return None if logprob is None else max(LOWEST, logprob.logprob)


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice or chunk: `content` has an entry for each token, also for those without text."""

    def entry(token_id: int, logprob: Logprob | None) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _value(logprob),
            "bytes": list(tokenizer.piece(token_id)),
        }

    return {
        "content": [
            {
                **entry(token.token_id, token.logprob),
                "top_logprobs": [entry(top.token_id, top) for top in token.top_logprobs],
            }
            for token in tokens
        ]
    }


def completion_logprobs(
    tokens: Sequence[Token], offsets: Sequence[int], tokenizer: Tokenizer, prompt: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`logprobs` of a completion choice or chunk: four lists of one length. The chosen token is in its `top_logprobs`
    as well. `prompt` (see `echo_logprobs`) goes in front."""
    shown: dict[str, Any] = {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [_value(token.logprob) for token in tokens],
        "top_logprobs": [_top(token.token_id, token.logprob, token.top_logprobs, tokenizer) for token in tokens],
        "text_offset": list(offsets),
    }
    return shown if prompt is None else {key: prompt[key] + values for key, values in shown.items()}


def _top(
    token_id: int, logprob: Logprob | None, top: Sequence[Logprob], tokenizer: Tokenizer
) -> dict[str, float | None]:
    shown = {tokenizer.token_text(one.token_id): _value(one) for one in top}
    shown.setdefault(tokenizer.token_text(token_id), _value(logprob))
    return shown


def echo_logprobs(
    ids: Sequence[int], text: str, logprobs: Sequence[PromptLogprob], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The prompt's part of a completion's `logprobs`: its first token has none. Offsets are places in `text`."""
    by_position = {one.position: one for one in logprobs}
    shown: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    place = 0
    for position, token_id in enumerate(ids):
        one = by_position.get(position)
        shown["tokens"].append(tokenizer.token_text(token_id))
        shown["token_logprobs"].append(None if one is None else _value(one.logprob))
        shown["top_logprobs"].append(None if one is None else _top(token_id, one.logprob, one.top_logprobs, tokenizer))
        shown["text_offset"].append(min(place, len(text)))
        if token_id not in tokenizer.special_ids:
            # Continuation bytes begin no character, so a character counts once, with its first token.
            place += sum(byte & 0xC0 != 0x80 for byte in tokenizer.piece(token_id))
    return shown


def prompt_logprobs(count: int, logprobs: Sequence[PromptLogprob], tokenizer: Tokenizer) -> list[Any]:
    """`prompt_logprobs` as vLLM's clients read it: for each position an object of token ids, null where there is
    nothing to say (the first)."""
    shown: list[Any] = [None] * count
    for one in logprobs:
        entries = {
            str(top.token_id): {
                "logprob": _value(top),
                "rank": top.rank,
                "decoded_token": tokenizer.token_text(top.token_id),
            }
            for top in (one.logprob, *one.top_logprobs)
        }
        if 0 <= one.position < count:
            shown[one.position] = entries
    return shown
