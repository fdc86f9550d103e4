"""What metrics and the access log cost: of the router's throughput, per RPC, and at a scrape.

    python -m bench.router_overhead                  # tables in Markdown
    python -m bench.router_overhead --rounds 6 --requests 100 --calls 20000

**Throughput.** Two routers before the same servers, which answer at once (bench/echo_servers.py): one as it is
started by default, its access log in a file, the other with `--disable-metrics --disable-log-requests`. They get the
same requests in turn, as one client with some connections sends them as fast as they are answered. A round is one
turn of each, and the order changes from round to round; the first round is not counted. Where the cores are shared by
client, servers and router, requests per second hide a part of the difference, so the processor time that the router
itself takes for a request stands beside them: it is what a router with a core of its own is limited by. Other work on
the machine can only add to that, so its lower quartile says more than its median there.

**Per RPC.** Everything that a server books for one RPC with all its stages, over and over in one thread.

**Scrape.** `/metrics` of a router without open requests, and with many.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx

from bench.echo_servers import HOLD, MODEL, EchoServers, echo_servers
from bench.http_stream import HttpPool
from protos import common_pb2, generation_pb2, generation_pb2_grpc
from rpc.channels import CLIENT_OPTIONS
from rpc.metrics import Registry
from rpc.stages import DECODE_STAGES, StageClock

START_S = 30.0
ROOT = Path(__file__).resolve().parents[1]
PROMPT = list(range(20, 84))
QUIET = ("--disable-metrics", "--disable-log-requests")
METHOD = "baton.v1.Decode/Decode"
RESAMPLES = 4000


@dataclass(frozen=True)
class Turn:
    """One turn of one router."""

    requests_per_s: float
    cpu_s_per_request: float


class RouterProcess:
    def __init__(self, process: subprocess.Popen[bytes], http: str, grpc_address: str) -> None:
        self.pid = process.pid
        self.wait = process.wait
        self.http = http
        self.grpc = grpc_address

    def cpu_seconds(self) -> float:
        """Processor time of all threads, as the scheduler counts it (ns), which is finer than that of `times`."""
        spent = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                spent += int((task / "schedstat").read_text().split()[0])
        return spent / 1e9


@contextlib.contextmanager
def router(model: str, servers: EchoServers, folder: Path, name: str, flags: Sequence[str]) -> Iterator[RouterProcess]:
    command = [sys.executable, "-m", "router", "--model", model, "--served-model-name", MODEL]
    command += ["--port", "0", "--grpc-port", "0", "--prefill", servers.prefill, "--decode", servers.decode, *flags]
    with (folder / f"{name}.err").open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the router ended: {(folder / f'{name}.err').read_text()[-2000:]}")
        ready = json.loads(line)
        limit = time.monotonic() + START_S
        while httpx.get(f"http://{ready['http']}/ready", timeout=5).status_code != 200:
            if time.monotonic() > limit:
                raise SystemExit(f"the router was not ready within {START_S:g} s")
            time.sleep(0.05)
        yield RouterProcess(process, ready["http"], ready["grpc"])
    finally:
        if process.stdout is not None:
            process.stdout.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# -- throughput ----------------------------------------------------------------------------------------------------


def body(tokens: int) -> bytes:
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return json.dumps(fields).encode()


async def drive(address: str, requests: int, connections: int, tokens: int) -> float:
    """Requests as fast as they are answered; returns the seconds that all took. Raises SystemExit for a failed one."""
    pool = HttpPool(f"http://{address}", {}, time.perf_counter)
    left = iter(range(requests))
    message = body(tokens)

    async def client() -> None:
        for _ in left:
            async with pool.post("/v1/completions", message) as answer:
                text = b"".join([piece async for _, piece in answer.pieces()])
                if answer.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
                    raise SystemExit(f"a request failed with {answer.status}: {text[-500:]!r}")
                await answer.finish(5)

    began = time.perf_counter()
    try:
        async with asyncio.timeout(300), asyncio.TaskGroup() as clients:
            for _ in range(connections):
                clients.create_task(client())
        return time.perf_counter() - began
    finally:
        pool.close()


def turn(process: RouterProcess, requests: int, connections: int, tokens: int) -> Turn:
    cpu = process.cpu_seconds()
    seconds = asyncio.run(drive(process.http, requests, connections, tokens))
    return Turn(requests / seconds, (process.cpu_seconds() - cpu) / requests)


def compare(
    on: RouterProcess, off: RouterProcess, rounds: int, requests: int, connections: int, tokens: int
) -> list[tuple[Turn, Turn]]:
    """(on, off) of each round; the first round is left out."""
    found = []
    for number in range(rounds + 1):
        order = [on, off] if number % 2 else [off, on]
        turns = {process.pid: turn(process, requests, connections, tokens) for process in order}
        found.append((turns[on.pid], turns[off.pid]))
    return found[1:]


def interval(
    rounds: Sequence[tuple[float, float]], estimate: Callable[[Sequence[tuple[float, float]]], float]
) -> tuple[float, float]:
    """95 % of the estimates from samples drawn from `rounds` with replacement."""
    draw = random.Random(1)
    found = sorted(estimate(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return found[round(0.025 * RESAMPLES)], found[round(0.975 * RESAMPLES) - 1]


def median_ratio(rounds: Sequence[tuple[float, float]]) -> float:
    """Of the ratios of each round."""
    return statistics.median(on / off for on, off in rounds)


def quiet_ratio(rounds: Sequence[tuple[float, float]]) -> float:
    """Of the lower quartiles of all turns: what else the machine does can only add to a turn."""
    return lower_quartile([on for on, _ in rounds]) / lower_quartile([off for _, off in rounds])


def lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


# -- one RPC -------------------------------------------------------------------------------------------------------


def book_rpc(registry: Registry) -> None:
    """What one RPC of a decode server books, with every stage."""
    registry.inc("baton_rpc_inflight", method=METHOD)
    clock = StageClock(DECODE_STAGES)
    for _ in DECODE_STAGES:
        clock.next_stage()
        clock.finish_stage()
    clock.finish()
    for stage, seconds in clock.seconds().items():
        registry.observe("baton_stage_seconds", seconds, stage=stage)
    registry.dec("baton_rpc_inflight", method=METHOD)
    registry.observe("baton_rpc_duration_seconds", 0.01, method=METHOD)
    registry.inc("baton_rpc_requests_total", method=METHOD, code="NONE_ERROR")


def run_clock(registry: Registry) -> None:
    """The stage clock alone."""
    clock = StageClock(DECODE_STAGES)
    for _ in DECODE_STAGES:
        clock.next_stage()
        clock.finish_stage()
    clock.finish()
    clock.seconds()


def microseconds(what: Callable[[Registry], None], calls: int) -> tuple[float, float, float]:
    """Median, least and most of ten batches, in µs per call."""
    registry = Registry("decode", process_metrics=False)
    batches = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(calls // 10):
            what(registry)
        batches.append((time.perf_counter() - began) / (calls // 10) * 1e6)
    return statistics.median(batches), min(batches), max(batches)


# -- scrape --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def held(address: str, count: int) -> AsyncIterator[None]:
    """So many requests open at the router."""
    request = generation_pb2.GenerateRequest(
        model=MODEL, token_ids=generation_pb2.TokenIds(ids=[HOLD, *PROMPT]),
        sampling=common_pb2.SamplingParams(max_tokens=4, ignore_eos=True),
    )  # fmt: skip
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        calls = [stub.Generate(request, timeout=300) for _ in range(count)]
        try:
            yield
        finally:
            for call in calls:
                call.cancel()


async def scrape(process: RouterProcess, open_requests: int, scrapes: int) -> tuple[list[float], int]:
    """Milliseconds of each scrape while so many requests are open, and the bytes of the last one."""
    async with held(process.grpc, open_requests), httpx.AsyncClient(base_url=f"http://{process.http}") as http:
        limit = time.monotonic() + 60
        while (found := (await http.get("/load", timeout=30)).json()["inflight"]) != open_requests:
            if time.monotonic() > limit:
                raise SystemExit(f"{found} of {open_requests} requests were open after 60 s")
            await asyncio.sleep(0.05)
        times = []
        for _ in range(scrapes):
            began = time.perf_counter()
            response = await http.get("/metrics", timeout=30)
            times.append((time.perf_counter() - began) * 1e3)
        return times, len(response.content)


# -- the page ------------------------------------------------------------------------------------------------------


def throughput_rows(rounds: Sequence[tuple[Turn, Turn]]) -> list[str]:
    rates = [(on.requests_per_s, off.requests_per_s) for on, off in rounds]
    times = [(on.cpu_s_per_request * 1e3, off.cpu_s_per_request * 1e3) for on, off in rounds]
    rows = ["| router | on | off | on / off | 95 % interval |", "|---|---|---|---|---|"]
    for name, figures, middle, estimate in (
        ("requests per second, median", rates, statistics.median, median_ratio),
        ("processor time per request, median, ms", times, statistics.median, median_ratio),
        ("processor time per request, lower quartile, ms", times, lower_quartile, quiet_ratio),
    ):
        low, high = interval(figures, estimate)
        on, off = (middle([pair[side] for pair in figures]) for side in (0, 1))
        shown = "{:,.0f}" if figures is rates else "{:.3f}"
        ratio = f"**{estimate(figures):.4f}** | {low:.4f} to {high:.4f}"
        rows.append(f"| {name} | {shown.format(on)} | {shown.format(off)} | {ratio} |")
    return rows


def page(model: str, rounds: int, requests: int, connections: int, tokens: int, calls: int, open_requests: int) -> str:
    with tempfile.TemporaryDirectory(prefix="baton-overhead-") as name, echo_servers() as servers:
        folder = Path(name)
        log = ("--access-log-path", str(folder / "access.log"))
        with (
            router(model, servers, folder, "on", log) as on,
            router(model, servers, folder, "off", QUIET) as off,
        ):
            turns = compare(on, off, rounds, requests, connections, tokens)
            idle, idle_bytes = asyncio.run(scrape(on, 0, 30))
            busy, busy_bytes = asyncio.run(scrape(on, open_requests, 30))
            servers.let_go()
        with (folder / "access.log").open("rb") as file:
            lines = sum(1 for _ in file)
    # The warm-up round counts too, and what was held ended as cancelled.
    expected = (rounds + 1) * requests + open_requests
    if lines != expected:
        raise SystemExit(f"the access log has {lines} lines for {expected} requests")
    booked, clock = microseconds(book_rpc, calls), microseconds(run_clock, calls)
    return "\n".join(
        [
            f"{rounds} rounds of {requests} streamed requests ({len(PROMPT)} prompt tokens, {tokens} tokens each) over "
            f"{connections} connections, {os.cpu_count()} cores for all processes together:",
            "",
            *throughput_rows(turns),
            "",
            f"Per RPC with its {len(DECODE_STAGES)} stages, {calls:,} calls:",
            "",
            "| what | median µs | least | most |",
            "|---|---|---|---|",
            f"| stage clock and metrics | {booked[0]:.1f} | {booked[1]:.1f} | {booked[2]:.1f} |",
            f"| stage clock alone | {clock[0]:.1f} | {clock[1]:.1f} | {clock[2]:.1f} |",
            "",
            "| scrape of the router | median ms | most ms | bytes |",
            "|---|---|---|---|",
            f"| no request open | {statistics.median(idle):.1f} | {max(idle):.1f} | {idle_bytes:,} |",
            f"| {open_requests:,} requests open | {statistics.median(busy):.1f} | {max(busy):.1f} | {busy_bytes:,} |",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.router_overhead", description="What metrics and the access log cost the router."
    )
    parser.add_argument("--model", default="", help="folder with a tokenizer (default: the embedded model)")
    parser.add_argument("--rounds", type=int, default=30, help="default 30")
    parser.add_argument("--requests", type=int, default=300, help="of each router in a round (default 300)")
    parser.add_argument("--connections", type=int, default=16, help="default 16")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default 64)")
    parser.add_argument("--calls", type=int, default=100_000, help="for the time per RPC (default 100000)")
    parser.add_argument("--held", type=int, default=1000, help="requests open at the second scrape (default 1000)")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2 or arguments.requests < 1 or arguments.connections < 1 or arguments.calls < 10:
        parser.error("--rounds must be 2 or more, --requests and --connections 1 or more, --calls 10 or more")
    model = arguments.model
    if not model:
        from cli.model_prepare import prepare_model

        model = str(prepare_model(None, None, progress=False))
    sizes = (arguments.requests, arguments.connections, arguments.tokens, arguments.calls, arguments.held)
    print(page(model, arguments.rounds, *sizes))
    return 0


if __name__ == "__main__":
    # Told to stop, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
