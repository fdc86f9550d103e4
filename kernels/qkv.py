"""What lies between the QKV product and attention, in one pass: split, q/k norm, rotation, write to the paged pool.

For every token: its query and key heads are normalised where the family does that (RMS over the head, Qwen3), pairs
(i, i + D / 2) of them are turned by the position's angle, queries go to `q_out`, keys and values to the token's slot
of the pool. All in float32, rounded once to the pool's and q_out's dtype.

The pool of a layer is [num_blocks, 2 (key, value), num_kv_heads, block_size, head_dim]; slot = block * block_size +
offset, and a token of slot -1 is written nowhere. Offsets into it are 64 bits wide.

Traffic per token with heads of D numbers of 2 bytes: (Hq + 2 Hkv) x D x 2 read and as many written, D x 4 bytes of
cosines and sines. Llama 8B (32 + 8 + 8 heads of 128), 8192 tokens: 206 MB, floor 48 us at 4.25 TB/s of copy; about 6
FLOPs per number never matter. For few tokens the floor is a launch's latency with two dependent reads, about 2.5 us.

One program handles a tile of tokens x heads of one kind (query, key or value): with one token a tile is HEADS heads, so
that a single token still spreads over several multiprocessors; with many, tiles are deeper, so that each thread has
enough loads in flight and neighbouring tokens of a head are written side by side.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, pdl_options, tl, triton


@jit
def _place(slot, head, block_stride, head_stride, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr):
    """Offset of a head of a slot among the keys (or values) of the pool."""
    slot = tl.maximum(slot, 0)
    return (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * (2 * HALF) + head * head_stride


@jit(do_not_specialize=["tokens"])
def _split_norm_rotate_write_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    angle_rows,
    slots,
    pool,
    q_out,
    tokens,
    qkv_stride,
    angle_stride,
    q_stride,
    block_stride,
    half_stride,
    head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    LOOK_UP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (tile of tokens, tile of heads). The tiles of heads: those of queries, of keys, of values.

    A tile is [TOKENS x HEADS, HALF_BLOCK] for the lower halves of its heads and as much for the upper ones.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_tiles: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    tile = tl.program_id(1)
    line = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + line // HEADS
    lane = tl.arange(0, HALF_BLOCK)[None, :]
    within = lane < HALF

    is_query = tile < q_tiles
    is_value = tile >= q_tiles + kv_tiles
    first = tl.where(is_query, tile, tl.where(is_value, tile - q_tiles - kv_tiles, tile - q_tiles)) * HEADS
    head = first + line % HEADS
    heads = tl.where(is_query, Q_HEADS, KV_HEADS)
    base = tl.where(is_query, 0, tl.where(is_value, Q_HEADS + KV_HEADS, Q_HEADS))
    valid = (token < tokens) & (head < heads)
    inside = valid[:, None] & within
    source = qkv + (token * qkv_stride + (base + head) * (2 * HALF))[:, None] + lane
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    slot = tl.load(slots + token, mask=valid, other=-1)

    if is_value:
        written = inside & (slot >= 0)[:, None]
        target = pool + half_stride + _place(slot, head, block_stride, head_stride, BLOCK_SIZE, HALF)[:, None] + lane
        tl.store(target, low, mask=written)
        tl.store(target + HALF, high, mask=written)
    else:
        first_half = low.to(tl.float32)
        second_half = high.to(tl.float32)
        row = token
        if LOOK_UP:
            row = tl.load(angle_rows + token, mask=valid, other=0)
        angle = row[:, None] * angle_stride + lane
        cosine = tl.load(cos + angle, mask=inside, other=0.0)
        sine = tl.load(sin + angle, mask=inside, other=0.0)
        if NORM:
            weight = k_norm
            if is_query:
                weight = q_norm
            square = tl.sum(first_half * first_half + second_half * second_half, axis=1)
            inverse = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
            first_half *= inverse * tl.load(weight + lane, mask=within, other=0.0).to(tl.float32)
            second_half *= inverse * tl.load(weight + HALF + lane, mask=within, other=0.0).to(tl.float32)
        turned_low = first_half * cosine - second_half * sine
        turned_high = second_half * cosine + first_half * sine
        if is_query:
            goal = q_out + (token * q_stride + head * (2 * HALF))[:, None] + lane
            tl.store(goal, turned_low, mask=inside)
            tl.store(goal + HALF, turned_high, mask=inside)
        else:
            written = inside & (slot >= 0)[:, None]
            target = pool + _place(slot, head, block_stride, head_stride, BLOCK_SIZE, HALF)[:, None] + lane
            tl.store(target, turned_low, mask=written)
            tl.store(target + HALF, turned_high, mask=written)


def split_norm_rotate_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    q_out: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns q_out [tokens, q_heads, head_dim].

    qkv: [tokens, q_heads + 2 * kv_heads, head_dim], heads of a token contiguous: queries, keys, values.
    q_norm, k_norm: [head_dim], both or none. cos, sin: float32 [tokens, head_dim / 2]; or, with positions (int64
    [tokens]), tables [positions, head_dim / 2] to look up in. slots: int64 [tokens], -1: write nothing. pool: as the
    module says, blocks contiguous. q_out may be the queries' part of qkv itself (`qkv[:, :q_heads]`, packed layout); by
    default it is made of qkv's dtype. Raises ValueError for shapes that do not fit.
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, block_size = pool.shape[2], pool.shape[3]
    q_heads = all_heads - 2 * kv_heads
    if pool.shape[1] != 2 or pool.shape[4] != head_dim or q_heads < 1 or head_dim % 2:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit a pool {tuple(pool.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: give both or none")
    if qkv.stride(1) != head_dim or qkv.stride(2) != 1 or pool.stride(4) != 1 or pool.stride(3) != head_dim:
        raise ValueError("the heads of a token of qkv, and the tokens of a head of the pool, must be contiguous")
    if q_out is None:
        q_out = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    elif q_out.shape != (tokens, q_heads, head_dim) or q_out.stride(1) != head_dim or q_out.stride(2) != 1:
        raise ValueError(f"q_out {tuple(q_out.shape)}, {q_out.stride()}: heads of a token must be contiguous")
    if not tokens:
        return q_out
    token_tile, head_tile, warps = _tiles(tokens, q_heads, kv_heads, head_dim)
    tiles = triton.cdiv(q_heads, head_tile) + 2 * triton.cdiv(kv_heads, head_tile)
    _split_norm_rotate_write_kernel[(triton.cdiv(tokens, token_tile), tiles)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        slots,
        pool,
        q_out,
        tokens,
        qkv.stride(0),
        cos.stride(0),
        q_out.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        NORM=q_norm is not None,
        LOOK_UP=positions is not None,
        TOKENS=token_tile,
        HEADS=head_tile,
        num_warps=warps,
        **pdl_options(qkv),
    )
    return q_out


def reference(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
) -> torch.Tensor:
    """The same in PyTorch, in float64 where qkv is, else in float32: writes the pool, returns the queries."""
    kv_heads, block_size = pool.shape[2:4]
    wide = qkv if qkv.dtype == torch.float64 else qkv.float()
    q, k, v = wide.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q = q * torch.rsqrt(q.square().mean(dim=-1, keepdim=True) + eps) * q_norm.to(q.dtype)
        k = k * torch.rsqrt(k.square().mean(dim=-1, keepdim=True) + eps) * k_norm.to(k.dtype)

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        c, s = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
        return torch.cat((low * c - high * s, high * c + low * s), dim=-1)

    kept = slots >= 0
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    pool[block, 0, :, offset] = turn(k)[kept].to(pool.dtype)
    pool[block, 1, :, offset] = v[kept].to(pool.dtype)
    return turn(q).to(qkv.dtype)


def _tiles(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Tokens and heads of a tile, and warps: 2048 numbers, 16 a thread, where there are many tokens, 1024 where few.

    A tile has no more heads than there are key heads, so that none is half empty.
    """
    numbers = 2048 if tokens >= 1024 else 1024
    lines = max(numbers // triton.next_power_of_2(head_dim), 1)
    heads = min(lines, triton.next_power_of_2(kv_heads), 8)
    return lines // heads, heads, 4
