"""What the sampler is told about one row of logits, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.messages import SamplingParams, TokenLogprob
from rpc.errors import BatonError

if TYPE_CHECKING:
    from engine.grammar.matching import GrammarMatching


@dataclass(slots=True)
class SamplingRow:
    """Everything besides the logits that the next token of one request depends on."""

    params: SamplingParams
    token_index: int  # position of the token to draw among the generated tokens; counts from 0
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # generated so far; read for penalties only
    eos_token_ids: Sequence[int]
    grammar: GrammarMatching | None = None  # what masks the tokens that it does not allow

    @property
    def greedy(self) -> bool:
        return self.params.temperature <= 0.0

    @property
    def masks_stop_tokens(self) -> bool:
        return self.token_index < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether bias, masks or penalties apply to this row."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or self.masks_stop_tokens
            or bool(params.logit_bias)
            or self.grammar is not None
        )


@dataclass(slots=True)
class SampledToken:
    """The token of one row; exactly one of `token_id` and `failure` is set."""

    token_id: int | None
    logprob: TokenLogprob | None = None  # set when the row asked for log-probabilities
    top_logprobs: tuple[TokenLogprob, ...] = ()  # most likely first; ties in id order
    failure: BatonError | None = None  # why no token can be drawn from these logits
