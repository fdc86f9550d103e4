"""The flags that several processes share: all of them (`CommonSettings`), or both kinds of servers
(`ServerSettings`).

Each process derives its own model from these and sets its own default ports. Names ending in `_ms` are
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, model_validator

from rpc.access_log import AccessLog, AccessLogSettings
from rpc.block_sizes import MOST_TOKENS
from rpc.grammar import GrammarBackend
from rpc.kv_tiers import KvTiers, kv_tiers
from rpc.redaction import hide
from rpc.settings import Flag, Settings
from rpc.trace_export import TracingUnavailable, open_tracer
from rpc.tracing import Tracer

DEFAULT_DISK_BYTES = 10 << 30  # of the files below --kv-disk-path

Port = Annotated[int, Field(ge=0, le=65535)]


class CommonSettings(Settings):
    """Flags of router, prefill and decode servers."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all")
    port: Port = Field(0, description="port to listen on; 0 takes a free one")
    advertise_host: str | None = Field(
        None, description="address under which others reach this process; default: --host"
    )
    metrics_port: Port | None = Field(None, description="HTTP port of /metrics, /ready and /debug; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["json", "text"] = Field("json", description="form of a log line on stderr")
    disable_log_requests: bool = Field(False, description="no access log")
    disable_metrics: bool = Field(
        False, description="/metrics names its families and counts nothing: to measure what counting costs"
    )
    enable_profiling: bool = Field(
        False, description="profiles of the engines may be recorded: /start_profile and /stop_profile of the router"
    )
    access_log_path: str | None = Field(None, description="file of the access log; default: stderr")
    access_log_content: bool = Field(False, description="write prompts and answers into the access log")
    access_log_arrival: bool = Field(False, description="write a line also when a request arrives")
    access_log_queue_size: int = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="access-log lines waiting to be written; more are dropped and counted",
    )
    access_log_batch_size: int = Field(
        100, ge=1, le=100_000, description="access-log lines that are written at once; so many wake the writer"
    )
    access_log_flush_interval_seconds: float = Field(
        1.0, ge=0.01, le=60, description="longest time that a line waits for others to be written with"
    )
    access_log_max_bytes: ByteSize = Field(
        ByteSize(100 * 1000 * 1000), ge=4096, description="size at which the access log's file is rotated"
    )
    access_log_backups: int = Field(
        10, ge=0, le=1000, description="rotated access-log files kept; 0: the file begins anew"
    )
    access_log_close_timeout_seconds: float = Field(
        5.0, ge=0.1, le=60, description="longest wait for the access log at the end of the process"
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s:]+(:\d+)?/?$|^https?://\[[0-9a-fA-F:]+\](:\d+)?/?$",
        description="collector that gets traces, http://HOST:PORT (OTLP over gRPC); needs the extra tracing; "
        "default: no tracing",
    )
    tracing_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of the requests that are traced, of those that come without a traceparent"
    )
    drain_grace_secs: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="time after SIGTERM in which requests are still taken, since load balancers lag",
    )
    drain_timeout_secs: float = Field(
        120.0, gt=0, le=86400, description="time after SIGTERM at which open requests are ended"
    )
    grammar_backend: GrammarBackend = Field(
        "auto",
        description="structured output: auto: where xgrammar is installed; xgrammar: no start without it; none: off",
    )
    max_rpc_timeout_ms: int = Field(
        7_200_000, description="limit of every RPC that comes without a deadline; 0 or less: none"
    )

    @model_validator(mode="after")
    def _grace_within_timeout(self) -> Self:
        if self.drain_grace_secs > self.drain_timeout_secs:
            raise ValueError(
                f"--drain-grace-secs {self.drain_grace_secs:g} must not exceed "
                f"--drain-timeout-secs {self.drain_timeout_secs:g}"
            )
        return self

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or self.host

    def open_access_log(self, role: str, on_drop: Callable[[], None]) -> AccessLog:
        """The access log as these settings want it; `on_drop` is called for each line that had no room. From now on no
        log shows a secret of these settings. Raises SystemExit with one line when the file cannot be opened."""
        for option in self.options():
            if option.spec.secret:
                hide(getattr(self, option.field))
        settings = AccessLogSettings(
            path=self.access_log_path,
            enabled=not self.disable_log_requests,
            content=self.access_log_content,
            arrival=self.access_log_arrival,
            queue_size=self.access_log_queue_size,
            batch_size=self.access_log_batch_size,
            flush_interval_s=self.access_log_flush_interval_seconds,
            max_bytes=int(self.access_log_max_bytes),
            backups=self.access_log_backups,
            close_timeout_s=self.access_log_close_timeout_seconds,
        )
        try:
            return AccessLog(role, settings, on_drop=on_drop)
        except OSError as error:
            program = role if role == "router" else f"{role}_server"
            reason = error.strerror or str(error)
            raise SystemExit(
                f"{program}: error: --access-log-path {self.access_log_path}: cannot be opened: {reason}"
            ) from None

    def open_tracer(self, role: str) -> Tracer | None:
        """What records traces; None without a collector. Raises SystemExit with one line if packages are missing."""
        if self.otlp_traces_endpoint is None:
            return None
        program = role if role == "router" else f"{role}_server"
        service = f"baton-{role}"
        try:
            return open_tracer(self.otlp_traces_endpoint, self.tracing_sample_ratio, service=service, role=role)
        except TracingUnavailable as error:
            raise SystemExit(f"{program}: error: --otlp-traces-endpoint {error}") from None

    @property
    def max_rpc_timeout_s(self) -> float:
        """Seconds; 0 means none."""
        return max(0, self.max_rpc_timeout_ms) / 1000


class ServerSettings(CommonSettings):
    """Flags of prefill and decode servers."""

    model: Annotated[str, Flag(("--model-path",))] = Field(
        min_length=1, description="folder of the model in Hugging Face form (config, safetensors, tokenizer)"
    )
    served_model_name: list[str] = Field([], description="names under which clients ask for it; default: folder name")
    cache_store_port: Port = Field(0, description="port of rank 0's cache store; rank r listens on this + r")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="dtype of weights and activations")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="dtype of the KV cache; must be that of the activations"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field("auto", description="where the weights come from")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what the engine computes on; auto takes CUDA where there is a device of it"
    )
    attention_backend: Literal["auto", "torch", "native", "triton", "flashinfer"] = Field(
        "auto", description="attention implementation; auto takes what was measured to be fastest on the device"
    )
    tensor_parallel_size: Annotated[int, Flag(("-tp", "--tp-size"))] = Field(
        1, ge=1, le=16, description="engine processes (ranks) that share the model"
    )
    tp_broadcast_timeout_seconds: float = Field(
        60.0,
        ge=1,
        le=600,
        description="longest time for a message between ranks, an operation of all of them, or a silence of one; after "
        "that the engine ends. A server whose engine says nothing for so long is not ready",
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of an engine; default: all cores")
    enable_cuda_graph: bool | None = Field(
        None, description="run decode steps as captured CUDA graphs; default: on with CUDA, off on the CPU"
    )
    enforce_eager: Annotated[bool, Flag(("--disable-cuda-graph",))] = Field(
        False, description="the same as --no-enable-cuda-graph"
    )
    profile_dir: str = Field("", description="existing folder of recorded profiles; needed with --enable-profiling")
    profile_max_seconds: float = Field(
        60.0, ge=0.1, le=600, allow_inf_nan=False, description="after which the recording of a profile ends by itself"
    )
    cuda_graph_debug: bool = Field(
        False, description="write each captured graph as a DOT file into a folder that the log names"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the device's memory that weights, activations, graphs and KV may take"
    )
    max_model_len: int | None = Field(None, ge=1, description="longest sequence in tokens; default: the model's own")
    max_num_seqs: int = Field(64, ge=1, le=65536, description="requests in the running batch at the most")
    max_num_batched_tokens: int = Field(2048, ge=1, le=1 << 20, description="tokens of an engine step at the most")
    block_size: Annotated[int | None, Flag(("--page-size",))] = Field(
        None, ge=1, le=MOST_TOKENS, description="tokens of a KV block; default: 64 on CUDA, 16 on the CPU"
    )
    num_kv_blocks: int | None = Field(None, ge=2, description="KV blocks of the pool, in place of a size in bytes")
    kv_cache_memory_bytes: ByteSize | None = Field(None, ge=1, description="size of the KV pool, e.g. 2GiB")
    enable_prefix_caching: bool = Field(True, description="keep the KV of finished prompts for later ones")
    enable_chunked_prefill: bool = Field(True, description="compute long prompts in pieces beside other requests")
    kv_transport: Literal["auto", "ipc", "nixl", "tcp", "grpc"] = Field(
        "auto", description="how KV blocks travel; auto: the first of these that both servers have"
    )
    kv_lease_seconds: float = Field(30.0, gt=0, le=86400, description="life of staged KV without a sign of its reader")
    kv_checksum: Literal["off", "sample", "all"] = Field(
        "all",
        description="which pieces of KV carry a checksum over tcp and grpc (ipc and nixl have none); of two servers the"
        " stricter mode counts",
    )
    kv_load_failure_policy: Literal["retry", "recompute", "fail"] = Field(
        "retry",
        description="what a decode server does whose load failed; retry: one reload, then as recompute; recompute: it"
        " computes the prompt itself where it may (--allow-local-prefill), else as fail; fail: the router tries again,"
        " elsewhere if it can",
    )
    kv_data_port: Port = Field(
        0, description="port of rank 0's data connections (transport tcp); rank r listens on this + r; 0: any free ones"
    )
    kv_bulk_channels: int = Field(4, ge=1, le=64, description="connections to a peer for KV blocks")
    kv_host_bytes: ByteSize = Field(
        ByteSize(0), ge=0, description="host memory for prefix blocks that leave the pool, e.g. 4GiB; 0: none"
    )
    kv_disk_path: str = Field(
        "",
        description="directory of this server alone for prefix blocks, which then outlive it; made if absent",
    )
    kv_disk_bytes: ByteSize | None = Field(
        None, ge=1, description="limit of the files below --kv-disk-path; default: 10GiB"
    )
    kv_tier: Annotated[list[str], Flag(split=False)] = Field(
        [],
        description="a tier for prefix blocks, may be repeated: host:BYTES and disk:PATH:BYTES are short for the three "
        "flags above, mooncake://HOST:PORT is a store that several servers share",
    )
    kv_tier_timeout_ms: int = Field(
        1000,
        ge=1,
        le=600_000,
        description="longest delay of a prompt whose beginning may be in host memory, on disk or in a shared store; "
        "what has not come by then is computed",
    )
    kv_tier_min_tokens: int = Field(
        256, ge=1, le=1 << 20, description="least number of tokens missing in the pool for which these are asked"
    )
    prefill_max_wait_timeout_ms: int = Field(
        600_000, ge=1, le=86_400_000, description="longest wait of a prompt for its turn"
    )
    load_cache_timeout_ms: int = Field(
        5000,
        ge=100,
        le=3_600_000,
        description="longest time of a load without a new block, once its prompt runs",
    )
    decode_retry_times: int = Field(100, ge=0, le=10_000, description="further attempts to reserve KV blocks")
    decode_retry_timeout_ms: int = Field(100, ge=0, le=60_000, description="time in which these attempts begin")
    decode_retry_interval_ms: int = Field(1, ge=1, le=1000, description="pause between these attempts")
    stop_stream_wait_timeout_ms: int = Field(
        2000, ge=0, le=60_000, description="wait for a running request to stop before it is forced"
    )
    cache_store_connect_retry_times: int = Field(0, ge=0, le=100, description="further attempts to reach a peer")
    cache_store_connect_timeout_ms: int = Field(
        1000, ge=10, le=60_000, description="time to reach a peer's cache store"
    )
    cache_store_queue_size: int = Field(1000, ge=1, le=1_000_000, description="publish and load tasks waiting")
    cache_store_chunk_bytes: ByteSize | None = Field(
        None, ge=64 << 10, le=4 << 20, description="largest piece of KV; by default 4 MiB by tcp, 1 MiB by grpc"
    )
    cache_store_publish_timeout_ms: int = Field(
        100_000, ge=100, le=3_600_000, description="wait of a load for a first published block"
    )

    cache_store_threads: int | None = Field(
        None,
        ge=1,
        le=256,
        description="workers that copy KV, move it over tcp, make its checksums; default: min(32, cores)",
    )
    cache_store_return_before_deadline_ms: int = Field(
        100, ge=0, le=10_000, description="a one-sided transfer answers this long before the request's deadline"
    )
    cache_store_steal_before_deadline_ms: int = Field(
        250, ge=0, le=10_000, description="a one-sided transfer begins no read within this time of the deadline"
    )
    cache_store_quarantine_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="least time for which blocks are held after a one-sided transfer that was not proven to have ended",
    )
    cache_store_transfer_wait_timeout_ms: int = Field(
        180_000, ge=100, le=3_600_000, description="longest wait for one-sided copies that have begun"
    )
    cache_store_cancel_timeout_ms: int = Field(
        1000, ge=10, le=60_000, description="time for the word to each peer that a load was given up"
    )

    @model_validator(mode="after")
    def _return_before_steal(self) -> Self:
        if self.cache_store_return_before_deadline_ms >= self.cache_store_steal_before_deadline_ms:
            answer, last_read = self.cache_store_return_before_deadline_ms, self.cache_store_steal_before_deadline_ms
            raise ValueError(
                f"--cache-store-return-before-deadline-ms {answer} must be less than "
                f"--cache-store-steal-before-deadline-ms {last_read}"
            )
        return self

    @model_validator(mode="after")
    def _disk_limit_has_a_directory(self) -> Self:
        if self.kv_disk_bytes is not None and not self.kv_disk_path:
            raise ValueError(
                f"--kv-disk-bytes {int(self.kv_disk_bytes)} limits the files below --kv-disk-path; give it"
            )
        return self

    @property
    def tiers(self) -> KvTiers:
        """What all flags about tiers say together."""
        named = kv_tiers(self.kv_tier)
        if self.kv_host_bytes:
            named = replace(named, host_bytes=int(self.kv_host_bytes))
        if self.kv_disk_path:
            size = int(self.kv_disk_bytes or DEFAULT_DISK_BYTES)
            named = replace(named, disk_path=self.kv_disk_path, disk_bytes=size)
        return named

    @model_validator(mode="after")
    def _one_word_on_tiers(self) -> Self:
        named = kv_tiers(self.kv_tier)
        if (named.host_bytes and self.kv_host_bytes) or (named.disk_path and self.kv_disk_path):
            flag = "--kv-disk-path" if named.disk_path and self.kv_disk_path else "--kv-host-bytes"
            raise ValueError(f"{flag} and --kv-tier {' '.join(self.kv_tier)} name the same tier; give one of them")
        return self

    @model_validator(mode="after")
    def _one_word_on_graphs(self) -> Self:
        if self.enforce_eager and self.enable_cuda_graph:
            raise ValueError("--enable-cuda-graph and --enforce-eager contradict each other; give one of them")
        return self

    @model_validator(mode="after")
    def _one_pool_size(self) -> Self:
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("--num-kv-blocks and --kv-cache-memory-bytes both size the pool; give one of them")
        return self
