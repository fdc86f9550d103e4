"""Products of a few rows with a weight, y[M, N] = x[M, K] W[N, K]^T + b for M <= 192, which are bound by reading W
once.

Bytes: N x K x 2 of weights (bfloat16), everything else is small. Llama-3.1-8B at 4.27 TB/s: qkv 6144 x 4096 50 MB,
11.8 us; o 4096 x 4096 34 MB, 7.9 us; gate-up 28672 x 4096 235 MB, 55 us; down 4096 x 14336 117 MB, 27.5 us; head
128256 x 4096 1051 MB, 246 us. FLOPs: 2 x M x N x K, at M = 64 a third of what the matrix units could do meanwhile,
at M = 180 all of it.

A program takes BLOCK_N rows of W and a share of K. The weight is the left operand of the matrix product, so that its
rows fill the matrix units' tall side, and x the right one, padded to a power of two of rows, or to one and a quarter or
half of it (two products with one tile of W). Triton's pipeline keeps
STAGES tiles of W in flight, BLOCK_N x BLOCK_K x 2 bytes each; 40 KB in flight per multiprocessor and more saturate the
memory.

One row alone can also be multiplied without matrix units: each thread keeps its part of a [BLOCK_N, BLOCK_K] product
in registers, and the sum over K is taken once, at the end. Programs either go along K, one tile of W ahead of the
arithmetic (`Config.vector`), or read their rows of W whole, with every load in flight at once (`Config.whole`): with
many short programs, which come and go at their own times, memory is busiest.

Where N / BLOCK_N programs leave multiprocessors without work, K is split. The sums of each share go to float32 scratch,
and the program that arrives last adds them up, in the order of the shares: the result does not depend on who was last.

With programmatic dependent launch (`Config.pdl`, Hopper and later) a program starts while the kernel before is at
work, reads ahead what needs nothing of that kernel, and only then waits for it. So the memory does not idle during the
small kernels between products. Reading ahead is the first tile of W for `vector`, and `prefetch` bytes of each
program's weight rows into the L2 cache, for the programs that fill the device first. The kernel behind may start when
this one does (`early`), or when its loads are done.

`gated` is SwiGLU's inner half: W holds the gate's rows and then as many of up; a program computes both for its columns,
and silu(gate) x up from the accumulators. That saves a launch and 3 x M x inner numbers of traffic.

Which configuration serves which shape and number of rows is measured (`python -m bench.gpu.gemm`) and listed in
kernels/small_gemm_table.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.jit import interpreted, jit, tl, triton

MOST_ROWS = 192
_WAVE = 2  # programs per multiprocessor that read ahead into the L2 cache


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is computed. Another configuration may round differently."""

    block_n: int = 64  # rows of W per program
    block_k: int = 128  # columns per step
    splits: int = 1  # shares of K
    warps: int = 4
    stages: int = 4
    vector: bool = False  # without matrix units, for one row of x
    whole: bool = False  # the same, rows of W in one go; block_k has no meaning then
    pdl: bool = False
    early: bool = True  # with pdl: the next kernel may start with this one
    prefetch: int = 0  # with pdl, not with `whole`: bytes of each weight row, multiples of 16 x `chunks`

    @property
    def chunks(self) -> int:
        """Pieces of a row's prefetch, so that every thread of the program asks for one."""
        return max(1, 32 * self.warps // self.block_n)


@jit
def _read_ahead(
    rows,
    weight,
    K: tl.constexpr,
    first,
    program,
    wave,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Brings the first PREFETCH bytes of W's `rows` from column `first` on into the L2 cache, for programs < wave."""
    if PDL and PREFETCH > 0:  # noqa: SIM102 - known when compiled
        if program < wave:
            size: tl.constexpr = PREFETCH // CHUNKS
            step: tl.constexpr = size // (weight.dtype.element_ty.primitive_bitwidth // 8)
            chunk = tl.arange(0, CHUNKS)[None, :] * step
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [weight + rows.to(tl.int64)[:, None] * K + first + chunk, tl.full([1, 1], size, tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@jit
def _finish(
    gate,
    up,
    bias,
    out,
    row,
    column,
    rows,
    out_stride,
    N: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """gate, up: float32 [columns, rows] sums; without GATED, `gate` is all there is. column, row: their places in
    out."""
    inside = (column < N)[:, None] & (row < rows)[None, :]
    if BIAS:
        gate += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            up += tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
        # Rounded as the two steps of a larger batch are: the product, then its element-wise half
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        gate = gate / (1.0 + tl.exp(-gate)) * up
    place = row.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(out + place, gate, mask=inside)


@jit
def _load_tile(weight, source, k, K: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """W's rows `source`, columns k: [rows, columns]."""
    place = weight + source[:, None] * K + k[None, :]
    if EVEN:
        w = tl.load(place, eviction_policy="evict_first")
    else:
        w = tl.load(place, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if WIDEN:
        w = w.to(tl.float32)
    return w


@jit
def _load_rows(x, row, rows, x_stride, k, K: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """Rows of x, transposed: [columns k, rows]; zeros behind the last row."""
    inside = (row < rows)[None, :]
    if not EVEN:
        inside = inside & (k < K)[:, None]
    right = tl.load(x + row[None, :] * x_stride + k[:, None], mask=inside, other=0.0)
    if WIDEN:
        right = right.to(tl.float32)
    return right


@jit
def _sum_shares(own, row, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Sums of all shares of K, in their order: float32 [BLOCK_N, ROWS]."""
    cell = row[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for share in tl.static_range(SPLITS):
        total += tl.load(own + share * SIZE + cell, cache_modifier=".cg")
    return total


@jit(do_not_specialize=["rows", "wave"])
def _product_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrived,
    rows,
    wave,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Programs (tile of W's rows, share of K). N: columns of out; W has 2 N rows with GATED."""
    tile = tl.program_id(0)
    share = tl.program_id(1)
    steps: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    first = share * steps * BLOCK_K
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows behind the last one are read as the last one: their sums are not stored
    source = tl.minimum(column, N - 1).to(tl.int64)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        program = share * tl.num_programs(0) + tile
        _read_ahead(source, weight, K, first, program, wave, PDL, PREFETCH, CHUNKS)
        if GATED:
            _read_ahead(source + N, weight, K, first, program, wave, PDL, PREFETCH, CHUNKS)
        tl.extra.cuda.gdc_wait()

    row = tl.arange(0, ROWS)
    late = ROWS + tl.arange(0, EXTRA if EXTRA else 1)
    lane = tl.arange(0, BLOCK_K)
    offset: tl.constexpr = N * K
    gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    late_gate = tl.zeros([BLOCK_N, EXTRA if EXTRA else 1], tl.float32)
    late_up = tl.zeros([BLOCK_N, EXTRA if EXTRA else 1], tl.float32)
    even: tl.constexpr = K % (BLOCK_K * SPLITS) == 0
    for step in tl.range(0, steps, num_stages=STAGES):
        k = first + step * BLOCK_K + lane
        w = _load_tile(weight, source, k, K, even, WIDEN)
        right = _load_rows(x, row, rows, x_stride, k, K, even, WIDEN)
        gate = tl.dot(w, right, gate, input_precision=PRECISION)
        if EXTRA:
            late_right = _load_rows(x, late, rows, x_stride, k, K, even, WIDEN)
            late_gate = tl.dot(w, late_right, late_gate, input_precision=PRECISION)
        if GATED:
            v = _load_tile(weight + offset, source, k, K, even, WIDEN)
            up = tl.dot(v, right, up, input_precision=PRECISION)
            if EXTRA:
                late_up = tl.dot(v, late_right, late_up, input_precision=PRECISION)

    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if SPLITS == 1:
        _finish(gate, up, bias, out, row, column, rows, out_stride, N, GATED, BIAS)
        if EXTRA:
            _finish(late_gate, late_up, bias, out, late, column, rows, out_stride, N, GATED, BIAS)
    else:
        # partial: [tiles, shares, ROWS + EXTRA, BLOCK_N]
        size: tl.constexpr = (ROWS + EXTRA) * BLOCK_N
        own = partial + tile.to(tl.int64) * (SPLITS * size)
        inner = tl.arange(0, BLOCK_N)[:, None]
        tl.store(own + share * size + row[None, :] * BLOCK_N + inner, gate)
        if EXTRA:
            tl.store(own + share * size + late[None, :] * BLOCK_N + inner, late_gate)
        tl.debug_barrier()  # all of this program's sums are written before it counts itself as arrived
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + tile, 0)  # for the next product
            total = _sum_shares(own, row, ROWS, BLOCK_N, size, SPLITS)
            _finish(total, total, bias, out, row, column, rows, out_stride, N, False, BIAS)
            if EXTRA:
                total = _sum_shares(own, late, EXTRA, BLOCK_N, size, SPLITS)
                _finish(total, total, bias, out, late, column, rows, out_stride, N, False, BIAS)


@jit(do_not_specialize=["wave"])
def _vector_kernel(
    x,
    weight,
    bias,
    out,
    wave,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program per tile of W's rows."""
    tile = tl.program_id(0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows behind the last one are read as the last one: their sums are not stored
    source = tl.minimum(column, N - 1).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    own = weight + source[:, None] * K + lane[None, :]
    offset: tl.constexpr = N * K
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(own, mask=(lane < K)[None, :], other=0.0, eviction_policy="evict_first")
    v = w
    if GATED:
        v = tl.load(own + offset, mask=(lane < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        _read_ahead(source, weight, K, BLOCK_K, tile, wave, PDL, PREFETCH, CHUNKS)
        if GATED:
            _read_ahead(source + N, weight, K, BLOCK_K, tile, wave, PDL, PREFETCH, CHUNKS)
        tl.extra.cuda.gdc_wait()
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        ahead = (lane < K - k - BLOCK_K)[None, :]
        next_w = tl.load(own + k + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
        next_v = next_w
        if GATED:
            next_v = tl.load(own + offset + k + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
        right = tl.load(x + k + lane, mask=lane < K - k, other=0.0).to(tl.float32)[None, :]
        gate += w.to(tl.float32) * right
        if GATED:
            up += v.to(tl.float32) * right
        w = next_w
        v = next_v
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, 1)
    first = tl.sum(gate, axis=1)[:, None]
    second = first
    if GATED:
        second = tl.sum(up, axis=1)[:, None]
    _finish(first, second, bias, out, row, column, 1, 0, N, GATED, BIAS)


@jit
def _load_part(weight, source, K: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Columns FIRST to FIRST + SIZE of W's rows `source`, [rows, SIZE]; zeros behind the last column."""
    column = FIRST + tl.arange(0, SIZE)
    place = weight + source[:, None] * K + column[None, :]
    if FIRST + SIZE <= K:
        return tl.load(place, eviction_policy="evict_first")
    return tl.load(place, mask=(column < K)[None, :], other=0.0, eviction_policy="evict_first")


@jit
def _multiply_part(x, w, K: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """float32 [rows]: sums of w times these columns of x."""
    column = FIRST + tl.arange(0, SIZE)
    right = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    return tl.sum(w.to(tl.float32) * right[None, :], axis=1)


@jit
def _whole_kernel(
    x,
    weight,
    bias,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per tile of W's rows, whose columns are A + B + C, powers of two (B and C may be 0)."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.minimum(column, N - 1).to(tl.int64)
    offset: tl.constexpr = N * K
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    w_a = _load_part(weight, source, K, 0, A)
    if B:
        w_b = _load_part(weight, source, K, A, B)
    if C:
        w_c = _load_part(weight, source, K, A + B, C)
    if GATED:
        v_a = _load_part(weight + offset, source, K, 0, A)
        if B:
            v_b = _load_part(weight + offset, source, K, A, B)
        if C:
            v_c = _load_part(weight + offset, source, K, A + B, C)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = _multiply_part(x, w_a, K, 0, A)
    if B:
        first += _multiply_part(x, w_b, K, A, B)
    if C:
        first += _multiply_part(x, w_c, K, A + B, C)
    second = first
    if GATED:
        second = _multiply_part(x, v_a, K, 0, A)
        if B:
            second += _multiply_part(x, v_b, K, A, B)
        if C:
            second += _multiply_part(x, v_c, K, A + B, C)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    _finish(first[:, None], second[:, None], bias, out, tl.arange(0, 1), column, 1, 0, N, GATED, BIAS)


class _Scratch:
    """Per device: its multiprocessors, and counters of arrived programs, zero between products. Products that share
    them must be ordered."""

    def __init__(self) -> None:
        self.counters: dict[torch.device, torch.Tensor] = {}
        self.processors: dict[torch.device, int] = {}

    def multiprocessors(self, device: torch.device) -> int:
        found = self.processors.get(device)
        if found is None:
            cuda = device.type == "cuda"
            found = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 2
            self.processors[device] = found
        return found

    def arrived(self, device: torch.device, tiles: int) -> torch.Tensor:
        found = self.counters.get(device)
        if found is None or found.shape[0] < tiles:
            found = self.counters[device] = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=device)
        return found


_scratch = _Scratch()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: Config,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b: [M, N] of `dtype` (x's by default).

    x: [M, K], M <= 192, rows may lie apart; weight: [N, K], contiguous, of x's dtype; bias: [N]. out: [M, N], rows may
    lie apart. Raises ValueError for shapes that do not fit.
    """
    return _launch(x, weight, bias, config, False, dtype, out)


def gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: Config,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(x Wg^T + bg) * (x Wu^T + bu): [M, inner] of x's dtype. weight: [2 * inner, K], gate first; else as
    `linear`.
    """
    return _launch(x, weight, bias, config, True, None, out)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    is_gated: bool,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    rows, k = x.shape
    n = weight.shape[0] // 2 if is_gated else weight.shape[0]
    one_row = config.vector or config.whole
    most = 1 if one_row else MOST_ROWS
    if not 1 <= rows <= most or weight.shape[1] != k or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and W {tuple(weight.shape)}: at most {most} rows, of W's width")
    if out is None:
        out = torch.empty((rows, n), dtype=dtype or x.dtype, device=x.device)
    tiles = triton.cdiv(n, config.block_n)
    options = {"launch_pdl": True} if config.pdl else {}
    shape = {
        "N": n,
        "K": k,
        "BLOCK_N": config.block_n,
        "GATED": is_gated,
        "BIAS": bias is not None,
        "PDL": config.pdl,
        "EARLY": config.early,
    }
    if config.whole:
        a, b, c = _parts(k)
        _whole_kernel[(tiles,)](x, weight, bias, out, A=a, B=b, C=c, **shape, num_warps=config.warps, **options)
        return out
    shape |= {"BLOCK_K": config.block_k, "PREFETCH": config.prefetch, "CHUNKS": config.chunks}
    wave = _scratch.multiprocessors(x.device) * _WAVE
    if config.vector:
        _vector_kernel[(tiles,)](x, weight, bias, out, wave, **shape, num_warps=config.warps, **options)
        return out
    splits = config.splits
    padded, extra = _padding(rows)
    partial = arrived = None
    if splits > 1:
        if is_gated:
            raise ValueError("a gated product is not split: it has programs enough")
        partial = torch.empty(
            tiles * splits * (padded + extra) * config.block_n, dtype=torch.float32, device=weight.device
        )
        arrived = _scratch.arrived(weight.device, tiles)
    _product_kernel[(tiles, splits)](
        x,
        weight,
        bias,
        out,
        partial,
        arrived,
        rows,
        wave,
        x.stride(0),
        out.stride(0),
        ROWS=padded,
        EXTRA=extra,
        SPLITS=splits,
        STAGES=config.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        WIDEN=interpreted,  # the interpreter does not multiply bfloat16 matrices
        **shape,
        num_warps=config.warps,
        **options,
    )
    return out


def _parts(k: int) -> tuple[int, int, int]:
    """At most three powers of two, descending, that add up to k, or to a little more."""
    parts: list[int] = []
    left = k
    while left > 0 and len(parts) < 3:
        size = 1 << (left.bit_length() - 1)
        if len(parts) == 2:
            size = triton.next_power_of_2(left)
        parts.append(size)
        left -= size
    a, b, c = (*parts, 0, 0)[:3]
    return a, b, c


def _padding(rows: int) -> tuple[int, int]:
    """Rows of the products that one tile of W takes part in: a power of two, and a quarter or half of it or none."""
    whole = max(8, triton.next_power_of_2(rows))
    half = whole // 2
    for extra in (half // 4, half // 2):
        if extra >= 16 and rows <= half + extra:
            return half, extra
    return whole, 0


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` in float32, not rounded."""
    y = x.float() @ weight.float().t()
    return y if bias is None else y + bias.float()


def gated_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`gated` in float32; gate and up are rounded to x's dtype as they are in the kernel."""
    gate, up = reference(x, weight, bias).to(x.dtype).float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
