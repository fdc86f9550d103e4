"""What the attention kernels have in common: the paged pool as a tensor descriptor, and matrix products."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kernels.jit import interpreted, jit, tl

# The interpreter holds bfloat16 as bits, which its matrix product takes for integers
_WIDEN = tl.constexpr(interpreted)


@jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32."""
    if _WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


def described(pool: torch.Tensor, tile: int) -> Any:
    """A layer's pool as rows of one token and head [blocks * 2 * kv_heads * page, head_dim], for copies of `tile` rows
    by the tensor memory unit. Its coordinates are 32-bit; elements past head_dim read as 0.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = pool.view(-1, pool.shape[-1])
    if flat.shape[0] >= 2**31:
        raise ValueError(f"a pool of {flat.shape[0]} rows of one token and head is too large for tensor descriptors")
    return TensorDescriptor(flat, list(flat.shape), [flat.shape[1], 1], [tile, next_power(flat.shape[1])])


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; few in the interpreter, where programs run one after the other."""
    return 4 if interpreted else torch.cuda.get_device_properties(device).multi_processor_count


def next_power(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
