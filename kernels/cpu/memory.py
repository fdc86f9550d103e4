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
def _madvise() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros whose memory asks for huge pages, where the system has them (Linux).

    Memory is taken as it is first written (numpy's zeros, unlike torch's, does not write them); the tensor begins at
    a huge page.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(nbytes + HUGE_PAGE, dtype=np.uint8))
    begin = -raw.data_ptr() % HUGE_PAGE
    madvise = _madvise()
    if madvise is not None and nbytes >= HUGE_PAGE:
        madvise(raw.data_ptr() + begin, nbytes // HUGE_PAGE * HUGE_PAGE, _MADV_HUGEPAGE)
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
