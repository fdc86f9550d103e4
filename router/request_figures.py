"""The metrics that every client request books, by their labels' values: each series is looked up once."""

from __future__ import annotations

from rpc.metrics import Registry


class RequestFigures:
    """What they mean is in rpc/metric_families.py; here are the orders of their labels."""

    def __init__(self, metrics: Registry) -> None:
        counters, histograms = metrics.counters, metrics.histograms
        self.requests = counters("baton_requests_total", "model_name", "api", "stream", "outcome")
        self.errors = counters("baton_request_errors_total", "model_name", "api", "code", "phase")
        self.aborts = counters("baton_aborts_total", "leg", "source")
        self.stages = histograms("baton_stage_seconds", "stage")
        self.first_token = histograms("baton_time_to_first_token_seconds", "model_name", "path")
        self.gap = histograms("baton_inter_token_latency_seconds", "model_name", "path")
        self.output_token = histograms("baton_time_per_output_token_seconds", "model_name", "path")
        self.answer = histograms("baton_e2e_request_latency_seconds", "model_name", "path")
        self.prompt_lengths = histograms("baton_request_prompt_tokens", "model_name")
        self.answer_lengths = histograms("baton_request_generation_tokens", "model_name")
        self.prompt_tokens = counters("baton_prompt_tokens_total", "model_name")
        self.cached_tokens = counters("baton_cached_prompt_tokens_total", "model_name")
        self.generated_tokens = counters("baton_generation_tokens_total", "model_name")
