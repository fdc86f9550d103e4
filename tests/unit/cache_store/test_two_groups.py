"""References that are wrong in one of two cache groups: refused, counted, and not a byte of either group is sent."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from protos import cache_store_pb2 as pb
from protos import cache_store_pb2_grpc as pb_grpc
from rpc.errors import BatonError, ErrorCode
from rpc.status import from_rpc_error
from tests.unit.cache_store.agents import LAYOUT, WINDOW, Node, assert_clean, key_of, nodes, prefill_result

LAYOUTS = (LAYOUT, WINDOW)
TOKENS = 20
IDS = {"full": [9, 8, 7, 6, 5], "window": [9, 8, 7]}
KEY = key_of(1)
LIMIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    with nodes(Node("prefill", layouts=LAYOUTS, seed=1), Node("decode", layouts=LAYOUTS, seed=2)) as (prefill, decode):
        yield prefill, decode
        assert_clean(prefill, decode)


def stage(prefill: Node, key: str, generation: int) -> None:
    prefill.agent.admit(key, generation, TOKENS, IDS, 0)
    for layout in LAYOUTS:
        for layer in range(layout.num_layers):
            prefill.agent.publish(key, layout.tag, layer, len(IDS[layout.tag]))
    prefill.agent.computed(key, prefill_result(), True)


def load(decode: Node, prefill: Node, key: str, *, blocks: dict[str, int], tokens: int = TOKENS) -> None:
    wanted = {tag: (0, list(range(count))) for tag, count in blocks.items()}
    decode.agent.load(key, prefill.source, tokens, wanted, 30)


WHOLE = {tag: len(ids) for tag, ids in IDS.items()}


def raw_load(prefill: Node, key: str, *, generation: int | None = None, beyond: str = "") -> BatonError | None:
    """How a load of everything ends; `beyond`: the group of which a block too many is wanted. No event comes before a
    refusal."""
    wanted = [
        pb.WantedBlocks(
            group=layout.tag, block_size=layout.block_size, first_block=0,
            num_blocks=WHOLE[layout.tag] + (layout.tag == beyond), block_bytes=layout.block_bytes,
            num_layers=layout.num_layers, partition_count=1, partition_id=0,
        )
        for layout in LAYOUTS
    ]  # fmt: skip
    request = pb.LoadRequest(
        reference=pb.KvReference(engine_id="prefill", request_key=key, generation=generation), wanted=wanted,
        prompt_tokens=TOKENS, checksum="all", chunk_bytes=1 << 20, reader=pb.ReaderRank(rank=0, tp_size=1),
    )  # fmt: skip
    events: list[pb.LoadEvent] = []
    with grpc.insecure_channel(prefill.address) as channel:
        try:
            events.extend(pb_grpc.CacheStoreStub(channel).Load(request, timeout=LIMIT_S))
        except grpc.RpcError as failure:
            assert events == []
            return from_rpc_error(failure, leg="cache_store", deadline_passed=False, was_ready=True)
    assert events[-1].done.pieces == sum(WHOLE[layout.tag] * layout.num_layers for layout in LAYOUTS)
    return None


def is_stale(node: Node, error: BatonError | None, kind: str) -> None:
    assert error is not None and error.code is ErrorCode.KV_STALE_REFERENCE
    assert node.count("kv_stale_references_total", kind=kind) == 1
    assert node.count("kv_transfer_failures_total", reason="KV_STALE_REFERENCE") == 1


@pytest.mark.parametrize("group", ["full", "window"])
def test_k2_block_beyond_the_request_in_one_of_two_groups_then_8602_and_nothing_is_taken(
    pair: tuple[Node, Node], group: str
) -> None:
    prefill, _ = pair
    stage(prefill, KEY, 1)
    is_stale(prefill, raw_load(prefill, KEY, beyond=group), "out_of_range")
    assert raw_load(prefill, KEY) is None
    prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
    prefill.lease_ended()


def test_k2_reference_to_two_groups_when_it_was_loaded_and_released_then_8602(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    stage(prefill, KEY, 1)
    load(decode, prefill, KEY, blocks=WHOLE)
    decode.load_done()
    prefill.lease_ended()
    is_stale(prefill, raw_load(prefill, KEY, generation=1), "reused")


def test_k2_reference_to_two_groups_when_their_blocks_hold_another_prompt_then_8602(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    stage(prefill, KEY, 1)
    prefill.agent.fail(KEY, BatonError(ErrorCode.KV_LEASE_EXPIRED))
    prefill.lease_ended()
    other = key_of(2)
    stage(prefill, other, 2)  # in the same blocks
    is_stale(prefill, raw_load(prefill, other, generation=1), "reused")
    load(decode, prefill, other, blocks=WHOLE)
    decode.load_done()
    prefill.lease_ended()


def test_k2_load_through_d_of_two_groups_when_the_prompt_is_another_then_it_fails_and_is_counted(
    pair: tuple[Node, Node],
) -> None:
    prefill, decode = pair
    stage(prefill, KEY, 1)
    load(decode, prefill, KEY, blocks={"full": 6, "window": 3}, tokens=24)
    failed = decode.load_failed()
    is_stale(decode, failed.error, "out_of_range")
    assert failed.delivered == 0
    decode.agent.cancel_load(KEY, failed.error)
    prefill.agent.fail(KEY, failed.error)
    prefill.lease_ended()
