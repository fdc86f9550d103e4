"""Steps whose last layer is computed for the last token of every row alone: results and KV of the whole pass."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from engine.runner import device_steps, model_runner
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.inputs import asks_for_lasts
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from kernels import jit
from tests.unit.engine.test_runner import BLOCK, greedy, random_prompt, sampled
from tests.unit.engine.tiny_models import tiny_model

TOLERANCE = 1e-4
interpreted = pytest.mark.skipif(
    not jit.available("cpu"), reason="needs Triton in its interpreter (TRITON_INTERPRET=1)"
)
slowly = [interpreted, pytest.mark.extended]
MODELS = ("llama", "mistral-window", "qwen3")
EVERY = ("all sample", "a chunk among them")
BACKENDS = ["torch", "native", pytest.param("triton", marks=interpreted)]


def new_runner(name: str, backend: str) -> ModelRunner:
    runner = ModelRunner(
        tiny_model(name), "float32", BLOCK, max_model_len=128, attention_backend=backend, device="cpu",
        max_num_seqs=6, max_num_batched_tokens=128,
    )  # fmt: skip
    runner.init_kv(40)
    for pool in runner.kv_layers[FULL_GROUP]:  # KV of the tokens that came before
        pool[1:20].normal_(generator=torch.Generator().manual_seed(3))
    return runner


def mixed(every: bool) -> StepBatch:
    """A row that decodes, one of a chunk in the middle, one that ends a prompt, and a whole prompt."""
    chunk = random_prompt(21, seed=4)
    rows = [
        sampled("decode", [7], 40, [1, 2, 3], sampling=greedy(3)),
        sampled("middle", chunk, 32, [4, 5, 6, 7], sampling=greedy(3))
        if every
        else BatchRow("middle", chunk, 32, [4, 5, 6, 7], False),
        sampled("end", random_prompt(20, seed=5), 5, [8, 9], sampling=greedy(3)),
        sampled("whole", random_prompt(37, seed=6), 0, [20, 21, 22], sampling=greedy(3)),
    ]
    return StepBatch(rows)


CASES = [(backend, name, every) for backend in ("torch", "native", "triton") for name in MODELS for every in EVERY]
ALWAYS = {("triton", "mistral-window", "a chunk among them")}  # of those that are interpreted, which is slow


@pytest.mark.parametrize(
    ("backend", "name", "every"),
    [
        pytest.param(*case, marks=[] if case[0] != "triton" else interpreted if case in ALWAYS else slowly)
        for case in CASES
    ],
)
def test_step_when_the_last_layer_is_for_last_tokens_alone_then_results_and_kv_are_those_of_the_whole_pass(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str, every: str
) -> None:
    found = {}
    for fewest in (30, 10_000):
        monkeypatch.setattr(model_runner, "_FEWEST_OTHERS", fewest)
        monkeypatch.setattr(device_steps, "_FEWEST_OTHERS", fewest)
        runner = new_runner(name, backend)
        widths = Mock(wraps=runner.model.layers[-1].mlp.gate_up)
        monkeypatch.setattr(runner.model.layers[-1].mlp, "gate_up", widths)
        results = runner.execute(mixed(every == "all sample")).rows
        [call] = widths.call_args_list
        assert call.args[0].shape[0] == (4 if fewest == 30 else 79)
        found[fewest] = results, runner.kv_layers[FULL_GROUP]
    (few, few_kv), (all_, all_kv) = found.values()
    for index, (one, other) in enumerate(zip(few, all_, strict=True)):
        assert one.failure is None and other.failure is None
        assert one.token_id == other.token_id
        assert (one.token_id is None) == (index == 1 and every != "all sample")
        if one.token_id is not None:
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=TOLERANCE)
            assert [top.token_id for top in one.top_logprobs] == [top.token_id for top in other.top_logprobs]
    for one, other in zip(few_kv, all_kv, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the rows that hold NaN
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_when_its_numbers_are_not_finite_then_it_fails_alone_also_by_its_last_token(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(model_runner, "_FEWEST_OTHERS", 30)
    monkeypatch.setattr(device_steps, "_FEWEST_OTHERS", 30)
    runner = new_runner("llama", backend)
    runner.kv_layers[FULL_GROUP][0][4, 1, :, 3] = torch.nan  # a value that the chunk's tokens see
    failures = [row.failure for row in runner.execute(mixed(False)).rows]
    assert [failure is None for failure in failures] == [True, False, True, True]
    assert failures[1] is not None and failures[1].metadata["cause"] == "hidden_states_not_finite"


def test_prompt_logprobs_when_asked_for_then_the_stream_of_every_token_is_kept() -> None:
    batch = mixed(True)
    assert asks_for_lasts(batch, 75) and not asks_for_lasts(batch, 76)
    batch.rows[3].prompt_logprobs_from = 0
    assert not asks_for_lasts(batch, 75)
