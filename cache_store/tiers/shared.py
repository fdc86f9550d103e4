"""Tiers that several servers share, by the address under which `--kv-tier` names them."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import urlsplit

from cache_store.tiers.tier import Tier

FLAG = "--kv-tier"
SCHEMES = ("mooncake",)


def check_address(address: str) -> None:
    """Raises ValueError that names the flag for anything but SCHEME://HOST:PORT, with options as ?NAME=VALUE."""
    parts = urlsplit(address)
    try:
        complete = parts.scheme in SCHEMES and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:  # the port is no number, or out of range
        complete = False
    if not complete:
        schemes = ", ".join(f"{scheme}://HOST:PORT" for scheme in SCHEMES)
        raise ValueError(f"{FLAG} {address!r}: must be {schemes}")


def open_shared(address: str, record_bytes: int, timeout_s: float) -> Tier:
    """The tier at a checked address, for records of `record_bytes` bytes.

    Raises BatonError INVALID_PARAMS that names the flag when a package is missing. A store that cannot be reached now
    is no error: it may come, and is a miss until then. timeout_s: after which nobody waits for an operation any more.
    """
    # Its client library is an extra, and slow to import.
    tier: Tier = import_module("cache_store.tiers.mooncake").open_tier(address, record_bytes, timeout_s)
    return tier
