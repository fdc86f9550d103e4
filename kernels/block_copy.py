"""Blocks of a KV pool to and from one contiguous piece, for transfer staging.

A pool of a layer is [num_blocks, 2 (key, value), num_kv_heads, block_size, head_dim]. `gather_blocks` lays the chosen
blocks side by side, all heads or a range of them (a peer with another number of ranks wants its share), and
`scatter_blocks` does the reverse. A block of all heads is one contiguous piece, of some heads two: one in the keys, one
in the values.

Every byte is read once and written once, as 8-byte words whatever the dtype: floor 2 x bytes / copy bandwidth. 128
blocks of 8 heads x 64 tokens x 128 x 2 bytes (8192 tokens of one layer, 33.5 MB): 16 us at 4.25 TB/s. The grid runs
over pieces and 16 KB parts of them. The contiguous side may be pinned host memory, which a GPU reaches over PCIe.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, tl, triton

_WORDS = 2048  # 8-byte words copied by one program


@jit
def _copy_pieces_kernel(
    pool,
    blocks,
    staged,
    pool_block,
    pool_half,
    staged_block,
    staged_half,
    words: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs (block, key or value, part of the piece). Strides and sizes in words; pool begins at the first head."""
    index = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + index).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (word < words) & (block >= 0)
    place = pool + tl.maximum(block, 0) * pool_block + half * pool_half + word
    packed = staged + index * staged_block + half * staged_half + word
    if GATHER:
        tl.store(packed, tl.load(place, mask=inside, other=0), mask=word < words)
    else:
        tl.store(place, tl.load(packed, mask=inside, other=0), mask=inside)


def gather_blocks(
    pool: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor | None = None, heads: tuple[int, int] | None = None
) -> torch.Tensor:
    """out[i] = pool[blocks[i], :, heads[0]:heads[1]]; a block below 0 gives zeros.

    pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], every block contiguous. blocks: int32 or int64 [n] on
    the device. out: contiguous [n, 2, heads, block_size, head_dim]. heads: half-open range, by default all. Raises
    ValueError for shapes, dtypes or ranges that do not fit.
    """
    first, last = _checked_heads(pool, heads)
    if out is None:
        out = torch.empty((blocks.shape[0], 2, last - first, *pool.shape[3:]), dtype=pool.dtype, device=pool.device)
    _copy(pool, blocks, out, first, last, gather=True)
    return out


def scatter_blocks(
    src: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor, heads: tuple[int, int] | None = None
) -> None:
    """pool[blocks[i], :, heads[0]:heads[1]] = src[i]; a block below 0 is left out. Blocks must differ.

    Shapes, dtypes and errors as of `gather_blocks`.
    """
    first, last = _checked_heads(pool, heads)
    _copy(pool, blocks, src, first, last, gather=False)


def gather_reference(pool: torch.Tensor, blocks: torch.Tensor, heads: tuple[int, int] | None = None) -> torch.Tensor:
    """gather_blocks' result in PyTorch."""
    first, last = _checked_heads(pool, heads)
    taken = pool[blocks.long().clamp(min=0), :, first:last].clone()
    taken[blocks < 0] = 0
    return taken


def scatter_reference(
    src: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor, heads: tuple[int, int] | None = None
) -> None:
    """scatter_blocks in PyTorch."""
    first, last = _checked_heads(pool, heads)
    kept = blocks >= 0
    pool[blocks[kept].long(), :, first:last] = src[kept]


def _checked_heads(pool: torch.Tensor, heads: tuple[int, int] | None) -> tuple[int, int]:
    first, last = heads or (0, pool.shape[2])
    if not 0 <= first < last <= pool.shape[2]:
        raise ValueError(f"heads [{first}, {last}) of a pool with {pool.shape[2]}")
    return first, last


def _copy(pool: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor, first: int, last: int, gather: bool) -> None:
    count, (_, _, _, block_size, head_dim) = blocks.shape[0], pool.shape
    if staged.shape != (count, 2, last - first, block_size, head_dim) or staged.dtype != pool.dtype:
        raise ValueError(
            f"{count} blocks of heads [{first}, {last}) of a pool {tuple(pool.shape)} {pool.dtype} do not fit "
            f"{tuple(staged.shape)} {staged.dtype}"
        )
    if not staged.is_contiguous() or not pool[0].is_contiguous():
        raise ValueError("the staged blocks and each block of the pool must be contiguous")
    if not count:
        return
    head_words = _words(block_size * head_dim, pool)
    pool_words, staged_words = pool.view(torch.int64), staged.view(torch.int64)
    whole = last - first == pool.shape[2]
    # A whole block is one piece; keys and values of some heads are two
    words = head_words * (last - first) * (2 if whole else 1)
    block = min(_WORDS, triton.next_power_of_2(words))
    _copy_pieces_kernel[(count, 1 if whole else 2, triton.cdiv(words, block))](
        pool_words[:, :, first:],
        blocks,
        staged_words,
        pool_words.stride(0),
        pool_words.stride(1),
        staged_words.stride(0),
        staged_words.stride(1),
        words=words,
        GATHER=gather,
        BLOCK=block,
        num_warps=8,
    )


def _words(elements: int, pool: torch.Tensor) -> int:
    """8-byte words of that many elements. Raises ValueError when there is no whole number of them."""
    words, rest = divmod(elements * pool.element_size(), 8)
    if rest or pool.shape[4] * pool.element_size() % 8:
        raise ValueError(f"heads of {pool.shape[4]} x {pool.dtype} are no whole number of 8-byte words")
    return words
