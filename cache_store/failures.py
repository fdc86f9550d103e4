"""Failures that are told to several callers, those for which no transfer is to blame, and how they are counted."""

from __future__ import annotations

from cache_store.observations import Observe
from cache_store.transports import GRPC
from rpc.errors import TRANSFER_FAILURES, BatonError, ErrorCode

_FAILED = {"failed": "request"}

_STALE_KINDS = {
    ErrorCode.KV_LEASE_EXPIRED: "expired",
    ErrorCode.KV_STALE_REFERENCE: "reused",
    ErrorCode.PEER_RESTARTED: "peer_restarted",
}


def again(error: BatonError) -> BatonError:
    """The same failure once more, for another caller: what one adds to it must not show up at the others."""
    return BatonError(
        error.code,
        error.message,
        stage=error.stage,
        param=error.param,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def of_request(error: BatonError) -> BatonError:
    """What the readers of a request are told that has failed on its own server, whatever the code."""
    return again(error).with_context(**_FAILED)


def blames_request(error: BatonError) -> bool:
    """Whether the failure is one of the request itself, also when a peer has told of it."""
    return _FAILED.items() <= error.metadata.items()


def observe_failure(observe: Observe, error: BatonError, transport: str = GRPC) -> None:
    """Books a failed transfer by its code, and a reference that was not valid by its kind."""
    if blames_request(error):
        return
    if error.code in TRANSFER_FAILURES:
        observe("kv_transfer_failures_total", transport=transport, reason=error.code.name)
    kind = _STALE_KINDS.get(error.code)
    if kind is not None:
        observe("kv_stale_references_total", kind=error.metadata.get("kind") or kind)


def abort_source(error: BatonError) -> str:
    """Who asked for an abort: the label of baton_aborts_total."""
    if error.code in (ErrorCode.CANCELLED, ErrorCode.REQUEST_TOMBSTONED):
        return "client"
    if error.code in (ErrorCode.GENERATE_TIMEOUT, ErrorCode.DEADLINE_EXCEEDED):
        return "deadline"
    return "drain" if error.code is ErrorCode.SERVER_DRAINING else "error"
