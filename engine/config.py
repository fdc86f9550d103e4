"""What a front tells its engine process at start: one JSON document with named fields.

Torch-free, so that fronts may build it. A missing field takes its default; an unknown field or a wrong type
is an error. Ranges are checked by `EngineConfig.check`, whose messages name the flag of the server's command
line.
"""

from __future__ import annotations

import msgspec

from engine.graph_settings import DECODE_SIZES_FLAG, PrefillGraphSettings
from rpc.errors import BatonError, ErrorCode

ROLES = ("prefill", "decode")
CHECKSUMS = ("off", "sample", "all")
TRANSPORTS = ("auto", "ipc", "nixl", "tcp", "grpc")
LOAD_FAILURE_POLICIES = ("retry", "recompute", "fail")
TENSOR_PARALLEL_FLAG = "--tensor-parallel-size"
MOST_RANKS = 16


class EngineConfig(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of one engine process. Durations carry their unit in the name; a limit of 0 or below means
    none."""

    role: str  # prefill or decode
    model: str  # Hugging Face folder
    served_model_name: str = ""  # label `model_name` of the engine's metrics; the folder's name when empty
    rank: int = 0
    tensor_parallel_size: int = 1  # engine processes that share the model
    tp_broadcast_timeout_seconds: float = 60.0  # longest silence of a rank towards another one
    start_deadline_ns: int = 0  # reading of time.monotonic_ns() until which ranks wait for each other to become ready
    dtype: str = "auto"
    load_format: str = "auto"
    grammars: bool = False  # keep to grammars; then a start without xgrammar, or without a tokenizer, fails
    attention_backend: str = "auto"
    device: str = "auto"
    threads: int = 0  # intra-op threads of torch; 0 leaves torch's own choice

    block_size: int = 0  # tokens per KV block; 0: 64 on CUDA, 16 on the CPU
    num_kv_blocks: int = 0  # usable blocks; 0: from kv_cache_memory_bytes
    kv_cache_memory_bytes: int = 0  # 0: a share of the free memory
    gpu_memory_utilization: float = 0.9  # share of a device's memory that this engine may take
    max_model_len: int = 0  # prompt and generated tokens; 0: the model's own limit
    max_num_seqs: int = 64  # requests computed in one step
    max_num_batched_tokens: int = 2048  # tokens computed in one step
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    allow_local_prefill: bool = True  # a decode server may compute prompts itself
    enable_cuda_graph: bool | None = None  # None: on with CUDA
    decode_capture_sizes: tuple[int, ...] = ()  # rows of the decode graphs; empty: the default list
    cuda_graph_debug: bool = False
    prefill_graph: PrefillGraphSettings = PrefillGraphSettings()

    host: str = "127.0.0.1"  # bind address of the cache-store agent
    cache_store_port: int = 0  # 0: any free port
    kv_transport: str = "auto"
    kv_lease_seconds: float = 30.0
    kv_checksum: str = "all"
    kv_load_failure_policy: str = "retry"
    kv_data_port: int = 0  # 0: any free port
    kv_bulk_channels: int = 4
    kv_host_bytes: int = 0  # of host memory for prefix blocks below the pool; 0: none
    kv_disk_path: str = ""  # directory for prefix blocks below the pool; empty: none
    kv_disk_bytes: int = 0  # limit of its files
    kv_tier: str = ""  # address of a store for prefix blocks that servers share; empty: none
    kv_tier_timeout_ms: int = 1000  # longest delay of a prompt whose beginning may be in one of these
    kv_tier_min_tokens: int = 256  # for fewer missing tokens none of them is asked
    cache_store_queue_size: int = 1000
    cache_store_chunk_bytes: int | None = None
    cache_store_connect_timeout_ms: int = 1000
    cache_store_connect_retry_times: int = 0
    cache_store_publish_timeout_ms: int = 100_000
    cache_store_threads: int = 0  # workers of host copies; 0: as many as cores, 32 at the most
    cache_store_return_before_deadline_ms: int = 100
    cache_store_steal_before_deadline_ms: int = 250
    cache_store_quarantine_ms: int = 10_000
    cache_store_transfer_wait_timeout_ms: int = 180_000
    cache_store_cancel_timeout_ms: int = 1000
    load_cache_timeout_ms: int = 5000  # longest time without a new block once the prefill runs
    prefill_max_wait_timeout_ms: int = 600_000  # longest time in the queue before the first step
    decode_retry_times: int = 100  # further attempts to reserve blocks
    decode_retry_timeout_ms: int = 100  # time for all of them
    decode_retry_interval_ms: int = 1

    profile_dir: str = ""  # folder of recorded profiles; empty: none are recorded
    profile_max_seconds: float = 60.0  # longest recording

    log_level: str = "info"
    log_format: str = "json"

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> EngineConfig:
        """Raises INVALID_PARAMS for anything but a configuration of this version."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise BatonError(ErrorCode.INVALID_PARAMS, f"engine configuration: {error}") from error

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    def check(self) -> None:
        """Raises INVALID_PARAMS for the first value out of its range."""
        _one_of("--role", self.role, ROLES)
        _one_of("--kv-transport", self.kv_transport, TRANSPORTS)
        _one_of("--kv-checksum", self.kv_checksum, CHECKSUMS)
        _one_of("--kv-load-failure-policy", self.kv_load_failure_policy, LOAD_FAILURE_POLICIES)
        _in_range("--block-size", self.block_size, 0, 1024)
        _in_range("--gpu-memory-utilization", self.gpu_memory_utilization, 0.01, 1)
        _in_range("--num-kv-blocks", self.num_kv_blocks, 0, 1 << 31)
        _in_range("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, 0, 1 << 62)
        _in_range("--max-model-len", self.max_model_len, 0, 1 << 31)
        _in_range("--max-num-seqs", self.max_num_seqs, 1, 65536)
        _in_range("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 1 << 24)
        _in_range("--threads", self.threads, 0, 4096)
        _in_range(TENSOR_PARALLEL_FLAG, self.tensor_parallel_size, 1, MOST_RANKS)
        _in_range("--tp-broadcast-timeout-seconds", self.tp_broadcast_timeout_seconds, 1, 600)
        for flag, port in (("--cache-store-port", self.cache_store_port), ("--kv-data-port", self.kv_data_port)):
            if not 0 <= port + self.tensor_parallel_size - 1 <= 65535:
                raise BatonError(
                    ErrorCode.INVALID_PARAMS,
                    f"{flag} {port} is rank 0's; with {TENSOR_PARALLEL_FLAG} {self.tensor_parallel_size} the last "
                    "rank's would be above 65535",
                )
        _in_range("--kv-lease-seconds", self.kv_lease_seconds, 0.05, 86400)
        _in_range("--kv-bulk-channels", self.kv_bulk_channels, 1, 64)
        _in_range("--cache-store-queue-size", self.cache_store_queue_size, 1, 1_000_000)
        if self.cache_store_chunk_bytes is not None:
            _in_range("--cache-store-chunk-bytes", self.cache_store_chunk_bytes, 64 << 10, 4 << 20)
        _in_range("--cache-store-connect-timeout-ms", self.cache_store_connect_timeout_ms, 10, 60_000)
        _in_range("--cache-store-connect-retry-times", self.cache_store_connect_retry_times, 0, 100)
        _in_range("--cache-store-publish-timeout-ms", self.cache_store_publish_timeout_ms, 100, 3_600_000)
        _in_range("--cache-store-threads", self.cache_store_threads, 0, 256)
        _in_range("--cache-store-return-before-deadline-ms", self.cache_store_return_before_deadline_ms, 0, 10_000)
        _in_range("--cache-store-steal-before-deadline-ms", self.cache_store_steal_before_deadline_ms, 0, 10_000)
        _in_range("--cache-store-quarantine-ms", self.cache_store_quarantine_ms, 0, 600_000)
        _in_range("--cache-store-transfer-wait-timeout-ms", self.cache_store_transfer_wait_timeout_ms, 100, 3_600_000)
        _in_range("--cache-store-cancel-timeout-ms", self.cache_store_cancel_timeout_ms, 10, 60_000)
        _in_range("--load-cache-timeout-ms", self.load_cache_timeout_ms, 100, 3_600_000)
        _in_range("--prefill-max-wait-timeout-ms", self.prefill_max_wait_timeout_ms, 1, 86_400_000)
        _in_range("--decode-retry-times", self.decode_retry_times, 0, 10_000)
        _in_range("--decode-retry-timeout-ms", self.decode_retry_timeout_ms, 0, 60_000)
        _in_range("--profile-max-seconds", self.profile_max_seconds, 0.1, 600)
        _in_range("--decode-retry-interval-ms", self.decode_retry_interval_ms, 1, 1000)
        self._check_tiers()
        self.prefill_graph.check()
        for size in self.decode_capture_sizes:
            _in_range(DECODE_SIZES_FLAG, size, 1, self.max_num_seqs)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least --max-num-seqs "
                f"{self.max_num_seqs}: every running request computes a token in each step",
            )

    @property
    def has_tiers(self) -> bool:
        """Whether there is any tier below the KV pool."""
        return bool(self.kv_host_bytes or self.kv_disk_path or self.kv_tier)

    def _check_tiers(self) -> None:
        _in_range("--kv-host-bytes", self.kv_host_bytes, 0, 1 << 62)
        _in_range("--kv-disk-bytes", self.kv_disk_bytes, 1 if self.kv_disk_path else 0, 1 << 62)
        _in_range("--kv-tier-timeout-ms", self.kv_tier_timeout_ms, 1, 600_000)
        _in_range("--kv-tier-min-tokens", self.kv_tier_min_tokens, 1, 1 << 24)
        if not self.has_tiers:
            return
        given = {
            "--kv-host-bytes": self.kv_host_bytes,
            "--kv-disk-path": self.kv_disk_path,
            "--kv-tier": self.kv_tier,
        }
        flags = ", ".join(flag for flag, value in given.items() if value)
        if not self.enable_prefix_caching:
            raise BatonError(
                ErrorCode.INVALID_PARAMS, f"{flags}: tiers extend the prefix cache; they need --enable-prefix-caching"
            )
        if self.role == "decode" and not self.allow_local_prefill:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"{flags}: tiers serve prompts that are computed here; a decode server needs --allow-local-prefill",
            )

    def check_lengths(self, max_model_len: int) -> None:
        """Raises INVALID_PARAMS when a prompt of the model's length could never be computed."""
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least the model length "
                f"{max_model_len} without chunked prefill; raise it, lower --max-model-len, or enable chunks",
            )


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        message = f"{flag} is {value!r}; it must be one of {', '.join(allowed)}"
        raise BatonError(ErrorCode.INVALID_PARAMS, message)


def _in_range(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BatonError(ErrorCode.INVALID_PARAMS, f"{flag} is {value}; it must be in {low} to {high}")
