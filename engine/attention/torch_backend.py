"""Paged attention in plain PyTorch: the CPU backend, and the reference for the others.

Keys and values of a row lie in the pool in pieces of one block and one head: [block_size, head_dim]. One index_select
per layer lays the pieces of all decode rows side by side, which gives dense [rows, 2, kv_heads, context, head_dim]
with no transposition, and one scaled-dot-product call attends over it. The query heads that share a key head stand in
that call's query dimension, so keys are read once per group. Rows of very different lengths are gathered in several
groups, because each group is padded to its longest row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionBackend, AttentionRows, Capabilities

# Padding blocks that cost as much as the calls of one more group (measured: about 60 us against 1.7 us per block)
_GROUP_COST_BLOCKS = 32


@dataclass(slots=True)
class LayerPool:
    """Views of one layer's pool."""

    slots: torch.Tensor  # [blocks, block_size, 2, kv_heads, head_dim], strided
    pieces: torch.Tensor  # [blocks * 2 * kv_heads, block_size * head_dim]


@dataclass(slots=True)
class DecodeGroup:
    """Decode rows attended in one call."""

    rows: torch.Tensor | None  # [rows] which of the step's tokens; None: the first `count`
    count: int
    pieces: torch.Tensor  # [count * 2 * kv_heads * blocks] indices into LayerPool.pieces
    mask: torch.Tensor | None  # [count, 1, 1, context], added to the scores; None: every slot is seen


@dataclass(slots=True)
class PrefillRow:
    """One chunk of a prompt."""

    first: int  # its tokens are [first, last) of the step's
    last: int
    pieces: torch.Tensor | None  # as above, for this row alone; None: all it sees is in this very chunk
    context: int  # tokens gathered, those of the chunk included
    mask: torch.Tensor | None  # [last - first, context], added to the scores; None: plainly causal


@dataclass(slots=True)
class WindowPlan:
    decode: list[DecodeGroup]
    prefill: list[PrefillRow]


@dataclass(slots=True)
class TorchPlan:
    blocks: torch.Tensor  # [tokens] block of each token's slot
    offsets: torch.Tensor  # [tokens] the slot inside it
    windows: dict[int | None, WindowPlan]


class TorchBackend(AttentionBackend):
    name = "torch"
    capabilities = Capabilities(cpu=True, sliding_window=True, mixed_batches=True)

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        windows: Iterable[int | None],
        dtype: torch.dtype,
    ) -> None:
        """windows: those of the layers. dtype: of queries and pool."""
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.windows = tuple(set(windows))
        self.dtype = dtype
        self._scratch = torch.empty(0, dtype=dtype)

    def bind(self, pool: torch.Tensor) -> LayerPool:
        return LayerPool(pool.permute(0, 3, 1, 2, 4), pool.view(-1, self.block_size * self.head_dim))

    # -- plan

    def plan(self, rows: AttentionRows) -> TorchPlan:
        lengths = np.array(rows.lengths)
        first_tokens = np.cumsum(lengths) - lengths
        tables = [np.array(table) for table in rows.block_tables]
        blocks, offsets = slots_of(rows, tables, self.block_size)
        return TorchPlan(
            blocks=blocks,
            offsets=offsets,
            windows={
                window: WindowPlan(
                    self._decode_groups(rows, tables, window) if rows.num_decode else [],
                    self._prefill_rows(rows, tables, window, first_tokens),
                )
                for window in self.windows
            },
        )

    def _pieces(self, blocks: np.ndarray) -> torch.Tensor:
        """blocks: [rows, n] -> flat indices, ordered [rows, 2, kv_heads, n]."""
        kinds = np.arange(2 * self.num_kv_heads)
        return torch.from_numpy((blocks[:, None, :] * len(kinds) + kinds[:, None]).reshape(-1))

    def _bias(self, visible: np.ndarray) -> torch.Tensor:
        """What to add to scores: 0 where visible, else minus infinity."""
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~visible), -math.inf)

    def _decode_groups(self, rows: AttentionRows, tables: list[np.ndarray], window: int | None) -> list[DecodeGroup]:
        if rows.num_decode == 0:
            return []
        size = self.block_size
        lasts = np.array(rows.starts[: rows.num_decode])  # position of each row's token, the last it sees
        firsts = np.zeros_like(lasts) if window is None else np.maximum(lasts - window + 1, 0)
        first_blocks = firsts // size
        counts = lasts // size + 1 - first_blocks
        groups = []
        for members in split_by_length(counts):
            most = int(counts[members].max())
            blocks = np.zeros((len(members), most), dtype=np.int64)  # padded with the reserved block 0
            for i, row in enumerate(members):
                blocks[i, : counts[row]] = tables[row][first_blocks[row] : first_blocks[row] + counts[row]]
            seen = np.arange(most * size) + (first_blocks[members] * size)[:, None]
            visible = (seen <= lasts[members, None]) & (seen >= firsts[members, None])
            groups.append(
                DecodeGroup(
                    rows=None if len(members) == rows.num_decode else torch.from_numpy(members),
                    count=len(members),
                    pieces=self._pieces(blocks),
                    mask=None if visible.all() else self._bias(visible[:, None, None, :]),
                )
            )
        return groups

    def _prefill_rows(
        self, rows: AttentionRows, tables: list[np.ndarray], window: int | None, first_tokens: np.ndarray
    ) -> list[PrefillRow]:
        size = self.block_size
        prefill = []
        for row in range(rows.num_decode, len(rows.lengths)):
            start, length, first = rows.starts[row], rows.lengths[row], int(first_tokens[row])
            if start == 0 and (window is None or window >= length):
                prefill.append(PrefillRow(first, first + length, None, length, None))
                continue
            first_block = 0 if window is None else max(start - window + 1, 0) // size
            end = start + length
            seen = np.arange(first_block * size, end)
            query = np.arange(start, end)[:, None]
            visible = seen <= query
            if window is not None:
                visible &= seen > query - window
            blocks = tables[row][None, first_block : -(-end // size)]
            prefill.append(PrefillRow(first, first + length, self._pieces(blocks), len(seen), self._bias(visible)))
        return prefill

    # -- step

    def write(self, plan: TorchPlan, layer: LayerPool, kv: torch.Tensor) -> None:
        layer.slots[plan.blocks, plan.offsets] = kv.view(-1, 2, self.num_kv_heads, self.head_dim)

    def attend(
        self, plan: TorchPlan, layer: LayerPool, q: torch.Tensor, kv: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        part = plan.windows[window]
        if len(part.decode) + len(part.prefill) == 1:
            return (
                self._decode(part.decode[0], layer, q) if part.decode else self._prefill(part.prefill[0], layer, q, kv)
            )
        out = q.new_empty(q.shape[0], self.num_heads * self.head_dim)
        for group in part.decode:
            rows = slice(group.count) if group.rows is None else group.rows
            out[rows] = self._decode(group, layer, q[rows])
        for row in part.prefill:
            chunk = slice(row.first, row.last)
            out[chunk] = self._prefill(row, layer, q[chunk], kv[chunk])
        return out

    def _gather(self, layer: LayerPool, pieces: torch.Tensor) -> torch.Tensor:
        """[pieces, block_size * head_dim], valid until the next call: one buffer for all layers stays in the cache."""
        needed = pieces.shape[0] * layer.pieces.shape[1]
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=self.dtype)
        out = self._scratch[:needed].view(pieces.shape[0], -1)
        return torch.index_select(layer.pieces, 0, pieces, out=out)

    def _decode(self, group: DecodeGroup, layer: LayerPool, q: torch.Tensor) -> torch.Tensor:
        """q: [count, heads, head_dim] -> [count, heads * head_dim]."""
        kv = self._gather(layer, group.pieces).view(group.count, 2, self.num_kv_heads, -1, self.head_dim)
        out = F.scaled_dot_product_attention(
            q.view(group.count, self.num_kv_heads, -1, self.head_dim), kv[:, 0], kv[:, 1], attn_mask=group.mask
        )  # [count, kv_heads, heads per kv head, head_dim]
        return out.reshape(group.count, -1)

    def _prefill(self, row: PrefillRow, layer: LayerPool, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q: [length, heads, head_dim], kv: [length, 2 * kv_heads, head_dim] -> [length, heads * head_dim]."""
        if row.pieces is None:
            key, value = kv.transpose(0, 1).unflatten(0, (2, self.num_kv_heads))
        else:
            held = self._gather(layer, row.pieces).view(2, self.num_kv_heads, -1, self.head_dim)
            key, value = held[:, :, : row.context]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            key.unsqueeze(0),  # [1, kv_heads, context, head_dim]
            value.unsqueeze(0),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            enable_gqa=True,
        )  # [1, heads, length, head_dim]
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)


def slots_of(rows: AttentionRows, tables: Sequence[np.ndarray], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the step's tokens are stored: blocks and offsets inside them, int64 [tokens] each.

    tables: rows.block_tables as arrays.
    """
    blocks = [
        table[start // block_size : -(-(start + length) // block_size)].repeat(block_size)[start % block_size :][
            :length
        ]
        for table, start, length in zip(tables, rows.starts, rows.lengths, strict=True)
    ]
    offsets = [np.arange(start, start + length) for start, length in zip(rows.starts, rows.lengths, strict=True)]
    return (
        torch.from_numpy(np.concatenate(blocks).astype(np.int64)),
        torch.from_numpy(np.concatenate(offsets) % block_size),
    )


def split_by_length(counts: np.ndarray) -> list[np.ndarray]:
    """Rows in groups of similar length: a row starts a new group when that saves more padding than a group costs.

    counts: blocks of each row. Returns row indices per group; one group keeps the rows' order.
    """
    if (counts.max() * len(counts) - counts.sum()) <= _GROUP_COST_BLOCKS:
        return [np.arange(len(counts))]
    order = np.argsort(-counts, kind="stable")
    groups, begin = [], 0
    for i in range(1, len(order)):
        if (counts[order[begin]] - counts[order[i]]) * (len(order) - i) > _GROUP_COST_BLOCKS:
            groups.append(order[begin:i])
            begin = i
    groups.append(order[begin:])
    return groups if len(groups) > 1 else [np.arange(len(counts))]
