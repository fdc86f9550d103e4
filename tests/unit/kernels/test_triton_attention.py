"""Paged attention kernels against their references in float64, on small shapes."""

from dataclasses import replace

import pytest
import torch

from kernels import decode_attention as decode
from kernels import prefill_attention as prefill
from tests.unit.kernels.paged_rows import bits, error, paged_rows

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
# head_dim, heads, kv_heads, page: GQA 1, 4, 8, one that is no power of two, a padded head
SHAPES = [(64, 2, 2, 64), (64, 4, 1, 16), (128, 8, 1, 64), (80, 6, 2, 16), (96, 3, 1, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "page"), SHAPES)
def test_decode_of_rows_of_any_length_equals_the_reference(
    head_dim: int, heads: int, kv_heads: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    lens = [1, 65, 0, 130, 64]
    rows = paged_rows(
        lens,
        [1] * 5,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        dtype=dtype,
        device=device,
        seed=1,
    )
    config = replace(decode.config_for(5, head_dim, dtype.itemsize), min_tiles=1, splits=3)
    out = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, config=config)
    wide = rows.wide
    expected = decode.reference(wide.q, wide.pool, rows.block_tables, rows.kv_lens)
    assert error(out, expected) < TOLERANCE[dtype]
    assert not out[2].any()


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("window", [1, 20, 64, 500])
def test_decode_with_a_window_sees_its_newest_tokens_only(window: int, descriptors: bool, device: torch.device) -> None:
    rows = paged_rows(
        [200, 7, 64],
        [1] * 3,
        heads=4,
        kv_heads=2,
        head_dim=64,
        page=64,
        dtype=torch.bfloat16,
        device=device,
        seed=window,
    )
    config = replace(decode.config_for(3, 64, 2), tile=32, min_tiles=1, splits=2, descriptors=descriptors)
    out = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, window, config=config)
    wide = rows.wide
    expected = decode.reference(wide.q, wide.pool, rows.block_tables, rows.kv_lens, window)
    assert error(out, expected) < TOLERANCE[torch.bfloat16]


def test_decode_of_a_row_is_the_same_bits_in_any_company(device: torch.device) -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page": 16, "dtype": torch.float32, "device": device}
    rows = paged_rows([150, 33, 90], [1] * 3, **shape, seed=3)
    config = replace(decode.config_for(3, 64, 4), tile=16, min_tiles=1, splits=4)
    together = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, config=config)
    for row in range(3):
        one = slice(row, row + 1)
        alone = decode.decode_attention(
            rows.q[one], rows.pool, rows.block_tables[one], rows.kv_lens[one], config=config
        )
        assert torch.equal(together[one], alone)


def test_decode_writes_its_rows_of_out_and_leaves_the_rest_as_it_was(device: torch.device) -> None:
    rows = paged_rows(
        [40, 100],
        [1] * 2,
        heads=4,
        kv_heads=4,
        head_dim=64,
        page=16,
        dtype=torch.bfloat16,
        device=device,
        seed=4,
    )
    packed = torch.randn(2, 12, 64, device=device).to(torch.bfloat16)
    packed[:, :4] = rows.q
    out = torch.full((4, 4, 64), 7.0, dtype=torch.bfloat16, device=device)
    scratch = decode.scratch_for(8, 4, 4, 64, device)
    before = bits(rows.pool)
    given = decode.decode_attention(
        packed[:, :4], rows.pool, rows.block_tables[:, :9], rows.kv_lens, out=out[1:3], scratch=scratch
    )
    assert given.data_ptr() == out[1].data_ptr()
    expected = decode.reference(rows.q.double(), rows.wide.pool, rows.block_tables, rows.kv_lens)
    assert error(out[1:3], expected) < TOLERANCE[torch.bfloat16]
    assert (out[0] == 7).all() and (out[3] == 7).all()
    assert torch.equal(bits(rows.pool), before)
    assert not scratch.counters.any()  # ready for the next launch


def test_decode_with_scratch_memory_for_fewer_rows_is_refused(device: torch.device) -> None:
    rows = paged_rows(
        [5, 6, 7],
        [1] * 3,
        heads=2,
        kv_heads=1,
        head_dim=64,
        page=16,
        dtype=torch.float32,
        device=device,
        seed=5,
    )
    scratch = decode.scratch_for(1, 2, 1, 64, device)
    with pytest.raises(ValueError, match="scratch"):
        decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens, scratch=scratch)
    with pytest.raises(ValueError, match="does not fit"):
        decode.decode_attention(rows.q.double(), rows.pool, rows.block_tables, rows.kv_lens)
    with pytest.raises(ValueError, match="int32"):
        decode.decode_attention(rows.q, rows.pool, rows.block_tables.long(), rows.kv_lens)


@pytest.mark.parametrize("max_rows", [1, 3, 16, 17, 64, 65, 300])
def test_scratch_memory_is_enough_for_each_smaller_batch(max_rows: int) -> None:
    scratch = decode.scratch_for(max_rows, 4, 2, 64, torch.device("cpu"))
    for rows in range(1, max_rows + 1):
        needed = rows * decode.config_for(rows, 64, 2).splits * 4
        assert scratch.partial.numel() >= needed * 64
        assert scratch.stats.numel() >= needed * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "page"), SHAPES)
def test_prefill_of_rows_with_and_without_a_prefix_equals_the_reference(
    head_dim: int, heads: int, kv_heads: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    new, lens = [1, 40, 0, 17, 3], [1, 40, 0, 90, 67]
    rows = paged_rows(
        lens,
        new,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        dtype=dtype,
        device=device,
        seed=6,
    )
    out = prefill.prefill_attention(rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens)
    wide = rows.wide
    expected = prefill.reference(wide.q, wide.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens)
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("window", [1, 20, 64, 500])
def test_prefill_with_a_window_sees_the_newest_tokens_only(
    window: int, descriptors: bool, device: torch.device
) -> None:
    rows = paged_rows(
        [130, 40],
        [60, 40],
        heads=4,
        kv_heads=2,
        head_dim=64,
        page=64,
        dtype=torch.bfloat16,
        device=device,
        seed=window,
    )
    config = prefill.PrefillConfig(block=32, tile=32, stages=2, warps=4, descriptors=descriptors)
    out = prefill.prefill_attention(
        rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens, window, config=config
    )
    wide = rows.wide
    expected = prefill.reference(wide.q, wide.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens, window)
    assert error(out, expected) < TOLERANCE[torch.bfloat16]


def test_prefill_with_rows_behind_decode_rows_leaves_other_tokens_and_the_pool_as_they_were(
    device: torch.device,
) -> None:
    rows = paged_rows(
        [30, 20, 50],
        [1, 20, 7],
        heads=2,
        kv_heads=2,
        head_dim=64,
        page=16,
        dtype=torch.bfloat16,
        device=device,
        seed=8,
    )
    packed = torch.randn(30, 6, 64, device=device).to(torch.bfloat16)  # with two tokens of no row at the end
    packed[:28, :2] = rows.q
    out = torch.full((30, 2, 64), 7.0, dtype=torch.bfloat16, device=device)
    before = bits(rows.pool)
    prefill.prefill_attention(
        packed[:, :2], rows.pool, rows.block_tables[1:], rows.cu_seqlens[1:], rows.kv_lens[1:], out=out
    )
    expected = prefill.reference(
        rows.q.double(), rows.wide.pool, rows.block_tables[1:], rows.cu_seqlens[1:], rows.kv_lens[1:]
    )
    assert error(out[1:28], expected[1:]) < TOLERANCE[torch.bfloat16]
    assert (out[0] == 7).all() and (out[28:] == 7).all()
    assert torch.equal(bits(rows.pool), before)


def test_prefill_of_one_token_per_row_equals_decode(device: torch.device) -> None:
    rows = paged_rows(
        [70, 16, 33],
        [1] * 3,
        heads=4,
        kv_heads=1,
        head_dim=64,
        page=16,
        dtype=torch.float32,
        device=device,
        seed=9,
    )
    one = decode.decode_attention(rows.q, rows.pool, rows.block_tables, rows.kv_lens)
    other = prefill.prefill_attention(rows.q, rows.pool, rows.block_tables, rows.cu_seqlens, rows.kv_lens)
    assert error(one, other) < TOLERANCE[torch.float32]


def test_prefill_with_the_wrong_number_of_rows_is_refused(device: torch.device) -> None:
    rows = paged_rows(
        [5, 6],
        [5, 6],
        heads=2,
        kv_heads=1,
        head_dim=64,
        page=16,
        dtype=torch.float32,
        device=device,
        seed=10,
    )
    with pytest.raises(ValueError, match="cu_seqlens"):
        prefill.prefill_attention(rows.q, rows.pool, rows.block_tables, rows.cu_seqlens[:2], rows.kv_lens)
