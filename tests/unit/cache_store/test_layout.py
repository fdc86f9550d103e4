"""Geometry of cache groups, and the pools over it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_store.geometry.layout import AgentIdentity, GroupLayout
from cache_store.memory.pool import HostKvPool
from cache_store.memory.torch_pool import TorchKvPool

LAYOUT = GroupLayout.of("full", num_layers=2, num_kv_heads=4, head_dim=8, block_size=16, dtype="bfloat16")


def test_layout_of_gives_the_bytes_of_keys_and_values() -> None:
    assert LAYOUT.block_bytes == 2 * 4 * 16 * 8 * 2


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (160, 10)])
def test_num_blocks_rounds_up(tokens: int, blocks: int) -> None:
    assert LAYOUT.num_blocks(tokens) == blocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"dtype": "int8"}, "dtype"),
        ({"block_bytes": 1}, "block_bytes"),
    ],
)
def test_layout_that_does_not_add_up_is_refused_by_name(change: dict[str, object], message: str) -> None:
    fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        GroupLayout(**{**fields, **change})


def test_partition_ranges_of_all_heads_is_the_whole_block() -> None:
    assert LAYOUT.partition_ranges(1, 0) == ((0, LAYOUT.block_bytes),)


def test_partition_ranges_of_every_share_cover_the_block_once() -> None:
    marks = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
    for index in range(4):
        for start, stop in LAYOUT.partition_ranges(4, index):
            marks[start:stop] += 1
    assert (marks == 1).all()


@pytest.mark.parametrize(("count", "index"), [(0, 0), (2, 2), (3, 0)])
def test_partition_ranges_that_do_not_exist_are_refused(count: int, index: int) -> None:
    with pytest.raises(ValueError):
        LAYOUT.partition_ranges(count, index)


def test_identity_refuses_a_tag_twice_and_a_rank_outside() -> None:
    with pytest.raises(ValueError, match="tag"):
        AgentIdentity("e", "m", "bfloat16", (LAYOUT, LAYOUT))
    with pytest.raises(ValueError, match="rank"):
        AgentIdentity("e", "m", "bfloat16", (LAYOUT,), tp_size=2, rank=2)


def test_host_pool_piece_aliases_the_memory_of_its_blocks() -> None:
    buffers = [np.zeros(5 * LAYOUT.block_bytes, dtype=np.uint8) for _ in range(2)]
    pool = HostKvPool([LAYOUT], {"full": buffers})
    view = pool.piece("full", 1, 2, count=2)
    view[:] = bytes([7]) * view.nbytes
    assert pool.num_blocks("full") == 5
    expected = np.zeros((5, LAYOUT.block_bytes), dtype=np.uint8)
    expected[2:4] = 7
    assert (buffers[1].reshape(5, -1) == expected).all()
    assert not buffers[0].any()


@pytest.mark.parametrize(("block", "count"), [(-1, 1), (5, 1), (4, 2), (0, 0)])
def test_host_pool_piece_outside_raises(block: int, count: int) -> None:
    pool = HostKvPool([LAYOUT], {"full": [bytearray(5 * LAYOUT.block_bytes)] * 2})
    with pytest.raises(IndexError):
        pool.piece("full", 0, block, count)


@pytest.mark.parametrize(
    "layers",
    [
        [bytearray(5 * LAYOUT.block_bytes)],
        [bytearray(5 * LAYOUT.block_bytes), bytearray(4 * LAYOUT.block_bytes)],
        [bytearray(5 * LAYOUT.block_bytes - 1)] * 2,
        [bytes(5 * LAYOUT.block_bytes)] * 2,
    ],
)
def test_host_pool_over_memory_that_does_not_fit_is_refused(layers: list[object]) -> None:
    with pytest.raises(ValueError, match="full"):
        HostKvPool([LAYOUT], {"full": layers})


def test_torch_pool_piece_is_the_block_of_the_tensor() -> None:
    tensors = [torch.zeros(3, 2, 4, 16, 8, dtype=torch.bfloat16) for _ in range(2)]
    pool = TorchKvPool([LAYOUT], {"full": tensors})
    source = torch.randn(2, 4, 16, 8).to(torch.bfloat16)
    pool.piece("full", 1, 2)[:] = source.view(-1).view(torch.uint8).numpy().data
    assert torch.equal(tensors[1][2], source)
    assert not tensors[1][:2].any() and not tensors[0].any()


def test_torch_pool_over_another_shape_or_dtype_is_refused() -> None:
    for tensor in (torch.zeros(3, 2, 4, 8, 16, dtype=torch.bfloat16), torch.zeros(3, 2, 4, 16, 8)):
        with pytest.raises(ValueError, match="tensor"):
            TorchKvPool([LAYOUT], {"full": [tensor, tensor]})
