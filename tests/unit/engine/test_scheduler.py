"""Requests computed on one engine: batches, chunks, limits, preemption, ends."""

import pytest

from engine.messages import FinishReason, RunMode
from rpc.errors import BatonError, ErrorCode
from tests.unit.engine.scripted_engine import ScriptedEngine, continuation

PROMPT = list(range(10, 23))


def test_tokens_when_a_request_runs_alone_then_they_are_the_models():
    engine = ScriptedEngine()
    engine.add("a", PROMPT, max_tokens=6)
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 6)
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    assert engine.outputs["a"][0].prefill.cached_tokens == 0
    engine.assert_clean()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 40])
@pytest.mark.parametrize("budget", [4, 5, 16])
def test_tokens_when_the_prompt_is_chunked_then_they_are_the_same(length, budget):
    engine = ScriptedEngine(max_num_batched_tokens=budget, num_blocks=20)
    prompt = [1 + i % 90 for i in range(length)]
    engine.add("a", prompt, max_tokens=5)
    engine.run()
    assert engine.tokens("a") == continuation(prompt, 5)
    assert max(sum(count for _, _, count in plan) for plan in engine.plans) <= budget
    engine.assert_clean()


def test_chunk_when_the_budget_cuts_a_prompt_then_it_ends_with_a_block():
    engine = ScriptedEngine(max_num_batched_tokens=7, block_size=4)
    engine.add("a", list(range(1, 14)))
    engine.step()
    engine.step()
    assert engine.plans == [[("a", 0, 4)], [("a", 4, 4)]]


def test_batch_when_requests_decode_then_their_rows_come_before_prompts_and_take_one_token_each():
    engine = ScriptedEngine(num_blocks=40, max_num_batched_tokens=13)
    engine.add("a", PROMPT)
    engine.step()
    engine.add("b", PROMPT[::-1])
    engine.add("c", [5])
    plan = engine.step()
    assert engine.plans[-1] == [("a", 13, 1), ("b", 0, 12)]
    assert (plan.kind, plan.num_decode, plan.num_tokens) == ("mixed", 1, 13)
    engine.step()
    assert engine.plans[-1] == [("a", 14, 1), ("b", 12, 1), ("c", 0, 1)]
    engine.run()
    for key, prompt in (("a", PROMPT), ("b", PROMPT[::-1]), ("c", [5])):
        assert engine.tokens(key) == continuation(prompt, 8)


def test_chunked_prefill_when_it_is_off_then_prompts_are_computed_whole():
    engine = ScriptedEngine(chunked_prefill=False, max_num_batched_tokens=64, num_blocks=40)
    for index in range(4):
        engine.add(str(index), [index + 1] * 40, max_tokens=3)
    engine.run()
    starts = [start for plan in engine.plans for _, start, count in plan if count > 1]
    assert starts == [0, 0, 0, 0]
    for index in range(4):
        assert engine.tokens(str(index)) == continuation([index + 1] * 40, 3)


def test_chunked_prefill_when_it_is_off_then_a_prompt_of_the_whole_budget_runs_beside_decoding_requests():
    engine = ScriptedEngine(chunked_prefill=False, max_num_batched_tokens=40, num_blocks=60)
    engine.add("a", PROMPT, max_tokens=30)
    engine.step()
    engine.add("b", [9] * 40, max_tokens=2)
    for _ in range(3):
        engine.step()
    assert engine.tokens("b") == continuation([9] * 40, 2)


def test_seats_when_more_requests_come_than_there_are_then_the_rest_wait():
    engine = ScriptedEngine(max_num_seqs=2, num_blocks=60)
    for index in range(5):
        engine.add(str(index), PROMPT[index:], max_tokens=4)
    engine.step()
    assert next(iter(engine.scheduler.batcher.waiting)).key in "234"
    engine.run()
    assert all(engine.tokens(str(index)) == continuation(PROMPT[index:], 4) for index in range(5))
    assert max(map(len, engine.plans)) == 2


def test_order_when_priorities_differ_then_lower_numbers_run_first_and_arrival_breaks_ties():
    engine = ScriptedEngine(max_num_seqs=1)
    for key, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        engine.add(key, [1, 2, 3], max_tokens=2, priority=priority)
        engine.wait(0.001)
    engine.run()
    started = [key for plan in engine.plans for key, start, _ in plan if start == 0]
    assert started == ["urgent", "first", "second", "late"]


# -- ends -------------------------------------------------------------------------------------------------------


def test_end_when_max_tokens_is_reached_then_it_is_exact_and_counts_earlier_tokens():
    engine = ScriptedEngine()
    tokens = continuation(PROMPT, 8)
    engine.add("a", PROMPT, max_tokens=8, outputs=tokens[:5])
    engine.run()
    assert engine.tokens("a") == tokens[5:]
    assert [token.index for output in engine.outputs["a"] for token in output.tokens] == [5, 6, 7]
    assert engine.last("a").finish_reason is FinishReason.LENGTH


def test_end_when_the_model_length_is_reached_then_it_is_exact():
    engine = ScriptedEngine(max_model_len=20, num_blocks=5)
    engine.add("a", PROMPT, max_tokens=100)
    engine.run()
    assert len(engine.tokens("a")) == 7
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    engine.assert_clean()


@pytest.mark.parametrize(
    ("sampling", "ends_at"),
    [
        ({}, 2),
        ({"ignore_eos": True}, 7),
        ({"ignore_eos": True, "stop_token_ids": (0,)}, 2),
        ({"stop_token_ids": (95,)}, 2),
        ({"ignore_eos": True, "stop_token_ids": (95,)}, 4),
        ({"min_tokens": 2}, 2),
        ({"min_tokens": 3}, 5),
    ],
)
def test_end_when_a_stop_token_comes_then_it_is_the_last_of_the_stream(sampling, ends_at):
    engine = ScriptedEngine()
    engine.scripted = {("a", 2): 0, ("a", 4): 95, ("a", 5): 0}
    engine.add("a", PROMPT, max_tokens=8, **sampling)
    engine.run()
    tokens = engine.tokens("a")
    assert len(tokens) == ends_at + 1
    reason = engine.last("a").finish_reason
    if ends_at < 7:
        assert reason is FinishReason.STOP
        assert engine.last("a").stop_token_id == tokens[-1]
    else:
        assert reason is FinishReason.LENGTH
        assert engine.last("a").stop_token_id is None
    engine.assert_clean()


def test_end_when_the_first_token_is_the_last_then_nothing_is_decoded():
    engine = ScriptedEngine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    assert len(engine.outputs["a"]) == 1
    assert engine.last("a").prefill is not None
    assert [len(plan) for plan in engine.plans] == [1, 0]


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"prompt": []}, ErrorCode.INVALID_PARAMS),
        ({"prompt": [1, 97]}, ErrorCode.OUT_OF_VOCAB_RANGE),
        ({"prompt": [-1]}, ErrorCode.OUT_OF_VOCAB_RANGE),
        ({"prompt": [1], "outputs": [97]}, ErrorCode.OUT_OF_VOCAB_RANGE),
        ({"prompt": [1] * 64}, ErrorCode.LONG_PROMPT_ERROR),
        ({"prompt": [1] * 60, "outputs": [1] * 4}, ErrorCode.LONG_PROMPT_ERROR),
        ({"prompt": [1], "outputs": [1] * 8, "max_tokens": 8}, ErrorCode.INVALID_PARAMS),
        ({"prompt": [1] * 45}, ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN),
    ],
)
def test_request_when_it_can_never_run_then_it_is_refused_with_its_code(arguments, code):
    engine = ScriptedEngine(num_blocks=11)
    engine.add("a", **arguments)
    engine.collect()
    assert engine.error("a") is code
    engine.add("b", PROMPT)
    engine.run()
    assert engine.tokens("b") == continuation(PROMPT, 8)
    engine.assert_clean()


def test_prompt_when_it_just_fits_an_empty_pool_then_it_runs():
    engine = ScriptedEngine(num_blocks=11)
    engine.add("a", [1] * 43, max_tokens=2)
    engine.run()
    assert engine.tokens("a") == continuation([1] * 43, 2)
    engine.add("b", [2] * 44, max_tokens=1)
    engine.run()
    assert engine.tokens("b") == continuation([2] * 44, 1)


def test_local_mode_when_the_server_does_not_compute_prompts_then_it_is_refused():
    engine = ScriptedEngine(allow_local_prefill=False)
    engine.add("a", PROMPT)
    engine.collect()
    assert engine.error("a") is ErrorCode.INVALID_ROUTE_REQUEST


def test_growth_when_a_request_outgrows_the_empty_pool_then_it_ends_with_607_and_what_it_had():
    engine = ScriptedEngine(num_blocks=4)
    engine.add("a", PROMPT, max_tokens=40)
    engine.run()
    assert engine.error("a") is ErrorCode.EXCEEDS_KV_CACHE_MAX_LEN
    assert engine.tokens("a") == continuation(PROMPT, 4)
    engine.assert_clean()


def test_duplicate_when_the_key_is_open_then_the_first_goes_on_unharmed():
    engine = ScriptedEngine()
    engine.add("a", PROMPT)
    engine.step()
    engine.add("a", [1, 2, 3])
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 8)


# -- preemption -------------------------------------------------------------------------------------------------


def test_preemption_when_blocks_run_out_then_the_latest_is_computed_again_and_no_token_comes_twice():
    engine = ScriptedEngine(num_blocks=9, prefix_caching=False)
    prompts = {"a": PROMPT, "b": PROMPT[::-1]}
    for key, prompt in prompts.items():
        engine.add(key, prompt, max_tokens=20)
        engine.wait(0.001)
    engine.run()
    for key, prompt in prompts.items():
        assert engine.tokens(key) == continuation(prompt, 20)
    assert engine.last("a").preemptions == 0
    assert engine.last("b").preemptions >= 1
    assert engine.counts["preemptions_total:blocks"] == engine.last("b").preemptions
    engine.assert_clean()


def test_preemption_when_priorities_differ_then_the_lowest_gives_way_whoever_came_first():
    engine = ScriptedEngine(num_blocks=9, prefix_caching=False)
    engine.add("low", PROMPT, max_tokens=20, priority=3)
    engine.wait(0.001)
    engine.add("high", PROMPT[::-1], max_tokens=20)
    engine.run()
    assert engine.last("high").preemptions == 0
    assert engine.last("low").preemptions >= 1
    assert engine.tokens("low") == continuation(PROMPT, 20)


def test_preemption_when_a_prompt_is_promised_to_a_decode_server_then_it_is_spared():
    engine = ScriptedEngine(num_blocks=9, prefix_caching=False, max_num_batched_tokens=6)
    engine.add("a", [1, 2, 3], max_tokens=25)
    engine.step()
    engine.wait(0.001)
    engine.add("p", [7] * 28, RunMode.PREFILL)
    for _ in range(12):
        engine.step()
    # The decoding request ran out of blocks beside the later prompt, and gave way itself.
    assert engine.tokens("p") == continuation([7] * 28, 1)
    assert engine.scheduler.open["a"].preemptions == 1
    engine.lease_ended("p")
    engine.run()
    assert engine.tokens("a") == continuation([1, 2, 3], 25)
    engine.assert_clean()


def test_preemption_when_the_prefix_cache_kept_its_blocks_then_they_are_not_computed_again():
    engine = ScriptedEngine(num_blocks=10)
    engine.add("a", PROMPT, max_tokens=20)
    engine.wait(0.001)
    engine.add("b", PROMPT[::-1], max_tokens=20)
    engine.run()
    computed = sum(count for plan in engine.plans for key, _, count in plan if key == "b")
    assert engine.last("b").preemptions >= 1
    assert engine.tokens("b") == continuation(PROMPT[::-1], 20)
    assert computed < 2 * 32
    # What a request is looked up for, and how often it is admitted, does not depend on preemptions.
    assert engine.counts["prefix_cache_queried_tokens_total"] == 26
    assert [event.name for event in engine.last("b").events] == ["admitted", "computed"]


# -- prefix cache -----------------------------------------------------------------------------------------------


def test_prefix_when_the_whole_prompt_is_cached_then_one_token_is_computed_and_the_rest_hit():
    engine = ScriptedEngine(num_blocks=20)
    prompt = list(range(1, 17))
    engine.add("a", prompt, max_tokens=3)
    engine.run()
    engine.plans.clear()
    engine.add("b", prompt, max_tokens=3)
    engine.run()
    assert engine.plans[0] == [("b", 12, 4)]
    assert engine.outputs["b"][0].prefill.cached_tokens == 12
    assert engine.tokens("b") == engine.tokens("a")
    assert engine.counts["prefix_cache_queried_tokens_total"] == 32
    assert engine.counts["prefix_cache_hit_tokens_total"] == 12


@pytest.mark.invariant("RPC-4")
def test_prefix_when_the_consumer_leaves_after_its_last_token_then_it_stays_cached_and_nothing_was_cancelled():
    engine = ScriptedEngine(num_blocks=20)
    prompt = list(range(1, 17))
    engine.add("a", prompt, max_tokens=3)
    engine.run()
    ended = engine.last("a")
    assert (ended.finish_reason, ended.error) == (FinishReason.LENGTH, None)
    engine.abort("a")  # its consumer has its final output, and goes
    assert engine.last("a") is ended
    assert engine.counts.get("aborts_total", 0) == 0
    engine.add("b", prompt, max_tokens=3)
    engine.run()
    assert engine.outputs["b"][0].prefill.cached_tokens == 12
    engine.assert_clean()


def test_prefix_when_the_answer_is_part_of_the_next_prompt_then_generated_blocks_hit():
    engine = ScriptedEngine(num_blocks=20)
    engine.add("a", PROMPT, max_tokens=8)
    engine.run()
    engine.add("b", PROMPT + engine.tokens("a") + [1, 2], max_tokens=2)
    engine.run()
    # 13 + 8 tokens, the last of which was never computed: five full blocks.
    assert engine.outputs["b"][0].prefill.cached_tokens == 20


def test_prefix_when_salts_differ_then_nothing_is_shared():
    engine = ScriptedEngine(num_blocks=20)
    engine.add("a", PROMPT, max_tokens=1, salt="one")
    engine.add("b", PROMPT, max_tokens=1, salt="two")
    engine.run()
    engine.add("c", PROMPT, max_tokens=1, salt="one")
    engine.run()
    cached = {key: engine.outputs[key][0].prefill.cached_tokens for key in "abc"}
    assert cached == {"a": 0, "b": 0, "c": 12}


def test_prefix_when_prompt_logprobs_are_wanted_then_every_position_is_computed():
    engine = ScriptedEngine(num_blocks=20)
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    engine.plans.clear()
    engine.add("b", PROMPT, max_tokens=1, prompt_logprobs=0)
    engine.step()
    assert engine.plans == [[("b", 0, 13)]]
    assert engine.outputs["b"][0].prefill.cached_tokens == 0
    assert engine.outputs["b"][0].prompt_logprobs == []


def test_prefix_when_a_step_fails_then_its_blocks_are_not_cached():
    engine = ScriptedEngine()
    engine.add("a", PROMPT)
    engine.fail_next = BatonError(ErrorCode.EXECUTION_EXCEPTION, "broken")
    engine.step()
    assert engine.error("a") is ErrorCode.EXECUTION_EXCEPTION
    assert engine.ledger() == {"free": 16}
    engine.add("b", PROMPT)
    engine.run()
    assert engine.outputs["b"][0].prefill.cached_tokens == 0
    assert engine.tokens("b") == continuation(PROMPT, 8)


@pytest.mark.parametrize("steps", [0, 1, 2, 4], ids=["whole prompt", "second chunk", "last chunk", "decoding"])
def test_row_when_the_model_gives_it_nothing_usable_then_its_request_alone_fails_and_nothing_of_it_is_cached(steps):
    engine = ScriptedEngine(num_blocks=40, max_num_batched_tokens=5 if steps else 64)
    engine.add("bad", PROMPT, max_tokens=20)
    for _ in range(steps):
        engine.step()
    engine.broken.add("bad")
    engine.add("good", PROMPT[::-1], max_tokens=6)
    computed = engine.plans[-1][0][1] + engine.plans[-1][0][2] if steps else 0
    engine.run()
    assert engine.error("bad") is ErrorCode.EXECUTION_EXCEPTION
    assert engine.last("bad").error.stage == ("generate" if steps == 4 else "compute")
    assert engine.tokens("good") == continuation(PROMPT[::-1], 6)
    engine.assert_clean()
    engine.add("again", PROMPT, max_tokens=6)
    engine.run()
    assert engine.outputs["again"][0].prefill.cached_tokens == min(computed, len(PROMPT) - 1) // 4 * 4
    assert engine.tokens("again") == continuation(PROMPT, 6)


def test_row_when_it_fails_on_a_prefill_server_then_loads_of_its_kv_end_with_the_same_code():
    engine = ScriptedEngine()
    engine.broken.add("a")
    engine.add("a", PROMPT, RunMode.PREFILL)
    engine.run()
    assert engine.error("a") is ErrorCode.EXECUTION_EXCEPTION
    assert engine.transfer.names("a") == ["admit", "fail"]
    assert engine.transfer.errors["a"].code is ErrorCode.EXECUTION_EXCEPTION
    engine.lease_ended("a", "aborted")
    engine.assert_clean()


# -- times ------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("RPC-1")
def test_stages_when_a_request_waits_then_each_has_its_time():
    engine = ScriptedEngine(max_num_batched_tokens=8)
    engine.add("a", PROMPT, max_tokens=3)
    engine.wait(2.0)
    engine.run()
    stages = engine.last("a").stages
    assert list(stages) == ["queue", "match", "compute", "sample", "generate", "release"]
    expected = {"queue": 2.0, "match": 0.0, "compute": 0.95, "sample": 0.05, "generate": 1.0, "release": 0.0}
    assert stages == pytest.approx(expected)
    assert [event.name for event in engine.last("a").events] == ["admitted", "computed"]


def test_deadline_when_it_passes_in_the_queue_or_while_running_then_603():
    engine = ScriptedEngine(max_num_seqs=1, num_blocks=40)
    engine.add("running", PROMPT, max_tokens=30, deadline_in=3.2)
    engine.add("waiting", PROMPT, deadline_in=1.2)
    engine.add("free", [4], max_tokens=2)
    engine.run()
    assert engine.error("running") is ErrorCode.GENERATE_TIMEOUT
    assert engine.error("waiting") is ErrorCode.GENERATE_TIMEOUT
    assert engine.last("waiting").error.stage == "queue"
    assert engine.last("running").error.stage == "generate"
    assert len(engine.tokens("running")) == 7
    assert engine.tokens("free") == continuation([4], 2)
    engine.assert_clean()


def test_queue_when_the_wait_is_too_long_then_8213_but_not_after_a_preemption():
    engine = ScriptedEngine(num_blocks=9, prefix_caching=False, queue_limit_s=3.0, max_num_seqs=2)
    engine.add("a", PROMPT, max_tokens=20)
    engine.wait(0.001)
    engine.add("b", PROMPT[::-1], max_tokens=20)
    engine.wait(0.001)
    engine.add("c", PROMPT, max_tokens=20)
    engine.run()
    assert engine.error("c") is ErrorCode.WAIT_TO_RUN_TIMEOUT
    assert engine.last("b").preemptions >= 1
    assert engine.tokens("b") == continuation(PROMPT[::-1], 20)
    engine.assert_clean()


def test_next_tick_when_a_limit_runs_then_it_is_the_time_until_then():
    engine = ScriptedEngine(queue_limit_s=5.0)
    assert engine.scheduler.next_tick_in() == float("inf")
    engine.add("a", PROMPT, deadline_in=2.0)
    assert engine.scheduler.next_tick_in() == pytest.approx(2.0)


def test_shutdown_when_requests_are_open_then_each_ends_with_draining():
    engine = ScriptedEngine(max_num_seqs=1)
    engine.add("a", PROMPT)
    engine.add("b", PROMPT)
    engine.step()
    engine.scheduler.end_all(BatonError(ErrorCode.SERVER_DRAINING, "bye"))
    engine.collect()
    assert {engine.error("a"), engine.error("b")} == {ErrorCode.SERVER_DRAINING}
    engine.assert_clean()
