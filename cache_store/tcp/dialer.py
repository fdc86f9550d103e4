"""D's end of the transport tcp: connections to the data ports of prefill servers, which stay for the next load.

A connection that ended a load cleanly, with every byte of it read, is kept for `data_idle_s`; any other is closed. So
there are as many connections to a peer as loads from it were under way at once, a short while ago.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable

from cache_store.settings import AgentSettings
from cache_store.tcp.connection import TOKEN_BYTES, DataConnection, greeting, prepare
from rpc.errors import BatonError, ErrorCode

# A connection that was made to see whether it is possible waits for its first load no longer than this part of the time
# that the other side gives it.
UNPROVEN = 0.5


def split_host(address: str) -> str:
    """The host of "host:port" or "[v6]:port"."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


class DataDialer:
    """Belongs to the agent's loop."""

    def __init__(self, settings: AgentSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._idle: dict[str, deque[tuple[str, DataConnection]]] = {}  # by address, with the engine; the latest last

    @property
    def idle(self) -> int:
        return sum(len(each) for each in self._idle.values())

    async def take(self, address: str, port: int, engine_id: str) -> DataConnection:
        """A connection to the engine's data port that says nothing, an idle one or a new one.

        Raises CACHE_STORE_LOAD_CONNECT_FAILED.
        """
        waiting = self._idle.get(address)
        while waiting:
            engine, connection = waiting.pop()
            if engine == engine_id and connection.silent():
                return connection
            connection.close()
        return await self._connect(address, port, engine_id)

    async def _connect(self, address: str, port: int, engine_id: str) -> DataConnection:
        host = split_host(address)
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                family, kind, protocol, _, target = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                prepare(sock)
                await loop.sock_connect(sock, target)
                said = b""
                while len(said) < TOKEN_BYTES:
                    part = await loop.sock_recv(sock, TOKEN_BYTES - len(said))
                    if not part:
                        raise OSError("it was closed at once: the server has no room for another one")
                    said += part
            if said != greeting(engine_id):
                raise OSError("something else answers there")
            connection, sock = DataConnection(sock), None
            return connection
        except (OSError, TimeoutError) as error:
            what = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise BatonError(
                ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
                "the prefill server's data port cannot be reached; open it, or use --kv-transport grpc",
                metadata={"peer": address, "data_port": str(port), "error": what[:128]},
            ) from None
        finally:
            if sock is not None:
                sock.close()

    def give(self, address: str, engine_id: str, connection: DataConnection) -> None:
        """Keeps a connection on which nothing is under way. `proven` says whether it has carried a load."""
        connection.since = self._clock()
        self._idle.setdefault(address, deque()).append((engine_id, connection))

    def drop(self, address: str) -> None:
        """The peer is lost."""
        for _, connection in self._idle.pop(address, ()):
            connection.close()

    def look_after(self) -> None:
        """Closes what has been idle for too long."""
        settings = self._settings
        now = self._clock()
        for address, waiting in list(self._idle.items()):
            kept = deque[tuple[str, DataConnection]]()
            for engine, connection in waiting:
                limit = settings.data_idle_s
                if not connection.proven:
                    limit = min(limit, settings.data_token_timeout_s * UNPROVEN)
                if now - connection.since < limit:
                    kept.append((engine, connection))
                else:
                    connection.close()
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]

    def close(self) -> None:
        for address in list(self._idle):
            self.drop(address)
