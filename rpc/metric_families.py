"""Every metric family that Baton exports: one table, from which registries, documentation and checks are
made.

Units are in the names (`_seconds`, `_bytes`, `_tokens`, `_ratio`). A family that a server exports, or that
all processes share, carries the exporting process's own `role`; in families of the router alone `role`, where
listed, is that of the server it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from rpc.errors import TRANSFER_FAILURES, ErrorCode
from rpc.graph_status import INIT_STATUSES, REQUEST_STATUSES, GraphRole
from rpc.stages import DECODE_STAGES, PREFILL_STAGES, ROUTER_LEG_STAGES, ROUTER_STAGES

Role = Literal["router", "prefill", "decode"]
Kind = Literal["counter", "gauge", "histogram"]
Condition = Literal["", "colocated", "tensor_parallel"]

R: Role = "router"
P: Role = "prefill"
D: Role = "decode"

BUCKETS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "S": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 90, 120,
              180, 240),
        "T": (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
              0.3, 0.5, 1, 2.5, 10, 60, 240),
        "N": (1, *(2**n for n in range(3, 18))),
        "B": tuple(4096 * 4**n for n in range(12)),
        "Q": tuple(2**n for n in range(11)),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One metric family.

    `labels` are those beside the process's own `role` (see `own_role`); `role_labels` replaces them for
    single roles. `values` closes the set of a label's values. `conditions` says for a role when the family
    exists there at all: `colocated` (a decode server that may serve whole requests), `tensor_parallel` (more
    than one rank).
    """

    name: str
    kind: Kind
    roles: tuple[Role, ...]
    labels: tuple[str, ...]
    help: str
    buckets: str = ""
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    role_labels: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    conditions: Mapping[Role, Condition] = field(default_factory=dict)
    own_role_on_router: bool = False

    @property
    def own_role(self) -> bool:
        """Whether `role` is the exporting process's own and is filled in by the registry."""
        return self.roles != (R,) or self.own_role_on_router

    def all_labels(self, role: Role) -> tuple[str, ...]:
        """Label names of the family as `role` exports it, in order."""
        labels = self.role_labels.get(role, self.labels)
        return ("role", *labels) if self.own_role else labels

    def bucket_bounds(self) -> tuple[float, ...]:
        return BUCKETS[self.buckets]


_CODES = frozenset(code.name for code in ErrorCode)
_STAGES = frozenset((*ROUTER_STAGES, *ROUTER_LEG_STAGES, *PREFILL_STAGES, *DECODE_STAGES))
_SETS: Mapping[str, frozenset[str]] = {
    "api": frozenset(("completions", "chat", "grpc")),
    "stream": frozenset(("true", "false")),
    "phase": frozenset(("before_first_token", "mid_stream")),
    "path": frozenset(("pd", "colocated")),
    "code": _CODES,
    "stage": _STAGES,
    "role": frozenset((P, D)),  # of families of the router alone: the server that they are about
    "transport": frozenset(("ipc", "nixl", "tcp", "grpc")),
}


def _family(
    name: str,
    kind: str,
    roles: tuple[Role, ...],
    labels: str,
    help_: str,
    /,
    *,
    role_labels: Mapping[Role, tuple[str, ...]] | None = None,
    conditions: Mapping[Role, Condition] | None = None,
    own_role_on_router: bool = False,
    **sets: str,
) -> Family:
    """`kind`: c counter, g gauge, h + bucket set. `labels`: names separated by blanks. `sets`: values of a
    label."""
    kinds: dict[str, Kind] = {"c": "counter", "g": "gauge", "h": "histogram"}
    names = tuple(labels.split())
    values = {label: _SETS[label] for label in names if label in _SETS}
    values.update({label: frozenset(words.split()) for label, words in sets.items()})
    return Family(
        "baton_" + name, kinds[kind[0]], roles, names, help_, kind[1:], values,
        role_labels or {}, conditions or {}, own_role_on_router,
    )  # fmt: skip


_f = _family
_ALL = (R, P, D)
_SERVERS = (P, D)
_COLOCATED: Mapping[Role, Condition] = {D: "colocated"}
_WORKER_STATES = "ready draining unhealthy incompatible"

REQUEST_FAMILIES = (
    _f("http_requests_total", "c", (R,), "route method status",
       "HTTP requests by status as sent (499: the client had gone)"),
    _f("http_request_duration_seconds", "hS", (R,), "route method",
       "Duration of an HTTP request, to its last byte"),
    _f("http_inflight_requests", "g", (R,), "route", "HTTP requests now open"),
    _f("requests_total", "c", (R,), "model_name api stream outcome", "Generation requests by how they ended",
       outcome="stop length abort error"),
    _f("request_errors_total", "c", (R,), "model_name api code phase",
       "Generation requests that failed, by code and by whether the client had seen a token"),
    _f("time_to_first_token_seconds", "hS", (R,), "model_name path", "Arrival to first token written"),
    _f("inter_token_latency_seconds", "hT", (R,), "model_name path",
       "Gap between two chunks divided by the tokens of the chunk, observed once per token"),
    _f("time_per_output_token_seconds", "hT", (R,), "model_name path",
       "Mean time of an output token, once per request, first token excluded"),
    _f("e2e_request_latency_seconds", "hS", (R,), "model_name path", "Arrival to last token written"),
    _f("request_prompt_tokens", "hN", (R,), "model_name", "Prompt tokens of a request"),
    _f("request_generation_tokens", "hN", (R,), "model_name", "Generated tokens of a request"),
    _f("prompt_tokens_total", "c", (R,), "model_name", "Prompt tokens of finished requests"),
    _f("generation_tokens_total", "c", (R,), "model_name", "Tokens generated"),
    _f("cached_prompt_tokens_total", "c", (R,), "model_name",
       "Prompt tokens that the prefilling server found in its prefix cache"),
    _f("stage_seconds", "hS", _ALL, "stage",
       "Time of a request in one stage, attempts added up, sleeps excluded"),
    _f("stage_retries_total", "c", _SERVERS, "stage", "Further attempts at a stage"),
    _f("stage_retry_wait_seconds", "hS", _SERVERS, "stage",
       "Sleep between the attempts at a stage, per request"),
    _f("aborts_total", "c", _ALL, "leg source",
       "Requests ended before their time, by leg and by who asked for it",
       leg="router prefill decode cache_store", source="client deadline peer error drain"),
)  # fmt: skip

ROUTING_FAMILIES = (
    _f("router_decisions_total", "c", (R,), "role policy result", "Choices of a server",
       role="prefill decode", result="chosen fallback pinned none_ready incompatible"),
    _f("router_decision_seconds", "hS", (R,), "role policy", "Time to choose a server"),
    _f("router_path_total", "c", (R,), "decision",
       "Requests by the reason for prefill and decode apart or together",
       decision="pd short_prompt single_token beam_or_n requested no_pair"),
    _f("router_prefix_tokens_total", "c", (R,), "kind",
       "Cached prompt tokens as guessed by the router and as reported",
       kind="predicted actual"),
    _f("router_index_entries", "g", (R,), "", "Entries of the router's prefix index"),
    _f("router_index_bytes", "g", (R,), "", "Memory of the router's prefix index"),
    _f("router_queue_depth", "g", (R,), "", "Requests waiting for admission"),
    _f("router_workers", "g", (R,), "role state", "Registered servers by state", state=_WORKER_STATES),
    _f("router_worker_inflight", "g", (R,), "role worker", "Requests that the router has open on a server"),
    _f("breaker_state", "g", (R,), "role worker",
       "Circuit breaker of a server: 0 closed, 1 open, 2 half-open"),
    _f("breaker_transitions_total", "c", (R,), "role worker to", "Changes of a circuit breaker's state",
       to="closed open half_open"),
    _f("router_rejections_total", "c", (R,), "code", "Requests refused before a server was chosen"),
    _f("retries_total", "c", (R,), "role code", "Retries by role and code of the failed leg"),
    _f("retry_budget_ratio", "g", (R,), "", "What is left of the retry budget, 0 to 1"),
    _f("retry_budget_exhausted_total", "c", (R,), "role", "Retries not made for want of budget"),
    _f("migrations_total", "c", (R,), "result", "Fail-overs after the first token", result="ok failed limit"),
)  # fmt: skip

PROCESS_FAMILIES = (
    _f("build_info", "g", _ALL, "version revision python", "1; what is running",
       role_labels=dict.fromkeys(_SERVERS, ("version", "revision", "python", "torch", "cuda"))),
    _f("model_info", "g", _SERVERS,
       "model_name dtype kv_cache_dtype block_size tp_size attention_backend kv_transport",
       "1; what is being served"),
    _f("ready", "g", _ALL, "", "1 while new requests are welcome"),
    _f("drain_state", "g", _ALL, "", "0 serving, 1 draining, 2 drained"),
    _f("drain_remaining_requests", "g", _ALL, "", "Requests that a drain still waits for"),
    _f("engine_up", "g", _SERVERS, "rank", "1 while the engine process of a rank lives"),
    _f("rpc_requests_total", "c", _ALL, "method code", "RPCs served, by code (NONE_ERROR on success)"),
    _f("rpc_duration_seconds", "hS", _ALL, "method", "Duration of an RPC served"),
    _f("rpc_inflight", "g", _ALL, "method", "RPCs now open"),
    _f("channel_evictions_total", "c", _ALL, "peer_role state",
       "gRPC channels given up because of their state",
       peer_role="router prefill decode cache_store", state="transient_failure shutdown"),
    _f("tombstones", "g", _SERVERS, "", "Aborts that wait for their request"),
    _f("tombstone_hits_total", "c", _SERVERS, "", "Requests refused because their abort came first"),
    _f("contract_breaches_total", "c", _ALL, "kind", "Messages of a peer that break the wire contract",
       kind="no_code unknown_code missing_result absent_field"),
    _f("event_loop_lag_seconds", "hS", _ALL, "", "Delay of a timer of the event loop beyond its due time"),
    _f("log_dropped_total", "c", _ALL, "", "Log records dropped because the queue of the writer was full"),
    _f("grammar_validator_available", "g", (R, D), "", "1 when structured output can be admitted"),
    _f("grammar_compile_seconds", "hS", (R,), "",
       "Time to compile a grammar at admission", own_role_on_router=True),
)  # fmt: skip

ENGINE_FAMILIES = (
    _f("num_requests_running", "g", _SERVERS, "model_name", "Requests in the running batch"),
    _f("num_requests_waiting", "g", _SERVERS, "model_name", "Requests waiting for the scheduler"),
    _f("num_requests_loading", "g", (D,), "model_name", "Requests whose KV is being loaded"),
    _f("engine_step_seconds", "hT", _SERVERS, "kind", "Time of an engine step", kind="prefill decode mixed"),
    _f("engine_batch_requests", "hQ", _SERVERS, "kind",
       "Requests of an engine step", kind="prefill decode mixed"),
    _f("engine_batch_tokens", "hN", _SERVERS, "kind",
       "Tokens computed by an engine step", kind="prefill decode mixed"),
    _f("engine_host_gap_seconds", "hT", (D,), "mode",
       "Time between two steps in which the device has no work"),
    _f("async_decode_wait_seconds", "hT", (D,), "mode", "Wait for the result of a step in flight"),
    _f("async_decode_steps_total", "c", (D,), "mode", "Decode steps by mode"),
    _f("async_decode_sync_fallback_total", "c", (D,), "reason", "Steps that had to be synchronous"),
    _f("async_decode_dropped_rows_total", "c", (D,), "", "Rows computed for requests that had ended"),
    _f("async_decode_pending", "g", (D,), "", "Steps in flight"),
    _f("preemptions_total", "c", _SERVERS, "reason",
       "Requests that gave their blocks back and are computed again"),
    _f("prefix_cache_queried_tokens_total", "c", _SERVERS, "model_name",
       "Prompt tokens looked up in the prefix cache"),
    _f("prefix_cache_hit_tokens_total", "c", _SERVERS, "model_name",
       "Prompt tokens found in the prefix cache"),
    _f("prefix_cache_evicted_blocks_total", "c", _SERVERS, "reason", "Blocks that left the prefix cache"),
    _f("prefill_cuda_graph_requests_total", "c", _SERVERS, "status",
       "Requests by prefill graph status: replayed, or the one refusal that made the prefill eager",
       conditions=_COLOCATED, status=" ".join(REQUEST_STATUSES)),
    _f("prefill_cuda_graph_init", "g", _SERVERS, "status",
       "1; prefill graph status at start-up", conditions=_COLOCATED, status=" ".join(INIT_STATUSES)),
    _f("prefill_cuda_graph_replays_total", "c", _SERVERS, "bucket",
       "Prefill graph replays", conditions=_COLOCATED),
    _f("prefill_cuda_graph_tokens_total", "c", _SERVERS, "kind", "Tokens of prefill graph replays",
       conditions=_COLOCATED, kind="real padding"),
    _f("decode_cuda_graph_steps_total", "c", (D,), "status",
       "Decode steps by graph status: replayed, or the one refusal that made the step eager"),
    _f("decode_cuda_graph_padded_rows_total", "c", (D,), "", "Rows added to fill a decode graph's bucket"),
    _f("decode_cuda_graph_padded_tokens_total", "c", (D,), "", "Padded rows times tokens per row"),
    _f("cuda_graph_capture_seconds", "hS", _SERVERS, "kind",
       "Time to capture a graph, warm-up and test replay included", kind=" ".join(GraphRole)),
    _f("cuda_graph_memory_bytes", "g", _SERVERS, "rank", "Device memory of the captured graphs"),
    _f("cuda_graphs_captured", "g", _SERVERS, "kind", "Captured graphs", kind=" ".join(GraphRole)),
    _f("spec_rounds_total", "c", (D,), "model_name method", "Speculative rounds"),
    _f("spec_proposed_tokens_total", "c", (D,), "model_name method", "Draft tokens proposed"),
    _f("spec_accepted_tokens_total", "c", (D,), "model_name method", "Draft tokens accepted"),
    _f("spec_accepted_tokens_per_position_total", "c", (D,), "method position",
       "Draft tokens accepted, by position",
       position=" ".join(str(n) for n in range(16))),
    _f("spec_step_seconds", "hT", (D,), "phase", "Time of a phase of a speculative step",
       phase="propose verify sample total"),
    _f("sparse_path_info", "g", (D,), "op path reason", "1; path of a sparse attention operation",
       path="fused separate"),
    _f("sparse_fallbacks_total", "c", (D,), "op reason",
       "Sparse attention operations that took the fallback"),
    _f("sparse_aborted_forwards_total", "c", (D,), "", "Forward passes given up by sparse attention"),
)  # fmt: skip

_BLOCK_STATES = "free running staged receiving quarantined cached reserved"
_RESULTS = "ok incompatible restarted failed"

KV_FAMILIES = (
    _f("kv_blocks", "g", _SERVERS, "rank group state",
       "KV blocks by state; reserved ones are outside the total",
       state=_BLOCK_STATES),
    _f("kv_blocks_capacity", "g", _SERVERS, "rank group", "KV blocks of the pool, reserved ones not counted"),
    _f("kv_cache_usage_ratio", "g", _SERVERS, "rank group", "1 - (free + cached) / capacity"),
    _f("kv_ledger_imbalance_blocks", "g", _SERVERS, "rank group",
       "Capacity less the sum of the states; always 0"),
    _f("kv_oldest_hold_seconds", "g", _SERVERS, "rank state",
       "Age of the oldest hold; absent when there is none",
       state="staged receiving quarantined"),
    _f("kv_allocation_failures_total", "c", _SERVERS, "code", "Reservations refused for want of blocks"),
    _f("kv_blocks_skipped_total", "c", (D,), "model_name",
       "Blocks not loaded because the own prefix cache held them"),
    _f("kv_leases_active", "g", (P,), "", "Leases on staged KV"),
    _f("kv_lease_hold_seconds", "hS", (P,), "outcome", "Life of a lease", outcome="released aborted expired"),
    _f("kv_lease_renewals_total", "c", (P,), "source result", "Renewals of a lease",
       source="open_load queued", result="ok unknown expired"),
    _f("kv_lease_expirations_total", "c", (P,), "cause", "Leases that ended on their own",
       cause="never_loaded load_stalled never_released"),
    _f("kv_stale_references_total", "c", _SERVERS, "kind",
       "Block references that were no longer, or never, valid",
       kind="expired reused peer_restarted out_of_range unknown"),
    _f("kv_publish_seconds", "hS", (P,), "transport", "Device event to ready for the reader"),
    _f("kv_transfer_seconds", "hS", (D,), "transport outcome", "Load opened to verified complete",
       outcome="ok failed aborted"),
    _f("kv_transfer_exposed_seconds", "hS", (D,), "transport",
       "Prompt computed (event on the load stream) to verified complete: what the prefill did not hide"),
    _f("load_rank_seconds", "hS", (D,), "stat", "Minimum and maximum over the ranks of one load",
       conditions={D: "tensor_parallel"}, stat="min max"),
    _f("kv_transfer_size_bytes", "hB", (D,), "transport", "Bytes of a load"),
    _f("kv_transfer_bytes_total", "c", _SERVERS, "transport direction",
       "Bytes of KV moved, counted piece by piece",
       direction="sent received"),
    _f("kv_transfer_pieces_total", "c", (D,), "transport result", "Pieces received",
       result="ok duplicate unknown checksum missing"),
    _f("kv_transfer_failures_total", "c", _SERVERS, "transport reason",
       "Transfers that failed, lease ends excluded",
       reason=" ".join(sorted(code.name for code in TRANSFER_FAILURES))),
    _f("kv_transport_fallbacks_total", "c", _SERVERS, "transport reason",
       "Transports left out because they do not work here",
       transport="ipc nixl tcp", reason="absent failed"),
    _f("kv_lease_proof_calls_total", "c", (D,), "",
       "Loads that read a prefill server's memory and had to ask it whether the lease had stood, because no word there "
       "told"),
    _f("kv_data_connections_total", "c", _SERVERS, "result",
       "Connections to the data port, each time that a load takes one or one is refused or ends",
       result="used unknown_token silent idle lost refused"),
    _f("kv_transfer_inflight", "g", _SERVERS, "transport", "Transfers now open"),
    _f("kv_transfer_queue_depth", "g", _SERVERS, "rank", "Publish and load tasks waiting"),
    _f("kv_quarantine_seconds", "hS", _SERVERS, "transport", "Time that blocks spent in quarantine"),
    _f("handshakes_total", "c", _SERVERS, "result", "Cache-store handshakes", result=_RESULTS),
    _f("handshake_seconds", "hS", _SERVERS, "result", "Duration of a cache-store handshake", result=_RESULTS),
    _f("peers", "g", _SERVERS, "state", "Cache-store peers by state", state="connected incompatible lost"),
    _f("peer_restarts_total", "c", _SERVERS, "", "Peers found with another engine_id than expected"),
)  # fmt: skip

_TIERS = "host disk mooncake"

TIER_FAMILIES = (
    _f("kv_tier_fetches_total", "c", _SERVERS, "outcome",
       "Prompts whose beginning was looked for below the pool: loaded, partial (some of what was found), absent, "
       "failed (nothing of what was found), timeout, busy (every thread hangs), displaced and computed (the pool "
       "changed meanwhile), abandoned (the request ended), flushed",
       conditions=_COLOCATED,
       outcome="loaded partial absent failed timeout busy displaced computed abandoned flushed"),
    _f("kv_tier_fetched_tokens_total", "c", _SERVERS, "", "Prompt tokens whose KV came from a tier",
       conditions=_COLOCATED),
    _f("kv_tier_fetch_seconds", "hT", _SERVERS, "", "A prompt is queued to its beginning looked for and loaded",
       conditions=_COLOCATED),
    _f("kv_tier_hit_blocks_total", "c", _SERVERS, "tier", "Blocks loaded from the tier, checked",
       conditions=_COLOCATED, tier=_TIERS),
    _f("kv_tier_missed_blocks_total", "c", _SERVERS, "tier reason",
       "Ends of a look-up or a load at a block: absent, lost (gone since the look-up), damaged, failed",
       conditions=_COLOCATED, tier=_TIERS, reason="absent lost damaged failed"),
    _f("kv_tier_writes_total", "c", _SERVERS, "tier outcome",
       "Blocks for the tier, by what became of them: stored, refused (no room in it), failed (after several tries "
       "where the reason may pass), dropped (too many wait for it), overtaken (the pool gave the block to another "
       "request while it waited for the tier)",
       conditions=_COLOCATED, tier=_TIERS, outcome="stored refused failed dropped overtaken"),
    _f("kv_tier_skipped_writes_total", "c", _SERVERS, "reason",
       "Blocks that were offered to no tier: present (every tier has them), reused (given to another request before "
       "they were copied), queue_full, failed",
       conditions=_COLOCATED, reason="present reused queue_full failed"),
    _f("kv_tier_evicted_blocks_total", "c", _SERVERS, "tier", "Blocks that left the tier for want of room",
       conditions=_COLOCATED, tier=_TIERS),
    _f("kv_tier_wasted_blocks_total", "c", _SERVERS, "tier",
       "Blocks fetched from the tier ahead of a prompt that then did not ask for them",
       conditions=_COLOCATED, tier=_TIERS),
    _f("kv_tier_errors_total", "c", _SERVERS, "tier reason", "Operations that failed",
       conditions=_COLOCATED, tier=_TIERS, reason="full io denied unreachable timeout other"),
    _f("kv_tier_bytes_total", "c", _SERVERS, "tier direction", "Bytes of records moved",
       conditions=_COLOCATED, tier=_TIERS, direction="read written"),
    _f("kv_tier_busy_seconds_total", "c", _SERVERS, "tier", "Time of the tier's threads in its operations",
       conditions=_COLOCATED, tier=_TIERS),
    _f("kv_tier_blocks", "g", _SERVERS, "tier", "Blocks in the tier", conditions=_COLOCATED, tier=_TIERS),
    _f("kv_tier_stored_bytes", "g", _SERVERS, "tier", "Bytes of the blocks in the tier",
       conditions=_COLOCATED, tier=_TIERS),
    _f("kv_tier_limit_bytes", "g", _SERVERS, "tier", "Room of the tier", conditions=_COLOCATED, tier=_TIERS),
)  # fmt: skip

SECTIONS: Mapping[str, tuple[Family, ...]] = MappingProxyType(
    {
        "Requests": REQUEST_FAMILIES,
        "Routing": ROUTING_FAMILIES,
        "Process and RPC": PROCESS_FAMILIES,
        "Engine, graphs, speculation": ENGINE_FAMILIES,
        "KV pool and cache store": KV_FAMILIES,
        "Tiers below the KV pool": TIER_FAMILIES,
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for section in SECTIONS.values() for family in section}
)


def families_of(role: Role, *, colocated: bool = False, tensor_parallel: bool = False) -> dict[str, Family]:
    """The families that a process of `role` exports."""
    met = {"": True, "colocated": colocated, "tensor_parallel": tensor_parallel}
    return {
        name: family
        for name, family in FAMILIES.items()
        if role in family.roles and met[family.conditions.get(role, "")]
    }
