"""Servers of several ranks in one process: a real cache-store agent with a real pool for each, driven by rank 0's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from cache_store.agent import AgentEvent, AgentSettings, KvSourceRef, LeaseEnded, LoadDone, LoadFailed, Observation
from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.tp_mapping import head_range
from engine import messages
from engine.parallel.agent_messages import AgentCall, apply, event_message, rank_stats
from engine.parallel.agents import RankAgents
from engine.parallel.messages import FollowerFrame, RankFrame
from tests.unit.cache_store.agents import WAIT_S, assert_clean, prefill_result, settings
from tests.unit.cache_store.shared import SharedNode
from tests.unit.cache_store.staged import StagedNode

NUM_LAYERS, HEAD_DIM, BLOCK_SIZE, POOL_BLOCKS = 2, 8, 4, 16
HEAD_BYTES = BLOCK_SIZE * HEAD_DIM * 2  # of one head in K or V of a block

T = TypeVar("T")


def layout(heads: int, total: int, block_size: int = BLOCK_SIZE) -> GroupLayout:
    return GroupLayout.of(
        "full",
        num_layers=NUM_LAYERS,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype="bfloat16",
        total_kv_heads=total,
    )


class RankNode(StagedNode):
    """One rank's agent, whose events its server polls. `news` is notified of each."""

    def __init__(self, news: threading.Condition, *arguments: object, **more: object) -> None:
        self.news = news
        super().__init__(*arguments, **more)  # type: ignore[arg-type]

    def _wake(self) -> None:
        with self.news:
            self.news.notify_all()


class HostRankNode(SharedNode):
    """A RankNode with a pool in host memory."""

    def __init__(self, news: threading.Condition, *arguments: object, **more: object) -> None:
        self.news = news
        super().__init__(*arguments, **more)  # type: ignore[arg-type]

    _wake = RankNode._wake


@dataclass
class Others:
    """The other ranks, in this process: what goes to them and comes from them passes through the messages."""

    nodes: Sequence[RankNode | HostRankNode]
    said: list[tuple[int, AgentEvent]] = field(default_factory=list)
    posted: list[AgentCall] = field(default_factory=list)
    held: bool = False  # calls stay under way until `release`

    @property
    def size(self) -> int:
        return 1 + len(self.nodes)

    def post(self, call: AgentCall) -> None:
        self.posted.append(call)
        if not self.held:
            self.release()

    def release(self) -> None:
        """Delivers the calls that are under way."""
        self.held = False
        frame = msgspec.msgpack.encode(FollowerFrame(1, calls=self.posted))
        self.posted = []
        for node in self.nodes:
            for call in msgspec.msgpack.decode(frame, type=FollowerFrame).calls:
                apply(call, node.agent)

    def poll(self) -> list[tuple[int, RankFrame]]:
        frames = []
        for rank, node in enumerate(self.nodes, 1):
            events = node.agent.poll_events()
            self.said += [(rank, event) for event in events]
            frame = RankFrame(
                events=[event_message(event) for event in events],
                observations=[
                    messages.Observation(item.name, dict(item.labels), item.value)
                    for item in node.agent.take_observations()
                ],
                stats=rank_stats(rank, node.agent.stats()),
            )
            frames.append((rank, msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=RankFrame)))
        return frames


class RankServer:
    """One server. `agents` is what its engine talks to: all ranks as one, or the only rank's agent."""

    def __init__(
        self,
        engine_id: str,
        tp: int,
        heads: int,
        *,
        transport: str = "grpc",
        seed: int = 0,
        agent_settings: AgentSettings | None = None,
        block_size: int = BLOCK_SIZE,
        pool_blocks: int = POOL_BLOCKS,
        node: type[RankNode] | type[HostRankNode] = RankNode,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tp, self.heads, self.block_size = tp, heads, block_size
        self.news = threading.Condition()
        ranges = [head_range(heads, tp, rank) for rank in range(tp)]
        self.nodes = [
            node(
                self.news,
                engine_id,
                agent_settings or settings(transport=transport),
                layouts=(layout(stop - start, heads, block_size),),
                pool_blocks=pool_blocks,
                seed=seed + rank,
                tp_size=tp,
                rank=rank,
                clock=clock,
            )
            for rank, (start, stop) in enumerate(ranges)
        ]
        self.others = Others(self.nodes[1:])
        self.agents = RankAgents(self.nodes[0].agent, self.others) if tp > 1 else self.nodes[0].agent
        self.source = KvSourceRef(engine_id, tuple(node.address for node in self.nodes), tp)
        self._events: list[AgentEvent] = []

    # ---- the tensor as a whole

    def put(self, ids: Sequence[int], whole: np.ndarray) -> None:
        """Writes [layers, blocks, K and V, heads of the model, bytes of a head] into the pools, each rank its share."""
        for node in self.nodes:
            start, stop = head_range(self.heads, self.tp, node.identity.rank)
            for layer, content in enumerate(node.memory["full"]):
                content[list(ids)] = whole[layer][:, :, start:stop].reshape(len(ids), -1)

    def shares(self, ids: Sequence[int]) -> list[np.ndarray]:
        """What the pools hold, of each rank."""
        return [node.blocks(ids).reshape(NUM_LAYERS, len(ids), 2, -1, HEAD_BYTES) for node in self.nodes]

    def holds(self, ids: Sequence[int], whole: np.ndarray) -> bool:
        """Whether every rank has its share of the tensor, bit for bit."""
        return all(
            np.array_equal(share, whole[:, :, :, slice(*head_range(self.heads, self.tp, rank))])
            for rank, share in enumerate(self.shares(ids))
        )

    def put_tokens(self, ids: Sequence[int], whole: np.ndarray) -> None:
        """Writes [layers, K and V, heads of the model, tokens, bytes of a token's head] into the pools."""
        size, tokens = self.block_size, whole.shape[3]
        for node in self.nodes:
            part = whole[:, :, slice(*head_range(self.heads, self.tp, node.identity.rank))]
            for layer, content in enumerate(node.memory["full"]):
                for index, block in enumerate(ids):
                    held = content[block].reshape(2, -1, size, whole.shape[4])
                    count = min(size, tokens - index * size)
                    held[:, :, :count] = part[layer][:, :, index * size : index * size + count]

    def holds_tokens(self, ids: Sequence[int], whole: np.ndarray) -> bool:
        """Whether every rank has its share of these tokens, bit for bit."""
        for node in self.nodes:
            part = whole[:, :, slice(*head_range(self.heads, self.tp, node.identity.rank))]
            blocks = node.blocks(ids).reshape(NUM_LAYERS, len(ids), 2, part.shape[2], self.block_size, -1)
            held = np.moveaxis(blocks, 1, 3).reshape(*part.shape[:3], -1, part.shape[4])
            if not np.array_equal(held[:, :, :, : part.shape[3]], part):
                return False
        return True

    # ---- what an engine does

    def admit(self, key: str, ids: Sequence[int], ready: int = 0) -> None:
        self.agents.admit(key, 3, len(ids) * BLOCK_SIZE, {"full": list(ids)}, ready * BLOCK_SIZE)

    def compute(self, key: str, blocks: int, ranks: Sequence[int] | None = None) -> None:
        """Every rank publishes from its own layer hook."""
        for rank, node in enumerate(self.nodes):
            for layer in range(NUM_LAYERS):
                if ranks is None or rank in ranks:
                    node.agent.publish(key, "full", layer, blocks)

    def stage(self, key: str, ids: Sequence[int]) -> None:
        self.admit(key, ids)
        self.compute(key, len(ids))
        self.agents.computed(key, prefill_result(), True)

    def load(self, source: KvSourceRef, key: str, ids: Sequence[int], first: int = 0, *, reload: bool = False) -> None:
        """`first`: blocks of the prompt that are here already, in a prefix cache."""
        tokens = (first + len(ids)) * BLOCK_SIZE
        self.agents.load(key, source, tokens, {"full": (first, list(ids))}, 60.0, reload)

    # ---- what it says

    def event(self, timeout_s: float = WAIT_S) -> AgentEvent:
        """The next event of the server as a whole."""
        deadline = time.monotonic() + timeout_s
        while not self._events:
            with self.news:
                self._events += self.agents.poll_events()
                if not self._events and not self.news.wait(max(0.0, min(0.05, deadline - time.monotonic()))):
                    assert time.monotonic() < deadline, f"no event in time; {self.state()}"
        return self._events.pop(0)

    def quiet(self) -> bool:
        """No event is there now."""
        self._events += self.agents.poll_events()
        return not self._events

    def lease_ended(self) -> LeaseEnded:
        event = self.event()
        assert isinstance(event, LeaseEnded), event
        return event

    def load_done(self) -> LoadDone:
        event = self.event()
        assert isinstance(event, LoadDone), event
        return event

    def load_failed(self) -> LoadFailed:
        event = self.event()
        assert isinstance(event, LoadFailed), event
        return event

    def observed(self) -> list[Observation]:
        self.quiet()
        return list(self.agents.take_observations())

    def state(self) -> str:
        return "; ".join(f"rank {rank}: {node.agent.stats()}" for rank, node in enumerate(self.nodes))

    def until(self, condition: Callable[[], T], what: str) -> T:
        """The first true value of `condition`, while events of the ranks are taken in."""
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not in time: {what}; {self.state()}"
            with self.news:
                self.news.wait(0.005)
            self._events += self.agents.poll_events()
        return value


@contextmanager
def servers(*made: RankServer) -> Iterator[tuple[RankServer, ...]]:
    try:
        yield made
        for server in made:
            assert server.quiet(), server._events
            assert_clean(*server.nodes)
    finally:
        for server in made:
            for node in server.nodes:
                node.close()
