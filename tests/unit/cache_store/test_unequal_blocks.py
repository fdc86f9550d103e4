"""Loads between servers whose blocks have different sizes, over every transport and kind of pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from cache_store.agent import GroupLayout
from cache_store.geometry.pieces import Piece
from cache_store.geometry.positions import Positions
from cache_store.loading.load import Load, WantedHere
from protos import cache_store_pb2 as pb
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import Node, assert_clean, key_of, nodes, settings, until
from tests.unit.cache_store.staged import StagedNode
from tests.unit.cache_store.test_transports import WAYS, Way

KEY = key_of(1)
POOL = 64
SIZES = [(4, 16), (16, 4)]


class StreamNode(StagedNode):
    """A pool behind the streams of a device."""

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, engine="streams", **more)  # type: ignore[arg-type]


GRPC, IPC = ([Way(transport, node) for node in (StagedNode, StreamNode)] for transport in ("grpc", "ipc"))
STAGED = [*GRPC, *IPC, Way("tcp", StreamNode)]


def layout(block_size: int, heads: int = 2, head_dim: int = 8) -> GroupLayout:
    return GroupLayout.of(
        "full", num_layers=3, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype="bfloat16"
    )


@dataclass
class Ends:
    """A prefill and a decode node with blocks of different sizes."""

    way: Way
    prefill: Node
    decode: Node
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def sizes(self) -> tuple[int, int]:
        return self.prefill.layouts[0].block_size, self.decode.layouts[0].block_size

    def new_key(self) -> str:
        return key_of(next(self.numbers))

    def publish(self, key: str, upto_block: int) -> None:
        for layer in range(3):
            self.prefill.agent.publish(key, "full", layer, upto_block)

    def tokens(self, node: Node, ids: Sequence[int], tokens: int) -> np.ndarray:
        """The bytes of the first `tokens` tokens in blocks `ids`: [layers, K and V, heads, tokens, bytes of a head]."""
        made = node.layouts[0]
        blocks = node.blocks(ids).reshape(made.num_layers, len(ids), 2, made.num_kv_heads, made.block_size, -1)
        return np.moveaxis(blocks, 1, 3).reshape(made.num_layers, 2, made.num_kv_heads, -1, blocks.shape[-1])[
            :, :, :, :tokens
        ]

    def arrived(self) -> int:
        """Pieces of the one open load that are in the decode node's pool."""
        jobs = list(self.decode.agent._pulling._jobs.values())
        return sum(leg.load.delivered for job in jobs for leg in job.legs if leg.load is not None)

    def assert_idle(self) -> None:
        """Nothing is held on either node."""
        faults.disarm()
        assert_clean(self.prefill, self.decode)
        for node in (self.prefill, self.decode):
            if isinstance(node, StagedNode):
                for ring in (node.staging.reads, node.staging.writes):
                    until(lambda ring=ring: ring.free == ring.slots, "every slot is free again")


@contextmanager
def ends(
    way: Way, sizes: tuple[int, int], heads: int = 2, head_dim: int = 8, pool: int = POOL, **more: float | str
) -> Iterator[Ends]:
    small = {"chunk_bytes": 64 * 1024, "staging_slots": 8}
    chosen = settings(transport=way.transport, **{**small, **more})
    made = [
        way.node(name, chosen, layouts=(layout(size, heads, head_dim),), seed=seed, pool_blocks=pool)
        for seed, (name, size) in enumerate(zip(("prefill", "decode"), sizes, strict=True), 1)
    ]
    with nodes(*made) as (prefill, decode):
        both = Ends(way, prefill, decode)
        yield both
        both.assert_idle()


def pairs() -> list[object]:
    """Every way with larger and with smaller blocks on the decode server."""
    found = []
    for each in [*WAYS, *STAGED]:
        way, marks = (each, ()) if isinstance(each, Way) else (each.values[0], each.marks)
        for sizes in SIZES:
            name = f"{way.transport}-{way.node.__name__}-p{sizes[0]}-d{sizes[1]}"
            found.append(pytest.param((way, sizes), id=name, marks=marks))
    return found


@pytest.fixture(scope="module", params=pairs())
def started(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ends(*request.param) as both:
        yield both


@pytest.fixture
def both(started: Ends) -> Iterator[Ends]:
    yield started
    started.assert_idle()


def test_load_when_block_sizes_differ_then_each_token_is_in_its_place_and_no_other_block_changed(both: Ends) -> None:
    p_size, d_size = both.sizes
    prefill, decode = both.prefill, both.decode
    rng = np.random.default_rng(1)
    # Within the first block, at the end of one, and behind it; the last ones with their beginning here already.
    for tokens, first in ((3, 0), (48, 0), (50, 0), (63, 0), (61, 1), (64, 2)):
        key = both.new_key()
        theirs = rng.permutation(POOL)[: -(-tokens // p_size)].tolist()
        own = rng.permutation(POOL)[: -(-tokens // d_size) - first].tolist()
        before = decode.blocks(range(POOL))
        prefill.stage(key, theirs, tokens=tokens)
        decode.load(prefill.source, key, own, tokens=tokens, first=first)
        done = decode.load_done()
        assert done.transport == both.way.transport
        assert done.bytes == 3 * len(own) * decode.layouts[0].block_bytes
        skipped = first * d_size
        assert np.array_equal(
            both.tokens(decode, own, tokens - skipped), both.tokens(prefill, theirs, tokens)[:, :, :, skipped:]
        )
        after = decode.blocks(range(POOL))
        after[:, own] = before[:, own]
        assert np.array_equal(after, before)
        assert prefill.lease_ended().outcome == "released"


def test_load_when_it_comes_first_then_each_block_arrives_once_its_tokens_are_computed(both: Ends) -> None:
    p_size, d_size = both.sizes
    prefill, decode, key = both.prefill, both.decode, both.new_key()
    tokens = 42
    theirs, own = list(range(20, 20 + -(-tokens // p_size))), list(range(40, 40 + -(-tokens // d_size)))
    decode.load(prefill.source, key, own, tokens=tokens)
    prefill.admit(key, theirs, tokens=tokens)
    for upto in range(1, len(theirs)):
        both.publish(key, upto)
        ready = upto * p_size // d_size
        until(lambda ready=ready: both.arrived() == 3 * ready, f"{ready} blocks of each layer")
    prefill.compute(key, len(theirs))
    decode.load_done()
    assert np.array_equal(both.tokens(decode, own, tokens), both.tokens(prefill, theirs, tokens))
    prefill.lease_ended()


def test_load_when_tokens_are_a_prefix_hit_of_the_prefill_server_then_blocks_that_are_whole_come_before_it_computes(
    both: Ends,
) -> None:
    p_size, d_size = both.sizes
    prefill, decode, key = both.prefill, both.decode, both.new_key()
    theirs, own = list(range(-(-50 // p_size))), list(range(5, 5 + -(-50 // d_size)))
    hit = 24 // p_size  # of 24 tokens there, or of 16
    prefill.admit(key, theirs, tokens=50, ready=hit)
    decode.load(prefill.source, key, own, tokens=50)
    whole = hit * p_size // d_size
    assert whole
    until(lambda: both.arrived() == 3 * whole, f"{whole} blocks of each layer")
    prefill.compute(key, len(theirs))
    decode.load_done()
    assert np.array_equal(both.tokens(decode, own, 50), both.tokens(prefill, theirs, 50))
    prefill.lease_ended()


def test_load_when_it_is_cancelled_in_its_middle_then_nothing_writes_its_blocks_afterwards(both: Ends) -> None:
    p_size, d_size = both.sizes
    prefill, decode, key, other = both.prefill, both.decode, both.new_key(), both.new_key()
    theirs, own = list(range(32 // p_size)), list(range(10, 10 + 32 // d_size))
    prefill.admit(key, theirs)
    both.publish(key, 16 // p_size)
    decode.load(prefill.source, key, own, tokens=32)
    until(lambda: both.arrived() == 3 * 16 // d_size, "what is ready")
    decode.agent.cancel_load(key, BatonError(ErrorCode.CANCELLED, "left"))
    assert decode.load_failed().error.code is ErrorCode.CANCELLED
    for layer in decode.memory["full"]:
        layer[own] = 77
    prefill.compute(key, len(theirs))
    assert prefill.lease_ended().outcome == "aborted"
    prefill.stage(other, theirs)
    decode.load(prefill.source, other, list(range(30, 30 + 32 // d_size)), tokens=32)
    decode.load_done()
    assert all((layer[own] == 77).all() for layer in decode.memory["full"])
    prefill.lease_ended()


def test_load_when_nothing_is_wanted_then_it_completes(both: Ends) -> None:
    p_size, d_size = both.sizes
    key = both.new_key()
    both.prefill.stage(key, list(range(16 // p_size)), tokens=16)
    both.decode.load(both.prefill.source, key, [], first=16 // d_size, tokens=16)
    assert both.decode.load_done().bytes == 0
    both.prefill.lease_ended()


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4)])
def test_load_when_neither_size_is_a_multiple_of_the_other_then_it_is_refused_with_both(sizes: tuple[int, int]) -> None:
    with ends(WAYS[0], sizes) as both:
        both.prefill.stage(KEY, [5, 6], tokens=8)
        both.decode.load(both.prefill.source, KEY, [1, 2], tokens=8)
        error = both.decode.load_failed().error
        assert error.code is ErrorCode.INCOMPATIBLE_PEER
        assert "multiple" in error.message
        theirs, own = error.metadata["group full"].split(" / ")
        assert f"block_size {sizes[1]}" in theirs and f"block_size {sizes[0]}" in own
        both.prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED, "over"))
        both.prefill.lease_ended()


@pytest.mark.parametrize("way", GRPC, ids=lambda way: way.node.__name__)
def test_load_when_a_block_is_larger_than_a_slot_of_the_prefill_server_then_it_comes_in_parts(way: Way) -> None:
    """128 tokens of 4 heads are 128 KiB."""
    with ends(way, (16, 128), heads=4, head_dim=64, staging_slots=1, pool=24) as both:
        prefill, decode = both.prefill, both.decode
        assert isinstance(prefill, StagedNode)
        assert prefill.staging.reads.slot_bytes < decode.layouts[0].block_bytes
        theirs = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 0, 11, 10, 12, 13]  # 240 tokens
        prefill.stage(KEY, theirs)
        decode.load(prefill.source, KEY, [5, 1], tokens=240)
        decode.load_done()
        assert np.array_equal(both.tokens(decode, [5, 1], 240), both.tokens(prefill, theirs, 240))
        prefill.lease_ended()


@pytest.mark.parametrize("way", IPC, ids=lambda way: way.node.__name__)
def test_load_when_a_notice_has_more_rows_than_have_room_in_a_slot_then_it_is_several_copies(way: Way) -> None:
    with ends(way, (4, 16), heads=4, pool=600) as both:
        prefill, decode = both.prefill, both.decode
        rng = np.random.default_rng(2)
        theirs, own = rng.permutation(600)[:560].tolist(), rng.permutation(600)[:140].tolist()
        rows = 2 * 4 * 4 * len(own)
        assert isinstance(decode, StagedNode) and rows > decode.staging.writes.slot_bytes // 16
        prefill.stage(KEY, theirs)
        decode.load(prefill.source, KEY, own)
        decode.load_done()
        assert np.array_equal(both.tokens(decode, own, 2240), both.tokens(prefill, theirs, 2240))
        prefill.lease_ended()


@pytest.mark.parametrize(
    ("sizes", "blocks", "sources", "good"),
    [
        ((4, 16), [0, 1], [1, 2, 3, 4, 5, 6, 7, 8], True),
        ((4, 16), [0, 1], [1, 2], False),
        ((4, 16), [2], [9, 10], True),  # 40 tokens: the last block of D has two of P
        ((4, 16), [2], [9, 10, 11, 12], False),
        ((4, 16), [1, 2], [5, 6, 7, 8, 9, 10], True),
        ((16, 4), [0, 1, 2, 3, 4], [1, 1, 1, 1, 2], True),
        ((16, 4), [0, 1, 2, 3, 4], [1, 2], False),
    ],
)
def test_notice_when_it_does_not_name_the_blocks_that_hold_the_tokens_then_it_is_a_breach(
    sizes: tuple[int, int], blocks: list[int], sources: list[int], good: bool
) -> None:
    made = layout(sizes[1])
    wanted = WantedHere(
        made, 0, list(range(-(-40 // sizes[1]))), made.block_bytes, ((0, made.block_bytes),),
        positions=Positions(*sizes, 40),
    )  # fmt: skip
    load = Load((wanted,), "off", 5.0, 5.0, transport="ipc")
    load.on_started(pb.Started(generation=1))
    piece = Piece("full", range(1), blocks, made.block_bytes, sources=sources)
    if good:
        assert load.expect(piece, 0) is wanted
        return
    with pytest.raises(BatonError) as caught:
        load.expect(piece, 0)
    assert caught.value.breach == "missing_result"
    assert "hold the tokens" in caught.value.metadata["breach"]
