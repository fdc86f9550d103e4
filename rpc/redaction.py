"""Secrets stay out of every log: by the name of a field, by the form of a bearer token, and by the values that this
process was given as secrets (`hide`)."""

from __future__ import annotations

import functools
import re
from typing import AnyStr

MASK = "***"
MIN_HIDDEN_LENGTH = 4  # a shorter value would blacken ordinary words

# Counts of tokens are no secrets, so a name that merely ends in `tokens` does not count.
_NAMES = frozenset(
    (
        *("authorization", "proxy_authorization", "api_key", "apikey", "x_api_key", "access_key", "private_key"),
        *("password", "passwd", "secret", "client_secret", "token", "access_token", "refresh_token", "auth_token"),
        *("id_token", "session_token", "bearer_token", "cookie", "set_cookie", "credential", "credentials"),
    )
)
_BEARER = re.compile(r"([Bb]earer|BEARER)(\s+|%20)[A-Za-z0-9._~+/=-]{4,}")
_BEARER_BYTES = re.compile(_BEARER.pattern.encode())
_hidden: dict[str, bytes] = {}


def hide(value: str | None) -> None:
    """From now on `value` is masked wherever it stands in a line, e.g. an API key."""
    if value and len(value) >= MIN_HIDDEN_LENGTH:
        _hidden[value] = value.encode("utf-8", "surrogatepass")


@functools.lru_cache(maxsize=1024)  # the same few names stand in every line
def is_secret(name: str) -> bool:
    return name.lower().replace("-", "_") in _NAMES


def redact(name: str, value: object) -> object:
    """The value of the field `name` as it may be written."""
    return MASK if is_secret(name) else value


def redact_line(line: AnyStr) -> AnyStr:
    """A whole line without bearer tokens and hidden values."""
    if isinstance(line, bytes):
        if b"earer" in line or b"EARER" in line:
            line = _BEARER_BYTES.sub(rb"\1 ***", line)
        for raw in _hidden.values():
            line = line.replace(raw, b"***")
        return line
    if "earer" in line or "EARER" in line:
        line = _BEARER.sub(r"\1 ***", line)
    for value in _hidden:
        line = line.replace(value, MASK)
    return line
