"""The loop of a rank that follows, over a real connection; the rank's model and agent have nothing to do here."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import torch

from cache_store.events import AgentStats
from engine.core import Wakeup
from engine.parallel.follower import Follower
from engine.parallel.frame_socket import FrameSocket, framed
from engine.parallel.hub import Hub
from engine.parallel.lost import RankLost
from engine.parallel.messages import FollowerFrame
from engine.parallel.port import Port

LIMIT_S = 30.0
SHORT_S = 1.0
NEWS_S = 0.05  # much more often than the deadline


def test_silence_of_rank_0_when_the_agent_has_news_all_the_time_then_it_is_noticed_within_the_deadline() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    leader, wakeup = FrameSocket(ours), Wakeup()
    agent = SimpleNamespace(poll_events=list, take_observations=list, stats=AgentStats)
    rank = SimpleNamespace(
        config=SimpleNamespace(rank=1, start_deadline_ns=0), runner=SimpleNamespace(device=torch.device("cpu")),
        agent=agent, tiers=None,
    )  # fmt: skip
    port = Port(theirs, SHORT_S)
    follower = Follower(rank, port, wakeup)  # type: ignore[arg-type]
    ended: list[tuple[RankLost, float]] = []
    over = threading.Event()

    def follow() -> None:
        try:
            follower.run()
        except RankLost as lost:
            ended.append((lost, time.monotonic()))
        over.set()

    thread = threading.Thread(target=follow)
    leader.send(framed(msgspec.msgpack.encode(FollowerFrame(1, heartbeat=True))))
    began = time.monotonic()
    thread.start()
    while not over.wait(NEWS_S) and time.monotonic() < began + LIMIT_S:
        wakeup.wake()
    noticed = over.is_set()
    leader.close()  # ends a follower that still waits
    thread.join(LIMIT_S)
    port.close()
    wakeup.close()
    assert noticed, "a follower with news waits for ever"
    [(lost, at)] = ended
    assert (lost.rank, lost.metadata["cause"]) == (0, "silent")
    assert at - began >= SHORT_S


def test_silence_of_rank_0_when_it_stops_as_soon_as_it_is_ready_then_it_is_not_taken_for_a_slow_start() -> None:
    """The start may take minutes; `Hub.serve`, before anybody is told that the engine is ready, ends it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    hub, wakeup, port = Hub([ours], SHORT_S), Wakeup(), Port(theirs, SHORT_S)
    agent = SimpleNamespace(poll_events=list, take_observations=list, stats=AgentStats)
    start_deadline_ns = time.monotonic_ns() + int(1000 * LIMIT_S * 1e9)
    rank = SimpleNamespace(
        config=SimpleNamespace(rank=1, start_deadline_ns=start_deadline_ns),
        runner=SimpleNamespace(device=torch.device("cpu")), agent=agent, tiers=None,
    )  # fmt: skip
    follower = Follower(rank, port, wakeup)  # type: ignore[arg-type]
    ended: list[RankLost] = []

    def follow() -> None:
        try:
            follower.run()
        except RankLost as lost:
            ended.append(lost)

    thread = threading.Thread(target=follow)
    thread.start()
    hub.serve()
    thread.join(LIMIT_S)
    noticed = not thread.is_alive()
    hub.close()  # ends a follower that still waits
    thread.join(LIMIT_S)
    port.close()
    wakeup.close()
    assert noticed
    assert [(lost.rank, lost.metadata["cause"]) for lost in ended] == [(0, "silent")]
