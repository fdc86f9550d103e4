"""What the HTTP API needs from the rest of the router."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from router.open_requests import OpenRequests
from router.requests import Serving
from router.text.tokenizer import Tokenizer
from router.validation import RequestValidator
from rpc.metrics import Registry

PING_INTERVAL_S = 15.0


class Workers(Protocol):
    """The registered servers, as `/workers` shows and changes them (router/registry.py)."""

    def describe(self) -> list[dict[str, Any]]: ...

    def add(self, role: Literal["prefill", "decode"], address: str) -> object:
        """INVALID_PARAMS for an address that is none."""
        ...

    def remove(self, role: Literal["prefill", "decode"], address: str) -> bool:
        """False: there was none."""
        ...


@dataclass(frozen=True, kw_only=True)
class HttpServices:
    """`flush_cache` asks every server and returns a result for each; `load` and `server_info` are shown as they are;
    `before_scrape` brings gauges up to date. An empty `api_keys` means that no key is asked for."""

    serving: Serving
    open_requests: OpenRequests
    validator: RequestValidator
    workers: Workers
    metrics: Registry
    flush_cache: Callable[[], Awaitable[list[dict[str, Any]]]]
    # Like `flush_cache`; None: there are no such paths.
    start_profile: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
    stop_profile: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
    load: Callable[[], dict[str, Any]]
    server_info: Callable[[], dict[str, Any]]
    before_scrape: Callable[[], None] | None = None
    api_keys: tuple[str, ...] = ()
    max_payload_bytes: int = 32 << 20
    ping_interval_s: float = PING_INTERVAL_S
    # Unix seconds at which the router started.
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.validator.tokenizer
