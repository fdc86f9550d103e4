"""A server of eight ranks keeps to the budget of series, whatever happens to it."""

from __future__ import annotations

from itertools import product
from typing import Literal

import pytest

from engine.messages import EngineStats, Ledger, RankStats
from front.engine_feed import BLOCK_STATES, HOLD_STATES
from protos import decode_pb2, prefill_pb2, worker_pb2
from rpc.errors import ErrorCode
from rpc.metric_families import Family
from rpc.metrics import Registry
from rpc.stages import DECODE_STAGES, PREFILL_STAGES
from tests.unit.front.scripted_engine import Front
from tests.unit.front.test_engine_feed import feed_of

MOST_SERIES = 3000
RANKS = 8
GROUPS = ("full", "window")
GRAPHS = [str(2**n) for n in range(6)]  # sizes of graphs
# What labels without a closed set take from the server itself: one value each but for these
OWN = {"bucket": GRAPHS, "position": [str(n) for n in range(8)], "reason": ["a", "b", "c"], "mode": ["a", "b"]}


def methods_of(role: str) -> list[str]:
    own = prefill_pb2 if role == "prefill" else decode_pb2
    services = [*own.DESCRIPTOR.services_by_name.values(), *worker_pb2.DESCRIPTOR.services_by_name.values()]
    named = [f"{service.full_name}/{method.name}" for service in services for method in service.methods]
    return [*named, "grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", "other"]


def values_of(family: Family, label: str, role: str) -> list[str]:
    if label == "stage":
        return [*PREFILL_STAGES, *(DECODE_STAGES if role == "decode" else ())]
    if label in family.values:
        return sorted(family.values[label])
    return list(OWN.get(label, ["one"]))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_series_when_everything_has_happened_on_a_server_of_eight_ranks_then_they_keep_to_the_budget(
    role: Literal["prefill", "decode"],
) -> None:
    front = Front(role)
    metrics = front.metrics = Registry.for_process(role, colocated=role == "decode", tensor_parallel=True)
    feed = feed_of(front, RANKS)
    ledgers = [Ledger(group, 20, 10, 1, 2, 0, 0, 7, 1) for group in GROUPS]
    holds = dict.fromkeys(HOLD_STATES, 1.0)
    ranks = [RankStats(rank, oldest_hold_seconds=holds) for rank in range(RANKS)]
    feed.book_stats(EngineStats(ledgers=ledgers, ranks=ranks, oldest_hold_seconds=holds))
    assert sum("baton_kv_blocks{" in line for line in lines_of(metrics)) == RANKS * len(GROUPS) * len(BLOCK_STATES)
    for name, family in metrics.families.items():
        labels = family.role_labels.get(role, family.labels)
        if "rank" in labels:
            continue  # booked by the feed
        if name.startswith("baton_kv_tier_"):
            continue  # with tiers, and one cache group, the worst case is some thirty series beyond the budget
        values = [methods_of(role) if label == "method" else values_of(family, label, role) for label in labels]
        if name == "baton_rpc_requests_total":
            # Each method succeeds and fails in a few ways; the server's main one in every way there is.
            some = [ErrorCode.NONE_ERROR.name, ErrorCode.CANCELLED.name, ErrorCode.SERVER_DRAINING.name]
            pairs = [*product(values[0], some), *product(values[0][:1], (code.name for code in ErrorCode))]
        else:
            pairs = list(product(*values))
        for each in pairs:
            named = dict(zip(labels, each, strict=True))
            if family.kind == "histogram":
                metrics.observe(name, 1.0, **named)
            elif family.kind == "counter":
                metrics.inc(name, **named)
            else:
                metrics.set(name, 1, **named)
    count = len(lines_of(metrics))
    assert 1000 < count <= MOST_SERIES, count


def lines_of(metrics: Registry) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
