"""The scaffolding of a gRPC server, by real calls over loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from protos import worker_pb2, worker_pb2_grpc
from rpc.channels import CLIENT_OPTIONS
from rpc.errors import BatonError, ErrorCode
from rpc.ids import valid_request_id
from rpc.metrics import Registry
from rpc.reflection import V1, V1ALPHA
from rpc.server import GrpcServer, RefusedCall, RpcCall, current_call
from rpc.status import from_rpc_error
from tests.unit.rpc.waiting import until

SERVICE = "baton.v1.Worker"


class Worker(worker_pb2_grpc.WorkerServicer):
    """Fails in the ways that the tests ask for by request."""

    def __init__(self) -> None:
        self.calls: list[RpcCall] = []
        self.entered = asyncio.Event()
        self.cleaned = asyncio.Event()
        # Of SubscribeKvEvents: its answers, their size, whether headers go before them, and after how many turns of the
        # loop it is cancelled, if it is.
        self.batches = 1
        self.batch_bytes = 0
        self.headers_first = False
        self.cancels_after: int | None = None

    async def GetInfo(self, request: Any, context: Any) -> Any:
        self.calls.append(current_call())
        return worker_pb2.WorkerInfo(engine_id="e")

    async def GetStatus(self, request: Any, context: Any) -> Any:
        raise BatonError(ErrorCode.MALLOC_FAILED, "no blocks", stage="allocate", metadata={"rank": "0"})

    async def FlushCache(self, request: Any, context: Any) -> Any:
        raise ZeroDivisionError("internal secret")

    async def Drain(self, request: Any, context: Any) -> Any:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cleaned.set()

    async def WatchStatus(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.entered.set()
        try:
            for _ in range(3):
                yield worker_pb2.WorkerStatus()
            if request.interval_seconds == 1:
                raise BatonError(ErrorCode.SERVER_DRAINING, "bye", retry_after_s=4)
            if request.interval_seconds == 2:
                raise ZeroDivisionError
            if request.interval_seconds == 3:
                await asyncio.Event().wait()
            if request.interval_seconds == 4:
                while True:
                    yield worker_pb2.WorkerStatus()
        finally:
            self.cleaned.set()

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        self.calls.append(current_call())
        if self.cancels_after is not None:
            task, loop, turns = asyncio.current_task(), asyncio.get_running_loop(), self.cancels_after

            def later(turns: int) -> None:
                if turns:
                    loop.call_soon(later, turns - 1)
                elif task is not None:
                    task.cancel()

            later(turns)
        try:
            if self.headers_first:
                await context.send_initial_metadata(())
            for _ in range(self.batches):
                await context.write(worker_pb2.KvEventBatch(engine_id="e" * self.batch_bytes))
        except asyncio.CancelledError:
            self.cleaned.set()
            raise BatonError(ErrorCode.SERVER_DRAINING) from None
        raise BatonError(ErrorCode.OUTPUT_QUEUE_FULL)


class Deployment:
    def __init__(self, max_rpc_s: float = 60.0) -> None:
        self.registry = Registry("prefill")
        self.refused: list[RefusedCall] = []
        self.server = GrpcServer(self.registry, max_rpc_s=max_rpc_s, on_refused=self.refused.append)
        self.worker = Worker()
        self.server.add_service(worker_pb2_grpc.add_WorkerServicer_to_server, self.worker, SERVICE)

    async def __aenter__(self) -> Deployment:
        port = await self.server.start("127.0.0.1", 0)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def count(self, method: str, code: str) -> float | None:
        return self.registry.value("baton_rpc_requests_total", method=f"{SERVICE}/{method}", code=code)

    async def settled(self, method: str, code: str) -> None:
        """Until the call is counted: the client may know its end before the server has booked it."""
        await until(lambda: self.count(method, code) is not None)
        assert self.count(method, code) == 1
        assert self.registry.value("baton_rpc_inflight", method=f"{SERVICE}/{method}") == 0
        assert self.registry.value("baton_rpc_duration_seconds_count", method=f"{SERVICE}/{method}") == 1


def typed(error: grpc.aio.AioRpcError) -> BatonError:
    return from_rpc_error(error, leg="prefill", deadline_passed=True, was_ready=True)


async def fails(call: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return typed(caught.value)


async def reads(call: Any) -> tuple[int, BatonError | None]:
    seen = 0
    try:
        async for _ in call:
            seen += 1
    except grpc.aio.AioRpcError as error:
        return seen, typed(error)
    return seen, None


async def test_success_is_counted_and_the_call_is_known_to_its_handler() -> None:
    async with Deployment() as d:
        await d.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=5, metadata=(("x-request-id", "r-7"),))
        await d.settled("GetInfo", "NONE_ERROR")
        (call,) = d.worker.calls
        assert (call.method, call.request_id, call.request_id_given) == (f"{SERVICE}/GetInfo", "r-7", True)
        assert 0 < call.deadline.remaining() <= 5.1  # gRPC rounds a timeout up on its way
        assert call.peer.startswith("ipv4:127.0.0.1")


async def test_call_without_id_and_deadline_gets_a_new_id_and_the_maximum() -> None:
    async with Deployment(max_rpc_s=30) as d:
        await d.stub.GetInfo(worker_pb2.GetInfoRequest())
        (call,) = d.worker.calls
        assert not call.request_id_given
        assert len(call.request_id) == 36
        assert 25 < call.deadline.remaining() <= 30


async def test_call_without_deadline_and_no_maximum_has_none() -> None:
    async with Deployment(max_rpc_s=0) as d:
        await d.stub.GetInfo(worker_pb2.GetInfoRequest())
        assert d.worker.calls[0].deadline.timeout() is None


def test_current_call_outside_of_one_raises() -> None:
    with pytest.raises(LookupError):
        current_call()


async def test_invalid_request_id_is_605_before_the_handler() -> None:
    async with Deployment() as d:
        error = await fails(d.stub.GetInfo(worker_pb2.GetInfoRequest(), metadata=(("x-request-id", "a#b"),)))
        assert (error.code, error.param) == (ErrorCode.INVALID_PARAMS, "request_id")
        assert not d.worker.calls
        await d.settled("GetInfo", "INVALID_PARAMS")


async def test_baton_error_becomes_its_status_with_details() -> None:
    async with Deployment() as d:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.stub.GetStatus(worker_pb2.GetStatusRequest(), metadata=(("x-request-id", "r-1"),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "no blocks"
        error = typed(caught.value)
        assert (error.code, error.message, error.stage) == (ErrorCode.MALLOC_FAILED, "no blocks", "allocate")
        assert error.metadata == {"rank": "0", "request_id": "r-1"}
        await d.settled("GetStatus", "MALLOC_FAILED")


async def test_unexpected_exception_is_514_and_logged_and_says_nothing_of_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "rpc.server"):
        async with Deployment() as d:
            error = await fails(d.stub.FlushCache(worker_pb2.FlushCacheRequest()))
            await d.settled("FlushCache", "UNKNOWN_ERROR")
    assert error.code is ErrorCode.UNKNOWN_ERROR
    assert "secret" not in error.message
    records = [record for record in caplog.records if record.name == "rpc.server"]
    assert len(records) == 1
    assert records[0].exc_info


@pytest.mark.parametrize(
    ("interval", "code"),
    [(0, None), (1, ErrorCode.SERVER_DRAINING), (2, ErrorCode.UNKNOWN_ERROR)],
)
async def test_stream_ends_with_its_answers_and_its_status(interval: int, code: ErrorCode | None) -> None:
    async with Deployment() as d:
        seen, error = await reads(d.stub.WatchStatus(worker_pb2.WatchStatusRequest(interval_seconds=interval)))
        assert seen == 3
        assert (error and error.code) == code
        if interval == 1:
            assert error is not None
            assert error.retry_after_s == 4
        await d.settled("WatchStatus", code.name if code else "NONE_ERROR")
        assert d.worker.cleaned.is_set()


async def test_stream_handler_that_writes_itself_is_served_alike() -> None:
    async with Deployment() as d:
        seen, error = await reads(d.stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest()))
        assert seen == 1
        assert error is not None
        assert error.code is ErrorCode.OUTPUT_QUEUE_FULL
        assert d.worker.calls
        await d.settled("SubscribeKvEvents", "OUTPUT_QUEUE_FULL")


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("headers", ["with the first answer", "before"])
async def test_stream_handler_that_is_cancelled_while_it_writes_ends_with_the_status_that_it_gives(
    turns: int, headers: str
) -> None:
    """Also in its first write, with which the headers go, or while it sends these."""
    async with Deployment() as d:
        d.worker.cancels_after, d.worker.batches = turns, 100
        d.worker.headers_first = headers == "before"
        _, error = await reads(d.stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=30))
        assert error is not None
        assert error.code is ErrorCode.SERVER_DRAINING
        await d.settled("SubscribeKvEvents", "SERVER_DRAINING")


@pytest.mark.parametrize("turns", [2, 100])
async def test_stream_handler_whose_large_first_answer_nobody_reads_can_be_cancelled(turns: int) -> None:
    async with Deployment() as d:
        d.worker.cancels_after, d.worker.batch_bytes = turns, 15_000_000
        async with grpc.aio.insecure_channel(f"127.0.0.1:{d.server.port}", options=CLIENT_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            call = stub.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=60)
            await asyncio.wait_for(d.worker.cleaned.wait(), 20)
            _, error = await reads(call)
        assert error is not None
        assert error.code is ErrorCode.SERVER_DRAINING
        await d.settled("SubscribeKvEvents", "SERVER_DRAINING")


async def test_cancel_of_a_unary_call_reaches_the_handler() -> None:
    async with Deployment() as d:
        call = d.stub.Drain(worker_pb2.DrainRequest(), timeout=30)
        waiter = asyncio.ensure_future(call.wait_for_connection())
        async with asyncio.timeout(20):
            await d.worker.entered.wait()
            call.cancel()
            await d.worker.cleaned.wait()
        waiter.cancel()
        await d.settled("Drain", "CANCELLED")


@pytest.mark.parametrize("interval", [3, 4])
async def test_cancel_of_a_stream_cleans_up_whether_it_waits_or_sends(interval: int) -> None:
    async with Deployment() as d:
        call = d.stub.WatchStatus(worker_pb2.WatchStatusRequest(interval_seconds=interval), timeout=30)
        await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            await d.worker.cleaned.wait()
        await d.settled("WatchStatus", "CANCELLED")


async def test_deadline_of_the_caller_ends_the_handler_and_is_counted_as_603() -> None:
    async with Deployment() as d:
        error = await fails(d.stub.Drain(worker_pb2.DrainRequest(), timeout=2.0))
        assert error.code is ErrorCode.GENERATE_TIMEOUT
        async with asyncio.timeout(20):
            await d.worker.cleaned.wait()
        await d.settled("Drain", "GENERATE_TIMEOUT")


async def test_call_without_deadline_ends_at_the_servers_maximum_with_8204() -> None:
    async with Deployment(max_rpc_s=0.2) as d:
        error = await fails(d.stub.Drain(worker_pb2.DrainRequest()))
        assert error.code is ErrorCode.DEADLINE_EXCEEDED
        await d.settled("Drain", "DEADLINE_EXCEEDED")
    async with Deployment(max_rpc_s=2.0) as d:  # time for what is sent before
        seen, failure = await reads(d.stub.WatchStatus(worker_pb2.WatchStatusRequest(interval_seconds=3)))
        assert seen == 3
        assert failure is not None
        assert failure.code is ErrorCode.DEADLINE_EXCEEDED
        await d.settled("WatchStatus", "DEADLINE_EXCEEDED")


async def test_unknown_method_is_unimplemented_and_its_path_is_no_label() -> None:
    async with Deployment() as d:
        call = d.channel.unary_unary("/baton.v1.Worker/Invented")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert d.registry.value("baton_rpc_requests_total", method="unknown", code="METHOD_NOT_ALLOWED") == 1
        assert b"Invented" not in d.registry.render()


@pytest.mark.parametrize(
    ("method", "message", "request_id", "code"),
    [
        ("GetInfo", b"", "a b", ErrorCode.INVALID_PARAMS),
        ("GetInfo", b"\x07garbage", "r-1", ErrorCode.ERROR_GENERATE_CONFIG_FORMAT),
        ("GetInfo", b"\x0a\xff\xff\xff\x07" + b"x" * (16 << 20), "r-1", ErrorCode.PAYLOAD_TOO_LARGE),
        ("Invented", b"", "r-1", ErrorCode.METHOD_NOT_ALLOWED),
        ("Invented" * 100, b"", "a b", ErrorCode.METHOD_NOT_ALLOWED),
    ],
    ids=["id", "bytes", "size", "method", "long method"],
)
async def test_call_when_no_handler_sees_it_then_the_hook_is_told_and_the_caller_gets_the_code(
    method: str, message: bytes, request_id: str, code: ErrorCode
) -> None:
    async with Deployment() as d:
        call = d.channel.unary_unary(f"/{SERVICE}/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(message, timeout=20, metadata=(("x-request-id", request_id), ("x-baton-private", "1")))
        (refused,) = d.refused
        assert refused.error.code is code
        assert refused.known is (method == "GetInfo")
        assert refused.private and len(refused.method) <= 128
        if request_id == "r-1":
            assert refused.request_id == "r-1"
        else:
            assert valid_request_id(refused.request_id)
        if refused.known:
            parsed = typed(caught.value)
            assert (parsed.code, parsed.metadata["request_id"]) == (code, refused.request_id)
            await d.settled(method, code.name)
        assert not d.worker.calls
        await d.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=20)
        assert len(d.refused) == 1


async def test_health_follows_serving_for_every_service_and_the_whole() -> None:
    async with Deployment() as d:
        stub = health_pb2_grpc.HealthStub(d.channel)
        states = health_pb2.HealthCheckResponse.ServingStatus
        for serving in (False, True, False):
            await d.server.set_serving(serving)
            for name in ("", SERVICE):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
                assert states.Name(answer.status) == ("SERVING" if serving else "NOT_SERVING")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=20)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("package", [V1, V1ALPHA])
async def test_reflection_lists_and_describes_the_services(package: str) -> None:
    async with Deployment() as d:
        call = d.channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"{V1}.ServerReflection"),
        ]
        answers = [answer async for answer in call(iter(requests), timeout=20)]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health", f"{V1}.ServerReflection", f"{V1ALPHA}.ServerReflection"} <= names
        for answer, package_name in ((answers[1], "baton.v1"), (answers[2], V1)):
            files = [
                descriptor_pb2.FileDescriptorProto.FromString(raw)
                for raw in answer.file_descriptor_response.file_descriptor_proto
            ]
            assert package_name in {file.package for file in files}


async def test_busy_port_ends_the_start_with_one_line_that_names_flag_and_address() -> None:
    async with Deployment() as d:
        with pytest.raises(SystemExit) as caught:
            await GrpcServer().start("127.0.0.1", d.server.port, flag="--port")
        assert caught.value.code == f"--port: cannot listen on 127.0.0.1:{d.server.port}: the port is in use"


async def test_port_taken_by_another_protocol_is_refused_too() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"--cache-store-port: cannot listen on 127.0.0.1:{port}"):
            await GrpcServer().start("127.0.0.1", port, flag="--cache-store-port")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
async def test_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(SystemExit, match=f"--port: cannot listen on {host}:4711"):
        await GrpcServer().start(host, 4711)


async def test_stop_turns_health_negative_and_lets_open_calls_end_within_the_grace() -> None:
    async with Deployment() as d:
        await d.server.set_serving(True)
        call = d.stub.WatchStatus(worker_pb2.WatchStatusRequest(interval_seconds=3), timeout=30)
        await call.read()
        async with asyncio.timeout(20):
            await d.server.stop(0.1)
            await d.worker.cleaned.wait()

        async def read_on() -> None:
            while await call.read():
                pass

        with pytest.raises(grpc.aio.AioRpcError):
            await read_on()
