"""What front and engine ask of their ZeroMQ sockets."""

from __future__ import annotations

import zmq


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """Of an event loop or a poller; it signals edges: after one, everything must be read before it signals again."""
    return _number(socket, zmq.FD)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether `recv` has something. Half as expensive as to try it and to catch what it raises."""
    return bool(_number(socket, zmq.EVENTS) & zmq.POLLIN)


def _number(socket: zmq.Socket[bytes], option: zmq.SocketOption) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
