"""Paged attention kernels on a GPU: over the shapes that are served, at fresh random inputs, and in captured graphs."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels import decode_attention as decode
from kernels import prefill_attention as prefill
from kernels import prefill_hopper
from tests.unit.kernels.paged_rows import PagedRows, bits, error, paged_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Against float64 at the same inputs: for bfloat16 weights and result are rounded once; sums are in float32, one summand
# after the other, which for rows of 33,000 tokens loses some 5e-6 of a result that is small against its summands
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-3}
GROUPS = {1: (8, 8), 4: (32, 8), 8: (32, 4)}  # query heads per key head: heads, key heads
BATCHES = [  # lengths of the rows
    [1],
    [1025],
    [33000],
    [63, 64, 65, 0, 1, 1023, 4097, 17],
    [1024] * 64,
    [1 + 37 * row % 700 for row in range(256)],
]
CHUNKS = [  # new tokens and prefix of the rows
    [(1, 0)],
    [(16, 0)],
    [(160, 0)],
    [(24, 0), (32, 0), (0, 0), (104, 0)],
    [(1000, 33), (5, 2000), (64, 64), (129, 0)],
    [(512, 32500)],
    [(4100, 0)],
    [(1 + row % 9, row) for row in range(256)],
]


@pytest.fixture
def seed() -> Iterator[int]:
    """Another one in every run; it is in the output of a failure."""
    value = random.SystemRandom().randrange(2**31)
    print("seed", value)
    yield value
    torch.cuda.empty_cache()


def _rows(
    lens: list[int], new: list[int], group: int, head_dim: int, page: int, dtype: torch.dtype, seed: int
) -> PagedRows:
    heads, kv_heads = GROUPS[group]
    device = torch.device("cuda")
    return paged_rows(
        lens,
        new,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        dtype=dtype,
        device=device,
        seed=seed,
    )


def _decode_reference(rows: PagedRows, window: int = 0) -> torch.Tensor:
    return decode.reference(rows.q.double(), rows.pool, rows.block_tables, rows.kv_lens, window)


def _prefill_reference(rows: PagedRows, window: int = 0) -> torch.Tensor:
    """By heads, for the scores of a long prompt are large."""
    kv_heads = rows.pool.shape[2]
    group = rows.q.shape[1] // kv_heads
    parts = [
        prefill.reference(
            rows.q[:, head * group : (head + 1) * group].double(),
            rows.pool[:, :, head : head + 1],
            rows.block_tables,
            rows.cu_seqlens,
            rows.kv_lens,
            window,
        )
        for head in range(kv_heads)
    ]
    return torch.cat(parts, 1)


# Group, head dim, page: each pair of values occurs. Float32 differs in the products alone
SHAPES = [
    (1, 64, 16, torch.bfloat16),
    (1, 128, 64, torch.bfloat16),
    (4, 64, 64, torch.bfloat16),
    (4, 128, 16, torch.bfloat16),
    (4, 128, 64, torch.bfloat16),
    (8, 64, 16, torch.bfloat16),
    (8, 128, 64, torch.bfloat16),
    (1, 64, 64, torch.float32),
    (4, 128, 16, torch.float32),
]


@pytest.mark.parametrize(("group", "head_dim", "page", "dtype"), SHAPES)
def test_decode_over_the_served_shapes_equals_float64(
    group: int, head_dim: int, page: int, dtype: torch.dtype, seed: int
) -> None:
    for lens in BATCHES:
        rows = _rows(lens, [1] * len(lens), group, head_dim, page, dtype, seed)
        out = torch.full_like(rows.q, float("nan"))
        before = bits(rows.pool)
        decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, out=out)
        assert error(out, _decode_reference(rows)) < TOLERANCE[dtype], f"{len(lens)} rows, longest {max(lens)}"
        assert torch.equal(bits(rows.pool), before)


@pytest.mark.parametrize(("group", "head_dim", "page", "dtype"), SHAPES)
def test_prefill_over_the_served_shapes_equals_float64(
    group: int, head_dim: int, page: int, dtype: torch.dtype, seed: int
) -> None:
    for chunks in CHUNKS:
        new = [n for n, _ in chunks]
        if dtype == torch.float32 and sum(new) > 1500:
            continue  # its products run without matrix units; the length is covered in bfloat16
        rows = _rows([n + prefix for n, prefix in chunks], new, group, head_dim, page, dtype, seed)
        out = torch.full_like(rows.q, float("nan"))
        before = bits(rows.pool)
        prefill.prefill_attention(rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens, out=out)
        assert error(out, _prefill_reference(rows)) < TOLERANCE[dtype], f"new tokens and prefixes {chunks[:4]}"
        assert torch.equal(bits(rows.pool), before)


@pytest.mark.parametrize("head_dim", [80, 256])
def test_other_head_dims_equal_float64(head_dim: int, seed: int) -> None:
    rows = _rows([700, 3], [1, 1], 4, head_dim, 64, torch.bfloat16, seed)
    out = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens)
    assert error(out, _decode_reference(rows)) < TOLERANCE[torch.bfloat16]
    rows = _rows([700, 30], [300, 30], 4, head_dim, 64, torch.bfloat16, seed)
    out = prefill.prefill_attention(rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens)
    assert error(out, _prefill_reference(rows)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [1, 1000])
@pytest.mark.parametrize("descriptors", [False, True])
def test_windows_equal_float64(window: int, descriptors: bool, seed: int) -> None:
    rows = _rows([3000, 64, 1025], [1] * 3, 4, 128, 64, torch.bfloat16, seed)
    config = replace(decode.config_for(3, 128, 2), descriptors=descriptors)
    out = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, window, config=config)
    assert error(out, _decode_reference(rows, window)) < TOLERANCE[torch.bfloat16]
    rows = _rows([3000, 64], [700, 64], 4, 128, 64, torch.bfloat16, seed)
    shape = replace(prefill.config_for(764, 128, 2, 4), descriptors=descriptors)
    out = prefill.prefill_attention(
        rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens, window, config=shape
    )
    assert error(out, _prefill_reference(rows, window)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_every_way_of_loading_tiles_gives_the_same_result(descriptors: bool, stages: int, seed: int) -> None:
    lens = [2000, 64, 1, 777]
    rows = _rows(lens, [1] * 4, 4, 128, 64, torch.bfloat16, seed)
    config = replace(decode.config_for(4, 128, 2), descriptors=descriptors, stages=stages, splits=5, min_tiles=2)
    out = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, config=config)
    assert error(out, _decode_reference(rows)) < TOLERANCE[torch.bfloat16]
    rows = _rows(lens, [1500, 64, 1, 300], 4, 128, 64, torch.bfloat16, seed)
    for block, warps in ((64, 4), (128, 8)):
        shape = prefill.PrefillConfig(block, 64, stages, warps, descriptors)
        out = prefill.prefill_attention(
            rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens, config=shape
        )
        assert error(out, _prefill_reference(rows)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(("group", "head_dim", "page"), [(4, 128, 64), (1, 64, 64), (8, 128, 128)])
def test_the_kernel_for_hopper_equals_float64(group: int, head_dim: int, page: int, turns: bool, seed: int) -> None:
    for chunks in CHUNKS:
        new = [n for n, _ in chunks]
        rows = _rows([n + prefix for n, prefix in chunks], new, group, head_dim, page, torch.bfloat16, seed)
        if reason := prefill_hopper.unavailable(rows.q, rows.pool):
            pytest.skip(reason)
        config = replace(prefill.config_for(sum(new), head_dim, 2, group), hopper=True, turns=turns)
        for window in (0, 200) if turns else (0,):
            out = torch.full_like(rows.q, float("nan"))
            before = bits(rows.pool)
            prefill.prefill_attention(
                rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens, window, out=out, config=config
            )
            found = error(out, _prefill_reference(rows, window))
            assert found < TOLERANCE[torch.bfloat16], f"window {window}, new tokens and prefixes {chunks[:4]}"
            assert torch.equal(bits(rows.pool), before)


def test_decode_adds_up_the_same_bits_at_every_launch_and_in_any_company(seed: int) -> None:
    lens = [1 + 977 * row % 9000 for row in range(64)]
    rows = _rows(lens, [1] * 64, 4, 128, 64, torch.bfloat16, seed)
    scratch = decode.scratch_for(64, 32, 8, 128, torch.device("cuda"))
    config = decode.config_for(64, 128, 2)
    first = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, scratch=scratch, config=config)
    for _ in range(50):
        again = decode.decode_attention(
            rows.q, rows.pool, rows.block_tables, rows.kv_lens, scratch=scratch, config=config
        )
        assert torch.equal(bits(again), bits(first))
    half = decode.decode_attention(
        rows.q[:20], rows.pool, rows.block_tables[:20], rows.kv_lens[:20], scratch=scratch, config=config
    )
    assert torch.equal(bits(half), bits(first[:20]))
    assert not scratch.counters.any()


def test_offsets_beyond_2_31_elements_are_right(seed: int) -> None:
    elements = 2**31 + 2**28
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    pool = torch.empty(elements // (2 * 8 * 64 * 128), 2, 8, 64, 128, dtype=torch.bfloat16, device="cuda")
    rows = _rows([200, 640], [1, 1], 4, 128, 64, torch.bfloat16, seed)
    pool[-rows.pool.shape[0] :] = rows.pool
    shift = pool.shape[0] - rows.pool.shape[0]
    tables = torch.where(rows.block_tables > 0, rows.block_tables + shift, 0)
    for descriptors in (False, True):
        config = replace(decode.config_for(2, 128, 2), descriptors=descriptors)
        out = decode.decode_attention(rows.q, pool, tables, rows.kv_lens, config=config)
        assert error(out, _decode_reference(rows)) < TOLERANCE[torch.bfloat16]
        shape = replace(prefill.config_for(2, 128, 2, 4), descriptors=descriptors)
        out = prefill.prefill_attention(rows.q, pool, tables, rows.cu_seqlens, rows.kv_lens, config=shape)
        assert error(out, _decode_reference(rows)) < TOLERANCE[torch.bfloat16]


def test_a_decode_graph_replayed_with_other_rows_equals_eager_bit_by_bit(seed: int) -> None:
    shape = (4, 128, 64, torch.bfloat16)
    lens = [700, 1, 64, 65, 3000, 0, 0, 0]
    one, other = _rows(lens, [1] * 8, *shape, seed), _rows(lens[::-1], [1] * 8, *shape, seed + 1)
    pool, q = one.pool.clone(), one.q.clone()
    tables, kv_lens = torch.zeros(8, 64, dtype=torch.int32, device="cuda"), one.kv_lens.clone()
    tables[:, : one.block_tables.shape[1]] = one.block_tables
    scratch = decode.scratch_for(8, 32, 8, 128, torch.device("cuda"))
    out = torch.empty_like(q)

    def step() -> None:
        decode.decode_attention(q, pool, tables, kv_lens, out=out, scratch=scratch)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for rows in (other, one):
        pool.copy_(rows.pool)
        q.copy_(rows.q)
        kv_lens.copy_(rows.kv_lens)
        tables[:, : rows.block_tables.shape[1]] = rows.block_tables
        out.fill_(float("nan"))
        graph.replay()
        eager = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens)
        assert torch.equal(bits(out), bits(eager))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 8)])
@pytest.mark.parametrize("tokens", [64, 160])
def test_a_prefill_graph_replayed_with_other_divisions_equals_eager_bit_by_bit(
    heads: int, kv_heads: int, tokens: int, seed: int
) -> None:
    device, slots = torch.device("cuda"), 8
    page = 64
    blocks = slots + 1 + -(-tokens // page)
    pool = torch.randn(blocks + 1, 2, kv_heads, page, 64, device=device).to(torch.bfloat16)
    cu_seqlens = torch.zeros(slots + 2, dtype=torch.int32, device=device)
    kv_lens = torch.zeros(slots + 1, dtype=torch.int32, device=device)
    tables = torch.zeros(slots + 1, 4, dtype=torch.int32, device=device)
    q = torch.randn(tokens, heads, 64, device=device).to(torch.bfloat16)
    out = torch.empty_like(q)

    def set_rows(lengths: list[int]) -> None:
        padded = [*lengths, *[0] * (slots - len(lengths)), tokens - sum(lengths)]  # the last row is the padding's
        kv_lens.copy_(torch.tensor(padded, dtype=torch.int32))
        cu_seqlens.copy_(torch.tensor([0, *padded], dtype=torch.int32).cumsum(0))
        tables.zero_()
        for row in range(len(lengths)):
            tables[row, 0] = row + 1
        scratch = torch.arange(slots + 1, blocks, dtype=torch.int32)
        tables[slots, : len(scratch)] = scratch

    def step() -> None:
        prefill.prefill_attention(q, pool, tables, cu_seqlens, kv_lens, out=out)

    set_rows([tokens - 40] if tokens - 40 <= page else [page])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([24, 32], [64], [32, 32], [16, 16, 16, 16]):
        set_rows(lengths)
        before = bits(pool)
        out.fill_(float("nan"))
        graph.replay()
        real = sum(lengths)
        eager = prefill.prefill_attention(
            q[:real],
            pool,
            tables[: len(lengths)],
            cu_seqlens[: len(lengths) + 1],
            kv_lens[: len(lengths)],
            config=prefill.config_for(tokens, 64, 2, heads // kv_heads),
        )
        assert torch.equal(bits(out[:real]), bits(eager))
        assert out.isfinite().all()
        assert torch.equal(bits(pool), before)


def test_attention_does_not_synchronise(seed: int) -> None:
    rows = _rows([700, 20], [1, 1], 4, 128, 64, torch.bfloat16, seed)
    decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens)
    prefill.prefill_attention(rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens)
        prefill.prefill_attention(rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
