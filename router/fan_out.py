"""Asking every registered server for the same thing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from router.registry import WorkerRegistry
from router.worker import Worker
from rpc.errors import BatonError
from rpc.status import from_rpc_error

TIMEOUT_S = 10.0


async def flush_caches(registry: WorkerRegistry) -> list[dict[str, Any]]:
    """Drops the prefix-cache blocks that no request uses, everywhere; one result for each server, failed or not."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_flush(registry, worker)) for worker in registry.workers()]
    return [task.result() for task in tasks]


async def _flush(registry: WorkerRegistry, worker: Worker) -> dict[str, Any]:
    result: dict[str, Any] = {"role": worker.role, "address": worker.address}
    try:
        connection = registry.pool.connection(worker.address)
        stub = worker_pb2_grpc.WorkerStub(connection.channel)
        await stub.FlushCache(worker_pb2.FlushCacheRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError as exc:
        error = from_rpc_error(exc, leg=worker.role, deadline_passed=False, was_ready=connection.was_ready())
        registry.pool.check(worker.address)
    except BatonError as closed:
        error = closed
    else:
        return result | {"ok": True}
    return result | {"ok": False, "code": error.code.name, "message": error.message}
