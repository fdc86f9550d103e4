"""Which server holds which blocks of prompts: what its prefix cache says, and what it was given to compute lately.

An entry is one block on one server, named by its hash alone (rpc/block_hashes.py); neither tokens nor text are kept.
There are never more entries than the cap: it is looked at before each one is added, and the server with the most
entries gives up its least recently used one. Entries go when the server evicts the block, is emptied, or goes itself.
"""

from __future__ import annotations

import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from rpc.block_hashes import HASH_BYTES

Server = TypeVar("Server", bound=Hashable)

# Cap of the router's index: 16 servers with some 30,000 blocks each.
INDEX_ENTRIES = 500_000
# How long a server that was given a prompt is taken to hold its blocks before it has said so.
EXPECTED_S = 30.0
_HASH_OBJECT_BYTES = sys.getsizeof(bytes(HASH_BYTES))


class _Holdings:
    """Of one server: blocks that it says it holds, and those that it is expected to hold, each with the moment until
    which. Least recently used first."""

    __slots__ = ("expected", "held")

    def __init__(self) -> None:
        self.held: OrderedDict[bytes, float] = OrderedDict()
        self.expected: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self.held) + len(self.expected)


class PrefixIndex(Generic[Server]):
    """At most `cap` entries. Servers that are not in it are ignored in every call. Belongs to one event loop."""

    def __init__(
        self, cap: int, *, expected_s: float = EXPECTED_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if cap < 1:
            raise ValueError(f"a prefix index needs room for at least one entry, not {cap}")
        self.cap = cap
        self._expected_s = expected_s
        self._clock = clock
        self._servers: dict[Server, _Holdings] = {}
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def size_bytes(self) -> int:
        """Memory of all entries and the tables that hold them. Takes time per server, not per entry."""
        tables = (sys.getsizeof(h.held) + sys.getsizeof(h.expected) for h in self._servers.values())
        return sum(tables) + self._entries * _HASH_OBJECT_BYTES

    def servers(self) -> list[Server]:
        return list(self._servers)

    def entries_of(self, server: Server) -> int:
        holdings = self._servers.get(server)
        return len(holdings) if holdings is not None else 0

    def unconfirmed(self, server: Server) -> int:
        """Of its entries, those that it has not confirmed yet."""
        holdings = self._servers.get(server)
        return len(holdings.expected) if holdings is not None else 0

    # -- servers

    def add(self, server: Server) -> None:
        """Takes a server in, without entries; one that is known keeps its own."""
        self._servers.setdefault(server, _Holdings())

    def remove(self, server: Server) -> None:
        """Forgets a server and all of its entries."""
        holdings = self._servers.pop(server, None)
        if holdings is not None:
            self._entries -= len(holdings)

    def clear(self, server: Server) -> None:
        """What the server holds, and will hold, is no longer known."""
        if server in self._servers:
            self.remove(server)
            self.add(server)

    # -- what servers say

    def store(self, server: Server, hashes: Sequence[bytes]) -> None:
        """The server holds these blocks, which follow one another in a prompt."""
        holdings = self._servers.get(server)
        if holdings is None:
            return
        # Backwards, so that of a prompt the last block is the first to be given up.
        for block_hash in reversed(hashes):
            if holdings.expected.pop(block_hash, None) is not None:
                self._entries -= 1
            self._put(holdings.held, block_hash, math.inf)

    def empty(self, server: Server) -> None:
        """The server holds nothing but what it says from now on; what it was given it may still come to hold."""
        holdings = self._servers.get(server)
        if holdings is not None:
            self._entries -= len(holdings.held)
            # A new table: that of a full one would keep its memory.
            holdings.held = OrderedDict()

    def drop(self, server: Server, hashes: Iterable[bytes]) -> None:
        """The server has evicted these blocks."""
        holdings = self._servers.get(server)
        if holdings is None:
            return
        for block_hash in hashes:
            # One that is expected was given to the server after it evicted the block, or is about to be computed.
            if block_hash in holdings.held:
                del holdings.held[block_hash]
                self._entries -= 1

    # -- what the router does

    def expect(self, server: Server, hashes: Sequence[bytes]) -> None:
        """The server is given a prompt with these blocks: those that it holds are used, the others it will hold soon.

        What it does not confirm within the time limit is forgotten, so that a failed request leaves nothing.
        """
        holdings = self._servers.get(server)
        if holdings is None:
            return
        self._forget_unconfirmed(holdings)
        until = self._clock() + self._expected_s
        held, expected = holdings.held, holdings.expected
        for block_hash in reversed(hashes):
            if block_hash in held:
                held.move_to_end(block_hash)
            else:
                self._put(expected, block_hash, until)

    def matches(self, servers: Sequence[Server], hashes: Iterable[bytes]) -> list[int]:
        """How many of the first blocks each server holds or is expected to hold.

        `hashes` is read up to the first block that none of them has.
        """
        found = [0] * len(servers)
        left = []
        for place, server in enumerate(servers):
            holdings = self._servers.get(server)
            if holdings is not None:
                self._forget_unconfirmed(holdings)
                left.append((place, holdings.held, holdings.expected))
        count = 0
        for block_hash in hashes if left else ():
            having = []
            for one in left:
                if block_hash in one[1] or block_hash in one[2]:
                    having.append(one)
                else:
                    found[one[0]] = count
            if not having:
                return found
            left = having
            count += 1
        for place, _, _ in left:
            found[place] = count
        return found

    # -- entries

    def _put(self, table: OrderedDict[bytes, float], block_hash: bytes, until: float) -> None:
        """Adds an entry, or makes it the most recently used one."""
        if block_hash not in table:
            if self._entries >= self.cap:
                self._give_up_one()
            self._entries += 1
        table[block_hash] = until
        table.move_to_end(block_hash)

    def _give_up_one(self) -> None:
        fullest = max(self._servers.values(), key=len)
        table = fullest.held if len(fullest.held) >= len(fullest.expected) else fullest.expected
        table.popitem(last=False)
        self._entries -= 1

    def _forget_unconfirmed(self, holdings: _Holdings) -> None:
        expected = holdings.expected
        if not expected:
            return
        now = self._clock()
        while expected:
            block_hash = next(iter(expected))
            if expected[block_hash] > now:
                return
            del expected[block_hash]
            self._entries -= 1
