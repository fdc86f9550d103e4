"""What a step costs whatever its batch: as many launches for many rows as for few, and over the host nothing but its
packed inputs one way, tokens, flags and log-probabilities the other.

Kernels are counted here and do not run; that they are right is tested elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from engine.messages import SamplingParams
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.decode_status import DecodeGraphStatus
from engine.runner.model_runner import ModelRunner
from engine.sampling import SamplingRow
from kernels import jit
from kernels.metadata import DecodeLayout
from kernels.sampling import ROW_WORDS
from tests.unit.engine.prefill_graph.graph_runners import GraphRunner
from tests.unit.engine.step_trace import READS, StepTrace, traced_step
from tests.unit.engine.tiny_models import tiny_model

pytestmark = [
    pytest.mark.skipif(not jit.available("cpu"), reason="needs Triton in its interpreter (TRITON_INTERPRET=1)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, about log-probabilities that nothing computed
]

BLOCK = 16
SIZES = (1, 2, 3, 5, 8, 13, 16, 17, 33, 64)
GRAPH_SIZES = (1, 8, 16, 64)
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "drawn": [{"temperature": 0.8}],
    "filtered": [{"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}],
    "penalised": [{"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}],
    "biased": [{"temperature": 0.0, "logit_bias": {5: 1.0, 7: -1.0}}],
    "logprobs": [{"temperature": 0.0, "logprobs": 3}],
}
KINDS["mixed"] = [row for rows in KINDS.values() for row in rows]


@functools.cache
def runner_of(graphs: bool) -> ModelRunner:
    runner = ModelRunner(
        tiny_model("llama"),
        "float32",
        BLOCK,
        max_model_len=128,
        attention_backend="triton",
        device="cpu",
        max_num_seqs=max(SIZES),
        max_num_batched_tokens=256,
    )
    runner.init_kv(1 + 2 * max(SIZES))
    if graphs:
        with traced_step():  # a capture compares what runs leave, which is nothing on both sides
            assert runner.capture_decode_graphs(GRAPH_SIZES) is not None
    return runner


def batch_of(kind: str, rows: int, start: int = 20) -> StepBatch:
    """Decode rows over two blocks each, whose sampling takes turns in what a kind has."""
    made = []
    for row in range(rows):
        wants = KINDS[kind][row % len(KINDS[kind])]
        sampling = SamplingRow(SamplingParams(max_tokens=99, seed=row, **wants), 3, (1, 2, 9), [4, 5, 4], ())
        made.append(BatchRow(str(row), [5 + row], start, [1 + 2 * row, 2 + 2 * row], True, sampling))
    return StepBatch(made)


def step(runner: ModelRunner, batch: StepBatch) -> tuple[StepTrace, Any]:
    with traced_step() as trace:
        result = runner.execute(batch)
    return trace, result


def warm(runner: ModelRunner, kind: str, rows: int) -> StepBatch:
    """A batch after two steps, which send tables and what penalties have seen, and make memory for both generations of
    results."""
    batch = batch_of(kind, rows)
    for _ in range(2):
        step(runner, batch)
        for row in batch.rows:
            row.start += 1
            assert row.sampling is not None
            row.sampling.output_token_ids.append(8)
            row.sampling.token_index += 1
    return batch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_decode_step_when_its_batch_grows_then_launches_are_the_same(graphs: bool, kind: str) -> None:
    runner = runner_of(graphs)
    found: dict[int, list[str]] = {}
    for rows in SIZES:
        if rows < len(KINDS[kind]):
            continue
        batch = warm(runner, kind, rows)
        trace, result = step(runner, batch)
        assert (result.decode_status == DecodeGraphStatus.REPLAYED) is graphs
        found[rows] = trace.launches
    assert len(found) > 2
    few = min(found)
    assert {rows: names for rows, names in found.items() if names != found[few]} == {}, found[few]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_decode_step_when_run_then_tokens_flags_and_logprobs_alone_come_to_the_host(graphs: bool, kind: str) -> None:
    runner = runner_of(graphs)
    steps = runner.device_steps
    assert steps is not None
    for rows in (7, 64):
        batch = warm(runner, kind, rows)
        trace, _ = step(runner, batch)
        to_device, to_host = trace.named_copies(steps)
        assert to_device.pop("inputs") == [4 * DecodeLayout(rows, 0, 0).words]
        staged = to_device.pop("sampling", [])
        assert len(staged) == (kind != "greedy")
        assert sum(staged) <= 8 * (max(SIZES) * ROW_WORDS + 12 * rows)
        assert to_device == {}
        assert to_host.pop("tokens and flags") == [2 * 8 * max(SIZES)]
        logprobs = to_host.pop("log-probabilities", [])
        assert len(logprobs) == (kind in ("logprobs", "mixed"))
        assert to_host == {}
        assert not [name for name in trace.launches if name.startswith(READS)]


def test_prompts_when_run_then_flags_of_chunks_come_to_the_host_too() -> None:
    runner = runner_of(False)
    steps = runner.device_steps
    assert steps is not None
    sampling = SamplingRow(SamplingParams(max_tokens=9, temperature=0.0), 0, (), [], ())
    rows = [
        BatchRow("whole", list(range(4)), 0, [1], True, sampling),
        BatchRow("chunk", list(range(3)), 0, [2], False),
    ]
    batch = StepBatch(rows)
    runner.execute(batch)  # computes what the next one only launches: chunks' last tokens are looked up
    with torch.inference_mode(), traced_step() as trace:
        launched = steps.launch(batch, None)
    to_device, to_host = trace.named_copies(steps)
    assert list(to_device) == ["inputs"]
    assert to_host == {"tokens and flags": [2 * 8 * max(SIZES)], "finite": [2]}
    assert not [name for name in trace.launches if name.startswith(READS)]
    assert launched.chunk_rows == [1]


def test_replayed_prompts_when_run_then_one_copy_goes_each_way() -> None:
    with torch.inference_mode(), traced_step():
        graph = GraphRunner(device="cpu", buckets=(16,), max_requests=3)
    steps = graph.runner.device_steps
    assert steps is not None
    launches = []
    for lengths in ((16,), (5, 8), (4, 4, 5)):
        rows = graph.rows(*lengths)
        with traced_step() as trace:
            graph.replay(rows)
        to_device, to_host = trace.named_copies(steps)
        assert {name: len(sizes) for name, sizes in to_device.items()} == {"prompts": 1}
        assert to_host == {"tokens and flags": [2 * 8 * 4]}
        launches.append(trace.launches)
    assert launches[0] == launches[1] == launches[2]
