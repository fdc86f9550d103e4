"""Nodes whose pool only its copy engine reaches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cache_store.agent import AgentSettings, GroupLayout
from cache_store.geometry.rows import Rows
from cache_store.memory.host_copies import HostCopyEngine
from cache_store.memory.pool import StagedKvPool
from cache_store.memory.regions import file_regions
from cache_store.memory.shared_memory import MemoryFile
from cache_store.memory.staging import Slot, Ticket
from cache_store.memory.stream_copies import StreamCopyEngine
from rpc import faults
from tests.unit.cache_store.agents import LAYOUT, POOL_BLOCKS, WAIT_S, Node, assert_clean, nodes, settings, until
from tests.unit.cache_store.late_device import LateDevice
from tests.unit.cache_store.shared import give_back

ENGINES = ("threads", "streams")
TRANSPORTS = ("grpc", "ipc", "tcp")


class Gate:
    """Holds copies up until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()  # a copy stands before the closed gate, or has passed it

    def close(self) -> None:
        self._open.clear()
        self.reached.clear()

    def open(self) -> None:
        self._open.set()

    def pass_(self) -> None:
        self.reached.set()
        assert self._open.wait(WAIT_S), "the gate stayed closed"


class GatedCopies(HostCopyEngine):
    """Copies by threads that a test can hold up, or let fail."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        layers: dict[str, list[np.ndarray]],
        files: dict[str, list[MemoryFile]] | None,
    ) -> None:
        super().__init__(layouts, layers, files)
        self.gate = Gate()
        self.failure: Exception | None = None
        self.copies = 0

    def _submit(self, name: str, copy: Callable[[], None]):  # type: ignore[no-untyped-def]
        self.copies += 1

        def gated() -> None:
            self.gate.pass_()
            if self.failure is not None:
                raise self.failure
            copy()

        return super()._submit(name, gated)


class FailingMark:
    def wait(self) -> None:
        raise RuntimeError("an illegal address")


class HeldMark:
    """A point of the computation that is reached when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def wait(self) -> None:
        assert self.reached.wait(WAIT_S), "the mark was never reached"


class StagedNode(Node):
    """A node with a pool behind a copy engine: `threads` (with a gate) or `streams` of a LateDevice.

    `memory` aliases the pool, as in Node.
    """

    def __init__(
        self,
        engine_id: str,
        agent_settings: AgentSettings | None = None,
        *,
        engine: str = "threads",
        layouts: Sequence[GroupLayout] = (LAYOUT,),
        pool_blocks: int = POOL_BLOCKS,
        seed: int = 0,
        shared: bool = True,
        **more: object,
    ) -> None:
        self.device = LateDevice()
        self.files: dict[str, list[MemoryFile]] = {
            layout.tag: [MemoryFile(pool_blocks * layout.block_bytes) for _ in range(layout.num_layers)]
            for layout in layouts
        }
        views = {
            tag: [np.frombuffer(file.view, np.uint8).reshape(pool_blocks, -1) for file in files]
            for tag, files in self.files.items()
        }
        self.copies: GatedCopies | StreamCopyEngine
        if engine == "threads":
            self.copies = GatedCopies(layouts, views, self.files if shared else None)
        else:
            places = {
                (tag, layer): torch.from_numpy(view) for tag, each in views.items() for layer, view in enumerate(each)
            }
            self.copies = StreamCopyEngine(self.device, places)
        regions = None
        if agent_settings is not None and agent_settings.transport == "nixl":
            regions = file_regions(
                {(tag, at): file for tag, each in self.files.items() for at, file in enumerate(each)}
            )
        pool = StagedKvPool({layout.tag: pool_blocks for layout in layouts}, self.copies, regions)
        super().__init__(
            engine_id, agent_settings, layouts=layouts, pool_blocks=pool_blocks, seed=seed, pool=pool, **more  # type: ignore[arg-type]
        )  # fmt: skip
        self.move_to(views)

    def close(self) -> None:
        super().close()
        give_back(self.files)

    @property
    def gate(self) -> Gate:
        assert isinstance(self.copies, GatedCopies)
        return self.copies.gate

    @property
    def staging(self):  # type: ignore[no-untyped-def]
        staging = self.agent._equipment.staging
        assert staging is not None
        return staging


def slot_of(engine: HostCopyEngine | StreamCopyEngine, size: int = 4096) -> Slot:
    return engine.allocate(1, size)[0]


def done(ticket: Ticket) -> None:
    ticket.wait()


__all__ = ["ENGINES", "TRANSPORTS", "FailingMark", "GatedCopies", "HeldMark", "Rows", "StagedNode", "done", "slot_of"]


Pair = tuple[StagedNode, StagedNode]


def make_pair(engine: str, transport: str, clock: Callable[[], float] = time.monotonic, **more: Any) -> Iterator[Pair]:
    """A prefill and a decode node; at its end nothing is held, and every slot is free. `clock`: by which leases end."""
    chosen = settings(transport=transport, **{"load_progress_timeout_s": 60.0, **more})  # copies are held up
    with nodes(
        StagedNode("prefill", chosen, engine=engine, seed=1, clock=clock),
        StagedNode("decode", chosen, engine=engine, seed=2),
    ) as (prefill, decode):
        assert isinstance(prefill, StagedNode) and isinstance(decode, StagedNode)
        yield prefill, decode
        faults.disarm()
        assert_clean(prefill, decode)
        for node in (prefill, decode):
            for ring in (node.staging.reads, node.staging.writes):
                until(lambda ring=ring: ring.free == ring.slots, "every slot is free again")
