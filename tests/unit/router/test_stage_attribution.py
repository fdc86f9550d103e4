"""The router's stages and its two legs on a clock that only the test moves: every second is in its own bucket."""

from __future__ import annotations

import pytest

from router.admission import Admission
from rpc.errors import BatonError, ErrorCode
from tests.unit.router.scripted_cluster import Clock, make_request, running_cluster

PROMPT = [5, 6, 7, 8]
RESERVE_S, PREFILL_S, STREAM_S = 0.5, 1.0, 2.0


def move(cluster, clock, *, failures=0, code=ErrorCode.EXECUTION_EXCEPTION):
    """Servers that take their time on the clock: to reserve, to compute (`failures` times in vain), and before the
    fourth token, which waits until the first one was shown and the prefill server has said all."""
    prefill = next(s for s in cluster.servers if s.role == "prefill")
    decode = next(s for s in cluster.servers if s.role == "decode")
    left = failures

    def reserving():
        clock.now += RESERVE_S

    async def computing():
        nonlocal left
        attempt = next(iter(cluster.orchestrator._attempts))
        await cluster.until(lambda: attempt._decode.reserved)
        clock.now += PREFILL_S
        if left:
            left -= 1
            raise BatonError(code)

    async def streaming():
        attempt = next(iter(cluster.orchestrator._attempts))
        await cluster.until(lambda: attempt._summarized and not attempt._out and attempt._prefill.clock.finished)
        clock.now += STREAM_S

    decode.at |= {"reserved": reserving, "token:3": streaming}
    prefill.at |= {"start": computing}


def booked(cluster) -> dict[str, float]:
    """Sums of the stages' histogram, each with one sample."""
    found = {}
    for stage in ("validate", "tokenize", "queue", "choose", "first_token", "stream", "reserve", "prefill"):
        total = cluster.metrics.value("baton_stage_seconds_sum", stage=stage)
        if total is not None:
            assert cluster.metrics.value("baton_stage_seconds_count", stage=stage) == 1, stage
            found[stage] = total
    return found


@pytest.mark.invariant("RPC-1")
@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_stages_when_attempts_fail_before_one_serves_then_each_bucket_is_exact(retries):
    clock = Clock()
    async with running_cluster(clock=clock, retry_budget_ratio=1.0) as cluster:
        move(cluster, clock, failures=retries)
        began = clock.now
        await cluster.collect(make_request(PROMPT, 6))
        attempts = retries + 1
        assert booked(cluster) == {
            "queue": 0.0,
            "choose": 0.0,
            "first_token": pytest.approx(attempts * (RESERVE_S + PREFILL_S)),
            "stream": pytest.approx(STREAM_S),
            # The legs overlap, and each has a clock of its own; their attempts add up as well.
            "reserve": pytest.approx(attempts * RESERVE_S),
            "prefill": pytest.approx(attempts * (RESERVE_S + PREFILL_S)),
        }
        [line] = cluster.access.lines
        own = {name: value for name, value in booked(cluster).items() if name not in ("reserve", "prefill")}
        assert sum(own.values()) <= clock.now - began + 1e-9
        assert {f"router.{name}" for name in own} <= line["timeline"].keys()
        await cluster.settled()


@pytest.mark.invariant("RPC-1")
async def test_stages_when_the_request_ends_early_then_the_rest_was_not_reached():
    clock = Clock()
    async with running_cluster(clock=clock) as cluster:
        move(cluster, clock, failures=1, code=ErrorCode.INVALID_PARAMS)
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request(PROMPT, 6))
        assert caught.value.stage == "first_token"
        assert booked(cluster) == {
            "queue": 0.0, "choose": 0.0, "first_token": pytest.approx(RESERVE_S + PREFILL_S),
            "reserve": pytest.approx(RESERVE_S), "prefill": pytest.approx(RESERVE_S + PREFILL_S),
        }  # fmt: skip
    async with running_cluster(0, 1, clock=Clock()) as cluster:  # a decode server alone, which computes no prompts
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request(PROMPT, 6))
        assert (caught.value.code, caught.value.stage) == (ErrorCode.NO_PREFILL_WORKER, "choose")
        assert booked(cluster) == {"queue": 0.0, "choose": 0.0}
    async with running_cluster(clock=Clock(), max_concurrent=1, queue_size=0) as cluster:
        admission: Admission = cluster.orchestrator._run_context.admission
        assert admission.enter(0) is None
        with pytest.raises(BatonError) as caught:
            await cluster.collect(make_request(PROMPT, 6))
        assert (caught.value.code, caught.value.stage) == (ErrorCode.ROUTER_QUEUE_FULL, "queue")
        assert booked(cluster) == {"queue": 0.0}
        admission.leave()


@pytest.mark.invariant("RPC-1")
async def test_clock_when_a_request_has_ended_in_any_way_then_it_stands_at_finish():
    clock = Clock()
    async with running_cluster(clock=clock) as cluster:
        for failures in (0, 1):
            move(cluster, clock, failures=failures, code=ErrorCode.INVALID_PARAMS)
            opened = cluster.open_requests.open(f"r{failures}", api="grpc", model="tiny")
            with opened:
                events = cluster.orchestrator.generate(make_request(PROMPT, 6, request_id=f"r{failures}", owner=opened))
                try:
                    async for _ in events:
                        pass
                    opened.finish("length")
                except BatonError as error:
                    opened.fail(error)
            assert opened.clock.finished
            with pytest.raises(AssertionError):
                opened.clock.next_stage()
            before = opened.clock.seconds()
            opened.clock.finish_stage()
            assert opened.clock.seconds() == before
