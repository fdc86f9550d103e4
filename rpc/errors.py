"""The error table: one row per code, and the one exception type that carries a code.

Everything that is said about a failure (gRPC status, HTTP status, OpenAI `type` and `code`, whether a retry
can help, whether it counts against a server's circuit breaker) is read from `TABLE`. `docs/error_codes.md` is
generated from it (`python -m rpc.errors_doc`). Numbers up to 85xx keep the meaning they have in RTP-LLM; 86xx
and the five-digit ones are Baton's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal

import grpc

MAX_MESSAGE_CHARS = 1000


class ErrorCode(IntEnum):
    """Every code that may travel. The member's name is the `reason` of `ErrorInfo` and the `code` label of
    metrics."""

    NONE_ERROR = 0
    LONG_PROMPT_ERROR = 511
    UNKNOWN_ERROR = 514
    MALLOC_FAILED = 602
    GENERATE_TIMEOUT = 603
    ERROR_GENERATE_CONFIG_FORMAT = 604
    INVALID_PARAMS = 605
    EXECUTION_EXCEPTION = 606
    EXCEEDS_KV_CACHE_MAX_LEN = 607
    GRAMMAR_PARSER_REJECTED_TOKEN = 608
    GRAMMAR_NON_EOS_AFTER_TERMINAL = 609
    GRAMMAR_BITMASK_BUFFER_TOO_SMALL = 610
    GRAMMAR_VOCAB_EXCEEDS_MODEL_VOCAB = 611
    GRAMMAR_EOS_OUT_OF_VOCAB = 612
    GRAMMAR_VERIFY_EXCEPTION = 613
    CANCELLED = 8100
    OUT_OF_VOCAB_RANGE = 8101
    OUTPUT_QUEUE_FULL = 8102
    GET_HOST_FAILED = 8200
    CONNECT_FAILED = 8202
    CONNECT_TIMEOUT = 8203
    DEADLINE_EXCEEDED = 8204
    CONNECTION_RESET_BY_PEER = 8205
    REMOTE_LOAD_KV_CACHE_FAILED = 8208
    REMOTE_GENERATE_FAILED = 8209
    DECODE_MALLOC_FAILED = 8211
    LOAD_KV_CACHE_FAILED = 8212
    WAIT_TO_RUN_TIMEOUT = 8213
    KEEP_ALIVE_TIMEOUT = 8214
    LOAD_CACHE_TIMEOUT = 8300
    CACHE_STORE_PUSH_ITEM_FAILED = 8301
    CACHE_STORE_LOAD_CONNECT_FAILED = 8302
    CACHE_STORE_LOAD_SEND_REQUEST_FAILED = 8303
    CACHE_STORE_CALL_PREFILL_TIMEOUT = 8304
    CACHE_STORE_LOAD_RDMA_CONNECT_FAILED = 8305
    CACHE_STORE_LOAD_RDMA_WRITE_FAILED = 8306
    CACHE_STORE_LOAD_BUFFER_TIMEOUT = 8307
    CACHE_STORE_LOAD_UNKNOWN_ERROR = 8308
    CACHE_STORE_STORE_FAILED = 8309
    ASYMMETRIC_TP_FAILED = 8315
    READ_BUFFER_MISMATCH = 8320
    READ_TRANSFER_NOT_DONE = 8325
    NO_PREFILL_WORKER = 8402
    NO_DECODE_WORKER = 8403
    INVALID_ROUTE_REQUEST = 8406
    PRIORITY_PREEMPTED = 8429
    ROUTER_QUEUE_FULL = 8502
    ROUTER_QUEUE_TIMEOUT = 8503
    WORKER_EXECUTION_FAILED = 8513
    KV_LEASE_EXPIRED = 8601
    KV_STALE_REFERENCE = 8602
    KV_CHECKSUM_MISMATCH = 8603
    INCOMPATIBLE_PEER = 8604
    PEER_RESTARTED = 8605
    REQUEST_TOMBSTONED = 8606
    DUPLICATE_REQUEST = 8607
    SERVER_DRAINING = 8608
    ENGINE_DEAD = 8609
    RETRY_BUDGET_EXHAUSTED = 8610
    PREFILL_GRAPH_UNSUPPORTED = 8611
    GRAPH_CAPTURE_DIRTY = 8612
    UNAUTHENTICATED = 40100
    MODEL_NOT_FOUND = 40400
    PATH_NOT_FOUND = 40401
    METHOD_NOT_ALLOWED = 40500
    PAYLOAD_TOO_LARGE = 41300
    UNSUPPORTED_MEDIA_TYPE = 41500


RetryMark = Literal["–", "no", "yes", "later"]
BreakerMark = Literal["–", "no", "yes"]


@dataclass(frozen=True)
class ErrorSpec:
    """One row of the error table.

    `http` is None for codes that only end a start-up. `retry` and `breaker_mark` are the cells of the
    documentation; `–` means the question does not arise (success, or a failure of the router's own).
    """

    code: ErrorCode
    grpc: grpc.StatusCode
    http: int | None
    retry: RetryMark
    breaker_mark: BreakerMark
    doc: str
    openai_code: str

    @property
    def name(self) -> str:
        return self.code.name

    @property
    def retryable(self) -> bool:
        """Another server, or the same one later, may succeed with the same request."""
        return self.retry in ("yes", "later")

    @property
    def breaker(self) -> bool:
        """The failure counts against the circuit breaker of the server that reported it."""
        return self.breaker_mark == "yes"

    @property
    def openai_type(self) -> str:
        return openai_type(self.http if self.http is not None else 500)

    @property
    def sends_retry_after(self) -> bool:
        """HTTP responses with this code have a `Retry-After` header."""
        return self.http in (429, 503)


def openai_type(http_status: int) -> str:
    """`error.type` of an HTTP status, as OpenAI clients expect it."""
    by_status = {
        401: "authentication_error",
        408: "timeout_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
        504: "timeout_error",
    }
    if http_status in by_status:
        return by_status[http_status]
    return "server_error" if http_status >= 500 else "invalid_request_error"


_OPENAI_CODES = {
    ErrorCode.LONG_PROMPT_ERROR: "context_length_exceeded",
    ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN: "context_length_exceeded",
    ErrorCode.MODEL_NOT_FOUND: "model_not_found",
    ErrorCode.UNAUTHENTICATED: "invalid_api_key",
}

_S = grpc.StatusCode
_E = ErrorCode
_Row = tuple[ErrorCode, grpc.StatusCode, int | None, RetryMark, BreakerMark, str]

_GRAMMAR_SERVER = "structured output, the server's fault; fails closed"
_GRAMMAR_CLIENT = "the grammar does not fit the model's vocabulary"
_ONE_SIDED = "one-sided transport"

_ROWS: tuple[_Row, ...] = (
    (_E.NONE_ERROR, _S.OK, 200, "–", "–", "success; never travels in an error"),
    (_E.LONG_PROMPT_ERROR, _S.OUT_OF_RANGE, 400, "no", "no", "prompt + reserve exceeds the model length"),
    (_E.UNKNOWN_ERROR, _S.INTERNAL, 500, "no", "yes", "the fallback; each occurrence is logged as a defect"),
    (_E.MALLOC_FAILED, _S.RESOURCE_EXHAUSTED, 503, "yes", "no",
     "KV blocks lacking on the server that reports it"),
    (_E.GENERATE_TIMEOUT, _S.DEADLINE_EXCEEDED, 504, "no", "no", "the request's own deadline"),
    (_E.ERROR_GENERATE_CONFIG_FORMAT, _S.INVALID_ARGUMENT, 400, "no", "no", "malformed request field"),
    (_E.INVALID_PARAMS, _S.INVALID_ARGUMENT, 400, "no", "no",
     "value out of range; the message names field, value, range"),
    (_E.EXECUTION_EXCEPTION, _S.INTERNAL, 500, "yes", "yes", "the model step raised, or its numbers are not finite"),
    (_E.EXCEEDS_KV_CACHE_MAX_LEN, _S.OUT_OF_RANGE, 400, "no", "no", "cannot fit even in an empty pool"),
    (_E.GRAMMAR_PARSER_REJECTED_TOKEN, _S.INTERNAL, 500, "no", "no", _GRAMMAR_SERVER),
    (_E.GRAMMAR_NON_EOS_AFTER_TERMINAL, _S.INTERNAL, 500, "no", "no", _GRAMMAR_SERVER),
    (_E.GRAMMAR_BITMASK_BUFFER_TOO_SMALL, _S.INTERNAL, 500, "no", "no", _GRAMMAR_SERVER),
    (_E.GRAMMAR_VOCAB_EXCEEDS_MODEL_VOCAB, _S.INVALID_ARGUMENT, 400, "no", "no", _GRAMMAR_CLIENT),
    (_E.GRAMMAR_EOS_OUT_OF_VOCAB, _S.INVALID_ARGUMENT, 400, "no", "no", _GRAMMAR_CLIENT),
    (_E.GRAMMAR_VERIFY_EXCEPTION, _S.INTERNAL, 500, "no", "no", _GRAMMAR_SERVER),
    (_E.CANCELLED, _S.CANCELLED, 499, "no", "no", "client or router cancelled"),
    (_E.OUT_OF_VOCAB_RANGE, _S.OUT_OF_RANGE, 400, "no", "no",
     "token id outside the vocabulary (also from a peer)"),
    (_E.OUTPUT_QUEUE_FULL, _S.RESOURCE_EXHAUSTED, 503, "yes", "no", "a reader too slow for its stream"),
    (_E.GET_HOST_FAILED, _S.UNAVAILABLE, 503, "yes", "no", "the address cannot be resolved"),
    (_E.CONNECT_FAILED, _S.UNAVAILABLE, 502, "yes", "yes", "the server cannot be reached"),
    (_E.CONNECT_TIMEOUT, _S.DEADLINE_EXCEEDED, 504, "yes", "yes", "no connection within its time limit"),
    (_E.DEADLINE_EXCEEDED, _S.DEADLINE_EXCEEDED, 504, "no", "yes",
     "an RPC deadline that is not the request's own"),
    (_E.CONNECTION_RESET_BY_PEER, _S.UNAVAILABLE, 502, "yes", "yes", "an established connection broke"),
    (_E.REMOTE_LOAD_KV_CACHE_FAILED, _S.INTERNAL, 502, "yes", "yes", "the router's view of a failed load"),
    (_E.REMOTE_GENERATE_FAILED, _S.INTERNAL, 502, "yes", "yes",
     "the decode leg ended without a typed cause"),
    (_E.DECODE_MALLOC_FAILED, _S.RESOURCE_EXHAUSTED, 503, "yes", "no",
     "KV blocks lacking on the decode server, seen from outside"),
    (_E.LOAD_KV_CACHE_FAILED, _S.INTERNAL, 502, "yes", "yes",
     "the decode server's load failed; cause in the metadata"),
    (_E.WAIT_TO_RUN_TIMEOUT, _S.DEADLINE_EXCEEDED, 504, "yes", "no", "queued too long"),
    (_E.KEEP_ALIVE_TIMEOUT, _S.UNAVAILABLE, 502, "yes", "yes",
     "an open stream was silent beyond the keep-alive limit"),
    (_E.LOAD_CACHE_TIMEOUT, _S.DEADLINE_EXCEEDED, 504, "yes", "yes",
     "a load saw no new block within `--load-cache-timeout-ms`"),
    (_E.CACHE_STORE_PUSH_ITEM_FAILED, _S.RESOURCE_EXHAUSTED, 503, "yes", "no", "transfer queue full"),
    (_E.CACHE_STORE_LOAD_CONNECT_FAILED, _S.UNAVAILABLE, 502, "yes", "yes",
     "the peer's cache store cannot be reached"),
    (_E.CACHE_STORE_LOAD_SEND_REQUEST_FAILED, _S.UNAVAILABLE, 502, "yes", "yes",
     "the load request could not be sent"),
    (_E.CACHE_STORE_CALL_PREFILL_TIMEOUT, _S.DEADLINE_EXCEEDED, 504, "yes", "yes",
     "the peer's cache store did not answer in time"),
    (_E.CACHE_STORE_LOAD_RDMA_CONNECT_FAILED, _S.UNAVAILABLE, 502, "yes", "yes", _ONE_SIDED),
    (_E.CACHE_STORE_LOAD_RDMA_WRITE_FAILED, _S.UNAVAILABLE, 502, "yes", "yes", _ONE_SIDED),
    (_E.CACHE_STORE_LOAD_BUFFER_TIMEOUT, _S.DEADLINE_EXCEEDED, 504, "yes", "yes",
     "blocks not published in time"),
    (_E.CACHE_STORE_LOAD_UNKNOWN_ERROR, _S.INTERNAL, 502, "yes", "yes",
     "also: a failure that came without a code"),
    (_E.CACHE_STORE_STORE_FAILED, _S.INTERNAL, 502, "yes", "yes", "publishing failed on the prefill server"),
    (_E.ASYMMETRIC_TP_FAILED, _S.FAILED_PRECONDITION, 500, "yes", "no", "rank sizes that do not divide"),
    (_E.READ_BUFFER_MISMATCH, _S.FAILED_PRECONDITION, 502, "yes", "yes", "piece length or layout differs"),
    (_E.READ_TRANSFER_NOT_DONE, _S.ABORTED, 502, "yes", "yes", "one-sided transfer not proven complete"),
    (_E.NO_PREFILL_WORKER, _S.UNAVAILABLE, 503, "yes", "–", "no prefill server is ready"),
    (_E.NO_DECODE_WORKER, _S.UNAVAILABLE, 503, "yes", "–", "no decode server is ready"),
    (_E.INVALID_ROUTE_REQUEST, _S.INVALID_ARGUMENT, 400, "no", "–", "a pin or route that cannot be followed"),
    (_E.PRIORITY_PREEMPTED, _S.RESOURCE_EXHAUSTED, 429, "yes", "no",
     "gave way to requests of a higher priority"),
    (_E.ROUTER_QUEUE_FULL, _S.RESOURCE_EXHAUSTED, 429, "yes", "–", "the router's admission queue is full"),
    (_E.ROUTER_QUEUE_TIMEOUT, _S.DEADLINE_EXCEEDED, 408, "yes", "–", "waited too long for admission"),
    (_E.WORKER_EXECUTION_FAILED, _S.INTERNAL, 500, "no", "yes", "failed again after the retry budget"),
    (_E.KV_LEASE_EXPIRED, _S.ABORTED, 502, "yes", "no", "staged KV was given up before it was read"),
    (_E.KV_STALE_REFERENCE, _S.ABORTED, 502, "yes", "no", "the block was reused since"),
    (_E.KV_CHECKSUM_MISMATCH, _S.DATA_LOSS, 502, "yes", "yes", "a transferred piece arrived damaged"),
    (_E.INCOMPATIBLE_PEER, _S.FAILED_PRECONDITION, 503, "yes", "no",
     "two servers cannot work as a pair; metadata lists each differing fact"),
    (_E.PEER_RESTARTED, _S.ABORTED, 502, "yes", "no", "engine_id differs from the expected one"),
    (_E.REQUEST_TOMBSTONED, _S.CANCELLED, 499, "no", "no", "the request's abort came before the request"),
    (_E.DUPLICATE_REQUEST, _S.ALREADY_EXISTS, 409, "no", "no",
     "a key that is open or already served; not the one reload after a failed load"),
    (_E.SERVER_DRAINING, _S.UNAVAILABLE, 503, "yes", "no", "the server is shutting down"),
    (_E.ENGINE_DEAD, _S.UNAVAILABLE, 503, "yes", "yes", "the engine process is gone"),
    (_E.RETRY_BUDGET_EXHAUSTED, _S.UNAVAILABLE, 503, "later", "–", "metadata keeps the first cause"),
    (_E.PREFILL_GRAPH_UNSUPPORTED, _S.FAILED_PRECONDITION, None, "no", "no",
     "start-up with `--prefill-cuda-graph-strict`; without it the server starts and reports the status"),
    (_E.GRAPH_CAPTURE_DIRTY, _S.INTERNAL, None, "no", "yes", "start-up fails; the process exits"),
    (_E.UNAUTHENTICATED, _S.UNAUTHENTICATED, 401, "no", "no", "the API key is missing or wrong"),
    (_E.MODEL_NOT_FOUND, _S.NOT_FOUND, 404, "no", "no", "no served model has this name"),
    (_E.PATH_NOT_FOUND, _S.NOT_FOUND, 404, "no", "no", "HTTP only"),
    (_E.METHOD_NOT_ALLOWED, _S.UNIMPLEMENTED, 405, "no", "no", "HTTP only"),
    (_E.PAYLOAD_TOO_LARGE, _S.RESOURCE_EXHAUSTED, 413, "no", "no",
     "the body exceeds `--max-payload-size`, or a gRPC message 16 MiB"),
    (_E.UNSUPPORTED_MEDIA_TYPE, _S.INVALID_ARGUMENT, 415, "no", "no", "HTTP only"),
)  # fmt: skip

TABLE: Mapping[ErrorCode, ErrorSpec] = MappingProxyType(
    {
        code: ErrorSpec(code, status, http, retry, breaker, doc, _OPENAI_CODES.get(code, code.name))
        for code, status, http, retry, breaker, doc in _ROWS
    }
)


def clean_text(text: str | bytes, limit: int = MAX_MESSAGE_CHARS) -> str:
    """`text` as valid, printable UTF-8 of at most `limit` characters; whatever is not becomes a replacement
    sign."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", "replace")
    text = text[: limit + 1].encode("utf-8", "replace").decode("utf-8")
    text = "".join(c if c.isprintable() else " " if c in "\t\r\n" else "\ufffd" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class BatonError(Exception):
    """A failure with its code. One without a code cannot be built.

    `message` is one sentence for the client that names what to change; addresses, bytes and internals go into
    `metadata` (strings). `stage` is the stage of the request at the time, `param` the request field at fault,
    `retry_after_s` a better estimate than the default of 1 s, where there is one.

    Raises ValueError for code 0 and for numbers that are not in the table (see `from_number`).
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str = "",
        *,
        stage: str = "",
        param: str | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
        retry_after_s: float | None = None,
    ) -> None:
        code = ErrorCode(code)
        if code is ErrorCode.NONE_ERROR:
            raise ValueError("an error needs a code other than NONE_ERROR")
        self.code = code
        self.message = clean_text(message) or code.name
        self.stage = stage
        self.param = param
        self.metadata: dict[str, str] = dict(metadata)
        self.retry_after_s = retry_after_s
        super().__init__(code, self.message)

    @classmethod
    def from_number(
        cls,
        number: int,
        message: str = "",
        *,
        stage: str = "",
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> BatonError:
        """The failure that another process reports as a bare number.

        Unknown numbers become UNKNOWN_ERROR, a missing one (0) CACHE_STORE_LOAD_UNKNOWN_ERROR; both keep the
        number in `metadata["remote_code"]` and are breaches of the contract between the processes (see
        `breach`).
        """
        try:
            code = ErrorCode(number)
        except ValueError:
            extra = {"remote_code": str(number), "contract_breach": "unknown_code"}
            return cls(ErrorCode.UNKNOWN_ERROR, message, stage=stage, metadata={**metadata, **extra})
        if code is ErrorCode.NONE_ERROR:
            extra = {"remote_code": "0", "contract_breach": "no_code"}
            code = ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
            return cls(code, message, stage=stage, metadata={**metadata, **extra})
        return cls(code, message, stage=stage, metadata=metadata)

    @property
    def spec(self) -> ErrorSpec:
        return TABLE[self.code]

    @property
    def breach(self) -> str:
        """Kind for `baton_contract_breaches_total`, or "" when the peer kept to the contract."""
        return self.metadata.get("contract_breach", "")

    @property
    def http_status(self) -> int:
        return self.spec.http if self.spec.http is not None else 500

    def with_context(self, **metadata: str) -> BatonError:
        """Adds what a caller knows and returns the same error. The first value of a key stays; the code never
        changes."""
        for key, value in metadata.items():
            self.metadata.setdefault(key, value)
        return self

    def __str__(self) -> str:
        return f"{self.code.name} ({int(self.code)}): {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.code, self.message, self.stage, self.param, self.metadata, self.retry_after_s)


def _rebuild(
    code: ErrorCode,
    message: str,
    stage: str,
    param: str | None,
    metadata: dict[str, str],
    retry_after_s: float | None,
) -> BatonError:
    return BatonError(code, message, stage=stage, param=param, metadata=metadata, retry_after_s=retry_after_s)


_ADDRESS = re.compile(
    r"\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?"  # [v6]:port
    r"|(?<![\w.])\d{1,3}(\.\d{1,3}){3}(:\d{1,5})?(?![\w.]*\d)"  # v4:port
    r"|(?<![\w.-])(localhost|[A-Za-z0-9][\w-]*(\.[\w-]+)+):\d{2,5}(?!\d)"  # host.domain:port
)


def without_addresses(text: str) -> str:
    """`text` without the addresses in it: they are for logs and metadata, not for clients."""
    return _ADDRESS.sub("a server", text)


def http_error_body(error: BatonError) -> dict[str, Any]:
    """The error JSON of every HTTP response and of the error event of a stream."""
    spec = error.spec
    return {
        "error": {
            "message": error.message,
            "type": openai_type(error.http_status),
            "param": error.param,
            "code": spec.openai_code,
            "baton_code": int(error.code),
        }
    }


def http_error_headers(error: BatonError, request_id: str = "") -> dict[str, str]:
    """Headers of an error response; `Retry-After` (whole seconds, at least 1) with 429 and 503. `x-baton-cause` names
    the code behind a failed load."""
    headers = {"x-baton-error": error.code.name}
    cause, number = error.metadata.get("cause", ""), error.metadata.get("cause_code", "")
    if cause in ErrorCode.__members__ and number == str(int(ErrorCode[cause])):
        headers["x-baton-cause"] = f"{cause}; code={number}"
    if request_id:
        headers["X-Request-Id"] = request_id
    if error.spec.sends_retry_after:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    return headers


# Codes that count as failures of the transfer itself; ended leases, aborts and the request's own failures do not.
TRANSFER_FAILURES = frozenset(
    code
    for code in ErrorCode
    if 8300 <= code < 8400
    or code
    in (
        ErrorCode.CONNECTION_RESET_BY_PEER,
        ErrorCode.KEEP_ALIVE_TIMEOUT,
        ErrorCode.KV_STALE_REFERENCE,
        ErrorCode.KV_CHECKSUM_MISMATCH,
        ErrorCode.INCOMPATIBLE_PEER,
        ErrorCode.PEER_RESTARTED,
        ErrorCode.DUPLICATE_REQUEST,
    )
)
