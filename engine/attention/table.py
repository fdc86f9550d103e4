"""Which attention backend is fastest for a shape, as measured: `table.json` beside this file.

`python -m bench.gpu.attention --table engine/attention/table.json` measures it anew. It speaks for the device that was
measured and for devices of the same compute capability, which run the same kernels; on any other it is left aside.
Without a measurement of a backend it is never chosen, and of equal ones `triton` is, which needs no plan on the host.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from engine.loader.errors import ModelLoadError

_log = logging.getLogger(__name__)
FILE = Path(__file__).with_name("table.json")
Kind = Literal["decode", "prefill"]
_FIRST = "triton"  # where nothing else is known to be faster
_OTHER_HEADS = 8.0  # distance of a shape with another head size or grouping, in powers of two


@dataclass(frozen=True, slots=True)
class Heads:
    """What of a model its attention depends on."""

    head_dim: int
    group: int  # query heads per key head
    layers: int  # that share one plan


@dataclass(frozen=True, slots=True)
class Measurement:
    """Microseconds of one layer's attention by backend."""

    kind: Kind
    head_dim: int
    group: int
    rows: int
    tokens: int  # decode: seen by each row; prefill: new ones of each row
    us: Mapping[str, float] = field(hash=False)

    def distance(self, heads: Heads, rows: int, tokens: int) -> float:
        """How unlike the shapes are, in powers of two."""
        other = abs(math.log2(self.head_dim / heads.head_dim)) + abs(math.log2(self.group / heads.group))
        return abs(math.log2(self.rows / rows)) + abs(math.log2(self.tokens / tokens)) + _OTHER_HEADS * other


@dataclass(frozen=True, slots=True)
class Table:
    device: str  # name of the device that was measured
    measurements: tuple[Measurement, ...]
    capability: tuple[int, int] = (0, 0)  # its compute capability
    plan_us: Mapping[str, float] = field(default_factory=dict)  # of the host, per step; nothing overlaps it
    _nearest: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Steps ask with few different shapes: rounded to powers of two there are some hundred
        object.__setattr__(self, "_nearest", lru_cache(4096)(self._find))

    def fastest(self, kind: Kind, among: Collection[str], heads: Heads, rows: int, tokens: int) -> str:
        """The fastest of the backends `among` on the measured shape nearest to this one, the host's planning included.
        Of equally near ones the one of more tokens speaks."""
        rounded = tuple(1 << max(0, round(math.log2(size))) for size in (max(rows, 1), max(tokens, 1)))
        return str(self._nearest(kind, frozenset(among), heads, *rounded))

    def _find(self, kind: Kind, among: frozenset[str], heads: Heads, rows: int, tokens: int) -> str:
        known = [m for m in self.measurements if m.kind == kind and sum(name in m.us for name in among) > 1]
        if not known:
            return _FIRST if _FIRST in among else min(among)
        nearest = min(known, key=lambda m: (m.distance(heads, rows, tokens), -m.tokens))
        costs = {
            name: us + self.plan_us.get(name, 0.0) / heads.layers for name, us in nearest.us.items() if name in among
        }
        return min(costs, key=lambda name: (costs[name], name != _FIRST))

    def winners(self, kind: Kind, among: Collection[str], heads: Heads, rows: int, most_tokens: int) -> list[str]:
        """The backends that are the fastest for so many rows of some length up to `most_tokens`."""
        lengths = [1 << power for power in range(max(1, most_tokens).bit_length())]
        return sorted({self.fastest(kind, among, heads, rows, tokens) for tokens in (*lengths, most_tokens)})

    def prefers(self, name: str, among: Collection[str], heads: Heads) -> bool:
        """Whether there is a measured shape for which that backend is the choice."""
        return any(self.fastest(m.kind, among, heads, m.rows, m.tokens) == name for m in self.measurements)

    def speaks_for(self, name: str, capability: tuple[int, int]) -> bool:
        """Whether the measurements hold on a device of that name and compute capability."""
        return name == self.device or capability == self.capability


def table_of(report: dict[str, Any]) -> dict[str, Any]:
    """The content of table.json from what `bench.gpu.attention` measured: the best version of each library, and the
    median of its plans."""
    rows, plans = [], dict[str, list[float]]()
    for found in report["results"]:
        us: dict[str, float] = {}
        for name, value in found["us"].items():
            library = name.partition("-")[0]
            us[library] = round(min(value, us.get(library, value)), 2)
        for name, value in found["plan_us"].items():
            plans.setdefault(name.partition("-")[0], []).append(value)
        rows.append({key: found[key] for key in ("kind", "head_dim", "group", "rows", "tokens")} | {"us": us})
    return {
        "device": report["device"],
        "capability": list(report["capability"]),
        "plan_us": {library: round(statistics.median(values), 1) for library, values in plans.items()},
        "measurements": rows,
    }


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Kind
    head_dim: Annotated[int, msgspec.Meta(ge=1)]
    group: Annotated[int, msgspec.Meta(ge=1)]
    rows: Annotated[int, msgspec.Meta(ge=1)]
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    us: dict[str, Annotated[float, msgspec.Meta(gt=0.0)]]


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    capability: tuple[int, int]
    plan_us: dict[str, Annotated[float, msgspec.Meta(ge=0.0)]]
    measurements: list[_Row]


def parse_table(content: bytes) -> Table:
    """Raises msgspec.DecodeError for JSON that is not what `table_of` writes: a time or size that is none, too."""
    read = msgspec.json.decode(content, type=_Content)
    measurements = tuple(Measurement(m.kind, m.head_dim, m.group, m.rows, m.tokens, m.us) for m in read.measurements)
    return Table(read.device, measurements, read.capability, read.plan_us)


@lru_cache(1)
def measured_table() -> Table:
    """The table of this installation; empty where nothing was measured. Raises ModelLoadError for a damaged one."""
    if not FILE.exists():
        return Table("", ())
    try:
        return parse_table(FILE.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(
            f"--attention-backend 'auto': the measurements of {FILE} cannot be used ({error}); put the file back as it "
            "came, measure anew (python -m bench.gpu.attention --table), or name a backend such as 'triton'"
        ) from error


@lru_cache
def table_for(name: str, capability: tuple[int, int]) -> Table:
    """The measurements that hold on a device of that name and compute capability; none on one unlike what was measured.
    The log tells, once per device, where they are another device's."""
    table = measured_table()
    if not table.measurements or table.device == name:
        return table
    told = {"measured": table.device, "device": name}
    if table.speaks_for(name, capability):
        _log.info("attention backends are chosen by measurements of a device of the same kind", extra=told)
        return table
    _log.warning(
        "attention was measured on another kind of device, so that triton computes all of it here; "
        "`python -m bench.gpu.attention --table engine/attention/table.json` measures this one",
        extra=told,
    )
    return Table("", ())
