"""A data connection: a plain socket that carries the bytes of one load at a time (transport tcp), and the work of the
threads that move them.

Bytes go from KV memory into the socket by gathering `sendmsg`, and out of it straight into KV memory by scattering
`recvmsg_into`; the interpreter lock is free meanwhile, and the agent's loop touches no byte of them. There is no thread
for a connection: a worker takes a *turn* with it, which ends when nothing is queued, when the peer has not kept up for
`TURN_S`, or after `LONGEST_TURN_S`. A connection that was held up waits in the loop's selector and not in a thread, so
slow peers, however many, take little from the others. Within a turn the kernel waits for the peer (SO_RCVTIMEO,
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
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

import xxhash

from cache_store.checksum import digest
from cache_store.geometry.rows import Rows, runs
from cache_store.memory.staging import settled

TOKEN_BYTES = 16
SUM_BYTES = 8
TURN_S = 0.005
LONGEST_TURN_S = 0.02
REPORT_BYTES = 8 << 20  # moved within a turn before the loop hears of it: to wake it costs both threads time
CALL_BYTES = 1 << 20  # of one system call
RECEIVED_BYTES = 512 << 10  # of one whose bytes are hashed: they are in a core's own cache then
WAKE_BYTES = 256 << 10  # a thread that waits for bytes is woken when there are so many
KEPT_UP_BYTES = 256 << 10  # moved in TURN_S by a peer that keeps up
BUFFER_BYTES = 4 << 20
# Where there are cores for it, checksums are made by other workers than those that move the bytes: ahead of them by the
# sender, behind them by the receiver. On fewer, a worker that hashes takes its time from one that moves; and where the
# bytes lie in many pieces, it waits for the interpreter lock after each of them.
CORES_FOR_SUMS = 8
LEAST_PIECE_BYTES = 256 << 10
_MAX_VIEWS = max(16, min(1024, os.sysconf("SC_IOV_MAX")))
_TIMEVAL = struct.pack("@ll", 0, int(TURN_S * 1e6))


class ConnectionEnded(Exception):
    """The peer has closed or reset the connection."""


def greeting(engine_id: str) -> bytes:
    """The first bytes on a data connection, from the side that listens: whoever connects knows by them that it has
    reached the engine of the handshake, and not what else answers at that port of the host."""
    return hashlib.blake2b(engine_id.encode(), digest_size=TOKEN_BYTES, person=b"baton kv data").digest()


@functools.cache
def _has_cores() -> bool:
    return len(os.sched_getaffinity(0)) >= CORES_FOR_SUMS


def sums_apart(views: Sequence[memoryview]) -> bool:
    """Whether the checksum of a transfer is another worker's business."""
    return _has_cores() and sum(view.nbytes for view in views) >= len(views) * LEAST_PIECE_BYTES


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


class Transfer:
    """Bytes that follow each other on the connection: `views`, and the checksum of them all behind them when they are
    `summed`.

    A worker takes away what it has moved: `views`, with `left` bytes, and `_rest` are what is left. Unless another one
    does (`apart`), it hashes each piece right after it was sent (`Outbound`) or has come (`Inbound`), while most of
    it is in the core's own cache, and nothing waits for that of a whole run.
    """

    piece_bytes = CALL_BYTES  # of one system call, when its bytes are hashed after it

    def __init__(self, views: Sequence[memoryview], summed: bool = False) -> None:
        self.views = deque(views)
        self.size = self.left = sum(view.nbytes for view in views)
        self.summed = summed
        self.apart = False
        self._hash = xxhash.xxh3_64()
        self._tail = bytearray(SUM_BYTES if summed else 0)
        self._rest = memoryview(self._tail)

    @property
    def unfinished(self) -> bool:
        return self.left > 0 or self._rest.nbytes > 0

    def next_views(self) -> tuple[list[memoryview], int]:
        """Views for the next system call, and their bytes."""
        chosen: list[memoryview] = []
        size = 0
        limit = self.piece_bytes if self.summed and not self.apart else CALL_BYTES
        for view in self.views:
            if len(chosen) == _MAX_VIEWS or size >= limit:
                return chosen, size
            part = view[: limit - size] if size + view.nbytes > limit else view
            chosen.append(part)
            size += part.nbytes
            if part is not view:
                return chosen, size
        return self._add_rest(chosen, size)

    def _add_rest(self, chosen: list[memoryview], size: int) -> tuple[list[memoryview], int]:
        """`chosen` has all that is left of the views."""
        if self._rest.nbytes:
            chosen.append(self._rest)
        return chosen, size + self._rest.nbytes

    def take_off(self, count: int) -> None:
        """The first `count` bytes of what is left have been moved."""
        views = self.views
        while count and views:
            view = views[0]
            step = min(count, view.nbytes)
            if self.summed and not self.apart:
                self._hash.update(view[:step])
            if step == view.nbytes:
                views.popleft()
            else:
                views[0] = view[step:]
            count -= step
            self.left -= step
        if count:
            self._rest = self._rest[count:]


class Outbound(Transfer):
    """To be sent."""

    _damaged = False
    _ahead: Future[int] | None = None
    _all: tuple[memoryview, ...] = ()

    def sum_ahead(self, workers: Executor) -> None:
        """Nothing of it has been sent: another worker makes the checksum."""
        if self.summed and not self._damaged:
            self.apart = True
            self._all = tuple(self.views)
            self._ahead = workers.submit(digest, self._all)

    def _sum(self) -> int:
        """Of all bytes. Waits for the worker that is at it; one that has not begun may never come to it."""
        ahead = self._ahead
        if ahead is None:
            return self._hash.intdigest()
        return digest(self._all) if ahead.cancel() else ahead.result()

    def _add_rest(self, chosen: list[memoryview], size: int) -> tuple[list[memoryview], int]:
        if chosen:
            return chosen, size  # the checksum is not known yet
        if self._rest.nbytes == SUM_BYTES and not self._damaged:
            self._tail[:] = self._sum().to_bytes(SUM_BYTES, "little")
        return super()._add_rest(chosen, size)

    def replace(self, views: Iterable[memoryview]) -> None:
        """What is left is sent from there: as many bytes. Where it was is not read any more."""
        if self._ahead is not None:
            known: Future[int] = Future()
            known.set_result(self._sum())
            self._ahead, self._all = known, ()
        self.views = deque(view for view in views if view.nbytes)

    def damage(self, views: Iterable[memoryview]) -> None:
        """Sends other bytes, and the checksum of those that it had. Nothing of it has been sent."""
        if self.summed:
            self._tail[:] = digest(self.views).to_bytes(SUM_BYTES, "little")
        self._damaged = True
        self.replace(views)


class Inbound(Transfer):
    """To be received: into the views. `apart`: whoever has received it hashes what has come."""

    piece_bytes = RECEIVED_BYTES

    def __init__(self, views: Sequence[memoryview], summed: bool = False, apart: bool = False) -> None:
        super().__init__(views, summed)
        self.apart = apart

    @property
    def said(self) -> int:
        """The checksum that the peer has sent."""
        return int.from_bytes(self._tail, "little")

    def sums(self) -> tuple[int, int]:
        """Checksum of what has come, and the one that the peer has sent. Not with `apart`."""
        return self._hash.intdigest(), self.said


class DataConnection:
    """A connected socket. `proven`: it has carried a load."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # for worker threads, with the limits below; the loop asks with MSG_DONTWAIT
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._wakes_at = 1
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

    def wake_at(self, count: int) -> None:
        """Whoever waits for bytes is woken when there are so many: each time costs both ends more than the bytes do."""
        if count != self._wakes_at:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wakes_at = count

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
    ended. `failed(error)`: nothing is moved any more, because of the connection (ConnectionEnded) or of the transfer.
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

    @property
    def held_up(self) -> bool:
        """The peer takes or sends nothing now, and no worker has a transfer."""
        return self._waiting

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
        due = 1  # the first one is reported at once
        until = time.monotonic() + LONGEST_TURN_S
        try:
            while self._queue and not self._ended and time.monotonic() < until:
                transfer = self._queue[0]
                views, size = transfer.next_views()
                count = self._move(views)
                total += count
                transfer.take_off(count)
                if count < size and count < KEPT_UP_BYTES:
                    return total, True, None
                if transfer.unfinished:
                    continue
                self._queue.popleft()
                self._finished.append(transfer)
                if total >= due:
                    due = total + REPORT_BYTES
                    self._loop.call_soon_threadsafe(self._report)
        except BlockingIOError:
            return total, True, None
        except OSError as error:
            ended = ConnectionEnded(errno.errorcode.get(error.errno or 0, str(error)))
            return total, False, ended
        except Exception as error:  # of a checksum, or the loop is closed: whoever queued the transfer has to know
            return total, False, error
        return total, False, None

    def _move(self, views: list[memoryview]) -> int:
        if self._sending:
            # The end of a run is no reason to send less than a full packet, when another one follows.
            return self.connection.sock.sendmsg(views, (), socket.MSG_MORE if len(self._queue) > 1 else 0)
        # So much has to be announced beyond these bytes, or the wait for what never comes lasts until TURN_S.
        follows = self._queue[1].left if len(self._queue) > 1 else 0
        self.connection.wake_at(WAKE_BYTES if follows >= WAKE_BYTES else 1)
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
            if not self._sending:
                self.connection.wake_at(1)
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
