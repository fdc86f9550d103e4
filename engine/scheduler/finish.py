"""When a request is done: a pure function of its parameters and its last token."""

from __future__ import annotations

from collections.abc import Collection

from engine.messages import FinishReason, SamplingParams


def finish_of(
    params: SamplingParams,
    token_id: int,
    generated: int,
    length: int,
    eos_token_ids: Collection[int],
    max_model_len: int,
) -> FinishReason | None:
    """Why the request ends with `token_id`, the last of `generated` tokens and of `length` in all; None: it goes on.

    A stop token counts from the `min_tokens`-th generated token on, and before a length that is reached with it.
    """
    if generated > params.min_tokens and (
        token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)
    ):
        return FinishReason.STOP
    if generated >= params.max_tokens or length >= max_model_len:
        return FinishReason.LENGTH
    return None
