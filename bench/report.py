"""`make bench`: Baton beside `transformers` on this machine, what router and RPC add, and how fast KV travels.

Prints the page `docs/benchmarks.md`, its progress on stderr. `--check` ends with status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import access_log
from bench.circumstances import circumstances, sentence
from bench.comparison import EQUAL_PROMPTS, EQUAL_TOKENS, Case, Comparison, MeasurementFailed, compare
from bench.process_starts import StartFailed, start_seconds
from cli.launch import LaunchError
from cli.model_prepare import ModelPrepareError, prepare_model

# At least so many times the tokens per second of transformers: dtype, kind, streams.
TARGETS = {
    ("bfloat16", "decode", 1): 1.6,
    ("bfloat16", "decode", 8): 2.5,
    ("bfloat16", "prefill", 1): 1.2,
    ("float32", "decode", 1): 1.1,
    ("float32", "decode", 8): 1.3,
    ("float32", "prefill", 1): 1.0,
}
TOKEN_ADDED_MS, FIRST_ADDED_MS = 3.0, 5.0
START_S, RESIDENT_MB = 2.0, 150.0
TRANSFER_TOKENS, TRANSFER_GB_S = 2000, 0.5
STARTS = 3
ENGINELESS = ("router", "prefill_server", "decode_server")


METHOD = """
## Method

A cluster (router, one prefill and one decode server, each with its engine) and a `transformers` process with the same
model, dtype, thread count and thread policy are alive together. Their rounds alternate, and so does their order; while
one works the other is idle. The first round warms up and is not counted. Prompts are random token ids, new in every
round, the same for both.

* **decode**: tokens per second while all streams decode, as an OpenAI client of the router sees them, first tokens
  excluded. The prompts were served once before, so that the streams begin together. Against it the plain greedy loop of
  `transformers` with a KV cache in one batch, its prefill excluded.
* **prefill**: prompt tokens over the time from sending the request to its first token at the client, for a prompt that
  no cache knows. Against it one forward pass.
* **added to a token**: time per output token at the client minus the decode server's mean engine step, one stream.
* **added to the first token**: time to the first token at the client minus computing and sampling on the prefill
  server, for prompts of 64 tokens that no cache knows, one at a time over one connection.
* **KV transfer**: payload bytes over the time from opening the load to its verified end, between two processes with
  real cache-store agents; the bare socket moves the same bytes between the same processes without looking at them.
* **start**: from starting the process to its first answer on `/live`.
* **access log**: each call is timed by itself, in one process; `emit` hands over a line that is ready, `record` first
  makes it of a request's fields. A queue is full because its destination takes nothing; then all lines but one are
  dropped.

`baton bench serve` measures a running cluster under a load of your choice.
"""


class Page:
    """The printed page, and whether a target was missed."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def line(self, text: str = "") -> None:
        print(text, flush=True)

    def verdict(self, what: str, met: bool) -> str:
        if not met:
            self.missed.append(what)
        return "met" if met else "**missed**"

    def limit(self, what: str, values: Sequence[float], unit: str, limit: float) -> None:
        """A line about figures whose median must not be above `limit`."""
        middle = statistics.median(values)
        spread = f"{min(values):.2f}–{max(values):.2f}"
        verdict = self.verdict(what, middle <= limit)
        self.line(f"* {what}: {middle:.2f} {unit} ({spread}), at most {limit:g} {unit}: {verdict}")


def case_row(page: Page, dtype: str, case: Case) -> str:
    name = f"{case.kind}, {case.streams} stream{'s' * (case.streams > 1)}, context {case.context}"
    if case.kind == "prefill":
        name = f"prefill of {case.context} tokens"
    target = TARGETS[dtype, case.kind, case.streams]
    verdict = page.verdict(f"{dtype} {name}", case.ratio >= target)
    ours, theirs = statistics.median(case.ours), statistics.median(case.theirs)
    spread = f"{min(case.ratios):.2f}–{max(case.ratios):.2f}"
    return f"| {name} | {ours:.1f} | {theirs:.1f} | {case.ratio:.2f} ({spread}) | {target:g} | {verdict} |"


def show_comparison(page: Page, found: Comparison) -> None:
    page.line(f"\n## {found.dtype}\n")
    page.line("| tokens per second | Baton | transformers | ratio (rounds) | at least | |\n|---|---|---|---|---|---|")
    for case in found.cases:
        page.line(case_row(page, found.dtype, case))
    seconds = min(found.read_seconds)  # a floor: the best that this machine did
    megabytes, rate = found.weight_bytes / 1e6, found.weight_bytes / seconds / 1e9
    page.line(
        f"\n* Floor: a step reads the weights ({megabytes:.0f} MB) once, which takes {seconds * 1e3:.1f} ms here "
        f"({rate:.1f} GB/s), so one stream cannot exceed {1 / seconds:.0f} tokens/s."
    )
    page.limit("router and RPC add to a token, 1 stream", found.token_added_ms, "ms", TOKEN_ADDED_MS)
    page.limit("router and RPC add to the first token", found.first_added_ms, "ms", FIRST_ADDED_MS)
    resident = ", ".join(f"{name} {size:.0f} MB" for name, size in found.resident_mb.items())
    verdict = page.verdict("resident memory", max(found.resident_mb.values()) <= RESIDENT_MB)
    page.line(f"* resident after the run (engines not counted): {resident}, at most {RESIDENT_MB:g} MB: {verdict}")
    equal = f"{found.equal_prompts} of {EQUAL_PROMPTS}"
    must = found.dtype == "float32"  # in bfloat16 the order of additions already decides near ties
    verdict = page.verdict("equal tokens", found.equal_prompts == EQUAL_PROMPTS) if must else "for information"
    page.line(f"* greedy answers of {EQUAL_TOKENS} tokens equal to those of transformers: {equal}: {verdict}")


def show_transfer(page: Page, rounds: int) -> None:
    """KV of one prompt between two processes through real cache-store agents, every piece with a checksum."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "transfer.json"
        command = [sys.executable, "-m", "bench.kv_transfer", "--tokens", str(TRANSFER_TOKENS)]
        command += ["--short", "--transports", "grpc,tcp", "--repeat", str(rounds), "--json", str(file)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise MeasurementFailed(f"bench.kv_transfer ended with status {ended.returncode}: {ended.stderr[-300:]}")
        rows: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())["rows"]
    page.line(f"\n## KV transfer of {TRANSFER_TOKENS} tokens over loopback\n")
    for name, variant in (
        ("grpc, checksum of every piece (the default)", "grpc all"),
        ("grpc, no checksum", "grpc off"),
        ("tcp, checksum of every piece", "tcp all"),
        ("tcp, no checksum", "tcp off"),
        ("bare socket", "bare socket"),
    ):
        rates = [float(row["gb_per_s"]) for row in rows[variant]]
        line = f"* {name}: {statistics.median(rates):.2f} GB/s ({min(rates):.2f}–{max(rates):.2f})"
        if variant == "grpc all":
            verdict = page.verdict("KV transfer", statistics.median(rates) >= TRANSFER_GB_S)
            line += f", at least {TRANSFER_GB_S:g} GB/s: {verdict}"
        page.line(line)


def show_starts(page: Page, folder: str) -> None:
    page.line("\n## Start until a process answers on /live, without its engine\n")
    for module in ENGINELESS:
        page.limit(f"start of {module}", [start_seconds(module, folder) for _ in range(STARTS)], "s", START_S)


def show_access_log(page: Page) -> None:
    page.line("\n## Access log\n")
    page.line("`python -m bench.access_log`\n")
    page.line(access_log.page(access_log.LINES, sigterm=True))


def show_circumstances(page: Page, model: str, threads: int, rounds: int) -> None:
    page.line(
        f"{sentence(circumstances())} {model}, 1 prefill and 1 decode server, {threads} threads each, {rounds} rounds. "
        "Figures are medians (lowest–highest)."
    )
    page.line(
        f"\nThis page is what `make bench` prints: `python -m bench.report --rounds {rounds} --threads {threads}`."
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder (default: the embedded model)")
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2, help="of each engine and of transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="status 1 when a target is missed")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    page = Page()
    told: list[int] = []

    def stop(number: int, _: object) -> None:
        told.append(128 + number)
        raise SystemExit(told[0])  # on the way out, whatever was started is ended

    signal.signal(signal.SIGTERM, stop)
    try:
        folder = prepare_model(arguments.model or None, None, progress=False)
        page.line("# Benchmarks\n")
        show_circumstances(page, folder.name, arguments.threads, arguments.rounds)
        for dtype in arguments.dtype:
            show_comparison(
                page,
                compare(dtype, str(folder), arguments.threads, arguments.rounds, lambda m: print(m, file=sys.stderr)),
            )
        show_transfer(page, max(5, arguments.rounds))
        show_starts(page, str(folder))
        show_access_log(page)
        page.line(METHOD.rstrip())
    except (MeasurementFailed, StartFailed, LaunchError, ModelPrepareError) as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return told[0] if told else 1  # what ends on the way out may not end well
    for what in page.missed:
        print(f"missed: {what}", file=sys.stderr)
    return int(arguments.check and bool(page.missed))


if __name__ == "__main__":
    sys.exit(main())
