"""Which tensor-parallel sizes of a prefill and a decode server fit each other."""

from __future__ import annotations

from collections.abc import Iterable


def heads_fit(heads: int, tp_size: int) -> bool:
    """Whether `heads` KV heads can be shared out evenly: as many to each rank, or as many ranks to each head."""
    return min(heads, tp_size) >= 1 and max(heads, tp_size) % min(heads, tp_size) == 0


def sizes_fit(prefill: int, decode: int, heads: Iterable[int]) -> bool:
    """Whether the ranks of two servers can be mapped onto each other. heads: KV heads of the model, by cache group.

    One size divides the other, and each shares out every group's heads.
    """
    small, large = sorted((prefill, decode))
    if small < 1 or large % small:
        return False
    return all(heads_fit(count, prefill) and heads_fit(count, decode) for count in heads)
