"""Attention of the C kernels: straight from the pool, for rows of any lengths in one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, AttentionRows, Capabilities
from engine.attention.torch_backend import slots_of
from kernels.cpu import attention, library


@dataclass(slots=True)
class DecodeRows:
    """The first `count` tokens: one per row."""

    count: int
    tables: torch.Tensor  # int32 [rows, blocks]
    last: torch.Tensor  # int64 [rows] position of each row's token


@dataclass(slots=True)
class PrefillRows:
    """The other tokens: chunks of prompts."""

    tables: torch.Tensor  # int32 [rows, blocks]
    starts: torch.Tensor  # int64 [rows] position of each chunk's first token
    lengths: torch.Tensor  # int64 [rows]
    first_tokens: torch.Tensor  # int64 [rows] its index among the step's tokens


@dataclass(slots=True)
class NativePlan:
    blocks: torch.Tensor  # int64 [tokens] block of each token's slot
    offsets: torch.Tensor  # int64 [tokens] the slot inside it
    decode: DecodeRows | None
    prefill: PrefillRows | None


class NativeBackend(AttentionBackend):
    """Reads each key and value once where the torch backend gathers and pads first. See decode.c and prefill.c."""

    name = "native"
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
        """Only where `available` says so."""
        kernels = library.load()
        assert kernels is not None
        self.kernels = kernels
        self.block_size = block_size

    @staticmethod
    def available(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether this machine can run the kernels, and the kernels this model."""
        return library.load() is not None and attention.supports(num_heads, num_kv_heads, head_dim, dtype)

    def bind(self, pool: torch.Tensor) -> torch.Tensor:
        return pool

    def plan(self, rows: AttentionRows) -> NativePlan:
        tables = [np.array(table, dtype=np.int32) for table in rows.block_tables]
        blocks, offsets = slots_of(rows, tables, self.block_size)
        decode, split = rows.num_decode, slice(rows.num_decode, None)
        starts, lengths = np.array(rows.starts), np.array(rows.lengths)
        first_tokens = np.cumsum(lengths) - lengths
        return NativePlan(
            blocks=blocks,
            offsets=offsets,
            decode=DecodeRows(decode, _padded(tables[:decode]), torch.from_numpy(starts[:decode])) if decode else None,
            prefill=PrefillRows(
                _padded(tables[split]),
                torch.from_numpy(starts[split]),
                torch.from_numpy(lengths[split]),
                torch.from_numpy(first_tokens[split]),
            )
            if decode < len(tables)
            else None,
        )

    def plan_lasts(self, rows: AttentionRows) -> NativePlan:
        tables = [np.array(table, dtype=np.int32) for table in rows.block_tables]
        lasts = torch.from_numpy(np.array(rows.starts) + np.array(rows.lengths) - 1)
        nothing = lasts[:0]  # written by the plan of all tokens
        return NativePlan(nothing, nothing, DecodeRows(len(tables), _padded(tables), lasts), None)

    def write(self, plan: NativePlan, layer: torch.Tensor, kv: torch.Tensor) -> None:
        attention.write_kv(self.kernels, kv, layer, plan.blocks, plan.offsets)

    def attend(
        self, plan: NativePlan, layer: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        tokens, heads, dim = q.shape
        out = torch.empty(tokens, heads * dim, dtype=q.dtype)
        decode, prefill = plan.decode, plan.prefill
        if decode is not None:
            first = q if prefill is None else q[: decode.count]
            attention.decode_attention(self.kernels, first, layer, decode.tables, decode.last, window, out)
        if prefill is not None:
            attention.prefill_attention(
                self.kernels,
                q,
                layer,
                prefill.tables,
                prefill.starts,
                prefill.lengths,
                prefill.first_tokens,
                window,
                out,
            )
        return out


def _padded(tables: list[np.ndarray]) -> torch.Tensor:
    """Block tables side by side, padded with the reserved block 0: int32 [rows, blocks]."""
    if len(tables) == 1:
        return torch.from_numpy(tables[0][None])
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return torch.from_numpy(padded)
