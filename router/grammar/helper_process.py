"""The router's side of the processes that compile grammars: their template, and one helper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from typing import Any, TypeVar

import msgspec

from router.grammar.helper import (
    LENGTH_BYTES,
    MAX_ORDER_BYTES,
    HelperConfig,
    HelperOrder,
    HelperPid,
    HelperReady,
    Verdict,
    frame,
)
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarSpec

START_TIMEOUT_S = 120.0
ORDER_TIMEOUT_S = 10.0
END_TIMEOUT_S = 2.0
_MAX_FRAME = 1 << 20
# The rest of the environment is nobody's business there: it may hold the API key.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")

_Message = TypeVar("_Message")


class HelperDied(Exception):
    """The process ended while it was asked."""


class HelperTemplate:
    """The process that makes helpers. It is started when the first one is wanted, and anew after it has ended."""

    def __init__(self, config: HelperConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._turn = asyncio.Lock()  # an order at a time
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def make(self) -> tuple[int, socket.socket]:
        """Pid of a new helper, and the socket to it.

        Raises BatonError, naming the flag, when there will never be one; OSError when there is none now.
        """
        async with self._turn:
            if self._control is None or self.pid is None:
                await self._kill()
                await self._start()
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = (await self._order(HelperOrder(), theirs)).pid
                if not pid:
                    raise OSError("the system has no room for another process")
            except BaseException:
                ours.close()
                raise
            return pid, ours

    async def end(self, pid: int) -> None:
        """The end of a helper, if it has not come yet. One that cannot be ended alone ends with the template."""
        async with self._turn:
            if self._control is None or self.pid is None:
                return  # none outlives the template
            with contextlib.suppress(OSError):
                await self._order(HelperOrder(kill=pid), None)

    async def close(self) -> None:
        """The end of the template and of all helpers."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._control = None
            with contextlib.suppress(TimeoutError):  # it ends its helpers itself, where it is not busy
                async with asyncio.timeout(END_TIMEOUT_S):
                    await self._process.wait()
        await self._kill()

    async def _start(self) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # One thread for whatever counts: a process with more of them could not be forked.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "router.grammar.helper",
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,  # the library prints what it tells in its errors too
                    env=environment,
                )
            self.starts += 1
            ready = await self._ask(control, self._config, HelperReady, START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            control.close()
            await self._kill()
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"--grammar-backend: the process that checks grammars did not start ({type(error).__name__}); "
                "repair xgrammar, or use --grammar-backend none",
                param="--grammar-backend",
            ) from None
        except BaseException:
            control.close()
            await self._kill()
            raise
        if ready.problem:
            control.close()
            await self._kill()
            raise BatonError(ErrorCode.INVALID_PARAMS, ready.problem, param="--grammar-backend")
        self._control = control

    async def _order(self, order: HelperOrder, passed: socket.socket | None) -> HelperPid:
        """Raises OSError when the template does not follow it; it has ended then."""
        assert self._control is not None
        try:
            return await self._ask(self._control, order, HelperPid, ORDER_TIMEOUT_S, passed)
        except TimeoutError:
            await self._kill()
            raise OSError("the template of helpers does not answer") from None
        except BaseException:  # whoever asks next would get the answer to this order
            await self._kill()
            raise

    async def _ask(
        self,
        control: socket.socket,
        message: Any,
        answer: type[_Message],
        limit_s: float,
        passed: socket.socket | None = None,
    ) -> _Message:
        """Raises OSError when the process has ended, TimeoutError when it says nothing."""
        body = msgspec.msgpack.encode(message)
        async with asyncio.timeout(limit_s):
            socket.send_fds(control, [body], [] if passed is None else [passed.fileno()])
            reply = await asyncio.get_running_loop().sock_recv(control, MAX_ORDER_BYTES)
        if not reply:
            raise ConnectionResetError("the process has ended")
        return msgspec.msgpack.decode(reply, type=answer)

    async def _kill(self) -> None:
        """Ends the process, and with it all helpers, and waits for it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()


class HelperProcess:
    """One helper, made anew by `start` after it has ended. Used by one task at a time."""

    def __init__(self, template: HelperTemplate) -> None:
        self._template = template
        self._pid = 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.starts = 0

    @property
    def alive(self) -> bool:
        """As far as is known: its end is seen by that of its socket."""
        return self._reader is not None and not self._reader.at_eof()

    @property
    def pid(self) -> int | None:
        return self._pid if self.alive else None

    async def start(self) -> None:
        """Returns when the helper can be asked.

        Raises BatonError, naming the flag, when it never will; OSError when it cannot now.
        """
        await self.kill()
        self._pid, link = await self._template.make()
        self.starts += 1
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=link, limit=_MAX_FRAME)
        except BaseException:
            link.close()
            raise

    async def judge(self, spec: GrammarSpec) -> Verdict:
        """What becomes of a grammar. Raises HelperDied; the helper is not `alive` then, whatever is left of it. Whoever
        stops waiting must `kill` the helper, whose next answer would be to this question."""
        reader, writer = self._reader, self._writer
        if reader is None or writer is None:
            raise HelperDied
        try:
            writer.write(frame(spec))
            await writer.drain()
            size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
            return msgspec.msgpack.decode(await reader.readexactly(size), type=Verdict)
        # RuntimeError: what uvloop raises for a connection that it has closed because the other end is gone.
        except (OSError, EOFError, RuntimeError, msgspec.MsgspecError):
            self._reader = None
            raise HelperDied from None

    async def kill(self) -> None:
        """Ends the process, if there is one, and waits for it."""
        writer, self._reader, self._writer = self._writer, None, None
        if writer is None:
            return
        writer.close()
        await self._template.end(self._pid)
