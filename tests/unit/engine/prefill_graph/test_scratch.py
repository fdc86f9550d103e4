"""Invariant 19 of docs/cuda_graphs.md: scratch blocks are found by tag, stand outside the ledger, and return once."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.kv_cache.cache import KvCache
from engine.messages import KvGroupInfo
from engine.runner.prefill_graph.scratch import ScratchBlocks, scratch_blocks

SIZES = {"full": 16, "window": 4, "draft": 64}
BUCKET = 70


def cache(order=tuple(SIZES), spare=None, num_blocks=20) -> KvCache:
    groups = [KvGroupInfo(tag, 1, 1, 8, SIZES[tag], "float32") for tag in order]
    return KvCache(groups, num_blocks, True, scratch_blocks(groups, BUCKET) if spare is None else spare)


@pytest.mark.parametrize("order", list(itertools.permutations(SIZES)))
def test_scratch_when_groups_come_in_any_order_then_each_tag_has_its_own_blocks(order):
    kv = cache(order)
    scratch = ScratchBlocks(kv, BUCKET)
    for tag, size in SIZES.items():
        blocks = scratch.of(tag)
        assert len(blocks) == -(-BUCKET // size)
        assert len(set(blocks)) == len(blocks)
        assert min(blocks) > kv.num_blocks  # neither block 0 nor one that a request can get


def test_scratch_when_it_is_reserved_then_total_and_counters_are_untouched():
    kv = cache()
    before = {ledger.group: ledger for ledger in kv.ledgers()}
    scratch = ScratchBlocks(kv, BUCKET)
    for ledger in kv.ledgers():
        old = before[ledger.group]
        assert (ledger.total, ledger.free, ledger.cached) == (old.total, old.free, old.cached) == (20, 20, 0)
        assert old.reserved == 1
        assert ledger.reserved == 1 + len(scratch.of(ledger.group))
    assert kv.take_events() == []
    assert (kv.evicted_blocks, kv.flushed_blocks, kv.releases) == (0, 0, 0)


def test_scratch_when_requests_take_every_block_then_they_never_get_one_of_it():
    kv = cache()
    scratch = ScratchBlocks(kv, BUCKET)
    tokens = list(range(4 * 20))  # all blocks of the group with the smallest ones
    allocation = kv.acquire(tokens, kv.chains(), max_hit=0)
    assert allocation is not None
    assert kv.acquire([1], kv.chains(), max_hit=0) is None
    for tag in SIZES:
        assert not set(allocation.table(tag)) & set(scratch.of(tag))
    kv.commit(allocation, tokens, len(tokens))
    kv.free(allocation)
    kv.flush()
    assert kv.ledgers()[0].reserved == 1 + len(scratch.of("full"))


def test_scratch_when_released_then_its_ids_return_once():
    kv = cache()
    scratch = ScratchBlocks(kv, BUCKET)
    held = {tag: list(scratch.of(tag)) for tag in SIZES}
    with pytest.raises(ValueError, match="spare"):
        ScratchBlocks(kv, BUCKET)
    scratch.release()
    assert {ledger.reserved for ledger in kv.ledgers()} == {1}
    scratch.release()
    assert {ledger.reserved for ledger in kv.ledgers()} == {1}
    again = ScratchBlocks(kv, BUCKET)
    assert {tag: again.of(tag) for tag in SIZES} == held
    with pytest.raises(RuntimeError, match="released"):
        scratch.of("full")


def test_scratch_when_a_group_has_too_little_then_nothing_is_held():
    spare = dict(scratch_blocks(cache().groups, BUCKET))
    spare["window"] -= 1
    for seed in range(3):
        order = list(SIZES)
        random.Random(seed).shuffle(order)
        kv = cache(tuple(order), spare)
        with pytest.raises(ValueError, match="window"):
            ScratchBlocks(kv, BUCKET)
        assert {ledger.reserved for ledger in kv.ledgers()} == {1}


def test_scratch_when_a_tag_is_unknown_then_it_fails_at_once():
    kv = cache()
    with pytest.raises(ValueError, match=r"nothing.*full"):
        kv.reserve("nothing", 1)
    with pytest.raises(KeyError, match="nothing"):
        ScratchBlocks(kv, BUCKET).of("nothing")


def test_reserved_blocks_when_given_back_wrongly_then_it_fails_and_nothing_changes():
    kv = cache()
    blocks = kv.reserve("full", 2)
    for wrong in ([1], [blocks[0], blocks[0]], [blocks[0], 999]):
        with pytest.raises(ValueError, match="not reserved"):
            kv.unreserve("full", wrong)
    assert kv.ledgers()[0].reserved == 3
    kv.unreserve("full", blocks)
    assert kv.ledgers()[0].reserved == 1
