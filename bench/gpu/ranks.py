"""An engine of one or several ranks whose rank 0 is in this process, for measurements that need all of them at once.

The other ranks are processes that start and serve as a server's do (`engine.process`). Beside what rank 0's frames ask
of them there, they take part in jobs: what no server does, like the same graph again and again.

    python -m bench.gpu.ranks --leader … --report … --meeting … --front-pid …   # one of the others; started from here
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import torch

from engine import process
from engine.config import EngineConfig
from engine.core import EngineCore, Wakeup
from engine.messages import EngineReady, Observation
from engine.parallel import follower
from engine.parallel.device_communicator import DeviceCommunicator
from engine.parallel.hub import Hub
from engine.parallel.messages import FollowerFrame, RankFrame
from engine.parallel.port import Port
from engine.runner.batch import StepBatch
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.startup import LoadedRank, start_core

START_S = 300.0
END_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


# -- jobs: the same on every rank, at the same time --------------------------------------------------------------


def do(job: str, count: int, runner: ModelRunner) -> list[float]:
    """`fill`: random numbers into the KV pool. `replay`: the latest decode graph, `count` times; seconds of each.
    `sum PATH BYTES`: seconds of a sum over ranks."""
    kind, *arguments = job.split()
    if kind == "fill":
        generator = torch.Generator(runner.device).manual_seed(7 + runner.communicator.rank)
        for pool in runner.kv_layers[FULL_GROUP]:
            pool.normal_(generator=generator)
        return []
    if kind == "replay":
        return replays(runner, count)
    if kind == "sum":
        return [sum_seconds(runner, arguments[0], int(arguments[1]), count)]
    raise ValueError(f"unknown job {job!r}")


def replays(runner: ModelRunner, count: int) -> list[float]:
    """From the end of one replay to the end of the next: they follow each other without a gap, so that it does not
    matter how far apart the ranks were when they began."""
    steps, communicator = runner.device_steps, runner.communicator
    assert steps is not None and steps.decode_graphs is not None and steps.decode_graphs.latest is not None
    graphs, graph = steps.decode_graphs, steps.decode_graphs.latest
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 2)]
    communicator.barrier()
    for mark in marks:
        graphs.replay(graph)
        mark.record()
    communicator.wait_device()
    torch.cuda.synchronize(runner.device)
    ends = marks[1:]  # the first replay takes in the ranks' different beginnings
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(ends)]


def sum_paths(runner: ModelRunner) -> tuple[str, ...]:
    """Ways that a sum over ranks can take."""
    communicator = runner.communicator
    return communicator.paths if isinstance(communicator, DeviceCommunicator) else ("gloo",)


def chosen_path(runner: ModelRunner, size: int) -> str:
    communicator = runner.communicator
    return communicator.path(size) if isinstance(communicator, DeviceCommunicator) else "gloo"


def sum_seconds(runner: ModelRunner, path: str, size: int, count: int) -> float:
    communicator = runner.communicator
    if isinstance(communicator, DeviceCommunicator):
        return communicator.measure(path, size)
    tensor = torch.zeros(size // 4, device=runner.device)
    times = []
    for _ in range(count):
        communicator.barrier()
        began = time.perf_counter()
        communicator.all_reduce_(tensor)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# -- the other ranks ---------------------------------------------------------------------------------------------


class MeasuredFollower(follower.Follower):
    """Also does the jobs that come in frames of this benchmark: as `skipped`, which a server sends with `stop` alone,
    how many times, and as `skipped_kind` which job. After a job `stamp` it says of the next steps when it had the frame
    and when its launch was over, readings of `time.perf_counter`, which all processes of a host have in common."""

    def __init__(self, rank: LoadedRank, port: Port, wakeup: Wakeup) -> None:
        super().__init__(rank, port, wakeup)
        self._stamps = 0
        self._launched = 0.0
        wait_device = rank.runner.communicator.wait_device

        def wait() -> None:  # what a step does once it is launched
            self._launched = time.perf_counter()
            wait_device()

        rank.runner.communicator.wait_device = wait  # type: ignore[method-assign]

    def _do(self, frame: FollowerFrame) -> bool:
        received = time.perf_counter()
        if frame.skipped and not frame.stop:
            if frame.skipped_kind == "stamp":
                self._stamps = frame.skipped
            else:
                do(frame.skipped_kind, frame.skipped, self.rank.runner)
        goes_on = super()._do(frame)
        if self._stamps and frame.step is not None:
            self._stamps -= 1
            times = {"received": received, "launched": self._launched}
            self._port.send(RankFrame(observations=[Observation(name, {}, at) for name, at in times.items()]))
        return goes_on


def main() -> int:
    follower.Follower = MeasuredFollower  # type: ignore[misc]  # what start_follower makes
    return process.main()


# -- rank 0 ------------------------------------------------------------------------------------------------------


class RankedEngine:
    """A context manager. Raises BatonError, RankLost or CollectiveFailed when a rank cannot start."""

    def __init__(self, config: EngineConfig) -> None:
        """config: with `tensor_parallel_size`; rank and deadline of the start are set here."""
        self.size = config.tensor_parallel_size
        deadline_ns = time.monotonic_ns() + int(START_S * 1e9)
        config = msgspec.structs.replace(config, rank=0, start_deadline_ns=deadline_ns)
        config.check()
        sys.setswitchinterval(process.SWITCH_INTERVAL_S)
        self._others: list[subprocess.Popen[bytes]] = []
        self._wakeup = Wakeup()
        self.hub: Hub | None = None
        meeting = os.memfd_create("baton-bench")
        try:
            if self.size > 1:
                links = [self._start(config, rank, meeting) for rank in range(1, self.size)]
                self.hub = Hub(links, config.tp_broadcast_timeout_seconds)
            process._share_processors(config)
            started = start_core(config, self._wakeup, self.hub, f"/proc/self/fd/{meeting}")
            self.core: EngineCore = started[0]
            self.ready: EngineReady = started[1]
        except BaseException:
            self._end()
            raise
        finally:
            os.close(meeting)
        runner = self.core.runner
        own = runner if isinstance(runner, ModelRunner) else runner._runner  # type: ignore[attr-defined]
        self.runner: ModelRunner = own
        gc.collect()
        gc.freeze()
        if self.hub is not None:
            self.hub.serve()

    def _start(self, config: EngineConfig, rank: int, meeting: int) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # It says on stderr why it ends, and to rank 0; a report to a front nobody reads here
        report = os.open(os.devnull, os.O_WRONLY)
        arguments = ["--leader", str(theirs.fileno()), "--report", str(report), "--meeting", str(meeting)]
        command = [sys.executable, "-m", "bench.gpu.ranks", *arguments, "--front-pid", str(os.getpid())]
        other = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=2, pass_fds=[theirs.fileno(), report, meeting]
        )
        self._others.append(other)
        os.close(report)
        theirs.close()
        assert other.stdin is not None
        other.stdin.write(msgspec.structs.replace(config, rank=rank).to_json())
        other.stdin.close()
        return ours

    def together(self, job: str, count: int = 1) -> list[float]:
        """Has every rank do a job; what rank 0's part gave."""
        if self.hub is not None:
            self.hub._send(FollowerFrame(self.hub._next(), skipped=count, skipped_kind=job))
        return do(job, count, self.runner)

    def stepped_apart(self, batch: StepBatch, count: int) -> dict[str, float]:
        """Seconds of the parts of a step of one token per row, medians of `count`: what `execute` does, move by move,
        and how far the last of the other ranks lags. `device`: from this rank's first launch to its last one's end."""
        runner, steps, hub = self.runner, self.runner.device_steps, self.hub
        assert steps is not None
        if hub is not None:
            hub.poll()
            hub._send(FollowerFrame(hub._next(), skipped=count + 1, skipped_kind="stamp"))
        parts: dict[str, list[float]] = {}
        for _ in range(count + 1):
            marks = [time.perf_counter()]
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.inference_mode():
                if hub is not None:
                    runner.check(batch)
                    marks.append(time.perf_counter())
                    hub.step(self.core.runner._orders.order(batch, apart=True))  # type: ignore[attr-defined]
                    marks.append(time.perf_counter())
                began.record()
                flight = steps.launch(batch, None)
                ended.record()
                marks.append(time.perf_counter())
                runner.communicator.wait_device()
                results = steps.finish(batch, flight)
            marks.append(time.perf_counter())
            names = ("launch", "wait") if hub is None else ("check", "tell", "launch", "wait")
            found = {
                name: later - earlier for name, (earlier, later) in zip(names, itertools.pairwise(marks), strict=True)
            }
            torch.cuda.synchronize(runner.device)
            found["device"] = began.elapsed_time(ended) / 1e3
            if hub is not None:
                stamps = self._stamped()
                found["received after"] = stamps["received"] - marks[2]
                found["launched after"] = stamps["launched"] - marks[3]
            for name, seconds in found.items():
                parts.setdefault(name, []).append(seconds)
            for row, outcome in zip(batch.rows, results, strict=True):
                row.start += 1
                row.token_ids = [outcome.token_id or 0]
        return {name: statistics.median(seconds[1:]) for name, seconds in parts.items()}

    def _stamped(self) -> dict[str, float]:
        """The latest reading of each name among the other ranks' of the last step."""
        assert self.hub is not None
        latest: dict[str, float] = {}
        said: set[int] = set()
        deadline = time.monotonic() + self.hub.timeout_s
        while len(said) < self.size - 1:
            if time.monotonic() > deadline:
                raise TimeoutError(f"of {self.size - 1} ranks {sorted(said)} have told their times")
            for rank, frame in self.hub.poll():
                for item in frame.observations:
                    if item.name in ("received", "launched"):
                        said.add(rank)
                        latest[item.name] = max(latest.get(item.name, 0.0), item.value)
        return latest

    def __enter__(self) -> RankedEngine:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        try:
            if failure is None and self.hub is not None:
                self.hub.stop()
                for other in self._others:
                    other.wait(END_S)
            self.core.agent.close(2.0)
        finally:
            self._end()

    def _end(self) -> None:
        for other in self._others:
            other.kill()
            other.wait()
        if self.hub is not None:
            self.hub.close()
        self._wakeup.close()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # as engine.process ends
