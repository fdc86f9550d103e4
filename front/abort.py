"""The Abort RPC of both services: checks its fields and ends the request."""

from __future__ import annotations

from front.reception import Reception
from front.validation import missing, out_of_range
from protos import decode_pb2, prefill_pb2
from rpc.errors import BatonError, ErrorCode
from rpc.ids import split_request_key

SOURCES = ("client", "deadline", "peer", "error", "drain")


def abort_request(
    reception: Reception, message: prefill_pb2.PrefillAbortRequest | decode_pb2.DecodeAbortRequest
) -> bool:
    """Ends the request of `message`, or leaves a tombstone; True if the request was open here.

    An absent code is CANCELLED, an empty source `client`. Raises INVALID_PARAMS for a code or source that
    does not exist, whatever the key.
    """
    if not message.request_key:
        raise missing("request_key")
    split_request_key(message.request_key)
    number = message.code if message.HasField("code") else int(ErrorCode.CANCELLED)
    if number == 0 or number not in ErrorCode.__members__.values():
        raise out_of_range("code", number, "a number of the error table other than 0")
    source = message.source or "client"
    if source not in SOURCES:
        raise out_of_range("source", repr(source[:32]), f"one of {', '.join(SOURCES)}")
    code = ErrorCode(number)
    text = "request cancelled by client" if code is ErrorCode.CANCELLED else "the request was aborted"
    return reception.abort(message.request_key, BatonError(code, text), source)
