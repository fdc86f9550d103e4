"""`/openapi.json`: what the API takes and gives."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.http.errors import json_response
from router.http.openapi import document
from router.http.services import HttpServices


def document_routes(services: HttpServices) -> list[Route]:
    content = document(needs_key=bool(services.api_keys), profiling=services.start_profile is not None)

    async def openapi(request: Request) -> Response:
        return json_response(content)

    return [Route("/openapi.json", openapi, methods=["GET"])]
