"""The mirror of the prefix cache and its subscribers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import KvEvent
from front.kv_index import QUEUE_BATCHES, KvIndex
from protos import worker_pb2
from rpc.errors import BatonError, ErrorCode


def name(number: int) -> str:
    return f"{number:032x}"


def replay(events: list[worker_pb2.KvCacheEvent]) -> dict[bytes, bytes]:
    """What a subscriber holds after `events`: block to parent."""
    held: dict[bytes, bytes] = {}
    for event in events:
        if event.cleared:
            held.clear()
        for block in event.removed:
            held.pop(block, None)
        parent = event.parent
        for block in event.stored:
            held[block] = parent
            parent = block
    return held


def test_snapshot_when_chains_share_a_prefix_then_every_parent_comes_before_its_children() -> None:
    index = KvIndex()
    index.apply([KvEvent(stored=[name(1), name(2), name(3)])])
    index.apply([KvEvent(stored=[name(4)], parent=name(2)), KvEvent(stored=[name(9)])])
    index.apply([KvEvent(removed=[name(3)])])
    events = [event for batch in index.snapshot() for event in batch]
    assert events[0].cleared
    held = replay(events)
    hexed = {block.hex(): parent.hex() for block, parent in held.items()}
    assert hexed == {name(1): "", name(2): name(1), name(4): name(2), name(9): ""}
    seen = {b""}
    for block, parent in held.items():
        assert parent in seen
        seen.add(block)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 20)), max_size=60), st.integers(0, 60))
def test_subscribe_when_changes_follow_the_snapshot_then_the_copy_equals_the_index(
    steps: list[tuple[bool, int, int]], cut: int
) -> None:
    async def run() -> None:
        index = KvIndex()
        events = [
            KvEvent(stored=[name(block)], parent=name(parent) if parent else "") if store
            else KvEvent(removed=[name(block)])
            for store, block, parent in steps
        ]  # fmt: skip
        for event in events[:cut]:
            index.apply([event])
        subscription = index.subscribe()
        received = list(await anext(subscription))
        for event in events[cut:]:
            index.apply([event])
            received += await anext(subscription)
        await subscription.aclose()
        final = [event for batch in index.snapshot() for event in batch]
        assert replay(received) == replay(final)

    asyncio.run(run())


async def test_subscribe_when_the_reader_is_too_slow_then_it_gets_8102_and_the_others_go_on() -> None:
    index = KvIndex()
    slow, quick = index.subscribe(), index.subscribe()
    await anext(slow)
    await anext(quick)
    for number in range(QUEUE_BATCHES + 1):
        index.apply([KvEvent(stored=[name(number)])])
        assert len(await anext(quick)) == 1
    with pytest.raises(BatonError) as caught:
        await anext(slow)
    assert caught.value.code is ErrorCode.OUTPUT_QUEUE_FULL
    await quick.aclose()


async def test_close_when_subscribers_wait_then_each_ends_with_the_error() -> None:
    index = KvIndex()
    subscription = index.subscribe()
    await anext(subscription)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(_code_of_next(subscription))
        await asyncio.sleep(0)
        index.close(BatonError(ErrorCode.ENGINE_DEAD, "gone"))
    assert waiting.result() is ErrorCode.ENGINE_DEAD


async def _code_of_next(subscription) -> ErrorCode:
    with pytest.raises(BatonError) as caught:
        await anext(subscription)
    return caught.value.code


def test_apply_when_the_cache_is_cleared_then_the_index_is_empty() -> None:
    index = KvIndex()
    index.apply([KvEvent(stored=[name(1), name(2)])])
    index.apply([KvEvent(cleared=True)])
    assert len(index) == 0
    assert [event.cleared for event in index.snapshot()[0]] == [True]
