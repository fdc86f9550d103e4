"""Processes that are the ranks of one engine, and run what a test asks them to: real collectives between them.

One set serves many tests, since what costs is the import of PyTorch, which a fork server does once. A job is a function
of a module; the first of its arguments is the rank's communicator.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.unit.engine.sharded_steps", "torch.distributed", "engine.layers.device"])

JOB_S = 100.0


class RankProcesses:
    """A context manager. `run(size, job, ...)` has the first `size` of the processes do the job at the same time."""

    def __init__(self, most: int, timeout_s: float = 60.0, device: str = "cpu") -> None:
        """timeout_s: deadline of the collectives, which serve from the beginning. device: of `--device`."""
        # The fork server's own folder goes when this process ends, and pytest's for temporary files before that.
        with patch.object(tempfile, "tempdir", os.environ.get("PYTEST_DEBUG_TEMPROOT")):
            multiprocessing.util.get_temp_dir()
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(most):
            here, there = _CONTEXT.Pipe()
            arguments = (there, rank, self._folder.name, timeout_s, device)
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()

    def run(self, size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What job(communicator, *arguments) gave, by rank. Raises what a rank raised, with its traceback."""
        self.begin(size, job, *arguments)
        answers = [self.answer(rank) for rank in range(size)]
        for answer in answers:
            if isinstance(answer, _Raised):
                raise AssertionError(f"rank {answer.rank}: {answer.trace}") from answer.error
        return answers

    def begin(self, size: int, job: Callable[..., Any], *arguments: Any) -> None:
        for end in self._ends[:size]:
            end.send((size, job, arguments))

    def answer(self, rank: int, within_s: float = JOB_S) -> Any:
        """The next thing that a rank sends: `told` by its job, or what the job gave."""
        end = self._ends[rank]
        if not end.poll(within_s):
            states = [(process.pid, process.exitcode) for process in self._processes]
            raise TimeoutError(f"rank {rank} said nothing in {within_s} s; processes and exit codes: {states}")
        return end.recv()

    def failure(self, rank: int, within_s: float = JOB_S) -> BaseException:
        """What a rank's job raised."""
        answer = self.answer(rank, within_s)
        assert isinstance(answer, _Raised), answer
        return answer.error

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


class _Raised:
    def __init__(self, rank: int, error: BaseException) -> None:
        self.rank = rank
        self.error = error
        self.trace = "".join(traceback.format_exception(error))


tell: Callable[[Any], None]  # in a rank's process: sends something before the job is done


def _serve(end: Connection, rank: int, folder: str, timeout_s: float, device: str) -> None:
    import torch

    from engine.device import resolve_device
    from engine.parallel.communicator import Communicator, connect

    global tell
    tell = end.send
    torch.set_num_threads(1)
    communicators: dict[int, Communicator] = {}
    while True:
        try:
            size, job, arguments = end.recv()
        except (EOFError, OSError):
            return
        try:
            if size not in communicators:
                meeting = str(Path(folder) / str(size))
                communicators[size] = connect(rank, size, meeting, resolve_device(device, rank), timeout_s)
                communicators[size].begin_serving()
            answer: Any = job(communicators[size], *arguments)
        except BaseException as error:
            answer = _Raised(rank, error)
        try:
            end.send(answer)
        except (BrokenPipeError, OSError):
            return
