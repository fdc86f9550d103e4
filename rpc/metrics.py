"""The one registry of a process, made from the table in `rpc.metric_families`.

What did not happen is absent: counters and histograms make a series with its first event, while `# HELP` and
`# TYPE` of every family of the role are there from the start. Gauges without labels of their own exist from
the start at 0.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from rpc.metric_families import BUCKETS, FAMILIES, SECTIONS, Family, Role, families_of
from rpc.metric_series import CounterSeries, GaugeSeries, HistogramSeries, Series

__all__ = [
    "BUCKETS",
    "CONTENT_TYPE",
    "FAMILIES",
    "MAX_WORKERS",
    "SECTIONS",
    "CounterSeries",
    "Family",
    "GaugeSeries",
    "HistogramSeries",
    "Registry",
    "Role",
    "families_of",
]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_WORKERS = 256
OTHER = "other"

S = TypeVar("S", bound=Series)

_log = logging.getLogger(__name__)


class ObservationLike(Protocol):
    """News about one series, as the engine sends it: a counter's increment, a gauge's value, a histogram's
    sample."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def value(self) -> float: ...


class Found(dict[tuple[str, ...], S]):
    """Series of one family by the values of its labels, in the order of `names`; each is found once. For figures that
    every request books, and of families whose series are never removed."""

    def __init__(self, registry: Registry, name: str, names: tuple[str, ...], kind: type[S]) -> None:
        super().__init__()
        self._registry, self._name, self._names, self._kind = registry, name, names, kind

    def __missing__(self, values: tuple[str, ...]) -> S:
        found = self._registry.series(self._name, dict(zip(self._names, values, strict=True)))
        if not isinstance(found, self._kind):
            raise KeyError(f"{self._name} is no {self._kind.__name__}")
        self[values] = found
        return found


class Registry:
    """All metric families of one process.

    `colocated` and `tensor_parallel` add the families that exist only then. Safe to use from several threads.
    An unknown family, an unknown or missing label and a value outside a closed set raise at once, so a test
    that reaches the line finds the mistake.
    """

    def __init__(
        self,
        role: Role,
        *,
        colocated: bool = False,
        tensor_parallel: bool = False,
        process_metrics: bool = True,
    ) -> None:
        self.role: Role = role
        self.families = families_of(role, colocated=colocated, tensor_parallel=tensor_parallel)
        self._process = CollectorRegistry(auto_describe=False)  # figures of the process and the interpreter
        self._labels = {name: family.all_labels(role) for name, family in self.families.items()}
        # By family, then by the labels' values.
        self._series: dict[str, dict[tuple[str, ...], Series]] = {name: {} for name in self.families}
        # The same by name and labels as callers give them: a request books some dozens of figures.
        self._given: dict[tuple[object, ...], Series] = {}
        self._workers: set[str] = set()
        self._complained: set[str] = set()
        self._lock = threading.Lock()
        for name, family in self.families.items():
            if family.kind == "gauge" and set(self._labels[name]) <= {"role"}:
                self.set(name, 0)
        if process_metrics:
            ProcessCollector(registry=self._process)
            PlatformCollector(registry=self._process)
            GCCollector(registry=self._process)

    @staticmethod
    def for_process(
        role: Role, *, colocated: bool = False, tensor_parallel: bool = False, counting: bool = True
    ) -> Registry:
        """The registry of a process; with `counting` False one that takes everything and books nothing."""
        kind = Registry if counting else _UncountedRegistry
        return kind(role, colocated=colocated, tensor_parallel=tensor_parallel)

    def _make(self, name: str, values: tuple[str, ...]) -> Series:
        family = self.families[name]
        labels = dict(zip(self._labels[name], values, strict=True))
        if family.kind == "counter":
            return CounterSeries(name, labels)
        if family.kind == "gauge":
            return GaugeSeries(name, labels)
        return HistogramSeries(name, labels, family.bucket_bounds())

    def _label_values(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Values in the family's order, with the own role filled in; checked."""
        names = self._labels.get(name)
        if names is None:
            known = "of another role" if name in FAMILIES else "unknown"
            raise KeyError(f"metric family {name} is {known}; this process is {self.role}")
        family = self.families[name]
        own_role = family.own_role
        for label in labels:
            if label not in names:
                raise KeyError(f"metric family {name} has no label {label}; its labels: {', '.join(names)}")
        values = []
        for label in names:
            value = labels.get(label)
            if value is None:
                if not (own_role and label == "role"):
                    raise KeyError(f"metric family {name} needs the label {label}")
                value = self.role
            value = str(value)
            allowed = family.values.get(label)
            if allowed is not None and value not in allowed:
                raise ValueError(f"label {label}={value!r} of {name} must be one of: {', '.join(sorted(allowed))}")
            if own_role and label == "role" and value != self.role:
                raise ValueError(f"label role={value!r} of {name}: this process is {self.role}")
            values.append(self._capped(value) if label == "worker" else value)
        return tuple(values)

    def _capped(self, worker: str) -> str:
        if worker in self._workers:
            return worker
        with self._lock:
            if len(self._workers) >= MAX_WORKERS and worker not in self._workers:
                return OTHER
            self._workers.add(worker)
        return worker

    def series(self, name: str, labels: Mapping[str, str]) -> Series:
        """The series of `name` with these labels; made if it does not exist."""
        given: tuple[object, ...] = (name, *labels.items())
        known = self._given.get(given)
        if known is not None:
            return known
        values = self._label_values(name, labels)
        with self._lock:
            found = self._series[name].get(values)
            if found is None:
                found = self._series[name][values] = self._make(name, values)
            # Not those whose label was changed on the way: there is no end to them.
            if all(value in values for value in labels.values()):
                self._given[given] = found
        return found

    def counters(self, name: str, *labels: str) -> Found[CounterSeries]:
        return Found(self, name, labels, CounterSeries)

    def gauges(self, name: str, *labels: str) -> Found[GaugeSeries]:
        return Found(self, name, labels, GaugeSeries)

    def histograms(self, name: str, *labels: str) -> Found[HistogramSeries]:
        return Found(self, name, labels, HistogramSeries)

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds to a counter (>= 0) or a gauge."""
        series = self.series(name, labels)
        if isinstance(series, HistogramSeries):
            raise KeyError(f"{name} is a histogram; use observe()")
        series.inc(value)

    def dec(self, name: str, value: float = 1, **labels: str) -> None:
        series = self.series(name, labels)
        if not isinstance(series, GaugeSeries):
            raise KeyError(f"{name} is no gauge")
        series.dec(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        series = self.series(name, labels)
        if not isinstance(series, GaugeSeries):
            raise KeyError(f"{name} is no gauge")
        series.set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds a sample to a histogram, in the unit of its name."""
        series = self.series(name, labels)
        if not isinstance(series, HistogramSeries):
            raise KeyError(f"{name} is no histogram")
        series.observe(value)

    @contextmanager
    def track(self, name: str, **labels: str) -> Iterator[None]:
        """Counts the `with` body in a gauge of open work, which falls on every exit."""
        series = self.series(name, labels)
        if not isinstance(series, GaugeSeries):
            raise KeyError(f"{name} is no gauge")
        series.inc()
        try:
            yield
        finally:
            series.dec()

    def remove(self, name: str, **labels: str) -> None:
        """Takes a series away (a state that is absent, a server that left). Absent already: nothing
        happens."""
        values = self._label_values(name, labels)
        with self._lock:
            # Without labels it has its value from the start and keeps it.
            if values and self._series[name].pop(values, None) is not None:
                self._given.clear()

    def remove_worker(self, worker: str) -> None:
        """Takes every series of a server away and frees its place among the MAX_WORKERS."""
        with self._lock:
            self._given.clear()
            for name, labels in self._labels.items():
                if "worker" in labels:
                    place = labels.index("worker")
                    kept = {values: one for values, one in self._series[name].items() if values[place] != worker}
                    self._series[name] = kept
            self._workers.discard(worker)

    def apply(self, observations: Iterable[ObservationLike]) -> int:
        """Books what an engine reports: increments, gauge values, samples, by the kind of the family.

        Returns how many were refused because of their name, labels or value; each kind of mistake is logged
        once, and the rest is booked, because a figure must not stop the step that brought it.
        """
        refused = 0
        for item in observations:
            try:
                series = self.series(item.name, item.labels)
                if isinstance(series, CounterSeries):
                    series.inc(item.value)
                elif isinstance(series, GaugeSeries):
                    series.set(item.value)
                else:
                    series.observe(item.value)
            except (KeyError, ValueError) as error:
                refused += 1
                text = str(error)
                if text not in self._complained and len(self._complained) < 100:
                    self._complained.add(text)
                    _log.error("observation refused: %s", text)
        return refused

    def value(self, sample: str, **labels: str) -> float | None:
        """Value of one sample (`…_total`, `…_count`, `…_sum`, a gauge's name), or None when it is absent.

        The own role need not be given.
        """
        for name in (sample, sample.rsplit("_", 1)[0]):
            family = self.families.get(name)
            if family is not None:
                if family.own_role:
                    labels.setdefault("role", self.role)
                upper = labels.pop("le", "")
                found = self._series[name].get(tuple(labels.get(label, "") for label in self._labels[name]))
                return None if found is None else found.read(sample.removeprefix(name), upper)
        raise KeyError(f"{self.role} has no metric family for the sample {sample}")

    def set_build_info(self, version: str, revision: str = "", **labels: str) -> None:
        self.set(
            "baton_build_info",
            1,
            version=version,
            revision=revision,
            python=platform.python_version(),
            **labels,
        )

    def render(self) -> bytes:
        """The exposition in Prometheus text format (CONTENT_TYPE)."""
        parts = []
        for name, family in self.families.items():
            parts.append(f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n")
            with self._lock:
                series = list(self._series[name].values())
            for one in series:
                parts.extend(one.lines())
        return "".join(parts).encode() + generate_latest(self._process)


class _UncountedHistogram(HistogramSeries):
    def observe(self, value: float, times: int = 1) -> None:
        pass


class _UncountedCounter(CounterSeries):
    def inc(self, value: float = 1) -> None:
        pass


class _UncountedGauge(GaugeSeries):
    def set(self, value: float) -> None:
        pass

    def inc(self, value: float = 1) -> None:
        pass

    def dec(self, value: float = 1) -> None:
        pass


class _UncountedRegistry(Registry):
    """Declares its families; what they are told goes nowhere."""

    def __init__(self, role: Role, *, colocated: bool = False, tensor_parallel: bool = False) -> None:
        self._nothing: dict[str, Series] = {
            "counter": _UncountedCounter("", {}),
            "gauge": _UncountedGauge("", {}),
            "histogram": _UncountedHistogram("", {}, ()),
        }
        super().__init__(role, colocated=colocated, tensor_parallel=tensor_parallel)

    def series(self, name: str, labels: Mapping[str, str]) -> Series:
        return self._nothing[self.families[name].kind]

    def inc(self, name: str, value: float = 1, **labels: str) -> None:
        pass

    def dec(self, name: str, value: float = 1, **labels: str) -> None:
        pass

    def set(self, name: str, value: float, **labels: str) -> None:
        pass

    def observe(self, name: str, value: float, **labels: str) -> None:
        pass

    @contextmanager
    def track(self, name: str, **labels: str) -> Iterator[None]:
        yield

    def remove(self, name: str, **labels: str) -> None:
        pass

    def remove_worker(self, worker: str) -> None:
        pass

    def apply(self, observations: Iterable[ObservationLike]) -> int:
        return 0
