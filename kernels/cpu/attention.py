"""Attention over the paged pool, and the writing of keys and values (decode.c, prefill.c).

Shapes: pool [num_blocks, 2, kv_heads, block_size, head_dim]; q [rows, heads, head_dim]; tables int32 [rows, width].
Bytes moved per decode row: 2 * context * kv_heads * head_dim * itemsize, each once; that over the bandwidth is the
floor. Chunks of prompts are bound by arithmetic.
"""

from __future__ import annotations

import ctypes
import math

import torch

_CODES = {torch.float32: 0, torch.bfloat16: 1}
_MAX_GROUP, _MAX_DIM = 16, 256


def supports(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can run these heads."""
    group = num_heads // num_kv_heads
    return group <= _MAX_GROUP and head_dim <= _MAX_DIM and head_dim % 16 == 0 and dtype in _CODES


def decode_attention(
    library: ctypes.CDLL,
    q: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    last: torch.Tensor,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """One query token per row.

    q: [rows, heads, head_dim], heads side by side. tables: int32, block of positions block_size * i and on. last: int64
    [rows], position of the row's token, whose key is in the pool. With a window, only the last `window` are seen.
    out: [rows, heads * head_dim], written.
    """
    rows, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = pool.shape
    failed = library.baton_decode_attention(
        q.data_ptr(), q.stride(0), pool.data_ptr(), tables.data_ptr(), tables.shape[1], last.data_ptr(), rows, kv_heads,
        heads // kv_heads, dim, block_size, window or 0, 1.0 / math.sqrt(dim), _CODES[q.dtype], out.data_ptr(),
        out.stride(0),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for decode attention")


def prefill_attention(
    library: ctypes.CDLL,
    q: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    first_tokens: torch.Tensor,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Chunks of prompts, causally; keys and values of the chunks are in the pool.

    q: [tokens, heads, head_dim]. Row r's chunk is tokens first_tokens[r] .. + lengths[r] of q and out, at positions
    starts[r] and on (int64 [rows] each). tables: int32 [rows, width]. out: [tokens, heads * head_dim], written there.
    """
    _, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = pool.shape
    failed = library.baton_prefill_attention(
        q.data_ptr(), q.stride(0), pool.data_ptr(), tables.data_ptr(), tables.shape[1], starts.data_ptr(),
        lengths.data_ptr(), first_tokens.data_ptr(), tables.shape[0], kv_heads, heads // kv_heads, dim, block_size,
        window or 0, 1.0 / math.sqrt(dim), _CODES[q.dtype], out.data_ptr(), out.stride(0),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for prefill attention")


def reference(q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """What both compute for one row: q [tokens, heads, head_dim] at positions start and on.

    Returns [tokens, heads * head_dim], computed in float32 and rounded once.
    """
    tokens, _, dim = q.shape
    _, _, kv_heads, block_size, _ = pool.shape
    end = start + tokens
    held = pool[table[: -(-end // block_size)].long()].float()  # [blocks, 2, kv_heads, block_size, dim]
    key, value = held.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :end]
    scores = torch.einsum("thgd,hsd->thgs", q.float().view(tokens, kv_heads, -1, dim), key) / math.sqrt(dim)
    position, seen = torch.arange(start, end)[:, None], torch.arange(end)
    visible = seen <= position
    if window is not None:
        visible &= seen > position - window
    weights = scores.masked_fill(~visible[:, None, None, :], -math.inf).softmax(-1)
    return torch.einsum("thgs,hsd->thgd", weights, value).reshape(tokens, -1).to(q.dtype)


def write_kv(
    library: ctypes.CDLL, kv: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Store kv [tokens, 2 * kv_heads, head_dim] in slots offsets[t] of blocks[t] (int64)."""
    tokens, _, dim = kv.shape
    size = kv.element_size()
    library.baton_write_kv(
        kv.data_ptr(), kv.stride(0) * size, pool.data_ptr(), blocks.data_ptr(), offsets.data_ptr(), tokens,
        pool.shape[2], pool.shape[3], dim * size,
    )  # fmt: skip


def write_kv_reference(kv: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
    """What write_kv does."""
    _, _, kv_heads, _, dim = pool.shape
    pool.permute(0, 3, 1, 2, 4)[blocks, offsets] = kv.reshape(-1, 2, kv_heads, dim)
