"""How the KV blocks of two engines with different block sizes lie over each other, by token position. Pure.

Both sizes are multiples of the smaller one, so blocks of either side consist of whole *units* of that many tokens. In a
layer [num_blocks, 2, num_kv_heads, block_size, head_dim] the unit t of (block b, key or value c, head h) is one
contiguous row of unit x head_dim elements, and with n units to a block its number is ((b * 2 + c) * num_kv_heads + h) *
n + t: what is copied between two such layers are rows of one size on both sides (see `rows.py`).

Blocks are always counted by the receiver's size; a block of the receiver *touches* the sender's blocks that hold its
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_store.geometry.rows import Rows
from rpc.block_sizes import block_sizes_fit


@dataclass(frozen=True, slots=True)
class Positions:
    """A prompt that lies in blocks of `source` tokens at its sender and of `target` tokens at its receiver.

    Raises ValueError for sizes that do not fit each other (`block_sizes_fit`).
    """

    source: int
    target: int
    prompt_tokens: int

    def __post_init__(self) -> None:
        if not block_sizes_fit(self.source, self.target):
            raise ValueError(f"blocks of {self.source} and of {self.target} tokens do not fit each other")

    @classmethod
    def between(cls, source: int, target: int, prompt_tokens: int) -> Positions | None:
        """None for equal sizes, where blocks are copied as they are."""
        return None if source == target else cls(source, target, prompt_tokens)

    @property
    def unit(self) -> int:
        """Tokens of a unit."""
        return min(self.source, self.target)

    @property
    def source_units(self) -> int:
        """Units of a block of the sender."""
        return self.source // self.unit

    @property
    def target_units(self) -> int:
        """Units of a block of the receiver."""
        return self.target // self.unit

    @property
    def source_blocks(self) -> int:
        """Blocks of the prompt at the sender."""
        return -(-self.prompt_tokens // self.source)

    def ready(self, blocks: int) -> int:
        """How many leading blocks of the receiver the first `blocks` blocks of the sender make up."""
        if blocks >= self.source_blocks:
            return -(-self.prompt_tokens // self.target)
        return blocks * self.source // self.target

    def touched(self, blocks: Sequence[int]) -> list[int]:
        """The sender's blocks that each of `blocks` touches, one after the other.

        The last block of a prompt may touch fewer than others: the sender has no blocks beyond the prompt's end.
        """
        if self.source_units > 1:
            return [block // self.source_units for block in blocks]
        units, end = self.target_units, self.source_blocks
        return [each for block in blocks for each in range(block * units, min((block + 1) * units, end))]

    def count_touched(self, blocks: Sequence[int]) -> int:
        """The length of `touched`, for ascending blocks of the prompt."""
        if self.source_units > 1 or not blocks:
            return len(blocks)
        beyond = (blocks[-1] + 1) * self.target_units - self.source_blocks
        return len(blocks) * self.target_units - max(0, beyond)

    def source_rows(
        self,
        group: str,
        layer: int,
        blocks: Sequence[int],
        ids: Sequence[int],
        piece_bytes: int,
        heads: int,
        count: int = 1,
        index: int = 0,
    ) -> Rows:
        """Rows of the sender's layer that make up `blocks`, ascending, in the order of the receiver's bytes.

        ids: the sender's block numbers of `touched(blocks)`. piece_bytes: of one of `blocks`. heads: so many of each
        block, share `index` of `count` equal shares of the sender's. Units beyond the sender's last block, which hold
        no token of the prompt, get the bytes of its last unit.
        """
        units, inside = self.target_units, self.source_units
        held = np.asarray(ids, np.int64)
        if inside > 1:
            place = held * 2 * heads * count * inside + np.asarray(blocks, np.int64) % inside
            places = place[:, None]
        else:
            order = np.minimum(np.arange(len(blocks) * units), len(held) - 1)
            places = (held * 2 * heads * count)[order].reshape(len(blocks), units)
        offsets = _head_offsets(heads, count, index) * inside
        return Rows(group, layer, self._row_bytes(piece_bytes, heads), _numbers(places, offsets))

    def target_rows(
        self,
        group: str,
        layer: int,
        ids: Sequence[int],
        piece_bytes: int,
        heads: int,
        count: int = 1,
        index: int = 0,
    ) -> Rows:
        """Rows of the receiver's blocks `ids`, in the order of `source_rows`; `heads` of each block, share `index` of
        `count` of the receiver's."""
        units = self.target_units
        places = np.asarray(ids, np.int64)[:, None] * (2 * heads * count * units) + np.arange(units)
        offsets = _head_offsets(heads, count, index) * units
        return Rows(group, layer, self._row_bytes(piece_bytes, heads), _numbers(places, offsets))

    def _row_bytes(self, piece_bytes: int, heads: int) -> int:
        return piece_bytes // (2 * heads * self.target_units)


def _head_offsets(heads: int, count: int, index: int) -> np.ndarray:
    """int64 [2 * heads]: of each head of a share, keys before values, how many heads lie before it in a block."""
    own = np.arange(heads, dtype=np.int64) + index * heads
    return np.concatenate((own, own + heads * count))


def _numbers(places: np.ndarray, offsets: np.ndarray) -> list[int]:
    """places [blocks, units] + offsets [heads], in the order block, head, unit."""
    numbers: list[int] = (places[:, None, :] + offsets[None, :, None]).ravel().tolist()
    return numbers
