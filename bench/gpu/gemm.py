"""Products of few rows with the weights of an 8B model: cuBLAS beside `kernels/small_gemm.py`, and their floor.

    python -m bench.gpu.gemm --shape llama-3.1-8b --rows 1 17 66 160 --save gemm.json

Every candidate is compared with the float32 reference on random data and timed, one product after the other. The best
few of each product then compete where they will work: in a chain of whole decode layers (norms, head step, attention
and all four products, 8 layers of weights), in which each product's configuration is exchanged until none gets faster.
That accounts for what overlaps with what. Last comes the table for kernels/small_gemm_table.py. Kernels are compiled
by a pool of processes before anything is timed. Weights rotate through copies that exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.pool
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import SHAPES, products
from bench.gpu.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from kernels import qkv, rms_norm, small_gemm, swiglu
from kernels.decode_attention import decode_attention, scratch_for
from kernels.small_gemm import Config

_FINALISTS = 2  # configurations of a product that compete in the chain
_TOLERANCE = 2e-2  # ||y - reference|| / ||reference|| of a bfloat16 result
_LAYERS = 8
_BLOCK = 64


def candidates(n: int, k: int, gated: bool, rows: int) -> Iterator[Config]:
    """Configurations worth a try: 12 KB to 100 KB of weights in flight per program, and enough programs."""
    if rows == 1:  # which has candidates of its own
        shapes = [(16, 256, 1, 4), (32, 128, 2, 5), (64, 128, 4, 4)]
    elif rows <= 16:
        shapes = [(16, 256, 1, 4), (16, 512, 2, 4), (32, 128, 2, 5), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6)]
    elif rows <= 64:
        shapes = [(64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 5), (128, 128, 8, 4)]
    else:
        shapes = [(64, 64, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)]
    for block_n, block_k, warps, stages in shapes:
        if gated:
            if block_n <= 64 or rows > 16:
                yield Config(block_n, block_k, 1, warps, max(3, stages - 1))
            continue
        splits = [s for s in (1, 2, 4, 8) if 120 <= n // block_n * s <= 1200 or (s == 1 and n // block_n >= 200)]
        for split in splits[:2]:
            if k // split >= 4 * block_k:
                yield Config(block_n, block_k, split, warps, stages)


def vector_candidates(gated: bool) -> Iterator[Config]:
    """For one row."""
    for block_n, warps in ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8), (4, 16)):
        if block_n > 1 or not gated:
            yield Config(block_n // 2 if gated else block_n, warps=warps, whole=True)
    for block_n, block_k, warps in (
        (2, 2048, 4),
        (4, 2048, 8),
        (2, 1024, 2),
        (2, 1024, 4),
        (4, 1024, 4),
        (8, 512, 4),
        (4, 512, 2),
        (16, 512, 8),
    ):
        yield Config(block_n // 2 if gated else block_n, block_k, 1, warps, vector=True)


def with_pdl(config: Config, k: int) -> Iterator[Config]:
    """The same with programmatic dependent launch, and some depths of reading ahead."""
    share = k * 2 // config.splits - (2 * config.block_k if config.vector else 0)
    unit = 16 * config.chunks
    for early in (True, False):
        base = dataclasses.replace(config, pdl=True, early=early)
        yield base
        for wanted in () if config.whole else (2048, 6144):
            if unit <= wanted <= share:
                yield dataclasses.replace(base, prefetch=wanted // unit * unit)


def run_small(config: Config, gated: bool, x: torch.Tensor, weight: torch.Tensor, exact: bool) -> torch.Tensor:
    if gated:
        return small_gemm.gated(x, weight, config=config)
    return small_gemm.linear(x, weight, config=config, dtype=torch.float32 if exact else None)


def run_cublas(gated: bool, x: torch.Tensor, weight: torch.Tensor, exact: bool) -> torch.Tensor:
    if exact:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    y = torch.nn.functional.linear(x, weight)
    return swiglu.swiglu(y) if gated else y


Job = tuple[Config, bool, int, int, int, bool]  # with rows of x, N, K, and whether the result is float32


def _compile(job: Job) -> str:
    """Compiles one configuration in a process of the pool, by one launch on little memory."""
    config, gated, rows, n, k, exact = job
    try:
        weight = torch.empty(n, k, dtype=torch.bfloat16, device="cuda")
        run_small(config, gated, torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda"), weight, exact)
        torch.cuda.synchronize()
    except Exception as error:  # a configuration that does not fit the device is passed over
        return f"{config}: {type(error).__name__}: {str(error)[:120]}"
    return ""


class Product:
    """One product with its weights and inputs."""

    def __init__(self, name: str, n: int, k: int, gated: bool) -> None:
        self.name, self.n, self.k, self.gated = name, n, k, gated
        self.exact = name == "head"
        self.bytes = n * k * 2
        generator = torch.Generator("cuda").manual_seed(1)
        count = copies_beyond_cache(self.bytes)
        self.weights = [
            torch.randn(n, k, device="cuda", generator=generator, dtype=torch.bfloat16).mul_(k**-0.5)
            for _ in range(count)
        ]
        self.calls = max(count, 4)

    def input(self, rows: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(2)
        return torch.randn(rows, self.k, device="cuda", generator=generator).to(torch.bfloat16)

    def error(self, config: Config, x: torch.Tensor) -> float:
        found = run_small(config, self.gated, x, self.weights[0], self.exact).float()
        reference = small_gemm.gated_reference if self.gated else small_gemm.reference
        expected = reference(x, self.weights[0])
        return float((found - expected).norm() / expected.norm())

    def alone(self, config: Config | None, x: torch.Tensor) -> float:
        """Seconds, one product after the other."""

        def run(i: int) -> None:
            weight = self.weights[i % len(self.weights)]
            if config is None:
                run_cublas(self.gated, x, weight, self.exact)
            else:
                run_small(config, self.gated, x, weight, self.exact)

        return seconds_per_call(run, self.calls)


class Chain:
    """Whole decode layers of a shape, with a configuration per product; None is cuBLAS."""

    def __init__(self, shape: str, rows: int) -> None:
        facts = SHAPES[shape]
        self.heads, self.kv_heads = facts["num_attention_heads"], facts["num_key_value_heads"]
        self.dim, hidden = facts["head_dim"], facts["hidden_size"]
        self.parts = {name: part for name, part in products(shape).items() if name != "head"}
        generator = torch.Generator("cuda").manual_seed(3)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, device="cuda", generator=generator, dtype=torch.bfloat16)

        self.weights = [
            {name: random(n, k).mul_(k**-0.5) for name, (n, k, _) in self.parts.items()} for _ in range(_LAYERS)
        ]
        context = 1025 if rows == 1 else 2 * _BLOCK + 1  # little, so that the products are what is seen
        per_row = -(-context // _BLOCK)
        blocks = 1 + rows * per_row
        self.pools = [random(blocks, 2, self.kv_heads, _BLOCK, self.dim) for _ in range(_LAYERS)]
        self.tables = 1 + torch.arange(rows * per_row, device="cuda", dtype=torch.int32).view(rows, per_row)
        self.kv_lens = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        self.slots = self.tables[:, -1].long() * _BLOCK + (context - 1) % _BLOCK
        self.residual = torch.randn(rows, hidden, device="cuda")
        self.delta = random(rows, hidden)
        self.scale = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        self.cos, self.sin = (torch.rand(rows, self.dim // 2, device="cuda") for _ in range(2))
        self.scratch = scratch_for(rows, self.heads, self.kv_heads, self.dim, torch.device("cuda"))
        self.rows = rows

    def product(self, name: str, configs: dict[str, Config | None], layer: int, x: torch.Tensor) -> torch.Tensor:
        config, gated, weight = configs[name], self.parts[name][2], self.weights[layer][name]
        if config is None:
            return run_cublas(gated, x, weight, False)
        return run_small(config, gated, x, weight, False)

    def layer(self, configs: dict[str, Config | None], layer: int, delta: torch.Tensor) -> torch.Tensor:
        x = rms_norm.add_rms_norm(self.residual, delta, self.scale, 1e-5)
        heads = self.product("qkv", configs, layer, x).view(self.rows, -1, self.dim)
        q = qkv.split_norm_rotate_write(heads, None, None, 0.0, self.cos, self.sin, self.slots, self.pools[layer])
        out = torch.empty_like(q)
        decode_attention(q, self.pools[layer], self.tables, self.kv_lens, 0, out=out, scratch=self.scratch)
        delta = self.product("o", configs, layer, out.view(self.rows, -1))
        x = rms_norm.add_rms_norm(self.residual, delta, self.scale, 1e-5)
        return self.product("down", configs, layer, self.product("gate_up", configs, layer, x))

    def seconds_per_layer(self, configs: dict[str, Config | None]) -> float:
        def run(i: int) -> None:
            delta = self.delta
            for layer in range(_LAYERS):
                delta = self.layer(configs, layer, delta)

        return seconds_per_call(run, 2) / _LAYERS


def compete(chain: Chain, finalists: dict[str, list[Config | None]]) -> tuple[dict[str, Config | None], float]:
    """Exchanges one product's configuration after the other for a faster one, twice around."""
    best: dict[str, Config | None] = {name: options[0] for name, options in finalists.items()}
    fastest = chain.seconds_per_layer(best)
    for _ in range(2):
        for name, options in finalists.items():
            for option in options:
                trial = best | {name: option}
                seconds = chain.seconds_per_layer(trial)
                if seconds < fastest * 0.999:
                    best, fastest = trial, seconds
    return best, fastest


def measure(product: Product, rows: int, bandwidth: float) -> dict[str, Any]:
    """Microseconds of cuBLAS and of every candidate, fastest first."""
    x = product.input(rows)
    result: dict[str, Any] = {
        "product": product.name,
        "rows": rows,
        "floor_us": product.bytes / bandwidth * 1e6,
        "cublas_us": product.alone(None, x) * 1e6,
        "small": [],
    }
    if rows > small_gemm.MOST_ROWS:
        return result
    tried = []
    for config in [
        *candidates(product.n, product.k, product.gated, rows),
        *(vector_candidates(product.gated) if rows == 1 else ()),
    ]:
        try:
            if product.error(config, x) > _TOLERANCE:
                print(f"WRONG RESULT {product.name} {rows} {config}", flush=True)
                continue
            tried.append((product.alone(config, x) * 1e6, config))
        except Exception as error:  # e.g. more shared memory than there is
            print(f"skipped {product.name} {config}: {str(error)[:100]}", flush=True)
    result["small"] = sorted(tried, key=lambda pair: pair[0])
    return result


def finalists_of(found: dict[str, Any], k: int) -> list[Config | None]:
    """cuBLAS, the fastest ones, and of one row's the fastest of its own kind."""
    ranked = [config for _, config in found["small"]]
    chosen = ranked[:_FINALISTS]
    for kind in ("vector", "whole"):
        chosen += [config for config in [c for c in ranked if getattr(c, kind)][:2] if config not in chosen]
    options: list[Config | None] = [None]
    for config in chosen:
        options += [config, *with_pdl(config, k)]
    return options


def compile_all(pool: multiprocessing.pool.Pool, jobs: list[Job]) -> None:
    failed = [line for line in pool.imap_unordered(_compile, jobs, chunksize=2) if line]
    print(f"compiled {len(jobs)} configurations, {len(failed)} do not run here", *failed[:5], sep="\n", flush=True)


def first_jobs(shape: str, rows: list[int]) -> list[Job]:
    jobs: list[Job] = []
    for name, (n, k, gated) in products(shape).items():
        for count in rows:
            jobs += [(config, gated, count, n, k, name == "head") for config in candidates(n, k, gated, count)]
        if 1 in rows:
            jobs += [(config, gated, 1, n, k, name == "head") for config in vector_candidates(gated)]
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 17, 66, 160])
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--save", type=Path, help="JSON file of all timings")
    arguments = parser.parse_args()
    few = [count for count in arguments.rows if count <= small_gemm.MOST_ROWS]
    pool = multiprocessing.get_context("spawn").Pool(arguments.workers)
    compile_all(pool, first_jobs(arguments.shape, few))
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    parts = products(arguments.shape)
    for name, (n, k, gated) in parts.items():
        product = Product(name, n, k, gated)
        for rows in arguments.rows:
            entry = found[name, rows] = measure(product, rows, bandwidth)
            best = entry["small"][0] if entry["small"] else (float("nan"), "")
            print(
                f"{name:8} {rows:4} rows  floor {entry['floor_us']:7.1f}  cuBLAS {entry['cublas_us']:7.1f}",
                f" small {best[0]:7.1f} us  {best[1]}",
                flush=True,
            )
        del product
        torch.cuda.empty_cache()
    finalists = {
        (name, rows): finalists_of(found[name, rows], k)
        for name, (_, k, _) in parts.items()
        for rows in few
        if name != "head"
    }
    compile_all(
        pool,
        [
            (config, parts[name][2], rows, parts[name][0], parts[name][1], False)
            for (name, rows), options in finalists.items()
            for config in options
            if config is not None
        ],
    )
    pool.terminate()
    chosen: dict[int, dict[str, Config | None]] = {}
    chains: list[dict[str, Any]] = []
    for rows in few:
        chain = Chain(arguments.shape, rows)
        names = [name for name in parts if name != "head"]
        best, seconds = compete(chain, {name: finalists[name, rows] for name in names})
        plain = chain.seconds_per_layer(dict.fromkeys(names))
        head = found["head", rows]
        best["head"] = head["small"][0][1] if head["small"][0][0] < head["cublas_us"] else None
        if best["head"] is not None:
            best["head"] = dataclasses.replace(best["head"], pdl=True)
        chosen[rows] = best
        print(f"layer of {rows} rows: cuBLAS {plain * 1e6:.1f} us, chosen {seconds * 1e6:.1f} us", flush=True)
        chains.append({"rows": rows, "cublas_us": plain * 1e6, "chosen_us": seconds * 1e6})
        del chain
        torch.cuda.empty_cache()
    if arguments.save:
        arguments.save.write_text(
            json.dumps(
                {"bandwidth": bandwidth, "products": list(found.values()), "layers": chains}, indent=1, default=str
            )
        )
    print("TABLE entries; None is cuBLAS:")
    for name, (n, k, gated) in parts.items():
        entries = ", ".join(f"({rows}, {chosen[rows][name]})" for rows in few)
        print(f"    ({gated}, {n}, {k}): ({entries},),  # {name}")


if __name__ == "__main__":
    main()
