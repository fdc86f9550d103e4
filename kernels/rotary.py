"""Cosines and sines of a step's positions, once for all layers.

Bytes: 8 per token in, 4 x head_dim per token out; 64 sines and cosines per token of 128 dimensions. For a decode batch
that is a launch's latency (about 2 us); for 8192 tokens 4 MB, about as much.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, pdl_options, tl, triton

_TOKENS = 4  # per program


@jit(do_not_specialize=["tokens", "factor"])
def _angles_kernel(
    positions,
    frequencies,
    axis_of,
    cos,
    sin,
    tokens,
    factor,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    AXES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per TOKENS tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (token < tokens) & (column < HALF)
    if AXES:
        axis = tl.load(axis_of + column, mask=column < HALF, other=0)
        position = tl.load(positions + axis * tokens + token, mask=inside, other=0).to(tl.float32)
    else:
        position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    frequency = tl.load(frequencies + column, mask=column < HALF, other=0.0)
    angle = position * frequency
    place = token.to(tl.int64) * HALF + column
    tl.store(cos + place, tl.cos(angle) * factor, mask=inside)
    tl.store(sin + place, tl.sin(angle) * factor, mask=inside)


def angles(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    factor: float = 1.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    axis_of: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency, times `factor`: float32 [tokens, half] each.

    positions: int64 or int32 [tokens]; frequencies: float32 [half], radians per position. With axis_of, int32 [half],
    positions are [axes, tokens], contiguous, and frequency i goes with axis axis_of[i].
    """
    tokens, half = positions.shape[-1], frequencies.shape[0]
    cos, sin = out or (
        torch.empty(tokens, half, dtype=torch.float32, device=positions.device),
        torch.empty(tokens, half, dtype=torch.float32, device=positions.device),
    )
    _angles_kernel[(triton.cdiv(tokens, _TOKENS),)](
        positions,
        frequencies,
        axis_of,
        cos,
        sin,
        tokens,
        factor,
        HALF=half,
        COLUMNS=triton.next_power_of_2(half),
        TOKENS=_TOKENS,
        AXES=axis_of is not None,
        num_warps=4,
        **pdl_options(positions),
    )
    return cos, sin


def reference(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0, *, axis_of: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch: angles are rounded to float32 before the cosine, as in the kernel."""
    if axis_of is None:
        angle = torch.outer(positions.to(torch.float32), frequencies)
    else:
        angle = positions.to(torch.float32)[axis_of.long()].t() * frequencies
    return angle.cos() * factor, angle.sin() * factor
