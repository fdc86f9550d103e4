"""A data connection: a plain socket that carries the bytes of one load at a time (transport tcp), and the work of the
threads that move them.

Bytes go from KV memory into the socket by gathering `sendmsg`, and out of it straight into KV memory by scattering
`recvmsg_into`; the interpreter lock is free meanwhile, and the agent's loop touches no byte of them. There is no thread
for a connection: a worker takes a *turn* with it, which ends when nothing is queued, when the peer has not kept up for
`TURN_S`, or after `TURN_BYTES`. A connection that was held up waits in the loop's selector and not in a thread, so slow
peers, however many, take little from the others. Within a turn the kernel waits for the peer (SO_RCVTIMEO,
MSG_WAITALL), which costs far fewer changes between threads than a selector for each piece of a run does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from cache_store.rows import Rows, runs
from cache_store.staging import settled

TOKEN_BYTES = 16
TURN_S = 0.005
TURN_BYTES = 16 << 20
REPORT_BYTES = 4 << 20  # moved within a turn before the loop hears of it: to wake it costs both threads time
# Bytes of one system call: they are looked at (checksums) while they are still in the processor's cache.
CALL_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20
_MAX_VIEWS = max(16, min(1024, os.sysconf("SC_IOV_MAX")))
_TIMEVAL = struct.pack("@ll", 0, int(TURN_S * 1e6))


class ConnectionEnded(Exception):
    """The peer has closed or reset the connection."""


def greeting(engine_id: str) -> bytes:
    """The first bytes on a data connection, from the side that listens: whoever connects knows by them that it has
    reached the engine of the handshake, and not what else answers at that port of the host."""
    return hashlib.blake2b(engine_id.encode(), digest_size=TOKEN_BYTES, person=b"baton kv data").digest()


@functools.cache
def _granted(name: str) -> bool:
    """Whether sockets may have buffers of BUFFER_BYTES: a size that is set is never adapted any more, so one that the
    system cuts down is worse than none."""
    try:
        return int(Path(f"/proc/sys/net/core/{name}").read_text()) >= BUFFER_BYTES
    except (OSError, ValueError):
        return False


def prepare(sock: socket.socket) -> None:
    """Options of a socket that listens or is about to connect: they cannot be set later."""
    if _granted("rmem_max"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    if _granted("wmem_max"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def views_of(layer: memoryview, rows: Rows) -> list[memoryview]:
    """The memory of `rows` in their layer, neighbours as one view; aliases the layer.

    Raises IndexError for rows that the layer does not have.
    """
    unit = rows.unit_bytes
    views = []
    for first, count in runs(rows.numbers):
        view = layer[first * unit : (first + count) * unit]
        if first < 0 or view.nbytes != count * unit:
            raise IndexError(f"rows [{first}, {first + count}) of {unit} bytes are outside of a layer")
        views.append(view)
    return views


@dataclass(eq=False)
class Transfer:
    """Bytes that follow each other on the connection. `views`: what is left of them; a worker takes it away piece by
    piece. `moved` is called by the worker after each piece with what was moved, in order."""

    views: deque[memoryview]
    size: int
    moved: Callable[[memoryview], None] | None = None

    @classmethod
    def of(cls, views: list[memoryview], moved: Callable[[memoryview], None] | None = None) -> Transfer:
        return cls(deque(views), sum(view.nbytes for view in views), moved)

    def next_views(self) -> tuple[list[memoryview], int]:
        """Views for the next system call, and their bytes."""
        chosen: list[memoryview] = []
        size = 0
        for view in self.views:
            if len(chosen) == _MAX_VIEWS or size >= CALL_BYTES:
                break
            part = view[: CALL_BYTES - size] if size + view.nbytes > CALL_BYTES else view
            chosen.append(part)
            size += part.nbytes
        return chosen, size

    def take_off(self, count: int) -> None:
        """The first `count` bytes of what is left have been moved."""
        views = self.views
        while count:
            view = views[0]
            step = min(count, view.nbytes)
            if self.moved is not None:
                self.moved(view[:step])
            if step == view.nbytes:
                views.popleft()
            else:
                views[0] = view[step:]
            count -= step


class DataConnection:
    """A connected socket. `proven`: it has carried a load."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # for worker threads, with the limits below; the loop asks with MSG_DONTWAIT
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.proven = False
        self.since = 0.0  # reading of the clock when it became idle

    def silent(self) -> bool:
        """Nothing has come that was not read, and the peer has not closed."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the end, or bytes that nobody waits for

    def say(self, token: bytes) -> None:
        """Sends the token of a load. Raises ConnectionEnded."""
        try:
            sent = self.sock.send(token, socket.MSG_DONTWAIT)
        except OSError as error:  # no room for a few bytes on a connection that is idle is an end, too
            raise ConnectionEnded(str(error)) from None
        if sent != len(token):
            raise ConnectionEnded("it takes nothing")

    def shut_down(self) -> None:
        """Ends what a worker does with it. The socket is closed once no worker has it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


class Mover:
    """Moves transfers over a connection, in order, in one direction. Belongs to the agent's loop.

    `done(transfer)` and `turned(bytes, held_up)` are called on the loop: a transfer has been moved; a worker's turn has
    ended. `failed(error)`: nothing is moved any more, because of the connection (ConnectionEnded) or of `moved`.
    """

    def __init__(
        self,
        connection: DataConnection,
        workers: Executor,
        *,
        sending: bool,
        done: Callable[[Transfer], None],
        failed: Callable[[Exception], None],
        turned: Callable[[int, bool], None],
    ) -> None:
        self.connection = connection
        self._workers = workers
        self._sending = sending
        self._done = done
        self._failed = failed
        self._turned = turned
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Transfer] = deque()
        self._finished: deque[Transfer] = deque()  # moved, and not yet reported
        self._turn: asyncio.Future[tuple[int, bool, Exception | None]] | None = None
        self._waiting = False
        self._ended = False

    @property
    def queued(self) -> tuple[Transfer, ...]:
        """Not moved yet. No worker has them while `turned` is called."""
        return tuple(self._queue)

    @property
    def idle(self) -> bool:
        return not self._queue and self._turn is None

    def put(self, transfer: Transfer) -> None:
        self._queue.append(transfer)
        self._start()

    def _start(self) -> None:
        if self._queue and self._turn is None and not self._waiting and not self._ended:
            self._turn = self._loop.run_in_executor(self._workers, self._take_turn)
            self._turn.add_done_callback(self._end_turn)

    # ---- on a worker

    def _take_turn(self) -> tuple[int, bool, Exception | None]:
        total = 0
        reported = 0
        try:
            while self._queue and total < TURN_BYTES and not self._ended:
                transfer = self._queue[0]
                while transfer.views:
                    views, size = transfer.next_views()
                    count = self._move(views)
                    total += count
                    transfer.take_off(count)
                    if count < size:
                        return total, True, None
                self._queue.popleft()
                self._finished.append(transfer)
                if total - reported >= REPORT_BYTES:
                    reported = total
                    self._loop.call_soon_threadsafe(self._report)
        except BlockingIOError:
            return total, True, None
        except OSError as error:
            ended = ConnectionEnded(errno.errorcode.get(error.errno or 0, str(error)))
            return total, False, ended
        except Exception as error:  # of `moved`, or the loop is closed: whoever has queued the transfer has to know
            return total, False, error
        return total, False, None

    def _move(self, views: list[memoryview]) -> int:
        if self._sending:
            return self.connection.sock.sendmsg(views)
        count = self.connection.sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not count:
            raise ConnectionEnded("the peer has closed it")
        return count

    # ---- on the loop

    def _report(self) -> None:
        while self._finished:
            self._done(self._finished.popleft())

    def _end_turn(self, turn: asyncio.Future[tuple[int, bool, Exception | None]]) -> None:
        if self._turn is not turn:  # `ended` was quicker than the loop
            return
        self._turn = None
        self._report()
        if turn.cancelled():  # with its loop, at the agent's end
            return
        total, held_up, error = turn.result()
        if self._ended:
            return
        if error is not None:
            self._ended = True
            self._failed(error)
            return
        self._turned(total, held_up)
        if not held_up:
            self._start()
        elif not self._ended:
            self._waiting = True
            watch = self._loop.add_writer if self._sending else self._loop.add_reader
            watch(self.connection.sock.fileno(), self._go_on)

    def _go_on(self) -> None:
        self._stop_waiting()
        self._start()

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            drop = self._loop.remove_writer if self._sending else self._loop.remove_reader
            drop(self.connection.sock.fileno())

    def stop(self) -> None:
        """Nothing more is moved, and a worker that is at it ends at once. The connection is of no use any more."""
        if not self._ended or self._turn is not None:
            self.connection.shut_down()
        self._ended = True
        self._stop_waiting()

    async def ended(self) -> None:
        """Returns when no worker has the connection and all that was moved is reported. A cancellation takes effect
        afterwards."""
        while (turn := self._turn) is not None:
            try:
                await settled([turn])
            finally:
                self._end_turn(turn)
