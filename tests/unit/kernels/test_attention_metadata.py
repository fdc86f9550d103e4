"""Prefix sums, padding offsets and page plans against a NumPy account."""

import numpy as np
import pytest
import torch

from kernels.attention_metadata import (
    PagePlan,
    attention_metadata,
    attention_metadata_reference,
    page_plan,
    page_plan_reference,
)

_POISON = 9999
_CASES = [
    ([1], [0]),
    ([3, 1, 700], [0, 33, 5]),
    ([0, 4, 0, 0], [0, 0, 16, 0]),
    ([2100, 1], [0, 64]),
    ([0, 0], [0, 0]),
    ([], []),
]


def _int32(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _poison(size: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), _POISON, dtype=torch.int32, device=device)


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize(("lengths", "prefixes"), _CASES)
def test_attention_metadata_sets_every_element(
    device: torch.device, lengths: list[int], prefixes: list[int], spare: int
) -> None:
    rows, tokens, padded = len(lengths), sum(lengths), max(lengths, default=0) + 2
    cu, cu_kv = _poison(rows + 1 + spare, device), _poison(rows + 1 + spare, device)
    offset = _poison(tokens + spare, device)
    attention_metadata(_int32(lengths, device), _int32(prefixes, device), cu, cu_kv, offset, padded)
    sums = np.cumsum([0, *lengths, *[0] * spare])
    assert cu.tolist() == sums.tolist()
    assert cu_kv.tolist() == np.cumsum([0, *np.add(lengths, prefixes), *[0] * spare]).tolist()
    expected = [row * padded - int(sums[row]) for row, length in enumerate(lengths) for _ in range(length)]
    assert offset.tolist() == expected + [0] * spare
    reference = attention_metadata_reference(_int32(lengths, device), _int32(prefixes, device), padded)
    for got, wanted in zip((cu, cu_kv, offset), reference, strict=True):
        assert torch.equal(got[: wanted.shape[0]], wanted)


def test_attention_metadata_total_kv_length_counts_prefixes(device: torch.device) -> None:
    lengths, prefixes = [5, 1, 9], [64, 0, 4000]
    cu, cu_kv, offset = _poison(4, device), _poison(4, device), _poison(15, device)
    attention_metadata(_int32(lengths, device), _int32(prefixes, device), cu, cu_kv, offset, 9)
    assert cu_kv[-1].item() == sum(lengths) + sum(prefixes)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("lengths", "prefixes"), _CASES)
def test_page_plan_equals_a_list_of_each_rows_pages(
    device: torch.device, lengths: list[int], prefixes: list[int], block_size: int
) -> None:
    rows, width = len(lengths), 2200 // block_size + 1
    kv = np.add(lengths, prefixes).astype(int)
    tables = np.random.default_rng(0).integers(1, 1 << 20, (rows, width + 5))
    pages = -(-kv // block_size)
    out = PagePlan(*(_poison(size, device) for size in (rows + 3, 3000, rows + 2, 2200, 2200, 1)))
    cu = _int32(np.cumsum([0, *lengths]), device)
    device_tables = _int32(tables, device).reshape(rows, width + 5)[:, :width]
    page_plan(cu, _int32(kv, device), device_tables, block_size, out)

    total, tokens = int(pages.sum()), sum(lengths)
    assert out.nnz.tolist() == [tokens]
    assert out.page_indptr.tolist() == np.cumsum([0, *pages, 0, 0]).tolist()
    assert out.page_indices[:total].tolist() == [int(b) for row in range(rows) for b in tables[row, : pages[row]]]
    assert out.last_page_len.tolist() == [
        *(int(n - (p - 1) * block_size) if n else 0 for n, p in zip(kv, pages, strict=True)),
        0,
        0,
    ]
    assert out.batch_indices[:tokens].tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]
    assert out.positions[:tokens].tolist() == [
        prefix + i for length, prefix in zip(lengths, prefixes, strict=True) for i in range(length)
    ]
    for tensor, used in ((out.page_indices, total), (out.batch_indices, tokens), (out.positions, tokens)):
        assert (tensor[used:] == _POISON).all()

    wanted = page_plan_reference(cu, _int32(kv, device), device_tables, block_size)
    for name in PagePlan.__dataclass_fields__:
        exact = getattr(wanted, name)
        assert torch.equal(getattr(out, name)[: exact.shape[0]], exact), name


def test_page_plan_when_outputs_are_short_writes_inside_them_only(device: torch.device) -> None:
    whole = _poison(40, device)
    out = PagePlan(_poison(3, device), whole[:5], _poison(2, device), whole[10:13], whole[20:23], _poison(1, device))
    tables = _int32([[1, 2, 3, 4], [5, 6, 7, 8]], device)
    page_plan(_int32([0, 4, 8], device), _int32([64, 64], device), tables, 16, out)
    assert whole.tolist() == [1, 2, 3, 4, 5, *[_POISON] * 5, 0, 0, 0, *[_POISON] * 7, 60, 61, 62, *[_POISON] * 17]


def test_metadata_when_an_output_does_not_fit_raises(device: torch.device) -> None:
    lengths = _int32([1, 2], device)
    good = [_poison(3, device), _poison(3, device), _poison(3, device)]
    for index, bad in (
        (0, _poison(2, device)),
        (1, _poison(2, device)),
        (0, _poison(3, device).long()),
        (1, _poison(6, device)[::2]),
        (2, _poison(3, device).float()),
    ):
        outputs = list(good)
        outputs[index] = bad
        with pytest.raises(ValueError, match="contiguous int32"):
            attention_metadata(lengths, lengths, *outputs, 2)
    sizes = {"page_indptr": 3, "page_indices": 4, "last_page_len": 2, "batch_indices": 3, "positions": 3, "nnz": 1}
    for name in ("page_indptr", "last_page_len", "nnz"):
        short = PagePlan(*(_poison(size - (n == name), device) for n, size in sizes.items()))
        with pytest.raises(ValueError, match=name):
            page_plan(_int32([0, 1, 3], device), lengths, _int32([[1], [2]], device), 16, short)
    fits = PagePlan(*(_poison(size, device) for size in sizes.values()))
    with pytest.raises(ValueError, match="block_size"):
        page_plan(_int32([0, 1, 3], device), lengths, _int32([[1], [2]], device), 0, fits)
    with pytest.raises(ValueError, match="block_tables"):
        page_plan(_int32([0, 1, 3], device), lengths, _int32([[1]], device), 16, fits)
