"""Every GPU figure of docs/benchmarks.md: runs the measurements one after the other, and prints their part of the page.

    python -m bench.gpu.report --folder results/gpu
    python -m bench.gpu.report --folder results/gpu --parts llama qwen3
    python -m bench.gpu.report --folder results/gpu --page-only

Each part is a process of its own, whose figures and lines are kept in the folder; parts that ran earlier stay there, so
a page can be put together from several runs of one machine. A part that fails is named on the page.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpc.version import revision, version

PARTS: dict[str, tuple[str, ...]] = {
    "elementwise": ("bench.gpu.elementwise",),
    "sampling": ("bench.gpu.sampling",),
    "gemm": ("bench.gpu.gemm", "--rows", "1", "8", "16", "32", "64", "256"),
    "wide_gemm": ("bench.gpu.wide_gemm", "--rows", "128", "160", "256"),
    "attention": ("bench.gpu.attention",),
    "llama": ("bench.gpu.engine_step", "--shape", "llama-3.1-8b", "--parts", "decode", "prefill", "idle"),
    "qwen3": ("bench.gpu.engine_step", "--shape", "qwen3-8b", "--parts", "decode", "prefill"),
    "prefill_graph": ("bench.gpu.prefill_graph", "--parts", "fit", "boundary", "gate", "cost", "--repetitions", "3"),
    "kv_transfer": ("bench.gpu.kv_transfer", "--rounds", "3"),
    "tensor_parallel": ("bench.gpu.tensor_parallel",),
}
TITLES = {
    "elementwise": "Norms, heads, SwiGLU, copies, metadata",
    "sampling": "Sampling",
    "gemm": "Products of few rows",
    "wide_gemm": "Products of 81 to 256 rows",
    "attention": "Attention",
    "llama": "Engine steps, Llama-3.1-8B shape",
    "qwen3": "Engine steps, Qwen3-8B shape",
    "prefill_graph": "Prefill graphs",
    "kv_transfer": "KV transfer between two engines on one GPU",
    "tensor_parallel": "One model over several GPUs",
}
# Milliseconds at most, of the Llama-3.1-8B shape: rows x context, rows x tokens, tokens of a first prompt.
DECODE_MS = {(64, 8192): 20.3, (16, 32767): 20.2, (1, 1025): 4.1, (256, 1024): 15.5}
PREFILL_MS = {(1, 8192): 200.0, (16, 2048): 730.0}
FIRST_TOKEN_MS = {16: 5.0, 64: 5.0, 160: 6.0}
EAGER_SHARE = 0.5  # of the time without graphs, at most
HIDDEN_SHARE = 0.8


def run_part(name: str, folder: Path, limit_s: float) -> bool:
    """Runs one part and keeps its lines and figures. False: it failed."""
    began = time.monotonic()
    command = [sys.executable, "-m", *PARTS[name], "--save", str(folder / f"{name}.json")]
    print(f"{name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    (folder / f"{name}.json").unlink(missing_ok=True)
    with (folder / f"{name}.log").open("w") as log, (folder / f"{name}.err").open("w") as errors:
        try:
            status = subprocess.run(command, stdout=log, stderr=errors, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            status = -1
            errors.write(f"cut off after {limit_s:g} s\n")
    print(f"  status {status}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return status == 0


def describe_machine(folder: Path) -> None:
    """Notes what the figures were measured on."""
    import torch
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "baton": f"{version()} ({revision() or 'unknown revision'})",
    }
    try:
        import flashinfer

        facts["flashinfer"] = flashinfer.__version__
    except ImportError:
        facts["flashinfer"] = "not installed"
    (folder / "machine.json").write_text(json.dumps(facts, indent=1))


def figures(folder: Path, name: str) -> Any:
    """A part's JSON, or None when it has none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def verdict(value: float, limit: float) -> str:
    return "met" if value <= limit else "**missed**"


def engine_rows(report: dict[str, Any], shape: str) -> Iterator[str]:
    """The engine's figures beside their floors and limits, as rows of one table."""
    limited = shape == "llama"
    for found in report.get("decode", ()):
        limit = DECODE_MS.get((found["rows"], found["context"])) if limited else None
        low, high = found["device_ms_range"]
        yield (
            f"| decode step, {found['rows']} x {found['context']} | {found['floor_ms']:.2f} "
            f"| {found['device_ms']:.2f} ({low:.2f}–{high:.2f}); wall clock {found['execute_ms']:.2f} "
            f"| {found['device_ms'] / found['floor_ms']:.2f} | {limit or ''} "
            f"| {verdict(found['device_ms'], limit) if limit else ''} |"
        )
    for found in report.get("prefill", ()):
        limit = PREFILL_MS.get((found["rows"], found["tokens"])) if limited else None
        low, high = found["ms_range"]
        yield (
            f"| prompts, {found['rows']} x {found['tokens']} | {found['floor_ms']:.1f} "
            f"| {found['ms']:.1f} ({low:.1f}–{high:.1f}) | {found['ms'] / found['floor_ms']:.2f} | {limit or ''} "
            f"| {verdict(found['ms'], limit) if limit else ''} |"
        )
    for found in report.get("idle", ()):
        limit = PREFILL_MS.get((found["prompts"], found["tokens"])) if limited else None
        low, high = found["ms_range"]
        when = f"after {found['idle_s']:.0f} s of rest" if found["idle_s"] else "one after the other"
        yield (
            f"| first tokens, {found['prompts']} x {found['tokens']}, {when} | "
            f"| {found['ms']:.1f} ({low:.1f}–{high:.1f}) | | {limit or ''} "
            f"| {verdict(found['ms'], limit) if limit else ''} |"
        )


def first_token_rows(report: dict[str, Any]) -> Iterator[str]:
    """First tokens with prefill graphs beside the same engine without, as rows of a table."""
    for found in report.get("fit", {}).get("first_token", ()):
        on, off = found["on"], found["off"]
        ratio = on["p50_ms"] / off["p50_ms"]
        limit = FIRST_TOKEN_MS.get(found["tokens"]) if found["requests"] == 1 else None
        judged = f"{verdict(on['p50_ms'], limit)}; ratio {verdict(ratio, EAGER_SHARE)}" if limit else ""
        yield (
            f"| {found['requests']} x {found['tokens']} | {off['p50_ms']:.2f} (p99 {off['p99_ms']:.2f}) "
            f"| {on['p50_ms']:.2f} (p99 {on['p99_ms']:.2f}) | {ratio:.2f} | {found['status']} "
            f"| {f'{limit}, {EAGER_SHARE}' if limit else ''} | {judged} |"
        )


def transfer_lines(report: dict[str, Any]) -> Iterator[str]:
    for transport, rounds in report.get("engines", {}).get("rows", {}).items():
        if not rounds:
            yield f"* {transport}: not served on this machine"
            continue
        hidden = statistics.median(found["hidden"] for found in rounds)
        gigabytes = rounds[0]["bytes"] / 1e9
        alone = statistics.median(found["alone_s"] for found in rounds)
        same = all(found["same_tokens"] for found in rounds)
        limit = f", at least {HIDDEN_SHARE:.0%}: {'met' if hidden >= HIDDEN_SHARE else '**missed**'}"
        yield (
            f"* {transport}: {hidden:.1%} of the transfer of {gigabytes:.2f} GB ({alone * 1e3:.0f} ms by itself, "
            f"{gigabytes / alone:.1f} GB/s) is hidden behind the computation{limit if transport == 'ipc' else ''}; "
            f"tokens {'identical to' if same else '**differ from**'} those of one engine"
        )


def shared_rows(report: dict[str, Any]) -> Iterator[str]:
    """Steps of one and several ranks beside their floors, as rows of a table."""
    for shape, engines in report["engines"].items():
        for ranks, found in sorted(engines.items(), key=lambda item: int(item[0])):
            steps = [(f"decode, {one['rows']} x {one['context']}", "device_ms", one) for one in found.get("decode", ())]
            steps += [(f"prompt of {one['tokens']}", "ms", one) for one in found.get("prompts", ())]
            for case, figure, one in steps:
                if figure not in one:
                    continue
                low, high = one[f"{figure}_range"]
                floor = one.get("floor_ms")
                ratio = f"{one[figure] / floor:.2f}" if floor else ""
                wall = f"; wall clock {one['execute_ms']:.2f}" if "execute_ms" in one else ""
                sums = f" ({one['of_it_sums_ms']:.2f} sums)" if "of_it_sums_ms" in one else ""
                yield (
                    f"| {shape}, {case} | {ranks} | {f'{floor:.2f}{sums}' if floor else ''} "
                    f"| {one[figure]:.2f} ({low:.2f}–{high:.2f}){wall} | {ratio} |"
                )
            for one in found.get("steps", ()):
                case = f"{one['requests']} requests decode after prompts of {one['prompt_tokens']}"
                yield f"| {shape}, {case}: the core's step | {ranks} | | {one['decode_step_ms']:.2f} | |"


def sum_lines(report: dict[str, Any]) -> Iterator[str]:
    """Microseconds of sums between ranks, of the first engine that has measured them."""
    engines = [found for ranked in report["engines"].values() for found in ranked.values()]
    for one in next((found["sums"] for found in engines if found.get("sums")), ()):
        times = ", ".join(f"{name.removesuffix('_us')} {us:.1f}" for name, us in one.items() if name.endswith("_us"))
        yield f"* {one['bytes']:,} bytes: {times}; taken: {one['taken']}"


def page(folder: Path) -> Iterator[str]:
    machine = figures(folder, "machine") or {}
    yield "## GPU"
    yield ""
    yield (
        f"{machine.get('date')}, Baton {machine.get('baton')}. One {machine.get('device')}, driver "
        f"{machine.get('driver')}, Python {machine.get('python')}, torch {machine.get('torch')}, triton "
        f"{machine.get('triton')}, flashinfer {machine.get('flashinfer')}. Random weights of real shapes in bfloat16, "
        "made on the device; greedy tokens; figures are medians (lowest–highest). The floors are bytes over the read "
        "bandwidth or FLOPs over the matrix rate, both measured in the same process."
    )
    yield ""
    yield "`python -m bench.gpu.report --folder results/gpu` prints this part of the page."
    for name, command in PARTS.items():
        log = folder / f"{name}.log"
        yield ""
        yield f"### {TITLES[name]}"
        yield ""
        yield f"`python -m {' '.join(command)}`"
        yield ""
        if not log.exists():
            yield "Not run."
            continue
        report = figures(folder, name)
        if report is None:
            yield "**Did not end well**; what it printed before:"
            yield ""
        elif name in ("llama", "qwen3"):
            yield (
                f"Read bandwidth {report['bandwidth'] / 1e12:.2f} TB/s, products {report['matrix_rate'] / 1e12:.0f} "
                "TFLOP/s. Milliseconds."
            )
            yield ""
            yield "| | floor | measured | of floor | at most | |"
            yield "|---|---|---|---|---|---|"
            yield from engine_rows(report, name)
            continue
        elif name == "prefill_graph":
            yield "Milliseconds from an idle engine's `add` to the first tokens of all prompts."
            yield ""
            yield "| prompts x tokens | without | with | ratio | status | at most | |"
            yield "|---|---|---|---|---|---|---|"
            yield from first_token_rows(report)
            yield ""
        elif name == "kv_transfer":
            yield from transfer_lines(report)
            yield ""
        elif name == "tensor_parallel" and report["engines"]:
            yield f"{report['devices']} x {report['device_name']}. Milliseconds; a floor is that of one rank's share."
            yield ""
            yield "| | ranks | floor | measured | of floor |"
            yield "|---|---|---|---|---|"
            yield from shared_rows(report)
            yield ""
            yield "Sums between the ranks, in microseconds:"
            yield ""
            yield from sum_lines(report)
            yield ""
        yield "```"
        yield log.read_text().rstrip()
        yield "```"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("results/gpu"), help="where figures are kept")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which a part is cut off")
    parser.add_argument("--page-only", action="store_true", help="print the page of what the folder holds")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    well = True
    if not arguments.page_only:
        describe_machine(folder)
        for name in arguments.parts:
            well &= run_part(name, folder, arguments.limit_s)
    print("\n".join(page(folder)))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
