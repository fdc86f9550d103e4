"""exp of float32 numbers that are not positive, with the same bits on every device.

A draw compares whole-numbered weights, round(exp(x) * 2**b), so two devices draw the same token from the same logits
when their exponentials have the same bits. A device's own exp is an approximation of its own; this one is a fixed
sequence of correctly rounded operations, the sequence that NumPy's vectorised float32 `exp` executes on x86 processors
with AVX2 or AVX-512, so that kernels agree with a host that uses `numpy.exp` there:

    q = round(x * log2(e))                       by adding and subtracting 1.5 * 2**23
    r = x - q * ln(2)                            ln(2) in two parts (Cody and Waite, 1980), two fused steps
    exp(x) = P(r) / Q(r) * 2**q                  minimax polynomials of degree 5 and 2 in fused steps, one division

Elsewhere `numpy.exp` may differ in the last bits (relative error of either below 2**-22), and so may weights. Then a
draw differs only where u * total falls between the two roundings of a cumulative weight: with probability near
2**-22 per token, whatever the size of the vocabulary.

About 35 instructions per number, two thirds of them the division. Kernels that call it must be launched with
enable_fp_fusion=False: a product and a sum that the compiler fuses are rounded once in place of twice.
"""

from __future__ import annotations

import struct

import torch

from kernels.jit import interpreted, jit, tl


def _single(value: float) -> float:
    """The float32 number nearest to `value`."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


_LOWEST = -86.0  # below it the result is 0, so that 2**q stays a normal number; exp(-86) is 4.5e-38
_NEAREST = 1.5 * 2.0**23
_LOG2_E = _single(1.44269504088896341)
_LN2 = (_single(-6.93145752e-1), _single(-1.42860677e-6))
_P = tuple(
    _single(c)
    for c in (
        5.082762527590693718096e-04,
        6.757896990527504603057e-03,
        5.114512081637298353406e-02,
        2.473615434895520810817e-01,
        7.257664613233124478488e-01,
        9.999999999980870924916e-01,
    )
)
_Q = tuple(_single(c) for c in (2.159509375685829852307e-02, -2.742335390411667452936e-01, 1.0))

_INTERPRETED = tl.constexpr(interpreted)
LOWEST = tl.constexpr(_LOWEST)
NEAREST = tl.constexpr(_NEAREST)
LOG2_E = tl.constexpr(_LOG2_E)
LN2_HIGH, LN2_LOW = tl.constexpr(_LN2[0]), tl.constexpr(_LN2[1])
P5, P4, P3, P2, P1, P0 = (tl.constexpr(c) for c in _P)
Q2, Q1, Q0 = (tl.constexpr(c) for c in _Q)


@jit
def _fused(a, b, c):
    """a * b + c, rounded once. The interpreter rounds twice there, so it gets the exact product of float64."""
    if _INTERPRETED:
        return (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@jit
def exponential(x):
    """exp(x) for float32 x <= 0 (minus infinity: 0); x not a number gives any number."""
    bounded = tl.maximum(x, LOWEST)
    q = (bounded * LOG2_E + NEAREST) - NEAREST
    r = _fused(q, LN2_LOW, _fused(q, LN2_HIGH, bounded))
    above = _fused(r, P5, P4)
    above = _fused(_fused(_fused(_fused(above, r, P3), r, P2), r, P1), r, P0)
    below = _fused(_fused(r, Q2, Q1), r, Q0)
    power = ((q.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < LOWEST, 0.0, tl.div_rn(above, below) * power)


def reference(x: torch.Tensor) -> torch.Tensor:
    """exponential() of a float32 tensor, on any device.

    Fused steps are made of float64 ones, which round twice: they differ from a fused step once in about 2**29.
    """

    def fused(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
        wide = c.double() if isinstance(c, torch.Tensor) else c
        return (a.double() * (b.double() if isinstance(b, torch.Tensor) else b) + wide).float()

    bounded = x.clamp_min(_LOWEST)
    q = (bounded * _LOG2_E + _NEAREST) - _NEAREST
    r = fused(q, _LN2[1], fused(q, _LN2[0], bounded))
    above, below = torch.full_like(r, _P[0]), torch.full_like(r, _Q[0])
    for coefficient in _P[1:]:
        above = fused(above, r, coefficient)
    for coefficient in _Q[1:]:
        below = fused(below, r, coefficient)
    power = ((q.int() + 127) << 23).view(torch.float32)
    return torch.where(x < _LOWEST, 0.0, above / below * power)
