"""docs/protocol.md is the truth: every row of its transition tables is run against the state machines."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.checksum import digest
from cache_store.geometry.tp_mapping import peer_map
from cache_store.loading.load import LoadState
from cache_store.serving.lease import Lease, LeaseState
from cache_store.serving.parking import Parked, ParkedState, ParkingTable
from cache_store.serving.reader import Caller, Reader
from cache_store.settings import AgentSettings
from cache_store.transports import TCP, TRANSPORTS
from protos import cache_store_pb2 as pb
from protos import common_pb2
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.lease_fixtures import (
    LAYOUT,
    LEASE_S,
    STALL_S,
    Clock,
    drain,
    make_table,
    prefill_result,
    publish_all,
    wanted,
)
from tests.unit.cache_store.test_load import FIRST, Stream

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"
KEY = "r#0.00000000"
BOTH = [Caller(rank, 2, (0, 1)) for rank in (0, 1)]
ELSEWHERE = Caller(0, 1, (0,), reads=False)


def rows_of(section: str) -> list[tuple[str, str, str]]:
    """(state, event, next state) of the transition table of a section."""
    text = DOCUMENT.read_text(encoding="utf-8")
    body = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    table = body.split("| state | event | next state |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.strip().splitlines()]
    assert all(len(row) == 3 for row in rows) and len(set(rows)) == len(rows)
    return rows  # type: ignore[return-value]


# ---- lease


class LeaseCase:
    """A lease brought into a state, with a reader where the row says so, and everything that can happen to it."""

    def __init__(self, state: str, event: str) -> None:
        self.clock = Clock()
        self.table = make_table(self.clock)
        hold = not ("without hold" in event and state == "computed")
        lease = self.table.admit(KEY, 5, 12, {"full": [1, 2, 3]}, 0)
        assert lease is not None
        self.lease: Lease = lease
        self.reader: Reader | None = None
        self.readers: list[Reader] = []
        if "two readers" in event:
            self.open_both()
        elif "reader" in event or state == "ending":
            self.open()
        if state in ("computed", "ending"):
            self.compute(hold)
        if state == "ending":
            self.fail()
        assert self.lease.state == state

    def open(self) -> None:
        self.reader = self.table.open_load(KEY, None, 12, wanted(), 1 << 20)
        assert self.reader is not None

    def compute(self, hold: bool) -> None:
        publish_all(self.table, KEY)
        self.table.computed(KEY, prefill_result(), hold)

    def fail(self) -> None:
        self.table.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION))

    def give_up(self) -> None:
        self.table.release(KEY, 5, complete=False)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.table.tick()

    def renew_and_wait(self) -> None:
        for _ in range(3):
            self.wait(LEASE_S - 1)
            self.table.renew(KEY, None)

    def move_and_wait(self) -> None:
        assert self.reader is not None
        for _ in range(6):
            self.reader.sent(1, self.clock.now)
            self.wait(LEASE_S)

    def stall(self) -> None:
        for _ in range(20):
            self.wait(STALL_S / 4)

    def close(self) -> None:
        assert self.reader is not None
        self.table.close_load(self.reader, sent=False)

    def open_both(self) -> None:
        """Both ranks of a decode server of two."""
        self.readers = []
        for caller in BOTH:
            reader = self.table.open_load(KEY, None, 12, wanted(), 1 << 20, caller=caller)
            assert reader is not None
            self.readers.append(reader)

    def send(self, number: int) -> None:
        drain(self.readers[number], self.clock.now)
        self.table.close_load(self.readers[number], sent=True)

    def release_first(self) -> None:
        self.open_both()
        self.send(0)
        assert self.table.release(KEY, 5, complete=True, caller=BOTH[0])
        self.send(1)

    def release_both(self) -> None:
        self.release_first()
        assert self.table.release(KEY, 5, complete=True, caller=BOTH[1])

    def one_gives_up(self) -> None:
        self.open_both()
        self.table.close_load(self.readers[0], sent=False)
        assert self.table.release(KEY, 5, complete=False, caller=BOTH[0])

    def first_of_two_closes(self) -> None:
        self.table.close_load(self.readers[0], sent=False)

    def told(self) -> None:
        assert self.table.release(KEY, None, complete=True, caller=ELSEWHERE)

    def send_and_release(self) -> None:
        self.open()
        assert self.reader is not None
        drain(self.reader, self.clock.now)
        self.table.close_load(self.reader, sent=True)
        self.table.release(KEY, 5, complete=True)


LEASE_EVENTS: dict[str, Callable[[LeaseCase], None]] = {
    "publish": lambda case: case.table.publish(KEY, "full", 0, 1),
    "a load opens": LeaseCase.open,
    "any time passes": lambda case: case.wait(100 * LEASE_S),
    "computed": lambda case: case.compute(True),
    "computed without hold": lambda case: case.compute(False),
    "fail": LeaseCase.fail,
    "release gives up": LeaseCase.give_up,
    "renewed in time": LeaseCase.renew_and_wait,
    "lease time over": lambda case: case.wait(LEASE_S),
    "lease time over, reader open and moving": LeaseCase.move_and_wait,
    "lease time over, reader open and stalled": LeaseCase.stall,
    "everything was sent, release complete": LeaseCase.send_and_release,
    "reader closes": LeaseCase.close,
    "reader closes without hold": LeaseCase.close,
    "two ranks open their loads": LeaseCase.open_both,
    "the first of two ranks releases complete": LeaseCase.release_first,
    "both of two ranks release complete": LeaseCase.release_both,
    "one of two ranks gives up, the other reads": LeaseCase.one_gives_up,
    "the first of two readers closes": LeaseCase.first_of_two_closes,
    "a rank that reads elsewhere releases complete": LeaseCase.told,
}


@pytest.mark.parametrize(("state", "event", "after"), rows_of("Lease (P)"))
def test_every_transition_of_a_lease_is_as_documented(state: str, event: str, after: str) -> None:
    case = LeaseCase(state, event)
    LEASE_EVENTS.get(event, LEASE_EVENTS[event.removesuffix(", reader open")])(case)
    assert case.lease.state == after
    ended = case.table.take_ended()
    assert len(ended) == (1 if after == "ended" else 0)
    assert (case.table.get(KEY) is None) == (after == "ended")


# ---- parked load


@pytest.mark.parametrize(("state", "event", "after"), rows_of("Load on P's side"))
def test_every_transition_of_a_parked_load_is_as_documented(state: str, event: str, after: str) -> None:
    clock = Clock()
    table = ParkingTable(2, 2, 10, clock)
    entry = table.park(KEY, "peer")

    def over() -> None:
        clock.now += 10
        table.expire()

    events: dict[str, Callable[[], None]] = {
        "admit": lambda: table.admit(KEY),
        "refuse": lambda: table.refuse(KEY, BatonError(ErrorCode.CANCELLED)),
        "caller goes away": lambda: table.leave(entry),
        "waiting time over": over,
    }
    before: dict[str, Callable[[], None]] = {
        "parked": lambda: None,
        "admitted": events["admit"],
        "refused": events["refuse"],
        "left": events["caller goes away"],
    }
    before[state]()
    assert _state(entry) == state
    events[event]()
    assert _state(entry) == after


def _state(entry: Parked) -> ParkedState:
    return entry.state


# ---- load


def started_and_piece(stream: Stream) -> None:
    stream.load.on_started(pb.Started(generation=1))
    stream.send(0, [FIRST])
    assert stream.load.delivered == 1


def piece_twice(stream: Stream) -> None:
    stream.send(0, [FIRST])
    stream.send(0, [FIRST])


def damaged(stream: Stream) -> None:
    stream.send(0, [FIRST], checksum=digest([memoryview(bytes(LAYOUT.block_bytes))]))


def receive_rest(stream: Stream) -> None:
    for layer in range(LAYOUT.num_layers):
        stream.send(layer, [FIRST, FIRST + 1])


def done(stream: Stream, result: common_pb2.PrefillResult | None = None) -> None:
    receive_rest(stream)
    stream.load.on_done(pb.Done(result=prefill_result() if result is None else result, pieces=4))


def done_and_end(stream: Stream) -> None:
    done(stream)
    stream.load.on_end()


def done_twice(stream: Stream) -> None:
    done(stream)
    stream.load.on_done(pb.Done(result=prefill_result(), pieces=4))


def time_over(stream: Stream) -> None:
    stream.clock.now = stream.load.wait_until()
    stream.load.on_timeout()


LOAD_EVENTS: dict[str, Callable[[Stream], None]] = {
    "Started": lambda stream: stream.load.on_started(pb.Started(generation=1)),
    "RUNNING": lambda stream: stream.load.on_state(pb.COMPUTE_STATE_RUNNING),
    "COMPUTED": lambda stream: stream.load.on_state(pb.COMPUTE_STATE_COMPUTED),
    "piece": lambda stream: stream.send(0, [FIRST]),
    "Started, piece": started_and_piece,
    "piece before Started": lambda stream: stream.send(0, [FIRST]),
    "piece twice": piece_twice,
    "piece not asked for": lambda stream: stream.send(0, [FIRST + 9]),
    "piece damaged": damaged,
    "no RUNNING in time": time_over,
    "no progress in time": time_over,
    "cancelled": lambda stream: stream.load.fail_with(BatonError(ErrorCode.CANCELLED)),
    "end of stream": lambda stream: stream.load.on_end(),
    "Done": done,
    "Done, end of stream": done_and_end,
    "Done with a piece missing": lambda stream: stream.load.on_done(pb.Done(result=prefill_result(), pieces=0)),
    "Done without result": lambda stream: done(stream, common_pb2.PrefillResult()),
    "Done twice": done_twice,
}


@pytest.mark.parametrize(("state", "event", "after"), rows_of("Load on D's side"))
def test_every_transition_of_a_load_is_as_documented(state: str, event: str, after: str) -> None:
    stream = Stream()
    if state in ("running", "computed", "complete"):
        stream.started()
    elif state == "requested" and event in ("RUNNING", "COMPUTED"):
        stream.load.on_started(pb.Started(generation=1))
    if state in ("computed", "complete"):
        stream.computed()
    if state == "complete":
        done_and_end(stream)
    if state == "failed":
        stream.load.fail(BatonError(ErrorCode.KV_CHECKSUM_MISMATCH))
    assert stream.load.state == state
    with contextlib.suppress(BatonError):
        LOAD_EVENTS[event](stream)
    assert stream.load.state == after
    if state == "failed":
        assert stream.load.error is not None and stream.load.error.code is ErrorCode.KV_CHECKSUM_MISMATCH


# ---- names


@pytest.mark.parametrize(
    ("section", "states"),
    [("Lease (P)", LeaseState), ("Load on P's side", ParkedState), ("Load on D's side", LoadState)],
)
def test_states_of_the_document_and_of_the_code_have_the_same_names(
    section: str, states: type[LeaseState] | type[ParkedState] | type[LoadState]
) -> None:
    rows = rows_of(section)
    assert {name for state, _, after in rows for name in (state, after)} == {state.value for state in states}


def test_limits_of_the_document_are_the_defaults_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split("\n## Limits\n")[1].split("\n## ")[0]
    named = dict(re.findall(r"`([a-z_]+)` ([\d.]+)", text))
    defaults = {name: getattr(AgentSettings(), name) for name in AgentSettings.__dataclass_fields__}
    assert set(named) <= set(defaults)
    # By transport, in MiB.
    ((by_tcp, otherwise),) = re.findall(r"`chunk_bytes` (\d+) MiB with tcp, else (\d+) MiB", text)
    for transport in TRANSPORTS:
        mebibytes = int(by_tcp if transport == TCP else otherwise)
        assert AgentSettings().chunk_bytes_of(transport) == mebibytes << 20, transport
    for name, value in named.items():
        assert name == "chunk_bytes" or float(value) == defaults[name], name
    assert set(defaults) - set(named) == {"checksum", "transport", "bulk_channels", "data_port"}


# ---- who reads what


def test_every_example_of_who_reads_what_is_as_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    head = "| h | p | d | rank of D | reads of P | tells besides |\n|---|---|---|---|---|---|\n"
    table = text.split(head)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(rows) == 8
    for *numbers, reads, told in rows:
        heads, prefill, decode, rank = map(int, numbers)
        plan = peer_map({"g": heads}, decode, rank, prefill)
        shares = [peer.shares["g"] for peer in plan if peer.shares]
        part = f"share {shares[0].source_id} of {shares[0].source_count} of " if shares[0].source_count > 1 else ""
        assert reads == part + named([share.peer_rank for share in shares])
        assert told == named([peer.peer_rank for peer in plan if not peer.shares])


def named(ranks: list[int]) -> str:
    if not ranks:
        return "–"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
