"""From a step's batch to the order that the followers get, and back.

Both ends remember the rows of the step before, and their block tables as lists that only grow at their end; so the
order of a decode step has a token, two places and seldom a block for each row. What a row does not have in common with
the step before is sent whole, and what was not in the step before is forgotten by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import TYPE_CHECKING

import numpy as np

from engine.input_embeddings import EmbeddingRows
from engine.parallel.messages import EmbeddingsOrder, RowExtra, RowOrder, RowsAgain, StepOrder
from engine.runner.batch import BatchRow, StepBatch

if TYPE_CHECKING:
    import torch

    from engine.parallel.communicator import Communicator


class StepOrders:
    """Rank 0's end."""

    def __init__(self) -> None:
        # The rows of the step before, by place: key, table, and how much of the table the followers have
        self._keys: list[str] = []
        self._tables: list[list[int]] = []
        self._lengths: list[int] = []

    def order(self, batch: StepBatch, apart: bool = False) -> StepOrder:
        """apart: the values of embeddings travel by `share_embeddings`."""
        rows = batch.rows
        keys = [row.request_key for row in rows]
        tables = [row.block_table for row in rows]
        lengths = [len(table) for table in tables]
        again = self._again(rows, tables, lengths) if keys == self._keys else None
        told = self._told(rows, apart) if again is None else []
        self._keys, self._tables, self._lengths = keys, tables, lengths
        return StepOrder(told, batch.kind, batch.shares, again)

    def _again(self, rows: Sequence[BatchRow], tables: list[list[int]], lengths: list[int]) -> RowsAgain | None:
        """For most decode steps, whose rows are those of the step before: a third of the work of telling each."""
        # The list itself is compared: one that another allocation has filled is another one
        if any(map(is_not, tables, self._tables)):
            return None
        for row in rows:
            if len(row.token_ids) != 1 or not row.sample or _has_extra(row):
                return None
        added = []
        if lengths != self._lengths:
            for place, (before, length) in enumerate(zip(self._lengths, lengths, strict=True)):
                if length < before:
                    return None
                if length > before:
                    added.append((place, tables[place][before:]))
        return RowsAgain([row.token_ids[0] for row in rows], [row.start for row in rows], added)

    def _told(self, rows: Sequence[BatchRow], apart: bool) -> list[RowOrder]:
        places = {key: place for place, key in enumerate(self._keys)}
        told = []
        for row in rows:
            key, table = row.request_key, row.block_table
            extra = _extra(row, apart) if _has_extra(row) else None
            place = places.get(key, -1)
            if place < 0 or self._tables[place] is not table or len(table) < self._lengths[place]:
                order = RowOrder(row.token_ids, row.start, -1, table, row.sample, key, extra)
            else:
                order = RowOrder(row.token_ids, row.start, place, table[self._lengths[place] :], row.sample, "", extra)
            told.append(order)
        return told

    def forget(self) -> None:
        """The last order was not sent: the next one is told whole."""
        self._keys, self._tables, self._lengths = [], [], []


class FollowedSteps:
    """A follower's end."""

    def __init__(self) -> None:
        self._rows: list[BatchRow] = []

    def batch(self, order: StepOrder) -> StepBatch:
        """The batch as rank 0 has it, but for sampling. Raises ValueError for an order that does not follow the one
        before."""
        before = self._rows
        if order.again is not None:
            return self._again(order, order.again)
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

    def _again(self, order: StepOrder, again: RowsAgain) -> StepBatch:
        rows = self._rows
        if len(again.token_ids) != len(rows):
            raise ValueError(f"{len(again.token_ids)} rows of a step before that had {len(rows)}")
        for row, token_id, start in zip(rows, again.token_ids, again.starts, strict=True):
            row.token_ids = [token_id]
            row.start = start
            row.sample = True
            if _has_extra(row):
                _take_extra(row, None)
        for place, blocks in again.added:
            rows[place].block_table.extend(blocks)
        # A list of its own: whoever still has the batch before keeps the one that it knows
        self._rows = list(rows)
        return StepBatch(self._rows, order.kind, order.shares)


def _has_extra(row: BatchRow) -> bool:
    return row.prompt_logprobs_from >= 0 or bool(row.embeddings or row.multimodal or row.position_ids)


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
