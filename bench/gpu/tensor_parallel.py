"""One model on one GPU and shared out over several: sums between the ranks, decode steps, prompts, beside their floors.

    python -m bench.gpu.tensor_parallel --save tensor_parallel.json
    python -m bench.gpu.tensor_parallel --ranks 2 --shapes qwen3-8b --budget 150

An engine per shape and number of ranks, one after the other, each with processes of its own that start and serve as a
server's do. Weights are random, made on the devices: those of N ranks are the shards of those of one. The KV that
decode steps read is random, and other on every rank; the tokens that are compared come from prompts that the engine
computes.

  sum      one sum over ranks inside a graph, by each path, and the path that the engine takes
  decode   `device`: one replay of the graph where replays follow each other; `execute`: what the core waits for, from
           the order to the other ranks to the tokens on the host; `apart`: its moves, in microseconds, and how much
           later than rank 0 the last rank has the order, and is through with its launch
  prompt   from an idle engine's `add` to the first token
  steps    the wall clock of the core's steps while requests decode: scheduling, execution, their news

The floor of N ranks: a rank's weights read or multiplied, its KV read, at the rates that one device has in this run,
and all sums of the step by the fastest path. Tokens of N ranks may differ from those of one where two logits are as
good as equal; that sharing gives the model's numbers is shown by tests/gpu/test_sharded_model.py.

Without CUDA, or with `--device cpu`, a tiny model runs over gloo: that shows that the measurement runs, nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.budget import Budget, add_budget
from bench.gpu.engine_step import BLOCK, decode_batch, kv_bytes_per_token, prefill_floor, weights_per_step
from bench.gpu.ranks import ROOT, RankedEngine, chosen_path, sum_paths
from bench.gpu.shapes import SHAPES, write_folder
from bench.gpu.timing import matrix_rate, read_bandwidth
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import AddRequest, FrontMessage, RunMode, SamplingParams
from engine.parallel.all_reduce_paths import NCCL, SIZES

ENGINE_S = 300.0  # for one engine, from its start to its last figure
REPLAYS = 12
APART = 8
EXECUTES = 12
NEW_TOKENS = 24
PROMPT_ROUNDS = 3
COMPARED = 4  # answers of each load of the scheduler


@dataclass(frozen=True)
class Cases:
    decode: tuple[tuple[int, int], ...]  # rows, context
    prompts: tuple[int, ...]  # tokens
    steps: tuple[tuple[int, int], ...]  # requests, prompt tokens of each
    settings: dict[str, Any]
    changes: dict[str, int]  # of the shape


CASES = {
    "cuda": Cases(
        decode=((1, 1025), (64, 8192), (256, 1024)),
        prompts=(2048, 8192),
        steps=((1, 1025), (64, 64), (256, 64)),
        settings={"dtype": "bfloat16", "max_model_len": 40960, "max_num_seqs": 256, "max_num_batched_tokens": 8192},
        changes={},
    ),
    "cpu": Cases(
        decode=((1, 33), (4, 64), (8, 32)),
        prompts=(64, 128),
        steps=((1, 33), (8, 16)),
        settings={"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256},
        changes={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 512,
        },
    ),
}  # fmt: skip


# -- one engine --------------------------------------------------------------------------------------------------


class Measurement:
    """The figures of one engine, saved as they come."""

    def __init__(self, shape: str, cases: Cases, budget: Budget, found: Path) -> None:
        self.shape, self.cases, self.budget, self._found = shape, cases, budget, found
        self.report: dict[str, Any] = {"sums": [], "decode": [], "prompts": [], "steps": [], "answers": []}
        self.rates: tuple[float, float] | None = None  # bytes and FLOPs per second of one device
        self._best: dict[int, float] = {}  # seconds of a sum by bytes

    def run(self, engine: RankedEngine) -> None:
        self.engine = engine
        engine.together("fill")
        hidden = engine.runner.config.hidden_size
        sizes = {4 * hidden * rows for rows in (*(rows for rows, _ in self.cases.decode), *self.cases.prompts)}
        if engine.size > 1:
            for size in self.budget.of(sorted(sizes.union(SIZES)), "sizes of sums"):
                self.add("sums", self.sums(size))
        for rows, context in self.budget.of(self.cases.decode, "decode steps"):
            self.add("decode", self.decode(rows, context))
        for tokens in self.budget.of(self.cases.prompts, "prompts"):
            self.add("prompts", self.prompt(tokens))
        for requests, tokens in self.budget.of(self.cases.steps, "loads of the scheduler"):
            self.add("steps", self.steps(requests, tokens))

    def add(self, part: str, figures: dict[str, Any]) -> None:
        self.report[part].append(figures)
        print(f"  {part:7}", *(f"{name} {_text(value)}" for name, value in figures.items()), flush=True)
        self.save()

    def save(self) -> None:
        self._found.write_text(json.dumps(self.report, indent=1))

    def sums(self, size: int) -> dict[str, Any]:
        engine = self.engine
        found: dict[str, Any] = {"bytes": size}
        for path in sum_paths(engine.runner):
            if path in (NCCL, "gloo") or size <= SIZES[-1]:
                [seconds] = engine.together(f"sum {path} {size}", 10)
                found[f"{path}_us"] = seconds * 1e6
        self._best[size] = min(value for name, value in found.items() if name != "bytes") / 1e6
        return {**found, "taken": chosen_path(engine.runner, size)}

    def floors(self, rows: int, kv_tokens: int, prompt: int = 0) -> dict[str, Any]:
        """Milliseconds of a step of so many rows, or of one prompt, and of the sums in it."""
        if self.rates is None:
            return {}
        bandwidth, rate = self.rates
        shape, ranks = SHAPES[self.shape], self.engine.size
        if prompt:
            own = prefill_floor(self.shape, 1, prompt, bandwidth, rate) / ranks
        else:
            weights = weights_per_step(self.shape) / ranks
            kv = kv_tokens * kv_bytes_per_token(self.shape) / min(ranks, shape["num_key_value_heads"])
            own = max(2 * weights / bandwidth, 2 * weights * rows / rate) + kv / bandwidth
        if ranks == 1:
            return {"floor_ms": own * 1e3}
        best = self._best.get(4 * shape["hidden_size"] * (prompt or rows))
        if best is None:
            return {}
        sums = (2 * shape["num_hidden_layers"] + 1) * best  # attention, MLP, and the embedding
        return {"floor_ms": (own + sums) * 1e3, "of_it_sums_ms": sums * 1e3}

    def decode(self, rows: int, context: int) -> dict[str, Any]:
        engine = self.engine
        batch = decode_batch(rows, context, engine.runner.num_blocks, engine.runner.config.vocab_size)
        batch.kind = "decode"
        walls = []
        for _ in range(EXECUTES + 1):
            began = time.perf_counter()
            result = engine.core.runner.execute(batch)
            walls.append(time.perf_counter() - began)
            for row, outcome in zip(batch.rows, result.rows, strict=True):
                if outcome.failure is not None:
                    raise outcome.failure
                row.start += 1
                row.token_ids = [outcome.token_id or 0]
        found: dict[str, Any] = {"rows": rows, "context": context, **self.floors(rows, rows * context)}
        if result.decode_status == "replayed":
            device = engine.together("replay", REPLAYS)
            found["device_ms"] = statistics.median(device) * 1e3
            found["device_ms_range"] = [min(device) * 1e3, max(device) * 1e3]
            found["apart_us"] = {k: v * 1e6 for k, v in engine.stepped_apart(batch, APART).items()}
        return {**found, "execute_ms": statistics.median(walls[1:]) * 1e3, "graph": result.decode_status}

    def prompt(self, tokens: int) -> dict[str, Any]:
        core, vocabulary = self.engine.core, self.engine.runner.config.vocab_size
        found = [generate(core, random_prompts(1, tokens, vocabulary, n), 1)[0] for n in range(PROMPT_ROUNDS + 1)]
        times = [seconds * 1e3 for seconds in found[1:]]  # the first one may compile
        figures = {"tokens": tokens, **self.floors(1, 0, tokens)}
        return {**figures, "ms": statistics.median(times), "ms_range": [min(times), max(times)]}

    def steps(self, requests: int, tokens: int) -> dict[str, Any]:
        prompts = random_prompts(requests, tokens, self.engine.runner.config.vocab_size, requests)
        _, walls, answers = generate(self.engine.core, prompts, NEW_TOKENS)
        self.report["answers"] += answers[:COMPARED]
        median = statistics.median(walls[1:])
        return {"requests": requests, "prompt_tokens": tokens, "decode_step_ms": median * 1e3}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_text(item)}" for name, item in value.items()) + ")"
    if isinstance(value, list):
        return f"({'–'.join(_text(item) for item in value)})"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def random_prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count, tokens), generator=generator).tolist()  # type: ignore[no-any-return]


def generate(core: EngineCore, prompts: Sequence[Sequence[int]], count: int) -> tuple[float, list[float], list[Any]]:
    """Seconds from `add` until every prompt has its first token, of each step from then on, and all greedy tokens."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    keys = [f"{time.monotonic_ns()}-{index}" for index in range(len(prompts))]
    tokens: dict[str, list[int]] = {key: [] for key in keys}
    left, first, walls = set(keys), 0.0, []
    began = time.perf_counter()
    adds = [AddRequest(key, RunMode.LOCAL, list(prompt), params) for key, prompt in zip(keys, prompts, strict=True)]
    core.handle(FrontMessage(adds=adds))
    while left:
        begun = time.perf_counter()
        core.step()
        message = core.take_message()
        ended = time.perf_counter()
        if first:
            walls.append(ended - begun)
        for output in message.outputs if message is not None else ():
            if output.error is not None:
                raise RuntimeError(output.error)
            tokens[output.request_key] += [token.token_id for token in output.tokens]
            if output.last:
                left.discard(output.request_key)
        if not first and all(tokens.values()):
            first = ended - began
    return first, walls, list(tokens.values())


def measure(options: argparse.Namespace) -> None:
    """The process of one engine's rank 0."""
    [shape], [ranks] = options.shapes, options.ranks
    cases = CASES[options.device]
    measurement = Measurement(shape, cases, Budget(options.budget), options.save)
    if options.device == "cuda":
        measurement.rates = options.rates or (read_bandwidth(), matrix_rate())
        torch.cuda.empty_cache()
        measurement.report["bandwidth"], measurement.report["matrix_rate"] = measurement.rates
    else:
        torch.set_num_threads(1)
    blocks = 1 + max(rows * -(-(context + NEW_TOKENS) // BLOCK) for rows, context in cases.decode)
    with tempfile.TemporaryDirectory() as parent:
        config = EngineConfig(
            role="decode",
            model=str(write_folder(shape, Path(parent), **cases.changes)),
            tensor_parallel_size=ranks,
            load_format="dummy",
            attention_backend=options.attention_backend,
            device=options.device,
            threads=1 if options.device == "cpu" else 0,
            block_size=BLOCK,
            num_kv_blocks=max(blocks, 64),
            decode_capture_sizes=tuple(rows for rows, _ in cases.decode),
            enable_prefix_caching=False,
            log_level="warning",
            **cases.settings,
        )
        began = time.monotonic()
        with RankedEngine(config) as engine:
            started = time.monotonic() - began
            measurement.report["start_s"] = started
            backend = engine.runner.attention_backend
            print(f"{shape}, {ranks} ranks: attention {backend}, started in {started:.1f} s", flush=True)
            measurement.save()
            measurement.run(engine)


# -- all of them -------------------------------------------------------------------------------------------------


def compared(engines: dict[str, Any]) -> list[str]:
    """Lines that set several ranks beside one. engines: of one shape, reports by number of ranks."""
    lines, alone = [], engines.get("1", {})
    for ranks, report in engines.items():
        for part, names, figure in (
            ("decode", ("rows", "context"), "device_ms"),
            ("decode", ("rows", "context"), "execute_ms"),
            ("prompts", ("tokens",), "ms"),
            ("steps", ("requests", "prompt_tokens"), "decode_step_ms"),
        ):
            for one, several in zip(alone.get(part, ()), report.get(part, ()), strict=False):
                if ranks != "1" and figure in one and figure in several:
                    case = " x ".join(str(several[name]) for name in names)
                    times = f"{one[figure]:.2f} ms alone, {several[figure]:.2f} ms with {ranks} ranks"
                    lines.append(f"{part} {case}, {figure}: {times}, {one[figure] / several[figure]:.2f} times as fast")
        answers = list(zip(alone.get("answers", ()), report.get("answers", ()), strict=False))
        if ranks != "1" and answers:
            same = [_common(a, b) for a, b in answers]
            lines.append(f"{ranks} ranks: of {NEW_TOKENS} greedy tokens the first {same} are those of one rank")
    return lines


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def run_engine(
    options: argparse.Namespace, shape: str, ranks: int, rates: Sequence[float], left_s: float | None
) -> dict[str, Any]:
    """Its figures, as far as it came; `failed` says why no further. rates: as another one measured them."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        arguments = ["--engine", "--shapes", shape, "--ranks", str(ranks), "--device", options.device]
        arguments += ["--attention-backend", options.attention_backend, "--save", str(found)]
        if rates:
            arguments += ["--rates", *map(str, rates)]
        if left_s is not None:
            arguments += ["--budget", str(left_s)]
        environment = {**os.environ, "GOMP_SPINCOUNT": "1000"}  # as a server's engines have it
        if options.device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        try:
            command = [sys.executable, "-m", "bench.gpu.tensor_parallel", *arguments]
            ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=ENGINE_S, check=False)
            failed = f"status {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            failed = f"cut off after {ENGINE_S:g} s"
        report: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    if failed:
        report["failed"] = failed
        print(f"{shape}, {ranks} ranks: {failed}", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b", "qwen3-8b"], choices=sorted(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, help="default: all devices, and 1")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    # Not auto: every rank would compile FlashInfer's kernels first
    parser.add_argument("--attention-backend", help="default: triton on GPUs")
    add_budget(parser)
    parser.add_argument("--save", type=Path, help="JSON file of all figures")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)  # one engine in this process
    parser.add_argument("--rates", nargs=2, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.attention_backend = options.attention_backend or ("triton" if options.device == "cuda" else "auto")
    if options.engine:
        measure(options)
        return 0
    devices = torch.cuda.device_count() if options.device == "cuda" else 2
    report: dict[str, Any] = {"device": options.device, "devices": devices, "engines": {}}
    if options.device == "cpu":
        print("no figures to go by: a tiny model on the CPU", flush=True)
        report["device_name"] = "cpu"
    else:
        report["device_name"] = torch.cuda.get_device_name()
    ranks = sorted(set(options.ranks or (1, devices)), reverse=True)
    failed = False
    if max(ranks) < 2 or max(ranks) > devices:
        print(f"{devices} device(s): nothing to share out over {max(ranks)} ranks", flush=True)
    else:
        began, budget = time.monotonic(), Budget(options.budget)
        rates: list[float] = []
        for shape, count in budget.of([(shape, count) for shape in options.shapes for count in ranks], "engines"):
            left_s = None if options.budget is None else max(0.0, options.budget - (time.monotonic() - began))
            found = run_engine(options, shape, count, rates, left_s)
            rates = rates or [found[name] for name in ("bandwidth", "matrix_rate") if name in found]
            failed |= "failed" in found
            report["engines"].setdefault(shape, {})[str(count)] = found
            if options.save:
                options.save.write_text(json.dumps(report, indent=1))
        for shape, engines in report["engines"].items():
            print(f"{shape}:", *compared(engines), sep="\n  ", flush=True)
    if options.save:
        options.save.write_text(json.dumps(report, indent=1))
    return int(failed)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what torch's process groups leave open would hold this up
