"""Transitions of a lease, one by one. Names are those of docs/protocol.md."""

from __future__ import annotations

import pytest

from cache_store.serving.lease import LeaseState, LeaseTable
from cache_store.serving.reader import Reader
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.lease_fixtures import (
    LAYOUT,
    LEASE_S,
    REMEMBER_S,
    STALL_S,
    Clock,
    Counts,
    drain,
    make_table,
    prefill_result,
    publish_all,
    wanted,
)

KEY = "r#0.00000000"
TOKENS = 12
BLOCKS = {"full": [3, 1, 2]}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
def table(clock: Clock, counts: Counts) -> LeaseTable:
    return make_table(clock, counts)


def open_load(table: LeaseTable, generation: int | None = None, first: int = 0, count: int = 3) -> Reader:
    reader = table.open_load(KEY, generation, TOKENS, wanted(first, count), 1 << 20)
    assert reader is not None
    return reader


def refused(table: LeaseTable, generation: int | None = None, tokens: int = TOKENS, **block_range: int) -> BatonError:
    with pytest.raises(BatonError) as caught:
        table.open_load(KEY, generation, tokens, wanted(**block_range), 1 << 20)
    return caught.value


def staged(table: LeaseTable, hold: bool = True) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    publish_all(table, KEY)
    table.computed(KEY, prefill_result(), hold)


def ends(table: LeaseTable) -> list[tuple[str, str]]:
    return [(ended.outcome, ended.cause) for ended in table.take_ended()]


def test_admit_then_publish_makes_blocks_readable_layer_by_layer(table: LeaseTable, clock: Clock) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, LAYOUT.block_size + 1)
    reader = open_load(table)
    assert drain(reader, clock.now) == [(0, 0, 1), (1, 0, 1)]  # the prefix hit, at all layers
    table.publish(KEY, "full", 1, 2)
    table.publish(KEY, "full", 0, 3)
    assert drain(reader, clock.now) == [(0, 1, 2), (1, 1, 1)]
    table.publish(KEY, "full", 1, 3)
    assert drain(reader, clock.now) == [(1, 2, 1)]
    assert reader.exhausted()


def test_reader_of_a_part_gets_no_block_outside_of_it(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    assert drain(open_load(table, first=1, count=1), clock.now) == [(0, 1, 1), (1, 1, 1)]


def test_reader_splits_by_chunk_bytes_but_sends_at_least_one_block(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    reader = table.open_load(KEY, None, TOKENS, wanted(), 1)
    assert reader is not None
    assert drain(reader, clock.now) == [(layer, block, 1) for layer in (0, 1) for block in (0, 1, 2)]


def test_reader_takes_the_same_blocks_of_another_layer_where_they_come_next_and_are_ready(table: LeaseTable) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    reader = open_load(table)
    table.publish(KEY, "full", 0, 2)
    table.publish(KEY, "full", 1, 1)
    run = reader.next_run()
    assert run is not None and (run.layer, run.first, run.count) == (0, 0, 2)
    assert not reader.take_same(run, 1), "one of them is not ready"
    table.publish(KEY, "full", 1, 3)
    assert reader.take_same(run, 1)
    assert not reader.take_same(run, 1), "they have been taken"
    assert not reader.take_same(run, 2), "there is no such layer"
    rest = reader.next_run()
    assert rest is not None and (rest.layer, rest.first, rest.count) == (1, 2, 1)


def test_publish_notifies_the_reader_only_when_it_gets_further(table: LeaseTable) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    reader = open_load(table)
    calls = []
    reader.notify = lambda: calls.append(1)
    table.publish(KEY, "full", 0, 2)
    table.publish(KEY, "full", 0, 2)
    table.publish(KEY, "full", 0, 1)
    assert len(calls) == 1


@pytest.mark.parametrize(("group", "layer", "upto"), [("other", 0, 1), ("full", 2, 1), ("full", -1, 1), ("full", 0, 4)])
def test_publish_of_what_the_request_does_not_have_raises(table: LeaseTable, group: str, layer: int, upto: int) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    with pytest.raises(ValueError, match="does not exist"):
        table.publish(KEY, group, layer, upto)


def test_computed_with_an_unpublished_block_raises(table: LeaseTable) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    table.publish(KEY, "full", 0, 3)
    table.publish(KEY, "full", 1, 2)
    with pytest.raises(ValueError, match="unpublished"):
        table.computed(KEY, prefill_result(), True)


@pytest.mark.parametrize(
    ("tokens", "blocks", "ready"),
    [(TOKENS, {"full": [1, 2]}, 0), (0, BLOCKS, 0), (TOKENS, {"other": [1, 2, 3]}, 0), (TOKENS, BLOCKS, TOKENS + 1)],
)
def test_admit_with_blocks_that_do_not_fit_raises(
    table: LeaseTable, tokens: int, blocks: dict[str, list[int]], ready: int
) -> None:
    with pytest.raises(ValueError, match=KEY):
        table.admit(KEY, 5, tokens, blocks, ready)


def test_admit_of_a_key_with_a_lease_raises_and_leaves_the_lease(table: LeaseTable) -> None:
    staged(table)
    with pytest.raises(ValueError, match="already"):
        table.admit(KEY, 6, TOKENS, BLOCKS, 0)
    lease = table.get(KEY)
    assert lease is not None and lease.generation == 5


# ---- the clock


def test_running_has_no_clock(table: LeaseTable, clock: Clock) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    clock.now += 100 * LEASE_S
    table.tick()
    assert ends(table) == []


def test_computed_without_a_load_expires_as_never_loaded(table: LeaseTable, clock: Clock, counts: Counts) -> None:
    staged(table)
    clock.now += LEASE_S - 0.1
    table.tick()
    assert ends(table) == []
    clock.now += 0.1
    table.tick()
    assert ends(table) == [("expired", "never_loaded")]
    assert counts.counters[("kv_lease_expirations_total", "never_loaded")] == 1
    error = refused(table)
    assert (error.code, error.metadata["kind"]) == (ErrorCode.KV_LEASE_EXPIRED, "expired")


def test_leases_with_equal_expiry_end_together(table: LeaseTable, clock: Clock) -> None:
    for index in range(3):
        key = f"r{index}#0.00000000"
        table.admit(key, index, TOKENS, BLOCKS, TOKENS)
        table.computed(key, prefill_result(), True)
    clock.now += LEASE_S
    table.tick()
    assert ends(table) == [("expired", "never_loaded")] * 3


def test_expired_while_sent_is_never_released(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    reader = open_load(table)
    drain(reader, clock.now)
    table.close_load(reader, sent=True)
    clock.now += LEASE_S
    table.tick()
    assert ends(table) == [("expired", "never_released")]


def test_open_load_renews_as_long_as_its_reader_takes_something(
    table: LeaseTable, clock: Clock, counts: Counts
) -> None:
    staged(table)
    reader = open_load(table)
    for _ in range(20):
        clock.now += LEASE_S / 3
        reader.sent(1, clock.now)
        table.tick()
    assert ends(table) == []
    assert counts.counters[("kv_lease_renewals_total", "open_load", "ok")] == 20


def test_open_load_that_stalls_expires_and_ends_with_its_reader(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    reader = open_load(table)
    while reader.stop is None:
        clock.now += LEASE_S / 3
        table.tick()
        assert clock.now < 1000 + STALL_S + 2 * LEASE_S
    assert ends(table) == []  # the reader still holds the blocks
    assert reader.stop.code is ErrorCode.KV_LEASE_EXPIRED
    table.close_load(reader, sent=False)
    assert ends(table) == [("expired", "load_stalled")]


def test_open_load_whose_renewal_is_cut_expires(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    reader = open_load(table)
    clock.now += LEASE_S
    reader.sent(1, clock.now)
    table.tick(may_renew=lambda key: False)
    assert reader.stop is not None and reader.stop.code is ErrorCode.KV_LEASE_EXPIRED


def test_renew_of_a_queued_request_extends_the_lease(table: LeaseTable, clock: Clock, counts: Counts) -> None:
    staged(table)
    for _ in range(5):
        clock.now += LEASE_S - 1
        table.tick()
        assert table.renew(KEY, None) == LEASE_S
    assert ends(table) == []
    assert counts.counters[("kv_lease_renewals_total", "queued", "ok")] == 5


def test_k4_renew_of_another_key_is_expired_and_counted_as_unknown(table: LeaseTable, counts: Counts) -> None:
    staged(table)
    with pytest.raises(BatonError) as caught:
        table.renew("r#1.00000000", None)
    assert caught.value.code is ErrorCode.KV_LEASE_EXPIRED
    assert counts.counters[("kv_lease_renewals_total", "queued", "unknown")] == 1


def test_renew_of_an_ended_lease_is_expired_and_counted_so(table: LeaseTable, clock: Clock, counts: Counts) -> None:
    staged(table)
    clock.now += LEASE_S
    table.tick()
    with pytest.raises(BatonError) as caught:
        table.renew(KEY, 5)
    assert caught.value.code is ErrorCode.KV_LEASE_EXPIRED
    assert counts.counters[("kv_lease_renewals_total", "queued", "expired")] == 1


def test_renew_with_another_generation_is_stale(table: LeaseTable) -> None:
    staged(table)
    with pytest.raises(BatonError) as caught:
        table.renew(KEY, 4)
    assert caught.value.code is ErrorCode.KV_STALE_REFERENCE


def test_next_tick_in_is_the_earliest_expiry_and_at_most_a_third_of_a_lease(table: LeaseTable, clock: Clock) -> None:
    assert table.next_tick_in() == pytest.approx(LEASE_S / 3)
    staged(table)
    clock.now += LEASE_S - 2
    table.tick()
    assert table.next_tick_in() == pytest.approx(2)


# ---- loads


def test_load_of_an_unknown_key_has_to_be_parked(table: LeaseTable) -> None:
    assert table.open_load(KEY, None, TOKENS, wanted(), 1 << 20) is None


def test_k2_load_of_an_unknown_key_with_a_generation_is_stale(table: LeaseTable) -> None:
    error = refused(table, generation=5)
    assert (error.code, error.metadata["kind"]) == (ErrorCode.KV_STALE_REFERENCE, "unknown")


def test_k2_load_of_blocks_beyond_the_request_is_stale_and_takes_nothing(table: LeaseTable) -> None:
    staged(table)
    for block_range in ({"first": 0, "count": 4}, {"first": 3, "count": 1}):
        error = refused(table, **block_range)
        assert (error.code, error.metadata["kind"]) == (ErrorCode.KV_STALE_REFERENCE, "out_of_range")
    assert refused(table, tokens=TOKENS + 1).code is ErrorCode.KV_STALE_REFERENCE
    lease = table.get(KEY)
    assert lease is not None and not lease.served and not lease.readers


def test_k2_load_of_another_generation_is_stale(table: LeaseTable) -> None:
    staged(table)
    error = refused(table, generation=4)
    assert (error.code, error.metadata["kind"]) == (ErrorCode.KV_STALE_REFERENCE, "reused")


def test_k2_reference_already_loaded_and_released_is_stale(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    reader = open_load(table)
    drain(reader, clock.now)
    table.close_load(reader, sent=True)
    assert table.release(KEY, 5, complete=True)
    assert refused(table, generation=5).code is ErrorCode.KV_STALE_REFERENCE


@pytest.mark.invariant("RPC-17")
def test_k12_second_load_is_a_duplicate_while_open_and_after_success(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    reader = open_load(table)
    assert refused(table).code is ErrorCode.DUPLICATE_REQUEST
    assert refused(table, generation=5).code is ErrorCode.DUPLICATE_REQUEST
    drain(reader, clock.now)
    table.close_load(reader, sent=True)
    assert refused(table).code is ErrorCode.DUPLICATE_REQUEST  # sent, not released yet
    assert table.release(KEY, 5, complete=True)
    assert refused(table).code is ErrorCode.DUPLICATE_REQUEST


def test_reload_after_a_failed_load_is_served_once_with_the_generation(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    table.close_load(open_load(table), sent=False)
    error = refused(table)
    assert (error.code, error.param) == (ErrorCode.ERROR_GENERATE_CONFIG_FORMAT, "reference.generation")
    reader = open_load(table, generation=5)
    assert drain(reader, clock.now) == [(0, 0, 3), (1, 0, 3)]
    table.close_load(reader, sent=False)
    assert refused(table, generation=5).code is ErrorCode.DUPLICATE_REQUEST


def test_reload_after_everything_was_sent_but_found_damaged_is_served(table: LeaseTable, clock: Clock) -> None:
    staged(table)
    reader = open_load(table)
    drain(reader, clock.now)
    table.close_load(reader, sent=True)
    assert open_load(table, generation=5) is not None


# ---- ends


def test_release_after_everything_was_sent_ends_the_lease_as_released(
    table: LeaseTable, clock: Clock, counts: Counts
) -> None:
    staged(table)
    reader = open_load(table)
    drain(reader, clock.now)
    table.close_load(reader, sent=True)
    clock.now += 2
    assert table.release(KEY, 5, complete=True)
    ended = table.take_ended()
    assert [(e.outcome, e.generation, e.held_seconds) for e in ended] == [("released", 5, 2.0)]
    assert [name for name, _ in ended[0].events] == [
        "admitted",
        "layer_published:0",
        "layer_published:1",
        "computed",
        "load_opened",
        "lease_ended",
    ]
    assert not table.release(KEY, 5, complete=True)
    assert counts.counters[("kv_lease_hold_seconds", "released")] == 1
    assert len(table) == 0


def test_release_complete_before_everything_was_sent_is_refused(table: LeaseTable) -> None:
    staged(table)
    open_load(table)
    with pytest.raises(BatonError) as caught:
        table.release(KEY, 5, complete=True)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_PARAMS, "complete")
    assert len(table) == 1


def test_release_of_another_generation_is_stale_and_frees_nothing(table: LeaseTable) -> None:
    staged(table)
    with pytest.raises(BatonError) as caught:
        table.release(KEY, 4, complete=False)
    assert caught.value.code is ErrorCode.KV_STALE_REFERENCE
    assert len(table) == 1


@pytest.mark.parametrize("generation", [None, 5])
def test_release_that_gives_up_ends_the_lease_as_aborted(table: LeaseTable, generation: int | None) -> None:
    staged(table)
    cause = BatonError(ErrorCode.KV_CHECKSUM_MISMATCH, "damaged")
    assert table.release(KEY, generation, complete=False, cause=cause)
    ended = table.take_ended()
    assert [e.outcome for e in ended] == ["aborted"]
    assert ended[0].error is not None and ended[0].error.metadata["cause"] == "KV_CHECKSUM_MISMATCH"
    assert refused(table).code is ErrorCode.KV_LEASE_EXPIRED


def test_release_that_gives_up_while_running_ends_the_lease_before_it_is_computed(table: LeaseTable) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    assert table.release(KEY, None, complete=False)
    assert ends(table) == [("aborted", "")]
    publish_all(table, KEY)
    table.computed(KEY, prefill_result(), True)
    assert ends(table) == []


def test_k9_fail_while_a_reader_is_open_ends_the_lease_only_after_the_reader(table: LeaseTable) -> None:
    staged(table)
    reader = open_load(table)
    error = BatonError(ErrorCode.EXECUTION_EXCEPTION, "step failed")
    assert table.fail(KEY, error)
    assert reader.stop is error
    lease = table.get(KEY)
    assert lease is not None and lease.state is LeaseState.ENDING
    assert ends(table) == []
    table.close_load(reader, sent=False)
    table.close_load(reader, sent=False)
    assert ends(table) == [("aborted", "")]


@pytest.mark.invariant("RPC-5")
def test_fail_twice_keeps_the_first_cause(table: LeaseTable) -> None:
    staged(table)
    assert table.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
    assert not table.fail(KEY, BatonError(ErrorCode.CANCELLED))
    assert refused(table).code is ErrorCode.EXECUTION_EXCEPTION


@pytest.mark.invariant("RPC-5")
def test_fail_twice_under_a_reader_keeps_the_first_cause(table: LeaseTable) -> None:
    staged(table)
    reader = open_load(table)
    table.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
    table.fail(KEY, BatonError(ErrorCode.CANCELLED))
    assert not table.release(KEY, 5, complete=False)
    table.close_load(reader, sent=False)
    ended = table.take_ended()
    assert [e.error.code for e in ended if e.error is not None] == [ErrorCode.EXECUTION_EXCEPTION]


def test_second_end_of_a_load_does_not_take_the_blocks_from_its_reload(table: LeaseTable) -> None:
    staged(table)
    first = open_load(table)
    table.close_load(first, sent=False)
    again = open_load(table, generation=5)
    table.close_load(first, sent=False)
    table.fail(KEY, BatonError(ErrorCode.CANCELLED))
    assert ends(table) == [], "the reload still reads"
    table.close_load(again, sent=False)
    assert ends(table) == [("aborted", "")]


def test_fail_of_a_key_not_admitted_is_remembered_for_its_load(table: LeaseTable, clock: Clock) -> None:
    assert not table.fail(KEY, BatonError(ErrorCode.LONG_PROMPT_ERROR))
    table.fail(KEY, BatonError(ErrorCode.CANCELLED))
    assert refused(table).code is ErrorCode.LONG_PROMPT_ERROR
    clock.now += REMEMBER_S
    assert table.open_load(KEY, None, TOKENS, wanted(), 1 << 20) is None


def test_tombstone_refuses_load_and_admission_until_it_is_forgotten(table: LeaseTable, clock: Clock) -> None:
    table.tombstone(KEY)
    assert table.tombstones == 1
    assert refused(table).code is ErrorCode.REQUEST_TOMBSTONED
    assert table.admit(KEY, 5, TOKENS, BLOCKS, 0) is None
    assert ends(table) == [("aborted", "")]
    clock.now += REMEMBER_S
    table.tick()
    assert table.tombstones == 0
    assert table.admit(KEY, 5, TOKENS, BLOCKS, 0) is not None


def test_remembered_keys_are_bounded(table: LeaseTable) -> None:
    for index in range(500):
        table.tombstone(f"{index}#0.00000000")
    assert table.tombstones == 100


def test_computed_without_hold_ends_the_lease_at_once(table: LeaseTable) -> None:
    staged(table, hold=False)
    assert ends(table) == [("released", "")]
    assert refused(table).code is ErrorCode.KV_LEASE_EXPIRED


def test_computed_without_hold_lets_an_open_load_finish(table: LeaseTable, clock: Clock) -> None:
    table.admit(KEY, 5, TOKENS, BLOCKS, 0)
    reader = open_load(table)
    publish_all(table, KEY)
    table.computed(KEY, prefill_result(), False)
    assert reader.stop is None and ends(table) == []
    drain(reader, clock.now)
    table.close_load(reader, sent=True)
    assert ends(table) == [("released", "")]


def test_error_for_one_caller_is_not_changed_by_another(table: LeaseTable) -> None:
    table.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))
    refused(table).with_context(peer="a")
    assert "peer" not in refused(table).metadata
