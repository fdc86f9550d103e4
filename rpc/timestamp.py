"""Points in time as logs write them."""

from __future__ import annotations

import functools
import time


def timestamp(seconds: float) -> str:
    """UTC with milliseconds, `2026-01-31T12:00:00.123Z`, of seconds since the epoch."""
    return f"{_whole(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@functools.lru_cache(maxsize=4)  # lines come in bursts
def _whole(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
