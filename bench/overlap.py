"""How much of the KV transfer hides behind the prefill, and what disaggregation does to the first two tokens.

    python -m bench.overlap                                      # tables in Markdown
    python -m bench.overlap --tokens 512 1024 2048 4096 8192 --json results/overlap.json

One prefill server, one decode server and two routers before them: one that knows both, and one that knows the decode
server alone, which then computes prompts itself (colocated). Everything runs in turn, one request at a time, with
prompts that no cache knows.

**Hidden share**, by the decode server's own clock, which it publishes in its metrics; the servers are called as the
router calls them:

  exposed   of a load that was opened while the prompt was computed: from the event "computed" on its stream to the
            verified end
  alone     of a load of as many blocks that is opened when the prompt has been computed: from its opening to the
            verified end
  hidden    1 - exposed / alone, both from the same repetition

**First tokens**, as an OpenAI client of a router sees them: the time to the first token, and from there to the second,
disaggregated and colocated.

The first repetition warms up and is not counted. Of the others the least and the most of each figure are left out; the
table has the median of the rest, and their range.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from bench.backends import OpenAiCompletions, Target
from bench.circumstances import circumstances, save, sentence
from bench.comparison import ENDPOINT, MeasurementFailed
from bench.datasets import Prompt
from bench.results import RequestResult
from bench.router_facts import NotReady, first_model
from cli.launch import SHARED_CORES, Launcher, LaunchError, Process
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from rpc.channels import CLIENT_OPTIONS
from rpc.ids import new_nonce, new_request_id

NEW_TOKENS = 8  # of a client's answer
LIMIT_S = 600.0  # of one request; long prompts take minutes on few cores
START_S = 120.0
LEAST_BLOCK = 16
FIGURES = ("hidden", "alone_ms", "exposed_ms", "ttft_pd_ms", "ttft_colocated_ms", "gap_pd_ms", "gap_colocated_ms")


@dataclass
class Size:
    """What was found for one length of prompts: a value per repetition of each figure."""

    tokens: int
    megabytes: float = 0.0
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})

    def book(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.values[name].append(value)


class Servers:
    """The processes, and calls of the servers as a router makes them."""

    def __init__(self, model: str, dtype: str, threads: int, most_tokens: int) -> None:
        blocks = 4 * -(-(most_tokens + NEW_TOKENS) // LEAST_BLOCK)  # of prompts that nobody asks for any more too
        flags = ["--dtype", dtype, "--threads", str(threads), "--num-kv-blocks", str(blocks)]
        # A load that fails is to be seen, not to be made good by computing the prompt anew.
        self._launcher = Launcher(
            model=model,
            port=0,
            grpc_port=0,
            server_flags=flags,
            decode_flags=["--kv-load-failure-policy", "fail"],
            say=lambda _: None,
        )
        self._model = model
        self._colocated: Process | None = None
        self._channels: list[grpc.Channel] = []
        self.max_model_len = self.vocabulary = 0
        self.urls: dict[str, str] = {}
        self.names: dict[str, str] = {}

    def start(self) -> None:
        """Raises LaunchError."""
        self._launcher.start()
        prefill, decode = self._launcher.servers
        flags = ["--model", self._model, "--port", "0", "--grpc-port", "0", "--drain-grace-secs", "0"]
        self._colocated = Process("router", "router-colocated", [*flags, "--decode", decode.ready["grpc"]])
        self._colocated.start(SHARED_CORES)
        while not self._colocated.check_ready(START_S):
            self._colocated.wait_listening(0.1)
        for name, router in (("pd", self._launcher.router), ("colocated", self._colocated)):
            self.urls[name] = f"http://{router.ready['http']}"
            self.names[name] = first_model(self.urls[name], "", START_S)
        self._channels = [grpc.insecure_channel(s.ready["grpc"], options=CLIENT_OPTIONS) for s in (prefill, decode)]
        info = worker_pb2_grpc.WorkerStub(self._channels[0]).GetInfo(worker_pb2.GetInfoRequest(), timeout=LIMIT_S)
        self.max_model_len, self.vocabulary = info.max_model_len, info.vocab_size
        self._served = info.served_model_names[0]
        self._source = common_pb2.KvSource(
            engine_id=info.engine_id, cache_store_addresses=info.cache_store_addresses, tp_size=info.tp_size
        )
        self._prefill = prefill_pb2_grpc.PrefillStub(self._channels[0])
        self._decode = decode_pb2_grpc.DecodeStub(self._channels[1])
        self._metrics = f"http://{decode.ready['http']}/metrics"

    def stop(self) -> None:
        for channel in self._channels:
            channel.close()
        if self._colocated is not None:
            self._colocated.send_signal(signal.SIGTERM)
            if not self._colocated.wait(10.0):
                self._colocated.send_signal(signal.SIGKILL)
        self._launcher.stop()

    def transfer(self, prompt: Sequence[int], *, late: bool) -> dict[str, float]:
        """Sums over one transfer of the decode server's histograms: `seconds`, `exposed_seconds`, `size_bytes`.

        late: the load is opened when the prompt has been computed.
        """
        request_id = new_request_id()
        request = common_pb2.GenerateInput(
            request_id=request_id, request_key=f"{request_id}#0.{new_nonce()}", prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(
                max_tokens=2, seed=1, temperature=0.0, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
            ),
            model=self._served,
        )  # fmt: skip
        load = decode_pb2.DecodeRequest(input=request, kv_source=self._source)
        compute = prefill_pb2.PrefillRequest(input=request, hold_kv=True)
        before = self._transfer_sums()
        if late:
            self._prefill.Prefill(compute, timeout=LIMIT_S)
            events = list(self._decode.Decode(load, timeout=LIMIT_S))
        else:
            stream = self._decode.Decode(load, timeout=LIMIT_S)
            answer = self._prefill.Prefill.future(compute, timeout=LIMIT_S)
            events = list(stream)
            answer.result(LIMIT_S)
        kinds = [event.WhichOneof("event") for event in events]
        if kinds[:2] != ["reserved", "loaded"] or events[0].reserved.blocks_in_cache:
            raise MeasurementFailed("the decode server did not load the whole prompt")
        after = self._transfer_sums()
        if after["count"] != before["count"] + 1:
            raise MeasurementFailed(f"{after['count'] - before['count']:g} transfers were counted in place of one")
        return {name: after[name] - before[name] for name in after}

    def _transfer_sums(self) -> dict[str, float]:
        samples = {
            "baton_kv_transfer_seconds_count": "count",
            "baton_kv_transfer_seconds_sum": "seconds",
            "baton_kv_transfer_exposed_seconds_sum": "exposed_seconds",
            "baton_kv_transfer_size_bytes_sum": "size_bytes",
        }
        found = dict.fromkeys(samples.values(), 0.0)
        for line in httpx.get(self._metrics, timeout=30.0).text.splitlines():
            sample, _, value = line.rpartition(" ")
            name = samples.get(sample.partition("{")[0])
            if name is not None:
                found[name] += float(value)
        return found

    def ask(self, path: str, prompt: list[int]) -> RequestResult:
        """One request of an OpenAI client, through the router of that path (`pd` or `colocated`)."""

        async def send() -> RequestResult:
            backend = OpenAiCompletions(Target(self.urls[path], ENDPOINT, self.names[path], timeout_s=LIMIT_S))
            try:
                return await backend.send(Prompt(prompt, "", NEW_TOKENS))
            finally:
                await backend.close()

        result = asyncio.run(send())
        if result.error or result.path != path:
            raise MeasurementFailed(f"a request by {path} went by {result.path or 'no path'}: {result.error}")
        return result


def repetition(servers: Servers, size: Size, number: int, rng: random.Random) -> None:
    """One measurement of everything for one length, in an order that changes; booked unless it is the first."""

    def prompt() -> list[int]:
        return [rng.randrange(3, servers.vocabulary) for _ in range(size.tokens)]

    found: dict[str, float] = {}

    def exposed() -> None:
        sums = servers.transfer(prompt(), late=False)
        found["exposed_ms"] = 1e3 * sums["exposed_seconds"]

    def alone() -> None:
        sums = servers.transfer(prompt(), late=True)
        found["alone_ms"] = 1e3 * sums["seconds"]
        size.megabytes = sums["size_bytes"] / 1e6

    def client(path: str) -> None:
        result = servers.ask(path, prompt())
        found[f"ttft_{path}_ms"] = 1e3 * result.ttft_s
        found[f"gap_{path}_ms"] = 1e3 * (result.token_times[1] - result.token_times[0])

    turns: list[Callable[[], None]] = [exposed, alone, lambda: client("pd"), lambda: client("colocated")]
    shift = number % len(turns)
    for turn in (*turns[shift:], *turns[:shift]):
        turn()
    found["hidden"] = 1 - found["exposed_ms"] / found["alone_ms"]
    if number:
        size.book(found)


def measure(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Size]:
    servers = Servers(arguments.model, arguments.dtype, arguments.threads, max(arguments.tokens))
    rng = random.Random(arguments.seed)
    try:
        servers.start()
        most = servers.max_model_len - NEW_TOKENS  # what is asked of the model's whole length is a little shorter
        sizes = [Size(min(tokens, most)) for tokens in arguments.tokens]
        for number in range(arguments.repetitions + 1):
            for size in sizes:
                repetition(servers, size, number, rng)
            say(f"  repetition {number} of {arguments.repetitions}")
        return sizes
    finally:
        servers.stop()


def kept(values: Sequence[float]) -> list[float]:
    """Without the least and the most, where enough is left."""
    return sorted(values)[1:-1] if len(values) > 2 else sorted(values)


def cell(values: Sequence[float], shown: str) -> str:
    """Median (least to most) of what is kept."""
    rest = kept(values)
    low, middle, high = (shown.format(value) for value in (rest[0], statistics.median(rest), rest[-1]))
    return f"{middle} ({low}–{high})"


def page(sizes: Sequence[Size], found: dict[str, Any], arguments: argparse.Namespace) -> str:
    lines = [
        f"{sentence(found)} {Path(arguments.model).name}, {arguments.dtype}, {arguments.threads} threads of each "
        f"engine; {arguments.repetitions} repetitions, the least and the most left out: median (range).",
        "",
        "| prompt | KV | load alone ms | exposed ms | hidden |",
        "|---|---|---|---|---|",
    ]
    for size in sizes:
        shown = [cell(size.values[name], "{:.1f}") for name in ("alone_ms", "exposed_ms")]
        shown.append(cell(size.values["hidden"], "{:.1%}"))
        lines.append(f"| {size.tokens} | {size.megabytes:.1f} MB | " + " | ".join(shown) + " |")
    lines += [
        "",
        "| prompt | first token, disaggregated, ms | colocated | then to the second, disaggregated, ms | colocated |",
        "|---|---|---|---|---|",
    ]
    for size in sizes:
        names = ("ttft_pd_ms", "ttft_colocated_ms", "gap_pd_ms", "gap_colocated_ms")
        lines.append(f"| {size.tokens} | " + " | ".join(cell(size.values[name], "{:.1f}") for name in names) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overlap", description="How much of the KV transfer hides behind the prefill."
    )
    parser.add_argument("--model", default="", help="model folder (default: the embedded model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default 1)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="lengths of prompts")
    parser.add_argument("--repetitions", type=int, default=5, help="default 5")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args(argv)
    if arguments.repetitions < 1 or arguments.threads < 1 or min(arguments.tokens) < LEAST_BLOCK:
        parser.error(f"--repetitions and --threads must be 1 or more, --tokens {LEAST_BLOCK} or more")
    found = circumstances()
    try:
        if not arguments.model:
            from cli.model_prepare import prepare_model

            arguments.model = str(prepare_model(None, None, progress=False))
        sizes = measure(arguments, lambda text: print(text, file=sys.stderr, flush=True))
    except (MeasurementFailed, LaunchError, NotReady, grpc.RpcError) as error:
        print(f"bench.overlap: {error}", file=sys.stderr)
        return 1
    print(page(sizes, found, arguments))
    save(arguments.json, found, {"sizes": [{"tokens": size.tokens, **size.values} for size in sizes]})
    return 0


if __name__ == "__main__":
    # Told to stop, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
