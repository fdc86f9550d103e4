"""What a decode server does when a load has failed: a pure decision."""

from __future__ import annotations

from enum import StrEnum

from rpc.errors import BatonError


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
