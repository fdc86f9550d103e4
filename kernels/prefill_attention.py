"""Causal attention of prompt chunks over the paged KV pool: rows of any lengths, each with or without a prefix.

A row of `n` new tokens after `p` earlier ones does 4 * heads * head_dim * (n * p + n * (n + 1) / 2) operations and
reads its keys and values at least once: 4 * (n + p) * kv_heads * head_dim bytes in bfloat16. For 8192 tokens of an 8B
model (32 heads of 128, 8 key heads) that is 550 GFLOP against 34 MB a layer, so the floor is the matrix rate: 0.70 ms
at 780 TFLOP/s. The exponentials between the two products have to hide behind them.

* A program holds `block` query rows: the query heads that share a key head, for block / group tokens in sequence. Short
  prompts fill a block so, and on the diagonal fewer scores are computed only to be masked.
* Tiles which all of a block's tokens see entirely are attended without masks, and, with `descriptors`, loaded by the
  tensor memory unit. The others (the diagonal, and the edge of a window) are masked by position.
* The grid is an upper bound of the blocks of any batch of so many rows and tokens, so a captured graph can replay
  another division of the tokens among rows; a program finds its row from a prefix sum. Longest blocks come first.

Slots past a row's end may hold anything, NaN included: they reach neither the scores nor the sum over values.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.jit import jit, pdl_options, tl
from kernels.paged_kv import described, dot, next_power
from kernels.prefill_hopper import prefill_hopper
from kernels.prefill_hopper import unavailable as hopper_unavailable

# Read once: BATON_PREFILL_HOPPER=off keeps long prompts from the kernel of prefill_hopper
_hopper_allowed = os.environ.get("BATON_PREFILL_HOPPER", "on").lower() not in ("off", "0")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel runs. Sizes are powers of two."""

    block: int  # query rows of a program: tokens * query heads per key head
    tile: int  # keys of one step of the loop
    stages: int
    warps: int
    descriptors: bool = False  # load whole tiles by tensor descriptors; needs pages of whole tiles
    hopper: bool = False  # where it can, the kernel of prefill_hopper, for which the rest does not count
    turns: bool = True  # of that kernel's groups of warps


def config_for(tokens: int, head_dim: int, itemsize: int, group: int) -> PrefillConfig:
    """The configuration for a step of `tokens` in all, by what the host knows of every step of that size."""
    wide = next_power(head_dim) * itemsize
    least = max(16, next_power(group))
    if itemsize > 2:
        return PrefillConfig(block=max(least, 32), tile=max(16, min(32, 16384 // wide)), stages=2, warps=4)
    if tokens * group <= 2048:
        return PrefillConfig(
            block=max(least, 64), tile=max(16, min(64, 16384 // wide)), stages=3, warps=4, descriptors=True
        )
    return PrefillConfig(
        block=max(least, 128),
        tile=max(32, min(64, 16384 // wide)),
        stages=3,
        warps=8,
        descriptors=True,
        hopper=_hopper_allowed,
    )


def reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    window: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """The same in PyTorch, in q's precision: q [tokens, heads, head_dim] -> the same shape."""
    _, heads, dim = q.shape
    _, _, kv_heads, page, _ = pool.shape
    out = torch.zeros_like(q)
    for row, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        count, length = last - first, int(kv_lens[row])
        if count == 0:
            continue
        blocks = block_tables[row, : -(-length // page)].long()
        # [blocks, 2, kv_heads, page, dim] -> [2, kv_heads, 1, tokens, dim]
        held = pool[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, 1, -1, dim)[:, :, :, :length].to(q.dtype)
        query = q[first:last].view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        scores = query @ held[0].transpose(-1, -2) * (scale or dim**-0.5)
        at = torch.arange(length - count, length, device=q.device)[:, None]
        seen = torch.arange(length, device=q.device)
        hidden = (seen > at) | (seen <= at - window) if window else seen > at
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        out[first:last] = (weights @ held[1]).permute(2, 0, 1, 3).reshape(count, heads, dim)
    return out


@jit
def _attend_tile(
    q, k, v, top, norm, acc, hidden, scale, MASKED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr
):
    """One more tile: largest score `top` [M] in base 2, sum of weights `norm` [M], sums over values acc [M, DIM]."""
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32), PRECISION)
    if MASKED:
        scores = tl.where(hidden, float("-inf"), scores)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new_top
    if MASKED and WINDOW > 0:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a token may not see its block's first tile
    fresh = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    norm = norm * shrink + tl.sum(fresh, 1)
    acc = dot(fresh.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return new_top, norm, acc


@jit
def _attend_masked(
    q,
    pool,
    table,
    head,
    at,
    length,
    begin,
    end,
    top,
    norm,
    acc,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles [begin, end) by pointers, masked (except without MASKED) for queries at positions `at` [M]."""
    PIECE: tl.constexpr = PAGE * DIM
    lanes = tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    if PAGE % TILE == 0:
        ahead = tl.load(table + begin * TILE // PAGE, mask=begin < end, other=0)
    else:
        ahead = tl.load(table + (begin * TILE + lanes) // PAGE, mask=begin * TILE + lanes < length, other=0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        tokens = tile * TILE + lanes
        if PAGE % TILE == 0:
            base = pool + ahead.to(tl.int64) * (2 * KV_HEADS * PIECE) + head * PIECE + tile * TILE % PAGE * DIM
            ahead = tl.load(table + tl.minimum(tile + 1, end - 1) * TILE // PAGE)
            keys = base + lanes[:, None] * DIM + d[None, :]
        else:
            base = pool + ahead.to(tl.int64) * (2 * KV_HEADS * PIECE) + head * PIECE + tokens % PAGE * DIM
            ahead = tl.load(table + (tokens + TILE) // PAGE, mask=tokens + TILE < length, other=0)
            keys = base[:, None] + d[None, :]
        values = keys + KV_HEADS * PIECE
        if DIM == DIM_PAD and not MASKED:
            k = tl.load(keys)
            v = tl.load(values)
        elif DIM == DIM_PAD:
            k = tl.load(keys)
            v = tl.load(values, mask=(tokens < length)[:, None], other=0.0)
        else:
            k = tl.load(keys, mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(values, mask=(tokens < length)[:, None] & (d < DIM)[None, :], other=0.0)
        hidden = tokens[None, :] > at[:, None]
        if WINDOW > 0:
            hidden |= tokens[None, :] <= at[:, None] - WINDOW
        top, norm, acc = _attend_tile(q, k, v, top, norm, acc, hidden, scale, MASKED, WINDOW, PRECISION)
    return top, norm, acc


@jit
def _attend_whole(
    q,
    described,
    table,
    head,
    begin,
    end,
    top,
    norm,
    acc,
    scale,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles [begin, end) by descriptors, all of them seen by all queries."""
    ahead = tl.load(table + begin * TILE // PAGE, mask=begin < end, other=0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        at = (ahead * (2 * KV_HEADS) + head) * PAGE + tile * TILE % PAGE
        ahead = tl.load(table + tl.minimum(tile + 1, end - 1) * TILE // PAGE)
        k = described.load([at, 0])
        v = described.load([at + KV_HEADS * PAGE, 0])
        top, norm, acc = _attend_tile(q, k, v, top, norm, acc, None, scale, False, 0, PRECISION)
    return top, norm, acc


# Views of larger buffers, at any row: their alignment must not call for another compilation in mid-serving
@jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens", "kv_lens"],
)
def _prefill_kernel(
    q,  # [tokens, heads, DIM], heads and elements dense
    pool,  # [blocks, 2, KV_HEADS, PAGE, DIM]
    described,  # tensor descriptor of the pool as [blocks * 2 * KV_HEADS * PAGE, DIM], or None
    block_tables,  # int32 [rows, ...]
    cu_seqlens,  # int32 [rows + 1]
    kv_lens,  # int32 [rows]
    out,  # [tokens, heads, DIM]
    rows,
    q_stride,  # elements from token to token
    table_stride,
    out_stride,
    scale,  # of scores in base 2: 1 / sqrt(head_dim) / ln 2
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TOKENS: tl.constexpr = BLOCK // GROUP
    head = tl.program_id(0)
    row_ids = tl.arange(0, ROWS_PAD)
    firsts = tl.load(cu_seqlens + row_ids, mask=row_ids < rows, other=0)
    lasts = tl.load(cu_seqlens + row_ids + 1, mask=row_ids < rows, other=0)
    ends = tl.cumsum((lasts - firsts + TOKENS - 1) // TOKENS, 0)
    blocks = tl.max(ends, 0)
    unit = blocks - 1 - tl.program_id(1)
    if unit >= 0:
        row = tl.sum((ends <= unit).to(tl.int32), 0)
        within = (unit - tl.max(tl.where(ends <= unit, ends, 0), 0)) * TOKENS  # first token among the row's new ones
        first = tl.load(cu_seqlens + row)
        new = tl.load(cu_seqlens + row + 1) - first
        length = tl.load(kv_lens + row)
        low = length - new + within  # position of the block's first token
        high = tl.minimum(low + TOKENS, length) - 1  # and of its last
        table = block_tables + row.to(tl.int64) * table_stride
        m = tl.arange(0, BLOCK)
        d = tl.arange(0, DIM_PAD)
        at = tl.minimum(low + m // GROUP, high)  # padding rows do as the last token does
        token = (first + within + m // GROUP).to(tl.int64)
        heads = (head * GROUP + m % GROUP)[:, None] * DIM + d[None, :]
        real = ((m < TOKENS * GROUP) & (within + m // GROUP < new))[:, None] & (d < DIM)[None, :]
        query = tl.load(q + token[:, None] * q_stride + heads, mask=real, other=0.0)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, DIM_PAD], tl.float32)
        begin = low * 0
        whole = low * 0  # tiles [whole, partial) are seen entirely by all
        partial = (low + 1) // TILE
        if WINDOW > 0:
            begin = tl.maximum(low - WINDOW + 1, 0) // TILE
            whole = tl.minimum((tl.maximum(high - WINDOW + 1, 0) + TILE - 1) // TILE, partial)
            top, norm, acc = _attend_masked(
                query, pool, table, head, at, length, begin, whole, top, norm, acc, scale,
                KV_HEADS, DIM, DIM_PAD, PAGE, WINDOW, TILE, STAGES, True, PRECISION,
            )  # fmt: skip
        if DESCRIPTORS:
            top, norm, acc = _attend_whole(
                query, described, table, head, whole, partial, top, norm, acc, scale,
                KV_HEADS, PAGE, TILE, STAGES, PRECISION,
            )  # fmt: skip
        else:
            top, norm, acc = _attend_masked(
                query, pool, table, head, at, length, whole, partial, top, norm, acc, scale,
                KV_HEADS, DIM, DIM_PAD, PAGE, WINDOW, TILE, STAGES, False, PRECISION,
            )  # fmt: skip
        top, norm, acc = _attend_masked(
            query, pool, table, head, at, length, partial, high // TILE + 1, top, norm, acc, scale,
            KV_HEADS, DIM, DIM_PAD, PAGE, WINDOW, TILE, STAGES, True, PRECISION,
        )  # fmt: skip
        tl.store(out + token[:, None] * out_stride + heads, acc / norm[:, None], mask=real)


def prefill_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    window: int = 0,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention of each row's newest tokens over all its tokens: q [tokens, heads, head_dim] -> the same shape.

    pool: [blocks, 2, kv_heads, page, head_dim], contiguous, of q's dtype; the new tokens' keys and values are in it.
    block_tables: int32 [rows, width], whose rows may lie apart. cu_seqlens: int32 [rows + 1], row i has the tokens
    [cu_seqlens[i], cu_seqlens[i + 1]) of q, none where they are equal. kv_lens: int32 [rows] tokens of each row, the
    new ones included. window: tokens seen at most, the query's own included; 0: all. scale: of the scores, default
    head_dim ** -0.5. q and out may be strided from token to token. Tokens of no row are left as they are in `out`.
    Neither synchronises nor depends on values on the host: only on how many rows and tokens there are.
    """
    tokens, heads, dim = q.shape
    _, _, kv_heads, page, pool_dim = pool.shape
    rows = kv_lens.shape[0]
    if pool_dim != dim or heads % kv_heads or pool.dtype != q.dtype:
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} does not fit the pool {pool.dtype} {tuple(pool.shape)}")
    if q.stride(1) != dim or q.stride(2) != 1 or not pool.is_contiguous():
        raise ValueError("heads and elements of q, and the whole pool, must be contiguous")
    if not block_tables.dtype == cu_seqlens.dtype == kv_lens.dtype == torch.int32 or block_tables.stride(1) != 1:
        raise ValueError("block_tables, cu_seqlens and kv_lens must be int32, and a row of block_tables contiguous")
    if cu_seqlens.shape[0] != rows + 1:
        raise ValueError(f"{rows} rows need {rows + 1} entries of cu_seqlens, got {cu_seqlens.shape[0]}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    group = heads // kv_heads
    config = config or config_for(tokens, dim, q.element_size(), group)
    scale = scale or dim**-0.5
    if config.hopper and not hopper_unavailable(q, pool):
        return prefill_hopper(q, pool, block_tables, cu_seqlens, kv_lens, window, scale, out, config.turns)
    descriptors = config.descriptors and page % config.tile == 0 and q.element_size() == 2
    _prefill_kernel[(kv_heads, tokens // (config.block // group) + rows)](
        q,
        pool,
        described(pool, config.tile) if descriptors else None,
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
        DIM_PAD=next_power(dim),
        PAGE=page,
        WINDOW=window,
        ROWS_PAD=next(size for size in (128, 512, 2048, 8192) if size >= rows),
        BLOCK=config.block,
        TILE=config.tile,
        STAGES=config.stages,
        DESCRIPTORS=descriptors,
        PRECISION="ieee",
        **pdl_options(q),
        num_warps=config.warps,
        num_stages=1,
    )
    return out
