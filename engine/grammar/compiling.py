"""Grammars of requests, compiled on threads beside the step loop."""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarSpec

MOST_WORKERS = 8
CACHE_BYTES = 512 << 20

_log = logging.getLogger(__name__)


class Compiler(Protocol):
    """The part of `rpc.grammar_compiler.GrammarCompiler` that is used here."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]

    def compile(self, spec: GrammarSpec) -> Any: ...

    @property
    def library(self) -> Any: ...


class GrammarWorkers:
    """Compiles what requests ask for. `submit` and `take` belong to the engine's main thread and never wait.

    As many grammars are compiled at once as there are workers; more wait, in the order in which they came, no longer
    than their requests do.
    """

    def __init__(self, compiler: Compiler, wake: Callable[[], None]) -> None:
        """wake: ends the main thread's sleep, from any thread."""
        self.compiler = compiler
        self._wake = wake
        self._threads = ThreadPoolExecutor(
            max_workers=min(MOST_WORKERS, os.cpu_count() or 1), thread_name_prefix="grammar"
        )
        # Appended to by the workers, emptied by the main thread; both ends of a deque are safe.
        self._done: collections.deque[tuple[str, Any]] = collections.deque()

    def submit(self, request_key: str, spec: GrammarSpec) -> None:
        """`take` has the result later."""
        self._threads.submit(self._work, request_key, spec)

    def take(self) -> list[tuple[str, Any]]:
        """What has been compiled since: request keys, each with its grammar or a BatonError."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, request_key: str, spec: GrammarSpec) -> None:
        result: Any
        try:
            result = self.compiler.compile(spec)
        except BatonError as error:
            result = error
        except Exception as error:
            _log.exception("a grammar could not be compiled")
            result = BatonError(
                ErrorCode.EXECUTION_EXCEPTION,
                "the grammar could not be compiled; send the request again",
                metadata={"cause": type(error).__name__},
            )
        self._done.append((request_key, result))
        self._wake()
