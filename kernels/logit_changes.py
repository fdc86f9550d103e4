"""Changes of single logits before tokens are chosen, and their undoing: bias, mask, penalties.

Rows name the tokens whose logits they change, so work and bytes are proportional to those, some 30 bytes per token;
rows that name none cost nothing.

`adjust` adds a bias or masks, as a list of (row, token, bias) says that comes with the step's parameters.

`penalize` applies repetition, presence and frequency penalties to all tokens that a request has seen. Those are too
many to send at every step, so each request has a slot of a PenaltyTable on the device, tokens and how often each was
generated, and a step sends what has changed: for a running request one token. `PenaltyTable.update` writes that.

Both save the logits that they overwrite, and `restore` and `unpenalize`, in the reverse order, put them back: logits of
a step are a pure input, whoever reads them next.
"""

from __future__ import annotations

import torch

from kernels.jit import jit, tl, triton
from kernels.sampling import PENALIZED, ROW_WORDS

# One token's bias, ENTRY_WORDS int64 words: row << 32 | token; float32 bits of the bias, minus infinity to mask.
ENTRY_WORDS = 2
# One change of a PenaltyTable, UPDATE_WORDS int64 words: slot * capacity + place; token << 32 | times generated.
UPDATE_WORDS = 2

_BLOCK = 256
_WORDS = tl.constexpr(ROW_WORDS)
_ENTRY, _UPDATE = tl.constexpr(ENTRY_WORDS), tl.constexpr(UPDATE_WORDS)
_PENALIZED = tl.constexpr(PENALIZED)


class PenaltyTable:
    """Tokens that requests have seen: `slots` requests with up to `capacity` distinct tokens each.

    A token counts as seen by being listed; its count says how often it was generated, 0 for tokens of the prompt only.
    `saved` is for the logits of as many rows.
    """

    def __init__(self, slots: int, capacity: int, device: torch.device | str) -> None:
        self.slots, self.capacity = slots, capacity
        self.tokens = torch.zeros(slots, capacity, dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, capacity, dtype=torch.int32, device=device)
        self.saved = torch.zeros(slots, capacity, dtype=torch.float32, device=device)

    def update(self, updates: torch.Tensor, count: int) -> None:
        """Writes the first `count` updates, int64 [>= count * UPDATE_WORDS] on the device, at most one per place."""
        if count:
            grid = (triton.cdiv(count, _BLOCK),)
            _update_kernel[grid](updates, count, self.tokens, self.counts, BLOCK=_BLOCK, num_warps=4)


@jit(do_not_specialize=["update_count"])
def _update_kernel(updates, update_count, table_tokens, table_counts, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lane < update_count
    place = tl.load(updates + lane.to(tl.int64) * _UPDATE, mask=there, other=0)
    value = tl.load(updates + lane.to(tl.int64) * _UPDATE + 1, mask=there, other=0)
    tl.store(table_tokens + place, (value >> 32).to(tl.int32), mask=there)
    tl.store(table_counts + place, value.to(tl.int32), mask=there)


@jit(do_not_specialize=["entry_count"])
def _adjust_kernel(logits, row_stride, entries, entry_count, saved, UNDO: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lane < entry_count
    words = entries + lane.to(tl.int64) * _ENTRY
    place = tl.load(words, mask=there, other=0)
    at = logits + (place >> 32) * row_stride + (place & 0xFFFFFFFF)
    if UNDO:
        tl.store(at, tl.load(saved + lane, mask=there), mask=there)
    else:
        bias = tl.load(words + 1, mask=there, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.load(at, mask=there, other=0.0)
        tl.store(saved + lane, x, mask=there)
        tl.store(at, tl.where(bias == float("-inf"), bias, x + bias), mask=there)


@jit(do_not_specialize=["capacity"])
def _penalize_kernel(
    logits,
    row_stride,
    row_params,
    table_tokens,
    table_counts,
    saved,
    capacity,
    UNDO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    words = row_params + row * _WORDS
    if (tl.load(words) & _PENALIZED) == 0:
        return
    where = tl.load(words + 7)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lane < (where & 0xFFFFFFFF)
    place = (where >> 32) * capacity + lane
    saved_at = saved + row * capacity + lane
    at = logits + row * row_stride + tl.load(table_tokens + place, mask=there, other=0)
    if UNDO:
        tl.store(at, tl.load(saved_at, mask=there), mask=there)
    else:
        repetition = tl.load(words + 8).to(tl.int32).to(tl.float32, bitcast=True)
        both = tl.load(words + 9)
        frequency = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        presence = both.to(tl.int32).to(tl.float32, bitcast=True)
        count = tl.load(table_counts + place, mask=there, other=0)
        x = tl.load(at, mask=there, other=0.0)
        tl.store(saved_at, x, mask=there)
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(count > 0, x - (frequency * count.to(tl.float32) + presence), x)
        tl.store(at, x, mask=there)


def adjust(logits: torch.Tensor, entries: torch.Tensor, count: int, saved: torch.Tensor) -> None:
    """Adds biases to float32 logits [rows, vocab] in place, or masks, and saves what was there.

    entries: int64 [>= count * ENTRY_WORDS], on the device, one per (row, token) at the most. saved: float32 [>= count].
    """
    _adjust(logits, entries, count, saved, undo=False)


def restore(logits: torch.Tensor, entries: torch.Tensor, count: int, saved: torch.Tensor) -> None:
    """Undoes `adjust`."""
    _adjust(logits, entries, count, saved, undo=True)


def _adjust(logits: torch.Tensor, entries: torch.Tensor, count: int, saved: torch.Tensor, undo: bool) -> None:
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _adjust_kernel[grid](logits, logits.stride(0), entries, count, saved, UNDO=undo, BLOCK=_BLOCK, num_warps=4)


def penalize(logits: torch.Tensor, row_params: torch.Tensor, table: PenaltyTable, longest: int) -> None:
    """Penalises seen tokens of PENALIZED rows in float32 logits [rows, vocab], in place, and saves what was there.

    longest: the most tokens that any of the rows has in the table. A seen token's logit x becomes x / repetition if
    positive and x * repetition if not (Keskar et al., "CTRL", 2019, section 4.1, with the sign rule that later became
    common), then loses frequency * count + presence if it was generated.
    """
    _penalize(logits, row_params, table, longest, undo=False)


def unpenalize(logits: torch.Tensor, row_params: torch.Tensor, table: PenaltyTable, longest: int) -> None:
    """Undoes `penalize`."""
    _penalize(logits, row_params, table, longest, undo=True)


def _penalize(logits: torch.Tensor, row_params: torch.Tensor, table: PenaltyTable, longest: int, undo: bool) -> None:
    if longest:
        _penalize_kernel[(triton.cdiv(longest, _BLOCK), len(logits))](
            logits,
            logits.stride(0),
            row_params,
            table.tokens,
            table.counts,
            table.saved,
            table.capacity,
            UNDO=undo,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


def reference(
    logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, penalties: tuple[float, float, float]
) -> torch.Tensor:
    """One row of logits [vocab] after repetition, frequency and presence penalty; tokens, distinct, and counts: [n]."""
    repetition, frequency, presence = torch.tensor(penalties, dtype=torch.float32, device=logits.device)
    out = logits.float().clone()
    x = out[tokens]
    x = torch.where(x > 0, x / repetition, x * repetition)
    out[tokens] = torch.where(counts > 0, x - (frequency * counts + presence), x)
    return out
