"""Why a row of logits has no token: such a row has no likeliest token, and any other would be a guess."""

from __future__ import annotations

from engine.sampling.row import SamplingRow
from rpc.errors import BatonError, ErrorCode


def logits_not_finite() -> BatonError:
    """The model's logits hold NaN, or their largest is infinite."""
    return BatonError(
        ErrorCode.EXECUTION_EXCEPTION,
        "the model's logits are not finite; send the request again",
        metadata={"cause": "logits_not_finite"},
    )


def every_token_masked(row: SamplingRow) -> BatonError:
    """The masks of stop tokens and of the row's grammar, as far as it has them, cover every token that the model gave a
    finite logit."""
    if row.grammar is None:
        problem = "min_tokens leaves no token to draw: every token of the vocabulary is a stop token; lower it"
    elif row.masks_stop_tokens:
        problem = "the grammar and min_tokens leave no token to draw: lower min_tokens, or allow more text"
    else:
        problem = "the grammar leads to a place where it allows no token of the model; allow some text there"
        return BatonError(ErrorCode.INVALID_PARAMS, problem, param="grammar")
    return BatonError(ErrorCode.INVALID_PARAMS, problem, param="min_tokens")
