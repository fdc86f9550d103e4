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
    num_slots: int  # of the pool
    sentinel: npt.NDArray[np.int32]  # block-table row of the sentinel


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
        self._packed = np.arange(layout.bucket, dtype=np.int32)
        self._groups: list[tuple[str, _HostGroup]] = []
        for tag, group in layout.groups.items():
            tables = arrays.block_tables[tag].numpy()
            sentinel = np.zeros(tables.shape[1], np.int32)
            needed = min(tables.shape[1], len(group.scratch))
            sentinel[:needed] = group.scratch[:needed]
            size = group.block_size
            held = _HostGroup(arrays.slots[tag].numpy(), tables, size, group.num_blocks * size, sentinel)
            self._groups.append((tag, held))

    def fill(self, rows: Sequence[BatchRow], tables: Mapping[str, Sequence[Sequence[int]]]) -> MetadataFailure | None:
        """Lays out `rows`, prompts without prefix; `tables` has their physical blocks by cache group.

        A failure leaves the buffer unusable until the next fill.
        """
        layout = self.layout
        lengths = [len(row.token_ids) for row in rows]
        failure = prepare_prefill_replay_metadata(lengths, layout.bucket, layout.max_requests, self._metadata)
        if failure is not None:
            return failure
        count, tokens = len(rows), sum(lengths)
        begin = 0
        for row, length in zip(rows, lengths, strict=True):
            self._token_ids[begin : begin + length] = row.token_ids
            begin += length
        self._token_ids[tokens:] = layout.pad_token_id
        # A token's place when slots are laid out apart tells its slot and its position there.
        slot_of, positions = np.divmod(self._packed + self._metadata.padding_offset, layout.bucket)
        self._positions[:] = positions
        self._last_tokens[:count] = self._metadata.cu_seqlens[1 : count + 1]
        self._last_tokens[:count] -= 1
        self._last_tokens[count:] = 0
        self._overridden[:] = 0
        if any(row.embeddings for row in rows):
            self._mark_overridden(rows, lengths)
        if layout.position_axes:
            self._fill_position_ids(rows, lengths, tokens)
        for tag, group in self._groups:
            group.tables[:-1] = 0
            for slot, blocks in enumerate(tables[tag]):
                needed = -(-lengths[slot] // group.block_size)
                group.tables[slot, :needed] = blocks[:needed]
            group.tables[-1] = group.sentinel
            block, offset = np.divmod(positions, group.block_size)
            np.multiply(group.tables[slot_of, block], group.block_size, out=group.slots, dtype=np.int64)
            group.slots += offset
            # Block 0 is nobody's, so the first slot that a prompt may have is that of block 1
            if group.slots.min() < group.block_size or group.slots.max() >= group.num_slots:
                return MetadataFailure(f"a block of group {tag} is outside [1, {group.num_slots // group.block_size})")
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
            own = np.asarray(row.position_ids, np.int32).reshape(self.layout.position_axes, length)
            self._position_ids[:, begin : begin + length] = own
            begin += length
        self._position_ids[:, tokens:] = 0
