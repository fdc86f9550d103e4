"""The process of a NIXL agent, for pools in host memory: `python -m cache_store.nixl.process DESCRIPTOR`.

The agent is not in the engine's process because the library ends its own process in some cases in which a peer ends
(seen with 1.5 over TCP: a reader that is killed with several reads queued at a server that stands still), and because
the end of a process is the only way to end a read that hangs. On a device `serve` runs in a thread of the engine: its
memory can be registered there alone.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from cache_store.nixl import frames as frames
from cache_store.nixl.agent import NixlAbsent, NixlAgent, NixlProblem, TheirMemory
from rpc.parent_death import end_with_parent

CUDA = "cuda"
_SHORTEST_LOOK_S = 0.0003
_LONGEST_LOOK_S = 0.02
_RECEIVE_BYTES = 1 << 18


class _Gone(Exception):
    """The other end has closed the socket."""


def serve(connection: socket.socket, attach: Callable[[], None]) -> None:
    """Makes an agent as the first frame says and does what the others say, until the other end closes."""
    arriving = frames.Frames(frames.Request)
    waiting: list[object] = []

    def receive() -> None:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            raise _Gone
        waiting.extend(arriving.feed(data))

    def send(answer: frames.Answer) -> None:
        connection.sendall(frames.encode(answer))

    agent: NixlAgent | None = None
    maps: list[mmap.mmap] = []
    try:
        while not waiting:
            receive()
        start = waiting.pop(0)
        assert isinstance(start, frames.Start)
        try:
            attach()
            layers = [_locate(maps, *layer) for layer in start.layers]
            words = _locate(maps, *start.words) if start.words[2] else (0, 0)
            agent = NixlAgent(start.name, start.memory == CUDA, start.device, layers, words)
        except NixlAbsent as absent:
            return send(frames.Failed("absent", str(absent)))
        except (NixlProblem, OSError, ValueError) as problem:
            return send(frames.Failed("failed", str(problem)))
        send(frames.Ready(agent.metadata, [address for address, _ in layers], words[0]))
        began = time.monotonic()
        while True:
            while waiting:
                _do(agent, waiting.pop(0), send)
                began = time.monotonic()
            agent.look()
            pause = None
            if agent.busy:  # looked at often at first, and hardly ever when it hangs
                pause = min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, (time.monotonic() - began) / 50))
            if _readable(connection, pause):
                receive()
    except (_Gone, ConnectionError):
        return
    finally:
        if agent is not None:
            agent.close()
        connection.close()


def _readable(connection: socket.socket, pause: float | None) -> bool:
    """Whether there is something to read, after `pause` seconds at the latest; None: as soon as there is.

    By poll: an engine has descriptors above 1023, which select cannot take. Its time is in whole milliseconds.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if pause is None or pause >= 1e-3:
        return bool(poll.poll(None if pause is None else int(1e3 * pause)))
    if not poll.poll(0):
        time.sleep(pause)
    return bool(poll.poll(0))


def _locate(maps: list[mmap.mmap], descriptor: int, address: int, size: int) -> tuple[int, int]:
    """Address and bytes of a layer here."""
    if descriptor < 0:
        return address, size
    mapped = mmap.mmap(descriptor, size)
    maps.append(mapped)
    return int(np.frombuffer(mapped, np.uint8).ctypes.data), size


def _do(agent: NixlAgent, request: object, send: Callable[[frames.Answer], None]) -> None:
    if isinstance(request, frames.Read):

        def ended(problem: str, number: int = request.number) -> None:
            send(frames.Ended(number, problem))

        source, target = np.frombuffer(request.source, np.int64), np.frombuffer(request.target, np.int64)
        agent.read(request.peer, request.layers, request.unit_bytes, source, target, ended)
    elif isinstance(request, frames.Look):

        def seen(problem: str, word: int, number: int = request.number) -> None:
            send(frames.Ended(number, problem, word))

        agent.read_word(request.peer, request.index, seen)
    elif isinstance(request, frames.Open):
        opened = partial(_opened, send, request.peer)
        memory = TheirMemory(request.memory == CUDA, request.device, request.layers, request.words)
        agent.open(request.peer, request.agent, memory, request.within_s, opened)
    elif isinstance(request, frames.Shut):
        agent.shut(request.peer)


def _opened(send: Callable[[frames.Answer], None], peer: int, problem: str) -> None:
    send(frames.Opened(peer, problem))


if __name__ == "__main__":
    end_with_parent()  # which its socket tells as well, unless the library hangs
    os.dup2(2, 1)  # the library prints to both
    serve(socket.socket(fileno=int(sys.argv[1])), lambda: None)
    # A regular exit crashes in a destructor of the library's parts (tried: 1.5). An engine's process ends so, too.
    os._exit(0)
