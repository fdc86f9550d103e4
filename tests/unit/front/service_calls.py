"""Generation calls to a front under test, and their outcomes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from protos import decode_pb2, prefill_pb2
from rpc.errors import BatonError
from rpc.status import details_payload, parse_status
from tests.unit.front.scripted_engine import (
    LIMIT_S,
    Front,
)
from tests.unit.front.wire_requests import generate_input, kv_source


def prefill_request(hold_kv: bool | None = True, **fields: object) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(input=generate_input(**fields), hold_kv=hold_kv)


def decode_request(local: bool = False, **fields: object) -> decode_pb2.DecodeRequest:
    if local:
        return decode_pb2.DecodeRequest(input=generate_input(**fields), local_prefill=decode_pb2.LocalPrefill())
    return decode_pb2.DecodeRequest(input=generate_input(**fields), kv_source=kv_source())


async def call(front: Front, message: Any, timeout: float = LIMIT_S) -> Any:
    """The answer, or the list of events, of one generation RPC."""
    if front.role == "prefill":
        return await front.stub.Prefill(message, timeout=timeout)
    return [event async for event in front.stub.Decode(message, timeout=timeout)]


def start(group: asyncio.TaskGroup, front: Front, message: Any, timeout: float = LIMIT_S) -> asyncio.Task[Any]:
    async def outcome() -> Any:
        try:
            return await call(front, message, timeout)
        except grpc.aio.AioRpcError as error:
            return error

    return group.create_task(outcome())


def error_of(outcome: Any) -> BatonError:
    assert isinstance(outcome, grpc.aio.AioRpcError), outcome
    error = parse_status(details_payload(outcome.trailing_metadata()))
    assert error is not None, outcome
    assert outcome.code() is error.spec.grpc
    return error


async def refusal(front: Front, message: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(front, message)
    return error_of(caught.value)
