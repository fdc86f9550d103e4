"""The torch attention backend beside attention written out, over random pools."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.attention.backend import AttentionRows, Capabilities
from engine.attention.torch_backend import TorchBackend, split_by_length

HEADS, KV_HEADS, DIM = 6, 2, 8


def build_rows(spans: list[tuple[int, int]], block_size: int, generator: torch.Generator) -> tuple[AttentionRows, int]:
    """Rows of (start, length) over shuffled blocks, and how many blocks the pool needs."""
    needed = [-(-(start + length) // block_size) for start, length in spans]
    order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    return AttentionRows(
        starts=[start for start, _ in spans],
        lengths=[length for _, length in spans],
        block_tables=tables,
        num_decode=sum(1 for _, length in spans if length == 1),
    ), sum(needed) + 1


def written_out(
    q: torch.Tensor, pool: torch.Tensor, rows: AttentionRows, block_size: int, window: int | None
) -> torch.Tensor:
    """Attention token by token, straight from the pool, in float64."""
    out, token = [], 0
    for start, length, table in zip(rows.starts, rows.lengths, rows.block_tables, strict=True):
        for position in range(start, start + length):
            first = 0 if window is None else max(0, position - window + 1)
            places = [(table[p // block_size], p % block_size) for p in range(first, position + 1)]
            kv = torch.stack([pool[block, :, :, offset] for block, offset in places]).double()
            kv = kv.repeat_interleave(HEADS // KV_HEADS, dim=2)  # [seen, 2, heads, dim]
            scores = torch.einsum("hd,shd->hs", q[token].double(), kv[:, 0]) / math.sqrt(DIM)
            out.append(torch.einsum("hs,shd->hd", scores.softmax(-1), kv[:, 1]).flatten())
            token += 1
    return torch.stack(out)


SPANS = {
    "one decode row": [(9, 1)],
    "decode rows in one group": [(3, 1), (8, 1), (15, 1), (0, 1)],
    "decode rows in several groups": [(700, 1), (2, 1), (650, 1), (40, 1), (1, 1), (39, 1)],
    "a prompt": [(0, 23)],
    "a chunk on a prefix inside a block": [(13, 20)],
    "a chunk behind more than a tile of hidden keys": [(1100, 40)],
    "all at once": [(30, 1), (600, 1), (0, 1), (0, 17), (5, 9), (64, 16)],
}


@pytest.mark.parametrize("window", [None, 1, 6, 16, 37])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
def test_attention_when_rows_and_windows_vary_then_equals_attention_written_out(
    spans: list[tuple[int, int]], block_size: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, num_blocks = build_rows(spans, block_size, generator)
    tokens = sum(rows.lengths)
    pool = torch.randn(num_blocks, 2, KV_HEADS, block_size, DIM, generator=generator)
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    q, kv = qkv[:, :HEADS], qkv[:, HEADS:]
    backend = TorchBackend(HEADS, KV_HEADS, DIM, block_size, [None, window], torch.float32)
    plan, layer, before = backend.plan(rows), backend.bind(pool), pool.clone()
    backend.write(plan, layer, kv)
    token = 0
    for start, length, table in zip(rows.starts, rows.lengths, rows.block_tables, strict=True):
        for position in range(start, start + length):
            slot = (table[position // block_size], slice(None), slice(None), position % block_size)
            assert torch.equal(pool[slot], kv[token].view(2, KV_HEADS, DIM))
            before[slot] = pool[slot]
            token += 1
    assert torch.equal(pool, before)  # nothing else was written
    found = backend.attend(plan, layer, q, kv, window)
    expected = written_out(q, pool, rows, block_size, window)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


def test_attention_when_bfloat16_then_is_near_attention_written_out() -> None:
    generator = torch.Generator().manual_seed(2)
    rows, num_blocks = build_rows(SPANS["all at once"], 16, generator)
    pool = torch.randn(num_blocks, 2, KV_HEADS, 16, DIM, generator=generator).to(torch.bfloat16)
    qkv = torch.randn(sum(rows.lengths), HEADS + 2 * KV_HEADS, DIM, generator=generator).to(torch.bfloat16)
    backend = TorchBackend(HEADS, KV_HEADS, DIM, 16, [None], torch.bfloat16)
    plan, layer = backend.plan(rows), backend.bind(pool)
    backend.write(plan, layer, qkv[:, HEADS:])
    found = backend.attend(plan, layer, qkv[:, :HEADS], qkv[:, HEADS:], None)
    expected = written_out(qkv[:, :HEADS], pool, rows, 16, None)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-2)


def test_groups_when_lengths_are_alike_then_one_in_order() -> None:
    assert [g.tolist() for g in split_by_length(np.array([5, 7, 6, 5]))] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_groups_when_lengths_vary_then_hold_every_row_once_and_little_padding(seed: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 130, size=int(generator.integers(1, 33)))
    groups = split_by_length(counts)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(counts)))
    cost = sum(counts[g].max() * len(g) + 32 for g in groups)
    assert cost <= counts.max() * len(counts) + 32  # never worse than one group
    assert cost <= (counts + 32).sum()  # nor than one group each


def test_capabilities_when_nothing_is_declared_then_all_are_false() -> None:
    assert Capabilities() == Capabilities(False, False, False, False, False, False)
