"""The blocks that an event of a load is about: the same ones in each of one or several layers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cache_store.geometry.rows import runs


@dataclass(frozen=True, slots=True)
class Piece:
    """`blocks` are indices in the request, in the order of the event; `sources` where they lie at the sender, when they
    are read there (`Notice.source_runs`). `block_bytes` is that of one of them in one layer; `checksum` of the bytes of
    all, when they have one.
    """

    group: str
    layers: range
    blocks: Sequence[int]
    block_bytes: int
    checksum: int | None = None
    sources: Sequence[int] = ()

    @property
    def layer(self) -> int:
        """The only layer, or the first one."""
        return self.layers.start

    @property
    def count(self) -> int:
        """Blocks x layers."""
        return len(self.blocks) * len(self.layers)

    @property
    def nbytes(self) -> int:
        return self.count * self.block_bytes

    def of(self, layers: range) -> Piece:
        """The same blocks in some of the layers."""
        return self if layers == self.layers else replace(self, layers=layers)

    def each_layer(self) -> Iterable[Piece]:
        return (self.of(range(layer, layer + 1)) for layer in self.layers)


def flat_runs(numbers: Sequence[int]) -> list[int]:
    """first, count, first, count, ... of the runs of consecutive numbers."""
    return [each for run in runs(numbers) for each in run]


def expand_runs(flat: Sequence[int], most: int) -> Sequence[int]:
    """The numbers of `flat_runs`. Raises ValueError for what is none, and for more than `most` numbers."""
    firsts, counts = flat[::2], flat[1::2]
    if len(firsts) != len(counts) or 0 in counts:
        raise ValueError("runs without a length")
    if sum(counts) > most:
        raise ValueError(f"{sum(counts)} blocks, {most} are possible")
    if len(firsts) == 1:
        return range(firsts[0], firsts[0] + counts[0])
    return [number for first, count in zip(firsts, counts, strict=True) for number in range(first, first + count)]
