"""Products of up to 256 rows with the weights of an 8B model: cuBLAS beside `kernels/wide_gemm.py`, and their floor.

    python -m bench.gpu.wide_gemm --shape llama-3.1-8b --rows 128 160 256 --budget 120 --save wide.json

Every candidate is compared with the float32 reference on random data, run twice for equal bits, and timed in a CUDA
graph, one product after the other over weights that exceed the L2 cache. The best few then compete in whole decode
layers (bench/gpu/gemm.py), which accounts for what overlaps with what. Last come the entries for
kernels/wide_gemm_table.py. Kernels are compiled by a pool of processes first. With --budget, what does not fit the
seconds is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu import gemm
from bench.gpu.shapes import SHAPES, products
from bench.gpu.timing import copies_beyond_cache, matrix_rate, read_bandwidth, seconds_per_call
from kernels import small_gemm, small_gemm_table, swiglu, wide_gemm
from kernels.wide_gemm import Config

_TOLERANCE = 4e-3  # ||y - reference|| / ||reference||: one rounding to bfloat16 is 1.7e-3
_SHARED = 232448  # bytes that a program can have
_FINALISTS = 2
_PRODUCTS = ("qkv", "o", "gate_up", "down")
_WIDTHS = ((64, 32), (128, 0), (128, 32), (128, 64), (256, 0))  # columns and extra ones of a tile


def _fits(config: Config) -> bool:
    stage = (config.height + config.width) * 128
    return config.stages * stage + 4 * config.stash + 512 <= _SHARED


def _deepest(config: Config) -> Config:
    stages = next(n for n in range(8, 1, -1) if _fits(dataclasses.replace(config, stages=n)))
    return dataclasses.replace(config, stages=stages)


def candidates(rows: int, n: int, gated: bool) -> Iterator[Config]:
    """Tiles worth a try for a number of rows, each with as many stages as fit."""
    columns, extra = next(pair for pair in _WIDTHS if sum(pair) >= rows)
    for tall in (64, 128):
        if tall * (columns + extra) > 128 * 192:  # sums are kept in registers
            continue
        config = Config(tall, columns, extra)
        tiles = -(-n // config.height)
        if gated:
            stash = 4096 if tall == 128 and columns <= 128 else 8192
            yield _deepest(dataclasses.replace(config, stash=stash))
        for shares in () if gated else (2, 4, 8):
            if 60 <= tiles * shares <= 132:
                yield _deepest(dataclasses.replace(config, shares=shares, stash=1024))


class Product:
    """One product with its weights and inputs."""

    def __init__(self, name: str, n: int, k: int, gated: bool) -> None:
        self.name, self.n, self.k, self.gated = name, n, k, gated
        self.generator = torch.Generator("cuda").manual_seed(1)
        self.weights = [
            torch.randn(n, k, device="cuda", generator=self.generator, dtype=torch.bfloat16).mul_(k**-0.5)
            for _ in range(copies_beyond_cache(n * k * 2))
        ]

    def input(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.k, device="cuda", generator=self.generator).to(torch.bfloat16)

    def run(self, config: Config | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """None is cuBLAS, gated with a SwiGLU kernel after it."""
        if config is not None:
            product = wide_gemm.gated if self.gated else wide_gemm.linear
            product(x, weight, config=config, out=out)
        elif self.gated:
            swiglu.swiglu(torch.nn.functional.linear(x, weight), out)
        else:
            torch.mm(x, weight.t(), out=out)

    def out(self, rows: int) -> torch.Tensor:
        columns = self.n // 2 if self.gated else self.n
        return torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")

    def error(self, config: Config | None, rows: int) -> float:
        """Relative to the float32 reference, on fresh numbers; infinite where a second run gives other bits."""
        x, weight = self.input(rows), self.weights[0]
        found, again = self.out(rows), self.out(rows)
        self.run(config, x, weight, found)
        self.run(config, x, weight, again)
        if not torch.equal(found, again):
            return float("inf")
        expected = (small_gemm.gated_reference if self.gated else small_gemm.reference)(x, weight)
        error = (found.float() - expected).norm() / expected.norm()
        return float(error) if bool(error.isfinite()) else float("inf")

    def seconds(self, config: Config | None, x: torch.Tensor, out: torch.Tensor) -> float:
        count = len(self.weights)
        calls = max(count, 4)
        return seconds_per_call(lambda i: self.run(config, x, self.weights[i % count], out), calls, replays=5)


Choice = Config | small_gemm.Config | None


class Chain(gemm.Chain):
    """Whole decode layers whose products may be of either kind."""

    def product(self, name: str, configs: dict[str, Any], layer: int, x: torch.Tensor) -> torch.Tensor:
        config = configs[name]
        if not isinstance(config, Config):
            return super().product(name, configs, layer, x)
        run = wide_gemm.gated if self.parts[name][2] else wide_gemm.linear
        return run(x, self.weights[layer][name], config=config)


def _compile(job: tuple[str, int, int, bool, int, Config]) -> str:
    """Compiles one configuration in a process of the pool, by one launch."""
    name, n, k, gated, rows, config = job
    try:
        torch.cuda.set_per_process_memory_fraction(0.05)
        product = Product.__new__(Product)
        product.name, product.n, product.k, product.gated = name, n, k, gated
        x = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
        product.run(config, x, torch.zeros(n, k, dtype=torch.bfloat16, device="cuda"), product.out(rows))
        torch.cuda.synchronize()
    except Exception as error:  # a configuration that does not fit the device is passed over
        return f"{name} {config}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(parts: dict[str, tuple[int, int, bool]], rows: list[int], workers: int) -> None:
    jobs: dict[tuple[str, Config], tuple[str, int, int, bool, int, Config]] = {}
    for name, (n, k, gated) in parts.items():
        for count in rows:
            for config in candidates(count, n, gated):
                # Kernels know nothing of the number of rows
                jobs.setdefault((name, config), (name, n, k, gated, count, config))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = [line for line in pool.imap_unordered(_compile, jobs.values()) if line]
    print(f"compiled {len(jobs)} configurations, {len(failed)} do not run here", *failed[:5], sep="\n", flush=True)


def floor(n: int, k: int, rows: int, bandwidth: float, rate: float) -> float:
    """Seconds: the weight read once, or multiplied."""
    return max(n * k * 2 / bandwidth, 2 * n * k * rows / rate)


def measure(product: Product, rows: int) -> dict[str, Any]:
    x, out = product.input(rows), product.out(rows)
    found: dict[str, Any] = {
        "product": product.name,
        "rows": rows,
        "cublas_us": product.seconds(None, x, out) * 1e6,
        "cublas_error": product.error(None, rows),
        "wide": [],
    }
    for config in candidates(rows, product.n, product.gated):
        try:
            error = product.error(config, rows)
            seconds = product.seconds(config, x, out)
        except Exception as problem:
            print(f"skipped {product.name} {config}: {str(problem)[:150]}", flush=True)
            continue
        if not error <= _TOLERANCE:
            print(f"WRONG RESULT {product.name} {rows} rows, error {error:.2e}: {config}", flush=True)
            continue
        found["wide"].append((seconds * 1e6, config, error))
    found["wide"].sort(key=lambda entry: entry[0])
    return found


def compete(shape: str, rows: int, found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """The fastest choice of each product in whole layers: exchanged one after the other, once around."""
    chain = Chain(shape, rows)
    now: dict[str, Choice] = {}
    for name, (n, k, gated) in chain.parts.items():
        entry = next((c for last, c in small_gemm_table.TABLE.get((gated, n, k), ()) if rows <= last), None)
        now[name] = entry
    before = chain.seconds_per_layer(now)  # type: ignore[arg-type]
    best, fastest = dict(now), before
    gains: dict[str, float] = {}
    for name in chain.parts:
        for _, config, _ in found[name, rows]["wide"][:_FINALISTS]:
            for option in (config, dataclasses.replace(config, pdl=False)):
                trial = best | {name: option}
                seconds = chain.seconds_per_layer(trial)  # type: ignore[arg-type]
                gains[f"{name} {option}"] = seconds * 1e6
                if seconds < fastest * 0.998:
                    best, fastest = trial, seconds
    return {"rows": rows, "before_us": before * 1e6, "chosen_us": fastest * 1e6, "chosen": best, "tried": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[160, 256, 128, 192, 96], help="up to 256")
    parser.add_argument("--products", nargs="+", default=_PRODUCTS, choices=_PRODUCTS)
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which nothing more is begun")
    parser.add_argument("--save", type=Path, help="JSON file of all timings")
    arguments = parser.parse_args()
    if not all(0 < rows <= 256 for rows in arguments.rows):
        parser.error("--rows must be between 1 and 256")
    end = time.monotonic() + arguments.budget
    parts = {name: part for name, part in products(arguments.shape).items() if name in arguments.products}
    compile_all(parts, arguments.rows, arguments.workers)
    wide_gemm.prepare(torch.device("cuda", torch.cuda.current_device()))
    bandwidth, rate = read_bandwidth(), matrix_rate()
    torch.cuda.empty_cache()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s, products {rate / 1e12:.0f} TFLOP/s", flush=True)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    chains: list[dict[str, Any]] = []
    everything = {name: Product(name, *part) for name, part in parts.items()}

    def save() -> None:
        if arguments.save:
            facts = {"bandwidth": bandwidth, "rate": rate, "products": list(found.values()), "layers": chains}
            arguments.save.write_text(json.dumps(facts, indent=1, default=str))

    for rows in arguments.rows:
        for name, product in everything.items():
            if time.monotonic() > end:
                break
            entry = found[name, rows] = measure(product, rows)
            least = floor(product.n, product.k, rows, bandwidth, rate) * 1e6
            print(f"{name:8} {rows:5} rows  floor {least:7.1f}  cuBLAS {entry['cublas_us']:7.1f} us", flush=True)
            for microseconds, config, error in entry["wide"]:
                print(f"    {microseconds:7.1f}  {error:.1e}  {config}", flush=True)
        complete = all((name, rows) in found for name in _PRODUCTS)
        if complete and time.monotonic() < end:
            chain = compete(arguments.shape, rows, found)
            chains.append(chain)
            print(
                f"layer of {rows} rows: now {chain['before_us']:.1f} us, chosen {chain['chosen_us']:.1f} us", flush=True
            )
            for option, microseconds in chain["tried"].items():
                print(f"    {microseconds:7.1f}  {option}", flush=True)
        save()
    print("Entries of the table; None is cuBLAS:")
    for name, (n, k, gated) in parts.items():
        entries = []
        for rows in sorted(arguments.rows):
            entry = found.get((name, rows))
            if entry is None:
                continue
            chosen = next((chain["chosen"][name] for chain in chains if chain["rows"] == rows), None)
            entries.append(f"({rows}, {chosen})")
        print(f"    ({gated}, {n}, {k}): ({', '.join(entries)},),  # {name}")


if __name__ == "__main__":
    main()
