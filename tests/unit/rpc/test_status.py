"""Errors on the wire: building and parsing `grpc-status-details-bin`."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import BatonError, ErrorCode
from rpc.status import (
    DETAILS_KEY,
    MAX_STATUS_BYTES,
    decode_view,
    from_rpc_error,
    load_failed,
    parse_status,
    to_rpc_status,
)

CODES = [code for code in ErrorCode if code is not ErrorCode.NONE_ERROR]


class Failure(grpc.RpcError):
    """What gRPC raises, with chosen contents."""

    def __init__(
        self,
        code: grpc.StatusCode | None,
        details: str = "some text of a peer at 10.0.0.1",
        payload: bytes | None = None,
    ) -> None:
        self._code, self._details, self._payload = code, details, payload

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return () if self._payload is None else (("other-bin", b"\0"), (DETAILS_KEY, self._payload))


def packed(reason: str, metadata: dict[str, str], domain: str = "baton", message: str = "m") -> bytes:
    status = status_pb2.Status(code=code_pb2.INTERNAL, message=message)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata))
    status.details.append(detail)
    return status.SerializeToString()


@pytest.mark.invariant("RPC-8")
@pytest.mark.parametrize("code", CODES, ids=lambda c: c.name)
def test_round_trip_keeps_everything(code: ErrorCode) -> None:
    error = BatonError(code, "one sentence", stage="load", param="max_tokens", metadata={"rank": "3"})
    status = to_rpc_status(error, request_id="r-1", peer="10.0.0.2:50051")
    assert status.code == error.spec.grpc.value[0]
    parsed = parse_status(status.SerializeToString())
    assert parsed is not None
    assert (parsed.code, parsed.message, parsed.stage, parsed.param) == (code, "one sentence", "load", "max_tokens")
    assert parsed.metadata == {"rank": "3", "request_id": "r-1", "peer": "10.0.0.2:50051"}
    assert (parsed.retry_after_s is not None) == error.spec.retryable


def test_retry_info_carries_the_estimate() -> None:
    status = to_rpc_status(BatonError(ErrorCode.SERVER_DRAINING, retry_after_s=2.5))
    parsed = parse_status(status.SerializeToString())
    assert parsed is not None
    assert parsed.retry_after_s == 2.5


@given(
    st.dictionaries(st.text(max_size=80), st.text(max_size=3000), max_size=40),
    st.text(max_size=4000),
    st.text(max_size=2000),
)
def test_status_is_never_larger_than_its_limit(metadata: dict[str, str], message: str, peer: str) -> None:
    error = BatonError(ErrorCode.LOAD_KV_CACHE_FAILED, message, stage=peer, metadata=metadata, param=message)
    status = to_rpc_status(error, request_id=peer, peer=peer)
    assert status.ByteSize() <= MAX_STATUS_BYTES
    parsed = parse_status(status.SerializeToString())
    assert parsed is not None
    assert parsed.code is ErrorCode.LOAD_KV_CACHE_FAILED


@pytest.mark.parametrize("key", ["peer", "stage", "param", "request_id", "code"])
def test_status_when_the_metadata_has_an_endless_value_of_a_known_key_then_it_is_cut(key: str) -> None:
    error = BatonError(ErrorCode.LOAD_KV_CACHE_FAILED, "m", metadata={key: "ü" * 50_000, "cause": "x"})
    status = to_rpc_status(error)
    assert status.ByteSize() <= MAX_STATUS_BYTES
    parsed = parse_status(status.SerializeToString())
    assert parsed is not None
    assert (parsed.code, parsed.metadata["cause"]) == (ErrorCode.LOAD_KV_CACHE_FAILED, "x")


def test_trimming_shortens_the_longest_value_and_keeps_the_short_ones() -> None:
    error = BatonError(ErrorCode.INCOMPATIBLE_PEER, "m", metadata={"long": "é" * 5000, "cause": "8302"})
    parsed = parse_status(to_rpc_status(error).SerializeToString())
    assert parsed is not None
    assert parsed.metadata["cause"] == "8302"
    assert 1000 < len(parsed.metadata["long"]) < 2100


class ErrorDetailsPB:
    """`{int32 error_code = 1; string error_message = 2}` as bytes: the same wire format as Status{1,2}."""

    payload = status_pb2.Status(code=8302, message="connect failed").SerializeToString()


@pytest.mark.invariant("RPC-8")
@pytest.mark.parametrize(
    "payload",
    [
        None,
        b"",
        b"\xff\xff\xff garbage",
        packed("NONE_ERROR", {"code": "0"}),
        packed("NONE_ERROR", {"code": "00"}),
        packed("MALLOC_FAILED", {}),
        packed("MALLOC_FAILED", {"code": "six"}),
        packed("MALLOC_FAILED", {"code": "-602"}),
        packed("MALLOC_FAILED", {"code": "٦٠٢"}),
        packed("MALLOC_FAILED", {"code": "9" * 40}),
        packed("MALLOC_FAILED", {"code": "602"}, domain="googleapis.com"),
        packed("MALLOC_FAILED", {"code": "602"}, domain=""),
        status_pb2.Status(code=13, message="plain").SerializeToString(),
        ErrorDetailsPB.payload,
    ],
)
def test_details_that_are_not_ours_count_as_absent(payload: bytes | None) -> None:
    assert parse_status(payload) is None
    error = from_rpc_error(
        Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, payload=payload),
        leg="decode",
        deadline_passed=False,
        was_ready=True,
    )
    assert error.code is ErrorCode.DECODE_MALLOC_FAILED


@pytest.mark.invariant("RPC-8")
def test_unknown_number_is_514_and_keeps_the_number() -> None:
    parsed = parse_status(packed("NEW_CODE", {"code": "9001"}))
    assert parsed is not None
    assert (parsed.code, parsed.metadata["remote_code"]) == (ErrorCode.UNKNOWN_ERROR, "9001")


@pytest.mark.invariant("RPC-8")
def test_empty_message_is_the_codes_name() -> None:
    parsed = parse_status(packed("X", {"code": "8603"}, message=""))
    assert parsed is not None
    assert parsed.message == "KV_CHECKSUM_MISMATCH"


@pytest.mark.invariant("RPC-12")
def test_message_with_bytes_and_format_signs_is_clean_and_unformatted() -> None:
    raw = status_pb2.Status(code=13, message="@@@@@ %s %d").SerializeToString()
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(domain="baton", metadata={"code": "606", "x": "a\x00b\n"}))
    whole = status_pb2.Status(details=[detail])
    good = parse_status(raw + whole.SerializeToString())
    assert good is not None
    assert good.message == "@@@@@ %s %d"
    assert good.metadata["x"].isprintable()
    # Not UTF-8: protobuf refuses the string, so the details are unparsable and thereby absent.
    assert parse_status(raw.replace(b"@@@@@", b"\xff\xfe\xfd\xfc\xfb") + whole.SerializeToString()) is None


S, E = grpc.StatusCode, ErrorCode


@pytest.mark.invariant("RPC-7")
@pytest.mark.parametrize(
    ("status", "leg", "facts", "code"),
    [
        (S.RESOURCE_EXHAUSTED, "decode", {}, E.DECODE_MALLOC_FAILED),
        (S.RESOURCE_EXHAUSTED, "prefill", {}, E.MALLOC_FAILED),
        (S.RESOURCE_EXHAUSTED, "cache_store", {}, E.CACHE_STORE_PUSH_ITEM_FAILED),
        (S.DEADLINE_EXCEEDED, "decode", {"deadline_passed": True}, E.GENERATE_TIMEOUT),
        (S.DEADLINE_EXCEEDED, "decode", {}, E.DEADLINE_EXCEEDED),
        (S.DEADLINE_EXCEEDED, "cache_store", {}, E.CACHE_STORE_CALL_PREFILL_TIMEOUT),
        (S.CANCELLED, "prefill", {}, E.CANCELLED),
        (S.UNAVAILABLE, "decode", {}, E.CONNECT_FAILED),
        (S.UNAVAILABLE, "decode", {"was_ready": True}, E.CONNECTION_RESET_BY_PEER),
        (S.UNAVAILABLE, "cache_store", {}, E.CACHE_STORE_LOAD_CONNECT_FAILED),
        (S.UNAVAILABLE, "cache_store", {"was_ready": True}, E.CONNECTION_RESET_BY_PEER),
        (S.UNAVAILABLE, "decode", {"was_ready": True, "silent": True}, E.KEEP_ALIVE_TIMEOUT),
        (S.INTERNAL, "decode", {}, E.REMOTE_LOAD_KV_CACHE_FAILED),
        (S.INTERNAL, "decode", {"loaded": True}, E.REMOTE_GENERATE_FAILED),
        (S.UNKNOWN, "prefill", {}, E.REMOTE_LOAD_KV_CACHE_FAILED),
        (S.UNIMPLEMENTED, "cache_store", {}, E.CACHE_STORE_LOAD_UNKNOWN_ERROR),
        (None, "decode", {"loaded": True}, E.REMOTE_GENERATE_FAILED),
    ],
)
def test_failure_without_details_is_classified_by_status_and_facts(
    status: grpc.StatusCode | None, leg: str, facts: dict[str, bool], code: ErrorCode
) -> None:
    facts = {"deadline_passed": False, "was_ready": False, **facts}
    error = from_rpc_error(Failure(status), leg=leg, **facts)  # type: ignore[arg-type]
    assert error.code is code
    assert "10.0.0.1" not in error.message
    assert error.metadata["grpc_message"] == "some text of a peer at 10.0.0.1"


def test_details_decide_whatever_the_status_says() -> None:
    payload = packed("KV_LEASE_EXPIRED", {"code": "8601"})
    error = from_rpc_error(
        Failure(S.UNAVAILABLE, payload=payload), leg="cache_store", deadline_passed=True, was_ready=False
    )
    assert error.code is E.KV_LEASE_EXPIRED


@pytest.mark.invariant("RPC-7")
@pytest.mark.parametrize(("leg", "code"), [("decode", 8211), ("prefill", 602), ("cache_store", 602)])
def test_602_with_details_is_8211_only_from_the_decode_leg(leg: str, code: int) -> None:
    payload = packed("MALLOC_FAILED", {"code": "602"})
    error = from_rpc_error(
        Failure(S.RESOURCE_EXHAUSTED, payload=payload),
        leg=leg,  # type: ignore[arg-type]
        deadline_passed=False,
        was_ready=True,
    )
    assert int(error.code) == code


@pytest.mark.invariant("RPC-7")
@pytest.mark.parametrize("code", CODES, ids=lambda c: c.name)
def test_decode_view_changes_602_alone(code: ErrorCode) -> None:
    seen = decode_view(BatonError(code, "m", metadata={"a": "b"})).code
    assert seen is (E.DECODE_MALLOC_FAILED if code is E.MALLOC_FAILED else code)


@pytest.mark.invariant("RPC-11")
def test_load_failed_names_its_cause() -> None:
    error = load_failed(BatonError(E.CACHE_STORE_LOAD_BUFFER_TIMEOUT, "m", stage="load", metadata={"peer": "p"}))
    assert error.code is E.LOAD_KV_CACHE_FAILED
    assert error.metadata == {
        "peer": "p",
        "cause_code": "8307",
        "cause": "CACHE_STORE_LOAD_BUFFER_TIMEOUT",
        "cause_message": "m",
    }
    assert load_failed(error) is error
