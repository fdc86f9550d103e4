"""Asking every registered server for the same thing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from router.registry import WorkerRegistry
from router.worker import Worker
from rpc.errors import BatonError
from rpc.status import from_rpc_error

TIMEOUT_S = 10.0
PROFILE_TIMEOUT_S = 120.0  # a long recording takes a while to write

# What a server is asked for, and what of its answer stands in the result.
Question = Callable[[Any], Awaitable[dict[str, Any]]]


async def flush_caches(registry: WorkerRegistry) -> list[dict[str, Any]]:
    """Drops the prefix-cache blocks that no request uses, everywhere; one result for each server, failed or not."""

    async def flush(stub: Any) -> dict[str, Any]:
        await stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=TIMEOUT_S)
        return {}

    return await _ask_all(registry, flush)


async def start_profiles(registry: WorkerRegistry) -> list[dict[str, Any]]:
    """Starts recording on every server; one result for each."""

    async def start(stub: Any) -> dict[str, Any]:
        answer = await stub.StartProfile(worker_pb2.StartProfileRequest(), timeout=TIMEOUT_S)
        return {"max_seconds": answer.max_seconds}

    return await _ask_all(registry, start)


async def stop_profiles(registry: WorkerRegistry) -> list[dict[str, Any]]:
    """Ends the recordings; one result for each server, with the path of its file there."""

    async def stop(stub: Any) -> dict[str, Any]:
        answer = await stub.StopProfile(worker_pb2.StopProfileRequest(), timeout=PROFILE_TIMEOUT_S)
        return {
            "path": answer.path,
            "seconds": round(answer.seconds, 6),
            "size_bytes": answer.size_bytes,
            "ended_by_limit": answer.ended_by_limit,
        }

    return await _ask_all(registry, stop)


async def _ask_all(registry: WorkerRegistry, question: Question) -> list[dict[str, Any]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(registry, worker, question)) for worker in registry.workers()]
    return [task.result() for task in tasks]


async def _ask(registry: WorkerRegistry, worker: Worker, question: Question) -> dict[str, Any]:
    result: dict[str, Any] = {"role": worker.role, "address": worker.address}
    try:
        connection = registry.pool.connection(worker.address)
        answer = await question(worker_pb2_grpc.WorkerStub(connection.channel))
    except grpc.RpcError as exc:
        error = from_rpc_error(exc, leg=worker.role, deadline_passed=False, was_ready=connection.was_ready())
        registry.pool.check(worker.address)
    except BatonError as closed:
        error = closed
    else:
        return result | {"ok": True} | answer
    return result | {"ok": False, "code": error.code.name, "message": error.message}
