"""What the scheduler asks of the cache store, which moves the KV of prompts from prefill to decode servers."""

from __future__ import annotations

from typing import Protocol

from engine.requests import Answer, Request
from rpc.errors import BatonError, ErrorCode


class Transfer(Protocol):
    """Nothing here blocks; answers come as events of the scheduler."""

    def admit(self, request: Request) -> None:
        """Prefill: the request has its blocks and is computed from now on. `Scheduler.lease_ended` follows."""

    def computed(self, request: Request, answer: Answer) -> None:
        """Prefill: every block was published; the lease runs."""

    def fail(self, request_key: str, error: BatonError) -> None:
        """Prefill: the request failed or was aborted; loads of the key end with `error`."""

    def tombstone(self, request_key: str) -> None:
        """An abort of a key that is not known here."""

    def load(self, request: Request, deadline_s: float | None, reload: bool) -> None:
        """Decode: fill the receiving blocks. `Scheduler.load_done` or `load_failed` follows."""

    def keep_alive(self, request: Request) -> None:
        """Decode: the request waits for blocks; its KV must stay on the prefill server."""

    def forget(self, request_key: str) -> None:
        """Decode: ends `keep_alive`; another decode server may load the KV."""

    def cancel_load(self, request_key: str, error: BatonError) -> None:
        """Decode: gives up; the prefill server may free the KV. An open load ends with `load_failed`."""


def for_readers(error: BatonError) -> BatonError:
    """What a load of the request's KV ends with: a cancelled request is to its readers one that was aborted."""
    if error.code is not ErrorCode.CANCELLED:
        return error
    return BatonError(
        ErrorCode.REQUEST_TOMBSTONED, "the request was aborted", stage=error.stage, metadata=error.metadata
    )
