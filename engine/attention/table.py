"""Which attention backend is fastest for a shape, as measured: `table.json` beside this file.

`python -m bench.gpu.attention --table engine/attention/table.json` measures it anew. Without a measurement of a backend
it is never chosen, and of equal ones `triton` is, which needs no plan on the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).with_name("table.json")
Kind = Literal["decode", "prefill"]
_FIRST = "triton"  # where nothing else is known to be faster
_PLAN_US = {"flashinfer": 10.0}  # of the host, per layer: a third of a millisecond to plan a step of 32 layers
_OTHER_HEADS = 8.0  # distance of a shape with another head size or grouping, in powers of two


@dataclass(frozen=True, slots=True)
class Measurement:
    """Microseconds of one layer's attention by backend."""

    kind: Kind
    head_dim: int
    group: int  # query heads per key head
    rows: int
    tokens: int  # decode: seen by each row; prefill: new ones of each row
    us: Mapping[str, float] = field(hash=False)

    def distance(self, head_dim: int, group: int, rows: int, tokens: int) -> float:
        """How unlike the shapes are, in powers of two."""
        other = abs(math.log2(self.head_dim / head_dim)) + abs(math.log2(self.group / group))
        return abs(math.log2(self.rows / rows)) + abs(math.log2(self.tokens / tokens)) + _OTHER_HEADS * other


@dataclass(frozen=True, slots=True)
class Table:
    device: str  # name of the device that was measured
    measurements: tuple[Measurement, ...]
    _nearest: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Steps ask with few different shapes: rounded to powers of two there are some hundred
        object.__setattr__(self, "_nearest", lru_cache(4096)(self._find))

    def fastest(self, kind: Kind, among: Collection[str], *, head_dim: int, group: int, rows: int, tokens: int) -> str:
        """The fastest of the backends `among` on the measured shape nearest to this one."""
        rounded = tuple(1 << max(0, round(math.log2(size))) for size in (max(rows, 1), max(tokens, 1)))
        return str(self._nearest(kind, frozenset(among), head_dim, group, *rounded))

    def _find(self, kind: Kind, among: frozenset[str], head_dim: int, group: int, rows: int, tokens: int) -> str:
        known = self._comparable(kind, among)
        if not known:
            return self._default(among)
        costs = _costs(min(known, key=lambda m: m.distance(head_dim, group, rows, tokens)), among)
        return min(costs, key=lambda name: (costs[name], name != _FIRST))

    def fastest_of_rows(self, kind: Kind, among: Collection[str], *, head_dim: int, group: int, rows: int) -> str:
        """For rows of lengths that are not known: the backend that loses least against the fastest, over the measured
        lengths of the nearest number of rows."""
        known = self._comparable(kind, among)
        if not known:
            return self._default(among)
        rows = max(rows, 1)
        distances = {m: m.distance(head_dim, group, rows, m.tokens) for m in known}
        nearest = min(distances.values())
        lost = dict.fromkeys(sorted(among), 0.0)
        for m, distance in distances.items():
            if distance == nearest:
                costs = _costs(m, among)
                for name in lost:
                    lost[name] += costs.get(name, math.inf) / min(costs.values())
        return min(lost, key=lambda name: (lost[name], name != _FIRST))

    def chosen_for_graphs(self, name: str, among: Collection[str], *, head_dim: int, group: int) -> bool:
        """Whether decode graphs of some size are that backend's."""
        sizes = {m.rows for m in self.measurements if m.kind == "decode"}
        heads = {"head_dim": head_dim, "group": group}
        return any(self.fastest_of_rows("decode", among, rows=rows, **heads) == name for rows in sizes)

    def prefers(self, name: str, among: Collection[str], *, head_dim: int, group: int) -> bool:
        """Whether there is a shape of such heads for which that backend is the choice."""
        heads = {"head_dim": head_dim, "group": group}
        return any(
            self.fastest(m.kind, among, rows=m.rows, tokens=m.tokens, **heads) == name for m in self.measurements
        )

    def _comparable(self, kind: Kind, among: Collection[str]) -> list[Measurement]:
        return [m for m in self.measurements if m.kind == kind and sum(name in m.us for name in among) > 1]

    @staticmethod
    def _default(among: Collection[str]) -> str:
        return _FIRST if _FIRST in among else min(among)


def _costs(measurement: Measurement, among: Collection[str]) -> dict[str, float]:
    """Microseconds per layer, the host's planning included."""
    return {name: us + _PLAN_US.get(name, 0.0) for name, us in measurement.us.items() if name in among}


def table_of(report: dict[str, Any]) -> dict[str, Any]:
    """The content of table.json from what `bench.gpu.attention` measured: the best version of each library."""
    rows = []
    for found in report["results"]:
        us: dict[str, float] = {}
        for name, value in found["us"].items():
            library = name.partition("-")[0]
            us[library] = round(min(value, us.get(library, value)), 2)
        rows.append({key: found[key] for key in ("kind", "head_dim", "group", "rows", "tokens")} | {"us": us})
    return {"device": report["device"], "measurements": rows}


def parse_table(content: dict[str, Any]) -> Table:
    """Raises KeyError or TypeError for content that `table_of` would not write."""
    return Table(content["device"], tuple(Measurement(**row) for row in content["measurements"]))


@lru_cache(1)
def measured_table() -> Table:
    """The table of this installation; empty where nothing was measured."""
    if not FILE.exists():
        return Table("", ())
    return parse_table(json.loads(FILE.read_text()))
