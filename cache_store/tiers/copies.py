"""Blocks of the KV pool to and from the payloads of records: all layers of a block, one after the other.

Calls block and are made by threads of the tiers. In host memory a block is copied straight out of the pool or into it;
behind a copy engine it goes by way of slots, which both the device and the threads reach.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import Protocol

from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.rows import Rows
from cache_store.memory.pool import HostKvPool, KvPool, StagedKvPool
from cache_store.memory.row_copies import address_of
from cache_store.memory.staging import CopyEngine, Ticket

MOST_SLOT_BYTES = 16 << 20  # of the slots of one direction, as long as one block fits
MOST_BLOCKS = 16  # that one call copies
# Of a pool that gets its pages at the start. To touch a page for the first time takes as long as to copy it, and the
# blocks that a new server loads a prefix into are all such.
MOST_PAGED_BYTES = 256 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14 or later


class BlockCopies(Protocol):
    """Copies between blocks of one cache group and payloads of `payload_bytes` bytes, up to `batch` at once."""

    payload_bytes: int
    batch: int

    def mark(self) -> Ticket | None:
        """Called by the engine's thread: what it has computed and begun to read so far. None: it has finished all."""
        ...

    def read(self, blocks: Sequence[int], payloads: Sequence[memoryview], after: Ticket | None) -> None:
        """Pool -> payloads, once `after` is reached. Raises what the copy, or the device, failed with."""
        ...

    def write(self, payloads: Sequence[memoryview], blocks: Sequence[int], after: Ticket | None) -> None:
        """Payloads -> pool, once `after` is reached. On return, and after a failure too, nothing of it is under way."""
        ...


def block_copies(pool: KvPool, layout: GroupLayout) -> BlockCopies:
    """The copies for a pool. Slots are allocated now."""
    if isinstance(pool, StagedKvPool):
        return StagedBlockCopies(pool.copies, layout)
    if isinstance(pool, HostKvPool):
        return HostBlockCopies(pool, layout)
    raise TypeError(f"a pool of type {type(pool).__name__} has no copies of blocks")


class HostBlockCopies:
    """BlockCopies of a pool in host memory."""

    def __init__(self, pool: HostKvPool, layout: GroupLayout) -> None:
        self.payload_bytes = layout.num_layers * layout.block_bytes
        self.batch = 1
        self._size = layout.block_bytes
        self._layers = [pool.layer(layout.tag, layer) for layer in range(layout.num_layers)]
        page_in(self._layers, MOST_PAGED_BYTES)

    def mark(self) -> Ticket | None:
        return None

    def read(self, blocks: Sequence[int], payloads: Sequence[memoryview], after: Ticket | None) -> None:
        size = self._size
        for block, payload in zip(blocks, payloads, strict=True):
            begin, at = block * size, 0
            for layer in self._layers:
                payload[at : at + size] = layer[begin : begin + size]
                at += size

    def write(self, payloads: Sequence[memoryview], blocks: Sequence[int], after: Ticket | None) -> None:
        size = self._size
        for block, payload in zip(blocks, payloads, strict=True):
            begin, at = block * size, 0
            for layer in self._layers:
                layer[begin : begin + size] = payload[at : at + size]
                at += size


def page_in(layers: Sequence[memoryview], most_bytes: int) -> None:
    """Has the system give the beginning of each layer its pages, as many of the lowest blocks as `most_bytes` hold.
    Changes no content. Where the system cannot, they come one by one as before."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for layer in layers:
        begin = address_of(layer)
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(first, begin - first + min(layer.nbytes, most_bytes // len(layers)), _MADV_POPULATE_WRITE)


class StagedBlockCopies:
    """BlockCopies of a pool that only its copy engine reaches: one slot for each layer and direction."""

    def __init__(self, copies: CopyEngine, layout: GroupLayout) -> None:
        self.payload_bytes = layout.num_layers * layout.block_bytes
        self.batch = max(1, min(MOST_BLOCKS, MOST_SLOT_BYTES // self.payload_bytes))
        self._copies = copies
        self._layout = layout
        slot_bytes = self.batch * layout.block_bytes
        self._out = copies.allocate(layout.num_layers, slot_bytes)
        self._in = copies.allocate(layout.num_layers, slot_bytes)
        self._reading = threading.Lock()
        self._writing = threading.Lock()

    def mark(self) -> Ticket | None:
        return self._copies.mark()

    def read(self, blocks: Sequence[int], payloads: Sequence[memoryview], after: Ticket | None) -> None:
        size = self._layout.block_bytes
        with self._reading:
            if after is not None:
                after.wait()
            tickets: list[Ticket] = []
            try:
                for layer, slot in enumerate(self._out):
                    tickets.append(self._copies.read(self._rows(layer, blocks), slot))
            finally:
                _wait_all(tickets)
            for layer, slot in enumerate(self._out):
                for number, payload in enumerate(payloads):
                    payload[layer * size : (layer + 1) * size] = slot.view[number * size : (number + 1) * size]

    def write(self, payloads: Sequence[memoryview], blocks: Sequence[int], after: Ticket | None) -> None:
        size = self._layout.block_bytes
        with self._writing:
            tickets: list[Ticket] = []
            try:
                for layer, slot in enumerate(self._in):
                    for number, payload in enumerate(payloads):
                        slot.view[number * size : (number + 1) * size] = payload[layer * size : (layer + 1) * size]
                    tickets.append(self._copies.write(slot, self._rows(layer, blocks), after))
            finally:
                _wait_all(tickets)

    def _rows(self, layer: int, blocks: Sequence[int]) -> Rows:
        return Rows(self._layout.tag, layer, self._layout.block_bytes, list(blocks))


def _wait_all(tickets: Sequence[Ticket]) -> None:
    """Waits for every copy, whatever becomes of the others: until then their slots and blocks are in use."""
    failure: Exception | None = None
    for ticket in tickets:
        try:
            ticket.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
