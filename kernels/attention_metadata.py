"""Prefix sums, padding offsets and page lists, from lengths and block tables that are on the device.

`attention_metadata`: rows with input_lengths new tokens after prefix_lengths earlier ones, packed one after the other:

    cu_seqlens      [B + 1]  exclusive prefix sum of input_lengths
    cu_kv_seqlens   [B + 1]  exclusive prefix sum of input_lengths + prefix_lengths; the last element is the total
    padding_offset  [T]      token t of row r: r * max_seq_len - cu_seqlens[r], so that t + padding_offset[t] is the
                             token's place in a [B, max_seq_len] padded layout

`page_plan`: the lists that attention libraries with paged KV take (FlashInfer's names), with p = pages of a row:

    page_indptr     [B + 1]  exclusive prefix sum of p = ceil(kv_len / block_size)
    page_indices    [sum p]  the rows' blocks, one row after the other
    last_page_len   [B]      tokens in a row's last page, 1 .. block_size; 0 for an empty row
    batch_indices   [nnz]    row of each new token
    positions       [nnz]    its position in the row's sequence
    nnz             [1]      new tokens of all rows

All int32. Outputs may be larger than the batch: prefix sums stay at their last value behind it, last_page_len and
padding_offset are 0 there; page_indices, batch_indices and positions keep what they held behind sum p and nnz. With no
rows at all every output is still set.

Each is one launch of programs (row, share of the row). A program sums the lengths before its row itself, so nothing
waits for a scan: B^2 x 4 bytes of reads from the cache in all (4 MB at 1024 rows), which is nothing beside a launch's
latency. Bytes of memory: 4 per token (8 for page_plan) and 4 per page; at 128k tokens 0.5 to 1 MB, so a few
microseconds whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.jit import jit, tl, triton

_ROWS = 1024  # lengths summed at a time
_SHARE = 1024  # tokens or pages filled at a time by one program
_PROGRAMS = 2048  # about as many programs as the device runs at once


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Buffers of `page_plan`, all int32."""

    page_indptr: torch.Tensor  # [rows + 1]
    page_indices: torch.Tensor  # [pages]
    last_page_len: torch.Tensor  # [rows]
    batch_indices: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    nnz: torch.Tensor  # [1]

    @classmethod
    def allocate(cls, rows: int, pages: int, tokens: int, device: torch.device | str) -> PagePlan:
        """Zeroed buffers for at most that many rows, pages of all rows together, and new tokens."""
        sizes = (rows + 1, pages, rows, tokens, tokens, 1)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


@jit
def _sum_before(lengths, row, ROWS: tl.constexpr):
    """Sum of the first `row` lengths."""
    index = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.int32)
    for first in range(0, row, ROWS):
        total += tl.load(lengths + first + index, mask=first + index < row, other=0)
    return tl.sum(total, axis=0)


@jit(do_not_specialize=["rows", "row_capacity", "token_capacity", "max_seq_len"])
def _attention_metadata_kernel(
    input_lengths,
    prefix_lengths,
    cu_seqlens,
    cu_kv_seqlens,
    padding_offset,
    rows,
    row_capacity,
    token_capacity,
    max_seq_len,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Programs (row, share of its tokens); row number `row_capacity` stands for the tokens behind all rows."""
    row = tl.program_id(0)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    lane = tl.arange(0, SHARE)
    length = 0
    prefix = 0
    if row < rows:
        length = tl.load(input_lengths + row)
        prefix = tl.load(prefix_lengths + row)
    if (share == 0) | (row == row_capacity) | (share * SHARE < length):
        begin = _sum_before(input_lengths, tl.minimum(row, rows), ROWS)
        end = begin + length
        offset = row * max_seq_len - begin
        if row == row_capacity:
            end = token_capacity
            offset = 0
        elif share == 0:
            before = _sum_before(prefix_lengths, tl.minimum(row, rows), ROWS)
            tl.store(cu_seqlens + row + 1, begin + length)
            tl.store(cu_kv_seqlens + row + 1, begin + length + before + prefix)
        if (row == 0) & (share == 0):
            tl.store(cu_seqlens, 0)
            tl.store(cu_kv_seqlens, 0)
        for first in range(begin + share * SHARE, end, shares * SHARE):
            inside = (first + lane < end) & (first + lane < token_capacity)
            tl.store(padding_offset + first + lane, tl.zeros([SHARE], tl.int32) + offset, mask=inside)


def attention_metadata(
    input_lengths: torch.Tensor,
    prefix_lengths: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_kv_seqlens: torch.Tensor,
    padding_offset: torch.Tensor,
    max_seq_len: int,
) -> None:
    """Fill the three outputs in one launch.

    input_lengths, prefix_lengths: int32 [B]. cu_seqlens, cu_kv_seqlens: int32 with at least B + 1 elements.
    padding_offset: int32 with as many elements as there are tokens, or more. max_seq_len: row length of the padded
    layout, no shorter than the longest row. Raises ValueError for an output that is too small, not int32, or not
    contiguous; that the tokens fit is the caller's to know, what does not fit is left out.
    """
    rows = input_lengths.shape[0]
    _check("input_lengths", input_lengths, rows)
    _check("prefix_lengths", prefix_lengths, rows)
    _check("cu_seqlens", cu_seqlens, rows + 1)
    _check("cu_kv_seqlens", cu_kv_seqlens, rows + 1)
    _check("padding_offset", padding_offset, 0)
    capacity = min(cu_seqlens.shape[0], cu_kv_seqlens.shape[0]) - 1
    longest = min(max_seq_len, padding_offset.shape[0])
    # At least one row, so that the first elements of the sums have a program that writes them
    _attention_metadata_kernel[(capacity + 1, _shares(capacity + 1, longest))](
        input_lengths,
        prefix_lengths,
        cu_seqlens,
        cu_kv_seqlens,
        padding_offset,
        rows,
        capacity,
        padding_offset.shape[0],
        max_seq_len,
        ROWS=_ROWS,
        SHARE=_SHARE,
        num_warps=4,
    )


@jit(do_not_specialize=["rows", "row_capacity", "token_capacity", "page_capacity", "table_stride", "width"])
def _page_plan_kernel(
    cu_seqlens,
    kv_lens,
    tables,
    page_indptr,
    page_indices,
    last_page_len,
    batch_indices,
    positions,
    nnz,
    rows,
    row_capacity,
    token_capacity,
    page_capacity,
    table_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Programs (row, share of its pages and tokens)."""
    row = tl.program_id(0)
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    lane = tl.arange(0, SHARE)
    kv_len = 0
    if row < rows:
        kv_len = tl.load(kv_lens + row)
    pages = (kv_len + BLOCK_SIZE - 1) // BLOCK_SIZE

    index = tl.arange(0, ROWS)
    sums = tl.zeros([ROWS], tl.int32)
    before = tl.minimum(row, rows)
    for first in range(0, before, ROWS):
        lens = tl.load(kv_lens + first + index, mask=first + index < before, other=0)
        sums += (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    first_page = tl.sum(sums, axis=0)

    if share == 0:
        if row == 0:
            tl.store(page_indptr, 0)
            tl.store(nnz, tl.load(cu_seqlens + rows))
        if row < row_capacity:
            tl.store(page_indptr + row + 1, first_page + pages)
            tl.store(last_page_len + row, kv_len - tl.maximum(pages - 1, 0) * BLOCK_SIZE)
    if row < rows:
        own = tables + row.to(tl.int64) * table_stride
        for first in range(share * SHARE, pages, shares * SHARE):
            page = first + lane
            inside = (page < pages) & (page < width) & (first_page + page < page_capacity)
            tl.store(page_indices + first_page + page, tl.load(own + page, mask=inside), mask=inside)
        begin = tl.load(cu_seqlens + row)
        end = tl.load(cu_seqlens + row + 1)
        for first in range(begin + share * SHARE, end, shares * SHARE):
            token = first + lane
            inside = (token < end) & (token < token_capacity)
            tl.store(batch_indices + token, tl.zeros([SHARE], tl.int32) + row, mask=inside)
            tl.store(positions + token, kv_len - end + token, mask=inside)


def page_plan(
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    out: PagePlan,
    longest: int | None = None,
) -> None:
    """Fill `out` in one launch.

    cu_seqlens: int32 [B + 1], of the rows' new tokens. kv_lens: int32 [B], tokens in the pool with the new ones.
    block_tables: int32 [B, width], rows may lie apart. longest: a bound of a row's new tokens and of its pages; it sets
    the number of programs and nothing else. Raises ValueError for an output that is too small, not int32, or not
    contiguous; that pages and tokens fit is the caller's to know, what does not fit is left out.
    """
    rows = kv_lens.shape[0]
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    _check("cu_seqlens", cu_seqlens, rows + 1)
    _check("kv_lens", kv_lens, rows)
    _check("page_indptr", out.page_indptr, rows + 1)
    _check("last_page_len", out.last_page_len, rows)
    for name, least in (("page_indices", 0), ("batch_indices", 0), ("positions", 0), ("nnz", 1)):
        _check(name, getattr(out, name), least)
    if block_tables.dtype != torch.int32 or block_tables.shape[0] < rows or (rows and block_tables.stride(1) != 1):
        raise ValueError(f"block_tables: int32 [{rows}, width] wanted, got {tuple(block_tables.shape)}")
    capacity = min(out.page_indptr.shape[0] - 1, out.last_page_len.shape[0])
    tokens = min(out.batch_indices.shape[0], out.positions.shape[0])
    if longest is None:
        longest = max(tokens, block_tables.shape[1])
    _page_plan_kernel[(max(capacity, 1), _shares(max(capacity, 1), longest))](
        cu_seqlens,
        kv_lens,
        block_tables,
        out.page_indptr,
        out.page_indices,
        out.last_page_len,
        out.batch_indices,
        out.positions,
        out.nnz,
        rows,
        capacity,
        tokens,
        out.page_indices.shape[0],
        block_tables.stride(0),
        block_tables.shape[1],
        BLOCK_SIZE=block_size,
        ROWS=_ROWS,
        SHARE=_SHARE,
        num_warps=4,
    )


def attention_metadata_reference(
    input_lengths: torch.Tensor, prefix_lengths: torch.Tensor, max_seq_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cu_seqlens, cu_kv_seqlens and padding_offset, of exactly the batch's size."""
    lengths = input_lengths.long()
    cu, cu_kv = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (lengths, lengths + prefix_lengths.long()))
    row = torch.repeat_interleave(lengths)
    return cu.int(), cu_kv.int(), (row * max_seq_len - cu[row]).int()


def page_plan_reference(
    cu_seqlens: torch.Tensor, kv_lens: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> PagePlan:
    """A plan of exactly the batch's size."""
    lengths, kv = cu_seqlens.long().diff(), kv_lens.long()
    pages = -(-kv // block_size)
    row = torch.repeat_interleave(lengths)
    token = torch.arange(row.shape[0], device=row.device)
    taken = [block_tables[i, :count] for i, count in enumerate(pages.tolist())]
    return PagePlan(
        page_indptr=torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
        page_indices=torch.cat([block_tables.new_empty(0), *taken]),
        last_page_len=(kv - (pages - 1).clamp(min=0) * block_size).int(),
        batch_indices=row.int(),
        positions=(kv[row] - cu_seqlens.long()[row + 1] + token).int(),
        nnz=cu_seqlens[-1:].int(),
    )


def _check(name: str, tensor: torch.Tensor, least: int) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.dim() != 1 or tensor.shape[0] < least:
        raise ValueError(
            f"{name}: contiguous int32 with at least {least} elements wanted, got {tensor.dtype} "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _shares(rows: int, longest: int) -> int:
    """Programs that share a row whose length may be `longest`."""
    return max(min(triton.cdiv(longest, _SHARE), _PROGRAMS // rows), 1)
