"""The transport tcp: who gets a data connection, what ends it, and that nothing is left of it."""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace

import grpc
import numpy as np
import pytest
import xxhash

from cache_store.agent import GroupLayout
from cache_store.loading import tcp_landing
from cache_store.loading.peers import TCP_AGAIN_S
from cache_store.serving import tcp_sending
from cache_store.tcp.connection import SUM_BYTES, TOKEN_BYTES, greeting
from cache_store.tcp.listener import NO_ROOM_PAUSE_S
from protos import cache_store_pb2 as pb
from protos import cache_store_pb2_grpc
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.integration.cluster import free_port
from tests.unit.cache_store.agents import LAYOUT, WAIT_S, Node, assert_clean, key_of, nodes, settings, until
from tests.unit.cache_store.between import Between
from tests.unit.cache_store.staged import StagedNode

KEY = key_of(1)
BIG = GroupLayout.of("full", num_layers=4, num_kv_heads=4, head_dim=128, block_size=32, dtype="bfloat16")  # 64 KiB


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(params=[False, True], ids=["sums_beside", "sums_apart"])
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are made by the workers that move the bytes, as on few cores, or by others."""
    for module in (tcp_sending, tcp_landing):
        monkeypatch.setattr(module, "sums_apart", lambda views: request.param)


@contextmanager
def pair(
    node: type[Node] = Node, layout: GroupLayout = LAYOUT, transport: str = "tcp", **more: float | str
) -> Iterator[tuple[Node, Node]]:
    chosen = settings(transport=transport, **more)
    made = [node(name, chosen, layouts=(layout,), seed=seed) for seed, name in enumerate(("prefill", "decode"), 1)]
    with nodes(*made) as (prefill, decode):
        yield prefill, decode
        faults.disarm()
        assert_clean(prefill, decode)


@contextmanager
def between(prefill: Node, allowed: int = 1 << 40, extra: tuple[int, bytes] = (0, b"")) -> Iterator[Between]:
    made = Between(prefill, allowed, extra)
    try:
        yield made
    finally:
        made.close()


def data_port(node: Node) -> int:
    return node.agent._service.offer.data_port


def connect(node: Node) -> socket.socket:
    """A data connection whose greeting was read."""
    made = socket.create_connection(("127.0.0.1", data_port(node)), timeout=WAIT_S)
    assert read(made, TOKEN_BYTES) == greeting(node.identity.engine_id)
    return made


def read(connection: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count and (part := connection.recv(count - len(said))):
        said += part
    return said


def sent_bytes(blocks: int) -> int:
    """What a load of so many blocks is on its data connection, with a checksum for each layer."""
    return LAYOUT.num_layers * (blocks * LAYOUT.block_bytes + SUM_BYTES)


def load_request(blocks: int, layout: GroupLayout = LAYOUT) -> pb.LoadRequest:
    return pb.LoadRequest(
        reference=pb.KvReference(engine_id="prefill", request_key=KEY),
        wanted=[
            pb.WantedBlocks(
                group="full", block_size=layout.block_size, first_block=0, num_blocks=blocks,
                num_layers=layout.num_layers, block_bytes=layout.block_bytes, partition_count=1, partition_id=0,
            )
        ],
        prompt_tokens=blocks * layout.block_size,
        checksum="all",
        chunk_bytes=1 << 16,
        transport="tcp",
        reader=pb.ReaderRank(rank=0, tp_size=1),
    )  # fmt: skip


def reloads(prefill: Node, decode: Node, theirs: list[int], own: list[int]) -> None:
    decode.load(prefill.source, KEY, own, reload=True)
    decode.load_done()
    assert np.array_equal(decode.blocks(own), prefill.blocks(theirs))
    assert prefill.lease_ended().outcome == "released"


# ---- tokens


def test_connection_when_its_token_is_unknown_or_was_used_then_it_is_closed_and_counted() -> None:
    with pair() as (prefill, _), grpc.insecure_channel(prefill.address) as channel:
        prefill.stage(KEY, [5, 9])
        with connect(prefill) as stranger:
            stranger.sendall(bytes(TOKEN_BYTES))
            assert stranger.recv(1) == b""
        assert prefill.count("kv_data_connections_total", result="unknown_token") == 1
        with connect(prefill) as half:
            half.sendall(bytes(TOKEN_BYTES - 1))
            half.shutdown(socket.SHUT_WR)
            assert half.recv(1) == b""
        assert prefill.count("kv_data_connections_total", result="lost") == 1
        events = cache_store_pb2_grpc.CacheStoreStub(channel).Load(load_request(2), timeout=WAIT_S)
        first = next(events)
        token = first.started.data_token
        with connect(prefill) as mine, connect(prefill) as thief:
            mine.sendall(token[:7])
            mine.sendall(token[7:])
            expected = b""
            for layer in prefill.memory["full"]:  # the blocks of a notice, then their checksum
                blocks = layer[[5, 9]].tobytes()
                expected += blocks + struct.pack("<Q", xxhash.xxh3_64_intdigest(blocks))
            assert read(mine, len(expected)) == expected
            thief.sendall(token)
            assert thief.recv(1) == b""
            seen = [first, *events]
            assert [(n.layer, n.num_layers, list(n.block_runs)) for event in seen for n in event.notices] == [
                (0, LAYOUT.num_layers, [0, 2])
            ]
            assert not any(event.data or event.HasField("pieces") for event in seen)
            # The load is over, and the connection is free for another token; this one is void.
            mine.sendall(token)
            assert mine.recv(1) == b""
        assert prefill.count("kv_data_connections_total", result="unknown_token") == 3
        assert prefill.count("kv_data_connections_total", result="used") == 1
        prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()


def test_token_when_none_comes_in_time_then_connection_and_load_end() -> None:
    with pair(data_token_timeout_s=0.2) as (prefill, _), grpc.insecure_channel(prefill.address) as channel:
        prefill.stage(KEY, [5])
        with connect(prefill) as silent:
            assert silent.recv(1) == b""
        assert prefill.count("kv_data_connections_total", result="silent") == 1
        with pytest.raises(grpc.RpcError) as failure:
            list(cache_store_pb2_grpc.CacheStoreStub(channel).Load(load_request(1), timeout=WAIT_S))
        assert failure.value.details().startswith("the decode server opened no data connection in time")
        prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
        prefill.lease_ended()


# ---- connections


def test_connection_when_the_process_has_no_descriptor_left_then_it_is_taken_later_and_the_loop_does_not_spin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[int] = []

    def refused() -> bool:
        with suppress(OSError):  # what other tests have left is closed at any time
            while True:
                taken.append(os.dup(0))
        return "cannot be accepted" in caplog.text

    with pair() as (prefill, _), ExitStack() as stack:
        late = [stack.enter_context(socket.socket()) for _ in range(4)]  # one of them may be quicker than `refused`
        for each in late:
            each.settimeout(WAIT_S)
        lowest = os.dup(0)
        os.close(lowest)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        began = time.monotonic()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            for each in late:
                each.connect(("127.0.0.1", data_port(prefill)))
            until(refused, "the refusal")
            for _ in range(20):  # the loop goes round
                with prefill.held():
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in taken:
                os.close(descriptor)
        tries = caplog.text.count("cannot be accepted")
        assert tries <= 1 + (time.monotonic() - began) / NO_ROOM_PAUSE_S
        for each in late:
            assert read(each, TOKEN_BYTES) == greeting(prefill.identity.engine_id)


def test_loads_when_many_follow_each_other_then_they_share_connections() -> None:
    with pair() as (prefill, decode):
        for number in range(20):
            prefill.stage(key_of(number), [number])
            decode.load(prefill.source, key_of(number), [number])
            decode.load_done()
            prefill.lease_ended()
        listener = prefill.agent._equipment.listener
        assert listener is not None
        until(lambda: listener.connections == 1, "the last load has given it back, and there is no other one")
        assert prefill.count("kv_data_connections_total", result="used") == 20
        for number in range(20, 40):
            prefill.stage(key_of(number), [number])
            decode.load(prefill.source, key_of(number), [number])
        for _ in range(20):
            decode.load_done()
            prefill.lease_ended()
        assert listener.connections <= 20
        assert np.array_equal(decode.blocks(range(40)), prefill.blocks(range(40)))


def test_connection_when_it_is_idle_for_long_then_it_is_closed() -> None:
    with pair(data_idle_s=0.4) as (prefill, decode):
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        decode.load_done()
        prefill.lease_ended()
        listener = prefill.agent._equipment.listener
        assert listener is not None
        until(lambda: decode.agent._pulling.peers.dialer.idle == listener.connections == 0, "no connection is left")


@pytest.mark.parametrize("what", ["closed", "another service", "no room"])
def test_port_when_it_cannot_be_used_then_grpc_is_with_one_warning(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        pair(transport="auto", data_connections=1) as (prefill, decode),
        socket.create_server(("127.0.0.1", 0)) as other,
        connect(prefill),
    ):
        if what != "no room":
            service = prefill.agent._service
            service.offer = replace(service.offer, data_port=other.getsockname()[1])
        if what == "closed":
            other.close()
        for number in (1, 2):
            prefill.stage(key_of(number), [5])
            decode.load(prefill.source, key_of(number), [number])
            if what == "another service" and number == 1:
                with other.accept()[0] as connection:
                    connection.sendall(b"220 mail.example ESMTP")
            assert decode.load_done().transport == "grpc"
            prefill.lease_ended()
        assert len([r for r in caplog.records if "transport tcp is not possible" in r.getMessage()]) == 1
        assert decode.count("kv_transport_fallbacks_total", transport="tcp", reason="failed") == 1


def test_port_when_strangers_have_filled_it_for_a_moment_then_tcp_is_used_again_a_minute_later() -> None:
    ahead = 0.0
    chosen = settings(transport="auto", data_connections=1)
    made = Node("prefill", chosen, seed=1), Node("decode", chosen, seed=2, clock=lambda: time.monotonic() + ahead)
    with nodes(*made) as (prefill, decode):
        used, listener = [], prefill.agent._equipment.listener
        for number in range(3):
            with connect(prefill) if number == 0 else nullcontext():
                prefill.stage(key_of(number), [5])
                decode.load(prefill.source, key_of(number), [number])
                used.append(decode.load_done().transport)
                prefill.lease_ended()
            if number == 1:
                ahead = TCP_AGAIN_S
                until(lambda: listener is not None and listener.connections == 0, "the stranger is gone")
        assert used == ["grpc", "grpc", "tcp"]
        assert_clean(prefill, decode)


def test_port_when_it_cannot_be_used_and_tcp_is_demanded_then_the_load_says_so() -> None:
    with pair(data_connections=1) as (prefill, decode):
        with connect(prefill):
            prefill.stage(KEY, [5])
            decode.load(prefill.source, KEY, [1])
            failed = decode.load_failed()
            assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED
            assert failed.error.metadata["data_port"] == str(data_port(prefill)) and failed.retriable_here
        until(lambda: prefill.count("kv_data_connections_total", result="lost") == 1, "there is room again")
        reloads(prefill, decode, [5], [1])


def test_port_when_it_is_given_then_it_is_that_one_and_one_that_is_in_use_leaves_tcp_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()  # nobody else is given it between the two
    with socket.create_server(("127.0.0.1", port)):
        with pair(transport="auto", data_port=port) as (prefill, decode):
            assert data_port(prefill) == 0
            assert any(f"data port {port} of 127.0.0.1 cannot be opened" in r.getMessage() for r in caplog.records)
            prefill.stage(KEY, [5])
            decode.load(prefill.source, KEY, [1])
            assert decode.load_done().transport == "grpc"
            prefill.lease_ended()
    with nodes(Node("prefill", settings(data_port=port))) as (free,):
        assert data_port(free) == port


def test_port_when_it_is_in_use_and_tcp_is_demanded_then_the_agent_does_not_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(BatonError) as raised, nodes(Node("prefill", settings(transport="tcp", data_port=port))):
            pass
    assert raised.value.code is ErrorCode.CONNECT_FAILED
    assert f"--kv-data-port: cannot listen on 127.0.0.1:{port}" in raised.value.message


# ---- bytes


def test_load_when_the_peer_of_another_one_does_not_connect_then_it_has_the_slot() -> None:
    with pair(StagedNode, staging_slots=1) as (prefill, decode):
        late, key = key_of(8), key_of(9)
        faults.arm(f"cache_store.read_event:delay=60,key={late}")
        prefill.stage(late, [7])
        decode.load(prefill.source, late, [8])
        until(lambda: prefill.agent.stats().readers == 1, "it has been told of the first bytes")
        prefill.stage(key, [5])
        decode.load(prefill.source, key, [6])
        decode.load_done()
        assert np.array_equal(decode.blocks([6]), prefill.blocks([5]))
        assert prefill.lease_ended().request_key == key
        decode.agent.cancel_load(late, BatonError(ErrorCode.CANCELLED, "left"))
        decode.load_failed()
        prefill.lease_ended()


def test_load_when_its_peer_connects_then_it_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_sending, "CONNECT_S", 3600.0)
    with pair() as (prefill, decode):
        prefill.stage(KEY, [5])
        decode.load(prefill.source, KEY, [1])
        decode.load_done()
        prefill.lease_ended()


@pytest.mark.parametrize("what", ["unread_stream", "reset_connection"])
def test_load_when_the_peer_of_another_one_keeps_its_stream_open_and_reads_nothing_then_it_has_the_slot(
    what: str,
) -> None:
    with pair(StagedNode, BIG, staging_slots=1, chunk_bytes=1 << 16) as (prefill, decode):
        assert isinstance(prefill, StagedNode)
        ring, listener = prefill.staging.reads, prefill.agent._equipment.listener
        prefill.stage(KEY, list(range(60)))
        window = 64 if what == "unread_stream" else 1 << 16  # bytes of the stream that its peer has room for
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window)]
        with grpc.insecure_channel(prefill.address, options) as channel:
            call = cache_store_pb2_grpc.CacheStoreStub(channel).Load(load_request(60, BIG), timeout=WAIT_S)
            token = next(call).started.data_token
            with connect(prefill) as connection:
                connection.sendall(token)
                if what == "reset_connection":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.close()
                until(lambda: prefill.count("kv_data_connections_total", result="used") == 1, "it is taken")
                prefill.stage(key_of(2), [5])
                decode.load(prefill.source, key_of(2), [6], deadline_s=WAIT_S / 2)
                decode.load_done()
                assert np.array_equal(decode.blocks([6]), prefill.blocks([5]))
                assert prefill.lease_ended().request_key == key_of(2)
                prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED, "left"))
                assert prefill.lease_ended().request_key == KEY
        assert listener is not None
        until(lambda: ring.free == 1 and listener.connections == 1, "no more than the connection of the other one")


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("mode", ["off", "sample", "all"])
@pytest.mark.parametrize("node", [Node, StagedNode])
def test_load_when_it_is_large_then_every_byte_is_there_whatever_is_checked(node: type[Node], mode: str) -> None:
    with pair(node, BIG, checksum=mode) as (prefill, decode):
        rng = np.random.default_rng(3)
        theirs, own = rng.permutation(64)[:60].tolist(), list(range(2, 62))
        prefill.stage(KEY, theirs)
        decode.load(prefill.source, KEY, own)
        assert decode.load_done().bytes == 60 * 4 * BIG.block_bytes
        assert np.array_equal(decode.blocks(own), prefill.blocks(theirs))
        prefill.lease_ended()


@pytest.mark.parametrize("how", ["cut", "half closed"])
def test_connection_when_it_ends_in_the_middle_of_a_block_then_the_load_fails_and_its_reload_works(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_landing, "GRACE_S", 0.1)
    with pair() as (prefill, decode), between(prefill, allowed=LAYOUT.block_bytes + 100) as middle:
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        middle.at(LAYOUT.block_bytes + 100)
        middle.cut() if how == "cut" else middle.half_close()
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CONNECTION_RESET_BY_PEER and failed.retriable_here
        middle.allow()
        reloads(prefill, decode, [5, 6], [3, 4])


def test_bytes_when_there_are_more_than_announced_then_the_load_fails() -> None:
    with pair() as (prefill, decode), between(prefill, extra=(sent_bytes(2), b"more")):
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
        assert "not announced" in failed.error.metadata["breach"]
        assert decode.agent._pulling.peers.dialer.idle == 0
        reloads(prefill, decode, [5, 6], [3, 4])


def test_bytes_when_there_are_fewer_than_announced_then_the_progress_limit_ends_the_load() -> None:
    allowed = sent_bytes(2) - 1
    with pair(load_progress_timeout_s=1.5) as (prefill, decode), between(prefill, allowed=allowed) as middle:
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.LOAD_CACHE_TIMEOUT and failed.retriable_here
        assert failed.missing >= 2, "the last run was not whole"
        middle.allow()
        reloads(prefill, decode, [5, 6], [3, 4])


def test_cancel_when_a_thread_waits_for_bytes_then_the_load_ends_and_nothing_is_written_later() -> None:
    with pair() as (prefill, decode), between(prefill, allowed=LAYOUT.block_bytes + 100) as middle:
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        middle.at(LAYOUT.block_bytes + 100)
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED, "left"))
        assert decode.load_failed().error.code is ErrorCode.CANCELLED
        for layer in decode.memory["full"]:
            layer[[1, 2]] = 77
        middle.allow()
        assert prefill.lease_ended().outcome == "aborted"
        prefill.stage(key_of(2), [7])
        decode.load(prefill.source, key_of(2), [3])
        decode.load_done()
        prefill.lease_ended()
        assert (decode.blocks([1, 2]) == 77).all()


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("node", [Node, StagedNode])
def test_load_when_the_network_stands_still_then_it_holds_no_slot_and_no_thread_and_others_go_on(
    node: type[Node],
) -> None:
    limits = {"threads": 1, "load_progress_timeout_s": 60.0}
    with pair(node, BIG, **limits) as (prefill, decode), between(prefill, allowed=100_000) as middle:
        prefill.stage(KEY, list(range(60)))
        decode.load(prefill.source, KEY, list(range(60)))
        middle.at(100_000)
        if isinstance(prefill, StagedNode) and isinstance(decode, StagedNode):
            for ring in (prefill.staging.reads, decode.staging.writes):
                until(lambda ring=ring: ring.free == ring.slots, "no slot is held")
        with nodes(node("other", settings(transport="tcp"), layouts=(BIG,), seed=5)) as (other,):
            service = prefill.agent._service
            there, port = service.offer, service.offer.data_port
            service.offer = replace(there, data_port=middle._target)
            prefill.stage(key_of(2), [61])
            other.load(prefill.source, key_of(2), [3])
            other.load_done()
            assert np.array_equal(other.blocks([3]), prefill.blocks([61]))
            assert prefill.lease_ended().request_key == key_of(2)
            service.offer = replace(there, data_port=port)
        middle.allow()
        assert decode.load_done().bytes == 60 * 4 * BIG.block_bytes
        assert np.array_equal(decode.blocks(range(60)), prefill.blocks(range(60)))
        prefill.lease_ended()


def test_connection_when_it_ends_and_the_stream_says_nothing_then_no_slot_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (tcp_sending, tcp_landing):
        monkeypatch.setattr(module, "GRACE_S", 10 * WAIT_S)
    monkeypatch.setattr(tcp_landing.StagedTarget, "set_aside", lambda target, incoming: None)
    limits = {"load_progress_timeout_s": 10 * WAIT_S, "chunk_bytes": 1 << 16}
    with pair(StagedNode, BIG, **limits) as (prefill, decode), between(prefill, allowed=100_000) as middle:
        assert isinstance(prefill, StagedNode) and isinstance(decode, StagedNode)
        ring = decode.staging.writes
        prefill.stage(KEY, list(range(60)))
        decode.load(prefill.source, KEY, list(range(60)))
        middle.at(100_000)
        until(lambda: ring.free == ring.slots - tcp_landing.AHEAD, "it has slots")
        middle.cut()
        until(lambda: ring.free == ring.slots, "they are free")
        assert decode.agent.stats().loads == 1
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED, "left"))
        assert decode.load_failed().error.code is ErrorCode.CANCELLED
        prefill.lease_ended()


@pytest.mark.usefixtures("sums")
def test_notices_when_they_come_while_the_network_stands_still_then_they_hold_no_slot_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: list[int] = []
    try_place = tcp_landing.StagedTarget.try_place

    def noted(target: tcp_landing.StagedTarget, incoming: tcp_landing.Incoming, count: int) -> list[memoryview] | None:
        views = try_place(target, incoming, count)
        placed.append(count)
        return views

    monkeypatch.setattr(tcp_landing.StagedTarget, "try_place", noted)
    with pair(StagedNode, BIG, load_progress_timeout_s=60.0) as (prefill, decode), between(prefill, 100_000) as middle:
        assert isinstance(decode, StagedNode)
        ring, whole = decode.staging.writes, list(range(40))
        prefill.admit(KEY, whole)
        decode.load(prefill.source, KEY, whole)
        prefill.agent.publish(KEY, "full", 0, 1)
        prefill.agent.publish(KEY, "full", 0, 8)
        middle.at(100_000)
        until(lambda: ring.free == ring.slots, "no slot is held")
        count = len(placed)
        prefill.agent.publish(KEY, "full", 0, 16)
        until(lambda: len(placed) > count, "another notice")
        until(lambda: ring.free == ring.slots, "no slot is held by it")
        middle.allow()
        prefill.compute(KEY, 40)
        decode.load_done()
        assert np.array_equal(decode.blocks(whole), prefill.blocks(whole))
        prefill.lease_ended()


@pytest.mark.usefixtures("sums")
def test_lease_when_it_ends_while_the_network_stands_still_then_its_blocks_come_back_soon() -> None:
    with (
        pair(layout=BIG, load_progress_timeout_s=60.0) as (prefill, decode),
        between(prefill, allowed=100_000) as middle,
    ):
        prefill.stage(KEY, list(range(60)))
        decode.load(prefill.source, KEY, list(range(60)))
        middle.at(100_000)
        prefill.agent.fail(KEY, BatonError(ErrorCode.EXECUTION_EXCEPTION, "no"))
        assert prefill.lease_ended().outcome == "aborted"
        assert decode.load_failed().error.code is ErrorCode.EXECUTION_EXCEPTION


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("cache_store.send_event:drop,kind=pieces,times=1", ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT),
        ("cache_store.send_event:duplicate,kind=pieces,times=1", ErrorCode.READ_BUFFER_MISMATCH),
        ("cache_store.piece_bytes:corrupt,times=1", ErrorCode.KV_CHECKSUM_MISMATCH),
        ("cache_store.send_piece:drop,layer=1,block=1,times=1", ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT),
    ],
)
@pytest.mark.parametrize("node", [Node, StagedNode])
def test_fault_when_it_hits_a_step_of_the_transfer_then_its_code_comes(
    node: type[Node], fault: str, code: ErrorCode
) -> None:
    with pair(node) as (prefill, decode):
        faults.arm(fault)
        before = prefill.blocks([5, 6])
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        failed = decode.load_failed()
        assert failed.error.code is code
        assert np.array_equal(prefill.blocks([5, 6]), before)
        if failed.retriable_here:
            reloads(prefill, decode, [5, 6], [3, 4])
        else:
            prefill.lease_ended()
