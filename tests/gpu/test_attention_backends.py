"""Attention backends on a GPU: FlashInfer beside Triton and the reference, captured, and without synchronisation."""

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.attention.backend import AttentionRows, BatchLimits, GraphSelectionMode
from engine.attention.device_backend import DeviceBackend
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.triton_backend import TritonBackend
from kernels import prefill_attention as prefill
from tests.unit.engine.step_rows import step_rows
from tests.unit.kernels.paged_rows import bits, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
WINDOWS = {"triton": (None, 200), "flashinfer": (None,)}
LIMITS = BatchLimits(max_rows=64, max_tokens=4096, max_blocks=160)
TOLERANCE = 5e-3
DECODE_GRAPH = GraphSelectionMode.DECODE_GRAPH
NAMES = [
    "triton",
    pytest.param(
        "flashinfer",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("flashinfer") is None, reason="needs the package flashinfer-python"
        ),
    ),
]


@pytest.fixture(scope="module")
def made() -> dict[str, DeviceBackend]:
    """Backends made so far; FlashInfer compiles its kernels when one is."""
    return {}


@pytest.fixture
def backend(request: pytest.FixtureRequest, made: dict[str, DeviceBackend]) -> DeviceBackend:
    device, name = torch.device("cuda"), request.param
    if name not in made:
        heads = (HEADS, KV_HEADS, DIM)
        made[name] = (
            TritonBackend(*heads, device=device, limits=LIMITS)
            if name == "triton"
            else FlashInferBackend(*heads, BLOCK, WINDOWS[name], torch.bfloat16, device=device, limits=LIMITS)
        )
    return made[name]


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Another one in every run; it is in the output of a failure."""
    value = random.SystemRandom().randrange(2**31)
    print("seed", value)
    torch.manual_seed(value)
    yield value
    torch.cuda.empty_cache()


def _rows(spans: list[tuple[int, int]], pads: int = 0) -> AttentionRows:
    return step_rows(spans, torch.device("cuda"), block_size=BLOCK, pads=pads, width=LIMITS.max_blocks)


def _pool(blocks: int) -> torch.Tensor:
    pool = torch.randn(blocks, 2, KV_HEADS, BLOCK, DIM, device="cuda").to(torch.bfloat16)
    pool[0] = 0  # reserved
    return pool


def _queries(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HEADS, DIM, device="cuda").to(torch.bfloat16)


def _expected(rows: AttentionRows, pool: torch.Tensor, q: torch.Tensor, window: int | None) -> torch.Tensor:
    device = rows.device
    assert device is not None
    count = len(rows.lengths)
    bounds = device.cu_seqlens[: count + 1]
    out = prefill.reference(q.float(), pool, device.block_tables, bounds, device.kv_lens[:count], window or 0)
    return out[: sum(rows.lengths)].flatten(1)


STEPS = {
    "decode": [(1024, 1), (0, 1), (63, 1), (64, 1), (5000, 1), (199, 1)],
    "prompts": [(0, 160), (0, 1000), (0, 1), (0, 64)],
    "chunks": [(64, 100), (777, 300)],
    "mixed": [(900, 1), (3, 1), (0, 500), (100, 77)],
}


@pytest.mark.parametrize("backend", NAMES, indirect=True)
@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS.keys())
def test_a_step_equals_the_reference(spans: list[tuple[int, int]], backend: DeviceBackend) -> None:
    rows = _rows(spans)
    pool = _pool(1 + sum(map(len, rows.block_tables)))
    q = _queries(sum(rows.lengths))
    for window in (*WINDOWS[backend.name], None):  # plans share buffers from step to step
        out = backend.attend(backend.plan(rows), backend.bind(pool), q, q, window)
        assert error(out, _expected(rows, pool, q, window)) < TOLERANCE


@pytest.mark.parametrize("backend", NAMES, indirect=True)
def test_a_decode_graph_replayed_with_rows_of_other_lengths_equals_eager(backend: DeviceBackend) -> None:
    size = 16
    captured = _rows([(0, 1)] * size)
    device = captured.device
    assert device is not None
    pool, q = _pool(size * LIMITS.max_blocks), _queries(size)
    plan = backend.graph_plan(captured, selection_mode=DECODE_GRAPH)
    outs: dict[int | None, torch.Tensor] = {}

    def step() -> None:
        backend.begin(plan)
        for window in WINDOWS[backend.name]:
            outs[window] = backend.attend(plan, backend.bind(pool), q, q, window)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    spread = [(0, 1), (64, 1), (8000, 1), (700, 1), (63, 1)]
    for spans in (spread, [(1000, 1)] * size, [(9, 1)], spread[::-1] * 3):
        rows = _rows(spans, pads=size - len(spans))
        there = rows.device
        assert there is not None
        device.kv_lens.copy_(there.kv_lens)
        device.block_tables.copy_(there.block_tables)
        device.cu_kv_seqlens.copy_(there.cu_kv_seqlens)
        backend.refresh(plan, replace(rows, device=device))
        graph.replay()
        for window in WINDOWS[backend.name]:
            count = len(spans)
            eager = backend.attend(backend.plan(_cut(rows, count)), backend.bind(pool), q[:count], q, window)
            assert error(outs[window][:count], _expected(rows, pool, q[:count], window)) < TOLERANCE
            assert error(outs[window][:count], eager) < TOLERANCE
            assert outs[window].isfinite().all()


def _cut(rows: AttentionRows, count: int) -> AttentionRows:
    """Without the rows that only pad."""
    device = rows.device
    assert device is not None
    there = replace(
        device,
        cu_seqlens=device.cu_seqlens[: count + 1],
        cu_kv_seqlens=device.cu_kv_seqlens[: count + 1],
        kv_lens=device.kv_lens[:count],
        slots=device.slots[:count],
        block_tables=device.block_tables[:count],
    )
    return replace(rows, device=there)


@pytest.mark.parametrize("backend", NAMES, indirect=True)
def test_steps_neither_synchronise_nor_write_to_the_pool(backend: DeviceBackend) -> None:
    for spans in STEPS.values():
        rows = _rows(spans)
        pool, q = _pool(1 + sum(map(len, rows.block_tables))), _queries(sum(rows.lengths))
        before = bits(pool)
        backend.attend(backend.plan(rows), backend.bind(pool), q, q, None)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.attend(backend.plan(rows), backend.bind(pool), q, q, None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(bits(pool), before)
