"""The engine with a real model: the same tokens whatever shares the batch, the cache, the memory or the machine."""

import time

import msgspec
import pytest
import torch

from engine import transfer
from engine.core import EngineUnusable
from engine.graph_settings import PrefillGraphSettings
from engine.messages import EngineEnvelope, FinishReason, FrontMessage, RunMode
from engine.runner.batch import RowResult, StepResult
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import until
from tests.unit.engine.real_engine import RealEngine, pair, run_until, serve

PROMPT = [5 + (i * 37) % 370 for i in range(45)]
OTHERS = [[7 + (i * 11 + j) % 360 for i in range(length)] for j, length in enumerate((1, 7, 8, 9, 30))]
SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 11, "top_p": 0.9},
    {"temperature": 1.2, "seed": 2**63 + 5, "top_k": 20, "repetition_penalty": 1.2},
    {"logprobs": 3, "presence_penalty": 1.0},
    {"temperature": 0.7, "seed": 3, "min_p": 0.05, "frequency_penalty": 0.5},
]


@pytest.fixture(autouse=True)
def _no_faults_left():
    yield
    faults.disarm()


def alone(prompt, **sampling):
    """The tokens of a request that has a fresh engine for itself."""
    with RealEngine() as engine:
        engine.add("a", prompt, **sampling)
        engine.run()
        return engine.tokens("a")


@pytest.fixture(scope="module")
def reference():
    return alone(PROMPT, max_tokens=16)


def test_batch_when_requests_of_all_kinds_share_it_then_each_has_the_tokens_it_has_alone():
    prompts = [PROMPT, *OTHERS]
    requests = {f"r{i}": (prompts[i % len(prompts)], SAMPLINGS[i % len(SAMPLINGS)]) for i in range(12)}
    expected = {key: alone(prompt, max_tokens=10, **sampling) for key, (prompt, sampling) in requests.items()}
    with RealEngine(num_kv_blocks=120) as engine:
        for key, (prompt, sampling) in requests.items():
            engine.add(key, prompt, max_tokens=10, **sampling)
            engine.step()
        engine.run()
        assert {key: engine.tokens(key) for key in requests} == expected
        assert engine.clean()
        with_logprobs = [token for output in engine.outputs["r3"] for token in output.tokens]
        assert all(token.logprob is not None and len(token.top_logprobs) == 3 for token in with_logprobs)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 13}, {"block_size": 5}])
def test_chunks_when_the_prompt_is_split_then_the_tokens_are_the_same(options, reference):
    with RealEngine(**options) as engine:
        engine.add("a", PROMPT, max_tokens=16)
        engine.run()
        assert engine.tokens("a") == reference


def test_preemption_when_memory_is_short_then_the_tokens_are_the_same(reference):
    expected = {"a": reference, "b": alone(PROMPT[::-1], max_tokens=40), "c": alone(OTHERS[4], max_tokens=40)}
    with RealEngine(num_kv_blocks=17, enable_prefix_caching=False) as engine:
        engine.add("a", PROMPT, max_tokens=16)
        engine.add("b", PROMPT[::-1], max_tokens=40)
        engine.add("c", OTHERS[4], max_tokens=40)
        engine.run()
        assert {key: engine.tokens(key) for key in expected} == expected
        assert sum(engine.last(key).preemptions for key in expected) >= 1
        assert engine.ledger() == {"free": 17}


def test_prefix_when_it_hits_then_the_tokens_are_the_same(reference):
    with RealEngine() as engine:
        for key, cached in (("a", 0), ("b", 40), ("c", 40)):
            engine.add(key, PROMPT, max_tokens=16)
            engine.run()
            assert engine.tokens(key) == reference
            assert engine.cached_tokens(key) == cached
        engine.add("d", PROMPT + reference, max_tokens=4)
        engine.run()
        assert engine.tokens("d") == alone(PROMPT + reference, max_tokens=4)
        assert engine.cached_tokens("d") == 56
        engine.core.handle(FrontMessage(flush_cache=True))
        engine.step()
        assert engine.kv_events[-1].cleared
        assert engine.ledger() == {"free": 64}
        assert "baton_engine_step_seconds" in {item.name for item in engine.observations}
        assert (
            engine.counted("baton_prefix_cache_hit_tokens_total", model_name=engine.config.model_name) == 40 + 40 + 56
        )
        assert engine.counted("baton_prefix_cache_evicted_blocks_total", reason="flush") == 8
        assert engine.counted("baton_prefix_cache_evicted_blocks_total", reason="capacity") == 0
        for i in range(12):  # prompts of more blocks than there are
            engine.add(f"r{i}", [i + 1] * 60, max_tokens=1)
        engine.run()
        engine.collect()
        evicted = engine.counted("baton_prefix_cache_evicted_blocks_total", reason="capacity")
        assert evicted == 12 * 7 - engine.ledger()["cached"] > 0


def test_fail_over_when_tokens_were_generated_before_then_the_rest_follows(reference):
    with RealEngine() as engine:
        for count in (1, 3, 11, 15):
            engine.add(f"r{count}", PROMPT, outputs=reference[:count], max_tokens=16)
        engine.run()
        for count in (1, 3, 11, 15):
            assert engine.tokens(f"r{count}") == reference[count:]


def test_fail_over_when_the_request_is_sampled_then_the_draws_go_on():
    sampling = {"temperature": 1.0, "seed": 77, "frequency_penalty": 0.3, "max_tokens": 16}
    expected = alone(PROMPT, **sampling)
    with RealEngine() as engine:
        engine.add("a", PROMPT, outputs=expected[:6], **sampling)
        engine.run()
        assert engine.tokens("a") == expected[6:]


def test_stop_when_the_token_comes_then_it_ends_the_stream(reference):
    stop = reference[5]
    end = reference.index(stop)
    with RealEngine() as engine:
        engine.add("a", PROMPT, max_tokens=16, stop_token_ids=(stop,))
        engine.run()
        assert engine.tokens("a") == reference[: end + 1]
        assert engine.last("a").finish_reason is FinishReason.STOP


# -- disaggregated ----------------------------------------------------------------------------------------------


def test_handover_when_prefixes_hit_nowhere_on_p_on_d_and_on_both_then_the_tokens_are_the_same(reference):
    with pair() as (p, d):
        assert serve(p, d, "none#0.00000000", PROMPT, max_tokens=16) == reference
        d.core.handle(FrontMessage(flush_cache=True))
        assert serve(p, d, "p#0.00000000", PROMPT, max_tokens=16) == reference
        assert d.outputs["p#0.00000000"][0].blocks_in_cache == 0
        assert (p.cached_tokens("p#0.00000000"), d.cached_tokens("p#0.00000000")) == (40, 40)
        p.core.handle(FrontMessage(flush_cache=True))
        assert serve(p, d, "d#0.00000000", PROMPT, max_tokens=16) == reference
        assert d.outputs["d#0.00000000"][0].blocks_in_cache == 5
        assert (p.cached_tokens("d#0.00000000"), d.cached_tokens("d#0.00000000")) == (0, 0)
        assert serve(p, d, "both#0.00000000", PROMPT, max_tokens=16) == reference
        assert d.outputs["both#0.00000000"][0].blocks_in_cache == 5
        assert p.cached_tokens("both#0.00000000") == 40
        assert p.clean()
        assert d.clean()
        assert [end.outcome for end in p.staged_ends] == ["released"] * 4


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 45])
def test_handover_when_the_prompt_has_any_length_then_the_tokens_are_the_same(length):
    prompt = PROMPT[:length]
    expected = alone(prompt, max_tokens=6)
    with pair(prefill={"max_num_batched_tokens": 16}) as (p, d):
        assert serve(p, d, "a#0.00000000", prompt, max_tokens=6) == expected
        # Everything that is whole is cached on D now: a prompt of whole blocks loads nothing.
        assert serve(p, d, "b#0.00000000", prompt, max_tokens=6) == expected
        assert d.outputs["b#0.00000000"][0].blocks_in_cache == length // 8


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_handover_when_the_request_is_sampled_then_the_tokens_are_the_same(sampling):
    expected = alone(PROMPT, max_tokens=12, **sampling)
    with pair() as (p, d):
        assert serve(p, d, "a#0.00000000", PROMPT, max_tokens=12, **sampling) == expected


def test_handover_when_a_half_streamed_answer_moves_then_the_rest_is_the_same(reference):
    with pair() as (p, d):
        rest = serve(p, d, "a#1.00000000", PROMPT, outputs=reference[:7], max_tokens=16)
        assert rest == reference[7:]


def test_handover_when_prompt_logprobs_are_wanted_then_both_servers_give_the_prefills():
    with RealEngine() as engine:
        engine.add("a", PROMPT, max_tokens=2, prompt_logprobs=2, logprobs=1)
        engine.run()
        expected = engine.outputs["a"][0].prompt_logprobs
    with pair(prefill={"max_num_batched_tokens": 16}) as (p, d):
        # The second time the prefix is cached, which must not cost positions.
        for key in ("a#0.00000000", "b#0.00000000"):
            serve(p, d, key, PROMPT, max_tokens=2, prompt_logprobs=2, logprobs=1)
            for engine in (p, d):
                found = next(o.prompt_logprobs for o in engine.outputs[key] if o.prompt_logprobs is not None)
                assert [entry.position for entry in found] == list(range(1, len(PROMPT)))
                assert [entry.logprob.token_id for entry in found] == PROMPT[1:]
                for mine, theirs in zip(found, expected, strict=True):
                    assert mine.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)
                    assert len(mine.top_logprobs) == 2


def test_handover_when_the_first_token_ends_the_request_then_d_decodes_nothing(reference):
    with pair() as (p, d):
        assert serve(p, d, "a#0.00000000", PROMPT, max_tokens=8, stop_token_ids=(reference[0],)) == reference[:1]
        assert (d.last("a#0.00000000").finish_reason, d.last("a#0.00000000").stop_token_id) == (
            FinishReason.STOP,
            reference[0],
        )
        assert p.last("a#0.00000000").finish_reason is FinishReason.STOP
        assert d.clean()


def test_overlap_when_layers_are_slow_then_each_arrives_while_the_next_is_computed(monkeypatch):
    monkeypatch.setattr(transfer, "HAND_OVER_S", 0.0)  # every layer takes longer, and goes by itself
    with pair() as (p, d):
        hook = p.core._layer_hook

        def arrived():
            jobs = list(d.core.agent._pulling._jobs.values())
            loads = [leg.load for job in jobs for leg in job.reading() if leg.load is not None]
            return {name for load in loads for name, _ in load.events}

        def slow_hook(plan, batch):
            on_layer = hook(plan, batch)

            def slow(group, layer):
                """Takes until the layer before has arrived."""
                if layer:
                    until(lambda: f"layer_received:{layer - 1}" in arrived(), f"layer {layer - 1} at its reader")
                on_layer(group, layer)

            return on_layer and slow

        p.core._layer_hook = slow_hook
        serve(p, d, "a#0.00000000", PROMPT, max_tokens=2)
        published = {event.name: event.at_ns for event in p.staged_ends[0].events}
        received = {event.name: event.at_ns for event in d.last("a#0.00000000").events}
        layers = p.ready.groups[0].num_layers
        for layer in range(layers - 1):
            # Layer k has arrived before layer k + 1 was even published.
            assert received[f"layer_received:{layer}"] < published[f"layer_published:{layer + 1}"]
        assert received["load_complete"] > published[f"layer_published:{layers - 1}"]


def test_handover_when_the_prefill_step_fails_then_both_servers_say_so_and_serve_on(reference):
    with pair(decode={"allow_local_prefill": False, "kv_load_failure_policy": "fail"}) as (p, d):
        faults.arm("engine.layer:raise=UNKNOWN_ERROR,layer=1,times=1")
        d.add("a#0.00000000", PROMPT, RunMode.DECODE, source=p.source)
        p.add("a#0.00000000", PROMPT, RunMode.PREFILL)
        run_until([p, d], lambda: d.ended("a#0.00000000") and p.clean() and d.clean())
        assert p.last("a#0.00000000").error.code == ErrorCode.EXECUTION_EXCEPTION
        assert d.last("a#0.00000000").error.code == ErrorCode.LOAD_KV_CACHE_FAILED
        assert d.last("a#0.00000000").error.metadata["cause"] == "EXECUTION_EXCEPTION"
        assert serve(p, d, "b#0.00000000", PROMPT, max_tokens=16) == reference


@pytest.mark.invariant("RPC-17")
def test_handover_when_a_load_breaks_then_it_is_repeated_without_a_new_prefill(reference):
    with pair() as (p, d):
        faults.arm("cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,nth=2")
        tokens = serve(p, d, "a#0.00000000", PROMPT, max_tokens=16)
        assert tokens == reference
        assert faults.fired("cache_store.send_piece") == 1
        assert d.clean()


@pytest.mark.parametrize("sampling", [{}, SAMPLINGS[2]], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("policy", "failures"), [("retry", 1), ("retry", 2), ("recompute", 1)])
def test_handover_when_loads_fail_then_what_each_policy_does_has_the_tokens_of_a_clean_run(policy, failures, sampling):
    with pair(decode={"kv_load_failure_policy": policy}) as (p, d):
        faults.arm(f"cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,times={failures}")
        tokens = serve(p, d, "a#0.00000000", PROMPT, max_tokens=16, **sampling)
        assert tokens == alone(PROMPT, max_tokens=16, **sampling)
        assert faults.fired("cache_store.send_piece") == failures
        recomputed = "compute" in d.last("a#0.00000000").stages
        assert recomputed == ((policy, failures) != ("retry", 1)), "one retry, and then, or at once, the prompt itself"
        assert d.clean()


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        ("ipc", "cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,layer=1"),
        ("tcp", "cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,layer=1"),
        ("tcp", "cache_store.piece_bytes:corrupt"),
    ],
)
def test_handover_when_unchecked_bytes_lie_in_the_pool_then_they_are_wiped_before_anybody_gets_the_blocks(
    transport, fault
):
    options = {"kv_transport": transport, "kv_load_failure_policy": "fail"}
    with pair(options, options) as (p, d):
        pools = d.core.runner.kv_layers["full"]
        before = [pool.clone() for pool in pools]
        faults.arm(fault)
        d.add("a#0.00000000", PROMPT, RunMode.DECODE, source=p.source)
        p.add("a#0.00000000", PROMPT, RunMode.PREFILL)
        run_until([p, d], lambda: d.ended("a#0.00000000") and p.clean() and d.clean())
        assert d.last("a#0.00000000").error.code == ErrorCode.LOAD_KV_CACHE_FAILED
        assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))


def test_handover_when_the_prefill_is_unreachable_then_d_computes_the_prompt_itself(reference):
    with pair(decode={"cache_store_connect_timeout_ms": 100}) as (p, d):
        p.core.agent.close(2.0)
        d.add("a#0.00000000", PROMPT, RunMode.DECODE, source=p.source, max_tokens=16)
        d.run()
        assert d.tokens("a#0.00000000") == reference
        assert d.cached_tokens("a#0.00000000") == 0
        assert d.clean()


# -- aborts -----------------------------------------------------------------------------------------------------


def test_abort_when_it_meets_each_state_of_both_servers_then_the_ledgers_return_to_their_start():
    with pair(prefill={"max_num_batched_tokens": 16}) as (p, d):
        key = "k{}#0.00000000".format
        # D: loading, P has not begun
        d.add(key(0), PROMPT, RunMode.DECODE, source=p.source)
        d.step()
        assert d.ledger()["receiving"] == 6
        d.abort(key(0))
        d.abort(key(0))
        run_until([p, d], d.clean)
        # P: computing, with D's load open
        d.add(key(1), PROMPT, RunMode.DECODE, source=p.source)
        p.add(key(1), PROMPT, RunMode.PREFILL)
        d.step()
        p.step()
        p.abort(key(1))
        d.abort(key(1))
        run_until([p, d], lambda: p.clean() and d.clean())
        # P: answered, nobody loads
        p.add(key(2), PROMPT, RunMode.PREFILL)
        p.run()
        assert p.ledger()["staged"] == 6
        p.abort(key(2))
        run_until([p], p.clean)
        assert p.staged_ends[-1].outcome == "aborted"
        # D: decoding
        d.add(key(3), PROMPT, RunMode.DECODE, source=p.source, max_tokens=100)
        p.add(key(3), PROMPT, RunMode.PREFILL, max_tokens=100)
        run_until([p, d], lambda: len(d.outputs.get(key(3), [])) > 3)
        d.abort(key(3))
        run_until([p, d], lambda: p.clean() and d.clean())
        for index in (0, 1, 3):
            assert d.last(key(index)).error.code == ErrorCode.CANCELLED
        assert p.last(key(1)).error.code == ErrorCode.CANCELLED
        assert serve(p, d, key(9), PROMPT, max_tokens=16) == alone(PROMPT, max_tokens=16)


def test_message_when_outputs_were_taken_ahead_then_the_figures_of_their_step_follow_once():
    with RealEngine("prefill") as p:
        p.add("a#0.00000000", PROMPT, RunMode.PREFILL)
        assert p.core.step()
        ahead = p.core.take_outputs()
        assert [output.request_key for output in ahead.outputs] == ["a#0.00000000"]
        assert (ahead.observations, ahead.kv_events, ahead.stats) == ([], [], None)
        assert p.core.take_outputs() is None
        figures = p.core.take_message()
        assert figures.seq == ahead.seq + 1
        assert figures.outputs == []
        assert "baton_engine_step_seconds" in {item.name for item in figures.observations}
        assert sum(len(event.stored) for event in figures.kv_events) == len(PROMPT) // p.core.kv.groups[0].block_size
        assert figures.stats.ledgers[0].staged > 0
        assert p.core.take_message() is None


def test_message_when_nothing_but_blocks_came_back_then_it_tells_of_them_at_once():
    with pair() as (p, d):
        d.add("a#0.00000000", PROMPT, RunMode.DECODE, source=p.source)
        d.step()
        d.abort("a#0.00000000")
        d.collect()
        assert d.ended("a#0.00000000")
        assert d.ledger()["quarantined"] == 6
        told = []
        # The engine's clock stands still as far as the silence towards the front is concerned.
        d.core._told_at = float("inf")

        def freed() -> bool:
            message = d.core.take_message()
            told.extend(message.stats.ledgers if message is not None else ())
            return bool(told)

        d.collect = lambda: None
        run_until([p, d], freed)
        assert (told[-1].quarantined, told[-1].free) == (0, told[-1].total)


def test_lease_when_nobody_loads_then_it_expires_on_its_own_clock():
    with RealEngine("prefill", kv_lease_seconds=0.2) as p:
        p.add("a#0.00000000", PROMPT, RunMode.PREFILL)
        run_until([p], lambda: bool(p.staged_ends))
        assert (p.staged_ends[0].outcome, p.staged_ends[0].cause) == ("expired", "never_loaded")
        assert p.clean()


def test_load_when_the_key_is_unknown_to_p_then_the_requests_deadline_ends_it():
    with pair() as (p, d):
        d.add("a#0.00000000", PROMPT, RunMode.DECODE, source=p.source)
        request = d.core.scheduler.open["a#0.00000000"]
        request.deadline_s = d.core.time.refresh() + 0.3
        d.core.scheduler.deadlines.add(request)
        run_until([p, d], lambda: d.ended("a#0.00000000") and d.clean())
        assert d.last("a#0.00000000").error.code in (ErrorCode.GENERATE_TIMEOUT, ErrorCode.LOAD_KV_CACHE_FAILED)


# -- failures of the engine -------------------------------------------------------------------------------------


def test_step_when_the_model_raises_then_its_requests_get_606_and_the_next_ones_are_served(reference):
    with RealEngine() as engine:
        faults.arm("engine.layer:raise=UNKNOWN_ERROR,times=1")
        engine.add("a", PROMPT)
        engine.step()
        assert engine.last("a").error.code == ErrorCode.EXECUTION_EXCEPTION
        engine.add("b", PROMPT, max_tokens=16)
        engine.run()
        assert engine.tokens("b") == reference
        assert engine.clean()


def test_step_when_the_engine_is_unusable_then_it_says_so_after_its_last_news():
    with RealEngine() as engine:
        faults.arm("engine.layer:raise=ENGINE_DEAD,times=1")
        engine.add("a", PROMPT)
        with pytest.raises(EngineUnusable) as failure:
            engine.step()
        assert failure.value.error.code is ErrorCode.ENGINE_DEAD
        engine.collect()
        assert engine.last("a").error.code == ErrorCode.ENGINE_DEAD


def test_step_when_the_device_fails_after_the_last_layer_then_nothing_asks_it_for_a_mark(monkeypatch):
    with RealEngine("prefill") as engine:
        execute = engine.core.runner.execute

        def compute_and_fail(batch, on_layer=None):
            execute(batch, on_layer)
            raise BatonError(ErrorCode.ENGINE_DEAD, "the engine's device has failed")

        def mark():
            raise AssertionError("the device was touched")

        monkeypatch.setattr(engine.core.runner, "execute", compute_and_fail)
        monkeypatch.setattr(engine.core.agent, "mark", mark)
        engine.add("a#0.00000000", PROMPT, RunMode.PREFILL)
        with pytest.raises(EngineUnusable):
            engine.step()
        engine.collect()
        assert engine.last("a#0.00000000").error.code == ErrorCode.ENGINE_DEAD


def test_stats_when_requests_are_open_then_they_count_them():
    with RealEngine(max_num_seqs=1) as engine:
        engine.add("a", PROMPT, max_tokens=50)
        engine.add("b", PROMPT)
        engine.step()
        stats = engine.core.stats()
        assert (stats.running, stats.waiting, stats.loading) == (1, 1, 0)
        assert stats.ledgers[0].running == 6
        engine.core.handle(FrontMessage(shutdown=True))
        engine.step()
        assert engine.core.stopping
        codes = {engine.last(key).error.code for key in "ab"}
        assert codes == {int(ErrorCode.SERVER_DRAINING)}
        assert isinstance(BatonError(ErrorCode.SERVER_DRAINING), BatonError)


@pytest.mark.parametrize(
    ("prompts", "steps", "expected"),
    [((45,), 1, (1, "prefill")), ((1,), 1, (1, "decode")), ((1, 45), 1, (2, "mixed")), ((), 0, None)],
)
def test_stop_when_there_is_something_to_compute_then_the_skipped_step_and_its_kind_are_logged(
    prompts, steps, expected, caplog
):
    with RealEngine(max_num_batched_tokens=16) as engine, caplog.at_level("INFO"):
        for number, length in enumerate(prompts):
            engine.add(f"r{number}", PROMPT[:length], max_tokens=50)
        for _ in range(steps):
            engine.step()
        engine.core.handle(FrontMessage(shutdown=True))
        engine.step()
        found = [(each.requests, each.kind) for each in caplog.records if "step is skipped" in each.message]
        assert found == ([] if expected is None else [expected])


def test_handover_when_the_prompt_comes_out_not_finite_then_it_fails_and_no_later_request_gets_any_of_it(reference):
    with pair(prefill={"max_num_batched_tokens": 16}) as (p, d):
        norm = p.core.runner.model.layers[1].attention_norm
        good, norm.weight = norm.weight, torch.full_like(norm.weight, torch.nan)
        d.add("a#0.00000000", PROMPT, RunMode.DECODE, source=p.source, max_tokens=16)
        p.add("a#0.00000000", PROMPT, RunMode.PREFILL, max_tokens=16)
        run_until([d, p], lambda: d.ended("a#0.00000000") and p.ended("a#0.00000000") and p.clean())
        error = p.last("a#0.00000000").error
        assert (error.code, error.stage) == (ErrorCode.EXECUTION_EXCEPTION, "compute")
        assert error.metadata["cause"] == "hidden_states_not_finite"
        assert d.tokens("a#0.00000000") == reference  # it computes the prompt itself
        for engine in (p, d):
            assert all(torch.isfinite(pool).all() for pool in engine.core.runner.kv_layers["full"])
        norm.weight = good
        assert serve(p, d, "b#0.00000000", PROMPT, max_tokens=16) == reference
        assert p.cached_tokens("b#0.00000000") == 0


def test_graph_status_when_the_feature_is_on_without_graphs_then_every_answer_says_that_it_is_disabled():
    with pair(prefill={"prefill_graph": PrefillGraphSettings(enabled=True)}) as (p, d):
        assert p.ready.prefill_cuda_graph_init == "feature_disabled"
        assert d.ready.prefill_cuda_graph_init == "not_requested"
        serve(p, d, "a#0.00000000", PROMPT, max_tokens=3)
        d.add("b#0.00000000", PROMPT)
        d.run()
        statuses = {
            (engine.config.role, key): [o.prefill.cuda_graph_status for o in engine.outputs[key] if o.prefill]
            for engine, key in ((p, "a#0.00000000"), (d, "a#0.00000000"), (d, "b#0.00000000"))
        }
        assert statuses == {
            ("prefill", "a#0.00000000"): ["feature_disabled"],
            ("decode", "a#0.00000000"): ["feature_disabled"],
            ("decode", "b#0.00000000"): ["not_requested"],
        }
        counted = [o for o in p.observations if o.name == "baton_prefill_cuda_graph_requests_total"]
        assert [(o.labels["status"], o.value) for o in counted] == [("feature_disabled", 1)]


@pytest.mark.parametrize(("requests", "limit_s"), [(1, 0.5e-3), (8, 1e-3)])
def test_overhead_when_requests_decode_then_a_step_costs_the_host_little(requests, limit_s):
    """Processor time of this thread beside the model: scheduling, booking, the message and its encoding."""
    with RealEngine(num_kv_blocks=400, max_model_len=0) as engine:
        core = engine.core
        runner = core.runner

        class Instant:
            groups = runner.groups

            def execute(self, batch, on_layer=None):
                return StepResult([RowResult(5) for _ in batch.rows], 0.0, 0.0)

        for index in range(requests):
            engine.add(f"r{index}", PROMPT[index:], max_tokens=300)
        engine.step()
        core.runner = Instant()
        encoder = msgspec.msgpack.Encoder()
        spent = []
        for _ in range(10):  # a busy machine, or the collector, may make some of them slow, and the code all of them
            began = time.thread_time()
            for _ in range(20):
                core.step()
                encoder.encode(EngineEnvelope(step=core.take_message()))
            spent.append((time.thread_time() - began) / 20)
        assert min(spent) < limit_s, spent
