"""Failures that are told to several callers, and those for which no transfer is to blame."""

from __future__ import annotations

from rpc.errors import BatonError

_FAILED = {"failed": "request"}


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
