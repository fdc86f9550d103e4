"""Any order of what can happen while a peer reads KV by itself: bytes of another request never count as its own.

P tells of blocks that are ready, D copies them whenever it comes to it, and asks at the end whether the lease stood. P
may have ended the lease meanwhile, for any of its reasons, and given the blocks to requests that wrote into them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache_store.loading.load import TERMINAL, LoadState
from cache_store.serving.lease import LeaseTable
from cache_store.serving.reader import Caller, ReaderState
from rpc.errors import BatonError, ErrorCode
from tests.extent import extent
from tests.unit.cache_store.lease_fixtures import LAYOUT, LEASE_S, STALL_S, Clock
from tests.unit.cache_store.one_sided import (
    BLOCKS,
    HALVES,
    Bytes,
    Cell,
    LeaseWords,
    Memory,
    Prefill,
    Transfer,
    new_load,
    open_reader,
)

pytestmark = pytest.mark.timeout(600)  # of the long form, on a busy machine

KEYS = [f"r{index}#0.00000000" for index in range(5)]
POOL = 4  # of P: two prompts
D_POOL = 8
PIECES = BLOCKS * LAYOUT.num_layers
PROGRESS_S = 2 * LEASE_S

keys = st.sampled_from(KEYS)
index = st.integers(0, 7)

# What may come next, each as the method of the machine and what it is called with.
ACTIONS = st.one_of(
    st.tuples(st.just("admit"), keys, st.sampled_from([0, 0, 1, 2])),
    st.tuples(
        st.just("compute"),
        keys,
        st.lists(st.integers(0, LAYOUT.num_layers - 1), max_size=4),
        st.integers(1, BLOCKS),
        st.sampled_from(["", "held", "held", "not held"]),
    ),
    st.tuples(
        st.just("lease_ends"),
        keys,
        st.sampled_from([ErrorCode.EXECUTION_EXCEPTION, ErrorCode.CANCELLED, None, "expiry"]),
        st.booleans(),
    ),
    st.tuples(st.just("server_starts_again"), st.sampled_from(["prefill", "decode", *["neither"] * 6])),
    st.tuples(st.just("stream_goes_on"), index, st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("stream_goes_on"), index, st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("event_is_lost_or_comes_twice"), index, st.sampled_from(["drop", "duplicate", *[""] * 6])),
    st.tuples(
        st.just("request_is_handed_over"),
        keys,
        st.sampled_from([True, True, False]),
        st.sampled_from([5, 20]),
        st.integers(0, 2 * PIECES),
    ),
    st.tuples(
        st.just("request_is_handed_over"),
        keys,
        st.sampled_from([True, True, False]),
        st.just(20),
        st.integers(0, 2 * PIECES),
    ),
    st.tuples(st.just("load"), keys, st.integers(0, 1), st.booleans()),
    *[
        st.tuples(
            st.just("copies_go_on"),
            index,
            index,
            st.sampled_from([0, 1, PIECES, 2 * PIECES, 2 * PIECES]),
            st.booleans(),
            st.sampled_from([0, 9, 9]),
        )
        for _ in range(3)
    ],
    st.tuples(
        st.just("decode_server_lets_go"),
        index,
        st.sampled_from([True, False, False]),
        st.sampled_from([0, 1, 1, 2]),
        st.sampled_from([True, True, True, False]),
    ),
    st.tuples(st.just("renew"), keys, st.booleans()),
    st.tuples(
        st.just("time_passes"), st.sampled_from([0.0, 1.0, LEASE_S / 3, LEASE_S / 3, LEASE_S, STALL_S + LEASE_S])
    ),
)

REFUSALS = {
    ErrorCode.DUPLICATE_REQUEST,
    ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
    ErrorCode.KV_STALE_REFERENCE,
    ErrorCode.KV_LEASE_EXPIRED,
    ErrorCode.PEER_RESTARTED,
    ErrorCode.REQUEST_TOMBSTONED,
    ErrorCode.EXECUTION_EXCEPTION,
    ErrorCode.CANCELLED,
}


def known(refusal: BatonError) -> None:
    assert refusal.code in REFUSALS, refusal


class OneSidedMachine(RuleBasedStateMachine):
    """One prefill server that may start again, and the ranks of one decode server that may too."""

    ranks = 1
    early = False
    make_words: Callable[[], LeaseWords | None] = staticmethod(lambda: None)  # readers have to ask

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.lives = [Prefill(self.clock, 0, POOL, self.make_words())]
        self.memory: Memory = {}  # of D; ranks use blocks of their own
        self.free = set(range(D_POOL))
        self.transfers: list[Transfer] = []
        self.done_with: set[tuple[int, str, int, int]] = set()  # leases that a rank itself has released
        group = tuple(range(self.ranks))
        self.callers = [Caller(rank, self.ranks, group) for rank in group]

    @staticmethod
    def prove(table: LeaseTable, key: str, generation: int | None) -> object:
        return table.renew(key, generation, "open_load")

    @property
    def server(self) -> Prefill:
        return self.lives[-1]

    def a_transfer(self, number: int, *, ended: bool = False) -> Transfer | None:
        """One of those that are open, or whose blocks are still their own."""
        live = [each for each in self.transfers if not each.given_back and ended >= each.quiet]
        return live[number % len(live)] if live else None

    @rule(action=ACTIONS)
    def then(self, action: tuple[Any, ...]) -> None:
        """One rule for all: were each a rule of its own, most runs would be without some of them."""
        name, *arguments = action
        getattr(self, name)(*arguments)

    # ---- P's engine

    def blocks_come_back(self, *, written: bool) -> None:
        """The engine hears which leases have ended; with `written`, other requests have used their blocks since."""
        self.take_ended(self.server)
        if written:
            for block in self.server.free:
                self.server.scribble(block)

    def admit(self, key: str, ready: int) -> None:
        self.blocks_come_back(written=False)
        waiting = self.server.table.get(key) is not None or any(key == owner for owner, _ in self.server.held)
        if not waiting and len(self.server.free) >= BLOCKS:
            self.server.admit(key, ready)

    def compute(self, key: str, layers: list[int], upto: int, end: str) -> None:
        for layer in layers:
            self.server.compute(key, layer, upto)
        if end:
            self.server.finish(key, end == "held")

    def lease_ends(self, key: str, why: ErrorCode | str | None, written: bool) -> None:
        """And with `written` its blocks have been those of another request before anybody else does anything."""
        if why == "expiry":
            self.clock.now += LEASE_S
            self.server.table.tick(lambda key: False)
        elif why is None:
            self.server.note_cause(key, ErrorCode.REQUEST_TOMBSTONED)
            self.server.table.tombstone(key)
        else:
            assert isinstance(why, ErrorCode)
            self.server.note_cause(key, why)
            self.server.table.fail(key, BatonError(why))
        if written:
            self.blocks_come_back(written=True)

    def server_starts_again(self, which: str) -> None:
        if which == "prefill":
            # What it had written is still on its way, and its memory can be read for as long as D has it mapped.
            for transfer in self.transfers:
                if transfer.server is self.server and transfer.load.state not in TERMINAL:
                    transfer.events.append(("error", BatonError(ErrorCode.CONNECTION_RESET_BY_PEER)))
                    self.server.table.close_load(transfer.reader, sent=False)
            self.lives.append(Prefill(self.clock, len(self.lives), POOL, self.make_words()))
        elif which == "decode":
            # Its memory is gone, and its calls have ended without a word.
            for transfer in self.transfers:
                transfer.copies.clear()
                transfer.fail(BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))
                self.look_at(transfer)
                if not transfer.given_back:
                    self.give_back(transfer)

    # ---- the wire

    def stream_goes_on(self, number: int, written: int, read: int) -> None:
        transfer = self.a_transfer(number)
        if transfer is None:
            return
        for _ in range(written if transfer.server is self.server else 0):
            transfer.serve()
        for _ in range(read):
            transfer.read_event()

    def event_is_lost_or_comes_twice(self, number: int, effect: str) -> None:
        transfer = self.a_transfer(number)
        if transfer is not None:
            transfer.read_event(effect)

    # ---- D

    def request_is_handed_over(self, key: str, hold: bool, events: int, copies: int) -> None:
        """As it mostly goes: the KV is computed while it is loaded, P has written so many events, D has read them, and
        a part of what they name has been copied."""
        self.admit(key, 0)
        for rank in range(self.ranks):
            self.load(key, rank, again=False)
        self.server.finish(key, hold)
        for transfer in self.transfers:
            if transfer.key == key and transfer.server is self.server:
                for _ in range(events):
                    transfer.serve()
                while transfer.read_event():
                    pass
                if self.early:
                    transfer.ask(self.server, self.prove, early=True)
                for _ in range(copies):
                    transfer.copy(0, self.memory)

    def load(self, key: str, rank: int, again: bool) -> None:
        """The first one, or a reload, which knows the generation; a second one beside an open one is refused."""
        if len(self.free) < BLOCKS:
            return
        caller = self.callers[rank % self.ranks]
        before = [each for each in self.transfers if each.key == key and each.caller == caller]
        server = before[-1].server if before and again else self.server
        generation = before[-1].load.generation if before and again else None
        try:
            if server is not self.server:
                raise BatonError(ErrorCode.PEER_RESTARTED)
            reader = open_reader(server, key, generation, caller)
        except BatonError as error:
            known(error)
            return
        if reader is None:
            assert server.table.get(key) is None and generation is None
            return
        same = [each for each in before if each.server is server and each.reader.lease is reader.lease]
        assert len(same) < 2 and not any(each.reader.state is ReaderState.OPEN for each in same)
        targets = [self.free.pop() for _ in range(BLOCKS)]
        load = new_load(targets, self.clock, PROGRESS_S)
        self.transfers.append(Transfer(key, caller, server, reader, load, targets))

    def copies_go_on(self, number: int, which: int, count: int, asks: bool, read: int) -> None:
        transfer = self.a_transfer(number)
        if transfer is None:
            return
        for _ in range(count):
            transfer.copy(which, self.memory)
        if asks:
            transfer.ask(self.server, self.prove, early=self.early)
        for _ in range(read):
            transfer.read_event()

    def decode_server_lets_go(self, number: int, gives_up: bool, sends: int, complete: bool) -> None:
        """Its blocks are used again once nothing writes them; P hears of it once, twice or never."""
        transfer = self.a_transfer(number, ended=not gives_up)
        if transfer is None:
            return
        if gives_up:
            transfer.fail(BatonError(ErrorCode.CANCELLED))
            self.look_at(transfer)
        if not transfer.quiet:
            return
        self.give_back(transfer)
        done = transfer.load.state is LoadState.COMPLETE
        for _ in range(sends if transfer.server is self.server else 0):
            self.done_with.add(transfer.identity)  # a reload beside it, which no engine begins, has to end
            try:
                self.server.table.release(
                    transfer.key, transfer.load.generation, done and complete, caller=transfer.caller
                )
            except BatonError as error:
                known(error)

    def renew(self, key: str, own: bool) -> None:
        try:
            lease = self.server.table.get(key)
            generation = lease.generation if own and lease is not None else None
            assert self.server.table.renew(key, generation) == LEASE_S
        except BatonError as error:
            known(error)

    # ---- time

    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.server.table.tick()
        for transfer in self.transfers:
            if transfer.load.state not in TERMINAL and transfer.load.wait_until() <= self.clock.now:
                transfer.load.on_timeout()

    # ---- what always holds

    def give_back(self, transfer: Transfer) -> None:
        assert transfer.quiet and not transfer.given_back
        transfer.given_back = transfer.hung_up = True
        assert not self.free & set(transfer.targets), "blocks were given back twice"
        self.free |= set(transfer.targets)

    def take_ended(self, server: Prefill) -> None:
        for ended in server.take_ended():
            identity = (ended.request_key, ended.generation)
            of_it = [
                each
                for each in self.transfers
                if each.server is server and (each.key, each.reader.lease.generation) == identity
            ]
            assert not any(each.reader.state is ReaderState.OPEN for each in of_it), "blocks were freed under a reader"
            if ended.outcome == "released":
                reading = [
                    each
                    for each in of_it
                    if each.announced and each.load.state not in TERMINAL and each.identity not in self.done_with
                ]
                assert not reading, "a lease came to an end without cause while its peer still read"

    def look_at(self, transfer: Transfer) -> None:
        """What a load has ended with is its end, and only the request's own bytes are a success."""
        load = transfer.load
        if transfer.end is not None:
            assert load.state is transfer.end, f"a load ended {transfer.end}, and then {load.state}"
            return
        if load.state not in TERMINAL:
            return
        transfer.end = load.state
        transfer.hung_up = True
        if load.state is not LoadState.COMPLETE:
            assert load.error is not None
            return
        assert load.error is None and load.missing == 0 and load.result is not None
        assert load.generation == transfer.reader.lease.generation
        for layer in range(LAYOUT.num_layers):
            for number, target in enumerate(transfer.targets):
                for half in range(HALVES):
                    have = self.memory.get(Cell(layer, target, half))
                    own = Bytes(
                        transfer.server.life, transfer.key, transfer.reader.lease.generation, layer, number, half
                    )
                    assert have == own, f"a load is complete with {have} in the place of {own}"

    @invariant()
    def every_load_and_lease_ends_once_and_no_foreign_byte_counts(self) -> None:
        for transfer in self.transfers:
            self.look_at(transfer)
        server = self.server
        assert len(server.free) + sum(map(len, server.held.values())) == POOL
        taken = sum(len(each.targets) for each in self.transfers if not each.given_back)
        assert len(self.free) + taken == D_POOL

    def teardown(self) -> None:
        """Whatever happened: with everything at its end, both servers have all their blocks again."""
        server = self.server
        for transfer in self.transfers:
            transfer.fail(BatonError(ErrorCode.CANCELLED))
            while transfer.copies:
                transfer.copy(0, self.memory)
            self.look_at(transfer)
            if not transfer.given_back:
                self.give_back(transfer)
            while transfer.serve():
                pass
        for key in KEYS:
            server.finish(key, True)
        self.clock.now += STALL_S + 2 * LEASE_S
        server.table.tick()
        self.take_ended(server)
        assert len(server.free) == POOL and not server.held
        assert len(server.ended) == server.generations
        assert len(self.free) == D_POOL
        assert all(transfer.end is not None for transfer in self.transfers)


class SeesMachine(OneSidedMachine):
    """Of one machine: the lease's word tells whether it stood; when there is none, or it says nothing, P is asked."""

    make_words = staticmethod(LeaseWords)


class RanksMachine(OneSidedMachine):
    """Two ranks read the KV of one: it stands until both have let go."""

    ranks = 2


limits = settings(deadline=None, derandomize=True, stateful_step_count=60)
TestOneSided = OneSidedMachine.TestCase
TestOneSided.settings = settings(limits, max_examples=extent(60, 3000))
TestOneSidedThatSee = SeesMachine.TestCase
TestOneSidedThatSee.settings = settings(limits, max_examples=extent(40, 3000))
TestOneSidedRanks = RanksMachine.TestCase
TestOneSidedRanks.settings = settings(limits, max_examples=extent(30, 1500))


def taken_for_granted(table: LeaseTable, key: str, generation: int | None) -> None:
    """In the place of the question: whatever was read counts."""


class NeverAsks(OneSidedMachine):
    prove = staticmethod(taken_for_granted)


class AsksEarly(OneSidedMachine):
    early = True


class WordsThatStay(LeaseWords):
    def clear(self, index: int) -> None:
        self.free.append(index)


class NeverTold(OneSidedMachine):
    make_words = staticmethod(WordsThatStay)


@pytest.mark.parametrize("careless", [NeverAsks, AsksEarly, NeverTold])
def test_machine_when_the_decode_server_asks_early_or_not_at_all_then_it_finds_foreign_bytes(
    careless: type[OneSidedMachine],
) -> None:
    found = settings(limits, max_examples=200, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError, match="a load is complete with"):
        run_state_machine_as_test(careless, settings=found)
