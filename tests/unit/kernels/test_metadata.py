"""Step metadata made on the device, against the row-by-row references and a NumPy account."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.metadata import (
    DecodeLayout,
    PrefillLayout,
    StepBuffers,
    prepare_decode,
    prepare_decode_reference,
    prepare_prefill,
    prepare_prefill_reference,
)

_BLOCK = 16
_POISON = 12345


def _poisoned(rows: int, tokens: int, width: int, device: torch.device) -> StepBuffers:
    buffers = StepBuffers.allocate(rows, tokens, width, device)
    for tensor in _tensors(buffers).values():
        tensor.fill_(_POISON)
    return buffers


def _tensors(buffers: StepBuffers) -> dict[str, torch.Tensor]:
    return {name: getattr(buffers, name) for name in StepBuffers.__dataclass_fields__}


def _assert_equal(got: StepBuffers, expected: StepBuffers) -> None:
    for name, tensor in _tensors(expected).items():
        assert torch.equal(_tensors(got)[name].cpu(), tensor), name


def _decode_staging(
    rng: np.random.Generator, positions: Sequence[int], tables: np.ndarray, changed: Sequence[int]
) -> torch.Tensor:
    """tables: [rows, columns]."""
    rows = len(positions)
    layout = DecodeLayout(rows, len(changed), tables.shape[1] if len(changed) else 0)
    words = np.full(layout.words + 7, _POISON, np.int32)
    words[:4] = layout.header
    words[layout.token_ids] = rng.integers(0, 1000, rows)
    words[layout.positions] = positions
    words[layout.blocks] = [tables[row, position // _BLOCK] for row, position in enumerate(positions)]
    words[layout.changed_rows] = changed
    words[layout.tables] = tables[list(changed)].reshape(-1) if len(changed) else []
    return torch.from_numpy(words)


@pytest.mark.parametrize(
    ("rows", "capacity", "width", "changed"),
    [(1, 1, 1, [0]), (3, 8, 5, [0, 1, 2]), (5, 5, 300, [3]), (4, 6, 20, [])],
)
def test_prepare_decode_fills_every_buffer_as_the_reference_does(
    device: torch.device, rows: int, capacity: int, width: int, changed: list[int]
) -> None:
    rng = np.random.default_rng(rows)
    positions = rng.integers(0, width * _BLOCK, rows).tolist()
    tables = rng.integers(1, 1000, (rows, width)).astype(np.int32)
    staging = _decode_staging(rng, positions, tables, changed)
    got, expected = _poisoned(9, 9, 310, device), _poisoned(9, 9, 310, torch.device("cpu"))
    prepare_decode(staging.to(device), got.cut(capacity, capacity), _BLOCK)
    prepare_decode_reference(staging, expected.cut(capacity, capacity), _BLOCK)
    _assert_equal(got, expected)
    assert torch.equal(got.last_tokens.cpu(), torch.full((9,), _POISON))
    kv_lens = np.array(positions + [-1] * (capacity - rows)) + 1
    assert got.kv_lens[:capacity].tolist() == kv_lens.tolist()
    assert got.cu_kv_seqlens[1 : capacity + 1].tolist() == kv_lens.cumsum().tolist()
    assert got.slots[rows:capacity].tolist() == [-1] * (capacity - rows)
    assert not got.block_tables[rows:capacity].any()


def test_prepare_decode_when_rows_stay_needs_only_their_newest_blocks(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    tables = np.zeros((3, 4), np.int32)
    tables[:, 0] = [7, 8, 9]
    buffers = _poisoned(4, 4, 4, device)
    positions = [14, 15, 3]
    for step in range(40):
        for row, position in enumerate(positions):
            if not tables[row, position // _BLOCK]:
                tables[row, position // _BLOCK] = rng.integers(10, 99)
        staging = _decode_staging(rng, positions, tables, range(3) if step == 0 else [])
        prepare_decode(staging.to(device), buffers, _BLOCK)
        assert np.array_equal(buffers.block_tables[:3].cpu().numpy(), tables)
        expected = [tables[row, p // _BLOCK] * _BLOCK + p % _BLOCK for row, p in enumerate(positions)]
        assert buffers.slots.tolist() == [*expected, -1]
        positions = [position + 1 for position in positions]


def _prefill_staging(
    rng: np.random.Generator, starts: Sequence[int], lengths: Sequence[int], columns: int, sampled: Sequence[int]
) -> torch.Tensor:
    layout = PrefillLayout(len(starts), sum(lengths), columns, len(sampled))
    words = np.full(layout.words + 3, _POISON, np.int32)
    words[:4] = layout.header
    words[layout.cu_seqlens] = np.cumsum([0, *lengths])
    words[layout.starts] = starts
    words[layout.sampled_tokens] = sampled
    words[layout.token_ids] = rng.integers(0, 1000, layout.tokens)
    tables = rng.integers(1, 1000, (layout.rows, columns))
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tables[row, -(-(start + length) // _BLOCK) :] = 0
    words[layout.tables] = tables.reshape(-1)
    return torch.from_numpy(words)


@pytest.mark.parametrize(
    ("starts", "lengths", "columns", "rows", "tokens"),
    [
        ([0], [1], 1, 1, 1),
        ([0, 37, 16], [40, 1, 600], 40, 3, 641),
        ([0, 0, 0, 0], [24, 8, 0, 18], 3, 6, 64),
        ([5], [2100], 140, 2, 4000),
        ([0, 0], [0, 0], 1, 2, 3),
    ],
)
def test_prepare_prefill_fills_every_buffer_as_the_reference_does(
    device: torch.device, starts: list[int], lengths: list[int], columns: int, rows: int, tokens: int
) -> None:
    rng = np.random.default_rng(tokens)
    sampled = [int(end) - 1 for end, length in zip(np.cumsum(lengths), lengths, strict=True) if length]
    staging = _prefill_staging(rng, starts, lengths, columns, sampled)
    got, expected = _poisoned(7, 4100, 300, device), _poisoned(7, 4100, 300, torch.device("cpu"))
    prepare_prefill(staging.to(device), got.cut(rows, tokens), _BLOCK, max(lengths))
    prepare_prefill_reference(staging, expected.cut(rows, tokens), _BLOCK)
    _assert_equal(got, expected)
    kv_lens = np.zeros(rows, int)
    kv_lens[: len(starts)] = np.add(starts, lengths)
    assert got.cu_kv_seqlens[: rows + 1].tolist() == np.cumsum([0, *kv_lens]).tolist()
    assert got.slots[sum(lengths) : tokens].tolist() == [-1] * (tokens - sum(lengths))


def test_prepare_prefill_when_a_token_lies_behind_its_table_writes_it_nowhere(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    staging = _prefill_staging(rng, [0], [40], 2, [39])
    buffers = _poisoned(1, 40, 2, device)
    prepare_prefill(staging.to(device), buffers, _BLOCK, 40)
    assert (buffers.slots[:32] >= _BLOCK).all()
    assert buffers.slots[32:].tolist() == [-1] * 8


def test_layouts_cover_the_staging_without_gaps() -> None:
    decode = DecodeLayout(5, 3, 7)
    parts = [decode.token_ids, decode.positions, decode.blocks, decode.changed_rows, decode.tables]
    prefill = PrefillLayout(5, 90, 7, 4)
    more = [prefill.cu_seqlens, prefill.starts, prefill.sampled_tokens, prefill.token_ids, prefill.tables]
    for layout, slices in ((decode, parts), (prefill, more)):
        ends = [4, *(part.stop for part in slices)]
        assert [part.start for part in slices] == ends[:-1]
        assert ends[-1] == layout.words


def test_cut_when_a_step_does_not_fit_raises() -> None:
    buffers = StepBuffers.allocate(4, 8, 2, "cpu")
    for rows, tokens in ((5, 8), (4, 9), (0, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            buffers.cut(rows, tokens)
