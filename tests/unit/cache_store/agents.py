"""Real agents over loopback, with pools of random bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from cache_store.agent import (
    AgentEvent,
    AgentIdentity,
    AgentSettings,
    CacheStoreAgent,
    GroupLayout,
    KvSourceRef,
    LeaseEnded,
    LoadDone,
    LoadFailed,
    Observation,
)
from cache_store.memory.pool import HostKvPool
from protos import common_pb2

WAIT_S = 20.0
LAYOUT = GroupLayout.of("full", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
WINDOW = GroupLayout.of("window", num_layers=2, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")
POOL_BLOCKS = 64

T = TypeVar("T")


def settings(**change: float | str) -> AgentSettings:
    """The defaults, where a test says nothing about it with time for handshakes on a busy machine, and with staging
    rings of which less memory has to be made than those of a server have."""
    return AgentSettings(**{"connect_timeout_s": 10.0, "staging_slots": 8, **change})  # type: ignore[arg-type]


def key_of(number: int) -> str:
    return f"request-{number}#0.{number:08x}"


def prefill_result(token_id: int = 7) -> common_pb2.PrefillResult:
    return common_pb2.PrefillResult(
        first_token=common_pb2.TokenOutput(index=0, token_id=token_id),
        cached_tokens=0,
        prefill_cuda_graph_status="not_requested",
    )


def until(condition: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
    """The first true value of `condition`; for states of another thread that no event announces."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not in time: {what}")
        pause.wait(0.002)
    return value


class HeldClock:
    """A clock of an agent that stands still until a test lets it run or moves it on: however slow the machine is, no
    time limit passes unless the test wants it to. Limits are looked at again within a second."""

    def __init__(self, *, running: bool = False) -> None:
        self._reading = time.monotonic()
        self._running_since = self._reading if running else None

    def __call__(self) -> float:
        since = self._running_since
        return self._reading if since is None else self._reading + time.monotonic() - since

    def move(self, seconds: float) -> None:
        self._reading += seconds

    def run(self) -> None:
        self._running_since = time.monotonic()

    def hold(self) -> None:
        self._reading, self._running_since = self(), None


class Node:
    """One agent, its memory, and everything it said."""

    def __init__(
        self,
        engine_id: str,
        agent_settings: AgentSettings | None = None,
        *,
        layouts: Sequence[GroupLayout] = (LAYOUT,),
        pool_blocks: int = POOL_BLOCKS,
        seed: int = 0,
        model: str = "model-a",
        tp_size: int = 1,
        rank: int = 0,
        pool: HostKvPool | None = None,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layouts = tuple(layouts)
        self.memory: dict[str, list[np.ndarray]] = {
            layout.tag: [
                np.random.default_rng(seed * 1000 + i).integers(0, 256, (pool_blocks, layout.block_bytes), np.uint8)
                for i in range(layout.num_layers)
            ]
            for layout in layouts
        }
        self.pool = pool or HostKvPool(self.layouts, self.memory)
        self.identity = AgentIdentity(engine_id, model, layouts[0].dtype, self.layouts, tp_size, rank)
        self.clock = clock
        self._changed = threading.Condition()
        self.said: list[AgentEvent] = []
        self.counters: dict[tuple[str, ...], float] = {}
        self.samples: dict[str, list[Observation]] = {}
        self.agent = CacheStoreAgent(
            self.identity, self.pool, agent_settings or settings(), wake=self._wake, clock=clock
        )
        self.address = self.agent.start("127.0.0.1", port)
        self._taken = 0

    def _wake(self) -> None:
        with self._changed:
            self.said += self.agent.poll_events()
            self._changed.notify_all()

    @property
    def source(self) -> KvSourceRef:
        return KvSourceRef(self.identity.engine_id, (self.address,), 1)

    def next_event(self, timeout_s: float = WAIT_S) -> AgentEvent:
        """The next event not yet taken, in order."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.said) > self._taken, timeout_s):
                raise AssertionError("no event in time")
            self._taken += 1
            return self.said[self._taken - 1]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing happens on the agent's thread meanwhile."""
        blocked, go = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            go.wait(WAIT_S)

        assert self.agent._loop is not None
        self.agent._loop.call_soon_threadsafe(block)
        assert blocked.wait(WAIT_S)
        try:
            yield
        finally:
            go.set()

    def lease_ended(self, timeout_s: float = WAIT_S) -> LeaseEnded:
        event = self.next_event(timeout_s)
        assert isinstance(event, LeaseEnded), event
        return event

    def load_done(self, timeout_s: float = WAIT_S) -> LoadDone:
        event = self.next_event(timeout_s)
        assert isinstance(event, LoadDone), event
        return event

    def load_failed(self, timeout_s: float = WAIT_S) -> LoadFailed:
        event = self.next_event(timeout_s)
        assert isinstance(event, LoadFailed), event
        return event

    def move_to(self, views: dict[str, list[np.ndarray]]) -> None:
        """The pool's own memory, by group and layer, gets the contents and is `memory` from now on."""
        for tag, own in self.memory.items():
            for layer, content in enumerate(own):
                views[tag][layer][:] = content
        self.memory = views

    # ---- what an engine does

    def admit(self, key: str, blocks: Sequence[int], *, tokens: int = 0, generation: int = 1, ready: int = 0) -> None:
        layout = self.layouts[0]
        count = tokens or len(blocks) * layout.block_size
        self.agent.admit(key, generation, count, {layout.tag: blocks}, min(count, ready * layout.block_size))

    def compute(self, key: str, blocks: int, hold: bool = True) -> None:
        for layer in range(self.layouts[0].num_layers):
            self.agent.publish(key, self.layouts[0].tag, layer, blocks)
        self.agent.computed(key, prefill_result(), hold)

    def stage(self, key: str, blocks: Sequence[int], **more: int) -> None:
        self.admit(key, blocks, **more)
        self.compute(key, len(blocks))

    def load(
        self,
        source: KvSourceRef,
        key: str,
        ids: Sequence[int],
        *,
        tokens: int = 0,
        first: int = 0,
        deadline_s: float | None = 60.0,
        reload: bool = False,
    ) -> None:
        layout = self.layouts[0]
        count = tokens or (first + len(ids)) * layout.block_size
        self.agent.load(key, source, count, {layout.tag: (first, ids)}, deadline_s, reload)

    def blocks(self, ids: Sequence[int], group: str = "full") -> np.ndarray:
        """A copy of the blocks, [layers, blocks, bytes]."""
        return np.stack([layer[list(ids)] for layer in self.memory[group]])

    # ---- what it counted

    def _take(self) -> None:
        for item in self.agent.take_observations():
            assert item.name.startswith("baton_"), item
            if item.name.endswith("_total"):
                key = (item.name.removeprefix("baton_"), *(f"{k}={v}" for k, v in sorted(item.labels.items())))
                self.counters[key] = self.counters.get(key, 0) + item.value
            else:
                self.samples.setdefault(item.name.removeprefix("baton_"), []).append(item)

    def count(self, name: str, **labels: str) -> float:
        """Sum of a counter over the series with these labels."""
        self._take()
        wanted = {f"{k}={v}" for k, v in labels.items()}
        return sum(value for key, value in self.counters.items() if key[0] == name and wanted <= set(key[1:]))

    def observed(self, name: str, **labels: str) -> list[float]:
        """Samples of a histogram with these labels."""
        self._take()
        return [item.value for item in self.samples.get(name, ()) if labels.items() <= item.labels.items()]

    def close(self) -> None:
        self.agent.close(10)
        # The thread must have ended: a hung stream or task would be seen here.
        assert not any(thread is self.agent._thread for thread in threading.enumerate()), "the agent hangs"


@contextmanager
def nodes(*made: Node) -> Iterator[tuple[Node, ...]]:
    try:
        yield made
    finally:
        for node in made:
            node.close()


def assert_clean(*made: Node) -> None:
    """Nothing is left open anywhere: every lease ended, no reader, no parked load, no load."""
    for node in made:
        until(
            lambda node=node: (s := node.agent.stats()).leases == s.readers == s.parked == s.loads == 0,
            f"{node.identity.engine_id} is idle, has {node.agent.stats()}",
        )
