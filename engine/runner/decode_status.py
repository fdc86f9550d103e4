"""Whether a captured decode graph can run a batch, and which one. Pure: nothing here raises, logs or counts."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.runner.batch import BatchRow

DENSE_SIZES = (1, 8, 16, 24, 32)
SIZE_STEP = 16  # above the dense ones


class DecodeGraphStatus(StrEnum):
    """How a decode step ran, or why no graph ran it. Label `status` of baton_decode_cuda_graph_steps_total."""

    REPLAYED = "replayed"
    NOT_REQUESTED = "not_requested"
    CAPTURE_UNAVAILABLE = "capture_unavailable"
    BATCH_EXCEEDS_CAPTURE_LIMIT = "batch_exceeds_capture_limit"
    BLOCK_TABLE_EXCEEDS_CAPTURE = "block_table_exceeds_capture"
    GROUP_TAGS_MISMATCH = "group_tags_mismatch"
    ROWS_PER_REQUEST_MISMATCH = "rows_per_request_mismatch"
    POSITION_IDS_MISMATCH = "position_ids_mismatch"
    PREFILL_INPUT = "prefill_input"
    UNSUPPORTED_BACKEND = "unsupported_backend"
    ERROR = "error"  # preparing the replay failed; the batch ran eagerly


@dataclass(frozen=True, slots=True)
class DecodeDecision:
    status: DecodeGraphStatus
    size: int = 0  # rows of the graph to replay; 0 unless REPLAYED

    @property
    def replay(self) -> bool:
        return self.status is DecodeGraphStatus.REPLAYED


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What the captured graphs of an engine can take."""

    sizes: tuple[int, ...]  # rows of each graph, ascending
    max_blocks: int  # entries of a row's block table
    group_tags: tuple[str, ...]  # cache groups whose tables they read
    tokens_per_row: int = 1  # more for verifying drafts
    position_axes: int = 0  # position ids that each token brings; 0 where the model counts itself


def decide(rows: Sequence[BatchRow], group_tags: tuple[str, ...], limits: DecodeLimits) -> DecodeDecision:
    """The first test that fails decides: kind of rows, tokens per row, position ids, groups, batch, block tables."""
    status = DecodeGraphStatus
    per_row = limits.tokens_per_row
    widest = 0
    for row in rows:
        count = len(row.token_ids)
        if not row.sample or count > per_row or row.prompt_logprobs_from >= 0 or row.embeddings:
            return DecodeDecision(status.PREFILL_INPUT)
        if count != per_row:
            return DecodeDecision(status.ROWS_PER_REQUEST_MISMATCH)
        if len(row.position_ids) != limits.position_axes * count:
            return DecodeDecision(status.POSITION_IDS_MISMATCH)
        length = len(row.block_table)
        if length > widest:
            widest = length
    if not rows:
        return DecodeDecision(status.ROWS_PER_REQUEST_MISMATCH)
    if group_tags != limits.group_tags:
        return DecodeDecision(status.GROUP_TAGS_MISMATCH)
    at = bisect.bisect_left(limits.sizes, len(rows))
    if at == len(limits.sizes):
        return DecodeDecision(status.BATCH_EXCEEDS_CAPTURE_LIMIT)
    if widest > limits.max_blocks:
        return DecodeDecision(status.BLOCK_TABLE_EXCEEDS_CAPTURE)
    return DecodeDecision(status.REPLAYED, limits.sizes[at])


def capture_sizes(configured: Sequence[int], max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs to capture, ascending: the configured ones, or the default list up to `max_num_seqs`.

    The default is 1, 8, 16, 24, 32, then steps of 16, and max_num_seqs itself. Raises ValueError for a configured size
    outside 1 to max_num_seqs.
    """
    if configured:
        wrong = [size for size in configured if not 1 <= size <= max_num_seqs]
        if wrong:
            raise ValueError(f"sizes must be in 1 to {max_num_seqs} (--max-num-seqs), not {wrong}")
        return tuple(sorted(set(configured)))
    default = (*DENSE_SIZES, *range(DENSE_SIZES[-1] + SIZE_STEP, max_num_seqs + 1, SIZE_STEP), max_num_seqs)
    return tuple(sorted({size for size in default if size <= max_num_seqs}))
