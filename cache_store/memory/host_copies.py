"""A CopyEngine over host memory: each direction is a thread that copies in the order of submission.

For KV memory that the agent must not touch on its own loop, and for machines without an accelerator: everything around
the copies, the order of completion and the memory of other processes included, works as with CUDA streams.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.rows import Rows, runs
from cache_store.memory.row_copies import check_rows, copy_rows
from cache_store.memory.shared_memory import MappedPool, MemoryFile, describe
from cache_store.memory.staging import CLOSE_S, MemoryUnavailable, PeerMemory, Slot, Ticket
from protos import cache_store_pb2 as pb


class _Done:
    """A ticket that is reached."""

    def wait(self) -> None:
        return


DONE = _Done()


class _Job:
    """One copy: run by a worker, waited for by whoever holds it as a ticket."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy: Callable[[], None] | None = copy
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def run(self) -> None:
        assert self._copy is not None
        try:
            self._copy()
        except Exception as error:  # belongs to the one who waits for the ticket
            self._failure = error
        self._copy = None
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._failure is not None:
            raise self._failure


class HostCopyEngine:
    """CopyEngine over per-layer buffers of num_blocks x block_bytes bytes.

    `files`, one per layer of each group, are those buffers' files where other processes may read them.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        layers: Mapping[str, Sequence[Any]],
        files: Mapping[str, Sequence[MemoryFile]] | None = None,
    ) -> None:
        self.shareable = files is not None
        self._files = files
        self._layers = {
            (layout.tag, layer): memoryview(buffer).cast("B")
            for layout in layouts
            for layer, buffer in enumerate(layers[layout.tag])
        }
        self._slots = 0
        self._queues: dict[str, queue.SimpleQueue[_Job | None]] = {
            name: queue.SimpleQueue() for name in ("read", "write")
        }
        self._threads = [
            threading.Thread(target=_work, args=(jobs,), name=f"kv-copy-{name}", daemon=True)
            for name, jobs in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def allocate(self, count: int, slot_bytes: int) -> list[Slot]:
        first = self._slots
        self._slots += count
        return [Slot(first + i, memoryview(bytearray(slot_bytes))) for i in range(count)]

    def mark(self) -> Ticket:
        return DONE  # who computes in host memory has computed when it says so

    def read(self, rows: Rows, slot: Slot) -> Ticket:
        layer, view, unit = self._layers[rows.group, rows.layer], slot.view, rows.unit_bytes

        def copy() -> None:
            at = 0
            for first, count in runs(rows.numbers):
                size = count * unit
                view[at : at + size] = layer[first * unit : first * unit + size]
                at += size

        return self._submit("read", copy)

    def write(self, slot: Slot, rows: Rows, after: Ticket | None = None) -> Ticket:
        layer, view, unit = self._layers[rows.group, rows.layer], slot.view, rows.unit_bytes

        def copy() -> None:
            _wait(after)
            at = 0
            for first, count in runs(rows.numbers):
                size = count * unit
                layer[first * unit : first * unit + size] = view[at : at + size]
                at += size

        return self._submit("write", copy)

    def fetch(
        self, memory: PeerMemory, source: Rows, target: Rows, scratch: Slot, after: Ticket | None = None
    ) -> Ticket:
        assert isinstance(memory, MappedPool)
        theirs, own = memory.layers[source.group, source.layer], self._layers[target.group, target.layer]
        check_rows(source, theirs.nbytes)

        def copy() -> None:
            _wait(after)
            copy_rows(theirs, source, own, target)

        return self._submit("write", copy)

    def share(self) -> pb.SharedPool:
        if self._files is None:
            raise MemoryUnavailable("the KV memory is not in memory files")
        return describe(self._files)

    def open(self, memory: pb.SharedPool) -> PeerMemory:
        return MappedPool(memory)

    def close(self) -> None:
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _submit(self, name: str, copy: Callable[[], None]) -> _Job:
        job = _Job(copy)
        self._queues[name].put(job)
        return job


def _wait(after: Ticket | None) -> None:
    if after is not None:
        after.wait()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
