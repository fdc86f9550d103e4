"""Attention of decode rows, one query token each, over the paged KV pool.

A row of `n` visible tokens reads 2 * n * kv_heads * head_dim elements and does 4 * n * heads * head_dim operations:
with bfloat16 and 4 query heads to a key head 4 FLOP a byte, fifty times below what an H200 could do while it reads. The
floor is the bytes over the read bandwidth: 64 rows of 8192 tokens with 8 key heads of 128 are 2.15 GB a layer, 0.50 ms
at 4.27 TB/s. Everything here serves one end: always enough loads under way, each byte read once.

* The query heads that share a key head are the rows of one matrix product (padded to 16, the least that tensor cores
  take), so a key or value is read once for all of them.
* A row is cut into at most `splits` pieces of whole tiles (kernels.decode_spans). The cut is a function of the row's
  own length and of the configuration, and each piece has sums of its own, so a row's result does not depend on its
  neighbours.
* The grid is as many programs as the device holds at a time, whatever the lengths, so it is the same in every replay of
  a captured graph. The programs take turns at spans of successive pieces of one row and key head. A span is as long as
  an even share of all tiles allows, for each begins with nothing under way: at the end of a piece the sums go to the
  scratch memory while the loads of the next piece go on.
* What a span begins with is asked into the L2 cache (`prefetch`) while the kernel or the span before it ends.
* The program that ends a row's last piece (an atomic counter says which) adds them up, which saves a second launch.
* The block id of the next tile is read one tile ahead, so that the loads of keys and values never wait for it. With
  `descriptors` a tile comes by the tensor memory unit, as one copy, where a tile lies in one page.

Slots past a row's end may hold anything, NaN included: they reach neither the scores nor the sum over values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.decode_spans import place_span, plan_spans
from kernels.jit import jit, pdl_options, tl
from kernels.paged_kv import described, dot, multiprocessors, next_power


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel runs. Sizes are powers of two, `splits` apart."""

    tile: int  # tokens of one step of the loop
    stages: int  # tiles whose loads are under way, the one in use included, plus 1
    warps: int
    per_sm: int  # programs per multiprocessor
    splits: int  # pieces of a row at most
    min_tiles: int  # tiles of a piece at least
    rounds: int  # spans that a program has on average, where rows can be cut so far
    descriptors: bool = False  # load tiles by tensor descriptors; needs pages of whole tiles
    prefetch: int = 2  # tiles asked for before a span begins, while the kernel or the span before it ends; or 0


@dataclass(frozen=True, slots=True)
class _Cut:
    """For batches up to `rows`. Few rows need many short pieces to occupy the device; many rows occupy it anyway, and
    the sums between pieces cost a microsecond each."""

    rows: int
    splits: int
    min_tiles: int
    rounds: int = 1


_CUTS = (_Cut(1, 32, 2), _Cut(4, 32, 4), _Cut(8, 16, 4), _Cut(16, 8, 8), _Cut(64, 4, 32), _Cut(2**31, 4, 32))
_MANY_ROWS = 64  # beyond, spans are short: three programs on a multiprocessor hide each other's beginnings


def config_for(rows: int, head_dim: int, itemsize: int) -> DecodeConfig:
    """The configuration for a batch of `rows`, as measured on an H200. It depends on nothing that changes from step to
    step."""
    tile = max(16, min(64, 16384 // (next_power(head_dim) * itemsize)))
    cut = next(cut for cut in _CUTS if rows <= cut.rows)
    many = rows > _MANY_ROWS
    return DecodeConfig(
        tile=tile,
        stages=3 if many else 4,
        warps=4,
        per_sm=3 if many else 2,
        splits=cut.splits,
        min_tiles=cut.min_tiles,
        rounds=cut.rounds,
        descriptors=not many,
        prefetch=0 if many else 2,
    )


@dataclass(slots=True)
class DecodeScratch:
    """Memory between the pieces of cut rows. Launches that share it must not overlap."""

    partial: torch.Tensor  # float32 [size] sums over the values of each piece, not yet divided
    stats: torch.Tensor  # float32 [size] per piece and head: largest score (in base 2), sum of the weights
    counters: torch.Tensor  # int32 [rows * kv heads] pieces that have ended; zero between launches


def scratch_for(
    max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, splits: int | None = None
) -> DecodeScratch:
    """Scratch memory for up to max_rows rows under `config_for` (or, given `splits`, any configuration up to that)."""
    most = (min(cut.rows, max_rows) for cut in _CUTS)
    pieces = max(rows * (splits or config_for(rows, head_dim, 2).splits) for rows in most)
    return DecodeScratch(
        partial=torch.empty(pieces * num_heads * head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(pieces * num_heads * 2, dtype=torch.float32, device=device),
        counters=torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
    )


def reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    window: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """The same in PyTorch, in q's precision: q [rows, heads, head_dim] -> [rows, heads, head_dim]."""
    rows, heads, dim = q.shape
    _, _, kv_heads, page, _ = pool.shape
    out = torch.zeros_like(q)
    for row in range(rows):
        length = int(kv_lens[row])
        if length == 0:
            continue
        blocks = block_tables[row, : -(-length // page)].long()
        # [blocks, 2, kv_heads, page, dim] -> [2, kv_heads, tokens, dim]
        keys, values = pool[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :length].to(q.dtype)
        if window:
            keys, values = keys[:, -window:], values[:, -window:]
        query = q[row].view(kv_heads, heads // kv_heads, dim)
        scores = query @ keys.transpose(1, 2) * (scale or dim**-0.5)
        out[row] = (torch.softmax(scores, -1) @ values).view(heads, dim)
    return out


@jit
def _attend_tile(
    q,
    k,
    v,
    top,
    weights,
    acc,
    seen,
    scale,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One more tile: scores in base 2, their maximum `top` [M], weights [M, TILE] still per slot, sums acc [M, DIM]."""
    zeros = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    scores = dot(q, tl.trans(k), zeros, PRECISION) * scale
    if MASKED:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    fresh = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)[:, None]
    acc = dot(fresh.to(v.dtype), v, acc * shrink, PRECISION)
    return new_top, weights * shrink + fresh, acc


@jit
def _prefetch(
    pool,
    block_tables,
    table_stride,
    row,
    head,
    begin,
    end,
    width,
    blocks,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Asks for the first COUNT tiles to be brought into the L2 cache, 128 parts of each. Whatever the arguments are,
    the addresses are within the tables and the pool."""
    PART: tl.constexpr = TILE * DIM // 128  # elements
    part = tl.arange(0, 128 * COUNT)
    tile = tl.maximum(tl.minimum(begin + part // 128, tl.maximum(end - 1, begin)), 0)
    column = tl.minimum(tile * TILE // PAGE, width - 1)
    block = tl.load(block_tables + row.to(tl.int64) * table_stride + column, cache_modifier=".cg")
    block = tl.minimum(tl.maximum(block, 0), blocks - 1)
    base = pool + block.to(tl.int64) * (2 * KV_HEADS * PAGE * DIM) + head * (PAGE * DIM) + tile * TILE % PAGE * DIM
    keys = base + part % 128 * PART
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $3; cp.async.bulk.prefetch.L2.global [$2], $3; mov.u32 $0, 0;",
        "=r,l,l,r",
        [
            keys,
            keys + KV_HEADS * PAGE * DIM,
            tl.full([128 * COUNT], PART * pool.dtype.element_ty.primitive_bitwidth // 8, tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _store_piece(partial, stats, slot, g, h, top, weights, acc, GROUP: tl.constexpr, DIM: tl.constexpr):
    # In halves, which takes half the shared memory for their way into rows: a third program fits
    HALF: tl.constexpr = acc.shape[1] // 2
    low, high = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0], 2, HALF]), [0, 2, 1]))
    at = partial + slot * (GROUP * DIM) + g[:, None] * DIM + h[None, :]
    tl.store(at, low, mask=(g < GROUP)[:, None] & (h < DIM)[None, :])
    tl.store(at + HALF, high, mask=(g < GROUP)[:, None] & (h + HALF < DIM)[None, :])
    tl.store(stats + slot * (2 * GROUP) + g, top, mask=g < GROUP)
    tl.store(stats + slot * (2 * GROUP) + GROUP + g, tl.sum(weights, 1), mask=g < GROUP)


# Views of larger buffers, at any row: their alignment must not call for another compilation in mid-serving
@jit(
    do_not_specialize=["rows", "table_stride", "most_pieces", "least_tiles", "rounds", "width", "blocks"],
    do_not_specialize_on_alignment=["block_tables", "kv_lens"],
)
def _decode_kernel(
    q,  # [rows, heads, DIM], heads and elements dense
    pool,  # [blocks, 2, KV_HEADS, PAGE, DIM]
    described,  # tensor descriptor of the pool as [blocks * 2 * KV_HEADS * PAGE, DIM], or None
    block_tables,  # int32 [rows, ...]
    kv_lens,  # int32 [rows]
    out,  # [rows, heads, DIM]
    partial,
    stats,
    counters,
    rows,
    q_stride,  # elements from row to row
    table_stride,
    out_stride,
    scale,  # of scores in base 2: 1 / sqrt(head_dim) / ln 2
    most_pieces,  # of a row
    least_tiles,  # of a piece
    rounds,  # spans of a program
    width,  # of the block tables
    blocks,  # of the pool
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    M: tl.constexpr = 16 if GROUP_PAD < 16 else GROUP_PAD
    PIECE: tl.constexpr = PAGE * DIM  # elements of one block's keys of one head
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    shares = programs * rounds
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            # While the kernel before is at work. Lengths and tables may still be the last step's, then it is in vain
            ends, target, items = plan_spans(
                kv_lens, rows, most_pieces, least_tiles, shares, KV_HEADS, TILE, WINDOW, ROWS_PAD, ".cg"
            )
            if program < items:
                row, head, length, size, count, piece, pieces, begin, end = place_span(
                    program,
                    ends,
                    target,
                    kv_lens,
                    rows,
                    most_pieces,
                    least_tiles,
                    KV_HEADS,
                    TILE,
                    WINDOW,
                    ROWS_PAD,
                    ".cg",
                )
                _prefetch(
                    pool,
                    block_tables,
                    table_stride,
                    row,
                    head,
                    begin,
                    end,
                    width,
                    blocks,
                    KV_HEADS,
                    DIM,
                    PAGE,
                    TILE,
                    PREFETCH,
                )
        tl.extra.cuda.gdc_wait()
    ends, target, items = plan_spans(
        kv_lens, rows, most_pieces, least_tiles, shares, KV_HEADS, TILE, WINDOW, ROWS_PAD, ""
    )
    g = tl.arange(0, M)
    d = tl.arange(0, DIM_PAD)
    h = tl.arange(0, DIM_PAD // 2)
    lanes = tl.arange(0, TILE)
    for item in range(program, items, programs):
        row, head, length, size, count, piece, pieces, begin, end = place_span(
            item, ends, target, kv_lens, rows, most_pieces, least_tiles, KV_HEADS, TILE, WINDOW, ROWS_PAD, ""
        )
        row64 = row.to(tl.int64)
        until = tl.where(count == 1, end + 1, tl.minimum(begin + size, end))  # the next end of a piece
        slot = (row64 * KV_HEADS + head) * most_pieces + piece
        table = block_tables + row64 * table_stride
        heads = (head * GROUP + g)[:, None] * DIM + d[None, :]
        real = (g < GROUP)[:, None] & (d < DIM)[None, :]
        query = tl.load(q + row64 * q_stride + heads, mask=real, other=0.0)
        top = tl.full([M], float("-inf"), tl.float32)
        weights = tl.zeros([M, TILE], tl.float32)
        acc = tl.zeros([M, DIM_PAD], tl.float32)
        # A descriptor cannot leave out the slots past the row's end, so it is for whole tiles alone
        whole = tl.minimum(end, length // TILE) if DESCRIPTORS else begin
        if DESCRIPTORS:
            ahead = tl.load(table + begin * TILE // PAGE, mask=begin < whole, other=0)
            for tile in tl.range(begin, whole, num_stages=STAGES):
                at = (ahead * (2 * KV_HEADS) + head) * PAGE + tile * TILE % PAGE
                ahead = tl.load(table + tl.minimum(tile + 1, whole - 1) * TILE // PAGE)
                seen = tile * TILE + lanes >= length - WINDOW
                k = described.load([at, 0])
                v = described.load([at + KV_HEADS * PAGE, 0])
                top, weights, acc = _attend_tile(query, k, v, top, weights, acc, seen, scale, WINDOW > 0, PRECISION)
                if tile + 1 == until:
                    _store_piece(partial, stats, slot, g, h, top, weights, acc, GROUP, DIM)
                    top = tl.full([M], float("-inf"), tl.float32)
                    weights = tl.zeros([M, TILE], tl.float32)
                    acc = tl.zeros([M, DIM_PAD], tl.float32)
                    slot += 1
                    until = tl.minimum(until + size, end)
        if PAGE % TILE == 0:
            block = tl.load(table + whole * TILE // PAGE, mask=whole < end, other=0)
        else:
            block = tl.load(table + (whole * TILE + lanes) // PAGE, mask=whole * TILE + lanes < length, other=0)
        for tile in tl.range(whole, end, num_stages=1 if DESCRIPTORS else STAGES):
            tokens = tile * TILE + lanes
            visible = tokens < length
            if WINDOW > 0:
                visible &= tokens >= length - WINDOW
            if PAGE % TILE == 0:
                base = pool + block.to(tl.int64) * (2 * KV_HEADS * PIECE) + head * PIECE + tile * TILE % PAGE * DIM
                block = tl.load(table + tl.minimum(tile + 1, end - 1) * TILE // PAGE)
                keys = base + lanes[:, None] * DIM + d[None, :]
            else:
                base = pool + block.to(tl.int64) * (2 * KV_HEADS * PIECE) + head * PIECE + tokens % PAGE * DIM
                block = tl.load(table + (tokens + TILE) // PAGE, mask=tokens + TILE < length, other=0)
                keys = base[:, None] + d[None, :]
            if DIM == DIM_PAD:
                some_k = tl.load(keys)
                some_v = tl.load(keys + KV_HEADS * PIECE, mask=visible[:, None], other=0.0)
            else:
                some_k = tl.load(keys, mask=(d < DIM)[None, :], other=0.0)
                some_v = tl.load(keys + KV_HEADS * PIECE, mask=visible[:, None] & (d < DIM)[None, :], other=0.0)
            top, weights, acc = _attend_tile(query, some_k, some_v, top, weights, acc, visible, scale, True, PRECISION)
            if tile + 1 == until:
                _store_piece(partial, stats, slot, g, h, top, weights, acc, GROUP, DIM)
                top = tl.full([M], float("-inf"), tl.float32)
                weights = tl.zeros([M, TILE], tl.float32)
                acc = tl.zeros([M, DIM_PAD], tl.float32)
                slot += 1
                until = tl.minimum(until + size, end)
        if PREFETCH > 0:  # noqa: SIM102 - a choice of the compiler, and one of the kernel
            if item + programs < items:
                # While the sums are stored and added up
                next_row, next_head, _l, _s, _c, _p, _n, next_begin, next_end = place_span(
                    item + programs,
                    ends,
                    target,
                    kv_lens,
                    rows,
                    most_pieces,
                    least_tiles,
                    KV_HEADS,
                    TILE,
                    WINDOW,
                    ROWS_PAD,
                    "",
                )
                _prefetch(
                    pool,
                    block_tables,
                    table_stride,
                    next_row,
                    next_head,
                    next_begin,
                    next_end,
                    width,
                    blocks,
                    KV_HEADS,
                    DIM,
                    PAGE,
                    TILE,
                    PREFETCH,
                )
        if count == 1:
            norm = tl.sum(weights, 1)
            norm = tl.where(norm == 0.0, 1.0, norm)  # a row of no tokens
            tl.store(out + row64 * out_stride + heads, acc / norm[:, None], mask=real)
        else:
            tl.debug_barrier()  # the stores of all threads come before the one thread's release, and before its reads
            others = count - pieces  # that other programs add up, unless this span is the whole row
            if others > 0:
                counter = counters + row * KV_HEADS + head
                others -= tl.atomic_add(counter, pieces, sem="acq_rel", scope="gpu")
                if others == 0:
                    tl.store(counter, 0)
            if others == 0:
                whole_slot = (row64 * KV_HEADS + head) * most_pieces
                _combine(
                    partial + whole_slot * (GROUP * DIM),
                    stats + whole_slot * (2 * GROUP),
                    out + row64 * out_stride + head * GROUP * DIM,
                    count,
                    GROUP,
                    GROUP_PAD,
                    DIM,
                    DIM_PAD,
                    8192 if ROWS_PAD == 1 else 4096,  # numbers; one row cannot hide that it waits for them
                )


@jit
def _combine(
    partial,
    stats,
    out,
    count,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Adds up the pieces of one row and key head. Read past the first cache, which may hold the last launch's."""
    STEP: tl.constexpr = max(1, AT_ONCE // (GROUP_PAD * DIM_PAD))
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    steps = tl.arange(0, STEP)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    norm = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for begin in range(0, count, STEP):
        piece = begin + steps
        there = (piece < count)[:, None] & (g < GROUP)[None, :]
        stat = stats + piece[:, None] * (2 * GROUP) + g[None, :]
        tops = tl.load(stat, mask=there, other=float("-inf"), cache_modifier=".cg")
        norms = tl.load(stat + GROUP, mask=there, other=0.0, cache_modifier=".cg")
        sums = tl.load(
            partial + piece[:, None, None] * (GROUP * DIM) + g[None, :, None] * DIM + d[None, None, :],
            mask=there[:, :, None] & (d < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        tops = tl.where((g < GROUP)[None, :], tops, 0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        grown = tl.exp2(tops - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(norms * grown, 0)
        acc = acc * shrink[:, None] + tl.sum(sums * grown[:, :, None], 0)
        top = new_top
    norm = tl.where(g < GROUP, norm, 1.0)
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    tl.store(out + g[:, None] * DIM + d[None, :], acc / norm[:, None], mask=real)


def decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    window: int = 0,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    scratch: DecodeScratch | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attention of one query token per row, the last of its row: q [rows, heads, head_dim] -> the same shape.

    pool: [blocks, 2, kv_heads, page, head_dim], contiguous, of q's dtype. block_tables: int32 [rows, width], whose rows
    may lie apart. kv_lens: int32 [rows] tokens seen, the query's own included; 0 is a row that only pads, whose output
    is zeros. window: tokens seen at most, the query's own included; 0: all. scale: of the scores, default
    head_dim ** -0.5. q and out may be strided from row to row. Neither synchronises nor depends on values on the host;
    with `out` and `scratch` given it allocates nothing.
    """
    rows, heads, dim = q.shape
    _, _, kv_heads, page, pool_dim = pool.shape
    if pool_dim != dim or heads % kv_heads or pool.dtype != q.dtype:
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} does not fit the pool {pool.dtype} {tuple(pool.shape)}")
    if q.stride(1) != dim or q.stride(2) != 1 or not pool.is_contiguous():
        raise ValueError("heads and elements of q, and the whole pool, must be contiguous")
    if block_tables.dtype != torch.int32 or kv_lens.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError("block_tables and kv_lens must be int32, and a row of block_tables contiguous")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    config = config or config_for(rows, dim, q.element_size())
    if scratch is None:
        scratch = scratch_for(rows, heads, kv_heads, dim, q.device, config.splits)
    if rows * config.splits * heads * 2 > scratch.stats.numel() or rows * kv_heads > scratch.counters.numel():
        raise ValueError(f"the scratch memory is too small for {rows} rows of {config.splits} pieces")
    descriptors = config.descriptors and page % config.tile == 0 and q.element_size() == 2
    group, launch = heads // kv_heads, pdl_options(q)
    programs = min(multiprocessors(q.device) * config.per_sm, rows * config.splits * kv_heads)
    _decode_kernel[(programs,)](
        q,
        pool,
        described(pool, config.tile) if descriptors else None,
        block_tables,
        kv_lens,
        out,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        rows,
        q.stride(0),
        block_tables.stride(0),
        out.stride(0),
        (scale or dim**-0.5) * math.log2(math.e),
        config.splits,
        config.min_tiles,
        config.rounds,
        block_tables.shape[1],
        pool.shape[0],
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=next_power(group),
        DIM=dim,
        DIM_PAD=next_power(dim),
        PAGE=page,
        WINDOW=window,
        ROWS_PAD=next(size for size in (1, 128, 512, 2048, 8192) if size >= rows),
        TILE=config.tile,
        STAGES=config.stages,
        DESCRIPTORS=descriptors,
        PREFETCH=config.prefetch if launch["PDL"] and page % config.tile == 0 else 0,
        PRECISION="ieee",
        **launch,
        num_warps=config.warps,
        num_stages=1,
        maxnreg=min(255, 65536 // (32 * config.warps * config.per_sm) // 8 * 8),
    )
    return out
