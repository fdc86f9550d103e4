"""Where the selections of rows end, to within a few tokens: the second reading of the logits for a draw.

`_bins_kernel` counts how many tokens fall into each of 128 bins of (peak - x) / temperature, from the peak to where
weights round to 0. Counts locate the k-th token to one bin. A bin's tokens weigh the same within 20 %, so counts also
bound every cumulative weight from both sides, and locate the end of top-p to a few bins: the region. Only if more
than 2,048 tokens, those that there is room to list, lie in it (flat distributions) a second launch divides the region
in the same way.
"""

from __future__ import annotations

from typing import Any

from kernels.draw_weights import BEYOND_ALL, positions_of, temperature_of, weights_of
from kernels.exponential import exponential
from kernels.jit import jit, tl
from kernels.sampling import ROW_WORDS, SELECTS, Scratch, last_to_arrive

_WORDS = tl.constexpr(ROW_WORDS)
_SELECTS = tl.constexpr(SELECTS)
_BINS = tl.constexpr(128)
_BIN_SHIFT = tl.constexpr(24)  # 128 bins of 2**24 positions
_SLACK = tl.constexpr(1e-4)  # relative; covers the rounding of positions and of a bin's edges
_TINY = tl.constexpr(2.0**-40)  # relative to the total; covers rounding in sums of bounds


@jit
def _region(counts, base, shift, head_count, head_mass, tail_mass, top_k, top_p, least, ONE, SCALE):
    """Where a row's selection ends: first and last bin, and how many tokens are before them and in them.

    counts: int32 [_BINS]. head_*: tokens before bin 0; tail_mass: weight behind the last bin. Returns also whether the
    selection ends at all before weights are 0.
    """
    bins = tl.arange(0, _BINS)
    through = tl.cumsum(counts, axis=0).to(tl.int64)  # tokens in this bin and those before
    total_count = tl.sum(counts, axis=0).to(tl.int64)
    left = top_k - head_count
    limited = left <= total_count
    kept = tl.where(limited, tl.minimum(tl.maximum(left - through + counts, 0), counts.to(tl.int64)), counts)
    width = (tl.full([], 1, tl.int64) << shift).to(tl.float64) / SCALE
    near = (base + (bins.to(tl.int64) << shift)).to(tl.float64) / SCALE
    largest = ONE * exponential(-near.to(tl.float32)).to(tl.float64) * (1.0 + _SLACK) + 1.0
    smallest = ONE * exponential(-(near + width).to(tl.float32)).to(tl.float64) * (1.0 - _SLACK) - 1.0
    most = tl.where(largest < least, 0.0, largest) * kept.to(tl.float64)
    fewest = tl.where((smallest < least) | (smallest < 0.0), 0.0, smallest) * kept.to(tl.float64)
    head = head_mass.to(tl.float64)
    tail = tl.where(limited, 0.0, tail_mass.to(tl.float64))
    unsure = (head + tl.sum(most, axis=0) + tail) * _TINY
    behind_most = tl.cumsum(most, axis=0, reverse=True) - most + tail + unsure
    behind_fewest = tl.cumsum(fewest, axis=0, reverse=True) - fewest + tail - unsure
    before_most = head + tl.cumsum(most, axis=0) + unsure
    before_fewest = head + tl.cumsum(fewest, axis=0) - unsure
    # Top-p ends in the first bin with mass before >= p (mass before + mass behind).
    not_yet = (1.0 - top_p) * before_most < top_p * behind_fewest
    not_surely = (1.0 - top_p) * before_fewest < top_p * behind_most
    last_k = tl.minimum(tl.sum((through < left).to(tl.int32), axis=0), _BINS - 1)
    first = tl.minimum(tl.sum(not_yet.to(tl.int32), axis=0), _BINS - 1)
    last = tl.minimum(tl.sum(not_surely.to(tl.int32), axis=0), _BINS - 1)
    last = tl.where(limited, last_k, last)
    first = tl.where(top_p < 1.0, tl.minimum(first, last), last_k)
    inside = tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0), axis=0).to(tl.int64)
    before = tl.sum(tl.where(bins < first, counts, 0), axis=0).to(tl.int64) + head_count
    return first, last, before, inside, limited | (top_p < 1.0)


@jit
def _bins_kernel(
    logits,
    row_stride,
    row_params,
    flags,
    peaks,
    regions,
    histograms,
    part_masses,
    tickets,
    vocab: tl.constexpr,
    ONE: tl.constexpr,
    SCALE: tl.constexpr,
    SECOND: tl.constexpr,
    CANDIDATES: tl.constexpr,
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
    if (tl.load(row_params + row * _WORDS) & _SELECTS) == 0:
        return
    if tl.load(flags + row) != 0:
        return
    region = regions + row * 4
    if SECOND:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(region + 3) <= CANDIDATES:
            return
    peak = tl.load(peaks + row)
    temperature = temperature_of(row_params, row)
    least = tl.load(row_params + row * _WORDS + 4)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    position, weighty = positions_of(x, peak, temperature, SCALE)
    cell = row * BLOCKS + block
    base = tl.full([], 0, tl.int64)
    shift = tl.full([], _BIN_SHIFT, tl.int32)
    if SECOND:
        base = tl.load(region)
        end = tl.load(region + 1)
        shift = tl.full([], 0, tl.int32)
        for bits in tl.static_range(24):
            shift += (end - base > (_BINS << bits)).to(tl.int32)
        begin = base.to(tl.int32)
        end = tl.minimum(end, BEYOND_ALL).to(tl.int32)
        mass = weights_of(x, peak, temperature, least, ONE)
        tl.store(part_masses + cell * 2, tl.sum(tl.where(position < begin, mass, 0), axis=0))
        tl.store(part_masses + cell * 2 + 1, tl.sum(tl.where(position >= end, mass, 0), axis=0))
        weighty = weighty & (position >= begin) & (position < end)
        position = position - begin
    bins = tl.where(weighty, position >> shift, 0)
    lane = tl.arange(0, _BINS)
    tl.store(histograms + cell * _BINS + lane, tl.histogram(bins, _BINS, mask=weighty))
    if last_to_arrive(tickets, row, BLOCKS):
        part = tl.arange(0, BLOCKS_POW2)
        there = (part < BLOCKS)[:, None] & (lane >= 0)[None, :]
        cells = (row * BLOCKS + part)[:, None] * _BINS + lane[None, :]
        counts = tl.sum(tl.load(histograms + cells, mask=there, other=0, cache_modifier=".cg"), axis=0)
        head_count = tl.full([], 0, tl.int64)
        head_mass = tl.full([], 0, tl.int64)
        tail_mass = tl.full([], 0, tl.int64)
        if SECOND:
            head_count = tl.load(region + 2)
            masses = part_masses + (row * BLOCKS + part) * 2
            head_mass = tl.sum(tl.load(masses, mask=part < BLOCKS, other=0, cache_modifier=".cg"), axis=0)
            tail_mass = tl.sum(tl.load(masses + 1, mask=part < BLOCKS, other=0, cache_modifier=".cg"), axis=0)
        top_k = tl.load(row_params + row * _WORDS + 2)
        top_p = tl.load(row_params + row * _WORDS + 3).to(tl.float64, bitcast=True)
        first, last, before, inside, ends = _region(
            counts, base, shift, head_count, head_mass, tail_mass, top_k, top_p, least, ONE, SCALE
        )
        tl.store(region, tl.where(ends, base + (first.to(tl.int64) << shift), BEYOND_ALL))
        tl.store(region + 1, tl.where(ends, base + ((last.to(tl.int64) + 1) << shift), BEYOND_ALL))
        tl.store(region + 2, before)
        tl.store(region + 3, tl.where(ends, inside, 0))


def find_regions(grid: tuple[int, int], rows: tuple[Any, ...], scratch: Scratch, constants: dict[str, Any]) -> None:
    """Writes regions of the rows that have SELECTS into those of `scratch`: first position, end, tokens before it,
    tokens in it.

    grid, rows, constants: of the launches of `kernels.draw.draw`; `rows` are the arguments that say what the rows are.
    """
    for second in (False, True):
        _bins_kernel[grid](
            *rows,
            scratch.regions,
            scratch.histograms,
            scratch.part_masses,
            scratch.tickets,
            SECOND=second,
            **constants,
        )
