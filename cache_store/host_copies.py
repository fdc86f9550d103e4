"""A CopyEngine over host memory: each direction is a thread that copies in the order of submission.

For KV memory that the agent must not touch on its own loop, and for machines without an accelerator: everything around
the copies, the order of completion and the memory of other processes included, works as with CUDA streams.
"""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cache_store.layout import GroupLayout
from cache_store.rows import Rows, paired_runs, runs
from cache_store.staging import CLOSE_S, MemoryUnavailable, PeerMemory, Slot, Ticket
from protos import cache_store_pb2 as pb

KIND = "host"


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


class MemoryFile:
    """Anonymous memory that other processes of the same user may map, by a name that ends with this process."""

    def __init__(self, size: int) -> None:
        self._token = f"baton-{secrets.token_hex(16)}"
        self._fd = os.memfd_create(self._token, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self.view = memoryview(self._map)

    @property
    def handle(self) -> bytes:
        return f"{os.getpid()}:{self._fd}:{self._token}".encode()

    def close(self) -> None:
        os.close(self._fd)
        self.view.release()
        self._map.close()


def _map_file(handle: bytes, offset: int, size: int) -> mmap.mmap:
    """The memory of another process's MemoryFile, for reading. Raises MemoryUnavailable."""
    try:
        pid, fd, token = handle.decode().split(":")
        path = f"/proc/{int(pid)}/fd/{int(fd)}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise MemoryUnavailable(f"a memory file of the peer cannot be opened: {error}") from error
    try:
        # The numbers may be those of another process by now; the token is never used twice.
        if token not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise MemoryUnavailable("the peer's process is another one by now")
        if os.fstat(descriptor).st_size < offset + size:
            raise MemoryUnavailable("a memory file of the peer is smaller than said")
        return mmap.mmap(descriptor, offset + size, prot=mmap.PROT_READ)
    except OSError as error:
        raise MemoryUnavailable(f"a memory file of the peer cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


class _HostPeer:
    def __init__(self, memory: pb.SharedPool) -> None:
        self._maps: list[mmap.mmap] = []
        self.layers: dict[tuple[str, int], memoryview] = {}
        try:
            for layer in memory.layers:
                mapped = _map_file(layer.handle, layer.offset, layer.bytes)
                self._maps.append(mapped)
                self.layers[layer.group, layer.layer] = memoryview(mapped)[layer.offset :]
        except MemoryUnavailable:
            self.close()
            raise

    def close(self) -> None:
        for view in self.layers.values():
            view.release()
        self.layers.clear()
        for mapped in self._maps:
            mapped.close()


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
        assert isinstance(memory, _HostPeer)
        theirs, own = memory.layers[source.group, source.layer], self._layers[target.group, target.layer]
        unit = source.unit_bytes
        check_rows(source, theirs.nbytes)

        def copy() -> None:
            _wait(after)
            for first, to, count in paired_runs(source.numbers, target.numbers):
                own[to * unit : (to + count) * unit] = theirs[first * unit : (first + count) * unit]

        return self._submit("write", copy)

    def share(self) -> pb.SharedPool:
        if self._files is None:
            raise MemoryUnavailable("the KV memory is not in memory files")
        return pb.SharedPool(
            kind=KIND,
            layers=[
                pb.SharedLayer(group=tag, layer=layer, handle=file.handle, offset=0, bytes=file.view.nbytes)
                for tag, files in self._files.items()
                for layer, file in enumerate(files)
            ],
        )

    def open(self, memory: pb.SharedPool) -> PeerMemory:
        if memory.kind != KIND:
            raise MemoryUnavailable(f"the peer's memory is of kind {memory.kind[:32]!r}, this one is {KIND!r}")
        return _HostPeer(memory)

    def close(self) -> None:
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _submit(self, name: str, copy: Callable[[], None]) -> _Job:
        job = _Job(copy)
        self._queues[name].put(job)
        return job


def check_rows(rows: Rows, nbytes: int) -> None:
    """Raises IndexError when a layer of `nbytes` bytes lacks one of the rows."""
    _check_range(rows.numbers, nbytes // rows.unit_bytes)


def _check_range(numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise IndexError(f"row {number} is outside [0, {count})")


def _wait(after: Ticket | None) -> None:
    if after is not None:
        after.wait()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
