"""What a campaign found, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.chaos.verdict import Ending, Outcome

SHOWN = 20  # violations that the text has in full


@dataclass
class Tally:
    """Requests and faults as they are counted."""

    endings: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    manners: Counter[str] = field(default_factory=Counter)
    blows: Counter[str] = field(default_factory=Counter)
    skipped_blows: int = 0
    attempts: Counter[int] = field(default_factory=Counter)  # of right answers
    paths: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of right answers
    first_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def book(self, manner: str, ending: Ending, outcome: Outcome) -> None:
        self.endings[ending.value] += 1
        self.manners[manner] += 1
        if outcome.code is not None:
            self.codes[f"{outcome.code_name or '?'} ({outcome.code})"] += 1
        if ending is Ending.RIGHT:
            self.attempts[outcome.attempts] += 1
            self.paths[outcome.path or "?"] += 1
            self.seconds.append(outcome.seconds)
            if outcome.first_s is not None:
                self.first_s.append(outcome.first_s)

    @property
    def requests(self) -> int:
        return sum(self.endings.values())

    def line(self) -> str:
        """How far it is."""
        return f"{self.requests} requests: {_counts(self.endings)}"


@dataclass
class Report:
    """The result. `ledger_s`: from the end of the faults to clean ledgers, None when that never came."""

    settings: dict[str, Any]
    tally: Tally
    clean_seconds: float
    campaign_seconds: float
    ledger_s: float | None
    loads: Counter[str]  # completed under fire, by transport
    hits: Counter[tuple[str, str]]
    recoveries: list[tuple[float, str]]
    memory: list[dict[str, object]]
    starts: dict[str, int]
    failed_starts: int
    violations: list[str]

    @property
    def passed(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "passed": self.passed,
            "violations": self.violations,
            "settings": self.settings,
            "requests": tally.requests,
            "endings": dict(tally.endings),
            "codes": dict(tally.codes.most_common()),
            "clients": dict(tally.manners),
            "attempts_of_right_answers": {str(count): number for count, number in sorted(tally.attempts.items())},
            "paths_of_right_answers": dict(tally.paths),
            "loads": dict(self.loads),
            "latency_seconds": percentiles(tally.seconds),
            "first_token_seconds": percentiles(tally.first_s),
            "blows": dict(tally.blows),
            "blows_skipped": tally.skipped_blows,
            "points_hit": {f"{point}:{action}": count for (point, action), count in sorted(self.hits.items())},
            "starts": self.starts,
            "failed_starts": self.failed_starts,
            "recovery_seconds": percentiles([seconds for seconds, _ in self.recoveries]),
            "worst_recovery": max(self.recoveries)[1] if self.recoveries else None,
            "memory": self.memory,
            "ledgers_clean_after_seconds": self.ledger_s,
            "clean_run_seconds": round(self.clean_seconds, 1),
            "campaign_seconds": round(self.campaign_seconds, 1),
        }

    def text(self) -> str:
        tally = self.tally
        lines = [
            f"{tally.requests} requests in {self.campaign_seconds:.0f} s; clean run {self.clean_seconds:.0f} s",
            "  endings:    " + _counts(tally.endings),
            "  codes:      " + _counts(tally.codes),
            "  attempts:   " + _counts(Counter({f"{n}": c for n, c in sorted(tally.attempts.items())})),
            "  paths:      " + _counts(tally.paths),
            "  loads:      " + _counts(self.loads),
            "  latency:    " + _spread(tally.seconds) + "   first token: " + _spread(tally.first_s),
            f"  blows:      {_counts(tally.blows)}; {tally.skipped_blows} not dealt",
            f"  starts:     {_counts(Counter(self.starts))}; {self.failed_starts} of them failed",
            "  points hit: " + _counts(Counter({f"{point}:{action}": n for (point, action), n in self.hits.items()})),
            "  recovery:   " + _spread([seconds for seconds, _ in self.recoveries])
            + (f"; the longest after {max(self.recoveries)[1]}" if self.recoveries else ""),
            "  ledgers:    "
            + ("never clean" if self.ledger_s is None else f"clean {self.ledger_s:.1f} s after the last fault"),
        ]  # fmt: skip
        for entry in self.memory:
            lines.append(
                f"  memory:     {entry['process']}: {entry['resident_mib']} MiB after {entry['seconds']} s, "
                f"{entry['grown_mib']:+} MiB since its warm-up"
            )
        lines += [f"  VIOLATION:  {text}" for text in self.violations[:SHOWN]]
        if len(self.violations) > SHOWN:
            lines.append(f"  and {len(self.violations) - SHOWN} more")
        lines.append("passed" if self.passed else f"FAILED: {len(self.violations)} violations")
        return "\n".join(lines)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    found = {f"p{share}": round(ordered[min(last, share * len(ordered) // 100)], 3) for share in (50, 90, 99)}
    return found | {"max": round(ordered[-1], 3)}


def _spread(values: Sequence[float]) -> str:
    found = percentiles(values)
    return ", ".join(f"{name} {value:.2f} s" for name, value in found.items()) or "-"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "-"
