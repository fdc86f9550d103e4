"""A device for `StreamCopyEngine` that runs nothing before somebody waits for it, and then no more than that needs.

Whatever is missing between two streams shows: a copy that does not wait for the computation runs before it, and a slot
or block that is used again too early is read or written with what came later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from cache_store.memory.staging import MemoryUnavailable
from protos import cache_store_pb2 as pb


@dataclass
class LatePoint:
    """A ticket: the first `upto` pieces of work of a stream."""

    stream: LateStream
    upto: int

    def wait(self) -> None:
        with self.stream.device.lock:
            self.stream.run(self.upto)


@dataclass
class LateStream:
    device: LateDevice
    name: str
    work: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0

    def run(self, upto: int) -> None:
        while self.done < upto:
            # Counted first: a piece of work that waits may come back here.
            piece = self.work[self.done]
            self.done += 1
            piece()

    def queue(self, what: str, piece: Callable[[], None]) -> None:
        with self.device.lock:
            if self.device.broken:
                raise RuntimeError("the device is gone")
            self.device.log.append((self.name, what))
            self.work.append(piece)

    def wait(self, after: LatePoint) -> None:
        self.queue(f"wait {after.stream.name}", lambda: after.stream.run(after.upto))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype

        def copy() -> None:
            self.device.before_copy()
            target.copy_(source)

        self.queue("copy", copy)

    def gather(self, rows: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor) -> None:
        assert (len(numbers), rows.shape[1]) == tuple(out.shape)

        def gather() -> None:
            torch.index_select(rows, 0, numbers, out=out)

        self.queue("gather", gather)

    def scatter(self, rows: torch.Tensor, numbers: torch.Tensor, source: torch.Tensor) -> None:
        def scatter() -> None:
            rows.index_copy_(0, numbers, source)

        self.queue("scatter", scatter)

    def record(self) -> LatePoint:
        with self.device.lock:
            return LatePoint(self, len(self.work))


class LateDevice:
    """`compute` queues work on the stream of the computation; `log` has everything that was queued, in order."""

    memory: dict[bytes, LateDevice] = {}  # noqa: RUF012  what devices of this process share, by handle

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[tuple[str, str]] = []
        self.broken = False
        self.before_copy: Callable[[], None] = lambda: None
        self.computing = LateStream(self, "compute")
        self._streams = 0
        self.opened: list[LatePeer] = []

    def compute(self, piece: Callable[[], None]) -> None:
        self.computing.queue("compute", piece)

    def stream(self) -> LateStream:
        self._streams += 1
        return LateStream(self, ("out", "in")[self._streams - 1])

    def mark(self) -> LatePoint:
        return self.computing.record()

    def pinned(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xAA, dtype=torch.uint8)

    def empty(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xBB, dtype=torch.uint8)

    def share(self, layers: Mapping[tuple[str, int], torch.Tensor]) -> pb.SharedPool:
        self.layers = layers
        handle = str(id(self)).encode()
        LateDevice.memory[handle] = self
        return pb.SharedPool(
            kind="late",
            layers=[
                pb.SharedLayer(group=group, layer=layer, handle=handle, offset=0, bytes=tensor.numel())
                for (group, layer), tensor in layers.items()
            ],
        )

    def open(self, memory: pb.SharedPool) -> LatePeer:
        if memory.kind != "late":
            raise MemoryUnavailable("another kind of memory")
        places = {(each.group, each.layer): self.memory[each.handle] for each in memory.layers}
        peer = LatePeer({place: device.layers[place] for place, device in places.items()})
        self.opened.append(peer)
        return peer


@dataclass
class LatePeer:
    layers: Mapping[tuple[str, int], torch.Tensor]
    closed: bool = False

    def close(self) -> None:
        self.closed = True
