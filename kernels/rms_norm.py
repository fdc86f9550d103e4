"""Root-mean-square normalisation, alone and together with the residual sum before it.

y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019), in float32, rounded once.

One program per row, which it keeps in registers between the sum of squares and the product: every byte moves once.
With T rows of H features, residual r float32, weights and outputs of 2 bytes:

    rms_norm      reads T x H x (2 or 4), writes T x H x 2
    add_rms_norm  reads T x H x (4 + 2), writes T x H x (4 + 2): 12 bytes per element

With 8192 x 4096 elements the second moves 403 MB, floor 95 us at 4.25 TB/s of copy; about 5 FLOPs per element never
matter. Up to some hundred rows the floor is the latency of one launch with
one round trip to memory and one reduction, about 2 us.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, pdl_options, tl, triton

_FEW_ROWS = 256


@jit
def _rms_norm_kernel(
    x, weight, out, x_stride, out_stride, eps, features: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < features
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / features + eps)
    tl.store(out + row * out_stride + column, value * inverse * scale, mask=inside)


@jit
def _add_rms_norm_kernel(
    residual,
    delta,
    weight,
    out,
    residual_stride,
    delta_stride,
    out_stride,
    eps,
    features: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < features
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
    value += tl.load(delta + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + row * residual_stride + column, value, mask=inside)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / features + eps)
    tl.store(out + row * out_stride + column, value * inverse * scale, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x: [rows, features] of any float dtype; weight: [features]; out: [rows, features], by default of weight's dtype.

    Rows may lie apart. out may be x.
    """
    rows, features = x.shape
    if out is None:
        out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    if rows:
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            out.stride(0),
            eps,
            features=features,
            BLOCK=triton.next_power_of_2(features),
            num_warps=_warps(rows, features),
            **pdl_options(x),
        )
    return out


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += delta, and the norm of the sum.

    residual: float32 [rows, features], changed in place; delta: [rows, features] of any float dtype; weight:
    [features]; out: [rows, features], by default of weight's dtype. Rows may lie apart. out may be delta.
    """
    rows, features = residual.shape
    if out is None:
        out = torch.empty(residual.shape, dtype=weight.dtype, device=residual.device)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            residual,
            delta,
            weight,
            out,
            residual.stride(0),
            delta.stride(0),
            out.stride(0),
            eps,
            features=features,
            BLOCK=triton.next_power_of_2(features),
            num_warps=_warps(rows, features),
            **pdl_options(residual),
        )
    return out


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """rms_norm's result, in `dtype` or weight's; computed in float64 where x is, else in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(dtype or weight.dtype)


def add_reference(
    residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """add_rms_norm's result; residual is changed in place."""
    residual += delta.to(residual.dtype)
    return reference(residual, weight, eps, dtype)


def _warps(rows: int, features: int) -> int:
    """Few rows leave the device empty, so a row takes many threads of 4 features: one load each, and float32 and 2-byte
    numbers lie alike in the threads. Many rows fill it: 16 features a thread keep more bytes in flight per barrier."""
    per_thread = 4 if rows <= _FEW_ROWS else 16
    return min(max(triton.next_power_of_2(features) // (32 * per_thread), 1), 32)
