"""Backends that read their rows on the device: what they attend, which graphs they admit, and which one is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import table as tables
from engine.attention.backend import AttentionRows, BatchLimits, GraphSelectionMode
from engine.attention.flashinfer_backend import FlashInferBackend, page_lists
from engine.attention.measured_backend import MeasuredBackend
from engine.attention.selection import select_backend
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_backend import MOST_ROWS, TritonBackend
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
    content = {
        "device": "test",
        "capability": [9, 0],
        "plan_us": {"flashinfer": 80.0},
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
    return tables.parse_table(json.dumps(content).encode())


BOTH = ("triton", "flashinfer")
HEADS_OF_8B = tables.Heads(head_dim=128, group=4, layers=32)


def test_the_fastest_backend_of_the_nearest_shape_is_chosen() -> None:
    table = measured(("decode", 1, 1024, 5, 20), ("decode", 64, 8192, 600, 500), ("prefill", 1, 8192, 1400, 900))
    assert table.fastest("decode", BOTH, HEADS_OF_8B, 2, 900) == "triton"
    assert table.fastest("decode", BOTH, HEADS_OF_8B, 50, 9000) == "flashinfer"
    assert table.fastest("prefill", BOTH, HEADS_OF_8B, 3, 100) == "flashinfer"
    assert table.fastest("prefill", ("triton",), HEADS_OF_8B, 3, 100) == "triton"


def test_a_small_gain_does_not_pay_for_a_plan_on_the_host() -> None:
    """80 us of the host for a step are 2.5 for each of 32 layers."""
    for gain, chosen in ((2.0, "triton"), (3.0, "flashinfer")):
        table = measured(("decode", 1, 1024, 6.0, 6.0 - gain))
        assert table.fastest("decode", BOTH, HEADS_OF_8B, 1, 1024) == chosen
        assert table.prefers("flashinfer", BOTH, HEADS_OF_8B) is (chosen == "flashinfer")
    few_layers = replace(HEADS_OF_8B, layers=16)
    assert table.fastest("decode", BOTH, few_layers, 1, 1024) == "triton"


def test_without_measurements_triton_is_chosen() -> None:
    table = tables.Table("", ())
    assert table.fastest("prefill", BOTH, HEADS_OF_8B, 1, 8192) == "triton"
    assert table.winners("decode", BOTH, HEADS_OF_8B, 64, 8192) == ["triton"]
    assert not table.prefers("flashinfer", BOTH, HEADS_OF_8B)


def test_a_number_of_rows_has_the_winners_of_every_length_that_it_can_have() -> None:
    table = measured(
        ("decode", 1, 1024, 5, 20),
        ("decode", 64, 1024, 80, 90),
        ("decode", 64, 8192, 600, 500),
        ("decode", 256, 1024, 250, 240),
    )
    winners = {
        (rows, most): table.winners("decode", BOTH, HEADS_OF_8B, rows, most)
        for rows, most in ((1, 1024), (64, 1024), (64, 8192), (256, 512))
    }
    assert winners == {
        (1, 1024): ["triton"],
        (64, 1024): ["triton"],
        (64, 8192): ["flashinfer", "triton"],
        (256, 512): ["flashinfer"],
    }


def test_the_table_is_made_of_the_best_version_that_a_benchmark_measured() -> None:
    shape = {"kind": "prefill", "rows": 1, "tokens": 8192, "head_dim": 128, "group": 4}
    us = {"triton": 1400.0, "flashinfer-fa3": 900.0, "flashinfer-fa2": 1300.0}
    found = shape | {"page": 64, "us": us, "error": {}, "failed": {}, "floor_us": 700.0, "plan_us": {}}
    results = [found, *({**found, "plan_us": {"flashinfer-fa2": plan}} for plan in (60.0, 90.0, 70.0))]
    report = {"device": "H200", "capability": (9, 0), "read_bandwidth": 4e12, "results": results}
    table = tables.parse_table(json.dumps(tables.table_of(report)).encode())
    assert (table.device, table.capability, table.plan_us) == ("H200", (9, 0), {"flashinfer": 70.0})
    assert table.measurements[0].us == {"triton": 1400.0, "flashinfer": 900.0}


def test_the_table_of_this_installation_is_readable_and_chooses_what_it_measured() -> None:
    table = tables.measured_table()
    assert all(m.us and min(m.us.values()) > 0 for m in table.measurements)
    assert (Path(tables.__file__).parent / "table.json").exists() == bool(table.device)
    for m in table.measurements:
        costs = {name: us + table.plan_us.get(name, 0) / 32 for name, us in m.us.items()}
        assert costs[table.fastest(m.kind, BOTH, HEADS_OF_8B, m.rows, m.tokens)] == min(costs.values())


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("measurements/0/rows", 0),
        ("measurements/0/group", 0),
        ("measurements/0/tokens", "many"),
        ("measurements/0/us", None),
        ("measurements/0/us/triton", -1.0),
        ("measurements/0/us/triton", float("nan")),
        ("measurements/0/kind", "draft"),
        ("measurements/0/extra", 1),
        ("measurements", {}),
        ("capability", [9]),
        ("plan_us", None),
    ],
)
def test_a_damaged_table_is_refused_with_the_file_and_what_to_do(
    place: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads(tables.FILE.read_text())
    *path, last = place.split("/")
    inner: Any = content
    for name in path:
        inner = inner[int(name) if isinstance(inner, list) else name]
    inner[last] = value
    damaged = tmp_path / "table.json"
    damaged.write_text(json.dumps(content))
    monkeypatch.setattr(tables, "FILE", damaged)
    for read in (tables.measured_table.__wrapped__, lambda: tables.table_for.__wrapped__("any", (9, 0))):
        tables.measured_table.cache_clear()
        with pytest.raises(ModelLoadError, match=rf"{damaged}.*'triton'"):
            read()


@pytest.mark.parametrize(
    ("device", "capability", "speaks", "level"),
    [
        ("NVIDIA H200", (9, 0), True, None),
        ("NVIDIA H100 80GB HBM3", (9, 0), True, "INFO"),
        ("NVIDIA B200", (10, 0), False, "WARNING"),
        ("NVIDIA L40S", (8, 9), False, "WARNING"),
    ],
)
def test_a_table_of_another_device_holds_for_the_same_capability_alone_and_the_log_says_so_once(
    device: str, capability: tuple[int, int], speaks: bool, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    measured_on = tables.measured_table()
    assert (measured_on.device, measured_on.capability) == ("NVIDIA H200", (9, 0))
    caplog.set_level("INFO")
    tables.table_for.cache_clear()
    try:
        for _ in range(3):
            found = tables.table_for(device, capability)
    finally:
        tables.table_for.cache_clear()
    assert (found is measured_on) is speaks
    assert bool(found.measurements) is speaks
    said = [(record.levelname, record.measured, record.device) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == ([] if level is None else [(level, "NVIDIA H200", device)])


# -- two backends behind one ---------------------------------------------------------------------------------------


class Named(TritonBackend):
    """Triton's kernels under another name, which notes what it is asked for."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(HEADS, KV_HEADS, DIM, device=device, limits=LIMITS)
        self.name = name
        self.asked: list[str] = []

    def list_rows(self, rows: AttentionRows) -> None:
        self.asked.append("list")

    def begin(self, plan: Any) -> None:
        self.asked.append("begin")

    def refresh(self, plan: Any, rows: AttentionRows) -> None:
        self.asked.append("refresh")

    def attend_decode(self, *arguments: Any) -> None:
        self.asked.append("decode")
        super().attend_decode(*arguments)

    def attend_prefill(self, *arguments: Any) -> None:
        self.asked.append("prefill")
        super().attend_prefill(*arguments)


@pytest.fixture
def both(device: torch.device) -> tuple[MeasuredBackend, Named, Named]:
    """Short decode rows are triton's, long ones and prompts flashinfer's."""
    table = measured(("decode", 4, 16, 5, 20), ("decode", 4, 128, 900, 500), ("prefill", 1, 16, 90, 50))
    first, second = Named("triton", device), Named("flashinfer", device)
    return MeasuredBackend(first, second, table, replace(HEADS_OF_8B, head_dim=128)), first, second


def test_a_mixed_step_lists_its_rows_once_for_each_backend_that_takes_a_part(
    both: tuple[MeasuredBackend, Named, Named], device: torch.device
) -> None:
    measured_backend, triton_part, other = both
    for spans, expected in (
        ([(100, 1), (120, 1), (0, 9)], ([], ["list", "decode", "prefill"])),
        ([(3, 1), (5, 1), (0, 9)], (["list", "decode"], ["list", "prefill"])),
        ([(3, 1), (5, 1)], (["list", "decode"], [])),
    ):
        triton_part.asked.clear()
        other.asked.clear()
        rows = step_rows(spans, device, block_size=BLOCK)
        pool = torch.randn(1 + sum(map(len, rows.block_tables)), 2, KV_HEADS, BLOCK, DIM, device=device)
        q = torch.randn(sum(rows.lengths), HEADS, DIM, device=device)
        found = measured_backend.attend(measured_backend.plan(rows), pool, q, q, None)
        assert (triton_part.asked, other.asked) == expected
        alone = triton(device)
        assert torch.equal(found, alone.attend(alone.plan(rows), pool, q, q, None))


def test_last_tokens_are_triton_s_whatever_takes_the_rest_of_their_rows(
    both: tuple[MeasuredBackend, Named, Named], device: torch.device
) -> None:
    measured_backend, triton_part, other = both
    rows = step_rows([(100, 1), (20, 12), (0, 9)], device, block_size=BLOCK)
    pool = torch.randn(1 + sum(map(len, rows.block_tables)), 2, KV_HEADS, BLOCK, DIM, device=device)
    q = torch.randn(sum(rows.lengths), HEADS, DIM, device=device)
    whole = measured_backend.attend(measured_backend.plan(rows), pool, q, q, None)
    asked = list(other.asked)
    triton_part.asked.clear()
    lasts = torch.tensor([0, 12, 21], device=device)
    found = measured_backend.attend(measured_backend.plan_lasts(rows), pool, q[lasts], q, None)
    assert (triton_part.asked, other.asked) == (["decode"], asked)
    torch.testing.assert_close(found, whole[lasts], rtol=0, atol=1e-5)


def test_a_graph_size_where_both_win_has_a_graph_of_each_and_steps_take_the_one_for_their_lengths(
    both: tuple[MeasuredBackend, Named, Named], device: torch.device
) -> None:
    measured_backend, triton_part, other = both
    mode = GraphSelectionMode.DECODE_GRAPH
    long, short = (step_rows([(start, 1)] * 4, device, block_size=BLOCK) for start in (100, 7))
    plans = measured_backend.graph_plans(long, selection_mode=mode)
    names = [plan.decode.backend.name for plan in plans]
    assert names == ["flashinfer", "triton"]
    assert names[measured_backend.pick(plans, long)] == "flashinfer"
    assert names[measured_backend.pick(plans, short)] == "triton"
    for plan, used, idle in zip(plans, (other, triton_part), (triton_part, other), strict=True):
        triton_part.asked.clear()
        other.asked.clear()
        measured_backend.refresh(plan, long)
        measured_backend.begin(plan)
        assert (used.asked, idle.asked) == (["refresh", "begin"], [])
    [prompts] = measured_backend.graph_plans(
        step_rows([(0, 9)], device, block_size=BLOCK), selection_mode=GraphSelectionMode.PREFILL_GRAPH
    )
    assert prompts.prefill.backend is triton_part


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


def test_more_rows_than_the_kernels_search_are_refused_at_the_start(device: torch.device) -> None:
    most = replace(LIMITS, max_rows=MOST_ROWS + 1)
    with pytest.raises(ModelLoadError, match=r"--max-num-seqs 8193.*8192"):
        select_backend("triton", MODEL, BLOCK, torch.bfloat16, device=device, limits=most)


def test_head_dims_that_no_kernel_has_are_refused(device: torch.device) -> None:
    assert "multiple of 16" in TritonBackend.unavailable(72, device)
    assert "multiple of 16" in TritonBackend.unavailable(272, device)
    assert not TritonBackend.unavailable(80, device)
