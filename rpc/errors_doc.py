"""Writes `docs/error_codes.md` from the error table: `python -m rpc.errors_doc > docs/error_codes.md`."""

from __future__ import annotations

import sys

from rpc.errors import TABLE, ErrorSpec

HEADER = """\
# Error codes

Generated from `rpc/errors.py` by `python -m rpc.errors_doc`; a test fails when the two differ.

A failing RPC carries `google.rpc.Status` in `grpc-status-details-bin` with `ErrorInfo{reason=NAME,
domain="baton", metadata{code, stage, param, peer, request_id, …}}`, and `RetryInfo` where a retry can help. A
failing HTTP request carries `{"error":{"message","type","param","code","baton_code"}}`, the headers
`x-baton-error: NAME` and `X-Request-Id`, and `Retry-After` with 429 and 503.

* **retry**: another server, or the same one later, may succeed with the same request.
* **breaker**: counts against the circuit breaker of the server that reported it.
* `–`: the question does not arise.

| code | name | gRPC | HTTP | `error.type` | `error.code` | retry | breaker | when |
|---|---|---|---|---|---|---|---|---|
"""

RULES = """
Rules

* The first cause wins: clean-up never overwrites an error that a request already has; what wraps it adds metadata.
* A decode server's MALLOC_FAILED becomes DECODE_MALLOC_FAILED when it leaves the server; a prefill server's own stays.
* Details count only with the domain `baton` and a code other than 0. An unknown number becomes UNKNOWN_ERROR and is
  kept in the metadata as `remote_code`; an empty message becomes the code's name.
* A failure without a code cannot be built. From a peer it becomes CACHE_STORE_LOAD_UNKNOWN_ERROR and is logged and
  counted (`baton_contract_breaches_total`) as a breach of the contract.
* Without details, the gRPC status decides: RESOURCE_EXHAUSTED is DECODE_MALLOC_FAILED from a decode server and
  MALLOC_FAILED from a prefill server; DEADLINE_EXCEEDED is GENERATE_TIMEOUT when the request's own deadline has
  passed, else DEADLINE_EXCEEDED; CANCELLED is CANCELLED; UNAVAILABLE is CONNECT_FAILED when there was no connection,
  else CONNECTION_RESET_BY_PEER; anything else REMOTE_LOAD_KV_CACHE_FAILED before the KV cache was loaded and
  REMOTE_GENERATE_FAILED after. From a cache store: CACHE_STORE_PUSH_ITEM_FAILED, CACHE_STORE_CALL_PREFILL_TIMEOUT,
  CACHE_STORE_LOAD_CONNECT_FAILED and CACHE_STORE_LOAD_UNKNOWN_ERROR in their place.
* Messages are one sentence for the client; addresses, bytes and foreign text are in metadata and logs only.
"""


def _row(spec: ErrorSpec) -> str:
    http = "–" if spec.http is None else str(spec.http)
    if spec.sends_retry_after:
        http += " + Retry-After"
    failed = spec.http is not None and spec.http >= 400
    kind = f"`{spec.openai_type}`" if failed else "–"
    code = f"`{spec.openai_code}`" if failed else "–"
    cells = (
        str(int(spec.code)),
        spec.name,
        spec.grpc.name,
        http,
        kind,
        code,
        spec.retry,
        spec.breaker_mark,
        spec.doc,
    )
    return "| " + " | ".join(cells) + " |"


def render() -> str:
    return HEADER + "\n".join(_row(spec) for spec in TABLE.values()) + "\n" + RULES


if __name__ == "__main__":
    sys.stdout.write(render())
