"""Which rank ended an engine, from what the ranks said in whatever order."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from engine.first_cause import FirstCause, ended
from engine.parallel.communicator import CollectiveFailed
from engine.parallel.lost import RankLost
from rpc.errors import BatonError, ErrorCode


def lost_peers(rank: int) -> BatonError:
    return CollectiveFailed(rank, "all_reduce", "lost", 0.1)


def own(rank: int) -> BatonError:
    return BatonError(ErrorCode.EXECUTION_EXCEPTION, "it broke", metadata={"cause": "ValueError"})


KILLED = ended(1, -9, range(4))
CASES: list[tuple[dict[int, BatonError], str, str]] = [
    # What ranks say, by rank; the rank at fault, and the cause
    ({1: KILLED}, "1", "signal_9"),
    ({0: RankLost(1, "closed", "is gone"), 1: KILLED, 2: lost_peers(2), 3: lost_peers(3)}, "1", "signal_9"),
    ({0: lost_peers(0), 1: lost_peers(1), 2: own(2), 3: lost_peers(3)}, "2", "ValueError"),
    ({0: RankLost(3, "silent", "has not answered"), 1: lost_peers(1)}, "3", "silent"),
    ({1: RankLost(0, "silent", "has given no sign of life"), 2: lost_peers(2)}, "0", "silent"),
    # Who is gone had a reason, and its news may come last
    (
        {
            0: RankLost(1, "silent", "has not answered"),
            2: RankLost(0, "closed", "is gone"),
            3: RankLost(0, "closed", "is gone"),
        },
        "1",
        "silent",
    ),
    ({0: lost_peers(0), 1: lost_peers(1), 3: lost_peers(3)}, "2", "silent"),
    ({1: lost_peers(1), 2: lost_peers(2), 3: lost_peers(3)}, "0", "silent"),
]


@pytest.mark.parametrize(("words", "rank", "cause"), CASES)
def test_cause_when_the_ranks_speak_in_any_order_then_the_one_at_fault_is_named(
    words: dict[int, BatonError], rank: str, cause: str
) -> None:
    for order in permutations(words):
        found = FirstCause(4)
        for each in order:
            found.heard(each, words[each])
        error = found.cause()
        assert error is not None
        assert (error.metadata["rank"], error.metadata["cause"]) == (rank, cause)


def test_settled_when_a_rank_has_a_reason_of_its_own_then_nothing_better_can_come() -> None:
    found = FirstCause(3)
    assert (found.settled, found.cause()) == (False, None)
    found.heard(2, lost_peers(2))
    assert not found.settled
    found.heard(1, own(1))
    assert found.settled
    found.heard(0, own(0))  # later, and a consequence
    cause = found.cause()
    assert cause is not None
    assert (cause.code, cause.metadata["rank"]) == (ErrorCode.EXECUTION_EXCEPTION, "1")


def test_cause_when_every_rank_only_lost_the_others_then_it_is_the_first_of_them() -> None:
    found = FirstCause(2)
    for rank in (1, 0):
        found.heard(rank, lost_peers(rank))
    assert found.settled
    cause = found.cause()
    assert cause is not None
    assert cause.metadata["rank"] == "1"


def test_cause_when_there_is_one_rank_then_its_error_is_as_it_was() -> None:
    found = FirstCause(1)
    error = BatonError(ErrorCode.INVALID_PARAMS, "--model: no")
    found.heard(0, error)
    found.heard(0, ended(0, 1, range(1)))
    assert found.cause() is error
    assert error.metadata == {}
    assert ended(0, -9, range(1)).message == "the engine process was killed by signal 9"


def test_end_when_a_mapped_file_was_cut_off_then_the_message_says_what_that_signal_means(tmp_path: Path) -> None:
    code = (
        "import mmap, os, sys\n"
        "with open(sys.argv[1], 'wb+') as file:\n"
        "    file.truncate(1 << 16)\n"
        "    view = mmap.mmap(file.fileno(), 0)\n"
        "    file.truncate(0)\n"
        "    view[1 << 15]\n"
    )
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path / "weights")], check=False, timeout=60)
    for ranks in (range(1), range(2)):
        message = ended(0, died.returncode, ranks).message
        assert "was killed by signal 7; a file of the model was cut off or cannot be read" in message
    assert "file" not in ended(0, -9, range(1)).message
