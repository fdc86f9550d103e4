"""The tiers below a server's KV pool, as its flags name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import ByteSize, TypeAdapter, ValidationError

FLAG = "--kv-tier"
FORMS = "host:BYTES, disk:PATH:BYTES or mooncake://HOST:PORT"

_size = TypeAdapter(ByteSize)


@dataclass(frozen=True)
class KvTiers:
    """At most one tier of each kind; empty and 0 stand for none."""

    host_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    shared: str = ""  # address of a store


def kv_tiers(texts: Iterable[str]) -> KvTiers:
    """What values of `--kv-tier` say. Raises ValueError that names the flag and the value.

    Of an address only that it is one is looked at here.
    """
    found = KvTiers()
    for text in texts:
        kind, _, rest = text.partition(":")
        if kind == "host":
            given = replace(found, host_bytes=_bytes(text, rest))
        elif kind == "disk" and rest.rpartition(":")[0]:
            path, _, size = rest.rpartition(":")
            given = replace(found, disk_path=path, disk_bytes=_bytes(text, size))
        elif rest.startswith("//"):
            kind, given = "store", replace(found, shared=text)
        else:
            raise ValueError(f"{FLAG} {text!r}: must be {FORMS}")
        if {"host": found.host_bytes, "disk": found.disk_path, "store": found.shared}[kind]:
            raise ValueError(f"{FLAG} {text!r}: there is a tier of this kind already; give one of each")
        found = given
    return found


def _bytes(tier: str, text: str) -> int:
    try:
        size = int(_size.validate_python(text.strip()))
    except ValidationError:
        size = 0
    if size < 1:
        raise ValueError(f"{FLAG} {tier!r}: {text!r} must be a size such as 4GiB; the forms are {FORMS}")
    return size
