"""What captured graphs do, and what they do not."""

from __future__ import annotations

from deploy.grafana.choices import ANNOTATIONS, INSTANCE, PLACES, RANK, RANKS, ROLE, SERVERS
from deploy.grafana.panels import Board, Panel, Query, Row
from deploy.grafana.series import rate, share

_PREFILL = "baton_prefill_cuda_graph"
_DECODE = "baton_decode_cuda_graph"

CUDA_GRAPHS = Board(
    "cuda_graphs",
    "Baton / CUDA graphs",
    "How much of the work the captured graphs do, and why they did not do the rest.",
    (
        Row(
            "Prefill",
            (
                Panel("Share of replayed prompts", "percentunit",
                      (Query(share(f'{_PREFILL}_requests_total{{status="replayed", {SERVERS}}}',
                                   f"{_PREFILL}_requests_total{{{SERVERS}}}", "instance"), "{{instance}}"),),
                      "No value without prefill graphs."),
                SERVERS.counts("Prompts by status", "reqps", f"{_PREFILL}_requests_total", "status",
                               "replayed, or the first reason why not.", stacked=True),
                SERVERS.gauge("State at start-up", "short", f"{_PREFILL}_init", "instance, status",
                              "What the capture came to.", kind="table"),
                SERVERS.counts("Replays by bucket", "short", f"{_PREFILL}_replays_total", "instance, bucket",
                               "Per second; a bucket is a number of tokens."),
                Panel("Padding share", "percentunit",
                      (Query(share(f'{_PREFILL}_tokens_total{{kind="padding", {SERVERS}}}',
                                   f"{_PREFILL}_tokens_total{{{SERVERS}}}", "instance"), "{{instance}}"),),
                      "Of the tokens that replays computed."),
            ),
        ),
        Row(
            "Decode",
            (
                Panel("Share of replayed steps", "percentunit",
                      (Query(share(f'{_DECODE}_steps_total{{status="replayed", {PLACES}}}',
                                   f"{_DECODE}_steps_total{{{PLACES}}}", "instance"), "{{instance}}"),),
                      "No value without decode graphs."),
                PLACES.counts("Steps by status", "short", f"{_DECODE}_steps_total", "status",
                              "Per second: replayed, or the first reason why not.", stacked=True),
                Panel("Padding", "short",
                      (Query(rate(f"{_DECODE}_padded_rows_total{{{PLACES}}}", "instance"), "rows {{instance}}"),
                       Query(rate(f"{_DECODE}_padded_tokens_total{{{PLACES}}}", "instance"),
                             "tokens {{instance}}")),
                      "Per second, to fill a graph's batch."),
            ),
        ),
        Row(
            "Captures",
            (
                SERVERS.gauge("Captured graphs", "short", "baton_cuda_graphs_captured", "instance, kind",
                              "By what they compute."),
                RANKS.gauge("Device memory of graphs", "bytes", "baton_cuda_graph_memory_bytes", "instance, rank",
                            "In use for as long as the engine runs."),
                Panel("Mean time of a capture", "s",
                      (Query(f"sum by (instance, kind) (baton_cuda_graph_capture_seconds_sum{{{SERVERS}}}) / "
                             f"(sum by (instance, kind) (baton_cuda_graph_capture_seconds_count{{{SERVERS}}}) > 0)",
                             "{{instance}} {{kind}}"),),
                      "Warm-up and test replay included, since the process started."),
            ),
        ),
    ),
    (ROLE, INSTANCE, RANK),
    ANNOTATIONS,
)  # fmt: skip
