"""From a StepBatch to the device: one packed copy and one kernel per step, whatever the batch.

The host packs a step into pinned int32 memory (two generations, each guarded by the event of its last copy), copies
the words in use to the device, and `kernels.metadata` spreads them over buffers that keep their addresses. Block
tables stay on the device from step to step: a decode row sends its table when another request sits in the row, else
one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.backend import AttentionRows, BatchLimits, DeviceRows
from engine.models.step import LastTokens
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.inputs import check_batch
from kernels.metadata import DecodeLayout, PrefillLayout, StepBuffers, prepare_decode, prepare_prefill

_GENERATIONS = 2


@dataclass(slots=True)
class DeviceStepInputs:
    """One step's inputs on the device. Tensors are views of the buffers, of the padded batch's size."""

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    rows: AttentionRows  # with `device`
    sampled_tokens: torch.Tensor | None  # int64 [sampled rows] index of their last token; None: all tokens, in order
    sampled_rows: list[int] = field(default_factory=list)  # rows of the batch that sample
    first_token: list[int] = field(default_factory=list)  # per row of the batch: index of its first token
    lasts: LastTokens | None = None  # where the stream of an eager step is theirs alone

    @property
    def device_rows(self) -> DeviceRows:
        assert self.rows.device is not None
        return self.rows.device


class _Staging:
    """Pinned host memory for one step, which may be written again once its last copy has been made."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.words = torch.zeros(words, dtype=torch.int32, pin_memory=self.on_device)
        self.array = self.words.numpy()
        self.copied = torch.cuda.Event() if self.on_device else None
        self.pending = False

    def wait(self) -> np.ndarray:
        """The memory, free to be written: int32 [words]."""
        if self.pending and self.copied is not None:
            self.copied.synchronize()
        self.pending = False
        return self.array

    def copy_to(self, target: torch.Tensor, count: int) -> None:
        """The first `count` words, behind what is enqueued already."""
        target[:count].copy_(self.words[:count], non_blocking=True)
        if self.copied is not None:
            self.copied.record()
            self.pending = True


class DeviceInputs:
    """The one builder of device inputs. Raises ValueError for a row that would read or write outside its blocks;
    nothing has been sent to the device then."""

    def __init__(self, limits: BatchLimits, block_size: int, device: torch.device) -> None:
        self.limits = limits
        self.block_size = block_size
        self.device = device
        self.num_blocks = 0  # of the pool; set when it is made
        self.buffers = StepBuffers.allocate(limits.max_rows, limits.max_tokens, limits.max_blocks, device)
        rows, tokens, width = limits.max_rows, limits.max_tokens, limits.max_blocks
        words = max(DecodeLayout(rows, rows, width).words, PrefillLayout(rows, tokens, width, rows).words)
        self._staging = [_Staging(words, device) for _ in range(_GENERATIONS)]
        self._on_device = torch.zeros(words, dtype=torch.int32, device=device)
        self._turn = 0
        # What the device's block tables hold: the list that row r's table was sent from, and how much of it
        self._seats: list[list[int] | None] = [None] * rows
        self._seated = [0] * rows
        self._cuts: dict[int, StepBuffers] = {}  # by rows of a decode step

    def check(self, batch: StepBatch) -> None:
        """Raises ValueError for a batch that `decode` and `prefill` would refuse. Of tables that the device has already
        no more is looked at than what is new, so a long context costs no more than a short one."""
        rows = batch.rows
        tokens = sum(len(row.token_ids) for row in rows)
        if not 0 < len(rows) <= self.limits.max_rows or tokens > self.limits.max_tokens:
            raise ValueError(f"{len(rows)} rows of {tokens} tokens: at most {self.limits} fit")
        if tokens == len(rows):
            self._look_up(rows)
            return
        check_batch(batch, self.block_size, self.num_blocks)
        for row in rows:
            _check_table(row, 1, self.num_blocks, self.limits.max_blocks, self.block_size)

    # -- decode ---------------------------------------------------------------------------------------------

    def decode(self, batch: StepBatch, padded_rows: int | None = None, prepare: bool = True) -> DeviceStepInputs:
        """Inputs of a step whose rows compute one token each.

        padded_rows: size of the graph that will run it. Without `prepare` the copy alone is enqueued: the graph begins
        with `prepare_decode`.
        """
        rows = batch.rows
        count = len(rows)
        padded = padded_rows or count
        if not 0 < count <= padded <= self.limits.max_rows:
            raise ValueError(f"{count} rows, padded to {padded}: at most {self.limits.max_rows} fit")
        starts, blocks, changed = self._look_up(rows)
        columns = max((len(rows[row].block_table) for row in changed), default=0)
        layout = DecodeLayout(count, len(changed), columns)
        staging = self._next()
        words = staging.wait()
        words[:4] = layout.header
        words[layout.token_ids] = [row.token_ids[0] for row in rows]
        words[layout.positions] = starts
        words[layout.blocks] = blocks
        if changed:
            words[layout.changed_rows] = changed
            _fill_tables(
                words[layout.tables].reshape(len(changed), columns), [rows[row].block_table for row in changed]
            )
        staging.copy_to(self._on_device, layout.words)
        if prepare:
            self.prepare_decode(padded)
        buffers = self.cut(padded)
        for row in changed:
            self._seats[row] = rows[row].block_table
        for row, item in enumerate(rows):
            self._seated[row] = len(item.block_table)
        if padded > count:
            self._seats[count:padded] = [None] * (padded - count)
        every = [row.sample for row in rows]
        sampled = list(range(count)) if all(every) else [i for i, sample in enumerate(every) if sample]
        attention = AttentionRows(
            starts=starts,
            lengths=[1] * count,
            block_tables=[row.block_table for row in rows],
            num_decode=count,
            device=device_rows(buffers, 1, max(starts) + 1),
        )
        return DeviceStepInputs(
            buffers.token_ids,
            buffers.positions,
            attention,
            None,
            sampled,
            list(range(count)),
        )

    def prepare_decode(self, padded_rows: int) -> None:
        """From the staged words to the buffers: one launch, which may be captured."""
        prepare_decode(self._on_device, self.cut(padded_rows), self.block_size)

    def stage_blank(self, rows: int, vocab_size: int) -> None:
        """Stages a decode step for a capture: different tokens at position 0, whose KV goes nowhere; each row sees
        block 0."""
        layout = DecodeLayout(rows, 0, 0)
        staging = self._next()
        words = staging.wait()
        words[:4] = layout.header
        words[layout.token_ids] = np.arange(rows) % vocab_size
        words[layout.positions] = 0
        words[layout.blocks] = 0
        staging.copy_to(self._on_device, layout.words)
        self.forget_tables()

    def _look_up(self, rows: Sequence[BatchRow]) -> tuple[list[int], list[int], list[int]]:
        """Start of each row, the block that its token goes to, and the rows whose tables the device lacks."""
        size, limit, most = self.block_size, self.num_blocks, self.limits.max_blocks
        seats, seated = self._seats, self._seated
        starts, blocks, changed = [], [], []
        for index, row in enumerate(rows):
            start, table = row.start, row.block_table
            at = start // size
            if len(row.token_ids) != 1 or start < 0 or at >= len(table):
                _refuse(row, size)
            block = table[at]
            if not 0 < block < limit or row.sample != (row.sampling is not None):
                _refuse_contents(row, limit, size)
            # A table grows at its end; what `blocks` cannot tell is sent whole
            known = seated[index]
            length = len(table)
            if seats[index] is not table or not (length == known or (length == known + 1 and at == known < most)):
                _check_table(row, at + 1, limit, most, size)
                changed.append(index)
            starts.append(start)
            blocks.append(block)
        return starts, blocks, changed

    # -- prefill and mixed ----------------------------------------------------------------------------------

    def prefill(self, batch: StepBatch) -> DeviceStepInputs:
        """Inputs of a step of any rows, decode rows first, without padding."""
        rows = batch.rows
        count = len(rows)
        if not 0 < count <= self.limits.max_rows:
            raise ValueError(f"{count} rows: at most {self.limits.max_rows} fit")
        size = self.block_size
        starts, lengths, token_ids = [], [], []
        for row in rows:
            length = len(row.token_ids)
            used = -(-(row.start + length) // size)
            if not length or row.start < 0 or used > len(row.block_table):
                _refuse(row, size)
            _check_table(row, used, self.num_blocks, self.limits.max_blocks, size)
            if row.sample != (row.sampling is not None):
                _refuse_contents(row, self.num_blocks, size)
            starts.append(row.start)
            lengths.append(length)
            token_ids += row.token_ids
        tokens = len(token_ids)
        if tokens > self.limits.max_tokens:
            raise ValueError(f"{tokens} tokens in one step: at most {self.limits.max_tokens} fit")
        ends = np.cumsum(lengths)
        sampled = [index for index, row in enumerate(rows) if row.sample]
        columns = max(len(row.block_table) for row in rows)
        layout = PrefillLayout(count, tokens, columns, len(sampled))
        staging = self._next()
        words = staging.wait()
        words[:4] = layout.header
        cu_seqlens = words[layout.cu_seqlens]
        cu_seqlens[0] = 0
        cu_seqlens[1:] = ends
        words[layout.starts] = starts
        words[layout.sampled_tokens] = ends[sampled] - 1 if sampled else ()
        words[layout.token_ids] = token_ids
        _fill_tables(words[layout.tables].reshape(count, columns), [row.block_table for row in rows])
        staging.copy_to(self._on_device, layout.words)
        buffers = self.buffers.cut(count, tokens)
        longest = max(lengths)
        prepare_prefill(self._on_device, buffers, size, longest)
        for index, row in enumerate(rows):
            self._seats[index] = row.block_table
            self._seated[index] = len(row.block_table)
        num_decode = next((index for index, length in enumerate(lengths) if length != 1), count)
        attention = AttentionRows(
            starts=starts,
            lengths=lengths,
            block_tables=[row.block_table for row in rows],
            num_decode=num_decode,
            device=device_rows(buffers, longest, max(map(sum, zip(starts, lengths, strict=True)))),
        )
        every = len(sampled) == tokens
        return DeviceStepInputs(
            buffers.token_ids,
            buffers.positions,
            attention,
            None if every else buffers.last_tokens[: len(sampled)],
            sampled,
            [0, *ends[:-1].tolist()],
        )

    # -- shared ---------------------------------------------------------------------------------------------

    def forget_tables(self) -> None:
        """The device's block tables were written by somebody else: the next step sends all of them."""
        self._seats = [None] * len(self._seats)

    def _next(self) -> _Staging:
        self._turn = (self._turn + 1) % _GENERATIONS
        return self._staging[self._turn]

    def cut(self, rows: int) -> StepBuffers:
        """The buffers of a decode step of that many rows."""
        found = self._cuts.get(rows)
        if found is None:
            found = self._cuts[rows] = self.buffers.cut(rows, rows)
        return found


def device_rows(buffers: StepBuffers, max_q: int, max_kv: int) -> DeviceRows:
    """What attention reads of a step's buffers."""
    return DeviceRows(
        buffers.cu_seqlens,
        buffers.cu_kv_seqlens,
        buffers.kv_lens,
        buffers.slots,
        buffers.block_tables,
        max_q,
        max_kv,
    )


def _fill_tables(target: np.ndarray, tables: Sequence[list[int]]) -> None:
    """target: int32 [tables, columns]; columns behind a table's own blocks become 0."""
    columns = target.shape[1]
    for index, table in enumerate(tables):
        target[index, : len(table)] = table
        if len(table) < columns:
            target[index, len(table) :] = 0


def _check_table(row: BatchRow, used: int, num_blocks: int, most: int, block_size: int) -> None:
    table = row.block_table
    if len(table) > most:
        raise ValueError(f"row {row.request_key!r}: a table of {len(table)} blocks, at most {most} fit")
    part = table if used == len(table) else table[:used]
    if min(part) < 1 or max(part) >= num_blocks:
        _refuse_contents(row, num_blocks, block_size)


def _refuse(row: BatchRow, block_size: int) -> None:
    if not row.token_ids or row.start < 0:
        raise ValueError(f"row {row.request_key!r}: no tokens, or a negative start ({row.start})")
    end = row.start + len(row.token_ids)
    if -(-end // block_size) > len(row.block_table):
        raise ValueError(
            f"row {row.request_key!r}: {end} tokens need {-(-end // block_size)} blocks, has {len(row.block_table)}"
        )
    raise ValueError(f"row {row.request_key!r}: {len(row.token_ids)} tokens in a decode step")


def _refuse_contents(row: BatchRow, num_blocks: int, block_size: int) -> None:
    used = row.block_table[: -(-(row.start + len(row.token_ids)) // block_size)]
    if min(used) < 1 or max(used) >= num_blocks:
        raise ValueError(f"row {row.request_key!r}: block ids must be in [1, {num_blocks}), got {used}")
    raise ValueError(f"row {row.request_key!r}: `sampling` must be set if and only if `sample` is")
