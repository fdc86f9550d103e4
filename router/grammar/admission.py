"""Whether a grammar compiles, asked before anything is reserved for its request."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from router.grammar.helper import HelperConfig, Verdict
from router.grammar.helper_process import HelperDied, HelperProcess, HelperTemplate
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarSpec, not_offered
from rpc.metrics import Registry

# Compiled grammars that the helpers keep, all together.
CACHE_BYTES = 1 << 30
MOST_HELPERS = 4
CORES_PER_HELPER = 4
MOST_WAITING = 1024
# A grammar that takes longer makes room for others, and goes on beside them.
QUICK_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

_Result = TypeVar("_Result")
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


@dataclass(frozen=True)
class _Trial:
    """A helper that is at a grammar. `asking` never fails."""

    helper: HelperProcess
    asking: asyncio.Task[Verdict]
    began: float


class GrammarAdmission:
    """A context manager that owns its helper processes; outside of it nothing is admitted.

    At most MOST_WAITING grammars wait for a helper, more are refused with ROUTER_QUEUE_FULL. Equal grammars are asked
    about once, and verdicts that cannot change are remembered. A request that leaves stops waiting at once; its grammar
    is still looked at if its turn has come.

    A grammar that is not done after QUICK_S leaves its place to those that wait, and a new helper takes it: the slow
    one goes on in a place of its own, one at a time. If that is taken, its helper is ended, and it is begun anew when
    its turn there comes. So however many slow grammars are sent, each costs the others QUICK_S at the most, and there
    is never more than one process above `helper_count` and the template.
    """

    def __init__(self, settings: GrammarSettings, metrics: Registry) -> None:
        self.settings = settings
        self._metrics = metrics
        self.template = HelperTemplate(
            HelperConfig(
                folder=settings.folder,
                memory_bytes=settings.memory_bytes,
                cache_bytes=CACHE_BYTES // settings.helper_count,
                parent_pid=os.getpid(),
            )
        )
        count = settings.helper_count if settings.enabled else 0
        self.helpers = [HelperProcess(self.template) for _ in range(count)]
        self._queue: asyncio.Queue[_Job] = asyncio.Queue(MOST_WAITING)
        self._slow_queue: asyncio.Queue[tuple[_Job, _Trial | None]] = asyncio.Queue(MOST_WAITING)
        self._slow = 0  # grammars in the slow place and on the way there
        self._jobs: dict[bytes, _Job] = {}
        self._verdicts: collections.OrderedDict[bytes, Verdict] = collections.OrderedDict()
        self._ready = 0
        self._stack = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._group = asyncio.TaskGroup()
        metrics.set("baton_grammar_validator_available", 0)

    async def __aenter__(self) -> Self:
        """Returns when a helper is ready. Raises SystemExit with one line, naming the flag, if the first cannot be."""
        if not self.helpers:
            return self
        try:
            await self.helpers[0].start()
        except (BatonError, OSError) as error:
            message = error.message if isinstance(error, BatonError) else f"--grammar-backend: {error}"
            await self.template.close()
            raise SystemExit(f"router: error: {message}") from None
        self._count(1)
        await self._stack.enter_async_context(self._group)
        for place in range(len(self.helpers)):
            self._spawn(self._serve(place))
        self._spawn(self._serve_slow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self._stack.aclose()
        await self.template.close()
        for helper in self.helpers:
            await helper.kill()
        while not self._slow_queue.empty():
            _, trial = self._slow_queue.get_nowait()
            if trial is not None:
                await trial.helper.kill()
        for job in list(self._jobs.values()):
            self._settle(job, _verdict(ErrorCode.SERVER_DRAINING, "the router is shutting down"))

    def _spawn(self, coroutine: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def admit(self, spec: GrammarSpec, param: str) -> int | None:
        """Returns when the grammar has been found to compile: the bytes of its longest text, None where there is no
        longest one or it cannot be told.

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
        return verdict.most_bytes

    def statistics(self) -> dict[str, object]:
        """For `/server_info`."""
        return {
            "helpers": [{"pid": helper.pid, "starts": helper.starts} for helper in self.helpers],
            "template": {"pid": self.template.pid, "starts": self.template.starts},
            "waiting": self._queue.qsize(),
            "slow": self._slow,
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
            self._limit_wait(job)
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

    def _limit_wait(self, job: _Job) -> None:
        job.timer = asyncio.get_running_loop().call_later(self.settings.queue_timeout_s, self._expire, job)

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

    async def _serve(self, place: int) -> None:
        """One place for helpers: a job at a time, and a new process after each that has ended or is slow."""
        if not self.helpers[place].alive:
            await self._start(self.helpers[place])
        while True:
            job = await self._queue.get()
            if not self._wanted(job):
                continue
            helper = self.helpers[place]
            if not helper.alive:  # it ended while it had nothing to do
                self._count(-1)
                await self._start(helper)
                if not self._wanted(job):  # that may have taken long
                    continue
            trial = self._begin(helper, job)
            if await self._ends(trial, min(QUICK_S, self.settings.compile_timeout_s)):
                self._settle(job, trial.asking.result())
                if helper.alive:
                    continue
                self._count(-1)
            else:
                self._count(-1)
                if not self._slow:
                    self._slow += 1
                    self._slow_queue.put_nowait((job, trial))
                    helper = self.helpers[place] = HelperProcess(self.template)
                else:
                    await self._stop(trial)
                    self._postpone(job)
            await self._start(helper)

    async def _serve_slow(self) -> None:
        """The place for grammars that take long: each ends here, one way or the other, and its helper with it."""
        while True:
            job, trial = await self._slow_queue.get()
            if trial is None and self._wanted(job):
                helper = HelperProcess(self.template)
                await self._start(helper)
                self._count(-1)  # it is for this one alone
                if self._wanted(job):
                    trial = self._begin(helper, job)
                else:
                    await helper.kill()
            if trial is not None:
                left_s = trial.began + self.settings.compile_timeout_s - time.monotonic()
                try:
                    verdict = trial.asking.result() if await self._ends(trial, left_s) else self._too_slow(job, trial)
                finally:
                    await self._stop(trial)
                self._settle(job, verdict)
            self._slow -= 1

    def _postpone(self, job: _Job) -> None:
        """The slow place is taken: the grammar waits for it, and is begun anew."""
        try:
            self._slow_queue.put_nowait((job, None))
        except asyncio.QueueFull:
            self._settle(job, _verdict(ErrorCode.ROUTER_QUEUE_FULL, "too many grammars are slow; send it again later"))
        else:
            self._slow += 1
            self._limit_wait(job)

    @staticmethod
    def _wanted(job: _Job) -> bool:
        """Whether anybody still waits for the job, whose turn has come."""
        if job.answer.done():
            return False
        if not job.waiters:
            if job.timer is not None:
                job.timer.cancel()
            job.answer.cancel()
            return False
        return True

    def _begin(self, helper: HelperProcess, job: _Job) -> _Trial:
        if job.timer is not None:  # it waits until here, for a helper that has to be started too
            job.timer.cancel()
        return _Trial(helper, self._spawn(self._ask(helper, job.spec)), time.monotonic())

    @staticmethod
    async def _ends(trial: _Trial, limit_s: float) -> bool:
        """Whether the helper has an answer within the limit."""
        done, _ = await asyncio.wait({trial.asking}, timeout=max(0.0, limit_s))
        return bool(done)

    @staticmethod
    async def _stop(trial: _Trial) -> None:
        trial.asking.cancel()
        await trial.helper.kill()

    def _too_slow(self, job: _Job, trial: _Trial) -> Verdict:
        self._metrics.observe("baton_grammar_compile_seconds", time.monotonic() - trial.began)
        return _verdict(
            ErrorCode.ERROR_GENERATE_CONFIG_FORMAT,
            f"{job.spec.kind} takes longer to compile than {self.settings.compile_timeout_s:g} s "
            "(--grammar-compile-timeout-seconds); simplify it",
            cause="timeout",
        )

    async def _ask(self, helper: HelperProcess, spec: GrammarSpec) -> Verdict:
        """What the helper says; if it dies, that."""
        began = time.monotonic()
        try:
            verdict = await helper.judge(spec)
        except HelperDied:
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
