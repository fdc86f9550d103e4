"""KV to and from a CUDA device: exact bytes, beside the computation, without a wait of the engine's thread."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_store.agent import GroupLayout, KvSourceRef
from cache_store.geometry.rows import block_rows
from cache_store.memory.cuda_pool import CudaKvPool, RowKernels
from cache_store.memory.staging import MemoryUnavailable
from kernels import block_copy
from rpc.errors import ErrorCode
from tests.unit.cache_store.agents import Node, key_of, nodes, prefill_result, settings, until
from tests.unit.engine.prefill_graph.graph_runners import model_folder
from tests.unit.engine.real_engine import RealEngine, pair, run_until, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

needs_queued_launches = pytest.mark.skipif(
    os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", reason="looks at launches that return at once"
)

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = GroupLayout.of("full", num_layers=4, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16")
BLOCKS = 96
NEIGHBOURS = list(range(7, 31))
SCATTERED = [(i * 29 + 3) % BLOCKS for i in range(24)]
KEY = key_of(1)


def kv_tensors(seed: int, layout: GroupLayout = LAYOUT, blocks: int = BLOCKS) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(layout.num_layers)
    ]


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).cpu().numpy()


class CudaNode(Node):
    """An agent over KV tensors on the device: `kv[layer]` is [blocks, 2, heads, tokens, head_dim]."""

    def __init__(self, engine_id: str, seed: int, **change: float | str) -> None:
        self.kv = kv_tensors(seed)
        pool = CudaKvPool([LAYOUT], {"full": self.kv}, block_copy)
        super().__init__(engine_id, settings(**change), layouts=(LAYOUT,), pool_blocks=1, pool=pool)  # type: ignore[arg-type]

    def blocks_of(self, ids: Sequence[int]) -> np.ndarray:
        return np.stack([bits(layer[list(ids)]) for layer in self.kv])


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def busy(milliseconds: float) -> None:
    """Keeps the current stream busy for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles, at 1.5 GHz or more


# ---- copies


@pytest.mark.parametrize("ids", [NEIGHBOURS, SCATTERED], ids=["neighbours", "scattered"])
@pytest.mark.parametrize(("count", "index"), [(1, 0), (4, 3)])
@pytest.mark.parametrize("kernels", [None, block_copy], ids=["torch", "triton"])
def test_copies_when_done_then_the_bytes_are_those_of_the_blocks(
    ids: list[int], count: int, index: int, kernels: RowKernels | None
) -> None:
    source, target = kv_tensors(1), kv_tensors(2)
    was = [layer.clone() for layer in target]
    out, into = (CudaKvPool([LAYOUT], {"full": layers}, kernels).copies for layers in (source, target))
    size = LAYOUT.block_bytes * len(ids)
    (slot,), (other,) = out.allocate(1, size), into.allocate(1, size)
    piece = LAYOUT.block_bytes // count
    with no_sync():
        reading = out.read(block_rows("full", 2, ids, piece, count, index), slot)
    reading.wait()
    heads = slice(index * 8 // count, (index + 1) * 8 // count)
    expected = bits(source[2][ids][:, :, heads].contiguous())
    got = np.frombuffer(slot.view, np.int16)[: expected.size].reshape(expected.shape)
    assert np.array_equal(got, expected)
    other.view[:] = slot.view
    places = [BLOCKS - 1 - block for block in ids]
    with no_sync():
        writing = into.write(other, block_rows("full", 2, places, piece, count, index), into.mark())
    writing.wait()
    was[2][places, :, heads] = source[2][ids][:, :, heads]
    for now, then in zip(target, was, strict=True):
        assert torch.equal(now, then)


@needs_queued_launches
def test_write_when_the_computation_uses_the_blocks_then_it_waits_for_it_on_the_device() -> None:
    layers = kv_tensors(3)
    was = layers[0][5].clone()
    engine = CudaKvPool([LAYOUT], {"full": layers}).copies
    (slot,) = engine.allocate(1, LAYOUT.block_bytes)
    slot.view[:] = bytes(LAYOUT.block_bytes)
    torch.cuda.synchronize()
    busy(50)
    seen = layers[0][5].clone()  # after the delay, on the stream of the computation
    began = time.perf_counter()
    ticket = engine.write(slot, block_rows("full", 0, [5], LAYOUT.block_bytes), engine.mark())
    submitted = time.perf_counter() - began
    ticket.wait()
    assert submitted < 0.02, "the submission waited for the device"
    assert torch.equal(seen, was) and not layers[0][5].any()


# ---- agents


@pytest.mark.parametrize("ids", [NEIGHBOURS, SCATTERED], ids=["neighbours", "scattered"])
def test_load_between_two_agents_when_done_then_the_blocks_are_equal_and_no_other_was_touched(ids: list[int]) -> None:
    with nodes(CudaNode("prefill", 1, transport="grpc"), CudaNode("decode", 2, transport="grpc")) as (p, d):
        assert isinstance(p, CudaNode) and isinstance(d, CudaNode)
        was = [layer.clone() for layer in d.kv]
        target = list(range(BLOCKS - 1, -1, -3))[: len(ids)]
        p.stage(KEY, ids)
        d.load(p.source, KEY, target)
        d.load_done()
        p.lease_ended()
        for mine, before, theirs in zip(d.kv, was, p.kv, strict=True):
            before[target] = theirs[ids]
            assert torch.equal(mine, before)


@needs_queued_launches
def test_publish_when_the_layers_are_only_queued_then_it_returns_at_once_and_the_transfer_waits_for_each() -> None:
    with nodes(CudaNode("prefill", 1, transport="grpc"), CudaNode("decode", 2, transport="grpc")) as (p, d):
        assert isinstance(p, CudaNode) and isinstance(d, CudaNode)
        # A first request: connections and handshakes are not what is looked at.
        p.stage(key_of(9), [1])
        d.load(p.source, key_of(9), [1])
        d.load_done()
        p.lease_ended()
        d.load(p.source, KEY, SCATTERED)
        p.admit(KEY, NEIGHBOURS)
        until(lambda: p.agent.stats().readers == 1, "the load is open")
        new = kv_tensors(5)
        numbers = torch.tensor(NEIGHBOURS, device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        with no_sync():
            for layer in range(LAYOUT.num_layers):
                busy(50)
                p.kv[layer].index_copy_(0, numbers, new[layer].index_select(0, numbers))
                p.agent.publish(KEY, "full", layer, len(NEIGHBOURS), p.agent.mark())
            queued = time.perf_counter() - began
            finished = torch.cuda.Event()
            finished.record()
            assert not finished.query(), "the device was done before anything could be seen"
        p.agent.computed(KEY, prefill_result(), True)
        done = d.load_done()
        computed = time.perf_counter() - began
        # Had each call waited for its layer, the device would have been done when the last one was queued.
        assert queued < computed / 2, (queued, computed)
        assert np.array_equal(d.blocks_of(SCATTERED), np.stack([bits(layer[NEIGHBOURS]) for layer in new]))
        times, published = dict(done.events), dict(p.lease_ended().events)
        for layer in range(LAYOUT.num_layers - 1):
            # Each layer had arrived before the next one was computed.
            assert times[f"layer_received:{layer}"] < published[f"layer_published:{layer + 1}"]


def test_g3_requests_when_the_copy_streams_are_delayed_then_every_block_is_still_right() -> None:
    rounds = 150
    with nodes(CudaNode("prefill", 1, transport="grpc"), CudaNode("decode", 2, transport="grpc")) as (p, d):
        assert isinstance(p, CudaNode) and isinstance(d, CudaNode)
        lanes = [node.agent._pool.copies for node in (p, d)]  # type: ignore[attr-defined]
        streams = [lane.stream._stream for copies in lanes for lane in (copies._out, copies._in)]
        random = np.random.default_rng(11)
        generator = torch.Generator("cuda").manual_seed(13)
        for number in range(rounds):
            key = key_of(number)
            source, target = (random.permutation(BLOCKS)[:12].tolist() for _ in range(2))
            numbers = torch.tensor(source, device="cuda")
            d.load(p.source, key, target)
            p.admit(key, source)
            for layer in range(LAYOUT.num_layers):
                with torch.cuda.stream(streams[int(random.integers(4))]):
                    busy(float(random.random()))
                if random.random() < 0.5:
                    busy(float(random.random()))
                fresh = torch.randn(
                    (12, *p.kv[layer].shape[1:]), generator=generator, device="cuda", dtype=torch.bfloat16
                )
                p.kv[layer].index_copy_(0, numbers, fresh)
                p.agent.publish(key, "full", layer, 12, p.agent.mark())
            p.agent.computed(key, prefill_result(), True)
            d.load_done()
            # What is computed next uses the blocks at once, on the stream of the computation.
            got = [layer.index_select(0, torch.tensor(target, device="cuda")) for layer in d.kv]
            for mine, theirs in zip(got, p.kv, strict=True):
                assert torch.equal(mine, theirs.index_select(0, numbers)), number
            p.lease_ended()


def test_memory_of_the_same_process_when_offered_then_grpc_takes_its_place() -> None:
    with nodes(CudaNode("prefill", 1), CudaNode("decode", 2)) as (p, d):
        assert isinstance(p, CudaNode) and isinstance(d, CudaNode)
        p.stage(KEY, SCATTERED)
        d.load(p.source, KEY, NEIGHBOURS)
        d.load_done()
        p.lease_ended()
        assert np.array_equal(d.blocks_of(NEIGHBOURS), p.blocks_of(SCATTERED))


# ---- two processes

CHILD = """
import sys
import torch
from tests.gpu.test_kv_transfer import CudaNode, NEIGHBOURS, KEY, key_of
node = CudaNode("prefill", 1, transport=sys.argv[1])
print(node.address, ",".join(node.agent.transports), flush=True)
for line in sys.stdin:
    if line.strip() == "stage":
        node.stage(KEY, NEIGHBOURS)
    elif line.strip() == "abort":
        from rpc.errors import BatonError, ErrorCode
        node.stage(key_of(2), NEIGHBOURS)
        node.agent.fail(key_of(2), BatonError(ErrorCode.CANCELLED))
    print("ok", flush=True)
node.close()
"""


@contextmanager
def other_process(transport: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        address, transports = child.stdout.readline().split()
        try:
            yield child, address, transports.split(",")
        finally:
            child.stdin.close()
            child.wait(30)


def tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == "ok"


@pytest.mark.parametrize("transport", ["ipc", "grpc"])
@pytest.mark.parametrize("target", [list(range(40, 64)), SCATTERED], ids=["neighbours", "scattered"])
def test_load_from_another_process_when_done_then_the_blocks_are_equal(transport: str, target: list[int]) -> None:

    with other_process("auto") as (child, address, transports):
        if transport == "ipc" and "ipc" not in transports:
            pytest.skip("this machine's driver gives no memory handles")
        with nodes(CudaNode("decode", 2, transport=transport)) as (d,):
            assert isinstance(d, CudaNode)
            tell(child, "stage")
            d.load(KvSourceRef("prefill", (address,), 1), KEY, target)
            done = d.load_done()
            expected = np.stack([bits(layer[NEIGHBOURS]) for layer in kv_tensors(1)])
            assert np.array_equal(d.blocks_of(target), expected)
            assert d.count("kv_transfer_bytes_total", transport=transport) == done.bytes


def test_load_from_another_process_when_it_gave_the_request_up_then_nothing_counts() -> None:

    with other_process("auto") as (child, address, _), nodes(CudaNode("decode", 2)) as (d,):
        tell(child, "abort")
        d.load(KvSourceRef("prefill", (address,), 1), key_of(2), NEIGHBOURS)
        assert d.load_failed().error.code is ErrorCode.CANCELLED


def test_handle_when_it_is_of_no_memory_then_it_cannot_be_opened() -> None:
    from cache_store.memory import cuda_ipc

    torch.zeros(1, device="cuda")
    with pytest.raises(MemoryUnavailable):
        cuda_ipc.open_handle(b"short")


# ---- engines


def test_pd_when_both_engines_are_on_the_device_then_the_tokens_are_those_of_one_engine() -> None:
    options = {
        "model": model_folder(heads=4, kv_heads=2, layers=3),
        "load_format": "dummy",
        "device": "cuda",
        "block_size": 16,
        "dtype": "bfloat16",
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "attention_backend": "triton",
        "kv_transport": "grpc",
    }
    prompts = [[3 + (i * 37 + j) % 300 for i in range(length)] for j, length in enumerate((15, 100, 333))]
    with RealEngine("decode", **options) as alone:  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts):
            alone.add(key_of(number), prompt, max_tokens=12)
            alone.run()
        expected = [alone.tokens(key_of(number)) for number in range(len(prompts))]
    with pair(options, options) as (p, d):
        for number, prompt in enumerate(prompts):
            assert serve(p, d, key_of(number), prompt, max_tokens=12) == expected[number]
            again = key_of(100 + number)  # its prefix is in both caches
            assert serve(p, d, again, prompt, max_tokens=12) == expected[number]
        run_until([p, d], lambda: p.clean() and d.clean())
