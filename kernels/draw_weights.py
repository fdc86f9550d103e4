"""Weights of tokens, and their positions below the peak: what the kernels of a draw (`kernels.draw`) have in common.

A logit x has the whole-numbered weight

    w = round(exp((x - peak) / temperature) * ONE),   ONE = 2**(53 - bits of the largest token id)

with min-p setting smaller weights than its least one to 0. Sums of weights are whole numbers below 2**53, exact in
int64 and in float64.
"""

from __future__ import annotations

import math

from kernels.exponential import exponential
from kernels.jit import jit, tl
from kernels.sampling import ROW_WORDS

_EXACT_BITS = 53
BEYOND_ALL = tl.constexpr(0x7FFFFFFF)  # above every position
_WORDS = tl.constexpr(ROW_WORDS)
_LAST_POSITION = tl.constexpr(2147483520.0)  # largest float32 number below 2**31
_WHOLE = tl.constexpr(2.0**23)  # float32 numbers from here on are whole
_SMALLEST_TEMPERATURE = tl.constexpr(1e-30)


def one_for(vocab: int) -> float:
    """Weight of the likeliest token: the power of two with which the sum of all weights stays within 2**53."""
    return 2.0 ** (_EXACT_BITS - (vocab - 1).bit_length())


def scale_for(vocab: int) -> float:
    """Positions per nat of (peak - x) / temperature, so that weights are 0 before positions reach 2**31."""
    return 2.0**31 / (math.log(2.0 * one_for(vocab)) + 0.1)


@jit
def weights_of(x, peak, temperature, least, ONE: tl.constexpr):
    """int64 weights of float32 logits. Half-way cases go to the even neighbour, as the addition of 2**23 does."""
    raised = exponential(tl.div_rn(x - peak, temperature)) * ONE
    whole = tl.where(raised < _WHOLE, (raised + _WHOLE) - _WHOLE, raised).to(tl.int64)
    return tl.where(whole < least, 0, whole)


@jit
def positions_of(x, peak, temperature, SCALE: tl.constexpr):
    """Distances below the peak as int32 numbers, which fall as logits rise, and whether a weight can be above 0."""
    distance = (peak - x) * tl.div_rn(temperature * 0.0 + SCALE, temperature)
    return tl.minimum(distance, _LAST_POSITION).to(tl.int32), distance < _LAST_POSITION


@jit
def temperature_of(row_params, row):
    value = tl.load(row_params + row * _WORDS + 1).to(tl.float64, bitcast=True).to(tl.float32)
    return tl.maximum(value, _SMALLEST_TEMPERATURE)
