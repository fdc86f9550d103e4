"""Errors on the wire: building and parsing `google.rpc.Status` in `grpc-status-details-bin`.

This module is the only place that does either. Nothing is classified by the text of a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rpc.errors import TABLE, BatonError, ErrorCode, clean_text, without_addresses

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
# gRPC's soft limit for trailers is 8 KiB, beyond which the client sees RESOURCE_EXHAUSTED in place of the
# real code. The details are base64 on the wire and the message is there a second time.
MAX_STATUS_BYTES = 4096
MAX_MESSAGE_BYTES = 600
DEFAULT_RETRY_DELAY_S = 1.0

Leg = Literal["prefill", "decode", "cache_store"]


def _cut(text: str, max_bytes: int) -> str:
    raw = text.encode("utf-8", "replace")
    return raw.decode() if len(raw) <= max_bytes else raw[:max_bytes].decode("utf-8", "ignore")


def to_rpc_status(error: BatonError, *, request_id: str = "", peer: str = "") -> status_pb2.Status:
    """`error` as a status of at most MAX_STATUS_BYTES; metadata values are shortened, longest first, to fit.

    Details: `ErrorInfo{reason=NAME, domain="baton", metadata{code, stage, param, request_id, peer, …}}`, and
    `RetryInfo` where a retry can help.
    """
    spec = error.spec
    reserved = {
        "code": str(int(error.code)),
        "stage": error.stage,
        "param": error.param or "",
        "request_id": request_id,
        "peer": peer,
    }
    extra = {clean_text(k, 64): clean_text(str(v), MAX_STATUS_BYTES) for k, v in error.metadata.items()}
    reserved = {k: clean_text(v or extra.get(k, ""), 256) for k, v in reserved.items()}
    extra = {k: v for k, v in extra.items() if k not in reserved and v}  # empty values say nothing
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    while True:
        status = _pack(error, message, {**{k: v for k, v in reserved.items() if v}, **extra})
        excess = status.ByteSize() - MAX_STATUS_BYTES
        if excess <= 0:
            return status
        longest = max(extra, key=lambda k: len(extra[k].encode()), default=None)
        if longest is None:  # cannot happen: the reserved values are bounded
            raise AssertionError(f"status of {spec.name} exceeds {MAX_STATUS_BYTES} bytes without metadata")
        size = len(extra[longest].encode())
        if size <= 32:
            del extra[longest]
        else:
            extra[longest] = _cut(extra[longest], max(16, size - max(excess, size // 4)))


def _pack(error: BatonError, message: str, metadata: dict[str, str]) -> status_pb2.Status:
    status = status_pb2.Status(code=error.spec.grpc.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.code.name, domain=DOMAIN, metadata=metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    status.details.append(detail)
    if error.spec.retryable:
        retry = error_details_pb2.RetryInfo()
        delay_s = DEFAULT_RETRY_DELAY_S if error.retry_after_s is None else error.retry_after_s
        retry.retry_delay.FromMilliseconds(max(0, int(delay_s * 1000)))
        detail = any_pb2.Any()
        detail.Pack(retry)
        status.details.append(detail)
    return status


def trailing_metadata(
    error: BatonError, *, request_id: str = "", peer: str = ""
) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata that carries `error`."""
    return ((DETAILS_KEY, to_rpc_status(error, request_id=request_id, peer=peer).SerializeToString()),)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    error: BatonError,
    *,
    request_id: str = "",
    peer: str = "",
    more: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    """Ends the call of `context` with `error`: its gRPC status, message and details. `more`: further trailing
    metadata."""
    await context.abort(
        error.spec.grpc,
        _cut(error.message, MAX_MESSAGE_BYTES),
        (*trailing_metadata(error, request_id=request_id, peer=peer), *more),
    )
    raise AssertionError("context.abort() returned")


def parse_status(payload: bytes | None) -> BatonError | None:
    """The error in a `grpc-status-details-bin` payload; None when it holds none of Baton's.

    Absent: no payload, unparsable bytes, no `ErrorInfo` of domain `baton`, a code that is missing, 0 or no
    number. An unknown number becomes UNKNOWN_ERROR and keeps the number in the metadata. An empty message
    becomes the code's name.
    """
    if not payload:
        return None
    status = status_pb2.Status()
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    found = False
    retry_after_s: float | None = None
    try:
        status.ParseFromString(payload)
        for detail in status.details:
            if detail.Is(info.DESCRIPTOR) and not found:
                detail.Unpack(info)
                found = info.domain == DOMAIN
            elif detail.Is(retry.DESCRIPTOR):
                detail.Unpack(retry)
                retry_after_s = max(0.0, retry.retry_delay.ToTimedelta().total_seconds())
        metadata = {k: clean_text(v, MAX_STATUS_BYTES) for k, v in info.metadata.items()}
        message = status.message
    except (DecodeError, UnicodeDecodeError, OverflowError, ValueError):
        return None
    if not found:
        return None
    number = metadata.pop("code", "")
    if not (number.isascii() and number.isdigit() and len(number) <= 10 and int(number)):
        return None
    stage = metadata.pop("stage", "")
    param = metadata.pop("param", "") or None
    error = BatonError.from_number(int(number), message, stage=stage, metadata=metadata)
    error.param = param
    error.retry_after_s = retry_after_s if error.spec.retryable else None
    return error


def details_payload(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    for key, value in metadata or ():
        if key == DETAILS_KEY:
            return value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return None


def from_rpc_error(
    exc: grpc.RpcError,
    *,
    leg: Leg,
    deadline_passed: bool,
    was_ready: bool,
    loaded: bool = False,
    silent: bool = False,
) -> BatonError:
    """The failure of a call that this process made, typed.

    With details, they decide (a decode server's own MALLOC_FAILED is DECODE_MALLOC_FAILED outside of it).
    Without details: `deadline_passed` is about the request's own deadline, `was_ready` whether the channel
    had ever been connected, `loaded` whether the decode leg's load had ended, `silent` whether the stream had
    been silent beyond the keep-alive limit. The peer's own text goes into the metadata, never into the
    message.
    """
    code_of = getattr(exc, "code", None)
    status_code = code_of() if callable(code_of) else None
    metadata_of = getattr(exc, "trailing_metadata", None)
    error = parse_status(details_payload(metadata_of() if callable(metadata_of) else None))
    if error is not None:
        message = without_addresses(error.message)
        if message != error.message:
            error.with_context(remote_message=error.message)
            error.message = message
        return decode_view(error) if leg == "decode" else error
    code, message = _fallback(status_code, leg, deadline_passed, was_ready, loaded, silent)
    details_of = getattr(exc, "details", None)
    text = details_of() if callable(details_of) else None
    context = {"leg": leg, "grpc_code": status_code.name if status_code is not None else "none"}
    if text:
        context["grpc_message"] = clean_text(text, 256)
    return BatonError(code, message, metadata=context)


def _fallback(
    status_code: grpc.StatusCode | None,
    leg: Leg,
    deadline_passed: bool,
    was_ready: bool,
    loaded: bool,
    silent: bool,
) -> tuple[ErrorCode, str]:
    server = {
        "prefill": "the prefill server",
        "decode": "the decode server",
        "cache_store": "the cache store",
    }[leg]
    if silent:
        return ErrorCode.KEEP_ALIVE_TIMEOUT, f"{server} was silent for too long"
    if status_code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if leg == "cache_store":
            return ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED, f"{server} has no room for another transfer"
        code = ErrorCode.DECODE_MALLOC_FAILED if leg == "decode" else ErrorCode.MALLOC_FAILED
        return code, f"{server} has no KV blocks left; try again later"
    if status_code is grpc.StatusCode.DEADLINE_EXCEEDED:
        if deadline_passed:
            return ErrorCode.GENERATE_TIMEOUT, "the request's deadline has passed; allow it more time"
        if leg == "cache_store":
            return ErrorCode.CACHE_STORE_CALL_PREFILL_TIMEOUT, f"{server} did not answer in time"
        return ErrorCode.DEADLINE_EXCEEDED, f"{server} did not answer in time"
    if status_code is grpc.StatusCode.CANCELLED:
        return ErrorCode.CANCELLED, "the request was cancelled"
    if status_code is grpc.StatusCode.UNAVAILABLE:
        if was_ready:
            return ErrorCode.CONNECTION_RESET_BY_PEER, f"the connection to {server} broke"
        if leg == "cache_store":
            return ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED, f"{server} cannot be reached"
        return ErrorCode.CONNECT_FAILED, f"{server} cannot be reached"
    if leg == "cache_store":
        return ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, f"{server} failed without a cause"
    if loaded:
        return ErrorCode.REMOTE_GENERATE_FAILED, f"{server} failed without a cause"
    return ErrorCode.REMOTE_LOAD_KV_CACHE_FAILED, f"{server} failed before the KV cache was loaded"


def decode_view(error: BatonError) -> BatonError:
    """`error` as seen outside a decode server: its own MALLOC_FAILED is DECODE_MALLOC_FAILED; all others are
    unchanged."""
    if error.code is not ErrorCode.MALLOC_FAILED:
        return error
    message = "" if error.message == error.code.name else error.message
    return BatonError(
        ErrorCode.DECODE_MALLOC_FAILED,
        message,
        stage=error.stage,
        param=error.param,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def load_failed(cause: BatonError) -> BatonError:
    """A decode server's failed load: LOAD_KV_CACHE_FAILED with number, name and message of the cause in the
    metadata."""
    if cause.code is ErrorCode.LOAD_KV_CACHE_FAILED:
        return cause
    return BatonError(
        ErrorCode.LOAD_KV_CACHE_FAILED,
        "the prompt's KV could not be loaded from the prefill server; send the request again",
        stage=cause.stage or "load",
        metadata={
            **cause.metadata,
            "cause_code": str(int(cause.code)),
            "cause": cause.code.name,
            "cause_message": cause.message,
        },
    )


_MISSING = set(ErrorCode) - set(TABLE)
if _MISSING:
    raise AssertionError(f"codes without a row in the error table: {sorted(_MISSING)}")
