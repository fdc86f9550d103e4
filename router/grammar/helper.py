"""Processes that try to compile grammars: `python -m router.grammar.helper`, started by the router, and its children.

The process that the router starts loads the library and the tokenizer, which takes seconds, and then sees no grammar:
it is the template of helpers, which it makes by forking, in milliseconds. So one that had to be killed is replaced at
once, and all of them share the template's memory.

Template and router talk over a socket that keeps messages apart, the template's stdin: `HelperConfig`, answered by
`HelperReady`; then each `HelperOrder` is answered by a `HelperPid`. An order for a new helper brings the socket along
that leads to it. There frames go both ways: a length of four bytes, little-endian, and a msgpack message; each
`GrammarSpec` is answered by a `Verdict`, in order. The end of its socket ends a process, and so does the death of the
one that made it.

What a grammar may do here is bounded: memory by a limit on the address space, set anew for each, time by the router,
which has the process killed. It writes no files, and knows no secrets: its environment is a short list.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import resource
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarSpec

LENGTH_BYTES = 4
MAX_ORDER_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


class HelperConfig(msgspec.Struct, frozen=True):
    """What the router tells a helper at its start."""

    folder: str  # of the model; its tokenizer is read
    memory_bytes: int  # that compiling one grammar may take
    cache_bytes: int  # of compiled grammars that are kept beside it
    parent_pid: int


class HelperReady(msgspec.Struct, frozen=True):
    """The first answer; `problem` is set when the helper cannot work, and is all that it says."""

    problem: str = ""


class HelperOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the router wants of the template: a new helper, or the end of one of them."""

    kill: int = 0  # its pid; 0: a new one


class HelperPid(msgspec.Struct, frozen=True):
    """The answer to an order; 0 when there could be no new helper."""

    pid: int


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one grammar: code 0 and how long its texts can be, or why it is refused."""

    seconds: float
    code: int = 0
    message: str = ""
    metadata: Mapping[str, str] = {}
    most_bytes: int | None = None  # of its longest text, where there is one and it can be told


def read_frame(stream: io.BufferedIOBase) -> bytes | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return body if len(body) == size else None


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its life is the router's
    control = socket.socket(fileno=0)
    first = control.recv(MAX_ORDER_BYTES)
    if not first:
        return 2
    config = msgspec.msgpack.decode(first, type=HelperConfig)
    if not _tie_to(config.parent_pid):
        return 2
    compiler, problem = _compiler(config)
    if compiler is not None:
        _confine()
        # The collector of a helper is not to touch, and so to copy, what it shares with the template.
        gc.collect()
        gc.freeze()
    control.send(msgspec.msgpack.encode(HelperReady(problem)))
    if compiler is None:
        return 1
    _make_helpers(control, compiler, config.memory_bytes)
    return 0


def _make_helpers(control: socket.socket, compiler: Any, memory_bytes: int) -> None:
    """Follows orders until the router has gone; then no helper is left."""
    decoder = msgspec.msgpack.Decoder(HelperOrder)
    helpers: set[int] = set()
    while True:
        message, passed, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, 1)
        helpers -= {pid for pid in helpers if os.waitpid(pid, os.WNOHANG)[0]}
        if not message:
            break
        order = decoder.decode(message)
        if passed:
            pid = _fork(control, passed[0], compiler, memory_bytes)
            os.close(passed[0])
            helpers |= {pid} - {0}
        else:
            # Its number cannot be another process's by now: whoever ended is waited for here alone.
            pid = order.kill
            _end(helpers & {pid})
            helpers.discard(pid)
        control.send(msgspec.msgpack.encode(HelperPid(pid)))
    _end(helpers)


def _end(helpers: Iterable[int]) -> None:
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(control: socket.socket, descriptor: int, compiler: Any, memory_bytes: int) -> int:
    """A helper behind the socket; returns its pid, 0 if the system has no room for one. Never returns in the helper."""
    template = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return 0
    if pid:
        return pid
    status = 1
    try:
        control.close()  # else nobody would see the template end
        if _tie_to(template):
            _work(descriptor, compiler, memory_bytes)
            status = 0
    finally:
        os._exit(status)


def _work(descriptor: int, compiler: Any, memory_bytes: int) -> None:
    decoder = msgspec.msgpack.Decoder(GrammarSpec)
    with socket.socket(fileno=descriptor) as link, link.makefile("rwb") as stream:
        while (body := read_frame(stream)) is not None:
            stream.write(frame(_judge(compiler, decoder.decode(body), memory_bytes)))
            stream.flush()


def _compiler(config: HelperConfig) -> tuple[Any, str]:
    """The compiler, or why there is none. A programming error is told as one: the library is there, and wrong."""
    from rpc.grammar_compiler import GrammarCompiler

    try:
        return GrammarCompiler.load(Path(config.folder), cache_bytes=config.cache_bytes), ""
    except BatonError as error:
        return None, error.message
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        return None, f"--grammar-backend: a programming error at {where}: {type(error).__name__}: {error}"


def _judge(compiler: Any, spec: GrammarSpec, memory_bytes: int) -> Verdict:
    began = time.perf_counter()
    _limit_memory(_address_space() + memory_bytes)
    try:
        compiler.check(spec)
        most_bytes = compiler.most_bytes(spec)
    except BatonError as error:
        return Verdict(time.perf_counter() - began, int(error.code), error.message, dict(error.metadata))
    except Exception as error:
        return Verdict(
            time.perf_counter() - began,
            int(ErrorCode.EXECUTION_EXCEPTION),
            "the grammar could not be checked",
            {"cause": type(error).__name__},
        )
    finally:
        _limit_memory(resource.RLIM_INFINITY)
    return Verdict(time.perf_counter() - began, most_bytes=most_bytes)


def _limit_memory(size: int) -> None:
    """The limit in force; the hard one stays, so that the next grammar starts from what is in use then."""
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _address_space() -> int:
    """Bytes of the process's address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _tie_to(parent_pid: int) -> bool:
    """Lets the kernel end this process with its parent. False: the parent has ended already."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent_pid


def _confine() -> None:
    """From here on: no files, no core dumps, no new privileges."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = min(64, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


if __name__ == "__main__":
    status = main()
    os._exit(status)  # taking torch apart would take longer than anybody waits
