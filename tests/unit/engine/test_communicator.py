"""Collective operations between processes: what they give, and what becomes of them when a peer is gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine.parallel import communicator as module
from engine.parallel.all_reduce_paths import NCCL, ONE_SHOT, TWO_SHOT, candidates, fastest
from engine.parallel.communicator import Communicator, HostCommunicator, single
from rpc.errors import BatonError, ErrorCode
from tests.extent import extended
from tests.unit.engine import rank_processes
from tests.unit.engine.rank_processes import RankProcesses

SIZE = 3
TIMEOUT_S = 1.0
SLACK_S = 10.0  # that a loaded machine may add to a deadline


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(SIZE) as processes:
        yield processes


def every_operation(communicator: Communicator) -> dict[str, Any]:
    rank = communicator.rank
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(7, 13, generator=generator)
    total = numbers.clone()
    communicator.all_reduce_(total)
    sent = torch.full((2, 2), rank, dtype=torch.int64)
    communicator.broadcast_(sent, 1)
    rounded = torch.full((3,), rank + 1, dtype=torch.bfloat16)
    communicator.all_reduce_(rounded)
    out = torch.empty(7, 30)
    gathered = communicator.gather_last(numbers)
    into = communicator.gather_last(numbers, 30, out)
    communicator.barrier()
    return {
        "numbers": numbers,
        "total": total,
        "sent": sent.tolist(),
        "rounded": rounded.tolist(),
        "gathered": gathered,
        "into": None if into is None else into.data_ptr() == out.data_ptr() and out,
        "least": communicator.all_min(10 - rank),
    }


def test_operations_when_ranks_take_part_then_every_one_has_the_same_bits(ranks: RankProcesses) -> None:
    found = ranks.run(SIZE, every_operation)
    numbers = [rank["numbers"] for rank in found]
    for rank in found:
        assert torch.equal(rank["total"].view(torch.int32), found[0]["total"].view(torch.int32))
        assert rank["sent"] == [[1, 1], [1, 1]]
        assert rank["rounded"] == [6.0, 6.0, 6.0]
        assert rank["least"] == 8
    torch.testing.assert_close(found[0]["total"], torch.stack(numbers).sum(dim=0))
    assert torch.equal(found[0]["gathered"], torch.cat(numbers, dim=1))
    assert torch.equal(found[0]["into"], torch.cat(numbers, dim=1)[:, :30])
    assert [rank["gathered"] for rank in found[1:]] == [None] * (SIZE - 1)


def sum_for_ever(communicator: Communicator, operation: str) -> None:
    values = torch.zeros(64, 64)
    rank_processes.tell("begun")
    while True:
        if operation == "all_reduce":
            communicator.all_reduce_(values)
        elif operation == "gather":
            communicator.gather_last(values)
            communicator.barrier()  # else the peer's sends run ahead of one that is stopped
        else:
            communicator.all_min(1)


@pytest.mark.parametrize(
    ("operation", "number", "how", "gone"),
    [
        ("all_reduce", signal.SIGKILL, "lost", 0),
        ("all_reduce", signal.SIGKILL, "lost", 1),
        ("all_reduce", signal.SIGSTOP, "late", 0),
        extended("all_reduce", signal.SIGSTOP, "late", 1),
        extended("gather", signal.SIGKILL, "lost", 0),
        ("gather", signal.SIGKILL, "lost", 1),
        extended("all_min", signal.SIGSTOP, "late", 0),
        ("all_min", signal.SIGSTOP, "late", 1),
    ],
)
def test_operation_when_a_peer_is_killed_or_stopped_then_fails_within_its_deadline(
    operation: str, number: signal.Signals, how: str, gone: int
) -> None:
    # The end of a peer is noticed at once: only one that stands still is missed at the deadline.
    with RankProcesses(2, TIMEOUT_S if how == "late" else 60.0) as processes:
        processes.begin(2, sum_for_ever, operation)
        assert [processes.answer(rank) for rank in range(2)] == ["begun", "begun"]
        processes.signal(gone, number)
        error = processes.failure(1 - gone, TIMEOUT_S + SLACK_S)
    assert isinstance(error, BatonError) and error.code is ErrorCode.ENGINE_DEAD, error
    found = error.metadata
    assert (found["cause"], found["rank"], found["how"]) == ("collective_failed", str(1 - gone), how), found


# Groups are made in a rank's process: threads and descriptors that gloo leaves behind do not stay with all other tests.


def connect_alone(_: Communicator, meeting: str) -> None:
    with patch.object(module, "START_S", 0.2):
        module.connect(0, 2, meeting, torch.device("cpu"), 0.2)


def test_connect_when_a_rank_never_comes_then_fails_within_its_deadline(ranks: RankProcesses, tmp_path: Path) -> None:
    ranks.begin(1, connect_alone, str(tmp_path / "ranks"))
    error = ranks.failure(0)
    assert isinstance(error, BatonError) and error.code is ErrorCode.ENGINE_DEAD, error
    assert (error.metadata["cause"], error.metadata["operation"]) == ("collective_failed", "connect"), error.metadata


def test_communicator_when_there_is_one_rank_then_changes_nothing() -> None:
    alone = single()
    numbers = torch.arange(6.0).view(2, 3)
    alone.all_reduce_(numbers)
    alone.broadcast_(numbers)
    alone.barrier()
    alone.begin_serving()
    gathered = alone.gather_last(numbers, 2)
    assert gathered is not None and gathered.tolist() == [[0, 1], [3, 4]]
    assert alone.all_min(5) == 5
    alone.close()


def close_twice(_: Communicator, meeting: str) -> str:
    from torch.distributed import FileStore

    alone = HostCommunicator(0, 1, FileStore(meeting, 1), TIMEOUT_S)
    alone.barrier()
    alone.close()
    alone.close()
    return "closed"


def test_host_communicator_when_closed_twice_then_does_nothing(ranks: RankProcesses, tmp_path: Path) -> None:
    assert ranks.run(1, close_twice, str(tmp_path / "ranks")) == ["closed"]


# -- paths between devices ------------------------------------------------------------------------------------------


def test_path_when_measured_then_is_the_fastest_of_the_sizes_class() -> None:
    table = fastest({NCCL: [9.0, 9.0, 9.0], ONE_SHOT: [1.0, 8.0, 20.0], TWO_SHOT: [2.0, 7.0, 9.0]}, (100, 200, 400))
    paths = {1: ONE_SHOT, 100: ONE_SHOT, 101: TWO_SHOT, 200: TWO_SHOT, 201: NCCL, 400: NCCL, 401: NCCL}
    assert {size: table.path(size) for size in paths} == paths


def test_path_when_nothing_was_measured_then_is_that_of_nccl() -> None:
    assert fastest({NCCL: []}, ()).path(64) == NCCL
    with pytest.raises(ValueError, match="2 sizes"):
        fastest({NCCL: [1.0]}, (1, 2))


def test_paths_when_there_are_more_than_two_ranks_then_none_sums_in_an_order_of_its_own() -> None:
    assert ONE_SHOT in candidates(2)
    assert all(ONE_SHOT not in candidates(size) for size in (3, 4, 8))
