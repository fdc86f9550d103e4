"""Which way a sum of so many bytes takes between GPUs: pure choice by measured times.

NCCL's all-reduce suits large tensors. With few rows a step's sums are some hundred kilobytes, and their time is
latency: then kernels that read the peers' memory over NVLink themselves are faster. *One shot*: every rank reads all of
every peer's tensor. *Two shots*: every rank sums a share, then reads the others' shares.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NCCL = "nccl"
ONE_SHOT = "one_shot"
TWO_SHOT = "two_shot"
SIZES = tuple(1 << exponent for exponent in range(13, 26, 2))  # bytes at which paths are measured: 8 KB to 32 MB


@dataclass(frozen=True, slots=True)
class PathTable:
    """The fastest path by size."""

    sizes: tuple[int, ...] = ()  # bytes, ascending: the largest tensor of each class
    paths: tuple[str, ...] = ()  # of each class

    def path(self, size: int) -> str:
        """For a tensor of `size` bytes; NCCL beyond what was measured."""
        at = bisect.bisect_left(self.sizes, size)
        return self.paths[at] if at < len(self.paths) else NCCL


def fastest(seconds: Mapping[str, Sequence[float]], sizes: Sequence[int] = SIZES) -> PathTable:
    """seconds: by path, for each of `sizes` ascending; the same on every rank. A tie goes to the path named first."""
    if any(len(measured) != len(sizes) for measured in seconds.values()):
        raise ValueError(f"{len(sizes)} sizes, measured {[len(measured) for measured in seconds.values()]}")
    paths = tuple(min(seconds, key=lambda name: seconds[name][index]) for index in range(len(sizes)))
    return PathTable(tuple(sizes), paths)


def candidates(size: int) -> tuple[str, ...]:
    """The paths that give the same bits on every one of `size` ranks. One shot adds up from a rank's own summand on,
    and only of two summands the order does not matter."""
    return (NCCL, ONE_SHOT, TWO_SHOT) if size == 2 else (NCCL, TWO_SHOT)
