"""From a step's batch to the order that the followers get, and back.

Both ends remember the rows of the step before, and their block tables as lists that only grow at their end; so the
order of a decode step has a token, two places and seldom a block for each row. What a row does not have in common with
the step before is sent whole, and what was not in the step before is forgotten by both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.input_embeddings import EmbeddingRows
from engine.parallel.messages import EmbeddingsOrder, RowExtra, RowOrder, StepOrder
from engine.runner.batch import BatchRow, StepBatch

if TYPE_CHECKING:
    import torch

    from engine.parallel.communicator import Communicator

_NONE: list[int] = []


class StepOrders:
    """Rank 0's end."""

    def __init__(self) -> None:
        # Of the step before: place, table, and how much of the table the followers have
        self._known: dict[str, tuple[int, list[int], int]] = {}

    def order(self, batch: StepBatch, apart: bool = False) -> StepOrder:
        """apart: the values of embeddings travel by `share_embeddings`."""
        known, now = self._known, {}
        rows = []
        for place, row in enumerate(batch.rows):
            key, table = row.request_key, row.block_table
            length = len(table)
            extra = None
            if row.prompt_logprobs_from >= 0 or row.embeddings or row.multimodal or row.position_ids:
                extra = _extra(row, apart)
            before = known.get(key)
            # The list itself is compared: one that another allocation has filled is another one
            if before is None or before[1] is not table or length < before[2]:
                order = RowOrder(row.token_ids, row.start, -1, table, row.sample, key, extra)
            else:
                added = table[before[2] :] if length > before[2] else _NONE
                order = RowOrder(row.token_ids, row.start, before[0], added, row.sample, "", extra)
            rows.append(order)
            now[key] = (place, table, length)
        self._known = now
        return StepOrder(rows, batch.kind, batch.shares)

    def forget(self) -> None:
        """The last order was not sent: the next one is told whole."""
        self._known = {}


class FollowedSteps:
    """A follower's end."""

    def __init__(self) -> None:
        self._rows: list[BatchRow] = []

    def batch(self, order: StepOrder) -> StepBatch:
        """The batch as rank 0 has it, but for sampling. Raises ValueError for an order that does not follow the one
        before."""
        before = self._rows
        rows = []
        for item in order.rows:
            if item.previous < 0:
                row = BatchRow(item.request_key, item.token_ids, item.start, item.blocks, item.sample)
            elif item.previous < len(before):
                row = before[item.previous]
                row.token_ids = item.token_ids
                row.start = item.start
                row.sample = item.sample
                if item.blocks:
                    row.block_table.extend(item.blocks)
            else:
                raise ValueError(f"row {item.previous} of a step before that had {len(before)}")
            _take_extra(row, item.extra)
            rows.append(row)
        self._rows = rows
        return StepBatch(rows, order.kind, order.shares)


def _extra(row: BatchRow, apart: bool) -> RowExtra:
    embeddings = [
        EmbeddingsOrder(
            item.place, len(item.values), b"" if apart else np.ascontiguousarray(item.values, np.float32).tobytes()
        )
        for item in row.embeddings
    ]
    return RowExtra(
        row.prompt_logprobs_from,
        list(row.prompt_next_ids),
        row.num_prompt_logprobs,
        embeddings,
        row.multimodal,
        list(row.position_ids),
    )


def _take_extra(row: BatchRow, extra: RowExtra | None) -> None:
    if extra is None:
        row.prompt_logprobs_from, row.prompt_next_ids, row.num_prompt_logprobs = -1, (), 0
        row.embeddings, row.multimodal, row.position_ids = (), False, ()
        return
    row.prompt_logprobs_from = extra.prompt_logprobs_from
    row.prompt_next_ids = extra.prompt_next_ids
    row.num_prompt_logprobs = extra.num_prompt_logprobs
    row.multimodal = extra.multimodal
    row.position_ids = extra.position_ids
    row.embeddings = [_rows_of(item) for item in extra.embeddings]


def _rows_of(item: EmbeddingsOrder) -> EmbeddingRows:
    values = np.frombuffer(item.values, np.float32)
    # Without values: as many rows of no size, until `take_embeddings` puts the real ones there
    return EmbeddingRows(item.place, values.reshape(item.rows, values.size // item.rows))


# ---- embeddings on a device


def embeddings_travel_apart(device: torch.device) -> bool:
    """Whether a step's embeddings go from device to device, in one packed broadcast, rather than in its order.

    They are large: 4 bytes for each number of the hidden size, 16 kB a token of an 8B model. Between devices that is a
    matter of microseconds. On the CPU the broadcast would copy them through a socket as the order does, only later and
    with one wait more.
    """
    return device.type == "cuda"


def share_embeddings(batch: StepBatch, communicator: Communicator, device: torch.device) -> None:
    """Rank 0's part of the packed broadcast: the rows of all embeddings of the step, one after the other."""
    import torch

    values = [item.values for row in batch.rows for item in row.embeddings]
    if not values:
        return
    packed = torch.from_numpy(np.concatenate(values).astype(np.float32, copy=False)).to(device)
    communicator.broadcast_(packed)


def take_embeddings(batch: StepBatch, communicator: Communicator, device: torch.device, hidden_size: int) -> None:
    """A follower's part: puts the rows where the order has their places."""
    import torch

    total = sum(len(item.values) for row in batch.rows for item in row.embeddings)
    if not total:
        return
    packed = torch.empty(total, hidden_size, dtype=torch.float32, device=device)
    communicator.broadcast_(packed)
    begin = 0
    for row in batch.rows:
        found = []
        for item in row.embeddings:
            end = begin + len(item.values)
            found.append(EmbeddingRows(item.place, packed[begin:end]))  # type: ignore[arg-type]
            begin = end
        row.embeddings = found
