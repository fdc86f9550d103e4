"""The one terminal cause of a request: who ended it, with which code. The same function for every role and mode.

`success` (finish `stop` or `length`), `context_error` (the request has an error), `client_cancel` (its client, or an
abort, ended it), `context_cleanup` (nobody did: it was closed before it had ended).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rpc.errors import BatonError, ErrorCode

STOP, LENGTH, ABORT = "stop", "length", "abort"


class Source(StrEnum):
    """Who ended a request."""

    SUCCESS = "success"
    CONTEXT_ERROR = "context_error"
    CLIENT_CANCEL = "client_cancel"
    CONTEXT_CLEANUP = "context_cleanup"


@dataclass(frozen=True)
class Terminal:
    """The terminal cause. `error` is None for a success, and only then. `finish_reason`: stop, length, abort, None."""

    source: Source
    error: BatonError | None
    finish_reason: str | None = None

    @property
    def code(self) -> ErrorCode:
        return ErrorCode.NONE_ERROR if self.error is None else self.error.code


def classify(error: BatonError | None, finish_reason: str | None, cancelled: bool) -> Terminal:
    """The terminal cause of a request of any role and mode.

    An error that the request has wins over everything. Without one, a generation that is done is a success, also when
    its consumer left before it was collected. Otherwise the consumer's cancel, and at last the clean-up of a request
    that nobody ended.
    """
    if error is not None:
        source = Source.CLIENT_CANCEL if error.code is ErrorCode.CANCELLED else Source.CONTEXT_ERROR
        return Terminal(source, error, finish_reason)
    if finish_reason in (STOP, LENGTH):
        return Terminal(Source.SUCCESS, None, finish_reason)
    if cancelled or finish_reason == ABORT:
        cancel = BatonError(ErrorCode.CANCELLED, "request cancelled by client")
        return Terminal(Source.CLIENT_CANCEL, cancel, finish_reason)
    cleanup = BatonError(ErrorCode.CANCELLED, "the request was closed before it had ended")
    return Terminal(Source.CONTEXT_CLEANUP, cleanup, finish_reason)
