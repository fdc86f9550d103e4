"""Attention of the C kernels: decode rows straight from the pool, chunks of prompts as in the torch backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.backend import AttentionRows, Capabilities
from engine.attention.torch_backend import LayerPool, TorchBackend, TorchPlan
from kernels.cpu import attention, library


@dataclass(slots=True)
class NativeDecode:
    """All decode rows of a step: the kernel takes rows of any lengths."""

    tables: torch.Tensor  # int32 [rows, blocks]
    last: torch.Tensor  # int64 [rows] position of each row's token
    window: int | None
    count: int
    rows: None = None  # they are the first ones


class NativeBackend(TorchBackend):
    """Reads each key and value once where the torch backend gathers and pads first. See kernels/cpu/attention.c."""

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
        super().__init__(num_heads, num_kv_heads, head_dim, block_size, windows, dtype)
        kernels = library.load()
        assert kernels is not None
        self.kernels = kernels

    @staticmethod
    def available(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether this machine can run the kernels, and the kernels this model."""
        return library.load() is not None and attention.supports(num_heads, num_kv_heads, head_dim, dtype)

    def _decode_groups(self, rows: AttentionRows, tables: list[np.ndarray], window: int | None) -> list[Any]:
        count = rows.num_decode
        lasts = np.array(rows.starts[:count])
        needed = lasts // self.block_size + 1
        padded = np.zeros((count, int(needed.max())), dtype=np.int32)
        for row in range(count):
            padded[row, : needed[row]] = tables[row][: needed[row]]
        return [NativeDecode(torch.from_numpy(padded), torch.from_numpy(lasts), window, count)]

    def write(self, plan: TorchPlan, layer: LayerPool, kv: torch.Tensor) -> None:
        attention.write_kv(self.kernels, kv, layer.pool, plan.blocks, plan.offsets)

    def _decode(self, group: NativeDecode, layer: LayerPool, q: torch.Tensor) -> torch.Tensor:
        return attention.decode_attention(self.kernels, q, layer.pool, group.tables, group.last, group.window)
