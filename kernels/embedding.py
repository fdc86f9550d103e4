"""Rows of the embedding table as the float32 residual stream.

Bytes: per token a row of the table in (8 KB for 4096 bfloat16 numbers) and a float32 row out; one launch in place of a
gather and a conversion. A decode batch costs a launch's latency.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, pdl_options, tl, triton

_MOST_COLUMNS = 2048  # per program


@jit
def _embed_kernel(
    token_ids,
    table,
    taken,
    replacements,
    out,
    table_stride,
    first,
    count,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    REPLACES: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (token, share of its columns)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    row = tl.load(token_ids + token).to(tl.int64)
    held = inside
    if PART:
        row -= first
        held = inside & (row >= 0) & (row < count)
    values = tl.load(table + row * table_stride + column, mask=held, other=0.0).to(tl.float32)
    if REPLACES:
        replaced = tl.load(taken + token) != 0
        other = tl.load(replacements + token * HIDDEN + column, mask=inside & replaced, other=0.0)
        values = tl.where(replaced, other, values)
    tl.store(out + token * HIDDEN + column, values, mask=inside)


def embed(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    taken: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    part: tuple[int, int] | None = None,
) -> torch.Tensor:
    """float32 [tokens, hidden]. token_ids: int64 or int32 [tokens], each below vocab; table: [vocab, hidden].

    part: tokens [start, stop) whose rows the table holds, from its first row on; those of other tokens are zeros. Where
    taken (int32 [tokens]) is not 0, the row of values (float32 [tokens, hidden]) stands in place of the table's.
    """
    tokens, hidden = token_ids.shape[0], table.shape[1]
    if out is None:
        out = torch.empty(tokens, hidden, dtype=torch.float32, device=table.device)
    first, stop = part or (0, table.shape[0])
    columns = min(triton.next_power_of_2(hidden), _MOST_COLUMNS)
    _embed_kernel[(tokens, triton.cdiv(hidden, columns))](
        token_ids,
        table,
        taken,
        values,
        out,
        table.stride(0),
        first,
        stop - first,
        HIDDEN=hidden,
        COLUMNS=columns,
        REPLACES=taken is not None,
        PART=part is not None,
        num_warps=4,
        **pdl_options(table),
    )
    return out


def reference(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    taken: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    part: tuple[int, int] | None = None,
) -> torch.Tensor:
    if part is None:
        rows = table[token_ids].float()
    else:
        held = (token_ids >= part[0]) & (token_ids < part[1])
        rows = table[torch.where(held, token_ids - part[0], 0)].float() * held.unsqueeze(1)
    if taken is None or values is None:
        return rows
    return torch.where(taken.bool().unsqueeze(1), values, rows)
