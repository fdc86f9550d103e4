"""A small KV pool with a store of tiers below it, and tiers that a test can hold up or break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from cache_store.geometry.layout import GroupLayout
from cache_store.memory.host_copies import HostCopyEngine
from cache_store.memory.pool import HostKvPool, KvPool, StagedKvPool
from cache_store.memory.stream_copies import StreamCopyEngine
from cache_store.tiers.copies import block_copies
from cache_store.tiers.host import HostTier
from cache_store.tiers.keys import TierKeys
from cache_store.tiers.record import HEADER_BYTES, record_bytes, seal_record
from cache_store.tiers.store import Fetch, TierStore
from cache_store.tiers.tier import Record, Tier, TierError
from tests.unit.cache_store.late_device import LateDevice

LAYOUT = GroupLayout.of("default", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
PAYLOAD = LAYOUT.num_layers * LAYOUT.block_bytes
RECORD = record_bytes(PAYLOAD)
WAIT_S = 10.0


def until(condition: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.002)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def record_of(number: int, fill: int | None = None) -> bytes:
    """A record as any tier gets it."""
    record = bytearray(RECORD)
    record[HEADER_BYTES:] = bytes([(number if fill is None else fill) % 251]) * PAYLOAD
    seal_record(key_of(number), record)
    return bytes(record)


class ScriptedTier:
    """A tier in memory whose calls wait while `gate` is closed, and fail while `failure` is set."""

    def __init__(self, name: str = "mooncake", shared: bool = True) -> None:
        self.name = name
        self.shared = shared
        self.takes = True
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.entered = 0  # calls that came, whether or not they were let through
        self.put_keys: list[bytes] = []  # those that `put` was called for and not failed, in that order
        self._inside = HostTier(1 << 30)
        self.discard, self.clear = self._inside.discard, self._inside.clear
        self.stats, self.close = self._inside.stats, self._inside.close
        self.touch = self._inside.touch

    def _pass(self) -> None:
        self.entered += 1
        assert self.gate.wait(WAIT_S), "the gate stayed closed"
        if self.failure is not None:
            raise self.failure

    def find(self, keys: Sequence[bytes]) -> int:
        self._pass()
        return self._inside.find(keys)

    def has(self, key: bytes) -> bool:
        return self.find((key,)) == 1

    def get(self, key: bytes, into: memoryview) -> bool:
        self._pass()
        return self._inside.get(key, into)

    def lent(self, key: bytes) -> None:
        return None

    def put(self, key: bytes, record: Record) -> bool:
        self._pass()
        self.put_keys.append(key)
        return self._inside.put(key, record)


class Below:
    """A pool of `blocks` blocks, all of them different, and a store below it."""

    def __init__(
        self, tiers: Sequence[Tier], blocks: int = 40, *, staged: str = "", timeout_s: float = 5.0, seed: int = 1
    ) -> None:
        """staged: the pool's memory is reached by a copy engine of `threads`, or of `streams` of a device."""
        rng = np.random.default_rng(seed)
        self.memory = [
            rng.integers(0, 256, (blocks, LAYOUT.block_bytes), dtype=np.uint8) for _ in range(LAYOUT.num_layers)
        ]
        layers = {LAYOUT.tag: self.memory}
        self.copies: HostCopyEngine | StreamCopyEngine | None = None
        if staged == "threads":
            self.copies = HostCopyEngine([LAYOUT], layers)
        elif staged:
            places = {(LAYOUT.tag, layer): torch.from_numpy(memory) for layer, memory in enumerate(self.memory)}
            self.copies = StreamCopyEngine(LateDevice(), places)
        pool: KvPool = HostKvPool([LAYOUT], layers)
        if self.copies is not None:
            pool = StagedKvPool({LAYOUT.tag: blocks}, self.copies)
        self.versions = [0] * blocks
        self.woken = threading.Event()
        self.store = TierStore(
            tiers,
            block_copies(pool, LAYOUT),
            TierKeys("model", LAYOUT),
            self.versions,
            timeout_s=timeout_s,
            wake=self.woken.set,
        )
        self.polled: list[Fetch] = []
        self.counts: dict[tuple[str, ...], float] = {}

    def block(self, number: int) -> bytes:
        """The content of a block, all layers."""
        return b"".join(layer[number].tobytes() for layer in self.memory)

    def write(self, blocks: Sequence[int], first_hash: int = 0) -> None:
        """Block i of the list has hash `first_hash` + i; returns when all are down or dropped."""
        self.begin_write([(block, key_of(first_hash + i)) for i, block in enumerate(blocks)])
        until(lambda: self.store.idle, "everything is written")

    def begin_write(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """(block, hash): named in one step of the engine, which begins the next one."""
        self.store.write(blocks)
        self.polled += self.store.poll()

    def ended(self, fetch: Fetch) -> Fetch:
        """Waits until the fetch comes out of `poll`."""

        def ended() -> bool:
            self.polled += self.store.poll()
            return fetch in self.polled

        until(ended, "the fetch ends")
        self.polled.remove(fetch)
        return fetch

    def look_up(self, count: int, first_hash: int = 0) -> Fetch:
        fetch = self.store.look_up([key_of(first_hash + i) for i in range(count)])
        assert fetch is not None, "every thread hangs"
        return self.ended(fetch)

    def load(self, fetch: Fetch, blocks: Sequence[int], offset: int = 0) -> int:
        """Returns how many blocks have come."""
        self.store.load(fetch, offset, blocks)
        return self.ended(fetch).good

    def count(self, name: str, **labels: str) -> float:
        """A counter so far."""
        for item in self.store.take_observations():
            key = (item.name, *sorted(item.labels.values()))
            self.counts[key] = self.counts.get(key, 0) + item.value
        return self.counts.get((f"baton_kv_tier_{name}", *sorted(labels.values())), 0)

    def close(self) -> None:
        self.store.close(drain_s=WAIT_S)
        if self.copies is not None:
            self.copies.close()


@contextmanager
def below(*tiers: Tier, **options: object) -> Iterator[Below]:
    made = Below(tiers, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for tier in tiers:
            if isinstance(tier, ScriptedTier):
                tier.gate.set()
        made.close()


__all__ = ["LAYOUT", "PAYLOAD", "RECORD", "Below", "ScriptedTier", "TierError", "below", "key_of", "record_of", "until"]
