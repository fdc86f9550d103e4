"""The kernel of kernels/wide_gemm.py, in Gluon, Triton's language for explicit layouts; there is no interpreter for it.

Three things to know when it is changed. A name that is bound before a loop to what another name holds, and again in
the loop, is not carried from round to round. The loading warp's partition has few registers. And a wait for a counter
may only be for programs that surely run: kernels/wide_gemm.py says which those are.
"""

from __future__ import annotations

import importlib.util

from kernels.jit import jit, tl

if importlib.util.find_spec("triton") is None:  # a launch raises KernelUnavailable
    gl, gluon_jit = tl, jit
else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    gluon_jit = gluon.jit

_STEP = gl.constexpr(64)  # columns of x and W per step: 128 bytes, the widest swizzle
_PIECE = gl.constexpr(4)  # steps of W that are read ahead into the L2 cache at a time
_ROUND = gl.constexpr(0)  # modes: bfloat16 out
_ADD = gl.constexpr(1)  # added to float32
_EXACT = gl.constexpr(2)  # float32 out


@gluon_jit
def _units(p, programs, tiles, SHARES: gl.constexpr):
    """Pieces of work of program p."""
    if SHARES > 1:
        return p * 0 + 1
    return (tiles - p + programs - 1) // programs


@gluon_jit
def _unit(i, p, programs, tiles, K_STEPS: gl.constexpr, SHARES: gl.constexpr):
    """Program p's i-th piece: its tile, its first step and its past the last one."""
    if SHARES > 1:
        share = p // tiles
        return p % tiles, share * K_STEPS // SHARES, (share + 1) * K_STEPS // SHARES
    return p + i * programs, p * 0, p * 0 + K_STEPS


@gluon_jit
def _place(tile, tall_tiles, wide_tiles, GROUP: gl.constexpr):
    """Of a tile: its number along the tall side and along the wide one. GROUP tall ones go together."""
    group = tile // (GROUP * wide_tiles)
    within = tile - group * (GROUP * wide_tiles)
    size = gl.minimum(tall_tiles - group * GROUP, GROUP)
    return group * GROUP + within % size, within // size


@gluon_jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), phase ^ wrapped.to(gl.int32)


@gluon_jit
def _copy(described, row, step, barrier, place, ROWS: gl.constexpr, PAIRED: gl.constexpr):
    """Asks for ROWS rows of 64 columns; paired: of gate and up, 8 of each in turn."""
    if PAIRED:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
        box = place._reinterpret(gl.bfloat16, [ROWS // 16, 2, 8, _STEP], LAYOUT)
        tma.async_copy_global_to_shared(described, [row // 16, 0, 0, step * _STEP], barrier, box)
    else:
        tma.async_copy_global_to_shared(described, [row, step * _STEP], barrier, place)


@gluon_jit
def _copy_tall(
    described, row, step, barrier, tall, stage, GROUPS: gl.constexpr, ROWS: gl.constexpr, PAIRED: gl.constexpr
):
    for part in gl.static_range(GROUPS):
        _copy(described, row + part * ROWS, step, barrier, tall.index(stage * GROUPS + part), ROWS, PAIRED)


@gluon_jit
def _copy_wide(
    described,
    row,
    step,
    barrier,
    wide,
    more,
    stage,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    BOX: gl.constexpr,
    PAIRED: gl.constexpr,
):
    BOXES: gl.constexpr = COLUMNS // BOX
    for box in gl.static_range(BOXES):
        _copy(described, row + box * BOX, step, barrier, wide.index(stage * BOXES + box), BOX, PAIRED)
    if EXTRA > 0:
        _copy(described, row + COLUMNS, step, barrier, more.index(stage), BOX, PAIRED)


@gluon_jit
def _read_ahead(raw, row, step, last, ROWS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr):
    """Brings _PIECE steps of ROWS rows of W, those before `last`, into the L2 cache."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    HALF: gl.constexpr = ROWS // 2
    if step < last:
        count = gl.minimum(gl.minimum(last - step, _PIECE) * _STEP, K - step * _STEP) * 2
        for i in gl.static_range(ROWS // 32):
            r = i * 32 + gl.arange(0, 32, layout=LANES)
            source = gl.minimum(row + r, N - 1)
            if GATED:
                source = gl.minimum(row // 2 + r % HALF, N - 1) + r // HALF * N
            gl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [raw + (source.to(gl.int64) * K + step * _STEP), count + 0 * r],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )


@gluon_jit
def _produce(
    x,
    weight,
    raw,
    tall,
    wide,
    more,
    full,
    empty,
    tiles,
    tall_tiles,
    wide_tiles,
    N: gl.constexpr,
    K: gl.constexpr,
    K_STEPS: gl.constexpr,
    SWAP: gl.constexpr,
    GATED: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    SHARES: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """One warp: asks for the tiles of x and W, step after step, as places become free."""
    BYTES: gl.constexpr = (GROUPS * ROWS + COLUMNS + EXTRA) * _STEP * 2
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    units = _units(p, programs, tiles, SHARES)
    # The first places are free, and W is a constant: its tiles do not wait for the kernel before
    tile, first, last = _unit(0, p, programs, tiles, K_STEPS, SHARES)
    a, b = _place(tile, tall_tiles, wide_tiles, GROUP)
    at_tall = a * (GROUPS * ROWS)
    at_wide = b * (COLUMNS + EXTRA)
    ahead = gl.minimum(last - first, STAGES)
    for i in range(ahead):
        barrier = full.index(i)
        mbarrier.expect(barrier, BYTES)
        if SWAP:
            _copy_tall(weight, at_tall, first + i, barrier, tall, i, GROUPS, ROWS, GATED)
        else:
            _copy_wide(weight, at_wide, first + i, barrier, wide, more, i, COLUMNS, EXTRA, BOX, GATED)
    if SWAP and AHEAD > 0:
        for i in gl.static_range(AHEAD // _PIECE):
            _read_ahead(raw, at_tall, first + STAGES + i * _PIECE, last, GROUPS * ROWS, N, K, GATED)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for i in range(ahead):
        barrier = full.index(i)
        if SWAP:
            _copy_wide(x, at_wide, first + i, barrier, wide, more, i, COLUMNS, EXTRA, BOX, False)
        else:
            _copy_tall(x, at_tall, first + i, barrier, tall, i, GROUPS, ROWS, False)
    stage = ahead % STAGES
    phase = ahead // STAGES
    for unit in range(units):
        tile, first, last = _unit(unit, p, programs, tiles, K_STEPS, SHARES)
        a, b = _place(tile, tall_tiles, wide_tiles, GROUP)
        at_tall = a * (GROUPS * ROWS)
        at_wide = b * (COLUMNS + EXTRA)
        for step in range(first + gl.where(unit == 0, ahead, 0), last):
            if SWAP and AHEAD > 0:  # noqa: SIM102 - known when compiled
                if (step - first - STAGES) % _PIECE == 0:
                    _read_ahead(raw, at_tall, step + AHEAD, last, GROUPS * ROWS, N, K, GATED)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, BYTES)
            if SWAP:
                _copy_tall(weight, at_tall, step, barrier, tall, stage, GROUPS, ROWS, GATED)
                _copy_wide(x, at_wide, step, barrier, wide, more, stage, COLUMNS, EXTRA, BOX, False)
            else:
                _copy_tall(x, at_tall, step, barrier, tall, stage, GROUPS, ROWS, False)
                _copy_wide(weight, at_wide, step, barrier, wide, more, stage, COLUMNS, EXTRA, BOX, GATED)
            stage, phase = _next(stage, phase, STAGES)


@gluon_jit
def _cells(LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """int32 [ROWS, COLUMNS]: places of sums in scratch that holds column after column."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return row[:, None] + column[None, :] * ROWS


@gluon_jit
def _await(counter, count):
    """Returns when the counter has come to `count`, and what was written before it was raised can be read."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred less;
        .reg .s32 left;
        again:
        ld.acquire.gpu.global.s32 $0, [$1];
        sub.s32 left, $0, $2;
        setp.lt.s32 less, left, 0;
        @less bra again;
        }
        """,
        "=&r,l,r",
        [counter, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon_jit
def _add_up(
    partial,
    out,
    out_stride,
    tokens,
    token,
    column,
    share,
    SIZE: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    N: gl.constexpr,
    MODE: gl.constexpr,
    SHARES: gl.constexpr,
):
    """A share's part of COUNT tokens of a tile, from scratch [SHARES, GROUPS, tokens, ROWS]."""
    PART: gl.constexpr = COUNT // SHARES
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [4, 1], [1, 0])
    t = FIRST + share * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, OUT))
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    cells = t[:, None] * ROWS + n[None, :]
    total = gl.load(partial + cells, cache_modifier=".cg")
    for other in gl.static_range(1, SHARES):
        total += gl.load(partial + other * GROUPS * SIZE + cells, cache_modifier=".cg")
    where = out + (token + t).to(gl.int64)[:, None] * out_stride + (column + n)[None, :]
    inside = (token + t < tokens)[:, None] & (column + n < N)[None, :]
    if MODE == _ADD:
        total += gl.load(where, mask=inside, other=0.0)
    if MODE == _ROUND:
        gl.store(where, total.to(gl.bfloat16), mask=inside)
    else:
        gl.store(where, total, mask=inside)


@gluon_jit
def _store(
    value,
    stash,
    out,
    out_stride,
    tokens,
    token,
    column,
    N: gl.constexpr,
    SWAP: gl.constexpr,
    MODE: gl.constexpr,
):
    """Of the tile value, [columns, tokens] with SWAP, else [tokens, columns], what is inside `out`."""
    if MODE == _ROUND:
        if SWAP:
            COLUMNS: gl.constexpr = value.shape[0]
            TOKENS: gl.constexpr = value.shape[1]
        else:
            COLUMNS: gl.constexpr = value.shape[1]
            TOKENS: gl.constexpr = value.shape[0]
        gl.static_assert(stash.numel >= COLUMNS * TOKENS, "the stash is too small")
        # Through shared memory, so that rows are written 16 bytes at a time
        WIDTH: gl.constexpr = 128 if COLUMNS >= 64 else COLUMNS * 2
        turned = stash._reinterpret(gl.bfloat16, [TOKENS, COLUMNS], gl.NVMMASharedLayout(WIDTH, 16, 2))
        if SWAP:
            turned.permute((1, 0)).store(value.to(gl.bfloat16))
        else:
            turned.store(value.to(gl.bfloat16))
        OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
        t = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, OUT))
        n = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
        where = out + (t.to(gl.int64) * out_stride)[:, None] + n[None, :]
        gl.store(where, turned.load(OUT), mask=(t < tokens)[:, None] & (n < N)[None, :])
    else:
        LAYOUT: gl.constexpr = value.type.layout
        i = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        j = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        if SWAP:
            where = out + (token + j).to(gl.int64)[None, :] * out_stride + (column + i)[:, None]
            inside = (column + i < N)[:, None] & (token + j < tokens)[None, :]
        else:
            where = out + (token + i).to(gl.int64)[:, None] * out_stride + (column + j)[None, :]
            inside = (token + i < tokens)[:, None] & (column + j < N)[None, :]
        if MODE == _ADD:
            value += gl.load(where, mask=inside, other=0.0)
        gl.store(where, value, mask=inside)


@gluon_jit
def _gate(acc, SWAP: gl.constexpr):
    """silu(gate) x up of sums that hold 8 of either in turn along the weight's side."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if SWAP:
        gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, COLUMNS]).permute((0, 2, 3, 1)))
    else:
        gate, up = gl.split(acc.reshape([ROWS, COLUMNS // 16, 2, 8]).permute((0, 1, 3, 2)))
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    value = gate / (1.0 + gl.exp(-gate)) * up
    if SWAP:
        return value.reshape([ROWS // 2, COLUMNS])
    else:
        return value.reshape([ROWS, COLUMNS // 2])


@gluon_jit
def _finish(
    acc,
    stash,
    out,
    out_stride,
    tokens,
    tall,
    wide,
    N: gl.constexpr,
    SWAP: gl.constexpr,
    GATED: gl.constexpr,
    MODE: gl.constexpr,
    STASH: gl.constexpr,
):
    """What is done with sums whose first row and column are `tall` and `wide`."""
    token = tall
    column = wide
    if SWAP:
        token = wide
        column = tall
    if GATED:
        acc = _gate(acc, SWAP)
        column = column // 2
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if ROWS * COLUMNS <= STASH:
        _store(acc, stash, out, out_stride, tokens, token, column, N, SWAP, MODE)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = gl.split(acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
        _store(left, stash, out, out_stride, tokens, token, column, N, SWAP, MODE)
        if SWAP:
            token += HALF
        else:
            column += HALF
        _store(right, stash, out, out_stride, tokens, token, column, N, SWAP, MODE)


@gluon_jit
def _consume(
    tall,
    wide,
    more,
    full,
    empty,
    stashes,
    out,
    partial,
    counters,
    tokens,
    out_stride,
    tiles,
    tall_tiles,
    wide_tiles,
    PART: gl.constexpr,
    N: gl.constexpr,
    K_STEPS: gl.constexpr,
    SWAP: gl.constexpr,
    GATED: gl.constexpr,
    MODE: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    STAGES: gl.constexpr,
    STASH: gl.constexpr,
    SHARES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """One group of warps: ROWS rows of the program's tiles."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EXTRA if EXTRA > 0 else 8, 16])
    SIZE: gl.constexpr = ROWS * (COLUMNS + EXTRA)
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    units = _units(p, programs, tiles, SHARES)
    stash = stashes.index(PART)
    stage = p * 0
    phase = p * 0
    for unit in range(units):
        tile, first, last = _unit(unit, p, programs, tiles, K_STEPS, SHARES)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        late = p
        if EXTRA > 0:
            late = gl.zeros([ROWS, EXTRA], gl.float32, MORE)
        for step in range(first, last):
            mbarrier.wait(full.index(stage), phase)
            left = tall.index(stage * GROUPS + PART)
            acc = warpgroup_mma(left, wide.index(stage).permute((1, 0)), acc, is_async=True)
            if EXTRA > 0:
                late = warpgroup_mma(left, more.index(stage).permute((1, 0)), late, is_async=True)
                acc, late = warpgroup_mma_wait(2, deps=(acc, late))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            # The step before is multiplied now
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1, pred=step > first)
            stage, phase = _next(stage, phase, STAGES)
        if EXTRA > 0:
            acc, late = warpgroup_mma_wait(0, deps=(acc, late))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1)
        a, b = _place(tile, tall_tiles, wide_tiles, GROUP)
        at_tall = a * (GROUPS * ROWS) + PART * ROWS
        at_wide = b * (COLUMNS + EXTRA)
        if SHARES > 1:
            share = p // tiles
            base = partial + (tile * (SHARES * GROUPS) + PART).to(gl.int64) * SIZE
            own = base + share * (GROUPS * SIZE)
            gl.store(own + _cells(LAYOUT, ROWS, COLUMNS), acc)
            if EXTRA > 0:
                gl.store(own + ROWS * COLUMNS + _cells(MORE, ROWS, EXTRA), late)
            gl.thread_barrier()  # all of the group's sums are written before it counts itself as done
            counter = counters + tile * GROUPS + PART
            # Every product adds 8, so that nobody has to set the counter back
            before = gl.atomic_add(counter, 8 // SHARES, sem="acq_rel", scope="gpu")
            _await(counter, (before & -8) + 8)
            _add_up(
                base, out, out_stride, tokens, at_wide, at_tall, share, SIZE, GROUPS, ROWS, 0, COLUMNS, N, MODE, SHARES
            )  # fmt: skip
            if EXTRA > 0:
                _add_up(
                    base, out, out_stride, tokens, at_wide, at_tall, share, SIZE, GROUPS, ROWS, COLUMNS, EXTRA, N,
                    MODE, SHARES,
                )  # fmt: skip
        else:
            _finish(acc, stash, out, out_stride, tokens, at_tall, at_wide, N, SWAP, GATED, MODE, STASH)
            if EXTRA > 0:
                more_wide = at_wide + COLUMNS
                _finish(late, stash, out, out_stride, tokens, at_tall, more_wide, N, SWAP, GATED, MODE, STASH)


@gluon_jit(
    do_not_specialize=["tokens", "tiles", "tall_tiles", "wide_tiles"],
)
def wide_kernel(
    x,  # tensor descriptor of [tokens, K]
    weight,  # of [N, K], or gated of [N / 8, 2, 8, K], where 2 N are the weight's rows
    raw,  # the weight itself
    out,  # [tokens, N]
    partial,  # float32 [tiles x SHARES, GROUPS, ROWS x (COLUMNS + EXTRA)]: sums of shares
    counters,  # int32 [tiles, GROUPS]: of those who are done with a share
    tokens,
    out_stride,
    tiles,
    tall_tiles,
    wide_tiles,
    N: gl.constexpr,
    K: gl.constexpr,
    K_STEPS: gl.constexpr,
    SWAP: gl.constexpr,
    GATED: gl.constexpr,
    MODE: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    STAGES: gl.constexpr,
    STASH: gl.constexpr,
    SHARES: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
    AHEAD: gl.constexpr,
):
    BOX: gl.constexpr = EXTRA if EXTRA > 0 else COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    tall = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, _STEP], LAYOUT)
    boxes = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (COLUMNS // BOX), BOX, _STEP], LAYOUT)
    wide = boxes._reinterpret(gl.bfloat16, [STAGES, COLUMNS, _STEP], LAYOUT)
    more = boxes
    if EXTRA > 0:
        more = gl.allocate_shared_memory(gl.bfloat16, [STAGES, EXTRA, _STEP], LAYOUT)
    stashes = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, STASH // 64, 64], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        tall, wide, more, full, empty, stashes, out, partial, counters, tokens, out_stride,
                        tiles, tall_tiles, wide_tiles, 0, N, K_STEPS, SWAP, GATED, MODE, GROUPS, ROWS, COLUMNS,
                        EXTRA, STAGES, STASH, SHARES, GROUP,
                    ),
                ),
                (
                    _consume,
                    (
                        tall, wide, more, full, empty, stashes, out, partial, counters, tokens, out_stride,
                        tiles, tall_tiles, wide_tiles, 1, N, K_STEPS, SWAP, GATED, MODE, GROUPS, ROWS, COLUMNS,
                        EXTRA, STAGES, STASH, SHARES, GROUP,
                    ),
                ),
                (
                    _consume,
                    (
                        tall, wide, more, full, empty, stashes, out, partial, counters, tokens, out_stride,
                        tiles, tall_tiles, wide_tiles, 2, N, K_STEPS, SWAP, GATED, MODE, GROUPS, ROWS, COLUMNS,
                        EXTRA, STAGES, STASH, SHARES, GROUP,
                    ),
                ),
                (
                    _produce,
                    (
                        x, weight, raw, tall, boxes, more, full, empty, tiles, tall_tiles, wide_tiles, N, K,
                        K_STEPS, SWAP, GATED, GROUPS, ROWS, COLUMNS, EXTRA, BOX, STAGES, SHARES, GROUP, PDL, AHEAD,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        tall, wide, more, full, empty, stashes, out, partial, counters, tokens, out_stride,
                        tiles, tall_tiles, wide_tiles, 0, N, K_STEPS, SWAP, GATED, MODE, GROUPS, ROWS, COLUMNS,
                        EXTRA, STAGES, STASH, SHARES, GROUP,
                    ),
                ),
                (
                    _consume,
                    (
                        tall, wide, more, full, empty, stashes, out, partial, counters, tokens, out_stride,
                        tiles, tall_tiles, wide_tiles, 1, N, K_STEPS, SWAP, GATED, MODE, GROUPS, ROWS, COLUMNS,
                        EXTRA, STAGES, STASH, SHARES, GROUP,
                    ),
                ),
                (
                    _produce,
                    (
                        x, weight, raw, tall, boxes, more, full, empty, tiles, tall_tiles, wide_tiles, N, K,
                        K_STEPS, SWAP, GATED, GROUPS, ROWS, COLUMNS, EXTRA, BOX, STAGES, SHARES, GROUP, PDL, AHEAD,
                    ),
                ),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
