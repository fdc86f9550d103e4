"""Loads that come before their request: bounded in number, per peer and in time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_store.serving.parking import Parked, ParkedState, ParkingTable
from rpc.errors import BatonError, ErrorCode


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(call: object, *arguments: object) -> BatonError:
    with pytest.raises(BatonError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


def test_park_then_admit_wakes_the_load_once() -> None:
    table = ParkingTable(4, 4, 10, Clock())
    woken = []
    entry = table.park("a", "peer")
    entry.notify = lambda: woken.append(entry.state)
    table.admit("a")
    table.admit("a")
    table.leave(entry)
    assert woken == [ParkedState.ADMITTED]
    assert len(table) == 0


def test_park_beside_a_parked_load_of_the_key_is_a_duplicate() -> None:
    table = ParkingTable(4, 4, 10, Clock())
    table.park("a", "one")
    assert refused(table.park, "a", "two").code is ErrorCode.DUPLICATE_REQUEST


def test_park_when_the_table_is_full_is_refused_at_once() -> None:
    table = ParkingTable(2, 2, 10, Clock())
    table.park("a", "one")
    table.park("b", "two")
    assert refused(table.park, "c", "three").code is ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED


def test_park_when_one_peer_has_its_share_leaves_room_for_others() -> None:
    table = ParkingTable(4, 2, 10, Clock())
    table.park("a", "one")
    table.park("b", "one")
    assert refused(table.park, "c", "one").code is ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED
    table.park("c", "two")


def test_parked_load_when_its_time_is_over_ends_with_buffer_timeout() -> None:
    clock = Clock()
    table = ParkingTable(4, 4, 10, clock)
    entry = table.park("a", "peer")
    clock.now = 9.9
    assert table.next_expiry_in() == pytest.approx(0.1)
    table.expire()
    assert entry.state is ParkedState.PARKED
    clock.now = 10.0
    table.expire()
    assert entry.state is ParkedState.REFUSED
    assert entry.error is not None and entry.error.code is ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT
    assert table.next_expiry_in() is None


def test_park_makes_room_of_what_has_expired() -> None:
    clock = Clock()
    table = ParkingTable(1, 1, 10, clock)
    table.park("a", "peer")
    clock.now = 10.0
    table.park("b", "peer")


def test_refuse_ends_the_load_with_the_prefills_own_failure() -> None:
    table = ParkingTable(4, 4, 10, Clock())
    entry = table.park("a", "peer")
    error = BatonError(ErrorCode.LONG_PROMPT_ERROR, "too long")
    table.refuse("a", error)
    table.refuse("a", BatonError(ErrorCode.CANCELLED))
    assert entry.error is error


class ParkingMachine(RuleBasedStateMachine):
    """Any order of events: each load ends once, the counts add up, the bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = ParkingTable(5, 3, 10, self.clock)
        self.entries: list[Parked] = []
        self.ends: dict[int, int] = {}

    @rule(key=st.sampled_from("abcdefgh"), peer=st.sampled_from(["x", "y", "z"]))
    def park(self, key: str, peer: str) -> None:
        parked = [entry for entry in self.entries if entry.state is ParkedState.PARKED]
        if any(entry.key == key for entry in parked):
            assert refused(self.table.park, key, peer).code is ErrorCode.DUPLICATE_REQUEST
            return
        if len(parked) == 5 or sum(entry.peer == peer for entry in parked) == 3:
            assert refused(self.table.park, key, peer).code is ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED
            return
        entry = self.table.park(key, peer)
        self.entries.append(entry)

        def ended(of: int = id(entry)) -> None:
            self.ends[of] = self.ends.get(of, 0) + 1

        entry.notify = ended

    @rule(key=st.sampled_from("abcdefgh"))
    def admit(self, key: str) -> None:
        self.table.admit(key)

    @rule(key=st.sampled_from("abcdefgh"))
    def refuse(self, key: str) -> None:
        self.table.refuse(key, BatonError(ErrorCode.CANCELLED))

    @rule(index=st.integers(0, 40))
    def leave(self, index: int) -> None:
        if self.entries:
            self.table.leave(self.entries[index % len(self.entries)])

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.table.expire()

    @invariant()
    def every_load_is_parked_or_ended_once(self) -> None:
        parked = [entry for entry in self.entries if entry.state is ParkedState.PARKED]
        assert len(parked) == len(self.table) <= 5
        assert all(sum(entry.peer == peer for entry in parked) <= 3 for peer in "xyz")
        assert len({entry.key for entry in parked}) == len(parked)
        assert all(count == 1 for count in self.ends.values())
        assert all((entry.error is not None) == (entry.state is ParkedState.REFUSED) for entry in self.entries)


TestParking = ParkingMachine.TestCase
TestParking.settings = settings(deadline=None, derandomize=True, max_examples=40, stateful_step_count=40)
