"""Settings of a prefill server."""

from __future__ import annotations

from pydantic import Field

from front.settings import FrontSettings
from rpc.server_settings import Port


class PrefillSettings(FrontSettings):
    port: Port = Field(50051, description="gRPC port; 0 takes a free one")
    cache_store_port: Port = Field(50061, description="port of rank 0's cache store; rank r listens on this + r")
    metrics_port: Port | None = Field(9101, description="HTTP port of /metrics, /ready and /debug; 0 takes a free one")
