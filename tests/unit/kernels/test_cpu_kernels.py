"""The C kernels beside their references, over shapes, strides and dtypes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernels.cpu import attention, elementwise, library
from kernels.cpu import linear as products
from kernels.cpu.linear import PackedWeight
from kernels.cpu.memory import HUGE_PAGE, HugeArena, huge_zeros

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    loaded = library.load()
    if loaded is None:
        pytest.skip("this machine has no AVX-512 with AMX, or no C compiler")
    library.set_threads(2)
    return loaded


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Rows around the tiles' 16 and 32 and the panels' 12 and 24; outputs and inputs that do and do not fill a tile
ROWS = [1, 2, 11, 12, 13, 16, 17, 24, 31, 33, 160]
SHAPES = [(32, 32), (64, 96), (20, 16), (100, 70), (1, 1), (384, 1600)]


def tolerance(dtype: torch.dtype, expected: torch.Tensor) -> float:
    return (1e-5 if dtype == torch.float32 else 8e-3) * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_product_when_rows_and_sizes_vary_then_equals_reference(
    kernels: ctypes.CDLL, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, bias = random(n, k, seed=1, dtype=dtype), random(n, seed=2, dtype=dtype)
    for b in (None, bias):
        packed = PackedWeight(kernels, HugeArena(), weight, b)
        for rows in ROWS:
            x = random(rows, k + 5, seed=rows, dtype=dtype)[:, :k]  # rows lie apart
            expected = products.reference(x, weight, b)
            torch.testing.assert_close(packed(x), expected, rtol=0, atol=tolerance(dtype, expected))
            exact = products.reference(x, weight, b, out_dtype=torch.float32)
            torch.testing.assert_close(packed.exact(x), exact, rtol=0, atol=tolerance(torch.float32, exact))
            residual = random(rows, n, seed=3)
            summed = residual.clone()
            packed.add_to(summed, x)
            torch.testing.assert_close(summed, residual + exact, rtol=0, atol=tolerance(torch.float32, exact))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gated_product_when_rows_and_sizes_vary_then_equals_reference(
    kernels: ctypes.CDLL, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, bias = random(2 * n, k, seed=1, dtype=dtype), random(2 * n, seed=2, dtype=dtype)
    for b in (None, bias):
        packed = PackedWeight(kernels, HugeArena(), weight, b, gated=True)
        for rows in ROWS:
            x = random(rows, k, seed=rows, dtype=dtype)
            expected = products.reference(x, weight, b, gated=True)
            torch.testing.assert_close(packed(x), expected, rtol=0, atol=tolerance(dtype, expected))


def test_gate_when_its_input_is_extreme_then_silu_neither_overflows_nor_loses_its_tail(kernels: ctypes.CDLL) -> None:
    x = torch.tensor([[-1e4], [-100.0], [-87.5], [-20.0], [-1e-3], [0.0], [30.0], [90.0], [1e4]])
    packed = PackedWeight(kernels, HugeArena(), torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0]), gated=True)
    torch.testing.assert_close(packed(x), torch.nn.functional.silu(x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_when_other_rows_join_then_a_row_is_the_same_bit_by_bit(
    kernels: ctypes.CDLL, dtype: torch.dtype
) -> None:
    weight, x = random(96, 200, seed=1, dtype=dtype), random(160, 200, seed=2, dtype=dtype)
    packed = PackedWeight(kernels, HugeArena(), weight)
    whole = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), whole[:rows])


def test_product_when_threads_change_then_result_is_the_same_bit_by_bit(kernels: ctypes.CDLL) -> None:
    packed = PackedWeight(kernels, HugeArena(), random(300, 70, seed=1))
    x = random(30, 70)
    library.set_threads(1)
    single = packed(x)
    for count in (4, 2, 1, 3):
        library.set_threads(count)
        assert torch.equal(packed(x), single)


def test_kernels_when_several_threads_call_them_at_once_then_each_gets_its_own_result(kernels: ctypes.CDLL) -> None:
    library.set_threads(3)
    packed = PackedWeight(kernels, HugeArena(), random(600, 70, seed=1))
    inputs = [random(1 + i, 70, seed=i) for i in range(6)]
    expected = [packed(x) for x in inputs]

    def repeat(i: int) -> bool:
        return all(torch.equal(packed(inputs[i]), expected[i]) for _ in range(300))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(repeat, range(len(inputs)), timeout=60))


def test_product_when_operands_do_not_fit_then_raises(kernels: ctypes.CDLL) -> None:
    packed = PackedWeight(kernels, HugeArena(), random(8, 16))
    for x in (random(2, 15), random(2, 16, dtype=torch.bfloat16), random(16, 2).T):
        with pytest.raises(ValueError, match=r"\[8, 16\]"):
            packed(x)
    with pytest.raises(ValueError, match=r"\[8, 16\]"):
        packed.add_to(torch.zeros(3, 8), random(2, 16))
    with pytest.raises(ValueError, match="float32"):
        packed.add_to(torch.zeros(2, 8, dtype=torch.bfloat16), random(2, 16))


HEADS = [(9, 3, 64, 16), (4, 4, 16, 4), (16, 1, 32, 16), (10, 1, 128, 8), (8, 2, 256, 64), (2, 1, 80, 3)]
WINDOWS = [None, 1, 20, 128, 300]


def shuffled_tables(rows: int, width: int) -> torch.Tensor:
    """Every row over blocks 1 to width, in an order of its own."""
    generator = torch.Generator().manual_seed(4)
    return torch.stack([torch.randperm(width, generator=generator) + 1 for _ in range(rows)]).int()


def decode(
    kernels: ctypes.CDLL,
    q: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    last: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"), dtype=q.dtype)
    attention.decode_attention(kernels, q, pool, tables, last, window, out)
    return out


def prefill(
    kernels: ctypes.CDLL,
    q: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    window: int | None = None,
) -> torch.Tensor:
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"), dtype=q.dtype)
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    attention.prefill_attention(
        kernels, q, pool, tables, torch.tensor(starts), torch.tensor(lengths), torch.tensor(firsts), window, out
    )
    return out


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_when_shapes_vary_then_equals_reference(
    kernels: ctypes.CDLL, heads: int, kv_heads: int, dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    last = torch.tensor([0, 1, 15, 16, 127, 128, 129, 400, 777])
    width = 777 // block_size + 1
    tables = shuffled_tables(len(last), width)
    pool = random(width + 1, 2, kv_heads, block_size, dim, seed=5, dtype=dtype)
    pool[0] = float("nan")  # the reserved block is never read
    q = random(len(last), heads + 2 * kv_heads, dim, seed=6, dtype=dtype)[:, :heads]
    assert attention.supports(heads, kv_heads, dim, dtype)
    found = decode(kernels, q, pool, tables, last, window)
    for row in range(len(last)):
        expected = attention.reference(q[row : row + 1], pool, tables[row], int(last[row]), window)
        torch.testing.assert_close(found[row], expected[0], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)
        # and a row is the same alone, bit by bit
        alone = decode(kernels, q[row : row + 1], pool, tables[row : row + 1], last[row:], window)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_attention_when_shapes_vary_then_equals_reference(
    kernels: ctypes.CDLL, heads: int, kv_heads: int, dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    starts, lengths = [0, 0, 3, 31, 500, 290], [1, 70, 5, 33, 40, 2]
    width = 540 // block_size + 1
    tables = shuffled_tables(len(starts), width)
    pool = random(width + 1, 2, kv_heads, block_size, dim, seed=5, dtype=dtype)
    pool[0] = float("nan")
    q = random(sum(lengths), heads + 2 * kv_heads, dim, seed=6, dtype=dtype)[:, :heads]
    found = prefill(kernels, q, pool, tables, starts, lengths, window)
    first = 0
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        expected = attention.reference(q[first : first + length], pool, tables[row], start, window)
        torch.testing.assert_close(
            found[first : first + length], expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2
        )
        first += length


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_attention_when_a_prompt_is_cut_otherwise_then_tokens_are_the_same_bit_by_bit(
    kernels: ctypes.CDLL, dtype: torch.dtype
) -> None:
    pool, tables = random(50, 2, 3, 16, 64, dtype=dtype), shuffled_tables(1, 49)
    q = random(700, 9, 64, seed=1, dtype=dtype)
    whole = prefill(kernels, q, pool, tables, [0], [700])
    for chunks in ([256, 256, 188], [1, 15, 300, 384], [7] * 100):
        start = 0
        for length in chunks:
            part = prefill(kernels, q[start : start + length], pool, tables, [start], [length])
            assert torch.equal(part, whole[start : start + length])
            start += length


def test_attention_when_slots_behind_the_row_hold_garbage_then_they_do_not_matter(kernels: ctypes.CDLL) -> None:
    pool, tables = random(2, 2, 1, 16, 32), torch.tensor([[1]], dtype=torch.int32)
    pool[1, :, :, 6:] = float("nan")
    assert torch.isfinite(decode(kernels, random(1, 2, 32), pool, tables, torch.tensor([5]))).all()
    assert torch.isfinite(prefill(kernels, random(4, 2, 32), pool, tables, [2], [4])).all()


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_attention_when_a_seen_slot_is_not_finite_then_the_row_shows_it_and_others_do_not(
    kernels: ctypes.CDLL, kind: str, broken: float
) -> None:
    pool = random(30, 2, 1, 16, 32)
    pool[3, int(kind == "value"), 0, 4] = broken
    tables = torch.arange(1, 29).view(2, 14).int()
    found = decode(kernels, random(2, 2, 32).abs(), pool, tables, torch.tensor([200, 200]))
    assert not torch.isfinite(found[0]).all()
    assert torch.isfinite(found[1]).all()
    found = prefill(kernels, random(6, 2, 32).abs(), pool, tables, [200, 200], [3, 3])
    assert not torch.isfinite(found[:3]).all(dim=-1).any()
    assert torch.isfinite(found[3:]).all()


def test_decode_attention_when_heads_are_unusual_then_is_not_offered() -> None:
    assert not attention.supports(34, 2, 64, torch.float32)
    assert not attention.supports(8, 2, 72, torch.float32)
    assert not attention.supports(8, 2, 272, torch.float32)
    assert not attention.supports(8, 2, 64, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_write_kv_when_tokens_are_scattered_then_equals_reference(
    kernels: ctypes.CDLL, tokens: int, dtype: torch.dtype
) -> None:
    qkv = random(tokens, 5 + 2 * 3, 24, dtype=dtype)
    slots = torch.randperm(160, generator=torch.Generator().manual_seed(1))[:tokens]
    found = torch.zeros(10, 2, 3, 16, 24, dtype=dtype)
    expected = found.clone()
    attention.write_kv(kernels, qkv[:, 5:], found, slots // 16, slots % 16)
    attention.write_kv_reference(qkv[:, 5:], expected, slots // 16, slots % 16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("x_dtype", "y_dtype"), [(a, b) for a in DTYPES for b in DTYPES])
@pytest.mark.parametrize("n", [1, 16, 33, 576])
@pytest.mark.parametrize("rows", [1, 70])
def test_rms_norm_when_shapes_vary_then_equals_reference(
    kernels: ctypes.CDLL, rows: int, n: int, x_dtype: torch.dtype, y_dtype: torch.dtype
) -> None:
    x, weight = random(rows, n, dtype=x_dtype) * 3, random(n, seed=1)
    out = torch.empty(rows, n, dtype=y_dtype)
    elementwise.rms_norm(kernels, x, weight, 1e-5, out)
    expected = elementwise.rms_norm_reference(x, weight, 1e-5, y_dtype)
    torch.testing.assert_close(out, expected, rtol=1e-6 if y_dtype == torch.float32 else 8e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_when_heads_of_wider_rows_are_done_in_place_then_the_rest_stays(
    kernels: ctypes.CDLL, dtype: torch.dtype
) -> None:
    rows, weight = random(6, 9, 16, dtype=dtype), random(16, seed=1)
    before, heads = rows.clone(), rows[:, 2:6]
    elementwise.rms_norm(kernels, heads, weight, 1e-6, heads)
    expected = elementwise.rms_norm_reference(before[:, 2:6], weight, 1e-6, dtype)
    torch.testing.assert_close(heads, expected, rtol=8e-3, atol=1e-6)
    assert torch.equal(rows[:, :2], before[:, :2])
    assert torch.equal(rows[:, 6:], before[:, 6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 16, 64, 80])
@pytest.mark.parametrize("rows", [1, 70])
def test_rotate_when_heads_of_wider_rows_are_turned_then_equals_reference(
    kernels: ctypes.CDLL, rows: int, dim: int, dtype: torch.dtype
) -> None:
    x, angle = random(rows, 5, dim, dtype=dtype), random(rows, dim // 2, seed=1) * 100
    before = x.clone()
    elementwise.rotate(kernels, x[:, :3], angle.cos(), angle.sin())
    expected = elementwise.rotate_reference(before[:, :3], angle.cos(), angle.sin())
    torch.testing.assert_close(x[:, :3], expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert torch.equal(x[:, 3:], before[:, 3:])


def test_huge_memory_when_taken_then_is_aligned_zeroed_and_of_the_shape() -> None:
    big = huge_zeros((3, 1 << 20), torch.float32)
    assert big.data_ptr() % HUGE_PAGE == 0
    assert big.is_contiguous()
    assert not big.any()
    arena = HugeArena()
    pieces = [arena.empty((7, i), torch.bfloat16) for i in range(1, 40)] + [arena.empty((80 << 20,), torch.uint8)]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in pieces)
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def load_in_a_process(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import torch; from kernels.cpu import library; print(library.load() is not None)"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        text=True,
        timeout=110,
        env={**os.environ, "BATON_KERNEL_DIR": str(folder), **environment},
    )


@pytest.mark.extended
def test_library_when_two_processes_start_on_an_empty_folder_then_one_build_serves_both(
    kernels: ctypes.CDLL, tmp_path: Path
) -> None:
    assert load_in_a_process(tmp_path).stdout.strip() == "True"
    built = list(tmp_path.glob("*.so"))
    assert len(built) == 1
    stamp = built[0].stat().st_mtime_ns
    assert load_in_a_process(tmp_path).stdout.strip() == "True"
    assert built[0].stat().st_mtime_ns == stamp
    assert {file.name for file in tmp_path.iterdir()} == {"lock", built[0].name}


IN_FORKS = """
import json, os, sys
import torch
from kernels.cpu import library
for environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(environment)
        print(library.load() is not None, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_library_when_switched_off_or_not_buildable_then_is_none(tmp_path: Path) -> None:
    environments = [{"BATON_CPU_KERNELS": "off"}, {"CC": "no-such-compiler"}, {"CC": "false"}]
    done = subprocess.run(
        [sys.executable, "-c", IN_FORKS, json.dumps(environments)],
        capture_output=True,
        check=True,
        text=True,
        timeout=110,
        env={**os.environ, "BATON_KERNEL_DIR": str(tmp_path)},
    )
    assert done.stdout.split() == ["False"] * len(environments)
    assert not list(tmp_path.glob("*.so"))
