"""What it costs to see: stage clock and metrics per RPC, scrapes, and lines of the access log.

    python -m bench.rpc_costs                        # tables in Markdown
    python -m bench.rpc_costs --calls 20000 --lines 20000 --json results/rpc_costs.json

**Per RPC.** All that a process books for one RPC with every stage of its role, over and over in one thread: the stage
clock, the gauge of open RPCs, and each metric. The roles take turns in ten rounds.

**Scrape.** `/metrics` of a router with no request open and with a thousand, before servers that hold them
(bench/echo_servers.py).

**Access log.** What `bench.access_log` finds: p50 and p99 of handing a line over on 1, 8 and 64 threads, with room in
the queue and without, and what a process that logs as fast as it can loses at SIGTERM.

**Router at SIGTERM.** A router under load gets SIGTERM and drains. Each request that was answered, in full or with an
error, must have its line in the access log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import access_log
from bench.circumstances import circumstances, save, sentence
from bench.echo_servers import echo_servers
from bench.http_stream import HttpFailed, HttpPool
from bench.router_overhead import body, router, scrape
from rpc.metrics import Registry
from rpc.stages import DECODE_STAGES, PREFILL_STAGES, ROUTER_STAGES, StageClock

ROUNDS = 10
SCRAPES = 50
CONNECTIONS = 16
TOKENS = 16
UNDER_LOAD_S = 2.0
END_S = 30.0
ROLES = {
    "router": (ROUTER_STAGES, "baton.v1.Generation/Generate"),
    "prefill": (PREFILL_STAGES, "baton.v1.Prefill/Prefill"),
    "decode": (DECODE_STAGES, "baton.v1.Decode/Decode"),
}


# -- one RPC -------------------------------------------------------------------------------------------------------


class Booking:
    """What the process of one role books for one RPC."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._stages, self._method = ROLES[role]
        self._registry = Registry(role, process_metrics=False)

    def clock(self) -> StageClock:
        """The stage clock alone, through every stage."""
        clock = StageClock(self._stages)
        for _ in self._stages:
            clock.next_stage()
            clock.finish_stage()
        clock.finish()
        return clock

    def whole(self) -> None:
        """The stage clock and every metric."""
        registry, method = self._registry, self._method
        registry.inc("baton_rpc_inflight", method=method)
        for stage, seconds in self.clock().seconds().items():
            registry.observe("baton_stage_seconds", seconds, stage=stage)
        registry.dec("baton_rpc_inflight", method=method)
        registry.observe("baton_rpc_duration_seconds", 0.01, method=method)
        registry.inc("baton_rpc_requests_total", method=method, code="NONE_ERROR")


def per_rpc(calls: int) -> dict[str, list[float]]:
    """Microseconds of a call, a value per round, by what is called."""
    work: dict[str, Callable[[], object]] = {}
    for role in ROLES:
        booking = Booking(role)
        work[f"stage clock and metrics, {role}"] = booking.whole
        work[f"stage clock alone, {role}"] = booking.clock
    found: dict[str, list[float]] = {name: [] for name in work}
    share = max(1, calls // ROUNDS)
    for number in range(ROUNDS + 1):  # the first warms up
        for name, call in work.items():
            began = time.perf_counter()
            for _ in range(share):
                call()
            if number:
                found[name].append((time.perf_counter() - began) / share * 1e6)
    return found


# -- a router at SIGTERM -------------------------------------------------------------------------------------------


async def load_until_gone(address: str, pid: int) -> dict[str, int]:
    """Requests on all connections until the router, which gets SIGTERM meanwhile, takes none any more.

    Returns how many were answered in full (`answered`, of which with an error `refused`), and how many were not.
    """
    counts = {"answered": 0, "refused": 0, "unanswered": 0}
    pool = HttpPool(f"http://{address}", {}, time.perf_counter)
    message = body(TOKENS)
    told = asyncio.Event()

    async def client() -> None:
        while True:
            try:
                async with asyncio.timeout(END_S), pool.post("/v1/completions", message) as answer:
                    status = await answer.wait_status()
                    text = b"".join([piece async for _, piece in answer.pieces()])
            except HttpFailed:
                if not told.is_set():
                    raise
                counts["unanswered"] += 1
                return
            counts["answered"] += 1
            counts["refused"] += status != 200 or not text.endswith(b"data: [DONE]\n\n")
            if told.is_set() and status != 200:
                return

    async def stop() -> None:
        await asyncio.sleep(UNDER_LOAD_S)
        told.set()
        os.kill(pid, signal.SIGTERM)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(client())
            group.create_task(stop())
    finally:
        pool.close()
    return counts


def router_costs(model: str, held: int) -> dict[str, Any]:
    """Scrapes of a router, and what a router under load loses at SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="baton-rpc-costs-") as name, echo_servers() as servers:
        folder = Path(name)
        log = folder / "access.log"
        # Nobody asks for a grammar here, and a router with helpers takes longer to start.
        flags = ("--access-log-path", str(log), "--drain-grace-secs", "0", "--grammar-backend", "none")
        with router(model, servers, folder, "router", flags) as process:
            idle, idle_bytes = asyncio.run(scrape(process, 0, SCRAPES))
            busy, busy_bytes = asyncio.run(scrape(process, held, SCRAPES))
            servers.let_go()
        before = lines_of(log)
        with router(model, servers, folder, "router", flags) as process:
            counts = asyncio.run(load_until_gone(process.http, process.pid))
            process.wait(END_S)
        counts["lines"] = lines_of(log) - before
    # What was not answered may have its line or not; what was answered must have one.
    counts["lost"] = max(0, counts["answered"] - counts["lines"])
    return {
        "scrape_idle_ms": idle,
        "scrape_idle_bytes": idle_bytes,
        "scrape_held_ms": busy,
        "scrape_held_bytes": busy_bytes,
        "sigterm": counts,
    }


def lines_of(log: Path) -> int:
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        return sum(1 for _ in file)
    return 0


# -- the page ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int) -> str:
    return " | ".join(f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))


def page(found: dict[str, Any], costs: dict[str, list[float]], routers: dict[str, Any], log: str, held: int) -> str:
    counts = routers["sigterm"]
    rows = ["| per RPC | median µs | least | most |", "|---|---|---|---|"]
    rows += [
        f"| {name} ({len(ROLES[name.rpartition(' ')[2]][0])} stages) | {spread(costs[name], 1)} |" for name in costs
    ]
    rows += ["", "| scrape of the router | median ms | least | most | bytes |", "|---|---|---|---|---|"]
    for what, kind in (("no request open", "idle"), (f"{held:,} requests open", "held")):
        rows.append(f"| {what} | {spread(routers[f'scrape_{kind}_ms'], 1)} | {routers[f'scrape_{kind}_bytes']:,} |")
    return "\n".join(
        [
            sentence(found), "", *rows, "", log, "",
            f"SIGTERM to a router with {CONNECTIONS} connections as fast as they are answered: {counts['answered']:,} "
            f"requests answered, {counts['refused']:,} of them with an error, {counts['unanswered']:,} not answered, "
            f"{counts['lines']:,} lines in the access log, **{counts['lost']:,} lost**.",
        ]
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rpc_costs", description="What stage clock, metrics, scrapes and access log cost."
    )
    parser.add_argument("--model", default="", help="folder with a tokenizer (default: the embedded model)")
    parser.add_argument(
        "--calls", type=int, default=100_000, help="of each kind, for the time per RPC (default 100000)"
    )
    parser.add_argument("--held", type=int, default=1000, help="requests open at the second scrape (default 1000)")
    parser.add_argument("--lines", type=int, default=access_log.LINES, help=f"default {access_log.LINES}")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args(argv)
    if arguments.calls < ROUNDS or arguments.held < 1 or arguments.lines < 6400:
        parser.error(f"--calls must be {ROUNDS} or more, --held 1 or more, --lines 6400 or more")
    model = arguments.model
    if not model:
        from cli.model_prepare import prepare_model

        model = str(prepare_model(None, None, progress=False))
    found = circumstances()
    costs = per_rpc(arguments.calls)
    routers = router_costs(model, arguments.held)
    log = access_log.page(arguments.lines, sigterm=True)
    print(page(found, costs, routers, log, arguments.held))
    save(arguments.json, found, {"per_rpc_us": costs, "router": routers, "access_log": log})
    return 0


if __name__ == "__main__":
    # Told to stop, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
