"""Few-row products, embedding rows and rotary angles beside their references."""

from __future__ import annotations

import pytest
import torch

from kernels import embedding, rotary, small_gemm
from kernels.small_gemm import Config
from kernels.small_gemm_table import TABLE

CONFIGS = [
    Config(32, 32),
    Config(16, 32, splits=3),
    Config(16, 16, splits=2, warps=2, stages=2),
]
VECTORS = [
    Config(16, 32, vector=True),
    Config(4, 64, vector=True, early=False),
    Config(8, 128, vector=True, warps=8),
    Config(1, whole=True),
    Config(4, whole=True, warps=2),
]


def operands(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * n + k)
    x = torch.randn(rows, k + 3, generator=generator).to(device, dtype)[:, :k]  # rows lie apart
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(device, dtype)
    return x, weight, torch.randn(n, generator=generator).to(device, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = max(4 * torch.finfo(found.dtype).eps, 1e-5)
    torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 96), (3, 70, 72), (16, 33, 64), (33, 40, 48), (70, 34, 48)])
@pytest.mark.parametrize("config", CONFIGS)
def test_product_when_of_few_rows_then_equals_the_reference(
    config: Config, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = operands(rows, n, k, dtype, device)
    for _ in range(2):  # counters of a split product are back at zero after the first
        assert_near(small_gemm.linear(x, weight, bias, config=config), small_gemm.reference(x, weight, bias))
    exact = small_gemm.linear(x, weight, config=config, dtype=torch.float32)
    torch.testing.assert_close(exact, small_gemm.reference(x, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (70, 72), (6, 44), (9, 59)])
@pytest.mark.parametrize("config", VECTORS)
def test_product_when_of_one_row_and_streamed_then_equals_the_reference(
    config: Config, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = operands(1, n, k, dtype, device)
    out = torch.full((1, n), torch.nan, dtype=dtype, device=device)
    assert small_gemm.linear(x, weight, bias, config=config, out=out) is out
    assert_near(out, small_gemm.reference(x, weight, bias))
    if n % 2 == 0:
        assert_near(small_gemm.gated(x, weight, bias, config=config), small_gemm.gated_reference(x, weight, bias))


@pytest.mark.parametrize(
    ("k", "parts"), [(4096, (4096, 0, 0)), (14336, (8192, 4096, 2048)), (59, (32, 16, 16)), (44, (32, 8, 4))]
)
def test_row_when_cut_into_powers_of_two_then_little_is_left_over(k: int, parts: tuple[int, ...]) -> None:
    assert small_gemm._parts(k) == parts


@pytest.mark.parametrize("rows", [1, 16, 90])
def test_gated_product_when_of_few_rows_then_equals_the_reference(rows: int, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = operands(rows, 84, 64, dtype, device)
        for b in (bias, None):
            found = small_gemm.gated(x, weight, b, config=Config(16, 32))
            assert_near(found, small_gemm.gated_reference(x, weight, b))


@pytest.mark.parametrize(
    ("rows", "padded"),
    [
        (1, 8),
        (8, 8),
        (9, 16),
        (17, 32),
        (40, 48),
        (50, 64),
        (64, 64),
        (65, 80),
        (81, 96),
        (97, 128),
        (160, 160),
        (161, 192),
    ],
)
def test_rows_when_padded_then_little_is_wasted(rows: int, padded: int) -> None:
    assert sum(small_gemm._padding(rows)) == padded


def test_row_when_its_neighbours_change_then_stays_bit_for_bit(device: torch.device) -> None:
    x, weight, _ = operands(4, 48, 64, torch.float32, device)
    config = Config(16, 32, splits=2)
    before = small_gemm.linear(x, weight, config=config)[2].clone()
    x[[0, 1, 3]] = 1e4
    assert torch.equal(small_gemm.linear(x, weight, config=config)[2], before)


def test_product_when_shapes_do_not_fit_then_it_is_refused(device: torch.device) -> None:
    x, weight, _ = operands(2, 8, 16, torch.float32, device)
    with pytest.raises(ValueError, match="at most 1 rows"):
        small_gemm.linear(x, weight, config=VECTORS[0])
    with pytest.raises(ValueError, match="of W's width"):
        small_gemm.linear(x, weight[:, :8].contiguous(), config=CONFIGS[0])
    with pytest.raises(ValueError, match="at most 192 rows"):
        small_gemm.linear(torch.zeros(193, 16, device=device), weight, config=CONFIGS[0])
    with pytest.raises(ValueError, match="not split"):
        small_gemm.gated(x, weight, config=CONFIGS[1])


def test_table_when_looked_up_then_entries_are_configurations_that_can_run() -> None:
    for (gated, n, k), entries in TABLE.items():
        assert [rows for rows, _ in entries] == sorted({rows for rows, _ in entries})
        for index, (rows, config) in enumerate(entries):
            assert 1 <= rows <= small_gemm.MOST_ROWS
            if config is None:
                continue
            assert not (gated and config.splits > 1)
            assert not (config.vector or config.whole) or (rows == 1 and index == 0)
            assert not (config.whole and config.prefetch)
            assert config.prefetch % (16 * config.chunks) == 0
            assert config.prefetch <= k * 2 // config.splits - (2 * config.block_k if config.vector else 0)
            assert n % config.block_n == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding_rows_when_gathered_then_are_the_tables_as_float32(dtype: torch.dtype, device: torch.device) -> None:
    table = torch.randn(9, 2500, device=device).to(torch.bfloat16)
    ids = torch.tensor([8, 0, 3, 3], dtype=dtype, device=device)
    assert torch.equal(embedding.embed(ids, table), embedding.reference(ids.long(), table))
    assert torch.equal(embedding.embed(ids, table[:, 100:740]), embedding.reference(ids.long(), table[:, 100:740]))


@pytest.mark.parametrize("part", [(0, 4), (3, 9), (5, 5)])
def test_embedding_rows_when_the_table_is_a_part_then_tokens_of_others_are_zeros(
    part: tuple[int, int], device: torch.device
) -> None:
    whole = torch.randn(9, 70, device=device)
    ids = torch.tensor([8, 0, 3, 4, 3, 5], device=device)
    table = torch.cat((whole[slice(*part)], torch.full((1, 70), torch.nan, device=device)))  # never read
    found = embedding.embed(ids, table, part=part)
    assert torch.equal(found, embedding.reference(ids, table.nan_to_num(), part=part))
    held = [part[0] <= token < part[1] for token in ids.tolist()]
    assert torch.equal(found, whole[ids] * torch.tensor(held, device=device).unsqueeze(1))


def test_angles_when_positions_are_large_then_equal_float32_arithmetic(device: torch.device) -> None:
    positions = torch.tensor([0, 1, 63, 4096, 131071, 1 << 20], device=device)
    frequencies = 500000.0 ** (-torch.arange(0, 128, 2, device=device) / 128)
    for found, expected in zip(
        rotary.angles(positions, frequencies, 1.5), rotary.reference(positions, frequencies, 1.5), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    narrow = torch.tensor([3, 7, 5], dtype=torch.int32, device=device)
    for found, expected in zip(
        rotary.angles(narrow, frequencies[:6]), rotary.reference(narrow, frequencies[:6]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
