"""Single series of a family: what counts, and how it is written in Prometheus' text format.

A request books some dozens of figures and a histogram sample per token, so booking one is a few instructions under the
series' own lock: a bucket is found by bisection and counted alone, and the running totals that the format wants are
made when somebody asks. The lines' names and labels are made once, with the series.

All three kinds are safe to use from several threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.utils import floatToGoString

__all__ = ["CounterSeries", "GaugeSeries", "HistogramSeries", "Series"]


def _number(value: float) -> str:
    """As Go writes it, which is what readers compare `le` with."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _head(sample: str, labels: Mapping[str, str]) -> str:
    """A line up to its value; labels in the order of their names."""
    text = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
    return f"{sample}{{{text}}} " if text else f"{sample} "


class CounterSeries:
    """Goes up only."""

    __slots__ = ("_head", "_lock", "_value")

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self._head = _head(name, labels)
        self._lock = threading.Lock()
        self._value = 0.0

    def inc(self, value: float = 1) -> None:
        """Raises ValueError for a negative value."""
        if value < 0:
            raise ValueError(f"a counter cannot fall by {-value:g}")
        with self._lock:
            self._value += value

    def read(self, suffix: str = "", le: str = "") -> float:
        return self._value

    def lines(self) -> Iterator[str]:
        yield f"{self._head}{_number(self._value)}\n"


class GaugeSeries:
    """Goes up and down."""

    __slots__ = ("_head", "_lock", "_value")

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self._head = _head(name, labels)
        self._lock = threading.Lock()
        self._value = 0.0

    def set(self, value: float) -> None:
        with self._lock:
            self._value = value

    def inc(self, value: float = 1) -> None:
        with self._lock:
            self._value += value

    def dec(self, value: float = 1) -> None:
        with self._lock:
            self._value -= value

    def read(self, suffix: str = "", le: str = "") -> float:
        return self._value

    def lines(self) -> Iterator[str]:
        yield f"{self._head}{_number(self._value)}\n"


class HistogramSeries:
    """Samples counted by bucket. `bounds`: upper bounds of the buckets, ascending, inclusive; the last one is open."""

    __slots__ = ("_bounds", "_counts", "_heads", "_lock", "_sum")

    def __init__(self, name: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        uppers = [*(_number(bound) for bound in bounds), "+Inf"]
        self._heads = (
            *(_head(f"{name}_bucket", {**labels, "le": upper}) for upper in uppers),
            _head(f"{name}_count", labels),
            _head(f"{name}_sum", labels),
        )
        self._lock = threading.Lock()
        self._counts = [0] * len(uppers)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds `times` samples of the same value."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += times
            self._sum += value * times

    def _totals(self) -> tuple[list[int], float]:
        """Samples up to each bound, and the sum of all."""
        with self._lock:
            return list(accumulate(self._counts)), self._sum

    def read(self, suffix: str = "_count", le: str = "") -> float:
        """`_count`, `_sum`, or `_bucket` with its bound. Raises KeyError for another one."""
        totals, total = self._totals()
        if suffix == "_bucket":
            uppers = [*(_number(bound) for bound in self._bounds), "+Inf"]
            return float(dict(zip(uppers, totals, strict=True))[le])
        return {"_count": float(totals[-1]), "_sum": total}[suffix]

    def lines(self) -> Iterator[str]:
        totals, total = self._totals()
        for head, value in zip(self._heads, (*totals, totals[-1], total), strict=True):
            yield f"{head}{_number(value)}\n"


Series: TypeAlias = CounterSeries | GaugeSeries | HistogramSeries
