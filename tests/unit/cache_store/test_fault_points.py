"""Each fault point of a transfer with each of its actions, on each transport: the load ends once, with the right bytes
or a typed error, and afterwards the same pair works."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from cache_store.events import LoadDone, LoadFailed
from rpc import fault_points, faults
from rpc.errors import ErrorCode
from tests.unit.cache_store.agents import HeldClock, Node, assert_clean, key_of, nodes, settings, until
from tests.unit.cache_store.shared import SharedNode, needs_nixl

KEY = key_of(1)
OURS, THEIRS = [1, 2, 3, 4], [5, 6, 7, 8]
RIGHT = "right"
# No sign of the prefill and no new block are waited for this long. Leases end by a clock that stands still.
BRIEF = {"publish_timeout_s": 3.0, "load_progress_timeout_s": 3.0, "lease_seconds": 0.3}
KINDS = ("started", "running", "pieces", "computed", "done")
_E = ErrorCode
# What a load may end with when an event is lost or comes twice: the reader takes nothing on trust.
LOST = {_E.CACHE_STORE_LOAD_UNKNOWN_ERROR.name, _E.CACHE_STORE_LOAD_BUFFER_TIMEOUT.name, _E.LOAD_CACHE_TIMEOUT.name}
TWICE = {_E.CACHE_STORE_LOAD_UNKNOWN_ERROR.name, _E.READ_BUFFER_MISMATCH.name, _E.LOAD_CACHE_TIMEOUT.name,
         _E.CONNECTION_RESET_BY_PEER.name}  # fmt: skip
FAILED = {_E.CACHE_STORE_STORE_FAILED.name}
FULL = {_E.CACHE_STORE_PUSH_ITEM_FAILED.name}

# fault: how the load may end. Delays are the slow senders and readers.
CASES: dict[str, set[str]] = {
    **{f"cache_store.send_event:delay=0.1,kind={kind}": {RIGHT} for kind in KINDS},
    # That the prompt is being computed is news that a load can do without.
    **{f"cache_store.send_event:drop,kind={kind}": {RIGHT} if kind == "running" else LOST for kind in KINDS},
    **{f"cache_store.send_event:duplicate,kind={kind}": TWICE | {RIGHT} for kind in KINDS},
    **{f"cache_store.send_event:raise=CACHE_STORE_STORE_FAILED,kind={kind}": FAILED for kind in KINDS},
    **{f"cache_store.read_event:drop,nth={nth}": {RIGHT} if nth == 2 else LOST for nth in (1, 2, 3, 4)},
    **{f"cache_store.read_event:duplicate,nth={nth}": TWICE | {RIGHT} for nth in (1, 2, 3, 4)},
    "cache_store.read_event:delay=0.1": {RIGHT},
    "cache_store.read_event:raise=CACHE_STORE_STORE_FAILED,nth=3": FAILED,
    "cache_store.send_piece:drop,layer=1,block=2": LOST,
    "cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,layer=1": FAILED,
    "cache_store.piece_bytes:corrupt,nth=2": {_E.KV_CHECKSUM_MISMATCH.name},
    "cache_store.publish:drop,nth=2": FAILED,
    "cache_store.publish:duplicate,nth=2": {RIGHT},
    "cache_store.publish:raise=CACHE_STORE_STORE_FAILED,nth=2": FAILED,
    "cache_store.queue:full,what=load": FULL,
    "cache_store.queue:full,what=publish": FULL,
    "cache_store.handshake:delay=0.1": {RIGHT},
    "cache_store.handshake:raise=CACHE_STORE_STORE_FAILED,side=decode": FAILED,
    "cache_store.handshake:raise=CACHE_STORE_STORE_FAILED,side=prefill": FAILED,
    "cache_store.load_start:raise=CACHE_STORE_STORE_FAILED": FAILED,
    "cache_store.load_open:delay=0.1": {RIGHT},
    "cache_store.load_open:raise=CACHE_STORE_STORE_FAILED": FAILED,
    "cache_store.release:drop,side=decode": {RIGHT},
    "cache_store.release:drop,side=prefill": {RIGHT},
    "cache_store.release:duplicate,side=decode": {RIGHT},
    "cache_store.release:duplicate,side=prefill": {RIGHT},
    "cache_store.release:raise=CACHE_STORE_STORE_FAILED,side=prefill": {RIGHT},
    "cache_store.renew:drop": {RIGHT},
    "cache_store.lease_word:drop": {RIGHT},
    "cache_store.prove:delay=0.1": {RIGHT},
    "cache_store.prove:raise=CONNECTION_RESET_BY_PEER": {_E.READ_TRANSFER_NOT_DONE.name},
}
# What is read in place has no payload on the way, and only there is something to be proven, mostly without a question.
_ASKED = {"cache_store.prove", "cache_store.lease_word"}
NOT_PASSED = {
    "grpc": _ASKED,
    "tcp": _ASKED,
    "ipc": {"cache_store.piece_bytes"},
    "nixl": {"cache_store.piece_bytes"},
}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(
    params=["grpc", "tcp", "ipc", pytest.param("nixl", marks=[needs_nixl, pytest.mark.extended])], scope="module"
)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def strangers(transport: str) -> Iterator[tuple[Node, Node]]:
    """A pair that has not shaken hands."""
    chosen, clock = settings(transport=transport, **BRIEF), HeldClock()
    made = SharedNode("prefill", chosen, seed=1, clock=clock), SharedNode("decode", chosen, seed=2)
    with nodes(*made) as (prefill, decode):
        yield prefill, decode


def lease_ended(prefill: Node) -> None:
    """By a release or, in a moment, by the clock."""
    clock = prefill.clock
    assert isinstance(clock, HeldClock)
    clock.run()
    prefill.lease_ended()
    clock.hold()


@pytest.fixture(scope="module")
def pair(transport: str) -> Iterator[tuple[Node, Node]]:
    with strangers(transport) as both:
        assert load(*both, KEY) == RIGHT
        lease_ended(both[0])
        yield both


def load(prefill: Node, decode: Node, key: str) -> str:
    """`right`, or the name of the code with which the load failed."""
    for ids in decode.memory["full"]:
        ids[OURS] = 0
    prefill.stage(key, THEIRS)
    decode.load(prefill.source, key, OURS)
    event = decode.next_event()
    if isinstance(event, LoadDone):
        np.testing.assert_array_equal(decode.blocks(OURS), prefill.blocks(THEIRS))
        return RIGHT
    assert isinstance(event, LoadFailed) and event.request_key == key
    decode.agent.cancel_load(key, event.error)
    return event.error.code.name


@pytest.mark.parametrize("fault", CASES)
def test_load_when_a_point_is_hit_then_it_ends_right_or_typed_and_the_pair_goes_on(
    pair: tuple[Node, Node], transport: str, fault: str
) -> None:
    with strangers(transport) if "handshake" in fault else contextlib.nullcontext(pair) as (prefill, decode):
        point = fault.partition(":")[0]
        # Nobody is asked what a word says already.
        faults.arm(fault + (";cache_store.lease_word:drop" if point == "cache_store.prove" else ""))
        ended = load(prefill, decode, f"{fault_key(fault)}#0.00000001")
        if point == "cache_store.release":  # said after the end of the load; the lease must not end by its clock before
            until(lambda: faults.fired(point), "the word that the KV is needed no longer")
        lease_ended(prefill)
        hit = faults.fired(point)
        faults.disarm()
        if point in NOT_PASSED[transport]:
            assert (hit, ended) == (0, RIGHT)
        else:
            assert ended in CASES[fault]
            assert hit > 0 or "renew" in point  # where nobody waits, nothing is renewed
        assert load(prefill, decode, f"{fault_key(fault)}#0.00000002") == RIGHT
        lease_ended(prefill)
        assert_clean(prefill, decode)


def fault_key(fault: str) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in fault)


def test_cases_then_every_point_and_action_of_a_transfer_is_among_them() -> None:
    named = {(fault.partition(":")[0], fault.partition(":")[2].split(",")[0].split("=")[0]) for fault in CASES}
    # A delay is that of any other point; a clock and a tier have tests of their own.
    apart = {"cache_store.clock", "cache_store.tier"}
    missing = {
        (point.name, action)
        for point in fault_points.points()
        if point.name.startswith("cache_store.") and point.name not in apart
        for action in point.actions
        if action != fault_points.DELAY and (point.name, action) not in named
    }
    assert missing == {("cache_store.renew", "raise")}, "which is a renewal that fails: like one that is dropped"
