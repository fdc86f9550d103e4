"""KV between servers of any numbers of ranks and any block sizes, over each transport: a real agent for each rank."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from cache_store.transports import GRPC, IPC, NIXL, TCP
from tests.unit.cache_store.agents import key_of, prefill_result, settings
from tests.unit.cache_store.shared import needs_nixl
from tests.unit.engine.rank_servers import HEAD_DIM, NUM_LAYERS, HostRankNode, RankNode, RankServer, servers

KEY = key_of(1)
POOL = 40
TOKENS = 70  # ends inside a block of either side
TP = (1, 2, 4)
HEADS = (4, 2, 1)  # of two and one, ranks hold copies
BLOCKS = ((4, 4), (4, 16), (16, 4))
NodeType = type[RankNode] | type[HostRankNode]
# nixl knows no copy engine of host threads; on a GPU it reads the pool itself, as in host memory.
WAYS: tuple[tuple[str, NodeType], ...] = (
    *((transport, node) for transport in (GRPC, IPC, TCP) for node in (HostRankNode, RankNode)),
    (NIXL, HostRankNode),
)


def cases() -> list[Any]:
    """All of them; those that always run have every pair of sizes, and every value of the rest several times."""
    found = []
    rest = list(product(WAYS, HEADS, BLOCKS))
    for number, sizes in enumerate(product(TP, TP)):
        always = {(5 * number + step) % len(rest) for step in (0, 22, 43)}
        for index, ((transport, node), heads, blocks) in enumerate(rest):
            name = f"p{sizes[0]}-d{sizes[1]}-h{heads}-b{blocks[0]}to{blocks[1]}-{transport}-{node.__name__}"
            # With nixl each agent has a process of its own.
            costly = transport == NIXL and sum(sizes) > 3
            marks = [] if index in always and not costly else [pytest.mark.extended]
            if transport == NIXL:
                marks.append(needs_nixl)
            found.append(pytest.param(sizes, heads, blocks, transport, node, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("sizes", "heads", "blocks", "transport", "node"), cases())
def test_load_when_ranks_and_block_sizes_differ_then_each_rank_has_its_heads_of_each_token(
    sizes: tuple[int, int],
    heads: int,
    blocks: tuple[int, int],
    transport: str,
    node: NodeType,
) -> None:
    rng = np.random.default_rng(3)
    whole = rng.integers(0, 256, (NUM_LAYERS, 2, heads, TOKENS, 2 * HEAD_DIM), np.uint8)
    theirs = rng.permutation(POOL)[: -(-TOKENS // blocks[0])].tolist()
    all_of = rng.permutation(POOL)[: -(-TOKENS // blocks[1])].tolist()
    chosen = settings(transport=transport, chunk_bytes=64 * 1024, staging_slots=8)
    made = [
        RankServer(name, tp, heads, seed=seed, agent_settings=chosen, block_size=size, pool_blocks=POOL, node=node)
        for name, tp, size, seed in zip(("prefill", "decode"), sizes, blocks, (1, 100), strict=True)
    ]
    with servers(*made) as (prefill, decode):
        prefill.put_tokens(theirs, whole)
        for first in (0, 1):  # the second time with the prompt's first block on the decode server
            key, own = key_of(first), all_of[first:]
            untouched = [block for block in range(POOL) if block not in own]
            before = [each.blocks(untouched) for each in decode.nodes]
            decode.agents.load(key, prefill.source, TOKENS, {"full": (first, own)}, 60.0)
            prefill.agents.admit(key, 3, TOKENS, {"full": theirs}, 0)
            for upto in (1, len(theirs)):
                prefill.compute(key, upto)
            prefill.agents.computed(key, prefill_result(), True)
            done = decode.load_done()
            assert done.transport == transport
            assert decode.holds_tokens(own, whole[:, :, :, first * blocks[1] :])
            assert done.bytes == sum(each.blocks(own).nbytes for each in decode.nodes)
            for each, was in zip(decode.nodes, before, strict=True):
                assert np.array_equal(each.blocks(untouched), was)
                each.memory["full"][0][own] = 0
            assert prefill.lease_ended().outcome == "released"
        assert not [each for each in prefill.nodes if len(each.agent._table)]
