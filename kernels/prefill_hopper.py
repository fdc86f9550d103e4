"""Attention of long prompts on Hopper GPUs: the work of `prefill_attention`, spread over specialised warps.

A program holds 128 query rows (tokens times the query heads that share a key head) and goes through the keys from the
diagonal down, 128 at a time. One warp does nothing but ask the tensor memory unit for pages, two tiles ahead; two
groups of four warps each multiply 64 of the rows. A tile costs a group 1024 cycles of the matrix units (two products of
64 x 128 x 128) and some 700 of the other units, 530 of them for exponentials. So the groups take turns (`TURNS`): one
has the matrix units while the other computes its weights. Left alone, both would multiply, then both compute weights.

Operations, bytes and the floor are those of kernels/prefill_attention.py; what is lost there is the overlap. Keys and
values come as boxes of 64 tokens by 64 elements, laid so that four boxes make the tile that the matrix units read.
Slots past a row's end are zeroed in the tile of values that has them: a weight of zero does not undo NaN.

In Gluon, Triton's language for explicit layouts; there is no interpreter for it.
"""

from __future__ import annotations

import importlib.util
import math

import torch

from kernels.jit import jit, tl

if importlib.util.find_spec("triton") is None:  # a launch raises KernelUnavailable
    gl, gluon_jit = tl, jit
else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    gluon_jit = gluon.jit

_HALF = gl.constexpr(64)


@gluon_jit
def _add(a, b):
    return a + b


@gluon_jit
def _produce(
    described,
    table,
    head,
    last,
    count,
    k_parts,
    v_parts,
    k_full,
    k_empty,
    v_full,
    v_empty,
    length,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    TILE: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: asks for the pages of tile after tile, as places become free."""
    HALVES: gl.constexpr = TILE // _HALF
    PANELS: gl.constexpr = DIM // _HALF
    PARTS: gl.constexpr = HALVES * PANELS
    for i in range(count):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        tile = last - i
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), TILE * DIM * 2)
        for half in gl.static_range(HALVES):
            token = gl.minimum(tile * TILE + half * _HALF, length - 1)
            block = gl.load(table + token // PAGE)
            at = (block * (2 * KV_HEADS) + head) * PAGE + token % PAGE // _HALF * _HALF
            for panel in gl.static_range(PANELS):
                part = k_parts.index(stage * PARTS + panel * HALVES + half)
                tma.async_copy_global_to_shared(described, [at, panel * _HALF], k_full.index(stage), part)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), TILE * DIM * 2)
        for half in gl.static_range(HALVES):
            token = gl.minimum(tile * TILE + half * _HALF, length - 1)
            block = gl.load(table + token // PAGE)
            at = (block * (2 * KV_HEADS) + KV_HEADS + head) * PAGE + token % PAGE // _HALF * _HALF
            for panel in gl.static_range(PANELS):
                part = v_parts.index(stage * PARTS + panel * HALVES + half)
                tma.async_copy_global_to_shared(described, [at, panel * _HALF], v_full.index(stage), part)


@gluon_jit
def _weigh(scores, top, norm, hidden, scale, MASKED: gl.constexpr):
    """Weights of a tile, largest score and sum of weights with it, and what the sums so far shrink by."""
    if MASKED:
        scores = gl.where(hidden, float("-inf"), scores)
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    base = new_top
    if MASKED:
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(top - base)
    return weights, new_top, norm * shrink + gl.sum(weights, 1), shrink


@gluon_jit
def _steps(
    begin,
    end,
    query,
    keys,
    values,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
    at,
    last,
    scale,
    weights,
    top,
    norm,
    acc,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    PART: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Tiles begin to end, the first being 1: the weights of one while the last one's are multiplied with its values."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    for i in range(begin, end):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        before = (i - 1) % STAGES
        before_phase = ((i - 1) // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        if TURNS:
            mbarrier.wait(turns.index(PART), ((i - 1) & 1) ^ (1 - PART))
        nothing = gl.zeros([64, TILE], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), before_phase)
        acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - PART), count=1)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        hidden = at[:, None] < 0
        if MASKED:
            tokens = (last - i) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, S_LAYOUT))
            hidden = tokens[None, :] > at[:, None]
            if WINDOW > 0:
                hidden = hidden | (tokens[None, :] <= at[:, None] - WINDOW)
        fresh, top, norm, shrink = _weigh(scores, top, norm, hidden, scale, MASKED)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        weights = gl.convert_layout(fresh.to(gl.bfloat16), P_LAYOUT)
    return weights, top, norm, acc


@gluon_jit
def _consume(
    queries,
    keys,
    values,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
    out,
    out_stride,
    first,
    within,
    new,
    head,
    low,
    high,
    length,
    last,
    count,
    masked,
    scale,
    PART: gl.constexpr,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    DIM: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    """One group of warps: 64 of the program's query rows."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    query = queries.index(PART)
    m = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    at = gl.minimum(low + m // GROUP, high)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    norm = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([64, DIM], gl.float32, O_LAYOUT)
    mbarrier.wait(k_full.index(0), 0)
    nothing = gl.zeros([64, TILE], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(query, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0), count=1)
    tokens = last * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, S_LAYOUT))
    hidden = tokens[None, :] > at[:, None]
    if WINDOW > 0:
        hidden = hidden | (tokens[None, :] <= at[:, None] - WINDOW)
    fresh, top, norm, _shrink = _weigh(scores, top, norm, hidden, scale, True)
    weights = gl.convert_layout(fresh.to(gl.bfloat16), P_LAYOUT)
    if (last + 1) * TILE > length:
        # The slots past the row's end count for nothing, but nothing times NaN is NaN
        mbarrier.wait(v_full.index(0), 0)
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [4, 1], [1, 0])
        for piece in gl.static_range(TILE // 32):
            some = values.index(0).slice(piece * 32, 32, dim=0)
            slots = last * TILE + piece * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, ROWS))
            some.store(gl.where((slots < length)[:, None], some.load(ROWS), 0.0))
        fence_async_shared()
        gl.thread_barrier()
    weights, top, norm, acc = _steps(
        1, masked, query, keys, values, k_full, k_empty, v_full, v_empty, turns, at, last, scale, weights, top, norm,
        acc, WINDOW, TILE, STAGES, True, S_LAYOUT, O_LAYOUT, PART, TURNS,
    )  # fmt: skip
    weights, top, norm, acc = _steps(
        masked, count, query, keys, values, k_full, k_empty, v_full, v_empty, turns, at, last, scale, weights, top,
        norm, acc, WINDOW, TILE, STAGES, WINDOW > 0, S_LAYOUT, O_LAYOUT, PART, TURNS,
    )  # fmt: skip
    final = (count - 1) % STAGES
    mbarrier.wait(v_full.index(final), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, values.index(final), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    acc = acc / gl.convert_layout(norm, gl.SliceLayout(1, O_LAYOUT))[:, None]
    # Through the queries' place, so that rows are written 16 bytes at a time
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [4, 1], [1, 0])
    query.store(acc.to(gl.bfloat16))
    result = query.load(OUT)
    n = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))
    token = (first + within + n // GROUP).to(gl.int64)
    real = (n < TOKENS * GROUP) & (within + n // GROUP < new)
    where = out + (token * out_stride + (head * GROUP + n % GROUP) * DIM)[:, None] + d[None, :]
    gl.store(where, result, mask=real[:, None])


# Views of larger buffers, at any row: their alignment must not call for another compilation in mid-serving
@gluon_jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens", "kv_lens"],
)
def _prefill_hopper_kernel(
    q,  # [tokens, heads, DIM], heads and elements dense
    described,  # tensor descriptor of the pool as [blocks * 2 * KV_HEADS * PAGE, DIM], boxes of 64 by 64
    block_tables,  # int32 [rows, ...]
    cu_seqlens,  # int32 [rows + 1]
    kv_lens,  # int32 [rows]
    out,  # [tokens, heads, DIM]
    rows,
    q_stride,  # elements from token to token
    table_stride,
    out_stride,
    scale,  # of scores in base 2: 1 / sqrt(head_dim) / ln 2
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    ROWS_PAD: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    TOKENS: gl.constexpr = 128 // GROUP
    HALF: gl.constexpr = 64
    PARTS: gl.constexpr = TILE // HALF * (DIM // HALF)
    head = gl.program_id(0)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row_ids = gl.arange(0, ROWS_PAD, layout=LINE)
    firsts = gl.load(cu_seqlens + row_ids, mask=row_ids < rows, other=0)
    lasts = gl.load(cu_seqlens + row_ids + 1, mask=row_ids < rows, other=0)
    ends = gl.associative_scan((lasts - firsts + TOKENS - 1) // TOKENS, 0, _add)
    unit = gl.max(ends, 0) - 1 - gl.program_id(1)
    if unit >= 0:
        row = gl.sum((ends <= unit).to(gl.int32), 0)
        within = (unit - gl.max(gl.where(ends <= unit, ends, 0), 0)) * TOKENS
        first = gl.load(cu_seqlens + row)
        new = gl.load(cu_seqlens + row + 1) - first
        length = gl.load(kv_lens + row)
        low = length - new + within
        high = gl.minimum(low + TOKENS, length) - 1
        table = block_tables + row.to(gl.int64) * table_stride
        last = high // TILE
        begin = low * 0
        if WINDOW > 0:
            begin = gl.maximum(low - WINDOW + 1, 0) // TILE
        count = last + 1 - begin
        masked = gl.maximum(gl.minimum(last + 1 - (low + 1) // TILE, count), 1)  # tiles that not all see entirely

        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        queries = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], LAYOUT)
        k_parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, HALF, HALF], LAYOUT)
        v_parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, HALF, HALF], LAYOUT)
        keys = k_parts._reinterpret(gl.bfloat16, [STAGES, TILE, DIM], LAYOUT)
        values = v_parts._reinterpret(gl.bfloat16, [STAGES, TILE, DIM], LAYOUT)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_full.index(stage), count=1)
            mbarrier.init(v_full.index(stage), count=1)
            mbarrier.init(k_empty.index(stage), count=2)
            mbarrier.init(v_empty.index(stage), count=2)
        for part in gl.static_range(2):
            mbarrier.init(turns.index(part), count=1)
        IN: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [4, 1], [1, 0])
        for part in gl.static_range(2):
            n = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, IN))
            d = gl.arange(0, DIM, layout=gl.SliceLayout(0, IN))
            token = (first + within + n // GROUP).to(gl.int64)
            real = (n < TOKENS * GROUP) & (within + n // GROUP < new)
            at = q + (token * q_stride + (head * GROUP + n % GROUP) * DIM)[:, None] + d[None, :]
            queries.index(part).store(gl.load(at, mask=real[:, None], other=0.0))
        fence_async_shared()
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        queries, keys, values, k_full, k_empty, v_full, v_empty, turns, out, out_stride, first, within,
                        new, head, low, high, length, last, count, masked, scale,
                        0, GROUP, TOKENS, DIM, WINDOW, TILE, STAGES, TURNS,
                    ),
                ),
                (
                    _consume,
                    (
                        queries, keys, values, k_full, k_empty, v_full, v_empty, turns, out, out_stride, first, within,
                        new, head, low, high, length, last, count, masked, scale,
                        1, GROUP, TOKENS, DIM, WINDOW, TILE, STAGES, TURNS,
                    ),
                ),
                (
                    _produce,
                    (
                        described, table, head, last, count, k_parts, v_parts, k_full, k_empty, v_full, v_empty, length,
                        KV_HEADS, PAGE, TILE, DIM, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def unavailable(q: torch.Tensor, pool: torch.Tensor) -> str:
    """Why the kernel cannot serve such queries and pool; empty where it can. Asks for shapes and the device alone."""
    _, heads, dim = q.shape
    _, _, kv_heads, page, _ = pool.shape
    if gl is tl or not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "it is for Hopper GPUs, compute capability 9.0"
    if q.dtype is not torch.bfloat16 or dim not in (64, 128) or page % 64 or heads // kv_heads > 128:
        return f"it is for bfloat16, heads of 64 or 128, pages of whole 64 tokens; not {q.dtype}, {dim}, {page}"
    if pool.numel() // dim >= 2**31:
        return "the tensor memory unit's coordinates are 32-bit, and the pool is larger"
    return ""


def prefill_hopper(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    window: int,
    scale: float,
    out: torch.Tensor,
    turns: bool = True,
) -> torch.Tensor:
    """`prefill_attention` with its arguments, checked there. Only where `unavailable` has nothing against it."""
    tokens, heads, dim = q.shape
    _, _, kv_heads, page, _ = pool.shape
    rows, group = kv_lens.shape[0], heads // kv_heads
    flat = pool.view(-1, dim)
    _prefill_hopper_kernel[(kv_heads, tokens // (128 // group) + rows)](
        q,
        TensorDescriptor(flat, list(flat.shape), [dim, 1], [64, 64], gl.NVMMASharedLayout(128, 16, 2)),
        block_tables,
        cu_seqlens,
        kv_lens,
        out,
        rows,
        q.stride(0),
        block_tables.stride(0),
        out.stride(0),
        scale * math.log2(math.e),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        PAGE=page,
        WINDOW=window,
        ROWS_PAD=next(size for size in (128, 512, 2048, 8192) if size >= rows),
        TILE=128,
        STAGES=2,
        TURNS=turns,
        num_warps=4,
        maxnreg=168,  # of 12 warps; at their work the groups have 240, the loading warp 24
    )
    return out
