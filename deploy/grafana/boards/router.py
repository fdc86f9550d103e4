"""How the router admits and places requests."""

from __future__ import annotations

from deploy.grafana.choices import ALL, ANNOTATIONS, PLACES, ROUTER_INSTANCE
from deploy.grafana.panels import Board, Panel, Query, Row
from deploy.grafana.series import Series, share

HERE = Series(f'role="router", {PLACES}')

ROUTER = Board(
    "router",
    "Baton / Router",
    "How requests are admitted, placed, retried and moved.",
    (
        Row(
            "Choice",
            (
                PLACES.counts("Path", "reqps", "baton_router_path_total", "decision",
                              "Prefill and decode apart (pd), or the reason for one server.", stacked=True),
                PLACES.counts("Decisions", "reqps", "baton_router_decisions_total", "role, policy, result",
                              "For each role of a request."),
                PLACES.quantile("p99 of a decision", "s", 0.99, "baton_router_decision_seconds", "role, policy",
                                "Time to choose a server."),
                PLACES.gauge("Servers by state", "short", "baton_router_workers", "role, state",
                             "`GET /workers` says why one is not used.", how="max"),
                PLACES.gauge("Open requests per server", "short", "baton_router_worker_inflight", "role, worker",
                             "As the router sees them."),
                PLACES.gauge("Circuit breakers", "short", "baton_breaker_state", "role, worker",
                             "0 closed, 1 open, 2 half-open.", how="max"),
            ),
        ),
        Row(
            "Prefix index",
            (
                Panel("Prompt tokens expected in a cache", "percentunit",
                      (Query(share(f'baton_router_prefix_tokens_total{{kind="predicted", {PLACES}}}',
                                   f"baton_prompt_tokens_total{{{PLACES}}}", "instance"), "expected {{instance}}"),
                       Query(share(f'baton_router_prefix_tokens_total{{kind="actual", {PLACES}}}',
                                   f"baton_prompt_tokens_total{{{PLACES}}}", "instance"), "found {{instance}}")),
                      "Of all prompt tokens; found by the servers of those requests. With policies cache_aware and"
                      " cost."),
                Panel("Found of what was expected", "percentunit",
                      (Query(share(f'baton_router_prefix_tokens_total{{kind="actual", {PLACES}}}',
                                   f'baton_router_prefix_tokens_total{{kind="predicted", {PLACES}}}', "instance"),
                             "{{instance}}"),),
                      "1: the guesses are right. Below: caches lose blocks before their requests come; above: servers"
                      " have more than the router knows."),
                PLACES.gauge("Entries", "short", "baton_router_index_entries", "instance",
                             "Blocks on servers, at most --prefix-index-entries."),
                PLACES.gauge("Memory", "bytes", "baton_router_index_bytes", "instance", "Of the index."),
            ),
        ),
        Row(
            "Admission",
            (
                PLACES.gauge("Queue", "short", "baton_router_queue_depth", "instance",
                             "Requests over --max-concurrent-requests."),
                PLACES.counts("Refused", "reqps", "baton_router_rejections_total", "code",
                              "Before a server was chosen."),
                HERE.counts("Requests ended before their time", "reqps", "baton_aborts_total", "leg, source",
                            "By leg and by who asked for it."),
                PLACES.gauge("Structured output", "short", "baton_grammar_validator_available", "role, instance",
                             "1 where grammars can be admitted. The router and the decode servers must agree.",
                             how="min"),
                PLACES.quantiles("Compiling grammars", "s", "baton_grammar_compile_seconds", "",
                                 "At admission; known grammars are not compiled again."),
            ),
        ),
        Row(
            "Failures",
            (
                PLACES.counts("Retries", "reqps", "baton_retries_total", "role, code",
                              "Before the first token, by role and code of the failed leg."),
                PLACES.counts("Migrations", "reqps", "baton_migrations_total", "result", "After the first token."),
                PLACES.gauge("Retry budget", "percentunit", "baton_retry_budget_ratio", "instance",
                             "What is left of it.", how="min"),
                PLACES.counts("Retries not made", "reqps", "baton_retry_budget_exhausted_total", "role",
                              "For want of budget."),
                PLACES.counts("Breakers that changed", "short", "baton_breaker_transitions_total", "role, worker, to",
                              "Per second."),
                HERE.counts("Channels given up", "short", "baton_channel_evictions_total", "peer_role, state",
                            "Per second."),
                PLACES.counts("Contract breaches", "short", "baton_contract_breaches_total", "instance, kind",
                              "Messages per second that break the protocol: versions are mixed, or there is a defect."),
            ),
        ),
        Row(
            "Process",
            (
                HERE.mean("Mean time in each stage", "s", "baton_stage_seconds", "stage",
                          "reserve and prefill are the two legs, which overlap first_token."),
                HERE.quantile("p99 of each stage", "s", 0.99, "baton_stage_seconds", "stage",
                              "One in a hundred takes longer."),
                HERE.quantile("Event loop lag", "s", 0.99, "baton_event_loop_lag_seconds", "instance",
                              "How late a timer is.", legend="p99 {{instance}}"),
                HERE.counts("RPCs served", "reqps", "baton_rpc_requests_total", "method, code",
                            "gRPC clients of the router."),
                PLACES.quantile("HTTP p99", "s", 0.99, "baton_http_request_duration_seconds", "route, method",
                                "To the last byte.", legend="{{method}} {{route}}"),
                ALL.counts("Log records dropped", "short", "baton_log_dropped_total", "role, instance",
                           "Per second, of all processes: the log's disk is too slow."),
            ),
        ),
    ),
    (ROUTER_INSTANCE,),
    ANNOTATIONS,
)  # fmt: skip
