"""Sampling on the device, first part: the largest logit of every row.

`largest` finds per row the largest logit, its lowest token id and whether the row is usable: the greedy token, and the
peak that `kernels.draw` and `kernels.logprobs` start from. It reads every logit once. With V = 128,256 tokens float32:

    1 row      0.5 MB   read by 63 programs; the floor is a launch, one trip to memory and two reductions, about 3 us
    256 rows   131 MB   floor 29 us at 4.5 TB/s; four operations per logit never matter

Rows are split so that up to 1,056 programs, one wave, share the work. Each writes its largest logit; the last one of a
row to finish (an atomic ticket per row) reads those of the others and writes the row's result, so that one launch
suffices. Maxima do not depend on the order of the comparisons: neither does the result on the split.

The other parts are kernels.logit_changes (bias, mask and penalties, before), kernels.draw (a draw in place of the
largest) and kernels.logprobs. All take [rows, vocab] logits of any float dtype, whose rows may lie apart, and work in
float32; only kernels.logit_changes, which writes, wants float32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.jit import jit, pdl_options, tl, triton

# One row's parameters on the device, ROW_WORDS int64 words:
#   0 WHAT, the bits below        1 temperature (float64)    2 top-k, or NO_TOP_K    3 top-p (float64)
#   4 least weight, for min-p     5 seed                     6 token index           7 slot << 32 | tokens in it
#   8 repetition (float32)        9 frequency << 32 | presence (float32)
# Words 1 to 6 are those of kernels.draw, 7 to 9 of kernels.logit_changes.
ROW_WORDS = 10
NO_TOP_K = 1 << 40
DRAWN = 1  # the row is not greedy
SELECTS = 2  # it has top-k or top-p
ADJUSTED = 4  # kernels.logit_changes changes its logits
PENALIZED = 8  # by penalties
LOGPROBS_SHIFT = 8  # WHAT >> 8: 0, or one more than the number of most likely tokens to report

USABLE, NOT_FINITE, ALL_MASKED = 0, 1, 2  # what `flags` says of a row

_SPLIT_BLOCK = 2048  # logits that a program of `largest` looks at in one go
_PROGRAMS = 1056  # of `largest`, at the most: one wave, eight programs on each of 132 multiprocessors
FEW_ROWS = 16  # up to here blocks are narrow, so that all multiprocessors get some

_WORDS = tl.constexpr(ROW_WORDS)
_ADJUSTED = tl.constexpr(ADJUSTED)
_NOT_FINITE, _ALL_MASKED = tl.constexpr(NOT_FINITE), tl.constexpr(ALL_MASKED)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@dataclass(slots=True)
class Scratch:
    """Device memory that the sampling kernels of one stream share; no two launches may use it at once.

    A row of logits is cut into blocks of `block_for(rows)` tokens. Where a shape says blocks, memory is for the
    larger of (many rows, wide blocks) and (few rows, narrow blocks).
    """

    max_rows: int
    vocab: int
    candidates: int  # tokens near the end of a row's selection that are looked at one by one
    blocks: tuple[int, int]  # tokens per block for few rows, and for many
    peaks: torch.Tensor  # float32 [max_rows]: largest logit, with its changes
    raw_peaks: torch.Tensor  # float32 [max_rows]: largest logit, without them
    tickets: torch.Tensor  # int32 [max_rows], zero between launches
    candidate_counts: torch.Tensor  # int32 [max_rows], zero between launches
    candidate_ids: torch.Tensor  # int32 [max_rows, candidates]
    part_values: torch.Tensor  # float32 [rows x blocks]
    part_ids: torch.Tensor  # int32 [rows x blocks]
    part_masses: torch.Tensor  # int64 [rows x blocks, 2]
    histograms: torch.Tensor  # int32 [rows x blocks, BINS]
    regions: torch.Tensor  # int64 [max_rows, 4]

    def block_for(self, rows: int) -> int:
        """Tokens per block of kernels.draw and kernels.logprobs for that many rows."""
        return self.blocks[0] if rows <= FEW_ROWS else self.blocks[1]


def scratch_for(
    max_rows: int,
    vocab: int,
    device: torch.device | str,
    *,
    blocks: tuple[int, int] = (2048, 4096),
    candidates: int = 2048,
    bins: int = 128,
) -> Scratch:
    """Memory for up to max_rows rows of vocab logits. The sizes, powers of two, are arguments for tests only."""
    few = min(max_rows, FEW_ROWS)
    cells = max(few * -(-vocab // blocks[0]), max_rows * -(-vocab // blocks[1]), few * -(-vocab // _SPLIT_BLOCK))
    cells = max(cells, _PROGRAMS, max_rows)

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Scratch(
        max_rows=max_rows,
        vocab=vocab,
        candidates=candidates,
        blocks=blocks,
        peaks=zeros(max_rows, dtype=torch.float32),
        raw_peaks=zeros(max_rows, dtype=torch.float32),
        tickets=zeros(max_rows, dtype=torch.int32),
        candidate_counts=zeros(max_rows, dtype=torch.int32),
        candidate_ids=zeros(max_rows, candidates, dtype=torch.int32),
        part_values=zeros(cells, dtype=torch.float32),
        part_ids=zeros(cells, dtype=torch.int32),
        part_masses=zeros(cells, 2, dtype=torch.int64),
        histograms=zeros(cells, bins, dtype=torch.int32),
        regions=zeros(max_rows, 4, dtype=torch.int64),
    )


@jit
def order_key(x):
    """int32 numbers in the order of the float32 numbers x; equal for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def key_value(key):
    """The float32 number with that order_key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def last_to_arrive(tickets, row, programs):
    """Whether all other programs of `row` have called this, and what they stored before is visible.

    Their stores must be read with cache_modifier=".cg": first-level caches are not coherent.
    """
    tl.debug_barrier()  # the ticket is drawn by one thread, for the stores of all
    last = tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(tickets + row, 0)
    return last


@jit(do_not_specialize=["splits", "split_blocks"])
def _largest_kernel(
    logits,
    row_stride,
    row_params,
    peaks,
    raw_peaks,
    tokens,
    flags,
    part_values,
    part_ids,
    tickets,
    splits,  # programs per row
    split_blocks,  # BLOCKs of logits per program
    vocab: tl.constexpr,
    ONLY_ADJUSTED: tl.constexpr,
    MOST_SPLITS: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if ONLY_ADJUSTED:  # noqa: SIM102 - decided when the kernel is compiled
        if (tl.load(row_params + row * _WORDS) & _ADJUSTED) == 0:
            return
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = split * split_blocks * BLOCK + lane
    for block in range(split * split_blocks, tl.minimum((split + 1) * split_blocks, tl.cdiv(vocab, BLOCK))):
        ids = block * BLOCK + lane
        x = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # a row with NaN is unusable, as one with infinity is
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, best_id, _NO_TOKEN), axis=0)
    tl.store(part_values + row * splits + split, peak)
    tl.store(part_ids + row * splits + split, token)
    if last_to_arrive(tickets, row, splits):
        part = tl.arange(0, MOST_SPLITS)
        at = row * splits + part
        values = tl.load(part_values + at, mask=part < splits, other=float("-inf"), cache_modifier=".cg")
        token_ids = tl.load(part_ids + at, mask=part < splits, other=_NO_TOKEN, cache_modifier=".cg")
        peak = tl.max(values, axis=0)
        token = tl.min(tl.where(values == peak, token_ids, _NO_TOKEN), axis=0)
        usable = (peak > float("-inf")) & (peak < float("inf"))
        failure = _NOT_FINITE
        if ONLY_ADJUSTED:
            raw = tl.load(raw_peaks + row)
            finite = (raw > float("-inf")) & (raw < float("inf"))
            usable = usable & finite  # also where a mask covers what is not
            failure = tl.where(finite, _ALL_MASKED, _NOT_FINITE)
        else:
            tl.store(raw_peaks + row, peak)
        tl.store(peaks + row, peak)
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(flags + row, tl.where(usable, 0, failure).to(tl.int64))


def largest(
    logits: torch.Tensor,
    scratch: Scratch,
    tokens: torch.Tensor,
    flags: torch.Tensor,
    adjusted: torch.Tensor | None = None,
) -> None:
    """Largest logits, [rows, vocab] to tokens int64 [>= rows], flags int64 [>= rows] and the scratch's peaks.

    Of equal logits the lowest token id counts. flags: USABLE, or NOT_FINITE when the row has a NaN or its largest
    logit is not finite; `tokens` then holds any id below vocab. Can be captured in a CUDA graph.

    adjusted: the rows' parameters, given once their logits are changed. Then only rows whose WHAT has ADJUSTED are
    looked at, raw peaks stay, and flags are ALL_MASKED where the raw peak was finite and the peak is no longer; a row
    that was NOT_FINITE stays so.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    blocks = triton.cdiv(vocab, _SPLIT_BLOCK)
    split_blocks = triton.cdiv(blocks, min(max(_PROGRAMS // rows, 1), blocks))
    splits = triton.cdiv(blocks, split_blocks)
    _largest_kernel[(splits, rows)](
        logits,
        logits.stride(0),
        flags if adjusted is None else adjusted,
        scratch.peaks,
        scratch.raw_peaks,
        tokens,
        flags,
        scratch.part_values,
        scratch.part_ids,
        scratch.tickets,
        splits,
        split_blocks,
        vocab=vocab,
        ONLY_ADJUSTED=adjusted is not None,
        MOST_SPLITS=triton.next_power_of_2(blocks),
        BLOCK=_SPLIT_BLOCK,
        num_warps=4,
        **pdl_options(logits),
    )


def reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64 [rows], flags int64 [rows] and peaks float32 [rows] of `largest`."""
    wide = logits.float()
    wide = torch.where(wide.isnan(), torch.inf, wide)
    peaks = wide.amax(dim=1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    tokens = torch.where(wide == peaks[:, None], ids, logits.shape[1]).amin(dim=1)
    return tokens, (~peaks.isfinite()).long(), peaks
