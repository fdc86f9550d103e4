"""The decisions after a failure, by table: pure, with a fake clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.budget import Backoff, RetryBudget
from router.failover import NO_SERVER, Failover, FailoverSettings
from rpc.deadline import Deadline
from rpc.errors import TABLE, BatonError, ErrorCode
from rpc.metrics import Registry

CODES = [code for code in TABLE if code is not ErrorCode.NONE_ERROR]


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def make(ratio: float = 1.0, deadline_s: float | None = None, **settings: object) -> tuple[Failover, Clock, Registry]:
    clock, metrics = Clock(), Registry("router", process_metrics=False)
    defaults = {"max_retries": 3, "migration_limit": 2, "backoff": Backoff(0.05, 5, 2, 0), "patience_s": 2.0}
    failover = Failover(
        FailoverSettings(**defaults | settings),
        RetryBudget(ratio, clock=clock),
        metrics,
        random.Random(1),
        Deadline.after(deadline_s, clock),
        clock=clock,
    )
    return failover, clock, metrics


def final(failover: Failover, code: ErrorCode, emitted: int = 0) -> BatonError:
    with pytest.raises(BatonError) as caught:
        failover.after(BatonError(code), emitted)
    return caught.value


@pytest.mark.invariant("RPC-11")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("emitted", [0, 5])
def test_after_a_failure_then_only_codes_that_a_retry_can_help_get_another_attempt(code, emitted):
    failover, _, _ = make()
    if TABLE[code].retryable and code not in NO_SERVER:
        assert failover.after(BatonError(code), emitted) >= 0
    else:
        assert final(failover, code, emitted).code is code


def test_after_failures_before_the_first_token_then_waits_grow_and_the_last_error_has_the_first_cause():
    failover, _, metrics = make()
    waits = [failover.after(BatonError(ErrorCode.CONNECT_FAILED, metadata={"leg": "prefill"}), 0) for _ in range(3)]
    assert waits == [0.05, 0.1, 0.2]
    error = final(failover, ErrorCode.DECODE_MALLOC_FAILED)
    assert error.code is ErrorCode.DECODE_MALLOC_FAILED
    assert error.metadata["first_cause"] == "CONNECT_FAILED"
    assert metrics.value("baton_retries_total", role="prefill", code="CONNECT_FAILED") == 3


def test_after_failures_in_mid_stream_then_the_first_migration_does_not_wait():
    failover, _, metrics = make()
    assert failover.after(BatonError(ErrorCode.ENGINE_DEAD), 4) == 0
    assert failover.migrating
    failover.progressed()
    assert not failover.migrating
    assert failover.after(BatonError(ErrorCode.CONNECT_FAILED), 7) == 0.05
    assert final(failover, ErrorCode.CONNECT_FAILED, 7).code is ErrorCode.CONNECT_FAILED
    counts = [metrics.value("baton_migrations_total", result=r) for r in ("ok", "failed", "limit")]
    assert counts == [1, 1, 1]


def test_after_no_server_at_first_then_it_is_refused_at_once_unless_one_is_recovering():
    failover, _, _ = make()
    assert final(failover, ErrorCode.NO_DECODE_WORKER).code is ErrorCode.NO_DECODE_WORKER
    failover, clock, _ = make()
    error = BatonError(ErrorCode.NO_DECODE_WORKER)
    waited = 0.0
    while waited < 10:
        try:
            wait_s = failover.after(error, 0, recovering=True)
        except BatonError:
            break
        waited += wait_s
        clock.now += wait_s
    assert 1.5 < waited <= 2.0


def test_after_no_server_later_then_the_patience_starts_with_the_last_failure():
    failover, clock, _ = make()
    clock.now += 100
    failover.after(BatonError(ErrorCode.CONNECTION_RESET_BY_PEER), 3)
    assert failover.after(BatonError(ErrorCode.NO_PREFILL_WORKER), 3) > 0
    clock.now += 2
    error = final(failover, ErrorCode.NO_PREFILL_WORKER, 3)
    assert error.metadata["first_cause"] == "CONNECTION_RESET_BY_PEER"


def test_after_a_failure_when_the_deadline_has_passed_then_603_with_the_cause():
    failover, clock, _ = make(deadline_s=1)
    clock.now += 1
    error = final(failover, ErrorCode.CONNECT_FAILED)
    assert (error.code, error.metadata["first_cause"]) == (ErrorCode.GENERATE_TIMEOUT, "CONNECT_FAILED")


@pytest.mark.parametrize("code", [ErrorCode.EXECUTION_EXCEPTION, ErrorCode.ENGINE_DEAD])
def test_after_every_attempt_broke_an_engine_then_8513(code):
    failover, _, _ = make(max_retries=1)
    failover.after(BatonError(code), 0)
    assert final(failover, code).code is ErrorCode.WORKER_EXECUTION_FAILED
    failover, _, _ = make(max_retries=0)
    assert final(failover, code).code is code


def test_after_a_failure_when_the_budget_is_empty_then_8610_and_free_retries_go_on():
    failover, _, metrics = make(ratio=0)
    assert failover.after(BatonError(ErrorCode.SERVER_DRAINING), 0) == 0
    error = final(failover, ErrorCode.CONNECT_FAILED)
    assert error.code is ErrorCode.RETRY_BUDGET_EXHAUSTED
    assert error.metadata["first_cause"] == "SERVER_DRAINING"
    assert metrics.value("baton_retry_budget_exhausted_total", role="decode") == 1
    assert not failover.may_redirect(BatonError(ErrorCode.DECODE_MALLOC_FAILED))


@given(st.lists(st.tuples(st.sampled_from(CODES), st.booleans()), max_size=60))
def test_after_any_failures_then_it_ends_within_its_limits(history):
    failover, clock, _ = make()
    attempts, emitted = 0, 0
    for code, progressed in history:
        if progressed:
            emitted += 1
            failover.progressed()
        try:
            clock.now += failover.after(BatonError(code), emitted)
        except BatonError:
            return
        if code not in NO_SERVER:
            attempts += 1
        assert attempts <= 3 + 2
