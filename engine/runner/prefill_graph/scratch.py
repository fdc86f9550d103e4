"""The blocks that a replay's padding writes to: real memory of the KV pool that no request ever gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from engine.kv_cache.cache import KvCache, blocks_for
from engine.messages import KvGroupInfo


def scratch_blocks(groups: Iterable[KvGroupInfo], largest_bucket: int) -> dict[str, int]:
    """By tag: blocks of each cache group that hold a sentinel of the largest bucket."""
    return {group.tag: blocks_for(largest_bucket, group.block_size) for group in groups}


class ScratchBlocks:
    """Scratch of every cache group, found by the group's tag. Reserved once, released once."""

    def __init__(self, kv: KvCache, largest_bucket: int) -> None:
        """Raises ValueError when a group has too few spare blocks; nothing is held then."""
        self._kv = kv
        found: dict[str, list[int]] = {}
        try:
            for tag, count in scratch_blocks(kv.groups, largest_bucket).items():
                found[tag] = kv.reserve(tag, count)
        except ValueError:
            for tag, blocks in found.items():
                kv.unreserve(tag, blocks)
            raise
        self._blocks: Mapping[str, list[int]] = MappingProxyType(found)
        self._released = False

    def of(self, tag: str) -> list[int]:
        """The blocks of the group `tag`. Raises KeyError for a tag without scratch, RuntimeError after `release`."""
        if self._released:
            raise RuntimeError(f"scratch blocks of group {tag!r} were released")
        try:
            return self._blocks[tag]
        except KeyError:
            known = ", ".join(sorted(self._blocks))
            raise KeyError(f"no scratch blocks for cache group {tag!r}; there are: {known}") from None

    def release(self) -> None:
        """Gives the blocks back; a second call does nothing."""
        if self._released:
            return
        self._released = True
        for tag, blocks in self._blocks.items():
            self._kv.unreserve(tag, blocks)
