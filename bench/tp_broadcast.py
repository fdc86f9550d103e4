"""What it costs to give a step to the other ranks of an engine: over Baton's sockets, and by a gloo broadcast.

    python -m bench.tp_broadcast                    # 4 ranks, batches of 64
    python -m bench.tp_broadcast --ranks 8 --batch 256 --context 16384 --check

Real processes, one for each rank, without a model. A step is a batch of decode rows with the block tables of their
context, as rank 0's runner gives it on. Both ways carry the same bytes: the step's order, encoded on rank 0, decoded by
each follower and made into a batch again. Rounds of both alternate in one run. A step begins when all have taken the
one before and `--pause-ms` have passed, since between two steps of an engine lies the model.

* **rank 0**: from the batch until its own part is done: what the step's time on rank 0 grows by.
* **all ranks**: from the batch until the last follower has its batch.

`--check` ends with status 1 when rank 0's part takes longer than the target, 150 us a step.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from engine.messages import Observation
from engine.parallel.communicator import Communicator, connect
from engine.parallel.hub import Hub
from engine.parallel.messages import FollowerFrame, RankFrame, StepOrder
from engine.parallel.port import Port
from engine.parallel.step_orders import FollowedSteps, StepOrders
from engine.runner.batch import BatchRow, StepBatch
from rpc.time_slice import never_interrupt

TARGET_US = 150.0
BLOCK_SIZE = 64
TIMEOUT_S = 60.0
WARM_UP = 20
END_S = 30.0
ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


@dataclass
class Figures:
    """Microseconds of each step."""

    rank_0: list[float] = field(default_factory=list)
    all_ranks: list[float] = field(default_factory=list)
    size: list[int] = field(default_factory=list)  # bytes of its message

    def line(self, name: str) -> str:
        return (
            f"| {name} | {statistics.mean(self.size):.0f} | {statistics.median(self.rank_0):.0f} | "
            f"{_p99(self.rank_0):.0f} | {statistics.median(self.all_ranks):.0f} | {_p99(self.all_ranks):.0f} |"
        )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def decoding(count: int, context: int) -> StepBatch:
    """A batch of rows in the middle of their answers, at different places in their blocks."""
    blocks = -(-context // BLOCK_SIZE)
    rows = [
        BatchRow(
            f"{row:08x}-0000-4000-8000-000000000000#0.{row:08x}",
            [row],
            context + row % BLOCK_SIZE - BLOCK_SIZE,
            [1 + (row * blocks + block) % 100_000 for block in range(blocks)],
            True,
        )
        for row in range(count)
    ]
    return StepBatch(rows, "decode")


def next_step(batch: StepBatch, step: int) -> None:
    """A token more for each row, and a block where one is full."""
    for number, row in enumerate(batch.rows):
        row.token_ids = [(step * 7919 + number * 31) % 50_000]
        row.start += 1
        if row.start % BLOCK_SIZE == 0:
            row.block_table.append(1 + (step + number) % 100_000)


# ---- followers


def follow(rank: int, ranks: int, descriptor: int, meeting: int) -> int:
    """The process of one follower."""
    never_interrupt()  # as ranks on the CPU do
    port = Port(socket.socket(fileno=descriptor), TIMEOUT_S)
    port.send(RankFrame(hello=os.getpid()))
    communicator = connect(rank, ranks, f"/proc/self/fd/{meeting}", CPU, TIMEOUT_S)
    steps = FollowedSteps()
    decode = msgspec.msgpack.Decoder(StepOrder).decode
    while True:
        frame = port.receive()
        assert frame is not None
        if frame.stop:
            communicator.close()
            port.close()
            return 0
        if frame.step is not None:
            steps.batch(frame.step)
            _took(port)
        if frame.skipped:  # so many steps now come by broadcast, of so many bytes at the most
            buffer = torch.zeros(frame.seq, dtype=torch.uint8)
            for _ in range(frame.skipped):
                communicator.broadcast_(buffer)
                bytes_ = buffer.numpy()
                length = int.from_bytes(bytes_[:4].tobytes(), "little")
                steps.batch(decode(memoryview(bytes_)[4 : 4 + length]))
                _took(port)


def _took(port: Port) -> None:
    port.send(RankFrame(observations=[Observation("took", {}, time.perf_counter())]))


# ---- rank 0


class Rank0:
    def __init__(self, ranks: int, threads: int) -> None:
        never_interrupt()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(ranks - 1)]
        meeting = os.memfd_create("baton-bench")
        self.processes = []
        for rank, (_, theirs) in enumerate(pairs, 1):
            numbers = [str(rank), str(ranks), str(theirs.fileno()), str(meeting)]
            command = [sys.executable, "-m", "bench.tp_broadcast", "--follow", *numbers]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno(), meeting])
            )
            theirs.close()
        self.hub = Hub([ours for ours, _ in pairs], TIMEOUT_S)
        self.communicator: Communicator = connect(0, ranks, f"/proc/self/fd/{meeting}", CPU, TIMEOUT_S)
        os.close(meeting)
        self.followers = ranks - 1

    def taken_at(self) -> float:
        """When the last follower had its batch."""
        found: list[float] = []
        while len(found) < self.followers:
            for _, frame in self.hub.poll():
                found += [item.value for item in frame.observations]
        return max(found)

    def close(self) -> None:
        """Ends the followers, however far they have come."""
        try:
            self.hub.stop()
            for process in self.processes:
                process.wait(END_S)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            self.communicator.close()
            self.hub.close()


def over_sockets(rank_0: Rank0, orders: StepOrders, batch: StepBatch, steps: range, pause_s: float) -> Figures:
    found = Figures()
    hub = rank_0.hub
    for step in steps:
        next_step(batch, step)
        time.sleep(pause_s)
        began = time.perf_counter()
        order = orders.order(batch)
        hub.step(order)
        done = time.perf_counter()
        found.rank_0.append(1e6 * (done - began))
        found.all_ranks.append(1e6 * (rank_0.taken_at() - began))
        found.size.append(len(msgspec.msgpack.encode(FollowerFrame(1, step=order))))
    return found


def by_broadcast(
    rank_0: Rank0, orders: StepOrders, batch: StepBatch, steps: range, pause_s: float, most: int
) -> Figures:
    found = Figures()
    encode = msgspec.msgpack.Encoder().encode
    buffer = torch.zeros(most, dtype=torch.uint8)
    target = buffer.numpy()
    rank_0.hub._send(FollowerFrame(most, skipped=len(steps)))
    for step in steps:
        next_step(batch, step)
        time.sleep(pause_s)
        began = time.perf_counter()
        message = encode(orders.order(batch))
        target[:4] = memoryview(len(message).to_bytes(4, "little"))
        target[4 : 4 + len(message)] = memoryview(message)
        rank_0.communicator.broadcast_(buffer)
        done = time.perf_counter()
        found.rank_0.append(1e6 * (done - began))
        found.all_ranks.append(1e6 * (rank_0.taken_at() - began))
        found.size.append(len(message))
    return found


def measure(options: argparse.Namespace) -> dict[str, Figures]:
    rank_0 = Rank0(options.ranks, 1)
    try:
        batch = decoding(options.batch, options.context)
        pause_s = options.pause_ms / 1000
        total = {"whole tables": Figures(), "sockets": Figures(), "gloo": Figures()}
        at = 0
        for _ in range(options.rounds):
            for name in ("sockets", "gloo"):
                orders = StepOrders()  # whose first step has every table whole
                first = over_sockets(rank_0, orders, batch, range(at, at + 1), pause_s)
                over_sockets(rank_0, orders, batch, range(at + 1, at + 1 + WARM_UP), pause_s)
                at += 1 + WARM_UP
                steps = range(at, at + options.steps)
                at += options.steps
                if name == "sockets":
                    found = over_sockets(rank_0, orders, batch, steps, pause_s)
                else:
                    most = 4 + 2 * len(msgspec.msgpack.encode(orders.order(batch)))
                    found = by_broadcast(rank_0, orders, batch, steps, pause_s, most)
                for part, figures in (("whole tables", first), (name, found)):
                    total[part].rank_0 += figures.rank_0
                    total[part].all_ranks += figures.all_ranks
                    total[part].size += figures.size
        return total
    finally:
        rank_0.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="rows of a step (default 64)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each row (default 4096)")
    parser.add_argument("--steps", type=int, default=200, help="of each way and round (default 200)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-ms", type=float, default=1.0, help="between two steps (default 1)")
    parser.add_argument("--check", action="store_true", help="status 1 when the target is missed")
    parser.add_argument("--follow", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.follow:
        return follow(*options.follow)
    torch.set_num_threads(1)
    total = measure(options)
    print(
        f"{options.ranks} ranks, {options.batch} rows of {options.context} tokens, "
        f"{options.rounds} rounds of {options.steps} steps, {os.cpu_count()} cores; microseconds a step\n"
    )
    print("| way | bytes | rank 0, median | p99 | all ranks, median | p99 |\n| --- | --- | --- | --- | --- | --- |")
    print(total["sockets"].line("Baton's sockets"))
    print(total["gloo"].line("gloo broadcast"))
    print(total["whole tables"].line("Baton's sockets, all rows new"))
    cost = statistics.median(total["sockets"].rank_0)
    verdict = "met" if cost <= TARGET_US else "missed"
    print(f"\nrank 0's part of a step: {cost:.0f} us, target {TARGET_US:.0f} us: {verdict}")
    return int(options.check and cost > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())
