"""Integrity of transferred blocks: xxh3-64 per block of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from rpc.errors import BatonError, ErrorCode

MODES = ("off", "sample", "all")  # in order of strictness
SAMPLE_EVERY = 8


def stricter(one: str, other: str) -> str:
    """The mode that two peers use together."""
    return max(one, other, key=MODES.index)


def covered(mode: str, layer: int, first_block: int) -> bool:
    """Whether an event that carries blocks of `layer` from `first_block` on has checksums.

    A rule that both ends know, so that a sender cannot leave them out unnoticed. In mode `sample` it spreads over
    layers and blocks.
    """
    return mode == "all" or (mode == "sample" and (layer + first_block) % SAMPLE_EVERY == 0)


def checksums(data: memoryview, block_bytes: int) -> list[int]:
    """xxh3-64 of each `block_bytes` long block of `data`."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[at : at + block_bytes]) for at in range(0, data.nbytes, block_bytes)]


class BlockSums:
    """Checksums of blocks whose bytes come piece by piece, in order; `sums` has those of whole blocks so far."""

    def __init__(self, block_bytes: int) -> None:
        self.sums: list[int] = []
        self._block_bytes = block_bytes
        self._begun: xxhash.xxh3_64 | None = None  # of a block that ends in a later piece
        self._left = 0  # bytes of it

    def add(self, view: memoryview) -> None:
        """view: format 'B', contiguous."""
        at, end, size = 0, view.nbytes, self._block_bytes
        if self._begun is not None:
            at = min(self._left, end)
            self._begun.update(view[:at])
            self._left -= at
            if self._left:
                return
            self.sums.append(self._begun.intdigest())
            self._begun = None
        whole = at + (end - at) // size * size
        digest = xxhash.xxh3_64_intdigest
        self.sums += [digest(view[begin : begin + size]) for begin in range(at, whole, size)]
        if whole < end:
            self._begun = xxhash.xxh3_64(view[whole:])
            self._left = size - (end - whole)


def verify(data: memoryview, block_bytes: int, blocks: Sequence[int], expected: Sequence[int], where: str) -> None:
    """Raises KV_CHECKSUM_MISMATCH naming the first damaged block of `where`."""
    compare(checksums(data, block_bytes), blocks, expected, where)


def compare(sums: Sequence[int], blocks: Sequence[int], expected: Sequence[int], where: str) -> None:
    """Like `verify`, with the checksums of what arrived."""
    if sums == expected:
        return
    for block, have, want in zip(blocks, sums, expected, strict=True):
        if have != want:
            raise BatonError(
                ErrorCode.KV_CHECKSUM_MISMATCH,
                "a KV block arrived damaged",
                metadata={"piece": f"{where}, block {block}", "expected": f"{want:016x}", "got": f"{have:016x}"},
            )
