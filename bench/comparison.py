"""Baton and `transformers` under the same work on this machine, in rounds that alternate.

A cluster (router, one prefill server, one decode server) and a `transformers` process with the same model, dtype and
thread count are alive together; while one side works the other is idle.

* decode: tokens per second while all streams decode, seen by an OpenAI client of the router, first tokens excluded. The
  prompts have been served once before, so that prefix caches let the streams begin together. On the other side the
  greedy loop, its prefill excluded.
* prefill: prompt tokens over the time from sending the request to the first token at the client, for a prompt that no
  cache knows and an answer of one token, which the prefill server runs alone. On the other side one forward pass.
* added to a token: time per output token at the client minus the decode server's mean engine step, one stream.
* added to the first token: time to the first token at the client minus computing and sampling on the prefill server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.backends import BatonGrpc, OpenAiCompletions, Target
from bench.datasets import Prompt
from bench.results import RequestResult
from bench.router_facts import first_model
from cli.launch import SHARED_CORES, Launcher

STEPS = 48  # decoded tokens per stream and round
FIRST_TOKENS = 4  # requests per round whose first token is timed
EQUAL_PROMPTS, EQUAL_TOKENS = 4, 32
KV_BLOCKS = 1024
ENDPOINT = "/v1/completions"
DECODE, PREFILL = "decode", "prefill"
SHAPES = ((DECODE, 1, 64), (DECODE, 1, 512), (DECODE, 8, 64), (DECODE, 8, 512), (PREFILL, 1, 512))


class MeasurementFailed(Exception):
    """A request failed, or a process ended; the figures would say nothing."""


@dataclass
class Case:
    """One comparison: tokens per second of both sides, a figure per round."""

    kind: str
    streams: int
    context: int
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def ratios(self) -> list[float]:
        """Of each round; both sides of it ran within seconds of each other."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]


@dataclass
class Comparison:
    """What one dtype's run found. Overheads in milliseconds, one figure per request."""

    dtype: str
    cases: list[Case]
    token_added_ms: list[float] = field(default_factory=list)
    first_added_ms: list[float] = field(default_factory=list)
    resident_mb: dict[str, float] = field(default_factory=dict)
    read_seconds: list[float] = field(default_factory=list)  # one pass over as many bytes as the weights have
    weight_bytes: int = 0
    equal_prompts: int = 0  # of EQUAL_PROMPTS, whose greedy tokens are those of transformers


class Baseline:
    """The transformers process."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        command = [sys.executable, "-m", "bench.transformers_baseline"]
        self._child = subprocess.Popen(
            [*command, "--model", model, "--dtype", dtype, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**SHARED_CORES, **os.environ},  # waits for its threads as Baton's engines do
            text=True,
        )

    def wait_ready(self) -> None:
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise MeasurementFailed(f"the transformers process ended with status {self._child.wait()}")
        return dict(json.loads(line))

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process, whatever it does now: it has nothing to save."""
        assert self._child.stdin is not None
        self._child.kill()
        with contextlib.suppress(BrokenPipeError):  # a question that was never sent
            self._child.stdin.close()
        self._child.wait()


def random_prompt(tokens: int, output: int, rng: random.Random) -> Prompt:
    return Prompt([rng.randrange(1000, 40000) for _ in range(tokens)], "", output)


def decode_rate(results: list[RequestResult]) -> float:
    """Tokens per second between the last stream's first token and the first stream's end."""
    start = max(r.first_token_at or 0.0 for r in results)
    end = min(r.last_token_at or 0.0 for r in results)
    if end <= start:
        raise MeasurementFailed("the streams did not overlap")
    return sum(start < t <= end for r in results for t in r.token_times) / (end - start)


class Cluster:
    """Baton's side: requests through the router, figures of its processes."""

    def __init__(self, model_folder: str, dtype: str, threads: int) -> None:
        flags = ["--dtype", dtype, "--threads", str(threads), "--num-kv-blocks", str(KV_BLOCKS)]
        self.launcher = Launcher(model=model_folder, port=0, grpc_port=0, server_flags=flags, say=lambda _: None)

    def start(self) -> None:
        self.launcher.start()
        self.base_url = f"http://{self.launcher.router.ready['http']}"
        self.model = first_model(self.base_url, "", 60.0)

    def stop(self) -> None:
        self.launcher.stop()

    def send(self, prompts: list[Prompt]) -> list[RequestResult]:
        """All prompts at once over HTTP. Raises MeasurementFailed on the first failed one."""
        return asyncio.run(self._send(prompts, together=True))

    def send_one_by_one(self, prompts: list[Prompt]) -> list[RequestResult]:
        """One after the other over one connection."""
        return asyncio.run(self._send(prompts, together=False))

    async def _send(self, prompts: list[Prompt], *, together: bool) -> list[RequestResult]:
        backend = OpenAiCompletions(Target(self.base_url, ENDPOINT, self.model))
        try:
            if together:
                results = list(await asyncio.gather(*(backend.send(prompt) for prompt in prompts)))
            else:
                results = [await backend.send(prompt) for prompt in prompts]
        finally:
            await backend.close()
        return _checked(results)

    def token_ids(self, prompts: list[Prompt]) -> list[list[int]]:
        """Greedy tokens, over gRPC, which says them."""

        async def ask() -> list[RequestResult]:
            backend = BatonGrpc(Target(self.launcher.router.ready["grpc"], "", ""))
            try:
                return [await backend.send(prompt) for prompt in prompts]
            finally:
                await backend.close()

        return [result.token_ids for result in _checked(asyncio.run(ask()))]

    def decode_steps(self) -> tuple[float, float]:
        """Seconds and number of the decode server's decode steps so far."""
        address = self.launcher.servers[1].ready["http"]
        page = httpx.get(f"http://{address}/metrics", timeout=10.0).text
        found = {"sum": 0.0, "count": 0.0}
        for line in page.splitlines():
            sample, _, value = line.rpartition(" ")
            name, _, labels = sample.partition("{")
            kind = name.removeprefix("baton_engine_step_seconds_")
            if kind in found and 'kind="decode"' in labels:
                found[kind] += float(value)
        return found["sum"], found["count"]

    def resident_mb(self) -> dict[str, float]:
        return {process.name: _resident_mb(process.ready["pid"]) for process in self.launcher.processes}


def _checked(results: list[RequestResult]) -> list[RequestResult]:
    for result in results:
        if result.error:
            raise MeasurementFailed(f"a request failed: {result.error}")
    return results


def _resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise MeasurementFailed(f"no VmRSS for process {pid}")


def compare(dtype: str, model_folder: str, threads: int, rounds: int, say: Callable[[str], None]) -> Comparison:
    """All cases of one dtype. Raises MeasurementFailed, or LaunchError when the cluster does not come up."""
    found = Comparison(dtype, [Case(*shape) for shape in SHAPES])
    cluster = Cluster(model_folder, dtype, threads)
    baseline = Baseline(model_folder, dtype, threads)
    try:
        cluster.start()
        baseline.wait_ready()
        for number in range(rounds + 1):  # round 0 warms up and is not kept
            began = time.monotonic()
            rng = random.Random(number)
            for case in found.cases:
                measure = _decode_round if case.kind == DECODE else _prefill_round
                ours, theirs = measure(case, cluster, baseline, rng, found, number)
                if number:
                    case.ours.append(ours)
                    case.theirs.append(theirs)
            if number:
                found.first_added_ms += _first_token_added(cluster, rng)
                floor = baseline.ask(op="read")
                found.read_seconds.append(floor["seconds"])
                found.weight_bytes = floor["bytes"]
            say(f"  {dtype} round {number} of {rounds}, {time.monotonic() - began:.0f} s")
        found.equal_prompts = _equal_prompts(cluster, baseline)
        found.resident_mb = cluster.resident_mb()
    finally:
        baseline.close()
        cluster.stop()
    return found


def _in_turn(number: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """Both sides, the order changing from round to round."""
    if number % 2:
        first = ours()
        return first, theirs()
    second = theirs()
    return ours(), second


def _decode_round(
    case: Case, cluster: Cluster, baseline: Baseline, rng: random.Random, found: Comparison, number: int
) -> tuple[float, float]:
    prompts = [random_prompt(case.context, STEPS + 1, rng) for _ in range(case.streams)]

    def ours() -> float:
        cluster.send([Prompt(p.token_ids, "", 2) for p in prompts])
        before = cluster.decode_steps()
        results = cluster.send(prompts)
        after = cluster.decode_steps()
        if case.streams == 1 and number:
            step = (after[0] - before[0]) / (after[1] - before[1])
            found.token_added_ms.append((results[0].tpot_s - step) * 1e3)
        return decode_rate(results)

    def theirs() -> float:
        answer = baseline.ask(op=DECODE, prompts=[p.token_ids for p in prompts], steps=STEPS)
        return float(answer["tokens"] / answer["seconds"])

    return _in_turn(number, ours, theirs)


def _prefill_round(
    case: Case, cluster: Cluster, baseline: Baseline, rng: random.Random, found: Comparison, number: int
) -> tuple[float, float]:
    prompt = random_prompt(case.context, 1, rng)

    def ours() -> float:
        [result] = cluster.send([prompt])
        return case.context / result.ttft_s

    def theirs() -> float:
        answer = baseline.ask(op=PREFILL, prompts=[prompt.token_ids])
        return float(answer["tokens"] / answer["seconds"])

    return _in_turn(number, ours, theirs)


def _first_token_added(cluster: Cluster, rng: random.Random) -> list[float]:
    """Milliseconds; the first request opens the connection and is not counted."""
    results = cluster.send_one_by_one([random_prompt(64, 3, rng) for _ in range(FIRST_TOKENS + 1)])
    return [
        (r.ttft_s - r.timeline["prefill.compute"] - r.timeline.get("prefill.sample", 0.0)) * 1e3 for r in results[1:]
    ]


def _equal_prompts(cluster: Cluster, baseline: Baseline) -> int:
    rng = random.Random(-1)
    prompts = [random_prompt(50, EQUAL_TOKENS, rng) for _ in range(EQUAL_PROMPTS)]
    ours = cluster.token_ids(prompts)
    theirs = [
        baseline.ask(op=DECODE, prompts=[prompt.token_ids], steps=EQUAL_TOKENS - 1)["ids"][0] for prompt in prompts
    ]
    return sum(a == b for a, b in zip(ours, theirs, strict=True))
