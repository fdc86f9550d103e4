"""The HTTP side of a server: figures, health and what is going on inside. No inference API."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rpc.http_server import EXCEPTION_HANDLERS, HttpServer
from rpc.metrics import CONTENT_TYPE, Registry
from rpc.version import version

Json: TypeAlias = dict[str, Any] | list[Any]
Answer: TypeAlias = Json | Awaitable[Json]

_NO_STORE = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class SideCallbacks:
    """Where the answers come from. Each may be a coroutine function but the first two.

    `ready()` returns the reasons why the process is not ready; none means ready. `before_scrape()` brings
    gauges up to date. `server_info()` is the effective configuration without secrets. A callback that is None
    has no endpoint.
    """

    ready: Callable[[], list[str]]
    before_scrape: Callable[[], None] | None = None
    server_info: Callable[[], Answer] | None = None
    ledger: Callable[[], Answer] | None = None
    requests: Callable[[], Answer] | None = None


async def _resolve(answer: Answer) -> Json:
    return await answer if inspect.isawaitable(answer) else answer


def side_routes(registry: Registry, callbacks: SideCallbacks) -> list[Route]:
    """The routes of a process beside its API; the router has them among its own."""

    async def metrics(request: Request) -> Response:
        if callbacks.before_scrape is not None:
            callbacks.before_scrape()
        return Response(registry.render(), headers={"Content-Type": CONTENT_TYPE, **_NO_STORE})

    async def live(request: Request) -> Response:
        return Response(status_code=200, headers=_NO_STORE)

    async def ready(request: Request) -> Response:
        reasons = callbacks.ready()
        if not reasons:
            return JSONResponse({"ready": True, "reasons": []}, headers=_NO_STORE)
        return JSONResponse({"ready": False, "reasons": reasons}, 503, {**_NO_STORE, "Retry-After": "1"})

    async def health(request: Request) -> Response:
        ok = not callbacks.ready()
        return Response(status_code=200 if ok else 503, headers=_NO_STORE if ok else {**_NO_STORE, "Retry-After": "1"})

    async def show_version(request: Request) -> Response:
        return JSONResponse({"version": version(), "python": platform.python_version()}, headers=_NO_STORE)

    def shown(callback: Callable[[], Answer]) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            return JSONResponse(await _resolve(callback()), headers=_NO_STORE)

        return show

    routes = [
        Route("/metrics", metrics),
        Route("/live", live),
        Route("/liveness", live),
        Route("/ready", ready),
        Route("/readiness", ready),
        Route("/health", health),
        Route("/ping", health),
        Route("/version", show_version),
    ]
    optional = {
        "/server_info": callbacks.server_info,
        "/debug/ledger": callbacks.ledger,
        "/debug/requests": callbacks.requests,
    }
    routes += [Route(path, shown(callback)) for path, callback in optional.items() if callback is not None]
    return routes


def side_app(registry: Registry, callbacks: SideCallbacks) -> Starlette:
    """The HTTP application of a prefill or decode server."""
    return Starlette(routes=side_routes(registry, callbacks), exception_handlers=EXCEPTION_HANDLERS)


class SideServer:
    """Serves `side_app` on a port of its own."""

    def __init__(self, registry: Registry, callbacks: SideCallbacks) -> None:
        self._http = HttpServer(side_app(registry, callbacks))

    @property
    def port(self) -> int:
        return self._http.port

    async def start(self, host: str, port: int, *, flag: str = "--metrics-port") -> int:
        """Listens and returns the port. Raises SystemExit with one line when it cannot."""
        return await self._http.start(host, port, flag=flag)

    async def stop(self, grace_s: float = 1.0) -> None:
        await self._http.stop(grace_s)
