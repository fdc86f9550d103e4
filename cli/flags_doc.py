"""Writes `docs/flags.md` from the settings models: `python -m cli.flags_doc > docs/flags.md`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping

from decode_server.settings import DecodeSettings
from prefill_server.settings import PrefillSettings
from router.settings import RouterSettings
from rpc.settings import Settings

HEADER = """\
# Flags

Generated from the settings models by `python -m cli.flags_doc`; a test fails when the two differ.

A flag `--kv-lease-seconds 30` is also the variable `BATON_KV_LEASE_SECONDS=30` and the key `kv-lease-seconds: 30` of
the YAML file that `--config` (or `BATON_CONFIG`) names. The command line wins over the environment, the environment
over the file, the file over the default. A switch is turned off by `--no-…`. Lists are repeated or separated by commas.
A value that cannot be ends the start with status 2 and one line that names where it came from.

R is the router, P a prefill server, D a decode server.
"""

ROLES: Mapping[str, type[Settings]] = {"R": RouterSettings, "P": PrefillSettings, "D": DecodeSettings}

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model and addresses": (
        *("model", "served_model_name", "host", "advertise_host", "port", "grpc_port", "metrics_port"),
        *("cache_store_port", "prefill", "decode", "api_key"),
    ),
    "Engine": (
        *("dtype", "load_format", "device", "attention_backend", "tensor_parallel_size", "threads", "max_model_len"),
        "tp_broadcast_timeout_seconds",
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "gpu_memory_utilization"),
        *("enable_cuda_graph", "enforce_eager", "decode_capture_config", "cuda_graph_debug"),
        *("enable_prefill_cuda_graph", "prefill_cuda_graph_max_requests", "prefill_cuda_graph_capture_config"),
        *("prefill_cuda_graph_max_padding_ratio", "prefill_cuda_graph_strict"),
        *("allow_local_prefill", "engine_start_timeout_secs"),
    ),
    "KV cache": ("kv_cache_dtype", "block_size", "num_kv_blocks", "kv_cache_memory_bytes", "enable_prefix_caching"),
    "KV tiers below the pool": (
        *("kv_host_bytes", "kv_disk_path", "kv_disk_bytes", "kv_tier", "kv_tier_timeout_ms", "kv_tier_min_tokens"),
    ),
    "KV transfer": (
        *("kv_transport", "kv_data_port", "kv_bulk_channels"),
        *("kv_lease_seconds", "kv_checksum", "kv_load_failure_policy"),
        *("load_cache_timeout_ms", "cache_store_connect_timeout_ms", "cache_store_connect_retry_times"),
        *("cache_store_queue_size", "cache_store_chunk_bytes", "cache_store_publish_timeout_ms"),
        *("cache_store_threads", "cache_store_cancel_timeout_ms", "cache_store_transfer_wait_timeout_ms"),
        *("cache_store_quarantine_ms", "cache_store_steal_before_deadline_ms"),
        "cache_store_return_before_deadline_ms",
    ),
    "Waiting and time limits": (
        *("request_timeout_secs", "max_rpc_timeout_ms", "prefill_max_wait_timeout_ms", "decode_retry_times"),
        *("decode_retry_timeout_ms", "decode_retry_interval_ms", "stop_stream_wait_timeout_ms"),
        *("reserve_timeout_secs", "stream_inactivity_timeout_secs"),
    ),
    "Requests": ("max_concurrent_requests", "queue_size", "queue_timeout_secs", "max_payload_size", "seed"),
    "Structured output and tools": (
        *("grammar_backend", "grammar_queue_timeout_seconds", "grammar_compile_timeout_seconds"),
        *("grammar_memory_mb", "grammar_result_cache", "tool_call_parser"),
    ),
    "Choice of servers": (
        *("policy", "prefill_policy", "decode_policy", "cache_threshold", "balance_abs_threshold"),
        *("balance_rel_threshold", "prefix_index_entries", "disagg_min_prompt_tokens", "allow_pins"),
    ),
    "Retry and migration": (
        *("retry_max_retries", "retry_initial_backoff_ms", "retry_max_backoff_ms", "retry_backoff_multiplier"),
        *("retry_jitter_factor", "retry_budget_ratio", "migration_limit"),
    ),
    "Health of servers": (
        *("health_check_interval_secs", "health_check_timeout_secs", "health_failure_threshold"),
        *("health_success_threshold", "cb_failure_threshold", "cb_success_threshold", "cb_timeout_duration_secs"),
        "cb_window_duration_secs",
    ),
    "Drain": ("drain_grace_secs", "drain_timeout_secs"),
    "Logs": (
        *("log_level", "log_format", "disable_metrics", "disable_log_requests", "access_log_path"),
        *("access_log_content", "access_log_arrival", "access_log_queue_size", "access_log_batch_size"),
        *("access_log_flush_interval_seconds", "access_log_max_bytes", "access_log_backups"),
        "access_log_close_timeout_seconds",
    ),
    "Profiles": ("enable_profiling", "profile_dir", "profile_max_seconds"),
    "Tracing": ("otlp_traces_endpoint", "tracing_sample_ratio"),
}


def ungrouped() -> set[str]:
    """Settings that no group has; a new one has to be put into one."""
    known = {name for names in GROUPS.values() for name in names}
    return {option.field for model in ROLES.values() for option in model.options()} - known


def _choices(annotation: typing.Any) -> str:
    """The values of a closed set, for the page; empty when any value of the type will do."""
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    return next(filter(None, map(_choices, typing.get_args(annotation))), "")


def _row(field: str) -> str:
    found = {role: option for role, model in ROLES.items() for option in model.options() if option.field == field}
    first = next(iter(found.values()))
    names = [first.flag, *first.spec.aliases]
    if first.shape == "bool":
        names.append("--no-" + first.flag[2:])
    defaults: dict[str, list[str]] = {}
    for role, option in found.items():
        defaults.setdefault(option.default_text(), []).append(role)
    if len(defaults) == 1:
        default = next(iter(defaults))
    else:
        default = ", ".join(f"{text} ({' '.join(roles)})" for text, roles in defaults.items())
    texts = list(dict.fromkeys(option.info.description or "" for option in found.values()))
    choices = _choices(first.info.annotation)
    if choices:
        texts[-1] += f": {choices}"
    cells = (" ".join(f"`{name}`" for name in names), " ".join(found), default, " / ".join(texts))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def render() -> str:
    """The page."""
    parts = [HEADER]
    for title, fields in GROUPS.items():
        rows = "\n".join(_row(field) for field in fields)
        parts.append(f"\n## {title}\n\n| flag | of | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
