"""Digests of whole weights, made on threads of their own while the same files are loaded.

    piece   = XXH3-128 of up to PIECE_BYTES of a tensor, in order
    tensor  = XXH3-128 of its pieces' digests, one after the other
    weights = XXH3-128 of name, dtype, shape and digest of each tensor that the model has, sorted by name

So it does not matter how tensors are spread over files, what else lies in these, or how many threads there were.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType

import xxhash

from engine.loader.digest_cache import DigestCache
from engine.loader.errors import ModelLoadError
from engine.loader.weights_file import TensorEntry, WeightsFile
from engine.progress import Progress

PIECE_BYTES = 16 << 20  # part of what a digest means, and of the fingerprint with it
MOST_THREADS = 8  # with more, memory or the disk is what they wait for
LEAST_CACHED_BYTES = 16 << 20  # of a file: a smaller one is read as fast as what was kept about it
READ_AHEAD_BYTES = 128 << 20  # asked of a disk while threads digest what has come
_READ_BYTES = 2 << 20  # at a time: large enough that the loading thread is rarely asked for the interpreter lock
_END_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Digested:
    """One file."""

    file: WeightsFile
    descriptor: int
    entries: list[TensorEntry]
    content: str  # of the cache's key
    tensors: dict[str, bytes] | None = None  # kept from an earlier start
    pieces: dict[str, list[bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a tensor, by its number; the bytes [begin, end) of the file."""

    digested: _Digested
    name: str
    number: int
    begin: int
    end: int

    def want(self) -> None:
        """Has the system read it, without a wait for it."""
        with suppress(OSError):
            os.posix_fadvise(self.digested.descriptor, self.begin, self.end - self.begin, os.POSIX_FADV_WILLNEED)


class WeightDigests:
    """A context manager: threads begin with it, and end with it at the latest."""

    def __init__(
        self, files: Sequence[WeightsFile], cache: DigestCache | None = None, threads: int | None = None
    ) -> None:
        """files: of later ones tensors take the place of those of the same name before. cache: None keeps nothing.
        threads: by default half of the processors, up to MOST_THREADS."""
        self._sources = files
        self._cache = cache
        self._count = threads or min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
        self._files: list[_Digested] = []
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()  # for what follows
        self._work: Iterator[_Piece] = iter(())
        self._ahead: Iterator[_Piece] = iter(())  # the same pieces, as they are asked of the disk
        self._ahead_bytes = 0  # asked of it, and not yet given to a thread
        self._stopped = False
        self._error: Exception | None = None
        self._bytes_left = 0
        self.read_bytes = 0  # of tensors, so far
        self._began = self._ended = 0.0

    def __enter__(self) -> WeightDigests:
        self._began = self._ended = time.monotonic()
        try:
            for source in self._sources:
                self._files.append(self._opened(source))
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        wanted = [digested for digested in self._files if digested.tensors is None]
        self._bytes_left = sum(entry.size for digested in wanted for entry in digested.entries)
        self._work, self._ahead = _pieces(wanted), _pieces(wanted)
        for number in range(min(self._count, -(-self._bytes_left // PIECE_BYTES))):
            thread = threading.Thread(target=self._run, name=f"weights-digest-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        until = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # else a read hangs, on descriptors that stay open
            self._stack.close()

    def _opened(self, source: WeightsFile) -> _Digested:
        try:
            descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, descriptor)
            source.require_unchanged(descriptor)
            entries, header = source.entries(descriptor)
        except OSError as error:
            raise _unreadable(source, error) from error
        digested = _Digested(source, descriptor, entries, f"{PIECE_BYTES} {header.hex()}")
        if self._cache is not None and source.state.size >= LEAST_CACHED_BYTES:
            kept = self._cache.get(source.state, digested.content)
            if kept is not None and kept.keys() == {entry.name for entry in entries}:
                digested.tensors = kept
        if digested.tensors is None:
            digested.pieces = {entry.name: [b""] * -(-entry.size // PIECE_BYTES) for entry in entries}
        return digested

    def combined(self, names: Iterable[str]) -> str:
        """32 hex digits over the named tensors, once they are digested. Raises ModelLoadError when a file could not be
        read to its end, or has changed since it was found; KeyError for a name that is in no file."""
        waited = self._wait()
        if self._error is not None:
            raise self._error
        found: dict[str, tuple[TensorEntry, bytes]] = {}
        for digested in self._files:
            fresh = digested.tensors is None
            if digested.tensors is None:
                digested.tensors = {
                    name: xxhash.xxh3_128_digest(b"".join(pieces)) for name, pieces in digested.pieces.items()
                }
            digested.file.require_unchanged(digested.descriptor)
            if fresh and self._cache is not None and digested.file.state.size >= LEAST_CACHED_BYTES:
                self._cache.put(digested.file.state, digested.content, digested.tensors)
            found.update({entry.name: (entry, digested.tensors[entry.name]) for entry in digested.entries})
        weights = xxhash.xxh3_128()
        for name in sorted(names):
            entry, digest = found[name]
            weights.update(json.dumps([name, entry.dtype, entry.shape]).encode() + digest)
        total = sum(entry.size for digested in self._files for entry in digested.entries)
        figures = {
            "bytes": self.read_bytes,
            "kept_bytes": total - self.read_bytes,
            "seconds": round(self._ended - self._began, 3),
            "waited_seconds": round(waited, 3),
        }
        _log.info("weights digested", extra=figures)
        return weights.hexdigest()

    def _wait(self) -> float:
        """Until the threads are through; seconds that it took."""
        began = time.monotonic()
        if any(thread.is_alive() for thread in self._threads):
            with Progress("digesting weights", self._bytes_left / 1e9, "GB") as progress:
                for thread in self._threads:
                    while thread.is_alive():
                        thread.join(0.5)
                        progress.update(self.read_bytes / 1e9)
        return time.monotonic() - began

    def _run(self) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        try:
            while not self._stopped:
                piece, ahead = self._take()
                for each in ahead:
                    each.want()
                if piece is None:
                    break
                self._digest(piece, buffer)
        except Exception as error:  # `combined` raises it
            self._stopped, self._error = True, self._error or error
        with self._turn:
            self._ended = time.monotonic()

    def _take(self) -> tuple[_Piece | None, list[_Piece]]:
        """The next piece, and those that the disk should read meanwhile."""
        ahead: list[_Piece] = []
        with self._turn:
            piece = next(self._work, None)
            if piece is not None:
                self._ahead_bytes -= piece.end - piece.begin
                while self._ahead_bytes < READ_AHEAD_BYTES and (other := next(self._ahead, None)) is not None:
                    self._ahead_bytes += other.end - other.begin
                    ahead.append(other)
        return piece, ahead

    def _digest(self, piece: _Piece, buffer: memoryview) -> None:
        digested = piece.digested
        digest = xxhash.xxh3_128()
        at = piece.begin
        while at < piece.end and not self._stopped:
            try:
                count = os.preadv(digested.descriptor, [buffer[: piece.end - at]], at)
            except OSError as error:
                raise _unreadable(digested.file, error, at) from error
            if not count:
                raise ModelLoadError(f"{digested.file.path}: cut off at byte {at}; start again once it is complete")
            digest.update(buffer[:count])
            at += count
        digested.pieces[piece.name][piece.number] = digest.digest()
        with self._turn:
            self.read_bytes += piece.end - piece.begin


def _pieces(files: Iterable[_Digested]) -> Iterator[_Piece]:
    """In the order of the files' bytes, so that a disk reads on."""
    for digested in files:
        for entry in digested.entries:
            for number in range(len(digested.pieces[entry.name])):
                begin = entry.begin + number * PIECE_BYTES
                end = min(begin + PIECE_BYTES, entry.begin + entry.size)
                yield _Piece(digested, entry.name, number, begin, end)


def _unreadable(file: WeightsFile, error: OSError, at: int | None = None) -> ModelLoadError:
    place = "" if at is None else f" at byte {at}"
    return ModelLoadError(f"{file.path}: cannot be read{place}: {error.strerror or error}")
