"""gRPC channels: their arguments, and the one pool that hands them out.

gRPC ignores an unknown argument key in silence, so a test looks each of these up in the installed native
library.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from rpc.errors import BatonError, ErrorCode

Options = list[tuple[str, int | str]]
S = TypeVar("S")

# gRPC's event engine passes what comes in from one thread of its own to the next, and the third one to Python's; with
# its older pollers the thread that waits for Python reads the socket itself. gRPC looks at this when the first channel
# or server of the process is made. What the user has set stays.
EXPERIMENTS = "-event_engine_client,-event_engine_listener"
os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)

MIB = 1 << 20
CONTROL_MESSAGE_BYTES = 16 * MIB
BULK_MESSAGE_BYTES = 8 * MIB


def _message_sizes(limit: int) -> Options:
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.max_metadata_size", 16384),
    ]


_CLIENT: Options = [
    ("grpc.keepalive_time_ms", 10000),
    ("grpc.keepalive_timeout_ms", 5000),
    # What a ping that is not answered takes to end the connection. It is a minute by default, whatever the time-out of
    # keepalive says.
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Whatever its name says, this is also the time that one attempt to connect may take; 100 ms is too little on a busy
    # host. A refused attempt ends at once, and the next one follows after the back-off above.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),  # retries belong to the router
    ("grpc.enable_http_proxy", 0),  # never for traffic inside the cluster
]

SERVER_OPTIONS: Options = [
    # Half of the fastest client's interval, because pings come early; sidecars and bandwidth probes ping too,
    # hence no strikes.
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20000),
    ("grpc.keepalive_timeout_ms", 10000),
    ("grpc.http2.ping_timeout_ms", 10000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", 4096),
    ("grpc.so_reuseport", 0),  # otherwise a second server takes the same port unnoticed
    *_message_sizes(CONTROL_MESSAGE_BYTES),
]

CLIENT_OPTIONS: Options = [*_CLIENT, *_message_sizes(CONTROL_MESSAGE_BYTES)]


def bulk_options() -> Options:
    """Arguments of a bulk channel: a TCP connection of its own, and room for pieces of KV."""
    # Channels with equal arguments share one connection unless each has a subchannel pool of its own.
    return [*_CLIENT, ("grpc.use_local_subchannel_pool", 1), *_message_sizes(BULK_MESSAGE_BYTES)]


def bulk_server_options() -> Options:
    """Arguments of a server that sends bulk data."""
    sizes = dict(_message_sizes(CONTROL_MESSAGE_BYTES))
    return [(key, value) for key, value in SERVER_OPTIONS if key not in sizes] + _message_sizes(BULK_MESSAGE_BYTES)


_BROKEN = {
    grpc.ChannelConnectivity.TRANSIENT_FAILURE: "transient_failure",
    grpc.ChannelConnectivity.SHUTDOWN: "shutdown",
}

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Entry:
    """A channel of the pool; `connections` counts how often a connection has stood."""

    channel: grpc.aio.Channel
    connections: int = 0
    watcher: asyncio.Task[None] | None = None
    stubs: dict[Callable[[grpc.aio.Channel], Any], Any] = field(default_factory=dict)


class Connection:
    """A channel for one call, which can tell afterwards whether the call had a connection at all."""

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry
        self._ready_before = entry.channel.get_state() is grpc.ChannelConnectivity.READY
        self._connections_before = entry.connections

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._entry.channel

    def stub(self, kind: Callable[[grpc.aio.Channel], S]) -> S:
        """The generated stub `kind` of the channel. It is made once: that takes longer than to begin a call."""
        stub = self._entry.stubs.get(kind)
        if stub is None:
            stub = self._entry.stubs[kind] = kind(self._entry.channel)
        return cast(S, stub)

    def saw_ready(self) -> None:
        """The caller saw the channel with a connection, which the pool may hear of a moment later."""
        self._ready_before = True

    def was_ready(self) -> bool:
        """Whether a connection stood when the call began or was made since."""
        return self._ready_before or self._entry.connections > self._connections_before


class ChannelPool:
    """One set of channels per peer: a control channel and, by index, channels for bulk data.

    A channel in TRANSIENT_FAILURE or SHUTDOWN is never handed out but replaced, and `on_evict(address,
    state)` is called with `transient_failure` or `shutdown`. Calls that are still open on a replaced channel
    keep it until they end, `retire_s` seconds at the most. Belongs to one event loop; `close` cancels what is
    left.
    """

    def __init__(
        self,
        *,
        on_evict: Callable[[str, str], None] | None = None,
        retire_s: float = 120.0,
        control_options: Options | None = None,
    ) -> None:
        self._on_evict = on_evict
        self._retire_s = retire_s
        # A replaced channel would otherwise share its successor's connection, and the successor its failure.
        self._control_options: Options = [
            *(CLIENT_OPTIONS if control_options is None else control_options),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._peers: dict[str, dict[int | None, _Entry]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._evictions = 0

    def get(self, address: str, bulk_index: int | None = None) -> grpc.aio.Channel:
        """The channel to `host:port`; the `bulk_index`-th one for bulk data. Never blocks nor connects.

        Raises SERVER_DRAINING after `close`.
        """
        return self._entry(address, bulk_index).channel

    def connection(self, address: str, bulk_index: int | None = None) -> Connection:
        """Like `get`, for a caller that has to tell a refused connection from one that broke."""
        return Connection(self._entry(address, bulk_index))

    def _entry(self, address: str, bulk_index: int | None) -> _Entry:
        if self._closed:
            raise BatonError(ErrorCode.SERVER_DRAINING, "this process is shutting down; ask another server")
        peer = self._peers.setdefault(address, {})
        entry = peer.get(bulk_index)
        if entry is not None:
            state = _BROKEN.get(entry.channel.get_state())
            if state is None:
                return entry
            self._retire(address, peer, bulk_index, state)
        options = self._control_options if bulk_index is None else bulk_options()
        entry = _Entry(grpc.aio.insecure_channel(address, options=options))
        entry.watcher = self._spawn(self._watch(entry))
        peer[bulk_index] = entry
        return entry

    def check(self, address: str) -> bool:
        """Replaces what is broken at `address` now, as after a failed call; True when something was."""
        found = False
        for index, entry in list(self._peers.get(address, {}).items()):
            state = _BROKEN.get(entry.channel.get_state())
            if state is not None:
                self._retire(address, self._peers[address], index, state)
                found = True
        return found

    def evict(self, address: str) -> None:
        """Forgets every channel to `address` (a server that was removed); open calls may end in their own
        time."""
        peer = self._peers.pop(address, {})
        for index in list(peer):
            self._retire(address, peer, index, None)

    def was_ready(self, address: str) -> bool:
        """Whether the present control channel to `address` has ever been connected. See also `connection`."""
        entry = self._peers.get(address, {}).get(None)
        return entry is not None and entry.connections > 0

    def is_ready(self, address: str) -> bool:
        """Whether the control channel to `address` has a connection now."""
        entry = self._peers.get(address, {}).get(None)
        return entry is not None and entry.channel.get_state() is grpc.ChannelConnectivity.READY

    async def wait_ready(self, address: str, timeout_s: float) -> bool:
        """Connects the control channel to `address`; False when that takes longer than `timeout_s`."""
        try:
            await self.connected(address, timeout_s=timeout_s)
        except TimeoutError:
            return False
        return True

    async def connected(self, address: str, bulk_index: int | None = None, *, timeout_s: float) -> Connection:
        """A channel with a connection. A channel that somebody else's failure replaces meanwhile is given up for its
        successor. Raises TimeoutError after `timeout_s`, SERVER_DRAINING after `close`."""
        async with asyncio.timeout(timeout_s):
            while True:
                connection = self.connection(address, bulk_index)
                try:
                    await connection.channel.channel_ready()
                except grpc.aio.UsageError:  # it was closed
                    if connection.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                        raise
                else:
                    connection.saw_ready()
                    return connection

    def statistics(self) -> dict[str, int]:
        return {
            "peers": len(self._peers),
            "channels": sum(len(peer) for peer in self._peers.values()),
            "evictions": self._evictions,
            "tasks": len(self._tasks),
        }

    async def close(self) -> None:
        """Closes every channel and cancels the calls on them."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        entries = [entry for peer in self._peers.values() for entry in peer.values()]
        self._peers.clear()
        for entry in entries:
            await entry.channel.close()

    def _retire(self, address: str, peer: dict[int | None, _Entry], index: int | None, state: str | None) -> None:
        entry = peer.pop(index)
        if entry.watcher is not None:
            entry.watcher.cancel()
        self._spawn(self._close_later(entry))
        if state is not None:
            self._evictions += 1
            _log.debug("channel to %s given up: %s", address, state)
            if self._on_evict is not None:
                self._on_evict(address, state)

    async def _close_later(self, entry: _Entry) -> None:
        try:
            await entry.channel.close(self._retire_s)
        except asyncio.CancelledError:
            await entry.channel.close()
            raise

    async def _watch(self, entry: _Entry) -> None:
        state = entry.channel.get_state()
        while state is not grpc.ChannelConnectivity.SHUTDOWN:
            if state is grpc.ChannelConnectivity.READY:
                entry.connections += 1
            with contextlib.suppress(grpc.aio.UsageError):  # closed between the two calls
                await entry.channel.wait_for_state_change(state)
            state = entry.channel.get_state()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # Held in `_tasks` until it ends, and cancelled by `close`.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
