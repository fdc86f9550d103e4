"""Request ids and the keys made from them.

One `request_id` names a request from the client's header to the cache store. Each attempt to serve it has its
own `request_key = "{request_id}#{attempt}.{nonce}"`, so that a retry and a later request with the same id
never meet.
"""

from __future__ import annotations

import re
import secrets
import uuid
from typing import NamedTuple

from rpc.errors import BatonError, ErrorCode

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_REQUEST_KEY = re.compile(r"([A-Za-z0-9._:-]{1,128})#(0|[1-9][0-9]{0,8})\.([0-9a-f]{8})", re.ASCII)


class RequestKey(NamedTuple):
    """The parts of a request key: attempt counts from 0, nonce is 8 hex digits."""

    request_id: str
    attempt: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}.{self.nonce}"


def valid_request_id(request_id: str) -> bool:
    """Whether a client may use this id. `#` is excluded because it separates the parts of a request key."""
    return _REQUEST_ID.fullmatch(request_id) is not None


def check_request_id(request_id: str) -> str:
    """The id itself, or INVALID_PARAMS."""
    if not valid_request_id(request_id):
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"request_id {request_id[:64]!r} must be 1 to 128 characters out of A-Z a-z 0-9 . _ : -",
            param="request_id",
        )
    return request_id


def new_request_id() -> str:
    return str(uuid.uuid4())


def new_nonce() -> str:
    return secrets.token_hex(4)


def request_key(request_id: str, attempt: int, nonce: str | None = None) -> str:
    """Key of one attempt; without `nonce` a new one is drawn. Raises ValueError for parts that cannot be
    split again."""
    key = f"{request_id}#{attempt}.{nonce if nonce is not None else new_nonce()}"
    if _REQUEST_KEY.fullmatch(key) is None:
        raise ValueError(f"not a request key: {key!r}")
    return key


def split_request_key(key: str) -> RequestKey:
    """The parts of `key`, or INVALID_PARAMS when it is none."""
    match = _REQUEST_KEY.fullmatch(key)
    if match is None:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"request_key {key[:64]!r} must have the form id#attempt.nonce",
            param="request_key",
        )
    return RequestKey(match[1], int(match[2]), match[3])
