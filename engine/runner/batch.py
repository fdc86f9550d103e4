"""What one engine step computes, and what came out of it: plain data, importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import PromptLogprob, TokenLogprob
from rpc.errors import BatonError
from rpc.graph_status import PrefillGraphStatus

if TYPE_CHECKING:
    from engine.input_embeddings import EmbeddingRows
    from engine.parallel.agent_messages import Shares
    from engine.sampling.row import SamplingRow


@dataclass(slots=True)
class BatchRow:
    """One request's share of a step."""

    request_key: str
    token_ids: list[int]  # tokens to compute: one for decode, a chunk for prefill
    start: int  # position of token_ids[0]; the KV of [0, start) is in the pool
    block_table: list[int]  # physical block ids, covering start + len(token_ids) tokens
    sample: bool  # a token is sampled from the logits of the last one
    sampling: SamplingRow | None = None  # set if and only if `sample`
    prompt_logprobs_from: int = -1  # >= 0: log-probabilities of the prompt from that position on are wanted
    prompt_next_ids: Sequence[int] = ()  # prompt token after each computed position; may lack the last one
    num_prompt_logprobs: int = 0  # most likely alternatives to report with each
    embeddings: Sequence[EmbeddingRows] = ()  # in place of those of token_ids; places count from the first of these
    multimodal: bool = False  # brings features that lie at no fixed address
    position_ids: Sequence[int] = ()  # axis by axis, of each token; for models that do not count positions themselves


@dataclass(slots=True)
class StepBatch:
    rows: list[BatchRow]  # decode rows first, then prefill rows; results keep the order
    kind: str = ""  # decode, prefill or mixed
    shares: Shares = field(default_factory=dict)  # what the step completes of staged prompts


@dataclass(slots=True)
class RowResult:
    token_id: int | None = None  # the sampled token
    failure: BatonError | None = None  # what this row computed cannot be used; the others are not concerned
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefillReplay:
    """One replay of a prefill graph."""

    bucket: int  # tokens that the graph computes
    tokens: int  # of which are real


@dataclass(slots=True)
class StepResult:
    rows: list[RowResult]  # one per row of the batch
    forward_seconds: float  # until the logits were there
    sample_seconds: float
    prefill_status: PrefillGraphStatus = PrefillGraphStatus.NOT_REQUESTED  # of the prompts that this step computed
    prefill_detail: str = ""  # more about a status that is not `replayed`
    replay: PrefillReplay | None = None
    decode_status: str = "not_requested"  # DecodeGraphStatus of the step
    decode_graph_rows: int = 0  # rows of the decode graph that was replayed
