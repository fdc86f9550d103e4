"""What the router records of a request: its calls to servers, those that failed too, and what servers are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.requests import RouterRequest
from rpc.errors import BatonError, ErrorCode
from rpc.trace_context import TraceContext
from rpc.tracing import Span, Tracer
from tests.unit.router.scripted_cluster import Cluster, Collected, make_request, running_cluster
from tests.unit.router.scripted_server import fails

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@asynccontextmanager
async def traced_cluster(prefills: int, decodes: int, ratio: float = 1.0) -> AsyncIterator[tuple[Cluster, list[Span]]]:
    spans: list[Span] = []
    async with running_cluster(prefills, decodes) as cluster:
        cluster.open_requests._tracer = Tracer(spans.extend, ratio=ratio)
        yield cluster, spans


async def serve(cluster: Cluster, traceparent: str = "", max_tokens: int = 6) -> Collected:
    """As a surface does it: opens the client's request, and the one that is served belongs to it."""
    collected = Collected()
    with cluster.open_requests.open("id", api="completions", model="tiny", traceparent=traceparent) as owner:
        context = {"traceparent": owner.traceparent, "tracestate": owner.tracestate}
        request: RouterRequest = make_request(request_id="id", max_tokens=max_tokens, owner=owner, **context)
        async for event in cluster.orchestrator.generate(request):
            collected.add(event)
        owner.finish("length")
    await cluster.settled()
    return collected


def told(server) -> list[TraceContext]:
    """The contexts that the calls to a server came with."""
    found = [TraceContext.read(metadata["traceparent"]) for metadata in server.metadata]
    return [context for context in found if context is not None]


async def test_calls_when_a_pair_serves_then_each_server_is_told_the_span_of_its_own_call():
    async with traced_cluster(1, 1) as (cluster, spans):
        await serve(cluster, PARENT)
        by_name = {span.name: span for span in spans}
        own = by_name["router.request"]
        assert own.parent == int(PARENT.split("-")[2], 16)
        for server in cluster.servers:
            call = by_name[f"router.{server.role}"]
            assert told(server) == [call.context]
            assert (call.kind, call.parent, call.error) == ("client", own.context.span_id, "")
            assert call.attributes["server.address"] == server.address
            assert call.begin_ns < call.end_ns
        stages = {"router.queue", "router.choose", "router.first_token", "router.stream"}
        assert stages <= by_name.keys()
        assert {by_name[stage].parent for stage in stages} == {own.context.span_id}
        assert len(by_name) == len(spans)


async def test_calls_when_the_first_attempt_fails_then_both_attempts_are_recorded_and_the_failed_call_has_its_code():
    async with traced_cluster(1, 2) as (cluster, spans):
        prefill, first, second = cluster.servers
        first.at["start"] = fails(ErrorCode.EXECUTION_EXCEPTION)
        prefill.at["answer"] = lambda: second.until(lambda: second.seen)
        collected = await serve(cluster)
        assert collected.finish is not None and collected.finish.attempts == 2
        calls = [span for span in spans if span.name == "router.decode"]
        assert [(call.attributes["server.address"], call.error) for call in calls] == [
            (first.address, "EXECUTION_EXCEPTION"),
            (second.address, ""),
        ]
        given_up, answered = [span for span in spans if span.name == "router.prefill"]
        assert given_up.attributes["baton.cancelled"] is True
        assert "baton.cancelled" not in answered.attributes
        assert [told(first), told(second)] == [[calls[0].context], [calls[1].context]]
        [own] = [span for span in spans if span.name == "router.request"]
        assert (own.error, own.attributes["baton.attempts"]) == ("", 2)


async def test_request_when_it_fails_for_good_then_its_span_has_the_code():
    async with traced_cluster(1, 1) as (cluster, spans):
        cluster.servers[1].at["token:2"] = fails(ErrorCode.INVALID_PARAMS)
        with pytest.raises(BatonError):
            await serve(cluster)
        [own] = [span for span in spans if span.name == "router.request"]
        assert (own.error, own.attributes["baton.code"]) == ("INVALID_PARAMS", "INVALID_PARAMS")


@pytest.mark.parametrize("traceparent", ["", PARENT[:-2] + "00"])
async def test_request_when_it_is_not_recorded_then_its_servers_are_told_so(traceparent):
    async with traced_cluster(1, 1, ratio=0.0) as (cluster, spans):
        await serve(cluster, traceparent)
        assert spans == []
        contexts = [context for server in cluster.servers for context in told(server)]
        assert [context.sampled for context in contexts] == [False, False]
