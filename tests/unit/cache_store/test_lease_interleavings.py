"""Any order of what engine, peers and clock do to leases: each ends once, and never under a reader."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store.events import LeaseEnded
from cache_store.serving.reader import Reader, ReaderState
from rpc.errors import BatonError, ErrorCode
from tests.extent import extent
from tests.unit.cache_store.lease_fixtures import (
    LAYOUT,
    LEASE_S,
    STALL_S,
    Clock,
    Counts,
    make_table,
    prefill_result,
    publish_all,
    wanted,
)

KEYS = [f"r{index}#0.00000000" for index in range(2)]
POOL = 6
TOKENS = 12
keys = st.sampled_from(KEYS)
generations = st.sampled_from(["own", "own", "own", None, "other"])

EXPECTED = {
    ErrorCode.DUPLICATE_REQUEST,
    ErrorCode.INVALID_PARAMS,
    ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
    ErrorCode.KV_STALE_REFERENCE,
    ErrorCode.KV_LEASE_EXPIRED,
    ErrorCode.REQUEST_TOMBSTONED,
    ErrorCode.EXECUTION_EXCEPTION,
    ErrorCode.CANCELLED,
}


class LeaseMachine(RuleBasedStateMachine):
    """A model allocator: blocks are free, or belong to one allocation until its LeaseEnded."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.counts = Counts()
        self.table = make_table(self.clock, self.counts)
        self.free = set(range(POOL))
        self.held: dict[tuple[str, int], set[int]] = {}
        self.ended: dict[tuple[str, int], LeaseEnded] = {}
        self.first_cause: dict[tuple[str, int], ErrorCode] = {}
        self.readers: list[Reader] = []
        self.opened: dict[tuple[str, int], int] = {}
        self.generation = 0

    # ---- the engine

    @precondition(lambda self: len(self.free) >= 3)
    @rule(key=keys, ready=st.integers(0, 3))
    def admit(self, key: str, ready: int) -> None:
        if self.table.get(key) is not None:
            return
        self.generation += 1
        blocks = {self.free.pop() for _ in range(3)}
        self.held[(key, self.generation)] = blocks
        self.table.admit(key, self.generation, TOKENS, {"full": sorted(blocks)}, min(TOKENS, ready * LAYOUT.block_size))

    @rule(key=keys, layer=st.integers(0, LAYOUT.num_layers - 1), upto=st.integers(0, 3))
    def publish(self, key: str, layer: int, upto: int) -> None:
        self.table.publish(key, "full", layer, upto)

    @rule(key=keys, hold=st.booleans())
    def computed(self, key: str, hold: bool) -> None:
        publish_all(self.table, key)
        self.table.computed(key, prefill_result(), hold)

    @rule(key=keys, code=st.sampled_from([ErrorCode.EXECUTION_EXCEPTION, ErrorCode.CANCELLED, None]))
    def fail_or_tombstone(self, key: str, code: ErrorCode | None) -> None:
        self.note_cause(key, code or ErrorCode.REQUEST_TOMBSTONED)
        if code is None:
            self.table.tombstone(key)
        else:
            self.table.fail(key, BatonError(code))

    def open_readers(self) -> list[Reader]:
        return [reader for reader in self.readers if reader.state is ReaderState.OPEN]

    def note_cause(self, key: str, code: ErrorCode) -> None:
        lease = self.table.get(key)
        if lease is not None and lease.error is None:
            self.first_cause[(key, lease.generation)] = code

    # ---- the peers

    def generation_of(self, key: str, which: str | None) -> int | None:
        if which is None:
            return None
        lease = self.table.get(key)
        current = lease.generation if lease is not None else self.generation
        return current if which == "own" else current + 1000

    @rule(key=keys, which=generations, blocks=st.sampled_from([(0, 3), (0, 3), (1, 2), (3, 0), (1, 3)]))
    def load_open(self, key: str, which: str | None, blocks: tuple[int, int]) -> None:
        first, count = blocks
        generation = self.generation_of(key, which)
        try:
            reader = self.table.open_load(key, generation, TOKENS, wanted(first, count), 1)
        except BatonError as error:
            self.known_refusal(error)
            return
        if reader is None:
            assert self.table.get(key) is None and generation is None
            return
        identity = (key, reader.lease.generation)
        assert identity not in self.ended and first + count <= 3
        assert not any(other.lease is reader.lease for other in self.open_readers())
        self.opened[identity] = self.opened.get(identity, 0) + 1
        assert self.opened[identity] <= 2
        self.readers.append(reader)

    @rule(index=st.integers(0, 20))
    def load_reads(self, index: int) -> None:
        readers = self.open_readers()
        if not readers:
            return
        reader = readers[index % len(readers)]
        run = reader.next_run()
        if run is None:
            return
        ids = reader.lease.blocks["full"][run.first : run.first + run.count]
        # What is read belongs to this allocation still, whatever has happened to the request.
        assert set(ids) <= self.held[(reader.lease.key, reader.lease.generation)]
        reader.sent(run.count, self.clock.now)

    @rule(index=st.integers(0, 20), sent=st.booleans())
    def load_end(self, index: int, sent: bool) -> None:
        if self.readers:  # ended ones too: a second end is a no-op
            reader = self.readers[-1 - index % len(self.readers)]
            self.table.close_load(reader, sent=sent and reader.exhausted())

    @rule(key=keys, which=generations)
    def renew(self, key: str, which: str | None) -> None:
        try:
            assert self.table.renew(key, self.generation_of(key, which)) == LEASE_S
        except BatonError as error:
            self.known_refusal(error)

    @rule(key=keys, which=generations, complete=st.booleans())
    def release(self, key: str, which: str | None, complete: bool) -> None:
        generation = self.generation_of(key, which)
        lease = self.table.get(key)
        may_end = lease is not None and lease.error is None
        try:
            found = self.table.release(key, generation, complete)
        except BatonError as error:
            self.known_refusal(error)
            return
        assert found == may_end

    def known_refusal(self, error: BatonError) -> None:
        assert error.code in EXPECTED, error

    # ---- the clock

    @rule(seconds=st.sampled_from([0.0, 1.0, 1.0, LEASE_S / 3, LEASE_S / 3, LEASE_S, STALL_S + LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.table.tick()

    # ---- what always holds

    @invariant()
    def every_allocation_ends_once_and_only_without_reader(self) -> None:
        for ended in self.table.take_ended():
            identity = (ended.request_key, ended.generation)
            assert identity not in self.ended, "a lease ended twice"
            self.ended[identity] = ended
            assert not any(reader.lease.generation == ended.generation for reader in self.open_readers()), (
                "blocks were freed under a reader"
            )
            blocks = self.held.pop(identity)
            assert not blocks & self.free, "blocks were freed twice"
            self.free |= blocks
            cause = self.first_cause.get(identity)
            if cause is not None:
                assert ended.outcome == "aborted" and ended.error is not None and ended.error.code is cause
        for reader in self.open_readers():
            assert reader in reader.lease.readers.values(), "an open reader does not hold its lease"
        live = {(key, lease.generation) for key in KEYS if (lease := self.table.get(key)) is not None}
        assert live == set(self.held), "a block is held by no lease, or a lease holds none"
        assert len(self.free) + sum(map(len, self.held.values())) == POOL

    def teardown(self) -> None:
        """Whatever happened: readers end, time passes, and everything is free again."""
        for reader in self.readers:
            self.table.close_load(reader, sent=False)
        for key in KEYS:
            publish_all(self.table, key)
            self.table.computed(key, prefill_result(), True)
        self.clock.now += STALL_S + 2 * LEASE_S
        self.table.tick()
        self.every_allocation_ends_once_and_only_without_reader()
        assert len(self.free) == POOL
        assert len(self.ended) == self.generation


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(deadline=None, derandomize=True, max_examples=extent(50, 100), stateful_step_count=60)
