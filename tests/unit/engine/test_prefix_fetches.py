"""A prompt whose beginning is in a tier below the pool: what it waits for, what it gets, and what holds its blocks."""

from __future__ import annotations

import pytest

from cache_store.tiers.store import Fetch
from engine.messages import RunMode
from rpc.errors import ErrorCode
from tests.unit.engine.scripted_engine import ScriptedEngine, continuation
from tests.unit.engine.scripted_tiers import ScriptedTiers

PROMPT = list(range(10, 27))  # four blocks and a token
OTHER = list(range(40, 57))


class Below:
    """An engine whose tiers have the blocks of PROMPT, and whose pool has nothing."""

    def __init__(self, **limits: object) -> None:
        self.tiers = ScriptedTiers()
        self.engine = ScriptedEngine(
            tiers=self.tiers, **{"tier_min_tokens": 1, "tier_timeout_s": 2.0, "max_num_batched_tokens": 64, **limits}
        )
        self.engine.step_s = 0.1
        self.engine.add("first", PROMPT, max_tokens=4)
        self.settle()
        assert self.engine.tokens("first") == continuation(PROMPT, 4)
        assert len(self.tiers.stored) == 5  # of its own tokens too
        self.engine.kv.flush()
        self.engine.counts.clear()

    def settle(self) -> None:
        """Until nothing happens any more."""
        for _ in range(20):
            self.tiers.finish()
            self.engine.run()

    def cached(self, key: str) -> int:
        return next(output.prefill.cached_tokens for output in self.engine.outputs[key] if output.prefill is not None)

    def outcome(self, name: str) -> float:
        return self.engine.counts.get(f"kv_tier_fetches_total:{name}", 0)

    @property
    def looking(self) -> Fetch:
        (fetch,) = self.tiers.looking
        return fetch

    @property
    def loading(self) -> Fetch:
        (fetch,) = self.tiers.loading
        return fetch


@pytest.fixture
def below() -> Below:
    return Below()


@pytest.mark.parametrize("mode", [RunMode.LOCAL, RunMode.PREFILL])
def test_prompt_when_a_tier_has_its_beginning_then_it_is_a_hit_like_any_other(below: Below, mode: RunMode) -> None:
    engine, tiers = below.engine, below.tiers
    engine.add("again", PROMPT, mode, max_tokens=4)
    assert not engine.step().rows
    tiers.answer(below.looking)
    assert not engine.step().rows
    assert engine.ledger()["receiving"] == 4
    tiers.fill(below.loading)
    tiers.end(below.loading)
    plan = engine.step()
    assert [(row.start, len(row.token_ids)) for row in plan.rows] == [(16, 1)]
    assert "receiving" not in engine.ledger()
    assert below.cached("again") == 16
    assert below.outcome("loaded") == 1
    assert engine.counts["kv_tier_fetched_tokens_total"] == 16
    if mode is RunMode.PREFILL:
        assert engine.transfer.names("again") == ["admit", "computed"]
        engine.lease_ended("again")
    below.settle()
    assert engine.tokens("again") == continuation(PROMPT, 1 if mode is RunMode.PREFILL else 4)
    engine.assert_clean()


def test_prompt_when_it_waits_for_a_tier_then_holds_up_nobody(below: Below) -> None:
    below.engine.add("again", PROMPT)
    below.engine.add("other", OTHER, max_tokens=2, prompt_logprobs=0)
    below.engine.run()
    assert below.engine.tokens("other") == continuation(OTHER, 2)
    assert below.engine.outputs.get("again") is None
    below.settle()
    assert below.cached("again") == 16


def test_prompt_when_the_pool_has_a_part_then_only_the_rest_is_asked_for(below: Below) -> None:
    below.engine.add("again", PROMPT[:9], max_tokens=1)
    below.settle()
    below.engine.add("longer", PROMPT, max_tokens=1)
    assert len(below.looking.keys) == 2
    below.tiers.answer(below.looking)
    below.engine.step()
    assert len(below.loading.blocks) == 2
    below.settle()
    assert below.cached("longer") == 16


@pytest.mark.parametrize(
    "why", ["prompt_logprobs", "too short", "min_tokens", "in the pool", "no prefix caching", "other salt", "busy"]
)
def test_prompt_when_no_tier_can_help_then_it_is_computed_at_once(why: str) -> None:
    limits = {"min_tokens": {"tier_min_tokens": 17}, "no prefix caching": {}}.get(why, {})
    below = Below(**limits)
    engine = below.engine
    prompt, sampling = PROMPT, {}
    if why == "no prefix caching":
        engine.kv.prefix_caching = False
    elif why == "prompt_logprobs":
        sampling["prompt_logprobs"] = 0
    elif why == "too short":
        prompt = PROMPT[:4]
    elif why == "in the pool":
        engine.add("before", PROMPT, max_tokens=1)
        below.settle()
    elif why == "busy":
        below.tiers.busy = True
    engine.add("again", prompt, max_tokens=2, salt="tenant" if why == "other salt" else "", **sampling)
    if why == "other salt":
        below.tiers.answer(below.looking)
    assert engine.step().rows
    below.settle()
    assert below.cached("again") == (16 if why == "in the pool" else 0)
    assert below.outcome("busy") == (why == "busy")
    assert below.outcome("absent") == (why == "other salt")
    assert engine.tokens("again") == continuation(prompt, 2)


@pytest.mark.parametrize("loaded", [0, 1, 3])
def test_load_when_it_takes_too_long_then_what_has_come_counts_and_the_rest_is_quarantined(
    below: Below, loaded: int
) -> None:
    engine, tiers = below.engine, below.tiers
    engine.add("again", PROMPT, max_tokens=2)
    tiers.answer(below.looking)
    engine.step()
    tiers.fill(below.loading, loaded)
    engine.wait(0.99)
    assert not engine.step().rows
    assert 0 < engine.scheduler.next_tick_in() < 0.02
    engine.wait(0.02)
    plan = engine.step()
    assert [row.start for row in plan.rows] == [4 * loaded]
    assert engine.ledger()["quarantined"] == 4 - loaded
    assert engine.scheduler.oldest_hold_seconds()["quarantined"] > 0.9
    engine.run()
    assert engine.tokens("again") == continuation(PROMPT, 2)
    assert engine.ledger()["quarantined"] == 4 - loaded
    tiers.end(below.loading)
    engine.step()
    assert below.outcome("timeout") == 1
    engine.assert_clean()


def test_load_when_it_takes_too_long_and_nothing_writes_then_its_blocks_are_free_at_once(below: Below) -> None:
    engine, tiers = below.engine, below.tiers
    tiers.quiet = True
    engine.add("again", PROMPT, max_tokens=2)
    tiers.answer(below.looking)
    engine.step()
    hanging = below.loading
    tiers.fill(hanging, 1)
    engine.wait(1.01)
    assert engine.step().rows[0].start == 4
    assert "quarantined" not in engine.ledger()
    engine.run()
    tiers.end(hanging)  # much later, and of no interest
    engine.run()
    assert engine.tokens("again") == continuation(PROMPT, 2)
    engine.assert_clean()


@pytest.mark.parametrize("found", [False, True])
def test_look_up_when_it_takes_too_long_then_what_is_known_by_then_is_loaded(below: Below, found: bool) -> None:
    engine, tiers = below.engine, below.tiers
    engine.add("again", PROMPT, max_tokens=2)
    hanging = below.looking
    if found:
        tiers.find(hanging)
    engine.wait(1.01)
    assert bool(engine.step().rows) is not found
    if found:
        tiers.fill(below.loading)
        tiers.end(below.loading)
    engine.run()
    assert below.cached("again") == (16 if found else 0)
    tiers.answer(hanging)  # much later, and of no interest
    engine.run()
    assert engine.tokens("again") == continuation(PROMPT, 2)
    engine.assert_clean()


@pytest.mark.parametrize("failing", ["load", "all"])
def test_load_when_the_records_are_not_there_any_more_then_the_rest_is_computed(below: Below, failing: str) -> None:
    engine, tiers = below.engine, below.tiers
    engine.add("again", PROMPT, max_tokens=2)
    tiers.answer(below.looking)
    engine.step()
    fetch = below.loading
    for key in fetch.keys[0 if failing == "all" else 2 :]:
        tiers.stored.pop(key, None)
    tiers.fill(fetch)
    tiers.end(fetch)
    below.settle()
    assert below.cached("again") == (0 if failing == "all" else 8)
    assert below.outcome("failed" if failing == "all" else "partial") == 1
    assert engine.tokens("again") == continuation(PROMPT, 2)
    engine.assert_clean()


@pytest.mark.parametrize("how", ["abort", "deadline", "queue limit", "shutdown"])
@pytest.mark.parametrize("phase", ["looking", "found", "loading"])
def test_request_when_it_ends_before_its_beginning_has_come_then_leaves_nothing(phase: str, how: str) -> None:
    below = Below(num_blocks=8, queue_limit_s=0.5 if how == "queue limit" else 600.0)
    engine, tiers = below.engine, below.tiers
    if phase == "found":  # there are no blocks for it
        engine.add("large", OTHER, RunMode.PREFILL)
        engine.step()
        tiers.writes.clear()
    engine.add("again", PROMPT, RunMode.PREFILL, deadline_in=0.5 if how == "deadline" else None)
    hanging = next(fetch for fetch in tiers.looking if not fetch.cancelled)
    if phase != "looking":
        tiers.answer(hanging)
        engine.step()
    assert engine.ledger().get("receiving", 0) == (4 if phase == "loading" else 0)
    if how == "abort":
        engine.abort("again")
    elif how == "shutdown":
        from rpc.errors import BatonError

        engine.scheduler.end_all(BatonError(ErrorCode.SERVER_DRAINING, "it stops"))
        engine.collect()
    else:
        engine.wait(0.6)
        engine.step()
    expected = {
        "abort": ErrorCode.CANCELLED, "deadline": ErrorCode.GENERATE_TIMEOUT,
        "queue limit": ErrorCode.WAIT_TO_RUN_TIMEOUT, "shutdown": ErrorCode.SERVER_DRAINING,
    }  # fmt: skip
    assert engine.error("again") is expected[how]
    assert engine.ledger().get("quarantined", 0) == (4 if phase == "loading" else 0)
    if "large" in engine.transfer.leases:
        engine.lease_ended("large")
    below.settle()
    assert below.outcome("abandoned") == 1
    engine.assert_clean()


def test_fetch_when_two_prompts_want_the_same_then_both_get_it_and_one_may_leave(below: Below) -> None:
    engine, tiers = below.engine, below.tiers
    for key in ("a", "b", "c"):
        engine.add(key, [*PROMPT, *OTHER[: 3 * (key == "b")]], max_tokens=2)
    tiers.answer(below.looking)
    engine.step()
    engine.abort("a")
    assert engine.ledger()["receiving"] == 4
    below.settle()
    assert (below.cached("b"), below.cached("c")) == (16, 16)
    assert below.outcome("loaded") == 1
    assert engine.tokens("b") == continuation([*PROMPT, *OTHER[:3]], 2)
    engine.assert_clean()


def test_fetch_when_there_are_no_blocks_then_it_takes_its_turn_and_then_loads() -> None:
    below = Below(num_blocks=8)
    engine, tiers = below.engine, below.tiers
    engine.add("large", OTHER, RunMode.PREFILL)
    tiers.answer(below.looking)
    engine.step()
    engine.add("again", PROMPT, max_tokens=2)
    tiers.answer(below.looking)
    engine.add("later", OTHER[:9], max_tokens=2, prompt_logprobs=0)  # would fit, but is not to overtake
    for _ in range(5):
        assert not engine.step().rows
    engine.lease_ended("large")
    engine.step()
    assert engine.ledger()["receiving"] == 4
    below.settle()
    assert below.cached("again") == 16
    assert len(engine.tokens("later")) == 2
    engine.assert_clean()


@pytest.mark.parametrize("hit", [0, 16])
def test_fetch_when_the_pool_changes_before_its_turn_then_it_is_given_up(hit: int) -> None:
    below = Below(num_blocks=8)
    engine, tiers = below.engine, below.tiers
    tiers.busy = True
    if not hit:  # the pool has a beginning, and loses it
        engine.add("beginning", PROMPT[:9], max_tokens=1)
        engine.run()
    tiers.busy = False
    engine.add("again", PROMPT, max_tokens=2)
    hanging = below.looking
    tiers.busy = True
    engine.add("between", PROMPT if hit else [*OTHER, *OTHER[:15]], max_tokens=1, prompt_logprobs=0)
    engine.run()
    tiers.answer(hanging)
    below.settle()
    assert below.outcome("computed" if hit else "displaced") == 1
    assert below.cached("again") == hit
    assert engine.tokens("again") == continuation(PROMPT, 2)
    engine.assert_clean()


@pytest.mark.parametrize("phase", ["looking", "loading"])
def test_flush_when_a_fetch_is_under_way_then_nothing_of_before_is_used(below: Below, phase: str) -> None:
    engine, tiers = below.engine, below.tiers
    engine.add("again", PROMPT, max_tokens=2)
    hanging = below.looking
    if phase == "loading":
        tiers.answer(hanging)
        engine.step()
        tiers.fill(below.loading)
    engine.scheduler.flush_cache()
    assert (tiers.stored, tiers.writes) == ({}, [])
    assert engine.step().rows[0].start == 0
    below.settle()
    assert below.cached("again") == 0
    assert below.outcome("flushed") == 1
    engine.assert_clean()


def test_block_when_it_is_used_again_before_its_copy_then_no_tier_gets_it() -> None:
    below = Below(num_blocks=5)
    engine, tiers = below.engine, below.tiers
    tiers.busy = True
    engine.add("one", OTHER, max_tokens=1)
    engine.run()
    waiting = len(tiers.writes)
    assert waiting == 4
    engine.add("two", PROMPT, max_tokens=1)
    engine.run()
    tiers.copy_down()
    assert tiers.void == waiting
    assert len(tiers.stored) == 5


def test_prompt_when_the_pool_has_it_then_tiers_that_lost_it_get_it_again(below: Below) -> None:
    engine, tiers = below.engine, below.tiers
    engine.add("again", PROMPT, max_tokens=1)
    below.settle()
    tiers.stored.clear()
    engine.add("once more", PROMPT, max_tokens=1)
    below.settle()
    assert len(tiers.stored) == 4


def test_prompt_when_it_took_several_steps_then_the_last_one_names_all_of_it_in_order() -> None:
    below = Below(max_num_batched_tokens=8)
    engine, tiers = below.engine, below.tiers
    tiers.busy = True
    engine.add("long", list(range(40, 60)), max_tokens=1)
    named = []
    for _ in range(3):
        engine.step()
        named.append([block_hash for _, block_hash, _ in tiers.writes])
        tiers.writes.clear()
    assert [len(each) for each in named] == [2, 2, 5]
    assert named[2][:4] == named[0] + named[1]
    below.settle()
    engine.assert_clean()


def test_load_of_a_decode_server_when_it_is_done_then_no_tier_gets_it(below: Below) -> None:
    engine, tiers = below.engine, below.tiers
    tiers.stored.clear()
    engine.add("loaded", OTHER, RunMode.DECODE, max_tokens=8)
    engine.step()
    engine.load_done("loaded")
    below.settle()
    assert (tiers.stored, tiers.looking) == ({}, [])
    engine.assert_clean()
