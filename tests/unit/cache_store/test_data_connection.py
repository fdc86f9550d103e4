"""A mover of bytes over a data connection, whose end comes at any moment."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from cache_store.data_connection import DataConnection, Mover, Transfer


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
        transfer = Transfer.of([memoryview(b"x" * 1000)])
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
