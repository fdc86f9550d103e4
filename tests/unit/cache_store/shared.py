"""Nodes whose pool is host memory that others of the machine can read."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest

from cache_store.agent import AgentSettings, GroupLayout
from cache_store.memory.pool import HostKvPool
from cache_store.memory.shared_memory import MemoryFile
from cache_store.nixl.agent import PACKAGES, installed
from tests.unit.cache_store.agents import LAYOUT, POOL_BLOCKS, Node

needs_nixl = pytest.mark.skipif(not installed(), reason=f"none of {', '.join(PACKAGES)} is installed")


def give_back(files: dict[str, list[MemoryFile]]) -> None:
    """Descriptors, of which a run of all tests has thousands. The memory stays as long as somebody maps it."""
    for each in files.values():
        while each:
            os.close(each.pop().descriptor)


class SharedNode(Node):
    """A node with a HostKvPool in memory files. `memory` aliases the pool, as in Node."""

    def __init__(
        self,
        engine_id: str,
        agent_settings: AgentSettings | None = None,
        *,
        layouts: Sequence[GroupLayout] = (LAYOUT,),
        pool_blocks: int = POOL_BLOCKS,
        seed: int = 0,
        **more: object,
    ) -> None:
        self.files = files = {
            layout.tag: [MemoryFile(pool_blocks * layout.block_bytes) for _ in range(layout.num_layers)]
            for layout in layouts
        }
        views = {
            tag: [np.frombuffer(file.view, np.uint8).reshape(pool_blocks, -1) for file in each]
            for tag, each in files.items()
        }
        super().__init__(
            engine_id, agent_settings, layouts=layouts, pool_blocks=pool_blocks, seed=seed,
            pool=HostKvPool(layouts, views, files), **more,  # type: ignore[arg-type]
        )  # fmt: skip
        self.move_to(views)

    def close(self) -> None:
        super().close()
        give_back(self.files)
