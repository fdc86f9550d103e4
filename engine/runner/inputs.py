"""From a StepBatch to tensors on the device: the one input builder, for every path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionRows
from engine.runner.batch import StepBatch
from engine.runner.position_ids import position_ids_of


@dataclass(slots=True)
class StepInputs:
    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64; [axes, tokens] int32 where rows bring their own
    rows: AttentionRows
    first_token: list[int]  # per row: index of its first token among `token_ids`
    sampled_rows: list[int]  # rows that sample
    sampled_tokens: torch.Tensor | None  # [sampled rows] index of their last token; None: all tokens, in order


def asks_for_lasts(batch: StepBatch, fewest: int) -> bool:
    """Whether the last token of every row is all that is asked for of the stream, and at least `fewest` others are
    there to be left out. The same on every rank."""
    others = sum(len(row.token_ids) for row in batch.rows) - len(batch.rows)
    return others >= fewest and all(row.prompt_logprobs_from < 0 for row in batch.rows)


def check_batch(batch: StepBatch, block_size: int, num_blocks: int) -> None:
    """Raises ValueError for a batch that would read or write outside its blocks."""
    for row in batch.rows:
        needed = -(-(row.start + len(row.token_ids)) // block_size)
        if not row.token_ids or row.start < 0:
            raise ValueError(f"row {row.request_key!r}: no tokens, or a negative start ({row.start})")
        if len(row.block_table) < needed:
            raise ValueError(
                f"row {row.request_key!r}: {row.start + len(row.token_ids)} tokens need {needed} blocks, "
                f"has {len(row.block_table)}"
            )
        used = row.block_table[:needed]
        if min(used) < 1 or max(used) >= num_blocks:
            raise ValueError(f"row {row.request_key!r}: block ids must be in [1, {num_blocks}), got {used}")
        if row.sample != (row.sampling is not None):
            raise ValueError(f"row {row.request_key!r}: `sampling` must be set if and only if `sample` is")


def build_inputs(batch: StepBatch, device: torch.device, position_axes: int = 0) -> StepInputs:
    """position_axes: of the model; see `position_ids_of`."""
    token_ids: list[int] = []
    positions: list[int] = []
    first_token: list[int] = []
    sampled_rows: list[int] = []
    sampled_tokens: list[int] = []
    num_decode = 0
    for index, row in enumerate(batch.rows):
        length = len(row.token_ids)
        if length == 1 and num_decode == index:
            num_decode += 1
        first_token.append(len(token_ids))
        token_ids += row.token_ids
        positions += range(row.start, row.start + length)
        if row.sample:
            sampled_rows.append(index)
            sampled_tokens.append(len(token_ids) - 1)
    every = len(sampled_tokens) == len(token_ids)
    own = position_ids_of(batch.rows, position_axes)
    return StepInputs(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device) if own is None else torch.from_numpy(own).to(device),
        rows=AttentionRows(
            starts=[row.start for row in batch.rows],
            lengths=[len(row.token_ids) for row in batch.rows],
            block_tables=[row.block_table for row in batch.rows],
            num_decode=num_decode,
        ),
        first_token=first_token,
        sampled_rows=sampled_rows,
        sampled_tokens=None if every else torch.tensor(sampled_tokens, device=device),
    )
