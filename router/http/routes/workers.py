"""`/workers`, `/load`, `/flush_cache`, `/start_profile`, `/stop_profile`: the servers behind the router."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.http.body import check_media_type, parse_object, read_body
from router.http.errors import json_response
from router.http.schemas import WorkerBody, required
from router.http.services import HttpServices
from router.validation import out_of_range
from rpc.errors import BatonError, ErrorCode


def _role(name: str) -> Literal["prefill", "decode"]:
    if name == "prefill" or name == "decode":
        return "prefill" if name == "prefill" else "decode"
    raise out_of_range("role", name, "prefill or decode")


def worker_routes(services: HttpServices) -> list[Route]:
    async def workers(request: Request) -> Response:
        if request.method == "POST":
            return await add(request)
        return json_response({"workers": services.workers.describe()})

    async def add(request: Request) -> Response:
        check_media_type(request.headers)
        body = WorkerBody.parse(
            parse_object(await read_body(request.headers, request.receive, services.max_payload_bytes))
        )
        if body.role is None:
            raise required("role")
        if body.address is None:
            raise required("address")
        role = _role(body.role)
        services.workers.add(role, body.address)
        # It gets requests once it has answered and fits the others; until then its state says what is missing.
        return json_response({"role": role, "address": body.address, "accepted": True}, 202)

    async def remove(request: Request) -> Response:
        role, address = _role(request.path_params["role"]), request.path_params["address"]
        if not services.workers.remove(role, address):
            raise BatonError(
                ErrorCode.PATH_NOT_FOUND,
                f"no {role} server {address[:128]} is registered; see /workers",
                param="address",
            )
        return json_response({"role": role, "address": address, "removed": True})

    async def load(request: Request) -> Response:
        return json_response(services.load())

    async def flush_cache(request: Request) -> Response:
        return json_response({"results": await services.flush_cache()})

    async def start_profile(request: Request) -> Response:
        assert services.start_profile is not None
        return json_response({"results": await services.start_profile()})

    async def stop_profile(request: Request) -> Response:
        assert services.stop_profile is not None
        return json_response({"results": await services.stop_profile()})

    profiles = [
        Route("/start_profile", start_profile, methods=["POST"]),
        Route("/stop_profile", stop_profile, methods=["POST"]),
    ]
    return [
        *(profiles if services.start_profile is not None else ()),
        Route("/workers", workers, methods=["GET", "POST"]),
        Route("/workers/{role}/{address}", remove, methods=["DELETE"]),
        Route("/load", load, methods=["GET"]),
        Route("/flush_cache", flush_cache, methods=["POST"]),
    ]
