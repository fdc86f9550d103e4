"""Rows of the embedding table as the float32 residual stream.

Bytes: per token a row of the table in (8 KB for 4096 bfloat16 numbers) and a float32 row out; one launch in place of a
gather and a conversion. A decode batch costs a launch's latency.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, tl, triton

_MOST_COLUMNS = 2048  # per program


@jit(do_not_specialize=["table_stride"])
def _embed_kernel(token_ids, table, out, table_stride, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Programs (token, share of its columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    row = tl.load(token_ids + token).to(tl.int64)
    values = tl.load(table + row * table_stride + column, mask=inside, other=0.0)
    tl.store(out + token * HIDDEN + column, values.to(tl.float32), mask=inside)


def embed(token_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [tokens, hidden]. token_ids: int64 or int32 [tokens], each below vocab; table: [vocab, hidden]."""
    tokens, hidden = token_ids.shape[0], table.shape[1]
    if out is None:
        out = torch.empty(tokens, hidden, dtype=torch.float32, device=table.device)
    columns = min(triton.next_power_of_2(hidden), _MOST_COLUMNS)
    _embed_kernel[(tokens, triton.cdiv(hidden, columns))](
        token_ids, table, out, table.stride(0), HIDDEN=hidden, COLUMNS=columns, num_warps=4
    )
    return out


def reference(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[token_ids].float()
