"""The process that holds the client of Mooncake Store: `python -m cache_store.tiers.mooncake_client`.

The client is a native library. Its calls can take a minute where a peer has stopped, some keep Python from running
meanwhile, and it may end its process. So it has one of its own, which the engine starts, watches and replaces
(`mooncake_link.py`): all that an engine can lose by it is the blocks that lie in this process's part of the store.

The engine's socket is stdin and keeps messages apart. First comes `ClientConfig` with the descriptor of the memory that
both share, answered by `Imported`; then each `Request` is answered by a `Reply` with its number, in any order: every
request has a thread of WORKERS, and what asks whether the store is there has one that no record waits for. Reads take
turns: two at once take half as much processor time again, and longer than one after the other. Records travel in slots
of the shared memory. The end of the socket ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from rpc.parent_death import end_with_parent, outlive_parent

WORKERS = 6  # requests at a time
MAX_MESSAGE_BYTES = 128 << 10
MOST_KEYS = 4096  # of one request
KEY_PREFIX = "baton-kv-"
LOCAL_BUFFER_BYTES = 16 << 20  # for the library's own use; records do not go through it
CLOSE_S = 3.0
READ_TURN_S = 0.2  # that a read waits for those before it

# Codes of replies beside those of the library, which are negative too.
OK, ABSENT = 0, -704
FULL = -200  # nowhere is there room
FAILED = -1
_LOST = frozenset((-900, -901, -902))  # the master does not answer

# How long the library waits, unless the user's environment says otherwise; its own defaults are up to a minute.
LIMITS = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
    "MC_SLICE_TIMEOUT": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}


class ClientConfig(msgspec.Struct, frozen=True):
    """What the engine tells the process at its start; the descriptor of the shared memory comes with it."""

    master: str  # host:port
    master_host: str
    master_port: int
    host: str  # under which the processes of other servers reach this one; empty: the address that leads to the master
    segment_bytes: int  # of this process's memory that the store may use; 0: none
    slot_bytes: int
    slots: int


class Imported(msgspec.Struct, frozen=True):
    """The first answer; `problem` is set when there is no library, and is all that the process says."""

    problem: str = ""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """connect; probe; find: keys; get and put: keys, slots, size; remove: keys; close: without an answer."""

    number: int
    operation: str
    keys: list[bytes] = []
    slots: list[int] = []
    size: int = 0  # of each record


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """codes: by key 0 or a negative code; of find one number, the leading keys that are there. lost: the master did
    not answer, or the client is not connected."""

    number: int
    codes: list[int] = []
    lost: bool = False


def main() -> int:
    end_with_parent()  # which its socket tells as well, unless the library keeps Python from running
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its life is the engine's
    control = socket.socket(fileno=0)
    message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
    if not message or not descriptors:
        return 2
    config = msgspec.msgpack.decode(message, type=ClientConfig)
    # With its pages: the first records would wait for them.
    memory = mmap.mmap(descriptors[0], config.slots * config.slot_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(descriptors[0])
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        control.send(msgspec.msgpack.encode(Imported(str(error)[:1000] or "it cannot be imported")))
        return 1
    control.send(msgspec.msgpack.encode(Imported()))
    client = Client(config, memory, MooncakeDistributedStore)
    workers = ThreadPoolExecutor(WORKERS, "mooncake")
    prober = ThreadPoolExecutor(1, "mooncake-probe")
    decoder = msgspec.msgpack.Decoder(Request)
    sending = threading.Lock()

    def serve(request: Request) -> None:
        reply = client.answer(request)
        with sending, contextlib.suppress(OSError):
            control.send(msgspec.msgpack.encode(reply))

    while True:
        try:
            message = control.recv(MAX_MESSAGE_BYTES)
        except OSError:
            break
        if not message:
            break
        request = decoder.decode(message)
        if request.operation == "close":
            _leave(client)
            break
        (prober if request.operation in ("connect", "probe") else workers).submit(serve, request)
    os._exit(0)  # whatever the library's threads are doing


def _leave(client: Client) -> None:
    """Takes this process's part out of the store in order, so that nobody is sent to it any more. It takes the library
    a second, for which the engine does not wait."""
    outlive_parent()
    thread = threading.Thread(target=client.close, daemon=True)
    thread.start()
    thread.join(CLOSE_S)


class Client:
    """The library's client with the engine's slots as its buffers. Calls come from several threads."""

    def __init__(self, config: ClientConfig, memory: mmap.mmap, make: Callable[[], Any]) -> None:
        self._config = config
        self._make = make
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory
        self._connecting = threading.Lock()
        self._reads = Turns(READ_TURN_S)
        self._store: Any = None

    def answer(self, request: Request) -> Reply:
        try:
            if request.operation == "connect":
                return Reply(request.number, lost=not self._connect())
            if self._store is None:
                return Reply(request.number, lost=True)
            codes = self._perform(request)
        except Exception:  # an error of the library's Python side
            return Reply(request.number, [FAILED] * len(request.keys))
        return Reply(request.number, codes, lost=bool(_LOST.intersection(codes)))

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _connect(self) -> bool:
        """Whether there is a connected client. One that was keeps itself connected."""
        with self._connecting:
            if self._store is not None:
                return True
            config = self._config
            try:
                host = config.host or _host_towards(config.master_host, config.master_port)
            except OSError:  # there is no network, or no such name, as yet
                return False
            store = self._make()
            code = store.setup(host, "P2PHANDSHAKE", config.segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", config.master)
            if code == 0:
                code = store.register_buffer(self._address, config.slots * config.slot_bytes)
            if code != 0:
                store.close()
                return False
            self._store = store
            return True

    def _perform(self, request: Request) -> list[int]:
        store, size = self._store, request.size
        keys = [KEY_PREFIX + key.hex() for key in request.keys]
        places = [self._address + slot * self._config.slot_bytes for slot in request.slots]
        match request.operation:
            case "probe":
                return [min(store.is_exist(KEY_PREFIX), OK)]
            case "find":
                return _leading(store.batch_is_exist(keys))
            case "get":
                with self._reads.mine():
                    read = store.batch_get_into(keys, places, [size] * len(keys))
                # A record of another size is none of ours.
                return [OK if count == size else min(count, FAILED) for count in read]
            case "put":
                return list(store.batch_put_from(keys, places, [size] * len(keys)))
            case "remove":
                return [store.remove(key, True) for key in keys]
        raise ValueError(f"no operation {request.operation!r}")


class Turns:
    """One after the other, in the order of coming; one that takes too long is passed by."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._changed = threading.Condition()
        self._here: deque[object] = deque()

    @contextmanager
    def mine(self) -> Iterator[None]:
        me = object()
        with self._changed:
            self._here.append(me)
            self._changed.wait_for(lambda: self._here[0] is me, self._longest_s)
        try:
            yield
        finally:
            with self._changed:
                self._here.remove(me)
                self._changed.notify_all()


def _host_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one."""
    family, kind, protocol, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


def _leading(present: list[int]) -> list[int]:
    """How many leading ones are 1; the code of the first error instead if nothing but that is known."""
    count = next((number for number, each in enumerate(present) if each != 1), len(present))
    if count == 0 and present and present[0] < 0:
        return [present[0]]
    return [count]


if __name__ == "__main__":
    raise SystemExit(main())
