"""Sampling on the device, second part: one draw per row from temperature, min-p, top-k and top-p.

The definition is that of the host's sampler. A logit x has the whole-numbered weight

    w = round(exp((x - peak) / temperature) * ONE),   ONE = 2**(53 - bits of the largest token id)

with min-p setting smaller weights than its least one to 0. Tokens are ranked by logit, equal ones by id. Top-k keeps
the first k, then top-p the fewest first ones that weigh at least p times what top-k left. The token drawn is the first
one, in id order over the kept ones, whose cumulative weight exceeds floor(u * total). Sums of weights are whole numbers
below 2**53, exact in int64 and in the float64 of the host, in any order: so is everything that is decided by them, and
the tokens are those of the host where the exponentials are (see kernels.exponential for when they are not).

Nothing is sorted. What a row keeps is {rank above a threshold}, found in three readings of the logits:

1. `largest` (kernels.sampling): the peak.
2. `find_regions` (kernels.draw_region): the region in which the selection ends, from counts of the tokens at about the
   same distance below the peak.
3. `_masses_kernel`: the exact weight of each block of tokens before the region, and a list of the tokens in it.

Then `_draw_kernel`, one program per row, bisects the threshold over the list, draws, and reads the one block of logits
that has the drawn token.

Rows without top-k and top-p skip step 2. Zero-weight tokens never matter: they cannot be drawn, and a top-k that ends
among them keeps the same weights as none. More than 2,048 tokens in the divided region (equal logits, or a top-k far
below top-p) are bisected over the whole row by one program: right, but slow (about a millisecond).

Bytes: 4 per logit and reading, so 3 x 131 MB for 256 rows of 128,256 tokens, floor 88 us; the exponential of each
logit and the ballots of the histogram take longer than the reading. The bisection, some 20 steps of one reduction,
is about 8 us for one row as for many. There are 5 launches (3 without any top-k and top-p) for any number of rows, and
none depends on anything that the host would have to wait for.
"""

from __future__ import annotations

import torch

from kernels import exponential as exponentials
from kernels.draw_region import find_regions
from kernels.draw_weights import BEYOND_ALL, one_for, positions_of, scale_for, temperature_of, weights_of
from kernels.jit import jit, pdl_options, tl, triton
from kernels.sampling import DRAWN, ROW_WORDS, SELECTS, Scratch, key_value, order_key

_WORDS = tl.constexpr(ROW_WORDS)
_DRAWN, _SELECTS = tl.constexpr(DRAWN), tl.constexpr(SELECTS)
_LEAST_KEY = tl.constexpr(-0x7FFFFFFF)  # one above the key of lanes without a token
_MOST_KEY = tl.constexpr(0x7FFFFFFF)
_NO_KEY = tl.constexpr(-0x80000000)
_UNIFORM = tl.constexpr(2.0**-52)


@jit
def _keeps(ids, key, end_key, end_id):
    """Which tokens rank at or above (end_key, end_id)."""
    return (key > end_key) | ((key == end_key) & (ids <= end_id))


@jit
def _tally(
    least_key,
    keys,
    masses,
    head_count,
    head_mass,
    wide,
    row_logits,
    peak,
    temperature,
    least,
    vocab: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count and weight of the row's tokens with keys of at least least_key, which is not above the head's keys."""
    reach = keys >= least_key
    count = head_count + tl.sum(reach.to(tl.int64), axis=0)
    mass = head_mass + tl.sum(tl.where(reach, masses, 0), axis=0)
    if wide:
        count = count * 0
        mass = mass * 0
        for begin in range(0, vocab, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            x = tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            reached = (order_key(x) >= least_key) & (ids < vocab)
            count += tl.sum(reached.to(tl.int64), axis=0)
            mass += tl.sum(tl.where(reached, weights_of(x, peak, temperature, least, ONE), 0), axis=0)
    return count, mass


@jit
def _end_key(
    wanted,
    BY_MASS: tl.constexpr,
    low,
    high,
    above_count,
    above_mass,
    keys,
    masses,
    head_count,
    head_mass,
    wide,
    row_logits,
    peak,
    temperature,
    least,
    vocab: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key from low to high at or above which tokens number (or weigh) at least `wanted`: bisection.

    They do at `low`. above_*: count and weight above `high`. Returns the key, and count and weight above it.
    """
    while low < high:
        middle = high - ((high - low) >> 1)
        count, mass = _tally(
            middle.to(tl.int32),
            keys,
            masses,
            head_count,
            head_mass,
            wide,
            row_logits,
            peak,
            temperature,
            least,
            vocab,
            ONE,
            BLOCK,
        )
        reached = count >= wanted
        if BY_MASS:
            reached = mass >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
        above_count = tl.where(reached, above_count, count)
        above_mass = tl.where(reached, above_mass, mass)
    return low, above_count, above_mass


@jit
def _end_id(
    wanted,
    end_key,
    ids,
    keys,
    wide,
    row_logits,
    vocab: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The id up to which `wanted` >= 1 tokens have end_key, or the last id if there are fewer."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], vocab - 1, tl.int32)
    while low < high:
        middle = low + ((high - low) >> 1)
        count = tl.sum(((keys == end_key) & (ids <= middle)).to(tl.int64), axis=0)
        if wide:
            for begin in range(0, vocab, BLOCK):
                others = begin + tl.arange(0, BLOCK)
                x = tl.load(row_logits + others, mask=others < vocab, other=float("-inf")).to(tl.float32)
                equal = (order_key(x) == end_key) & (others <= middle)
                count += tl.sum(equal.to(tl.int64), axis=0)
        enough = count >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@jit
def _uniform(row_params, row):
    """The number in [0, 1) of (seed, token index): 52 bits of Philox4x32-10, as engine/sampling/philox.py says."""
    seed = tl.load(row_params + row * _WORDS + 5)
    index = tl.load(row_params + row * _WORDS + 6)
    low = index.to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, low, (index >> 32).to(tl.uint32), zero, zero)
    bits = ((second.to(tl.int64) & 0xFFFFF) << 32) | (first.to(tl.int64) & 0xFFFFFFFF)
    return bits.to(tl.float64) * _UNIFORM


@jit
def _masses_kernel(
    logits,
    row_stride,
    row_params,
    flags,
    peaks,
    regions,
    part_masses,
    candidate_counts,
    candidate_ids,
    vocab: tl.constexpr,
    ONE: tl.constexpr,
    SCALE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weight of each block before the row's region and in all, and the list of the tokens in the region."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    what = tl.load(row_params + row * _WORDS)
    if (what & _DRAWN) == 0:
        return
    if tl.load(flags + row) != 0:
        return
    selects = (what & _SELECTS) != 0
    peak = tl.load(peaks + row)
    temperature = temperature_of(row_params, row)
    least = tl.load(row_params + row * _WORDS + 4)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    mass = weights_of(x, peak, temperature, least, ONE)
    at = part_masses + (row * BLOCKS + block) * 2
    total = tl.sum(mass, axis=0)
    tl.store(at + 1, total)
    if selects:
        region = regions + row * 4
        begin = tl.minimum(tl.load(region), BEYOND_ALL).to(tl.int32)
        end = tl.minimum(tl.load(region + 1), BEYOND_ALL).to(tl.int32)
        inside_count = tl.load(region + 3)
        position, weighty = positions_of(x, peak, temperature, SCALE)
        tl.store(at, tl.sum(tl.where(position < begin, mass, 0), axis=0))
        near = (weighty & (position >= begin) & (position < end)).to(tl.int32)
        found = tl.sum(near, axis=0)
        if (found > 0) & (inside_count <= CANDIDATES):
            slot = tl.atomic_add(candidate_counts + row, found, sem="relaxed") + tl.cumsum(near, axis=0) - 1
            tl.store(candidate_ids + row * CANDIDATES + slot, ids, mask=near > 0)
    else:
        tl.store(at, total)


@jit
def _draw_kernel(
    logits,
    row_stride,
    row_params,
    flags,
    peaks,
    tokens,
    regions,
    part_masses,
    candidate_counts,
    candidate_ids,
    vocab: tl.constexpr,
    ONE: tl.constexpr,
    SCALE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: the end of its selection, and the draw."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    what = tl.load(row_params + row * _WORDS)
    if (what & _DRAWN) == 0:
        return
    if tl.load(flags + row) != 0:
        return
    selects = (what & _SELECTS) != 0
    peak = tl.load(peaks + row)
    temperature = temperature_of(row_params, row)
    least = tl.load(row_params + row * _WORDS + 4)
    region = regions + row * 4
    inside_count = tl.where(selects, tl.load(region + 3), 0)
    row_logits = logits + row * row_stride
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCKS_POW2)
    masses_at = part_masses + (row * BLOCKS + part) * 2
    head_masses = tl.load(masses_at, mask=part < BLOCKS, other=0)
    kept_mass = tl.sum(head_masses, axis=0)
    end_key = tl.full([], _LEAST_KEY, tl.int64)
    end_id = tl.full([], vocab, tl.int32)

    # The tokens of the region, unless they are too many
    tl.store(candidate_counts + row, 0)
    wide = inside_count > CANDIDATES
    near_lane = tl.arange(0, CANDIDATES)
    got = near_lane < tl.where(wide, 0, inside_count)
    near_ids = tl.load(candidate_ids + row * CANDIDATES + near_lane, mask=got, other=0)
    near_x = tl.load(row_logits + near_ids, mask=got, other=float("-inf")).to(tl.float32)
    near_keys = tl.where(got, order_key(near_x), _NO_KEY)
    near_masses = tl.where(got, weights_of(near_x, peak, temperature, least, ONE), 0)

    if inside_count > 0:
        top_k = tl.load(row_params + row * _WORDS + 2)
        top_p = tl.load(row_params + row * _WORDS + 3).to(tl.float64, bitcast=True)
        head_count = tl.load(region + 2)
        head_mass = kept_mass
        lowest = tl.min(tl.where(got, near_keys, _MOST_KEY), axis=0).to(tl.int64)
        highest = tl.max(near_keys, axis=0).to(tl.int64)
        lowest = tl.where(wide, _LEAST_KEY, lowest)
        highest = tl.where(wide, order_key(peak).to(tl.int64), highest)
        above_count = tl.where(wide, 0, head_count)
        above_mass = tl.where(wide, 0, head_mass)

        # Top-k: the key of the k-th token, and how many of its equals are kept
        limited = top_k <= head_count + inside_count
        end_key = lowest
        of_equals = tl.full([], vocab, tl.int64)
        kept_mass = tl.sum(tl.load(masses_at + 1, mask=part < BLOCKS, other=0), axis=0)
        if limited:
            end_key, count, heavier = _end_key(
                top_k, False, lowest, highest, above_count, above_mass,
                near_keys, near_masses, head_count, head_mass, wide, row_logits, peak, temperature, least,
                vocab, ONE, BLOCK,
            )  # fmt: skip
            of_equals = top_k - count
            each = weights_of(key_value(end_key.to(tl.int32)), peak, temperature, least, ONE)
            kept_mass = heavier + of_equals * each

        # Top-p: the same, by weight
        if top_p < 1.0:
            share = top_p * kept_mass.to(tl.float64)
            wanted = share.to(tl.int64)
            wanted += (wanted.to(tl.float64) < share).to(tl.int64)
            p_key, count, heavier = _end_key(
                wanted, True, end_key, highest, above_count, above_mass,
                near_keys, near_masses, head_count, head_mass, wide, row_logits, peak, temperature, least,
                vocab, ONE, BLOCK,
            )  # fmt: skip
            each = weights_of(key_value(p_key.to(tl.int32)), peak, temperature, least, ONE)
            needed = (wanted - heavier + each - 1) // tl.maximum(each, 1)
            of_equals = tl.where(p_key == end_key, tl.minimum(of_equals, needed), needed)
            end_key = p_key
            kept_mass = heavier + of_equals * each
        end_id = _end_id(of_equals, end_key.to(tl.int32), near_ids, near_keys, wide, row_logits, vocab, BLOCK)

    # Weight kept of each block: what lies before the region, and the kept tokens of the region
    key = end_key.to(tl.int32)
    near_masses = tl.where(_keeps(near_ids, near_keys, key, end_id), near_masses, 0)
    if wide:
        for begin_block in range(BLOCKS):
            others = begin_block * BLOCK + lane
            x = tl.load(row_logits + others, mask=others < vocab, other=float("-inf")).to(tl.float32)
            kept = _keeps(others, order_key(x), key, end_id)
            mass = tl.where(kept, weights_of(x, peak, temperature, least, ONE), 0)
            head_masses = tl.where(part == begin_block, tl.sum(mass, axis=0), head_masses)

    # The first block whose cumulative weight exceeds the target, and the first token in it
    target = (_uniform(row_params, row) * kept_mass.to(tl.float64)).to(tl.int64)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], BLOCKS - 1, tl.int32)
    while low < high:
        middle = low + ((high - low) >> 1)
        through = tl.sum(tl.where(part <= middle, head_masses, 0), axis=0)
        through += tl.sum(tl.where(near_ids < (middle + 1) * BLOCK, near_masses, 0), axis=0)
        high = tl.where(through > target, middle, high)
        low = tl.where(through > target, low, middle + 1)
    target -= tl.sum(tl.where(part < low, head_masses, 0), axis=0)
    target -= tl.sum(tl.where(near_ids < low * BLOCK, near_masses, 0), axis=0)
    ids = low * BLOCK + lane
    x = tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    mass = weights_of(x, peak, temperature, least, ONE)
    mass = tl.where(_keeps(ids, order_key(x), key, end_id), mass, 0)
    token = low * BLOCK + tl.sum((tl.cumsum(mass, axis=0) <= target).to(tl.int32), axis=0)
    tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


def draw(
    logits: torch.Tensor,
    row_params: torch.Tensor,
    scratch: Scratch,
    tokens: torch.Tensor,
    flags: torch.Tensor,
    selects: bool = True,
) -> None:
    """Overwrites the tokens of usable DRAWN rows by one draw each. `largest` must have run on the same logits.

    logits: [rows, vocab]; row_params: int64 [rows, ROW_WORDS]; tokens, flags: int64 [rows], as `largest` left them.
    selects: whether any row may have SELECTS; without one, the launches for those are left out.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    block = scratch.block_for(rows)
    blocks = triton.cdiv(vocab, block)
    grid = (blocks, rows)
    constants = {
        "vocab": vocab,
        "ONE": one_for(vocab),
        "SCALE": scale_for(vocab),
        "CANDIDATES": scratch.candidates,
        "BLOCKS": blocks,
        "BLOCKS_POW2": triton.next_power_of_2(blocks),
        "BLOCK": block,
        "num_warps": 8,
        "enable_fp_fusion": False,
        **pdl_options(logits),
    }
    common = (logits, logits.stride(0), row_params, flags, scratch.peaks)
    if selects:
        find_regions(grid, common, scratch, constants)
    selected = (scratch.regions, scratch.part_masses, scratch.candidate_counts, scratch.candidate_ids)
    _masses_kernel[grid](*common, *selected, **constants)
    # A row is one program: with at most 128 registers a thread, two of them share a multiprocessor.
    _draw_kernel[(rows,)](*common, tokens, *selected, maxnreg=128, **constants)


def reference(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Tokens int64 [rows] of draws with the same parameters for each row, by sorting; uniforms: float64 [rows]."""
    rows, vocab = logits.shape
    x = logits.float()
    x = torch.where(x == 0.0, 0.0, x)  # a sort may tell the zeros apart
    peaks = x.amax(dim=1, keepdim=True)
    heat = torch.tensor(temperature, dtype=torch.float32, device=x.device).clamp_min(1e-30)
    weights = (exponentials.reference((x - peaks) / heat) * one_for(vocab)).round().double()
    weights = torch.where(weights < min_p * one_for(vocab), 0.0, weights)
    order = torch.sort(x, dim=1, descending=True, stable=True).indices
    ranked = weights.gather(1, order).cumsum(dim=1)
    count = min(top_k, vocab) if top_k > 0 else vocab
    kept = torch.full((rows, 1), count, device=x.device)
    if top_p < 1.0:
        wanted = top_p * ranked[:, count - 1 : count]
        kept = torch.minimum(kept, (ranked < wanted).sum(dim=1, keepdim=True) + 1)
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(vocab, device=x.device).expand(rows, -1))
    ends = torch.where(ranks < kept, weights, 0.0).cumsum(dim=1)
    targets = torch.floor(uniforms[:, None] * ends[:, -1:])
    return (ends <= targets).sum(dim=1).clamp_max(vocab - 1)
