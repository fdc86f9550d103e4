"""Sampling kernels: device time of a whole step's sampling, bytes, and how far from the read bandwidth.

    python -m bench.gpu.sampling                # the table
    python -m bench.gpu.sampling --tune         # also other blocks and programs than the kernels choose

The floor of every row is one reading of the logits, so "bytes" are those, whatever a kernel reads again. Launches
follow one another in a CUDA graph. Up to 64 rows the logits stay in the L2 cache, as a decode step finds them there,
written by the product with the head just before; 256 rows rotate through more memory than it holds.

Logits are normal numbers of three kinds: `flat` (spread 1, as random weights give), `wide` (spread 3) and `peaked`
(spread 2 and a few hundred tokens far above, nearest to a trained model). Beside them stand PyTorch's argmax and a
softmax-and-sort sampler made of PyTorch's operations. The rows of `host` are wall time of Python on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from bench.gpu.budget import Budget, add_budget
from bench.gpu.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from engine.messages import SamplingParams
from engine.sampling import SamplingRow
from engine.sampling.device import DeviceSampler
from kernels import sampling

LLAMA, QWEN = 128_256, 151_936
ROWS = (1, 16, 64, 256)
_CACHED_ROWS = 64

KINDS: dict[str, dict[str, object]] = {
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "greedy, logprobs": {"temperature": 0.0, "logprobs": 0},
    "greedy, 20 logprobs": {"temperature": 0.0, "logprobs": 20},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.1},
    "top_p 0.95, penalised, 5 logprobs": {"top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 5},
}


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    shape: str
    median_us: float
    bytes: int  # of one reading of the logits
    gb_per_s: float


def _row(name: str, shape: str, moved: int, seconds: float) -> Row:
    return Row(name, shape, seconds * 1e6, moved, moved / seconds / 1e9)


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """float32 [rows, vocab] on the GPU."""
    logits = torch.randn(rows, vocab, device="cuda")
    if kind == "wide":
        logits *= 3
    elif kind == "peaked":
        logits *= 2
        logits += (torch.rand_like(logits) < 0.003) * (12 + 3 * torch.randn_like(logits))
    return logits


def rows_of(count: int, **params: object) -> list[SamplingRow]:
    """Requests with 1,000 prompt tokens and 200 generated ones."""
    prompt, output = list(range(1000)), list(range(500, 700))
    return [
        SamplingRow(SamplingParams(max_tokens=9999, seed=i, **params), i, prompt[:], output[:], [0])  # type: ignore[arg-type]
        for i in range(count)
    ]


def _sets(rows: int, vocab: int) -> int:
    return 1 if rows <= _CACHED_ROWS else copies_beyond_cache(rows * vocab * 4, 8)


def _graphed(run: Callable[[torch.Tensor], object], logits: list[torch.Tensor]) -> float:
    """Seconds of run(logits)."""
    calls = 2 * len(logits) if len(logits) > 1 else 20
    return seconds_per_call(lambda i: run(logits[i % len(logits)]), calls)


def greedy(sampler: DeviceSampler, vocab: int) -> Iterator[Row]:
    for rows in ROWS:
        logits = [logits_of("flat", rows, vocab) for _ in range(_sets(rows, vocab))]
        shape = f"{rows} x {vocab}"
        moved = rows * vocab * 4
        yield _row("greedy", shape, moved, _graphed(sampler.greedy, logits))
        narrow = [values.bfloat16() for values in logits]
        yield _row("greedy bf16", shape, moved // 2, _graphed(sampler.greedy, narrow))
        yield _row("PyTorch argmax", shape, moved, _graphed(lambda x: x.argmax(dim=1), logits))


def drawn(sampler: DeviceSampler, vocab: int, kinds: dict[str, dict[str, object]]) -> Iterator[Row]:
    """A whole step that is not plain, `largest` included."""
    for rows in ROWS:
        for shape_kind in ("peaked", "wide", "flat"):
            logits = [logits_of(shape_kind, rows, vocab) for _ in range(_sets(rows, vocab))]
            for name, params in kinds.items():
                if shape_kind != "peaked" and "top" not in name:
                    continue  # takes the same time for any logits
                sampler.stage(rows_of(rows, **params))
                seconds = _graphed(sampler.run, logits)
                yield _row(f"{name}, {shape_kind}", f"{rows} x {vocab}", rows * vocab * 4, seconds)


def pytorch_sampler(vocab: int) -> Iterator[Row]:
    """Softmax, sort, cumulative sum, threshold, Gumbel draw: top_p 0.95 by PyTorch's operations."""

    def run(x: torch.Tensor) -> torch.Tensor:
        ranked, order = torch.softmax(x, dim=-1).sort(dim=-1, descending=True)
        kept = torch.where(ranked.cumsum(dim=-1) - ranked < 0.95, ranked, 0.0)
        place = (kept / torch.empty_like(kept).exponential_()).argmax(dim=-1, keepdim=True)
        return order.gather(-1, place)

    for rows in ROWS:
        logits = [logits_of("peaked", rows, vocab) for _ in range(_sets(rows, vocab))]
        yield _row("PyTorch top_p 0.95", f"{rows} x {vocab}", rows * vocab * 4, _graphed(run, logits))


def equal_logits(sampler: DeviceSampler, vocab: int) -> Iterator[Row]:
    """The slow way: all tokens stand at the end of the selection."""
    for rows in (1, 64):
        sampler.stage(rows_of(rows, top_k=5000, top_p=0.9))
        logits = [torch.zeros(rows, vocab, device="cuda")]
        yield _row("top_k, top_p, equal logits", f"{rows} x {vocab}", rows * vocab * 4, _graphed(sampler.run, logits))


def host(sampler: DeviceSampler, vocab: int) -> Iterator[Row]:
    """Wall time of the host's part of a step: staging with its copy, launches, and answers."""
    for rows in (1, 64, 256):
        logits = logits_of("peaked", rows, vocab)
        for name in ("greedy", "top_p 0.95", "greedy, penalised", "greedy, 20 logprobs"):
            batch = rows_of(rows, **({"temperature": 0.0} if name == "greedy" else KINDS[name]))
            times: list[list[float]] = [[], [], []]
            for number in range(25):
                for row in batch:
                    row.token_index += 1
                    row.output_token_ids.append(number)  # type: ignore[attr-defined]
                torch.cuda.synchronize()
                marks = [time.perf_counter()]
                plain = sampler.stage(batch)
                marks.append(time.perf_counter())
                if plain:
                    sampler.greedy(logits)
                else:
                    sampler.run(logits)
                pending = sampler.send(rows)
                marks.append(time.perf_counter())
                torch.cuda.synchronize()
                marks.append(time.perf_counter())
                sampler.collect(pending)
                marks.append(time.perf_counter())
                for series, begin in zip(times, (0, 1, 3), strict=True):
                    series.append(marks[begin + 1] - marks[begin])
            for part, series in zip(("stage", "launch", "collect"), times, strict=True):
                yield Row(f"host: {part}, {name}", f"{rows} rows", sorted(series)[len(series) // 2] * 1e6, 0, 0.0)


def tuning(vocab: int) -> Iterator[Row]:
    """The same kernels with other blocks and numbers of programs than they choose."""
    sampler = DeviceSampler(256, vocab, torch.device("cuda"))
    for programs in (528, 792, 1056, 1320, 2112):
        for block in (1024, 2048, 4096):
            with mock.patch.multiple(sampling, _PROGRAMS=programs, _SPLIT_BLOCK=block):
                roomy = sampling.scratch_for(256, vocab, "cuda", blocks=(1024, 1024))
                wide = DeviceSampler(256, vocab, torch.device("cuda"), scratch=roomy)
                for row in greedy(wide, vocab):
                    if row.name == "greedy":
                        yield replace(row, name=f"greedy programs={programs} block={block}")
    for blocks in ((1024, 2048), (2048, 2048), (2048, 4096), (4096, 8192)):
        for candidates in (1024, 2048, 4096):
            scratch = sampling.scratch_for(256, vocab, "cuda", blocks=blocks, candidates=candidates)
            sampler = DeviceSampler(256, vocab, torch.device("cuda"), scratch=scratch)
            for row in drawn(sampler, vocab, {"top_p 0.95": KINDS["top_p 0.95"]}):
                yield replace(row, name=f"{row.name} blocks={blocks} candidates={candidates}")


def measurements(tune: bool = False) -> Iterator[Row]:
    """Everything, in the order of the table."""
    speed = read_bandwidth()
    yield Row("device read", "4 GiB", (4 << 30) / speed * 1e6, 4 << 30, speed / 1e9)
    for vocab in (LLAMA, QWEN):
        sampler = DeviceSampler(256, vocab, torch.device("cuda"))
        yield from greedy(sampler, vocab)
        yield from drawn(sampler, vocab, KINDS if vocab == LLAMA else {"top_p 0.95": KINDS["top_p 0.95"]})
        if vocab == LLAMA:
            yield from pytorch_sampler(vocab)
            yield from equal_logits(sampler, vocab)
            yield from host(sampler, vocab)
    if tune:
        yield from tuning(LLAMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="also other blocks and programs than the kernels choose")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    add_budget(parser)
    arguments = parser.parse_args()
    rows = []
    for row in Budget(arguments.budget).of(measurements(arguments.tune), "rows"):
        rows.append(row)
        print(f"{row.name:52} {row.shape:14} {row.median_us:9.2f} us {row.gb_per_s:8.0f} GB/s", flush=True)
    if arguments.save is not None:
        arguments.save.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
