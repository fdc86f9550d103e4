"""The start of an engine of two ranks, each of which is a thread here: what rank 0 finds out for both of them. Their
process is one of its own, so that nothing of the group between them (threads of gloo) stays with all other tests."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.parallel.communicator import CollectiveFailed, Communicator
from engine.parallel.follower import start_follower
from engine.parallel.hub import Hub
from engine.parallel.port import Port
from engine.startup import start_core
from rpc.errors import BatonError, ErrorCode
from tests.unit.engine.rank_processes import RankProcesses
from tests.unit.engine.real_engine import QuietWakeup
from tests.unit.engine.tiny_models import tiny_model

LIMIT_S = 60.0


def config_of(rank: int, model: Path, start_s: float = LIMIT_S) -> EngineConfig:
    return EngineConfig(
        role="decode", model=str(model), rank=rank, tensor_parallel_size=2, device="cpu", dtype="float32",
        num_kv_blocks=16, block_size=8, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=4,
        start_deadline_ns=time.monotonic_ns() + int(start_s * 1e9),
    )  # fmt: skip


class Ranks:
    """Rank 1 as a thread, and rank 0 in the thread that calls `start`."""

    def __init__(self, folder: Path, second: Path) -> None:
        """second: the model of rank 1."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.hub, self._port = Hub([ours], LIMIT_S), Port(theirs, LIMIT_S)
        self._meeting = folder / "meeting"
        self._meeting.touch()
        self._wakeups = QuietWakeup(), QuietWakeup()
        self._second = second
        self.fingerprints: dict[int, str] = {}  # as the ranks' agents tell it
        self.said: tuple[ErrorCode, str] | None = None  # when rank 1 fails
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def start(self, model: Path) -> str:
        """Raises what rank 0 raises."""
        self.thread.start()
        core, ready = start_core(config_of(0, model), self._wakeups[0], self.hub, str(self._meeting))
        self.fingerprints[0] = core.agent.local.identity.model_fingerprint  # type: ignore[attr-defined]
        self.thread.join(LIMIT_S)
        core.agent.close(2.0)
        return ready.model_fingerprint

    def _follow(self) -> None:
        try:
            started = start_follower(config_of(1, self._second), self._port, str(self._meeting), self._wakeups[1])
        except BatonError as error:
            self.said = error.code, error.message  # and nothing that keeps its connections open
        else:
            self.fingerprints[1] = started.rank.agent.identity.model_fingerprint
            started.tell_ready()
            started.rank.agent.close(2.0)
            started.rank.runner.communicator.close()
        finally:
            self._port.close()

    def close(self) -> None:
        self.hub.close()
        self.thread.join(LIMIT_S)
        for wakeup in self._wakeups:
            wakeup.close()


@pytest.fixture(scope="module")
def process() -> Iterator[RankProcesses]:
    with RankProcesses(1) as processes:
        yield processes


class Records(logging.Handler):
    """Gathers what is logged while it is used as a context."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self) -> Records:
        logger = logging.getLogger()
        self._before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger()
        logger.removeHandler(self)
        logger.setLevel(self._before)


Said = tuple[ErrorCode, str] | None


def start_with_one_model(_: Communicator, folder: str, model: str) -> tuple[str, dict[int, str], Said, list[str]]:
    """The fingerprint of the engine, those of its ranks, what rank 1 says, and the threads that have digested."""
    with Records() as log:
        ranks = Ranks(Path(folder), Path(model))
        try:
            found = ranks.start(Path(model))
        finally:
            ranks.close()
    threads = [record.threadName or "" for record in log.records if record.getMessage() == "weights digested"]
    return found, ranks.fingerprints, ranks.said, threads


def start_with_two_models(_: Communicator, folder: str, model: str, other: str) -> Said:
    ranks = Ranks(Path(folder), Path(other))
    try:
        with pytest.raises(CollectiveFailed):  # of which a front tells nobody, since the other rank has said why
            ranks.start(Path(model))
    finally:
        ranks.close()
    return ranks.said


def test_start_when_there_are_two_ranks_then_one_digests_the_weights_for_both(
    process: RankProcesses, tmp_path: Path
) -> None:
    model = str(tiny_model("llama"))
    [(found, fingerprints, said, threads)] = process.run(1, start_with_one_model, str(tmp_path), model)
    assert said is None
    assert fingerprints == {0: found, 1: found}
    assert len(found) == 32
    assert threads == ["MainThread"]


def test_start_when_a_rank_has_read_other_files_than_the_first_then_it_says_so_and_leaves(
    process: RankProcesses, tmp_path: Path
) -> None:
    """As when they are replaced after one rank has read them and before another one does."""
    model = tiny_model("llama")
    other = Path(shutil.copytree(model, tmp_path / "model"))
    [said] = process.run(1, start_with_two_models, str(tmp_path), str(model), str(other))
    assert said is not None
    code, message = said
    assert code is ErrorCode.INVALID_PARAMS
    assert f"--model {other}: files changed while the ranks loaded them" in message
