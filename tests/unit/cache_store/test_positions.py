"""Blocks of unequal sizes: each byte of a decode block comes from the token that belongs there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.positions import Positions
from cache_store.geometry.rows import Rows
from cache_store.geometry.tp_mapping import head_range, read_plan
from cache_store.serving.reader import WantedGroup
from rpc.block_sizes import block_sizes_fit
from rpc.errors import BatonError, ErrorCode
from tests.extent import extent
from tests.unit.cache_store.lease_fixtures import Clock, make_table

SIZES = (4, 8, 16, 64)
HEAD_DIM = 2
POOL = 80  # blocks of either side

UNEQUAL = [(p, d) for p in SIZES for d in SIZES if p != d]


def pool_of(layout: GroupLayout, whole: np.ndarray, ids: list[int], heads: tuple[int, int], fill: int) -> np.ndarray:
    """uint8 [POOL * block_bytes] with the tokens of `whole`, int32 [2, heads, tokens, HEAD_DIM], in blocks `ids`, and
    bytes `fill` everywhere else."""
    size = layout.block_size
    blocks = np.full((POOL, 2, layout.num_kv_heads, size, HEAD_DIM), fill * 0x01010101, np.int32)
    part = whole[:, heads[0] : heads[1]]
    for index, block in enumerate(ids):
        tokens = part[:, :, index * size : (index + 1) * size]
        blocks[block, :, :, : tokens.shape[2]] = tokens
    return blocks.reshape(-1).view(np.uint8)


def table(memory: np.ndarray, rows: Rows) -> np.ndarray:
    return memory.reshape(-1, rows.unit_bytes)


@st.composite
def cases(draw: Any) -> tuple[int, int, int, int, int, int, int]:
    """Block sizes, tokens of the prompt, first wanted block, heads, ranks."""
    p_size, d_size = draw(st.sampled_from(UNEQUAL))
    tokens = draw(st.integers(1, 4 * max(p_size, d_size)))
    first = draw(st.integers(0, -(-tokens // d_size)))
    heads = draw(st.sampled_from([1, 2, 4]))
    return p_size, d_size, tokens, first, heads, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))


@settings(deadline=None, derandomize=True, max_examples=extent(100, 250))
@given(cases(), st.randoms(use_true_random=False))
def test_rows_when_sizes_and_ranks_differ_then_each_byte_is_written_once_with_that_of_its_token(
    case: tuple[int, int, int, int, int, int, int], random: Any
) -> None:
    p_size, d_size, tokens, first, heads, p_tp, d_tp = case
    positions = Positions(p_size, d_size, tokens)
    whole = np.arange(2 * heads * tokens * HEAD_DIM, dtype=np.int32).reshape(2, heads, tokens, HEAD_DIM)
    theirs = random.sample(range(POOL), -(-tokens // p_size))
    own = random.sample(range(POOL), -(-tokens // d_size) - first)
    blocks = list(range(first, first + len(own)))
    for rank in range(d_tp):
        held = head_range(heads, d_tp, rank)
        target = GroupLayout.of(
            "full", num_layers=1, num_kv_heads=held[1] - held[0], head_dim=HEAD_DIM, block_size=d_size, dtype="float32",
            total_kv_heads=heads,
        )  # fmt: skip
        got = pool_of(target, whole, [], held, 0x6E)
        writes = np.zeros(got.size, np.uint8)
        for share in read_plan(heads, d_tp, rank, p_tp):
            there = head_range(heads, p_tp, share.peer_rank)
            source = GroupLayout.of(
                "full", num_layers=1, num_kv_heads=there[1] - there[0], head_dim=HEAD_DIM, block_size=p_size,
                dtype="float32", total_kv_heads=heads,
            )  # fmt: skip
            memory = pool_of(source, whole, theirs, there, 0x5D)
            wanted = WantedGroup(source, first, len(own), share.source_count, share.source_id, positions)
            read = wanted.rows(0, blocks, theirs)
            size = target.block_bytes // share.dest_count
            assert wanted.piece_bytes == size
            count = target.num_kv_heads // share.dest_count
            write = positions.target_rows("full", 0, own, size, count, share.dest_count, share.dest_id)
            assert (read.unit_bytes, len(read.numbers)) == (write.unit_bytes, len(write.numbers))
            assert read.nbytes == size * len(own)
            payload = table(memory, read)[read.numbers]
            table(got, write)[write.numbers] = payload
            np.add.at(table(writes, write), write.numbers, 1)
            # The payload of a block is the share of that block as it lies at the receiver.
            ranges = target.partition_ranges(share.dest_count, share.dest_id)
            for place, block in enumerate(own):
                bytes_of = got[block * target.block_bytes :][: target.block_bytes]
                part = np.concatenate([bytes_of[start:stop] for start, stop in ranges])
                assert part.tobytes() == payload.tobytes()[place * size : (place + 1) * size]
        expected = pool_of(target, whole[:, :, first * d_size :], own, held, 0x6E)
        written = np.zeros((POOL, target.block_bytes), np.uint8)
        written[own] = 1
        assert np.array_equal(writes, written.reshape(-1))
        tokens_of = np.zeros((POOL, 2, target.num_kv_heads, d_size, HEAD_DIM), bool)
        for place, block in enumerate(own):
            tokens_of[block, :, :, : max(0, min(d_size, tokens - (first + place) * d_size))] = True
        valid = tokens_of.repeat(4, axis=-1).reshape(-1)
        assert np.array_equal(got[valid], expected[valid])
        # What is beyond the prompt comes out of the request's own blocks, never out of others.
        beyond = got.reshape(POOL, -1)[own].reshape(-1)[~valid.reshape(POOL, -1)[own].reshape(-1)].view(np.int32)
        assert set(beyond.tolist()) <= {*whole.reshape(-1).tolist(), 0x5D * 0x01010101}
        if d_size > p_size and tokens % p_size == 0:
            assert set(beyond.tolist()) <= set(whole.reshape(-1).tolist())


@settings(deadline=None, derandomize=True, max_examples=extent(60, 150))
@given(st.sampled_from(UNEQUAL), st.data())
def test_reader_when_layers_advance_in_any_order_then_each_block_is_handed_out_once_and_not_before_its_tokens(
    sizes: tuple[int, int], data: Any
) -> None:
    p_size, d_size = sizes
    layers = 3
    made = GroupLayout.of(
        "full", num_layers=layers, num_kv_heads=1, head_dim=HEAD_DIM, block_size=p_size, dtype="float32"
    )
    tokens = data.draw(st.integers(1, 3 * max(sizes)))
    first = data.draw(st.integers(0, -(-tokens // d_size)))
    table = make_table(Clock(), layouts=(made,))
    count = made.num_blocks(tokens)
    ready = data.draw(st.integers(0, tokens))
    table.admit("r#0.00000000", 1, tokens, {"full": list(range(count))}, ready)
    wanted = WantedGroup(made, first, -(-tokens // d_size) - first, positions=Positions(p_size, d_size, tokens))
    beyond = replace(wanted, num_blocks=wanted.num_blocks + 1)
    with pytest.raises(BatonError) as caught:
        table.open_load("r#0.00000000", None, tokens, (beyond,), 4096)
    assert caught.value.code is ErrorCode.KV_STALE_REFERENCE
    reader = table.open_load("r#0.00000000", None, tokens, (wanted,), data.draw(st.sampled_from([1, 4096, 1 << 20])))
    assert reader is not None
    have = [tokens if ready == tokens else ready // p_size * p_size] * layers
    handed: list[list[int]] = [[] for _ in range(layers)]
    while True:
        while (run := reader.next_run()) is not None:
            taken = run.layer
            while taken == run.layer or (data.draw(st.booleans()) and reader.take_same(run, taken)):
                for block in range(run.first, run.first + run.count):
                    assert have[taken] >= min((block + 1) * d_size, tokens)
                    handed[taken].append(block)
                taken += 1
        for layer in range(layers):  # nothing that is ready is held back
            assert handed[layer] == [
                block for block in range(first, wanted.end) if have[layer] >= min((block + 1) * d_size, tokens)
            ]
        behind = [layer for layer in range(layers) if have[layer] < tokens]
        if not behind:
            break
        layer = data.draw(st.sampled_from(behind))
        upto = data.draw(st.integers(have[layer] // p_size + 1, count))
        table.publish("r#0.00000000", "full", layer, upto)
        have[layer] = min(upto * p_size, tokens)
    assert reader.exhausted()


@pytest.mark.parametrize(("p_size", "d_size"), UNEQUAL)
def test_ready_and_touched_when_tokens_are_counted_one_by_one_then_they_are_the_same(p_size: int, d_size: int) -> None:
    for tokens in {1, 3, p_size, p_size + 1, d_size, d_size + 1, 64, 65, 128, 150, 256}:
        positions = Positions(p_size, d_size, tokens)
        theirs, own = -(-tokens // p_size), -(-tokens // d_size)
        assert positions.source_blocks == theirs
        for ready in range(theirs + 1):
            have = min(ready * p_size, tokens)
            whole = sum(1 for block in range(own) if have >= min((block + 1) * d_size, tokens))
            assert positions.ready(ready) == whole, (tokens, ready)
        for block in range(own):
            holds = range(block * d_size, min((block + 1) * d_size, tokens))
            assert positions.touched([block]) == sorted({token // p_size for token in holds})
        for first in range(own):
            blocks = list(range(first, own))
            assert positions.count_touched(blocks) == len(positions.touched(blocks))
    assert positions.count_touched([]) == 0


def test_block_sizes_when_neither_is_a_multiple_of_the_other_then_they_do_not_fit() -> None:
    assert all(block_sizes_fit(p, d) for p in SIZES for d in SIZES)
    for pair in ((16, 24), (24, 16), (0, 16), (16, 0), (0, 0), (16, 2048), (3, 1000)):
        assert not block_sizes_fit(*pair), pair
        with pytest.raises(ValueError, match="fit"):
            Positions(*pair, 10)
    assert block_sizes_fit(4096, 4096), "equal sizes always"


def test_between_when_sizes_are_equal_then_there_is_nothing_to_convert() -> None:
    assert Positions.between(16, 16, 100) is None
    assert Positions.between(16, 32, 100) == Positions(16, 32, 100)


def test_document_when_it_shows_examples_then_they_are_what_is_computed() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = text.partition("## Unequal block sizes")[2].partition("\n## ")[0]
    rows = [[int(number) for number in re.findall(r"\d+", line)] for line in section.splitlines() if "–" in line]
    assert len(rows) == 8
    for p_size, d_size, tokens, block, begin, end, *touched, ready in rows:
        positions = Positions(p_size, d_size, tokens)
        assert (begin, end) == (block * d_size, min((block + 1) * d_size, tokens) - 1)
        assert positions.touched([block]) == touched
        assert positions.ready(ready) > block >= positions.ready(ready - 1)
