"""What rank 0 asks of the other ranks' tiers, and what they answer. Part of the frames of `messages.py`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class WriteDown(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """`TierStore.write`: (block, its version on rank 0, its hash), in a prefix's order."""

    blocks: list[tuple[int, int, bytes]]


class LookUp(msgspec.Struct, frozen=True, array_like=True, tag="look_up"):
    """`TierStore.look_up`; a `FetchEnded` of this number follows."""

    number: int
    block_hashes: list[bytes]


class LoadInto(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """`TierStore.load` of what was looked up; another `FetchEnded` follows."""

    number: int
    offset: int
    blocks: list[int]


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag="give_up"):
    """Nobody wants it any more. What is under way is answered once nothing writes into its blocks."""

    number: int


class Clear(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """`TierStore.clear`."""


TierCall: TypeAlias = WriteDown | LookUp | LoadInto | GiveUp | Clear


class FetchEnded(msgspec.Struct, frozen=True, array_like=True):
    """A rank has ended its look-up, or its load."""

    number: int
    loaded: bool  # of a load
    blocks: int  # leading ones that it has found, or that are complete
