"""What the scheduler must hold where others were reported to lose blocks, or to take one request's for another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine.kv_cache.cache import KvCache
from engine.messages import KvGroupInfo, PrefillInfo, RunMode
from engine.requests import Answer
from engine.scheduler.scheduler import Scheduler
from rpc import faults
from rpc.errors import ErrorCode
from tests.unit.engine.scripted_engine import ScriptedEngine, continuation

BLOCK = 4
POOL = 12
PROMPT = list(range(10, 26))  # four blocks
WHOLE_POOL = list(range(40, 40 + BLOCK * POOL - 2))


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


# -- K5: a request that ends early keeps nothing that its look at the prefix cache took ---------------------------


def _refused_before_the_match(engine: ScriptedEngine) -> None:
    faults.arm("engine.stage:raise=CANCELLED,stage=match,request_key=x")
    engine.add("x", [*PROMPT, 1, 2], RunMode.PREFILL)
    engine.step()


def _matched_without_room(engine: ScriptedEngine) -> None:
    """The hit was found, and the rest of the prompt does not fit beside a request that computes."""
    engine.add("other", list(range(60, 60 + BLOCK * 7)), max_tokens=2)
    engine.step()
    engine.add("x", [*PROMPT, *range(50, 60)], RunMode.PREFILL)
    engine.step()
    assert engine.scheduler.open["x"].allocation is None
    engine.abort("x")
    engine.run()


def _matched_without_room_to_load(engine: ScriptedEngine) -> None:
    engine.add("other", list(range(60, 60 + BLOCK * 7)), max_tokens=2)
    engine.step()
    engine.add("x", [*PROMPT, *range(50, 60)], RunMode.DECODE)
    engine.step()
    assert engine.scheduler.open["x"].attempts
    engine.abort("x")
    engine.run()


def _pinned_and_allocated(engine: ScriptedEngine) -> None:
    engine.add("x", [*PROMPT, *range(50, 70)], RunMode.PREFILL)
    engine.step()
    allocation = engine.scheduler.open["x"].allocation
    assert allocation is not None and allocation.cached_tokens == len(PROMPT)
    engine.abort("x")
    engine.lease_ended("x", "aborted")


def _pinned_and_computing(engine: ScriptedEngine) -> None:
    engine.add("x", [*PROMPT, *range(50, 66)], max_tokens=4)
    engine.step()
    engine.abort("x")


def _reserved_before_the_load(engine: ScriptedEngine) -> None:
    """Its blocks are held for a load of which nothing has come yet."""
    engine.add("x", [*PROMPT, *range(50, 70)], RunMode.DECODE)
    engine.step()
    assert engine.transfer.names("x") == ["load"]
    engine.abort("x")
    engine.load_failed("x", ErrorCode.CANCELLED)


def _loaded_and_waiting_for_a_seat(engine: ScriptedEngine) -> None:
    engine.add("x", [*PROMPT, *range(50, 70)], RunMode.DECODE)
    engine.step()
    engine.load_done("x")
    engine.abort("x")


@pytest.mark.parametrize(
    "leave",
    [
        _refused_before_the_match,
        _matched_without_room,
        _matched_without_room_to_load,
        _pinned_and_allocated,
        _pinned_and_computing,
        _reserved_before_the_load,
        _loaded_and_waiting_for_a_seat,
    ],
    ids=lambda leave: leave.__name__.strip("_"),
)
def test_k5_request_when_it_is_aborted_before_it_computes_then_nothing_of_its_prefix_stays_pinned(
    leave: Callable[[ScriptedEngine], None],
) -> None:
    engine = ScriptedEngine(num_blocks=POOL, reserve_timeout_s=60.0, reserve_attempts=1000)
    engine.add("first", PROMPT, max_tokens=2)
    engine.run()
    assert engine.ledger()["cached"] == len(PROMPT) // BLOCK
    leave(engine)
    assert engine.scheduler.open.get("x") is None
    engine.add("whole", WHOLE_POOL, max_tokens=2)
    engine.run()
    assert engine.tokens("whole") == continuation(WHOLE_POOL, 2)
    engine.assert_clean()


# -- K1: what comes late is counted, and changes nothing ----------------------------------------------------------


@pytest.mark.parametrize("late", ["done", "failed", "lease of another allocation", "lease of nobody"])
def test_k1_completion_when_its_allocation_is_gone_then_it_is_counted_and_dropped(late: str) -> None:
    engine = ScriptedEngine(num_blocks=POOL)
    engine.add("a", PROMPT, RunMode.DECODE, max_tokens=4)
    engine.step()
    engine.transfer.loads["dead"] = engine.transfer.loads["a"]
    before = engine.ledger()
    if late == "done":
        engine.scheduler.load_done("dead", Answer(0, 5, info=PrefillInfo(0, "not_requested")), [])
    elif late == "failed":
        engine.load_failed("dead", ErrorCode.CONNECTION_RESET_BY_PEER)
    else:
        key = "a" if late == "lease of another allocation" else "dead"
        engine.scheduler.lease_ended(key, 999, "released", "", None, 0.0, 0.0, [])
    engine.collect()
    assert engine.counts["kv_stale_references_total"] == 1
    assert engine.ledger() == before
    engine.load_done("a")
    engine.run()
    assert engine.tokens("a") == continuation(PROMPT, 4)
    assert engine.counts["kv_stale_references_total"] == 1
    engine.assert_clean()


# -- P2: a failed load of several groups --------------------------------------------------------------------------


def test_p2_load_of_two_groups_when_it_fails_then_equal_block_numbers_of_others_are_untouched() -> None:
    engine = ScriptedEngine(num_blocks=POOL, load_failure_policy="fail")
    groups = [KvGroupInfo("full", 1, 1, 8, BLOCK, "float32"), KvGroupInfo("window", 1, 1, 8, 2 * BLOCK, "float32")]
    engine.kv = KvCache(groups, POOL)
    engine.scheduler = Scheduler(engine.kv, engine.limits, engine.transfer, engine.time)
    engine.add("well", PROMPT, max_tokens=12)
    engine.step()
    engine.add("ill", PROMPT[::-1], RunMode.DECODE)
    engine.step()
    held = {key: engine.scheduler.open[key].allocation for key in ("well", "ill")}
    assert held["well"] is not None and held["ill"] is not None
    # Numbers of blocks mean nothing without their group.
    assert set(held["ill"].table("window")) & set(held["well"].table("full"))
    engine.load_failed("ill", ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT)
    assert engine.error("ill") is ErrorCode.LOAD_KV_CACHE_FAILED
    engine.add("next", PROMPT[::-1], max_tokens=6)
    engine.run()
    assert engine.tokens("well") == continuation(PROMPT, 12)
    assert engine.tokens("next") == continuation(PROMPT[::-1], 6)
    for ledger in engine.kv.ledgers():
        assert ledger.free + ledger.cached == ledger.total
    engine.assert_clean()
