"""Keeps the prefix index equal to what the servers' prefix caches hold, by their streams of events.

A server is followed as long as it is registered and connected. While its stream is down nothing is known of its cache,
so the index forgets it; each stream begins with all that is cached. None is followed when no policy needs the index.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from protos import worker_pb2, worker_pb2_grpc
from router.pairing import Role
from router.prefix.index import PrefixIndex
from router.registry import WorkerRegistry
from router.worker import Worker
from rpc.block_hashes import HASH_BYTES
from rpc.channels import ChannelPool
from rpc.errors import BatonError
from rpc.metrics import Registry as Metrics
from rpc.status import from_rpc_error

AGAIN_FIRST_S = 0.1
AGAIN_MAX_S = 5.0
# A stream is opened anew after this time, so that no call lives without a deadline.
STREAM_S = 3600.0
# After so many blocks others get their turn.
BLOCKS_AT_ONCE = 4096
LOOK_S = 1.0

_log = logging.getLogger(__name__)


class PrefixFeed:
    """An async context manager, within which the servers of `roles` are followed. Belongs to one event loop."""

    def __init__(
        self,
        registry: WorkerRegistry,
        pool: ChannelPool,
        metrics: Metrics,
        index: PrefixIndex[Worker] | None,
        roles: Collection[Role],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._metrics = metrics
        self._index = index
        self._roles = roles
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._calls: dict[Worker, grpc.aio.UnaryStreamCall[Any, Any]] = {}
        if index is not None:
            for worker in registry.workers():
                self._added(worker)
            registry.on_added.append(self._added)
            registry.on_removed.append(self._removed)
            registry.on_lost.append(self._lost)

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        if self._index is not None:
            for worker in self._index.servers():
                self._follow(worker, self._index)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        assert group is not None
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        await group.__aexit__(None, None, None)

    def show(self) -> None:
        """Sets the gauges of the index."""
        index = self._index
        if index is not None:
            self._metrics.set("baton_router_index_entries", len(index))
            self._metrics.set("baton_router_index_bytes", index.size_bytes())

    # -- members

    def _added(self, worker: Worker) -> None:
        if worker.role in self._roles and self._index is not None:
            self._index.add(worker)
            self._follow(worker, self._index)

    def _removed(self, worker: Worker) -> None:
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
        if self._index is not None:
            self._index.remove(worker)

    def _lost(self, worker: Worker) -> None:
        call = self._calls.get(worker)
        if call is not None:
            call.cancel()

    def _follow(self, worker: Worker, index: PrefixIndex[Worker]) -> None:
        if self._group is not None:
            self._tasks[worker] = self._group.create_task(self._supervise(worker, index))

    # -- streams

    async def _supervise(self, worker: Worker, index: PrefixIndex[Worker]) -> None:
        wait_s = AGAIN_FIRST_S
        while True:
            if worker.facts is None or worker.disconnected:
                await self._registry.wait_change(LOOK_S)
                continue
            began = self._clock()
            try:
                why = await self._read(worker, index)
            except BatonError as error:
                why = str(error)
            except Exception as error:
                # A defect in the following of one server must not end the router.
                _log.exception("following the prefix cache of %s failed", worker.address)
                why = type(error).__name__
            index.clear(worker)
            _log.info("prefix-cache events of %s server %s ended: %s", worker.role, worker.address, why)
            if self._clock() - began > 2 * AGAIN_MAX_S:
                wait_s = AGAIN_FIRST_S
            await asyncio.sleep(wait_s)
            wait_s = min(AGAIN_MAX_S, 2 * wait_s)

    async def _read(self, worker: Worker, index: PrefixIndex[Worker]) -> str:
        """Follows one stream until it ends; returns why it is given up. Raises BatonError when it broke."""
        stub = worker_pb2_grpc.WorkerStub(self._pool.get(worker.address))
        call = self._calls[worker] = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=STREAM_S)
        sequence = 0
        try:
            async for batch in call:
                sequence += 1
                if not batch.HasField("sequence"):
                    self._metrics.inc("baton_contract_breaches_total", kind="absent_field")
                    return "a batch without its number"
                if batch.sequence != sequence:
                    return f"batch {batch.sequence} came in place of {sequence}"
                if not _names_blocks(batch):
                    self._metrics.inc("baton_contract_breaches_total", kind="absent_field")
                    return f"a block whose hash has not {HASH_BYTES} bytes"
                await self._apply(worker, index, batch)
            return "the server closed the stream"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return "the server is lost"
        except grpc.RpcError as exc:
            self._pool.check(worker.address)
            raise from_rpc_error(exc, leg=worker.role, deadline_passed=False, was_ready=True) from None
        finally:
            self._calls.pop(worker, None)
            call.cancel()

    async def _apply(self, worker: Worker, index: PrefixIndex[Worker], batch: worker_pb2.KvEventBatch) -> None:
        count = 0
        for event in batch.events:
            if event.cleared:
                index.empty(worker)
            if event.removed:
                index.drop(worker, event.removed)
            if event.stored:
                index.store(worker, event.stored)
            count += len(event.stored) + len(event.removed)
            if count > BLOCKS_AT_ONCE:
                count = 0
                await asyncio.sleep(0)


def _names_blocks(batch: worker_pb2.KvEventBatch) -> bool:
    """Whether every hash is one. The memory of the index is bounded by their number, and so by their length."""
    return all(len(each) == HASH_BYTES for event in batch.events for each in (*event.stored, *event.removed))
