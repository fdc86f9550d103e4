"""The staging ring, the order of completions, and which bytes a copy is about."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.rows import Rows, block_rows, paired_runs, runs
from cache_store.memory import row_copies
from cache_store.memory.staging import Completions, Slot, StagingRing, settled

WAIT_S = 10.0


def make_ring(count: int) -> StagingRing:
    return StagingRing([Slot(i, memoryview(bytearray(8))) for i in range(count)])


# ---- ring


async def test_ring_when_it_is_empty_then_takers_get_slots_in_the_order_in_which_they_came() -> None:
    ring = make_ring(2)
    first, second = await ring.take(), await ring.take()
    assert (ring.free, ring.try_take()) == (0, None)
    served: list[str] = []

    async def taker(name: str) -> Slot:
        slot = await ring.take()
        served.append(name)
        return slot

    takers = [asyncio.create_task(taker(name)) for name in "abc"]
    await asyncio.sleep(0)
    for slot in (first, second):
        ring.give(slot)
    got = [await takers[0], await takers[1]]
    assert served == ["a", "b"] and {slot.index for slot in got} == {0, 1}
    ring.give(got[0])
    ring.give(await takers[2])
    ring.give(got[1])
    assert ring.free == 2


async def test_ring_when_a_taker_is_cancelled_then_its_slot_goes_to_the_next_one() -> None:
    ring = make_ring(1)
    slot = await ring.take()
    waiting, cancelled, next_one = (asyncio.create_task(ring.take()) for _ in range(3))
    await asyncio.sleep(0)
    cancelled.cancel()
    ring.give(slot)  # for `waiting`, which is cancelled before it runs again
    waiting.cancel()
    assert (await next_one) is slot
    for task in (waiting, cancelled):
        with pytest.raises(asyncio.CancelledError):
            await task
    ring.give(slot)
    assert ring.free == 1


async def test_ring_when_nobody_waits_then_no_free_slot_is_passed_over() -> None:
    ring = make_ring(3)
    taken = [ring.try_take() for _ in range(4)]
    assert taken[3] is None and len({slot.index for slot in taken[:3]}) == 3  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="at least one slot"):
        StagingRing([])


# ---- completions


class Point:
    def __init__(self, failure: Exception | None = None) -> None:
        self.reached = threading.Event()
        self.failure = failure

    def wait(self) -> None:
        assert self.reached.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure


def test_completions_when_a_later_ticket_is_reached_first_then_the_order_is_kept() -> None:
    completions = Completions("test")
    said: list[tuple[str, BaseException | None]] = []
    over = threading.Event()
    first, second = Point(), Point(OSError("broken"))
    completions.add(first, lambda failure: said.append(("first", failure)))
    completions.add(None, lambda failure: said.append(("between", failure)))
    completions.add(second, lambda failure: said.append(("second", failure)))
    completions.add(None, lambda failure: over.set())
    second.reached.set()
    assert said == []
    first.reached.set()
    assert over.wait(WAIT_S)
    assert said == [("first", None), ("between", None), ("second", second.failure)]
    completions.close()


def test_completions_when_what_follows_raises_then_the_next_ticket_is_still_told() -> None:
    completions = Completions("test")
    over = threading.Event()

    def raises(failure: BaseException | None) -> None:
        raise ValueError("of a metric")

    completions.add(None, raises)
    completions.add(None, lambda failure: over.set())
    assert over.wait(WAIT_S)
    completions.close()


async def test_settled_when_it_is_cancelled_then_it_waits_for_all_and_is_cancelled_then() -> None:
    loop = asyncio.get_running_loop()
    copies: list[asyncio.Future[None]] = [loop.create_future() for _ in range(3)]
    waiter = asyncio.create_task(settled(copies))
    await asyncio.sleep(0)
    for copy in copies:
        waiter.cancel()
        await asyncio.sleep(0)
        assert not waiter.done()
        copy.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiter
    failed = loop.create_future()
    failed.set_exception(OSError())
    await settled([failed])  # whatever their ends
    assert isinstance(failed.exception(), OSError)


# ---- rows

LAYOUTS = st.builds(
    lambda heads, size, dim, dtype: GroupLayout.of(
        "g", num_layers=1, num_kv_heads=heads, head_dim=dim, block_size=size, dtype=dtype
    ),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["float32", "bfloat16"]),
)


@given(LAYOUTS, st.lists(st.integers(0, 7), max_size=8, unique=True), st.data())
def test_rows_of_any_share_are_the_bytes_that_the_layout_names(
    layout: GroupLayout, ids: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.sampled_from([each for each in (1, 2, 4) if layout.num_kv_heads % each == 0]))
    index = data.draw(st.integers(0, count - 1))
    halves = data.draw(st.booleans())
    rows = block_rows("g", 0, ids, layout.block_bytes // count, count, index, halves=halves)
    memory = np.arange(8 * layout.block_bytes, dtype=np.int64)
    found = [n for row in rows.numbers for n in memory[row * rows.unit_bytes : (row + 1) * rows.unit_bytes]]
    expected = [
        n
        for block in ids
        for start, stop in layout.partition_ranges(count, index)
        for n in memory[block * layout.block_bytes + start : block * layout.block_bytes + stop]
    ]
    assert found == expected and rows.nbytes == len(expected)


@given(st.lists(st.integers(0, 20), max_size=20))
def test_runs_cover_the_numbers_in_order_and_neighbours_are_one(numbers: list[int]) -> None:
    found = runs(numbers)
    assert [first + i for first, count in found for i in range(count)] == numbers
    for (first, count), (after, _) in pairwise(found):
        assert after != first + count


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_paired_runs_are_consecutive_on_both_sides(pairs: list[tuple[int, int]]) -> None:
    found = paired_runs([one for one, _ in pairs], [other for _, other in pairs])
    assert [(first + i, to + i) for first, to, count in found for i in range(count)] == pairs


ORDERS = st.sampled_from(["as they come", "ascending", "neighbours"])


def drawn_rows(data: st.DataObject, count: int, among: int) -> list[int]:
    order = data.draw(ORDERS)
    if order == "neighbours":
        first = data.draw(st.integers(0, among - count))
        return list(range(first, first + count))
    numbers = data.draw(st.permutations(range(among)))[:count]
    return sorted(numbers) if order == "ascending" else numbers


@given(st.integers(0, 24), st.sampled_from([1, 6, 64]), st.data())
def test_copied_rows_are_those_of_the_source_and_no_other_byte_changes(
    count: int, unit: int, data: st.DataObject
) -> None:
    read, write = drawn_rows(data, count, 30), drawn_rows(data, count, 30)
    rng = np.random.default_rng(7)
    source, target = (rng.integers(0, 256, (30, unit), np.uint8) for _ in range(2))
    expected = target.copy()
    for one, other in zip(read, write, strict=True):
        expected[other] = source[one]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_copies, "_CHUNK_BYTES", data.draw(st.sampled_from([1, 5 * unit, 1 << 20])))
        row_copies.copy_rows(
            memoryview(source).cast("B"),
            Rows("g", 0, unit, read),
            memoryview(target).cast("B"),
            Rows("g", 0, unit, write),
        )
    assert (target == expected).all()
