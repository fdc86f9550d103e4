"""Engine steps on a GPU: decode from graph launch to sampled tokens, long prompts, and short ones through the engine.

    python -m bench.gpu.engine_step --shape llama-3.1-8b --save step.json

Weights are random, made on the device. Decode reads synthetic KV: rows of the wanted length over a pool of random
numbers, no two rows share a block. Every figure stands beside its floor: bytes of weights and KV over the read
bandwidth that this run measures, or FLOPs over the measured matrix rate, whichever takes longer (their sum for wide
decode batches).

Parts: `decode` (device time of a replay by events; beside it the wall clock of ModelRunner.execute and of the launch
alone), `prefill` (ModelRunner.execute, chunks of --max-tokens), `first` (EngineCore from add to the first token: the
engine is idle before, prefix caching is off; with prefill graphs and without), `idle` (the same of long prompts, after
some seconds of rest and one after the other: the GPU's power limit makes a difference between them).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import SHAPES, products, write_folder
from bench.gpu.timing import matrix_rate, read_bandwidth
from engine.attention.measured_backend import ChosenPart
from engine.config import EngineConfig
from engine.core import EngineCore, Wakeup
from engine.graph_settings import PrefillGraphSettings
from engine.messages import AddRequest, EngineReady, FrontMessage, RunMode, SamplingParams
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.decode_graph import DecodeGraph
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.sampling import SamplingRow
from engine.startup import start_core

BLOCK = 64
DECODE_CASES = ((1, 1025), (64, 8192), (16, 32767), (256, 1024))
PREFILL_CASES = ((1, 1024), (1, 8192), (16, 2048))
FIRST_TOKEN_PROMPTS = (16, 64, 160)
LONG_PROMPTS = ((1, 8192), (16, 2048))  # prompts, tokens
IDLE_S = 2.0
_STEPS = 24
_LONG_PROMPT_ROUNDS = 5
_FIRST_TOKEN_ROUNDS = 30


# -- floors ----------------------------------------------------------------------------------------------------


def weights_per_step(shape: str) -> int:
    """Weights of all layers and of the head, as numbers."""
    parts = products(shape)
    layers = SHAPES[shape]["num_hidden_layers"]
    return sum(n * k * (1 if name == "head" else layers) for name, (n, k, _) in parts.items())


def kv_bytes_per_token(shape: str) -> int:
    s = SHAPES[shape]
    return int(s["num_hidden_layers"] * 2 * s["num_key_value_heads"] * s["head_dim"] * 2)


def decode_floor(shape: str, rows: int, context: int, bandwidth: float, rate: float) -> float:
    """Seconds: weights read once or multiplied, whichever takes longer, and KV read once."""
    weights = weights_per_step(shape)
    products_s = max(weights * 2 / bandwidth, 2 * weights * rows / rate)
    return products_s + rows * context * kv_bytes_per_token(shape) / bandwidth


def prefill_floor(shape: str, rows: int, tokens: int, bandwidth: float, rate: float) -> float:
    """Seconds: products of the layers for every token, of the head for the last ones, and causal attention's FLOPs."""
    s = SHAPES[shape]
    head = s["vocab_size"] * s["hidden_size"]
    layers = weights_per_step(shape) - head
    attention = 2 * tokens**2 * s["num_attention_heads"] * s["head_dim"] * s["num_hidden_layers"]  # 4 / 2: causal
    flops = 2 * layers * tokens * rows + 2 * head * rows + attention * rows
    return max(flops / rate, (layers + head) * 2 / bandwidth)


# -- a runner and its batches ----------------------------------------------------------------------------------


def new_runner(folder: Path, num_blocks: int, max_tokens: int, backend: str, max_model_len: int) -> ModelRunner:
    runner = ModelRunner(
        folder,
        "bfloat16",
        BLOCK,
        max_model_len,
        "dummy",
        backend,
        "cuda",
        max_num_seqs=256,
        max_num_batched_tokens=max_tokens,
    )
    runner.init_kv(num_blocks)
    generator = torch.Generator("cuda").manual_seed(7)
    for pool in runner.kv_layers[FULL_GROUP]:
        pool.normal_(generator=generator)
    return runner


def greedy() -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True), 0, (), (), ())


def decode_batch(rows: int, context: int, num_blocks: int, vocab: int) -> StepBatch:
    """Rows whose token is the `context`-th one, over blocks in random order."""
    per_row = -(-(context + _STEPS) // BLOCK)
    if rows * per_row >= num_blocks:
        raise ValueError(f"{rows} rows of {context} tokens need {rows * per_row + 1} blocks, there are {num_blocks}")
    order = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3))).tolist()
    return StepBatch(
        [
            BatchRow(
                str(row), [row * 37 % vocab], context - 1, order[row * per_row : (row + 1) * per_row], True, greedy()
            )
            for row in range(rows)
        ]
    )


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


# -- decode ----------------------------------------------------------------------------------------------------


def decode_case(runner: ModelRunner, rows: int, context: int) -> dict[str, Any]:
    """Milliseconds: `device` from the launch of the graph to the sampled tokens, `execute` and `launch` on the host."""
    steps = runner.device_steps
    assert steps is not None and steps.decode_graphs is not None
    batch = decode_batch(rows, context, runner.num_blocks, runner.config.vocab_size)
    result = runner.execute(batch)
    if result.decode_status != "replayed" or any(row.failure for row in result.rows):
        raise RuntimeError(f"{rows} x {context}: {result.decode_status}, {result.rows[0].failure}")
    graphs, graph = steps.decode_graphs, steps.decode_graphs.latest
    assert graph is not None
    device = []
    for _ in range(_STEPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graphs.replay(graph)
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end))
    walls, launches = [], []
    gc.collect()
    gc.disable()
    for _ in range(_STEPS - 1):
        for row, outcome in zip(batch.rows, result.rows, strict=True):
            row.start += 1
            row.token_ids = [outcome.token_id or 0]
        begun = time.perf_counter()
        with torch.inference_mode():
            flight = steps.launch(batch, None)
            launches.append(time.perf_counter() - begun)
            steps.finish(batch, flight)
        walls.append(time.perf_counter() - begun)
    gc.enable()
    return {
        "rows": rows,
        "context": context,
        "graph_rows": result.decode_graph_rows,
        "attention": attention_of(graph),
        "device_ms": statistics.median(device),
        "device_ms_range": [min(device), max(device)],
        "execute_ms": statistics.median(walls) * 1e3,
        "launch_ms": statistics.median(launches) * 1e3,
    }


def attention_of(graph: DecodeGraph) -> str:
    """Name of the backend that the graph holds, where there was a choice."""
    part = graph.plan.decode
    return part.backend.name if isinstance(part, ChosenPart) else ""


def kernels_of(title: str, run: Callable[[], object], most: int = 14) -> list[str]:
    """The kernels of one call by time. Where kernels overlap, as dependent launches do, their times add up to more."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    totals: dict[str, tuple[float, int]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            microseconds, count = totals.get(event.name, (0.0, 0))
            totals[event.name] = (microseconds + event.device_time, count + 1)
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])
    launches = sum(count for _, count in totals.values())
    whole = sum(us for us, _ in totals.values())
    return [f"{title}: {launches} launches, {whole / 1e3:.3f} ms in kernels"] + [
        f"    {us / 1e3:8.3f} ms {count:5} x {us / count:8.2f} us  {name[:80]}" for name, (us, count) in ranked[:most]
    ]


def profile_steps(runner: ModelRunner, parts: list[str]) -> None:
    """Prints the kernels of each decode case and of the longest prompt. Last of all measurements, since a profiler
    slows every later launch."""
    steps = runner.device_steps
    assert steps is not None
    if "decode" in parts and steps.decode_graphs is not None:
        for rows, context in DECODE_CASES:
            batch = decode_batch(rows, context, runner.num_blocks, runner.config.vocab_size)
            runner.execute(batch)
            graphs, graph = steps.decode_graphs, steps.decode_graphs.latest
            print(
                *kernels_of(f"decode {rows} x {context}", lambda g=graphs, n=graph: g.replay(n)), sep="\n", flush=True
            )
    if "prefill" in parts:
        tokens = min(8192, runner.limits.max_tokens)
        table = list(range(1, 1 + -(-tokens // BLOCK)))
        batch = StepBatch([BatchRow("p", [token % 1000 for token in range(tokens)], 0, table, True, greedy())])
        print(*kernels_of(f"prefill 1 x {tokens}", lambda: runner.execute(batch)), sep="\n", flush=True)


# -- prompts ---------------------------------------------------------------------------------------------------


def prefill_case(runner: ModelRunner, rows: int, tokens: int, rounds: int = 3) -> dict[str, Any]:
    """Milliseconds until the first tokens of all prompts, steps of at most the runner's tokens, whole prompts."""
    most = runner.limits.max_tokens
    per_row = -(-tokens // BLOCK)
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, runner.config.vocab_size, (rows, tokens), generator=generator).tolist()
    per_step = max(1, most // tokens)
    batches = []
    for first in range(0, rows, per_step):
        batches.append(
            StepBatch(
                [
                    BatchRow(str(r), prompts[r], 0, list(range(1 + r * per_row, 1 + (r + 1) * per_row)), True, greedy())
                    for r in range(first, min(first + per_step, rows))
                ]
            )
        )

    def run() -> None:
        for batch in batches:
            for outcome in runner.execute(batch).rows:
                assert outcome.failure is None, outcome.failure

    run()
    times = [timed(run) for _ in range(rounds)]
    return {
        "rows": rows,
        "tokens": tokens,
        "ms": statistics.median(times) * 1e3,
        "ms_range": [min(times) * 1e3, max(times) * 1e3],
    }


def first_token(core: EngineCore, tokens: int, prompts: int = 1) -> tuple[float, set[str]]:
    """Seconds from `handle` of the requests to the message with the first token of all, and their graph statuses."""
    generator = torch.Generator().manual_seed(time.monotonic_ns() % 2**31)
    keys = [f"{time.monotonic_ns()}-{i}" for i in range(prompts)]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    adds = [
        AddRequest(key, RunMode.LOCAL, torch.randint(3, 500, (tokens,), generator=generator).tolist(), params)
        for key in keys
    ]
    missing, statuses = set(keys), set()
    begin = time.perf_counter()
    core.handle(FrontMessage(adds=adds))
    ended = begin
    while missing:
        core.step()
        message = core.take_message()
        for output in message.outputs if message is not None else ():
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.prefill is not None:
                statuses.add(output.prefill.cuda_graph_status)
            if output.tokens:
                missing.discard(output.request_key)
                ended = time.perf_counter()
    while core.scheduler.open:
        core.step()
        core.take_message()
    return ended - begin, statuses


@contextlib.contextmanager
def engine(folder: Path, backend: str, **options: Any) -> Iterator[tuple[EngineCore, EngineReady]]:
    """An engine of dummy weights. Its memory is given back once nobody has it any more."""
    config = EngineConfig(
        role="prefill",
        model=str(folder),
        dtype="bfloat16",
        load_format="dummy",
        attention_backend=backend,
        device="cuda",
        block_size=BLOCK,
        max_model_len=8192 + BLOCK,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        **options,
    )
    wakeup = Wakeup()
    core, ready = start_core(config, wakeup)
    gc.collect()
    gc.freeze()
    try:
        yield core, ready
    finally:
        core.agent.close(2.0)
        wakeup.close()
        if isinstance(core.runner, ModelRunner):
            core.runner.release()
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


def long_prompt_cases(folder: Path, backend: str) -> list[dict[str, Any]]:
    """From an engine that was idle for IDLE_S before each, and one after the other, which is what heats the GPU."""
    results = []
    with engine(folder, backend, num_kv_blocks=640, enable_cuda_graph=False) as (core, _):
        for prompts, tokens in LONG_PROMPTS:
            first_token(core, tokens, prompts)
            for idle_s in (IDLE_S, 0.0):
                times = []
                for _ in range(_LONG_PROMPT_ROUNDS):
                    time.sleep(idle_s)
                    times.append(first_token(core, tokens, prompts)[0])
                results.append(
                    {
                        "prompts": prompts,
                        "tokens": tokens,
                        "idle_s": idle_s,
                        "ms": statistics.median(times) * 1e3,
                        "ms_range": [min(times) * 1e3, max(times) * 1e3],
                    }
                )
    return results


def first_token_cases(folder: Path, backend: str) -> list[dict[str, Any]]:
    results = []
    for graphs in (False, True):
        settings = PrefillGraphSettings(enabled=graphs)
        with engine(folder, backend, num_kv_blocks=512, prefill_graph=settings) as (core, ready):
            for tokens, prompts in (*((tokens, 1) for tokens in FIRST_TOKEN_PROMPTS), (64, 2)):
                for _ in range(5):
                    first_token(core, tokens, prompts)
                found = [first_token(core, tokens, prompts) for _ in range(_FIRST_TOKEN_ROUNDS)]
                times = sorted(seconds for seconds, _ in found)
                results.append(
                    {
                        "graphs": graphs,
                        "tokens": tokens,
                        "prompts": prompts,
                        "ms": statistics.median(times) * 1e3,
                        "ms_p99": times[-1] * 1e3,
                        "statuses": sorted(set().union(*(statuses for _, statuses in found))),
                        "load_seconds": ready.load_seconds,
                    }
                )
    return results


# -- report ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--parts", nargs="+", default=["decode", "prefill", "first"])
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--profile", action="store_true", help="list the kernels of steps")
    parser.add_argument("--save", type=Path, help="JSON file of all figures")
    arguments = parser.parse_args()
    bandwidth, rate = read_bandwidth(), matrix_rate()
    torch.cuda.empty_cache()
    print(f"read {bandwidth / 1e12:.3f} TB/s, bfloat16 products {rate / 1e12:.0f} TFLOP/s", flush=True)
    report: dict[str, Any] = {"shape": arguments.shape, "bandwidth": bandwidth, "matrix_rate": rate}
    shape = arguments.shape
    with tempfile.TemporaryDirectory() as parent:
        folder = write_folder(shape, Path(parent))
        if "decode" in arguments.parts or "prefill" in arguments.parts:
            blocks = 1 + max(rows * -(-(context + _STEPS) // BLOCK) for rows, context in DECODE_CASES)
            runner = new_runner(folder, blocks, arguments.max_tokens, arguments.attention_backend, 40960)
            print(f"{shape}: attention backend {runner.attention_backend}, {blocks} blocks", flush=True)
        if "decode" in arguments.parts:
            captured = runner.capture_decode_graphs(sorted({rows for rows, _ in DECODE_CASES}))
            print(f"captured {captured}", flush=True)
            report["decode"] = []
            for rows, context in DECODE_CASES:
                found = decode_case(runner, rows, context)
                found["floor_ms"] = decode_floor(shape, rows, context, bandwidth, rate) * 1e3
                report["decode"].append(found)
                print(
                    f"decode {rows:4} x {context:6}  floor {found['floor_ms']:7.3f}  device {found['device_ms']:7.3f}",
                    f"({found['device_ms'] / found['floor_ms']:.3f})  execute {found['execute_ms']:7.3f}",
                    f"launch {found['launch_ms']:6.3f} ms {found['attention']}",
                    flush=True,
                )
        if "prefill" in arguments.parts:
            report["prefill"] = []
            for rows, tokens in PREFILL_CASES:
                found = prefill_case(runner, rows, tokens)
                found["floor_ms"] = prefill_floor(shape, rows, tokens, bandwidth, rate) * 1e3
                report["prefill"].append(found)
                print(
                    f"prefill {rows:3} x {tokens:5}  floor {found['floor_ms']:7.1f}  engine {found['ms']:7.1f} ms",
                    f"({found['ms'] / found['floor_ms']:.3f})",
                    flush=True,
                )
        if arguments.profile and ("decode" in arguments.parts or "prefill" in arguments.parts):
            profile_steps(runner, arguments.parts)
        if "decode" in arguments.parts or "prefill" in arguments.parts:
            runner.release()
            del runner
            gc.collect()
            torch.cuda.empty_cache()
        if "first" in arguments.parts:
            report["first"] = first_token_cases(folder, arguments.attention_backend)
            for found in report["first"]:
                print(
                    f"first token of {found['prompts']} x {found['tokens']:4}  graphs {found['graphs']!s:5}",
                    f"{found['ms']:7.3f} ms (longest {found['ms_p99']:7.3f})  {','.join(found['statuses'])}",
                    flush=True,
                )
        if "idle" in arguments.parts:
            report["idle"] = long_prompt_cases(folder, arguments.attention_backend)
            for found in report["idle"]:
                low, high = found["ms_range"]
                print(
                    f"first tokens of {found['prompts']:2} x {found['tokens']:4} after {found['idle_s']:.0f} s of rest",
                    f"{found['ms']:7.1f} ms ({low:.1f}–{high:.1f})",
                    flush=True,
                )
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
