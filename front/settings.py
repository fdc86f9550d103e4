"""From a server's settings to its engine's configuration, and the checks that need no engine."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.capture_config import parse_sizes
from engine.config import EngineConfig
from engine.graph_settings import (
    BUCKETS_FLAG,
    DECODE_SIZES_FLAG,
    DEFAULT_BUCKETS,
    DEFAULT_MAX_PADDING_RATIO,
    DEFAULT_MAX_REQUESTS,
    MOST_BUCKETS,
    MOST_DECODE_SIZES,
    MOST_REQUESTS,
    PrefillGraphSettings,
)
from rpc.grammar import grammar_enabled
from rpc.server_settings import ServerSettings
from rpc.settings import Flag


def _prefill_buckets(value: Any) -> list[int]:
    return parse_sizes(value, flag=BUCKETS_FLAG, most=MOST_BUCKETS)


def _decode_sizes(value: Any) -> list[int]:
    return [] if value in ("", []) else parse_sizes(value, flag=DECODE_SIZES_FLAG, most=MOST_DECODE_SIZES)


class FrontSettings(ServerSettings):
    """Flags of both kinds of servers that concern their front, or whose values the engine's own code reads."""

    engine_start_timeout_secs: float = Field(
        1800.0, gt=0, le=86400, description="longest time for the engine to load the model"
    )
    enable_prefill_cuda_graph: bool = Field(
        False,
        description="replay a captured graph for batches of short prompts; needs --enable-cuda-graph, without which "
        "it has no effect",
    )
    prefill_cuda_graph_max_requests: int = Field(
        DEFAULT_MAX_REQUESTS, ge=1, le=MOST_REQUESTS, description="prompts that one replay computes at the most"
    )
    prefill_cuda_graph_capture_config: Annotated[
        list[int], Flag(split=False, metavar="SIZES"), BeforeValidator(_prefill_buckets)
    ] = Field(
        list(DEFAULT_BUCKETS),
        description=f"tokens of the prefill graphs, at most {MOST_BUCKETS} sizes: a list 1,2,64, a range max:step, "
        "or a file with one size a line",
    )
    prefill_cuda_graph_max_padding_ratio: float = Field(
        DEFAULT_MAX_PADDING_RATIO,
        ge=0.0,
        le=1.0,
        allow_inf_nan=False,
        description="share of padding in a prefill graph above which the batch runs without one; 1.0 allows any",
    )
    prefill_cuda_graph_strict: bool = Field(
        False, description="do not start when the prefill graphs that were asked for cannot be captured"
    )

    decode_capture_config: Annotated[
        list[int],
        Flag(("--cuda-graph-sizes",), split=False, metavar="SIZES"),
        BeforeValidator(_decode_sizes),
    ] = Field(
        [],
        description="batch sizes of the decode graphs, each up to --max-num-seqs: a list 1,8,64, a range max:step, "
        "or a file with one size a line; default: 1, 8, 16, 24, 32, then every 16th",
    )

    @model_validator(mode="after")
    def _decode_sizes_fit(self) -> Self:
        wrong = [size for size in self.decode_capture_config if size > self.max_num_seqs]
        if wrong:
            raise ValueError(f"{DECODE_SIZES_FLAG}: {wrong} exceed --max-num-seqs {self.max_num_seqs}")
        return self

    @model_validator(mode="after")
    def _profiles_have_a_folder(self) -> Self:
        folder = self.profile_dir
        if self.enable_profiling and not (folder and Path(folder).is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(
                f"--profile-dir {folder!r}: --enable-profiling needs an existing folder that can be written to"
            )
        return self

    @model_validator(mode="after")
    def _advertised_host_is_reachable(self) -> Self:
        check_advertised(self.host, self.advertise_host)
        return self

    @model_validator(mode="after")
    def _model_is_a_folder(self) -> Self:
        folder = Path(self.model)
        if not folder.is_dir():
            raise ValueError(f"--model {self.model!r}: no such folder")
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model {self.model!r}: the folder has no config.json; give a Hugging Face folder")
        return self

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names under which the model is asked for; the first one is the label of metrics."""
        return tuple(self.served_model_name) or (Path(self.model).resolve().name,)


def check_advertised(host: str, advertise_host: str | None) -> None:
    """Raises ValueError when others would be told an address that leads nowhere, or back to themselves."""
    if advertise_host is None:
        if _is_wildcard(host):
            raise ValueError(
                f"--host {host} listens on all addresses, so --advertise-host must name the one that others can reach"
            )
        return
    if _is_wildcard(advertise_host):
        raise ValueError(
            f"--advertise-host {advertise_host} is no address that others can reach; name the host or its address"
        )
    if _is_loopback(advertise_host) and not _is_loopback(host):
        raise ValueError(
            f"--advertise-host {advertise_host} leads every other host to itself, while --host {host} "
            "listens beyond this machine; name an address that others can reach"
        )


def _is_wildcard(host: str) -> bool:
    address = _address(host)
    return host in ("", "*") if address is None else address.is_unspecified


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def engine_config(settings: FrontSettings, role: str, *, allow_local_prefill: bool) -> EngineConfig:
    """The configuration of the server's engine; unset numbers stay 0, which leaves the choice to the
    engine.
    """
    tiers = settings.tiers
    return EngineConfig(
        role=role,
        model=str(Path(settings.model).resolve()),
        served_model_name=settings.served_names[0],
        grammars=grammar_enabled(settings.grammar_backend, Path(settings.model)),
        dtype=settings.dtype,
        load_format=settings.load_format,
        attention_backend=settings.attention_backend,
        tensor_parallel_size=settings.tensor_parallel_size,
        tp_broadcast_timeout_seconds=settings.tp_broadcast_timeout_seconds,
        threads=settings.threads or 0,
        block_size=settings.block_size or 0,
        num_kv_blocks=settings.num_kv_blocks or 0,
        kv_cache_memory_bytes=int(settings.kv_cache_memory_bytes or 0),
        max_model_len=settings.max_model_len or 0,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        allow_local_prefill=allow_local_prefill,
        device=settings.device,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_cuda_graph=False if settings.enforce_eager else settings.enable_cuda_graph,
        decode_capture_sizes=tuple(settings.decode_capture_config),
        cuda_graph_debug=settings.cuda_graph_debug,
        prefill_graph=PrefillGraphSettings(
            enabled=settings.enable_prefill_cuda_graph,
            max_requests=settings.prefill_cuda_graph_max_requests,
            buckets=tuple(settings.prefill_cuda_graph_capture_config),
            max_padding_ratio=settings.prefill_cuda_graph_max_padding_ratio,
            strict=settings.prefill_cuda_graph_strict,
        ),
        host=settings.host,
        cache_store_port=settings.cache_store_port,
        kv_transport=settings.kv_transport,
        kv_lease_seconds=settings.kv_lease_seconds,
        kv_checksum=settings.kv_checksum,
        kv_load_failure_policy=settings.kv_load_failure_policy,
        kv_data_port=settings.kv_data_port,
        kv_bulk_channels=settings.kv_bulk_channels,
        kv_host_bytes=tiers.host_bytes,
        kv_disk_path=str(Path(tiers.disk_path).resolve()) if tiers.disk_path else "",
        kv_disk_bytes=tiers.disk_bytes,
        kv_tier=tiers.shared,
        kv_tier_timeout_ms=settings.kv_tier_timeout_ms,
        kv_tier_min_tokens=settings.kv_tier_min_tokens,
        cache_store_queue_size=settings.cache_store_queue_size,
        cache_store_chunk_bytes=settings.cache_store_chunk_bytes and int(settings.cache_store_chunk_bytes),
        cache_store_connect_timeout_ms=settings.cache_store_connect_timeout_ms,
        cache_store_connect_retry_times=settings.cache_store_connect_retry_times,
        cache_store_publish_timeout_ms=settings.cache_store_publish_timeout_ms,
        cache_store_threads=settings.cache_store_threads or 0,
        cache_store_return_before_deadline_ms=settings.cache_store_return_before_deadline_ms,
        cache_store_steal_before_deadline_ms=settings.cache_store_steal_before_deadline_ms,
        cache_store_quarantine_ms=settings.cache_store_quarantine_ms,
        cache_store_transfer_wait_timeout_ms=settings.cache_store_transfer_wait_timeout_ms,
        cache_store_cancel_timeout_ms=settings.cache_store_cancel_timeout_ms,
        load_cache_timeout_ms=settings.load_cache_timeout_ms,
        prefill_max_wait_timeout_ms=settings.prefill_max_wait_timeout_ms,
        decode_retry_times=settings.decode_retry_times,
        decode_retry_timeout_ms=settings.decode_retry_timeout_ms,
        decode_retry_interval_ms=settings.decode_retry_interval_ms,
        profile_dir=str(Path(settings.profile_dir).resolve()) if settings.enable_profiling else "",
        profile_max_seconds=settings.profile_max_seconds,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
