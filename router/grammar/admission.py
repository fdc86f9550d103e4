"""Whether a grammar compiles, asked before anything is reserved for its request."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import logging
import os
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from router.grammar.helper import HelperConfig, Verdict
from router.grammar.helper_process import HelperDied, HelperProcess
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarSpec, not_offered
from rpc.metrics import Registry

# Compiled grammars that the helpers keep, all together.
CACHE_BYTES = 1 << 30
MOST_HELPERS = 4
CORES_PER_HELPER = 4
MOST_WAITING = 1024
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrammarSettings:
    """Bounds of admission; times in seconds."""

    enabled: bool
    folder: str  # of the model
    queue_timeout_s: float = 30.0
    compile_timeout_s: float = 30.0
    memory_bytes: int = 1 << 30
    result_cache: int = 2048
    helpers: int = 0  # 0: by the cores

    @property
    def helper_count(self) -> int:
        return self.helpers or max(1, min(MOST_HELPERS, (os.cpu_count() or 1) // CORES_PER_HELPER))


@dataclass(eq=False)
class _Job:
    """One grammar that is being asked about, by as many requests as wait for it."""

    spec: GrammarSpec
    answer: asyncio.Future[Verdict]
    waiters: int = 0
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class GrammarAdmission:
    """A context manager that owns its helper processes; outside of it nothing is admitted.

    At most MOST_WAITING grammars wait for a helper, more are refused with ROUTER_QUEUE_FULL. Equal grammars are asked
    about once, and verdicts that cannot change are remembered. A request that leaves stops waiting at once; its grammar
    is still looked at if its turn has come.
    """

    def __init__(self, settings: GrammarSettings, metrics: Registry) -> None:
        self.settings = settings
        self._metrics = metrics
        config = HelperConfig(
            folder=settings.folder,
            memory_bytes=settings.memory_bytes,
            cache_bytes=CACHE_BYTES // settings.helper_count,
            parent_pid=os.getpid(),
        )
        self.helpers = [HelperProcess(config) for _ in range(settings.helper_count)] if settings.enabled else []
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(MOST_WAITING)
        self._jobs: dict[bytes, _Job] = {}
        self._verdicts: collections.OrderedDict[bytes, Verdict] = collections.OrderedDict()
        self._ready = 0
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        metrics.set("baton_grammar_validator_available", 0)

    async def __aenter__(self) -> Self:
        """Returns when a helper is ready. Raises SystemExit with one line, naming the flag, if the first cannot be."""
        if not self.helpers:
            return self
        first, *others = self.helpers
        try:
            await first.start()
        except BatonError as error:
            raise SystemExit(f"router: error: {error.message}") from None
        self._count(1)
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._tasks = [group.create_task(self._serve(helper)) for helper in (first, *others)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._stack.aclose()
        for helper in self.helpers:
            await helper.kill()
        for job in list(self._jobs.values()):
            self._settle(job, _verdict(ErrorCode.SERVER_DRAINING, "the router is shutting down"))

    async def admit(self, spec: GrammarSpec, param: str) -> None:
        """Returns when the grammar has been found to compile.

        Raises ERROR_GENERATE_CONFIG_FORMAT with the parser's position, or with the cause `timeout` or `memory`,
        ROUTER_QUEUE_TIMEOUT and ROUTER_QUEUE_FULL when no helper had time, EXECUTION_EXCEPTION when the helper died,
        INVALID_PARAMS when structured output is off. `param` is the client's field.
        """
        if not self.helpers:
            raise not_offered(param)
        key = hashlib.sha256(f"{spec.kind}\0{spec.text}".encode("utf-8", "surrogatepass")).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._wait(key, spec)
        else:
            self._verdicts.move_to_end(key)
        if verdict.code:
            raise BatonError(
                ErrorCode(verdict.code), verdict.message, param=param, metadata=dict(verdict.metadata), stage="tokenize"
            )

    def statistics(self) -> dict[str, object]:
        """For `/server_info`."""
        return {
            "helpers": [{"pid": helper.pid, "starts": helper.starts} for helper in self.helpers],
            "waiting": self._queue.qsize(),
            "verdicts": len(self._verdicts),
        }

    async def _wait(self, key: bytes, spec: GrammarSpec) -> Verdict:
        job = self._jobs.get(key)
        if job is None or job.answer.done():
            loop = asyncio.get_running_loop()
            job = _Job(spec, loop.create_future())
            try:
                self._queue.put_nowait(job)
            except asyncio.QueueFull:
                raise BatonError(
                    ErrorCode.ROUTER_QUEUE_FULL, "too many grammars wait to be checked; send the request again"
                ) from None
            self._jobs[key] = job
            job.answer.add_done_callback(lambda _, job=job: self._forget(key, job))  # type: ignore[misc]
            job.timer = loop.call_later(self.settings.queue_timeout_s, self._expire, job)
        job.waiters += 1
        try:
            verdict = await asyncio.shield(job.answer)
        finally:
            job.waiters -= 1
        if _is_final(verdict):
            self._remember(key, verdict)
        return verdict

    def _forget(self, key: bytes, job: _Job) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > self.settings.result_cache:
            self._verdicts.popitem(last=False)

    def _expire(self, job: _Job) -> None:
        message = (
            f"the grammar waited {self.settings.queue_timeout_s:g} s (--grammar-queue-timeout-seconds) to be checked; "
            "send the request again"
        )
        self._settle(job, _verdict(ErrorCode.ROUTER_QUEUE_TIMEOUT, message))

    @staticmethod
    def _settle(job: _Job, verdict: Verdict) -> None:
        if job.timer is not None:
            job.timer.cancel()
        if not job.answer.done():
            job.answer.set_result(verdict)

    # -- helpers ----------------------------------------------------------------------------------------------

    async def _serve(self, helper: HelperProcess) -> None:
        """One helper's life: a job at a time, and a new process after each that has ended."""
        if not helper.alive:
            await self._start(helper)
        while True:
            job = await self._queue.get()
            if job.timer is not None:
                job.timer.cancel()
            if job.answer.done():
                continue
            if not job.waiters:
                job.answer.cancel()
                continue
            if not helper.alive:  # it ended while it had nothing to do
                self._count(-1)
                await self._start(helper)
            self._settle(job, await self._judge(helper, job.spec))
            if not helper.alive:
                self._count(-1)
                await self._start(helper)

    async def _judge(self, helper: HelperProcess, spec: GrammarSpec) -> Verdict:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.settings.compile_timeout_s):
                verdict = await helper.judge(spec)
        except TimeoutError:
            await helper.kill()
            verdict = _verdict(
                ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
                f"{spec.kind} takes longer to compile than {self.settings.compile_timeout_s:g} s "
                "(--grammar-compile-timeout-seconds); simplify it",
                cause="timeout",
            )
        except HelperDied:
            await helper.kill()
            verdict = _verdict(
                ErrorCode.EXECUTION_EXCEPTION,
                "the process that checks grammars ended; send the request again",
                cause="helper_died",
            )
            _log.error("a grammar helper ended while it compiled", extra={"code": "EXECUTION_EXCEPTION"})
        self._metrics.observe("baton_grammar_compile_seconds", time.monotonic() - began)
        return verdict

    async def _start(self, helper: HelperProcess) -> None:
        """Starts it until it works; the pauses between attempts grow."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await helper.start()
            except (BatonError, OSError) as error:
                _log.error("a grammar helper does not start: %s", error, extra={"code": "EXECUTION_EXCEPTION"})
            else:
                self._count(1)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _count(self, change: int) -> None:
        self._ready += change
        self._metrics.set("baton_grammar_validator_available", int(self._ready > 0))


def _verdict(code: ErrorCode, message: str, cause: str = "") -> Verdict:
    return Verdict(0.0, int(code), message, {"cause": cause} if cause else {})


def _is_final(verdict: Verdict) -> bool:
    """Whether asking again would bring the same: not after a timeout, a death or a full queue."""
    if verdict.code == 0:
        return True
    return verdict.code == ErrorCode.ERROR_GENERATE_CONFIG_FORMAT and verdict.metadata.get("cause") != "timeout"
