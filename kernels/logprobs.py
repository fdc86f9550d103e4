"""Log-probabilities of chosen and of most likely tokens, out of raw logits.

For a row with raw logits x, peak m and chosen token t the kernel gives

    sum over all tokens of exp(x - m)     so that log p(token) = x[token] - m - log(sum)
    x[t] and its rank                     1 + tokens with larger logits + tokens before t with equal ones
    the n most likely tokens              largest logits first, equal ones in id order

and leaves the logarithm and the subtraction, a few numbers per row, to the host. exp is that of kernels.exponential,
float32 as in the host's sampler; the sum is float64, whose rounding (relative 2**-50) is all that differs.

The logits are read once: 0.5 MB per row of 128,256 tokens, 131 MB and a floor of 29 us for 256 rows. The most likely
tokens are found by n rounds of one maximum each, in every block of 4,096 tokens (2,048 for few rows) and then, by the
last program of the row, over the blocks' findings: with n = 20 about 10 us for one row. Rows that did not ask cost a
program that ends at once.
"""

from __future__ import annotations

import torch

from kernels.exponential import exponential
from kernels.exponential import reference as exponential_reference
from kernels.jit import jit, pdl_options, tl, triton
from kernels.sampling import LOGPROBS_SHIFT, ROW_WORDS, Scratch, last_to_arrive, order_key

# One row's result, HEAD_WORDS + n int64 words: sum (float64 bits); rank << 32 | logit (float32 bits) of the chosen
# token; peak (float32 bits); then per likely token order_key(logit) << 32 | (2**31 - 1 - id).
HEAD_WORDS = 3

_HEAD = tl.constexpr(HEAD_WORDS)
_WORDS = tl.constexpr(ROW_WORDS)
_SHIFT = tl.constexpr(LOGPROBS_SHIFT)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(-0x8000000000000000)


@jit
def _logprobs_kernel(
    logits,
    row_stride,
    row_params,
    flags,
    raw_peaks,
    tokens,
    part_sums,
    part_counts,
    part_tops,
    tickets,
    found,
    vocab: tl.constexpr,
    TOPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    asked = tl.load(row_params + row * _WORDS) >> _SHIFT
    if asked == 0:
        return
    if tl.load(flags + row) != 0:
        return
    wanted = tl.minimum(asked - 1, TOPS).to(tl.int32)
    peak = tl.load(raw_peaks + row)
    token = tl.load(tokens + row)
    own = tl.load(logits + row * row_stride + token).to(tl.float32)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    cell = row * BLOCKS + block
    tl.store(part_sums + cell, tl.sum(exponential(x - peak).to(tl.float64), axis=0))
    likelier = inside & ((x > own) | ((x == own) & (ids < token)))
    tl.store(part_counts + cell, tl.sum(likelier.to(tl.int32), axis=0))
    ranked = (order_key(x).to(tl.int64) << 32) | (ids ^ _LAST_ID).to(tl.int64)
    ranked = tl.where(inside, ranked, _NOTHING)
    for place in range(wanted):
        best = tl.max(ranked, axis=0)
        tl.store(part_tops + cell * TOPS + place, best)
        ranked = tl.where(ranked == best, _NOTHING, ranked)
    if last_to_arrive(tickets, row, BLOCKS):
        part = tl.arange(0, BLOCKS_POW2)
        cells = row * BLOCKS + part
        sums = tl.load(part_sums + cells, mask=part < BLOCKS, other=0.0, cache_modifier=".cg")
        counts = tl.load(part_counts + cells, mask=part < BLOCKS, other=0, cache_modifier=".cg")
        at = found + row * (_HEAD + TOPS)
        rank = 1 + tl.sum(counts, axis=0).to(tl.int64)
        tl.store(at, tl.sum(sums, axis=0).to(tl.int64, bitcast=True))
        tl.store(at + 1, (rank << 32) | (own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF))
        tl.store(at + 2, peak.to(tl.int32, bitcast=True).to(tl.int64))
        if wanted > 0:
            lane = tl.arange(0, BLOCKS_POW2 * TOPS)
            there = (lane // TOPS < BLOCKS) & (lane % TOPS < wanted)
            tops = part_tops + row * BLOCKS * TOPS + lane
            finalists = tl.load(tops, mask=there, other=_NOTHING, cache_modifier=".cg")
            for place in range(wanted):
                best = tl.max(finalists, axis=0)
                tl.store(at + _HEAD + place, best)
                finalists = tl.where(finalists == best, _NOTHING, finalists)


class LogprobScratch:
    """Device memory for `logprobs` with up to `tops` likely tokens (a power of two) per row, and its results."""

    def __init__(self, scratch: Scratch, tops: int) -> None:
        device, cells = scratch.peaks.device, len(scratch.part_ids)
        self.tops = tops
        self.sums = torch.zeros(cells, dtype=torch.float64, device=device)
        self.counts = torch.zeros(cells, dtype=torch.int32, device=device)
        self.top_keys = torch.zeros(cells, tops, dtype=torch.int64, device=device)
        self.found = torch.zeros(scratch.max_rows, HEAD_WORDS + tops, dtype=torch.int64, device=device)


def logprobs(
    logits: torch.Tensor,
    row_params: torch.Tensor,
    scratch: Scratch,
    tokens: torch.Tensor,
    flags: torch.Tensor,
    out: LogprobScratch,
) -> None:
    """Fills out.found, [rows, HEAD_WORDS + tops], for usable rows whose WHAT asks for log-probabilities.

    logits: raw, [rows, vocab]; tokens: the chosen ones, int64 [rows]. `largest` must have run on the same raw logits.
    A row that asks for more than out.tops tokens gets out.tops; one that asks for more than there are in the
    vocabulary gets words of -2**63 behind them.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    block = scratch.block_for(rows)
    blocks = triton.cdiv(vocab, block)
    _logprobs_kernel[(blocks, rows)](
        logits,
        logits.stride(0),
        row_params,
        flags,
        scratch.raw_peaks,
        tokens,
        out.sums,
        out.counts,
        out.top_keys,
        scratch.tickets,
        out.found,
        vocab=vocab,
        TOPS=out.tops,
        BLOCKS=blocks,
        BLOCKS_POW2=triton.next_power_of_2(blocks),
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=False,
        **pdl_options(logits),
    )


def reference(
    logits: torch.Tensor, tokens: torch.Tensor, tops: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities float64 [rows] and ranks [rows] of tokens, then ids and log-probabilities [rows, tops]."""
    x = logits.float()
    x = torch.where(x == 0.0, 0.0, x)  # a sort may tell the zeros apart
    peaks = x.amax(dim=1, keepdim=True)
    sums = exponential_reference(x - peaks).double().sum(dim=1, keepdim=True)
    everything = x.double() - peaks.double() - sums.log()
    own = x.gather(1, tokens[:, None])
    ids = torch.arange(x.shape[1], device=x.device)
    ranks = 1 + ((x > own) | ((x == own) & (ids < tokens[:, None]))).sum(dim=1)
    order = torch.sort(x, dim=1, descending=True, stable=True).indices[:, :tops]
    return everything.gather(1, tokens[:, None])[:, 0], ranks, order, everything.gather(1, order)
