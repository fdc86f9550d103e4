"""The OpenAPI document is complete, and no request made from it, good or bad, makes the router fail.

`BATON_FUZZ_CASES=10000 pytest tests/conformance/test_openapi.py` sends that many, which takes minutes of two cores,
most of them to make the requests up; without the variable it is a short run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from starlette.routing import Route

from router.http.app import build_app
from router.http.openapi import document
from router.http.openapi_fields import FIELDS
from router.http.schemas import AbortBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, WorkerBody
from router.http.services import HttpServices
from tests.conformance.live_cluster import API_KEY, CONTEXT, Live

schemathesis = pytest.importorskip("schemathesis", reason="it makes requests of the document")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CASES = int(os.environ.get("BATON_FUZZ_CASES", "200"))
AS_DOCUMENTED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    (path, method) for path, item in document(needs_key=True)["paths"].items() for method in item if path != "/metrics"
]
# Most of what can be wrong is in a body.
WITH_BODY = [(path, method) for path, method in OPERATIONS if method == "post" and path != "/flush_cache"]

HEADERS = {"Authorization": f"Bearer {API_KEY}"}

pytestmark = pytest.mark.timeout(max(120, CASES))
api = schemathesis.openapi.from_dict(document(needs_key=True))


@api.hook
def map_body(context: Any, body: Any) -> Any:
    """Keeps good requests small: what is too large or of a wrong type stays as it is."""
    if not isinstance(body, dict):
        return body
    for name, most, range_ends in (("n", 2, 128), ("best_of", 2, 128), ("max_tokens", 4, CONTEXT)):
        value = body.get(name)
        if type(value) is int and most < value <= range_ends:
            body[name] = most
    if "messages" in body and body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = 4  # absent, it is the rest of the context
    if isinstance(body.get("prompt"), list):
        body["prompt"] = body["prompt"][:4]
    if isinstance(body.get("address"), str):
        body["address"] = body["address"][:200]
    return body


@pytest.fixture(scope="module", autouse=True)
def nothing_stays(live: Live) -> Iterator[None]:
    """Servers that were registered are taken out again, and the cluster is as it was."""
    before = {(w["role"], w["address"]) for w in live.http.get("/workers").json()["workers"]}
    yield
    for worker in live.http.get("/workers").json()["workers"]:
        if (worker["role"], worker["address"]) not in before:
            live.http.delete(f"/workers/{worker['role']}/{quote(worker['address'], safe=':')}").raise_for_status()
    assert {(w["role"], w["address"]) for w in live.http.get("/workers").json()["workers"]} == before
    live.check_serving()
    assert live.defects() == []


def test_document_when_it_is_served_then_it_has_every_path_and_method_of_the_application(live: Live) -> None:
    served = live.http.get("/openapi.json").json()
    assert served == document(needs_key=True)
    assert live.http.get("/openapi.json", headers={"Authorization": ""}).status_code == 401
    routes: set[tuple[str, str]] = set()
    unused: dict[str, Any] = {field.name: None for field in fields(HttpServices) if field.name != "api_keys"}
    unused["server_info"] = dict
    for route in build_app(HttpServices(**unused)).routes:
        assert isinstance(route, Route)
        routes |= {(route.path, method.lower()) for method in route.methods or () if method != "HEAD"}
    assert routes == {(path, method) for path, item in served["paths"].items() for method in item}


@pytest.mark.parametrize("kind", [AbortBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, WorkerBody])
def test_field_when_a_body_has_it_then_the_document_says_what_it_is(kind: type) -> None:
    undocumented = set(kind.model_fields) - FIELDS.keys() - {"logprobs"}  # type: ignore[attr-defined]
    assert undocumented == set()


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda value: str(value))
def test_request_when_it_is_made_from_the_document_then_the_router_answers_as_documented(
    live: Live, path: str, method: str
) -> None:
    share = CASES // len(OPERATIONS)
    modes = {GenerationMode.POSITIVE: max(2, share // 3)}
    if (path, method) in WITH_BODY:  # what breaks the document's own rules too
        modes = {GenerationMode.POSITIVE: max(2, 2 * share), GenerationMode.NEGATIVE: max(2, share)}
    for mode, count in modes.items():
        check_answers(live, api[path][method.upper()].as_strategy(generation_mode=mode), count)


def check_answers(live: Live, cases: SearchStrategy[schemathesis.Case], count: int) -> None:
    """Sends so many of the cases. Nothing is made smaller after a failure: its message has the request."""

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    def send(case: schemathesis.Case) -> None:
        response = case.call(base_url=f"http://{live.cluster.router.http}", headers=HEADERS, timeout=30.0)
        case.validate_response(response, checks=AS_DOCUMENTED)
        if response.status_code == 202:  # not one watched server more for each case
            worker = response.json()
            live.http.delete(f"/workers/{worker['role']}/{quote(worker['address'], safe=':')}").raise_for_status()

    given(case=cases)(send)()
