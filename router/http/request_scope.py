"""What every HTTP request has: an id, the API key's check, figures, an answer in the one error form."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.errors import ClientGone, error_response, internal_error, unauthenticated
from rpc.errors import BatonError
from rpc.http_server import header_request_id
from rpc.ids import new_request_id
from rpc.metrics import Registry
from rpc.timeline import TIMELINE_KEY, timeline_text

# Probes and scrapers have no key, and ids that their senders make up are no reason to fail them.
OPEN_PATHS = frozenset(("/health", "/ping", "/live", "/liveness", "/ready", "/readiness", "/version", "/metrics"))
UNMATCHED = "unmatched"
WORKER_TEMPLATE = "/workers/{role}/{address}"
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
CLIENT_GONE = 499
GONE_LIMIT_S = 1.0

_log = logging.getLogger(__name__)


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


async def _has_left(receive: Receive) -> bool:
    """Whether the news that the client has left is there, or comes within GONE_LIMIT_S."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GONE_LIMIT_S):
            while (await receive())["type"] != "http.disconnect":
                pass
            return True
    return False


class AccountedApp(Protocol):
    """An endpoint whose requests are accounted for one by one, also those that do not get as far as it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def refused(self, headers: Headers, request_id: str, error: BatonError | None, arrival: float) -> None: ...


class RequestScope:
    """ASGI middleware around all endpoints. `paths` are the served ones: the `route` label of the figures. `posts` are
    those that get nearly all requests, by path; they are called straight from here, without Starlette's layers between,
    and told of what is refused before.

    Puts `request_id` into `scope["state"]`; an endpoint that learns a better one (from the body) replaces it there
    before it answers. A `ClientGone` that leaves the endpoint is counted as 499, any other exception answered with 500.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: frozenset[str],
        posts: Mapping[str, AccountedApp],
        metrics: Registry,
        api_keys: tuple[str, ...],
    ) -> None:
        self._app = app
        self._posts = posts
        self._paths = paths
        self._inflight = metrics.gauges("baton_http_inflight_requests", "route")
        self._requests = metrics.counters("baton_http_requests_total", "route", "method", "status")
        self._seconds = metrics.histograms("baton_http_request_duration_seconds", "route", "method")
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        route = path if path in self._paths else WORKER_TEMPLATE if path.startswith("/workers/") else UNMATCHED
        method: str = scope["method"] if scope["method"] in METHODS else "other"
        began = time.monotonic()
        state = scope.setdefault("state", {})
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = state["request_id"].encode()
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-request-id"]
                headers.append((b"x-request-id", request_id))
                timeline = state.get("timeline")
                if timeline is not None and not _is_stream(headers):  # a stream has it in its last event
                    headers.append((TIMELINE_KEY.encode(), timeline_text(timeline()).encode()))
                message = {**message, "headers": headers}
            try:
                await send(message)
            except RuntimeError:
                # uvloop's answer for a connection that it has closed and not told of yet.
                if await _has_left(receive):
                    raise ClientGone from None
                raise

        inflight = self._inflight[(route,)]
        inflight.inc()
        try:
            try:
                await self._answer(scope, receive, send_with_id, path, began)
            except ClientGone:
                status = CLIENT_GONE
            except Exception as error:
                if isinstance(error, BatonError) and status == CLIENT_GONE:  # an endpoint's refusal
                    with contextlib.suppress(ClientGone):
                        await error_response(error, state["request_id"])(scope, receive, send_with_id)
                    return
                _log.exception("request %s failed unexpectedly", state["request_id"])
                if status != CLIENT_GONE:  # it has begun to answer; only breaking it off tells the client
                    raise
                with contextlib.suppress(ClientGone):
                    await error_response(internal_error(), state["request_id"])(scope, receive, send_with_id)
            finally:
                self._requests[route, method, str(status)].inc()
                self._seconds[route, method].observe(time.monotonic() - began)
        finally:
            inflight.dec()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, path: str, began: float) -> None:
        headers = Headers(scope=scope)
        state = scope["state"]
        post = self._posts.get(path) if scope["method"] == "POST" else None
        state["request_id"] = ""
        try:
            state["request_id"] = state["header_request_id"] = header_request_id(headers)
        except BatonError as error:
            if path not in OPEN_PATHS:
                state["request_id"] = new_request_id()
                if post is not None:
                    post.refused(headers, state["request_id"], error, began)
                await error_response(error, state["request_id"])(scope, receive, send)
                return
        state["request_id"] = state["request_id"] or new_request_id()
        if self._keys and path not in OPEN_PATHS and not self._has_key(headers):
            refusal = unauthenticated()
            if post is not None:
                post.refused(headers, state["request_id"], refusal, began)
            response = error_response(refusal, state["request_id"], {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        await (self._app if post is None else post)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        """Compares with every key, each in constant time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        raw = given.strip().encode("latin-1", "replace")
        found = [hmac.compare_digest(raw, key) for key in self._keys]
        return any(found)
