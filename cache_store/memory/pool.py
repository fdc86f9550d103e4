"""The agent's view of an engine's KV memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cache_store.geometry.layout import GroupLayout
from cache_store.memory.regions import Regions, file_regions
from cache_store.memory.shared_memory import MemoryFile, describe
from cache_store.memory.staging import CopyEngine, MemoryUnavailable
from protos import cache_store_pb2 as pb


class KvPool(Protocol):
    """KV memory of one rank, addressed by (group tag, layer, physical block id).

    Which blocks may be read or written at a time is the business of the engine's allocator and of the leases; the pool
    only knows where they lie. It is a `HostKvPool` or a `StagedKvPool`.
    """

    def num_blocks(self, group: str) -> int:
        """Physical blocks of the group; ids are [0, num_blocks)."""
        ...

    def regions(self) -> Regions | None:
        """Where the layers lie, for a transport that moves bytes without the pool; None where that is not possible."""
        ...


class StagedKvPool:
    """A pool whose memory only its copy engine reaches, as on an accelerator."""

    def __init__(self, num_blocks: Mapping[str, int], copies: CopyEngine, regions: Regions | None = None) -> None:
        self.copies = copies
        self._num_blocks = dict(num_blocks)
        self._regions = regions

    def regions(self) -> Regions | None:
        return self._regions

    def num_blocks(self, group: str) -> int:
        return self._num_blocks[group]


class HostKvPool:
    """A pool over host memory: per layer one writable, contiguous buffer of num_blocks x block_bytes bytes.

    `files`, one per layer of each group, are those buffers' files where other processes may read them.
    """

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        layers: Mapping[str, Sequence[Any]],
        files: Mapping[str, Sequence[MemoryFile]] | None = None,
    ) -> None:
        self._files = files
        self._block_bytes: dict[str, int] = {}
        self._num_blocks: dict[str, int] = {}
        self._layers: dict[str, list[memoryview]] = {}
        for layout in layouts:
            views = [memoryview(buffer).cast("B") for buffer in layers[layout.tag]]
            sizes = {view.nbytes for view in views}
            if len(views) != layout.num_layers or len(sizes) != 1 or min(sizes) % layout.block_bytes:
                raise ValueError(
                    f"cache group {layout.tag!r}: {len(views)} layers of {sorted(sizes)} bytes do not hold "
                    f"{layout.num_layers} layers of whole blocks of {layout.block_bytes} bytes"
                )
            if any(view.readonly for view in views):
                raise ValueError(f"cache group {layout.tag!r}: its memory cannot be written")
            self._layers[layout.tag] = views
            self._block_bytes[layout.tag] = layout.block_bytes
            self._num_blocks[layout.tag] = min(sizes) // layout.block_bytes

    def piece(self, group: str, layer: int, block_id: int, count: int = 1) -> memoryview:
        """Writable view (format 'B', contiguous) of `count` consecutive blocks of one layer; aliases the pool.

        Raises IndexError beyond the pool, KeyError for an unknown group.
        """
        if block_id < 0 or count < 1 or block_id + count > self._num_blocks[group]:
            raise IndexError(
                f"blocks [{block_id}, {block_id + count}) of {group!r} are outside [0, {self._num_blocks[group]})"
            )
        size = self._block_bytes[group]
        return self._layers[group][layer][block_id * size : (block_id + count) * size]

    def num_blocks(self, group: str) -> int:
        return self._num_blocks[group]

    def layer(self, group: str, layer: int) -> memoryview:
        """The whole memory of a layer (format 'B', contiguous); aliases the pool."""
        return self._layers[group][layer]

    @property
    def shareable(self) -> bool:
        """Whether other processes of this machine can open this memory."""
        return self._files is not None

    def regions(self) -> Regions | None:
        if self._files is None:
            return None
        return file_regions(
            {(tag, layer): file for tag, each in self._files.items() for layer, file in enumerate(each)}
        )

    def share(self) -> pb.SharedPool:
        """How another process of this machine opens this memory. Raises MemoryUnavailable."""
        if self._files is None:
            raise MemoryUnavailable("the KV memory is not in memory files")
        return describe(self._files)
