"""Settings of a decode server."""

from __future__ import annotations

from pydantic import Field

from front.settings import FrontSettings
from rpc.server_settings import Port


class DecodeSettings(FrontSettings):
    port: Port = Field(50052, description="gRPC port; 0 takes a free one")
    cache_store_port: Port = Field(50071, description="port of rank 0's cache store; rank r listens on this + r")
    metrics_port: Port | None = Field(9102, description="HTTP port of /metrics, /ready and /debug; 0 takes a free one")
    allow_local_prefill: bool = Field(
        True,
        description="serve whole requests (colocated), and recompute prompts whose KV could not be loaded",
    )
