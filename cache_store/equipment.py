"""What an agent moves KV with: the transports that are possible here, and what each of them needs."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cache_store.geometry.layout import AgentIdentity
from cache_store.memory.fetching import DeviceFetcher, Fetcher, HostFetcher
from cache_store.memory.lease_words import make_lease_words
from cache_store.memory.pool import HostKvPool, KvPool, StagedKvPool
from cache_store.memory.staging import Completions, Staging
from cache_store.nixl.fetching import NixlFetcher
from cache_store.nixl.link import NixlLink
from cache_store.observations import Observe
from cache_store.offering import make_offer
from cache_store.settings import AgentSettings
from cache_store.tcp.listener import DataListener
from cache_store.transports import IPC, NIXL, ONE_SIDED, TCP
from rpc.server import bind_error

_log = logging.getLogger(__name__)


class Equipment:
    """Made by the thread that makes the agent, used on the agent's.

    `offer`: what handshakes tell. `workers`: threads for copies in host memory. `staging`, `marks`: of a pool on a
    device. `words`: those of the own leases, where peers may read blocks by themselves. `fetchers`: of the one-sided
    transports by which KV can be read here. `nixl`, `listener`: of these transports.

    Raises INVALID_PARAMS when nixl is demanded and not possible.
    """

    def __init__(self, identity: AgentIdentity, pool: KvPool, settings: AgentSettings, observe: Observe) -> None:
        self._settings = settings
        self._observe = observe
        self.offer = make_offer(pool, settings, observe)
        # Threads begin with the first event that is large enough for them.
        self.workers = ThreadPoolExecutor(settings.threads, "kv-host-copy")
        self.staging: Staging | None = None
        self.marks: Completions | None = None
        if isinstance(pool, StagedKvPool):
            pieces = [settings.chunk_bytes_of(transport) for transport in self.offer.transports]
            slot_bytes = max(*pieces, *(group.block_bytes for group in identity.groups))
            self.staging = Staging(pool.copies, settings.staging_slots, slot_bytes)
            self.marks = Completions("kv-marks")
        shown = ONE_SIDED & (self.offer.memories.keys() | self.offer.on_demand)
        self.words = make_lease_words() if shown else None
        if self.words is not None and IPC in shown:
            self.offer.memories[IPC].words.MergeFrom(self.words.describe())
        self.fetchers: dict[str, Fetcher] = {}
        if IPC in self.offer.transports:
            self.fetchers[IPC] = self._ipc_fetcher(pool)
        self.nixl: NixlLink | None = None
        regions = pool.regions()
        if NIXL in self.offer.transports and regions is not None:
            self.nixl = NixlLink(f"{identity.engine_id}/{identity.rank}", regions, observe, words=self.words)
            self.fetchers[NIXL] = NixlFetcher(self.nixl, self.nixl_alone, self.workers)
        self.listener = DataListener(identity.engine_id, settings, observe) if TCP in self.offer.transports else None

    def _ipc_fetcher(self, pool: KvPool) -> Fetcher:
        if self.staging is not None:
            return DeviceFetcher(IPC, self.staging)
        assert isinstance(pool, HostKvPool)
        return HostFetcher(IPC, pool, self.workers, self._settings.threads)

    @property
    def nixl_alone(self) -> bool:
        """No other transport will do, so it is there from the start."""
        return self.offer.transports == (NIXL,)

    def listen(self, host: str) -> None:
        """Opens the port of the transport tcp, which the handshakes tell. Without one, peers cannot use it: raises
        SystemExit when they could use no other."""
        if self.listener is None:
            return
        wanted = self._settings.data_port
        try:
            port = self.listener.listen(host, wanted)
        except OSError as error:
            if self.offer.transports == (TCP,):
                raise bind_error("--kv-data-port", host, wanted, str(error.strerror)) from None
            self._observe("kv_transport_fallbacks_total", transport=TCP, reason="failed")
            _log.warning(
                "data port %s of %s cannot be opened, so peers cannot use tcp; give another --kv-data-port: %s",
                wanted or "(any)",
                host,
                error,
            )
            return
        self.listener.start()
        self.offer = replace(self.offer, data_port=port)

    def close(self) -> None:
        """The agent's thread has ended, and no copy is under way."""
        for fetcher in self.fetchers.values():
            fetcher.close()
        self.workers.shutdown(wait=False)
        if self.marks is not None:
            self.marks.close()
        if self.staging is not None:
            self.staging.close()
        words, self.words = self.words, None
        if words is not None:
            words.close()
