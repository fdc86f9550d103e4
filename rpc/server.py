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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
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
from rpc.errors import BatonError, ErrorCode, clean_text
from rpc.ids import check_request_id, new_request_id, valid_request_id
from rpc.logs import request_id_var
from rpc.metrics import Registry
from rpc.reflection import enable_reflection
from rpc.stream_context import StreamContext
from rpc.timeline import TIMELINE_KEY, asks_for_timeline, timeline_text
from rpc.trace_context import trace_context

REQUEST_ID_KEY = "x-request-id"
# What a caller says beside its message: nothing of this request is to be logged but a failure; its trace (W3C).
PRIVATE_KEY = "x-baton-private"
TRACE_KEYS = ("traceparent", "tracestate")
UNKNOWN_METHOD = "unknown"
DEADLINE_TOLERANCE_S = 0.05
# A request ends up to 0.1 s before its deadline where its KV is read in a peer's memory (`return_before_deadline_s` of
# cache_store/settings.py), and the calls for it on other servers with it.
EARLY_END_S = 0.1

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
    private: bool = False
    traceparent: str = ""  # as it came: whoever uses it checks its form
    tracestate: str = ""


@dataclass(frozen=True)
class RefusedCall:
    """A call for which nothing was done: the method is unknown, the id is none, the message cannot be read or is too
    large, the key is missing. `method` is the full name, or what the caller made up, cut short."""

    method: str
    known: bool  # whether there is such a method
    request_id: str  # the caller's, or a new one
    error: BatonError
    private: bool = False
    traceparent: str = ""
    tracestate: str = ""


RefusedHook = Callable[[RefusedCall], None]

_NOTED_KEYS = frozenset((PRIVATE_KEY, *TRACE_KEYS))
_MAX_RECEIVED = "grpc.max_receive_message_length"
# gRPC itself refuses a message with a status that has no code; so it takes some more than is allowed.
_TAKEN_OF_LIMIT = 2
_METHOD_TEXT = 128

# What gRPC's own services end calls with: the health service with NOT_FOUND for a service that it does not know.
_CODES_OF_OTHERS = {
    grpc.StatusCode.NOT_FOUND: ErrorCode.PATH_NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.METHOD_NOT_ALLOWED,
}


def says_yes(value: str) -> bool:
    """Whether a header asks for what it is named after: any value does that is no word for no."""
    return value.strip().lower() not in ("", "0", "false", "no", "off")


class _Unreadable:
    """Stands for a request whose bytes are not taken, and says why not."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        self.code = code
        self.message = message


_NO_MESSAGE = _Unreadable(
    ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
    "the message cannot be read: it is no protobuf of this method, or text in it is not UTF-8",
)


class Methods(grpc.GenericRpcHandler):
    """All methods of one server, each wrapped once, at its first call.

    Servicers are added to it as they would be to a server. Their methods are not registered with gRPC one by one: the
    asyncio server would wait for a call of each of them apart, and go through them all at every call.
    """

    def __init__(
        self, registry: Registry | None, max_rpc_s: float, max_bytes: int = 0, on_refused: RefusedHook | None = None
    ) -> None:
        self._registry = registry
        self._max_rpc_s = max_rpc_s
        self._max_bytes = max_bytes
        self._on_refused = on_refused
        self._added: list[grpc.GenericRpcHandler] = []
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._added.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Generated code brings the same methods in this form too."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC: what serves a call."""
        path = handler_call_details.method
        known = self._wrapped.get(path)
        if known is not None:
            return known
        for added in self._added:
            handler = added.service(handler_call_details)
            if handler is not None:
                wrapped = self._wrapped[path] = self._wrap(path.lstrip("/"), cast(Any, handler))
                return wrapped
        if self._registry is not None:
            # The path is the caller's invention, so it must not become a label.
            code = ErrorCode.METHOD_NOT_ALLOWED.name
            self._registry.inc("baton_rpc_requests_total", method=UNKNOWN_METHOD, code=code)
        if self._on_refused is not None:
            self._on_refused(_unknown_method(handler_call_details))
        return None

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        if handler.request_streaming:  # reflection
            return cast("grpc.RpcMethodHandler[Any, Any]", handler)  # the class cannot be subscripted at run time
        if handler.response_streaming:
            body = handler.unary_stream
            writes_itself = inspect.iscoroutinefunction(body)
            return grpc.unary_stream_rpc_method_handler(
                cast(Any, self._serving(method, _streaming(body if writes_itself else _writing(body)))),
                _tolerant(handler.request_deserializer, self._max_bytes),
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            cast(Any, self._serving(method, handler.unary_unary)),
            _tolerant(handler.request_deserializer, self._max_bytes),
            handler.response_serializer,
        )

    def _serving(self, method: str, body: Callable[[Any, _Context], Awaitable[Any]]) -> object:
        registry, max_rpc_s, on_refused = self._registry, self._max_rpc_s, self._on_refused

        async def serve(request: Any, context: _Context) -> Any:
            scope = _CallScope(method, context, max_rpc_s, registry)
            try:
                scope.enter()
                if type(request) is _Unreadable:
                    raise BatonError(request.code, request.message)
                scope.handled = True
                if scope.has_own_deadline:  # gRPC cancels this task when it passes
                    answer = await body(request, context)
                else:
                    async with _limit(scope.deadline):
                        answer = await body(request, context)
                if scope.timeline is not None:
                    context.set_trailing_metadata(scope.trailing())
                return answer
            except BaseException as error:
                if on_refused is not None and isinstance(error, BatonError) and scope.refuses_with(error):
                    on_refused(scope.refused(error))
                await scope.failed(error)
                raise
            finally:
                scope.leave()

        return serve


def _unknown_method(details: grpc.HandlerCallDetails) -> RefusedCall:
    given = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
    request_id = given.get(REQUEST_ID_KEY, "")
    return RefusedCall(
        method=clean_text(str(details.method).lstrip("/"), _METHOD_TEXT),
        known=False,
        request_id=request_id if valid_request_id(request_id) else new_request_id(),
        error=BatonError(ErrorCode.METHOD_NOT_ALLOWED, "this server has no such method"),
        private=says_yes(given.get(PRIVATE_KEY, "")),
    )


def _tolerant(deserialize: Callable[[bytes], Any] | None, max_bytes: int) -> Callable[[bytes], Any]:
    """Bytes that cannot be parsed, or are more than `max_bytes` (0: any number), become `_Unreadable`: left to gRPC,
    they would be an error without details."""
    too_large = _Unreadable(
        ErrorCode.PAYLOAD_TOO_LARGE, f"the message is larger than the {max_bytes} bytes that this server takes"
    )

    def parse(data: bytes) -> Any:
        if 0 < max_bytes < len(data):
            return too_large
        try:
            return data if deserialize is None else deserialize(data)
        except (DecodeError, ValueError):
            return _NO_MESSAGE

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


def _streaming(body: Callable[[Any, _Context], Awaitable[None]]) -> Callable[[Any, _Context], Awaitable[None]]:
    async def serve(request: Any, context: _Context) -> None:
        await body(request, cast(_Context, StreamContext(context)))

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
    passed = remaining is not None and remaining <= EARLY_END_S + DEADLINE_TOLERANCE_S
    return ErrorCode.GENERATE_TIMEOUT if passed else ErrorCode.CANCELLED


class _CallScope:
    """From the start of a call to its end: figures, and the status that an exception becomes."""

    def __init__(self, method: str, context: _Context, max_rpc_s: float, registry: Registry | None) -> None:
        self.method = method
        self.context = context
        self.request_id = ""
        self.request_id_given = False
        self.handled = False  # whether the handler has seen it
        self.noted: dict[str, str] = {}
        remaining = context.time_remaining()
        self.has_own_deadline = remaining is not None
        self.deadline = Deadline.of_remaining(remaining, max_rpc_s)
        # What makes the timeline, if the caller asked for it.
        self.timeline: Callable[[], Mapping[str, float]] | None = None
        self._began = time.monotonic()
        self._succeeded = True
        self._code = ErrorCode.NONE_ERROR.name
        self._registry = registry
        if registry is not None:
            registry.inc("baton_rpc_inflight", method=method)

    def enter(self) -> None:
        """Reads the id. Raises INVALID_PARAMS for one that is none."""
        request_id_var.set("")  # whatever the server was started with
        given = ""
        for key, value in self.context.invocation_metadata() or ():
            if key == REQUEST_ID_KEY:
                given = value if isinstance(value, str) else value.decode("ascii", "replace")
            elif key in _NOTED_KEYS and isinstance(value, str):
                self.noted[key] = value
        self.request_id_given = bool(given)
        self.request_id = check_request_id(given) if given else new_request_id()
        # gRPC serves each call in a task of its own, so these end with the task.
        _scope.set(self)
        request_id_var.set(self.request_id)

    def refuses_with(self, error: BatonError) -> bool:
        """Whether nothing was done for the caller: its handler has not seen the call, or asks for a key first."""
        return not self.handled or error.code is ErrorCode.UNAUTHENTICATED

    def refused(self, error: BatonError) -> RefusedCall:
        """This call, of which its handler books nothing."""
        self.request_id = self.request_id or new_request_id()
        return RefusedCall(
            method=self.method,
            known=True,
            request_id=self.request_id,
            error=error,
            private=says_yes(self.noted.get(PRIVATE_KEY, "")),
            traceparent=self.noted.get("traceparent", ""),
            tracestate=self.noted.get("tracestate", ""),
        )

    async def failed(self, error: BaseException) -> None:
        """Ends the call with the status of `error`, unless it has one already or nobody waits for it any more."""
        self._succeeded = False
        self._code = self._code_of(error)
        if isinstance(error, BatonError):
            await self._fail(error)
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            _log.error("unexpected error in %s", self.method, exc_info=error)
            await self._fail(BatonError(ErrorCode.UNKNOWN_ERROR, "internal error; see the server's log"))

    def leave(self) -> None:
        """Books the call. After a success that comes last: the task still has to send the answer."""
        seconds = time.monotonic() - self._began
        if self._registry is None:
            return
        if self._succeeded:
            asyncio.get_running_loop().call_soon(self._book, self._registry, seconds)
        else:
            self._book(self._registry, seconds)

    def _book(self, registry: Registry, seconds: float) -> None:
        registry.dec("baton_rpc_inflight", method=self.method)
        registry.observe("baton_rpc_duration_seconds", seconds, method=self.method)
        registry.inc("baton_rpc_requests_total", method=self.method, code=self._code)

    def _code_of(self, error: BaseException) -> str:
        if isinstance(error, BatonError):
            return error.code.name
        if isinstance(error, grpc.aio.AbortError):
            # The handler ended the call itself; its details say with which code.
            context = cast(Any, self.context)
            parsed = status.parse_status(status.details_payload(context.trailing_metadata() or ()))
            if parsed is not None:
                return parsed.code.name
            return _CODES_OF_OTHERS.get(context.code(), ErrorCode.UNKNOWN_ERROR).name
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return cancel_code(self.context).name
        return ErrorCode.UNKNOWN_ERROR.name

    async def _fail(self, error: BatonError) -> NoReturn:
        # The handler may have found the id in the message itself.
        request_id = request_id_var.get() or self.request_id
        try:
            await status.abort(self.context, error, request_id=request_id, more=self.trailing())
        except grpc.aio.InternalError:
            # The caller has gone while the answer was on its way: there is no call left to end. As a cancelled one gRPC
            # lets it rest; any other exception it would log as a defect and try to answer once more.
            raise asyncio.CancelledError from None

    def trailing(self) -> tuple[tuple[str, str], ...]:
        """What the caller is told at the end of the call, besides how it ended."""
        return () if self.timeline is None else ((TIMELINE_KEY, timeline_text(self.timeline())),)


_scope: ContextVar[_CallScope | None] = ContextVar("baton_rpc_call", default=None)


def current_call() -> RpcCall:
    """The call that the present task serves. Raises LookupError outside of a handler."""
    scope = _scope.get()
    if scope is None:
        raise LookupError("no RPC is being served by this task")
    return RpcCall(
        method=scope.method,
        request_id=scope.request_id,
        request_id_given=scope.request_id_given,
        deadline=scope.deadline,
        peer=scope.context.peer(),
        private=says_yes(scope.noted.get(PRIVATE_KEY, "")),
        traceparent=scope.noted.get("traceparent", ""),
        tracestate=scope.noted.get("tracestate", ""),
    )


def tell_timeline(seconds: Callable[[], Mapping[str, float]]) -> bool:
    """The present call's caller gets `seconds()` as trailing metadata at the end, if it asked for a timeline; whether
    it did. Outside of a call nobody did."""
    scope = _scope.get()
    if scope is None or not asks_for_timeline(scope.context.invocation_metadata() or ()):
        return False
    scope.timeline = seconds
    return True


def current_traceparent() -> str:
    """The W3C trace context that the present task's call came with; "" without one."""
    scope = _scope.get()
    return "" if scope is None else trace_context(scope.noted.get("traceparent", ""), "")[0]


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
    come without a deadline (0: no limit). `extra` options replace or extend SERVER_OPTIONS. `on_refused` is told of the
    calls for which nothing was done; it must not block.
    """

    def __init__(
        self,
        registry: Registry | None = None,
        *,
        max_rpc_s: float = 7200.0,
        extra: Options | None = None,
        on_refused: RefusedHook | None = None,
    ) -> None:
        options = dict(SERVER_OPTIONS)
        options.update(dict(extra or []))
        max_bytes = int(options.get(_MAX_RECEIVED, 0))
        if max_bytes > 0:
            options[_MAX_RECEIVED] = _TAKEN_OF_LIMIT * max_bytes
        self._server = grpc.aio.server(options=list(options.items()))
        self._methods = Methods(registry, max_rpc_s, max_bytes, on_refused)
        self._server.add_generic_rpc_handlers((self._methods,))
        self._health = health_aio.HealthServicer()
        self._services: list[str] = []
        self._serving = False
        self._started = False
        self.port = 0
        health_pb2_grpc.add_HealthServicer_to_server(self._health, cast(Any, self._methods))

    @property
    def server(self) -> grpc.aio.Server:
        return self._server

    def add_service(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str) -> None:
        """Adds a servicer by its generated `add_…_to_server` function; `name` is the service's full name."""
        add_to_server(servicer, cast(Any, self._methods))
        self._services.append(name)

    @property
    def services(self) -> list[str]:
        return list(self._services)

    async def start(self, host: str, port: int, *, flag: str = "--port") -> int:
        """Listens and returns the port (the one chosen, for port 0).

        Raises SystemExit with one line naming `flag`, host and port when it cannot.
        """
        check_port(flag, host, port)
        enable_reflection(self._methods, [*self._services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name])
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
