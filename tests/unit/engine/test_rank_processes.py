"""The processes of one engine, on the event loop that the servers use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from engine.client import EngineClient, EngineConfig
from engine.rank_processes import FAILED, RankProcesses
from rpc.errors import BatonError, ErrorCode
from tests.unit.engine.tiny_models import tiny_model
from tests.unit.rpc.waiting import until

LIMIT_S = 20.0


@pytest.mark.parametrize("size", [1, 2])
def test_start_when_a_process_is_gone_before_it_has_its_configuration_then_its_exit_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    make = asyncio.create_subprocess_exec

    async def gone(*command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await make("/bin/sh", "-c", "exit 3", **options)
        await process.wait()
        assert process.stdin is not None
        await until(process.stdin.is_closing)
        return process

    async def start() -> None:
        config = EngineConfig(role="decode", model=str(tiny_model("llama")), tensor_parallel_size=size)
        with pytest.raises(BatonError) as failure:
            await EngineClient(config).start(LIMIT_S)
        assert failure.value.code is ErrorCode.ENGINE_DEAD
        assert "rank 0" in failure.value.message or size == 1
        assert "status 3" in failure.value.message

    monkeypatch.setattr(asyncio, "create_subprocess_exec", gone)
    uvloop.run(start())


async def test_end_when_what_the_engine_said_before_it_is_read_later_then_that_is_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = asyncio.create_subprocess_exec
    asked: list[int] = []
    death: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()

    async def failing(*command: str, **options: Any) -> asyncio.subprocess.Process:
        return await make("/bin/sh", "-c", "cat > /dev/null; exit 1", **options)

    def last_words(status: int) -> bool:
        asked.append(status)
        if len(asked) == 3:
            ranks.failed(0, BatonError(ErrorCode.INVALID_PARAMS, "what it said"))
        return len(asked) == 3

    monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)
    ranks = RankProcesses(EngineConfig(role="decode", model="m"), on_death=death.set_result, last_words=last_words)
    async with asyncio.timeout(LIMIT_S):
        await ranks.start("ipc:///nowhere/in", "ipc:///nowhere/out", LIMIT_S)
        cause = await death
        await ranks.close()
    assert (cause.code, cause.message) == (ErrorCode.INVALID_PARAMS, "what it said")
    assert asked == [FAILED] * 3
