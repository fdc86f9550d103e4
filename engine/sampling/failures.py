"""Why a row of logits has no token: such a row has no likeliest token, and any other would be a guess."""

from __future__ import annotations

from rpc.errors import BatonError, ErrorCode


def logits_not_finite() -> BatonError:
    """The model's logits hold NaN, or their largest is infinite."""
    return BatonError(
        ErrorCode.EXECUTION_EXCEPTION,
        "the model's logits are not finite; send the request again",
        metadata={"cause": "logits_not_finite"},
    )


def every_token_masked(by_grammar: bool = False) -> BatonError:
    """The masks of stop tokens, and of the row's grammar if it has one, cover every token that the model gave a finite
    logit."""
    if by_grammar:
        return BatonError(
            ErrorCode.INVALID_PARAMS,
            "the grammar and min_tokens leave no token to draw: lower min_tokens, or allow more text",
            param="min_tokens",
        )
    return BatonError(
        ErrorCode.INVALID_PARAMS,
        "min_tokens leaves no token to draw: every token of the vocabulary is a stop token; lower it",
        param="min_tokens",
    )
