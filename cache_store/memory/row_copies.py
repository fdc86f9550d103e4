"""Copies of rows between two pieces of host memory, with the interpreter lock released while bytes move."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from cache_store.geometry.rows import Rows

_FEW_RUNS = 4  # so many copies of whole runs cost less than finding their rows one by one
# Of rows that are scattered on both sides, on their way through a buffer that stays in the processor's cache. Each call
# lets go of the interpreter lock, and waits for it afterwards: one for each row takes longer than the bytes.
_CHUNK_BYTES = 512 << 10


def address_of(view: memoryview) -> int:
    """Where the memory of a view (format 'B', contiguous, not empty) begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def check_rows(rows: Rows, nbytes: int) -> None:
    """Raises IndexError when a layer of `nbytes` bytes lacks one of the rows."""
    check_range(rows.numbers, nbytes // rows.unit_bytes)


def check_range(numbers: Iterable[int], count: int) -> None:
    """Raises IndexError for a row number outside [0, count)."""
    for number in numbers:
        if not 0 <= number < count:
            raise IndexError(f"row {number} is outside [0, {count})")


def copy_rows(source: memoryview, read: Rows, target: memoryview, write: Rows) -> None:
    """Row i of `read` in the layer `source` -> row i of `write` in the layer `target`. Both have rows of one size, as
    many of them, and all of them (`check_rows`).

    Rows that follow each other on both sides are one copy. Many scattered ones are gathered by one call, and where the
    target is scattered too, by one for each chunk of them, and as many that write them.
    """
    unit, count = read.unit_bytes, len(read.numbers)
    if not count:
        return
    froms = np.fromiter(read.numbers, np.intp, count)
    tos = np.fromiter(write.numbers, np.intp, count)
    apart = np.diff(tos) != 1
    pieces = _bounds(apart | (np.diff(froms) != 1))
    if len(pieces) <= _FEW_RUNS:
        begin, end = address_of(source), address_of(target)
        for first, stop in pieces:
            ctypes.memmove(end + int(tos[first]) * unit, begin + int(froms[first]) * unit, (stop - first) * unit)
        return
    theirs, own = _table(source, unit), _table(target, unit)
    into = _bounds(apart)
    if len(into) * _FEW_RUNS < len(pieces):
        for first, stop in into:
            to = int(tos[first])
            np.take(theirs, froms[first:stop], out=own[to : to + stop - first], mode="clip")
        return
    step = max(1, _CHUNK_BYTES // unit)
    between = np.empty(min(step, count), own.dtype)
    for at in range(0, count, step):
        rows = between[: count - at]
        np.take(theirs, froms[at : at + step], out=rows, mode="clip")
        own[tos[at : at + step]] = rows


def _bounds(breaks: np.ndarray) -> list[tuple[int, int]]:
    """(first, stop) of each run of entries, where `breaks[i]` says that entry i + 1 begins a new one."""
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(breaks) + 1]
    return list(pairwise(edges))


def _table(layer: memoryview, unit: int) -> np.ndarray:
    return np.frombuffer(layer, np.dtype((np.void, unit)), layer.nbytes // unit)
