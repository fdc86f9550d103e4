"""What a decode server does when a load has failed: a pure decision."""

from __future__ import annotations

from enum import StrEnum

from rpc.errors import BatonError, ErrorCode


class AfterFailure(StrEnum):
    RELOAD = "reload"  # once more from the same prefill server, into new blocks
    RECOMPUTE = "recompute"  # compute the prompt here
    FAIL = "fail"


def after_failed_load(
    policy: str, error: BatonError, *, loads: int, retriable_here: bool, may_recompute: bool
) -> AfterFailure:
    """`loads`: loads of this request so far. A failure that no retry can help is never answered by computing here."""
    if policy == "retry" and retriable_here and loads == 1:
        return AfterFailure.RELOAD
    if policy != "fail" and may_recompute and error.spec.retryable:
        return AfterFailure.RECOMPUTE
    return AfterFailure.FAIL


def load_failure(cause: BatonError) -> BatonError:
    """The failure of the request, LOAD_KV_CACHE_FAILED, with its cause in the metadata."""
    return BatonError(
        ErrorCode.LOAD_KV_CACHE_FAILED,
        "the prompt's KV could not be loaded from the prefill server; send the request again",
        stage="load",
        metadata={
            **cause.metadata,
            "cause_code": str(int(cause.code)),
            "cause": cause.code.name,
            "cause_message": cause.message,
        },
    )
