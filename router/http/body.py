"""Reading a JSON body: its type, its size while it comes, its form."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from router.http.errors import ClientGone
from rpc.errors import BatonError, ErrorCode

# A client that stops sending in the middle of its body is given up after this time.
BODY_TIMEOUT_S = 60.0


def check_media_type(headers: Headers) -> None:
    """UNSUPPORTED_MEDIA_TYPE for a body that says it is something else than JSON. One that says nothing is read."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BatonError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE, f"send the body as Content-Type: application/json, not {kind[:100]}"
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BatonError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE, f"send the body without Content-Encoding, not as {encoding[:100]}"
        )


def too_large(limit_bytes: int) -> BatonError:
    return BatonError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"the body exceeds {limit_bytes} bytes (--max-payload-size); send less at a time",
    )


async def read_body(headers: Headers, receive: Receive, limit_bytes: int) -> bytes:
    """The body. PAYLOAD_TOO_LARGE as soon as it is known to be too large, before the rest is read; ClientGone when the
    client left; GENERATE_TIMEOUT when it stopped sending."""
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit_bytes:
        raise too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > limit_bytes:
                    raise too_large(limit_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise BatonError(
            ErrorCode.GENERATE_TIMEOUT, f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds"
        ) from None


# The escape of a surrogate that is not one of a pair. The parser's own message is about an end that came too early.
_HALF_CHARACTER = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u(?:d[89ab]..(?!\\ud[c-f])|d[c-f](?<!\\ud[89ab]..\\ud.))", re.IGNORECASE
)
_EXPLAINED_BYTES = 1 << 16


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; ERROR_GENERATE_CONFIG_FORMAT for anything else: no UTF-8, no JSON, NaN, numbers that
    do not exist, nesting beyond Python's recursion limit, another type."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        detail = str(error).removesuffix(" - at `$[...]`")
        if _HALF_CHARACTER.search(body, 0, _EXPLAINED_BYTES):
            detail = "it has half a character (a lone surrogate such as \\ud800)"
        raise _malformed(f"the body is not valid JSON: {detail}") from None
    if not isinstance(content, dict):
        raise _malformed(f"the body must be a JSON object, not {json_type(content)}")
    return content


def json_type(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def _malformed(message: str) -> BatonError:
    return BatonError(ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, message)
