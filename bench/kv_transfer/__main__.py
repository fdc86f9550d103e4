"""How fast the cache store moves KV from one process to another on this machine, by every transport.

    python -m bench.kv_transfer                 # everything, at 66 MB
    python -m bench.kv_transfer --short         # without the sweeps
    python -m bench.kv_transfer --short --check # status 1 when a transport is slower than it has to be

One process stages prompts, others load them through real agents (handshake, lease, checksums, completion by identity).
A figure is payload bytes / (first call of `load` to the last LoadDone), so it has every fixed cost in it. Beside them,
in the same rounds and between the same pools, the same bytes are moved without a cache store (see baselines.py).
Variants take turns, in another order each round; the first round is not counted. In it, the bytes are compared.

The sweeps change one thing each: blocks of a load, loads at once, layers. What they have per block is the time of a
load over its blocks; that of a load of one block is what a single block waits for.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.circumstances import circumstances
from bench.kv_transfer.memory import Shape
from bench.kv_transfer.processes import Processes, Way
from bench.kv_transfer.targets import LEAST_BYTES, ratios
from cache_store.nixl.agent import installed

TRANSPORTS = ("grpc", "tcp", "ipc", "nixl")
BARE = {"grpc": ("stream", "bare grpc stream"), "tcp": ("socket", "bare socket"), "ipc": ("copy", "memory copy"),
        "nixl": ("nixl", "bare nixl")}  # fmt: skip
SCATTERED_TOO = ("ipc", "nixl")  # baselines that can move blocks from anywhere to anywhere
MODES = ("off", "sample", "all")

Row = dict[str, float]


@dataclass(frozen=True)
class Variant:
    """`bare`: the baseline that it is; else a load by `way`."""

    name: str
    way: Way
    bare: str = ""
    scattered: bool = False

    def run(self, processes: Processes, blocks: int, concurrency: int = 1) -> Row:
        if self.bare:
            return processes.bare(self.bare, self.way.name, blocks, self.scattered)
        return processes.load(self.way.name, blocks, concurrency, self.scattered)


def ways_of(transport: str) -> list[Way]:
    return [Way(transport, mode) for mode in MODES] if transport in ("grpc", "tcp") else [Way(transport, "all")]


def variants_of(transports: Sequence[str]) -> list[Variant]:
    found = []
    for transport in transports:
        ways = ways_of(transport)
        bare, name = BARE[transport]
        found.append(Variant(name, ways[0], bare))
        if transport in SCATTERED_TOO:
            found.append(Variant(f"{name}, scattered", ways[0], bare, True))
        found += [Variant(way.name, way) for way in ways]
        found.append(Variant(f"{ways[-1].name}, scattered", ways[-1], scattered=True))
    return found


def measure(processes: Processes, variants: list[Variant], blocks: int, repeat: int) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {variant.name: [] for variant in variants}
    order = list(variants)
    dice = random.Random(1)
    for number in range(repeat + 1):
        print(f"  round {number} of {repeat}", file=sys.stderr, flush=True)  # it takes minutes
        for variant in order:
            row = variant.run(processes, blocks)
            if number:
                rows[variant.name].append(row)
            elif not variant.bare and not processes.same(variant.way.name, blocks, variant.scattered):
                raise SystemExit(f"{variant.name}: other bytes have arrived than were sent")
        dice.shuffle(order)
    return rows


def spread(rows: list[Row], key: str) -> tuple[float, float, float]:
    values = [row[key] for row in rows]
    return statistics.median(values), min(values), max(values)


def show(rows: dict[str, list[Row]], size: int) -> None:
    gigabytes = size / 1e9
    print(f"{'':<26}{'GB/s (min - max)':>24}{'ms':>9}{'first layer ms':>16}{'CPU s/GB: send':>16}{'receive':>9}")
    for name, each in rows.items():
        seconds, fast, slow = spread(each, "seconds")[0], spread(each, "seconds")[1], spread(each, "seconds")[2]
        rate = f"{gigabytes / seconds:.2f} ({gigabytes / slow:.2f} - {gigabytes / fast:.2f})"
        first, send = 1000 * spread(each, "first_s")[0], spread(each, "send_cpu_s")[0] / gigabytes
        print(
            f"{name:<26}{rate:>24}{1000 * seconds:9.1f}{f'{first:.1f}' if first else '':>16}"
            f"{f'{send:.2f}' if send else '':>16}{spread(each, 'cpu_s')[0] / gigabytes:9.2f}"
        )


def show_ratios(rows: dict[str, list[Row]]) -> bool:
    """Whether every target is met."""
    found = ratios({name: [row["seconds"] for row in each] for name, each in rows.items()})
    print("\nrate of one over that of another in the same round: median (min - max), and what it has to be")
    for each in found:
        target = each.target
        print(
            f"{target.what + ' / ' + target.beside:<44}{each.median:.2f} ({each.low:.2f} - {each.high:.2f}), "
            f">= {target.least:.2f}: {'met' if each.met else 'MISSED'}"
        )
    return all(each.met for each in found)


def sweep(
    processes: Processes, ways: list[Way], blocks: Sequence[int], at_once: Sequence[int], repeat: int
) -> list[Any]:
    """Median of each way, for each number of blocks and each number of loads at once."""
    found = []
    shape = processes.shape
    for count in blocks:
        for concurrency in at_once:
            if count % concurrency:
                continue
            rows: dict[str, list[Row]] = {way.name: [] for way in ways}
            for number in range(repeat + 1):
                for way in ways:
                    row = processes.load(way.name, count, concurrency, False)
                    if number:
                        rows[way.name].append(row)
            for name, each in rows.items():
                seconds = spread(each, "seconds")[0]
                load_s = spread(each, "load_s")[0]
                per_load = count // concurrency
                found.append(
                    {
                        "way": name,
                        "layers": shape.layers,
                        "blocks": count,
                        "loads": concurrency,
                        "gb_per_s": shape.bytes_of(count) / seconds / 1e9,
                        "ms_per_load": 1000 * load_s,
                        "ms_per_block": 1000 * load_s / per_load,
                    }
                )
                print(
                    f"{name:<12}{shape.layers:>7}{count:>8}{concurrency:>7}{found[-1]['gb_per_s']:>9.2f}"
                    f"{found[-1]['ms_per_load']:>13.2f}{found[-1]['ms_per_block']:>14.3f}"
                )
    return found


def sweeps(args: argparse.Namespace, processes: Processes, transports: Sequence[str], blocks: int) -> list[Any]:
    ways = [ways_of(transport)[-1] for transport in transports]
    print(f"\n{'':<12}{'layers':>7}{'blocks':>8}{'loads':>7}{'GB/s':>9}{'ms per load':>13}{'ms per block':>14}")
    counts = sorted({1, 8, 32, blocks})
    found = sweep(processes, ways, [count for count in counts if count <= blocks], [1], args.repeat)
    found += sweep(processes, ways, [blocks - blocks % 8], [2, 4, 8], args.repeat)
    for layers in args.sweep_layers:
        other = Processes(replace(processes.shape, layers=layers), ways, args.threads, args.chunk_bytes)
        try:
            found += sweep(other, ways, [blocks], [1], args.repeat)
        finally:
            other.close()
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.kv_transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2880)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--block-bytes", type=int, default=12288, help="bytes of one block of one layer")
    parser.add_argument("--repeat", type=int, default=15, help="counted rounds")
    parser.add_argument("--threads", type=int, default=4, help="workers of each agent (--cache-store-threads)")
    parser.add_argument(
        "--chunk-bytes", type=int, help="largest piece (--cache-store-chunk-bytes); by default as agents"
    )
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="those to measure, with commas between")
    parser.add_argument("--sweep-layers", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8])
    parser.add_argument("--short", action="store_true", help="no sweeps")
    parser.add_argument("--check", action="store_true", help="status 1 when a target is missed")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    transports = [each for each in args.transports.split(",") if each]
    if unknown := set(transports) - set(TRANSPORTS):
        raise SystemExit(f"--transports: {', '.join(sorted(unknown))}: choose from {', '.join(TRANSPORTS)}")
    if "nixl" in transports and not installed():
        print("nixl is not installed, so it is left out", file=sys.stderr)
        transports.remove("nixl")
    blocks = -(-args.tokens // args.block_size)
    shape = Shape(blocks, args.layers, args.block_size, args.block_bytes)
    size = shape.bytes_of(blocks)
    if args.check and size < LEAST_BYTES:
        raise SystemExit(f"--check needs at least {LEAST_BYTES} bytes, not {size}; raise --tokens")
    print(
        f"{args.tokens} tokens: {blocks} blocks of {args.block_bytes} B in {args.layers} layers, {size / 1e6:.1f} MB; "
        f"{args.repeat} rounds, medians"
    )
    processes = Processes(
        shape, [way for transport in transports for way in ways_of(transport)], args.threads, args.chunk_bytes
    )
    try:
        rows = measure(processes, variants_of(transports), blocks, args.repeat)
        show(rows, size)
        met = show_ratios(rows)
        swept = [] if args.short else sweeps(args, processes, transports, blocks)
    finally:
        processes.close()
    if args.json:
        for each in rows.values():
            for row in each:
                row["gb_per_s"] = size / row["seconds"] / 1e9
        given = {name: str(value) for name, value in vars(args).items()}
        found = {"arguments": given, "bytes": size, "circumstances": circumstances(), "rows": rows, "sweeps": swept}
        args.json.write_text(json.dumps(found))
    return 1 if args.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
