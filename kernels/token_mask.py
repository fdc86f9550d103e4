"""Logits with the tokens masked that a row may not take, for rows that have a mask of the vocabulary.

A mask is packed, a bit per token, and comes from the host with the step: 16 KiB for 128k tokens. The logits themselves
are a pure input, and so many of them change that saving and restoring would cost what a copy does: the kernel writes
one, of all rows, so that what draws has them in one place. It moves 8 bytes per logit, and the launch is the floor
below some hundred thousand of them.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, tl, triton

_BLOCK = 1024


def mask_words(vocab: int) -> int:
    """int32 words of a mask: token t is bit t mod 32 of word t div 32."""
    return -(-vocab // 32)


@jit
def _mask_kernel(logits, row_stride, out, out_stride, slots, masks, words, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lane < vocab
    x = tl.load(logits + row * row_stride + lane, mask=there, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        bits = tl.load(masks + slot * words + (lane >> 5), mask=there, other=0)
        x = tl.where(((bits >> (lane & 31)) & 1) != 0, x, float("-inf"))
    tl.store(out + row * out_stride + lane, x, mask=there)


def masked(logits: torch.Tensor, slots: torch.Tensor, masks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes logits [rows, vocab] of any float dtype into out, float32 [>= rows, vocab], minus infinity where a row's
    mask has no bit; answers the rows of out.

    slots: int32 [>= rows], the row's mask, negative for none. masks: int32 [masks, mask_words(vocab)]. One launch.
    """
    rows, vocab = logits.shape
    grid = (triton.cdiv(vocab, _BLOCK), rows)
    _mask_kernel[grid](
        logits, logits.stride(0), out, out.stride(0), slots, masks, masks.stride(0), vocab, BLOCK=_BLOCK, num_warps=4
    )
    return out[:rows]


def reference(logits: torch.Tensor, slots: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """What `masked` writes: float32 [rows, vocab]."""
    rows, vocab = logits.shape
    token = torch.arange(vocab, device=logits.device)
    out = logits.float().clone()
    for row, slot in enumerate(slots[:rows].tolist()):
        if slot >= 0:
            allowed = (masks[slot][token >> 5] >> (token & 31)) & 1
            out[row, allowed == 0] = float("-inf")
    return out
