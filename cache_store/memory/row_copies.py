"""Copies of rows between two pieces of host memory, with the interpreter lock released while bytes move."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from cache_store.geometry.rows import Rows, paired_runs

_FEW_RUNS = 4  # so many copies of whole runs cost less than finding their rows one by one


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

    Rows that follow each other on both sides are one copy. Where many are scattered in the source alone, they are
    gathered by one call.
    """
    unit = read.unit_bytes
    pieces = paired_runs(read.numbers, write.numbers)
    if len(pieces) > _FEW_RUNS:
        into = paired_runs(range(len(write.numbers)), write.numbers)
        if len(into) * _FEW_RUNS < len(pieces):
            theirs = _table(source, unit)
            own = _table(target, unit)
            for first, to, count in into:
                np.take(theirs, read.numbers[first : first + count], axis=0, out=own[to : to + count], mode="clip")
            return
    begin, end = address_of(source), address_of(target)
    for first, to, count in pieces:
        ctypes.memmove(end + to * unit, begin + first * unit, count * unit)


def _table(layer: memoryview, unit: int) -> np.ndarray:
    count = layer.nbytes // unit
    return np.frombuffer(layer, np.uint8, count * unit).reshape(count, unit)
