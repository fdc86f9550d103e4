"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from router.breaker import BreakerSettings
from router.budget import Backoff
from router.grammar.admission import GrammarSettings
from router.policies import Tuning
from router.prefix.index import INDEX_ENTRIES
from router.requests import MAX_SEED
from rpc.grammar import grammar_enabled
from rpc.server_settings import CommonSettings, Port
from rpc.settings import Flag

PolicyName = Literal[
    "random", "round_robin", "least_load", "least_loaded", "power_of_two", "session", "cache_aware", "cost"
]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError that shows the address."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} must have the form host:port, with a port from 1 to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{address!r} must put an IPv6 address in brackets: [host]:port")
    if any(not "!" <= c <= "~" or c in "/,#?" for c in host):
        raise ValueError(f"{address!r} must have the form host:port, without a scheme or path")
    return host, int(port)


class RouterSettings(CommonSettings):
    """Flags of the router."""

    port: Port = Field(8000, description="HTTP port (API and /metrics); 0 takes a free one")
    grpc_port: Port = Field(8001, description="gRPC port; 0 takes a free one")
    model: Annotated[str, Flag(("--model-path",))] = Field(
        min_length=1,
        description="folder of the model in Hugging Face form; tokenizer and chat template are read",
    )
    served_model_name: list[str] = Field(
        [],
        description="names under which clients ask for the model; default: those of the servers",
    )
    api_key: Annotated[str | None, Flag(secret=True)] = Field(
        None, min_length=1, description="clients must send it as a bearer token"
    )
    prefill: list[str] = Field([], description="prefill server host:port; repeated or separated by commas")
    decode: list[str] = Field([], description="decode server host:port; repeated or separated by commas")

    policy: PolicyName = Field("round_robin", description="choice of servers of both roles")
    prefill_policy: PolicyName | None = Field(None, description="choice of prefill servers; default: --policy")
    decode_policy: PolicyName | None = Field(None, description="choice of decode servers; default: --policy")
    cache_threshold: float = Field(
        0.3, ge=0, le=1, description="cache_aware: share of a prompt that has to be cached for a server to be preferred"
    )
    balance_abs_threshold: int = Field(
        64, ge=0, le=1_000_000, description="cache_aware: difference in open requests above which load may decide"
    )
    balance_rel_threshold: float = Field(
        1.5, ge=1, le=1000, description="cache_aware: ratio of open requests above which load decides, if both are"
    )
    prefix_index_entries: int = Field(
        INDEX_ENTRIES,
        ge=1,
        le=100_000_000,
        description="cache_aware and cost: most blocks that the router remembers, of all servers together",
    )
    disagg_min_prompt_tokens: int = Field(
        0, ge=0, le=1 << 30, description="shorter prompts are served by one server, where one allows it"
    )
    allow_pins: bool = Field(False, description="follow x-baton-prefill and x-baton-decode of clients")

    retry_max_retries: int = Field(5, ge=0, le=100, description="further attempts before the first token")
    retry_initial_backoff_ms: int = Field(50, ge=0, le=60_000, description="wait before the first retry")
    retry_max_backoff_ms: int = Field(5000, ge=0, le=600_000, description="longest wait between attempts")
    retry_backoff_multiplier: float = Field(2.0, ge=1, le=100, description="growth of the wait")
    retry_jitter_factor: float = Field(0.1, ge=0, le=1, description="random share of the wait, up and down")
    retry_budget_ratio: float = Field(0.1, ge=0, le=10, description="retries allowed per request, on average; 0: none")
    migration_limit: int = Field(
        3, ge=0, le=100, description="fail-overs of one request after its first token; 0: none"
    )

    cb_failure_threshold: int = Field(5, ge=1, le=10_000, description="failures in a row that open a breaker")
    cb_success_threshold: int = Field(2, ge=1, le=10_000, description="successful probes that close it again")
    cb_timeout_duration_secs: float = Field(30.0, gt=0, le=86_400, description="time that a breaker stays open")
    cb_window_duration_secs: float = Field(60.0, gt=0, le=86_400, description="older failures are forgotten")
    health_check_interval_secs: float = Field(
        5.0, gt=0, le=60, description="longest silence that a server is to keep about its status"
    )
    health_check_timeout_secs: float = Field(
        2.0, gt=0, le=60, description="wait for an answer; a silent stream leads to a check after this time"
    )
    health_failure_threshold: int = Field(
        3, ge=1, le=100, description="unanswered checks in a row after which a server counts as lost"
    )
    health_success_threshold: int = Field(
        2, ge=1, le=100, description="answers in a row after which a lost server is used again"
    )
    reserve_timeout_secs: float = Field(
        30.0, gt=0, le=3600, description="longest wait for a decode server to reserve its KV blocks"
    )
    stream_inactivity_timeout_secs: float = Field(
        60.0, gt=0, le=3600, description="longest silence of a stream that has begun to generate"
    )

    max_concurrent_requests: int = Field(0, ge=0, le=1_000_000, description="requests served at a time; 0: no limit")
    queue_size: int = Field(1024, ge=0, le=1_000_000, description="requests waiting for their turn; more get 429")
    queue_timeout_secs: float = Field(60.0, gt=0, le=86_400, description="longest wait for a turn")
    request_timeout_secs: float = Field(600.0, gt=0, le=86_400, description="longest time of a request")
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED, description="of the draws for requests that bring no seed; default: another each start"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template has it"
    )
    grammar_queue_timeout_seconds: float = Field(
        30.0, gt=0, le=3600, description="longest wait of a grammar for a process that checks it"
    )
    grammar_compile_timeout_seconds: float = Field(
        30.0, gt=0, le=3600, description="longest time to compile a grammar; then it is refused"
    )
    grammar_memory_mb: int = Field(
        1024, ge=16, le=1 << 20, description="memory that compiling a grammar may take; beyond it is refused"
    )
    grammar_result_cache: int = Field(2048, ge=1, le=1 << 20, description="verdicts on grammars that are remembered")
    max_payload_size: ByteSize = Field(
        ByteSize(32 << 20), ge=1024, le=1 << 32, description="largest request body in bytes"
    )

    @field_validator("prefill", "decode")
    @classmethod
    def _addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            split_address(address)
        return list(dict.fromkeys(addresses))

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        if any(not name.strip() for name in names):
            raise ValueError("a served model name must not be empty")
        return list(dict.fromkeys(names))

    @field_validator("model")
    @classmethod
    def _folder(cls, model: str) -> str:
        if not (Path(model) / "tokenizer.json").is_file():
            raise ValueError("must be a folder with a tokenizer.json; `baton model prepare` makes one")
        return model

    @model_validator(mode="after")
    def _one_role_per_address(self) -> Self:
        both = set(self.prefill) & set(self.decode)
        if both:
            raise ValueError(f"--prefill and --decode both name {', '.join(sorted(both))}")
        return self

    @property
    def grammars(self) -> GrammarSettings:
        return GrammarSettings(
            enabled=grammar_enabled(self.grammar_backend, self.model_folder),
            folder=str(self.model_folder.resolve()),
            queue_timeout_s=self.grammar_queue_timeout_seconds,
            compile_timeout_s=self.grammar_compile_timeout_seconds,
            memory_bytes=self.grammar_memory_mb << 20,
            result_cache=self.grammar_result_cache,
        )

    @property
    def model_folder(self) -> Path:
        return Path(self.model)

    @property
    def tuning(self) -> Tuning:
        return Tuning(self.cache_threshold, self.balance_abs_threshold, self.balance_rel_threshold)

    @property
    def backoff(self) -> Backoff:
        return Backoff(
            self.retry_initial_backoff_ms / 1000,
            self.retry_max_backoff_ms / 1000,
            self.retry_backoff_multiplier,
            self.retry_jitter_factor,
        )

    @property
    def breaker(self) -> BreakerSettings:
        return BreakerSettings(
            self.cb_failure_threshold,
            self.cb_success_threshold,
            self.cb_timeout_duration_secs,
            self.cb_window_duration_secs,
        )
