"""Errors as HTTP responses: one JSON form, a request id on each, nothing of Starlette's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from rpc.errors import BatonError, ErrorCode, http_error_body, http_error_headers
from rpc.ids import new_request_id

JSON_TYPE = "application/json"

ExceptionHandler = Callable[[Request, Exception], Response | Awaitable[Response]]


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def request_id_of(scope: Scope) -> str:
    """The id that this request's response carries; see `router.http.request_scope`."""
    request_id: str = scope.get("state", {}).get("request_id") or new_request_id()
    return request_id


def error_response(error: BatonError, request_id: str, headers: dict[str, str] | None = None) -> Response:
    """The error JSON of `error` with its status and headers."""
    return Response(
        msgspec.json.encode(http_error_body(error)),
        error.http_status,
        {**http_error_headers(error, request_id), **(headers or {})},
        JSON_TYPE,
    )


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, JSON_TYPE)


def path_not_found(method: str, path: str) -> BatonError:
    return BatonError(ErrorCode.PATH_NOT_FOUND, f"there is no path {method} {path[:200]}; /openapi.json has all")


def unauthenticated() -> BatonError:
    return BatonError(ErrorCode.UNAUTHENTICATED, "send the router's API key as the header Authorization: Bearer KEY")


def internal_error() -> BatonError:
    return BatonError(ErrorCode.UNKNOWN_ERROR, "internal error of the router; see its log for this request id")


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    """Starlette's refusals: unknown path, wrong method."""
    assert isinstance(exc, HTTPException)
    method, path = request.method, request.url.path
    headers = dict(exc.headers or {})
    if exc.status_code == 404:
        error = path_not_found(method, path)
    elif exc.status_code == 405:
        allowed = headers.get("Allow", "another method")
        error = BatonError(ErrorCode.METHOD_NOT_ALLOWED, f"{method} is not allowed on {path[:200]}; use {allowed}")
    else:
        error = BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "the request cannot be read")
    return error_response(error, request_id_of(request.scope), headers)


async def _on_baton_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, BatonError)
    return error_response(exc, request_id_of(request.scope))


EXCEPTION_HANDLERS: dict[int | type[Exception], ExceptionHandler] = {
    HTTPException: _on_http_exception,
    BatonError: _on_baton_error,
}
