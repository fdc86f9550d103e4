"""What a transport has to reach, of what the machine does without a cache store. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_BYTES = 64_000_000  # below, what a load costs once counts for more than its bytes


@dataclass(frozen=True)
class Target:
    """Rate of `what` over that of `beside`, in the same round: at least `least` in the median."""

    what: str
    beside: str
    least: float


TARGETS = (
    Target("grpc off", "bare grpc stream", 0.85),
    Target("tcp off", "bare socket", 0.70),
    Target("ipc", "memory copy", 0.85),
    Target("ipc, scattered", "memory copy, scattered", 0.85),
    Target("nixl", "bare nixl", 0.85),
    Target("nixl, scattered", "bare nixl, scattered", 0.85),
    # Checksums of every block cost 15 % of the time at the most.
    Target("grpc all", "grpc off", 1 / 1.15),
    Target("tcp all", "tcp off", 1 / 1.15),
)


@dataclass(frozen=True)
class Ratio:
    target: Target
    median: float
    low: float
    high: float

    @property
    def met(self) -> bool:
        return self.median >= self.target.least


def ratios(seconds: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """seconds: of each variant, round by round. Targets whose variants were not measured are left out."""
    found = []
    for target in TARGETS:
        if target.what in seconds and target.beside in seconds:
            pairs = zip(seconds[target.what], seconds[target.beside], strict=True)
            each = [beside / own for own, beside in pairs]
            found.append(Ratio(target, statistics.median(each), min(each), max(each)))
    return found
