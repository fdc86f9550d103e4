"""`make bench`: Baton beside transformers on this CPU, and what router and RPC add, in one run.

For each dtype a cluster (router, one prefill server, one decode server) and a transformers process with the same model
and thread count are alive together; their rounds alternate, the idle side uses no processor time. Printed per case:
median of each side, the ratio of medians, the lowest and highest ratio of a round, and the target.

What is compared
* decode: tokens per second while all streams decode, seen by an OpenAI client of the router, first tokens excluded;
  on the other side the greedy loop, its prefill excluded.
* prefill: prompt tokens over the time from sending the request to the first token at the client, for a request of one
  token, which the prefill server runs alone; on the other side one forward pass.
* overhead of a token at batch 1: time per output token at the client minus the mean engine step of the same requests.
* overhead of the first token: TTFT at the client minus compute and sampling on the prefill server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from bench.backends import OpenAiCompletions, Target
from bench.datasets import Prompt
from bench.results import RequestResult
from cli.launch import Launcher
from cli.model_prepare import prepare_model

STEPS = 48  # decoded tokens per stream and round
TARGETS = {
    "bfloat16": {"decode-1": 1.6, "decode-8": 2.5, "prefill-512": 1.2},
    "float32": {"decode-1": 1.1, "decode-8": 1.3, "prefill-512": 1.0},
}
TOKEN_OVERHEAD_MS, FIRST_TOKEN_OVERHEAD_MS = 3.0, 5.0
START_S, RESIDENT_MB = 2.0, 150.0


@dataclass
class Case:
    """One comparison: tokens per second of both sides, a figure per round."""

    name: str
    context: int
    target: float | None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def row(self) -> str:
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        ratio = statistics.median(self.ours) / statistics.median(self.theirs)
        target = "" if self.target is None else f"{self.target:.1f} {'met' if ratio >= self.target else 'MISSED'}"
        return (
            f"| {self.name}, context {self.context} | {statistics.median(self.ours):.1f} "
            f"| {statistics.median(self.theirs):.1f} | {ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {target} |"
        )


class Baseline:
    """The transformers process."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.transformers_baseline"),
                *("--model", model, "--dtype", dtype, "--threads", str(threads)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers process ended with status {self._child.wait()}")
        return dict(json.loads(line))

    def tokens_per_second(self, **request: Any) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        answer = self._answer()
        return answer["tokens"] / answer["seconds"]

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=30)


def random_prompt(tokens: int, output: int, seed: int) -> Prompt:
    rng = random.Random(seed)
    return Prompt([rng.randrange(1000, 40000) for _ in range(tokens)], "", output)


async def send_all(base_url: str, model: str, prompts: list[Prompt]) -> list[RequestResult]:
    """Sends all prompts at once. Raises RuntimeError on the first failed one."""
    backend = OpenAiCompletions(Target(base_url, "/v1/completions", model))
    try:
        results = await asyncio.gather(*(backend.send(prompt) for prompt in prompts))
    finally:
        await backend.close()
    for result in results:
        if result.error:
            raise RuntimeError(f"a request failed: {result.error}")
    return results


def decode_rate(results: list[RequestResult]) -> float:
    """Tokens per second between the last stream's first token and the first stream's end."""
    start = max(r.first_token_at or 0.0 for r in results)
    end = min(r.last_token_at or 0.0 for r in results)
    tokens = sum(start < t <= end for r in results for t in r.token_times)
    return tokens / (end - start)


def metric(address: str, name: str, **labels: str) -> float:
    """Sum of the samples called `name` whose labels include `labels`, read from a live /metrics."""
    total = 0.0
    for line in httpx.get(f"http://{address}/metrics").text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.split("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
            total += float(value)
    return total


def step_seconds(decode_http: str) -> tuple[float, float]:
    family = "baton_engine_step_seconds"
    return metric(decode_http, family + "_sum", kind="decode"), metric(decode_http, family + "_count", kind="decode")


def first_token_overhead_ms(base_url: str, model: str, prompt: Prompt) -> float:
    """TTFT of one streamed request minus compute and sampling on the prefill server, in milliseconds."""
    body = {"model": model, "prompt": prompt.token_ids, "max_tokens": prompt.output_tokens, "ignore_eos": True}
    body |= {"stream": True, "temperature": 0}
    ttft = 0.0
    timeline: dict[str, float] = {}
    start = time.monotonic()
    with httpx.stream("POST", base_url + "/v1/completions", json=body, timeout=60.0) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ttft = ttft or time.monotonic() - start
                timeline = json.loads(line[6:]).get("baton", {}).get("timeline") or timeline
    computed = timeline["prefill.compute"] + timeline["prefill.sample"]
    return (ttft - computed) * 1e3


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no VmRSS for process {pid}")


def measure(dtype: str, model_folder: str, threads: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All cases of one dtype. Raises RuntimeError when a request fails or gives another number of tokens."""
    launcher = Launcher(
        model=model_folder,
        port=0,
        grpc_port=0,
        server_flags=["--dtype", dtype, "--no-enable-prefix-caching", "--threads", str(threads)],
        say=lambda _: None,
    )
    baseline = Baseline(model_folder, dtype, threads)
    overheads: dict[str, list[float]] = {"token": [], "first": []}
    try:
        launcher.start()
        base_url = f"http://{launcher.router.ready['http']}"
        decode_http = launcher.servers[1].ready["http"]
        deadline = time.monotonic() + 60
        while httpx.get(base_url + "/health").status_code != 200:
            if time.monotonic() > deadline:
                raise RuntimeError("the router did not become ready within 60 s")
            time.sleep(0.05)
        model = httpx.get(base_url + "/v1/models").json()["data"][0]["id"]
        targets = TARGETS[dtype]
        cases = {
            (kind, size, context): Case(f"{kind} {size}", context, targets.get(f"{kind}-{size}"))
            for kind, size, context in (
                ("decode", 1, 64),
                ("decode", 1, 512),
                ("decode", 8, 64),
                ("decode", 8, 512),
                ("prefill", 512, 0),
            )
        }
        for number in range(rounds + 1):  # round 0 warms up and is not kept
            for (kind, size, context), case in cases.items():
                seed = 1000 * number + size + context
                if kind == "decode":
                    before = step_seconds(decode_http)
                    prompts = [random_prompt(context, STEPS, seed * 100 + i) for i in range(size)]
                    results = asyncio.run(send_all(base_url, model, prompts))
                    ours = decode_rate(results)
                    after = step_seconds(decode_http)
                    theirs = baseline.tokens_per_second(op=kind, batch=size, context=context, steps=STEPS, seed=seed)
                    if size == 1 and number:
                        step = (after[0] - before[0]) / (after[1] - before[1])
                        overheads["token"].append((results[0].tpot_s - step) * 1e3)
                        overheads["first"].append(
                            first_token_overhead_ms(base_url, model, random_prompt(context, 4, seed + 7))
                        )
                else:
                    [result] = asyncio.run(send_all(base_url, model, [random_prompt(size, 1, seed)]))
                    ours = size / result.ttft_s
                    theirs = baseline.tokens_per_second(op=kind, tokens=size, seed=seed)
                if number:
                    case.ours.append(ours)
                    case.theirs.append(theirs)
            say(f"  {dtype} round {number} of {rounds}")
        processes = {p.name: resident_mb(p.ready["pid"]) for p in launcher.processes}
    finally:
        baseline.close()
        launcher.stop()
    return {"cases": list(cases.values()), "overheads": overheads, "resident_mb": processes}


def start_seconds(model_folder: str) -> float:
    """Time from starting a router process to its ready line."""
    command = [sys.executable, "-m", "router", "--model", model_folder, "--port", "0", "--grpc-port", "0"]
    command += ["--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"]
    start = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        return time.monotonic() - start
    finally:
        child.kill()
        child.wait()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder (default: the embedded model)")
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"], choices=list(TARGETS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = str(prepare_model(arguments.model or None, None, progress=False))
    starts = [start_seconds(folder) for _ in range(3)]
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {cpu_name()}, {arguments.threads} threads, {arguments.rounds} rounds, {folder}"
    )
    missed = False
    for dtype in arguments.dtype:
        found = measure(dtype, folder, arguments.threads, arguments.rounds, lambda m: print(m, file=sys.stderr))
        print(
            f"\n{dtype}, tokens/s\n\n| case | Baton | transformers | ratio (rounds) | target |\n|---|---|---|---|---|"
        )
        for case in found["cases"]:
            print(case.row())
            missed |= "MISSED" in case.row()
        for name, limit in (("token", TOKEN_OVERHEAD_MS), ("first", FIRST_TOKEN_OVERHEAD_MS)):
            values = found["overheads"][name]
            middle = statistics.median(values)
            label = "a token at batch 1" if name == "token" else "the first token"
            print(
                f"\nadded to {label}: {middle:.2f} ms ({min(values):.2f}-{max(values):.2f}), limit {limit} ms "
                f"{'met' if middle <= limit else 'MISSED'}"
            )
            missed |= middle > limit
        print("\nresident MB: " + ", ".join(f"{k} {v:.0f}" for k, v in found["resident_mb"].items()))
        missed |= max(found["resident_mb"].values()) > RESIDENT_MB
    print(f"\nrouter start: {statistics.median(starts):.2f} s ({min(starts):.2f}-{max(starts):.2f}), limit {START_S} s")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
