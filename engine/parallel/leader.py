"""Rank 0's part in an engine of several: it starts the others, and gives each step to all of them before its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.device import resolve_device
from engine.parallel.communicator import CollectiveFailed, Communicator, connect
from engine.parallel.hub import Hub
from engine.parallel.lost import RankLost
from engine.parallel.messages import FollowerStart
from engine.parallel.step_orders import StepOrders, embeddings_travel_apart, share_embeddings
from engine.runner.batch import StepBatch, StepResult
from engine.runner.model_runner import ModelRunner
from rpc.errors import BatonError
from rpc.faults import fault

CONNECT = "connect"  # where ranks wait for each other before they connect for their collective operations
LOADED = "loaded"  # … and with their weights in memory


def connect_ranks(config: EngineConfig, hub: Hub, meeting: str, engine_id: str) -> Communicator:
    """Has all ranks connect with each other, once each of them is there. Raises RankLost, CollectiveFailed."""
    hub.begin(FollowerStart(engine_id))
    hub.meet(CONNECT, start_deadline(config))
    device = resolve_device(config.device, config.rank)
    return connect(0, config.tensor_parallel_size, meeting, device, config.tp_broadcast_timeout_seconds)


def start_deadline(config: EngineConfig) -> float:
    """Reading of `time.monotonic()` until which ranks wait for each other at the start."""
    return config.start_deadline_ns / 1e9


class LeadingRunner:
    """`engine.core.Runner` over all ranks: the others compute each step along with rank 0's own runner.

    A step that has been given to the others is one that every rank computes to its end. If one cannot, they are out of
    step for good: `execute` then raises RankLost, with the rank that is at fault, and the engine ends.
    """

    def __init__(self, runner: ModelRunner, hub: Hub) -> None:
        self.groups = runner.groups
        self._runner = runner
        self._hub = hub
        self._orders = StepOrders()
        self._apart = embeddings_travel_apart(runner.device)

    def execute(self, batch: StepBatch, on_layer: Callable[[str, int], None] | None = None) -> StepResult:
        self._runner.check(batch)  # raises while nobody has been told: then the step alone fails
        order = self._orders.order(batch, apart=self._apart)
        try:
            self._hub.step(order)
        except ValueError:  # too large, so nobody has been told either
            self._orders.forget()
            raise
        try:
            fault("engine.ordered", kind=batch.kind)
            if self._apart:
                share_embeddings(batch, self._runner.communicator, self._runner.device)
            result = self._runner.execute(batch, on_layer)
        except Exception as error:
            raise self._lost(error) from error
        for group, blocks in self._runner.failed_blocks(batch, result.rows):
            self._hub.wipe(group, blocks)  # rank 0's own runner has wiped its part
        return result

    def wipe(self, group: str, blocks: Sequence[int]) -> None:
        """Zeroes blocks on every rank, before the next step."""
        self._hub.wipe(group, blocks)
        self._runner.wipe(group, blocks)

    def release(self) -> None:
        self._runner.release()

    def _lost(self, error: Exception) -> RankLost:
        """The end of the engine, by the rank that is at fault: another one if it can be found, else this one."""
        if isinstance(error, RankLost):
            return error
        if isinstance(error, CollectiveFailed):
            other = self._hub.blame()
            if other is not None:
                return other
        if isinstance(error, BatonError):
            return RankLost.of(0, error)
        return RankLost(0, type(error).__name__, "failed in a step that the other ranks compute")
