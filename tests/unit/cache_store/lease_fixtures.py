"""A lease table with a clock that tests move."""

from __future__ import annotations

from collections import Counter

from cache_store.geometry.layout import GroupLayout
from cache_store.serving.lease import LeaseTable, Words
from cache_store.serving.reader import Reader, WantedGroup
from protos import common_pb2

LAYOUT = GroupLayout.of("full", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float16")
LEASE_S = 30.0
STALL_S = 60.0
REMEMBER_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def ns(self) -> int:
        return int(self.now * 1e9)


class Counts:
    """An observer that sums counters by (name, label values) and keeps samples by name."""

    def __init__(self) -> None:
        self.counters: Counter[tuple[str, ...]] = Counter()

    def __call__(self, name: str, value: float = 1, **labels: str) -> None:
        self.counters[(name, *labels.values())] += 1 if not name.endswith("_total") else int(value)


def make_table(
    clock: Clock,
    observe: Counts | None = None,
    layouts: tuple[GroupLayout, ...] = (LAYOUT,),
    words: Words | None = None,
) -> LeaseTable:
    return LeaseTable(
        layouts,
        lease_seconds=LEASE_S,
        load_stall_s=STALL_S,
        remember_s=REMEMBER_S,
        max_remembered=100,
        clock=clock,
        clock_ns=clock.ns,
        observe=observe or Counts(),
        words=words,
    )


def prefill_result(token_id: int = 7) -> common_pb2.PrefillResult:
    return common_pb2.PrefillResult(
        first_token=common_pb2.TokenOutput(index=0, token_id=token_id),
        cached_tokens=0,
        prefill_cuda_graph_status="not_requested",
    )


def wanted(first: int = 0, count: int = 3, layout: GroupLayout = LAYOUT) -> tuple[WantedGroup, ...]:
    return (WantedGroup(layout, first, count),)


def publish_all(table: LeaseTable, key: str, blocks: int = 3) -> None:
    for layer in range(LAYOUT.num_layers):
        table.publish(key, "full", layer, blocks)


def drain(reader: Reader, now: float) -> list[tuple[int, int, int]]:
    """Takes and sends everything that is ready: (layer, first block, count) of each event."""
    runs = []
    while (run := reader.next_run()) is not None:
        reader.sent(run.count, now)
        runs.append((run.layer, run.first, run.count))
    return runs
