"""Prefill graphs: time to first token with and without them, what a replay costs, and where they end.

    python -m bench.gpu.prefill_graph --shape llama-3.1-8b --save prefill_graph.json
    python -m bench.gpu.prefill_graph --model FOLDER --load-format auto

One engine, prefix caching off. The arms `off` and `on` are the same engine without and with its graphs, alternated per
repetition; of the repetitions the fastest and the slowest are left out. A request of the arm `on` whose status is not
`replayed` ends the run.

Parts: `ttft` (EngineCore from add to the first token of all prompts of a batch), `replay` (per bucket: device time of
the graph, host time of preparing and launching it, kernels in it and in an eager step), `cost` (start-up seconds and
memory of 19 and of 64 buckets), `gate` (buckets 32 and 160 alone, with and without the limit of padding), `boundary`
(160 against 161 tokens, 8 against 9 prompts), `fit` (for some lengths the bucket whose graph takes least time: how fast
matrix products are does not only rise with their rows; then first tokens with these buckets alone).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.gpu.budget import Budget, add_budget
from bench.gpu.engine_step import first_token, greedy
from bench.gpu.shapes import SHAPES, write_folder
from engine.config import EngineConfig
from engine.core import EngineCore, Wakeup
from engine.graph_settings import DEFAULT_BUCKETS, PrefillGraphSettings
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.model_runner import ModelRunner
from engine.runner.prefill_graph.decision import Decision
from engine.runner.prefill_graph.runner import PrefillGraphRunner
from engine.startup import start_core
from rpc.graph_status import PrefillGraphStatus

BLOCK = 64
PROMPTS = (1, 8, 16, 32, 64, 88, 118, 128, 156, 160)
REQUESTS = (1, 2, 4, 8)
SPARSE = (32, 160)
FITTED = (16, 64, 128, 160)
GATE_PROMPTS = (8, 16, 24, 33, 64, 100, 128)


class Engine:
    """An engine whose graphs can be put aside and captured anew."""

    def __init__(self, folder: Path, load_format: str, backend: str) -> None:
        settings = PrefillGraphSettings(enabled=True, strict=True)
        config = EngineConfig(
            role="prefill",
            model=str(folder),
            dtype="bfloat16",
            load_format=load_format,
            attention_backend=backend,
            device="cuda",
            block_size=BLOCK,
            num_kv_blocks=512,
            max_model_len=2048,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            prefill_graph=settings,
        )
        self.settings = settings
        self._wakeup = Wakeup()
        self.core: EngineCore
        self.core, self.ready = start_core(config, self._wakeup)
        runner = self.core.runner
        assert isinstance(runner, ModelRunner) and runner.device_steps is not None
        self.runner = runner
        self.steps = runner.device_steps
        gc.collect()
        gc.freeze()

    @property
    def graphs(self) -> PrefillGraphRunner:
        assert self.steps.prefill_graphs is not None
        return self.steps.prefill_graphs

    @contextmanager
    def arm(self, on: bool) -> Iterator[None]:
        """With `on` the graphs are used, else not."""
        graphs = self.steps.prefill_graphs
        if not on:
            self.steps.prefill_graphs = None
            self.steps.prefill_init = Decision(PrefillGraphStatus.NOT_REQUESTED)
        try:
            yield
        finally:
            self.steps.prefill_graphs = graphs

    def recapture(self, buckets: Sequence[int], settings: PrefillGraphSettings) -> float:
        """Captures other buckets in place of the present ones; seconds that it took."""
        self.graphs.release()
        gc.collect()
        torch.cuda.empty_cache()
        began = time.perf_counter()
        graphs, problem = self.runner.capture_prefill_graphs(self.core.kv, buckets, settings)
        if graphs is None:
            raise RuntimeError(problem)
        return time.perf_counter() - began

    def close(self) -> None:
        self.core.agent.close(2.0)
        self.runner.release()
        self._wakeup.close()


def measure(engine: Engine, tokens: int, requests: int, on: bool, count: int, expect: str = "replayed") -> list[float]:
    """Seconds of `count` batches of `requests` prompts of `tokens` each."""
    times = []
    with engine.arm(on):
        for _ in range(count):
            seconds, statuses = first_token(engine.core, tokens, requests)
            if on and statuses != {expect}:
                raise RuntimeError(f"{requests} x {tokens} tokens: {sorted(statuses)} in place of {expect}")
            times.append(seconds)
    return times


def summary(repetitions: list[list[float]]) -> dict[str, float]:
    """Milliseconds over all but the fastest and the slowest repetition."""
    kept = sorted(repetitions, key=statistics.median)
    kept = kept[1:-1] if len(kept) > 2 else kept
    times = sorted(seconds for repetition in kept for seconds in repetition)
    return {
        "p50_ms": statistics.median(times) * 1e3,
        "p99_ms": times[min(len(times) - 1, int(0.99 * len(times)))] * 1e3,
    }


def compare(
    engine: Engine, tokens: int, requests: int, repetitions: int, count: int, expect: str = "replayed"
) -> dict[str, Any]:
    """Both arms in turn."""
    for on in (False, True):
        measure(engine, tokens, requests, on, min(count, 20), expect)
    arms: dict[bool, list[list[float]]] = {False: [], True: []}
    for repetition in range(repetitions):
        for on in (False, True) if repetition % 2 else (True, False):
            arms[on].append(measure(engine, tokens, requests, on, count, expect))
    off, on_ = summary(arms[False]), summary(arms[True])
    found = {"tokens": tokens, "requests": requests, "off": off, "on": on_, "status": expect}
    print(
        f"first token of {requests} x {tokens:4} tokens   off {off['p50_ms']:7.3f} (p99 {off['p99_ms']:7.3f})   on "
        f"{on_['p50_ms']:7.3f} (p99 {on_['p99_ms']:7.3f}) ms   {on_['p50_ms'] / off['p50_ms']:.3f}   {expect}",
        flush=True,
    )
    return found


# -- one replay -------------------------------------------------------------------------------------------------


def rows_of(engine: Engine, lengths: Sequence[int]) -> list[BatchRow]:
    rows, block = [], 1
    for index, length in enumerate(lengths):
        blocks = list(range(block, block + -(-length // BLOCK)))
        block += len(blocks)
        tokens = [(7 * i + index) % engine.runner.config.vocab_size for i in range(length)]
        rows.append(BatchRow(str(index), tokens, 0, blocks, True, greedy()))
    return rows


def kernels(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Kernels and copies that the device is given, by time: name, times, microseconds together. With programmatic
    launches a kernel's time holds its wait for the one before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    totals: dict[str, tuple[int, float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, us = totals.get(event.name, (0, 0.0))
            totals[event.name] = (count + 1, us + event.device_time)
    return sorted(((name, *total) for name, total in totals.items()), key=lambda item: -item[2])


def launches(found: Sequence[tuple[str, int, float]]) -> int:
    return sum(count for _, count, _ in found)


@torch.inference_mode()
def replay_case(engine: Engine, bucket: int, rounds: int, listed: bool = False) -> dict[str, Any]:
    """A single prompt that fills the bucket but for one token, where it has more than four."""
    graphs = engine.graphs
    tokens = max(1, bucket - (bucket > 4))
    batch = StepBatch(rows_of(engine, [tokens]))
    device, prepare, launch = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        graphs.prepare_replay(batch, bucket)
        prepared = time.perf_counter()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launching = time.perf_counter()
        graphs.replay()
        launched = time.perf_counter()
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end))
        prepare.append((prepared - began) * 1e3)
        launch.append((launched - launching) * 1e3)
    execute = []
    for _ in range(rounds):
        began = time.perf_counter()
        engine.runner.execute(batch)
        execute.append((time.perf_counter() - began) * 1e3)
    with engine.arm(False):
        eager = launches(kernels(lambda: engine.runner.execute(batch)))
    replayed = kernels(lambda: engine.runner.execute(batch))
    found = {
        "bucket": bucket,
        "real_tokens": tokens,
        "padded_tokens": bucket - tokens,
        "device_ms": statistics.median(device),
        "prepare_ms": statistics.median(prepare),
        "launch_ms": statistics.median(launch),
        "execute_ms": statistics.median(execute),
        "launches": launches(replayed),
        "launches_eager": eager,
    }
    print(
        f"bucket {bucket:4}   device {found['device_ms']:6.3f}   prepare {found['prepare_ms']:6.3f}   launch "
        f"{found['launch_ms']:6.3f}   whole step {found['execute_ms']:6.3f} ms   {found['launches']} launches, "
        f"{eager} in an eager step",
        flush=True,
    )
    if listed:
        for name, count, us in replayed[:14]:
            print(f"    {us / 1e3:8.3f} ms {count:5} x {us / count:8.2f} us  {name[:90]}", flush=True)
    return found


# -- parts ------------------------------------------------------------------------------------------------------


def cost(engine: Engine) -> list[dict[str, Any]]:
    found = []
    many = sorted({1 + i * (DEFAULT_BUCKETS[-1] - 1) // 63 for i in range(64)})
    for sizes in (DEFAULT_BUCKETS, many):
        seconds = engine.recapture(sizes, engine.settings)
        found.append({"buckets": len(sizes), "seconds": seconds, "memory_bytes": engine.graphs.memory_bytes})
    for item in found:
        print(
            f"{item['buckets']:3} buckets   {item['seconds']:6.2f} s   {item['memory_bytes'] / 2**20:8.1f} MiB",
            flush=True,
        )
    engine.recapture(DEFAULT_BUCKETS, engine.settings)
    return found


@torch.inference_mode()
def seconds_in(engine: Engine, tokens: int, bucket: int, rounds: int = 15) -> float:
    """Median seconds from preparing a prompt's replay in `bucket` to its end on the device."""
    batch = StepBatch(rows_of(engine, [tokens]))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        engine.graphs.prepare_replay(batch, bucket)
        engine.graphs.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def fit(engine: Engine, lengths: Sequence[int], repetitions: int, count: int) -> dict[str, Any]:
    """Buckets up to a quarter of padding above each length, and no larger than the scratch blocks allow."""
    most = BLOCK * -(-DEFAULT_BUCKETS[-1] // BLOCK)
    choices = {
        tokens: sorted({tokens + more for more in (0, 1, 2, 4, 8, 12, 16, 24, 32) if more <= (tokens + more) / 4})
        for tokens in lengths
    }
    choices = {tokens: [size for size in sizes if size <= most] for tokens, sizes in choices.items()}
    engine.recapture(sorted({size for sizes in choices.values() for size in sizes}), engine.settings)
    measured: dict[int, dict[int, float]] = {}
    for tokens, sizes in choices.items():
        measured[tokens] = {size: seconds_in(engine, tokens, size) * 1e3 for size in sizes}
        shown = "  ".join(f"{size}: {ms:.3f}" for size, ms in measured[tokens].items())
        print(f"{tokens:4} tokens in a bucket of   {shown} ms", flush=True)
    best = sorted({min(found, key=lambda size: found[size]) for found in measured.values()})
    engine.recapture(best, engine.settings)
    print(f"first tokens with buckets {best}", flush=True)
    first = [compare(engine, tokens, 1, repetitions, count) for tokens in lengths]
    if 64 in lengths and 128 in lengths:
        first.append(compare(engine, 64, 2, repetitions, count))
    engine.recapture(DEFAULT_BUCKETS, engine.settings)
    return {"milliseconds": measured, "buckets": best, "first_token": first}


def gate(engine: Engine, repetitions: int, count: int, budget: Budget) -> list[dict[str, Any]]:
    found = []
    for ratio in (0.25, 1.0):
        settings = PrefillGraphSettings(enabled=True, max_padding_ratio=ratio)
        engine.recapture(SPARSE, settings)
        for tokens in budget.of(GATE_PROMPTS, f"prompts with a limit of {ratio}"):
            bucket = next(size for size in SPARSE if size >= tokens)
            fits = (bucket - tokens) / bucket <= ratio
            status = "replayed" if fits else "padding_ratio_exceeded"
            found.append({"ratio": ratio, **compare(engine, tokens, 1, repetitions, count, status)})
    engine.recapture(DEFAULT_BUCKETS, engine.settings)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--model", type=Path, help="a model folder in place of --shape")
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "auto"))
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--parts", nargs="+", default=["ttft", "replay", "boundary", "cost", "fit", "gate"])
    parser.add_argument("--tokens", nargs="+", type=int, default=PROMPTS)
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--count", type=int, default=200, help="batches per arm and repetition")
    parser.add_argument("--profile", nargs="*", type=int, default=(), help="buckets whose kernels are listed")
    parser.add_argument("--save", type=Path, help="JSON file of all figures")
    add_budget(parser)
    arguments = parser.parse_args()
    budget = Budget(arguments.budget)
    repetitions, count = arguments.repetitions, arguments.count
    with tempfile.TemporaryDirectory() as parent:
        folder = arguments.model or write_folder(arguments.shape, Path(parent))
        engine = Engine(folder, arguments.load_format, arguments.attention_backend)
        [captured] = [item for item in engine.ready.captured if item.kind == engine.graphs.role]
        print(
            f"{folder.name}: {engine.ready.attention_backend}, start {engine.ready.load_seconds:.1f} s, "
            f"{captured.count} graphs in {sum(captured.capture_seconds):.2f} s, "
            f"{captured.memory_bytes / 2**20:.0f} MiB, {engine.core.kv.ledgers()[0].reserved - 1} scratch blocks",
            flush=True,
        )
        report: dict[str, Any] = {"model": folder.name, "start_seconds": engine.ready.load_seconds}
        try:
            if "boundary" in arguments.parts:
                above = ("input_tokens_exceed_capture_limit", "request_capacity_exceeded")
                cases = [(160, 1, "replayed"), (161, 1, above[0]), (16, 8, "replayed"), (16, 9, above[1])]
                report["boundary"] = [
                    compare(engine, tokens, requests, repetitions, count, status)
                    for tokens, requests, status in budget.of(cases, "cases of the boundary")
                ]
            if "replay" in arguments.parts:
                report["replay"] = [
                    replay_case(engine, bucket, 30, bucket in arguments.profile)
                    for bucket in budget.of(DEFAULT_BUCKETS, "buckets")
                ]
            if "ttft" in arguments.parts:
                pairs = [
                    (tokens, requests)
                    for requests in arguments.requests
                    for tokens in arguments.tokens
                    if tokens * requests <= DEFAULT_BUCKETS[-1]
                ]
                report["ttft"] = [
                    compare(engine, tokens, requests, repetitions, count)
                    for tokens, requests in budget.of(pairs, "first tokens")
                ]
            rest: dict[str, Callable[[], Any]] = {
                "cost": lambda: cost(engine),
                "fit": lambda: fit(engine, FITTED, repetitions, count),
                "gate": lambda: gate(engine, repetitions, count, budget),
            }
            asked = [name for name in rest if name in arguments.parts]
            for name in budget.of(asked, "parts"):
                report[name] = rest[name]()
        finally:
            engine.close()
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
