"""Random rows over a paged pool, for tests of attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class PagedRows:
    """Rows with `new` tokens each, the last of `kv_lens` tokens whose keys and values are in the pool.

    Slots that no row owns hold NaN: those of other blocks, and those past a row's end.
    """

    q: torch.Tensor  # [new tokens, heads, head_dim]
    pool: torch.Tensor  # [blocks, 2, kv_heads, page, head_dim]
    block_tables: torch.Tensor  # int32 [rows, width]
    cu_seqlens: torch.Tensor  # int32 [rows + 1]
    kv_lens: torch.Tensor  # int32 [rows]

    @property
    def wide(self) -> PagedRows:
        """The same numbers in float64."""
        return PagedRows(self.q.double(), self.pool.double(), self.block_tables, self.cu_seqlens, self.kv_lens)


def paged_rows(
    kv_lens: Sequence[int],
    new: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> PagedRows:
    """Rows with their blocks in random places of a pool with blocks to spare. Zero lengths are rows that only pad."""
    host = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    pages = [-(-length // page) for length in kv_lens]
    blocks = sum(pages) + 4
    order = torch.randperm(blocks - 2, generator=host) + 1  # block 0 is reserved, the last belongs to nobody
    tables = torch.zeros(len(pages), max(pages) + 3, dtype=torch.int32)
    used = torch.zeros(blocks, page, dtype=torch.bool)
    first = 0
    for row, (count, length) in enumerate(zip(pages, kv_lens, strict=True)):
        own = order[first : first + count]
        first += count
        tables[row, :count] = own
        slots = torch.zeros(count * page, dtype=torch.bool)
        slots[:length] = True
        used[own] = slots.view(count, page)
    shape = (blocks, 2, kv_heads, page, head_dim)
    pool = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    pool.masked_fill_(~used.to(device)[:, None, None, :, None], float("nan"))
    q = torch.randn(sum(new), heads, head_dim, generator=generator, device=device, dtype=torch.float32).to(dtype)
    bounds = torch.tensor([0, *new]).cumsum(0)
    return PagedRows(
        q,
        pool,
        tables.to(device),
        bounds.to(device, torch.int32),
        torch.tensor(kv_lens, device=device, dtype=torch.int32),
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, in which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8).clone()


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN anywhere is infinite."""
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    return float("inf") if difference.isnan() else float(difference)
