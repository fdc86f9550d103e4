"""Traces of requests through real processes, received by a real collector."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import httpx
import pytest

from protos import common_pb2, generation_pb2, generation_pb2_grpc
from tests.integration.cluster import Cluster, wait_for
from tests.integration.observed import Observed, start
from tests.integration.trace_collector import Collector, Received

CALLER = "00f067aa0ba902b7"
ROUTER_STAGES = {f"router.{s}" for s in ("validate", "tokenize", "queue", "choose", "first_token", "stream")}
PREFILL_STAGES = {f"prefill.{s}" for s in ("admit", "queue", "match", "compute", "sample", "publish", "held")}
DECODE_STAGES = {f"decode.{s}" for s in ("admit", "prepare", "allocate", "load", "wait_to_run", "generate", "release")}
REQUESTS = {"router.request", "prefill.request", "decode.request"}
CALLS = {"router.prefill", "router.decode", "cache_store.load", "cache_store.send"}
SLACK_NS = 5_000_000  # two processes convert the common clock to the time of day at different moments
BODY = {"prompt": "trace me through everything", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector(observed: Observed) -> Collector:
    return observed.collector


@pytest.fixture(scope="module")
def cluster(observed: Observed) -> Cluster:
    return observed.cluster


def complete(cluster: Cluster, **headers: str) -> httpx.Response:
    return httpx.post(f"http://{cluster.router.http}/v1/completions", json=BODY, headers=headers, timeout=30)


def caller(trace_id: str, sampled: bool = True) -> str:
    return f"00-{trace_id}-{CALLER}-0{int(sampled)}"


def check_inside(inner: Received, outer: Received) -> None:
    assert outer.begin_ns - SLACK_NS <= inner.begin_ns <= inner.end_ns <= outer.end_ns + SLACK_NS, (inner, outer)


def test_trace_when_a_pair_serves_a_request_then_its_spans_form_one_tree(
    cluster: Cluster, collector: Collector
) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    before_ns = time.time_ns()
    answer = complete(cluster, traceparent=caller(trace_id), tracestate="vendor=1", **{"X-Request-Id": "traced"})
    assert answer.status_code == 200
    names = ROUTER_STAGES | PREFILL_STAGES | DECODE_STAGES | REQUESTS | CALLS
    spans = collector.wait_names(trace_id, names)
    assert set(spans) == names

    def parent(name: str) -> str:
        found = [span.name for span in spans.values() if span.span_id == spans[name].parent_id]
        return found[0] if found else spans[name].parent_id

    assert parent("router.request") == CALLER
    for stage in ROUTER_STAGES | {"router.prefill", "router.decode"}:
        assert parent(stage) == "router.request"
    assert (parent("prefill.request"), parent("decode.request")) == ("router.prefill", "router.decode")
    assert {parent(stage) for stage in PREFILL_STAGES} == {"prefill.request"}
    assert {parent(stage) for stage in DECODE_STAGES} == {"decode.request"}
    assert parent("cache_store.load") == "decode.load"
    assert parent("cache_store.send") == "cache_store.load"

    kinds = {name: span.kind for name, span in spans.items()}
    assert {kinds[name] for name in REQUESTS | {"cache_store.send"}} == {"server"}
    assert {kinds[name] for name in ("router.prefill", "router.decode", "cache_store.load")} == {"client"}
    assert {kinds[name] for name in ROUTER_STAGES | PREFILL_STAGES | DECODE_STAGES} == {"internal"}
    services = {span.service for span in spans.values()}
    assert services == {"baton-router", "baton-prefill", "baton-decode"}
    assert {spans[n].service for n in PREFILL_STAGES | {"cache_store.send"}} == {"baton-prefill"}

    for stage in ROUTER_STAGES:
        check_inside(spans[stage], spans["router.request"])
    for stage in DECODE_STAGES:
        check_inside(spans[stage], spans["decode.request"])
    check_inside(spans["cache_store.load"], spans["decode.load"])
    for stage in DECODE_STAGES:
        check_inside(spans[stage], spans["router.decode"])
    # It ends on the decode server when its last event is on its way, which the router may have by then.
    answered = spans["router.decode"]
    assert answered.begin_ns - SLACK_NS <= spans["decode.request"].begin_ns <= answered.end_ns + SLACK_NS
    for stage in PREFILL_STAGES - {"prefill.publish", "prefill.held"}:  # the KV stays after the answer
        check_inside(spans[stage], spans["prefill.request"])
    for role, stages in (("router", ROUTER_STAGES), ("decode", DECODE_STAGES)):
        order = [spans[name].begin_ns for name in sorted(stages, key=lambda n: spans[n].begin_ns)]
        assert order == sorted(order), role
    now_ns = time.time_ns()
    assert all(before_ns - SLACK_NS < span.begin_ns <= span.end_ns < now_ns + SLACK_NS for span in spans.values())

    own = spans["router.request"].attributes
    assert own["baton.request_id"] == "traced"
    assert (own["baton.code"], own["baton.path"], own["baton.attempts"]) == ("NONE_ERROR", "pd", 1)
    assert own["gen_ai.usage.output_tokens"] == 4
    usage = answer.json()["usage"]
    for role in ("router", "prefill", "decode"):
        assert spans[f"{role}.request"].attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert spans["router.decode"].attributes["server.address"] == cluster.decode[0].grpc
    assert spans["prefill.request"].attributes["server.address"] == cluster.prefill[0].grpc
    keys = {spans[n].attributes["baton.request_key"] for n in (CALLS | REQUESTS) - {"router.request"}}
    assert len(keys) == 1
    assert not any(span.error for span in spans.values())
    assert {span.trace_state for span in spans.values() if span.name in REQUESTS} == {"vendor=1"}
    assert BODY["prompt"] not in str(spans), "content is no part of a trace"

    # The stages are those of the stage clocks: the timeline that the client got has the same seconds.
    timeline = answer.json()["baton"]["timeline"]
    for stage in ("prefill.compute", "decode.load", "decode.generate", "router.first_token"):
        seconds = (spans[stage].end_ns - spans[stage].begin_ns) / 1e9
        assert seconds == pytest.approx(timeline[stage], abs=2e-3), stage


def test_caller_that_does_not_sample_when_its_request_is_served_then_no_process_records_it(
    cluster: Cluster, collector: Collector
) -> None:
    """Servers record all requests without a caller's word, so it is this word that keeps them from it."""
    silent, loud = "a" * 32, "b" * 32
    assert complete(cluster, traceparent=caller(silent, sampled=False)).status_code == 200
    assert complete(cluster).status_code == 200, "no caller, and the router's share is 0: not recorded anywhere"
    assert complete(cluster, traceparent="nonsense").status_code == 200
    assert complete(cluster, traceparent=caller(loud)).status_code == 200
    spans = collector.wait_names(loud, {"router.request", "prefill.held", "decode.request", "cache_store.load"})
    assert not any(span.error for span in spans.values()), "nor is it an error that all its KV was there already"
    for server in cluster.servers:
        wait_for("nothing open", lambda server=server: not server.requests()["open"], 10)
    assert {span.trace_id for span in collector.spans()} <= {loud, "4bf92f3577b34da6a3ce929d0e0e4736"}


def test_failed_request_when_traced_then_its_spans_have_the_code(cluster: Cluster, collector: Collector) -> None:
    refused = "c" * 32
    bad = httpx.post(
        f"http://{cluster.router.http}/v1/completions",
        json={**BODY, "temperature": 9},
        headers={"traceparent": caller(refused)},
        timeout=30,
    )
    assert bad.status_code == 400
    spans = collector.wait_names(refused, {"router.request", "router.validate"})
    assert set(spans) == {"router.request", "router.validate"}
    assert spans["router.request"].error == "INVALID_PARAMS"
    assert spans["router.request"].attributes["error.type"] == "INVALID_PARAMS"


def test_grpc_request_when_traced_then_its_metadata_counts_like_the_header(
    cluster: Cluster, collector: Collector
) -> None:
    trace_id = "d" * 32
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[5, 6, 7]), sampling=common_pb2.SamplingParams(max_tokens=2)
    )
    with grpc.insecure_channel(cluster.router.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        assert list(stub.Generate(request, timeout=30, metadata=(("traceparent", caller(trace_id)),)))
    spans = collector.wait_names(trace_id, REQUESTS | {"cache_store.send"})
    assert spans["router.request"].attributes["baton.api"] == "grpc"


@pytest.mark.extended
def test_collector_when_it_refuses_then_requests_are_served_and_the_log_says_so_once_in_a_while(
    cluster: Cluster, collector: Collector
) -> None:
    collector.refuse = True
    calls = collector.calls
    try:
        for number in range(3):
            assert complete(cluster, traceparent=caller(f"{number + 1:032x}")).status_code == 200
        wait_for("a refused delivery", lambda: collector.calls > calls, 20)
        assert complete(cluster, traceparent=caller("e" * 32)).status_code == 200
    finally:
        collector.refuse = False
    # What was refused is tried again for a while; what came later gets through in any case.
    collector.wait_names("e" * 32, REQUESTS)
    warned = [line for line in cluster.router.log_lines() if "could not be delivered" in line.get("message", "")]
    assert all("told to" in line["message"] and line["level"] == "warning" for line in warned)
    assert not [line for line in cluster.router.log_lines() if line.get("level") == "error"]


@pytest.mark.extended
def test_sigterm_when_spans_wait_then_a_stuck_collector_delays_little_and_one_that_answers_gets_them(
    tmp_path: Path,
) -> None:
    with start(tmp_path) as own:
        check_ends(own.cluster, own.collector)


def check_ends(cluster: Cluster, collector: Collector) -> None:
    trace_id = "f" * 32
    prefill = cluster.prefill[0]
    collector.hold.clear()  # from now on it takes calls and answers none
    try:
        assert complete(cluster, traceparent=caller(trace_id), **{"X-Request-Id": "last"}).status_code == 200
        prefill.finished("last")
        began = time.monotonic()
        assert prefill.terminate() == 0
        assert time.monotonic() - began < 8
        assert "were not delivered" in prefill.log()
    finally:
        collector.hold.set()
    assert cluster.router.terminate() == 0
    assert "router.request" in {span.name for span in collector.spans(trace_id)}, "delivered before the process ended"
