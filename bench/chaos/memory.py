"""Whether processes grow: their resident memory over time, and the judgement on it. Pure but for reading /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
MIN_LIFE_S = 45.0  # of a younger process nothing can be said
WARM_UP = 0.4  # of its life; what it takes until then is no growth
ALLOWED_MIB = 24.0
ALLOWED_SHARE = 0.10


def resident_bytes(pid: int) -> int | None:
    """Memory of the process that lies in RAM; None when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return None


@dataclass
class Life:
    """Samples of one process: (seconds, resident bytes), oldest first."""

    name: str
    samples: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0

    def growth(self) -> tuple[float, float]:
        """(MiB, MiB per minute) between the medians of the first and the last third of what follows the warm-up."""
        warm = self.samples[0][0] + WARM_UP * self.seconds
        rest = [sample for sample in self.samples if sample[0] >= warm]
        third = max(1, len(rest) // 3)
        early, late = rest[:third], rest[-third:]
        grown = (_median([size for _, size in late]) - _median([size for _, size in early])) / MIB
        minutes = (_median([at for at, _ in late]) - _median([at for at, _ in early])) / 60
        return grown, grown / minutes if minutes > 0 else 0.0

    def too_much(self) -> str:
        """What is wrong about the growth; empty when nothing is."""
        if self.seconds < MIN_LIFE_S:
            return ""
        grown, slope = self.growth()
        allowed = max(ALLOWED_MIB, ALLOWED_SHARE * self.samples[-1][1] / MIB)
        if grown <= allowed:
            return ""
        return (
            f"{self.name} grew by {grown:.1f} MiB ({slope:.2f} MiB/min) in {self.seconds:.0f} s; {allowed:.1f} allowed"
        )


class Memory:
    """Lives of all processes that were seen."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], Life] = {}

    def sample(self, now_s: float, pids: Mapping[str, int]) -> None:
        """`pids` by the name of the process."""
        for name, pid in pids.items():
            size = resident_bytes(pid) if pid else None
            if size:
                self._lives.setdefault((name, pid), Life(name)).samples.append((now_s, size))

    def lives(self) -> list[Life]:
        return list(self._lives.values())

    def violations(self) -> list[str]:
        return [text for life in self._lives.values() if (text := life.too_much())]

    def longest(self) -> list[dict[str, object]]:
        """Of each name the longest life, with its growth."""
        best: dict[str, Life] = {}
        for life in self._lives.values():
            if life.name not in best or life.seconds > best[life.name].seconds:
                best[life.name] = life
        found: list[dict[str, object]] = []
        for name, life in sorted(best.items()):
            grown, slope = life.growth()
            found.append(
                {
                    "process": name,
                    "seconds": round(life.seconds, 1),
                    "resident_mib": round(life.samples[-1][1] / MIB, 1),
                    "grown_mib": round(grown, 1),
                    "mib_per_minute": round(slope, 2),
                }
            )
        return found


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
