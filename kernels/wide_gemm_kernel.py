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
_GROUPS = gl.constexpr(2)  # of warps that multiply, each ROWS rows of W


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
def _copy_weight(described, row, step, barrier, tall, stage, ROWS: gl.constexpr, GATED: gl.constexpr):
    for part in gl.static_range(_GROUPS):
        _copy(described, row + part * ROWS, step, barrier, tall.index(stage * _GROUPS + part), ROWS, GATED)


@gluon_jit
def _copy_x(
    described,
    step,
    barrier,
    wide,
    more,
    stage,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    BOX: gl.constexpr,
):
    BOXES: gl.constexpr = COLUMNS // BOX
    for box in gl.static_range(BOXES):
        _copy(described, box * BOX, step, barrier, wide.index(stage * BOXES + box), BOX, False)
    if EXTRA > 0:
        _copy(described, COLUMNS, step, barrier, more.index(stage), BOX, False)


@gluon_jit
def _produce(
    x,
    weight,
    tall,
    wide,
    more,
    full,
    empty,
    tiles,
    K_STEPS: gl.constexpr,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    SHARES: gl.constexpr,
    PDL: gl.constexpr,
):
    """One warp: asks for the tiles of W and x, step after step, as places become free."""
    BYTES: gl.constexpr = (_GROUPS * ROWS + COLUMNS + EXTRA) * _STEP * 2
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    units = _units(p, programs, tiles, SHARES)
    # The first places are free, and W is a constant: its tiles do not wait for the kernel before
    tile, first, last = _unit(0, p, programs, tiles, K_STEPS, SHARES)
    row = tile * (_GROUPS * ROWS)
    ahead = gl.minimum(last - first, STAGES)
    for i in range(ahead):
        barrier = full.index(i)
        mbarrier.expect(barrier, BYTES)
        _copy_weight(weight, row, first + i, barrier, tall, i, ROWS, GATED)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for i in range(ahead):
        _copy_x(x, first + i, full.index(i), wide, more, i, COLUMNS, EXTRA, BOX)
    stage = ahead % STAGES
    phase = ahead // STAGES
    for unit in range(units):
        tile, first, last = _unit(unit, p, programs, tiles, K_STEPS, SHARES)
        row = tile * (_GROUPS * ROWS)
        for step in range(first + gl.where(unit == 0, ahead, 0), last):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, BYTES)
            _copy_weight(weight, row, step, barrier, tall, stage, ROWS, GATED)
            _copy_x(x, step, barrier, wide, more, stage, COLUMNS, EXTRA, BOX)
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
    column,
    share,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    N: gl.constexpr,
    SHARES: gl.constexpr,
):
    """A share's part of the COUNT tokens from FIRST on, from scratch [SHARES, _GROUPS, tokens, ROWS]."""
    PART: gl.constexpr = COUNT // SHARES
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [4, 1], [1, 0])
    t = FIRST + share * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, OUT))
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    cells = t[:, None] * ROWS + n[None, :]
    total = gl.load(partial + cells, cache_modifier=".cg")
    for other in gl.static_range(1, SHARES):
        total += gl.load(partial + other * _GROUPS * SIZE + cells, cache_modifier=".cg")
    where = out + t.to(gl.int64)[:, None] * out_stride + (column + n)[None, :]
    gl.store(where, total.to(gl.bfloat16), mask=(t < tokens)[:, None] & (column + n < N)[None, :])


@gluon_jit
def _store(value, stash, out, out_stride, tokens, column, FIRST: gl.constexpr, N: gl.constexpr):
    """Of the tile value, [columns of out, tokens from FIRST on], what is inside `out`."""
    COLUMNS: gl.constexpr = value.shape[0]
    TOKENS: gl.constexpr = value.shape[1]
    gl.static_assert(stash.numel >= COLUMNS * TOKENS, "the stash is too small")
    # Through shared memory, so that rows are written 16 bytes at a time
    WIDTH: gl.constexpr = 128 if COLUMNS >= 64 else COLUMNS * 2
    turned = stash._reinterpret(gl.bfloat16, [TOKENS, COLUMNS], gl.NVMMASharedLayout(WIDTH, 16, 2))
    turned.permute((1, 0)).store(value.to(gl.bfloat16))
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    t = FIRST + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, OUT))
    n = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    where = out + (t.to(gl.int64) * out_stride)[:, None] + n[None, :]
    gl.store(where, turned.load(OUT), mask=(t < tokens)[:, None] & (n < N)[None, :])


@gluon_jit
def _gate(acc):
    """silu(gate) x up of sums whose rows are 8 of either in turn."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    gate, up = gl.split(acc.reshape([ROWS // 16, 2, 8, COLUMNS]).permute((0, 2, 3, 1)))
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    value = gate / (1.0 + gl.exp(-gate)) * up
    return value.reshape([ROWS // 2, COLUMNS])


@gluon_jit
def _finish(
    acc,
    stash,
    out,
    out_stride,
    tokens,
    row,
    FIRST: gl.constexpr,
    N: gl.constexpr,
    GATED: gl.constexpr,
    STASH: gl.constexpr,
):
    """What is done with sums whose first row of W is `row` and whose first token is FIRST."""
    column = row
    if GATED:
        acc = _gate(acc)
        column = column // 2
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if ROWS * COLUMNS <= STASH:
        _store(acc, stash, out, out_stride, tokens, column, FIRST, N)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = gl.split(acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
        _store(left, stash, out, out_stride, tokens, column, FIRST, N)
        _store(right, stash, out, out_stride, tokens, column, FIRST + HALF, N)


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
    PART: gl.constexpr,
    N: gl.constexpr,
    K_STEPS: gl.constexpr,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    STAGES: gl.constexpr,
    STASH: gl.constexpr,
    SHARES: gl.constexpr,
):
    """One group of warps: ROWS rows of W of the program's tiles."""
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
            left = tall.index(stage * _GROUPS + PART)
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
        row = tile * (_GROUPS * ROWS) + PART * ROWS
        if SHARES > 1:
            share = p // tiles
            base = partial + (tile * (SHARES * _GROUPS) + PART).to(gl.int64) * SIZE
            own = base + share * (_GROUPS * SIZE)
            gl.store(own + _cells(LAYOUT, ROWS, COLUMNS), acc)
            if EXTRA > 0:
                gl.store(own + ROWS * COLUMNS + _cells(MORE, ROWS, EXTRA), late)
            gl.thread_barrier()  # all of the group's sums are written before it counts itself as done
            counter = counters + tile * _GROUPS + PART
            # Every product adds 8, so that nobody has to set the counter back
            before = gl.atomic_add(counter, 8 // SHARES, sem="acq_rel", scope="gpu")
            _await(counter, (before & -8) + 8)
            _add_up(base, out, out_stride, tokens, row, share, SIZE, ROWS, 0, COLUMNS, N, SHARES)
            if EXTRA > 0:
                _add_up(base, out, out_stride, tokens, row, share, SIZE, ROWS, COLUMNS, EXTRA, N, SHARES)
        else:
            _finish(acc, stash, out, out_stride, tokens, row, 0, N, GATED, STASH)
            if EXTRA > 0:
                _finish(late, stash, out, out_stride, tokens, row, COLUMNS, N, GATED, STASH)


@gluon_jit(do_not_specialize=["tokens", "tiles"])
def wide_kernel(
    x,  # tensor descriptor of [tokens, K]
    weight,  # of [N, K], or gated of [N / 8, 2, 8, K], where 2 N are the weight's rows
    out,  # [tokens, N]
    partial,  # float32 [tiles x SHARES, _GROUPS, ROWS x (COLUMNS + EXTRA)]: sums of shares
    counters,  # int32 [tiles, _GROUPS]: of those who are done with a share
    tokens,
    out_stride,
    tiles,
    N: gl.constexpr,
    K_STEPS: gl.constexpr,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    EXTRA: gl.constexpr,
    STAGES: gl.constexpr,
    STASH: gl.constexpr,
    SHARES: gl.constexpr,
    PDL: gl.constexpr,
):
    BOX: gl.constexpr = EXTRA if EXTRA > 0 else COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    tall = gl.allocate_shared_memory(gl.bfloat16, [STAGES * _GROUPS, ROWS, _STEP], LAYOUT)
    boxes = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (COLUMNS // BOX), BOX, _STEP], LAYOUT)
    wide = boxes._reinterpret(gl.bfloat16, [STAGES, COLUMNS, _STEP], LAYOUT)
    more = boxes
    if EXTRA > 0:
        more = gl.allocate_shared_memory(gl.bfloat16, [STAGES, EXTRA, _STEP], LAYOUT)
    stashes = gl.allocate_shared_memory(gl.bfloat16, [_GROUPS, STASH // 64, 64], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    tall, wide, more, full, empty, stashes, out, partial, counters, tokens, out_stride, tiles, 0, N,
                    K_STEPS, GATED, ROWS, COLUMNS, EXTRA, STAGES, STASH, SHARES,
                ),
            ),
            (
                _consume,
                (
                    tall, wide, more, full, empty, stashes, out, partial, counters, tokens, out_stride, tiles, 1, N,
                    K_STEPS, GATED, ROWS, COLUMNS, EXTRA, STAGES, STASH, SHARES,
                ),
            ),
            (
                _produce,
                (
                    x, weight, tall, boxes, more, full, empty, tiles, K_STEPS, GATED, ROWS, COLUMNS, EXTRA, BOX,
                    STAGES, SHARES, PDL,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
