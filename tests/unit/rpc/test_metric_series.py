"""Series of each kind: the text they are written as is that of prometheus_client for the same events."""

from __future__ import annotations

import math
import threading

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from rpc.metric_series import CounterSeries, GaugeSeries, HistogramSeries
from rpc.metrics import BUCKETS

BOUNDS = (0.001, 0.25, 1, 2.5, 4096, 16 << 30)
LABELS = st.dictionaries(
    st.sampled_from(["role", "code", "model_name"]), st.text(st.characters(codec="utf-8"), max_size=8)
)
VALUES = st.lists(st.one_of(st.floats(0, 1e12), st.sampled_from([*BOUNDS, 0, math.inf])), max_size=12)

prometheus_client.disable_created_metrics()


def samples(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().split("\n") if line and not line.startswith("#")]


def written(series: CounterSeries | GaugeSeries | HistogramSeries) -> list[str]:
    return "".join(series.lines()).removesuffix("\n").split("\n")


@given(LABELS, VALUES)
@settings(max_examples=60, deadline=None)
def test_lines_when_compared_with_prometheus_client_then_they_are_the_same(
    labels: dict[str, str], values: list[float]
) -> None:
    registry = CollectorRegistry()
    names = list(labels)
    theirs = [
        prometheus_client.Counter("c_total", "h", names, registry=registry),
        prometheus_client.Gauge("g", "h", names, registry=registry),
        prometheus_client.Histogram("h", "h", names, registry=registry, buckets=BOUNDS),
    ]
    counter, gauge, histogram = ((m.labels(**labels) if names else m) for m in theirs)
    ours = (CounterSeries("c_total", labels), GaugeSeries("g", labels), HistogramSeries("h", labels, BOUNDS))
    for value in values:
        counter.inc(value)
        gauge.set(value)
        histogram.observe(value)
        ours[0].inc(value)
        ours[1].set(value)
        ours[2].observe(value)
    assert [line for series in ours for line in written(series)] == samples(registry)


@pytest.mark.parametrize("name", BUCKETS)
def test_observe_when_a_value_is_a_bound_then_it_belongs_to_that_bucket(name: str) -> None:
    for bound in BUCKETS[name]:
        series = HistogramSeries("h", {}, BUCKETS[name])
        series.observe(bound)
        series.observe(math.nextafter(bound, math.inf))
        upper = str(float(bound)) if bound < 1e6 else None
        if upper is not None:
            assert series.read("_bucket", upper) == 1
        assert series.read("_bucket", "+Inf") == series.read("_count") == 2


def test_observe_when_several_times_then_it_is_as_often_and_the_sum_as_large() -> None:
    series = HistogramSeries("h", {}, (1.0, 2.0))
    series.observe(1.5, 3)
    series.observe(9.0)
    assert (series.read("_count"), series.read("_sum")) == (4, 13.5)
    assert [series.read("_bucket", upper) for upper in ("1.0", "2.0", "+Inf")] == [0, 3, 4]


def test_inc_when_negative_then_a_counter_refuses_it() -> None:
    series = CounterSeries("c_total", {})
    with pytest.raises(ValueError, match="cannot fall by 1"):
        series.inc(-1)
    assert series.read() == 0


def test_series_when_several_threads_book_then_nothing_is_lost() -> None:
    counter, gauge = CounterSeries("c_total", {}), GaugeSeries("g", {})
    histogram = HistogramSeries("h", {}, (0.5, 1.5))
    barrier = threading.Barrier(4)

    def book() -> None:
        barrier.wait(10)
        for _ in range(2000):
            counter.inc()
            gauge.inc()
            gauge.dec()
            histogram.observe(1.0)
            assert histogram.read("_bucket", "+Inf") >= histogram.read("_bucket", "0.5")

    threads = [threading.Thread(target=book) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (counter.read(), gauge.read(), histogram.read("_count")) == (8000, 0, 8000)
    assert histogram.read("_sum") == 8000
