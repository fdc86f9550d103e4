"""Which batch a captured decode graph can run: a pure decision, and the list of sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.runner.batch import BatchRow
from engine.runner.decode_status import DecodeDecision, DecodeGraphStatus, DecodeLimits, capture_sizes, decide
from tests.unit.engine.test_runner import greedy

LIMITS = DecodeLimits(sizes=(1, 4, 8), max_blocks=3, group_tags=("full",))
GROUPS = ("full",)


def rows(count: int, **fields: object) -> list[BatchRow]:
    values: dict[str, object] = {"token_ids": [1], "start": 9, "block_table": [1, 2], "sample": True, **fields}
    return [BatchRow(str(i), sampling=greedy() if values["sample"] else None, **values) for i in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "groups", "status", "size"),
    [
        (rows(1), GROUPS, DecodeGraphStatus.REPLAYED, 1),
        (rows(2), GROUPS, DecodeGraphStatus.REPLAYED, 4),
        (rows(4), GROUPS, DecodeGraphStatus.REPLAYED, 4),
        (rows(8), GROUPS, DecodeGraphStatus.REPLAYED, 8),
        (rows(9), GROUPS, DecodeGraphStatus.BATCH_EXCEEDS_CAPTURE_LIMIT, 0),
        (rows(2, block_table=[1, 2, 3]), GROUPS, DecodeGraphStatus.REPLAYED, 4),
        (rows(2, block_table=[1, 2, 3, 4]), GROUPS, DecodeGraphStatus.BLOCK_TABLE_EXCEEDS_CAPTURE, 0),
        ([*rows(1), *rows(1, token_ids=[1, 2])], GROUPS, DecodeGraphStatus.PREFILL_INPUT, 0),
        (rows(1, sample=False), GROUPS, DecodeGraphStatus.PREFILL_INPUT, 0),
        (rows(1, prompt_logprobs_from=3), GROUPS, DecodeGraphStatus.PREFILL_INPUT, 0),
        (rows(1, token_ids=[]), GROUPS, DecodeGraphStatus.ROWS_PER_REQUEST_MISMATCH, 0),
        ([], GROUPS, DecodeGraphStatus.ROWS_PER_REQUEST_MISMATCH, 0),
        (rows(1, position_ids=[9, 9, 9]), GROUPS, DecodeGraphStatus.POSITION_IDS_MISMATCH, 0),
        (rows(1), ("full", "window"), DecodeGraphStatus.GROUP_TAGS_MISMATCH, 0),
        (rows(1), (), DecodeGraphStatus.GROUP_TAGS_MISMATCH, 0),
    ],
)
def test_decision_when_a_batch_is_given_then_the_first_test_that_fails_decides(
    batch: list[BatchRow], groups: tuple[str, ...], status: DecodeGraphStatus, size: int
) -> None:
    before = repr(batch)
    for _ in range(3):
        assert decide(batch, groups, LIMITS) == DecodeDecision(status, size)
    assert repr(batch) == before


def test_decision_when_graphs_verify_drafts_then_rows_bring_as_many_tokens() -> None:
    verify = replace(LIMITS, tokens_per_row=3)
    assert decide(rows(2, token_ids=[1, 2, 3]), GROUPS, verify).size == 4
    assert decide(rows(2), GROUPS, verify).status is DecodeGraphStatus.ROWS_PER_REQUEST_MISMATCH
    assert decide(rows(2, token_ids=[1] * 4), GROUPS, verify).status is DecodeGraphStatus.PREFILL_INPUT


def test_decision_when_nothing_is_captured_then_every_batch_exceeds_the_limit() -> None:
    none = replace(LIMITS, sizes=())
    assert decide(rows(1), GROUPS, none).status is DecodeGraphStatus.BATCH_EXCEEDS_CAPTURE_LIMIT


@pytest.mark.parametrize(
    ("configured", "most", "expected"),
    [
        ((), 1, (1,)),
        ((), 7, (1, 7)),
        ((), 32, (1, 8, 16, 24, 32)),
        ((), 50, (1, 8, 16, 24, 32, 48, 50)),
        ((), 64, (1, 8, 16, 24, 32, 48, 64)),
        ((9, 2, 9), 16, (2, 9)),
    ],
)
def test_sizes_when_none_are_configured_then_the_default_list_ends_with_the_largest_batch(
    configured: tuple[int, ...], most: int, expected: tuple[int, ...]
) -> None:
    assert capture_sizes(configured, most) == expected


@pytest.mark.parametrize("size", [0, -1, 17])
def test_sizes_when_one_can_never_be_used_then_it_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        capture_sizes((1, size), 16)
