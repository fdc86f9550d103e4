"""What a replay reads, as one piece of memory: filled on the host, copied to the device whole, read there in place.

Nothing on the device fills or changes these arrays, and each bucket has its own addresses: a captured graph reads what
the copy brought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.batch import BatchRow
from engine.runner.prefill_graph.metadata import (
    MetadataFailure,
    ReplayMetadata,
    prepare_prefill_replay_metadata,
)

_ALIGNMENT = 4  # int32 words: 16 bytes, so that vector loads are allowed wherever an array begins


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One cache group's part in a replay."""

    block_size: int  # tokens
    scratch: tuple[int, ...]  # physical blocks that padding is written to
    num_blocks: int  # of the pool; a prompt's are 1 to num_blocks - 1


@dataclass(frozen=True, slots=True)
class ReplayArrays:
    """The arrays of one bucket, on the host (numpy) or on the device (torch), all of them views of one buffer.

    S = max_requests + 1 slots, T tokens of the bucket, W blocks that T tokens need.
    """

    input_lengths: torch.Tensor  # int32 [S]
    cu_seqlens: torch.Tensor  # int32 [S + 1]
    cu_kv_seqlens: torch.Tensor  # int32 [S + 1]
    padding_offset: torch.Tensor  # int32 [T]
    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    last_tokens: torch.Tensor  # int32 [max_requests] index of each prompt's last token; of empty slots 0
    overridden: torch.Tensor  # int32 [T] 1 where an embedding takes the token's place
    position_ids: torch.Tensor  # int32 [axes, T] for models that do not count positions themselves
    slots: Mapping[str, torch.Tensor]  # by cache group: int64 [T] block * block size + offset
    block_tables: Mapping[str, torch.Tensor]  # by cache group: int32 [S, W]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLayout:
    """Where the arrays of one bucket lie in its buffer."""

    bucket: int
    max_requests: int
    pad_token_id: int
    groups: Mapping[str, GroupShape]
    position_axes: int = 0

    def _segments(self) -> list[tuple[str, str, tuple[int, ...], bool]]:
        """(field, group, shape, whether it is int64), in the buffer's order."""
        slots, tokens = self.max_requests + 1, self.bucket
        found: list[tuple[str, str, tuple[int, ...], bool]] = [
            ("input_lengths", "", (slots,), False),
            ("cu_seqlens", "", (slots + 1,), False),
            ("cu_kv_seqlens", "", (slots + 1,), False),
            ("padding_offset", "", (tokens,), False),
            ("token_ids", "", (tokens,), False),
            ("positions", "", (tokens,), False),
            ("last_tokens", "", (self.max_requests,), False),
            ("overridden", "", (tokens,), False),
            ("position_ids", "", (self.position_axes, tokens), False),
        ]
        for tag, group in self.groups.items():
            found.append(("slots", tag, (tokens,), True))
            found.append(("block_tables", tag, (slots, -(-tokens // group.block_size)), False))
        return found

    @property
    def words(self) -> int:
        """int32 words of the buffer."""
        return sum(_room(shape, wide) for _, _, shape, wide in self._segments())

    def views(self, buffer: torch.Tensor) -> ReplayArrays:
        """The arrays as views of `buffer`, int32 [words or more], contiguous."""
        begin = 0
        single: dict[str, torch.Tensor] = {}
        by_group: dict[str, dict[str, torch.Tensor]] = {"slots": {}, "block_tables": {}}
        for name, tag, shape, wide in self._segments():
            numbers = int(np.prod(shape, dtype=np.int64))
            piece = buffer[begin : begin + numbers * (2 if wide else 1)]
            begin += _room(shape, wide)
            view = (piece.view(torch.int64) if wide else piece).view(shape)
            if tag:
                by_group[name][tag] = view
            else:
                single[name] = view
        return ReplayArrays(slots=by_group["slots"], block_tables=by_group["block_tables"], **single)


def _room(shape: tuple[int, ...], wide: bool) -> int:
    words = int(np.prod(shape, dtype=np.int64)) * (2 if wide else 1)
    return -(-words // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True)
class _HostGroup:
    slots: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    block_size: int
    num_blocks: int  # of the pool
    block_of: npt.NDArray[np.int64]  # column of the block table, by position
    offset_of: npt.NDArray[np.int64]  # place in the block, by position
    scratch: npt.NDArray[np.int32]  # block-table row of the sentinel
    scratch_slots: npt.NDArray[np.int64]  # of the sentinel's tokens, by position


class HostStaging:
    """One host buffer of a bucket, and the code that fills it. Whether a copy still reads the buffer is its owner's
    concern."""

    def __init__(self, layout: ReplayLayout, buffer: torch.Tensor) -> None:
        """buffer: int32 [layout.words], pinned where there is a device."""
        self.layout = layout
        self.buffer = buffer
        self.arrays = arrays = layout.views(buffer)
        self._metadata = ReplayMetadata(
            arrays.input_lengths.numpy(),
            arrays.cu_seqlens.numpy(),
            arrays.cu_kv_seqlens.numpy(),
            arrays.padding_offset.numpy(),
        )
        self._token_ids = arrays.token_ids.numpy()
        self._positions = arrays.positions.numpy()
        self._last_tokens = arrays.last_tokens.numpy()
        self._overridden = arrays.overridden.numpy()
        self._position_ids = arrays.position_ids.numpy()
        self._counted = np.arange(layout.bucket, dtype=np.int32)
        self._groups = [
            (tag, _host_group(group, arrays.slots[tag].numpy(), arrays.block_tables[tag].numpy()))
            for tag, group in layout.groups.items()
        ]

    def fill(self, rows: Sequence[BatchRow], tables: Mapping[str, Sequence[Sequence[int]]]) -> MetadataFailure | None:
        """Lays out `rows`, prompts without prefix; `tables` has their physical blocks by cache group.

        A failure leaves the buffer unusable until the next fill.
        """
        layout = self.layout
        lengths = [len(row.token_ids) for row in rows]
        failure = prepare_prefill_replay_metadata(lengths, layout.bucket, layout.max_requests, self._metadata)
        if failure is not None:
            return failure
        count, begin = len(rows), 0
        counted = self._counted
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            end = begin + length
            self._token_ids[begin:end] = row.token_ids
            self._positions[begin:end] = counted[:length]
            self._last_tokens[index] = end - 1
            begin = end
        tokens = begin
        self._token_ids[tokens:] = layout.pad_token_id
        self._positions[tokens:] = counted[: layout.bucket - tokens]
        self._last_tokens[count:] = 0
        self._overridden[:] = 0
        if any(row.embeddings for row in rows):
            self._mark_overridden(rows, lengths)
        if layout.position_axes:
            self._fill_position_ids(rows, lengths, tokens)
        for tag, group in self._groups:
            problem = _fill_group(group, lengths, tables[tag], layout.bucket)
            if problem:
                return MetadataFailure(f"cache group {tag}: {problem}")
        return None

    def _mark_overridden(self, rows: Sequence[BatchRow], lengths: Sequence[int]) -> None:
        begin = 0
        for row, length in zip(rows, lengths, strict=True):
            for item in row.embeddings:
                self._overridden[begin + item.place : begin + item.end] = 1
            begin += length

    def _fill_position_ids(self, rows: Sequence[BatchRow], lengths: Sequence[int], tokens: int) -> None:
        begin = 0
        for row, length in zip(rows, lengths, strict=True):
            place = self._position_ids[:, begin : begin + length]
            if row.position_ids:
                place[:] = np.asarray(row.position_ids, np.int32).reshape(self.layout.position_axes, length)
            else:
                place[:] = self._counted[:length]
            begin += length
        self._position_ids[:, tokens:] = 0


def _host_group(group: GroupShape, slots: npt.NDArray[np.int64], tables: npt.NDArray[np.int32]) -> _HostGroup:
    block_of, offset_of = np.divmod(np.arange(slots.shape[0], dtype=np.int64), group.block_size)
    scratch = np.zeros(tables.shape[1], np.int32)
    scratch[:] = group.scratch[: tables.shape[1]]
    scratch_slots = scratch[block_of] * np.int64(group.block_size) + offset_of
    size, num_blocks = group.block_size, group.num_blocks
    return _HostGroup(slots, tables, size, num_blocks, block_of, offset_of, scratch, scratch_slots)


def _fill_group(group: _HostGroup, lengths: Sequence[int], blocks: Sequence[Sequence[int]], bucket: int) -> str:
    """Block tables and slots of one cache group. Returns what is wrong with a prompt's blocks; empty: nothing."""
    size, begin = group.block_size, 0
    group.tables[:] = 0
    for index, (length, own) in enumerate(zip(lengths, blocks, strict=True)):
        needed = -(-length // size)
        used = own[:needed]
        if len(used) < needed or min(used) < 1 or max(used) >= group.num_blocks:
            return f"{length} tokens need {needed} blocks of [1, {group.num_blocks}), there are {list(used)}"
        row = group.tables[index]
        row[:needed] = used
        end = begin + length
        slots = group.slots[begin:end]
        np.multiply(row[group.block_of[:length]], size, out=slots, dtype=np.int64)
        slots += group.offset_of[:length]
        begin = end
    group.tables[-1] = group.scratch
    group.slots[begin:] = group.scratch_slots[: bucket - begin]
    return ""
