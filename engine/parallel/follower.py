"""A rank that follows: it holds its share of the model and of the KV, and does what rank 0's frames say, in order."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.core import Wakeup
from engine.device import device_title, resolve_device
from engine.messages import Observation, RankFacts
from engine.parallel.agent_messages import apply, event_message, rank_stats
from engine.parallel.communicator import connect
from engine.parallel.leader import CONNECT, LOADED, start_deadline
from engine.parallel.lost import RankLost
from engine.parallel.messages import PROTOCOL_VERSION, FollowerFrame, RankFrame, StepOrder
from engine.parallel.port import Port
from engine.parallel.step_orders import FollowedSteps, embeddings_travel_apart, take_embeddings
from engine.parallel.tiers import FollowedTiers
from engine.startup import LoadedRank, finish_rank, load_model
from engine.transfer import Publisher
from rpc.errors import BatonError, ErrorCode
from rpc.faults import fault

FIGURES_S = 0.25  # longest time that a follower keeps its agent's figures back while there is anything to tell

_log = logging.getLogger(__name__)


def start_follower(config: EngineConfig, port: Port, meeting: str, wakeup: Wakeup) -> Follower:
    """Takes part in the start of the engine; returns once this rank can compute. Rank 0 waits for its `tell_ready`.

    Raises BatonError that names the flag to change, RankLost, CollectiveFailed.
    """
    began = time.monotonic()
    port.send(RankFrame(hello=os.getpid()))
    deadline = start_deadline(config)
    start = _awaited(port, deadline).start
    if start is None or start.protocol_version != PROTOCOL_VERSION:
        raise RankLost(0, "protocol", "is of another version; install one version")
    _meet(port, CONNECT, deadline)
    device = resolve_device(config.device, config.rank)
    size, timeout_s = config.tensor_parallel_size, config.tp_broadcast_timeout_seconds
    communicator = connect(config.rank, size, meeting, device, timeout_s)
    runner = load_model(config, communicator)
    weights = _meet(port, LOADED, deadline).weights
    if weights is None:
        raise RankLost(0, "protocol", "did not name the model")
    if weights.files != runner.model.weights_files:
        raise BatonError(
            ErrorCode.INVALID_PARAMS,
            f"--model {config.model}: files changed while the ranks loaded them; start again once they are complete",
        )
    runner.model_fingerprint = weights.model_fingerprint
    rank = finish_rank(config, runner, start.engine_id, wakeup.wake, began)
    communicator.begin_serving()
    return Follower(rank, port, wakeup)


def _awaited(port: Port, deadline: float) -> FollowerFrame:
    frame = port.receive(deadline)
    assert frame is not None  # nothing else wakes it yet
    return frame


def _meet(port: Port, place: str, deadline: float) -> FollowerFrame:
    port.send(RankFrame(reached=place))
    frame = _awaited(port, deadline)
    if not frame.proceed:
        raise RankLost(0, "protocol", f"did not wait at {place!r}")
    return frame


class Follower:
    """The loop of one follower. Belongs to one thread."""

    def __init__(self, rank: LoadedRank, port: Port, wakeup: Wakeup) -> None:
        self.rank = rank
        self._port = port
        self._wakeup = wakeup
        self._steps = FollowedSteps()
        self._apart = embeddings_travel_apart(rank.runner.device)
        self._deferred: list[Callable[[], None]] = []
        self._told_at = 0.0
        self.tiers: FollowedTiers | None = None
        if rank.tiers is not None:
            self.tiers = FollowedTiers(rank.tiers, rank.kv.versions(rank.kv.groups[0].tag))
        port.watch(wakeup.fileno())

    def tell_ready(self) -> None:
        """From now on rank 0 counts on an answer within the deadline."""
        rank = self.rank
        load_seconds = time.monotonic() - rank.began
        runner = rank.runner
        own = (os.getpid(), rank.address, load_seconds, runner.read_bytes, rank.captured, device_title(runner.device))
        self._port.send(RankFrame(ready=RankFacts(rank.config.rank, *own)))

    def run(self) -> None:
        """Until rank 0 says to stop.

        Raises RankLost when rank 0 is gone or silent, CollectiveFailed when a rank did not take part in a step, and
        whatever a step of this rank raises.
        """
        # Rank 0 has yet to settle; its first frame ends the start.
        deadline = max(start_deadline(self.rank.config), time.monotonic() + self._port.timeout_s)
        while True:
            frame = self._port.receive(deadline)
            if frame is None:  # an agent with much to say does not make rank 0 any less silent
                self._wakeup.clear()
                self._tell()
                continue
            if not self._do(frame):
                break
            self._hand_over()
            self._tell(pong=frame.seq if frame.heartbeat else 0)
            deadline = time.monotonic() + self._port.timeout_s
        self.rank.runner.release()

    def _do(self, frame: FollowerFrame) -> bool:
        """False: that was the last frame."""
        if frame.given and self.tiers is not None:
            self.tiers.given(frame.given)
        for group, blocks in frame.wipes:
            self.rank.runner.wipe(group, blocks)
        for call in frame.calls:
            apply(call, self.rank.agent)
        if self.tiers is not None:
            for order in frame.tiers:
                self.tiers.apply(order)
        if frame.heartbeat:
            fault("engine.rest", rank=self.rank.config.rank)
        if frame.stop:
            fault("engine.stop", rank=self.rank.config.rank)
            if frame.skipped:
                what = {"requests": frame.skipped, "kind": frame.skipped_kind, "seq": frame.seq}
                _log.info("the next step is skipped: the engine stops", extra=what)
            return False
        if frame.step is not None:
            self._compute(frame.step)
        return True

    def _compute(self, order: StepOrder) -> None:
        """Fault points `engine.step` and `engine.layer`, as on rank 0."""
        runner, rank = self.rank.runner, self.rank.config.rank
        batch = self._steps.batch(order)
        fault("engine.step", kind=order.kind, request_key=batch.rows[0].request_key, rank=rank)
        if self._apart:
            take_embeddings(batch, runner.communicator, runner.device, runner.config.hidden_size)
        runner.follow(batch, self._layer_hook(order))

    def _layer_hook(self, order: StepOrder) -> Callable[[str, int], None] | None:
        if order.kind == "decode":
            return None
        rank = self.rank
        publish = Publisher(rank.agent, order.shares, self._deferred.append) if order.shares else None

        def on_layer(group: str, layer: int) -> None:
            fault("engine.layer", group=group, layer=layer, rank=rank.config.rank)
            if publish is not None:
                publish(group, layer)

        return on_layer

    def _hand_over(self) -> None:
        while self._deferred:
            self._deferred.pop(0)()

    def _tell(self, pong: int = 0) -> None:
        """What the agent and the tiers have to say, to rank 0; figures with it, and from time to time by themselves."""
        agent = self.rank.agent
        events = agent.poll_events()
        ends = self.tiers.take_ends() if self.tiers is not None else []
        now = time.monotonic()
        if not events and not ends and not pong and now < self._told_at + FIGURES_S:
            return
        self._told_at = now
        news = [*agent.take_observations(), *(self.tiers.take_observations() if self.tiers is not None else ())]
        self._port.send(
            RankFrame(
                events=[event_message(event) for event in events],
                observations=[Observation(item.name, dict(item.labels), item.value) for item in news],
                stats=rank_stats(self.rank.config.rank, agent.stats()),
                pong=pong,
                tier_ends=ends,
            )
        )
