"""Keeps freed memory in the process, so that every event of a load does not fault its pages in anew.

gRPC allocates about 1 MiB per event several times over. By default glibc takes buffers of that size from the kernel and
gives them back when they are freed, which costs about 80,000 page faults per GB received: a load over loopback then ran
at about two thirds of the rate (`python -m bench.kv_transfer` has rates).
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

MMAP_THRESHOLD_BYTES = 16 << 20  # buffers below this come from the heap
TRIM_THRESHOLD_BYTES = 64 << 20  # the heap keeps at most so much free memory at its end
TOP_PAD_BYTES = 4 << 20


def keep_freed_memory() -> bool:
    """Sets glibc's thresholds for this process. False, and no change, where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018  another C library may have a mallopt that does nothing
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(option, value) == 1
        for option, value in (
            (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
            (_M_TOP_PAD, TOP_PAD_BYTES),
        )
    )
