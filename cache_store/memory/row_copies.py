"""Copies of rows between two pieces of host memory, with the interpreter lock released while bytes move."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from cache_store.geometry.rows import Rows

_FEW_RUNS = 4  # so many copies of whole runs cost less than a table of them
# Runs of rows that are scattered on both sides go by a table of them, in one system call. Shorter ones than these (on
# average) are copied twice, through a buffer that stays in the processor's cache: the call costs more for each run.
_LEAST_RUN_BYTES = 8192
_RUNS_PER_CALL = min(1024, os.sysconf("SC_IOV_MAX"))
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
    many of them, and all of them (`check_rows`)."""
    RowCopy(read.numbers, write.numbers, read.unit_bytes)(source, target)


class RowCopy:
    """The copy of row read[i] of one layer -> row write[i] of another, for any pairs of layers. May be used by several
    threads.

    Rows that follow each other on both sides are one run. Each call into a library lets go of the interpreter lock and
    waits for it afterwards, so there are few of them, whatever the number of runs.
    """

    def __init__(self, read: Sequence[int], write: Sequence[int], unit_bytes: int) -> None:
        self._unit = unit_bytes
        self._count = len(read)
        self._froms = np.fromiter(read, np.intp, self._count)
        self._tos = np.fromiter(write, np.intp, self._count)
        breaks = (np.diff(self._froms) != 1) | (np.diff(self._tos) != 1)
        self._first = np.concatenate((np.zeros(1, np.intp), np.flatnonzero(breaks) + 1))[: self._count]
        self._lengths = np.diff(self._first, append=self._count)

    def __call__(self, source: memoryview, target: memoryview) -> None:
        runs = len(self._first)
        if not runs:
            return
        if runs <= _FEW_RUNS:
            self._by_run(address_of(source), address_of(target))
        elif self._count * self._unit < runs * _LEAST_RUN_BYTES or not self._by_table(source, target):
            self._by_row(source, target)

    def _by_run(self, source: int, target: int) -> None:
        unit = self._unit
        for first, length in zip(self._first.tolist(), self._lengths.tolist(), strict=True):
            read, write = int(self._froms[first]), int(self._tos[first])
            ctypes.memmove(target + write * unit, source + read * unit, length * unit)

    def _by_table(self, source: memoryview, target: memoryview) -> bool:
        """False where the system has no such call, or does not allow it; a part may have been copied then."""
        move = _scatter()
        if move is None:
            return False
        read, write = self._tables
        return move(read + _base(address_of(source)), write + _base(address_of(target)))

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """(offset, bytes) of each run at its source and its target, uint64 [runs, 2]."""
        tables = []
        for rows in (self._froms, self._tos):
            table = np.empty((len(self._first), 2), np.uint64)
            table[:, 0] = rows[self._first] * self._unit
            table[:, 1] = self._lengths * self._unit
            tables.append(table)
        return tables[0], tables[1]

    def _by_row(self, source: memoryview, target: memoryview) -> None:
        unit, count = self._unit, self._count
        theirs, own = _rows(source, unit), _rows(target, unit)
        into = np.flatnonzero(np.diff(self._tos) != 1) + 1
        if len(into) * _FEW_RUNS < len(self._first):
            for first, stop in pairwise([0, *into.tolist(), count]):
                to = int(self._tos[first])
                np.take(theirs, self._froms[first:stop], out=own[to : to + stop - first], mode="clip")
            return
        step = max(1, _CHUNK_BYTES // unit)
        between = np.empty(min(step, count), own.dtype)
        for at in range(0, count, step):
            rows = between[: count - at]
            np.take(theirs, self._froms[at : at + step], out=rows, mode="clip")
            own[self._tos[at : at + step]] = rows


def _base(address: int) -> np.ndarray:
    return np.array([address, 0], np.uint64)


def _rows(layer: memoryview, unit: int) -> np.ndarray:
    return np.frombuffer(layer, np.dtype((np.void, unit)), layer.nbytes // unit)


@functools.cache
def _scatter() -> Callable[[np.ndarray, np.ndarray], bool] | None:
    """A copy by tables of (address, bytes), uint64 [runs, 2], inside of this process: process_vm_readv of itself, which
    is the one call that takes a table on both sides. None where it does not work."""
    try:
        call = ctypes.CDLL(None).process_vm_readv
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t

    def move(read: np.ndarray, write: np.ndarray) -> bool:
        for at in range(0, len(read), _RUNS_PER_CALL):
            theirs, own = read[at : at + _RUNS_PER_CALL], write[at : at + _RUNS_PER_CALL]
            moved = call(os.getpid(), own.ctypes.data, len(own), theirs.ctypes.data, len(theirs), 0)
            if moved != int(own[:, 1].sum()):
                return False
        return True

    one, other = np.arange(2, dtype=np.uint64), np.zeros(2, np.uint64)
    worked = move(
        np.array([[one.ctypes.data, one.nbytes]], np.uint64), np.array([[other.ctypes.data, other.nbytes]], np.uint64)
    )
    return move if worked and (one == other).all() else None
