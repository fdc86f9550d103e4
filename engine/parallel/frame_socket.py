"""A connection between two ranks: frames over a Unix-domain stream socket, each with its length before it.

Nothing here waits; whoever owns the connection waits for several of them, with its own deadlines.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size
MOST_BYTES = 1 << 30
BUFFER_BYTES = 1 << 20  # asked of the kernel for each direction, so that a usual frame is taken in one call
_READ_BYTES = 1 << 18


class FrameSocket:
    """One end of a connection. Not thread-safe.

    `send` and `flush` raise OSError, `receive` EOFError or OSError, once the other end is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._socket = connection
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._scratch = bytearray(_READ_BYTES)
        self.sent_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether something that was sent has not been taken by the kernel yet."""
        return bool(self._outgoing)

    def send(self, frame: bytes | bytearray | memoryview) -> bool:
        """Queues a frame that begins with its header, see `framed`, and writes what the kernel takes at once. The frame
        may not change until it has left. True: all has left."""
        view = memoryview(frame)
        if not self._outgoing:
            try:
                taken = self._socket.send(view)
            except BlockingIOError:
                taken = 0
            self.sent_bytes += taken
            if taken == len(view):
                return True
            view = view[taken:]
        self._outgoing.append(view)
        return self.flush()

    def flush(self) -> bool:
        """Writes what the kernel takes of what waits. True: nothing waits any more."""
        outgoing = self._outgoing
        while outgoing:
            view = outgoing[0]
            try:
                taken = self._socket.send(view)
            except BlockingIOError:
                return False
            self.sent_bytes += taken
            if taken < len(view):
                outgoing[0] = view[taken:]
                return False
            outgoing.popleft()
        return True

    def receive(self) -> list[bytes]:
        """The frames that are complete by now, without their headers.

        Raises EOFError when the other end is closed and everything it sent has been returned, ValueError for what is no
        frame.
        """
        incoming, scratch = self._incoming, self._scratch
        ended = False
        while True:
            try:
                count = self._socket.recv_into(scratch)
            except BlockingIOError:
                break
            except ConnectionError:
                count = 0
            if not count:
                ended = True
                break
            incoming += memoryview(scratch)[:count]
            if count < len(scratch):
                break
        frames, begin = [], 0
        while len(incoming) - begin >= HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(incoming, begin)
            if length > MOST_BYTES:
                raise ValueError(f"a frame of {length} bytes; at most {MOST_BYTES} are allowed")
            end = begin + HEADER_BYTES + length
            if len(incoming) < end:
                break
            frames.append(bytes(memoryview(incoming)[begin + HEADER_BYTES : end]))
            begin = end
        if begin:
            del incoming[:begin]
        if ended and not frames:
            raise EOFError("the other end is closed")
        return frames

    def close(self) -> None:
        """What waits to be written is lost. A second call does nothing."""
        self._outgoing.clear()
        self._socket.close()


def framed(body: bytes) -> bytes:
    """The body with its header. Raises ValueError for one that is too long."""
    if len(body) > MOST_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes; at most {MOST_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body
