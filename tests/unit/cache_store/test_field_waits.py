"""Waits end with the first cause, whatever state brings it about, and nothing that waits for room is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from cache_store import wire
from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.rows import Rows
from cache_store.memory.staging import Slot, StagingRing
from cache_store.serving.lease import LeaseTable
from cache_store.serving.parking import ParkedState, ParkingTable
from cache_store.serving.reader import Reader
from cache_store.serving.sending import Link, NoticeSender, StagedSender
from protos import cache_store_pb2 as pb
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import settings
from tests.unit.cache_store.lease_fixtures import LEASE_S, Clock, make_table, prefill_result, publish_all, wanted

KEY = "request#0.00000001"
SOON_S = 4.0  # far less than any limit of the product's own
LIMIT_S = 100.0


# -- O6: every terminal state ends every wait, whether it is there before the wait or comes during it --------------


class Stuck:
    """A stream whose peer takes `takes` events and then no more."""

    def __init__(self, takes: int) -> None:
        self._takes = takes
        self.waiting = asyncio.Event()
        self.messages: list[bytes] = []

    async def write(self, message: bytes) -> None:
        if len(self.messages) >= self._takes:
            self.waiting.set()
            await asyncio.get_running_loop().create_future()
        self.messages.append(message)


def fails(table: LeaseTable, clock: Clock) -> ErrorCode:
    table.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
    return ErrorCode.EXECUTION_EXCEPTION


def is_tombstoned(table: LeaseTable, clock: Clock) -> ErrorCode:
    table.tombstone(KEY)
    return ErrorCode.REQUEST_TOMBSTONED


def is_given_up(table: LeaseTable, clock: Clock) -> ErrorCode:
    table.release(KEY, None, complete=False)
    return ErrorCode.KV_LEASE_EXPIRED


def expires(table: LeaseTable, clock: Clock) -> ErrorCode:
    publish_all(table, KEY)
    table.computed(KEY, prefill_result(), True)
    clock.now += LEASE_S + 1
    table.tick(lambda key: False)
    return ErrorCode.KV_LEASE_EXPIRED


def closes(table: LeaseTable, clock: Clock) -> ErrorCode:
    table.close(BatonError(ErrorCode.SERVER_DRAINING))
    return ErrorCode.SERVER_DRAINING


ENDS = [fails, is_tombstoned, is_given_up, expires, closes]
End = Callable[[LeaseTable, Clock], ErrorCode]


def make_link(table: LeaseTable, reader: Reader, context: Any, clock: Clock) -> Link:
    chosen = settings(publish_timeout_s=LIMIT_S)
    return Link(chosen, lambda *_, **__: None, clock, table.close_load, reader, "off", context)


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("takes", [0, 1, 100], ids=["first write", "blocks", "nothing new"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_o6_sender_when_its_lease_ends_then_whatever_it_waits_for_it_ends_with_the_cause(
    end: End, takes: int, when: str
) -> None:
    clock = Clock()
    table = make_table(clock)
    table.admit(KEY, 1, 12, {"full": [3, 4, 5]}, 4)
    reader = table.open_load(KEY, None, 12, wanted(), 1)
    assert reader is not None
    context = Stuck(takes)
    sender = NoticeSender(make_link(table, reader, context, clock))
    if when == "before":
        expected = end(table, clock)
        work = asyncio.create_task(sender.run())
    else:
        work = asyncio.create_task(sender.run())
        await settle(work)
        if work.done():
            await work
        assert context.waiting.is_set() == (takes < 100)
        expected = end(table, clock)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(BatonError) as caught:
            await work
    assert caught.value.code is expected
    if takes < 100 and when == "during":
        assert table.get(KEY) is None, "the blocks do not wait for it"


async def settle(work: asyncio.Task[Any], turns: int = 20) -> None:
    """Lets the loop run until nothing happens any more without news."""
    for _ in range(turns):
        if work.done():
            return
        await asyncio.sleep(0)


def admitted(parking: ParkingTable, clock: Clock) -> tuple[ParkedState, ErrorCode | None]:
    parking.admit(KEY)
    return ParkedState.ADMITTED, None


def refused(parking: ParkingTable, clock: Clock) -> tuple[ParkedState, ErrorCode | None]:
    parking.refuse(KEY, BatonError(ErrorCode.REQUEST_TOMBSTONED))
    parking.refuse(KEY, BatonError(ErrorCode.CANCELLED))
    return ParkedState.REFUSED, ErrorCode.REQUEST_TOMBSTONED


def expired(parking: ParkingTable, clock: Clock) -> tuple[ParkedState, ErrorCode | None]:
    clock.now += LIMIT_S
    parking.expire()
    parking.admit(KEY)
    return ParkedState.REFUSED, ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT


def closed(parking: ParkingTable, clock: Clock) -> tuple[ParkedState, ErrorCode | None]:
    parking.close(BatonError(ErrorCode.SERVER_DRAINING))
    return ParkedState.REFUSED, ErrorCode.SERVER_DRAINING


@pytest.mark.parametrize("end", [admitted, refused, expired, closed], ids=lambda end: end.__name__)
async def test_o6_parked_load_when_it_ends_in_any_way_then_its_caller_is_told_once_with_the_first_cause(
    end: Callable[[ParkingTable, Clock], tuple[ParkedState, ErrorCode | None]],
) -> None:
    clock = Clock()
    parking = ParkingTable(4, 4, LIMIT_S, clock)
    entry = parking.park(KEY, "peer")
    told: list[None] = []
    entry.notify = lambda: told.append(None)
    state, code = end(parking, clock)
    assert (entry.state, entry.error.code if entry.error else None) == (state, code)
    parking.leave(entry)
    assert len(told) == 1 and len(parking) == 0


# -- O5: an event that finds no room keeps its place ----------------------------------------------------------------


class RefusingRing(StagingRing):
    """Has no room, three times in ten."""

    def __init__(self, slots: list[Slot], numbers: random.Random) -> None:
        super().__init__(slots)
        self._numbers = numbers
        self.refusals = 0

    def try_take(self) -> Slot | None:
        if self._numbers.random() < 0.3:
            self.refusals += 1
            return None
        return super().try_take()

    async def take(self) -> Slot:
        for _ in range(10_000):
            if (slot := self.try_take()) is not None:
                return slot
            await asyncio.sleep(0)
        raise AssertionError("no slot came back")


class Device:
    """Every copy brings the number of the block, as the layer has it, and is done when the loop comes to it."""

    def __init__(self, ring: RefusingRing) -> None:
        self.reads = ring
        self.copies = self

    def read(self, rows: Rows, slot: Slot) -> Rows:
        slot.view[: rows.nbytes] = bytes(rows.nbytes)
        return rows

    def when_read(self, ticket: Rows, then: Callable[[BaseException | None], None]) -> None:
        asyncio.get_running_loop().call_soon(then, None)


class Recording:
    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.done: pb.Done | None = None

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)
        piece = wire.split_piece(message)
        if piece is not None:
            header = piece[0]
            self.pieces += [(header.layer, block) for block in header.blocks]
        elif (event := pb.LoadEvent.FromString(message)).HasField("done"):
            self.done = event.done


async def test_o5_staging_when_it_refuses_at_random_then_each_piece_is_delivered_once_and_in_order() -> None:
    layers, blocks = 4, 2500
    layout = GroupLayout.of("full", num_layers=layers, num_kv_heads=1, head_dim=4, block_size=4, dtype="float16")
    clock = Clock()
    table = make_table(clock, layouts=(layout,))
    tokens = blocks * layout.block_size
    table.admit(KEY, 1, tokens, {"full": list(range(blocks))}, 0)
    reader = table.open_load(KEY, None, tokens, wanted(0, blocks, layout), 1)  # an event for each piece
    assert reader is not None
    for layer in range(layers):
        table.publish(KEY, "full", layer, blocks)
    table.computed(KEY, prefill_result(), True)
    ring = RefusingRing(
        [Slot(index, memoryview(bytearray(layout.block_bytes))) for index in range(3)], random.Random(5)
    )
    context = Recording()
    sender = StagedSender(make_link(table, reader, context, clock), Device(ring))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await sender.run()
    assert ring.refusals > layers * blocks // 5
    assert context.done is not None and context.done.pieces == layers * blocks
    for layer in range(layers):
        assert [block for of, block in context.pieces if of == layer] == list(range(blocks))
    assert ring.free == ring.slots
