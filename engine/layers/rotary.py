"""Rotary position embedding and its long-context scalings."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from engine.models.rope_config import RopeConfig
from kernels.cpu import elementwise, library


def _plain(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    freq = _plain(rope, head_dim)
    turns = rope.original_max_positions / (2 * math.pi / freq)  # of the trained context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * freq / rope.factor + keep * freq


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023), section 3.2: a ramp over dimensions from kept to interpolated frequencies."""

    def dimension_of(turns: float) -> float:
        wavelength = rope.original_max_positions / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    base = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    keep = 1 - ramp
    return 1.0 / (rope.factor * base) * (1 - keep) + 1.0 / base * keep


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2]."""
    if rope.kind == "llama3":
        return _llama3(rope, head_dim)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    return _plain(rope, head_dim) / rope.factor


def attention_factor(rope: RopeConfig) -> float:
    """Factor of cosines and sines; 1 but for YaRN (section 3.4; the mscale pair is DeepSeek's)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale_of(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale_of(rope.mscale) / scale_of(rope.mscale_all_dim)
    return scale_of(1.0)


def axis_of_frequency(rope: RopeConfig) -> torch.Tensor | None:
    """int64 [head_dim / 2]: the axis of position ids by which each pair of dimensions turns; None with one axis."""
    if not rope.sections:
        return None
    return torch.repeat_interleave(torch.arange(rope.axes), torch.tensor(rope.sections))


class Angles(Protocol):
    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [tokens], or [axes, tokens] for a model that has axes -> cos, sin: float32 [tokens, head_dim / 2],
        made once per step for all layers."""


class Rotary:
    """Turns pairs (i, i + head_dim / 2) of every head by its position's angle, in float32."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.frequencies = inverse_frequencies(rope, head_dim)
        self.factor = attention_factor(rope)
        self.axis_of = axis_of_frequency(rope)
        self.kernels = library.load()

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Angles`."""
        if positions.dim() == 2:
            assert self.axis_of is not None
            angle = positions.to(torch.float32)[self.axis_of].t().contiguous() * self.frequencies
        else:
            angle = torch.outer(positions.to(torch.float32), self.frequencies)
        return angle.cos().mul_(self.factor), angle.sin().mul_(self.factor)

    def apply_(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates x [tokens, heads, head_dim] in place; tokens may lie apart."""
        if self.kernels is not None:
            elementwise.rotate(self.kernels, x, cos, sin)
            return
        low, high = x.float().chunk(2, dim=-1)  # [tokens, heads, head_dim / 2] each
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        x.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
