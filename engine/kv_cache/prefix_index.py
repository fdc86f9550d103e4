"""The prefix cache of one cache group: which block holds the KV of which prefix, and which one to evict next.

Cached blocks form a forest: the parent of a block is the block of the prefix one block shorter. A block is
evictable when no request holds it or any block below it; of the evictable ones, only leaves are evicted,
least recently used first, so a prefix never loses its middle.
"""

from __future__ import annotations

import heapq

_NONE = 0  # block 0 is never given out, so it can stand for "no block"


class PrefixIndex:
    """Maps block hashes to block ids in [1, num_blocks]. Not thread-safe.

    A block is *busy* while a request holds it; the owner of the blocks says so with `hold` and `unhold`, also
    for blocks that are not cached. Every operation is O(1) amortised, but `remove_lru`, which is O(log n).
    """

    def __init__(self, num_blocks: int) -> None:
        size = num_blocks + 1
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * size
        self._parent: list[int] = [_NONE] * size
        self._children: list[int] = [0] * size
        self._held: list[bool] = [False] * size
        self._busy_children: list[int] = [0] * size  # cached children that are held or have busy children
        self._last_use: list[int] = [0] * size
        self._heap: list[tuple[int, int]] = []  # (last use, block), stale entries included
        self._tick = 0
        self.evictable = 0  # cached blocks that are not busy: what eviction could free in all

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, block_hash: bytes) -> int:
        """The block with this hash; 0 when there is none."""
        return self._block_of.get(block_hash, _NONE)

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of[block]

    def is_evictable(self, block: int) -> bool:
        """Whether `block` is cached, and neither it nor a block below it is held."""
        return self._hash_of[block] is not None and not self._held[block] and not self._busy_children[block]

    def add(self, block_hash: bytes, block: int, parent_hash: bytes | None) -> bool:
        """Registers a held block; False if another block has this hash already, and nothing changed then.

        `parent_hash` is None at the start of a prompt. The parent must be cached.
        """
        if block_hash in self._block_of:
            return False
        if not self._held[block] or self._hash_of[block] is not None:
            raise ValueError(f"block {block} must be held and not cached yet")
        parent = self._block_of[parent_hash] if parent_hash is not None else _NONE
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._parent[block] = parent
        if parent:
            self._children[parent] += 1
            self._add_busy_child(parent)
        return True

    def hold(self, block: int) -> None:
        """The first holder of `block` came."""
        self._held[block] = True
        if self._hash_of[block] is not None and self._busy_children[block] == 0:
            self.evictable -= 1
            self._add_busy_child(self._parent[block])

    def unhold(self, block: int) -> None:
        """The last holder of `block` left. To keep the order of use, a request drops its last block first."""
        self._held[block] = False
        self._tick += 1
        self._last_use[block] = self._tick
        if self._hash_of[block] is not None and self._busy_children[block] == 0:
            self._becomes_evictable(block)

    def remove_lru(self) -> tuple[int, bytes]:
        """Takes the least recently used evictable leaf out of the cache. Raises LookupError when there is
        none."""
        while self._heap:
            last_use, block = heapq.heappop(self._heap)
            if self._is_candidate(block) and last_use == self._last_use[block]:
                return block, self._remove(block)
        raise LookupError("no evictable block")

    def remove_all_evictable(self) -> list[tuple[int, bytes]]:
        """Takes every evictable block out of the cache, children before parents."""
        return [self.remove_lru() for _ in range(self.evictable)]

    # -- internals ------------------------------------------------------------------------------------------

    def _is_candidate(self, block: int) -> bool:
        return self._hash_of[block] is not None and not self._held[block] and self._children[block] == 0

    def _becomes_evictable(self, block: int) -> None:
        """`block` is no longer busy; its ancestors may follow."""
        while block:
            self.evictable += 1
            if self._children[block] == 0:
                self._push(block)
            parent = self._parent[block]
            if parent:
                self._busy_children[parent] -= 1
                if self._busy_children[parent] or self._held[parent]:
                    return
            block = parent

    def _add_busy_child(self, block: int) -> None:
        while block:
            self._busy_children[block] += 1
            if self._busy_children[block] > 1 or self._held[block]:
                return
            self.evictable -= 1
            block = self._parent[block]

    def _remove(self, block: int) -> bytes:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block] = None
        self.evictable -= 1
        parent = self._parent[block]
        self._parent[block] = _NONE
        if parent:
            self._children[parent] -= 1
            if self._is_candidate(parent):
                self._push(parent)
        return block_hash

    def _push(self, block: int) -> None:
        heapq.heappush(self._heap, (self._last_use[block], block))
        if len(self._heap) > 2 * len(self._hash_of) + 64:
            self._heap = [
                (self._last_use[candidate], candidate)
                for candidate in self._block_of.values()
                if self._is_candidate(candidate)
            ]
            heapq.heapify(self._heap)
