"""Families of metrics as PromQL, and as the panels that most of them are shown in.

Rates are over `$__rate_interval`, which Grafana makes at least four scrapes long. A ratio has no value where its
denominator is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.grafana.panels import Panel, Query

_RATE = "$__rate_interval"


def rate(series: str, by: str) -> str:
    return f"sum by ({by}) (rate({series}[{_RATE}]))"


def share(part: str, whole: str, by: str, or_none: bool = False) -> str:
    """`part` of `whole`, both rates; without a value where nothing happened.

    `or_none`: 0 where there is no `part`, which has no series before its first event.
    """
    counted = f"({rate(part, by)} or 0 * {rate(whole, by)})" if or_none else rate(part, by)
    return f"{counted} / ({rate(whole, by)} > 0)"


def smaller(one: str, other: str) -> str:
    """The smaller of two values for each set of labels that both have."""
    return f"{one} < {other} or ({other} <= {one})"


@dataclass(frozen=True)
class Series:
    """The series that `matchers` choose; as text, the matchers. Its panels have the labels `by` as legends."""

    matchers: str = ""

    def __str__(self) -> str:
        return self.matchers

    def of(self, family: str) -> str:
        return f"{family}{{{self}}}" if self.matchers else family

    def counts(self, title: str, unit: str, family: str, by: str, description: str, **looks: Any) -> Panel:
        """A counter, per second."""
        return _panel(title, unit, rate(self.of(family), by), _legend(by), description, looks)

    def gauge(
        self, title: str, unit: str, family: str, by: str, description: str, how: str = "sum", **looks: Any
    ) -> Panel:
        """A gauge; `how`: PromQL's way to make one value of several."""
        return _panel(title, unit, f"{how} by ({by}) ({self.of(family)})", _legend(by), description, looks)

    def mean(self, title: str, unit: str, family: str, by: str, description: str, **looks: Any) -> Panel:
        """The mean of a histogram."""
        expr = share(self.of(f"{family}_sum"), self.of(f"{family}_count"), by)
        return _panel(title, unit, expr, _legend(by), description, looks)

    def quantile(
        self, title: str, unit: str, q: float, family: str, by: str, description: str, legend: str = "", **looks: Any
    ) -> Panel:
        """One quantile of a histogram. `legend`: in place of the labels."""
        return _panel(title, unit, self._quantile(q, family, by), legend or _legend(by), description, looks)

    def quantiles(self, title: str, unit: str, family: str, by: str, description: str, **looks: Any) -> Panel:
        """p50, p90 and p99 of a histogram."""
        queries = [
            Query(self._quantile(q, family, by), f"p{round(q * 100)} {_legend(by)}".strip()) for q in (0.5, 0.9, 0.99)
        ]
        return Panel(title, unit, tuple(queries), description, **looks)

    def _quantile(self, q: float, family: str, by: str) -> str:
        within = ", ".join(filter(None, ("le", by)))
        return f"histogram_quantile({q}, sum by ({within}) (rate({self.of(f'{family}_bucket')}[{_RATE}])))"


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)


def _panel(title: str, unit: str, expr: str, legend: str, description: str, looks: dict[str, Any]) -> Panel:
    return Panel(title, unit, (Query(expr, legend),), description, **looks)
