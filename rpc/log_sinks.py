"""Where lines go: a rotating file, or a stream such as stderr.

A sink belongs to one thread, the writer of an `AsyncLogHandler`, and has no lock. `write` returns how many of the
lines it was given are out, in order; it raises nothing for a disk that is full or a reader that is gone.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO

_FILE_WRITE_BYTES = 1 << 20
# A pipe takes this much at once or not at all, so lines of several processes do not mix in it.
_PIPE_WRITE_BYTES = 4096
# How long a stream that was switched to non-blocking by whoever shares it may be full.
_FULL_STREAM_LIMIT_MS = 1000


class Sink(Protocol):
    """What the writer needs of a destination. `problem` is why something last failed."""

    @property
    def problem(self) -> Exception | None: ...

    def write(self, lines: Sequence[bytes]) -> int:
        """Writes lines, each without its line end; returns how many were written whole."""

    def reopen(self) -> None:
        """Opens the destination anew if it is a file. Raises OSError, and then goes on with the old one."""

    def flush(self) -> None:
        """Hands over what is buffered here, if anything."""

    def close(self) -> None:
        """May be called again."""


class _Descriptor:
    """Appends to one file descriptor in pieces of whole lines. Remembers a line that was cut by an error."""

    def __init__(self, fd: int, piece_bytes: int) -> None:
        self.fd = fd
        self.problem: OSError | None = None
        self._piece_bytes = piece_bytes
        self._cut = False

    def write(self, lines: Sequence[bytes]) -> int:
        done = 0
        while done < len(lines):
            count, size = 1, len(lines[done]) + 1
            while done + count < len(lines) and size + len(lines[done + count]) < self._piece_bytes:
                size += len(lines[done + count]) + 1
                count += 1
            piece = lines[done : done + count]
            written = self._put(b"\n".join(piece) + b"\n")
            if written < size:
                return done + _whole(piece, written)
            done += count
        return done

    def _put(self, data: bytes) -> int:
        """Bytes of `data` that were written before the first error."""
        # After half a line, what follows has to begin on one of its own.
        lead = b"\n" if self._cut else b""
        view, done = memoryview(lead + data), 0
        while done < len(view):
            try:
                done += os.write(self.fd, view[done:])
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.fd, select.POLLOUT)
                if not poll.poll(_FULL_STREAM_LIMIT_MS):
                    self.problem = TimeoutError("nobody reads it")
                    break
            except OSError as error:
                self.problem = error
                break
        if done:
            self._cut = view[done - 1] != ord("\n")
        return max(0, done - len(lead))


def _whole(lines: Sequence[bytes], size: int) -> int:
    """How many of the first lines fit into `size` bytes with their line ends."""
    for number, line in enumerate(lines):
        size -= len(line) + 1
        if size < 0:
            return number
    return len(lines)


class RotatingFile:
    """Appends to `path`; a file that would grow beyond `max_bytes` is renamed to `path.1`, that one to `path.2`, up
    to `backups`. Without backups the file begins anew. What is no regular file (/dev/null, /dev/stdout, a named pipe)
    is written to and never renamed.

    Raises OSError when it cannot be opened, also for a pipe that nobody reads: it is not waited for. A rotation that
    fails is tried again after another `max_bytes`.
    """

    def __init__(self, path: str | Path, max_bytes: int, backups: int) -> None:
        self._path = os.path.abspath(path)
        self._max_bytes = max_bytes
        self._backups = backups
        self._file: io.FileIO | None = None
        self._size = 0
        self._rotation_problem: OSError | None = None
        self._open()

    @property
    def problem(self) -> OSError | None:
        return self._out.problem or self._rotation_problem

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self._path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise OSError(error.errno, "no process reads this pipe", self._path) from None
            raise
        new = io.FileIO(fd, "ab")
        old, self._file = self._file, new
        status = os.fstat(fd)
        self._regular = stat.S_ISREG(status.st_mode)
        self._out = _Descriptor(fd, _PIPE_WRITE_BYTES if stat.S_ISFIFO(status.st_mode) else _FILE_WRITE_BYTES)
        self._size = status.st_size
        if old is not None:
            old.close()

    def write(self, lines: Sequence[bytes]) -> int:
        done = 0
        while done < len(lines):
            if self._regular and self._size and self._size + len(lines[done]) + 1 > self._max_bytes:
                self._rotate()
            count, size = 0, 0
            for line in lines[done:]:
                if count and self._size + size + len(line) + 1 > self._max_bytes:
                    break
                size += len(line) + 1
                count += 1
            written = self._out.write(lines[done : done + count])
            self._size += size
            done += written
            if written < count:
                break
        return done

    def _rotate(self) -> None:
        try:
            if self._backups:
                for number in range(self._backups - 1, 0, -1):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._path, f"{self._path}.1")
            else:
                assert self._file is not None
                self._file.truncate(0)
            self._open()
        except OSError as error:
            self._rotation_problem = error
            self._size = 0

    def reopen(self) -> None:
        self._open()

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Stream:
    """Writes to a text stream. One with a file descriptor is bypassed: its lock and buffer are shared with whoever
    else prints, and a reader that does not read would stop them all."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._problem: Exception | None = None
        self._out: _Descriptor | None = None
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.flush()
            fd = stream.fileno()
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            self._out = _Descriptor(fd, _FILE_WRITE_BYTES if regular else _PIPE_WRITE_BYTES)

    @property
    def problem(self) -> Exception | None:
        return self._problem if self._out is None else self._out.problem

    def write(self, lines: Sequence[bytes]) -> int:
        if self._out is not None:
            return self._out.write(lines)
        try:
            self._stream.write("".join(line.decode("utf-8", "replace") + "\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._problem = error
            return 0
        return len(lines)

    def reopen(self) -> None:
        """It is not ours to open."""

    def flush(self) -> None:
        if self._out is None:
            self._stream.flush()

    def close(self) -> None:
        """It is not ours to close."""
