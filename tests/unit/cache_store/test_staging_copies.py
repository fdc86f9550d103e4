"""Copies between a pool and its slots: the right bytes, on either engine, never before what they have to wait for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store.geometry.layout import GroupLayout
from cache_store.geometry.rows import Rows, block_rows
from cache_store.memory import shared_memory, stream_copies
from cache_store.memory.host_copies import HostCopyEngine
from cache_store.memory.shared_memory import MemoryFile
from cache_store.memory.staging import MemoryUnavailable
from cache_store.memory.stream_copies import StreamCopyEngine
from protos import cache_store_pb2 as pb
from tests.unit.cache_store.late_device import LateDevice
from tests.unit.cache_store.staged import ENGINES, slot_of

LAYOUT = GroupLayout.of("full", num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")
BLOCKS = 48
NEIGHBOURS = [5, 6, 7, 8, 30, 31]
SCATTERED = [40, 3, 11, 2, 29, 17, 8, 31, 22, 5, 0]
assert len(SCATTERED) > stream_copies.DIRECT_RUNS


def memory(seed: int) -> list[np.ndarray]:
    return [
        np.random.default_rng(seed + layer).integers(0, 256, (BLOCKS, LAYOUT.block_bytes), np.uint8)
        for layer in range(LAYOUT.num_layers)
    ]


def share(layer: int, ids: list[int], count: int = 1, index: int = 0) -> Rows:
    return block_rows("full", layer, ids, LAYOUT.block_bytes // count, count, index)


def make(kind: str, layers: list[np.ndarray]) -> HostCopyEngine | StreamCopyEngine:
    if kind == "threads":
        return HostCopyEngine([LAYOUT], {"full": layers})
    device = LateDevice()
    return StreamCopyEngine(device, {("full", i): torch.from_numpy(layer) for i, layer in enumerate(layers)})


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("ids", [NEIGHBOURS, SCATTERED, [7], []], ids=["neighbours", "scattered", "one", "none"])
@pytest.mark.parametrize(("count", "index"), [(1, 0), (2, 1), (4, 2)])
def test_read_then_write_when_done_then_the_share_of_the_blocks_is_at_its_places_and_nothing_else(
    kind: str, ids: list[int], count: int, index: int
) -> None:
    layers, other = memory(1), memory(5)
    before = [layer.copy() for layer in other]
    source, target = make(kind, layers), make(kind, other)
    out, into = slot_of(source, 8192), slot_of(target, 8192)
    source.read(share(1, ids, count, index), out).wait()
    places = [BLOCKS - 1 - block for block in ids]
    into.view[:] = out.view
    target.write(into, share(1, places, count, index)).wait()
    for start, stop in LAYOUT.partition_ranges(count, index):
        before[1][places, start:stop] = layers[1][ids, start:stop]
    for now, expected in zip(other, before, strict=True):
        assert np.array_equal(now, expected)
    source.close()
    target.close()


@pytest.mark.parametrize("unit", [1, 2, 4, 12, 256])
def test_rows_of_any_size_when_scattered_are_moved_whole(unit: int) -> None:
    layer = np.random.default_rng(unit).integers(0, 256, 64 * unit, np.uint8)
    other = np.zeros(64 * unit, np.uint8)
    source, target = (StreamCopyEngine(LateDevice(), {("full", 0): torch.from_numpy(each)}) for each in (layer, other))
    numbers = list(range(1, 64, 5))
    out, into = slot_of(source, 1 << 16), slot_of(target, 1 << 16)
    source.read(Rows("full", 0, unit, numbers), out).wait()
    into.view[:] = out.view
    target.write(into, Rows("full", 0, unit, numbers)).wait()
    expected = np.zeros((64, unit), np.uint8)
    expected[numbers] = layer.reshape(64, unit)[numbers]
    assert np.array_equal(other.reshape(64, unit), expected)


def test_copies_when_rows_are_few_or_scattered_then_they_are_copied_or_gathered() -> None:
    engine = make("streams", memory(1))
    assert isinstance(engine, StreamCopyEngine)
    device = engine._device
    assert isinstance(device, LateDevice)
    slot = slot_of(engine, 8192)
    engine.read(share(0, NEIGHBOURS), slot)
    assert [what for _, what in device.log] == ["copy"] * 2
    device.log.clear()
    engine.read(share(0, SCATTERED), slot)
    assert [what for _, what in device.log] == ["copy", "gather", "copy"]  # numbers, rows, result
    device.log.clear()
    engine.write(slot, share(0, SCATTERED))
    assert [what for _, what in device.log] == ["copy", "copy", "scatter"]


def test_rows_when_a_slots_list_has_no_room_for_them_then_they_are_copied_one_by_one() -> None:
    layers = memory(1)
    engine = make("streams", layers)
    slot = slot_of(engine, 2048)  # room for 8 numbers
    engine.read(Rows("full", 0, 32, [1, 5, 3, 7, 40, 50, 60, 70, 80, 90]), slot).wait()
    expected = layers[0].reshape(-1, 32)[[1, 5, 3, 7, 40, 50, 60, 70, 80, 90]]
    assert np.array_equal(np.frombuffer(slot.view, np.uint8)[:320].reshape(-1, 32), expected)


# ---- order


@pytest.mark.parametrize("ids", [NEIGHBOURS, SCATTERED], ids=["direct", "scatter"])
def test_g3_write_when_the_computation_still_uses_the_blocks_then_it_comes_after_it(ids: list[int]) -> None:
    layers = memory(1)
    engine = make("streams", layers)
    assert isinstance(engine, StreamCopyEngine) and isinstance(engine._device, LateDevice)
    seen: list[np.ndarray] = []
    was = layers[0][ids].copy()
    engine._device.compute(lambda: seen.append(layers[0][ids].copy()))
    slot = slot_of(engine, 8192)
    slot.view[:] = bytes(8192)
    ticket = engine.write(slot, share(0, ids), after=engine.mark())
    assert seen == []  # nothing waits for the computation on the caller's thread
    ticket.wait()
    assert np.array_equal(seen[0], was) and not layers[0][ids].any()
    names = [(stream, what) for stream, what in engine._device.log if stream == "in"]
    assert names[0] == ("in", "wait compute")  # before the first copy


def test_g3_read_when_the_mark_of_the_computation_was_waited_for_then_it_sees_what_was_computed() -> None:
    layers = memory(1)
    engine = make("streams", layers)
    assert isinstance(engine, StreamCopyEngine) and isinstance(engine._device, LateDevice)
    computed = np.random.default_rng(9).integers(0, 256, LAYOUT.block_bytes, np.uint8)
    engine._device.compute(lambda: layers[0].__setitem__(4, computed))
    mark = engine.mark()
    slot = slot_of(engine, 8192)
    engine.read(share(0, [4]), slot).wait()
    assert not np.array_equal(np.frombuffer(slot.view, np.uint8)[: LAYOUT.block_bytes], computed)  # the double bites
    mark.wait()
    engine.read(share(0, [4]), slot).wait()
    assert np.array_equal(np.frombuffer(slot.view, np.uint8)[: LAYOUT.block_bytes], computed)


@pytest.mark.parametrize("kind", ENGINES)
def test_copies_of_one_direction_are_done_in_the_order_of_their_submission(kind: str) -> None:
    layers = memory(1)
    engine = make(kind, layers)
    slots = engine.allocate(4, 8192)
    for value, slot in enumerate(slots):
        slot.view[:] = bytes([value]) * 8192
        last = engine.write(slot, share(0, SCATTERED[value:]))
    last.wait()
    for value in range(3):
        assert (layers[0][SCATTERED[value]] == value).all()
    assert (layers[0][SCATTERED[3:]] == 3).all()
    engine.close()


# ---- memory of a peer


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("ids", [NEIGHBOURS, SCATTERED], ids=["neighbours", "scattered"])
@pytest.mark.parametrize(("theirs", "own"), [((1, 0), (1, 0)), ((2, 1), (1, 0)), ((1, 0), (4, 3))])
def test_fetch_when_done_then_the_peers_rows_are_here(
    monkeypatch: pytest.MonkeyPatch, kind: str, ids: list[int], theirs: tuple[int, int], own: tuple[int, int]
) -> None:
    monkeypatch.setattr(stream_copies, "FETCH_STAGE_BYTES", 3 * LAYOUT.block_bytes)  # several batches
    files = [MemoryFile(BLOCKS * LAYOUT.block_bytes) for _ in range(LAYOUT.num_layers)]
    views = [np.frombuffer(file.view, np.uint8).reshape(BLOCKS, -1) for file in files]
    for view, content in zip(views, memory(1), strict=True):
        view[:] = content
    here = memory(5)
    # A share of the peer's heads is all the heads here, or the other way round.
    piece = LAYOUT.block_bytes // max(theirs[0], own[0])
    source: HostCopyEngine | StreamCopyEngine
    source = HostCopyEngine([LAYOUT], {"full": views}, {"full": files}) if kind == "threads" else make(kind, views)
    target = make(kind, here)
    peer = target.open(source.share())
    places = list(range(len(ids)))
    halves = max(theirs[0], own[0]) > 1
    rows = block_rows("full", 1, ids, piece, *theirs, halves=halves)
    to = block_rows("full", 1, places, piece, *own, halves=halves)
    assert rows.unit_bytes == to.unit_bytes
    target.fetch(peer, rows, to, slot_of(target, 4096)).wait()
    their_rows = views[1].reshape(-1, rows.unit_bytes)[list(rows.numbers)]
    assert np.array_equal(here[1].reshape(-1, to.unit_bytes)[list(to.numbers)], their_rows)
    with pytest.raises(IndexError, match="outside"):
        target.fetch(peer, Rows("full", 0, LAYOUT.block_bytes, [BLOCKS]), to, slot_of(target, 4096))
    peer.close()
    source.close()
    target.close()


CHILD = """
import sys
import threading
from cache_store.memory.host_copies import HostCopyEngine
from cache_store.memory.shared_memory import MemoryFile
from cache_store.geometry.layout import GroupLayout
layout = GroupLayout.of("full", num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="bfloat16")
file = MemoryFile(4 * layout.block_bytes)
file.view[:] = bytes(range(layout.block_bytes)) * 4
engine = HostCopyEngine([layout], {"full": [file.view]}, {"full": [file]})
print(engine.share().SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


def test_memory_of_another_process_is_read_and_can_not_be_opened_after_its_end() -> None:
    layout = GroupLayout.of("full", num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="bfloat16")
    own = bytearray(4 * layout.block_bytes)
    engine = HostCopyEngine([layout], {"full": [own]})
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        shared = pb.SharedPool.FromString(bytes.fromhex(child.stdout.readline().strip()))
        peer = engine.open(shared)
        rows = block_rows("full", 0, [2, 3], layout.block_bytes)
        engine.fetch(peer, rows, block_rows("full", 0, [0, 1], layout.block_bytes), slot_of(engine)).wait()
        assert own[: 2 * layout.block_bytes] == bytes(range(layout.block_bytes)) * 2
        child.stdin.close()
        child.wait(30)
    # What is mapped stays readable; nothing new can be opened.
    engine.fetch(peer, rows, block_rows("full", 0, [2, 3], layout.block_bytes), slot_of(engine)).wait()
    peer.close()
    with pytest.raises(MemoryUnavailable):
        engine.open(shared)
    engine.close()


def test_memory_file_when_the_descriptor_is_another_file_by_now_then_it_is_refused(tmp_path: Path) -> None:
    file = MemoryFile(64)
    handle = file.handle
    file.view.release()
    pid, fd, token = handle.decode().split(":")
    other = MemoryFile(64)
    stale = f"{pid}:{other.handle.decode().split(':')[1]}:{token}".encode()
    plain = f"{pid}:{other.descriptor}"  # a file of its own, but not by a name that says which
    for wrong in (stale, b"", b"x", f"{pid}:99999:{token}".encode(), f"{plain}:".encode(), f"{plain}:baton-".encode()):
        with pytest.raises(MemoryUnavailable):
            shared_memory._map_file(wrong, 0, 64)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(MemoryUnavailable):  # and not a wait for somebody who writes to it
        shared_memory._map_file(f"{pid}:{pipe}:{token}".encode(), 0, 64)
    os.close(pipe)
    with pytest.raises(MemoryUnavailable, match="smaller"):
        shared_memory._map_file(other.handle, 32, 64)
    gc.collect()
    assert fd


def test_engine_without_files_shares_nothing_and_opens_no_other_kind() -> None:
    engine = HostCopyEngine([LAYOUT], {"full": memory(1)})
    assert not engine.shareable
    with pytest.raises(MemoryUnavailable):
        engine.share()
    with pytest.raises(MemoryUnavailable, match="kind"):
        engine.open(pb.SharedPool(kind="cuda"))
    engine.close()


def test_copies_of_scattered_rows_when_two_threads_submit_them_then_neither_gets_the_others_bytes() -> None:
    layers = memory(1)
    engine = make("streams", layers)
    assert isinstance(engine, StreamCopyEngine)
    one, other = slot_of(engine, 8192), slot_of(engine, 8192)
    first, second = share(0, SCATTERED), share(1, SCATTERED[::-1])
    stream = engine._out.stream
    upload, threads = stream.copy, []  # type: ignore[attr-defined]
    done = threading.Event()

    def between(target: torch.Tensor, source: torch.Tensor) -> None:
        """The other thread comes when the first one has queued a part of its copy."""
        upload(target, source)
        if not threads:
            threads.append(threading.Thread(target=lambda: (engine.read(second, other), done.set())))
            threads[0].start()
            done.wait(0.2)

    stream.copy = between  # type: ignore[method-assign]
    engine.read(first, one).wait()
    assert done.wait(10)
    threads[0].join(10)
    engine.read(first, slot_of(engine, 8192)).wait()  # and everything before it
    for slot, layer, numbers in ((one, 0, SCATTERED), (other, 1, SCATTERED[::-1])):
        expected = b"".join(layers[layer][number].tobytes() for number in numbers)
        assert bytes(slot.view[: len(expected)]) == expected
