"""The connections between ranks: real sockets between real processes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.parallel.agent_messages import Forget
from engine.parallel.frame_socket import FrameSocket, framed
from engine.parallel.hub import Hub
from engine.parallel.lost import RankLost
from engine.parallel.messages import FollowerFrame, FollowerStart, RankFrame, RowOrder, StepOrder
from engine.parallel.port import Port
from rpc.errors import ErrorCode
from tests.standstill import stand_still

ROOT = Path(__file__).resolve().parents[4]
LIMIT_S = 60.0
SHORT_S = 2.0  # the deadline between ranks where one of them is to miss it


class Peers:
    """Follower processes and the hub to them."""

    def __init__(self, behaviours: list[str], timeout_s: float = LIMIT_S, theirs_s: float | None = None) -> None:
        """timeout_s: of the hub, and of the followers unless theirs is another one."""
        patience = str(timeout_s if theirs_s is None else theirs_s)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in behaviours]
        self.processes = []
        for (_, theirs), behaviour in zip(pairs, behaviours, strict=True):
            number = str(theirs.fileno())
            command = [sys.executable, "-m", "tests.unit.engine.parallel.rank_peer", number, patience, behaviour]
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
            )
            theirs.close()
        self.hub = Hub([ours for ours, _ in pairs], timeout_s)

    def replies(self, name: str, count: int) -> list[float]:
        """So many values that the peers report, in any order."""
        found: list[float] = []
        limit = time.monotonic() + LIMIT_S
        while len(found) < count:
            assert time.monotonic() < limit, f"{len(found)} of {count} replies of {name}"
            for _, frame in self.hub.poll():
                found += [item.value for item in frame.observations if item.name == name]
            self._wait()
        return found

    def _wait(self) -> None:
        poller = select.poll()
        for descriptor in self.hub.filenos():
            poller.register(descriptor, select.POLLIN)
        poller.poll(50)

    def until_lost(self, act: Callable[[], object] | None = None) -> RankLost:
        """Goes on until the hub gives a rank up."""
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit:
            try:
                self.hub.heartbeat() if act is None else act()
            except RankLost as lost:
                return lost
            self._wait()
        raise AssertionError("no rank was lost")

    def close(self) -> None:
        self.hub.close()
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peers]]:
    made: list[Peers] = []

    def make(*arguments: object, **options: object) -> Peers:
        made.append(Peers(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def order(tokens: int = 1, rows: int = 1) -> StepOrder:
    return StepOrder([RowOrder([7] * tokens, 0, -1, [1], True, f"r{row}") for row in range(rows)], "prefill")


def test_frames_when_there_are_five_followers_then_each_gets_all_in_order_with_what_was_posted(
    peers: Callable[..., Peers],
) -> None:
    cluster = peers(["echo"] * 5)
    hub = cluster.hub
    hub.post(Forget("a"))
    hub.wipe("full", [1, 2])
    hub.wipe("full", [])  # nothing
    hub.step(order(3))
    assert cluster.replies("tokens", 5) == [3] * 5
    hub.flush()  # nothing waits, so nothing is sent
    sent = hub.sent_frames
    hub.post(Forget("b"))
    hub.post(Forget("c"))
    hub.flush()
    assert hub.sent_frames == sent + 1
    assert cluster.replies("calls", 5) == [2] * 5
    hub.step(order(4_000_000))  # 4 MB: many times what a socket holds, so all are written to side by side
    assert cluster.replies("tokens", 5) == [4_000_000] * 5
    hub.stop(skipped=5, kind="decode")
    hub.stop()  # a second time: nothing
    hub.flush()
    for process in cluster.processes:
        assert process.communicate(timeout=LIMIT_S)[0] == "stopped: skipped 5 of decode\n"
        assert process.returncode == 0
    assert hub.poll() == []  # that they leave now is no failure
    hub.close()
    hub.close()


@pytest.mark.parametrize("when", ["idle", "step"])
def test_follower_when_it_dies_then_it_is_lost_at_once(peers: Callable[..., Peers], when: str) -> None:
    cluster = peers(["echo"])
    cluster.hub.step(order())
    cluster.replies("tokens", 1)
    cluster.processes[0].kill()
    cluster.processes[0].wait()
    began = time.monotonic()
    lost = cluster.until_lost(None if when == "idle" else lambda: cluster.hub.step(order()))
    assert (lost.code, lost.rank, lost.metadata["cause"]) == (ErrorCode.ENGINE_DEAD, 1, "closed")
    assert time.monotonic() - began < LIMIT_S / 2  # the deadline has nothing to do with it
    with pytest.raises(RankLost) as again:
        cluster.hub.step(order())
    assert again.value is lost  # the first cause stays


def test_follower_when_it_is_stopped_then_it_is_lost_within_the_deadline(peers: Callable[..., Peers]) -> None:
    cluster = peers(["echo"], timeout_s=SHORT_S, theirs_s=LIMIT_S)  # it misses nobody before it stands still
    cluster.hub.step(order())
    cluster.replies("tokens", 1)
    began = time.monotonic()
    stand_still(cluster.processes[0].pid)
    lost = cluster.until_lost()
    assert (lost.rank, lost.metadata["cause"]) == (1, "silent")
    assert SHORT_S <= time.monotonic() - began < LIMIT_S / 2


def test_follower_when_it_does_not_read_a_large_frame_then_the_write_ends_at_the_deadline(
    peers: Callable[..., Peers],
) -> None:
    # The other one does not get as impatient while a busy machine makes so large a frame
    cluster = peers(["deaf", "echo"], timeout_s=SHORT_S, theirs_s=LIMIT_S)
    cluster.hub.step(order())
    cluster.replies("tokens", 2)
    large = order(8_000_000)
    began = time.monotonic()
    with pytest.raises(RankLost) as caught:
        cluster.hub.step(large)
    assert (caught.value.rank, caught.value.metadata["cause"]) == (1, "not_reading")
    assert SHORT_S <= time.monotonic() - began < LIMIT_S / 2


def test_follower_when_it_reports_a_failure_then_that_is_the_cause_and_not_its_end(
    peers: Callable[..., Peers],
) -> None:
    cluster = peers(["fail"])
    cluster.hub.step(order())
    cluster.processes[0].wait(LIMIT_S)
    lost = cluster.hub.blame()
    assert lost is not None
    assert (lost.rank, lost.metadata["cause"], lost.metadata["cause_code"]) == (1, "ValueError", "UNKNOWN_ERROR")
    assert "it went wrong here" in lost.message


def test_followers_when_rank_0_is_silent_or_gone_then_they_end(peers: Callable[..., Peers]) -> None:
    cluster = peers(["echo"], timeout_s=SHORT_S)
    cluster.hub.step(order())
    cluster.replies("tokens", 1)  # and then nothing more
    assert cluster.processes[0].communicate(timeout=LIMIT_S)[0] == "lost rank 0: silent\n"
    gone = peers(["echo"])
    gone.hub.step(order())
    gone.replies("tokens", 1)
    gone.hub.close()
    assert gone.processes[0].communicate(timeout=LIMIT_S)[0] == "lost rank 0: closed\n"


@pytest.mark.extended
def test_heartbeats_when_nothing_is_computed_then_both_ends_stay_together(peers: Callable[..., Peers]) -> None:
    cluster = peers(["echo"], timeout_s=2 * SHORT_S)  # what a busy machine may let a process wait
    cluster.hub.step(order())
    cluster.replies("tokens", 1)
    until = time.monotonic() + 2.5 * SHORT_S
    while time.monotonic() < until:
        cluster.hub.heartbeat()
        cluster.hub.poll()
        cluster._wait()
    cluster.hub.stop()
    assert cluster.processes[0].wait(LIMIT_S) == 0


def test_start_when_a_follower_does_not_arrive_then_it_is_named() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        hub = Hub([ours], LIMIT_S)
        hub.begin(FollowerStart("e" * 32))
        with pytest.raises(RankLost) as caught:
            hub.meet("loaded", time.monotonic() + 0.05)
        hub.close()
    assert (caught.value.rank, caught.value.metadata["cause"]) == (1, "silent")
    assert "loaded" in caught.value.message


# ---- one end by itself


def test_receive_when_frames_come_in_pieces_then_they_are_put_together() -> None:
    ours, theirs = socket.socketpair()
    port = Port(ours, LIMIT_S)
    encode = msgspec.msgpack.encode
    wire = b"".join(framed(encode(FollowerFrame(seq, heartbeat=True))) for seq in (1, 2, 3))
    with theirs:
        seen = []
        for at in range(0, len(wire), 3):
            theirs.sendall(wire[at : at + 3])
            with contextlib.suppress(RankLost):  # the rest of the frame has not come yet
                while (frame := port.receive(time.monotonic() + 0.002)) is not None:
                    seen.append(frame.seq)
        assert seen == [1, 2, 3]
    port.close()


@pytest.mark.parametrize("wire", [framed(b"\xc1"), framed(b"\x81\xa3seq"), b"\xff\xff\xff\xff"])
def test_receive_when_it_is_no_frame_then_rank_0_is_given_up(wire: bytes) -> None:
    ours, theirs = socket.socketpair()
    port = Port(ours, LIMIT_S)
    with theirs:
        theirs.sendall(wire)
        with pytest.raises(RankLost) as caught:
            port.receive()
    assert caught.value.metadata["cause"] == "protocol"
    port.close()


def test_receive_when_the_watched_descriptor_is_readable_then_it_returns_without_a_frame() -> None:
    ours, theirs = socket.socketpair()
    wake = os.eventfd(1)
    port = Port(ours, LIMIT_S)
    port.watch(wake)
    with theirs:
        assert port.receive() is None
        theirs.sendall(framed(msgspec.msgpack.encode(FollowerFrame(9))))
        os.eventfd_read(wake)
        frame = port.receive()
        assert frame is not None
        assert frame.seq == 9
    os.close(wake)
    port.close()


def test_send_when_rank_0_is_busy_then_it_does_not_wait_and_the_rest_leaves_later() -> None:
    ours, theirs = socket.socketpair()
    port, reader = Port(ours, LIMIT_S), FrameSocket(theirs)
    count = 0
    while port.flush(0.0):  # until the kernel takes no more
        port.send(RankFrame(reached="x" * 50_000))
        count += 1
    port.send(RankFrame(reached="last"))
    frames: list[bytes] = []
    while len(frames) < count + 1:
        frames += reader.receive()
        port.flush(0.0)
    assert msgspec.msgpack.decode(frames[-1], type=RankFrame).reached == "last"
    port.close()
    with pytest.raises(EOFError):
        reader.receive()
    reader.close()


def test_send_when_rank_0_never_reads_then_the_follower_gives_up_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    port = Port(ours, 0.2)
    with theirs:
        while port.flush(0.0):
            port.send(RankFrame(reached="x" * 50_000))
        with pytest.raises(RankLost) as caught:
            port.receive(time.monotonic() + LIMIT_S)
    assert caught.value.metadata["cause"] == "not_reading"
    port.close()
