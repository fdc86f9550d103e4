"""How a request was refused, read from the live answer and compared with the documented table of error codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc
import httpx
from google.rpc import error_details_pb2, status_pb2

from tests.integration.cluster import ROOT

DETAILS = "grpc-status-details-bin"
MAX_DETAILS_BYTES = 4096


@dataclass(frozen=True)
class Documented:
    """One row of docs/error_codes.md."""

    name: str
    grpc: str
    http: int | None
    retry_after: bool
    error_type: str
    openai_code: str
    retryable: bool


@cache
def documented() -> Mapping[int, Documented]:
    """The table of docs/error_codes.md by number."""
    rows = {}
    for line in (ROOT / "docs" / "error_codes.md").read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if len(cells) < 9 or not cells[0].isdigit():
            continue
        number, name, status, http, kind, word, retry = cells[:7]
        found = re.match(r"\d+", http)
        rows[int(number)] = Documented(
            name, status, int(found[0]) if found else None, "Retry-After" in http, kind, word, retry in ("yes", "later")
        )
    assert len(rows) > 50, "docs/error_codes.md has no table"
    return rows


@dataclass(frozen=True)
class Refusal:
    """A failed request. `code` 0: the transport refused it, with none of Baton's codes."""

    status: int | grpc.StatusCode
    code: int
    message: str
    param: str | None = None
    request_id: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


def of_response(response: httpx.Response) -> Refusal:
    """Reads an HTTP error response and checks its form against the table."""
    content = response.json()
    assert set(content) == {"error"}, response.text
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code", "baton_code"}, response.text
    row = documented()[error["baton_code"]]
    assert response.status_code == (row.http or 500), response.text  # without one: codes that end a start-up
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-baton-error"] == row.name
    assert ("retry-after" in response.headers) == row.retry_after
    expected = (row.error_type, row.openai_code) if row.http else ("server_error", row.name)
    assert (error["type"], error["code"]) == expected
    assert isinstance(error["message"], str) and 0 < len(error["message"]) <= 600
    assert len(response.content) <= 2048
    request_id = response.headers["x-request-id"]
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", request_id)
    metadata = {}
    if "x-baton-cause" in response.headers:
        name, _, number = response.headers["x-baton-cause"].partition("; code=")
        assert documented()[int(number)].name == name
        metadata = {"cause_code": number, "cause": name}
    return Refusal(response.status_code, error["baton_code"], error["message"], error["param"], request_id, metadata)


def of_call(error: grpc.RpcError) -> Refusal:
    """Reads a failed call and checks its details against the table."""
    payloads = [value for key, value in error.trailing_metadata() or () if key == DETAILS]
    if not payloads:
        return Refusal(error.code(), 0, error.details() or "")
    (payload,) = payloads
    assert len(payload) <= MAX_DETAILS_BYTES
    status = status_pb2.Status.FromString(payload)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    kinds = [detail.TypeName() for detail in status.details]
    assert status.details[0].Unpack(info), kinds
    number = int(info.metadata["code"])
    row = documented()[number]
    assert (info.domain, info.reason) == ("baton", row.name)
    assert (error.code().name, error.code().value[0]) == (row.grpc, status.code)
    assert error.details() == status.message
    assert status.message.strip()
    assert kinds[1:] == (["google.rpc.RetryInfo"] if row.retryable else [])
    if row.retryable:
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
    metadata = dict(info.metadata)
    return Refusal(
        error.code(), number, status.message, metadata.get("param"), metadata.get("request_id", ""), metadata
    )
