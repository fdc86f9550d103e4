"""P's end of the transport tcp: the port where decode servers connect, and the tokens by which a connection finds the
load that it is for.

A token is 16 random bytes, made for one load and told to its reader alone, on the stream of the load. A connection says
one as its first bytes, and after each load the next one; it is good once, and void when its load has ended or
`data_token_timeout_s` have passed since the load had something to send. A connection that says anything else, or
nothing in time, is closed and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import secrets
import socket

from cache_store.observations import Observe
from cache_store.settings import AgentSettings
from cache_store.tcp.connection import TOKEN_BYTES, DataConnection, greeting, prepare
from rpc.errors import BatonError, ErrorCode
from rpc.log_limit import LogLimit

BACKLOG = 128
ACCEPTS_AT_ONCE = 32  # then the loop serves others first
NO_ROOM_PAUSE_S = 1.0  # after the process had no descriptor for a connection: it waits, and would call again at once
IDLE_MARGIN = 1.5  # the other side, which closes idle connections first, does so this much sooner

_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

_log = logging.getLogger(__name__)


class Expected:
    """A load that waits for its connection. `connection` fails when none comes in time."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.connection: asyncio.Future[DataConnection] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None


class _Guest:
    """A connection between two loads: it has not said its token, or not all of it."""

    def __init__(self, connection: DataConnection) -> None:
        self.connection = connection
        self.said = b""
        self.timer: asyncio.TimerHandle | None = None


class DataListener:
    """Belongs to the agent's loop, but for `listen`."""

    def __init__(self, engine_id: str, settings: AgentSettings, observe: Observe) -> None:
        self._greeting = greeting(engine_id)
        self._settings = settings
        self._observe = observe
        self._key = secrets.token_bytes(32)
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._expected: dict[bytes, Expected] = {}  # by the token's digest, so that no comparison tells of a token
        self._guests: set[_Guest] = set()
        self._lent = 0
        self._resume: asyncio.TimerHandle | None = None
        self._failures = LogLimit()

    @property
    def connections(self) -> int:
        return len(self._guests) + self._lent

    def listen(self, host: str, port: int = 0) -> int:
        """Binds and returns the port. Raises OSError."""
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            prepare(sock)
            sock.bind(address)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        self._socket = sock
        bound: int = sock.getsockname()[1]
        return bound

    def start(self) -> None:
        """Accepts connections, on the running loop."""
        assert self._socket is not None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._accept)

    # ---- loads

    def expect(self) -> Expected:
        assert self._loop is not None
        expected = Expected(secrets.token_bytes(TOKEN_BYTES))
        self._expected[self._digest(expected.token)] = expected
        return expected

    def await_token(self, expected: Expected) -> None:
        """The load has something to send from now on, so its token is due."""
        assert self._loop is not None
        if not expected.connection.done():
            expected.timer = self._loop.call_later(self._settings.data_token_timeout_s, self._void, expected)

    def forget(self, expected: Expected) -> None:
        """The load has ended; a connection that has come for it and was not taken is closed."""
        self._expected.pop(self._digest(expected.token), None)
        if expected.timer is not None:
            expected.timer.cancel()
        future = expected.connection
        if not future.done():
            future.cancel()

    def give_back(self, connection: DataConnection, clean: bool) -> None:
        """A load is done with its connection, and no worker has it. `clean`: everything that was announced was sent."""
        self._lent -= 1
        if clean and self._loop is not None:
            connection.proven = True
            self._welcome(connection)
        else:
            connection.close()

    def _void(self, expected: Expected) -> None:
        future = expected.connection
        if not future.done():
            future.set_exception(
                BatonError(
                    ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
                    "the decode server opened no data connection in time",
                    metadata={"waited_s": f"{self._settings.data_token_timeout_s:g}"},
                )
            )
        self._expected.pop(self._digest(expected.token), None)

    def _digest(self, token: bytes) -> bytes:
        return hashlib.blake2b(token, digest_size=TOKEN_BYTES, key=self._key).digest()

    # ---- connections

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # this one has ended already
                if count := self._failures.occurred("accept"):
                    _log.warning("a data connection cannot be accepted: %s", error, extra={"occurrences": count})
                self._pause()  # the peer is told by its own limit
                return
            if self.connections >= self._settings.data_connections:
                self._count("refused")
                sock.close()
                continue
            try:
                connection = DataConnection(sock)
                sock.send(self._greeting, socket.MSG_DONTWAIT)
            except OSError:
                self._count("lost")
                sock.close()
                continue
            self._welcome(connection)

    def _pause(self) -> None:
        """Accepts nothing for a while."""
        assert self._socket is not None and self._loop is not None
        self._loop.remove_reader(self._socket.fileno())
        self._resume = self._loop.call_later(NO_ROOM_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._socket is not None and self._loop is not None:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _welcome(self, connection: DataConnection) -> None:
        """Waits for the connection's next token."""
        assert self._loop is not None
        guest = _Guest(connection)
        self._guests.add(guest)
        limit = self._settings.data_idle_s * IDLE_MARGIN
        if not connection.proven:
            limit = min(limit, self._settings.data_token_timeout_s)
        guest.timer = self._loop.call_later(limit, self._dismiss, guest, "idle" if connection.proven else "silent")
        self._loop.add_reader(connection.sock.fileno(), self._read, guest)

    def _read(self, guest: _Guest) -> None:
        sock = guest.connection.sock
        try:
            part = sock.recv(TOKEN_BYTES - len(guest.said), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        guest.said += part
        if not part:
            self._dismiss(guest, "lost")
        elif len(guest.said) == TOKEN_BYTES:
            expected = self._expected.pop(self._digest(guest.said), None)
            if expected is None or expected.connection.done():
                self._dismiss(guest, "unknown_token")
                return
            self._part(guest)
            self._lent += 1
            if expected.timer is not None:
                expected.timer.cancel()
            self._count("used")
            expected.connection.set_result(guest.connection)

    def _part(self, guest: _Guest) -> None:
        """The listener has nothing to do with it for now."""
        assert self._loop is not None
        self._loop.remove_reader(guest.connection.sock.fileno())
        if guest.timer is not None:
            guest.timer.cancel()
        self._guests.discard(guest)

    def _dismiss(self, guest: _Guest, result: str) -> None:
        self._part(guest)
        self._count(result)
        guest.connection.close()

    def _count(self, result: str) -> None:
        self._observe("kv_data_connections_total", result=result)

    def close(self) -> None:
        """Connections of loads are closed by their senders."""
        if self._resume is not None:
            self._resume.cancel()
        for guest in list(self._guests):
            self._part(guest)
            guest.connection.close()
        if self._socket is not None:
            if self._loop is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._loop = None
