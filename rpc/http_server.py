"""An HTTP server inside the running event loop: Starlette on uvicorn, without uvicorn's signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rpc.errors import BatonError, ErrorCode, http_error_body, http_error_headers
from rpc.ids import new_request_id, valid_request_id
from rpc.server import bind_error, check_port

ExceptionHandler = Callable[[Request, Exception], Response | Awaitable[Response]]

MAX_HEAD_BYTES = 65536

_REQUEST_ID_HEADERS = ("x-request-id", "x-trace-id", "x-correlation-id")


def header_request_id(headers: Headers) -> str:
    """The id that the client gave in a header, "" when there is none; INVALID_PARAMS for one that cannot be used."""
    for name in _REQUEST_ID_HEADERS:
        value = headers.get(name)
        if value is not None:
            if not valid_request_id(value):
                raise BatonError(
                    ErrorCode.INVALID_PARAMS,
                    f"{name} must be 1 to 128 characters out of A-Z a-z 0-9 . _ : -",
                    param=name,
                )
            return value
    return ""


def echoed_request_id(request: Request) -> str:
    """An id for the response whatever happened: the client's if it is valid, else a new one."""
    with contextlib.suppress(BatonError):
        return header_request_id(request.headers) or new_request_id()
    return new_request_id()


def error_response(
    error: BatonError, request_id: str = "", extra_headers: dict[str, str] | None = None
) -> JSONResponse:
    """The error JSON of `error` with its status and headers."""
    headers = {**http_error_headers(error, request_id or new_request_id()), **(extra_headers or {})}
    return JSONResponse(http_error_body(error), error.http_status, headers)


async def handle_http_exception(request: Request, exc: Exception) -> Response:
    """Starlette's own refusals (unknown path, wrong method) in Baton's form."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    headers = dict(exc.headers or {}) if isinstance(exc, HTTPException) else {}
    path = request.url.path[:200]
    if status == 404:
        error = BatonError(ErrorCode.PATH_NOT_FOUND, f"no such path: {request.method} {path}")
    elif status == 405:
        error = BatonError(ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not allowed on {path}")
    elif status == 413:
        error = BatonError(ErrorCode.PAYLOAD_TOO_LARGE, "the body is too large")
    elif status < 500:
        error = BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "the request cannot be read")
    else:
        error = BatonError(ErrorCode.UNKNOWN_ERROR, "internal error; see the server's log")
    return error_response(error, echoed_request_id(request), headers)


async def handle_baton_error(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, BatonError):
        raise exc
    return error_response(exc, echoed_request_id(request))


async def handle_unexpected(request: Request, exc: Exception) -> Response:
    """Starlette logs the exception itself, after this response was sent."""
    error = BatonError(ErrorCode.UNKNOWN_ERROR, "internal error; see the server's log")
    return error_response(error, echoed_request_id(request))


EXCEPTION_HANDLERS: dict[int | type[Exception], ExceptionHandler] = {
    HTTPException: handle_http_exception,
    BatonError: handle_baton_error,
    Exception: handle_unexpected,
}


class _Protocol(HttpToolsProtocol):
    """What cannot be parsed as HTTP, or has too large a head, is refused in Baton's form as well."""

    _head_bytes = 0  # of a head that is not complete yet
    _in_head = True
    _messages = 0  # read to their end
    _oversized = False

    @property
    def _max_head_bytes(self) -> int:
        return self.config.h11_max_incomplete_event_size or MAX_HEAD_BYTES  # the parser itself has no limit

    def data_received(self, data: bytes) -> None:
        messages = self._messages
        super().data_received(data)
        if not self._in_head or self._messages != messages:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > self._max_head_bytes and not self.transport.is_closing():
            self._oversized = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._max_head_bytes:
            self._oversized = True
            raise ValueError("the head is too large")  # the parser passes it on as its own error
        super().on_headers_complete()
        self._in_head = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._messages += 1

    def send_400_response(self, msg: str) -> None:
        text = "the request is not valid HTTP"
        if self._oversized:
            text = f"path and headers of the request exceed {self._max_head_bytes} bytes"
        error = BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, text)
        body = json.dumps(http_error_body(error)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **http_error_headers(error, new_request_id()),
        }
        lines = [f"HTTP/1.1 {error.http_status} Bad Request", *(f"{name}: {value}" for name, value in headers.items())]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """The process handles its signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One listening HTTP server of a process.

    `start` returns once it accepts; `stop` refuses new connections, waits up to `grace_s` for open responses
    and then cuts them.
    """

    def __init__(self, app: Starlette, *, keep_alive_s: float = 75, max_header_bytes: int = MAX_HEAD_BYTES) -> None:
        self._config = uvicorn.Config(
            app,
            loop="none",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nobody asks who a client behind a proxy is
            server_header=False,
            timeout_keep_alive=max(1, int(keep_alive_s)),
            h11_max_incomplete_event_size=max_header_bytes,
        )
        self._server = _Uvicorn(self._config)
        self._task: asyncio.Task[None] | None = None
        self.host = ""
        self.port = 0

    async def start(self, host: str, port: int, *, flag: str = "--port", timeout_s: float = 10.0) -> int:
        """Listens and returns the port. Raises SystemExit with one line naming `flag`, host and port if it
        cannot."""
        check_port(flag, host, port)
        sock = self._bind(flag, host, port)
        self.host, self.port = host, sock.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([sock]), name=f"http:{self.port}")
        async with asyncio.timeout(timeout_s):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                    raise bind_error(flag, host, port, "the HTTP server ended at its start")
                await asyncio.sleep(0.002)
        return self.port

    def _bind(self, flag: str, host: str, port: int) -> socket.socket:
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            sock = socket.socket(info[0], info[1], info[2])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit it: a token must not wait for the acknowledgement of the one
            # before.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.bind(info[4])
            sock.set_inheritable(False)
            return sock
        except OSError as error:
            raise bind_error(flag, host, port, str(error.strerror or error)) from None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ends the server. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        self._server.should_exit = True
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(task)
        except TimeoutError:
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                transport: Any = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
            for work in list(self._server.server_state.tasks):
                work.cancel()
            _, pending = await asyncio.wait({task}, timeout=2.0)
            if pending:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
