"""Products of few rows with the weights of an 8B model: cuBLAS beside `kernels/small_gemm.py`, and their floor.

    python -m bench.gpu.gemm --shape llama-3.1-8b --rows 1 8 16 64 256 --save gemm.json

For up to 16 rows every candidate configuration is timed, and the best few again as they stand in a step: behind a
norm, with and without programmatic dependent launch. Last comes the table for kernels/small_gemm.py. Every candidate's
result is compared with the float32 reference on random data first. Kernels are compiled by a pool of processes before
anything is timed. Weights rotate through copies that exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import products
from bench.gpu.timing import copies_beyond_cache, read_bandwidth, seconds_per_call
from kernels import rms_norm, small_gemm, swiglu
from kernels.small_gemm import Config

_FINALISTS = 3  # configurations that are timed behind a norm
_TOLERANCE = 2e-2  # ||y - reference|| / ||reference|| of a bfloat16 result


def candidates(n: int, k: int, gated: bool) -> Iterator[Config]:
    """Configurations worth a try: 12 KB to 100 KB of weights in flight per program, and enough programs."""
    for block_n, block_k, warps, stages in (
        (16, 256, 1, 4),
        (16, 256, 2, 5),
        (16, 512, 2, 4),
        (16, 512, 4, 4),
        (32, 128, 2, 5),
        (32, 256, 2, 4),
        (32, 256, 4, 4),
        (32, 512, 4, 3),
        (64, 64, 4, 6),
        (64, 128, 4, 4),
        (64, 128, 4, 6),
        (64, 256, 4, 3),
        (128, 64, 4, 5),
        (128, 128, 8, 4),
    ):
        if gated:
            if block_n <= 64:
                yield Config(block_n, block_k, 1, warps, max(3, stages - 1))
            continue
        splits = [s for s in (1, 2, 4, 8) if 200 <= n // block_n * s <= 1200 or (s == 1 and n // block_n >= 200)]
        for split in splits[:2]:
            if k // split >= 4 * block_k:
                yield Config(block_n, block_k, split, warps, stages)


def vector_candidates(gated: bool) -> Iterator[Config]:
    """For one row."""
    for block_n, block_k, warps in ((2, 1024, 2), (4, 512, 2), (4, 1024, 4), (4, 2048, 8), (8, 512, 4), (8, 1024, 8)):
        yield Config(block_n, block_k // (2 if gated else 1), 1, warps, vector=True)


def with_pdl(config: Config, k: int) -> Iterator[Config]:
    """The same with programmatic dependent launch, and two depths of prefetch."""
    yield dataclasses.replace(config, pdl=True)
    share = k * 2 // config.splits
    unit = 16 * config.chunks
    for wanted in (1024, 4096):
        if unit <= wanted <= share:
            yield dataclasses.replace(config, pdl=True, prefetch=wanted // unit * unit)


def run_small(config: Config, gated: bool, x: torch.Tensor, weight: torch.Tensor, exact: bool) -> torch.Tensor:
    if gated:
        return small_gemm.gated(x, weight, config=config)
    return small_gemm.linear(x, weight, config=config, dtype=torch.float32 if exact else None)


def run_cublas(gated: bool, x: torch.Tensor, weight: torch.Tensor, exact: bool) -> torch.Tensor:
    if exact:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    y = torch.nn.functional.linear(x, weight)
    return swiglu.swiglu(y) if gated else y


def _compile(job: tuple[Config, bool, int, int, int, bool]) -> str:
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

    def behind_norm(self, config: Config | None, rows: int) -> float:
        """Seconds of a product and the norm before it, as they stand in a layer."""
        residual = torch.randn(rows, self.k, device="cuda")
        delta = torch.zeros(rows, self.k, device="cuda", dtype=torch.bfloat16)
        scale = torch.ones(self.k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(delta)

        def run(i: int) -> None:
            rms_norm.add_rms_norm(residual, delta, scale, 1e-5, out)
            weight = self.weights[i % len(self.weights)]
            if config is None:
                run_cublas(self.gated, out, weight, self.exact)
            else:
                run_small(config, self.gated, out, weight, self.exact)

        return seconds_per_call(run, self.calls)


def measure(product: Product, rows: int, bandwidth: float) -> dict[str, Any]:
    x = product.input(rows)
    floor = product.bytes / bandwidth
    result: dict[str, Any] = {
        "product": product.name,
        "rows": rows,
        "floor_us": floor * 1e6,
        "cublas_us": product.alone(None, x) * 1e6,
        "cublas_behind_norm_us": product.behind_norm(None, rows) * 1e6,
    }
    if rows > small_gemm.MOST_ROWS:
        return result
    tried = []
    for config in [
        *candidates(product.n, product.k, product.gated),
        *(vector_candidates(product.gated) if rows == 1 else ()),
    ]:
        try:
            if product.error(config, x) > _TOLERANCE:
                print(f"WRONG RESULT {product.name} {rows} {config}", flush=True)
                continue
            tried.append((product.alone(config, x), config))
        except Exception as error:  # e.g. more shared memory than there is
            print(f"skipped {product.name} {config}: {str(error)[:100]}", flush=True)
    tried.sort(key=lambda pair: pair[0])
    result["small"] = [(seconds * 1e6, str(config)) for seconds, config in tried]
    finals = []
    for _, config in tried[:_FINALISTS]:
        for variant in (config, *with_pdl(config, product.k)):
            if product.error(variant, x) > _TOLERANCE:
                print(f"WRONG RESULT {product.name} {rows} {variant}", flush=True)
                continue
            finals.append((product.behind_norm(variant, rows), variant))
    finals.sort(key=lambda pair: pair[0])
    result["behind_norm"] = [(seconds * 1e6, str(config)) for seconds, config in finals]
    result["best"] = dataclasses.asdict(finals[0][1]) if finals else None
    result["best_us"] = finals[0][0] * 1e6 if finals else None
    return result


def compile_all(shape: str, rows: list[int], workers: int) -> None:
    jobs = []
    for name, (n, k, gated) in products(shape).items():
        for padded in sorted({8 if count <= 8 else 16 for count in rows if count <= small_gemm.MOST_ROWS}):
            jobs += [(config, gated, padded, n, k, name == "head") for config in candidates(n, k, gated)]
        if 1 in rows:
            jobs += [(config, gated, 1, n, k, name == "head") for config in vector_candidates(gated)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = [line for line in pool.imap_unordered(_compile, jobs, chunksize=4) if line]
    print(f"compiled {len(jobs)} configurations, {len(failed)} do not run here", *failed[:5], sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 256])
    parser.add_argument("--products", nargs="+", default=None)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--save", type=Path, help="JSON file of all timings")
    arguments = parser.parse_args()
    if any(count <= small_gemm.MOST_ROWS for count in arguments.rows):
        compile_all(arguments.shape, arguments.rows, arguments.workers)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s", flush=True)
    results = []
    for name, (n, k, gated) in products(arguments.shape).items():
        if arguments.products and name not in arguments.products:
            continue
        product = Product(name, n, k, gated)
        for rows in arguments.rows:
            found = measure(product, rows, bandwidth)
            results.append(found | {"n": n, "k": k, "gated": gated})
            alone = found.get("small") or [(float("nan"), "")]
            behind = found.get("behind_norm") or [(float("nan"), "")]
            print(
                f"{name:8} {rows:4} rows  floor {found['floor_us']:7.1f}  cuBLAS {found['cublas_us']:7.1f}",
                f"(norm+ {found['cublas_behind_norm_us']:7.1f})  small {alone[0][0]:7.1f}",
                f"(norm+ {behind[0][0]:7.1f}) us  {behind[0][1]}",
                flush=True,
            )
        del product
        torch.cuda.empty_cache()
    if arguments.save:
        arguments.save.write_text(json.dumps({"bandwidth": bandwidth, "results": results}, indent=1))
    print("TABLE entries (where the small kernel won behind a norm):")
    for name, (n, k, gated) in products(arguments.shape).items():
        entries = []
        for found in results:
            if found["product"] == name and found.get("best") and found["best_us"] < found["cublas_behind_norm_us"]:
                entries.append(f"({found['rows']}, Config(**{found['best']!r}))")
        if entries:
            print(f"    ({gated}, {n}, {k}): ({', '.join(entries)},),  # {name}")


if __name__ == "__main__":
    main()
