"""A follower's end of its connection to rank 0.

A write never waits: what rank 0 does not take at once leaves while the follower waits for its next frame. Rank 0 must
give a sign of life within `--tp-broadcast-timeout-seconds`, and take what it is sent within the same time.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable

import msgspec

from engine.parallel.frame_socket import FrameSocket, framed
from engine.parallel.lost import RankLost
from engine.parallel.messages import FollowerFrame, RankFrame


class Port:
    """The connection of one follower. Belongs to one thread. All methods but `close` raise RankLost for rank 0."""

    def __init__(
        self, connection: socket.socket, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._link = FrameSocket(connection)
        self._frames: deque[FollowerFrame] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FollowerFrame)
        self._waits_since = 0.0  # since when something that was sent has not left; 0: nothing waits
        self._poller = select.poll()
        self._poller.register(self._link.fileno(), select.POLLIN)
        self._wake: int | None = None

    def watch(self, descriptor: int) -> None:
        """Has `receive` return early when the descriptor becomes readable."""
        self._wake = descriptor
        self._poller.register(descriptor, select.POLLIN)

    def send(self, frame: RankFrame) -> None:
        """Hands a frame over; what cannot leave now leaves during the next `receive` or `flush`."""
        try:
            left = self._link.send(framed(self._encoder.encode(frame)))
        except OSError:
            raise _closed() from None
        if not left and not self._waits_since:
            self._waits_since = self._clock()

    def flush(self, wait_s: float) -> bool:
        """Waits until everything that was sent has left. False: it has not within `wait_s`."""
        deadline = self._clock() + wait_s
        poller = select.poll()
        poller.register(self._link.fileno(), select.POLLOUT)
        while self._link.pending:
            self._write()
            left_s = deadline - self._clock()
            if not self._link.pending or left_s <= 0:
                break
            poller.poll(max(1, int(left_s * 1000)))
        return not self._link.pending

    def receive(self, deadline: float | None = None) -> FollowerFrame | None:
        """The next frame of rank 0; None when the watched descriptor became readable first.

        deadline: a reading of the clock until which rank 0 may be silent; None: `timeout_s` from now.
        """
        if deadline is None:
            deadline = self._clock() + self.timeout_s
        while not self._frames:
            left_s = deadline - self._clock()
            if left_s <= 0:
                self._read()
                if self._frames:
                    break
                raise RankLost(0, "silent", "has given no sign of life in time")
            if self._waits_since:
                left_s = min(left_s, max(0.001, self._waits_since + self.timeout_s - self._clock()))
                self._poller.modify(self._link.fileno(), select.POLLIN | select.POLLOUT)
            woken = False
            for descriptor, event in self._poller.poll(max(1, int(left_s * 1000))):
                if descriptor == self._wake:
                    woken = True
                    continue
                if event & select.POLLOUT:
                    self._write()
                if event & ~select.POLLOUT:
                    self._read()
            if self._waits_since and self._clock() - self._waits_since >= self.timeout_s:
                raise RankLost(0, "not_reading", f"has not read for {self.timeout_s:g} s")
            if woken and not self._frames:
                return None
        return self._frames.popleft()

    def close(self) -> None:
        """A second call does nothing."""
        self._link.close()

    def _write(self) -> None:
        sent = self._link.sent_bytes
        try:
            done = self._link.flush()
        except OSError:
            raise _closed() from None
        if done:
            self._waits_since = 0.0
            self._poller.modify(self._link.fileno(), select.POLLIN)
        elif self._link.sent_bytes > sent:
            self._waits_since = self._clock()

    def _read(self) -> None:
        try:
            for body in self._link.receive():
                self._frames.append(self._decoder.decode(body))
        except (EOFError, OSError):
            if not self._frames:
                raise _closed() from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise RankLost(0, "protocol", "sent a message that cannot be read", {"detail": str(error)}) from error


def _closed() -> RankLost:
    return RankLost(0, "closed", "is gone: it has closed its connection")
