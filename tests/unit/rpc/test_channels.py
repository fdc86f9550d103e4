"""Channel arguments exist, and the pool never hands out a broken channel. Real servers on loopback."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.channels import (
    CLIENT_OPTIONS,
    EXPERIMENTS,
    SERVER_OPTIONS,
    ChannelPool,
    bulk_options,
    bulk_server_options,
)
from rpc.errors import BatonError, ErrorCode
from rpc.server import GrpcServer
from rpc.status import from_rpc_error
from tests.integration.cluster import free_port
from tests.integration.tcp_proxy import TcpProxy
from tests.unit.rpc.waiting import until

NATIVE = Path(cygrpc.__file__).read_bytes()
KEYS = sorted({key for options in (CLIENT_OPTIONS, SERVER_OPTIONS, bulk_options()) for key, _ in options})


def occurs(key: str) -> bool:
    """Whether the library holds `key` as a whole string, not as a part of a longer one."""
    end = key.encode() + b"\0"
    found = NATIVE.find(end)
    while found > 0 and re.match(rb"[a-z_.]", NATIVE[found - 1 : found]):
        found = NATIVE.find(end, found + 1)
    return found > 0


@pytest.mark.parametrize("key", KEYS)
def test_f2_key_occurs_in_the_installed_native_library(key: str) -> None:
    assert occurs(key)


@pytest.mark.parametrize(
    "key", ["grpc.http2.min_recv_ping_interval_without_data_ms", "grpc.http2.min_time_between_pings_ms"]
)
def test_key_that_does_not_exist_is_found_out(key: str) -> None:
    assert not occurs(key)


@pytest.mark.parametrize("name", EXPERIMENTS.split(","))
def test_experiment_is_one_of_the_installed_native_library(name: str) -> None:
    assert name.startswith("-")
    assert occurs(name[1:])


def test_options_have_the_documented_values() -> None:
    server, client, bulk = dict(SERVER_OPTIONS), dict(CLIENT_OPTIONS), dict(bulk_options())
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 5000
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert (server["grpc.keepalive_time_ms"], server["grpc.keepalive_timeout_ms"]) == (20000, 10000)
    assert (server["grpc.so_reuseport"], server["grpc.max_concurrent_streams"]) == (0, 4096)
    assert (client["grpc.keepalive_time_ms"], client["grpc.keepalive_timeout_ms"]) == (10000, 5000)
    for options in (server, client, bulk):
        assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"]
    assert (client["grpc.enable_retries"], client["grpc.enable_http_proxy"]) == (0, 0)
    assert "grpc.use_local_subchannel_pool" not in client
    assert bulk["grpc.use_local_subchannel_pool"] == 1
    for options, limit in (
        (server, 16 << 20),
        (client, 16 << 20),
        (bulk, 8 << 20),
        (dict(bulk_server_options()), 8 << 20),
    ):
        assert options["grpc.max_receive_message_length"] == limit
        assert options["grpc.max_send_message_length"] == limit
        assert options["grpc.max_metadata_size"] == 16384


async def started(port: int = 0) -> GrpcServer:
    server = GrpcServer()
    await server.start("127.0.0.1", port)
    await server.set_serving(True)
    return server


async def check(channel: grpc.aio.Channel, timeout: float = 5.0) -> Any:
    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)


async def failure(pool: ChannelPool, address: str) -> BatonError:
    connection = pool.connection(address)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(connection.channel)
    return from_rpc_error(caught.value, leg="decode", deadline_passed=False, was_ready=connection.was_ready())


async def test_get_gives_one_channel_per_peer_and_index() -> None:
    server = await started()
    pool = ChannelPool()
    address = f"127.0.0.1:{server.port}"
    for _ in range(200):
        await check(pool.get(address))
    assert pool.get(address) is pool.get(address)
    assert pool.get(address, 0) is pool.get(address, 0)
    assert len({id(pool.get(address, index)) for index in (None, 0, 1, 2)}) == 4
    assert pool.statistics()["channels"] == 4
    await pool.close()
    await server.stop(0)


async def test_f3_ten_thousand_requests_have_no_more_channels_than_peers_have_configured_ones() -> None:
    servers = [await started() for _ in range(3)]
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    pool = ChannelPool()
    bulk = 4
    for number in range(10_000):
        address = addresses[number % 3]
        connection = pool.connection(address, None if number % 2 else number % bulk)
        if number % 50 == 0:
            await check(connection.channel)
        assert pool.statistics()["channels"] <= len(servers) * (1 + bulk)
    statistics = pool.statistics()
    assert (statistics["peers"], statistics["evictions"]) == (3, 0)
    # Each has one task that watches it, and a request leaves none.
    assert statistics["tasks"] == statistics["channels"] == 3 * (1 + bulk // 2)
    await pool.close()
    for server in servers:
        await server.stop(0)


async def test_bulk_channels_have_connections_of_their_own() -> None:
    peers: set[str] = set()

    class Health(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            peers.add(context.peer())
            return health_pb2.HealthCheckResponse()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pool = ChannelPool()
    for index in (None, 0, 1, 0, 1):
        await check(pool.get(address, index))
    assert len(peers) == 3
    await pool.close()
    await server.stop(0)


async def test_was_ready_tells_a_connection_from_none() -> None:
    server = await started()
    pool = ChannelPool()
    address = f"127.0.0.1:{server.port}"
    assert not pool.was_ready(address)
    assert await pool.wait_ready(address, 5)
    await until(lambda: pool.was_ready(address))
    nowhere = f"127.0.0.1:{free_port()}"
    assert not await pool.wait_ready(nowhere, 0.3)
    assert not pool.was_ready(nowhere)
    await pool.close()
    await server.stop(0)


async def test_f3_closed_port_fails_fast_and_a_reopened_one_is_found_again() -> None:
    port = free_port()
    server = await started(port)
    address = f"127.0.0.1:{port}"
    evicted: list[tuple[str, str]] = []
    pool = ChannelPool(on_evict=lambda peer, state: evicted.append((peer, state)))
    await check(pool.get(address))
    await server.stop(0)
    # The client learns of it a moment later; a call before that has its connection broken.
    await until(lambda: pool.get(address).get_state() is not grpc.ChannelConnectivity.READY)
    loop = asyncio.get_running_loop()
    for _ in range(3):
        began = loop.time()
        error = await failure(pool, address)
        assert error.code is ErrorCode.CONNECT_FAILED
        assert loop.time() - began < 4  # its limit is 5
    assert evicted
    assert set(evicted) == {(address, "transient_failure")}
    server = await started(port)
    await check(pool.get(address))
    assert pool.statistics()["channels"] == 1
    await pool.close()
    await server.stop(0)


async def test_wait_for_a_connection_when_its_channel_is_replaced_then_it_goes_on_with_the_new_one() -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    pool, server = ChannelPool(), GrpcServer()
    try:
        first = pool.get(address)
        control = asyncio.create_task(pool.wait_ready(address, 10))
        bulk = asyncio.create_task(pool.connected(address, 0, timeout_s=10))
        await until(lambda: pool.check(address) and pool.get(address) is not first)
        await server.start("127.0.0.1", port)
        assert await control
        connection = await bulk
        assert connection.channel is pool.get(address, 0)
        assert connection.was_ready()
    finally:
        await server.stop()
        await pool.close()


@pytest.mark.invariant("RPC-9")
async def test_channel_that_is_closed_from_outside_is_replaced() -> None:
    server = await started()
    evicted: list[str] = []
    pool = ChannelPool(on_evict=lambda peer, state: evicted.append(state))
    address = f"127.0.0.1:{server.port}"
    channel = pool.get(address)
    await channel.close()
    assert pool.get(address) is not channel
    await check(pool.get(address))
    assert evicted == ["shutdown"]
    await pool.close()
    await server.stop(0)


@pytest.mark.invariant("RPC-9")
async def test_connection_that_breaks_under_a_call_is_8205() -> None:
    started_, release = asyncio.Event(), asyncio.Event()

    class Health(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            started_.set()
            await release.wait()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    upstream = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    writers: list[asyncio.StreamWriter] = []
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream)
        writers.extend([writer, up_writer])
        pumps.extend([asyncio.create_task(pump(reader, up_writer)), asyncio.create_task(pump(up_reader, writer))])

    front = await asyncio.start_server(proxy, "127.0.0.1", 0)
    address = f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
    pool = ChannelPool()
    connection = pool.connection(address)
    call = asyncio.ensure_future(check(connection.channel, 10))
    async with asyncio.timeout(20):
        await started_.wait()
    for writer in writers:
        writer.transport.abort()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value, leg="decode", deadline_passed=False, was_ready=connection.was_ready())
    assert error.code is ErrorCode.CONNECTION_RESET_BY_PEER
    for task in pumps:
        task.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    front.close()
    await pool.close()
    await server.stop(0)


async def test_connection_that_falls_silent_is_given_up_after_the_time_of_keepalive() -> None:
    """Nobody resets it and nothing comes: a partition, or a firewall that has forgotten the connection."""
    started_, release = asyncio.Event(), asyncio.Event()

    class Health(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            started_.set()
            await release.wait()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    upstream = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # The times of CLIENT_OPTIONS, a tenth as long; those that are not there are gRPC's.
    scaled = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    options = [(key, int(value) // 10 if key in scaled else value) for key, value in CLIENT_OPTIONS]
    with TcpProxy(("127.0.0.1", 0), ("127.0.0.1", upstream)) as proxy:
        pool = ChannelPool(control_options=options)
        connection = pool.connection(proxy.address)
        call = asyncio.ensure_future(check(connection.channel, 30))
        async with asyncio.timeout(20):
            await started_.wait()
        proxy.hold(True)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert time.monotonic() - began < 6.0
        error = from_rpc_error(caught.value, leg="decode", deadline_passed=False, was_ready=connection.was_ready())
        assert error.code in (ErrorCode.CONNECTION_RESET_BY_PEER, ErrorCode.KEEP_ALIVE_TIMEOUT)
        await pool.close()
    release.set()
    await server.stop(0)


async def test_evicted_peer_is_forgotten_while_its_open_call_ends_in_peace() -> None:
    started_, release = asyncio.Event(), asyncio.Event()

    class Health(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            started_.set()
            await release.wait()
            return health_pb2.HealthCheckResponse()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pool = ChannelPool()
    call = asyncio.ensure_future(check(pool.get(address), 10))
    async with asyncio.timeout(20):
        await started_.wait()
    pool.evict(address)
    assert pool.statistics()["peers"] == 0
    release.set()
    await call
    await until(lambda: pool.statistics()["tasks"] == 0)
    assert pool.statistics()["evictions"] == 0
    await pool.close()
    await server.stop(0)


async def test_close_leaves_no_task_and_refuses_further_use() -> None:
    server = await started()
    pool = ChannelPool()
    address = f"127.0.0.1:{server.port}"
    for index in (None, 0, 1):
        await check(pool.get(address, index))
    await pool.close()
    await pool.close()
    assert pool.statistics() == {"peers": 0, "channels": 0, "evictions": 0, "tasks": 0}
    assert not [task for task in asyncio.all_tasks() if "ChannelPool" in repr(task)]
    with pytest.raises(BatonError) as caught:
        pool.get(address)
    assert caught.value.code is ErrorCode.SERVER_DRAINING
    await server.stop(0)


async def _ping_storm(server_options: list[tuple[str, int]], call_s: float = 8, ping_ms: int = 1000) -> grpc.StatusCode:
    """A long unary call of a client that pings every second, or as told, against the given server."""
    release = asyncio.Event()

    class Health(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            try:
                async with asyncio.timeout(float(request.service)):
                    await release.wait()
            except TimeoutError:
                pass
            return health_pb2.HealthCheckResponse()

    server = grpc.aio.server(options=server_options)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = {**dict(CLIENT_OPTIONS), "grpc.keepalive_time_ms": ping_ms, "grpc.keepalive_timeout_ms": 5000}
    async with grpc.aio.insecure_channel(address, options=list(client.items())) as channel:
        request = health_pb2.HealthCheckRequest(service=str(call_s))
        call = health_pb2_grpc.HealthStub(channel).Check(request, timeout=call_s + 7)
        code = await call.code()
    await server.stop(0)
    return code


@pytest.mark.slow
@pytest.mark.extended
async def test_f2_client_that_pings_every_second_passes_our_options_and_fails_the_defaults() -> None:
    scaled = {**dict(SERVER_OPTIONS), "grpc.http2.min_ping_interval_without_data_ms": 500}
    ours, defaults = await asyncio.gather(_ping_storm(list(scaled.items())), _ping_storm([]))  # type: ignore[arg-type]
    assert ours is grpc.StatusCode.OK
    assert defaults is grpc.StatusCode.UNAVAILABLE


@pytest.mark.skipif(os.environ.get("BATON_TESTS") != "nightly", reason="ten minutes: BATON_TESTS=nightly runs it")
@pytest.mark.timeout(700)
async def test_f2_ten_minutes_of_silence_when_both_sides_have_our_options_then_the_call_passes() -> None:
    assert await _ping_storm(SERVER_OPTIONS, 600, 10_000) is grpc.StatusCode.OK  # type: ignore[arg-type]
