"""Host memory that other processes of the same user on this machine can map: KV pools for the transport ipc.

The memory is that of an anonymous file, which ends with its last user and leaves nothing behind. Its name for others is
where its owner's process shows it, `/proc/<pid>/fd/<fd>`, with a token that is never used twice. Processes that do not
see each other there, as in two containers, cannot share it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping, Sequence

from cache_store.memory.staging import MemoryUnavailable
from protos import cache_store_pb2 as pb

KIND = "host"
NAME = "baton-"  # and the token
TOKEN_BYTES = 16
HUGE_PAGE_BYTES = 2 << 20


class MemoryFile:
    """`size` bytes of zeros. On huge pages where the system grants them to shared memory."""

    def __init__(self, size: int) -> None:
        self._token = NAME + secrets.token_hex(TOKEN_BYTES)
        self._fd = os.memfd_create(self._token, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)

    @property
    def descriptor(self) -> int:
        return self._fd

    @property
    def handle(self) -> bytes:
        return f"{os.getpid()}:{self._fd}:{self._token}".encode()

    def close(self) -> None:
        os.close(self._fd)
        self.view.release()
        self._map.close()


def describe(files: Mapping[str, Sequence[MemoryFile]]) -> pb.SharedPool:
    """How another process opens the files, by cache group one per layer."""
    return pb.SharedPool(
        kind=KIND,
        layers=[
            pb.SharedLayer(group=tag, layer=layer, handle=file.handle, offset=0, bytes=file.view.nbytes)
            for tag, each in files.items()
            for layer, file in enumerate(each)
        ],
    )


def open_file(handle: bytes, size: int) -> int:
    """A descriptor of another process's MemoryFile, for reading. Raises MemoryUnavailable, also for a smaller one."""
    try:
        pid, fd, token = handle.decode().split(":")
        path = f"/proc/{int(pid)}/fd/{int(fd)}"
        # Whatever a peer may name, to open it waits for nobody.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise MemoryUnavailable(f"a memory file of the peer cannot be opened: {error}") from error
    try:
        # The numbers may be those of another process by now; the token is never used twice. Nothing but such a file is
        # opened, whatever a peer names.
        named = token.startswith(NAME) and len(token) == len(NAME) + 2 * TOKEN_BYTES
        if not named or token not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise MemoryUnavailable("the peer's process is another one by now")
        if os.fstat(descriptor).st_size < size:
            raise MemoryUnavailable("a memory file of the peer is smaller than said")
    except (OSError, MemoryUnavailable) as error:
        os.close(descriptor)
        if isinstance(error, MemoryUnavailable):
            raise
        raise MemoryUnavailable(f"a memory file of the peer cannot be looked at: {error}") from error
    return descriptor


def _map_file(handle: bytes, offset: int, size: int) -> mmap.mmap:
    """The memory of another process's MemoryFile, for reading. Raises MemoryUnavailable."""
    descriptor = open_file(handle, offset + size)
    try:
        return mmap.mmap(descriptor, offset + size, prot=mmap.PROT_READ)
    except OSError as error:
        raise MemoryUnavailable(f"a memory file of the peer cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


class MappedPool:
    """A peer's memory, mapped for reading: `layers` by group and layer. Raises MemoryUnavailable."""

    def __init__(self, memory: pb.SharedPool) -> None:
        if memory.kind != KIND:
            raise MemoryUnavailable(f"the peer's memory is of kind {memory.kind[:32]!r}, this one is {KIND!r}")
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
        """No copy may be under way."""
        for view in self.layers.values():
            view.release()
        self.layers.clear()
        for mapped in self._maps:
            mapped.close()
