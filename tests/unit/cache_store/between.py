"""Something between a decode server and the data port of a prefill server: it holds back, cuts, adds, takes bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace

from cache_store.tcp.connection import TOKEN_BYTES
from tests.unit.cache_store.agents import WAIT_S, Node


class Between:
    """One data connection at a time passes through. Of what the prefill server sends, only the greeting and the first
    `allowed` bytes do; `at(count)` waits until so many have."""

    def __init__(self, prefill: Node, allowed: int = 1 << 40, extra: tuple[int, bytes] = (0, b"")) -> None:
        """`extra`: bytes that go out together with that byte of the prefill server's."""
        self._extra = extra
        service = prefill.agent._service
        self._target = service.offer.data_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._changed = threading.Condition()
        self._allowed = allowed
        self.passed = 0
        self._down: socket.socket | None = None  # to the decode server
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = [self._listener]
        self._start(self._accept)
        service.offer = replace(service.offer, data_port=self._listener.getsockname()[1])

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                down, _ = self._listener.accept()
                up = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [down, up]
                self._start(self._forward, down, up)
                self._start(self._pass, up, down)

    def _forward(self, down: socket.socket, up: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := down.recv(1 << 16):
                up.sendall(data)
            up.shutdown(socket.SHUT_RDWR)

    def _pass(self, up: socket.socket, down: socket.socket) -> None:
        with contextlib.suppress(OSError):
            down.sendall(up.recv(TOKEN_BYTES, socket.MSG_WAITALL))
            while data := up.recv(1 << 16):
                self._down = down
                while data:
                    with self._changed:
                        assert self._changed.wait_for(lambda: self._ended or self.passed < self._allowed, WAIT_S)
                        count = min(len(data), self._allowed - self.passed)
                    if self._ended:
                        return
                    at, extra = self._extra
                    due = self.passed < at <= self.passed + count
                    down.sendall(data[:count] + (extra if due else b""))
                    data = data[count:]
                    with self._changed:
                        self.passed += count
                        self._changed.notify_all()
            down.shutdown(socket.SHUT_WR)

    def at(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.passed >= count, WAIT_S), f"{self.passed} bytes have passed"

    def allow(self, count: int = 1 << 40) -> None:
        with self._changed:
            self._allowed = count
            self._changed.notify_all()

    def cut(self) -> None:
        """Ends the connection of the load, for both."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for each in self._sockets[1:]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._ended = False

    def half_close(self) -> None:
        """The decode server sees the end, and can still send."""
        assert self._down is not None
        self._down.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for each in self._sockets:
            each.close()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
