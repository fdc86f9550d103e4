"""Peers that are gone, are others than expected, or break the protocol: each is told apart, and none hangs a load."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from cache_store.agent import GroupLayout, KvSourceRef, LoadDone
from cache_store.loading.peers import FORGET_LOST_S, Peers, PeerState
from cache_store.observations import ignore
from cache_store.transports import Offer
from protos import cache_store_pb2 as pb
from protos import cache_store_pb2_grpc as pb_grpc
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from rpc.status import trailing_metadata
from tests.integration.cluster import free_port
from tests.unit.cache_store.agents import LAYOUT, Node, assert_clean, key_of, nodes, prefill_result, settings, until
from tests.unit.cache_store.lease_fixtures import Clock

KEY = key_of(1)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    with nodes(Node("prefill", seed=1), Node("decode", seed=2)) as (prefill, decode):
        yield prefill, decode
        faults.disarm()
        assert_clean(prefill, decode)


PREFILL_PROCESS = """
import sys
from rpc import faults
from tests.unit.cache_store.lease_fixtures import Clock
from tests.unit.cache_store.agents import Node, key_of

node = Node("prefill", seed=1)
faults.arm("cache_store.send_piece:delay=60,layer=1")
node.stage(key_of(1), [5, 6])
print(node.address, flush=True)
sys.stdin.read()
"""


def test_k1_peer_killed_in_mid_load_ends_it_soon_and_nothing_more_is_needed_from_it() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", PREFILL_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        nodes(Node("decode", settings(connect_timeout_s=3), seed=2)) as (decode,),
    ):
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            decode.load(KvSourceRef("prefill", (address,), 1), KEY, [1, 2])
            until(lambda: decode.count("kv_transfer_pieces_total", result="ok") == 2, "layer 0 has come")
            process.kill()
            failed = decode.load_failed()
            assert failed.error.code is ErrorCode.CONNECTION_RESET_BY_PEER
            assert (failed.delivered, failed.missing) == (2, 4)
            assert failed.retriable_here
            decode.load(KvSourceRef("prefill", (address,), 1), KEY, [3, 4], reload=True)
            assert decode.load_failed().error.code in (
                ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
                ErrorCode.CONNECTION_RESET_BY_PEER,  # where the connection's end was not known yet
            )
            assert decode.agent.stats().peers_lost == 1
            assert_clean(decode)
        finally:
            process.kill()


def test_peer_that_shuts_down_in_mid_load_ends_it_with_its_cause() -> None:
    faults.arm("cache_store.send_piece:delay=30,layer=1")
    prefill, decode = Node("prefill", seed=1), Node("decode", seed=2)
    with nodes(decode):
        decode.load(prefill.source, KEY, [1, 2])
        prefill.stage(KEY, [5, 6])
        until(lambda: decode.count("kv_transfer_pieces_total", result="ok") == 2, "layer 0 has come")
        prefill.agent.close(10)
        failed = decode.load_failed()
        assert failed.error.code in (ErrorCode.SERVER_DRAINING, ErrorCode.CONNECTION_RESET_BY_PEER)
        assert (failed.delivered, failed.missing) == (2, 4)
        decode.agent.cancel_load(KEY, failed.error)
        assert_clean(decode)


def test_peer_that_cannot_be_reached_is_a_connect_failure() -> None:
    with socket.socket() as reserved, nodes(Node("decode", settings(connect_timeout_s=0.3), seed=2)) as (decode,):
        reserved.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens there
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        decode.load(KvSourceRef("prefill", (address,), 1), KEY, [1])
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED
        assert failed.retriable_here
        assert decode.count("handshakes_total", result="failed") == 1
        assert decode.agent.stats().peers_lost == 1
        assert address not in failed.error.message and failed.error.metadata["peer"] == address


def test_peer_that_accepts_but_never_answers_is_a_connect_failure_within_its_limit() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        nodes(Node("decode", settings(connect_timeout_s=0.3))) as (decode,),
    ):
        source = KvSourceRef("prefill", (f"127.0.0.1:{silent.getsockname()[1]}",), 1)
        decode.load(source, KEY, [1])
        assert decode.load_failed().error.code is ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED


def test_h2_another_engine_at_the_address_is_restarted_with_both_ids(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.load(KvSourceRef("old-engine", (prefill.address,), 1), KEY, [1])
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.PEER_RESTARTED
    assert failed.error.metadata["expected_engine_id"] == "old-engine"
    assert failed.error.metadata["engine_id"] == "prefill"
    assert not failed.retriable_here
    assert decode.count("peer_restarts_total") == 1
    assert decode.count("handshakes_total", result="restarted") == 1
    assert decode.count("kv_stale_references_total", kind="peer_restarted") == 1
    # A decode server that is sent to itself finds out in the same way.
    decode.load(KvSourceRef("prefill", (decode.address,), 1), key_of(2), [1])
    assert decode.load_failed().error.code is ErrorCode.PEER_RESTARTED


def test_restarted_peer_on_the_same_port_is_found_out_and_the_new_one_served() -> None:
    prefill, decode = Node("prefill", seed=1, port=free_port()), Node("decode", seed=2)
    with nodes(decode):
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        decode.load_done()
        old, port = prefill.source, int(prefill.address.rsplit(":", 1)[1])
        prefill.close()
        with nodes(Node("prefill-restarted", seed=4, port=port)) as (again,):
            decode.load(old, key_of(2), [1])
            assert decode.load_failed().error.code in (
                ErrorCode.PEER_RESTARTED,
                ErrorCode.CONNECTION_RESET_BY_PEER,
                ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
            )
            again.stage(key_of(3), [6])

            def loaded() -> bool:
                decode.load(again.source, key_of(3), [2])
                return isinstance(decode.next_event(), LoadDone)

            until(loaded, "the new engine serves")
            assert np.array_equal(decode.blocks([2]), again.blocks([6]))


@pytest.mark.invariant("RPC-31")
def test_incompatible_peer_is_refused_with_every_differing_fact(pair: tuple[Node, Node]) -> None:
    prefill, _ = pair
    with nodes(Node("other", model="model-b", seed=5)) as (other,):
        other.load(prefill.source, KEY, [1])
        failed = other.load_failed()
        assert failed.error.code is ErrorCode.INCOMPATIBLE_PEER
        assert failed.error.metadata["model_fingerprint"] == "model-b / model-a"
        assert other.count("handshakes_total", result="incompatible") == 1
        assert prefill.count("handshakes_total", result="incompatible") == 1
        assert other.agent.stats().peers_incompatible == 1


def test_h1_death_of_one_decode_server_does_not_touch_the_others(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    faults.arm(f"cache_store.send_piece:delay=30,key={key_of(9)}")
    dying = Node("dying", seed=8)
    prefill.stage(key_of(9), [9, 10])
    dying.load(prefill.source, key_of(9), [1, 2])
    until(lambda: prefill.agent.stats().readers == 1, "the load is open")
    dying.agent.close(10)
    prefill.stage(KEY, [5])
    decode.load(prefill.source, KEY, [1])
    decode.load_done()
    assert {prefill.lease_ended().request_key for _ in range(2)} == {KEY, key_of(9)}


async def test_peers_that_stay_lost_are_forgotten_with_their_channels() -> None:
    clock = Clock()
    with nodes(Node("prefill", seed=1)) as (prefill,):
        peers = Peers(prefill.identity, settings(), Offer(), None, ignore, clock)
        await peers.ready(prefill.address, "prefill")
        lost = peers.get("127.0.0.1:1")
        peers.note_failure(lost.address, BatonError(ErrorCode.CONNECTION_RESET_BY_PEER))
        clock.now += FORGET_LOST_S - 1
        peers.look_after()
        assert (peers.count(PeerState.CONNECTED), peers.count(PeerState.LOST)) == (1, 1)
        clock.now += 1
        peers.look_after()
        assert (peers.count(PeerState.CONNECTED), peers.count(PeerState.LOST)) == (1, 0)
        await peers.close()


# ---- a peer that breaks the protocol


class Scripted(pb_grpc.CacheStoreServicer):
    """A cache store that answers a load with the events it is given, however wrong they are."""

    groups = (LAYOUT.to_proto(),)
    agreed: dict[str, object] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, events: list[pb.LoadEvent | bytes], end: Exception | None = None) -> None:
        self.events = events
        self.end = end
        self.released = threading.Event()

    def Handshake(self, request: pb.HandshakeRequest, context: object) -> pb.HandshakeResponse:
        usual = {"transport": "grpc", "checksum": "off", "lease_seconds": 30}
        return pb.HandshakeResponse(engine_id="prefill", tp_size=1, rank=0, groups=self.groups, **usual | self.agreed)

    def Load(self, request: pb.LoadRequest, context: object) -> Iterator[pb.LoadEvent]:
        yield from self.events
        if isinstance(self.end, BatonError):
            context.set_trailing_metadata(trailing_metadata(self.end))  # type: ignore[attr-defined]
            context.abort(self.end.spec.grpc, self.end.message)  # type: ignore[attr-defined]
        if self.end is not None:
            context.abort(grpc.StatusCode.INTERNAL, "no details")  # type: ignore[attr-defined]

    def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        self.released.set()
        return pb.ReleaseResponse(found=True)


@contextlib.contextmanager
def scripted(events: list[pb.LoadEvent], end: Exception | None = None) -> Iterator[KvSourceRef]:
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_CacheStoreServicer_to_server(Scripted(events, end), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield KvSourceRef("prefill", (f"127.0.0.1:{port}",), 1)
    finally:
        server.stop(0).wait(5)


def piece(layer: int, blocks: list[int], data: bytes | None = None) -> pb.LoadEvent:
    payload = bytes(LAYOUT.block_bytes * len(blocks)) if data is None else data
    return pb.LoadEvent(
        pieces=pb.PieceHeader(group="full", layer=layer, blocks=blocks, block_bytes=LAYOUT.block_bytes), data=payload
    )


START = [pb.LoadEvent(started=pb.Started(generation=1)), pb.LoadEvent(state=pb.COMPUTE_STATE_RUNNING)]
ALL = [piece(layer, [0]) for layer in range(LAYOUT.num_layers)]
TWO_IN_ONE = pb.LoadEvent.FromString(
    ALL[0].SerializeToString() + pb.LoadEvent(state=pb.COMPUTE_STATE_RUNNING).SerializeToString()
)
END = [pb.LoadEvent(state=pb.COMPUTE_STATE_COMPUTED), pb.LoadEvent(done=pb.Done(result=prefill_result(), pieces=3))]


def test_scripted_peer_that_keeps_to_the_protocol_is_loaded_from() -> None:
    """So that the failures below are due to what is wrong in them. Also: a sender in another encoding is understood."""
    with scripted([*START, *ALL, *END]) as source, nodes(Node("decode")) as (decode,):
        decode.load(source, KEY, [1])
        decode.load_done()


@pytest.mark.parametrize("block_size", [0, 6], ids=["absent", "of which neither is a multiple"])
def test_handshake_when_the_peer_does_not_name_block_sizes_that_fit_then_it_is_a_breach(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = GroupLayout.of("full", num_layers=3, num_kv_heads=2, head_dim=8, block_size=6, dtype="bfloat16")
    monkeypatch.setattr(Scripted, "groups", (other.to_proto(),) if block_size else ())
    with scripted([*START, *ALL, *END]) as source, nodes(Node("decode")) as (decode,):
        decode.load(source, KEY, [1])
        error = decode.load_failed().error
        assert (error.code, error.breach) == (ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, "absent_field")
        assert "block sizes" in error.metadata["breach"]
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        assert_clean(decode)


@pytest.mark.parametrize(
    "agreed",
    [
        {"lease_seconds": math.nan},
        {"lease_seconds": math.inf},
        {"lease_seconds": -1.0},
        {"transport": "tcp", "data_port": 0},
        {"transport": "tcp", "data_port": 65536 + 80},
        {"transport": "nixl"},
    ],
    ids=str,
)
def test_handshake_when_the_peer_agrees_to_what_cannot_be_then_it_is_a_breach(
    agreed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "agreed", agreed)
    transport = "tcp" if "data_port" in agreed else "grpc"
    with scripted([*START, *ALL, *END]) as source, nodes(Node("decode", settings(transport=transport))) as (decode,):
        decode.load(source, KEY, [1])
        error = decode.load_failed().error
        assert (error.code, error.breach) == (ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, "absent_field")
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        assert_clean(decode)


def test_answers_when_they_cannot_be_parsed_then_it_is_a_breach_and_renewals_go_on() -> None:
    asked = threading.Semaphore(0)

    def garbage(request: bytes, context: object) -> bytes:
        asked.release()
        return b"\xff\xff"

    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(garbage)
    methods = dict.fromkeys(("Handshake", "RenewLease", "Release"), handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.CacheStore", methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with nodes(Node("decode", settings(lease_seconds=0.05))) as (decode,):
            source = KvSourceRef("prefill", (address,), 1)
            decode.load(source, KEY, [1])
            error = decode.load_failed().error
            assert (error.code, error.breach) == (ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR, "absent_field")
            assert asked.acquire(timeout=5)
            decode.agent.keep_alive(key_of(2), source)
            assert all(asked.acquire(timeout=5) for _ in range(3))
            decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
            decode.agent.cancel_load(key_of(2), BatonError(ErrorCode.CANCELLED))
            assert_clean(decode)
    finally:
        server.stop(0).wait(5)


@pytest.mark.invariant("RPC-10", "RPC-13")
@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([*START, *ALL[:2], *END], ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT),
        ([*START, *ALL[:2]], ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT),
        ([*START, *ALL], ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),
        ([*START, *ALL, pb.LoadEvent()], ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),
        ([*START, TWO_IN_ONE, *ALL[1:], *END], ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),
        ([*START, piece(0, [0], b"")], ErrorCode.READ_BUFFER_MISMATCH),
        ([*START, ALL[0], *ALL, *END], ErrorCode.READ_BUFFER_MISMATCH),
        ([*START, piece(0, [0, 1]), *ALL[1:], *END], ErrorCode.READ_BUFFER_MISMATCH),
        ([*START, piece(3, [0]), *ALL, *END], ErrorCode.READ_BUFFER_MISMATCH),
        ([*START, *ALL, *END, ALL[0]], ErrorCode.READ_BUFFER_MISMATCH),
        ([*START, *ALL, END[0], pb.LoadEvent(done=pb.Done(pieces=3))], ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),
        ([*START, *ALL, END[0], pb.LoadEvent(done=pb.Done(result=prefill_result()))], ErrorCode.READ_BUFFER_MISMATCH),
        ([], ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT),
    ],
)
def test_p3_stream_that_ends_ok_without_everything_is_a_failure(events: list[pb.LoadEvent], code: ErrorCode) -> None:
    with scripted(events) as source, nodes(Node("decode")) as (decode,):
        decode.load(source, KEY, [1])
        assert decode.load_failed().error.code is code
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        assert_clean(decode)


def fails(code: ErrorCode | None) -> Exception:
    """What a scripted peer ends a load with: a code of the table, or a status without details."""
    return RuntimeError("no details") if code is None else BatonError(code, "it failed")


RESULT, NO_RESULT = END, [END[0], pb.LoadEvent(done=pb.Done(pieces=3))]
X, NO_CODE = ErrorCode.EXECUTION_EXCEPTION, ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
ENDS = [
    ("success without its result", NO_RESULT, None, NO_CODE, "missing_result"),
    ("no word of success", [], None, NO_CODE, "missing_result"),
    ("failure", [], fails(X), X, ""),
    ("failure without a code", [], fails(None), NO_CODE, "no_code"),
    ("success without its result, failure", NO_RESULT, fails(X), NO_CODE, "missing_result"),
    ("success, failure", RESULT, fails(X), X, ""),
    ("success, failure without a code", RESULT, fails(None), NO_CODE, "no_code"),
]


@pytest.mark.invariant("RPC-10", "RPC-13")
@pytest.mark.parametrize(("events", "end", "code", "breach"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS])
def test_end_when_success_and_code_do_not_go_together_then_it_is_a_failure_and_a_breach_is_logged_once(
    events: list[pb.LoadEvent], end: Exception | None, code: ErrorCode, breach: str, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted([*START, *ALL, *events], end) as source, nodes(Node("decode")) as (decode,):
        decode.load(source, KEY, [1])
        failed = decode.load_failed()
        assert failed.error.code is code
        assert failed.error.breach == breach
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        assert_clean(decode)
        assert len(decode.said) == 1
        assert decode.count("contract_breaches_total") == (1 if breach else 0)
    errors = [
        record for record in caplog.records if record.levelno >= logging.ERROR and record.name.startswith("cache")
    ]
    assert ["contract breach" in record.message for record in errors] == ([True] if breach else [])
