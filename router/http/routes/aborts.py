"""`/abort_request`: ends a request from outside."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.http.body import check_media_type, parse_object, read_body
from router.http.errors import json_response
from router.http.schemas import AbortBody, required
from router.http.services import HttpServices
from rpc.ids import check_request_id


def abort_routes(services: HttpServices) -> list[Route]:
    async def abort(request: Request) -> Response:
        check_media_type(request.headers)
        body = AbortBody.parse(
            parse_object(await read_body(request.headers, request.receive, services.max_payload_bytes))
        )
        if body.request_id is None:
            raise required("request_id")
        found = services.serving.abort(check_request_id(body.request_id))
        return json_response({"request_id": body.request_id, "found": found})

    return [Route("/abort_request", abort, methods=["POST"])]
