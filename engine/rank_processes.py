"""The engine processes of one server, one per rank: started together, watched, and ended together.

Torch-free. Belongs to one asyncio event loop. The ranks are connected by Unix-domain sockets that are made here and
inherited, so nothing of them is on disk. Each follower also inherits a pipe into which it writes why it ends; rank 0
says so in its messages to the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.first_cause import FirstCause, ended
from engine.messages import EngineError, EngineFailed
from rpc.errors import BatonError, ErrorCode

CAUSE_WAIT_S = 1.0  # how long a rank that only lost the others waits for the one that is at fault
KILL_WAIT_S = 5.0
LOOK_S = 0.01  # between two looks for what a rank has said that has ended
START_MARGIN_S = 5.0
MOST_REPORT_BYTES = 1 << 16
# Exit statuses of rank 0 (engine/process.py): its front has told it to end, it has told its front why it ends.
STOPPED, FAILED = 0, 1
_ROOT = str(Path(__file__).resolve().parents[1])


def error_of(error: EngineError) -> BatonError:
    """The engine's failure as an exception; a number outside the table becomes UNKNOWN_ERROR, and so does a missing
    one: it is this server's own defect, and no peer's."""
    if error.code == 0:
        return BatonError(ErrorCode.UNKNOWN_ERROR, error.message, stage=error.stage, metadata=error.metadata)
    return BatonError.from_number(error.code, error.message, stage=error.stage, metadata=error.metadata)


class _Rank:
    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.process = process
        self.watch: asyncio.Task[None] | None = None
        self.report: int | None = None  # read end of the pipe
        self.written = b""


class RankProcesses:
    """All ranks of one engine.

    `on_death(cause)` is called once, when a rank has ended or failed before `expect_end`, and all of them have been
    killed; with one rank, and after `expect_end`, when the last one has ended. `last_words(exit status)` is called when
    rank 0 has ended, and again while it returns False: what rank 0 had to say may not have been read yet.
    """

    def __init__(
        self, config: EngineConfig, *, on_death: Callable[[BatonError], None], last_words: Callable[[int], bool]
    ) -> None:
        self.config = config
        self.size = config.tensor_parallel_size
        self._on_death = on_death
        self._last_words = last_words
        self._ranks: list[_Rank] = []
        self._cause = FirstCause(self.size)
        self._decision: asyncio.TimerHandle | None = None
        self.serving = False  # set once the engine is ready: what ends it then is no mistake in its settings
        self._expected = False
        self._dead = False
        self._start_deadline_ns = 0

    @property
    def pids(self) -> list[int]:
        """Of all ranks that were started, in order."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def running(self) -> list[int]:
        """Ranks whose processes have not ended."""
        return [rank.rank for rank in self._ranks if rank.process.returncode is None]

    # -- start ----------------------------------------------------------------------------------------------

    async def start(self, inbox: str, outbox: str, timeout_s: float) -> None:
        """Starts the processes and gives each its configuration. inbox, outbox: rank 0's sockets to the front.
        timeout_s: for the engine to become ready; ranks that wait for each other give up a little earlier, so that they
        can say for whom.

        Raises OSError; what was started then is ended by `kill`.
        """
        margin_s = min(START_MARGIN_S, timeout_s / 5)
        self._start_deadline_ns = time.monotonic_ns() + int((timeout_s - margin_s) * 1e9)
        with contextlib.ExitStack() as theirs:
            leading, following = [], []
            for _ in range(1, self.size):
                leads, follows = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                leading.append(theirs.enter_context(leads))
                following.append(theirs.enter_context(follows))
            common = ["--front-pid", str(os.getpid())]
            descriptors = [leads.fileno() for leads in leading]
            arguments = ["--inbox", inbox, "--outbox", outbox]
            meeting = -1
            if descriptors:
                meeting = os.memfd_create("baton-ranks")  # where they meet; no folder has its name
                theirs.callback(os.close, meeting)
                common += ["--meeting", str(meeting)]
                arguments += ["--followers", ",".join(map(str, descriptors))]
                descriptors.append(meeting)
            await self._spawn(0, [*arguments, *common], descriptors)
            for rank, follows in enumerate(following, 1):
                report, write_end = os.pipe()
                theirs.callback(os.close, write_end)
                try:
                    inherited = [follows.fileno(), write_end, meeting]
                    arguments = ["--leader", str(follows.fileno()), "--report", str(write_end), *common]
                    await self._spawn(rank, arguments, inherited)
                except BaseException:
                    os.close(report)
                    raise
                self._listen(self._ranks[rank], report)

    async def _spawn(self, rank: int, arguments: list[str], inherited: list[int]) -> None:
        # A session of its own: Ctrl-C in the terminal reaches the front alone, which ends the engine in order. Its
        # stdout is the front's stderr, because the front's stdout carries the one line that says it is ready.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine.process", *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=2, stderr=None, env=self._environment(), start_new_session=True,
            pass_fds=inherited,
        )  # fmt: skip
        started = _Rank(rank, process)
        self._ranks.append(started)
        started.watch = asyncio.create_task(self._watch(started), name=f"engine-watch-{rank}")
        assert process.stdin is not None
        # It died at once; the watch says so. RuntimeError: what uvloop raises where it knows that already.
        with contextlib.suppress(ConnectionError, RuntimeError):
            own = msgspec.structs.replace(
                self.config, rank=rank, threads=self.threads, start_deadline_ns=self._start_deadline_ns
            )
            process.stdin.write(own.to_json())
            await process.stdin.drain()
        process.stdin.close()

    @property
    def threads(self) -> int:
        """Threads of each rank; 0 leaves the choice to torch. Several ranks share the cores."""
        if self.config.threads or self.size == 1:
            return self.config.threads
        return max(1, len(os.sched_getaffinity(0)) // self.size)

    def _environment(self) -> Mapping[str, str]:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
        if self.threads:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        # How long an idle compute thread spins before it sleeps, here about 50 us: longer than the gap between two
        # operators. The default of about 16 ms takes a core from the other processes after every step, and with more
        # runnable threads than cores makes a step ten times as slow.
        environment.setdefault("GOMP_SPINCOUNT", "1000")
        return environment

    # -- watch ----------------------------------------------------------------------------------------------

    def failed(self, rank: int, error: BatonError) -> None:
        """The rank has said that it cannot go on; its process is about to exit."""
        self._cause.heard(rank, error)
        if self.size > 1:
            self._consider()

    def _listen(self, started: _Rank, report: int) -> None:
        os.set_blocking(report, False)
        started.report = report
        asyncio.get_running_loop().add_reader(report, self._read_report, started)

    def _read_report(self, started: _Rank) -> None:
        """Books the follower's report once it is complete, which is when the pipe is closed."""
        if started.report is None:
            return
        while True:
            try:
                part = os.read(started.report, MOST_REPORT_BYTES)
            except BlockingIOError:
                return
            if not part:
                break
            started.written = (started.written + part)[:MOST_REPORT_BYTES]
        self._close_report(started)
        if started.written:
            try:
                failure = error_of(msgspec.msgpack.decode(started.written, type=EngineFailed).error)
            except msgspec.MsgspecError as error:
                message = f"rank {started.rank} of the engine ended with a report that cannot be read"
                failure = BatonError(ErrorCode.ENGINE_DEAD, message, metadata={"detail": str(error)})
            self.failed(started.rank, failure)

    @staticmethod
    def _close_report(started: _Rank) -> None:
        if started.report is not None:
            asyncio.get_running_loop().remove_reader(started.report)
            os.close(started.report)
            started.report = None

    async def _watch(self, started: _Rank) -> None:
        status = await started.process.wait()
        if started.rank == 0:
            await self._hear_out(status)
        self._read_report(started)
        self._close_report(started)
        if self._dead:
            return
        self._cause.heard(started.rank, ended(started.rank, status, range(self.size)))
        if self._expected:
            if not self.running:
                self._die()
        else:
            self._consider()

    async def _hear_out(self, status: int) -> None:
        """Rank 0 leaves once the kernel has its last message; the thread that moves messages here may read it later."""
        deadline = time.monotonic() + CAUSE_WAIT_S
        while not self._last_words(status) and time.monotonic() < deadline:  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(LOOK_S)

    def _consider(self) -> None:
        """One rank has failed or ended: so has the engine. What remains is to find out why."""
        if self._dead or self._expected:
            return
        if self._cause.settled:
            self._die()
        elif self._decision is None:
            self._decision = asyncio.get_running_loop().call_later(CAUSE_WAIT_S, self._die)

    def _die(self) -> None:
        if self._dead:
            return
        self._dead = True
        self._cancel_decision()
        cause = self._cause.cause()
        assert cause is not None
        if self.size > 1:
            self.kill()  # the others cannot go on without it
            if self.serving and cause.code is not ErrorCode.ENGINE_DEAD:
                message = f"rank {cause.metadata['rank']} of the engine failed: {cause.message}"
                cause = BatonError(ErrorCode.ENGINE_DEAD, message, metadata=cause.metadata)
        self._on_death(cause)

    # -- ends -----------------------------------------------------------------------------------------------

    def expect_end(self) -> None:
        """The engine was told to leave; from now on a process that ends is no failure of the others."""
        self._expected = True
        self._cancel_decision()
        if self._ranks and not self.running:
            self._die()

    def kill(self) -> None:
        """SIGKILL to all that still run."""
        for rank in self._ranks:
            if rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.kill()

    async def close(self) -> None:
        """Kills what still runs and waits for its end. May be called again."""
        self._expected = True
        self._cancel_decision()
        self.kill()
        watches = [rank.watch for rank in self._ranks if rank.watch is not None]
        if watches:
            _, late = await asyncio.wait(watches, timeout=KILL_WAIT_S)
            for watch in late:
                watch.cancel()
        for rank in self._ranks:
            rank.watch = None
            self._close_report(rank)

    def _cancel_decision(self) -> None:
        if self._decision is not None:
            self._decision.cancel()
            self._decision = None
