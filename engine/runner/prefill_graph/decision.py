"""Whether a batch can be replayed, and in which bucket. Pure: nothing here raises, logs or counts."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from engine.runner.batch import BatchRow
from rpc.graph_status import PrefillGraphStatus


@dataclass(frozen=True, slots=True)
class Decision:
    """`bucket` is the number of tokens of the graph to replay; 0 unless the status is REPLAYED."""

    status: PrefillGraphStatus
    bucket: int = 0
    detail: str = ""

    @property
    def replay(self) -> bool:
        return self.status is PrefillGraphStatus.REPLAYED


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """What the captured graphs of an engine can take."""

    init: PrefillGraphStatus  # of the engine, at start-up
    buckets: tuple[int, ...] = ()  # captured ones, ascending
    max_requests: int = 0
    max_padding_ratio: float = 1.0
    block_size: int = 1
    position_axes: int = 0  # position ids that a token may bring: 3 for mRoPE, 0 where its place is its position
    hidden_size: int = 0  # of an embedding that replaces a token's; 0: the model takes none


def decide(rows: Sequence[BatchRow], limits: ReplayLimits) -> Decision:
    """The decision for the prompts of a batch. The first test that fails decides, in this order: start-up,
    multimodal input, metadata, prefix, number of requests, number of tokens, padding."""
    status = PrefillGraphStatus
    if limits.init is not status.CAPTURED:
        return Decision(limits.init)
    if any(row.multimodal for row in rows):
        return Decision(status.MULTIMODAL_NOT_SUPPORTED)
    for row in rows:
        problem = row_problem(row, limits)
        if problem:
            return Decision(status.INPUT_METADATA_INVALID, detail=f"{row.request_key}: {problem}")
    if not rows:
        return Decision(status.INPUT_METADATA_INVALID, detail="the batch has no rows")
    if any(row.start > 0 for row in rows):
        return Decision(status.PREFIX_NOT_SUPPORTED)
    if len(rows) > limits.max_requests:
        return Decision(status.REQUEST_CAPACITY_EXCEEDED, detail=f"{len(rows)} requests")
    tokens = sum(len(row.token_ids) for row in rows)
    if any(not row.sample for row in rows):
        return Decision(status.INPUT_TOKENS_EXCEED_CAPTURE_LIMIT, detail="a prompt is computed in chunks")
    bucket = bucket_for(tokens, limits.buckets)
    if bucket is None:
        return Decision(status.INPUT_TOKENS_EXCEED_CAPTURE_LIMIT, detail=f"{tokens} tokens")
    if (bucket - tokens) / bucket > limits.max_padding_ratio:
        return Decision(status.PADDING_RATIO_EXCEEDED, detail=f"{tokens} tokens in a bucket of {bucket}")
    return Decision(status.REPLAYED, bucket)


def bucket_for(tokens: int, buckets: Sequence[int]) -> int | None:
    """The smallest of the ascending `buckets` that holds `tokens` tokens."""
    index = bisect.bisect_left(buckets, tokens)
    return buckets[index] if index < len(buckets) else None


def row_problem(row: BatchRow, limits: ReplayLimits) -> str:
    """What makes one row unusable, whatever graphs there are; empty when nothing does."""
    tokens = len(row.token_ids)
    if tokens <= 0:
        return f"{tokens} tokens"
    if row.start < 0:
        return f"its first token has position {row.start}"
    if len(row.block_table) * limits.block_size < row.start + tokens:
        return f"{len(row.block_table)} blocks for {row.start + tokens} tokens"
    for item in row.embeddings:
        if item.place < 0 or item.end > tokens or item.values.shape[1:] != (limits.hidden_size,):
            return f"embeddings {item.values.shape} at place {item.place} of {tokens} tokens"
    if row.position_ids and len(row.position_ids) != limits.position_axes * tokens:
        return f"{len(row.position_ids)} position ids for {tokens} tokens of {limits.position_axes} axes"
    return ""
