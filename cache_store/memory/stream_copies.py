"""A CopyEngine over the streams of a device: what is queued on which stream, in which order, and after what.

One stream copies KV out of the pool, another one into it, both beside the stream of the computation. Neighbouring rows
go directly between the pool and a slot. Where they are scattered, one kernel gathers them into device memory first (or
scatters them from there): every copy costs the host and the device microseconds, however small it is.

The device itself is behind `Device` and `Stream`: `cuda_pool.py` has that of CUDA, the tests one that runs everything
as late as it may.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from cache_store.geometry.rows import Rows, paired_runs, runs
from cache_store.memory.row_copies import check_rows
from cache_store.memory.staging import PeerMemory, Slot, Ticket
from protos import cache_store_pb2 as pb

DIRECT_RUNS = 8  # up to so many runs of neighbouring rows are copied one by one
MIN_ROW_BYTES = 256  # smaller rows are gathered only as far as their numbers have room in a slot's list
FETCH_STAGE_BYTES = 32 << 20  # scattered blocks of a peer pass through so much device memory at a time

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Stream(Protocol):
    """A queue of device work. Calls return before the work is done; memory that it names must live until then."""

    def wait(self, after: Ticket) -> None:
        """What is queued from now on begins after the ticket's point."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between tensors of equal shape, on the device or in pinned host memory."""
        ...

    def gather(self, rows: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = rows[numbers[i]]; rows: [any, words], out: [n, words], numbers: int64 [n] on the device."""
        ...

    def scatter(self, rows: torch.Tensor, numbers: torch.Tensor, source: torch.Tensor) -> None:
        """rows[numbers[i]] = source[i]; numbers are distinct."""
        ...

    def record(self) -> Ticket:
        """The present end of the queue."""
        ...


class Device(Protocol):
    def stream(self) -> Stream:
        """A new stream. Nothing on it waits for any other unless told to."""
        ...

    def mark(self) -> Ticket:
        """The present end of the stream on which the calling thread computes."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 [size] in host memory that copies reach without blocking."""
        ...

    def empty(self, size: int) -> torch.Tensor:
        """uint8 [size] in device memory."""
        ...

    def share(self, layers: Mapping[tuple[str, int], torch.Tensor]) -> pb.SharedPool: ...

    def open(self, memory: pb.SharedPool) -> DevicePeer: ...


class DevicePeer(PeerMemory, Protocol):
    """Layers of a peer, each uint8 [bytes], readable on this device."""

    @property
    def layers(self) -> Mapping[tuple[str, int], torch.Tensor]: ...


class _Lane:
    """One direction: its stream, and the device memory through which scattered rows pass.

    The scratch memory has one user at a time because everything that touches it is queued on this one stream.
    """

    def __init__(self, device: Device) -> None:
        self.stream = device.stream()
        self._device = device
        self.stage = device.empty(0)
        self.numbers = device.empty(0).view(torch.int64)

    def reserve(self, stage_bytes: int, numbers: int) -> None:
        if stage_bytes > self.stage.numel():
            self.stage = self._device.empty(stage_bytes)
        if numbers > self.numbers.numel():
            self.numbers = self._device.empty(8 * numbers).view(torch.int64)

    def upload(self, numbers: torch.Tensor, at: int = 0) -> torch.Tensor:
        """Row numbers in pinned memory, int64 [n], as device memory from entry `at` on."""
        target = self.numbers[at : at + numbers.numel()]
        self.stream.copy(target, numbers)
        return target


class StreamCopyEngine:
    """CopyEngine over per-layer device tensors, each contiguous, num_blocks x block_bytes bytes."""

    shareable = True

    def __init__(self, device: Device, layers: Mapping[tuple[str, int], torch.Tensor]) -> None:
        self._device = device
        self._layers = {place: _bytes_of(tensor) for place, tensor in layers.items()}
        self._out, self._in = _Lane(device), _Lane(device)
        # A copy of scattered rows is queued in pieces that share the scratch memory of their direction: no pieces of
        # another thread's may come between. Never held while anything is waited for.
        self._queueing = threading.Lock()
        self._slots: list[torch.Tensor] = []  # pinned uint8 [slot bytes]
        self._lists: list[torch.Tensor] = []  # pinned int64: row numbers of the copy that uses the slot

    def allocate(self, count: int, slot_bytes: int) -> list[Slot]:
        slots = []
        for _ in range(count):
            memory = self._device.pinned(slot_bytes)
            self._slots.append(memory)
            self._lists.append(self._device.pinned(8 * max(1, slot_bytes // MIN_ROW_BYTES)).view(torch.int64))
            slots.append(Slot(len(self._slots) - 1, memory.numpy().data))
        self._out.reserve(slot_bytes, slot_bytes // MIN_ROW_BYTES)
        self._in.reserve(max(slot_bytes, FETCH_STAGE_BYTES), slot_bytes // 8)
        return slots

    def mark(self) -> Ticket:
        return self._device.mark()

    def read(self, rows: Rows, slot: Slot) -> Ticket:
        with self._queueing:
            return self._read(rows, slot)

    def _read(self, rows: Rows, slot: Slot) -> Ticket:
        lane, layer, unit = self._out, self._layers[rows.group, rows.layer], rows.unit_bytes
        host = self._slots[slot.index][: rows.nbytes]
        found = runs(rows.numbers)
        numbers = self._listed(slot, rows.numbers) if len(found) > DIRECT_RUNS else None
        if numbers is None:
            at = 0
            for first, count in found:
                lane.stream.copy(host[at : at + count * unit], layer[first * unit : (first + count) * unit])
                at += count * unit
        else:
            stage = lane.stage[: rows.nbytes]
            lane.stream.gather(as_rows(layer, unit), lane.upload(numbers), as_rows(stage, unit))
            lane.stream.copy(host, stage)
        return lane.stream.record()

    def write(self, slot: Slot, rows: Rows, after: Ticket | None = None) -> Ticket:
        with self._queueing:
            return self._write(slot, rows, after)

    def _write(self, slot: Slot, rows: Rows, after: Ticket | None) -> Ticket:
        lane, layer, unit = self._in, self._layers[rows.group, rows.layer], rows.unit_bytes
        host = self._slots[slot.index][: rows.nbytes]
        if after is not None:
            lane.stream.wait(after)
        found = runs(rows.numbers)
        numbers = self._listed(slot, rows.numbers) if len(found) > DIRECT_RUNS else None
        if numbers is None:
            at = 0
            for first, count in found:
                lane.stream.copy(layer[first * unit : (first + count) * unit], host[at : at + count * unit])
                at += count * unit
        else:
            stage = lane.stage[: rows.nbytes]
            lane.stream.copy(stage, host)
            lane.stream.scatter(as_rows(layer, unit), lane.upload(numbers), as_rows(stage, unit))
        return lane.stream.record()

    def fetch(
        self, memory: PeerMemory, source: Rows, target: Rows, scratch: Slot, after: Ticket | None = None
    ) -> Ticket:
        with self._queueing:
            return self._fetch(memory, source, target, scratch, after)

    def _fetch(self, memory: PeerMemory, source: Rows, target: Rows, scratch: Slot, after: Ticket | None) -> Ticket:
        layers: Mapping[tuple[str, int], torch.Tensor] = memory.layers  # type: ignore[attr-defined]  # of our device
        theirs, own = layers[source.group, source.layer], self._layers[target.group, target.layer]
        lane, unit = self._in, source.unit_bytes
        check_rows(source, theirs.numel())
        if after is not None:
            lane.stream.wait(after)
        found = paired_runs(source.numbers, target.numbers)
        lists = self._slots[scratch.index].view(torch.int64)
        count = len(source.numbers)
        if len(found) <= DIRECT_RUNS or 2 * count > lists.numel():
            for first, to, length in found:
                size = length * unit
                lane.stream.copy(own[to * unit : to * unit + size], theirs[first * unit : first * unit + size])
            return lane.stream.record()
        lists.numpy()[:count] = source.numbers
        lists.numpy()[count : 2 * count] = target.numbers
        numbers = lane.upload(lists[: 2 * count])
        batch = max(1, lane.stage.numel() // unit)
        for at in range(0, count, batch):
            upto = min(at + batch, count)
            stage = as_rows(lane.stage[: (upto - at) * unit], unit)
            lane.stream.gather(as_rows(theirs, unit), numbers[at:upto], stage)
            lane.stream.scatter(as_rows(own, unit), numbers[count + at : count + upto], stage)
        return lane.stream.record()

    def share(self) -> pb.SharedPool:
        return self._device.share(self._layers)

    def open(self, memory: pb.SharedPool) -> PeerMemory:
        return self._device.open(memory)

    def close(self) -> None:
        """Nothing: memory and streams end with this object."""

    def _listed(self, slot: Slot, numbers: Sequence[int]) -> torch.Tensor | None:
        """The numbers in the slot's pinned list, int64 [n]; None where they have no room."""
        room = self._lists[slot.index]
        if len(numbers) > room.numel():
            return None
        listed = room[: len(numbers)]
        listed.numpy()[:] = numbers
        return listed


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def as_rows(memory: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """uint8 [n * unit_bytes] as [n, words], in words as wide as the unit allows: a kernel moves a word per thread."""
    dtype: Any
    width, dtype = next((width, dtype) for width, dtype in _WORDS if unit_bytes % width == 0)
    return memory.view(dtype).view(-1, unit_bytes // width)
