"""Tests that run side by side share a machine; one that is marked `serial` has it for itself."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from tests.conftest import Turns
from tests.integration.cluster import wait_for

LIMIT_S = 60.0


def gate_is_closed(folder: Path) -> bool:
    with (folder / "gate").open("wb") as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_turn_when_somebody_wants_it_alone_then_it_waits_for_the_others_and_nobody_overtakes_it(tmp_path: Path) -> None:
    order: list[str] = []

    def run(name: str, alone: bool) -> None:
        turns = Turns(tmp_path)  # as every process has its own
        with turns.take(alone=alone):
            order.append(name)
        turns.close()

    threads = [threading.Thread(target=run, args=("alone", True)), threading.Thread(target=run, args=("later", False))]
    mine, other = Turns(tmp_path), Turns(tmp_path)
    with mine.take(alone=False):
        with other.take(alone=False):
            order.append("two side by side")
        threads[0].start()
        wait_for("the serial one at the gate", lambda: gate_is_closed(tmp_path), LIMIT_S)
        threads[1].start()
        threads[1].join(0.1)
        order.append("the first ends")
    for thread in threads:
        thread.join(LIMIT_S)
    mine.close()
    other.close()
    assert order == ["two side by side", "the first ends", "alone", "later"]
