"""The start of an engine of two ranks, each of which is a thread here: what rank 0 finds out for both of them."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import Wakeup
from engine.parallel.communicator import CollectiveFailed
from engine.parallel.follower import start_follower
from engine.parallel.hub import Hub
from engine.parallel.port import Port
from engine.startup import start_core
from rpc.errors import BatonError, ErrorCode
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
        self._wakeups = Wakeup(), Wakeup()
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


def test_start_when_there_are_two_ranks_then_one_digests_the_weights_for_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ranks = Ranks(tmp_path, tiny_model("llama"))
    try:
        found = ranks.start(tiny_model("llama"))
    finally:
        ranks.close()
    assert ranks.said is None
    assert ranks.fingerprints == {0: found, 1: found}
    assert len(found) == 32
    assert [line.threadName for line in caplog.records if line.getMessage() == "weights digested"] == ["MainThread"]


def test_start_when_a_rank_has_read_other_files_than_the_first_then_it_says_so_and_leaves(tmp_path: Path) -> None:
    """As when they are replaced after one rank has read them and before another one does."""
    other = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    ranks = Ranks(tmp_path, other)
    try:
        with pytest.raises(CollectiveFailed):  # of which a front tells nobody, since the other rank has said why
            ranks.start(tiny_model("llama"))
    finally:
        ranks.close()
    assert ranks.said is not None
    code, message = ranks.said
    assert code is ErrorCode.INVALID_PARAMS
    assert f"--model {other}: files changed while the ranks loaded them" in message
