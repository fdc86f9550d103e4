"""The blocks of one cache group: free ones, and held ones by the reason for which they are held.

The ledger: every block is in exactly one state, so at any time

    total = free + running + staged + receiving + quarantined + cached

A block with several holders is in the state of the strongest: quarantined, receiving, running, staged. A
block without a holder is cached when the prefix index knows it, else free; a free block has no hash. Block 0
stands outside: it is never given out, so that padding and empty table entries can point at it. Scratch blocks of
captured graphs stand outside as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from engine.kv_cache.prefix_index import PrefixIndex
from engine.messages import Ledger


class Hold(IntEnum):
    """Why a block is held, weakest first."""

    STAGED = 0  # by a prefill server until the decode server has it
    RUNNING = 1  # by a request that computes, or waits for its load beside the blocks that arrive
    RECEIVING = 2  # the transfer writes it
    QUARANTINED = 3  # its request is gone, and the transfer is not proven quiet yet


_CACHED = 4
_FREE = 5


class BlockPool:
    """Blocks 1 … num_blocks of one cache group. Not thread-safe.

    Behind them lie `spare` blocks, num_blocks + 1 and up, which belong to no request and stand outside the ledger's
    total. They can only be reserved.
    """

    def __init__(self, group: str, num_blocks: int, spare: int = 0) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self._spare = list(range(num_blocks + spare, num_blocks, -1))  # a stack; low ids first
        self._reserved: set[int] = set()
        self.group = group
        self.total = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.evicted: list[bytes] = []  # hashes that eviction removed since the last `take_evicted`
        self.releases = 0  # rises whenever a block may have become available
        # By block; rises before anything else than what is in the block may be written to it.
        self.versions = [0] * (num_blocks + 1)
        self.given: list[int] | None = None  # blocks that were given out since it was emptied; None: nobody asks
        self._free = list(range(num_blocks, 0, -1))  # a stack; low ids first
        self._holders = [[0] * (num_blocks + 1) for _ in Hold]  # by reason and block
        self._state = [_FREE] * (num_blocks + 1)
        self._counts = [0] * 6
        self._counts[_FREE] = num_blocks

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give out: the free ones and those that eviction would free."""
        return len(self._free) + self.index.evictable

    def allocate(self, count: int, hold: Hold) -> list[int] | None:
        """`count` blocks of undefined content, held; None, and nothing changed, if there are too few.

        Evicts cached blocks only when no free ones are left.
        """
        if count > self.available:
            return None
        while len(self._free) < count:
            block, block_hash = self.index.remove_lru()
            self.evicted.append(block_hash)
            self._update(block)
            self._free.append(block)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self.versions[block] += 1
            self._add(block, hold)
        if self.given is not None:
            self.given += blocks
        return blocks

    def share(self, blocks: Iterable[int], hold: Hold) -> None:
        """One more holder for blocks that are held or cached."""
        for block in blocks:
            if self._state[block] == _FREE:
                raise ValueError(f"block {block} of group {self.group} is free and cannot be shared")
            self._add(block, hold)

    def release(self, blocks: Sequence[int], hold: Hold) -> None:
        """Takes a holder away from each block, from the last block to the first, so that leaves age first."""
        for block in reversed(blocks):
            self._drop(block, hold)
            if self._state[block] == _FREE:
                self._free.append(block)
        self.releases += 1

    def move(self, blocks: Iterable[int], old: Hold, new: Hold) -> None:
        """The same holder, for another reason."""
        for block in blocks:
            self._add(block, new)
            self._drop(block, old)

    def flush(self) -> int:
        """Forgets every cached block that nobody needs; returns their number."""
        removed = self.index.remove_all_evictable()
        for block, block_hash in removed:
            self.evicted.append(block_hash)
            self._update(block)
            self._free.append(block)
        return len(removed)

    def take_evicted(self) -> list[bytes]:
        evicted, self.evicted = self.evicted, []
        return evicted

    def reserve(self, count: int) -> list[int]:
        """`count` spare blocks, for as long as the caller wants. Raises ValueError, and nothing changed, if there are
        too few. Neither the ledger's total nor the prefix cache is concerned."""
        if count > len(self._spare):
            raise ValueError(f"group {self.group} has {len(self._spare)} spare blocks, {count} were to be reserved")
        blocks = [self._spare.pop() for _ in range(count)]
        self._reserved.update(blocks)
        return blocks

    def unreserve(self, blocks: Sequence[int]) -> None:
        """Gives reserved blocks back. Raises ValueError, and nothing changed, for one that is not reserved."""
        wrong = [block for block in blocks if block not in self._reserved]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {wrong or blocks} of group {self.group} are not reserved, or named twice")
        self._reserved.difference_update(blocks)
        self._spare.extend(reversed(blocks))

    def holders(self, block: int) -> int:
        return sum(holders[block] for holders in self._holders)

    def ledger(self) -> Ledger:
        counts = self._counts
        return Ledger(
            group=self.group,
            total=self.total,
            free=counts[_FREE],
            running=counts[Hold.RUNNING],
            staged=counts[Hold.STAGED],
            receiving=counts[Hold.RECEIVING],
            quarantined=counts[Hold.QUARANTINED],
            cached=counts[_CACHED],
            reserved=1 + len(self._reserved),
        )

    # -- internals ------------------------------------------------------------------------------------------

    def _add(self, block: int, hold: Hold) -> None:
        if self._state[block] >= _CACHED:
            self.index.hold(block)
        self._holders[hold][block] += 1
        self._update(block)

    def _drop(self, block: int, hold: Hold) -> None:
        holders = self._holders[hold]
        if holders[block] <= 0:
            raise ValueError(f"block {block} of group {self.group} has no holder for {hold.name}")
        holders[block] -= 1
        if not any(reasons[block] for reasons in self._holders):
            self.index.unhold(block)
        self._update(block)

    def _update(self, block: int) -> None:
        staged, running, receiving, quarantined = self._holders
        if quarantined[block]:
            state = int(Hold.QUARANTINED)
        elif receiving[block]:
            state = int(Hold.RECEIVING)
        elif running[block]:
            state = int(Hold.RUNNING)
        elif staged[block]:
            state = int(Hold.STAGED)
        else:
            state = _FREE if self.index.hash_of(block) is None else _CACHED
        old = self._state[block]
        if state != old:
            self._counts[old] -= 1
            self._counts[state] += 1
            self._state[block] = state
