"""Invariants 12 and 13 of docs/cuda_graphs.md: the decision is pure, and each refusal has its status."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from engine.runner.batch import BatchRow
from engine.runner.prefill_graph.decision import Decision, ReplayLimits, bucket_for, decide
from engine.runner.prefill_graph.metadata import metadata_problem
from rpc.graph_status import INIT_STATUSES
from rpc.graph_status import PrefillGraphStatus as Status

LIMITS = ReplayLimits(init=Status.CAPTURED, buckets=(4, 16, 64), max_requests=3, max_padding_ratio=0.25, block_size=16)


def row(tokens: int, start: int = 0, sample: bool = True, **changes) -> BatchRow:
    table = list(range(1, 2 + (max(0, start) + max(0, tokens)) // 16))
    return BatchRow(f"r{tokens}", [5] * tokens, start, table, sample, **changes)


CASES = [
    ("one prompt that fits", [row(14)], {}, Status.REPLAYED, 16),
    ("exact fit", [row(16)], {}, Status.REPLAYED, 16),
    ("several prompts", [row(4), row(5), row(4)], {}, Status.REPLAYED, 16),
    ("the smallest bucket", [row(3)], {}, Status.REPLAYED, 4),
    ("as many tokens as there can be", [row(60), row(4)], {}, Status.REPLAYED, 64),
    ("multimodal", [row(14), row(1, multimodal=True)], {}, Status.MULTIMODAL_NOT_SUPPORTED, 0),
    ("no tokens", [row(14), row(0)], {}, Status.INPUT_METADATA_INVALID, 0),
    ("no rows", [], {}, Status.INPUT_METADATA_INVALID, 0),
    ("a negative start", [row(14, start=-1)], {}, Status.INPUT_METADATA_INVALID, 0),
    ("too few blocks", [BatchRow("r", [5] * 17, 0, [1], True)], {}, Status.INPUT_METADATA_INVALID, 0),
    ("too few position ids", [row(2, position_ids=(0, 1))], {"position_axes": 3}, Status.INPUT_METADATA_INVALID, 0),
    ("unwanted position ids", [row(2, position_ids=(0, 1))], {}, Status.INPUT_METADATA_INVALID, 0),
    ("position ids", [row(4, position_ids=range(12))], {"position_axes": 3}, Status.REPLAYED, 4),
    ("a prefix-cache hit", [row(14), row(2, start=16)], {}, Status.PREFIX_NOT_SUPPORTED, 0),
    ("a decode row", [row(1, start=40), row(14)], {}, Status.PREFIX_NOT_SUPPORTED, 0),
    ("too many prompts", [row(4)] * 4, {}, Status.REQUEST_CAPACITY_EXCEEDED, 0),
    ("too many tokens", [row(60), row(5)], {}, Status.INPUT_TOKENS_EXCEED_CAPTURE_LIMIT, 0),
    ("a chunk", [row(16, sample=False)], {}, Status.INPUT_TOKENS_EXCEED_CAPTURE_LIMIT, 0),
    ("much padding", [row(11)], {}, Status.PADDING_RATIO_EXCEEDED, 0),
    ("much padding, allowed", [row(11)], {"max_padding_ratio": 1.0}, Status.REPLAYED, 16),
    ("padding at the limit", [row(12)], {}, Status.REPLAYED, 16),
    ("no padding allowed", [row(15)], {"max_padding_ratio": 0.0}, Status.PADDING_RATIO_EXCEEDED, 0),
]


@pytest.mark.parametrize(("rows", "changes", "status", "bucket"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_decision_when_a_batch_is_given_then_its_status_and_bucket_follow(rows, changes, status, bucket):
    decision = decide(rows, dataclasses.replace(LIMITS, **changes))
    assert (decision.status, decision.bucket) == (status, bucket)
    assert decision.replay is (status is Status.REPLAYED)


@pytest.mark.parametrize("init", [status for status in INIT_STATUSES if status is not Status.CAPTURED])
def test_decision_when_nothing_is_captured_then_the_engines_status_is_the_batchs(init):
    for _, rows, _, _, _ in CASES:
        assert decide(rows, dataclasses.replace(LIMITS, init=init)) == Decision(init)


def test_decisions_when_put_together_then_they_cover_every_status_of_a_request():
    pure = {decide(rows, dataclasses.replace(LIMITS, **changes)).status for _, rows, changes, _, _ in CASES}
    pure |= {decide([], dataclasses.replace(LIMITS, init=init)).status for init in INIT_STATUSES}
    assert set(Status) - pure == {Status.CAPTURED, Status.ERROR}  # at start-up; by the runner, when preparing raised


def test_decision_when_several_tests_fail_then_the_first_in_order_decides():
    worst = [row(70, start=16, sample=False, multimodal=True)] * 5
    expected = [
        ({"multimodal": False}, Status.MULTIMODAL_NOT_SUPPORTED),
        ({"block_table": [1] * 9}, Status.INPUT_METADATA_INVALID),
        ({"start": 0}, Status.PREFIX_NOT_SUPPORTED),
    ]
    rows = [dataclasses.replace(item, block_table=[]) for item in worst]
    for repair, status in expected:
        assert decide(rows, LIMITS).status is status
        rows = [dataclasses.replace(item, **repair) for item in rows]
    assert decide(rows, LIMITS).status is Status.REQUEST_CAPACITY_EXCEEDED
    assert decide(rows[:3], LIMITS).status is Status.INPUT_TOKENS_EXCEED_CAPTURE_LIMIT


def test_decision_when_asked_again_then_nothing_has_changed(caplog):
    caplog.set_level(logging.DEBUG)
    for _, rows, changes, _, _ in CASES:
        limits = dataclasses.replace(LIMITS, **changes)
        before = [dataclasses.replace(item) for item in rows]
        assert decide(rows, limits) == decide(rows, limits) == decide(rows, limits)
        assert rows == before
    assert not caplog.records


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 4), (4, 4), (5, 16), (64, 64), (65, None)])
def test_bucket_when_tokens_are_given_then_it_is_the_smallest_that_holds_them(tokens, bucket):
    assert bucket_for(tokens, LIMITS.buckets) == bucket


# -- 13: what lies on the device --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "device_type", "problem"),
    [
        (torch.zeros(5, dtype=torch.int32), "cpu", ""),
        (torch.zeros(6, dtype=torch.int32), "cpu", ""),
        (None, "cpu", "not there"),
        (torch.zeros(5, dtype=torch.int32), "cuda", "on cpu, not on cuda"),
        (torch.zeros(5, dtype=torch.int64), "cpu", "int64, not int32"),
        (torch.zeros(10, dtype=torch.int32)[::2], "cpu", "not contiguous"),
        (torch.zeros(4, dtype=torch.int32), "cpu", "holds 4 numbers, needed are 5"),
    ],
)
def test_device_metadata_when_a_graph_cannot_read_it_then_the_reason_is_told(tensor, device_type, problem):
    found = metadata_problem("cu_seqlens", tensor, least=5, device_type=device_type)
    assert problem in found
    assert bool(found) is bool(problem)
