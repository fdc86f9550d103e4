"""The hand-over between a prefill and a decode server, on each side: reservation, loads, leases, aborts in every
state."""

import itertools

import pytest

from engine.messages import FinishReason, RunMode
from engine.requests import RequestState
from engine.scheduler.load_policy import AfterFailure, after_failed_load
from rpc.errors import BatonError, ErrorCode
from tests.unit.engine.scripted_engine import ScriptedEngine, continuation, next_token

PROMPT = list(range(10, 23))
RETRYABLE = ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED


def decode_engine(**options):
    return ScriptedEngine(**{"num_blocks": 16, **options})


# -- decode side ------------------------------------------------------------------------------------------------


def test_load_when_it_is_done_then_the_first_token_comes_from_the_prefill_and_decoding_goes_on():
    engine = decode_engine()
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=6)
    assert not engine.step().rows
    (reserved,) = engine.outputs["a"]
    assert (reserved.reserved, reserved.blocks_in_cache) == (True, 0)
    # Four blocks of the prompt arrive, one more is the reserve.
    assert engine.ledger() == {"free": 11, "receiving": 4, "running": 1}
    engine.load_done("a")
    loaded = engine.outputs["a"][1]
    assert loaded.loaded
    assert (loaded.prefill.cached_tokens, loaded.prefill.cuda_graph_status) == (3, "replayed")
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 6)
    assert engine.plans[1] == [("a", 13, 1)]
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    engine.assert_clean()
    assert engine.ledger()["cached"] == 4


def test_load_when_the_prefill_already_ended_the_request_then_nothing_is_decoded():
    engine = decode_engine()
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=1)
    engine.step()
    engine.load_done("a")
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 1)
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    assert not any(engine.plans)
    engine.assert_clean()


def test_load_when_the_own_prefix_cache_holds_blocks_then_they_are_skipped():
    engine = decode_engine(num_blocks=20)
    prompt = list(range(1, 17))
    engine.add("a", prompt, RunMode.DECODE, max_tokens=3)
    engine.step()
    engine.load_done("a")
    engine.run()
    engine.add("b", [*prompt, 50], RunMode.DECODE, max_tokens=3)
    engine.step()
    held = engine.transfer.loads["b"].allocation.groups["full"]
    assert held.receiving == (4, 5)
    assert engine.outputs["b"][0].blocks_in_cache == 4
    engine.load_done("b")
    # A prompt that is cached to its end needs no block at all, but still the prefill's token.
    engine.add("c", prompt, RunMode.DECODE, max_tokens=3)
    engine.step()
    assert engine.transfer.loads["c"].allocation.groups["full"].receiving == (4, 4)
    engine.load_done("c")
    engine.run()
    assert engine.tokens("b") == continuation([*prompt, 50], 3)
    assert engine.tokens("c") == continuation(prompt, 3)
    assert engine.counts["kv_blocks_skipped_total"] == 8
    engine.assert_clean()


def test_load_when_tokens_were_generated_before_then_their_kv_is_loaded_too():
    engine = decode_engine()
    tokens = continuation(PROMPT, 8)
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=8, outputs=tokens[:5])
    engine.step()
    assert engine.transfer.loads["a"].allocation.groups["full"].receiving == (0, 5)
    engine.load_done("a")
    engine.run()
    assert engine.tokens("a") == tokens[5:]
    assert engine.outputs["a"][1].tokens[0].index == 5


def test_reservation_when_blocks_lack_then_602_after_the_attempts_and_the_kv_stays_for_another_server():
    engine = decode_engine(num_blocks=6, reserve_timeout_s=0.1, reserve_interval_s=0.01)
    engine.add("a", PROMPT, RunMode.DECODE)
    engine.step()
    engine.add("b", PROMPT[::-1], RunMode.DECODE)
    for _ in range(20):
        engine.step()
        engine.wait(0.01)
    assert engine.error("b") is ErrorCode.MALLOC_FAILED
    assert engine.last("b").error.stage == "allocate"
    assert engine.transfer.names("b") == ["keep_alive", "forget"]
    assert engine.counts["kv_allocation_failures_total:MALLOC_FAILED"] == 1
    # The time between the attempts is no stage's own.
    assert engine.last("b").stages["allocate"] == 0
    assert engine.counts["stage_retry_wait_seconds:allocate"] == pytest.approx(0.1, abs=0.02)
    assert engine.counts["stage_retries_total:allocate"] == int(engine.last("b").error.metadata["attempts"]) - 1 > 5
    engine.load_done("a")
    engine.run()
    engine.assert_clean()


def test_reservation_when_blocks_come_back_in_time_then_it_succeeds():
    engine = decode_engine(num_blocks=6, reserve_timeout_s=5.0, reserve_interval_s=0.01, reserve_attempts=1000)
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=3)
    engine.step()
    engine.add("b", PROMPT[::-1], RunMode.DECODE, max_tokens=3)
    engine.step()
    assert engine.scheduler.next_tick_in() <= 0.01
    engine.load_done("a")
    engine.run()
    engine.wait(0.02)
    engine.step()
    assert engine.outputs["b"][0].reserved
    engine.load_done("b")
    engine.run()
    assert engine.tokens("b") == continuation(PROMPT[::-1], 3)
    engine.assert_clean()


def test_reservation_when_the_first_in_line_does_not_fit_then_nobody_overtakes_it():
    engine = decode_engine(num_blocks=10, reserve_timeout_s=5.0, reserve_attempts=10_000)
    engine.add("a", [1] * 20, RunMode.DECODE, max_tokens=3)
    engine.step()
    engine.add("big", [2] * 30, RunMode.DECODE, max_tokens=3)
    engine.wait(0.001)
    engine.add("small", [3], RunMode.DECODE, max_tokens=3)
    engine.step()
    assert "small" not in engine.transfer.loads
    engine.load_done("a")
    engine.run()
    engine.wait(0.1)
    engine.step()
    assert {"big", "small"} <= set(engine.transfer.loads)


def test_o2_reservation_when_eight_long_prompts_share_a_pool_of_one_and_a_half_then_each_ends():
    engine = decode_engine(num_blocks=12, reserve_timeout_s=0.2, reserve_interval_s=0.01)
    for index in range(8):
        engine.add(str(index), [index + 1] * 28, RunMode.DECODE, max_tokens=3)
        engine.wait(0.001)
    for _ in range(60):
        engine.step()
        for key in list(engine.transfer.loads):
            engine.load_done(key)
        engine.wait(0.01)
    ended = {key: outputs[-1] for key, outputs in engine.outputs.items()}
    assert len(ended) == 8
    assert all(output.last for output in ended.values())
    codes = {output.error.code for output in ended.values() if output.error is not None}
    assert codes <= {int(ErrorCode.MALLOC_FAILED)}
    assert any(output.error is None for output in ended.values())
    engine.assert_clean()


def test_wait_to_run_when_seats_are_taken_then_a_loaded_request_waits_and_may_time_out():
    engine = decode_engine(num_blocks=40, max_num_seqs=1, queue_limit_s=3.0)
    engine.add("a", PROMPT, max_tokens=30)
    engine.add("b", PROMPT[::-1], RunMode.DECODE, max_tokens=3)
    engine.step()
    engine.load_done("b")
    assert engine.scheduler.open["b"].state is RequestState.READY
    engine.run()
    assert engine.error("b") is ErrorCode.WAIT_TO_RUN_TIMEOUT
    assert engine.last("b").error.stage == "wait_to_run"
    assert engine.tokens("a") == continuation(PROMPT, 30)
    engine.assert_clean()


def test_preemption_when_a_loaded_request_loses_its_blocks_then_it_is_computed_here():
    engine = decode_engine(num_blocks=10, prefix_caching=False)
    for key, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        engine.add(key, prompt, RunMode.DECODE, max_tokens=20)
        engine.wait(0.001)
    engine.step()
    for key in "ab":
        engine.load_done(key)
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 20)
    assert engine.tokens("b") == continuation(PROMPT[::-1], 20)
    assert engine.last("b").preemptions >= 1
    # The status is the prefill server's, and the request was counted there.
    assert "prefill_cuda_graph_requests_total" not in engine.counts
    engine.assert_clean()


@pytest.mark.invariant("RPC-1")
def test_stages_when_a_request_is_loaded_then_each_has_its_time():
    engine = decode_engine()
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=3)
    engine.wait(0.05)
    engine.step()
    engine.wait(2.0)
    engine.load_done("a")
    engine.wait(0.25)
    engine.run()
    assert engine.last("a").stages == pytest.approx(
        {"prepare": 0.0, "allocate": 0.05, "load": 2.0, "wait_to_run": 0.25, "generate": 1.0, "release": 0.0}
    )
    assert [event.name for event in engine.last("a").events] == ["load_complete", "first_step"]


@pytest.mark.invariant("RPC-1")
@pytest.mark.parametrize("retries", [0, 1, 4])
def test_stages_when_a_reservation_is_tried_again_then_the_waits_stand_apart_and_each_bucket_is_exact(retries):
    engine = decode_engine(num_blocks=6, reserve_timeout_s=60.0, reserve_interval_s=1.0)
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=1)
    engine.step()
    if not retries:
        engine.load_done("a")
    engine.add("b", PROMPT[::-1], RunMode.DECODE, max_tokens=3)
    engine.wait(0.05)
    engine.step()
    for number in range(retries):
        assert "b" not in engine.outputs
        if number == retries - 1:
            engine.load_done("a")  # which ends it, and gives its blocks back
        engine.wait(1.5)
        engine.step()
    assert engine.outputs["b"][0].reserved
    engine.wait(2.0)
    engine.load_done("b")
    engine.wait(0.25)
    engine.run()
    stages = {"prepare": 0.0, "allocate": 0.05, "load": 2.0, "wait_to_run": 0.25, "generate": 1.0, "release": 0.0}
    assert engine.last("b").stages == pytest.approx(stages)
    assert engine.counts.get("stage_retries_total:allocate", 0) == retries
    assert engine.counts.get("stage_retry_wait_seconds:allocate", 0) == pytest.approx(1.5 * retries)
    engine.assert_clean()


# -- failed loads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "code", "loads", "retriable", "recompute", "expected"),
    [
        ("retry", RETRYABLE, 1, True, True, AfterFailure.RELOAD),
        ("retry", RETRYABLE, 2, True, True, AfterFailure.RECOMPUTE),
        ("retry", RETRYABLE, 1, False, True, AfterFailure.RECOMPUTE),
        ("retry", RETRYABLE, 1, False, False, AfterFailure.FAIL),
        ("retry", ErrorCode.LONG_PROMPT_ERROR, 1, False, True, AfterFailure.FAIL),
        ("retry", ErrorCode.CANCELLED, 1, False, True, AfterFailure.FAIL),
        ("recompute", RETRYABLE, 1, True, True, AfterFailure.RECOMPUTE),
        ("recompute", RETRYABLE, 1, True, False, AfterFailure.FAIL),
        ("fail", RETRYABLE, 1, True, True, AfterFailure.FAIL),
    ],
)
def test_policy_when_a_load_fails_then_it_decides(policy, code, loads, retriable, recompute, expected):
    error = BatonError(code, "x")
    assert after_failed_load(policy, error, loads=loads, retriable_here=retriable, may_recompute=recompute) is expected


@pytest.mark.invariant("RPC-17")
def test_failed_load_when_the_peer_still_holds_the_kv_then_it_is_reloaded_once_into_new_blocks():
    engine = decode_engine(num_blocks=6)
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=4)
    engine.step()
    before = engine.scheduler.open["a"].allocation.generation
    engine.load_failed("a", ErrorCode.KV_CHECKSUM_MISMATCH, retriable_here=True)
    assert engine.transfer.names("a") == ["load", "reload"]
    assert engine.scheduler.open["a"].allocation.generation > before
    engine.load_done("a")
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 4)
    assert engine.last("a").error is None
    engine.assert_clean()


def test_failed_load_when_the_reload_fails_too_then_the_prompt_is_computed_here():
    engine = decode_engine()
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=4)
    engine.step()
    engine.load_failed("a", ErrorCode.KV_CHECKSUM_MISMATCH, retriable_here=True)
    engine.load_failed("a", ErrorCode.KV_CHECKSUM_MISMATCH, retriable_here=True)
    assert engine.transfer.names("a") == ["load", "reload", "cancel_load"]
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 4)
    assert [output.loaded for output in engine.outputs["a"]].count(True) == 0
    assert engine.outputs["a"][1].prefill.cached_tokens == 0
    stages = engine.last("a").stages
    assert {"load", "queue", "compute", "sample", "generate"} <= set(stages)
    engine.assert_clean()


def test_failed_load_when_nothing_else_is_allowed_then_8212_names_the_cause():
    engine = decode_engine(allow_local_prefill=False, load_failure_policy="recompute")
    engine.add("a", PROMPT, RunMode.DECODE)
    engine.step()
    engine.load_failed("a", ErrorCode.CACHE_STORE_STORE_FAILED, retriable_here=True)
    assert engine.error("a") is ErrorCode.LOAD_KV_CACHE_FAILED
    metadata = engine.last("a").error.metadata
    assert (metadata["cause_code"], metadata["cause"]) == ("8309", "CACHE_STORE_STORE_FAILED")
    assert engine.last("a").error.stage == "load"
    assert engine.transfer.names("a")[-1] == "cancel_load"
    engine.assert_clean()


def test_p1_failed_load_when_the_prefill_refused_the_prompt_then_it_is_not_computed_here():
    engine = decode_engine()
    engine.add("a", PROMPT, RunMode.DECODE)
    engine.step()
    engine.load_failed("a", ErrorCode.LONG_PROMPT_ERROR)
    assert engine.error("a") is ErrorCode.LOAD_KV_CACHE_FAILED
    assert engine.tokens("a") == []
    engine.assert_clean()


def test_load_when_the_peers_result_is_unusable_then_it_counts_as_failed():
    engine = decode_engine(load_failure_policy="fail")
    engine.add("a", PROMPT, RunMode.DECODE)
    engine.step()
    engine.load_done("a", BatonError(ErrorCode.OUT_OF_VOCAB_RANGE, "token 99999"))
    assert engine.error("a") is ErrorCode.LOAD_KV_CACHE_FAILED
    assert engine.last("a").error.metadata["cause"] == "OUT_OF_VOCAB_RANGE"
    assert engine.tokens("a") == []
    engine.assert_clean()


# -- prefill side -----------------------------------------------------------------------------------------------


def test_prefill_when_it_is_computed_then_its_blocks_stay_until_the_lease_ends():
    engine = ScriptedEngine()
    engine.add("p", PROMPT, RunMode.PREFILL, max_tokens=5)
    engine.run()
    output = engine.last("p")
    assert engine.tokens("p") == [next_token(PROMPT)]
    assert output.finish_reason is None
    assert output.error is None
    assert output.prefill.kv_generation == engine.transfer.leases["p"]
    assert list(output.stages) == ["queue", "match", "compute", "sample"]
    assert engine.ledger() == {"free": 12, "staged": 4}
    assert engine.transfer.names("p") == ["admit", "computed"]
    engine.lease_ended("p")
    assert engine.staged_ends == [("p", "released")]
    assert engine.ledger() == {"free": 13, "cached": 3}
    engine.assert_clean()


def test_prefill_when_its_token_ends_the_request_then_the_answer_says_so():
    engine = ScriptedEngine()
    engine.scripted = {("p", 0): 0}
    engine.add("p", PROMPT, RunMode.PREFILL, max_tokens=5)
    engine.add("q", PROMPT, RunMode.PREFILL, max_tokens=1)
    engine.run()
    assert (engine.last("p").finish_reason, engine.last("p").stop_token_id) == (FinishReason.STOP, 0)
    assert engine.transfer.answers["p"].stop_token_id == 0
    assert engine.last("q").finish_reason is FinishReason.LENGTH
    assert engine.transfer.answers["q"].finish_reason is FinishReason.LENGTH


def test_prefill_when_the_prefix_is_cached_then_only_the_rest_is_computed_and_hits_are_staged_too():
    engine = ScriptedEngine(num_blocks=20)
    engine.add("p", PROMPT, RunMode.PREFILL)
    engine.run()
    engine.add("q", [*PROMPT, 1, 2], RunMode.PREFILL)
    engine.plans.clear()
    engine.run()
    assert engine.plans[0] == [("q", 12, 3)]
    assert engine.ledger() == {"free": 15, "staged": 5}
    engine.lease_ended("p")
    assert engine.ledger() == {"free": 16, "staged": 4}
    engine.lease_ended("q")
    engine.assert_clean()


def test_prefill_when_the_reader_gave_up_before_the_end_then_the_answer_still_comes_and_nothing_is_kept():
    engine = ScriptedEngine(max_num_batched_tokens=8)
    engine.add("p", PROMPT, RunMode.PREFILL)
    engine.step()
    engine.lease_ended("p", "aborted", BatonError(ErrorCode.KV_LEASE_EXPIRED, "gave up"))
    engine.run()
    assert engine.tokens("p") == [next_token(PROMPT)]
    assert engine.staged_ends == [("p", "aborted")]
    engine.assert_clean()


def test_prefill_when_its_key_was_tombstoned_then_it_stops_at_once():
    engine = ScriptedEngine(max_num_batched_tokens=8)
    engine.add("p", PROMPT, RunMode.PREFILL)
    engine.step()
    engine.lease_ended("p", "aborted", BatonError(ErrorCode.REQUEST_TOMBSTONED, "aborted before"))
    assert engine.error("p") is ErrorCode.REQUEST_TOMBSTONED
    assert not engine.step().rows
    engine.assert_clean()


def test_prefill_when_the_step_fails_then_readers_are_told_and_blocks_wait_for_the_lease():
    engine = ScriptedEngine()
    engine.add("p", PROMPT, RunMode.PREFILL)
    engine.fail_next = BatonError(ErrorCode.EXECUTION_EXCEPTION, "broken")
    engine.step()
    assert engine.error("p") is ErrorCode.EXECUTION_EXCEPTION
    assert engine.transfer.errors["p"].code is ErrorCode.EXECUTION_EXCEPTION
    assert engine.ledger() == {"free": 12, "staged": 4}
    engine.lease_ended("p", "aborted")
    assert engine.ledger() == {"free": 16}
    engine.assert_clean()


def test_prefill_when_it_is_refused_then_a_load_that_waits_for_it_is_told():
    engine = ScriptedEngine()
    engine.add("p", [1] * 64, RunMode.PREFILL)
    engine.collect()
    assert engine.error("p") is ErrorCode.LONG_PROMPT_ERROR
    assert engine.transfer.errors["p"].code is ErrorCode.LONG_PROMPT_ERROR


# -- aborts -----------------------------------------------------------------------------------------------------


def bring_to(engine, state):
    """Request "x" in that state; returns what the test does to let its blocks go."""
    if state == "waiting":
        engine.add("blocker", PROMPT, max_tokens=30)
        engine.step()
        engine.add("x", PROMPT)
    elif state == "waiting prefill":
        engine.add("blocker", PROMPT, max_tokens=30)
        engine.step()
        engine.add("x", PROMPT, RunMode.PREFILL)
    elif state == "reserving":
        engine.add("blocker", [1] * 50, max_tokens=3)
        engine.step()
        engine.add("x", [2] * 50, RunMode.DECODE)
        engine.step()
    elif state == "loading":
        engine.add("x", PROMPT, RunMode.DECODE)
        engine.step()
        return lambda: engine.load_failed("x", ErrorCode.CANCELLED)
    elif state == "ready":
        engine.add("blocker", PROMPT, max_tokens=30)
        engine.add("x", PROMPT, RunMode.DECODE)
        engine.step()
        engine.load_done("x")
    elif state == "prefilling":
        engine.add("x", [3] * 30)
        engine.step()
    elif state == "decoding":
        engine.add("x", PROMPT)
        engine.step()
        engine.step()
    elif state == "computing prefill":
        engine.add("x", [3] * 30, RunMode.PREFILL)
        engine.step()
        return lambda: engine.lease_ended("x", "aborted")
    elif state == "preempted":
        engine.add("blocker", PROMPT, max_tokens=40)
        engine.wait(0.001)
        engine.add("x", PROMPT[::-1], max_tokens=40)
        while not (engine.step() and engine.scheduler.open["x"].preemptions):
            pass
    else:
        raise AssertionError(state)
    return lambda: None


STATES = {
    "waiting": {"max_num_seqs": 1},
    "waiting prefill": {"max_num_seqs": 1},
    "reserving": {"reserve_timeout_s": 60.0, "reserve_attempts": 10_000},
    "loading": {},
    "ready": {"max_num_seqs": 1},
    "prefilling": {},
    "decoding": {},
    "computing prefill": {},
    "preempted": {"num_blocks": 16},
}


@pytest.mark.parametrize("how", ["abort", "deadline"])
@pytest.mark.parametrize("state", STATES)
def test_k11_abort_when_the_request_is_in_any_state_then_it_ends_once_and_all_blocks_come_back(state, how):
    engine = ScriptedEngine(**{"num_blocks": 20, **STATES[state]})
    let_go = bring_to(engine, state)
    if how == "abort":
        engine.abort("x")
        engine.abort("x")
        expected = ErrorCode.CANCELLED
    else:
        engine.scheduler.open["x"].deadline_s = engine.now
        engine.scheduler.deadlines.add(engine.scheduler.open["x"])
        engine.scheduler.tick()
        engine.collect()
        expected = ErrorCode.GENERATE_TIMEOUT
    assert engine.error("x") is expected
    assert engine.last("x").error.stage
    assert sum(output.last for output in engine.outputs["x"]) == 1
    let_go()
    engine.run()
    if "blocker" in engine.outputs:
        assert engine.last("blocker").error is None
    engine.assert_clean()


@pytest.mark.invariant("RPC-17")
def test_abort_when_a_load_still_writes_then_its_blocks_are_quarantined_until_it_is_quiet():
    engine = decode_engine(num_blocks=6)
    engine.add("a", PROMPT, RunMode.DECODE)
    engine.step()
    engine.abort("a")
    assert engine.ledger() == {"free": 2, "quarantined": 4}
    assert engine.scheduler.oldest_hold_seconds().keys() == {"quarantined"}
    engine.add("b", PROMPT[::-1], max_tokens=2)
    assert not engine.step().rows
    engine.load_failed("a", ErrorCode.CANCELLED)
    engine.run()
    assert engine.tokens("b") == continuation(PROMPT[::-1], 2)
    engine.assert_clean()


def test_abort_when_the_load_completed_meanwhile_then_the_blocks_are_freed_all_the_same():
    engine = decode_engine()
    engine.add("a", PROMPT, RunMode.DECODE)
    engine.step()
    engine.abort("a")
    engine.load_done("a")
    assert engine.tokens("a") == []
    engine.assert_clean()


def test_abort_when_the_answer_was_given_then_the_staged_kv_ends():
    engine = ScriptedEngine()
    engine.add("p", PROMPT, RunMode.PREFILL)
    engine.run()
    engine.abort("p")
    assert engine.transfer.names("p")[-1] == "fail"
    assert engine.transfer.errors["p"].code is ErrorCode.REQUEST_TOMBSTONED
    assert engine.ledger() == {"free": 12, "staged": 4}
    engine.lease_ended("p", "aborted")
    assert engine.staged_ends == [("p", "aborted")]
    engine.assert_clean()


def test_abort_when_the_key_is_unknown_then_a_tombstone_is_left():
    engine = ScriptedEngine()
    engine.abort("nobody")
    assert engine.transfer.names("nobody") == ["tombstone"]
    assert engine.outputs == {}


def test_reload_when_the_request_is_gone_then_the_peer_is_told_that_nobody_wants_it():
    engine = decode_engine()
    engine.add("a", PROMPT, RunMode.DECODE)
    engine.step()
    engine.abort("a")
    engine.load_failed("a", RETRYABLE, retriable_here=True)
    assert engine.transfer.names("a") == ["load", "cancel_load", "cancel_load"]
    engine.assert_clean()


@pytest.mark.parametrize("order", list(itertools.permutations(["compute", "abort", "release"])))
@pytest.mark.parametrize("doubled", [None, "abort", "release"])
def test_k3_end_when_finish_abort_and_release_come_in_any_order_then_once_and_clean(order, doubled):
    engine = ScriptedEngine(max_num_batched_tokens=8)
    engine.add("p", PROMPT, RunMode.PREFILL)
    engine.step()
    generation = engine.transfer.leases["p"]
    for event in order:
        for _ in range(2 if event == doubled else 1):
            if event == "compute":
                engine.run()
            elif event == "abort":
                engine.abort("p")
            else:
                engine.transfer.leases["p"] = generation
                engine.lease_ended("p", "released")
    assert sum(output.last for output in engine.outputs["p"]) == 1
    assert len(engine.staged_ends) == (1 if order.index("compute") < order.index("abort") else 0)
    engine.assert_clean()


def test_lease_when_it_is_of_an_earlier_generation_then_nothing_happens():
    engine = ScriptedEngine()
    engine.add("p", PROMPT, RunMode.PREFILL)
    engine.run()
    engine.scheduler.lease_ended("p", 999, "released", "", None, 0, 0, [])
    assert engine.ledger() == {"free": 12, "staged": 4}
