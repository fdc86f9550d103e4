"""Normalisation and rotation of rows (elementwise.c). Bytes moved: each row read and written once."""

from __future__ import annotations

import ctypes

import torch

_CODES = {torch.float32: 0, torch.bfloat16: 1}


def rms_norm(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded to out's dtype.

    x, out: [rows, n], or [rows, vectors, n] with the vectors of a row side by side; out may be x. weight: float32 [n].
    """
    vectors = 1 if x.dim() == 2 else x.shape[1]
    library.baton_rms_norm(
        x.data_ptr(), x.stride(0), _CODES[x.dtype], weight.data_ptr(), eps, out.data_ptr(), out.stride(0),
        _CODES[out.dtype], x.shape[0], vectors, x.shape[-1],
    )  # fmt: skip


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """What rms_norm writes to an output of `dtype`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(dtype)


def rotate(library: ctypes.CDLL, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn the pairs (i, i + dim / 2) of every head of x [rows, heads, dim] in place by the row's angles.

    cos, sin: float32 [rows, dim / 2], contiguous. The heads of a row lie side by side.
    """
    rows, heads, dim = x.shape
    library.baton_rotate(x.data_ptr(), x.stride(0), _CODES[x.dtype], cos.data_ptr(), sin.data_ptr(), rows, heads, dim)


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What rotate leaves in x."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
