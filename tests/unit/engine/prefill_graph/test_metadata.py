"""Invariant 14 of docs/cuda_graphs.md, and the layout of everything else that a replay reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.runner.batch import BatchRow
from engine.runner.prefill_graph.metadata import MetadataFailure, ReplayMetadata, prepare_prefill_replay_metadata
from engine.runner.prefill_graph.staging import GroupShape, HostStaging, ReplayLayout


def arrays(bucket: int, requests: int, **sizes: int) -> ReplayMetadata:
    wanted = {
        "input_lengths": requests + 1,
        "cu_seqlens": requests + 2,
        "cu_kv_seqlens": requests + 2,
        "padding_offset": bucket,
        **sizes,
    }
    return ReplayMetadata(**{name: np.full(size, -7, np.int32) for name, size in wanted.items()})


@pytest.mark.parametrize(
    ("lengths", "bucket", "requests"),
    [
        *[([3] * n, 24, 8) for n in range(1, 9)],
        ([1], 1, 1),
        ([1], 64, 8),
        ([64], 64, 8),
        ([24, 32], 64, 8),
        ([32, 32], 64, 8),
        ([16] * 4, 64, 8),
        ([16] * 4, 160, 4),
        ([1] * 1024, 1024, 1024),
    ],
)
def test_metadata_when_prompts_fit_then_slots_sentinel_and_offsets_follow(lengths, bucket, requests):
    out = arrays(bucket, requests)
    assert prepare_prefill_replay_metadata(lengths, bucket, requests, out) is None
    expected = [*lengths, *[0] * (requests - len(lengths)), bucket - sum(lengths)]
    assert out.input_lengths.tolist() == expected
    assert out.cu_seqlens.tolist() == out.cu_kv_seqlens.tolist() == np.cumsum([0, *expected]).tolist()
    packed_offset, offsets = 0, []
    for slot, length in enumerate(expected):
        offsets += [slot * bucket - packed_offset] * length
        packed_offset += length
    assert packed_offset == bucket
    assert out.padding_offset.tolist() == offsets


def test_metadata_when_arrays_are_longer_then_what_lies_behind_stays():
    out = arrays(8, 2, input_lengths=9, cu_seqlens=9, cu_kv_seqlens=9, padding_offset=20)
    assert prepare_prefill_replay_metadata([3], 8, 2, out) is None
    assert out.input_lengths.tolist() == [3, 0, 5] + [-7] * 6
    assert out.cu_seqlens.tolist() == [0, 3, 3, 8] + [-7] * 5
    assert out.padding_offset.tolist() == [0] * 3 + [13] * 5 + [-7] * 12


@pytest.mark.parametrize(
    ("lengths", "sizes", "reason"),
    [
        ([3], {"input_lengths": 2}, "input_lengths"),
        ([3], {"cu_seqlens": 3}, "cu_seqlens"),
        ([3], {"cu_kv_seqlens": 3}, "cu_kv_seqlens"),
        ([3], {"padding_offset": 7}, "padding_offset"),
        ([0], {}, "0 tokens"),
        ([3, 0], {}, "0 tokens"),
        ([3, -1], {}, "-1 tokens"),
        ([4, 5], {}, "9 tokens"),
        ([1, 1, 1], {}, "3 prompts"),
        ([], {}, "0 prompts"),
    ],
)
def test_metadata_when_it_cannot_be_laid_out_then_a_failure_says_why_and_nothing_is_written(lengths, sizes, reason):
    out = arrays(8, 2, **sizes)
    failure = prepare_prefill_replay_metadata(lengths, 8, 2, out)
    assert isinstance(failure, MetadataFailure)
    assert reason in failure.reason
    for name in ("input_lengths", "cu_seqlens", "cu_kv_seqlens", "padding_offset"):
        assert set(getattr(out, name).tolist()) <= {-7}


# -- the whole buffer -------------------------------------------------------------------------------------------

GROUPS = {"small": GroupShape(4, (90, 91, 92, 93), 94), "large": GroupShape(8, (50, 51), 52)}


def staging(axes: int = 0) -> HostStaging:
    layout = ReplayLayout(bucket=16, max_requests=3, pad_token_id=7, groups=GROUPS, position_axes=axes)
    return HostStaging(layout, torch.full((layout.words,), -9, dtype=torch.int32))


def rows(*lengths: int, axes: int = 0) -> list[BatchRow]:
    return [
        BatchRow(f"r{n}", list(range(100 * n, 100 * n + length)), 0, [], True, position_ids=range(axes * length))
        for n, length in enumerate(lengths, 1)
    ]


def test_staging_when_prompts_are_laid_out_then_padding_is_the_sentinels_and_goes_to_scratch():
    host = staging()
    tables = {"small": [[3, 5], [8, 11, 14]], "large": [[4], [6, 9]]}
    for _ in range(2):  # the second time over what the first one left
        assert host.fill(rows(5, 6), tables) is None
    found = host.arrays
    assert found.token_ids.tolist() == [100, 101, 102, 103, 104, 200, 201, 202, 203, 204, 205] + [7] * 5
    assert found.positions.tolist() == [*range(5), *range(6), *range(5)]
    assert found.last_tokens.tolist() == [4, 10, 0]
    assert found.overridden.tolist() == [0] * 16
    # Empty slots point at block 0, the sentinel at scratch; blocks behind a prompt's own tokens are not there.
    assert found.block_tables["small"].tolist() == [[3, 5, 0, 0], [8, 11, 0, 0], [0] * 4, [90, 91, 92, 93]]
    assert found.block_tables["large"].tolist() == [[4, 0], [6, 0], [0, 0], [50, 51]]
    for tag, group in GROUPS.items():
        size = group.block_size
        own = [[*tables[tag][0]], [*tables[tag][1]], list(group.scratch)]
        expected = [
            own[row][position // size] * size + position % size
            for row, length in enumerate((5, 6, 5))
            for position in range(length)
        ]
        assert found.slots[tag].tolist() == expected
        assert found.slots[tag].dtype is torch.int64
        assert found.slots[tag].data_ptr() % 8 == 0


def test_staging_when_the_bucket_is_full_then_nothing_goes_to_scratch():
    host = staging()
    assert host.fill(rows(16), {"small": [[1, 2, 3, 4]], "large": [[1, 2]]}) is None
    assert host.arrays.input_lengths.tolist() == [16, 0, 0, 0]
    assert set((host.arrays.slots["small"] // 4).tolist()) == {1, 2, 3, 4}
    assert host.arrays.block_tables["small"][3].tolist() == [90, 91, 92, 93]


def test_staging_when_a_batch_cannot_be_laid_out_then_it_says_so():
    assert isinstance(staging().fill(rows(9, 9), {"small": [[], []], "large": [[], []]}), MetadataFailure)


@pytest.mark.parametrize("block", [0, -1, 94, 2**31 - 1])
def test_staging_when_a_prompts_block_is_outside_the_pool_then_it_says_so(block):
    failure = staging().fill(rows(5, 6), {"small": [[3, 5], [8, block, 14]], "large": [[4], [6]]})
    assert isinstance(failure, MetadataFailure)
    failure = staging().fill(rows(5, 6), {"small": [[3], [8, 9]], "large": [[4], [6]]})
    assert isinstance(failure, MetadataFailure)
    assert "small" in failure.reason


def test_staging_when_tokens_have_several_positions_then_only_the_padded_tail_is_zero():
    host = staging(axes=3)
    tables = {"small": [[1, 2], [3]], "large": [[1], [2]]}
    assert host.fill(rows(5, 2, axes=3), tables) is None
    first, second = np.arange(15).reshape(3, 5), np.arange(6).reshape(3, 2)
    expected = np.concatenate([first, second, np.zeros((3, 9), int)], axis=1)
    assert np.array_equal(host.arrays.position_ids.numpy(), expected)


def test_staging_when_views_are_taken_then_no_two_share_a_word():
    layout = ReplayLayout(bucket=13, max_requests=5, pad_token_id=0, groups=GROUPS, position_axes=3)
    buffer = torch.zeros(layout.words, dtype=torch.int32)
    views = layout.views(buffer)
    single = [views.input_lengths, views.cu_seqlens, views.cu_kv_seqlens, views.padding_offset, views.token_ids]
    single += [views.positions, views.last_tokens, views.overridden, views.position_ids]
    for view in [*single, *views.slots.values(), *views.block_tables.values()]:
        assert view.data_ptr() % 16 == 0
        assert view.is_contiguous()
        view += 1
    # Every word was counted up once, but for the high halves of the 64-bit numbers and the gaps between arrays.
    assert set(buffer.tolist()) == {0, 1}
    words = sum(view.numel() for view in [*single, *views.slots.values(), *views.block_tables.values()])
    assert int(buffer.sum()) == words
