"""Memory on huge pages: with 4 KiB pages, address translation costs a decode step a third of its time."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_CHUNK = 64 << 20


@functools.cache
def _c_function(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of the C library, None where it has no such one."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros whose memory asks for huge pages, where the system has them (Linux).

    Memory is taken as it is first written (numpy's zeros, unlike torch's, does not write them); the tensor begins at
    a huge page.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(nbytes + HUGE_PAGE, dtype=np.uint8))
    begin = -raw.data_ptr() % HUGE_PAGE
    madvise = _c_function("madvise")
    if madvise is not None and nbytes >= HUGE_PAGE:
        length = ctypes.c_size_t(nbytes // HUGE_PAGE * HUGE_PAGE)
        madvise(ctypes.c_void_p(raw.data_ptr() + begin), length, _MADV_HUGEPAGE)
    return raw[begin : begin + nbytes].view(dtype).view(*shape)


class HugeArena:
    """Gives out pieces of memory on huge pages, one behind the other. A chunk is freed with its last piece."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor aligned to 64 bytes, not yet written to."""
        nbytes = -(-math.prod(shape) * dtype.itemsize // 64) * 64
        if self._used + nbytes > self._chunk.numel():
            self._chunk = huge_zeros([-(-max(nbytes, _CHUNK) // HUGE_PAGE) * HUGE_PAGE], torch.uint8)
            self._used = 0
        piece = self._chunk[self._used : self._used + math.prod(shape) * dtype.itemsize]
        self._used += nbytes
        return piece.view(dtype).view(*shape)


def release_freed() -> None:
    """Gives memory that this process freed back to the system, where the C library knows how (glibc).

    Worth calling after the plain weights of a model were dropped: they lie among blocks that stay.
    """
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))
