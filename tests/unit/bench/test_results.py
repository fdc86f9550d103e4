"""Figures of the load generator, exact on hand-made sequences of chunks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.results import RequestResult, Slos, peak_concurrency, peak_per_second, percentile, render, summarize


def result(sent_at: float, *chunks: tuple[float, int], prompt_tokens: int = 10, error: str = "") -> RequestResult:
    """A request whose chunks are (arrival, tokens)."""
    made = RequestResult(sent_at, prompt_tokens)
    for at, tokens in chunks:
        made.chunk(at, tokens)
    made.error = error
    made.ended_at = made.last_token_at
    return made


def test_latencies_when_every_chunk_has_one_token_then_gaps_are_itls() -> None:
    r = result(1.0, (1.5, 1), (1.75, 1), (2.25, 1))
    assert r.ttft_s == 0.5
    assert r.itls_s == [0.25, 0.5]
    assert r.e2el_s == 1.25
    assert r.tpot_s == 0.375
    assert r.output_tokens == 3


def test_itl_when_a_chunk_bundles_tokens_then_its_gap_is_shared_and_counted_per_token() -> None:
    r = result(0.0, (1.0, 1), (2.0, 4), (2.5, 1))
    assert r.itls_s == [0.25, 0.25, 0.25, 0.25, 0.5]
    assert r.tpot_s == pytest.approx(1.5 / 5)


def test_itl_when_counted_per_chunk_then_each_gap_counts_once() -> None:
    r = RequestResult(0.0, 1)
    for at, tokens in ((1.0, 1), (2.0, 4), (2.5, 1)):
        r.chunk(at, tokens, per_token=False)
    assert r.itls_s == [1.0, 0.5]
    assert r.output_tokens == 6


def test_ttft_when_a_role_chunk_comes_first_then_the_first_chunk_with_a_token_counts() -> None:
    r = result(0.0, (0.25, 0), (1.0, 2), (1.5, 1), (2.0, 0))
    assert r.ttft_s == 1.0
    assert r.e2el_s == 1.5, "the end is the last token, not the usage chunk"
    assert r.token_times == [1.0, 1.0, 1.5]


def test_tpot_when_the_answer_has_one_token_then_there_is_none() -> None:
    r = result(0.0, (1.0, 1))
    assert math.isnan(r.tpot_s)
    assert r.itls_s == []


def test_latencies_when_no_token_came_then_nan() -> None:
    r = result(0.0)
    assert math.isnan(r.ttft_s)
    assert math.isnan(r.e2el_s)


def test_latencies_when_the_clock_reads_zero_then_it_is_a_time_like_any_other() -> None:
    r = result(-1.0, (0.0, 1))
    assert r.ttft_s == 1.0


def test_correct_total_when_chunks_did_not_say_their_size_then_tokens_are_added_without_latencies() -> None:
    r = result(0.0, (1.0, 1), (2.0, 1))
    r.correct_total(5)
    assert r.output_tokens == 5
    assert r.itls_s == [1.0]
    assert r.token_times == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert r.tpot_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([], 50, math.nan),
        ([3.0], 99, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 25, 1.75),
        ([float(n) for n in range(101)], 99, 99.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentile_when_between_ranks_then_interpolated(values: list[float], p: float, expected: float) -> None:
    assert percentile(values, p) == pytest.approx(expected, nan_ok=True)


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_percentile_of_anything_is_within_its_values_and_monotonic(values: list[float], p: float, q: float) -> None:
    low, high = percentile(values, min(p, q)), percentile(values, max(p, q))
    slack = 1e-9 * max(values)
    assert min(values) - slack <= low <= high + slack <= max(values) + 2 * slack


def test_goodput_when_one_objective_is_missed_then_the_request_does_not_count() -> None:
    slos = Slos.parse(["ttft:600", "tpot:300"])
    good = result(0.0, (0.5, 1), (0.75, 1))
    slow_first = result(0.0, (0.7, 1), (0.8, 1))
    slow_rest = result(0.0, (0.5, 1), (0.9, 1))
    assert [slos.met_by(r) for r in (good, slow_first, slow_rest)] == [True, False, False]


def test_goodput_when_tpot_does_not_exist_then_only_the_other_objectives_count() -> None:
    assert Slos.parse(["tpot:1"]).met_by(result(0.0, (5.0, 1)))


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:0", "e2el:-1", "ttft:nan"])
def test_goodput_when_a_word_is_wrong_then_it_is_named(word: str) -> None:
    with pytest.raises(ValueError, match=f"--goodput {word}"):
        Slos.parse([word])


def test_peak_per_second_when_tokens_bunch_then_the_fullest_second() -> None:
    assert peak_per_second([0.1, 0.9, 1.0, 1.5, 1.99, 2.0]) == 3.0
    assert peak_per_second([]) == 0.0


def test_peak_concurrency_when_one_starts_as_another_ends_then_they_do_not_overlap() -> None:
    a, b = result(0.0, (1.0, 1)), result(1.0, (2.0, 1))
    c = result(0.5, (1.5, 1))
    assert peak_concurrency([a, b]) == 1
    assert peak_concurrency([a, b, c]) == 2


def summary_of(results: list[RequestResult], **changes: object) -> dict[str, object]:
    options: dict[str, object] = {
        "request_rate": math.inf,
        "max_concurrency": None,
        "slos": Slos(),
        "percentiles": [50.0, 99.0],
        **changes,
    }
    return summarize(results, 2.0, **options)  # type: ignore[arg-type]


def test_summary_when_a_request_failed_then_its_tokens_and_latencies_do_not_count() -> None:
    good = result(0.0, (0.5, 1), (1.0, 1), prompt_tokens=7)
    failed = result(0.0, (0.1, 1), (0.2, 5), prompt_tokens=90, error="broke off")
    figures = summary_of([good, failed], slos=Slos.parse(["ttft:1000"]))
    assert figures["completed"] == 1
    assert figures["failed"] == 1
    assert figures["total_input_tokens"] == 7
    assert figures["total_output_tokens"] == 2
    assert figures["request_throughput"] == 0.5
    assert figures["output_throughput"] == 1.0
    assert figures["total_token_throughput"] == 4.5
    assert figures["request_goodput"] == 0.5
    assert figures["slo_attainment"] == 0.5
    assert figures["mean_ttft_ms"] == 500.0
    assert figures["mean_itl_ms"] == 500.0
    assert figures["max_concurrent_requests"] == 2, "the failed one was open, too"


def test_summary_when_latencies_differ_then_mean_median_and_percentiles_in_milliseconds() -> None:
    results = [result(0.0, (t, 1), (t + 0.1, 1)) for t in (0.1, 0.2, 0.6)]
    figures = summary_of(results)
    assert figures["mean_ttft_ms"] == pytest.approx(300.0)
    assert figures["median_ttft_ms"] == pytest.approx(200.0)
    assert figures["p50_ttft_ms"] == pytest.approx(200.0)
    assert figures["p99_ttft_ms"] == pytest.approx(592.0)
    assert figures["p99_tpot_ms"] == pytest.approx(100.0)
    assert figures["p99_e2el_ms"] == pytest.approx(692.0)


FULL_BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     1         
Failed requests:                         0         
Maximum request concurrency:             4         
Request rate configured (RPS):           2.50      
Benchmark duration (s):                  2.00      
Total input tokens:                      7         
Total generated tokens:                  3         
Request throughput (req/s):              0.50      
Request goodput (req/s):                 0.50      
Output token throughput (tok/s):         1.50      
Peak output token throughput (tok/s):    2.00      
Peak concurrent requests:                1.00      
Total token throughput (tok/s):          5.00      
---------------Time to First Token----------------
Mean TTFT (ms):                          500.00    
Median TTFT (ms):                        500.00    
P50 TTFT (ms):                           500.00    
P99.9 TTFT (ms):                         500.00    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          375.00    
Median TPOT (ms):                        375.00    
P50 TPOT (ms):                           375.00    
P99.9 TPOT (ms):                         375.00    
---------------Inter-token Latency----------------
Mean ITL (ms):                           375.00    
Median ITL (ms):                         375.00    
P50 ITL (ms):                            375.00    
P99.9 ITL (ms):                          499.75    
----------------End-to-end Latency----------------
Mean E2EL (ms):                          1250.00   
Median E2EL (ms):                        1250.00   
P50 E2EL (ms):                           1250.00   
P99.9 E2EL (ms):                         1250.00   
=================================================="""  # noqa: W291 values are padded to ten signs


def test_render_when_everything_is_asked_for_then_the_block_to_the_letter() -> None:
    figures = summary_of(
        [result(0.0, (0.5, 1), (0.75, 1), (1.25, 1), prompt_tokens=7)],
        request_rate=2.5,
        max_concurrency=4,
        slos=Slos.parse(["e2el:2000"]),
        percentiles=[50.0, 99.9],
    )
    assert render(figures, ["ttft", "tpot", "itl", "e2el"], [50.0, 99.9]) == FULL_BLOCK


def test_render_when_nothing_is_asked_for_then_those_lines_are_absent() -> None:
    block = render(summary_of([result(0.0, (0.5, 1))]), ["ttft"], [99.0])
    labels = [line.partition(":")[0] for line in block.splitlines()]
    assert "Maximum request concurrency" not in labels
    assert "Request rate configured (RPS)" not in labels
    assert "Request goodput (req/s)" not in labels
    assert labels[-4:] == ["Mean TTFT (ms)", "Median TTFT (ms)", "P99 TTFT (ms)", "=" * 50]


def test_render_when_nothing_succeeded_then_figures_of_nothing_are_nan() -> None:
    failed = result(0.0, error="refused")
    lines = render(summary_of([failed]), ["ttft"], [99.0]).splitlines()
    assert f"{'Failed requests:':<40} {'1':<10}" in lines
    assert f"{'Mean TTFT (ms):':<40} {'nan':<10}" in lines
