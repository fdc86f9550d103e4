"""Waiting for something that has no event of its own, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Returns once `condition()` holds. Raises TimeoutError when it does not within `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for gives no event
            await asyncio.sleep(0.002)
