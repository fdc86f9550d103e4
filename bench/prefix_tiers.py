"""Time to the first token of a long prompt: computed, and with its KV from each place that may keep it.

    python -m bench.prefix_tiers                                     # a table in Markdown
    python -m bench.prefix_tiers --repetitions 7 --json results/prefix_tiers.json
    python -m bench.prefix_tiers --mooncake mooncake://127.0.0.1:50088

Servers that compute prompts themselves, each behind a router of its own; an OpenAI client of the routers asks one
request at a time. A repetition takes one prompt that no cache knows through all places, so that all are compared under
the same conditions:

  computed   asked for the first time
  pool       asked again
  host       asked again after another prompt, which is computed too, has taken its blocks in the pool
  disk       asked of the same server after a restart (with --kill, after a SIGKILL)
  mooncake   asked of another server, which has the store in common with the first

Before the measured request a server that was started anew answers a short one. Each answer must be the one that the
prompt's blocks lead to in the pool, where they were computed, and the metrics must say that the blocks came from the
place that is measured; else there is no figure. (The answer of the whole computation is no measure: it computes the
last tokens together with the others, so its last bits may differ, and a random prompt has candidates that close.)
The first repetition warms up and is not counted. The table has the medians of the others, and their range; and of the
time to the first token, how long the prompt waited for a tier, from its arrival in the queue to the last block.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.backends import OpenAiCompletions, Target
from bench.circumstances import circumstances, save, sentence
from bench.comparison import ENDPOINT, MeasurementFailed
from bench.datasets import Prompt
from bench.results import RequestResult
from bench.router_facts import NotReady, first_model
from cli.launch import SHARED_CORES, Launcher, LaunchError, Process

BLOCK = 16
NEW_TOKENS = 8
LIMIT_S = 600.0
START_S = 120.0
WRITTEN_S = 30.0
WARM_TOKENS = 3 * BLOCK
PLACES = ("computed", "pool", "host", "disk", "mooncake")
TIERS = ("host", "disk", "mooncake")


class Servers:
    """One server, or two with a store in common, and a router before each."""

    def __init__(self, arguments: argparse.Namespace, folder: str) -> None:
        blocks = -(-(arguments.tokens + NEW_TOKENS) // BLOCK)  # for one prompt: the next one takes them all
        flags = [
            *("--dtype", arguments.dtype, "--threads", str(arguments.threads), "--block-size", str(BLOCK)),
            *("--num-kv-blocks", str(blocks), "--kv-disk-bytes", "8GiB", "--drain-timeout-secs", "10"),
            # What is measured is how long it takes, not when one gives up.
            *("--kv-host-bytes", "2GiB", "--kv-tier-timeout-ms", "60000"),
            *(("--kv-tier", arguments.mooncake) if arguments.mooncake else ()),
        ]
        self._launcher = Launcher(
            model=arguments.model,
            prefill_servers=0,
            decode_servers=2 if arguments.mooncake else 1,
            port=0,
            grpc_port=0,
            server_flags=flags,
            kv_disk_path=folder,
            say=lambda _: None,
        )
        self._model = arguments.model
        self._routers: list[Process] = []
        self._name = ""

    def start(self) -> None:
        """Raises LaunchError."""
        self._launcher.start()
        for number, server in enumerate(self._launcher.servers):
            flags = ["--model", self._model, "--port", "0", "--grpc-port", "0", "--drain-grace-secs", "0"]
            router = Process("router", f"router-{number}", [*flags, "--decode", server.ready["grpc"]])
            router.start(SHARED_CORES)
            self._routers.append(router)
        for router in self._routers:
            while not router.check_ready(START_S):
                router.wait_listening(0.1)
            self._name = first_model(self._url(router), "", START_S)

    def stop(self) -> None:
        for router in self._routers:
            router.send_signal(signal.SIGTERM)
        for router in self._routers:
            if not router.wait(10.0):
                router.send_signal(signal.SIGKILL)
        self._launcher.stop()

    def restart(self, number: int, kill: bool) -> None:
        server = self._launcher.servers[number]
        server.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        if not server.wait(30.0):
            raise MeasurementFailed("a server did not end")
        self._launcher.start_again(server)
        first_model(self._url(self._routers[number]), "", START_S)

    def ask(self, number: int, prompt: list[int]) -> RequestResult:
        """One request to a server, which may just have been started."""

        async def send() -> RequestResult:
            url = self._url(self._routers[number])
            backend = OpenAiCompletions(Target(url, ENDPOINT, self._name, timeout_s=LIMIT_S))
            try:
                return await backend.send(Prompt(prompt, "", NEW_TOKENS))
            finally:
                await backend.close()

        result = asyncio.run(send())
        if result.error:
            raise MeasurementFailed(f"a request failed: {result.error}")
        return result

    def counted(self, number: int, family: str, *labels: str) -> dict[str, float]:
        """Sums of a counter of a server by its label `tier`, over the series that have all of `labels`."""
        found = dict.fromkeys(TIERS, 0.0)
        page = httpx.get(f"http://{self._launcher.servers[number].ready['http']}/metrics", timeout=30.0).text
        for line in page.splitlines():
            if line.startswith(f"baton_{family}{{") and all(label in line for label in labels):
                tier = line.partition('tier="')[2].partition('"')[0]
                found[tier] += float(line.rpartition(" ")[2])
        return found

    def fetch_seconds(self, number: int) -> float:
        """How long prompts of a server have waited for tiers, in all."""
        page = httpx.get(f"http://{self._launcher.servers[number].ready['http']}/metrics", timeout=30.0).text
        lines = (line for line in page.splitlines() if line.startswith("baton_kv_tier_fetch_seconds_sum"))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_written(self, number: int, tier: str, before: float, blocks: int) -> None:
        """Until a tier has got so many blocks of a server since `before`."""
        limit = time.monotonic() + WRITTEN_S
        while self.counted(number, "kv_tier_writes_total", 'outcome="stored"')[tier] < before + blocks:
            if time.monotonic() > limit:
                raise MeasurementFailed(f"{blocks} blocks did not get to {tier} within {WRITTEN_S:g} s")
            time.sleep(0.05)

    @staticmethod
    def _url(router: Process) -> str:
        return f"http://{router.ready['http']}"


class Measurement:
    """Takes prompts through the places. `seconds` and `fetched` (of these, for a tier) by place, without the first
    repetition's."""

    def __init__(self, servers: Servers, arguments: argparse.Namespace) -> None:
        self.seconds: dict[str, list[float]] = {
            place: [] for place in PLACES if place != "mooncake" or arguments.mooncake
        }
        self.fetched: dict[str, list[float]] = {place: [] for place in self.seconds if place in TIERS}
        self._servers = servers
        self._tokens = arguments.tokens
        self._kill = arguments.kill
        self._mooncake = bool(arguments.mooncake)
        self._vocabulary = int(json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"])
        self._rng = random.Random(arguments.seed)

    def repetition(self, count: bool) -> None:
        servers, blocks = self._servers, self._tokens // BLOCK
        far = "mooncake" if self._mooncake else "disk"
        stored = servers.counted(0, "kv_tier_writes_total", 'outcome="stored"')
        prompt, other = self._prompt(self._tokens), self._prompt(self._tokens)
        found: list[tuple[str, float]] = []
        fetched: list[tuple[str, float]] = []
        found.append(("computed", self._ask(0, prompt, "computed")[0]))
        seconds, kept = self._ask(0, prompt, "pool")
        found.append(("pool", seconds))

        def expect(number: int, place: str) -> None:
            before = servers.fetch_seconds(number)
            seconds, result = self._ask(number, prompt, place)
            fetched.append((place, servers.fetch_seconds(number) - before))
            if result.text != kept.text:
                raise MeasurementFailed(f"the answer from {place} is another one than that from the pool")
            found.append((place, seconds))

        found.append(("computed", self._ask(0, other, "computed")[0]))
        expect(0, "host")
        servers.wait_written(0, far, stored[far], 2 * blocks)
        if self._mooncake:
            self._ask(1, self._prompt(WARM_TOKENS), "computed")
            expect(1, "mooncake")
        servers.restart(0, self._kill)
        self._ask(0, self._prompt(WARM_TOKENS), "computed")
        expect(0, "disk")
        if count:
            for place, seconds in found:
                self.seconds[place].append(seconds)
            for place, seconds in fetched:
                self.fetched[place].append(seconds)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(3, self._vocabulary) for _ in range(tokens)]

    def _ask(self, number: int, prompt: list[int], place: str) -> tuple[float, RequestResult]:
        before = self._servers.counted(number, "kv_tier_hit_blocks_total")
        result = self._servers.ask(number, prompt)
        after = self._servers.counted(number, "kv_tier_hit_blocks_total")
        hits = {tier: after[tier] - before[tier] for tier in TIERS}
        whole = (len(prompt) - 1) // BLOCK
        wanted = {tier: float(whole) if tier == place else 0.0 for tier in TIERS}
        cached = 0 if place == "computed" else whole * BLOCK
        if hits != wanted or result.cached_tokens != cached:
            raise MeasurementFailed(f"{place}: {result.cached_tokens} tokens were cached, blocks by tier: {hits}")
        return result.ttft_s, result


def measure(arguments: argparse.Namespace, say: Callable[[str], None]) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="baton-tiers-", dir=arguments.disk or None) as folder:
        servers = Servers(arguments, folder)
        try:
            servers.start()
            measurement = Measurement(servers, arguments)
            for number in range(arguments.repetitions + 1):
                measurement.repetition(count=number > 0)
                say(f"  repetition {number} of {arguments.repetitions}")
            return measurement
        finally:
            servers.stop()


def page(
    seconds: dict[str, list[float]],
    fetched: dict[str, list[float]],
    found: dict[str, Any],
    arguments: argparse.Namespace,
) -> str:
    computed = statistics.median(seconds["computed"])
    lines = [
        f"{sentence(found)} {Path(arguments.model).name}, {arguments.dtype}, {arguments.threads} threads, a prompt of "
        f"{arguments.tokens} tokens; {arguments.repetitions} repetitions: median (range).",
        "",
        "| KV of the prompt | first token, ms | of computed | for the tier, ms |",
        "|---|---|---|---|",
    ]
    for place, values in seconds.items():
        low, middle, high = (1e3 * value for value in (min(values), statistics.median(values), max(values)))
        waited = f"{1e3 * statistics.median(fetched[place]):.0f}" if place in fetched else ""
        lines.append(f"| {place} | {middle:.0f} ({low:.0f}–{high:.0f}) | {middle / 1e3 / computed:.1%} | {waited} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefix_tiers", description="First token of a prompt whose KV a tier has."
    )
    parser.add_argument("--model", default="", help="model folder (default: the embedded model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default 2)")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt (default 2000)")
    parser.add_argument("--repetitions", type=int, default=5, help="default 5")
    parser.add_argument("--mooncake", default="", metavar="ADDRESS", help="store of both servers: mooncake://HOST:PORT")
    parser.add_argument("--disk", default="", metavar="DIR", help="where the blocks on disk are (default: temporary)")
    parser.add_argument("--kill", action="store_true", help="the server is killed before its restart")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args(argv)
    if arguments.repetitions < 1 or arguments.threads < 1 or arguments.tokens < 30 * BLOCK:
        parser.error(f"--repetitions and --threads must be 1 or more, --tokens {30 * BLOCK} or more")
    found = circumstances()
    try:
        if not arguments.model:
            from cli.model_prepare import prepare_model

            arguments.model = str(prepare_model(None, None, progress=False))
        measured = measure(arguments, lambda text: print(text, file=sys.stderr, flush=True))
    except (MeasurementFailed, LaunchError, NotReady) as error:
        print(f"bench.prefix_tiers: {error}", file=sys.stderr)
        return 1
    print(page(measured.seconds, measured.fetched, found, arguments))
    figures = {"tokens": arguments.tokens, "ttft_seconds": measured.seconds, "fetch_seconds": measured.fetched}
    save(arguments.json, found, figures)
    return 0


if __name__ == "__main__":
    # Told to stop, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
