"""Attention kernels beside their floors: Triton's and FlashInfer's, for decode rows and for prompts.

    python -m bench.gpu.attention --save attention.json
    python -m bench.gpu.attention --sweep
    python -m bench.gpu.attention --warm

The first measures every backend on every shape below, and with --table writes what `engine/attention/table.py` chooses
by. The second tries other configurations of the Triton kernels, the third only compiles FlashInfer's kernels.
Inputs are random, and each result is compared with the reference in float32 before it is timed. Small shapes read other
blocks at each call, so that no cache serves them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.gpu.budget import Budget, add_budget
from bench.gpu.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from engine.attention.backend import AttentionRows, BatchLimits, DeviceRows, GraphSelectionMode
from engine.attention.flashinfer_backend import FlashInferBackend
from kernels import decode_attention as decode
from kernels import prefill_attention as prefill

PAGE = 64
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B model
DECODE = [(64, 8192), (16, 32767), (1, 1025), (256, 1024), (1, 8192), (16, 1024), (64, 1024)]  # rows, tokens seen
PREFILL = [(1, 8192), (16, 2048), (1, 160), (1, 1024), (8, 512)]  # rows, tokens of each
_TOLERANCE = 5e-3  # ||out - reference|| / ||reference||

Run = Callable[[int], object]


class Inputs:
    """A pool of random keys and values, and rows of `length` tokens in random blocks of it."""

    def __init__(self, rows: int, length: int, new: int) -> None:
        self.rows, self.length, self.new = rows, length, new
        pages = -(-length // PAGE)
        row_bytes = 2 * KV_HEADS * HEAD_DIM * 2 * length
        self.copies = copies_beyond_cache(rows * row_bytes)
        blocks = 1 + rows * pages * self.copies
        self.pool = torch.empty(blocks, 2, KV_HEADS, PAGE, HEAD_DIM, dtype=torch.bfloat16, device="cuda").normal_()
        order = torch.randperm(blocks - 1, device="cuda", dtype=torch.int32) + 1
        self.pages = pages
        # Rows of whole 16 bytes, as the engine's are, so that every copy's table is alike to the compiler
        self.tables = torch.zeros(self.copies, rows, -(-pages // 4) * 4, dtype=torch.int32, device="cuda")
        self.tables[:, :, :pages] = order.view(self.copies, rows, pages)
        self.kv_lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        self.cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * new
        self.q = torch.randn(rows * new, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self._expected: tuple[torch.Tensor, torch.Tensor] | None = None

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference of the first copy's first and last row in float32, and the indices of their tokens."""
        picked = sorted({0, self.rows - 1})
        table, lens = self.tables[0][picked], self.kv_lens[picked]
        tokens = torch.cat([torch.arange(row * self.new, (row + 1) * self.new) for row in picked]).cuda()
        if self.new == 1:
            return decode.reference(self.q[tokens].float(), self.pool, table, lens), tokens
        parts = []
        for i in range(len(picked)):
            # A few query heads at a time, for the scores of a long prompt take 32 * length^2 * 4 bytes
            for head in range(KV_HEADS):
                group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
                mine = self.q[tokens[i * self.new : (i + 1) * self.new], group].float()
                bounds = torch.tensor([0, self.new], device="cuda")
                one = self.pool[:, :, head : head + 1]
                parts.append(prefill.reference(mine, one, table[i : i + 1], bounds, lens[i : i + 1]))
        each = [torch.cat(parts[i * KV_HEADS : (i + 1) * KV_HEADS], 1) for i in range(len(picked))]
        return torch.cat(each), tokens

    def check(self, run: Run) -> float:
        """Error of run(0), after making sure that it writes all of `out`."""
        self.out.fill_(float("nan"))
        run(0)
        want, tokens = self._expected = self._expected or self.expected()
        if self.out.isnan().any():
            return float("inf")
        return float((self.out[tokens].float() - want).norm() / want.norm())


def triton_decode(inputs: Inputs, config: decode.DecodeConfig | None = None) -> Run:
    config = config or decode.config_for(inputs.rows, HEAD_DIM, 2)
    scratch = decode.scratch_for(inputs.rows, HEADS, KV_HEADS, HEAD_DIM, torch.device("cuda"), config.splits)
    return lambda i: decode.decode_attention(
        inputs.q,
        inputs.pool,
        inputs.tables[i % inputs.copies],
        inputs.kv_lens,
        out=inputs.out,
        scratch=scratch,
        config=config,
    )


def triton_prefill(inputs: Inputs, config: prefill.PrefillConfig | None = None) -> Run:
    return lambda i: prefill.prefill_attention(
        inputs.q,
        inputs.pool,
        inputs.tables[i % inputs.copies],
        inputs.cu_seqlens,
        inputs.kv_lens,
        out=inputs.out,
        config=config,
    )


def flashinfer_runs(inputs: Inputs, kind: str, backend: str) -> Run:
    """FlashInfer, planned once per copy of the rows. backend: fa2, fa3."""
    import flashinfer

    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    pages = inputs.pages
    bounds = torch.arange(inputs.rows + 1, dtype=torch.int32) * pages
    last = torch.full((inputs.rows,), inputs.length - (pages - 1) * PAGE, dtype=torch.int32)
    wrappers: list[Any] = []
    for copy in range(inputs.copies):
        indices = inputs.tables[copy, :, :pages].reshape(-1).contiguous()
        if kind == "decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=bounds.cuda(),
                paged_kv_indices_buffer=indices.clone(),
                paged_kv_last_page_len_buffer=last.cuda(),
                backend=backend,
            )
            wrapper.plan(bounds, indices, last, HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=torch.bfloat16)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
            starts = torch.arange(inputs.rows + 1, dtype=torch.int32) * inputs.new
            wrapper.plan(
                starts,
                bounds,
                indices,
                last,
                HEADS,
                KV_HEADS,
                HEAD_DIM,
                PAGE,
                causal=True,
                q_data_type=torch.bfloat16,
            )
        wrappers.append(wrapper)
    return lambda i: wrappers[i % len(wrappers)].run(inputs.q, inputs.pool, out=inputs.out)


def floor_seconds(inputs: Inputs, bandwidth: float, flops: float) -> float:
    """The larger of bytes over bandwidth and operations over the matrix rate."""
    n, prefix = inputs.new, inputs.length - inputs.new
    read = inputs.rows * 4 * inputs.length * KV_HEADS * HEAD_DIM
    return max(read / bandwidth, operations(n, prefix, inputs.rows) / flops)


def operations(new: int, prefix: int, rows: int) -> float:
    return rows * 4 * HEADS * HEAD_DIM * (new * prefix + new * (new + 1) / 2)


def timed(inputs: Inputs, run: Run) -> tuple[float, float]:
    """Error and seconds of a call."""
    error = inputs.check(run)
    calls = max(4, min(64, inputs.copies * 2))
    return error, seconds_per_call(run, calls)


def measure(kind: str, rows: int, tokens: int, backends: list[str], bandwidth: float, flops: float) -> dict[str, Any]:
    """One shape on every backend: microseconds, and the error of each."""
    inputs = Inputs(rows, tokens, 1 if kind == "decode" else tokens)
    runs: dict[str, Callable[[], Run]] = {
        "triton": lambda: triton_decode(inputs) if kind == "decode" else triton_prefill(inputs),
    }
    if "flashinfer" in backends:
        for version in ("fa2",) if kind == "decode" else ("fa3", "fa2"):
            runs[f"flashinfer-{version}"] = lambda version=version: flashinfer_runs(inputs, kind, version)
    found: dict[str, Any] = {"kind": kind, "rows": rows, "tokens": tokens, "us": {}, "error": {}, "failed": {}}
    found["plan_us"] = {}
    found |= {"head_dim": HEAD_DIM, "group": HEADS // KV_HEADS, "page": PAGE}
    found["floor_us"] = floor_seconds(inputs, bandwidth, flops) * 1e6
    for name, make in runs.items():
        try:
            found["error"][name], seconds = timed(inputs, make())
            found["us"][name] = seconds * 1e6
        except Exception as failure:  # a backend that cannot run a shape is a result too
            found["failed"][name] = f"{type(failure).__name__}: {failure}"[:300]
    if kind == "decode" and found["us"].keys() - {"triton"}:
        found["plan_us"]["flashinfer-fa2"] = plan_seconds(inputs) * 1e6
    return found


def plan_seconds(inputs: Inputs, calls: int = 20) -> float:
    """Of the host, to plan a replay of a decode graph as the engine's backend does."""
    backend = FlashInferBackend(
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        [None],
        torch.bfloat16,
        device=torch.device("cuda"),
        limits=BatchLimits(inputs.rows, inputs.rows, inputs.pages),
    )
    rows = AttentionRows(
        starts=[inputs.length - 1] * inputs.rows,
        lengths=[1] * inputs.rows,
        block_tables=[],
        num_decode=inputs.rows,
        device=DeviceRows(
            cu_seqlens=inputs.cu_seqlens,
            cu_kv_seqlens=inputs.cu_seqlens,
            kv_lens=inputs.kv_lens,
            slots=torch.full((inputs.rows,), -1, device="cuda"),
            block_tables=inputs.tables[0],
            max_q=1,
            max_kv=inputs.length,
        ),
    )
    plan = backend.graph_plan(rows, selection_mode=GraphSelectionMode.DECODE_GRAPH)
    backend.refresh(plan, rows)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        backend.refresh(plan, rows)
    return (time.perf_counter() - began) / calls


def described(found: dict[str, Any]) -> str:
    line = f"{found['kind']:8}{found['rows']:4} x {found['tokens']:<6} floor {found['floor_us']:8.1f} us"
    for name, us in found["us"].items():
        if found["kind"] == "decode":
            read = found["rows"] * 4 * found["tokens"] * KV_HEADS * HEAD_DIM
            rate = f"{read / us / 1e6:5.2f} TB/s"
        else:
            rate = f"{operations(found['tokens'], 0, found['rows']) / us / 1e6:5.0f} TFLOP/s"
        wrong = "" if found["error"][name] < _TOLERANCE else f" WRONG ({found['error'][name]:.1e})"
        line += f"  {name} {us:8.1f} us {rate}{wrong}"
    for name, us in found["plan_us"].items():
        line += f"  plan of {name} {us:.0f} us"
    for name, failure in found["failed"].items():
        line += f"  {name} failed: {failure[:100]}"
    return line


# -- other configurations ----------------------------------------------------------------------------------------


def decode_candidates(rows: int) -> list[decode.DecodeConfig]:
    base = decode.config_for(rows, HEAD_DIM, 2)
    found = [base]
    if rows <= 4:
        for splits, min_tiles in ((32, 1), (32, 2), (32, 3), (32, 4)):
            for warps, stages, descriptors in ((4, 4, False), (8, 4, False), (4, 4, True), (4, 2, False)):
                found.append(
                    dataclasses.replace(
                        base,
                        splits=splits,
                        min_tiles=min_tiles,
                        warps=warps,
                        stages=stages,
                        descriptors=descriptors,
                        rounds=1,
                    )
                )
    else:
        for descriptors, stages, per_sm in (
            (False, 3, 3),
            (False, 4, 2),
            (False, 2, 5),
            (True, 3, 3),
            (True, 4, 2),
        ):
            for (splits, min_tiles), rounds in product(((32, 4), (16, 8), (8, 16)), (1, 2, 4)):
                found.append(
                    dataclasses.replace(
                        base,
                        descriptors=descriptors,
                        stages=stages,
                        per_sm=per_sm,
                        splits=splits,
                        min_tiles=min_tiles,
                        rounds=rounds,
                    )
                )
        found += [dataclasses.replace(config, prefetch=0) for config in found[1:10]]
    return list(dict.fromkeys(found))


def prefill_candidates(tokens: int) -> list[prefill.PrefillConfig]:
    base = prefill.config_for(tokens, HEAD_DIM, 2, HEADS // KV_HEADS)
    found = [base]
    if tokens > 512:
        found += [dataclasses.replace(base, hopper=True, turns=turns) for turns in (True, False)]
    for block, tile, stages, warps in ((128, 64, 3, 8), (64, 64, 2, 4), (64, 64, 3, 4)):
        found.append(prefill.PrefillConfig(block, tile, stages, warps, descriptors=True))
    return list(dict.fromkeys(found))


def _compile(job: tuple[str, int, Any]) -> str:
    """Compiles one configuration without the GPU, into the cache that all processes share."""
    from kernels import offline, paged_kv

    kind, rows, config = job
    pool = torch.empty(4, 2, KV_HEADS, PAGE, HEAD_DIM, dtype=torch.bfloat16)
    q = torch.empty(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    tables = torch.empty(rows, 16, dtype=torch.int32)
    lens, bounds = torch.empty(rows, dtype=torch.int32), torch.empty(rows + 1, dtype=torch.int32)
    decode.multiprocessors = paged_kv.multiprocessors = lambda device: 132  # type: ignore[assignment]
    try:
        with offline.compiled_for(90, pdl=True):
            if kind == "decode":
                decode.decode_attention(q, pool, tables, lens, config=config)
            else:
                prefill.prefill_attention(q, pool, tables, bounds, lens, config=config)
    except Exception as failure:
        return f"{config}: {failure}"[:200]
    return ""


def _compiled_rows(rows: int) -> int:
    """The least number of rows with the same compiled kernel: one row, up to 128, up to 512 each have their own."""
    return 1 if rows == 1 else 2 if rows <= 128 else 256


def warm() -> None:
    """Compiles what FlashInfer needs for an 8B model without a window: minutes, once per machine."""
    for kind, backend in (("decode", "fa2"), ("prefill", "fa3")):
        inputs = Inputs(1, PAGE, 1 if kind == "decode" else PAGE)
        flashinfer_runs(inputs, kind, backend)(0)
        torch.cuda.synchronize()
        print(f"FlashInfer's {kind} ({backend}) is compiled", flush=True)


def sweep(
    decode_shapes: list[tuple[int, int]],
    prefill_shapes: list[tuple[int, int]],
    workers: int,
    beside_flashinfer: bool,
) -> None:
    """Every candidate on these shapes, best first."""
    # The cut of rows is an argument of the decode kernel: one of each compiles them all
    jobs = [
        ("decode", _compiled_rows(rows), dataclasses.replace(config, splits=8, min_tiles=8, rounds=1))
        for rows, _ in decode_shapes
        for config in decode_candidates(rows)
    ]
    jobs += [("prefill", rows, config) for rows, n in prefill_shapes for config in prefill_candidates(rows * n)]
    jobs = list(dict.fromkeys(jobs))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = [line for line in pool.imap_unordered(_compile, jobs, chunksize=2) if line]
    print(f"compiled {len(jobs)} configurations, {len(failed)} do not compile", *failed[:3], sep="\n", flush=True)
    for kind, shapes in (("decode", decode_shapes), ("prefill", prefill_shapes)):
        for rows, tokens in shapes:
            inputs = Inputs(rows, tokens, 1 if kind == "decode" else tokens)
            results: list[tuple[float, float, Any]] = []
            if beside_flashinfer:
                other = flashinfer_runs(inputs, kind, "fa2" if kind == "decode" else "fa3")
                error, seconds = timed(inputs, other)
                results.append((seconds * 1e6, error, "flashinfer"))
                del other
            candidates: list[Any] = decode_candidates(rows) if kind == "decode" else prefill_candidates(rows * tokens)
            for config in candidates:
                run = triton_decode(inputs, config) if kind == "decode" else triton_prefill(inputs, config)
                try:
                    error, seconds = timed(inputs, run)
                except Exception as failure:
                    print(f"  {config}: {type(failure).__name__}: {str(failure)[:100]}")
                    continue
                results.append((seconds * 1e6, error, config))
            print(f"{kind} {rows} x {tokens}")
            for us, error, config in sorted(results, key=lambda item: item[0])[:9]:
                print(f"  {us:8.1f} us  {'' if error < _TOLERANCE else f'WRONG {error:.1e}'} {config}", flush=True)
            del inputs
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["triton", "flashinfer"], choices=["triton", "flashinfer"])
    parser.add_argument("--kinds", nargs="+", default=["decode", "prefill"], choices=["decode", "prefill"])
    parser.add_argument("--save", type=Path, help="JSON file of all timings")
    parser.add_argument("--table", type=Path, help="JSON file for engine/attention/table.json")
    parser.add_argument("--sweep", action="store_true", help="try other configurations instead")
    parser.add_argument("--warm", action="store_true", help="only compile what FlashInfer needs")
    parser.add_argument("--matrix-rate", type=float, default=780e12, help="FLOP/s of a large bfloat16 product")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    add_budget(parser)
    arguments = parser.parse_args()
    budget = Budget(arguments.budget)
    torch.manual_seed(torch.seed() % 2**31)
    if arguments.warm:
        warm()
        return
    if arguments.sweep:
        sweep(
            [*DECODE[:4], (16, 1024)] if "decode" in arguments.kinds else [],
            PREFILL[:3] if "prefill" in arguments.kinds else [],
            arguments.workers,
            "flashinfer" in arguments.backends,
        )
        return
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)
    results = []
    for kind, shapes in (("decode", DECODE), ("prefill", PREFILL)):
        for rows, tokens in budget.of(shapes if kind in arguments.kinds else [], f"shapes of {kind}"):
            found = measure(kind, rows, tokens, arguments.backends, bandwidth, arguments.matrix_rate)
            results.append(found)
            print(described(found), flush=True)
            torch.cuda.empty_cache()
    report = {"device": torch.cuda.get_device_name(), "read_bandwidth": bandwidth, "results": results}
    report["capability"] = torch.cuda.get_device_capability()
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=1))
    if arguments.table:
        from engine.attention.table import table_of

        arguments.table.write_text(json.dumps(table_of(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
