"""What step messages become: metrics, ends of staged KV, the mirror of the prefix cache."""

from __future__ import annotations

import logging

import msgspec
import pytest

from engine.messages import EngineStats, KvEvent, Ledger, Observation, RankFacts, RankStats, StepMessage
from front.engine_feed import EngineFeed
from front.kv_index import KvIndex
from front.transfer_health import TransferHealth
from front.wire import ledger_imbalance, ledger_pages
from tests.unit.front.scripted_engine import Front, engine_ready

LEDGER = Ledger("full", total=20, free=10, running=1, staged=2, receiving=0, quarantined=0, cached=7, reserved=1)


def feed_of(front: Front, tp_size: int = 1) -> EngineFeed:
    return EngineFeed(
        tp_size=tp_size,
        model_name="tiny",
        metrics=front.metrics,
        reception=front.reception,
        kv_index=KvIndex(),
        transfers=TransferHealth(),
    )


async def test_book_stats_when_a_ledger_comes_then_states_add_up_and_usage_leaves_the_cache_out() -> None:
    front = Front("prefill")
    feed_of(front).book_stats(
        EngineStats(
            running=3,
            waiting=2,
            ledgers=[LEDGER],
            leases=1,
            transfers_inflight=5,
            transfer_queue_depth=6,
            peers_connected=7,
            peers_incompatible=8,
            peers_lost=4,
        )
    )
    value = front.metrics.value
    states = ("free", "running", "staged", "receiving", "quarantined", "cached")
    assert sum(value("baton_kv_blocks", rank="0", group="full", state=state) for state in states) == 20
    assert value("baton_kv_blocks", rank="0", group="full", state="reserved") == 1
    assert value("baton_kv_cache_usage_ratio", rank="0", group="full") == pytest.approx(3 / 20)
    assert value("baton_kv_ledger_imbalance_blocks", rank="0", group="full") == 0
    assert value("baton_num_requests_running", model_name="tiny") == 3
    assert value("baton_kv_leases_active") == 1
    assert value("baton_num_requests_waiting", model_name="tiny") == 2
    assert value("baton_kv_transfer_inflight", transport="grpc") == 5
    assert value("baton_kv_transfer_queue_depth", rank="0") == 6
    assert [value("baton_peers", state=state) for state in ("connected", "incompatible", "lost")] == [7, 8, 4]


async def test_book_stats_when_a_hold_ends_then_its_age_is_absent_and_not_zero() -> None:
    front = Front("decode")
    feed = feed_of(front)
    feed.book_stats(EngineStats(loading=1, oldest_hold_seconds={"receiving": 1.5}))
    assert front.metrics.value("baton_kv_oldest_hold_seconds", rank="0", state="receiving") == 1.5
    assert front.metrics.value("baton_num_requests_loading", model_name="tiny") == 1
    feed.book_stats(EngineStats())
    assert front.metrics.value("baton_kv_oldest_hold_seconds", rank="0", state="receiving") is None


async def test_on_step_when_one_figure_cannot_be_booked_then_the_rest_of_the_step_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    front = Front("prefill")
    feed = feed_of(front)
    wrong = Observation("baton_no_such_family", {}, 1)
    right = Observation("baton_engine_step_seconds", {"kind": "prefill"}, 0.25)
    with caplog.at_level(logging.ERROR):
        feed.on_step(StepMessage(1, observations=[wrong, right], kv_events=[KvEvent(stored=["ab" * 16])]))
    assert front.metrics.value("baton_engine_step_seconds_sum", kind="prefill") == 0.25
    assert "baton_no_such_family" in caplog.text


async def test_came_up_when_the_engine_is_ready_then_model_and_engine_are_described() -> None:
    front = Front("decode")
    feed = feed_of(front)
    assert front.metrics.value("baton_engine_up", rank="0") == 0
    feed.came_up(engine_ready())
    assert front.metrics.value("baton_engine_up", rank="0") == 1
    exposition = front.metrics.render().decode()
    line = next(line for line in exposition.splitlines() if line.startswith("baton_model_info{"))
    for label in ('model_name="tiny"', 'dtype="float32"', 'block_size="16"', 'tp_size="1"', 'kv_transport="grpc"'):
        assert label in line
    feed.died()
    assert front.metrics.value("baton_engine_up", rank="0") == 0


def test_ledger_page_when_states_do_not_add_up_then_the_difference_shows() -> None:
    leaky = Ledger("full", total=20, free=10, running=1, staged=2, receiving=0, quarantined=0, cached=4, reserved=1)
    assert ledger_imbalance(leaky) == 3
    [page] = ledger_pages(EngineStats(ledgers=[leaky]))
    assert page["groups"] == [
        {
            "group": "full", "total": 20, "free": 10, "running": 1, "staged": 2, "receiving": 0, "quarantined": 0,
            "cached": 4, "reserved": 1, "imbalance": 3,
        }
    ]  # fmt: skip


async def test_figures_when_an_engine_has_two_ranks_then_each_has_its_own_beside_the_blocks_of_all() -> None:
    front = Front("decode")
    feed = feed_of(front, tp_size=2)
    facts = [RankFacts(rank, 100 + rank, f"127.0.0.1:{rank + 1}", 0.5) for rank in range(2)]
    feed.came_up(msgspec.structs.replace(engine_ready(), ranks=facts))
    parts = [RankStats(0, transfer_queue_depth=3), RankStats(1, leases=1, oldest_hold_seconds={"staged": 2.0})]
    stats = EngineStats(ledgers=[LEDGER], leases=1, transfer_queue_depth=3, ranks=parts)
    feed.book_stats(stats)
    value = front.metrics.value
    assert [value("baton_engine_up", rank=rank) for rank in "01"] == [1, 1]
    assert [value("baton_kv_blocks", rank=rank, group="full", state="cached") for rank in "01"] == [7, 7]
    assert [value("baton_kv_transfer_queue_depth", rank=rank) for rank in "01"] == [3, 0]
    assert [value("baton_kv_oldest_hold_seconds", rank=rank, state="staged") for rank in "01"] == [None, 2.0]
    assert [(page["rank"], page["leases"]) for page in ledger_pages(stats)] == [(0, 0), (1, 1)]
    feed.died()
    assert [value("baton_engine_up", rank=rank) for rank in "01"] == [0, 0]
