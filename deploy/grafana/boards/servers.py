"""Where requests spend their time on prefill and on decode servers."""

from __future__ import annotations

from deploy.grafana.choices import ANNOTATIONS, DECODE_INSTANCE, PLACES, PREFILL_INSTANCE
from deploy.grafana.panels import Board, Panel, Query, Row
from deploy.grafana.series import Series


def _stage_rows(role: str, requests: str) -> tuple[Row, ...]:
    here = Series(f'role="{role}", {PLACES}')
    return (
        Row(
            "Stages",
            (
                here.mean("Mean time in each stage", "s", "baton_stage_seconds", "stage",
                          f"Where {requests} spend their time on this role.", stacked=True),
                here.quantile("Median of each stage", "s", 0.5, "baton_stage_seconds", "stage", "Half take longer."),
                here.quantile("p99 of each stage", "s", 0.99, "baton_stage_seconds", "stage",
                              "One in a hundred takes longer."),
                here.counts("Retried stages", "short", "baton_stage_retries_total", "instance, stage",
                            "Further attempts per second, above all at finding KV blocks."),
                here.mean("Waits between attempts", "s", "baton_stage_retry_wait_seconds", "stage",
                          "Mean sleep of a request that was retried; it is in no stage's own time."),
                here.counts("Requests ended before their time", "reqps", "baton_aborts_total", "leg, source",
                            "By leg and by who asked for it."),
            ),
        ),
        Row(
            "Calls",
            (
                here.counts("RPCs served", "reqps", "baton_rpc_requests_total", "method, code",
                            "NONE_ERROR is success."),
                here.gauge("Open RPCs", "short", "baton_rpc_inflight", "instance, method",
                           "Falls back to 0 when nothing runs."),
                here.quantile("p99 of RPCs", "s", 0.99, "baton_rpc_duration_seconds", "method",
                              "To the end of the stream."),
                here.quantile("Event loop lag", "s", 0.99, "baton_event_loop_lag_seconds", "instance",
                              "How late a timer is: above some milliseconds the process has too little processor.",
                              legend="p99 {{instance}}"),
            ),
        ),
    )  # fmt: skip


def _batch_panels(role: str) -> tuple[Panel, ...]:
    here = Series(f'role="{role}", {PLACES}')
    return (
        Panel("Requests", "short",
              (Query(f"sum by (instance) (baton_num_requests_running{{{here}}})", "running {{instance}}"),
               Query(f"sum by (instance) (baton_num_requests_waiting{{{here}}})", "waiting {{instance}}")),
              "In the running batch, and waiting for the scheduler."),
        here.quantiles("Step time", "s", "baton_engine_step_seconds", "kind", "One pass of the engine."),
        here.quantiles("Requests per step", "short", "baton_engine_batch_requests", "kind", "Batch size."),
        here.quantiles("Tokens per step", "short", "baton_engine_batch_tokens", "kind",
                       "Tokens computed, padding excluded."),
        here.counts("Preemptions", "short", "baton_preemptions_total", "instance, reason",
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
                PLACES.gauge("Loading", "short", "baton_num_requests_loading", "instance",
                             "Requests whose KV is on its way."),
            ),
        ),
    ),
    (DECODE_INSTANCE,),
    ANNOTATIONS,
)  # fmt: skip
