"""ModelRunner: whole steps with sampling, the pool's layout, callbacks, and what it refuses."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from engine.messages import SamplingParams
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.sampling import SamplingRow
from kernels.cpu import library
from rpc.errors import ErrorCode
from tests.unit.engine.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

BLOCK = 16


@functools.cache
def reference_model(name: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32).eval()


def new_runner(name: str = "llama", blocks: int = 64, **arguments: Any) -> ModelRunner:
    runner = ModelRunner(tiny_model(name), arguments.pop("dtype", "float32"), BLOCK, **arguments)
    runner.init_kv(blocks)
    return runner


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(logprobs: int = -1) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=1, temperature=0.0, logprobs=logprobs), 0, (), (), ())


def sampled(key: str, token_ids: list[int], start: int, table: list[int], **fields: Any) -> BatchRow:
    return BatchRow(key, token_ids, start, table, True, fields.pop("sampling", greedy()), **fields)


def generate(runner: ModelRunner, prompts: list[list[int]], count: int, chunk: int) -> list[list[int]]:
    """Greedy tokens of several requests: prefilled in chunks one after the other, then decoded together."""
    tables, free = [], 1
    for prompt in prompts:
        blocks = -(-(len(prompt) + count) // BLOCK)
        tables.append(list(range(free, free + blocks)))
        free += blocks
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            last = start + len(part) == len(prompt)
            row = sampled("p", part, start, tables[i]) if last else BatchRow("p", part, start, tables[i], False)
            result = runner.execute(StepBatch([row])).rows[0]
            assert (result.token_id is not None) == last
        outputs[i].append(result.token_id)
    for step in range(count - 1):
        rows = [sampled(str(i), outputs[i][-1:], len(prompt) + step, tables[i]) for i, prompt in enumerate(prompts)]
        for output, result in zip(outputs, runner.execute(StepBatch(rows)).rows, strict=True):
            output.append(result.token_id)
    return outputs


@pytest.mark.parametrize("name", ["llama-rope-llama3", "mistral-window", "qwen2", "qwen3"])
def test_greedy_tokens_when_decoded_together_then_equal_transformers_generate(name: str) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 50)]
    found = generate(new_runner(name), prompts, count=12, chunk=20)
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = reference_model(name).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=EOS_TOKEN_ID,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_pool_when_a_prompt_is_computed_then_holds_keys_and_values_in_the_documented_layout() -> None:
    runner = new_runner("llama-tied")
    assert runner.groups[0].tag == FULL_GROUP
    pools = runner.kv_layers[FULL_GROUP]
    config = runner.config
    shape = (64, 2, config.num_kv_heads, BLOCK, config.head_dim)
    assert [tuple(pool.shape) for pool in pools] == [shape] * config.num_layers
    assert runner.kv_bytes_per_block() == sum(pool[0].numel() * pool.element_size() for pool in pools)
    prompt, table = random_prompt(37), [9, 2, 30]
    runner.execute(StepBatch([BatchRow("r", prompt, 0, table, False)]))
    with torch.inference_mode():
        cache = reference_model("llama-tied")(torch.tensor([prompt]), use_cache=True).past_key_values
    for layer, pool in enumerate(pools):
        held = pool[table].permute(1, 2, 0, 3, 4).reshape(2, config.num_kv_heads, 48, config.head_dim)
        for index, expected in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            torch.testing.assert_close(held[index, :, :37], expected[0], rtol=0, atol=1e-4)
        assert not held[:, :, 37:].any()
        unused = [block for block in range(64) if block not in table]
        assert not pool[unused].any()  # block 0 among them


def test_on_layer_when_a_step_runs_then_is_called_in_order_with_the_layers_kv_in_the_pool() -> None:
    runner = new_runner()
    pools = runner.kv_layers[FULL_GROUP]
    seen: list[tuple[str, int, list[bool]]] = []

    def on_layer(group: str, layer: int) -> None:
        seen.append((group, layer, [bool(pool[5].any()) for pool in pools]))

    runner.execute(StepBatch([BatchRow("r", random_prompt(4), 0, [5], False)]), on_layer)
    assert seen == [(FULL_GROUP, i, [j <= i for j in range(3)]) for i in range(3)]


def test_result_when_rows_are_mixed_then_keeps_their_order_and_samples_only_where_asked() -> None:
    runner = new_runner()
    prompts = [random_prompt(5, 1), random_prompt(30, 2), random_prompt(18, 3)]
    for i, prompt in enumerate(prompts[:2]):
        runner.execute(StepBatch([BatchRow("p", prompt[:-1], 0, [10 * i + 1, 10 * i + 2], False)]))
    batch = StepBatch(
        [
            sampled("a", prompts[0][-1:], 4, [1, 2]),
            sampled("b", prompts[1][-1:], 29, [11, 12], sampling=greedy(logprobs=2)),
            BatchRow("c", prompts[2][:10], 0, [21, 22], False),
            sampled("d", prompts[2], 0, [31, 32]),
        ]
    )
    result = runner.execute(batch)
    with torch.inference_mode():
        logits = [reference_model("llama")(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    expected = [int(row.argmax()) for row in logits]
    assert [row.token_id for row in result.rows] == [expected[0], expected[1], None, expected[2]]
    assert [row.logprob is not None for row in result.rows] == [False, True, False, False]
    top = logits[1].log_softmax(-1).topk(2)
    assert [entry.token_id for entry in result.rows[1].top_logprobs] == top.indices.tolist()
    assert [entry.logprob for entry in result.rows[1].top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert result.forward_seconds > 0
    assert result.sample_seconds > 0


def test_prompt_logprobs_when_prompt_comes_in_chunks_then_equal_log_softmax_of_transformers() -> None:
    runner, prompt, table = new_runner(), random_prompt(150, 4), list(range(1, 12))
    found = []
    for start, end in ((0, 100), (100, 150)):
        row = BatchRow(
            "r",
            prompt[start:end],
            start,
            table,
            False,
            prompt_logprobs_from=0,
            prompt_next_ids=prompt[start + 1 : end + 1],
            num_prompt_logprobs=1,
        )
        found += runner.execute(StepBatch([row])).rows[0].prompt_logprobs
    with torch.inference_mode():
        logprobs = reference_model("llama")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [entry.position for entry in found] == list(range(1, 150))
    assert [entry.logprob.token_id for entry in found] == prompt[1:]
    expected = [float(logprobs[p - 1, prompt[p]]) for p in range(1, 150)]
    assert [entry.logprob.logprob for entry in found] == pytest.approx(expected, abs=1e-4)
    assert [entry.top_logprobs[0].token_id for entry in found] == logprobs[:-1].argmax(-1).tolist()


def test_rows_when_their_numbers_are_not_finite_then_they_fail_alone_and_leave_clean_blocks() -> None:
    runner, prompt = new_runner(), random_prompt(20, 5)
    generated = generate(new_runner(), [prompt], count=4, chunk=64)[0]
    runner.execute(StepBatch([BatchRow("p", prompt[:-1], 0, [1, 2], False)]))
    clean = runner.execute(StepBatch([sampled("p", prompt[-1:], 19, [1, 2])])).rows[0]
    assert clean.token_id == generated[0]
    for block in (5, 7):  # what two other requests computed before
        runner.kv_layers[FULL_GROUP][1][block] = torch.nan
    batch = StepBatch(
        [
            sampled("decode", [3], 17, [5, 6], sampling=greedy(logprobs=2)),
            sampled("good", generated[:1], 20, [1, 2]),
            BatchRow("chunk", random_prompt(20), 16, [7, 8, 9], False, prompt_logprobs_from=17, prompt_next_ids=[1]),
        ]
    )
    decode, good, chunk = runner.execute(batch).rows
    assert (good.token_id, good.failure) == (generated[1], None)
    for row in (decode, chunk):
        assert row.failure.code is ErrorCode.EXECUTION_EXCEPTION
        assert (row.token_id, row.logprob, row.prompt_logprobs) == (None, None, [])
    for pool in runner.kv_layers[FULL_GROUP]:
        assert torch.isfinite(pool[[6, 8, 9]]).all()
    assert generate(runner, [prompt], count=4, chunk=64) == [generated]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (BatchRow("r", [], 0, [1], False), "no tokens"),
        (BatchRow("r", [1], -1, [1], False), "negative start"),
        (BatchRow("r", [1, 2], 15, [1], False), "2 blocks"),
        (BatchRow("r", [1], 0, [0], False), "block ids"),
        (BatchRow("r", [1], 0, [64], False), "block ids"),
        (BatchRow("r", [1], 16, [0, 1], False), "block ids"),
        (BatchRow("r", [1], 0, [1], True), "sampling"),
        (BatchRow("r", [1], 0, [1], False, greedy()), "sampling"),
    ],
)
def test_execute_when_a_row_points_outside_its_blocks_then_raises_and_leaves_the_pool(
    row: BatchRow, named: str
) -> None:
    runner = new_runner()
    good = BatchRow("good", [1], 0, [2], False)
    with pytest.raises(ValueError, match=named):
        runner.execute(StepBatch([good, row]))
    assert not any(pool.any() for pool in runner.kv_layers[FULL_GROUP])


def test_init_kv_when_there_is_no_room_for_a_request_then_raises() -> None:
    runner = ModelRunner(tiny_model("llama"), "float32", BLOCK)
    with pytest.raises(ValueError, match="at least 2 blocks"):
        runner.init_kv(1)


def test_runner_when_built_then_reports_what_a_pair_of_servers_must_share() -> None:
    runner = new_runner("mistral-window", dtype="bfloat16", max_model_len=100)
    assert runner.config.family == "mistral"
    assert runner.config.max_model_len == 100
    assert runner.config.eos_token_ids == (EOS_TOKEN_ID,)
    assert runner.groups[0].dtype == "bfloat16"
    assert runner.groups[0].num_layers == 3
    assert runner.attention_backend == ("torch" if library.load() is None else "native")
    assert runner.model_fingerprint == new_runner("mistral-window").model_fingerprint


def test_batch_module_when_imported_then_torch_is_not() -> None:
    code = "import sys, engine.runner.batch, engine.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "row",
    [
        BatchRow("r", [1, 2], 15, [3], False),  # one block for two blocks' tokens
        BatchRow("r", [1], 0, [64], False),  # beyond the pool
        BatchRow("r", [1], 0, [3], True),  # sampled, and nothing says how
    ],
)
def test_check_when_execute_would_refuse_a_batch_then_refuses_it_too(row: BatchRow) -> None:
    runner = new_runner()
    for asked in (runner.check, runner.execute):
        with pytest.raises(ValueError, match="row 'r'"):
            asked(StepBatch([row]))
