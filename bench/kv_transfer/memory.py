"""The KV pools of both sides of a measurement, and which blocks of them are moved."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.rows import Rows
from cache_store.memory.pool import HostKvPool
from cache_store.memory.shared_memory import MemoryFile

TAG = "full"


@dataclass(frozen=True)
class Shape:
    """`blocks` of `block_bytes` in each of `layers`; that is what a pool holds."""

    blocks: int
    layers: int
    block_size: int  # tokens
    block_bytes: int

    @property
    def layout(self) -> GroupLayout:
        """One head of bfloat16, whatever head_dim the bytes of a block take."""
        head_dim, rest = divmod(self.block_bytes, 4 * self.block_size)
        if rest:
            raise SystemExit(f"--block-bytes {self.block_bytes} must be a multiple of {4 * self.block_size}")
        return GroupLayout.of(
            TAG,
            num_layers=self.layers,
            num_kv_heads=1,
            head_dim=head_dim,
            block_size=self.block_size,
            dtype="bfloat16",
        )

    def bytes_of(self, blocks: int) -> int:
        return blocks * self.layers * self.block_bytes


def block_ids(shape: Shape, blocks: int, scattered: bool, seed: int) -> list[int]:
    """Neighbours from the first block on, or blocks anywhere in the pool."""
    if not scattered:
        return list(range(blocks))
    return [int(block) for block in np.random.default_rng(seed).permutation(shape.blocks)[:blocks]]


class Pool:
    """Host memory in memory files, as the pool of a prefill server has it: every transport can use it."""

    def __init__(self, shape: Shape, seed: int) -> None:
        size = shape.blocks * shape.block_bytes
        self.files = [MemoryFile(size) for _ in range(shape.layers)]
        rng = np.random.default_rng(seed)
        for file in self.files:
            np.frombuffer(file.view, np.uint8)[:] = rng.integers(0, 256, size, dtype=np.uint8)
        self.views = [file.view for file in self.files]
        self.kv = HostKvPool([shape.layout], {TAG: self.views}, {TAG: self.files})

    def digest(self, shape: Shape, ids: list[int]) -> int:
        """Of the blocks, in their order: equal on both sides of a load that was right."""
        total = 0
        for layer, view in enumerate(self.views):
            table = np.frombuffer(view, np.uint64).reshape(shape.blocks, -1)
            sums = table[ids].sum(axis=1, dtype=np.uint64)
            weights = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(2 * layer + 1)
            total = (total + int((sums * weights).sum(dtype=np.uint64))) % (1 << 64)
        return total

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # views of it live until the process ends
            for file in self.files:
                file.close()


def rows_of(shape: Shape, layer: int, ids: list[int]) -> Rows:
    return Rows(TAG, layer, shape.block_bytes, ids)
