"""Tiers below the pool of a scripted engine, whose threads are moves of the test.

They keep the tokens whose KV a block holds, as the double of the model sees it. A thread that may still write does so
at the worst moment: just before a fetch ends it writes rubbish into every block that is not complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cache_store.tiers.store import Fetch, Segment

if TYPE_CHECKING:
    from tests.unit.engine.scripted_engine import ScriptedEngine

RUBBISH = -1


class ScriptedTiers:
    def __init__(self) -> None:
        self.stored: dict[bytes, tuple[int, ...]] = {}  # by hash of the block
        self.writes: list[tuple[int, bytes, int]] = []  # block, hash, version: not copied yet
        self.looking: list[Fetch] = []
        self.loading: list[Fetch] = []
        self.busy = False
        self.quiet = False  # a fetch that is cancelled writes nothing more
        self.void = 0
        self._ended: list[Fetch] = []

    def attach(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self._size = engine.limits.block_size
        self._versions = engine.kv.versions("full")

    # -- what the scheduler asks ------------------------------------------------------------------------------

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        self.writes += [(block, block_hash, self._versions[block]) for block, block_hash in blocks]

    def look_up(self, block_hashes: Sequence[bytes]) -> Fetch | None:
        if self.busy:
            return None
        fetch = Fetch(list(block_hashes), 0)
        self.looking.append(fetch)
        return fetch

    def take_found(self, fetch: Fetch) -> Fetch:
        fetch.cancelled = True
        return Fetch(fetch.keys, 0, list(fetch.segments))

    def load(self, fetch: Fetch, offset: int, blocks: Sequence[int]) -> None:
        assert 0 < len(blocks) <= fetch.found - offset
        fetch.offset, fetch.blocks = offset, list(blocks)
        fetch.complete = bytearray(len(blocks))
        self.loading.append(fetch)

    def cancel(self, fetch: Fetch) -> bool:
        fetch.cancelled = True
        return self.quiet

    def poll(self) -> list[Fetch]:
        ended, self._ended = self._ended, []
        return ended

    def clear(self) -> None:
        self.stored.clear()
        self.writes.clear()

    # -- what the threads do ----------------------------------------------------------------------------------

    def copy_down(self, count: int = 1 << 30) -> None:
        for block, block_hash, version in self.writes[:count]:
            if self._versions[block] != version:
                self.void += 1
                continue
            content = tuple(self.engine.pool[block, slot] for slot in range(self._size))
            assert self.stored.setdefault(block_hash, content) == content, "two contents under one hash"
        del self.writes[:count]

    def find(self, fetch: Fetch) -> None:
        """The look-up knows what there is, and has not ended: a farther tier does not answer."""
        count = next((i for i, key in enumerate(fetch.keys) if key not in self.stored), len(fetch.keys))
        fetch.segments[:] = [Segment(None, 0, count)] if count else []  # type: ignore[arg-type]

    def answer(self, fetch: Fetch) -> None:
        """The look-up ends."""
        self.looking.remove(fetch)
        if not fetch.cancelled:
            self.find(fetch)
        self._ended.append(fetch)

    def fill(self, fetch: Fetch, count: int = 1 << 30) -> None:
        """So many blocks more are loaded, as far as they are still wanted and there."""
        for index in range(len(fetch.blocks)):
            if count <= 0 or fetch.cancelled:
                return
            if fetch.complete[index]:
                continue
            content = self.stored.get(fetch.keys[fetch.offset + index])
            if content is None:
                return
            for slot, token in enumerate(content):
                self.engine.pool[fetch.blocks[index], slot] = token
            fetch.complete[index] = 1
            count -= 1

    def end(self, fetch: Fetch) -> None:
        """The load ends, complete or not."""
        self.loading.remove(fetch)
        for index, block in enumerate(fetch.blocks):
            if not fetch.complete[index] and not (self.quiet and fetch.cancelled):
                for slot in range(self._size):
                    self.engine.pool[block, slot] = RUBBISH
        self._ended.append(fetch)

    def finish(self) -> None:
        """Everything that is under way is done."""
        for fetch in list(self.looking):
            self.answer(fetch)
        for fetch in list(self.loading):
            self.fill(fetch)
            self.end(fetch)
        self.copy_down()
