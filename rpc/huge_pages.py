"""The memory of a process that is ready to serve, in huge pages.

Beside an engine that reads a model's weights at every step, router and fronts find the processor's caches cold at every
request, and the caches of page addresses too: a few hundred microseconds of Python touch hundreds of pages. In pages of
2 MiB a process's memory is some dozens of them. Linux 6.1 or later; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

HUGE = 2 << 20
# A range with fewer of its pages in use stays as it is: gathering it would take memory for the others.
DENSE = 0.75
_MADV_COLLAPSE = 25


def gather_memory() -> int:
    """Moves the memory in use of the calling process into huge pages; returns the bytes that are there now.

    To be called once, when what was allocated will stay; takes about a millisecond for each 2 MiB.
    """
    if sys.platform != "linux":
        return 0
    try:
        libc = ctypes.CDLL(None)
        madvise, mincore = libc.madvise, libc.mincore
        ranges = list(_own_ranges())
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = HUGE // mmap.PAGESIZE
    resident = ctypes.create_string_buffer(pages)  # a byte for each page
    gathered = 0
    for begin, end in ranges:
        for address in range(-(-begin // HUGE) * HUGE, end - HUGE + 1, HUGE):
            if mincore(address, HUGE, resident) == 0 and resident.raw.count(1) >= DENSE * pages:
                gathered += HUGE if madvise(address, HUGE, _MADV_COLLAPSE) == 0 else 0
    return gathered


def _own_ranges() -> Iterator[tuple[int, int]]:
    """Begin and end of what the process has allocated: private, writable, of no file."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights == "rw-p" and inode == "0" and (not name or name[0].strip() == "[heap]"):
                begin, _, end = addresses.partition("-")
                yield int(begin, 16), int(end, 16)
