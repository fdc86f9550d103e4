"""Whether a lease stands, seen without a call: words in memory that a prefill server shows, as it shows its KV.

Whoever has read blocks in the memory of a peer has to know whether they were the lease's all along. The owner writes a
value that it never uses twice into a word when a reader comes, and another one before any block of the lease can be
given to another request. So a reader that finds the value after its copies knows that they are good. One that does not
find it knows nothing, and asks.

The processor keeps the order: a store to the word comes before the owner's later ones to the blocks, and the reader's
look at it after its reads of them. (Calls into the interpreter and its lock, and that into the system by which the word
is read, lie between them and are barriers everywhere. A one-sided read of the word begins after those of the blocks
have ended.)

On the owner's machine they are a file that is opened (`PeerWords`). Words of a process that has ended say nothing: its
device memory may belong to somebody else by now. So the owner holds a lock on the file (an OFD lock) that ends with it.
Through NIXL (`nixl.fetching.NixlWords`) they cannot be read any more when its device memory is gone; host memory that
can still be read is written by nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import struct
import sys
from typing import Protocol

import numpy as np

from cache_store.memory.shared_memory import MemoryFile, open_file
from cache_store.memory.staging import MemoryUnavailable
from protos import cache_store_pb2 as pb

WORDS = 8192
WORD_BYTES = 8

_log = logging.getLogger(__name__)
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of Linux, with 64 bits


def _lock(kind: int) -> bytes:
    """All of a file."""
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


class LeaseWords:
    """The owner's end. Raises OSError where the system has no such files or locks."""

    def __init__(self, count: int = WORDS) -> None:
        self.file = MemoryFile(count * WORD_BYTES)
        try:
            fcntl.fcntl(self.file.descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK))
        except OSError:
            self.file.close()
            raise
        self._words = np.frombuffer(self.file.view, np.uint64)
        self._free = list(range(count - 1, -1, -1))
        # Not the numbers of another engine: whatever is read where its words were is not taken for them.
        self._last = secrets.randbits(62)

    def take(self) -> tuple[int, int] | None:
        """Index and value of a word; None when all are taken."""
        if not self._free:
            return None
        index = self._free.pop()
        self._last += 1
        self._words[index] = self._last
        return index, self._last

    def clear(self, index: int) -> None:
        """Whoever looks from now on does not find the value."""
        self._words[index] = 0
        self._free.append(index)

    def describe(self) -> pb.SharedLayer:
        """How another process of this machine opens them."""
        return pb.SharedLayer(handle=self.file.handle, offset=0, bytes=self.file.view.nbytes)

    def close(self) -> None:
        del self._words
        self.file.close()


def make_lease_words() -> LeaseWords | None:
    """None where the system has no such files or locks: readers ask then."""
    try:
        return LeaseWords()
    except OSError as error:
        _log.info("readers have to ask whether leases stand: %s", error)
        return None


class WordReader(Protocol):
    """A peer's words, as its readers see them."""

    async def stands(self, word: pb.LeaseWord) -> bool:
        """Whether the lease stood up to now. False: it is not known."""
        ...

    def close(self) -> None:
        """Nobody looks at them any more."""
        ...


class PeerWords:
    """Those of a peer on this machine. They are read by calls: memory of a file that its owner cuts short would end
    this process.

    Raises MemoryUnavailable.
    """

    def __init__(self, shared: pb.SharedLayer) -> None:
        self._count = shared.bytes // WORD_BYTES
        self._descriptor = open_file(shared.handle, shared.bytes)

    async def stands(self, word: pb.LeaseWord) -> bool:
        if not word.value or word.index >= self._count:
            return False
        with contextlib.suppress(OSError):  # of what is no such file, whatever its name is
            said = os.pread(self._descriptor, WORD_BYTES, word.index * WORD_BYTES)
            if said != word.value.to_bytes(WORD_BYTES, sys.byteorder):
                return False
            held = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_RDLCK))
            return bool(_FLOCK.unpack(held)[0] != fcntl.F_UNLCK)
        return False

    def close(self) -> None:
        os.close(self._descriptor)


def open_words(shared: pb.SharedPool) -> PeerWords | None:
    """Of a peer on this machine. None: they cannot be opened, and the peer has to be asked."""
    try:
        return PeerWords(shared.words)
    except MemoryUnavailable as error:
        _log.info("a peer on this machine has to be asked whether its leases stand: %s", error)
        return None
