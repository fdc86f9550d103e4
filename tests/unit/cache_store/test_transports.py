"""What every transport does: the same tests for each of them, over real agents and sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from cache_store.agent import GroupLayout
from cache_store.transports import ONE_SIDED
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store.agents import LAYOUT, POOL_BLOCKS, Node, assert_clean, key_of, nodes, settings, until
from tests.unit.cache_store.shared import SharedNode, needs_nixl
from tests.unit.cache_store.staged import StagedNode

WIDE = GroupLayout.of("full", num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")


@dataclass(frozen=True)
class Way:
    """A transport between two nodes of one kind."""

    transport: str
    node: type[Node]

    @contextmanager
    def pair(self, layout: GroupLayout = LAYOUT, **more: float | str) -> Iterator[tuple[Node, Node]]:
        """A prefill and a decode node; at the end nothing is held on either."""
        chosen = settings(transport=self.transport, **more)
        made = [
            self.node(name, chosen, layouts=(layout,), seed=seed) for seed, name in enumerate(("prefill", "decode"), 1)
        ]
        with nodes(*made) as (prefill, decode):
            yield prefill, decode
            faults.disarm()
            assert_clean(prefill, decode)


WAYS = [
    Way("grpc", Node),
    Way("ipc", SharedNode),
    Way("tcp", Node),
    Way("tcp", StagedNode),
    pytest.param(Way("nixl", SharedNode), marks=[needs_nixl, pytest.mark.extended]),
    pytest.param(Way("nixl", StagedNode), marks=[needs_nixl, pytest.mark.extended]),
]
Pairs = Callable[..., AbstractContextManager[tuple[Node, Node]]]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.transport}-{way.node.__name__}")
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def test_load_when_blocks_are_scattered_then_each_byte_is_in_its_place_and_no_other_changed(way: Way) -> None:
    with way.pair(WIDE) as (prefill, decode):
        rng = np.random.default_rng(1)
        for number, count in enumerate((1, 2, 7, 30)):
            theirs, own = rng.permutation(POOL_BLOCKS)[:count].tolist(), rng.permutation(POOL_BLOCKS)[:count].tolist()
            before = decode.blocks(range(POOL_BLOCKS))
            prefill.stage(key_of(number), theirs)
            decode.load(prefill.source, key_of(number), own)
            done = decode.load_done()
            assert done.transport == way.transport
            before[:, own] = prefill.blocks(theirs)
            assert np.array_equal(decode.blocks(range(POOL_BLOCKS)), before)
            assert done.bytes == count * WIDE.num_layers * WIDE.block_bytes
            assert prefill.lease_ended().outcome == "released"
        moved = (1 + 2 + 7 + 30) * WIDE.num_layers * WIDE.block_bytes
        for node, direction in ((prefill, "sent"), (decode, "received")):
            counted = node.count("kv_transfer_bytes_total", transport=way.transport, direction=direction)
            assert counted == node.count("kv_transfer_bytes_total", direction=direction) == moved


def test_load_when_it_comes_first_then_layers_arrive_while_they_are_computed(way: Way) -> None:
    with way.pair() as (prefill, decode):
        key, theirs, own = key_of(1), [9, 3, 4], [20, 21, 40]
        decode.load(prefill.source, key, own)
        prefill.admit(key, theirs)
        for upto in (1, 3):
            for layer in range(LAYOUT.num_layers):
                prefill.agent.publish(key, LAYOUT.tag, layer, upto)
        prefill.compute(key, 3)
        decode.load_done()
        assert np.array_equal(decode.blocks(own), prefill.blocks(theirs))
        prefill.lease_ended()


def test_load_when_only_the_end_of_the_prompt_is_wanted_then_the_rest_is_left_alone(way: Way) -> None:
    with way.pair() as (prefill, decode):
        prefill.stage(key_of(1), [5, 6, 7, 8])
        before = decode.blocks([1])
        decode.load(prefill.source, key_of(1), [2, 3], first=2)
        decode.load_done()
        assert np.array_equal(decode.blocks([2, 3]), prefill.blocks([7, 8]))
        assert np.array_equal(decode.blocks([1]), before)
        prefill.lease_ended()


def test_load_when_nothing_is_wanted_then_it_completes(way: Way) -> None:
    with way.pair() as (prefill, decode):
        prefill.stage(key_of(1), [5])
        decode.load(prefill.source, key_of(1), [], first=1, tokens=LAYOUT.block_size)
        assert decode.load_done().bytes == 0
        prefill.lease_ended()


def test_load_when_the_prefill_fails_then_its_cause_arrives_and_blocks_come_back(way: Way) -> None:
    with way.pair() as (prefill, decode):
        prefill.admit(key_of(1), [5, 6])
        prefill.agent.publish(key_of(1), LAYOUT.tag, 0, 1)
        decode.load(prefill.source, key_of(1), [1, 2])
        prefill.agent.fail(key_of(1), BatonError(ErrorCode.EXECUTION_EXCEPTION, "no"))
        assert decode.load_failed().error.code is ErrorCode.EXECUTION_EXCEPTION
        prefill.lease_ended()


def test_load_when_it_is_cancelled_in_its_middle_then_nothing_writes_its_blocks_afterwards(way: Way) -> None:
    with way.pair() as (prefill, decode):
        prefill.admit(key_of(1), [5, 6])
        prefill.agent.publish(key_of(1), LAYOUT.tag, 0, 2)
        decode.load(prefill.source, key_of(1), [1, 2])
        decode.agent.cancel_load(key_of(1), BatonError(ErrorCode.CANCELLED, "left"))
        assert decode.load_failed().error.code is ErrorCode.CANCELLED
        marker = np.full_like(decode.memory["full"][0][1], 77)
        for layer in decode.memory["full"]:
            layer[[1, 2]] = marker
        prefill.compute(key_of(1), 2)
        assert prefill.lease_ended().outcome == "aborted"
        prefill.stage(key_of(2), [7])
        decode.load(prefill.source, key_of(2), [3])
        decode.load_done()
        assert all((layer[[1, 2]] == marker).all() for layer in decode.memory["full"])
        prefill.lease_ended()


def test_load_when_many_run_at_once_then_each_gets_its_own(way: Way) -> None:
    with way.pair(staging_slots=2) as (prefill, decode):  # whoever has one must not wait for another
        for number in range(30):
            prefill.stage(key_of(number), [2 * number, 2 * number + 1])
            decode.load(prefill.source, key_of(number), [63 - 2 * number, 62 - 2 * number])
        for _ in range(30):
            decode.load_done()
            prefill.lease_ended()
        for number in range(30):
            theirs, own = [2 * number, 2 * number + 1], [63 - 2 * number, 62 - 2 * number]
            assert np.array_equal(decode.blocks(own), prefill.blocks(theirs))


def test_load_when_the_peer_is_closed_in_its_middle_then_a_typed_error_and_the_next_engine_serves(way: Way) -> None:
    chosen = settings(transport=way.transport, connect_timeout_s=3.0)
    with nodes(way.node("decode", chosen, seed=2)) as (decode,):
        with nodes(way.node("prefill", chosen, seed=1)) as (prefill,):
            prefill.admit(key_of(1), [5, 6])
            prefill.agent.publish(key_of(1), LAYOUT.tag, 0, 2)
            decode.load(prefill.source, key_of(1), [1, 2])
            until(lambda: prefill.agent.stats().readers, "the load reads")
        assert decode.load_failed().error.code in (
            ErrorCode.SERVER_DRAINING,
            ErrorCode.CONNECTION_RESET_BY_PEER,
            ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED,
        )
        with nodes(way.node("prefill-2", chosen, seed=3)) as (fresh,):
            fresh.stage(key_of(2), [5])
            decode.load(fresh.source, key_of(2), [1])
            decode.load_done()
            assert np.array_equal(decode.blocks([1]), fresh.blocks([5]))
            fresh.lease_ended()
            assert_clean(fresh, decode)


# What goes wrong with a step of the transfer, and the code of a load whose blocks were ready; None: it does not fail.
FAULTS = [
    ("cache_store.send_event:drop,kind=pieces,times=1", ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT),
    ("cache_store.send_event:duplicate,kind=pieces,times=1", ErrorCode.READ_BUFFER_MISMATCH),
    ("cache_store.send_event:raise=CACHE_STORE_STORE_FAILED,kind=done,times=1", ErrorCode.CACHE_STORE_STORE_FAILED),
    ("cache_store.send_event:delay=0.05", None),
    ("cache_store.send_piece:drop,layer=1,block=1,times=1", ErrorCode.CACHE_STORE_LOAD_BUFFER_TIMEOUT),
    ("cache_store.read_event:delay=0.05", None),
    ("cache_store.read_event:drop,nth=1", ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),  # Started, which all others need
    ("cache_store.read_event:duplicate,nth=1", ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR),
    ("cache_store.load_open:raise=CACHE_STORE_STORE_FAILED,times=1", ErrorCode.CACHE_STORE_STORE_FAILED),
    ("cache_store.load_start:raise=CACHE_STORE_LOAD_CONNECT_FAILED,times=1", ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED),
    ("cache_store.queue:full,what=load,times=1", ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED),
    ("cache_store.piece_bytes:corrupt,times=1", ErrorCode.KV_CHECKSUM_MISMATCH),
]


def test_fault_when_it_hits_any_step_of_a_transfer_then_its_code_comes_and_a_reload_brings_every_byte(way: Way) -> None:
    with way.pair() as (prefill, decode):
        for number, (fault, code) in enumerate(FAULTS):
            key, theirs, own = key_of(number), [5, 9, 6], [1, 2, 3]
            faults.disarm()
            faults.arm(fault)
            prefill.stage(key, theirs)
            decode.load(prefill.source, key, own)
            if code is None or (code is ErrorCode.KV_CHECKSUM_MISMATCH and way.transport in ONE_SIDED):
                decode.load_done()
                assert faults.fired(fault.partition(":")[0]) or code is not None, fault
            else:
                failed = decode.load_failed()
                assert failed.error.code is code, fault
                if not failed.retriable_here:
                    assert prefill.lease_ended().outcome == "aborted", fault
                    continue
                own = [11, 12, 13]
                decode.load(prefill.source, key, own, reload=True)
                decode.load_done()
            assert np.array_equal(decode.blocks(own), prefill.blocks(theirs)), fault
            assert prefill.lease_ended().outcome == "released", fault
