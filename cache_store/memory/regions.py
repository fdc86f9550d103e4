"""Where the layers of a KV pool lie, for a transport that registers memory and moves bytes without the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cache_store.memory.shared_memory import MemoryFile

HOST = "host"
CUDA = "cuda"


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Regions:
    """Each layer of each cache group, by (group, layer): contiguous memory of `sizes` bytes that stays where it is.

    In host memory they are `files`, which another process can map; on device number `device` they begin at `addresses`
    of this process. `attach` readies the calling thread for calls to the device's driver.
    """

    memory: str
    sizes: Mapping[tuple[str, int], int]
    files: Mapping[tuple[str, int], MemoryFile] = field(default_factory=dict)
    addresses: Mapping[tuple[str, int], int] = field(default_factory=dict)
    device: int = 0
    attach: Callable[[], None] = _nothing


def file_regions(files: Mapping[tuple[str, int], MemoryFile]) -> Regions:
    return Regions(HOST, {place: file.view.nbytes for place, file in files.items()}, files=files)
