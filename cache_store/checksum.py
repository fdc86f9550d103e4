"""Integrity of transferred blocks: xxh3-64 per block of a layer; with the transport tcp, of the blocks of a notice."""

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


def verify(data: memoryview, block_bytes: int, blocks: Sequence[int], expected: Sequence[int], where: str) -> None:
    """Raises KV_CHECKSUM_MISMATCH naming the first damaged block of `where`."""
    compare(checksums(data, block_bytes), blocks, expected, where)


def compare(sums: Sequence[int], blocks: Sequence[int | str], expected: Sequence[int], where: str) -> None:
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
