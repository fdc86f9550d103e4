"""Blocks in a directory: one file for each, under its final name only once it is whole.

    PATH/lock                    held (flock) by the one server that uses the directory; a dead server holds nothing
    PATH/blocks/ab/abcd….kv      a record (record.py); the name is its key, `ab` the key's first byte
    PATH/blocks/new/…            files that are being written; what lies there at a start is of a server that died

The names are the index: at a start the directories are listed, and no file is read. A file is written beside and then
renamed, so a server that is killed leaves whole files and litter that the next one removes. Nothing is synced to the
disk: after a loss of power a file may lack content, which the checksum of its record tells whoever reads it.

The order of use is exact while the server runs. The next one has it from the files' times, which are set to that of a
use at most once in STAMP_S. Folders are 0700 and files 0600: they hold what the tenants' prompts became.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_store.tiers.record import HEADER_BYTES, KEY_BYTES
from cache_store.tiers.tier import Record, TierError, TierStats, leading
from rpc.errors import BatonError, ErrorCode

FLAG = "--kv-disk-path"
SUFFIX = ".kv"
ASIDE = ".aside"
STAMP_S = 60.0
_NEW = "new"
_HEX_DIGITS = frozenset("0123456789abcdef")
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_DENIED = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
# What a process lacks for a moment; anything else is wrong with the file, and will be the next time.
_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR))

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    size: int  # bytes
    stamped_s: float  # when the time of its file was set
    stamp_ns: int = 0  # the time to be set when it is read next


class DiskTier:
    """A `Tier` over a directory of its own. Safe to use from several threads."""

    name = "disk"
    shared = False
    takes = True

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int) -> None:
        """limit_bytes: of the files. Makes the directory if there is none.

        Raises INVALID_PARAMS that names the flag when another server uses the directory, or it cannot be used.
        """
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by key, the least recently used one first
        self._bytes = 0
        self._evicted = 0
        self._written = 0
        self._lock_file = -1
        root = Path(path)
        self._blocks = root / "blocks"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in (self._blocks, self._blocks / _NEW):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)
            self._remove_litter()
            self._list()
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                text = (
                    "another server uses it; give each server a directory of its own, as `baton up --kv-disk-path` does"
                )
            else:
                text = f"it cannot be used: {error.strerror or error}; name a directory that can be written to"
            raise BatonError(ErrorCode.INVALID_PARAMS, f"{FLAG} {root}: {text}") from error
        self._make_room(0)

    # -- a Tier ---------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> int:
        """Counts as a use of what it finds, of the last one first: a beginning is of use without what follows. Touches
        no file: a prompt waits. Whoever reads one sets its time."""
        now, stamp_ns = time.monotonic(), time.time_ns()
        with self._lock:
            entries = self._entries
            count = leading(keys, entries)
            for position in range(count - 1, -1, -1):
                key = keys[position]
                entries.move_to_end(key)
                entry = entries[key]
                if now - entry.stamped_s >= STAMP_S:
                    entry.stamp_ns = stamp_ns - position
        return count

    def has(self, key: bytes) -> bool:
        return key in self._entries

    def touch(self, keys: Sequence[bytes]) -> None:
        """Sets the times of files, those that are new included."""
        now, stamp_ns = time.monotonic(), time.time_ns()
        stale: list[tuple[bytes, int]] = []
        with self._lock:
            for position in range(len(keys) - 1, -1, -1):
                entry = self._entries.get(keys[position])
                if entry is None:
                    continue
                self._entries.move_to_end(keys[position])
                if now - entry.stamped_s >= STAMP_S:
                    entry.stamped_s, entry.stamp_ns = now, 0
                    stale.append((keys[position], stamp_ns - position))
        for key, stamp in stale:
            with contextlib.suppress(OSError):  # `get` will tell
                os.utime(self._file(key), ns=(stamp, stamp))

    def get(self, key: bytes, into: memoryview) -> bool:
        """Is no use: `find` comes before it, in the right order."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        try:
            # Without O_NONBLOCK a pipe that somebody has put there would keep the reader for good.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._file(key), flags)
            try:
                whole = os.fstat(descriptor).st_size == into.nbytes and _read(descriptor, into)
                if entry.stamp_ns:
                    _stamp(descriptor, entry)
            finally:
                os.close(descriptor)
        except FileNotFoundError:  # somebody else removed it
            self._forget(key)
            return False
        except OSError as error:
            if error.errno not in _PASSING:
                self.discard(key)  # or what follows it in its prefix would be out of reach for good
            raise _tier_error(error) from error
        if not whole:
            self.discard(key)
        return whole

    def lent(self, key: bytes) -> None:
        """Nothing of a file is this process's."""

    def put(self, key: bytes, record: Record) -> bool:
        size = memoryview(record).nbytes
        if size > self._limit:
            return False
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return True
            self._written += 1
            new = self._blocks / _NEW / f"{self._written:x}"
        self._make_room(size)
        target = self._file(key)
        try:
            descriptor = self._open_new(new)
            try:
                _write(descriptor, memoryview(record))
            finally:
                os.close(descriptor)
            self._publish(new, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise _tier_error(error) from error
        with self._lock:
            if key not in self._entries:
                self._entries[key] = _Entry(size, -STAMP_S)
                self._bytes += size
        return True

    def discard(self, key: bytes) -> None:
        self._forget(key)
        with contextlib.suppress(OSError):
            self._file(key).unlink()

    def clear(self) -> None:
        with self._lock:
            keys = list(self._entries)
        for key in keys:
            self.discard(key)

    def stats(self) -> TierStats:
        return TierStats(len(self._entries), self._bytes, self._limit, self._evicted)

    def close(self) -> None:
        """Lets another server have the directory."""
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    # -- internals ------------------------------------------------------------------------------------------

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return self._blocks / name[:2] / (name + SUFFIX)

    def _open_new(self, new: Path) -> int:
        # Without O_NONBLOCK a pipe that somebody has put there would keep the writer for good.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(new, flags, 0o600)
        except FileNotFoundError:  # somebody has emptied the directory
            if not os.path.samestat(os.fstat(self._lock_file), os.stat(self._blocks.parent / "lock")):
                raise  # or put another one in its place, which another server may use
            for folder in (self._blocks, self._blocks / _NEW):
                folder.mkdir(mode=0o700, exist_ok=True)
            return os.open(new, flags, 0o600)

    def _publish(self, new: Path, target: Path) -> None:
        """Gives a whole file its final name. What lies in its way and is no file of ours is moved aside: every write of
        the block would fail."""
        try:
            new.rename(target)
            return
        except FileNotFoundError:
            pass  # the first of its folder
        except IsADirectoryError:
            _move_aside(target)
        except NotADirectoryError:
            _move_aside(target.parent)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        new.rename(target)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            self._bytes -= entry.size if entry is not None else 0

    def _make_room(self, size: int) -> None:
        """Removes what was used least recently, until `size` bytes more are within the limit."""
        while True:
            with self._lock:
                if not self._entries or self._bytes + size <= self._limit:
                    return
                key, old = self._entries.popitem(last=False)
                self._bytes -= old.size
                self._evicted += 1
            with contextlib.suppress(OSError):  # gone already, or it stays until the next start finds it
                self._file(key).unlink()

    def _remove_litter(self) -> None:
        with os.scandir(self._blocks / _NEW) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def _list(self) -> None:
        found: list[tuple[int, bytes, int]] = []
        for entry in self._files():
            key = _key_of(entry.name)
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if key is None or not entry.is_file(follow_symlinks=False):
                continue  # none of ours
            if facts.st_size <= HEADER_BYTES:  # power was lost before its content was on the disk
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                continue
            found.append((facts.st_mtime_ns, key, facts.st_size))
        found.sort()
        for _, key, size in found:
            self._entries[key] = _Entry(size, -STAMP_S)
            self._bytes += size
        if found:
            _log.info("%s has %d blocks of earlier", self._blocks, len(found))

    def _files(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._blocks) as folders:
            for folder in folders:
                if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                    continue
                with os.scandir(folder.path) as entries:
                    yield from entries


def _move_aside(path: Path) -> None:
    aside = path.with_name(path.name + ASIDE)
    if os.path.lexists(aside):
        aside = path.with_name(f"{path.name}{ASIDE}-{time.time_ns():x}")
    path.rename(aside)
    _log.warning("%s lay in the place of a block's file and is none of ours; it is now %s", path, aside)


def _key_of(name: str) -> bytes | None:
    text = name.removesuffix(SUFFIX)
    if len(text) != 2 * KEY_BYTES or text == name or not _HEX_DIGITS.issuperset(text):
        return None
    return bytes.fromhex(text)


def _stamp(descriptor: int, entry: _Entry) -> None:
    """Keeps the use of a file, which the next server goes by."""
    entry.stamped_s, stamp_ns, entry.stamp_ns = time.monotonic(), entry.stamp_ns, 0
    with contextlib.suppress(OSError):  # of another user, perhaps: it is read all the same
        os.utime(descriptor, ns=(stamp_ns, stamp_ns))


def _read(descriptor: int, into: memoryview) -> bool:
    """Fills `into`, without the interpreter lock; False when the file ends before."""
    at = 0
    while at < into.nbytes:
        count = os.preadv(descriptor, [into[at:]], at)
        if count == 0:
            return False
        at += count
    return True


def _write(descriptor: int, record: memoryview) -> None:
    at = 0
    while at < record.nbytes:
        count = os.write(descriptor, record[at:])
        if count == 0:
            raise OSError(errno.EIO, "nothing was written")
        at += count


def _tier_error(error: OSError) -> TierError:
    reason = "full" if error.errno in _FULL else "denied" if error.errno in _DENIED else "io"
    return TierError(reason, f"{error.strerror or error}")
