"""The error table and the exception that carries its codes."""

from __future__ import annotations

import pickle

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import (
    TABLE,
    BatonError,
    ErrorCode,
    clean_text,
    http_error_body,
    http_error_headers,
    openai_type,
    without_addresses,
)

CODES = [code for code in ErrorCode if code is not ErrorCode.NONE_ERROR]


def test_table_has_one_row_for_every_code() -> None:
    assert set(TABLE) == set(ErrorCode)
    assert all(spec.code is code for code, spec in TABLE.items())


@pytest.mark.parametrize("code", CODES, ids=lambda c: c.name)
def test_row_is_complete(code: ErrorCode) -> None:
    spec = TABLE[code]
    assert spec.grpc is not grpc.StatusCode.OK
    assert spec.doc
    assert spec.openai_code
    assert spec.http is None or 400 <= spec.http < 600
    assert spec.http != 422


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (502, "server_error"),
        (503, "service_unavailable_error"),
        (504, "timeout_error"),
    ],
)
def test_openai_type_of_status(status: int, kind: str) -> None:
    assert openai_type(status) == kind


@pytest.mark.parametrize(
    ("number", "word"),
    [(511, "context_length_exceeded"), (607, "context_length_exceeded"), (40400, "model_not_found"),
     (40100, "invalid_api_key"), (605, "INVALID_PARAMS"), (8403, "NO_DECODE_WORKER")],
)  # fmt: skip
def test_openai_code_is_openais_word_where_there_is_one(number: int, word: str) -> None:
    assert TABLE[ErrorCode(number)].openai_code == word


@pytest.mark.invariant("RPC-11")
@pytest.mark.parametrize(
    ("number", "status", "http", "retryable", "breaker"),
    [
        (511, "OUT_OF_RANGE", 400, False, False),
        (514, "INTERNAL", 500, False, True),
        (602, "RESOURCE_EXHAUSTED", 503, True, False),
        (605, "INVALID_ARGUMENT", 400, False, False),
        (8301, "RESOURCE_EXHAUSTED", 503, True, False),
        (8302, "UNAVAILABLE", 502, True, True),
        (8303, "UNAVAILABLE", 502, True, True),
        (8304, "DEADLINE_EXCEEDED", 504, True, True),
        (8305, "UNAVAILABLE", 502, True, True),
        (8306, "UNAVAILABLE", 502, True, True),
        (8307, "DEADLINE_EXCEEDED", 504, True, True),
        (8308, "INTERNAL", 502, True, True),
        (8309, "INTERNAL", 502, True, True),
        (8100, "CANCELLED", 499, False, False),
        (8204, "DEADLINE_EXCEEDED", 504, False, True),
        (8212, "INTERNAL", 502, True, True),
        (8402, "UNAVAILABLE", 503, True, False),
        (8513, "INTERNAL", 500, False, True),
        (8602, "ABORTED", 502, True, False),
        (8603, "DATA_LOSS", 502, True, True),
        (8610, "UNAVAILABLE", 503, True, False),
        (8612, "INTERNAL", None, False, True),
    ],
)
def test_classification_of_code(number: int, status: str, http: int | None, retryable: bool, breaker: bool) -> None:
    spec = TABLE[ErrorCode(number)]
    assert (spec.grpc.name, spec.http, spec.retryable, spec.breaker) == (status, http, retryable, breaker)


@pytest.mark.invariant("RPC-10")
def test_error_without_code_cannot_be_built() -> None:
    with pytest.raises(ValueError):
        BatonError(ErrorCode.NONE_ERROR)
    with pytest.raises(ValueError):
        BatonError(12345)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BatonError()  # type: ignore[call-arg]


def test_error_with_empty_message_has_the_codes_name() -> None:
    assert BatonError(ErrorCode.ENGINE_DEAD).message == "ENGINE_DEAD"


def test_with_context_when_a_key_exists_keeps_the_first_value() -> None:
    error = BatonError(ErrorCode.PEER_RESTARTED, metadata={"peer": "a"})
    assert error.with_context(peer="b", rank="1") is error
    assert error.metadata == {"peer": "a", "rank": "1"}
    assert error.code is ErrorCode.PEER_RESTARTED


def test_from_number_when_unknown_is_514_and_keeps_the_number() -> None:
    error = BatonError.from_number(9999, "hm")
    assert (error.code, error.metadata["remote_code"], error.breach) == (
        ErrorCode.UNKNOWN_ERROR,
        "9999",
        "unknown_code",
    )


@pytest.mark.invariant("RPC-10")
def test_from_number_when_zero_is_a_contract_breach() -> None:
    error = BatonError.from_number(0)
    assert (error.code, error.breach) == (ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, "no_code")


@pytest.mark.parametrize("code", CODES, ids=lambda c: c.name)
def test_http_error_has_the_documented_form(code: ErrorCode) -> None:
    error = BatonError(code, "say what to change", param="field")
    body = http_error_body(error)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code", "baton_code"}
    assert body["error"]["baton_code"] == int(code)
    headers = http_error_headers(error, "id-1")
    assert headers["x-baton-error"] == code.name
    assert headers["X-Request-Id"] == "id-1"
    assert ("Retry-After" in headers) == (error.http_status in (429, 503))


@pytest.mark.parametrize(("seconds", "header"), [(None, "1"), (0.0, "1"), (0.2, "1"), (2.01, "3"), (30, "30")])
def test_retry_after_is_whole_seconds_of_at_least_one(seconds: float | None, header: str) -> None:
    error = BatonError(ErrorCode.SERVER_DRAINING, retry_after_s=seconds)
    assert http_error_headers(error)["Retry-After"] == header


@pytest.mark.invariant("RPC-12")
@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("no answer from 10.0.0.1:50051 in time", "no answer from a server in time"),
        ("at [fe80::1]:80, 127.0.0.1", "at a server, a server"),
        ("ask db-1.internal.example:8443 or localhost:99", "ask a server or a server"),
        ("max_tokens must be in [1, 2147483647], got 0", "max_tokens must be in [1, 2147483647], got 0"),
        ("must be in [0, 2], got 2.5; version 1.2.3 at 12:30", "must be in [0, 2], got 2.5; version 1.2.3 at 12:30"),
    ],
)  # fmt: skip
def test_addresses_when_a_message_is_for_a_client_then_it_has_none(text: str, clean: str) -> None:
    assert without_addresses(text) == clean


def test_error_survives_pickling() -> None:
    error = BatonError(ErrorCode.KV_STALE_REFERENCE, "m", stage="load", param="p", metadata={"a": "b"})
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.message, copy.stage, copy.param, copy.metadata) == (
        error.code, error.message, error.stage, error.param, error.metadata,
    )  # fmt: skip


@pytest.mark.invariant("RPC-12")
@given(st.one_of(st.text(), st.binary(), st.text(st.characters(codec=None, categories=["Cs", "Cc"]))))
def test_clean_text_is_printable_utf8_within_the_limit(text: str | bytes) -> None:
    cleaned = clean_text(text, 50)
    cleaned.encode("utf-8")
    assert len(cleaned) <= 50
    assert cleaned.isprintable()
