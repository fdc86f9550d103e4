"""How long a benchmark may take: what does not fit any more is left out, and said."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Budget:
    """Seconds from its making on. An item that has begun runs to its end."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        return self._ends is not None and time.monotonic() >= self._ends

    def of(self, items: Iterable[Item], what: str) -> Iterator[Item]:
        """The items until the time is spent. What they are is in the line that says how many are left out, where that
        can be known."""
        remaining = iter(items)
        while not self.spent:
            try:
                item = next(remaining)
            except StopIteration:
                return
            yield item
        left = "some" if not isinstance(items, list | tuple) else sum(1 for _ in remaining)
        if left:
            print(f"out of time: {left} {what} left out", flush=True)


def add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=float, help="seconds after which nothing more is begun")
