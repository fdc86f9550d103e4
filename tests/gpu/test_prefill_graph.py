"""Prefill graphs on a GPU: invariants 1, 10, 15 to 18, 20, 21, 23, 27 of docs/cuda_graphs.md. Nothing waits there."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention.backend import GraphSelectionMode
from engine.config import EngineConfig
from engine.graph_settings import DEFAULT_BUCKETS, PrefillGraphSettings
from engine.input_embeddings import EmbeddingRows
from engine.messages import RunMode
from engine.runner.batch import StepBatch
from engine.runner.capture import CudaRecorder
from rpc.errors import ErrorCode
from tests.unit.engine.prefill_graph.graph_runners import (
    BLOCK,
    CHANGES,
    PAD,
    GraphRunner,
    assert_only_written,
    assert_same_bits,
    check_replay,
    model_folder,
    prompt,
    sampling_row,
    used_blocks,
)
from tests.unit.engine.real_engine import RealEngine, pair, run_until, serve
from tests.unit.engine.tiny_models import TINY_MODELS, tiny_model

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [(24, 32), (64,), (32, 32), (16, 16, 16, 16)]
HEADS = {"grouped": (8, 2), "packed": (8, 8)}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="prefill graphs are admitted on compute capability 9.0",
    ),
]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield
    torch.cuda.synchronize()


def folder_of(heads: str) -> Path:
    count, kv_count = HEADS[heads]
    return model_folder(heads=count, kv_heads=kv_count, layers=3, hidden=512)


@functools.cache
def graph_of(heads: str, dtype: str = "bfloat16") -> GraphRunner:
    """One runner per kind of heads, with buckets of 64 and 160 tokens, captured once."""
    return GraphRunner(
        device="cuda",
        folder=folder_of(heads),
        buckets=(64, 160),
        max_requests=8,
        max_padding_ratio=1.0,
        dtype=dtype,
        blocks=60,
        max_rows=16,
        max_tokens=512,
    )


# -- 16: bit by bit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [64, 160])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_forward_when_replayed_then_every_bit_is_that_of_an_eager_forward_of_the_padded_batch(heads, layout, bucket):
    graph = graph_of(heads)
    graphs, rows = graph.graphs, graph.rows(*layout)
    graph.clear()
    graphs.prepare_replay(StepBatch(rows), bucket)
    output = graphs.replay()
    torch.cuda.synchronize()
    replayed = [output.logits.clone(), output.hidden.clone(), *graph.snapshot()]
    padding = bucket - sum(layout)
    scratch = set(graph.scratch[: -(-padding // BLOCK)])
    assert_only_written(graph.pools, used_blocks(rows) | scratch)
    graph.clear()
    graphs.logits.fill_(torch.nan)
    graphs.prepare_replay(StepBatch(rows), bucket)
    graphs.run_eager(bucket)
    torch.cuda.synchronize()
    eager = [graphs.logits[: len(layout)], graphs._hidden[: sum(layout)], *graph.pools]
    for left, right in zip(replayed, eager, strict=True):
        assert_same_bits(left, right)


@pytest.mark.parametrize("bucket", [64, 160])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_when_replayed_then_tokens_and_kv_are_those_of_the_unpadded_batch(dtype, heads, layout, bucket):
    graph = graph_of(heads, dtype)
    rows = graph.rows(*layout, seed=1)
    graph.clear()
    graph.graphs.prepare_replay(StepBatch(rows), bucket)
    output = graph.graphs.replay()
    torch.cuda.synchronize()
    tokens, logits = output.logits.argmax(dim=-1).tolist(), output.logits.clone()
    pools = graph.snapshot()
    graph.clear()
    eager = graph.eager(rows)
    tolerance = {"bfloat16": 0.06, "float32": 2e-3}[dtype]  # float32 products may run in TensorFloat-32
    unpadded = graph.runner.device_steps.logits[: len(rows)]
    torch.testing.assert_close(logits, unpadded, rtol=0.02, atol=tolerance)
    for token, result, row in zip(tokens, eager.rows, unpadded, strict=True):
        # Another number of rows may round otherwise; a token may differ only where two are as likely.
        assert token == result.token_id or row[result.token_id] - row[token] < 2 * tolerance
    for left, right in zip(pools, graph.pools, strict=True):
        for row in rows:
            for block in row.block_table:
                torch.testing.assert_close(left[block], right[block], rtol=0.02, atol=tolerance)


@pytest.mark.parametrize("bucket", [64, 160])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_when_recorded_with_rotation_and_kv_then_every_bit_is_that_of_the_eager_operation(
    heads, layout, bucket
):
    graph = graph_of(heads)
    graphs, steps = graph.graphs, graph.runner.device_steps
    attention = graph.runner.model.layers[0].attention
    pool = graph.pools[0]
    generator = torch.Generator("cuda").manual_seed(5)
    count, kv_count = HEADS[heads]
    product = torch.randn(bucket, (count + 2 * kv_count) * 64, device="cuda", generator=generator).bfloat16()
    graphs.prepare_replay(StepBatch(graph.rows(*layout, seed=2)), bucket)
    found = graphs._buckets[bucket]
    backend, tag = steps.forward.backend, "full"
    plan = backend.graph_plan(found.rows, selection_mode=GraphSelectionMode.PREFILL_GRAPH)

    from engine.models.step import ForwardStep

    def operation() -> torch.Tensor:
        cos, sin = graph.runner.model.rotary.angles(found.arrays.positions)
        step = ForwardStep(backend, plan, steps.forward.pools, cos, sin, found.arrays.slots[tag], None)
        q, kv = attention.heads(product.clone(), 0, step)
        return backend.attend(plan, steps.forward.pools[0], q, kv, None)

    recorder = CudaRecorder(torch.device("cuda"))
    for _ in range(2):
        recorder.warm_up(operation)
    recording, result = recorder.record(operation, "attention")
    graph.clear()
    recording.replay()
    torch.cuda.synchronize()
    replayed, kv = result.clone(), pool.clone()
    graph.clear()
    eager = operation()
    torch.testing.assert_close(replayed, eager, rtol=0, atol=0)
    for block in range(pool.shape[0]):
        torch.testing.assert_close(kv[block], pool[block], rtol=0, atol=0)


# -- 15: padding, with the default limit ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padded() -> GraphRunner:
    with torch.inference_mode():
        return GraphRunner(
            device="cuda",
            folder=folder_of("grouped"),
            buckets=(64, 160),
            max_requests=4,
            dtype="bfloat16",
            blocks=60,
            max_rows=16,
            max_tokens=512,
        )


@pytest.mark.parametrize("layout", [(20, 33), (50,), (16, 16, 16), (63,), (30, 30, 1), (64,), (100, 30, 15)], ids=str)
def test_g1_padding_when_it_is_real_then_it_touches_scratch_alone(padded, layout):
    rows = padded.rows(*layout, seed=3)
    padded.clear()
    # Blocks of others hold numbers that a stray write would change.
    others = [block for block in range(1, padded.blocks + 1) if block not in used_blocks(rows)][:5]
    for pool in padded.pools:
        pool[others] = 1.5
    result = padded.replay(rows)
    bucket, tokens = result.replay.bucket, sum(layout)
    assert result.replay.tokens == tokens
    assert (bucket - tokens) / bucket <= 0.25
    arrays = padded.graphs.device_arrays(bucket)
    assert arrays.token_ids[tokens:].tolist() == [PAD] * (bucket - tokens)
    tables = arrays.block_tables["full"]
    assert not tables[len(layout) : -1].any()
    assert tables[-1].tolist() == padded.scratch[: tables.shape[1]]
    for pool in padded.pools:
        assert (pool[others] == 1.5).all()
        assert bool(pool[padded.scratch].any()) is (bucket > tokens)
        unmapped = sorted(set(range(padded.runner.num_blocks)) - used_blocks(rows) - set(others) - set(padded.scratch))
        assert not pool[unmapped].any()
    expected = [row.token_id for row in padded.eager(rows).rows]
    assert [row.token_id for row in result.rows] == expected


def test_pad_token_when_zero_is_an_ordinary_token_then_prompts_of_zeros_are_right(padded):
    [row] = padded.rows(50, seed=4)
    row = dataclasses.replace(row, token_ids=[0] * 50)
    assert padded.graphs.pad_token_id == PAD
    assert padded.replay([row]).rows[0].token_id == padded.eager([row]).rows[0].token_id


def test_multimodal_when_a_row_has_such_input_then_it_runs_eagerly_with_the_same_output(padded):
    rows = padded.rows(50, seed=5)
    expected = padded.replay(rows).rows[0].token_id
    result = padded.runner.execute(StepBatch([dataclasses.replace(rows[0], multimodal=True)]))
    assert result.prefill_status == "multimodal_not_supported"
    assert result.rows[0].token_id == expected


def test_replay_when_it_is_prepared_and_launched_then_nothing_waits_for_the_device(padded):
    rows = padded.rows(20, 33, seed=6)
    batch = StepBatch(rows)
    padded.replay(rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            launched = padded.runner.device_steps.launch(batch, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched.prefill.status == "replayed"
    padded.runner.device_steps.finish(batch, launched)


def test_embeddings_when_rows_bring_those_of_other_tokens_then_steps_of_both_kinds_answer_as_to_these(padded):
    table = padded.runner.model.embedding.table.float().cpu().numpy()
    for seed, lengths in ((30, (20, 33)), (32, (1, 60)), (34, (50,))):
        meant, rows = padded.rows(*lengths, seed=seed), padded.rows(*lengths, seed=seed + 1)
        for row, other in zip(rows, meant, strict=True):
            row.embeddings = (EmbeddingRows(0, table[other.token_ids]),)
        for run in (padded.replay, padded.eager):
            expected = [row.token_id for row in run(meant).rows]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = [row.token_id for row in run(rows).rows]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert found == expected
    plain = padded.rows(20, 33, seed=40)
    expected = [row.token_id for row in padded.eager(plain).rows]
    assert [row.token_id for row in padded.replay(plain).rows] == expected


def test_addresses_when_batches_change_then_results_follow_and_no_address_does(padded):
    arrays = padded.graphs.device_arrays(64)
    before = [arrays.token_ids.data_ptr(), arrays.slots["full"].data_ptr(), padded.graphs.logits.data_ptr()]
    for seed in range(10):
        rows = padded.rows(20 + seed, 34 - seed, seed=20 + seed)
        replayed = [row.token_id for row in padded.replay(rows).rows]
        assert replayed == [row.token_id for row in padded.eager(rows).rows]
    arrays = padded.graphs.device_arrays(64)
    assert [arrays.token_ids.data_ptr(), arrays.slots["full"].data_ptr(), padded.graphs.logits.data_ptr()] == before


def test_parameters_when_they_change_in_place_then_a_replay_follows():
    options = {"folder": folder_of("grouped"), "buckets": (64,), "dtype": "bfloat16", "max_rows": 4, "max_tokens": 128}
    graph = GraphRunner(device="cuda", **options)
    rows = graph.rows(20, 33)
    graph.replay(rows)
    before = graph.graphs.logits[:2].clone()
    for name, change in CHANGES.items():
        change(graph.runner.model)
        graph.replay(rows)
        after = graph.graphs.logits[:2].clone()
        assert (after - before).norm() > 0.05 * before.norm(), name
        graph.eager(rows)
        assert (after - graph.graphs.logits[:2]).norm() < 0.05 * after.norm(), name
        before = after


@functools.cache
def default_buckets() -> GraphRunner:
    """All buckets of the default list, without a limit of padding."""
    return GraphRunner(
        device="cuda",
        folder=folder_of("grouped"),
        buckets=DEFAULT_BUCKETS,
        max_requests=8,
        max_padding_ratio=1.0,
        dtype="bfloat16",
        blocks=60,
        max_rows=16,
        max_tokens=512,
    )


@pytest.mark.parametrize("bucket", DEFAULT_BUCKETS)
def test_g2_bucket_when_it_has_one_token_one_too_few_or_is_full_then_the_replay_is_what_an_eager_step_gives(bucket):
    for tokens in sorted({1, max(1, bucket - 1), bucket}):
        check_replay(default_buckets(), bucket, tokens, 0.06)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_family_when_its_graphs_are_captured_then_a_replay_is_what_an_eager_step_gives(name):
    graph = GraphRunner(device="cuda", folder=tiny_model(name), buckets=(4, 33), max_requests=2, blocks=8)
    for bucket, tokens in ((4, 3), (33, 30), (33, 33)):
        check_replay(graph, bucket, tokens, 2e-3)  # float32 products may run in TensorFloat-32


def test_g2_steps_when_a_thousand_of_eight_requests_run_then_addresses_and_results_stay():
    graph = default_buckets()
    arrays = {bucket: graph.graphs.device_arrays(bucket) for bucket in DEFAULT_BUCKETS}
    before = {bucket: (a.token_ids.data_ptr(), a.slots["full"].data_ptr()) for bucket, a in arrays.items()}
    before[0] = (graph.graphs.logits.data_ptr(), graph.graphs._hidden.data_ptr())
    expected: dict[int, list[int | None]] = {}
    for turn in range(1000):
        kind = turn * 7 % 20
        lengths = [1 + (kind * (3 + row) + row) % 20 for row in range(1 + kind % 8)]
        graph._free = 1
        tokens = [row.token_id for row in graph.replay(graph.rows(*lengths, seed=kind)).rows]
        assert expected.setdefault(kind, tokens) == tokens, (turn, lengths)
    arrays = {bucket: graph.graphs.device_arrays(bucket) for bucket in DEFAULT_BUCKETS}
    after = {bucket: (a.token_ids.data_ptr(), a.slots["full"].data_ptr()) for bucket, a in arrays.items()}
    after[0] = (graph.graphs.logits.data_ptr(), graph.graphs._hidden.data_ptr())
    assert before == after


def test_sampling_when_not_greedy_then_replayed_and_eager_steps_draw_alike(padded):
    rows = padded.rows(20, 33, seed=7)
    rows[0].sampling = sampling_row(temperature=0.7, top_k=12, seed=3, logprobs=2)
    replayed, eager = padded.replay(rows), padded.eager(rows)
    assert [row.token_id for row in replayed.rows] == [row.token_id for row in eager.rows]
    assert replayed.rows[0].logprob.logprob == pytest.approx(eager.rows[0].logprob.logprob, abs=0.1)


# -- through the engine -----------------------------------------------------------------------------------------

GRAPHS = PrefillGraphSettings(enabled=True, max_requests=2, buckets=(16, 64), strict=True)


def engine(role: str = "prefill", **changes: object) -> RealEngine:
    options = {
        "model": folder_of("grouped"),
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cuda",
        "attention_backend": "triton",
        "block_size": 16,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "num_kv_blocks": 128,
        "prefill_graph": GRAPHS,
        **changes,
    }
    return RealEngine(role, **options)  # type: ignore[arg-type]


def answer(engine: RealEngine, key: str) -> tuple[list[int], str]:
    """Tokens and status of a request that has ended."""
    assert engine.last(key).error is None, engine.last(key).error
    [info] = [output.prefill for output in engine.outputs[key] if output.prefill is not None]
    return engine.tokens(key), info.cuda_graph_status


def test_server_when_prompts_of_every_kind_come_then_each_is_right_and_says_how_it_was_computed():
    prompts = {
        "fits": (prompt(60, 1), "replayed"),
        "fits again": (prompt(15, 2), "replayed"),
        "padding": (prompt(33, 3), "padding_ratio_exceeded"),
        "tokens": (prompt(65, 4), "input_tokens_exceed_capture_limit"),
        "chunks": (prompt(300, 5), "input_tokens_exceed_capture_limit"),
        "prefix": (prompt(60, 1)[:48] + prompt(12, 6), "prefix_not_supported"),
    }
    with (
        engine("decode") as graphs,
        engine("decode", prefill_graph=PrefillGraphSettings(), enable_cuda_graph=False) as eager,
    ):
        assert graphs.ready.prefill_cuda_graph_init == "captured"
        assert eager.ready.prefill_cuda_graph_init == "not_requested"
        for server in (graphs, eager):
            for key, (tokens, _) in prompts.items():
                server.add(key, tokens, max_tokens=6)
                server.run()
            for key, seed in (("one", 7), ("two", 8), ("three", 9)):
                server.add(key, prompt(20, seed), max_tokens=6)
            server.run()
        for key, (_, status) in prompts.items():
            tokens, found = answer(graphs, key)
            assert (key, found) == (key, status)
            assert tokens == answer(eager, key)[0]
        for key in ("one", "two", "three"):
            assert answer(graphs, key)[1] == "request_capacity_exceeded"
            assert answer(graphs, key)[0] == answer(eager, key)[0]
        name = "baton_prefill_cuda_graph_requests_total"
        assert graphs.counted(name, status="replayed") == 2
        assert graphs.counted(name, status="request_capacity_exceeded") == 3
        assert sum(item.value for item in graphs.observations if item.name == name) == 9
        tokens_name = "baton_prefill_cuda_graph_tokens_total"
        assert graphs.counted(tokens_name, kind="real") == 75
        assert graphs.counted(tokens_name, kind="padding") == 5


def test_requests_when_two_come_at_once_then_one_replay_computes_both():
    with engine("decode") as graphs:
        graphs.add("a", prompt(24, 1), max_tokens=1)
        graphs.add("b", prompt(32, 2), max_tokens=1)
        graphs.step()
        assert answer(graphs, "a")[1] == answer(graphs, "b")[1] == "replayed"
        assert graphs.counted("baton_prefill_cuda_graph_replays_total", bucket="64") == 1
        assert graphs.counted("baton_prefill_cuda_graph_requests_total", status="replayed") == 2


def test_ledger_when_graphs_hold_scratch_then_it_is_reserved_and_the_total_is_what_was_asked_for():
    with engine("prefill") as graphs:
        [ledger] = graphs.core.kv.ledgers()
        assert (ledger.total, ledger.reserved) == (128, 1 + 4)
        [captured] = [item for item in graphs.ready.captured if item.kind == "generative_prefill"]
        assert (captured.count, len(captured.capture_seconds)) == (2, 2)
        assert graphs.counted("baton_prefix_cache_queried_tokens_total") == 0


def test_disaggregation_when_the_prompt_was_replayed_then_both_ends_say_so_and_tokens_are_the_colocated_ones():
    options: dict[str, object] = {"model": folder_of("grouped"), "load_format": "dummy", "device": "cuda"}
    options |= {"attention_backend": "triton", "max_num_batched_tokens": 128, "max_model_len": 512, "block_size": 16}
    with pair(prefill={**options, "prefill_graph": GRAPHS}, decode=options) as (p, d):
        tokens = serve(p, d, "a#0.00000000", prompt(60, 1), max_tokens=6)
        for side in (p, d):
            [info] = [output.prefill for output in side.outputs["a#0.00000000"] if output.prefill is not None]
            assert info.cuda_graph_status == "replayed"
        d.add("b#0.00000000", prompt(60, 1), RunMode.LOCAL, max_tokens=6)
        run_until([d], lambda: d.ended("b#0.00000000"))
        assert d.tokens("b#0.00000000") == tokens


# -- 23: captures that fail -------------------------------------------------------------------------------------

_START = """
import sys
from engine.config import EngineConfig
from engine.core import Wakeup
from engine.startup import start_core
from rpc.errors import BatonError
config = EngineConfig.from_json(sys.stdin.buffer.read())
try:
    core, ready = start_core(config, Wakeup())
except BatonError as error:
    print("failed", int(error.code), flush=True)
else:
    [ledger] = core.kv.ledgers()
    print("ready", ready.prefill_cuda_graph_init, ledger.reserved, flush=True)
import os
os._exit(0)
"""


def start_with(fault: str, **changes: object) -> list[str]:
    """What a fresh process says of its start."""
    config = EngineConfig(
        role="prefill",
        model=str(folder_of("grouped")),
        load_format="dummy",
        device="cuda",
        attention_backend="triton",
        block_size=16,
        num_kv_blocks=32,
        max_model_len=512,
        **{"prefill_graph": PrefillGraphSettings(enabled=True, max_requests=2, buckets=(16, 64)), **changes},
    )
    done = subprocess.run(
        [sys.executable, "-c", _START],
        input=config.to_json(),
        capture_output=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "BATON_FAULTS": fault},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode().split()


def test_capture_when_it_fails_before_it_begins_then_the_engine_starts_and_scratch_is_given_back():
    before = "prefill_graph.capture:raise=EXECUTION_EXCEPTION,phase=before"
    assert start_with(before) == ["ready", "capture_unavailable", "1"]
    failed = start_with(before, prefill_graph=GRAPHS)
    assert failed == ["failed", str(int(ErrorCode.PREFILL_GRAPH_UNSUPPORTED))]


@pytest.mark.parametrize("bucket", [64, 16])
def test_capture_when_it_fails_midway_then_the_start_fails(bucket):
    failed = start_with(f"prefill_graph.capture:raise=EXECUTION_EXCEPTION,phase=during,bucket={bucket}")
    assert failed == ["failed", str(int(ErrorCode.GRAPH_CAPTURE_DIRTY))]
