"""What requests see."""

from __future__ import annotations

from deploy.grafana.choices import ALL, ANNOTATIONS, E2E_SLO, MODEL_NAME, MODELS, TPOT_SLO, TTFT_SLO
from deploy.grafana.panels import Board, Panel, Query, Row
from deploy.grafana.series import rate, share, smaller

_WITHIN = {
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
                ALL.gauge("Ready", "short", "baton_ready", "role", "Processes of each role that welcome requests.",
                          kind="stat", height=5),
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
                MODELS.counts("Requests", "reqps", "baton_requests_total", "outcome",
                              "Generation requests by how they ended.", stacked=True),
                MODELS.counts("Requests by interface", "reqps", "baton_requests_total", "api, stream",
                              "Which API they came by, and whether they stream."),
                ALL.gauge("Open HTTP requests", "short", "baton_http_inflight_requests", "route",
                          "Requests that the router is answering now."),
                ALL.counts("HTTP responses", "reqps", "baton_http_requests_total", "route, status",
                           "By status as sent; 499: the client had gone."),
                MODELS.counts("Errors by code", "reqps", "baton_request_errors_total", "code, phase",
                              "What each code means, and what to do, is on the operations page.", stacked=True),
                Panel("Share of failed requests", "percentunit",
                      (Query(share(f"baton_request_errors_total{{{MODELS}}}",
                                   f"baton_requests_total{{{MODELS}}}", "model_name", or_none=True),
                             "{{model_name}}"),),
                      "All codes, also those that clients have to answer for."),
            ),
        ),
        Row(
            "Latency",
            (
                MODELS.quantiles("Time to first token", "s", "baton_time_to_first_token_seconds", "path",
                                 "From arrival at the router to the first token written.", width=12),
                MODELS.quantiles("Time per output token", "s", "baton_time_per_output_token_seconds", "path",
                                 "Mean of each request, its first token excluded.", width=12),
                MODELS.quantiles("Inter-token latency", "s", "baton_inter_token_latency_seconds", "path",
                                 "Gap before each token; a chunk of several divides its gap.", width=12),
                MODELS.quantiles("Whole answer", "s", "baton_e2e_request_latency_seconds", "path",
                                 "From arrival to the last token written.", width=12),
            ),
        ),
        Row(
            "Objectives",
            (
                Panel("Share within the objective", "percentunit",
                      tuple(
                          Query(f'{rate(f"""{family}_bucket{{{MODELS}, le="{limit}"}}""", "model_name")} / '
                                f'({rate(f"{family}_count{{{MODELS}}}", "model_name")} > 0)',
                                name + " {{model_name}}")
                          for name, (family, limit) in _WITHIN.items()
                      ),
                      "The objectives are chosen at the head of the board.", width=12),
                Panel("Goodput", "reqps",
                      (Query(smaller(*(
                          rate(f'{family}_bucket{{{MODELS}, le="{limit}"}}', "model_name")
                          for family, limit in (_WITHIN["first tokens"], _WITHIN["answers"])
                       )), "{{model_name}}"),),
                      "Answers per second that keep the objective of the first token and of the whole answer: the "
                      "smaller of the two counts, so an upper bound.", width=12),
            ),
        ),
        Row(
            "Tokens",
            (
                Panel("Tokens per second", "short",
                      (Query(rate(f"baton_prompt_tokens_total{{{MODELS}}}", "model_name"), "prompt"),
                       Query(rate(f"baton_generation_tokens_total{{{MODELS}}}", "model_name"), "generated"),
                       Query(rate(f"baton_cached_prompt_tokens_total{{{MODELS}}}", "model_name"), "cached")),
                      "Prompt tokens of finished requests, tokens generated, and prompt tokens that a prefix cache "
                      "had."),
                MODELS.quantiles("Prompt length", "short", "baton_request_prompt_tokens", "", "Tokens."),
                MODELS.quantiles("Answer length", "short", "baton_request_generation_tokens", "", "Tokens."),
            ),
        ),
    ),
    (MODEL_NAME, TTFT_SLO, TPOT_SLO, E2E_SLO),
    ANNOTATIONS,
)  # fmt: skip
