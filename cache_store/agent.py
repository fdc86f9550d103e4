"""The cache-store agent of one engine rank: it serves the KV that its engine staged, and pulls what it needs.

All sockets and all state live on the agent's own thread, an asyncio loop. The methods of `CacheStoreAgent` may be called
from any thread, never block, and never raise for what happens on the network: news come as events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cache_store.events import (
    AgentEvent,
    AgentStats,
    KvSourceRef,
    LeaseEnded,
    LoadDone,
    LoadFailed,
    Observation,
)
from cache_store.layout import AgentIdentity, GroupLayout
from cache_store.pool import KvPool
from cache_store.settings import AgentSettings
from protos import common_pb2
from rpc.errors import BatonError

__all__ = [
    "AgentEvent",
    "AgentIdentity",
    "AgentSettings",
    "AgentStats",
    "CacheStoreAgent",
    "GroupLayout",
    "KvSourceRef",
    "LeaseEnded",
    "LoadDone",
    "LoadFailed",
    "Observation",
]


class CacheStoreAgent:
    """One per engine rank. `wake` is called on the agent's thread after an event was queued; it must not block."""

    def __init__(
        self,
        identity: AgentIdentity,
        pool: KvPool,
        settings: AgentSettings,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def start(self, host: str, port: int) -> str:
        """Listens and returns the bound "host:port" (port 0: any free one). A port in use is CONNECT_FAILED naming it."""
        raise NotImplementedError

    def close(self, timeout_s: float) -> None:
        """Stops serving; open loads end with SERVER_DRAINING. Returns when the thread has ended, at most `timeout_s`."""
        raise NotImplementedError

    # ---- prefill side

    def admit(
        self,
        request_key: str,
        generation: int,
        prompt_tokens: int,
        blocks: Mapping[str, Sequence[int]],
        ready_blocks: int,
    ) -> None:
        """The request has its blocks (per group, at least those of the prompt) and is being computed now.

        The first `ready_blocks` are readable at all layers (prefix hits). One LeaseEnded follows, sooner or later.
        """
        raise NotImplementedError

    def publish(self, request_key: str, group: str, layer: int, upto_block: int) -> None:
        """Blocks [0, upto_block) of that layer are final. Ignored when the lease has ended."""
        raise NotImplementedError

    def computed(self, request_key: str, result: common_pb2.PrefillResult, hold: bool) -> None:
        """Every prompt block was published. The lease clock starts; without `hold` the lease ends with its readers."""
        raise NotImplementedError

    def fail(self, request_key: str, error: BatonError) -> None:
        """The request failed or was aborted: open, parked and later loads of the key end with `error`."""
        raise NotImplementedError

    def tombstone(self, request_key: str) -> None:
        """An abort of a key that the engine does not know: its load is REQUEST_TOMBSTONED."""
        raise NotImplementedError

    # ---- decode side

    def keep_alive(self, request_key: str, source: KvSourceRef) -> None:
        """The request is queued here: renews its lease on P until `load`, `cancel_load` or `forget`."""
        raise NotImplementedError

    def forget(self, request_key: str) -> None:
        """Ends `keep_alive` without a word to P: another decode server may still load the key."""
        raise NotImplementedError

    def load(
        self,
        request_key: str,
        source: KvSourceRef,
        prompt_tokens: int,
        wanted: Mapping[str, tuple[int, Sequence[int]]],
        deadline_s: float | None,
        reload: bool = False,
    ) -> None:
        """Pulls blocks into the pool: per group the first block's index in the request and the physical ids here.

        `deadline_s` is the time the request has left. Exactly one LoadDone or LoadFailed follows.
        """
        raise NotImplementedError

    def cancel_load(self, request_key: str, error: BatonError) -> None:
        """Gives up: P may free the KV at once. An open load ends with LoadFailed once nothing can write its blocks.

        For a key that is only kept alive, or whose load has failed already, no event follows.
        """
        raise NotImplementedError

    # ---- both

    def poll_events(self) -> list[AgentEvent]:
        """News since the last call, in order."""
        raise NotImplementedError

    def stats(self) -> AgentStats:
        raise NotImplementedError

    def take_observations(self) -> list[Observation]:
        """Metric news since the last call; counters are summed up."""
        raise NotImplementedError
