"""The dashboards' contents. Every panel shows families of docs/metrics.md, with a unit; a ratio has no value where its
denominator is 0.

Rates are over `$__rate_interval`, which Grafana makes at least four scrapes long. Families of the router alone carry
no role of their own, so they are chosen by `instance` only where that is of use; `role` in them is the chosen server's.
"""

from __future__ import annotations

from deploy.grafana.panels import Annotation, Board, Panel, Query, Row, Variable

_RATE = "$__rate_interval"

MODEL_NAME = Variable("model_name", "model", "label_values(baton_model_info, model_name)")
ROLE = Variable("role", "role", "label_values(baton_build_info, role)")
INSTANCE = Variable("instance", "instance", 'label_values(baton_build_info{role=~"$role"}, instance)')
PREFILL_INSTANCE, DECODE_INSTANCE, ROUTER_INSTANCE = (
    Variable("instance", "instance", f'label_values(baton_build_info{{role="{role}"}}, instance)')
    for role in ("prefill", "decode", "router")
)
RANK = Variable("rank", "rank", "label_values(baton_engine_up, rank)")
# Bounds of the buckets as their label `le` has them.
TTFT_SLO = Variable("ttft_slo", "first token within (s)", choices=("2.5", "0.25", "0.5", "1.0", "5.0", "10.0"))
TPOT_SLO = Variable("tpot_slo", "output token within (s)", choices=("0.1", "0.02", "0.03", "0.05", "0.2", "0.5"))
E2E_SLO = Variable("e2e_slo", "answer within (s)", choices=("60.0", "5.0", "10.0", "20.0", "120.0", "240.0"))

DRAINS = Annotation("drains", "baton_drain_state > 0", "{{role}} {{instance}} drains", "orange")
RESTARTS = Annotation(
    "restarts",
    "changes(process_start_time_seconds[1m]) > 0 and on (instance) baton_build_info",
    "{{instance}} was restarted",
    "red",
)
ANNOTATIONS = (DRAINS, RESTARTS)

_ROUTER_MODEL = 'model_name=~"$model_name"'
_SERVER = 'role=~"$role", instance=~"$instance"'
_PLACE = 'instance=~"$instance"'


def _rate(series: str, by: str) -> str:
    return f"sum by ({by}) (rate({series}[{_RATE}]))"


def _share(part: str, whole: str, by: str, or_none: bool = False) -> str:
    """`part` of `whole`, both rates; without a value where nothing happened.

    `or_none`: 0 where there is no `part`, which has no series before its first event.
    """
    counted = f"({_rate(part, by)} or 0 * {_rate(whole, by)})" if or_none else _rate(part, by)
    return f"{counted} / ({_rate(whole, by)} > 0)"


def _mean(family: str, matchers: str, by: str) -> str:
    return _share(f"{family}_sum{{{matchers}}}", f"{family}_count{{{matchers}}}", by)


def _quantile(q: float, family: str, matchers: str, by: str) -> str:
    within = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q}, sum by ({within}) (rate({family}_bucket{{{matchers}}}[{_RATE}])))"


def _quantiles(family: str, matchers: str, by: str) -> tuple[Query, ...]:
    """p50, p90 and p99 for each value of the labels `by`."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return tuple(
        Query(_quantile(q, family, matchers, by), f"p{round(q * 100)} {legend}".strip()) for q in (0.5, 0.9, 0.99)
    )


def _smaller(one: str, other: str) -> str:
    """The smaller of two values for each set of labels that both have."""
    return f"{one} < {other} or ({other} <= {one})"


def _counted(series: str, by: str) -> tuple[Query, ...]:
    return (Query(_rate(series, by), " ".join(f"{{{{{label}}}}}" for label in by.split(", "))),)


def _gauge(series: str, by: str, how: str = "sum") -> tuple[Query, ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return (Query(f"{how} by ({by}) ({series})", legend),)


# -- what requests see -------------------------------------------------------------------------------------------------

_within = {
    "first tokens": ("baton_time_to_first_token_seconds", "$ttft_slo"),
    "output tokens": ("baton_time_per_output_token_seconds", "$tpot_slo"),
    "answers": ("baton_e2e_request_latency_seconds", "$e2e_slo"),
}

OVERVIEW = Board(
    "overview",
    "Baton / Overview",
    "What clients get: rates, errors, latencies, and whether the processes are ready.",
    (
        Row(
            "Processes",
            (
                Panel("Ready", "short", _gauge("baton_ready", "role"),
                      "Processes of each role that welcome requests.", kind="stat", height=5),
                Panel("Running", "short", (Query("count by (role) (baton_build_info)", "{{role}}"),),
                      "Processes of each role that answer scrapes.", kind="stat", height=5),
                Panel("Versions", "short",
                      (Query("count by (role, version, revision, python) (baton_build_info)"),),
                      "What runs where. During an upgrade there are two; prefill and decode servers of different "
                      "protocol versions do not pair.", kind="table", height=5),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel("Requests", "reqps",
                      _counted(f"baton_requests_total{{{_ROUTER_MODEL}}}", "outcome"),
                      "Generation requests by how they ended.", stacked=True),
                Panel("Requests by interface", "reqps",
                      _counted(f"baton_requests_total{{{_ROUTER_MODEL}}}", "api, stream"),
                      "Which API they came by, and whether they stream."),
                Panel("Open HTTP requests", "short", _gauge("baton_http_inflight_requests", "route"),
                      "Requests that the router is answering now."),
                Panel("HTTP responses", "reqps", _counted("baton_http_requests_total", "route, status"),
                      "By status as sent; 499: the client had gone."),
                Panel("Errors by code", "reqps",
                      _counted(f"baton_request_errors_total{{{_ROUTER_MODEL}}}", "code, phase"),
                      "What each code means, and what to do, is on the operations page.", stacked=True),
                Panel("Share of failed requests", "percentunit",
                      (Query(_share(f"baton_request_errors_total{{{_ROUTER_MODEL}}}",
                                    f"baton_requests_total{{{_ROUTER_MODEL}}}", "model_name", or_none=True),
                             "{{model_name}}"),),
                      "All codes, also those that clients have to answer for."),
            ),
        ),
        Row(
            "Latency",
            (
                Panel("Time to first token", "s",
                      _quantiles("baton_time_to_first_token_seconds", _ROUTER_MODEL, "path"),
                      "From arrival at the router to the first token written.", width=12),
                Panel("Time per output token", "s",
                      _quantiles("baton_time_per_output_token_seconds", _ROUTER_MODEL, "path"),
                      "Mean of each request, its first token excluded.", width=12),
                Panel("Inter-token latency", "s",
                      _quantiles("baton_inter_token_latency_seconds", _ROUTER_MODEL, "path"),
                      "Gap before each token; a chunk of several divides its gap.", width=12),
                Panel("Whole answer", "s", _quantiles("baton_e2e_request_latency_seconds", _ROUTER_MODEL, "path"),
                      "From arrival to the last token written.", width=12),
            ),
        ),
        Row(
            "Objectives",
            (
                Panel("Share within the objective", "percentunit",
                      tuple(
                          Query(f'{_rate(f"""{family}_bucket{{{_ROUTER_MODEL}, le="{limit}"}}""", "model_name")} / '
                                f'({_rate(f"{family}_count{{{_ROUTER_MODEL}}}", "model_name")} > 0)',
                                name + " {{model_name}}")
                          for name, (family, limit) in _within.items()
                      ),
                      "The objectives are chosen at the head of the board.", width=12),
                Panel("Goodput", "reqps",
                      (Query(_smaller(*(
                          _rate(f'{family}_bucket{{{_ROUTER_MODEL}, le="{limit}"}}', "model_name")
                          for family, limit in (_within["first tokens"], _within["answers"])
                       )), "{{model_name}}"),),
                      "Answers per second that keep the objective of the first token and of the whole answer: the "
                      "smaller of the two counts, so an upper bound.", width=12),
            ),
        ),
        Row(
            "Tokens",
            (
                Panel("Tokens per second", "short",
                      (Query(_rate(f"baton_prompt_tokens_total{{{_ROUTER_MODEL}}}", "model_name"), "prompt"),
                       Query(_rate(f"baton_generation_tokens_total{{{_ROUTER_MODEL}}}", "model_name"), "generated"),
                       Query(_rate(f"baton_cached_prompt_tokens_total{{{_ROUTER_MODEL}}}", "model_name"), "cached")),
                      "Prompt tokens of finished requests, tokens generated, and prompt tokens that a prefix cache "
                      "had."),
                Panel("Prompt length", "short", _quantiles("baton_request_prompt_tokens", _ROUTER_MODEL, ""),
                      "Tokens."),
                Panel("Answer length", "short", _quantiles("baton_request_generation_tokens", _ROUTER_MODEL, ""),
                      "Tokens."),
            ),
        ),
    ),
    (MODEL_NAME, TTFT_SLO, TPOT_SLO, E2E_SLO),
    ANNOTATIONS,
)  # fmt: skip


# -- servers -----------------------------------------------------------------------------------------------------------


def _stage_rows(role: str, requests: str) -> tuple[Row, ...]:
    here = f'role="{role}", {_PLACE}'
    return (
        Row(
            "Stages",
            (
                Panel("Mean time in each stage", "s",
                      (Query(_mean("baton_stage_seconds", here, "stage"), "{{stage}}"),),
                      f"Where {requests} spend their time on this role.", stacked=True),
                Panel("Median of each stage", "s",
                      (Query(_quantile(0.5, "baton_stage_seconds", here, "stage"), "{{stage}}"),), "Half take longer."),
                Panel("p99 of each stage", "s",
                      (Query(_quantile(0.99, "baton_stage_seconds", here, "stage"), "{{stage}}"),),
                      "One in a hundred takes longer."),
                Panel("Retried stages", "short", _counted(f"baton_stage_retries_total{{{here}}}", "instance, stage"),
                      "Further attempts per second, above all at finding KV blocks."),
                Panel("Waits between attempts", "s",
                      (Query(_mean("baton_stage_retry_wait_seconds", here, "stage"), "{{stage}}"),),
                      "Mean sleep of a request that was retried; it is in no stage's own time."),
                Panel("Requests ended before their time", "reqps",
                      _counted(f"baton_aborts_total{{{here}}}", "leg, source"), "By leg and by who asked for it."),
            ),
        ),
        Row(
            "Calls",
            (
                Panel("RPCs served", "reqps", _counted(f"baton_rpc_requests_total{{{here}}}", "method, code"),
                      "NONE_ERROR is success."),
                Panel("Open RPCs", "short", _gauge(f"baton_rpc_inflight{{{here}}}", "instance, method"),
                      "Falls back to 0 when nothing runs."),
                Panel("p99 of RPCs", "s",
                      (Query(_quantile(0.99, "baton_rpc_duration_seconds", here, "method"), "{{method}}"),),
                      "To the end of the stream."),
                Panel("Event loop lag", "s",
                      (Query(_quantile(0.99, "baton_event_loop_lag_seconds", here, "instance"), "p99 {{instance}}"),),
                      "How late a timer is: above some milliseconds the process has too little processor."),
            ),
        ),
    )  # fmt: skip


def _batch_panels(role: str) -> tuple[Panel, ...]:
    here = f'role="{role}", {_PLACE}'
    return (
        Panel("Requests", "short",
              (Query(f"sum by (instance) (baton_num_requests_running{{{here}}})", "running {{instance}}"),
               Query(f"sum by (instance) (baton_num_requests_waiting{{{here}}})", "waiting {{instance}}")),
              "In the running batch, and waiting for the scheduler."),
        Panel("Step time", "s", _quantiles("baton_engine_step_seconds", here, "kind"), "One pass of the engine."),
        Panel("Requests per step", "short", _quantiles("baton_engine_batch_requests", here, "kind"), "Batch size."),
        Panel("Tokens per step", "short", _quantiles("baton_engine_batch_tokens", here, "kind"),
              "Tokens computed, padding excluded."),
        Panel("Preemptions", "short", _counted(f"baton_preemptions_total{{{here}}}", "instance, reason"),
              "Requests per second that gave their blocks back: the pool is too small for the load."),
    )  # fmt: skip


PREFILL = Board(
    "prefill",
    "Baton / Prefill servers",
    "Where prompts spend their time, and how full the steps are.",
    (
        *_stage_rows("prefill", "prompts"),
        Row("Engine", _batch_panels("prefill")),
    ),
    (PREFILL_INSTANCE,),
    ANNOTATIONS,
)

DECODE = Board(
    "decode",
    "Baton / Decode servers",
    "Where answers spend their time, and how full the steps are.",
    (
        *_stage_rows("decode", "answers"),
        Row(
            "Engine",
            (
                *_batch_panels("decode"),
                Panel("Loading", "short", _gauge(f"baton_num_requests_loading{{{_PLACE}}}", "instance"),
                      "Requests whose KV is on its way."),
            ),
        ),
    ),
    (DECODE_INSTANCE,),
    ANNOTATIONS,
)  # fmt: skip

# -- KV ----------------------------------------------------------------------------------------------------------------

_ok = f'outcome="ok", {_PLACE}'

KV_TRANSFER = Board(
    "kv_transfer",
    "Baton / KV transfer",
    "The way of a prompt's KV from the prefill to the decode server.",
    (
        Row(
            "Along the way",
            (
                Panel("Mean time in each stage", "s",
                      (Query(_mean("baton_stage_seconds", 'stage!~"held|stream|generate"', "role, stage"),
                             "{{role}} {{stage}}"),),
                      "All legs, to the first token. Loads and prefill overlap, so the bars do not add up to the time "
                      "to first token.", width=12),
                Panel("Transfers", "s", _quantiles("baton_kv_transfer_seconds", _ok, "transport"),
                      "Opened to verified complete, for those that succeeded; it includes the wait for the prefill.",
                      width=12),
                Panel("Exposed time", "s",
                      _quantiles("baton_kv_transfer_exposed_seconds", _PLACE, "transport"),
                      "From the computed prompt to the last verified block: what the prefill did not hide.", width=12),
                Panel("Exposed share", "percentunit",
                      (Query(f"{_rate(f'baton_kv_transfer_exposed_seconds_sum{{{_PLACE}}}', 'instance, transport')} / "
                             f"({_rate(f'baton_kv_transfer_seconds_sum{{{_ok}}}', 'instance, transport')} > 0)",
                             "{{instance}} {{transport}}"),),
                      "Exposed part of the transfers' time.", width=12),
                Panel("KV moved", "Bps",
                      _counted(f"baton_kv_transfer_bytes_total{{{_PLACE}}}", "instance, transport, direction"),
                      "Bytes per second, counted piece by piece.", width=12),
                Panel("Size of a load", "bytes", _quantiles("baton_kv_transfer_size_bytes", _PLACE, "transport"),
                      "Blocks that the decode server has itself are not loaded.", width=12),
                Panel("First and last rank of a load", "s", _quantiles("baton_load_rank_seconds", _PLACE, "stat"),
                      "Of decode servers of several ranks. Far apart, one rank's connection holds the others up.",
                      width=12),
            ),
        ),
        Row(
            "Work in hand",
            (
                Panel("Open transfers", "short",
                      _gauge(f"baton_kv_transfer_inflight{{{_SERVER}}}", "instance, transport"),
                      "An alert fires when they are open and no byte moves."),
                Panel("Tasks waiting", "short",
                      _gauge(f'baton_kv_transfer_queue_depth{{{_SERVER}, rank=~"$rank"}}', "instance, rank"),
                      "Publishes and loads; at --cache-store-queue-size new ones are refused."),
                Panel("Publishing", "s", _quantiles("baton_kv_publish_seconds", _PLACE, "transport"),
                      "From the device's event to ready for the reader."),
                Panel("Pieces", "short",
                      _counted(f"baton_kv_transfer_pieces_total{{{_PLACE}}}", "instance, transport, result"),
                      "Per second; all but ok is refused, and a bad checksum is an alert."),
                Panel("Finished transfers", "short",
                      _counted(f"baton_kv_transfer_seconds_count{{{_PLACE}}}", "instance, outcome"),
                      "Per second, by how they ended."),
                Panel("Failures by reason", "short",
                      _counted(f"baton_kv_transfer_failures_total{{{_SERVER}}}", "instance, transport, reason"),
                      "Per second; leases that end are not in it."),
            ),
        ),
        Row(
            "Leases",
            (
                Panel("Active leases", "short", _gauge(f"baton_kv_leases_active{{{_PLACE}}}", "instance"),
                      "Prompts whose KV waits to be fetched."),
                Panel("Life of a lease", "s", _quantiles("baton_kv_lease_hold_seconds", _PLACE, "outcome"),
                      "By how it ended."),
                Panel("Renewals", "short",
                      _counted(f"baton_kv_lease_renewals_total{{{_PLACE}}}", "source, result"),
                      "Per second, by what asked for it."),
                Panel("Expirations", "short",
                      _counted(f"baton_kv_lease_expirations_total{{{_PLACE}}}", "instance, cause"),
                      "Leases per second that ended on their own."),
                Panel("Stale references", "short",
                      _counted(f"baton_kv_stale_references_total{{{_SERVER}}}", "instance, kind"),
                      "References per second to blocks that were no longer, or never, valid."),
                Panel("Quarantine", "s", _quantiles("baton_kv_quarantine_seconds", _SERVER, "instance"),
                      "Time until nothing could write to the blocks of a broken load any more."),
            ),
        ),
        Row(
            "Peers",
            (
                Panel("Peers", "short", _gauge(f"baton_peers{{{_SERVER}}}", "instance, state"),
                      "Cache stores that this one has shaken hands with."),
                Panel("Handshakes", "short", _counted(f"baton_handshakes_total{{{_SERVER}}}", "instance, result"),
                      "Per second."),
                Panel("p99 of handshakes", "s",
                      (Query(_quantile(0.99, "baton_handshake_seconds", _SERVER, "result"), "{{result}}"),),
                      "By result."),
                Panel("Peers that were restarted", "short",
                      _counted(f"baton_peer_restarts_total{{{_SERVER}}}", "instance"),
                      "Per second: found with another engine than expected."),
            ),
        ),
    ),
    (ROLE, INSTANCE, RANK),
    ANNOTATIONS,
)  # fmt: skip

_ledger = f'{_SERVER}, rank=~"$rank"'

KV_LEDGER = Board(
    "kv_ledger",
    "Baton / KV ledger",
    "Who holds the KV blocks.",
    (
        Row(
            "Blocks",
            (
                Panel("Blocks by state", "short",
                      _gauge(f'baton_kv_blocks{{{_ledger}, state!="reserved"}}', "instance, rank, state"),
                      "They add up to the capacity.", stacked=True, width=12),
                Panel("Usage", "percentunit",
                      _gauge(f"baton_kv_cache_usage_ratio{{{_ledger}}}", "instance, rank, group", "max"),
                      "Neither free nor cached.", width=12),
                Panel("Capacity", "short", _gauge(f"baton_kv_blocks_capacity{{{_ledger}}}", "instance, rank, group"),
                      "Blocks of the pool, reserved ones not counted."),
                Panel("Imbalance", "short",
                      _gauge(f"baton_kv_ledger_imbalance_blocks{{{_ledger}}}", "instance, rank, group"),
                      "Capacity less the sum of the states. Anything but 0 is a defect.", minimum=None),
                Panel("Oldest hold", "s",
                      _gauge(f"baton_kv_oldest_hold_seconds{{{_ledger}}}", "instance, rank, state", "max"),
                      "No value when nothing is held. Above four leases: blocks leak."),
                Panel("Refused reservations", "short",
                      _counted(f"baton_kv_allocation_failures_total{{{_SERVER}}}", "instance, code"),
                      "Per second, for want of blocks."),
                Panel("Tombstones", "short", _gauge(f"baton_tombstones{{{_SERVER}}}", "instance"),
                      "Aborts that wait for a request that has not come yet."),
                Panel("Tombstone hits", "short", _counted(f"baton_tombstone_hits_total{{{_SERVER}}}", "instance"),
                      "Requests per second that came after their abort."),
            ),
        ),
        Row(
            "Prefix cache",
            (
                Panel("Hit share", "percentunit",
                      (Query(_share(f"baton_prefix_cache_hit_tokens_total{{{_SERVER}}}",
                                    f"baton_prefix_cache_queried_tokens_total{{{_SERVER}}}", "instance"),
                             "{{instance}}"),),
                      "Of the prompt tokens looked up."),
                Panel("Evictions", "short",
                      _counted(f"baton_prefix_cache_evicted_blocks_total{{{_SERVER}}}", "instance, reason"),
                      "Blocks per second that left the cache."),
                Panel("Blocks not loaded", "short", _counted(f"baton_kv_blocks_skipped_total{{{_PLACE}}}", "instance"),
                      "Per second: the decode server's own cache had them."),
            ),
        ),
        Row(
            "Tiers below the pool",
            (
                Panel("Prompts that asked the tiers", "reqps",
                      _counted(f"baton_kv_tier_fetches_total{{{_SERVER}}}", "instance, outcome"),
                      "By what came of it; docs/metrics.md has the outcomes."),
                Panel("Prompt tokens from tiers", "short",
                      _counted(f"baton_kv_tier_fetched_tokens_total{{{_SERVER}}}", "instance"),
                      "Per second; they need not be computed."),
                Panel("Delay of their prompts", "s", _quantiles("baton_kv_tier_fetch_seconds", _SERVER, "instance"),
                      "From the queue to the end of what a tier was asked for, at most --kv-tier-timeout-ms."),
                Panel("Blocks loaded", "short", _counted(f"baton_kv_tier_hit_blocks_total{{{_SERVER}}}", "tier"),
                      "Per second."),
                Panel("Where a prefix ended", "short",
                      _counted(f"baton_kv_tier_missed_blocks_total{{{_SERVER}}}", "tier, reason"),
                      "Per second. Damaged ones point at the medium."),
                Panel("Blocks written", "short",
                      _counted(f"baton_kv_tier_writes_total{{{_SERVER}}}", "tier, outcome"),
                      "Per second. Dropped: the tier does not keep up."),
                Panel("Blocks not written", "short",
                      _counted(f"baton_kv_tier_skipped_writes_total{{{_SERVER}}}", "instance, reason"),
                      "Per second. Reused: the pool is too small for the copies to keep up."),
                Panel("Bytes", "Bps", _counted(f"baton_kv_tier_bytes_total{{{_SERVER}}}", "tier, direction"),
                      "Of records, read and written."),
                Panel("Filled", "percentunit",
                      (Query(f"sum by (instance, tier) (baton_kv_tier_stored_bytes{{{_SERVER}}}) / "
                             f"(sum by (instance, tier) (baton_kv_tier_limit_bytes{{{_SERVER}}}) > 0)",
                             "{{tier}} {{instance}}"),),
                      "Share of the limit; of tiers that have one."),
                Panel("Blocks", "short", _gauge(f"baton_kv_tier_blocks{{{_SERVER}}}", "instance, tier"),
                      "In the tier now, where it can tell."),
                Panel("Blocks that had to go", "short",
                      _counted(f"baton_kv_tier_evicted_blocks_total{{{_SERVER}}}", "instance, tier"),
                      "Per second, for want of room in the tier."),
                Panel("Errors", "short", _counted(f"baton_kv_tier_errors_total{{{_SERVER}}}", "tier, reason"),
                      "Operations per second that failed. Each costs a miss or a lost write."),
                Panel("Threads of a tier", "short",
                      (Query(_rate(f"baton_kv_tier_busy_seconds_total{{{_SERVER}}}", "instance, tier"),
                             "{{tier}} {{instance}}"),),
                      "Seconds per second in its operations; two readers and a writer: 3 is all there is."),
                Panel("Fetched in vain", "short",
                      _counted(f"baton_kv_tier_wasted_blocks_total{{{_SERVER}}}", "instance, tier"),
                      "Blocks per second that were read ahead of a prompt that then did not ask for them."),
            ),
        ),
    ),
    (ROLE, INSTANCE, RANK),
    ANNOTATIONS,
)  # fmt: skip

# -- CUDA graphs -------------------------------------------------------------------------------------------------------

_prefill_graph = "baton_prefill_cuda_graph"
_decode_graph = "baton_decode_cuda_graph"

CUDA_GRAPHS = Board(
    "cuda_graphs",
    "Baton / CUDA graphs",
    "How much of the work the captured graphs do, and why they did not do the rest.",
    (
        Row(
            "Prefill",
            (
                Panel("Share of replayed prompts", "percentunit",
                      (Query(_share(f'{_prefill_graph}_requests_total{{status="replayed", {_SERVER}}}',
                                    f"{_prefill_graph}_requests_total{{{_SERVER}}}", "instance"), "{{instance}}"),),
                      "No value without prefill graphs."),
                Panel("Prompts by status", "reqps",
                      _counted(f"{_prefill_graph}_requests_total{{{_SERVER}}}", "status"),
                      "replayed, or the first reason why not.", stacked=True),
                Panel("State at start-up", "short", _gauge(f"{_prefill_graph}_init{{{_SERVER}}}", "instance, status"),
                      "What the capture came to.", kind="table"),
                Panel("Replays by bucket", "short",
                      _counted(f"{_prefill_graph}_replays_total{{{_SERVER}}}", "instance, bucket"),
                      "Per second; a bucket is a number of tokens."),
                Panel("Padding share", "percentunit",
                      (Query(_share(f'{_prefill_graph}_tokens_total{{kind="padding", {_SERVER}}}',
                                    f"{_prefill_graph}_tokens_total{{{_SERVER}}}", "instance"), "{{instance}}"),),
                      "Of the tokens that replays computed."),
            ),
        ),
        Row(
            "Decode",
            (
                Panel("Share of replayed steps", "percentunit",
                      (Query(_share(f'{_decode_graph}_steps_total{{status="replayed", {_PLACE}}}',
                                    f"{_decode_graph}_steps_total{{{_PLACE}}}", "instance"), "{{instance}}"),),
                      "No value without decode graphs."),
                Panel("Steps by status", "short", _counted(f"{_decode_graph}_steps_total{{{_PLACE}}}", "status"),
                      "Per second: replayed, or the first reason why not.", stacked=True),
                Panel("Padding", "short",
                      (Query(_rate(f"{_decode_graph}_padded_rows_total{{{_PLACE}}}", "instance"), "rows {{instance}}"),
                       Query(_rate(f"{_decode_graph}_padded_tokens_total{{{_PLACE}}}", "instance"),
                             "tokens {{instance}}")),
                      "Per second, to fill a graph's batch."),
            ),
        ),
        Row(
            "Captures",
            (
                Panel("Captured graphs", "short", _gauge(f"baton_cuda_graphs_captured{{{_SERVER}}}", "instance, kind"),
                      "By what they compute."),
                Panel("Device memory of graphs", "bytes",
                      _gauge(f'baton_cuda_graph_memory_bytes{{{_SERVER}, rank=~"$rank"}}', "instance, rank"),
                      "In use for as long as the engine runs."),
                Panel("Mean time of a capture", "s",
                      (Query(f"sum by (instance, kind) (baton_cuda_graph_capture_seconds_sum{{{_SERVER}}}) / "
                             f"(sum by (instance, kind) (baton_cuda_graph_capture_seconds_count{{{_SERVER}}}) > 0)",
                             "{{instance}} {{kind}}"),),
                      "Warm-up and test replay included, since the process started."),
            ),
        ),
    ),
    (ROLE, INSTANCE, RANK),
    ANNOTATIONS,
)  # fmt: skip

# -- router ------------------------------------------------------------------------------------------------------------

_router = f'role="router", {_PLACE}'

ROUTER = Board(
    "router",
    "Baton / Router",
    "How requests are admitted, placed, retried and moved.",
    (
        Row(
            "Choice",
            (
                Panel("Path", "reqps", _counted(f"baton_router_path_total{{{_PLACE}}}", "decision"),
                      "Prefill and decode apart (pd), or the reason for one server.", stacked=True),
                Panel("Decisions", "reqps",
                      _counted(f"baton_router_decisions_total{{{_PLACE}}}", "role, policy, result"),
                      "For each role of a request."),
                Panel("p99 of a decision", "s",
                      (Query(_quantile(0.99, "baton_router_decision_seconds", _PLACE, "role, policy"),
                             "{{role}} {{policy}}"),),
                      "Time to choose a server."),
                Panel("Servers by state", "short", _gauge(f"baton_router_workers{{{_PLACE}}}", "role, state", "max"),
                      "`GET /workers` says why one is not used."),
                Panel("Open requests per server", "short",
                      _gauge(f"baton_router_worker_inflight{{{_PLACE}}}", "role, worker"), "As the router sees them."),
                Panel("Circuit breakers", "short",
                      _gauge(f"baton_breaker_state{{{_PLACE}}}", "role, worker", "max"),
                      "0 closed, 1 open, 2 half-open."),
            ),
        ),
        Row(
            "Prefix index",
            (
                Panel("Prompt tokens expected in a cache", "percentunit",
                      (Query(_share(f'baton_router_prefix_tokens_total{{kind="predicted", {_PLACE}}}',
                                    f"baton_prompt_tokens_total{{{_PLACE}}}", "instance"), "expected {{instance}}"),
                       Query(_share(f'baton_router_prefix_tokens_total{{kind="actual", {_PLACE}}}',
                                    f"baton_prompt_tokens_total{{{_PLACE}}}", "instance"), "found {{instance}}")),
                      "Of all prompt tokens; found by the servers of those requests. With policies cache_aware and"
                      " cost."),
                Panel("Found of what was expected", "percentunit",
                      (Query(_share(f'baton_router_prefix_tokens_total{{kind="actual", {_PLACE}}}',
                                    f'baton_router_prefix_tokens_total{{kind="predicted", {_PLACE}}}', "instance"),
                             "{{instance}}"),),
                      "1: the guesses are right. Below: caches lose blocks before their requests come; above: servers"
                      " have more than the router knows."),
                Panel("Entries", "short", _gauge(f"baton_router_index_entries{{{_PLACE}}}", "instance"),
                      "Blocks on servers, at most --prefix-index-entries."),
                Panel("Memory", "bytes", _gauge(f"baton_router_index_bytes{{{_PLACE}}}", "instance"),
                      "Of the index."),
            ),
        ),
        Row(
            "Admission",
            (
                Panel("Queue", "short", _gauge(f"baton_router_queue_depth{{{_PLACE}}}", "instance"),
                      "Requests over --max-concurrent-requests."),
                Panel("Refused", "reqps", _counted(f"baton_router_rejections_total{{{_PLACE}}}", "code"),
                      "Before a server was chosen."),
                Panel("Requests ended before their time", "reqps",
                      _counted(f"baton_aborts_total{{{_router}}}", "leg, source"), "By leg and by who asked for it."),
                Panel("Structured output", "short",
                      _gauge(f"baton_grammar_validator_available{{{_PLACE}}}", "role, instance", "min"),
                      "1 where grammars can be admitted. The router and the decode servers must agree."),
                Panel("Compiling grammars", "s", _quantiles("baton_grammar_compile_seconds", _PLACE, ""),
                      "At admission; known grammars are not compiled again."),
            ),
        ),
        Row(
            "Failures",
            (
                Panel("Retries", "reqps", _counted(f"baton_retries_total{{{_PLACE}}}", "role, code"),
                      "Before the first token, by role and code of the failed leg."),
                Panel("Migrations", "reqps", _counted(f"baton_migrations_total{{{_PLACE}}}", "result"),
                      "After the first token."),
                Panel("Retry budget", "percentunit", _gauge(f"baton_retry_budget_ratio{{{_PLACE}}}", "instance", "min"),
                      "What is left of it."),
                Panel("Retries not made", "reqps", _counted(f"baton_retry_budget_exhausted_total{{{_PLACE}}}", "role"),
                      "For want of budget."),
                Panel("Breakers that changed", "short",
                      _counted(f"baton_breaker_transitions_total{{{_PLACE}}}", "role, worker, to"), "Per second."),
                Panel("Channels given up", "short",
                      _counted(f"baton_channel_evictions_total{{{_router}}}", "peer_role, state"), "Per second."),
                Panel("Contract breaches", "short",
                      _counted(f"baton_contract_breaches_total{{{_PLACE}}}", "instance, kind"),
                      "Messages per second that break the protocol: versions are mixed, or there is a defect."),
            ),
        ),
        Row(
            "Process",
            (
                Panel("Mean time in each stage", "s",
                      (Query(_mean("baton_stage_seconds", _router, "stage"), "{{stage}}"),),
                      "reserve and prefill are the two legs, which overlap first_token."),
                Panel("p99 of each stage", "s",
                      (Query(_quantile(0.99, "baton_stage_seconds", _router, "stage"), "{{stage}}"),),
                      "One in a hundred takes longer."),
                Panel("Event loop lag", "s",
                      (Query(_quantile(0.99, "baton_event_loop_lag_seconds", _router, "instance"),
                             "p99 {{instance}}"),),
                      "How late a timer is."),
                Panel("RPCs served", "reqps", _counted(f"baton_rpc_requests_total{{{_router}}}", "method, code"),
                      "gRPC clients of the router."),
                Panel("HTTP p99", "s",
                      (Query(_quantile(0.99, "baton_http_request_duration_seconds", _PLACE, "route, method"),
                             "{{method}} {{route}}"),),
                      "To the last byte."),
                Panel("Log records dropped", "short",
                      _counted("baton_log_dropped_total", "role, instance"),
                      "Per second, of all processes: the log's disk is too slow."),
            ),
        ),
    ),
    (ROUTER_INSTANCE,),
    ANNOTATIONS,
)  # fmt: skip

BOARDS = (OVERVIEW, PREFILL, DECODE, KV_TRANSFER, KV_LEDGER, CUDA_GRAPHS, ROUTER)
