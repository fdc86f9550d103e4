"""The same bytes between the same two pools without a cache store: what the machine can do in each of its ways.

    socket   one TCP connection: `sendall` of each layer, `recv_into` the layer with MSG_WAITALL, buffers of 4 MiB
    stream   a grpc.aio stream of messages of 1 MiB, each made of a view of the pool and copied into the other one
    copy     the pieces copied from the prefill side's memory, mapped by the decode side, with one thread
    nixl     one NIXL read of all pieces, between two agents that only do that

Contiguous blocks, from the first one on, for socket and stream; any blocks for copy and nixl.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from bench.kv_transfer.memory import Pool, Shape
from cache_store.geometry.rows import paired_runs
from cache_store.memory.row_copies import address_of
from cache_store.memory.shared_memory import MappedPool
from cache_store.nixl.agent import PACKAGES
from cache_store.tcp.connection import prepare
from protos import cache_store_pb2 as pb
from rpc.channels import bulk_options, bulk_server_options

MESSAGE_BYTES = 1 << 20
METHOD = "/bench.Stream/Send"
NIXL_LIMIT_S = 60.0


def _parts(pool: Pool, shape: Shape, blocks: int) -> list[memoryview]:
    return [view[: blocks * shape.block_bytes] for view in pool.views]


# ---- socket


class SocketServer:
    """P's side: sends the first `blocks` blocks of each layer to whoever has connected, when `send` is called."""

    def __init__(self, pool: Pool, shape: Shape) -> None:
        self._pool, self._shape = pool, shape
        self._listener = socket.socket()
        prepare(self._listener)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._connection: socket.socket | None = None

    def send(self, blocks: int) -> None:
        if self._connection is None:
            self._connection = self._listener.accept()[0]
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.recv(1)
        for part in _parts(self._pool, self._shape, blocks):
            self._connection.sendall(part)


class SocketClient:
    def __init__(self, pool: Pool, shape: Shape, port: int) -> None:
        self._pool, self._shape = pool, shape
        self._socket = socket.socket()
        prepare(self._socket)
        self._socket.connect(("127.0.0.1", port))

    def receive(self, blocks: int) -> float:
        began = time.perf_counter()
        self._socket.send(b".")
        for part in _parts(self._pool, self._shape, blocks):
            while part:
                count = self._socket.recv_into(part, 0, socket.MSG_WAITALL)
                if not count:
                    raise SystemExit("the bare socket was closed")
                part = part[count:]
        return time.perf_counter() - began


# ---- gRPC stream


async def serve_stream(pool: Pool, shape: Shape, ready: Callable[[int], None], end: asyncio.Event) -> None:
    async def send(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for part in _parts(pool, shape, int(request)):
            for at in range(0, part.nbytes, MESSAGE_BYTES):
                yield bytes(part[at : at + MESSAGE_BYTES])

    server = grpc.aio.server(options=bulk_server_options())
    service, method = METHOD.strip("/").split("/")
    handler: Any = grpc.unary_stream_rpc_method_handler(send)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready(port)
    await end.wait()
    await server.stop(0)


class StreamClient:
    def __init__(self, pool: Pool, shape: Shape, port: int) -> None:
        self._pool, self._shape = pool, shape
        self._runner = asyncio.Runner()
        self._channel: grpc.aio.Channel | None = None
        self._address = f"127.0.0.1:{port}"

    def receive(self, blocks: int) -> float:
        return self._runner.run(self._receive(blocks))

    async def _receive(self, blocks: int) -> float:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=bulk_options())
            await self._channel.channel_ready()
        call: Any = self._channel.unary_stream(METHOD)
        parts = _parts(self._pool, self._shape, blocks)
        layer = at = 0
        began = time.perf_counter()
        async for message in call(str(blocks).encode()):
            parts[layer][at : at + len(message)] = message
            at += len(message)
            if at == parts[layer].nbytes:
                layer, at = layer + 1, 0
        if layer != len(parts):
            raise SystemExit("the bare stream ended early")
        return time.perf_counter() - began

    def close(self) -> None:
        async def end() -> None:
            if self._channel is not None:
                await self._channel.close()

        self._runner.run(end())
        self._runner.close()


# ---- memory copy


class Copier:
    def __init__(self, pool: Pool, shape: Shape, memory: bytes) -> None:
        self._pool, self._shape = pool, shape
        self._mapped = MappedPool(pb.SharedPool.FromString(memory))

    def copy(self, source: Sequence[int], target: Sequence[int]) -> float:
        """Runs that follow each other on both sides are one copy."""
        unit = self._shape.block_bytes
        began = time.perf_counter()
        pieces = paired_runs(source, target)
        for view, theirs in zip(self._pool.views, self._mapped.layers.values(), strict=True):
            begin, end = address_of(theirs), address_of(view)
            for first, to, count in pieces:
                ctypes.memmove(end + to * unit, begin + first * unit, count * unit)
        return time.perf_counter() - began


# ---- NIXL


def _nixl_api() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    for package in PACKAGES:
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._api")
    return None


class BareNixl:
    """One side. `None` where the library is not installed (`make`)."""

    def __init__(self, api: Any, name: str, pool: Pool, shape: Shape) -> None:
        self._shape = shape
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self.addresses = [address_of(view) for view in pool.views]
        size = shape.blocks * shape.block_bytes
        self._agent.register_memory([(address, size, 0, "") for address in self.addresses], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._peers: dict[bytes, str] = {}

    @classmethod
    def make(cls, name: str, pool: Pool, shape: Shape) -> BareNixl | None:
        api = _nixl_api()
        return None if api is None else cls(api, name, pool, shape)

    def read(self, metadata: bytes, addresses: Sequence[int], source: Sequence[int], target: Sequence[int]) -> float:
        if metadata not in self._peers:
            self._peers[metadata] = self._agent.add_remote_agent(metadata)
        peer, unit = self._peers[metadata], self._shape.block_bytes
        began = time.perf_counter()
        pieces = paired_runs(source, target)
        theirs = [(base + first * unit, count * unit, 0) for base in addresses for first, _, count in pieces]
        own = [(base + to * unit, count * unit, 0) for base in self.addresses for _, to, count in pieces]
        agent = self._agent
        handle = agent.initialize_xfer("READ", agent.get_xfer_descs(own, "DRAM"), agent.get_xfer_descs(theirs, "DRAM"),
                                       peer, b"")  # fmt: skip
        state = agent.transfer(handle)
        while state == "PROC":
            if time.perf_counter() - began > NIXL_LIMIT_S:
                raise SystemExit("the bare NIXL read does not end")
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise SystemExit(f"the bare NIXL read failed: {state}")
        return seconds
