"""What a load generator measured, and the figures and the printed block made of it.

Definitions. TTFT: from sending the request to the first chunk that carries a token of any kind. ITL: the gap between
two chunks divided by the later chunk's token count, counted once per token. TPOT: (end-to-end latency - TTFT) /
(tokens - 1), once per request. E2EL: from sending to the last token. Times inside are seconds, printed and saved
figures are milliseconds (`_ms`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 50


@dataclass
class RequestResult:
    """One request, on the load generator's own monotonic clock."""

    sent_at: float  # seconds since the benchmark began
    prompt_tokens: int
    lateness_s: float = 0.0  # how much later than planned it was sent
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None  # last token, or the moment of the failure
    token_times: list[float] = field(default_factory=list)  # arrival of every token
    itls_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    path: str = ""
    timeline: dict[str, float] = field(default_factory=dict)  # seconds by "role.stage", as the server says
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # where the back end learns them (gRPC)
    error: str = ""  # empty on success

    def chunk(self, now: float, tokens: int, per_token: bool = True) -> None:
        """Books a chunk that arrived `now` with `tokens` tokens; one without tokens (role, usage) counts for nothing.

        per_token: a gap stands for each of its tokens; else once for the chunk.
        """
        if tokens <= 0:
            return
        if self.last_token_at is None:
            self.first_token_at = now
        else:
            gap = now - self.last_token_at
            self.itls_s += [gap / tokens] * tokens if per_token else [gap]
        self.last_token_at = now
        self.output_tokens += tokens
        self.token_times += [now] * tokens

    def correct_total(self, tokens: int) -> None:
        """The server's final count, for chunks that did not say how many tokens they carried."""
        missing = tokens - self.output_tokens
        if self.last_token_at is not None and missing > 0:
            self.token_times += [self.last_token_at] * missing
        self.output_tokens = tokens

    @property
    def ttft_s(self) -> float:
        """NaN without a token."""
        return math.nan if self.first_token_at is None else self.first_token_at - self.sent_at

    @property
    def e2el_s(self) -> float:
        """NaN without a token."""
        return math.nan if self.last_token_at is None else self.last_token_at - self.sent_at

    @property
    def tpot_s(self) -> float:
        """NaN for answers of one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation between closest ranks; NaN of nothing. `p` in [0, 100]."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True)
class Slos:
    """Service-level objectives in milliseconds; a request is good when it meets all that are set."""

    limits_ms: dict[str, float] = field(default_factory=dict)  # ttft, tpot, e2el

    @classmethod
    def parse(cls, words: Iterable[str]) -> Slos:
        """Reads `ttft:200 tpot:50`. Raises ValueError naming the bad word."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, value = word.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                raise ValueError(f"--goodput {word}: write NAME:MILLISECONDS") from None
            if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
                raise ValueError(f"--goodput {word}: NAME is ttft, tpot or e2el, MILLISECONDS above 0")
        return cls(limits)

    def met_by(self, result: RequestResult) -> bool:
        figures = {"ttft": result.ttft_s, "tpot": result.tpot_s, "e2el": result.e2el_s}
        return all(math.isnan(figures[k]) or figures[k] * 1e3 <= limit for k, limit in self.limits_ms.items())


LATENCIES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def summarize(
    results: Sequence[RequestResult],
    duration_s: float,
    *,
    request_rate: float,
    max_concurrency: int | None,
    slos: Slos,
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Figures of a run under the keys of the saved JSON. `request_rate` is requests per second, inf for closed loop."""
    good = [r for r in results if not r.error]
    output_tokens = sum(r.output_tokens for r in good)
    input_tokens = sum(r.prompt_tokens for r in good)
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(results) - len(good),
        "max_concurrency": max_concurrency,
        "request_rate": request_rate if math.isfinite(request_rate) else "inf",
        "duration": duration_s,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(slos.met_by(r) for r in good) / duration_s if slos.limits_ms else None,
        "slo_attainment": sum(slos.met_by(r) for r in good) / max(1, len(results)) if slos.limits_ms else None,
        "output_throughput": output_tokens / duration_s,
        "max_output_tokens_per_s": peak_per_second([t for r in good for t in r.token_times]),
        "max_concurrent_requests": peak_concurrency(results),
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "send_lateness_p99_ms": percentile([r.lateness_s for r in results], 99) * 1e3,
    }
    series = {
        "ttft": [r.ttft_s for r in good],
        "tpot": [r.tpot_s for r in good if not math.isnan(r.tpot_s)],
        "itl": [gap for r in good for gap in r.itls_s],
        "e2el": [r.e2el_s for r in good],
    }
    for name, values in series.items():
        figures[f"mean_{name}_ms"] = statistics.fmean(values) * 1e3 if values else math.nan
        figures[f"median_{name}_ms"] = percentile(values, 50) * 1e3
        figures[f"std_{name}_ms"] = statistics.pstdev(values) * 1e3 if values else math.nan
        for p in percentiles:
            figures[f"p{p:g}_{name}_ms"] = percentile(values, p) * 1e3
    return figures


def peak_per_second(times: Sequence[float]) -> float:
    """Most tokens that arrived within one second of the benchmark's clock."""
    buckets: dict[int, int] = {}
    for at in times:
        buckets[int(at)] = buckets.get(int(at), 0) + 1
    return float(max(buckets.values(), default=0))


def peak_concurrency(results: Sequence[RequestResult]) -> int:
    """Most requests open at one moment, failed ones included; one that begins as another ends is not beside it."""
    ends = [r.ended_at if r.ended_at is not None else r.sent_at for r in results]
    edges = [(r.sent_at, 1) for r in results] + [(end, -1) for end in ends]
    running = peak = 0
    for _, step in sorted(edges):
        running += step
        peak = max(peak, running)
    return peak


def _line(label: str, value: float | int | str | None) -> str:
    if isinstance(value, float):
        value = f"{value:.2f}"
    return f"{label:<40} {value!s:<10}"


def render(figures: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The printed block: titles centred in 50 signs, labels padded to 40, a space, values padded to 10.

    Figures that were not asked for (concurrency limit, rate, goodput) have no line.
    """
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines.append(_line("Successful requests:", figures["completed"]))
    lines.append(_line("Failed requests:", figures["failed"]))
    if figures["max_concurrency"] is not None:
        lines.append(_line("Maximum request concurrency:", figures["max_concurrency"]))
    if figures["request_rate"] != "inf":
        lines.append(_line("Request rate configured (RPS):", float(figures["request_rate"])))
    lines.append(_line("Benchmark duration (s):", figures["duration"]))
    lines.append(_line("Total input tokens:", figures["total_input_tokens"]))
    lines.append(_line("Total generated tokens:", figures["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", figures["request_throughput"]))
    if figures["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", figures["request_goodput"]))
    lines.append(_line("Output token throughput (tok/s):", figures["output_throughput"]))
    lines.append(_line("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]))
    lines.append(_line("Peak concurrent requests:", float(figures["max_concurrent_requests"])))
    lines.append(_line("Total token throughput (tok/s):", figures["total_token_throughput"]))
    for name in metrics:
        title, short = LATENCIES[name]
        lines.append(f"{title:-^{WIDTH}}")
        lines.append(_line(f"Mean {short} (ms):", figures[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {short} (ms):", figures[f"median_{name}_ms"]))
        lines += [_line(f"P{p:g} {short} (ms):", figures[f"p{p:g}_{name}_ms"]) for p in percentiles]
    lines.append("=" * WIDTH)
    return "\n".join(lines)
