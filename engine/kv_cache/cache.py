"""The KV cache of one engine: what each request holds in every cache group, all groups or none.

A request's blocks are an `Allocation`. Block i of a group holds the tokens [i * block_size, (i + 1) *
block_size). Only blocks whose KV is proven complete enter the prefix cache, by `commit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.kv_cache.block_pool import BlockPool, Hold
from engine.messages import KvEvent, KvGroupInfo, Ledger
from rpc.block_hashes import HashChain


@dataclass(slots=True)
class GroupBlocks:
    """What one request holds of one cache group."""

    blocks: list[int]
    chain: HashChain
    receiving: tuple[int, int] = (0, 0)  # indices [first, last) of blocks that a transfer writes
    committed: int = 0  # leading blocks that are done with the prefix cache


@dataclass(slots=True)
class Allocation:
    """The blocks of one request. Its generation is never given out twice by one engine."""

    generation: int
    cached_tokens: int  # leading tokens found in the prefix cache, the same in all groups
    groups: dict[str, GroupBlocks]
    hold: Hold = Hold.RUNNING  # why the blocks outside `receiving` are held

    def table(self, group: str) -> list[int]:
        return self.groups[group].blocks


@dataclass(slots=True)
class _Group:
    info: KvGroupInfo
    pool: BlockPool


Chains = dict[int, HashChain]  # by block size


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


class KvCache:
    """Block pools and prefix cache of all cache groups of a rank. Not thread-safe, no locks needed."""

    def __init__(
        self,
        groups: Sequence[KvGroupInfo],
        num_blocks: int,
        prefix_caching: bool = True,
        spare: Mapping[str, int] | None = None,
    ) -> None:
        """`spare` blocks by tag lie behind the `num_blocks` usable ones and can only be reserved."""
        if not groups or len({group.tag for group in groups}) != len(groups):
            raise ValueError(f"cache groups need distinct tags: {[group.tag for group in groups]}")
        self.prefix_caching = prefix_caching
        self.num_blocks = num_blocks
        self.evicted_blocks = 0  # by allocation, since the last look
        self.flushed_blocks = 0
        spare = spare or {}
        self._groups = {
            group.tag: _Group(group, BlockPool(group.tag, num_blocks, spare.get(group.tag, 0))) for group in groups
        }
        self._list = list(self._groups.values())
        self._step = math.lcm(*(group.block_size for group in groups))  # hits end at a block of every group
        self._generation = 0
        self._events: list[KvEvent] = []

    @property
    def groups(self) -> list[KvGroupInfo]:
        return [group.info for group in self._list]

    @property
    def releases(self) -> int:
        """Rises whenever blocks may have become available; as long as it stays, a failed `acquire` fails
        again."""
        return sum(group.pool.releases for group in self._list)

    def fits_empty(self, tokens: int) -> bool:
        """Whether `tokens` tokens would fit if nothing else were held."""
        return all(blocks_for(tokens, group.info.block_size) <= group.pool.total for group in self._list)

    def chains(self, salt: str = "", embeddings: bytes = b"") -> Chains:
        """Hashes of one request's blocks, to be kept with it; empty at first. embeddings: digest of its own ones."""
        sizes = (group.info.block_size for group in self._list)
        return {size: HashChain(size, salt, embeddings) for size in sizes}

    def acquire(
        self, tokens: Sequence[int], chains: Chains, *, max_hit: int, extra: int = 0, receive: bool = False
    ) -> Allocation | None:
        """Blocks for `tokens` and `extra` tokens more, the longest cached prefix shared; None if they do not
        fit.

        At most `max_hit` tokens are taken from the prefix cache. With `receive` the blocks of `tokens` that
        are not cached are to be written by a transfer; those of `extra` alone are not. `chains` are those of
        a sequence that only ever grew to `tokens`. A failure changes nothing, not even the order of eviction.
        """
        count = len(tokens)
        hit = self._match(tokens, min(max_hit, count), chains)
        plan: list[tuple[_Group, list[int], int]] = []
        for group in self._list:
            size, index = group.info.block_size, group.pool.index
            shared = [index.find(block_hash) for block_hash in chains[size].hashes[: hit // size]]
            fresh = blocks_for(count + extra, size) - len(shared)
            if fresh + sum(map(index.is_evictable, shared)) > group.pool.available:
                return None
            plan.append((group, shared, fresh))
        self._generation += 1
        allocation = Allocation(self._generation, hit, {})
        for group, shared, fresh in plan:
            size, pool = group.info.block_size, group.pool
            pool.share(shared, Hold.RUNNING)
            blocks = pool.allocate(fresh, Hold.RUNNING)
            assert blocks is not None
            held = GroupBlocks(shared + blocks, chains[size], committed=len(shared))
            if receive:
                held.receiving = (len(shared), blocks_for(count, size))
                pool.move(held.blocks[slice(*held.receiving)], Hold.RUNNING, Hold.RECEIVING)
            allocation.groups[group.info.tag] = held
        return allocation

    def grow(self, allocation: Allocation, num_tokens: int) -> bool:
        """Adds blocks until `num_tokens` tokens fit; False, and nothing changed, if there are too few.

        Costs O(1) when the last block has room.
        """
        added: list[tuple[BlockPool, GroupBlocks, int]] = []
        for group in self._list:
            held = allocation.groups[group.info.tag]
            missing = blocks_for(num_tokens, group.info.block_size) - len(held.blocks)
            if missing <= 0:
                continue
            fresh = group.pool.allocate(missing, allocation.hold)
            if fresh is None:
                for pool, other, count in added:
                    pool.release(other.blocks[-count:], allocation.hold)
                    del other.blocks[-count:]
                return False
            held.blocks.extend(fresh)
            added.append((group.pool, held, missing))
        return True

    def commit(self, allocation: Allocation, tokens: Sequence[int], num_tokens: int) -> list[tuple[int, bytes]]:
        """The KV of the first `num_tokens` of `tokens` is complete: its full blocks may be shared from now
        on. Returns those of the first group that are in the prefix cache since, with their hashes."""
        if not self.prefix_caching:
            return []
        new: list[tuple[int, bytes]] = []
        for group in self._list:
            held = allocation.groups[group.info.tag]
            full = num_tokens // group.info.block_size
            if full > held.committed:
                stored = self._commit(group, held, tokens, full)
                if group is self._list[0]:
                    new = stored
        return new

    def record_given(self, tag: str) -> list[int]:
        """A list to which each block of the group `tag` is added when it is given out; whoever asks empties it."""
        pool = self._group_of(tag).pool
        if pool.given is None:
            pool.given = []
        return pool.given

    def versions(self, tag: str) -> list[int]:
        """By block of the group `tag`: a number that rises whenever the block is given out, which is before anything
        may be written to it. Any thread may read it."""
        return self._group_of(tag).pool.versions

    def available(self, tag: str) -> int:
        """Blocks of the group `tag` that could be given out now, cached ones that nobody needs included."""
        return self._group_of(tag).pool.available

    def cached_tokens(self, tokens: Sequence[int], chains: Chains, max_hit: int) -> int:
        """Leading tokens of `tokens`, at most `max_hit`, that `acquire` would find in the prefix cache now."""
        return self._match(tokens, min(max_hit, len(tokens)), chains)

    def free(self, allocation: Allocation) -> None:
        """Lets go of every block of the allocation, which is of no use afterwards."""
        for group in self._list:
            held = allocation.groups[group.info.tag]
            first, last = held.receiving
            if last > first:
                hold = Hold.QUARANTINED if allocation.hold is Hold.QUARANTINED else Hold.RECEIVING
                group.pool.release(held.blocks[first:last], hold)
            if allocation.hold is not Hold.QUARANTINED:
                group.pool.release(held.blocks[last:] if last > first else held.blocks, allocation.hold)
                if last > first:
                    group.pool.release(held.blocks[:first], allocation.hold)
            held.blocks, held.receiving = [], (0, 0)

    def stage(self, allocation: Allocation) -> None:
        """The request has its answer; its blocks stay for the decode server."""
        self._move(allocation, Hold.STAGED)

    def received(self, allocation: Allocation) -> None:
        """The transfer is complete and verified; nothing writes the blocks any more."""
        for group in self._list:
            held = allocation.groups[group.info.tag]
            group.pool.move(held.blocks[slice(*held.receiving)], Hold.RECEIVING, Hold.RUNNING)
            held.receiving = (0, 0)

    def received_leading(self, allocation: Allocation, tag: str, count: int) -> None:
        """The first `count` of the blocks of the group `tag` that a transfer writes are complete and verified, and
        nothing writes them any more. The others stay as they are."""
        held = allocation.groups[tag]
        first, last = held.receiving
        if not 0 <= count <= last - first:
            raise ValueError(f"{count} of {last - first} blocks of group {tag} cannot have been received")
        self._group_of(tag).pool.move(held.blocks[first : first + count], Hold.RECEIVING, Hold.RUNNING)
        held.receiving = (first + count, last) if first + count < last else (0, 0)

    def quarantine(self, allocation: Allocation) -> None:
        """The request is gone while a transfer may still write: keeps those blocks alone, until `free`."""
        for group in self._list:
            held = allocation.groups[group.info.tag]
            first, last = held.receiving
            group.pool.move(held.blocks[first:last], Hold.RECEIVING, Hold.QUARANTINED)
            group.pool.release(held.blocks[last:], allocation.hold)
            group.pool.release(held.blocks[:first], allocation.hold)
        allocation.hold = Hold.QUARANTINED

    def flush(self) -> int:
        """Forgets every cached block that no request needs; returns their number."""
        self._collect_evictions()
        count = sum(group.pool.flush() for group in self._list)
        if all(len(group.pool.index) == 0 for group in self._list):
            for group in self._list:
                group.pool.take_evicted()
            self._events.append(KvEvent(cleared=True))
        else:
            self._collect_evictions(flushed=True)
        self.flushed_blocks += count
        return count

    def reserve(self, tag: str, count: int) -> list[int]:
        """`count` spare blocks of the group `tag`, outside of what requests can get, without a trace in the prefix
        cache or its metrics. Raises ValueError for an unknown tag or too few spare blocks."""
        return self._group_of(tag).pool.reserve(count)

    def unreserve(self, tag: str, blocks: Sequence[int]) -> None:
        """Gives back what `reserve` gave. Raises ValueError for anything else."""
        self._group_of(tag).pool.unreserve(blocks)

    def ledgers(self) -> list[Ledger]:
        return [group.pool.ledger() for group in self._list]

    def take_events(self) -> list[KvEvent]:
        """Changes of the prefix cache since the last call, in order."""
        self._collect_evictions()
        events, self._events = self._events, []
        return events

    # -- internals ------------------------------------------------------------------------------------------

    def _group_of(self, tag: str) -> _Group:
        group = self._groups.get(tag)
        if group is None:
            raise ValueError(f"no cache group {tag!r}; there are: {', '.join(sorted(self._groups))}")
        return group

    def _match(self, tokens: Sequence[int], max_hit: int, chains: Chains) -> int:
        """Leading tokens, a multiple of every group's block size, that are cached in all groups."""
        if not self.prefix_caching:
            return 0
        hit = max_hit // self._step * self._step
        for group in self._list:
            if hit == 0:
                return 0
            size = group.info.block_size
            find = group.pool.index.find
            found = 0
            chain = chains[size]
            # Hashing stops at the first miss.
            while found < hit // size and find(chain.extend(tokens, found + 1)[found]):
                found += 1
            hit = found * size // self._step * self._step
        return hit

    def _commit(self, group: _Group, held: GroupBlocks, tokens: Sequence[int], full: int) -> list[tuple[int, bytes]]:
        """Returns what entered the prefix cache: blocks with their hashes."""
        self._collect_evictions()
        index, chain = group.pool.index, held.chain
        hashes = chain.extend(tokens, full)
        first = held.committed
        # Where a block of this request duplicated another one, which was evicted since, this one takes its
        # place: a block is cached only below its cached parent.
        while first > 0 and not index.find(hashes[first - 1]):
            first -= 1
        stored: list[str] = []
        new: list[tuple[int, bytes]] = []
        parent = b""
        for position in range(first, full):
            above = hashes[position - 1] if position else None
            if index.add(hashes[position], held.blocks[position], above):
                if not stored:
                    parent = above or b""
                stored.append(hashes[position].hex())
                new.append((held.blocks[position], hashes[position]))
            elif stored:
                self._events.append(KvEvent(stored=stored, parent=parent.hex()))
                stored = []
        if stored:
            self._events.append(KvEvent(stored=stored, parent=parent.hex()))
        held.committed = full
        return new

    def _collect_evictions(self, flushed: bool = False) -> None:
        for group in self._list:
            evicted = group.pool.take_evicted()
            if evicted:
                self._events.append(KvEvent(removed=[block_hash.hex() for block_hash in evicted]))
                if not flushed:
                    self.evicted_blocks += len(evicted)

    def _move(self, allocation: Allocation, hold: Hold) -> None:
        for group in self._list:
            group.pool.move(allocation.groups[group.info.tag].blocks, allocation.hold, hold)
        allocation.hold = hold
