"""Which bytes of a layer's memory a copy is about: equal rows, so that one form serves blocks and shares of heads.

Pure. A layer of a cache group is num_blocks x block_bytes bytes. A copy of whole blocks has rows of block_bytes; a copy
of share `index` of `count` equal shares of the heads has two rows per block, one in K and one in V (see
`GroupLayout.partition_ranges`), because the share is contiguous in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """Row i of the layer are its bytes [i * unit_bytes, (i + 1) * unit_bytes); `numbers` in the order of the copy."""

    group: str
    layer: int
    unit_bytes: int
    numbers: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.unit_bytes * len(self.numbers)

    def at(self, layer: int) -> Rows:
        """The same rows of another layer."""
        return Rows(self.group, layer, self.unit_bytes, self.numbers)

    def part(self, at: int, count: int) -> Rows:
        """Up to `count` of the rows, from entry `at` on."""
        return Rows(self.group, self.layer, self.unit_bytes, self.numbers[at : at + count])


def block_rows(
    group: str,
    layer: int,
    ids: Sequence[int],
    piece_bytes: int,
    count: int = 1,
    index: int = 0,
    *,
    halves: bool = False,
) -> Rows:
    """Rows of share `index` of `count` of the blocks `ids`, in their order, K before V in each.

    `piece_bytes` is the size of the share in one block. With `halves` there are two rows per block for all heads too:
    the other end of the copy has a share, and a copy needs the same rows on both ends.
    """
    if count == 1 and not halves:
        return Rows(group, layer, piece_bytes, ids)
    numbers: list[int] = []
    for block in ids:
        first = 2 * count * block + index
        numbers += (first, first + count)
    return Rows(group, layer, piece_bytes // 2, numbers)


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers, in order."""
    numbers = list(numbers)
    if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return [(numbers[0], len(numbers))]
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def paired_runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first of source, first of target, count) of each run that is consecutive on both sides, in order."""
    found: list[tuple[int, int, int]] = []
    for one, other in zip(source, target, strict=True):
        if found:
            first, to, count = found[-1]
            if one == first + count and other == to + count:
                found[-1] = (first, to, count + 1)
                continue
        found.append((one, other, 1))
    return found
