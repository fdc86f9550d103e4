"""What the engine's prefix cache holds, for subscribers: a snapshot first, then every change.

The index mirrors the engine's events by block hash, so its size is bounded by the engine's block pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from engine.messages import KvEvent
from front.wire import kv_cache_event
from protos import worker_pb2
from rpc.errors import BatonError, ErrorCode

SNAPSHOT_BATCH = 2000
QUEUE_BATCHES = 1024


class Subscription:
    """One subscriber's queue of batches. A reader that lets QUEUE_BATCHES pile up gets OUTPUT_QUEUE_FULL."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[worker_pb2.KvCacheEvent]] = asyncio.Queue(QUEUE_BATCHES)
        self._error: BatonError | None = None
        self._ended = asyncio.Event()

    def put(self, events: list[worker_pb2.KvCacheEvent]) -> None:
        if self._error is not None:
            return
        try:
            self._queue.put_nowait(events)
        except asyncio.QueueFull:
            self.fail(
                BatonError(
                    ErrorCode.OUTPUT_QUEUE_FULL,
                    f"the subscriber is more than {QUEUE_BATCHES} batches behind; subscribe again",
                )
            )

    def fail(self, error: BatonError) -> None:
        """Ends the subscription; what is queued is dropped, because a gap makes the rest useless."""
        if self._error is None:
            self._error = error
            while not self._queue.empty():
                self._queue.get_nowait()
            self._queue.put_nowait([])

    async def next(self) -> list[worker_pb2.KvCacheEvent]:
        """The next changes, waiting for them without a limit of its own (the RPC has one). Raises the
        failure.
        """
        if self._error is None:
            events = await self._queue.get()
        if self._error is not None:
            raise self._error
        return events


class KvIndex:
    """Mirror of the prefix cache: block hash to the hash of the block before it."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._subscriptions: set[Subscription] = set()

    def __len__(self) -> int:
        return len(self._parents)

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Books the changes of one engine step and hands them to every subscriber as one batch."""
        wire = []
        for event in events:
            if event.cleared:
                self._parents.clear()
            for block in event.removed:
                self._parents.pop(block, None)
            parent = event.parent
            for block in event.stored:
                self._parents[block] = parent
                parent = block
            wire.append(kv_cache_event(event))
        if wire:
            for subscription in self._subscriptions:
                subscription.put(wire)

    def snapshot(self) -> list[list[worker_pb2.KvCacheEvent]]:
        """The whole content as batches of at most SNAPSHOT_BATCH events; the first event empties the
        reader's copy.

        Parents come before their children: a block is stored after its parent and evicted before it.
        """
        events = [worker_pb2.KvCacheEvent(cleared=True)]
        chain: worker_pb2.KvCacheEvent | None = None
        last = ""
        for block, parent in self._parents.items():
            if chain is None or parent != last:
                chain = worker_pb2.KvCacheEvent(parent=bytes.fromhex(parent))
                events.append(chain)
            chain.stored.append(bytes.fromhex(block))
            last = block
        return [events[i : i + SNAPSHOT_BATCH] for i in range(0, len(events), SNAPSHOT_BATCH)]

    async def subscribe(self) -> AsyncIterator[list[worker_pb2.KvCacheEvent]]:
        """Batches of events: the snapshot, then the changes after it, none lost and none twice."""
        subscription = Subscription()
        self._subscriptions.add(subscription)
        try:
            for batch in self.snapshot():
                yield batch
            while True:
                yield await subscription.next()
        finally:
            self._subscriptions.discard(subscription)

    def close(self, error: BatonError) -> None:
        """Ends every subscription with `error`."""
        for subscription in list(self._subscriptions):
            subscription.fail(error)
