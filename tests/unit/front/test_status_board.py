"""Statuses and their watchers; the state that a server reports."""

from __future__ import annotations

import asyncio

import pytest

from engine.messages import EngineStats, Ledger
from front.drain import DrainState
from front.engine_link import EngineLink
from front.status_board import StatusBoard
from front.worker_service import fill_status
from protos import worker_pb2
from rpc.errors import BatonError, ErrorCode
from tests.unit.front.scripted_engine import ENGINE_ID, ScriptedEngine, engine_ready

LIMIT_S = 20.0


def board() -> StatusBoard:
    return StatusBoard(lambda status: None)


async def test_watch_when_nothing_changes_then_a_status_comes_every_interval_with_a_higher_version() -> None:
    async with asyncio.timeout(LIMIT_S):
        stream = board().watch(0.01)
        versions = [(await anext(stream)).version for _ in range(3)]
        await stream.aclose()
    assert versions == [1, 2, 3]


async def test_watch_when_the_state_changes_then_every_watcher_hears_it_at_once() -> None:
    shared = board()
    async with asyncio.timeout(LIMIT_S):
        streams = [shared.watch(60.0) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        shared.notify()
        assert {(await status).version for status in waiting} == {4, 5, 6}
        for stream in streams:
            await stream.aclose()


async def test_watch_when_a_change_comes_while_the_reader_is_busy_then_it_is_not_lost() -> None:
    shared = board()
    async with asyncio.timeout(LIMIT_S):
        stream = shared.watch(60.0)
        await anext(stream)
        shared.notify()
        await anext(stream)
        await stream.aclose()


async def test_close_when_watched_then_the_watch_ends_with_the_error() -> None:
    shared = board()
    async with asyncio.timeout(LIMIT_S):
        stream = shared.watch(60.0)
        await anext(stream)
        shared.close(BatonError(ErrorCode.SERVER_DRAINING))
        with pytest.raises(BatonError) as caught:
            await anext(stream)
    assert caught.value.code is ErrorCode.SERVER_DRAINING


async def test_fill_status_when_the_server_is_in_each_state_then_it_says_so() -> None:
    engine = ScriptedEngine()
    link = EngineLink(engine, ("m",))

    def status(drain: DrainState = DrainState.SERVING, reasons: list[str] | None = None) -> worker_pb2.WorkerStatus:
        filled = worker_pb2.WorkerStatus()
        fill_status(filled, link, drain, reasons or [])
        return filled

    assert status().state == worker_pb2.WORKER_STATE_STARTING
    assert status().engine_id == ""
    link.came_up(engine_ready())
    engine.stats = EngineStats(running=1, waiting=2, loading=3, ledgers=[Ledger("full", 8, 8, 0, 0, 0, 0, 0, 1)])
    ready = status()
    assert (ready.state, ready.engine_id) == (worker_pb2.WORKER_STATE_READY, ENGINE_ID)
    assert (ready.running, ready.waiting, ready.loading) == (1, 2, 3)
    assert ready.ledgers[0].HasField("staged")
    assert status(reasons=["transfers"]).state == worker_pb2.WORKER_STATE_UNHEALTHY
    assert status(DrainState.LEAVING, ["draining"]).state == worker_pb2.WORKER_STATE_DRAINING
    link.died(BatonError(ErrorCode.ENGINE_DEAD, "gone"))
    dead = status(DrainState.LEAVING, ["the engine is dead"])
    assert (dead.state, list(dead.reasons)) == (worker_pb2.WORKER_STATE_UNHEALTHY, ["the engine is dead"])
