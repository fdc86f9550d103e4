"""Scaffolding of a gRPC server: arguments, health, reflection, deadlines, metrics, typed errors.

Handlers raise `BatonError` and are plain coroutines or async generators; what stands around every call (id,
deadline, figures, status details) is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from rpc import status
from rpc.channels import SERVER_OPTIONS, Options
from rpc.deadline import Deadline
from rpc.errors import BatonError, ErrorCode
from rpc.ids import check_request_id, new_request_id
from rpc.logs import request_id_var
from rpc.metrics import Registry
from rpc.reflection import enable_reflection

REQUEST_ID_KEY = "x-request-id"
UNKNOWN_METHOD = "unknown"
DEADLINE_TOLERANCE_S = 0.05

_Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RpcCall:
    """What is known about the call that the present task serves."""

    method: str  # full name without the leading slash
    request_id: str  # the caller's, or a new one
    request_id_given: bool
    deadline: Deadline  # the caller's, or the server's maximum
    peer: str


# What gRPC's own services end calls with: the health service with NOT_FOUND for a service that it does not know.
_CODES_OF_OTHERS = {
    grpc.StatusCode.NOT_FOUND: ErrorCode.PATH_NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.METHOD_NOT_ALLOWED,
}

_call: ContextVar[RpcCall | None] = ContextVar("baton_rpc_call", default=None)


def current_call() -> RpcCall:
    """The call that the present task serves. Raises LookupError outside of a handler."""
    call = _call.get()
    if call is None:
        raise LookupError("no RPC is being served by this task")
    return call


class _Interceptor(grpc.aio.ServerInterceptor):
    """Wraps every unary-unary and unary-stream handler; passes the others (reflection) on as they are."""

    def __init__(self, registry: Registry | None, max_rpc_s: float) -> None:
        self._registry = registry
        self._max_rpc_s = max_rpc_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = cast(Any, await continuation(handler_call_details))
        if handler is None:
            # The path is the caller's invention, so it must not become a label.
            self._count(UNKNOWN_METHOD, ErrorCode.METHOD_NOT_ALLOWED.name)
            return None
        method = str(handler_call_details.method).lstrip("/")
        if handler.request_streaming:
            return cast("grpc.RpcMethodHandler[Any, Any]", handler)  # the class cannot be subscripted at run time
        if handler.response_streaming:
            body = handler.unary_stream
            writes_itself = inspect.iscoroutinefunction(body)
            return grpc.unary_stream_rpc_method_handler(
                cast(Any, self._wrap(method, body if writes_itself else _writing(body))),
                _tolerant(handler.request_deserializer),
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            cast(Any, self._wrap(method, handler.unary_unary)),
            _tolerant(handler.request_deserializer),
            handler.response_serializer,
        )

    def _wrap(self, method: str, body: Callable[[Any, _Context], Awaitable[Any]]) -> object:
        async def serve(request: Any, context: _Context) -> Any:
            scope = _CallScope(self, method, context)
            async with scope:
                call = scope.enter()
                if isinstance(request, _Unreadable):
                    raise BatonError(
                        ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
                        "the message cannot be read: it is no protobuf of this method, or text in it is not UTF-8",
                    )
                if scope.has_own_deadline:  # gRPC cancels this task when it passes
                    return await body(request, context)
                async with _limit(call.deadline):
                    return await body(request, context)

        return serve

    def _count(self, method: str, code: str) -> None:
        if self._registry is not None:
            self._registry.inc("baton_rpc_requests_total", method=method, code=code)


class _Unreadable:
    """Stands for a request whose bytes cannot be parsed."""


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Bytes that cannot be parsed become `_Unreadable`: left to gRPC, they would be UNKNOWN without details."""

    def parse(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except (DecodeError, ValueError):
            return _Unreadable()

    return parse


def _writing(
    generator: Callable[[Any, _Context], AsyncGenerator[Any, None]],
) -> Callable[[Any, _Context], Awaitable[None]]:
    """A coroutine that sends what `generator` yields.

    Left to gRPC, a generator whose call is cancelled while an answer is being sent would stay suspended until the
    garbage collector closes it. Here its clean-up runs before the call's own ends.
    """

    async def serve(request: Any, context: _Context) -> None:
        async with contextlib.aclosing(generator(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return serve


@contextlib.asynccontextmanager
async def _limit(deadline: Deadline) -> AsyncIterator[None]:
    """Ends the body at the server's own maximum."""
    timer = asyncio.timeout(deadline.timeout())
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise BatonError(
            ErrorCode.DEADLINE_EXCEEDED, "the call took longer than this server's maximum; set a deadline"
        ) from None


def cancel_code(context: _Context) -> ErrorCode:
    """Why the task of this call is being cancelled: GENERATE_TIMEOUT for its deadline, else CANCELLED."""
    remaining = context.time_remaining()
    # The client's clock runs out first, and its cancellation then arrives shortly before the deadline here.
    passed = remaining is not None and remaining <= DEADLINE_TOLERANCE_S
    return ErrorCode.GENERATE_TIMEOUT if passed else ErrorCode.CANCELLED


class _CallScope:
    """From the start of a call to its end: figures, and the status that an exception becomes."""

    def __init__(self, owner: _Interceptor, method: str, context: _Context) -> None:
        self._owner = owner
        self._method = method
        self._context = context
        self._began = time.monotonic()
        self._request_id = ""
        remaining = context.time_remaining()
        self.has_own_deadline = remaining is not None

    async def __aenter__(self) -> None:
        if self._owner._registry is not None:
            self._owner._registry.inc("baton_rpc_inflight", method=self._method)

    def enter(self) -> RpcCall:
        """Reads id and deadline. Raises INVALID_PARAMS for an id that is none."""
        given = ""
        for key, value in self._context.invocation_metadata() or ():
            if key == REQUEST_ID_KEY:
                given = value if isinstance(value, str) else value.decode("ascii", "replace")
        self._request_id = check_request_id(given) if given else new_request_id()
        call = RpcCall(
            method=self._method,
            request_id=self._request_id,
            request_id_given=bool(given),
            deadline=Deadline.from_context(self._context, self._owner._max_rpc_s),
            peer=self._context.peer(),
        )
        # gRPC serves each call in a task of its own, so these end with the task.
        _call.set(call)
        request_id_var.set(self._request_id)
        return call

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        code = ErrorCode.NONE_ERROR.name
        try:
            if error is None:
                return False
            code = self._code_of(error)
            if isinstance(error, BatonError):
                await self._fail(error)
            if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
                _log.error("unexpected error in %s", self._method, exc_info=error)
                failure = BatonError(ErrorCode.UNKNOWN_ERROR, "internal error; see the server's log")
                await self._fail(failure)
            return False
        finally:
            registry = self._owner._registry
            if registry is not None:
                registry.dec("baton_rpc_inflight", method=self._method)
                registry.observe("baton_rpc_duration_seconds", time.monotonic() - self._began, method=self._method)
            self._owner._count(self._method, code)

    def _code_of(self, error: BaseException) -> str:
        if isinstance(error, BatonError):
            return error.code.name
        if isinstance(error, grpc.aio.AbortError):
            # The handler ended the call itself; its details say with which code.
            context = cast(Any, self._context)
            parsed = status.parse_status(status.details_payload(context.trailing_metadata() or ()))
            if parsed is not None:
                return parsed.code.name
            return _CODES_OF_OTHERS.get(context.code(), ErrorCode.UNKNOWN_ERROR).name
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return cancel_code(self._context).name
        return ErrorCode.UNKNOWN_ERROR.name

    async def _fail(self, error: BatonError) -> NoReturn:
        # The handler may have found the id in the message itself.
        await status.abort(self._context, error, request_id=request_id_var.get() or self._request_id)


def bind_error(flag: str, host: str, port: int, reason: str) -> SystemExit:
    """The one line that ends a start-up whose port cannot be had."""
    return SystemExit(f"{flag}: cannot listen on {host}:{port}: {reason}")


def check_port(flag: str, host: str, port: int) -> None:
    """Raises SystemExit with one line when `host:port` cannot be listened on; nothing stays bound."""
    if port == 0:
        return
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = infos[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
        raise bind_error(flag, host, port, reason) from None


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class GrpcServer:
    """One listening gRPC server of a process.

    Add services, then `start`. Health is NOT_SERVING until `set_serving(True)`. `max_rpc_s` limits calls that
    come without a deadline (0: no limit). `extra` options replace or extend SERVER_OPTIONS.
    """

    def __init__(
        self, registry: Registry | None = None, *, max_rpc_s: float = 7200.0, extra: Options | None = None
    ) -> None:
        options = dict(SERVER_OPTIONS)
        options.update(dict(extra or []))
        self._server = grpc.aio.server(options=list(options.items()), interceptors=[_Interceptor(registry, max_rpc_s)])
        self._health = health_aio.HealthServicer()
        self._services: list[str] = []
        self._serving = False
        self._started = False
        self.port = 0
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def server(self) -> grpc.aio.Server:
        return self._server

    def add_service(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str) -> None:
        """Adds a servicer by its generated `add_…_to_server` function; `name` is the service's full name."""
        add_to_server(servicer, self._server)
        self._services.append(name)

    @property
    def services(self) -> list[str]:
        return list(self._services)

    async def start(self, host: str, port: int, *, flag: str = "--port") -> int:
        """Listens and returns the port (the one chosen, for port 0).

        Raises SystemExit with one line naming `flag`, host and port when it cannot.
        """
        check_port(flag, host, port)
        enable_reflection(self._server, [*self._services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name])
        try:
            self.port = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise bind_error(flag, host, port, "the port is in use or the address is not this machine's")
        await self._server.start()
        self._started = True
        await self.set_serving(self._serving)
        return self.port

    async def set_serving(self, serving: bool) -> None:
        """What health checks answer, for every service and for the server as a whole (the empty name)."""
        self._serving = serving
        state = "SERVING" if serving else "NOT_SERVING"
        value = health_pb2.HealthCheckResponse.ServingStatus.Value(state)
        for name in ("", *self._services):
            await self._health.set(name, value)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuses new calls, waits up to `grace_s` for open ones, then cancels them."""
        if self._started:
            await self.set_serving(False)
        await self._server.stop(grace_s)
