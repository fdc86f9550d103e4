"""A process that tries to compile grammars: `python -m router.grammar.helper`, started by the router.

Frames go in on stdin and out on stdout: a length of four bytes, little-endian, and a msgpack message. The first is
`HelperConfig`, answered by `HelperReady`; each `GrammarSpec` after it is answered by a `Verdict`, in order. The end of
stdin ends the process, and so does the death of the router.

What a grammar may do here is bounded: memory by a limit on the address space, set anew for each, time by the router,
which kills the process. It writes no files, and knows no secrets: its environment is a short list.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarSpec

LENGTH_BYTES = 4
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


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one grammar: code 0, or why it is refused."""

    seconds: float
    code: int = 0
    message: str = ""
    metadata: Mapping[str, str] = {}


def read_frame(stream: BinaryIO) -> bytes | None:
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
    source = sys.stdin.buffer
    # Nothing but answers goes to the router, whatever a library prints.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    first = read_frame(source)
    if first is None:
        return 2
    config = msgspec.msgpack.decode(first, type=HelperConfig)
    if not _tie_to(config.parent_pid):
        return 2
    compiler, problem = _compiler(config)
    if compiler is not None:
        _confine()
    _send(out, HelperReady(problem))
    if compiler is None:
        return 1
    decoder = msgspec.msgpack.Decoder(GrammarSpec)
    while (body := read_frame(source)) is not None:
        _send(out, _judge(compiler, decoder.decode(body), config.memory_bytes))
    return 0


def _send(out: BinaryIO, message: object) -> None:
    out.write(frame(message))
    out.flush()


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
    return Verdict(time.perf_counter() - began)


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
