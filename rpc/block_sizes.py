"""Which block sizes of a prefill and a decode server fit each other."""

from __future__ import annotations

MOST_TOKENS = 1024  # of a block of a server


def block_sizes_fit(prefill: int, decode: int) -> bool:
    """Whether blocks of two sizes, in tokens, lie over each other: one is a multiple of the other."""
    small, large = sorted((prefill, decode))
    return small >= 1 and (small == large or (large % small == 0 and large <= MOST_TOKENS))
