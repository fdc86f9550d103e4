"""A mover of bytes over a data connection, whose end comes at any moment."""

from __future__ import annotations

import asyncio
import random
import socket
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from cache_store.tcp.connection import (
    CALL_BYTES,
    SUM_BYTES,
    DataConnection,
    Inbound,
    Mover,
    Outbound,
    Transfer,
)


def cut(data: bytes, dice: random.Random) -> list[memoryview]:
    """The same bytes in pieces of any size."""
    views, at = [], 0
    while at < len(data):
        step = dice.choice((1, 7, 1000, 90_000))
        views.append(memoryview(data)[at : at + step])
        at += step
    return views


def receive(into: Inbound, wire: bytes, dice: random.Random) -> None:
    """All of it, in parts of any size."""
    while into.unfinished:
        views, size = into.next_views()
        count = dice.randrange(1, size + 1)
        part, wire = wire[:count], wire[count:]
        for view in views:
            step = min(len(part), view.nbytes)
            view[:step], part = part[:step], part[step:]
        into.take_off(count)
    assert not wire


class Busy(Executor):
    """Workers that never come to what they are given."""

    def submit(self, *_arguments: object, **_named: object) -> Future[Any]:
        return Future()


@pytest.mark.parametrize("workers", [None, ThreadPoolExecutor, Busy], ids=["same worker", "another one", "none free"])
@pytest.mark.parametrize("seed", range(6))
def test_checksum_when_bytes_move_in_parts_and_are_set_aside_then_it_is_that_of_them_all_and_follows(
    seed: int, workers: type[Executor] | None
) -> None:
    dice = random.Random(seed)
    data = dice.randbytes(2 * CALL_BYTES + seed)
    digest = xxhash.xxh3_64_intdigest(data)
    out = Outbound(cut(data, dice), summed=True)
    if workers is not None:
        out.sum_ahead(workers())
    landed = bytearray(len(data))
    into = Inbound([memoryview(landed)[:3001], memoryview(landed)[3001:]], summed=True)
    wire = b""
    while out.unfinished:
        if dice.random() < 0.2:
            out.replace([memoryview(b"".join(out.views))])
        views, size = out.next_views()
        moved = b"".join(views)
        assert 0 < len(moved) == size <= CALL_BYTES + SUM_BYTES
        count = size if dice.random() < 0.5 else dice.randrange(size + 1)
        wire += moved[:count]
        out.take_off(count)
    assert wire == data + digest.to_bytes(SUM_BYTES, "little")
    receive(into, wire, dice)
    assert (landed, into.sums()) == (data, (digest, digest))


def test_checksum_when_other_bytes_are_sent_than_were_hashed_then_both_ends_do_not_agree() -> None:
    data = bytes(CALL_BYTES)
    out = Outbound([memoryview(data)], summed=True)
    out.damage([memoryview(b"\x01" + data[1:])])
    into = Inbound([memoryview(bytearray(len(data)))], summed=True)
    wire = b""
    while out.unfinished:
        views, size = out.next_views()
        wire += b"".join(views)
        out.take_off(size)
    receive(into, wire, dice=random.Random(1))
    have, want = into.sums()
    assert want == xxhash.xxh3_64_intdigest(data) != have


async def test_ended_when_a_turn_is_over_and_the_loop_has_not_seen_it_then_what_was_moved_is_reported_first() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    theirs = socket.create_connection(listener.getsockname())
    ours, _ = listener.accept()
    reported: list[Transfer] = []
    failures: list[Exception] = []
    with listener, theirs, ours, ThreadPoolExecutor(1) as workers:
        mover = Mover(
            DataConnection(ours), workers, sending=True, done=reported.append, failed=failures.append,
            turned=lambda moved, held_up: None,
        )  # fmt: skip
        transfer = Outbound([memoryview(b"x" * 1000)])
        mover.put(transfer)
        turn = mover._turn
        assert turn is not None
        async with asyncio.timeout(10):
            while not turn.done():  # noqa: ASYNC110 -- an event would give the loop time to see it
                await asyncio.sleep(0)
        assert mover._turn is turn, "the loop was quicker: this tests nothing"
        mover.stop()
        await mover.ended()
        assert (reported, mover.idle) == ([transfer], True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert (reported, failures) == ([transfer], []), "something was reported after the end"
