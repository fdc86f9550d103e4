"""Backends that read their rows on the device: what they attend, which graphs they admit, and which one is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import table as tables
from engine.attention.backend import BatchLimits, GraphSelectionMode
from engine.attention.flashinfer_backend import FlashInferBackend, page_lists
from engine.attention.selection import select_backend
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import TritonBackend
from engine.loader.errors import ModelLoadError
from kernels import jit
from tests.unit.engine.step_rows import step_rows

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
LIMITS = BatchLimits(max_rows=8, max_tokens=64, max_blocks=8)


@pytest.fixture(scope="module")
def device() -> torch.device:
    for name in ("cuda", "cpu"):
        if jit.available(name):
            return torch.device(name)
    pytest.skip("kernels need Triton, and a CUDA device or TRITON_INTERPRET=1")


def triton(device: torch.device) -> TritonBackend:
    return TritonBackend(HEADS, KV_HEADS, DIM, device=device, limits=LIMITS)


SPANS = {
    "decode rows": [(9, 1), (40, 1), (0, 1)],
    "prompts": [(0, 23), (0, 5)],
    "a chunk behind a prefix": [(33, 20)],
    "all at once": [(30, 1), (0, 1), (0, 17), (64, 9)],
}


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
def test_triton_attends_as_the_torch_backend_does(
    spans: list[tuple[int, int]], window: int | None, device: torch.device
) -> None:
    torch.manual_seed(len(spans))
    rows = step_rows(spans, device, block_size=BLOCK)
    pool = torch.randn(1 + sum(map(len, rows.block_tables)), 2, KV_HEADS, BLOCK, DIM)
    q = torch.randn(sum(rows.lengths), HEADS, DIM)
    kv = torch.randn(sum(rows.lengths), 2 * KV_HEADS, DIM)
    reference = TorchBackend(HEADS, KV_HEADS, DIM, BLOCK, [window], torch.float32)
    plan, layer = reference.plan(rows), reference.bind(pool)
    reference.write(plan, layer, kv)
    expected = reference.attend(plan, layer, q, kv, window)
    backend = triton(device)
    held = backend.bind(pool.to(device))
    out = backend.attend(backend.plan(rows), held, q.to(device), kv.to(device), window)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_only_pad_are_zeros_and_change_nothing(device: torch.device) -> None:
    torch.manual_seed(1)
    rows = step_rows([(20, 1), (3, 1)], device, block_size=BLOCK, pads=2)
    pool = torch.randn(8, 2, KV_HEADS, BLOCK, DIM, device=device)
    q = torch.randn(4, HEADS, DIM, device=device)
    backend = triton(device)
    padded = backend.attend(backend.plan(rows), pool, q, q, None)
    assert not padded[2:].any()
    mode = GraphSelectionMode.DECODE_GRAPH
    graph = backend.attend(backend.graph_plan(rows, selection_mode=mode), pool, q, q, None)
    assert torch.equal(graph, padded)


def test_a_plan_without_rows_on_the_device_is_refused(device: torch.device) -> None:
    rows = replace(step_rows([(3, 1)], device, block_size=BLOCK), device=None)
    with pytest.raises(ValueError, match="DeviceRows"):
        triton(device).plan(rows)


# -- graphs ------------------------------------------------------------------------------------------------------


def test_triton_admits_decode_graphs_and_on_hopper_prefill_graphs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = triton(device)
    assert backend.admits(selection_mode=GraphSelectionMode.EAGER)
    assert backend.admits(selection_mode=GraphSelectionMode.DECODE_GRAPH)
    backend.device = torch.device("cuda")
    for capability, admitted in (((9, 0), True), ((8, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert backend.admits(selection_mode=GraphSelectionMode.PREFILL_GRAPH) is admitted


def test_an_unknown_selection_mode_raises(device: torch.device) -> None:
    backend: Any = triton(device)
    with pytest.raises(ValueError, match="selection mode"):
        backend.admits(selection_mode="draft_graph")
    with pytest.raises(TypeError):
        backend.admits(GraphSelectionMode.EAGER)  # it is a keyword everywhere


def test_flashinfer_declares_no_prefill_graph() -> None:
    assert FlashInferBackend.capabilities.decode_graph
    assert not FlashInferBackend.capabilities.prefill_graph
    assert FlashInferBackend.refreshes
    assert not TritonBackend.refreshes


# -- FlashInfer's lists ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_lens", [[1], [15, 16, 17], [64, 0, 1], []])
def test_page_lists_count_pages_and_give_padding_none(kv_lens: list[int]) -> None:
    rows = len(kv_lens) + 2
    indptr, last = np.full(rows + 1, 99, dtype=np.int32), np.full(rows, 99, dtype=np.int32)
    total = page_lists(np.array(kv_lens, dtype=np.int32), 16, indptr, last)
    pages = [-(-length // 16) for length in kv_lens] + [0, 0]
    assert indptr.tolist() == [sum(pages[:row]) for row in range(rows + 1)]
    assert total == sum(pages)
    for row, length in enumerate([*kv_lens, 0, 0]):
        assert max(pages[row] - 1, 0) * 16 + last[row] == length
        assert 0 <= last[row] <= 16


# -- the measured table ------------------------------------------------------------------------------------------


def measured(*rows: tuple[str, int, int, float, float]) -> tables.Table:
    """(kind, rows, tokens, microseconds of triton, of flashinfer) for heads of 128 in groups of 4."""
    return tables.parse_table(
        {
            "device": "test",
            "measurements": [
                {
                    "kind": kind,
                    "head_dim": 128,
                    "group": 4,
                    "rows": count,
                    "tokens": tokens,
                    "us": {"triton": one, "flashinfer": other},
                }
                for kind, count, tokens, one, other in rows
            ],
        }
    )


BOTH = ("triton", "flashinfer")
HEADS_OF_8B = {"head_dim": 128, "group": 4}


def test_the_fastest_backend_of_the_nearest_shape_is_chosen() -> None:
    table = measured(("decode", 1, 1024, 5, 20), ("decode", 64, 8192, 600, 500), ("prefill", 1, 8192, 1400, 900))
    assert table.fastest("decode", BOTH, rows=2, tokens=900, **HEADS_OF_8B) == "triton"
    assert table.fastest("decode", BOTH, rows=50, tokens=9000, **HEADS_OF_8B) == "flashinfer"
    assert table.fastest("prefill", BOTH, rows=3, tokens=100, **HEADS_OF_8B) == "flashinfer"
    assert table.fastest("prefill", ("triton",), rows=3, tokens=100, **HEADS_OF_8B) == "triton"


def test_a_small_gain_does_not_pay_for_a_plan_on_the_host() -> None:
    table = measured(("decode", 1, 1024, 6.0, 4.0))
    assert table.fastest("decode", BOTH, rows=1, tokens=1024, **HEADS_OF_8B) == "triton"
    assert not table.prefers("flashinfer", BOTH, **HEADS_OF_8B)


def test_without_measurements_triton_is_chosen() -> None:
    table = tables.Table("", ())
    assert table.fastest("prefill", BOTH, rows=1, tokens=8192, **HEADS_OF_8B) == "triton"
    assert table.fastest_of_rows("decode", BOTH, rows=64, **HEADS_OF_8B) == "triton"
    assert not table.prefers("flashinfer", BOTH, **HEADS_OF_8B)


def test_a_graph_goes_to_the_backend_that_loses_least_for_so_many_rows() -> None:
    table = measured(
        ("decode", 1, 1024, 5, 20),
        ("decode", 64, 1024, 90, 80),
        ("decode", 64, 8192, 600, 500),
        ("decode", 256, 1024, 250, 260),
    )
    chosen = {rows: table.fastest_of_rows("decode", BOTH, rows=rows, **HEADS_OF_8B) for rows in (1, 4, 48, 64, 256)}
    assert chosen == {1: "triton", 4: "triton", 48: "flashinfer", 64: "flashinfer", 256: "triton"}
    assert table.chosen_for_graphs("flashinfer", BOTH, **HEADS_OF_8B)
    only_prompts = measured(("decode", 1, 1024, 5, 20), ("prefill", 1, 8192, 1400, 900))
    assert not only_prompts.chosen_for_graphs("flashinfer", BOTH, **HEADS_OF_8B)


def test_the_table_is_made_of_the_best_version_that_a_benchmark_measured() -> None:
    shape = {"kind": "prefill", "rows": 1, "tokens": 8192, "head_dim": 128, "group": 4}
    us = {"triton": 1400.0, "flashinfer-fa3": 900.0, "flashinfer-fa2": 1300.0}
    found = shape | {"page": 64, "us": us, "error": {}, "failed": {}, "floor_us": 700.0}
    table = tables.parse_table(tables.table_of({"device": "H200", "read_bandwidth": 4e12, "results": [found]}))
    assert table.device == "H200"
    assert table.measurements[0].us == {"triton": 1400.0, "flashinfer": 900.0}


def test_the_table_of_this_installation_is_readable() -> None:
    table = tables.measured_table()
    assert all(m.us and min(m.us.values()) > 0 for m in table.measurements)
    assert (Path(tables.__file__).parent / "table.json").exists() == bool(table.device)


# -- selection ---------------------------------------------------------------------------------------------------

MODEL: Any = SimpleNamespace(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, windows=(None, None))


def test_a_backend_is_taken_by_name(device: torch.device) -> None:
    assert select_backend("triton", MODEL, BLOCK, torch.float32, device=device, limits=LIMITS).name == "triton"
    assert select_backend("torch", MODEL, BLOCK, torch.float32).name == "torch"
    assert select_backend("auto", MODEL, BLOCK, torch.float32).name in ("torch", "native")


@pytest.mark.parametrize(
    ("name", "on", "says"),
    [
        ("flash", "cpu", "available: auto"),
        ("flashinfer", "cpu", "flashinfer"),
        ("torch", "cuda", "CPU only"),
        ("native", "cuda", "CPU only"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_with_what_to_use(name: str, on: str, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        select_backend(name, MODEL, BLOCK, torch.bfloat16, device=torch.device(on), limits=LIMITS)


def test_head_dims_that_no_kernel_has_are_refused(device: torch.device) -> None:
    assert "multiple of 16" in TritonBackend.unavailable(72, device)
    assert "multiple of 16" in TritonBackend.unavailable(272, device)
    assert not TritonBackend.unavailable(80, device)
