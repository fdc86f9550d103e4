"""One safetensors file: what it says that it holds, and whether it is still the file that was there at first."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

import xxhash

from engine.loader.errors import ModelLoadError

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file cannot keep when its content changes or another one takes its place."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the file
    size: int  # bytes


class WeightsFile:
    """Where a file lies, and its state when this was made: before anybody reads it."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError when there is no such file."""
        self.path = path
        self.state = self._now()

    def require_unchanged(self, descriptor: int | None = None) -> None:
        """Raises ModelLoadError unless what is open as `descriptor`, or else lies at the path, is as it was."""
        if self._now(descriptor) != self.state:
            raise ModelLoadError(
                f"{self.path}: the file changed while the model was loaded; start again once it is complete"
            )

    def _now(self, descriptor: int | None = None) -> FileState:
        try:
            return FileState.of(os.stat(self.path if descriptor is None else descriptor))
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def entries(self, descriptor: int) -> tuple[list[TensorEntry], bytes]:
        """The tensors of the file, which is open, by their place in it; and XXH3-128 of the header."""
        prefix = os.pread(descriptor, 8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(self.state.size - 8, _MOST_HEADER_BYTES):
            raise ModelLoadError(f"{self.path}: not a safetensors file (header of {length} bytes)")
        text = os.pread(descriptor, length, 8)
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            found = [_entry(name, said, 8 + length) for name, said in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{self.path}: the safetensors header cannot be read: {error!r}") from error
        for entry in found:
            if entry.size < 0 or not 8 + length <= entry.begin <= self.state.size - entry.size:
                raise ModelLoadError(f"{self.path}: tensor {entry.name!r} does not lie in the file; it was cut off")
        return sorted(found, key=lambda entry: entry.begin), xxhash.xxh3_128_digest(text)


def _entry(name: str, said: dict[str, object], data_begin: int) -> TensorEntry:
    first, last = said["data_offsets"]  # type: ignore[misc]
    shape = tuple(int(size) for size in said["shape"])  # type: ignore[attr-defined]
    return TensorEntry(name, str(said["dtype"]), shape, data_begin + int(first), int(last) - int(first))


def states_name(files: Iterable[WeightsFile]) -> str:
    """32 hex digits that differ between two processes of a machine unless both read the same files, unchanged."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(json.dumps([str(file.path), *astuple(file.state)]).encode())
    return digest.hexdigest()
