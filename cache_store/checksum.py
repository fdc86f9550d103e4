"""Integrity of transferred blocks: xxh3-64 of those that travel together, which are of one layer."""

from __future__ import annotations

from collections.abc import Iterable

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


def digest(views: Iterable[memoryview]) -> int:
    """xxh3-64 of the views' bytes, one after the other."""
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def compare(have: int, want: int, where: str) -> None:
    """Checksum of what arrived at `where`, and what the peer has sent of it. Raises KV_CHECKSUM_MISMATCH."""
    if have != want:
        raise BatonError(
            ErrorCode.KV_CHECKSUM_MISMATCH,
            "KV blocks arrived damaged",
            metadata={"piece": where, "expected": f"{want:016x}", "got": f"{have:016x}"},
        )
