"""The router's side of one helper process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any, TypeVar

import msgspec

from router.grammar.helper import LENGTH_BYTES, HelperConfig, HelperReady, Verdict, frame
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarSpec

START_TIMEOUT_S = 120.0
KILL_TIMEOUT_S = 5.0
_MAX_FRAME = 1 << 20
# The rest of the environment is nobody's business there: it may hold the API key.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ")

_Message = TypeVar("_Message")


class HelperDied(Exception):
    """The process ended while it was asked."""


class HelperProcess:
    """One process, started anew by `start` after it has ended. Used by one task at a time."""

    def __init__(self, config: HelperConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self.starts = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    async def start(self) -> None:
        """Returns when the helper can be asked. Raises BatonError, naming the flag, when it never will."""
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "router.grammar.helper",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # the library prints what it tells in its errors too
            env=environment,
            limit=_MAX_FRAME,
        )
        self.starts += 1
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await self._ask(self._config, HelperReady)
        except (HelperDied, TimeoutError) as error:
            await self.kill()
            raise BatonError(
                ErrorCode.INVALID_PARAMS,
                f"--grammar-backend: the process that checks grammars did not start ({type(error).__name__}); "
                "repair xgrammar, or use --grammar-backend none",
                param="--grammar-backend",
            ) from None
        except BaseException:
            await self.kill()
            raise
        if ready.problem:
            await self.kill()
            raise BatonError(ErrorCode.INVALID_PARAMS, ready.problem, param="--grammar-backend")

    async def judge(self, spec: GrammarSpec) -> Verdict:
        """What becomes of a grammar. Raises HelperDied. Whoever stops waiting must `kill` the helper, whose next answer
        would be to this question."""
        return await self._ask(spec, Verdict)

    async def kill(self) -> None:
        """Ends the process, if there is one, and waits for it."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._process = None

    async def _ask(self, message: Any, answer: type[_Message]) -> _Message:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise HelperDied
        try:
            process.stdin.write(frame(message))
            await process.stdin.drain()
            size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
            return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=answer)
        # RuntimeError: what uvloop raises for a pipe that it has closed because the other end is gone.
        except (OSError, EOFError, RuntimeError, msgspec.MsgspecError):
            raise HelperDied from None
