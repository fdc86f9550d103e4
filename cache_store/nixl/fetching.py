"""One-sided reads through NIXL (`fetching.Fetcher`), and what a peer is told to make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor

from cache_store.geometry.rows import Rows
from cache_store.memory.fetching import Part, settle
from cache_store.memory.row_copies import check_rows
from cache_store.memory.staging import PeerMemory, Ticket
from cache_store.nixl.link import NixlLink, NixlPeer, NotYet, ReadFailed
from cache_store.transports import NIXL
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode

# Reads of a load that has ended get so long to end, too. Then their process is ended, and with it whatever else is
# being read by it: those loads can be repeated, while the blocks of the hanging ones could not be given back.
HANG_S = 5.0
LOOK_S = 1.0  # for a word to be read; then its owner is asked
READ_BYTES = 32 << 20  # of one read, unless a layer has more; each that ends is a sign of progress


class NixlFetcher:
    """Belongs to the agent's loop. `pinned`: no other transport is allowed, so it is waited for."""

    transport = NIXL
    in_order = False

    def __init__(self, link: NixlLink, pinned: bool, workers: Executor) -> None:
        self.link = link
        self._pinned = pinned
        self._workers = workers
        self._timers: set[asyncio.TimerHandle] = set()

    async def open(self, memory: pb.SharedPool) -> PeerMemory:
        if self.link.session is None and not self._pinned:
            self.link.begin()
            raise NotYet("the NIXL process is being started")
        return await self.link.open(memory)

    async def begin(
        self, memory: PeerMemory, layers: range, source: Rows, target: Rows, after: Ticket | None
    ) -> AsyncIterator[Part]:
        """Few reads of many layers: each costs the library and both processes more than its bytes when it is small."""
        assert isinstance(memory, NixlPeer)
        check_rows(source, min(memory.layers[source.group, layer][1] for layer in layers))
        step = max(1, READ_BYTES // max(1, source.nbytes))
        for at in range(0, len(layers), step):
            some = layers[at : at + step]
            yield some, self._read(memory, some, source, target, after)

    def _read(
        self, memory: NixlPeer, layers: range, source: Rows, target: Rows, after: Ticket | None
    ) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def ended(read: asyncio.Future[int]) -> None:
            failure = read.exception()
            settle(done, _lost(failure) if isinstance(failure, ReadFailed) else failure)

        def read(failure: BaseException | None) -> None:
            if failure is not None:
                settle(done, failure)
            else:
                self.link.read(memory, layers, source, target).add_done_callback(ended)

        if after is None:
            read(None)
        else:
            waiting = loop.run_in_executor(self._workers, after.wait)
            waiting.add_done_callback(lambda reached: read(reached.exception()))
        return done

    def words(self, memory: PeerMemory, shared: pb.SharedPool) -> NixlWords:
        assert isinstance(memory, NixlPeer)
        return NixlWords(self, memory)

    def usable(self, memory: PeerMemory) -> bool:
        assert isinstance(memory, NixlPeer)
        return self.link.session is memory.session

    def give_up(self, memory: PeerMemory) -> None:
        """A load from there has ended while reads of it are under way. They end in bounded time."""
        assert isinstance(memory, NixlPeer)
        self._watch(memory, asyncio.get_running_loop().time())

    def _watch(self, peer: NixlPeer, since: float) -> None:
        """Until the reads that began before `since` have ended. They may be another load's, and slow."""
        loop = asyncio.get_running_loop()
        looked = loop.time()

        def look() -> None:
            self._timers.discard(timer)
            hanging = self.link.under_way(peer, since)
            if hanging and self.link.moved(peer, looked):
                self._watch(peer, since)
            elif hanging:
                self.link.restart(f"{hanging} reads of a peer hang, and their load has given up {HANG_S:g} s ago")

        timer = loop.call_later(HANG_S, look)
        self._timers.add(timer)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


class NixlWords:
    """Words of a peer's leases, looked at by a read like those of its blocks (`memory.lease_words.WordReader`)."""

    def __init__(self, fetcher: NixlFetcher, peer: NixlPeer) -> None:
        self._fetcher = fetcher
        self._peer = peer

    async def stands(self, word: pb.LeaseWord) -> bool:
        if not word.value:
            return False
        look = self._fetcher.link.look(self._peer, word.index)
        try:
            async with asyncio.timeout(LOOK_S):
                return await asyncio.shield(look) == word.value
        except (ReadFailed, TimeoutError):
            return False
        finally:
            if not look.done():
                self._fetcher.give_up(self._peer)

    def close(self) -> None:
        return  # the peer's memory is closed


def _lost(failure: ReadFailed) -> BatonError:
    return BatonError(
        ErrorCode.CACHE_STORE_LOAD_RDMA_WRITE_FAILED,
        "the prefill server's memory cannot be read any more",
        metadata={"nixl": str(failure)[:256]},
    )
