"""KV goes from one agent to another: while it is computed, only what is wanted, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cache_store.agent import GroupLayout, KvSourceRef
from cache_store.memory.torch_pool import TorchKvPool
from rpc.errors import ErrorCode
from tests.unit.cache_store.agents import (
    LAYOUT,
    WINDOW,
    Node,
    assert_clean,
    key_of,
    nodes,
    prefill_result,
    settings,
    until,
)

KEY = key_of(1)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    chosen = settings(transport="grpc")
    with nodes(Node("prefill", chosen, seed=1), Node("decode", chosen, seed=2)) as (prefill, decode):
        yield prefill, decode
        assert_clean(prefill, decode)


def test_load_of_staged_kv_brings_every_block_and_frees_it(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    source, target = [9, 3, 4, 5, 30], [1, 2, 8, 7, 6]
    prefill.stage(KEY, source, tokens=18)
    decode.load(prefill.source, KEY, target, tokens=18)
    done = decode.load_done()
    assert done.request_key == KEY
    assert done.result == prefill_result()
    assert done.bytes == 15 * LAYOUT.block_bytes
    assert np.array_equal(decode.blocks(target), prefill.blocks(source))
    ended = prefill.lease_ended()
    assert (ended.outcome, ended.generation, ended.error) == ("released", 1, None)
    for side, node in (("sent", prefill), ("received", decode)):
        assert node.count("kv_transfer_bytes_total", direction=side, transport="grpc") == done.bytes
    assert decode.count("kv_transfer_pieces_total", result="ok") == 15
    assert decode.observed("kv_transfer_size_bytes", transport="grpc") == [done.bytes]
    assert decode.observed("kv_transfer_seconds", outcome="ok", transport="grpc") == [done.seconds]
    assert decode.observed("kv_transfer_exposed_seconds", transport="grpc") == [done.exposed_seconds]
    assert prefill.observed("kv_lease_hold_seconds", outcome="released")
    assert len(prefill.observed("kv_publish_seconds", transport="grpc")) == LAYOUT.num_layers
    for node in pair:
        assert node.count("handshakes_total", result="ok") == 1
        assert len(node.observed("handshake_seconds", result="ok")) == 1
        assert node.count("kv_transfer_failures_total") == 0


def test_load_touches_no_other_block(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    before = {tag: [layer.copy() for layer in layers] for tag, layers in decode.memory.items()}
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [10, 12])
    decode.load_done()
    others = [block for block in range(64) if block not in (10, 12)]
    for layer, was in zip(decode.memory["full"], before["full"], strict=True):
        assert np.array_equal(layer[others], was[others])


def test_overlap_each_layer_arrives_before_the_next_is_published(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1, 2])
    until(lambda: prefill.agent.stats().parked == 1, "the load came first and is parked")
    prefill.admit(KEY, [5, 6])
    for layer in range(LAYOUT.num_layers):
        prefill.agent.publish(KEY, "full", layer, 2)
        # No later layer is published and nothing is computed until this one is in the pool of D, and booked there.
        until(
            lambda pieces=2 * (layer + 1): decode.count("kv_transfer_pieces_total", result="ok") == pieces,
            f"layer {layer}",
        )
        assert np.array_equal(decode.memory["full"][layer][[1, 2]], prefill.blocks([5, 6])[layer])
    assert decode.said == []
    prefill.agent.computed(KEY, prefill_result(), True)
    received = dict(decode.load_done().events)
    published = dict(prefill.lease_ended().events)
    for layer in range(LAYOUT.num_layers - 1):
        assert received[f"layer_received:{layer}"] < published[f"layer_published:{layer + 1}"]
    assert received["load_running"] < received["layer_received:0"]
    assert received["load_computed"] > received[f"layer_received:{LAYOUT.num_layers - 1}"]


def test_chunked_prefill_sends_each_chunk_as_it_is_published(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    source, target = [5, 6, 7, 8, 9], [20, 21, 30, 31, 32]
    decode.load(prefill.source, KEY, target)
    prefill.admit(KEY, source)
    for upto in (2, 3, 5):
        for layer in range(LAYOUT.num_layers):
            prefill.agent.publish(KEY, "full", layer, upto)
        until(
            lambda upto=upto: np.array_equal(decode.blocks(target[:upto]), prefill.blocks(source[:upto])),
            f"{upto} blocks",
        )
    prefill.agent.computed(KEY, prefill_result(), True)
    decode.load_done()
    prefill.lease_ended()


def test_prefix_hit_of_the_prefill_is_sent_before_anything_is_computed(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1, 2, 3])
    prefill.admit(KEY, [5, 6, 7], ready=2)
    until(lambda: np.array_equal(decode.blocks([1, 2]), prefill.blocks([5, 6])), "the cached blocks")
    prefill.compute(KEY, 3)
    decode.load_done()
    prefill.lease_ended()


def test_blocks_that_the_decode_server_holds_are_not_sent(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    before = decode.blocks(range(64))
    prefill.stage(KEY, [5, 6, 7, 8])
    decode.load(prefill.source, KEY, [40], tokens=16, first=3)
    assert decode.load_done().bytes == LAYOUT.num_layers * LAYOUT.block_bytes
    assert np.array_equal(decode.blocks([40]), prefill.blocks([8]))
    others = [block for block in range(64) if block != 40]
    assert np.array_equal(decode.blocks(others), before[:, others])
    prefill.lease_ended()
    assert prefill.count("kv_transfer_bytes_total") == LAYOUT.num_layers * LAYOUT.block_bytes


@pytest.mark.invariant("RPC-14")
def test_load_of_zero_blocks_completes_with_the_result(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [], tokens=5)
    prefill.admit(KEY, [5, 6], tokens=5)
    prefill.compute(KEY, 2)
    done = decode.load_done()
    assert (done.bytes, done.result) == (0, prefill_result())
    assert prefill.lease_ended().outcome == "released"


def test_two_groups_with_equal_block_numbers_each_get_their_own(request: pytest.FixtureRequest) -> None:
    layouts = (LAYOUT, WINDOW)
    with nodes(Node("prefill", layouts=layouts, seed=1), Node("decode", layouts=layouts, seed=2)) as (prefill, decode):
        decode.agent.load(KEY, prefill.source, 20, {"full": (0, [1, 2, 3, 4, 5]), "window": (1, [1, 2])}, 30)
        prefill.agent.admit(KEY, 1, 20, {"full": [9, 8, 7, 6, 5], "window": [9, 8, 7]}, 0)
        for layout, blocks in ((LAYOUT, 5), (WINDOW, 3)):
            for layer in range(layout.num_layers):
                prefill.agent.publish(KEY, layout.tag, layer, blocks)
        prefill.agent.computed(KEY, prefill_result(), True)
        decode.load_done()
        prefill.lease_ended()
        assert np.array_equal(decode.blocks([1, 2, 3, 4, 5]), prefill.blocks([9, 8, 7, 6, 5]))
        assert np.array_equal(decode.blocks([1, 2], "window"), prefill.blocks([8, 7], "window"))
        assert_clean(prefill, decode)


def test_many_loads_at_once_do_not_mix(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    sources = {key_of(i): [2 * i, 2 * i + 1] for i in range(20)}
    targets = {key_of(i): [63 - 2 * i, 62 - 2 * i] for i in range(20)}
    for key, ids in targets.items():
        decode.load(prefill.source, key, ids)
    for key, ids in sources.items():
        prefill.stage(key, ids)
    assert {decode.load_done().request_key for _ in targets} == set(targets)
    for key, ids in targets.items():
        assert np.array_equal(decode.blocks(ids), prefill.blocks(sources[key]))
    assert {prefill.lease_ended().request_key for _ in sources} == set(sources)
    assert decode.count("handshakes_total") == 1


@pytest.mark.parametrize("mode", ["off", "sample", "all"])
def test_stricter_checksum_mode_of_the_two_is_used(mode: str) -> None:
    limits = settings(checksum=mode)
    with nodes(Node("prefill", settings(checksum="off")), Node("decode", limits, seed=2)) as (prefill, decode):
        prefill.stage(KEY, [1, 2, 3])
        decode.load(prefill.source, KEY, [4, 5, 6])
        decode.load_done()
        assert np.array_equal(decode.blocks([4, 5, 6]), prefill.blocks([1, 2, 3]))
        peer = decode.agent._pulling.peers.get(prefill.address)
        assert peer.checksum == mode
        prefill.lease_ended()


def test_more_ranks_here_read_their_share_of_the_heads() -> None:
    """One prefill rank with four heads, two decode ranks with two each."""
    wide = GroupLayout.of("full", num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="float16")
    half = GroupLayout.of(
        "full", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float16", total_kv_heads=4
    )
    with nodes(
        Node("prefill", layouts=(wide,), seed=1),
        Node("decode", layouts=(half,), seed=2, tp_size=2, rank=0),
        Node("decode", layouts=(half,), seed=3, tp_size=2, rank=1),
    ) as (prefill, first, second):
        prefill.stage(KEY, [5, 6])
        whole = prefill.blocks([5, 6]).reshape(2, 2, 2, 4, -1)  # layers, blocks, K and V, heads, bytes
        for decode, heads in ((second, slice(2, 4)), (first, slice(0, 2))):
            assert prefill.said == []  # a lease stands until every rank that is to read has released it
            decode.load(prefill.source, KEY, [1, 2])
            decode.load_done()
            assert np.array_equal(decode.blocks([1, 2]).reshape(2, 2, 2, 2, -1), whole[:, :, :, heads])
        assert prefill.lease_ended().outcome == "released"
        assert_clean(prefill, first, second)


def test_fewer_ranks_here_gather_the_heads_of_their_peers() -> None:
    """Two prefill ranks with two heads each, one decode rank with four: complete only with both."""
    wide = GroupLayout.of("full", num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="float16")
    half = GroupLayout.of(
        "full", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float16", total_kv_heads=4
    )
    with nodes(
        Node("prefill", layouts=(half,), seed=1, tp_size=2, rank=0),
        Node("prefill", layouts=(half,), seed=2, tp_size=2, rank=1),
        Node("decode", layouts=(wide,), seed=3),
    ) as (first, second, decode):
        source = KvSourceRef("prefill", (first.address, second.address), 2)
        first.stage(KEY, [5, 6])
        decode.load(source, KEY, [1, 2])
        second.stage(KEY, [5, 6], generation=8)
        assert decode.load_done().bytes == 2 * 2 * wide.block_bytes
        got = decode.blocks([1, 2]).reshape(2, 2, 2, 4, -1)
        for node, heads in ((first, slice(0, 2)), (second, slice(2, 4))):
            assert np.array_equal(got[:, :, :, heads], node.blocks([5, 6]).reshape(2, 2, 2, 2, -1))
            assert node.lease_ended().outcome == "released"


def test_torch_pools_get_equal_tensors() -> None:
    shape = (8, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim)
    generator = torch.Generator().manual_seed(5)
    theirs = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYOUT.num_layers)]
    ours = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYOUT.num_layers)]
    with nodes(
        Node("prefill", pool=TorchKvPool([LAYOUT], {"full": theirs})),
        Node("decode", pool=TorchKvPool([LAYOUT], {"full": ours})),
    ) as (prefill, decode):
        prefill.stage(KEY, [2, 3])
        decode.load(prefill.source, KEY, [6, 5])
        decode.load_done()
        for there, here in zip(theirs, ours, strict=True):
            assert torch.equal(here[[6, 5]], there[[2, 3]])
            assert not here[[0, 1, 2, 3, 4, 7]].any()
        prefill.lease_ended()


def test_second_load_of_an_open_key_is_ignored_and_the_first_completes(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1])
    decode.load(prefill.source, KEY, [2])
    prefill.stage(KEY, [5])
    decode.load_done()
    prefill.lease_ended()
    assert np.array_equal(decode.blocks([1]), prefill.blocks([5]))
    assert len(decode.said) == 1


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        ({"full": (0, [64])}, "outside the pool"),
        ({"full": (0, [1, 2, 3])}, "beyond the prompt"),
        ({"full": (0, [1, 1])}, "a block twice"),
        ({"other": (0, [1])}, "unknown group"),
        ({}, "no group"),
    ],
)
def test_load_into_blocks_that_cannot_be_right_fails_before_anything_is_sent(
    pair: tuple[Node, Node], wanted: dict[str, tuple[int, list[int]]], what: str
) -> None:
    prefill, decode = pair
    decode.agent.load(KEY, prefill.source, 2 * LAYOUT.block_size, wanted, 30)
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.INVALID_PARAMS, what
    assert not failed.retriable_here
    assert prefill.agent.stats().parked == 0
