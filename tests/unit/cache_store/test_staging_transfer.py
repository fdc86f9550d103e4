"""KV that only copies reach goes from one agent to another: through staging rings, or out of the peer's memory (more
of which is in test_direct_reads.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cache_store.agent import CacheStoreAgent, GroupLayout, KvSourceRef, LeaseEnded
from cache_store.serving.sending import WINDOW
from rpc import faults
from rpc.errors import BatonError, ErrorCode
from tests.unit.cache_store import agents
from tests.unit.cache_store.agents import (
    LAYOUT,
    Node,
    key_of,
    nodes,
    prefill_result,
    settings,
    until,
)
from tests.unit.cache_store.staged import ENGINES, TRANSPORTS, FailingMark, HeldMark, Pair, StagedNode, make_pair

KEY = key_of(1)
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


@pytest.fixture(params=[(e, t) for e in ENGINES for t in TRANSPORTS], ids=lambda p: f"{p[0]}-{p[1]}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both engines, both transports."""
    engine, transport = request.param
    yield from make_pair(engine, transport)


@pytest.fixture
def threads() -> Iterator[Pair]:
    """Copies that can be held up, through the staging rings."""
    yield from make_pair("threads", "grpc")


# ---- the right bytes


def test_load_of_staged_kv_when_done_then_every_block_is_there_and_no_other_was_touched(pair: Pair) -> None:
    prefill, decode = pair
    before = decode.blocks(range(64))
    source, target = [9, 3, 4, 5, 30, 22, 60, 11, 40, 41, 50, 0], [1, 2, 8, 7, 6, 20, 21, 30, 31, 33, 35, 63]
    prefill.stage(KEY, source, tokens=46)
    decode.load(prefill.source, KEY, target, tokens=46)
    done = decode.load_done()
    assert done.bytes == 36 * LAYOUT.block_bytes and done.result == prefill_result()
    assert np.array_equal(decode.blocks(target), prefill.blocks(source))
    others = [block for block in range(64) if block not in target]
    assert np.array_equal(decode.blocks(others), before[:, others])
    assert prefill.lease_ended().outcome == "released"
    transport = decode.agent.transports[0]
    for side, node in (("sent", prefill), ("received", decode)):
        assert node.count("kv_transfer_bytes_total", direction=side, transport=transport) == done.bytes
    assert decode.observed("kv_transfer_seconds", outcome="ok", transport=transport) == [done.seconds]
    assert len(prefill.observed("kv_publish_seconds", transport=transport)) == LAYOUT.num_layers
    # That the lease stood is seen, and not asked.
    assert not prefill.count("kv_lease_renewals_total", source="open_load", result="ok")


def test_overlap_each_layer_arrives_before_the_next_is_published(pair: Pair) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1, 2])
    until(lambda: prefill.agent.stats().parked == 1, "the load came first and is parked")
    prefill.admit(KEY, [5, 6])
    for layer in range(LAYOUT.num_layers):
        prefill.agent.publish(KEY, "full", layer, 2)
        until(
            lambda layer=layer: np.array_equal(decode.memory["full"][layer][[1, 2]], prefill.blocks([5, 6])[layer]),
            f"layer {layer}",
        )
    assert decode.said == []
    prefill.agent.computed(KEY, prefill_result(), True)
    received = dict(decode.load_done().events)
    prefill.lease_ended()
    assert {f"layer_received:{layer}" for layer in range(LAYOUT.num_layers)} <= received.keys()


def test_prefix_hits_and_chunks_when_published_one_after_the_other_then_each_is_sent_at_once(pair: Pair) -> None:
    prefill, decode = pair
    source, target = [5, 6, 7, 8, 9, 10], [20, 21, 30, 31, 32, 2]
    decode.load(prefill.source, KEY, target)
    prefill.admit(KEY, source, ready=2)
    until(lambda: np.array_equal(decode.blocks(target[:2]), prefill.blocks(source[:2])), "the cached blocks")
    for upto in (3, 6):
        for layer in range(LAYOUT.num_layers):
            prefill.agent.publish(KEY, "full", layer, upto)
        until(
            lambda upto=upto: np.array_equal(decode.blocks(target[:upto]), prefill.blocks(source[:upto])),
            f"{upto} blocks",
        )
    prefill.agent.computed(KEY, prefill_result(), True)
    decode.load_done()
    prefill.lease_ended()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_groups_and_events_smaller_than_the_prompt_arrive_whole(engine: str, transport: str) -> None:
    large = GroupLayout.of("full", num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
    layouts = (large, agents.WINDOW)
    chosen = settings(transport=transport, chunk_bytes=1 << 16, staging_slots=3)
    with nodes(
        StagedNode("prefill", chosen, engine=engine, layouts=layouts, seed=1),
        StagedNode("decode", chosen, engine=engine, layouts=layouts, seed=2),
    ) as (prefill, decode):
        tokens = 40 * 16
        blocks = {"full": list(range(3, 43)), "window": [*range(63, -1, -1), *range(16)][:64]}
        tokens = min(tokens, 64 * agents.WINDOW.block_size)
        blocks["full"] = blocks["full"][: large.num_blocks(tokens)]
        target = {tag: ids[::-1] for tag, ids in blocks.items()}
        prefill.agent.admit(KEY, 1, tokens, blocks, 0)
        for tag, layout in (("full", large), ("window", agents.WINDOW)):
            for layer in range(layout.num_layers):
                prefill.agent.publish(KEY, tag, layer, len(blocks[tag]))
        prefill.agent.computed(KEY, prefill_result(), True)
        decode.agent.load(KEY, prefill.source, tokens, {tag: (0, ids) for tag, ids in target.items()}, 60.0)
        decode.load_done()
        for tag in blocks:
            assert np.array_equal(decode.blocks(target[tag], tag), prefill.blocks(blocks[tag], tag)), tag
        prefill.lease_ended()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_unequal_ranks_when_loaded_then_each_has_its_heads(
    engine: str, transport: str, prefill_tp: int, decode_tp: int
) -> None:
    def layout(tp: int) -> GroupLayout:
        return GroupLayout.of(
            "full", num_layers=2, num_kv_heads=4 // tp, head_dim=8, block_size=4, dtype="bfloat16", total_kv_heads=4
        )

    chosen = settings(transport=transport)
    prefills, decodes = (
        [
            StagedNode(name, chosen, engine=engine, layouts=(layout(tp),), seed=10 * tp + rank, tp_size=tp, rank=rank)
            for rank in range(tp)
        ]
        for name, tp in (("prefill", prefill_tp), ("decode", decode_tp))
    )
    source_ids, target_ids = [9, 3, 4, 5, 30, 22, 60, 11, 40], [1, 2, 8, 7, 6, 20, 21, 30, 31]
    with nodes(*prefills, *decodes):
        source = KvSourceRef("prefill", tuple(node.address for node in prefills), prefill_tp)
        for node in prefills:
            node.stage(KEY, source_ids)
        for node in decodes:
            node.load(source, KEY, target_ids, tokens=36)
        for node in decodes:
            node.load_done()
        for node in prefills:
            node.lease_ended()

        def heads(node: StagedNode, ids: list[int]) -> np.ndarray:
            # [layers, blocks, K and V, heads, bytes of a head]
            return node.blocks(ids).reshape(2, len(ids), 2, node.layouts[0].num_kv_heads, -1)

        theirs = np.concatenate([heads(node, source_ids) for node in prefills], axis=3)
        assert np.array_equal(np.concatenate([heads(node, target_ids) for node in decodes], axis=3), theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_damaged_event_when_staged_then_it_is_found_before_it_is_written_and_can_be_reloaded(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache_store.serving.sending import Sender

    for prefill, decode in make_pair(engine, "grpc"):
        encode = Sender._encode

        def damaged(*arguments: Any, encode: Callable[..., bytes] = encode) -> bytes:
            message = encode(*arguments)
            return message[:-1] + bytes([message[-1] ^ 1])

        before = decode.blocks([1, 2])
        monkeypatch.setattr(Sender, "_encode", damaged)
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        failed = decode.load_failed()
        assert (failed.error.code, failed.retriable_here) == (ErrorCode.KV_CHECKSUM_MISMATCH, True)
        assert np.array_equal(decode.blocks([1, 2]), before)
        monkeypatch.undo()
        decode.load(prefill.source, KEY, [3, 4], reload=True)
        decode.load_done()
        assert np.array_equal(decode.blocks([3, 4]), prefill.blocks([5, 6]))
        prefill.lease_ended()


# ---- the computation


def test_publish_when_the_device_is_not_there_yet_then_nothing_is_read_before_it_is(pair: Pair) -> None:
    prefill, decode = pair
    mark = HeldMark()
    was = prefill.blocks([5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    prefill.admit(KEY, [5, 6])
    for layer in range(LAYOUT.num_layers):
        prefill.agent.publish(KEY, "full", layer, 2, mark)
    prefill.agent.computed(KEY, prefill_result(), True)  # the host may say so before the last mark is looked at
    until(lambda: prefill.agent.stats().readers == 1, "the load is open")
    prefill.admit(key_of(2), [9])
    until(lambda: prefill.agent._table.get(key_of(2)) is not None, "what was said until now has been heard")
    assert prefill.agent._table.get(KEY).published == 0  # type: ignore[union-attr]
    prefill.agent.fail(key_of(2), BatonError(ErrorCode.CANCELLED))
    prefill.lease_ended()
    for layer in prefill.memory["full"]:
        layer[[5, 6]] ^= 0xFF  # what the device computes
    mark.reached.set()
    decode.load_done()
    assert np.array_equal(decode.blocks([1, 2]), was ^ 0xFF)
    published = dict(prefill.lease_ended().events)
    assert published["layer_published:2"] <= published["computed"]


def test_marks_of_streams_when_the_computation_is_queued_then_publishing_waits_for_it() -> None:
    for prefill, decode in make_pair("streams", "grpc"):
        prefill.admit(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        for layer, content in enumerate(prefill.memory["full"]):
            prefill.device.compute(lambda content=content: content.__setitem__([5, 6], 0x5A))
            prefill.agent.publish(KEY, "full", layer, 2, prefill.agent.mark())
        prefill.agent.computed(KEY, prefill_result(), True)
        decode.load_done()
        assert (decode.blocks([1, 2]) == 0x5A).all()
        prefill.lease_ended()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_load_when_the_computation_still_uses_its_blocks_then_they_are_written_after_it(transport: str) -> None:
    for prefill, decode in make_pair("streams", transport):
        prefill.stage(KEY, [5, 6])
        was, seen = decode.blocks([1, 2]), []
        decode.device.compute(lambda seen=seen, decode=decode: seen.append(decode.blocks([1, 2])))
        decode.load(prefill.source, KEY, [1, 2])
        decode.load_done()
        assert np.array_equal(seen[0], was)
        assert np.array_equal(decode.blocks([1, 2]), prefill.blocks([5, 6]))
        prefill.lease_ended()


def test_publish_when_the_device_fails_then_the_request_ends_with_a_typed_error(pair: Pair) -> None:
    prefill, decode = pair
    decode.load(prefill.source, KEY, [1])
    prefill.admit(KEY, [5])
    prefill.agent.publish(KEY, "full", 0, 1, FailingMark())
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.CACHE_STORE_STORE_FAILED
    ended = prefill.lease_ended()
    assert ended.outcome == "aborted" and ended.error is not None and ended.error.stage == "publish"


def test_publish_and_load_when_every_slot_is_taken_then_they_return_and_the_transfer_waits(threads: Pair) -> None:
    prefill, decode = threads
    for node in threads:
        node.gate.close()
    count = prefill.staging.reads.slots + 8
    returned = threading.Event()

    def engine() -> None:
        for number in range(count):
            prefill.admit(key_of(number), [number])
            prefill.compute(key_of(number), 1)
            decode.load(prefill.source, key_of(number), [number])
        returned.set()

    caller = threading.Thread(target=engine)
    caller.start()
    assert returned.wait(WAIT_S), "the engine's calls wait for copies"
    caller.join()
    until(lambda: prefill.staging.reads.free == 0, "the ring is full")
    assert decode.said == []
    for node in threads:
        node.gate.open()
    for _ in range(count):
        decode.load_done()
        prefill.lease_ended()
    assert np.array_equal(decode.blocks(range(count)), prefill.blocks(range(count)))


def test_full_agent_when_marks_are_not_reached_then_the_request_fails_in_place_of_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cache_store.agent.MAX_WAITING_PER_SLOT", 1)
    for prefill, _ in make_pair("threads", "grpc", queue_size=8):
        mark = HeldMark()
        prefill.admit(KEY, [5])
        for _number in range(10):
            prefill.agent.publish(KEY, "full", 0, 1, mark)
        ended = prefill.lease_ended()
        assert ended.error is not None and ended.error.code is ErrorCode.CACHE_STORE_PUSH_ITEM_FAILED
        mark.reached.set()


# ---- blocks are not given back while a copy is under way


def test_lease_when_it_is_aborted_during_a_copy_then_its_blocks_are_held_until_the_copy_is_done(threads: Pair) -> None:
    prefill, decode = threads
    prefill.gate.close()
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    assert prefill.gate.reached.wait(WAIT_S)
    prefill.agent.fail(KEY, BatonError(ErrorCode.CANCELLED))
    until(lambda: prefill.agent._table.get(KEY).state == "ending", "the end is decided")  # type: ignore[union-attr]
    prefill.admit(key_of(2), [9])  # the agent goes on meanwhile
    prefill.agent.fail(key_of(2), BatonError(ErrorCode.CANCELLED))
    assert prefill.lease_ended().request_key == key_of(2)
    prefill.gate.open()
    assert prefill.lease_ended().request_key == KEY
    assert decode.load_failed().error.code is ErrorCode.CANCELLED


def test_lease_when_the_reader_goes_away_during_a_copy_then_its_blocks_are_held_until_the_copy_is_done(
    threads: Pair,
) -> None:
    prefill, decode = threads
    prefill.gate.close()
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    assert prefill.gate.reached.wait(WAIT_S)
    decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
    decode.load_failed()
    until(lambda: prefill.agent._table.get(KEY).error is not None, "the release has come")  # type: ignore[union-attr]
    assert prefill.agent.stats().readers == 1 and prefill.said == []
    prefill.gate.open()
    assert prefill.lease_ended().outcome == "aborted"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_load_when_it_is_cancelled_during_a_copy_then_it_ends_after_the_copy(transport: str) -> None:
    for prefill, decode in make_pair("threads", transport):
        decode.gate.close()
        prefill.stage(KEY, [5, 6])
        decode.load(prefill.source, KEY, [1, 2])
        assert decode.gate.reached.wait(WAIT_S)
        decode.agent.cancel_load(KEY, BatonError(ErrorCode.CANCELLED))
        decode.load(prefill.source, key_of(2), [9])  # the agent goes on meanwhile: this one waits for its lease
        until(lambda prefill=prefill: prefill.agent.stats().parked == 1, "the second load is parked")
        assert decode.said == []
        decode.gate.open()
        failed = decode.load_failed()
        assert (failed.request_key, failed.error.code) == (KEY, ErrorCode.CANCELLED)
        assert failed.foreign == (transport == "ipc")
        written = decode.blocks([1, 2]).copy()
        prefill.lease_ended()
        prefill.stage(key_of(2), [7])
        decode.load_done()
        prefill.lease_ended()
        # Nothing has written the first load's blocks since it ended.
        assert np.array_equal(decode.blocks([1, 2]), written)
        assert decode.observed("kv_quarantine_seconds", transport=transport)


def test_slow_reader_when_it_takes_nothing_then_it_holds_no_slot_and_others_are_served(threads: Pair) -> None:
    prefill, decode = threads
    # The receiving device stands still, so its streams are not read any further.
    decode.gate.close()
    keys = [key_of(number) for number in range(3)]
    for number, key in enumerate(keys):
        prefill.stage(key, [number * 4 + i for i in range(4)])
        decode.load(prefill.source, key, [number * 4 + i for i in range(4)])
    until(lambda: decode.staging.writes.free < decode.staging.writes.slots, "copies are held up")
    until(lambda: prefill.staging.reads.free == prefill.staging.reads.slots, "the sender holds no slot")
    decode.gate.open()
    for _ in keys:
        decode.load_done()
        prefill.lease_ended()


# ---- a copy fails


def test_copy_that_fails_when_sending_then_the_load_has_a_typed_error_and_can_be_repeated(threads: Pair) -> None:
    prefill, decode = threads
    prefill.copies.failure = OSError("bad memory \xff")  # type: ignore[union-attr]
    prefill.stage(KEY, [5, 6])
    decode.load(prefill.source, KEY, [1, 2])
    failed = decode.load_failed()
    assert (failed.error.code, failed.retriable_here) == (ErrorCode.CACHE_STORE_STORE_FAILED, True)
    assert "bad memory" not in failed.error.message
    prefill.copies.failure = None  # type: ignore[union-attr]
    decode.load(prefill.source, KEY, [3, 4], reload=True)
    decode.load_done()
    assert np.array_equal(decode.blocks([3, 4]), prefill.blocks([5, 6]))
    prefill.lease_ended()


@pytest.mark.invariant("RPC-16")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copy_that_fails_when_receiving_then_the_load_ends_at_once_with_a_typed_error(transport: str) -> None:
    for prefill, decode in make_pair("threads", transport):
        decode.copies.failure = OSError("bad memory")  # type: ignore[union-attr]
        decode.load(prefill.source, KEY, [1, 2])
        prefill.admit(KEY, [5, 6])
        prefill.agent.publish(KEY, "full", 0, 2)
        # The prefill goes on and sends nothing more: the failure itself ends the wait.
        failed = decode.load_failed()
        assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
        assert failed.error.metadata["error"] == "OSError"
        assert failed.retriable_here and failed.delivered == 0
        decode.agent.cancel_load(KEY, failed.error)
        assert prefill.lease_ended().outcome == "aborted"


def test_submission_that_fails_then_the_slot_is_given_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair

    def refuse(*_: object) -> None:
        raise RuntimeError("the device is gone")

    for name in ("write", "fetch"):
        monkeypatch.setattr(decode.copies, name, refuse)
    prefill.stage(KEY, [5])
    decode.load(prefill.source, KEY, [1])
    failed = decode.load_failed()
    assert failed.error.code is ErrorCode.CACHE_STORE_LOAD_UNKNOWN_ERROR
    monkeypatch.undo()
    decode.load(prefill.source, KEY, [2], reload=True)
    decode.load_done()
    prefill.lease_ended()


# ---- the end of an agent


def test_agent_when_it_closes_during_copies_then_it_waits_for_them_and_its_threads_end() -> None:
    chosen = settings(transport="grpc")
    prefill, decode = StagedNode("prefill", chosen, seed=1), StagedNode("decode", chosen, seed=2)
    prefill.gate.close()
    prefill.stage(KEY, [5])
    decode.load(prefill.source, KEY, [1])
    assert prefill.gate.reached.wait(WAIT_S)
    closing = threading.Thread(target=prefill.close)
    closing.start()
    decode.load_failed()
    assert not any(isinstance(event, LeaseEnded) for event in prefill.said)
    prefill.gate.open()
    closing.join(WAIT_S)
    assert prefill.lease_ended().outcome == "aborted"
    decode.close()

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]

    until(lambda: not left(), f"its threads have ended, of which there are {left()}")


def test_agent_with_a_pool_in_host_memory_has_no_staging_and_no_marks() -> None:
    with nodes(Node("plain")) as (plain,):
        agent: CacheStoreAgent = plain.agent
        assert (agent.mark(), agent.on_device, agent.transports) == (None, False, ("ipc", "tcp", "grpc"))
    assert WINDOW >= 2
