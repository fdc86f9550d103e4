"""The router's HTTP application: every endpoint under one request scope."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route

from router.http.errors import EXCEPTION_HANDLERS
from router.http.request_scope import RequestScope
from router.http.routes.aborts import abort_routes
from router.http.routes.documents import document_routes
from router.http.routes.generation import GenerationEndpoint
from router.http.routes.models import model_routes
from router.http.routes.workers import worker_routes
from router.http.services import HttpServices
from rpc.http_side import SideCallbacks, side_routes


def build_app(services: HttpServices) -> Starlette:
    """Serves it with `rpc.http_server.HttpServer`."""

    def not_ready() -> list[str]:
        ready, reasons = services.serving.ready()
        return [] if ready else list(reasons) or ["not ready"]

    generation = {
        "/v1/chat/completions": GenerationEndpoint(services, "chat"),
        "/v1/completions": GenerationEndpoint(services, "completions"),
    }
    routes: list[BaseRoute] = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generation.items()),
        *model_routes(services),
        *worker_routes(services),
        *abort_routes(services),
        *document_routes(services),
        *side_routes(
            services.metrics,
            SideCallbacks(ready=not_ready, before_scrape=services.before_scrape, server_info=services.server_info),
        ),
    ]
    paths = frozenset(route.path for route in routes if isinstance(route, Route) and "{" not in route.path)
    scope = Middleware(
        RequestScope, paths=paths, posts=generation, metrics=services.metrics, api_keys=services.api_keys
    )
    app = Starlette(routes=routes, middleware=[scope], exception_handlers=EXCEPTION_HANDLERS)
    app.router.redirect_slashes = False
    return app
