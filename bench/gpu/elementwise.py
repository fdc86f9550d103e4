"""Element-wise, block-copy and metadata kernels: device time, bytes, and how far from the copy bandwidth.

    python -m bench.gpu.elementwise                # the table
    python -m bench.gpu.elementwise --tune         # also other tiles and warps than the kernels choose
    BATON_KERNEL_PDL=off python -m bench.gpu.elementwise

Launches follow one another in a CUDA graph, as in the engine's graphs, and inputs rotate through more memory than the
L2 cache holds, except where a decode step finds them there (up to 256 rows). So the time of a small launch includes
the gap to the one before. Beside them stands PyTorch's own kernel where there is one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from bench.gpu.budget import Budget, add_budget
from bench.gpu.shapes import SHAPES
from bench.gpu.timing import copies_beyond_cache, copy_bandwidth, seconds_per_call
from kernels import block_copy, qkv, rms_norm, swiglu
from kernels.attention_metadata import PagePlan, attention_metadata, page_plan
from kernels.metadata import DecodeLayout, PrefillLayout, StepBuffers, prepare_decode, prepare_prefill

ROWS = (1, 16, 64, 256, 8192)
_BF16 = torch.bfloat16
_SMALL_CALLS = 100
_BLOCKS = 4096  # of the pool that block copies read and write
_WARM_ROWS = 256  # with fewer, a decode step finds the activations in the L2 cache


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    shape: str
    median_us: float
    bytes: int  # read and written
    gb_per_s: float


def _row(name: str, shape: str, moved: int, run: Callable[[int], object], calls: int) -> Row:
    seconds = seconds_per_call(run, calls)
    return Row(name, shape, seconds * 1e6, moved, moved / seconds / 1e9)


def _sets(rows: int, bytes_each: int) -> int:
    return 1 if rows <= _WARM_ROWS else copies_beyond_cache(bytes_each)


def _random(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def norms(hidden: int = 4096) -> Iterator[Row]:
    """The norm alone, with the residual sum before it, and PyTorch's for both."""
    weight = _random(hidden)
    for rows in ROWS:
        moved = rows * hidden * 12
        sets = _sets(rows, moved)
        calls = max(sets, _SMALL_CALLS) if rows <= _WARM_ROWS else 2 * sets
        residuals = [_random(rows, hidden, dtype=torch.float32) for _ in range(sets)]
        deltas, outs = ([_random(rows, hidden) for _ in range(sets)] for _ in range(2))
        shape = f"{rows} x {hidden}"

        def fused(i: int, a=residuals, d=deltas, o=outs, n=sets) -> None:
            rms_norm.add_rms_norm(a[i % n], d[i % n], weight, 1e-5, o[i % n])

        def alone(i: int, d=deltas, o=outs, n=sets) -> None:
            rms_norm.rms_norm(d[i % n], weight, 1e-5, o[i % n])

        def pytorch(i: int, a=residuals, d=deltas, n=sets) -> None:
            F.rms_norm(a[i % n].add_(d[i % n]).to(_BF16), (hidden,), weight, 1e-5)

        yield _row("add_rms_norm", shape, moved, fused, calls)
        yield _row("rms_norm bf16", shape, rows * hidden * 4, alone, calls)
        yield _row("PyTorch add + norm", shape, moved, pytorch, calls)


def swiglus(inner: int = 14336) -> Iterator[Row]:
    for rows in ROWS:
        moved = rows * inner * 6
        sets = _sets(rows, moved)
        calls = _SMALL_CALLS if rows <= _WARM_ROWS else 2 * sets
        inputs = [_random(rows, 2 * inner) for _ in range(sets)]
        outs = [torch.empty(rows, inner, dtype=_BF16, device="cuda") for _ in range(sets)]
        shape = f"{rows} x {inner}"

        def fused(i: int, x=inputs, o=outs, n=sets) -> None:
            swiglu.swiglu(x[i % n], o[i % n])

        def pytorch(i: int, x=inputs, n=sets) -> None:
            gate, up = x[i % n].chunk(2, dim=-1)
            F.silu(gate).mul_(up)

        yield _row("swiglu", shape, moved, fused, calls)
        yield _row("PyTorch silu, mul", shape, moved, pytorch, calls)


def prologues(
    shape_name: str = "llama-3.1-8b", block_size: int = 64, rows_list: tuple[int, ...] = ROWS
) -> Iterator[Row]:
    """Split, norm (Qwen3), rotation, KV write; queries in place, as the engine does."""
    model = SHAPES[shape_name]
    heads, kv_heads, dim = model["num_attention_heads"], model["num_key_value_heads"], model["head_dim"]
    norm = _random(dim) if model["model_type"] == "qwen3" else None
    for rows in rows_list:
        moved = rows * ((heads + 2 * kv_heads) * dim * 4 + dim * 4)
        sets = _sets(rows, moved)
        calls = _SMALL_CALLS if rows <= _WARM_ROWS else 2 * sets
        blocks = -(-rows // block_size) + 8
        inputs = [_random(rows, heads + 2 * kv_heads, dim) for _ in range(sets)]
        pools = [_random(blocks, 2, kv_heads, block_size, dim) for _ in range(sets)]
        angle = _random(rows, dim // 2, dtype=torch.float32)
        cos, sin = angle.cos(), angle.sin()
        # A prompt's tokens are neighbours in their blocks; decode rows lie anywhere
        slots = torch.arange(rows, device="cuda")
        if rows <= _WARM_ROWS:
            slots = torch.randperm(blocks * block_size, device="cuda")[:rows]

        def fused(i: int, x=inputs, p=pools, n=sets, s=slots, c=cos, si=sin) -> None:
            source = x[i % n]
            qkv.split_norm_rotate_write(source, norm, norm, 1e-6, c, si, s, p[i % n], source[:, :heads])

        yield _row(f"qkv prologue {model['model_type']}", f"{rows} tokens, {heads}/{kv_heads}", moved, fused, calls)


def copies(kv_heads: int = 8, block_size: int = 64, dim: int = 128) -> Iterator[Row]:
    """Blocks of a layer to and from one piece, on the device or pinned; PyTorch's indexing beside it."""
    pool = _random(_BLOCKS, 2 * kv_heads * block_size * dim).view(torch.int64)
    for count in (1, 16, 128):
        count = min(count, _BLOCKS - 1)
        words = pool.shape[1]
        moved = 2 * count * words * 8
        sets = copies_beyond_cache(moved, 30)
        chosen = [torch.randperm(_BLOCKS, device="cuda")[:count] for _ in range(sets)]
        staged = [torch.zeros(count, words, dtype=torch.int64, device="cuda") for _ in range(sets)]
        shape = f"{count} blocks, {kv_heads} heads"

        def gather(i: int, b=chosen, o=staged, n=sets) -> None:
            block_copy.gather_rows(pool, b[i % n], o[i % n])

        def scatter(i: int, b=chosen, o=staged, n=sets) -> None:
            block_copy.scatter_rows(pool, b[i % n], o[i % n])

        def select(i: int, b=chosen, o=staged, n=sets) -> None:
            torch.index_select(pool, 0, b[i % n], out=o[i % n])

        def put(i: int, b=chosen, o=staged, n=sets) -> None:
            pool.index_copy_(0, b[i % n], o[i % n])

        yield _row("gather_rows", shape, moved, gather, 2 * sets)
        yield _row("PyTorch index_select", shape, moved, select, 2 * sets)
        yield _row("scatter_rows", shape, moved, scatter, 2 * sets)
        yield _row("PyTorch index_copy_", shape, moved, put, 2 * sets)
    count = min(128, _BLOCKS - 1)
    blocks = torch.arange(1, count + 1, device="cuda")
    pinned = torch.empty(count, pool.shape[1], dtype=torch.int64, pin_memory=True)
    moved = pinned.numel() * 8
    shape = f"{count} blocks"
    yield _row("gather to pinned", shape, moved, lambda i: block_copy.gather_rows(pool, blocks, pinned), 4)
    yield _row("scatter from pinned", shape, moved, lambda i: block_copy.scatter_rows(pool, blocks, pinned), 4)


def metadata() -> Iterator[Row]:
    """What begins a step."""
    for rows, width in ((1, 17), (64, 129), (256, 17), (16, 512)):
        for changed in (0, rows):
            layout = DecodeLayout(rows, changed, width if changed else 0)
            words = torch.ones(layout.words, dtype=torch.int32)
            words[:4] = torch.tensor(layout.header, dtype=torch.int32)
            words[layout.changed_rows] = torch.arange(changed, dtype=torch.int32)
            step = (words.cuda(), StepBuffers.allocate(rows, rows, width, "cuda"), 64)
            moved = layout.words * 4 + rows * 36 + changed * width * 4
            shape = f"{rows} rows, {changed} tables of {width}"
            yield _row("prepare_decode", shape, moved, lambda i, s=step: prepare_decode(*s), _SMALL_CALLS)
    for rows, each in ((1, 16), (1, 160), (1, 8192), (16, 512), (256, 32)):
        layout = PrefillLayout(rows, rows * each, -(-each // 64), rows)
        words = torch.ones(layout.words, dtype=torch.int32)
        words[:4] = torch.tensor(layout.header, dtype=torch.int32)
        words[layout.cu_seqlens] = torch.arange(rows + 1, dtype=torch.int32) * each
        words[layout.starts] = 0
        buffers = StepBuffers.allocate(rows, rows * each, layout.columns, "cuda")
        moved = layout.words * 4 + rows * each * 24
        staged = words.cuda()
        yield _row(
            "prepare_prefill",
            f"{rows} x {each} tokens",
            moved,
            lambda i, w=staged, b=buffers, n=each: prepare_prefill(w, b, 64, n),
            _SMALL_CALLS,
        )
    for rows, each in ((1, 1024), (128, 8), (1, 131072), (128, 1024)):
        tokens = rows * each
        lengths = torch.full((rows,), each, dtype=torch.int32, device="cuda")
        none, cu = torch.zeros_like(lengths), torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
        offset, cu_kv = torch.zeros(tokens, dtype=torch.int32, device="cuda"), torch.zeros_like(cu)
        pages = -(-each // 64)
        plan = PagePlan.allocate(rows, rows * pages, tokens, "cuda")
        tables = torch.ones(rows, pages, dtype=torch.int32, device="cuda")
        first = (lengths, none, cu, cu_kv, offset, each)
        second = (cu, lengths, tables, 64, plan)
        shape = f"{rows} x {each} tokens"
        yield _row("attention_metadata", shape, tokens * 4, lambda i, a=first: attention_metadata(*a), _SMALL_CALLS)
        yield _row("page_plan", shape, tokens * 8, lambda i, a=second: page_plan(*a), _SMALL_CALLS)


def tuning() -> Iterator[Row]:
    """The same kernels with other tiles and warps than they choose."""
    for warps in (2, 4, 8, 16, 32):
        with mock.patch.object(rms_norm, "_warps", lambda rows, features, warps=warps: warps):
            for row in norms():
                if row.name.startswith("add"):
                    yield replace(row, name=f"{row.name} warps={warps}")
    for lines, heads, warps in (
        (4, 4, 2),
        (8, 8, 2),
        (8, 8, 4),
        (16, 8, 2),
        (16, 8, 4),
        (32, 8, 4),
        (32, 8, 8),
        (16, 4, 4),
        (32, 4, 4),
        (64, 8, 8),
    ):
        tile = (lines // heads, heads, warps)
        with mock.patch.object(qkv, "_tiles", lambda *shape, tile=tile: tile):
            for row in (*prologues(), *prologues("qwen3-8b", rows_list=(1, 8192))):
                yield replace(row, name=f"{row.name} tile={tile}")
    for block in (512, 1024, 2048, 4096):
        with mock.patch.object(swiglu, "_BLOCK", block):
            for row in swiglus():
                if row.name == "swiglu":
                    yield replace(row, name=f"{row.name} block={block}")
    for part in (1 << 13, 1 << 14, 1 << 15, 1 << 16):
        with mock.patch.object(block_copy, "_PART", part):
            for row in copies():
                if row.name in ("gather_rows", "scatter_rows"):
                    yield replace(row, name=f"{row.name} part={part}")


def measurements(tune: bool = False) -> Iterator[Row]:
    """Everything, in the order of the table."""
    copied = copy_bandwidth()
    yield Row("device copy", "4 GiB", 2 * (4 << 30) / copied * 1e6, 2 * (4 << 30), copied / 1e9)
    yield from norms()
    yield from swiglus()
    yield from prologues()
    yield from prologues("qwen3-8b")
    yield from copies()
    yield from metadata()
    if tune:
        yield from tuning()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="also other tiles and warps than the kernels choose")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    add_budget(parser)
    arguments = parser.parse_args()
    rows = []
    for row in Budget(arguments.budget).of(measurements(arguments.tune), "rows"):
        rows.append(row)
        print(f"{row.name:38} {row.shape:26} {row.median_us:9.2f} us {row.gb_per_s:8.0f} GB/s", flush=True)
    if arguments.save is not None:
        arguments.save.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
