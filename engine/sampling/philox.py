"""Philox4x32-10: random numbers as a function of (seed, token index, purpose), without any state.

The generator is a keyed bijection of a 128-bit counter (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers:
As Easy as 1, 2, 3", SC 2011). Ten rounds; in each the counter words c0..c3 become

    c0' = hi(M1 * c2) ^ c1 ^ k0      c1' = lo(M1 * c2)
    c2' = hi(M0 * c0) ^ c3 ^ k1      c3' = lo(M0 * c0)

and the key words grow by the Weyl constants W0, W1. The key here is the request's 64-bit seed (low word
first); the counter is (token index low word, token index high word, purpose, 0). So the number of a token
depends neither on how many numbers were drawn before nor on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
# Row 0 multiplies c2 and row 1 multiplies c0, see philox4x32.
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL[None, :, None]  # [rounds, 2, 1]

_UNIFORM_BITS = 52


class Purpose(IntEnum):
    """Third counter word: keeps the numbers that one token needs for different decisions independent."""

    TOKEN = 0  # choice of the token


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds of Philox4x32 for n counters at once.

    counter: [4, n], key: [2, n]; each uint64 element holds one 32-bit word. Returns the output words [4, n].
    """
    keys = (key[None] + _KEY_STEPS) & _LOW  # [rounds, 2, n]
    multiplied = counter[[2, 0]]  # c2 and c0
    mixed = counter[[1, 3]]  # c1 and c3
    for round_key in keys:
        product = multiplied * _MULTIPLIERS  # 32 x 32 bits: never more than 64
        multiplied = ((product >> _SHIFT) ^ mixed ^ round_key)[::-1]
        mixed = product & _LOW
    return np.stack([multiplied[1], mixed[0], multiplied[0], mixed[1]])


def uniforms(
    seeds: Sequence[int], token_indices: Sequence[int], purpose: Purpose = Purpose.TOKEN
) -> NDArray[np.float64]:
    """One number in [0, 1 - 2**-52] per row, a multiple of 2**-52: [n] float64.

    `seeds` are unsigned 64 bit (taken modulo 2**64), `token_indices` >= 0. The 52 bits are the low 20 bits of
    the second output word above the first word. With 52 bits (not 53), floor(u * total) < total for every
    whole total <= 2**53.
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    index = np.array(token_indices, dtype=np.uint64)
    counter = np.zeros((4, len(seed)), dtype=np.uint64)
    counter[0] = index & _LOW
    counter[1] = index >> _SHIFT
    counter[2] = purpose
    words = philox4x32(counter, np.stack([seed & _LOW, seed >> _SHIFT]))
    bits = ((words[1] & np.uint64(0xFFFFF)) << _SHIFT) | words[0]
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-_UNIFORM_BITS
    return numbers
