"""The engine's runner on a GPU: tokens of transformers, graphs beside eager steps, no waiting, start-up."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.shapes import write_folder
from engine.attention.table import Measurement, Table
from engine.loader.checkpoint import DummyCheckpoint
from engine.messages import SamplingParams
from engine.runner import device_steps
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.decode_status import DecodeGraphStatus
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.sampling import SamplingRow
from rpc.errors import ErrorCode
from tests.unit.engine.prefill_graph.graph_runners import CHANGES
from tests.unit.engine.test_runner import generate, greedy, random_prompt, sampled
from tests.unit.engine.tiny_models import EOS_TOKEN_ID, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK = 16
BLOCKS = 512
BACKENDS = ["triton", "flashinfer"]
_PRODUCTS = ("gemm", "gemv", "splitk", "cutlass", "nvjet", "cublas", "memset", "_vector_kernel")


def new_runner(folder: Path, dtype: str, backend: str = "triton", blocks: int = 0, **options: Any) -> ModelRunner:
    options = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256} | options
    if backend == "flashinfer":
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
        options |= {"block_size": 64}
    runner = ModelRunner(
        folder,
        dtype,
        options.pop("block_size", BLOCK),
        options.pop("max_model_len"),
        options.pop("load_format", "auto"),
        backend,
        "cuda",
        options.pop("max_num_seqs"),
        options.pop("max_num_batched_tokens"),
    )
    runner.init_kv(blocks or BLOCKS)
    return runner


@functools.cache
def reference_model(name: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32).cuda().eval()


def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    found = model.generate(
        torch.tensor([prompt], device="cuda"),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device="cuda"),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=EOS_TOKEN_ID,
    )
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@functools.cache
def graph_runner(backend: str = "triton") -> ModelRunner:
    """A tiny bfloat16 model with decode graphs."""
    runner = new_runner(small_folder(), "bfloat16", backend, load_format="dummy")
    captured = runner.capture_decode_graphs((1, 4, 8, 16))
    assert captured is not None
    assert captured.count == 4
    assert captured.memory_bytes > 0
    return runner


@functools.cache
def small_folder(**changes: Any) -> Path:
    import tempfile

    parent = Path(tempfile.mkdtemp(prefix="baton-gpu-tests-"))
    facts = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,  # as FlashInfer is compiled for: every further size takes it a minute or two
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return write_folder("llama-1b", parent, **(facts | changes))


def pools(runner: ModelRunner) -> list[torch.Tensor]:
    return runner.kv_layers[FULL_GROUP]


def fill(runner: ModelRunner, seed: int = 0) -> None:
    """Random KV everywhere."""
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.inference_mode():
        for pool in pools(runner):
            pool.normal_(generator=generator)


def decode_batch(runner: ModelRunner, rows: int, start: int = 40, seed: int = 0) -> StepBatch:
    """Rows of different lengths over blocks of their own, in random order."""
    starts = [start + 13 * row % 100 for row in range(rows)]
    per_row = -(-(max(starts) + 1) // runner.block_size)
    order = (1 + torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(seed))).tolist()
    tables = [order[row * per_row : (row + 1) * per_row] for row in range(rows)]
    assert len(tables[-1]) == per_row
    return StepBatch([sampled(str(r), [r * 31 % 4096], starts[r], tables[r]) for r in range(rows)])


# -- tokens of transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama-rope-llama3", "mistral-window", "qwen2", "qwen3", "llama-bias"])
def test_greedy_tokens_when_float32_then_equal_transformers(name: str, graphs: bool) -> None:
    runner = new_runner(tiny_model(name), "float32")
    if graphs:
        assert runner.capture_decode_graphs((1, 4, 8)) is not None
    prompts = [random_prompt(length, seed=length) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 50)]
    found = generate(runner, prompts, count=12, chunk=20)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == reference_tokens(reference_model(name), prompt, 12)


@pytest.mark.parametrize("name", ["llama-rope-llama3", "mistral-window", "qwen3"])
def test_long_prompts_when_the_last_layer_is_for_last_tokens_alone_then_logits_are_those_of_the_whole_pass(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A decode row, a chunk, the end of a prompt and a whole one, more tokens than a step leaves out at the least."""
    tables = [list(range(1 + 24 * row, 1 + 24 * (row + 1))) for row in range(4)]
    texts = [random_prompt(length, seed=length) for length in (1, 200, 190, 230)]
    starts = [100, 128, 40, 0]
    rows = [
        BatchRow("chunk", texts[1], starts[1], tables[1], False)
        if row == 1
        else sampled(str(row), texts[row], starts[row], tables[row])
        for row in range(4)
    ]
    logits = []
    for fewest in (512, 1 << 30):
        monkeypatch.setattr(device_steps, "_FEWEST_OTHERS", fewest)
        runner = new_runner(tiny_model(name), "float32", max_num_batched_tokens=1024, blocks=100)
        generator = torch.Generator("cuda").manual_seed(5)
        for pool in runner.kv_layers[FULL_GROUP]:
            pool[1:].normal_(generator=generator)
        results = runner.execute(StepBatch(rows)).rows
        assert [result.failure for result in results] == [None] * 4
        assert [result.token_id is None for result in results] == [False, True, False, False]
        assert runner.device_steps is not None
        logits.append(runner.device_steps.logits[:3].clone())
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def billion(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model of 1B size: its folder, and the model in transformers with the same weights, float32."""
    import transformers

    folder = write_folder("llama-1b", tmp_path_factory.mktemp("models"), max_position_embeddings=512)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to_empty(device="cuda").eval()
    source = DummyCheckpoint()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source.read_into(name, parameter)
        model.model.rotary_emb = type(model.model.rotary_emb)(config).cuda()
        model.tie_weights()
    return folder, model


@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_tokens_when_a_billion_random_weights_then_equal_transformers(
    billion: tuple[Path, Any], graphs: bool
) -> None:
    folder, model = billion
    runner = new_runner(folder, "float32", load_format="dummy", blocks=64)
    if graphs:
        assert runner.capture_decode_graphs((1, 4)) is not None
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, 128000, (length,), generator=generator).tolist() for length in (7, 40, 90)]
    found = generate(runner, prompts, count=10, chunk=64)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == reference_tokens(model, prompt, 10)


def test_logits_when_bfloat16_then_are_near_the_float32_models(billion: tuple[Path, Any]) -> None:
    folder, model = billion
    runner = new_runner(folder, "bfloat16", load_format="dummy", blocks=32)
    prompt = torch.randint(3, 128000, (70,), generator=torch.Generator().manual_seed(5)).tolist()
    assert runner.device_steps is not None
    row = runner.execute(StepBatch([sampled("r", prompt, 0, list(range(1, 9)))])).rows[0]
    assert row.failure is None
    found = runner.device_steps.logits[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt], device="cuda")).logits[0, -1]
    error = (found - expected).norm() / expected.norm()
    assert error < 0.05, error  # float32 accumulators and residual stream, bfloat16 weights and activations


# -- graphs beside eager steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16])
def test_g2_replay_when_compared_with_an_eager_run_of_the_padded_batch_then_is_bitwise_equal(
    backend: str, rows: int
) -> None:
    runner = graph_runner(backend)
    steps = runner.device_steps
    assert steps is not None
    graphs = steps.decode_graphs
    assert graphs is not None
    batch = decode_batch(runner, rows, seed=rows)
    fill(runner, rows)
    result = runner.execute(batch)
    size = result.decode_graph_rows
    assert result.decode_status == DecodeGraphStatus.REPLAYED
    replayed, written = steps.logits[:size].clone(), [pool.clone() for pool in pools(runner)]
    fill(runner, rows)
    with torch.inference_mode():
        inputs = graphs.stage(batch, size)
        graphs.run_eager(size, graphs.refresh(inputs, size).plan)
    assert torch.equal(steps.logits[:size], replayed)
    for pool, expected in zip(pools(runner), written, strict=True):
        assert torch.equal(pool, expected)
    fill(runner, rows)
    eager = new_runner_without_graphs(backend)
    for pool, source in zip(pools(eager), pools(runner), strict=True):
        pool.copy_(source)
    unpadded = eager.execute(batch)
    assert eager.device_steps is not None
    torch.testing.assert_close(eager.device_steps.logits[:rows], replayed[:rows], rtol=0.02, atol=0.05)
    assert unpadded.decode_status == DecodeGraphStatus.NOT_REQUESTED


@functools.cache
def new_runner_without_graphs(backend: str) -> ModelRunner:
    return new_runner(small_folder(), "bfloat16", backend, load_format="dummy")


def test_g1_replay_when_the_batch_is_padded_then_blocks_of_others_stay() -> None:
    runner = graph_runner()
    for rows in range(1, 16):
        batch = StepBatch([sampled(str(r), [r], 20, [1 + 2 * r, 2 + 2 * r]) for r in range(rows)])
        others = torch.ones(BLOCKS, dtype=torch.bool, device="cuda")
        others[1 : 1 + 2 * rows] = False
        with torch.inference_mode():
            for pool in pools(runner):
                pool.fill_(7.5)
        assert runner.execute(batch).decode_status == DecodeGraphStatus.REPLAYED
        for pool in pools(runner):
            assert bool((pool[others] == 7.5).all())


def test_replay_when_lengths_tables_and_weights_change_then_they_take_effect_at_the_same_addresses() -> None:
    runner, eager = graph_runner(), new_runner_without_graphs("triton")
    steps = runner.device_steps
    assert steps is not None
    assert eager.device_steps is not None
    buffers = steps.inputs.buffers
    tensors = [getattr(buffers, name) for name in buffers.__dataclass_fields__] + [steps.logits, steps.sampler.tokens]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for turn in range(10):
        batch = decode_batch(runner, 1 + turn * 5 % 8, start=1 + 37 * turn, seed=turn)
        for each in (runner, eager):
            fill(each, turn)
            result = each.execute(batch)
            assert all(row.failure is None for row in result.rows)
        count = len(batch.rows)
        torch.testing.assert_close(
            steps.logits[:count], eager.device_steps.logits[:count], rtol=0.02, atol=0.05, msg=f"turn {turn}"
        )
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    weight = runner.model.head.weight
    batch = decode_batch(runner, 3)
    before = runner.execute(batch)
    logits = steps.logits[:3].clone()
    with torch.inference_mode():
        kept = weight.clone()
        weight.copy_(kept.flip(0))
        after = runner.execute(batch)
        weight.copy_(kept)
    assert after.decode_status == before.decode_status == DecodeGraphStatus.REPLAYED
    torch.testing.assert_close(steps.logits[:3], logits.flip(1), rtol=1e-3, atol=1e-3)


def test_replay_when_rope_parameters_or_weights_change_then_it_follows() -> None:
    runner, eager = (new_runner(small_folder(), "bfloat16", load_format="dummy") for _ in range(2))
    assert runner.capture_decode_graphs((4,)) is not None
    batch = decode_batch(runner, 3)

    def run(each: ModelRunner) -> torch.Tensor:
        fill(each, 3)
        found = each.execute(batch)
        assert (found.decode_status == DecodeGraphStatus.REPLAYED) is (each is runner)
        assert each.device_steps is not None
        return each.device_steps.logits[:3].clone()

    before = run(runner)
    for name, change in CHANGES.items():
        with torch.inference_mode():
            for each in (runner, eager):
                change(each.model)
        after, expected = run(runner), run(eager)
        assert (after - before).norm() > 0.1 * before.norm(), name
        assert (after - expected).norm() < 0.05 * expected.norm(), name
        before = after


@pytest.mark.parametrize("backend", BACKENDS)
def test_g2_steps_when_thousand_of_mixed_sizes_run_then_addresses_stay_and_tokens_equal_eager_ones(
    backend: str,
) -> None:
    runner = graph_runner(backend)
    steps = runner.device_steps
    assert steps is not None
    buffers = steps.inputs.buffers
    tensors = [getattr(buffers, name) for name in buffers.__dataclass_fields__] + [steps.logits, steps.sampler.tokens]
    addresses = [tensor.data_ptr() for tensor in tensors]
    expected: dict[tuple[int, int], list[int | None]] = {}
    for turn in range(1000):
        rows, start = 1 + turn * 7 % 16, 1 + turn % 5 * 60
        fill(runner, 2)  # the step before has changed it
        batch = decode_batch(runner, rows, start=start, seed=3)
        tokens = [row.token_id for row in runner.execute(batch).rows]
        assert expected.setdefault((rows, start), tokens) == tokens, (turn, rows, start)
    buffers = steps.inputs.buffers
    tensors = [getattr(buffers, name) for name in buffers.__dataclass_fields__] + [steps.logits, steps.sampler.tokens]
    assert addresses == [tensor.data_ptr() for tensor in tensors]


def test_graphs_when_each_backend_wins_for_some_lengths_then_a_step_replays_the_one_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    shapes = {16: {"triton": 1.0, "flashinfer": 9.0}, 256: {"triton": 90.0, "flashinfer": 1.0}}
    table = Table("", tuple(Measurement("decode", 128, 4, 4, tokens, us) for tokens, us in shapes.items()))
    monkeypatch.setattr("engine.attention.table.table_for", lambda name, capability: table)
    options: dict[str, Any] = {"load_format": "dummy", "block_size": 64}
    runner = new_runner(small_folder(), "bfloat16", "auto", **options)
    eager = new_runner(small_folder(), "bfloat16", "triton", **options)
    captured = runner.capture_decode_graphs((4,))
    assert captured is not None
    assert (captured.count, runner.attention_backend) == (2, "triton+flashinfer")
    steps = runner.device_steps
    assert steps is not None
    assert steps.decode_graphs is not None
    assert eager.device_steps is not None
    for start, name in ((1, "triton"), (300, "flashinfer"), (2, "triton"), (200, "flashinfer")):
        batch = decode_batch(runner, 3, start=start, seed=start)
        for each in (runner, eager):
            fill(each, start)
            each.execute(batch)
        graph = steps.decode_graphs.latest
        assert graph is not None
        assert graph.plan.decode.backend.name == name
        found, expected = steps.logits[:3], eager.device_steps.logits[:3]
        assert (found - expected).norm() < 0.05 * expected.norm(), name


def test_batch_when_it_exceeds_the_largest_graph_then_runs_eagerly_and_says_so() -> None:
    runner = new_runner(small_folder(), "bfloat16", load_format="dummy")
    assert runner.capture_decode_graphs((1, 2)) is not None
    eager = new_runner_without_graphs("triton")
    for each in (runner, eager):
        fill(each, 4)
    batch = decode_batch(runner, 3)
    found, expected = runner.execute(batch), eager.execute(batch)
    assert found.decode_status == DecodeGraphStatus.BATCH_EXCEEDS_CAPTURE_LIMIT
    assert [row.token_id for row in found.rows] == [row.token_id for row in expected.rows]
    chunk = runner.execute(StepBatch([BatchRow("c", [1, 2, 3], 0, [5], False)]))
    assert chunk.decode_status == DecodeGraphStatus.PREFILL_INPUT


# -- no waiting, few launches ----------------------------------------------------------------------------------


def rows_of_kind(runner: ModelRunner, rows: int, kind: str) -> StepBatch:
    batch = decode_batch(runner, rows)
    if kind == "drawn":
        for index, row in enumerate(batch.rows):
            params = SamplingParams(max_tokens=9, temperature=0.8, top_k=40, top_p=0.9, seed=index, logprobs=3)
            row.sampling = SamplingRow(params, index, (1, 2), [3], ())
    if kind == "penalised":
        for row in batch.rows:
            params = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.3, logit_bias={5: 1.0})
            row.sampling = SamplingRow(params, 1, (1, 2), [3, 4], ())
    if kind in ("logprobs", "mixed"):
        for index, row in enumerate(batch.rows):
            fields: dict[str, Any] = {"logprobs": 2} if kind == "logprobs" or index % 4 == 0 else {}
            if kind == "mixed" and index % 4 == 1:
                fields = {"repetition_penalty": 1.3}
            temperature = 0.7 if kind == "mixed" and index % 4 == 2 else 0.0
            params = SamplingParams(max_tokens=9, temperature=temperature, seed=index, **fields)
            row.sampling = SamplingRow(params, 1, (1, 2), [3, 4], ())
    if kind == "prompts":
        batch = StepBatch([sampled(str(r), list(range(5, 25)), 0, row.block_table) for r, row in enumerate(batch.rows)])
    if kind == "prefix":
        batch = StepBatch(
            [
                *(row for row in batch.rows[: rows // 2]),
                *(
                    BatchRow(str(r), list(range(5, 15)), 30, row.block_table, False)
                    for r, row in enumerate(batch.rows[rows // 2 :])
                ),
            ]
        )
    return batch


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalised", "logprobs", "mixed", "prompts", "prefix"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_step_when_anything_that_waits_raises_then_it_runs(backend: str, graphs: bool, kind: str) -> None:
    runner = graph_runner(backend) if graphs else new_runner_without_graphs(backend)
    fill(runner, 1)
    batch = rows_of_kind(runner, 6, kind)
    runner.execute(batch)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = runner.execute(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(row.failure is None for row in result.rows)


def on_device(runner: ModelRunner, batch: StepBatch) -> list[str]:
    """Names of what a step runs on the device, in order; copies among them."""
    from torch.profiler import ProfilerActivity, profile

    runner.execute(batch)
    for row in batch.rows:
        if row.sampling is not None:  # as a step leaves it for the next one
            row.sampling.output_token_ids = [*row.sampling.output_token_ids, 8]
            row.sampling.token_index += 1
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        runner.execute(batch)
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def launches(runner: ModelRunner, batch: StepBatch) -> list[str]:
    """Without products: cuBLAS may split one of few rows in two launches, and a number of rows has a kernel of its
    own."""
    return [name for name in on_device(runner, batch) if not any(part in name.lower() for part in _PRODUCTS)]


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalised", "logprobs", "mixed"])
@pytest.mark.parametrize("graphs", [False, True])
def test_launches_when_the_batch_grows_then_are_as_many(graphs: bool, kind: str) -> None:
    runner = graph_runner() if graphs else new_runner_without_graphs("triton")
    fill(runner, 1)
    found = {rows: launches(runner, rows_of_kind(runner, rows, kind)) for rows in (4, 5, 8, 11, 16)}
    counts = {rows: len(names) for rows, names in found.items()}
    assert len(set(counts.values())) == 1, (counts, found[4], found[16])
    assert counts[4] > 0


# What may come from the device to the host in a step: copies, into pinned memory alone
_TO_HOST = {"greedy": 1, "drawn": 2, "penalised": 1, "logprobs": 2, "mixed": 2, "prompts": 1, "prefix": 2}


@pytest.mark.parametrize("kind", _TO_HOST)
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_when_a_step_runs_then_tokens_flags_and_logprobs_alone_come_to_the_host(
    backend: str, graphs: bool, kind: str
) -> None:
    """Of prompts' chunks also whether they are finite. tests/unit/engine/test_step_launches.py has the bytes."""
    runner = graph_runner(backend) if graphs else new_runner_without_graphs(backend)
    fill(runner, 1)
    names = on_device(runner, rows_of_kind(runner, 8, kind))
    to_host = [name for name in names if "DtoH" in name]
    assert len(to_host) == _TO_HOST[kind], names
    assert all("Pinned" in name for name in to_host), to_host
    if backend == "triton":  # FlashInfer's own plan of an eager step copies a constant from pageable memory
        to_device = [name for name in names if "HtoD" in name]
        assert all("Pinned" in name for name in to_device), to_device


# -- values that are not finite --------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_when_their_numbers_are_not_finite_then_they_fail_alone_and_leave_clean_blocks(graphs: bool) -> None:
    runner = graph_runner() if graphs else new_runner_without_graphs("triton")
    fill(runner, 6)
    good = sampled("good", [5], 20, [1, 2], sampling=greedy())
    expected = runner.execute(StepBatch([good, good])).rows[0].token_id
    with torch.inference_mode():
        for block in (5, 7):
            pools(runner)[1][block] = torch.nan
    rows = [sampled("bad", [3], 17, [5, 6]), good]
    if not graphs:
        rows.append(BatchRow("chunk", list(range(20)), 16, [7, 8, 9], False))
    found = runner.execute(StepBatch(rows)).rows
    assert (found[1].token_id, found[1].failure) == (expected, None)
    for row in (found[0], *found[2:]):
        assert row.failure is not None
        assert row.failure.code is ErrorCode.EXECUTION_EXCEPTION
    for pool in pools(runner):
        assert bool(torch.isfinite(pool[6]).all())


# -- start-up --------------------------------------------------------------------------------------------------


def test_weights_when_read_from_safetensors_then_are_those_of_the_file() -> None:
    from safetensors import safe_open

    folder = tiny_model("llama")
    runner = new_runner(folder, "float32")
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        expected = torch.cat([stored.get_tensor(f"model.layers.1.self_attn.{n}_proj.weight") for n in "qkv"])
        embedding = stored.get_tensor("model.embed_tokens.weight")
    assert torch.equal(runner.model.layers[1].attention.qkv.weight.cpu(), expected)
    assert torch.equal(runner.model.embedding.table.cpu(), embedding)


def test_upload_when_a_tensor_is_larger_than_a_piece_then_arrives_whole() -> None:
    from engine.loader.upload import Upload

    source = torch.randn(40_000_001)
    out = torch.empty(source.shape, dtype=torch.bfloat16, device="cuda")
    Upload(torch.device("cuda")).copy(source, out)
    assert torch.equal(out.cpu(), source.to(torch.bfloat16))


def test_memory_when_measured_then_the_pool_that_it_allows_can_be_made() -> None:
    from engine.config import EngineConfig
    from engine.memory import device_kv_blocks

    runner = new_runner(small_folder(), "bfloat16", load_format="dummy")
    memory = runner.measure_device()
    assert memory.step_peak > 0
    assert memory.free <= memory.total
    config = EngineConfig(role="decode", model="m", block_size=BLOCK, gpu_memory_utilization=0.5)
    blocks = device_kv_blocks(config, memory, bytes_per_block=runner.kv_bytes_per_block(), max_model_len=512, graphs=8)
    runner.init_kv(blocks + 1)
    assert runner.execute(decode_batch(runner, 2)).rows[0].failure is None
    runner.kv_layers[FULL_GROUP].clear()


def test_graph_debug_when_asked_for_then_each_graph_is_written(tmp_path: Path) -> None:
    runner = new_runner(small_folder(), "bfloat16", load_format="dummy")
    assert runner.capture_decode_graphs((1, 2), tmp_path) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode_1.dot", "decode_2.dot"]


@pytest.mark.skipif(os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", reason="runs with it already")
def test_step_when_launches_block_then_it_runs() -> None:
    """A failing launch is then reported where it happened."""
    import subprocess
    import sys

    code = (
        "from tests.gpu.test_engine_runner import *\n"
        "runner = new_runner(tiny_model('llama'), 'float32')\n"
        "print(json.dumps(generate(runner, [random_prompt(20)], 4, 64)))\n"
    )
    environment = os.environ | {"CUDA_LAUNCH_BLOCKING": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=True
    )
    assert json.loads(found.stdout.strip().splitlines()[-1]) == generate(
        new_runner(tiny_model("llama"), "float32"), [random_prompt(20)], 4, 64
    )
