"""From hidden states to logits."""

from __future__ import annotations

import torch

from engine.layers.linear import Linear

# Neighbouring bfloat16 numbers are at most this fraction of their size apart
_BFLOAT16_STEP = 2.0**-7


class OutputHead:
    """float32 logits of the whole vocabulary.

    In bfloat16 the product comes out rounded to 8 bits: at a logit of 25 the next number is 0.125 away, and the two
    most likely tokens share one number in 3 % of a chat's positions. Which of them wins must not be left to the output
    format, so rows whose leading logits lie within one rounding step get the product's remainder as well: the
    accumulators once more, less the rounded logits, which gives 16 bits. Only such rows pay for it, and what a row
    gets depends on that row alone.
    """

    __slots__ = ("product",)

    def __init__(self, product: Linear) -> None:
        """product: [hidden -> vocab], without bias."""
        self.product = product

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: normalised, [n, hidden] -> float32 [n, vocab]."""
        rounded = self.product(hidden)
        logits = rounded.float()
        if rounded.dtype == torch.float32:
            return logits
        best = logits.amax(dim=-1, keepdim=True)
        close = (logits >= best - best.abs() * _BFLOAT16_STEP).sum(dim=-1) > 1
        if not close.any():
            return logits
        rows = close.nonzero()[:, 0]
        remainder = self.product.plus(hidden[rows], rounded[rows].neg_())  # [close rows, vocab]
        return logits.index_add_(0, rows, remainder.float())
