"""The whole path of a device, in Triton's interpreter on the CPU: fused layers, packed inputs, device sampler, graphs.

Beside it stands the runner of the CPU. Both compute float32, so tokens are equal and numbers within 1e-4.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine.layers import device as device_layers
from engine.layers.device_linear import measured_sizes
from engine.messages import SamplingParams
from engine.runner import device_inputs
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.capture import HostRecorder
from engine.runner.decode_status import DecodeGraphStatus
from engine.runner.device_inputs import DeviceInputs
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.sampling import SamplingRow
from kernels import jit, small_gemm_table
from kernels.metadata import DecodeLayout, PrefillLayout
from kernels.small_gemm import Config
from rpc.errors import BatonError, ErrorCode
from tests.extent import extended
from tests.unit.engine.real_engine import RealEngine
from tests.unit.engine.test_runner import generate, greedy, random_prompt, sampled
from tests.unit.engine.tiny_models import tiny_model

BLOCK = 16
BLOCKS = 40
TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.skipif(not jit.available("cpu"), reason="needs Triton in its interpreter (TRITON_INTERPRET=1)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, where rows hold NaN on purpose
]


def new_runner(
    name: str,
    backend: str,
    blocks: int = BLOCKS,
    dtype: str = "float32",
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
) -> ModelRunner:
    runner = ModelRunner(
        tiny_model(name),
        dtype,
        BLOCK,
        max_model_len=128,
        attention_backend=backend,
        device="cpu",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    runner.init_kv(blocks)
    return runner


@functools.cache
def graph_runner() -> ModelRunner:
    runner = new_runner("llama", "triton")
    captured = runner.capture_decode_graphs((1, 4))
    assert captured is not None
    assert (captured.kind, captured.count) == ("decode", 2)
    return runner


def pools(runner: ModelRunner) -> list[torch.Tensor]:
    return runner.kv_layers[FULL_GROUP]


def fill(runner: ModelRunner, blocks: list[int], seed: int = 0) -> None:
    """Random KV in blocks, as if something had been computed there."""
    generator = torch.Generator().manual_seed(seed)
    for pool in pools(runner):
        pool[blocks] = torch.randn(len(blocks), *pool.shape[1:], generator=generator)


def params(**fields: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=9, **fields), 3, (1, 2, 3), [4, 5, 4], ())


@pytest.mark.parametrize("name", [extended("llama-bias"), "mistral-window", "qwen3", extended("llama-rope-yarn")])
def test_greedy_tokens_and_kv_when_computed_by_the_device_path_then_equal_the_cpus(name: str) -> None:
    host, device = new_runner(name, "torch"), new_runner(name, "triton")
    assert device.device_steps is not None
    assert host.device_steps is None
    prompts = [random_prompt(length, seed=length) for length in (1, BLOCK, 21)]
    assert generate(device, prompts, count=3, chunk=16) == generate(host, prompts, count=3, chunk=16)
    for found, expected in zip(pools(device), pools(host), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_mixed_step_when_rows_decode_and_prefill_then_results_equal_the_cpus() -> None:
    results = []
    for backend in ("torch", "triton"):
        runner = new_runner("llama", backend)
        fill(runner, [1, 2, 3, 4])
        batch = StepBatch(
            [
                sampled("a", [7], 20, [1, 2], sampling=greedy(logprobs=2)),
                sampled("b", [8], 31, [3, 4], sampling=params(temperature=0.8, top_k=30, seed=5, logprobs=1)),
                BatchRow(
                    "c",
                    random_prompt(9),
                    16,
                    [4, 9],
                    False,
                    prompt_logprobs_from=18,
                    prompt_next_ids=random_prompt(9, 3),
                    num_prompt_logprobs=1,
                ),
                sampled("d", random_prompt(5, 4), 0, [10], sampling=params(temperature=0.0, presence_penalty=1.5)),
            ]
        )
        results.append(runner.execute(batch))
    for found, expected in zip(results[1].rows, results[0].rows, strict=True):
        assert found.token_id == expected.token_id
        assert (found.logprob is None) == (expected.logprob is None)
        if found.logprob is not None:
            assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=TOLERANCE)
            assert [t.token_id for t in found.top_logprobs] == [t.token_id for t in expected.top_logprobs]
        pairs = zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True)
        assert [p.position for p in found.prompt_logprobs] == [p.position for p in expected.prompt_logprobs]
        for mine, theirs in pairs:
            assert mine.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=TOLERANCE)
    assert len(results[1].rows[2].prompt_logprobs) == 8
    assert results[1].decode_status == DecodeGraphStatus.PREFILL_INPUT


@pytest.mark.parametrize("rows", [extended(1), extended(2), 3])
def test_g1_decode_graph_when_the_batch_is_padded_then_results_are_those_of_an_eager_step(rows: int) -> None:
    graphs, eager = graph_runner(), new_runner("llama", "triton")
    blocks = list(range(1, 1 + 2 * rows))
    for runner in (graphs, eager):
        for pool in pools(runner):
            pool.fill_(7.5)  # whatever a request holds, blocks that are nobody's included
        fill(runner, blocks, seed=rows)
    mine = [r for r in range(BLOCKS) if r not in blocks]

    def batch() -> StepBatch:
        return StepBatch(
            [sampled(str(r), [5 + r], 17 + 4 * r, [1 + 2 * r, 2 + 2 * r]) for r in range(rows)],
        )

    replayed, expected = graphs.execute(batch()), eager.execute(batch())
    assert replayed.decode_status == DecodeGraphStatus.REPLAYED
    assert replayed.decode_graph_rows == {1: 1, 2: 4, 3: 4}[rows]
    assert [row.token_id for row in replayed.rows] == [row.token_id for row in expected.rows]
    for found, reference in zip(pools(graphs), pools(eager), strict=True):
        # A product of more rows may round differently
        torch.testing.assert_close(found[blocks], reference[blocks], rtol=0, atol=TOLERANCE)
        assert (found[mine] == 7.5).all()  # the last block, which a slot of -1 would name, and block 0 among them


def test_decode_graph_when_lengths_tables_and_weights_change_then_replays_follow() -> None:
    runner, steps = graph_runner(), graph_runner().device_steps
    host = new_runner("llama", "torch")
    assert steps is not None
    addresses = [tensor.data_ptr() for tensor in (steps.inputs.buffers.token_ids, steps.inputs.buffers.block_tables)]
    for r in (runner, host):
        fill(r, list(range(1, 9)), seed=3)
    tables = {"a": [1, 2], "b": [3, 4], "c": [5, 6, 7]}
    for starts in ({"a": 17}, {"b": 31, "a": 18}, {"c": 40, "a": 19, "b": 20}, {"b": 1, "c": 16}):
        found, expected = (
            r.execute(StepBatch([sampled(key, [at], at, tables[key]) for key, at in starts.items()]))
            for r in (runner, host)
        )
        assert found.decode_status == DecodeGraphStatus.REPLAYED
        assert [row.token_id for row in found.rows] == [row.token_id for row in expected.rows]
    tables["a"].append(8)  # a table that grew in place
    found, expected = (r.execute(StepBatch([sampled("a", [9], 32, tables["a"])])) for r in (runner, host))
    assert found.rows[0].token_id == expected.rows[0].token_id
    for r in (runner, host):
        assert torch.equal(pools(r)[0][8, :, :, 0].any(-1), torch.ones(2, r.config.num_kv_heads, dtype=torch.bool))
    assert addresses == [t.data_ptr() for t in (steps.inputs.buffers.token_ids, steps.inputs.buffers.block_tables)]
    weight = runner.model.head.weight
    with torch.inference_mode():
        before = weight.clone()
        try:
            weight.copy_(before.flip(0))
            turned = runner.execute(StepBatch([sampled("a", [9], 32, tables["a"])]))
            assert turned.rows[0].token_id == runner.config.vocab_size - 1 - expected.rows[0].token_id
        finally:
            weight.copy_(before)


def test_decode_graph_when_preparing_it_fails_then_the_step_runs_eagerly_and_the_log_says_so_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = graph_runner()
    assert runner.device_steps is not None
    fill(runner, [1, 2], seed=4)
    batch = StepBatch([sampled("a", [7], 20, [1, 2])])
    expected = runner.execute(batch)
    assert expected.decode_status == DecodeGraphStatus.REPLAYED

    moved = StepBatch([sampled("b", [7], 20, [3, 4])])  # another request in the seat, with the same tokens
    for pool in pools(runner):
        pool[[3, 4]] = pool[[1, 2]]
        pool[[1, 2]] = 0

    def fail(plan: Any, rows: Any) -> None:
        raise RuntimeError("no plan for these rows")

    with monkeypatch.context() as broken:
        broken.setattr(runner.backend, "refresh", fail)
        for _ in range(3):
            found = runner.execute(moved)
            assert found.decode_status == DecodeGraphStatus.ERROR
            assert found.rows[0].token_id == expected.rows[0].token_id
        assert runner.device_steps.inputs.buffers.block_tables[0, :2].tolist() == [3, 4]
    records = [record for record in caplog.records if "decode graph could not be prepared" in record.message]
    assert [record.occurrences for record in records] == [1, 2]  # type: ignore[attr-defined]
    assert all(record.exc_info is not None for record in records)
    found = runner.execute(moved)
    assert found.decode_status == DecodeGraphStatus.REPLAYED
    assert found.rows[0].token_id == expected.rows[0].token_id


@pytest.mark.parametrize("fails", ["before", "during", "replay"])
def test_decode_capture_when_it_fails_then_steps_are_eager_or_once_it_has_begun_there_are_none(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = new_runner("llama", "triton", max_num_seqs=1, max_num_batched_tokens=16)
    batch = StepBatch([sampled("a", [7], 20, [1, 2])])

    def fail(*args: Any, **options: Any) -> Any:
        raise SystemExit if fails == "during" else RuntimeError("no room")

    if fails == "before":
        monkeypatch.setattr(runner.backend, "graph_plans", fail)
        assert runner.capture_decode_graphs((1,)) is None
        assert runner.execute(batch).decode_status == DecodeGraphStatus.CAPTURE_UNAVAILABLE
        return
    # In place of the recording, or of a replay that leaves what it finds
    monkeypatch.setattr(HostRecorder, "record", fail if fails == "during" else lambda *_: (Mock(spec=["replay"]), None))
    for act in (lambda: runner.capture_decode_graphs((1,)), lambda: runner.execute(batch)):
        with pytest.raises(BatonError) as refusal:
            act()
        assert refusal.value.code is ErrorCode.GRAPH_CAPTURE_DIRTY


def test_step_when_run_then_its_inputs_are_built_once_and_the_words_in_use_alone_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = graph_runner()
    assert runner.device_steps is not None
    runner.device_steps.inputs.forget_tables()
    built: list[str] = []
    copied: list[int] = []
    for name in ("decode", "prefill"):
        build = getattr(DeviceInputs, name)

        def counted(*args: Any, name: str = name, build: Any = build, **options: Any) -> Any:
            built.append(name)
            return build(*args, **options)

        monkeypatch.setattr(DeviceInputs, name, counted)
    copy = device_inputs._Staging.copy_to

    def recorded(staging: Any, target: torch.Tensor, count: int) -> None:
        copied.append(count)
        copy(staging, target, count)

    monkeypatch.setattr(device_inputs._Staging, "copy_to", recorded)
    tables = [[1, 2], [3, 4]]
    for start in (20, 21):
        rows = [sampled(str(r), [5], start, table) for r, table in enumerate(tables)]
        assert runner.execute(StepBatch(rows)).decode_status == DecodeGraphStatus.REPLAYED
    runner.execute(StepBatch([sampled("p", random_prompt(5), 0, [5])]))
    assert built == ["decode", "decode", "prefill"]
    assert copied == [DecodeLayout(2, 2, 2).words, DecodeLayout(2, 0, 0).words, PrefillLayout(1, 5, 1, 1).words]


def test_decode_graph_when_rows_are_drawn_or_ask_for_logprobs_then_they_are_sampled_from_the_graphs_logits() -> None:
    results = []
    for runner in (new_runner("llama", "torch"), graph_runner()):
        fill(runner, [1, 2, 3, 4], seed=9)
        rows = [
            sampled("a", [7], 20, [1, 2], sampling=params(temperature=1.0, seed=11, top_p=0.9, logprobs=2)),
            sampled("b", [8], 31, [3, 4], sampling=params(temperature=0.0, logit_bias={17: 100.0})),
        ]
        results.append(runner.execute(StepBatch(rows)))
    assert results[1].decode_status == DecodeGraphStatus.REPLAYED
    assert [row.token_id for row in results[1].rows] == [row.token_id for row in results[0].rows]
    assert results[1].rows[1].token_id == 17
    logprobs = [[entry.logprob for entry in result.rows[0].top_logprobs] for result in results]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=TOLERANCE)


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_when_their_numbers_are_not_finite_then_they_fail_alone_and_leave_clean_blocks(graphs: bool) -> None:
    runner = graph_runner() if graphs else new_runner("llama", "triton")
    fill(runner, list(range(1, 9)), seed=1)
    good = sampled("good", [5], 20, [1, 2])
    expected = runner.execute(StepBatch([good])).rows[0].token_id
    pools(runner)[1][[5, 7]] = torch.nan
    rows = [sampled("bad", [3], 17, [5, 6]), good]
    if not graphs:
        rows.append(BatchRow("chunk", random_prompt(20), 16, [7, 8, 9], False))
    found = runner.execute(StepBatch(rows)).rows
    assert (found[1].token_id, found[1].failure) == (expected, None)
    for row in (found[0], *found[2:]):
        assert row.failure is not None
        assert row.failure.code is ErrorCode.EXECUTION_EXCEPTION
        assert row.token_id is None
    for pool in pools(runner):
        written = [6] if graphs else [6, 8, 9]
        assert torch.isfinite(pool[written]).all()
        pool[[5, 7]] = 0


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (BatchRow("r", [], 0, [1], False), "no tokens"),
        (BatchRow("r", [1], -1, [1], True, greedy()), "negative start"),
        (BatchRow("r", [1, 2], 15, [1], False), "2 blocks"),
        (BatchRow("r", [1], 16, [1], True, greedy()), "2 blocks"),
        (BatchRow("r", [1], 0, [0], True, greedy()), "block ids"),
        (BatchRow("r", [1], 0, [BLOCKS], True, greedy()), "block ids"),
        (BatchRow("r", [1], 16, [0, 1], True, greedy()), "block ids"),
        (BatchRow("r", [1], 0, list(range(1, 10)), True, greedy()), "at most 8"),
        (BatchRow("r", [1], 0, [1], True), "sampling"),
        (BatchRow("r", [1, 2], 0, [1], False, greedy()), "sampling"),
        (BatchRow("r", [1] * 65, 0, [1, 2, 3, 4, 5], False), "at most 64"),
    ],
)
def test_step_when_a_row_points_outside_its_blocks_then_raises_and_leaves_the_pool(row: BatchRow, named: str) -> None:
    runner = new_runner("llama", "triton")
    with pytest.raises(ValueError, match=named):
        runner.execute(StepBatch([sampled("good", [1], 0, [2]), row]))
    assert not any(pool.any() for pool in pools(runner))
    assert runner.execute(StepBatch([sampled("good", [1], 0, [2])])).rows[0].failure is None


def test_bfloat16_when_computed_by_the_device_path_then_logits_are_near_the_cpus() -> None:
    host, device = new_runner("qwen3", "torch", dtype="bfloat16"), new_runner("qwen3", "triton", dtype="bfloat16")
    row = sampled("r", random_prompt(13), 0, [1], sampling=greedy(logprobs=4))
    found, expected = (r.execute(StepBatch([row])).rows[0] for r in (device, host))
    for mine, theirs in zip(found.top_logprobs, expected.top_logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=0.1)


def test_few_rows_when_their_products_take_kernels_of_their_own_then_tokens_and_kv_equal_the_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = {1: Config(32, 32, vector=True), **dict.fromkeys(range(2, 18), Config(32, 32))}
    monkeypatch.setattr(small_gemm_table, "configs_for", lambda weight, gated=False: configs)
    host, device = new_runner("qwen3", "torch"), new_runner("qwen3", "triton")
    prompt = random_prompt(18)
    assert generate(device, [prompt], count=3, chunk=17) == generate(host, [prompt], count=3, chunk=17)
    for found, expected in zip(pools(device), pools(host), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_long_prompt_when_its_products_add_to_the_stream_themselves_then_tokens_equal_the_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_layers, "_ACCUMULATE_FROM", 8)
    host, device = new_runner("llama-bias", "torch"), new_runner("llama-bias", "triton")
    prompts = [random_prompt(20)]
    assert generate(device, prompts, count=2, chunk=20) == generate(host, prompts, count=2, chunk=20)
    for found, expected in zip(pools(device), pools(host), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_runner_when_warmed_up_then_every_size_of_the_tables_has_run_the_pool_is_clean_and_steps_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, host = (
        new_runner("llama", "triton", max_num_seqs=3, max_num_batched_tokens=18),
        new_runner("llama", "torch"),
    )
    steps = runner.device_steps
    assert steps is not None
    ran: list[list[int]] = []
    launch = steps.launch

    def noted(batch: StepBatch, on_layer: Any) -> Any:
        ran.append([len(row.token_ids) for row in batch.rows])
        return launch(batch, on_layer)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "launch", noted)
        runner.warm_up()
    assert [1] * 3 in ran  # the most rows, which are no power of two
    assert {min(size, 18) for size in measured_sizes()} == {lengths[0] for lengths in ran if len(lengths) == 1} - {2}
    assert not any(pool.any() for pool in pools(runner))
    row = sampled("r", random_prompt(9), 0, [1])
    assert runner.execute(StepBatch([row])).rows[0].token_id == host.execute(StepBatch([row])).rows[0].token_id


def test_largest_step_when_run_to_measure_memory_then_no_block_is_written_and_positions_are_each_rows_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ModelRunner(
        tiny_model("llama"),
        "float32",
        BLOCK,
        max_model_len=32,
        attention_backend="triton",
        device="cpu",
        max_num_seqs=2,
        max_num_batched_tokens=72,
    )
    runner.init_kv(2)
    steps = runner.device_steps
    assert steps is not None
    seen: list[list[int]] = []
    angles = runner.model.rotary.angles
    monkeypatch.setattr(runner.model.rotary, "angles", lambda where: seen.append(where.tolist()) or angles(where))
    with torch.inference_mode():
        steps.run_largest()
    assert seen == [[*range(32), *range(32), *range(8)]]
    assert not any(pool.any() for pool in pools(runner))


@pytest.mark.slow
@pytest.mark.extended
def test_engine_when_its_decode_steps_are_replayed_then_they_are_counted_and_tokens_are_the_cpus() -> None:
    options = {"max_num_seqs": 2, "num_kv_blocks": 16, "max_model_len": 64, "max_num_batched_tokens": 32}
    found = {}
    for backend in ("torch", "triton"):
        graphs = backend == "triton"
        with RealEngine(
            "decode",
            attention_backend=backend,
            device="cpu",
            enable_cuda_graph=graphs,
            decode_capture_sizes=(2,),
            **options,
        ) as engine:
            assert [entry.kind for entry in engine.ready.captured] == (["decode"] if graphs else [])
            engine.add("a", random_prompt(11), max_tokens=4)
            engine.run()
            found[backend] = engine.tokens("a")
            status = "replayed" if graphs else "not_requested"
            assert engine.counted("baton_decode_cuda_graph_steps_total", status=status) == 3
            assert engine.counted("baton_decode_cuda_graph_padded_rows_total") == (3 if graphs else 0)
    assert found["triton"] == found["torch"]
