"""Jobs of ranks that share a model (see rank_processes.py): the same steps on every rank, executed by the first."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from engine.config import EngineConfig
from engine.graph_settings import PrefillGraphSettings
from engine.input_embeddings import EmbeddingRows
from engine.loader.errors import ModelLoadError
from engine.messages import SamplingParams
from engine.parallel.communicator import Communicator
from engine.runner.batch import BatchRow, RowResult, StepBatch
from engine.runner.inputs import build_inputs
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.runner.prefill_graph.gate import ask
from engine.runner.prefill_graph.startup import gate_facts
from engine.sampling import SamplingRow
from kernels.cpu import library
from tests.unit.engine.tiny_models import tiny_model

BLOCK = 16
BLOCKS = 256
ROWS = 50  # of a step, at most


@dataclass(frozen=True)
class Case:
    """A runner to be made on every rank. path: "kernels" and "torch" of a host, "triton" in its interpreter, "cuda"."""

    name: str  # of TINY_MODELS
    path: str = "kernels"
    dtype: str = "float32"
    changed: tuple[tuple[str, int], ...] = ()  # of its config.json; its weights are random then
    short: bool = False  # prompts for an interpreter, which takes its time

    def make(self, communicator: Communicator) -> ModelRunner:
        folder = tiny_model(self.name) if not self.changed else _changed_model(self.name, self.changed)
        on_device = self.path in ("triton", "cuda")
        with patch.object(library, "load", library.load if self.path == "kernels" else lambda: None):
            runner = ModelRunner(
                folder,
                self.dtype,
                BLOCK,
                load_format="dummy" if self.changed else "auto",
                attention_backend="triton" if on_device else "auto",
                device="cuda" if self.path == "cuda" else "cpu",
                max_num_seqs=4 if on_device else ROWS,
                max_num_batched_tokens=64 if on_device else 2048,
                max_model_len=128,
                communicator=communicator,
            )
            runner.init_kv(32 if on_device else BLOCKS)
        return runner


def _changed_model(name: str, changed: tuple[tuple[str, int], ...]) -> Path:
    source = tiny_model(name)
    folder = source.parent / "-".join([source.name, *(f"{key}-{value}" for key, value in changed)])
    config = json.loads((source / "config.json").read_text()) | dict(changed)
    folder.mkdir(exist_ok=True)
    # Under a name of its own first: ranks do this at the same time, and are forks, which draw the same random numbers.
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as own:
        json.dump(config, own)
    Path(own.name).replace(folder / "config.json")
    return folder


@functools.cache
def runner_of(case: Case, communicator: Communicator) -> ModelRunner:
    return case.make(communicator)


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(logprobs: int = -1) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=1, temperature=0.0, logprobs=logprobs), 0, (), (), ())


def step(runner: ModelRunner, rows: list[BatchRow]) -> list[RowResult] | None:
    """One step of this rank. The first rank's results."""
    batch = StepBatch(rows)
    if runner.communicator.rank == 0:
        runner.check(batch)
        return runner.execute(batch).rows
    runner.follow(batch)
    return None


# -- logits -------------------------------------------------------------------------------------------------------


def logits_of_steps(communicator: Communicator, case: Case) -> torch.Tensor | None:
    """Float32 [tokens, vocab] of every token of a few steps: a prompt in chunks, beside a decode row, embeddings in
    place of tokens', prompts of one step. None where the first rank has them."""
    runner = runner_of(case, communicator)
    first, second = random_prompt(38, 1), random_prompt(9, 2)
    values = np.random.default_rng(3).standard_normal((4, runner.config.hidden_size), dtype=np.float32)
    if communicator.rank > 0:
        values = torch.from_numpy(values).to(runner.device)  # as other ranks of a device get them
    brought = (EmbeddingRows(2, values),) if runner.embedding_size else ()
    one, two = [7, 3, 12], [5, 1]
    cut, end = (10, 19) if case.short else (20, 36)
    steps = [
        [BatchRow("1", first[:cut], 0, one, False)],
        [BatchRow("1", first[cut:end], cut, one, False), BatchRow("2", second, 0, two, False, embeddings=brought)],
        [BatchRow("1", first[end : end + 1], end, one, False)],
        [BatchRow("1", first[end + 1 : end + 2], end + 1, one, False), BatchRow("3", first[:5], 0, [9], False)],
    ]
    found = [_step_logits(runner, rows) for rows in (steps[:2] if case.short else steps)]
    return torch.cat(found) if communicator.rank == 0 else None


@torch.inference_mode()
def _step_logits(runner: ModelRunner, rows: list[BatchRow]) -> torch.Tensor:
    batch = StepBatch(rows)
    if runner.device_steps is not None:
        hidden, _ = runner.device_steps.follow(batch, None)
        assert hidden is not None
    else:
        hidden = runner.forward(batch, build_inputs(batch, runner.device))
    return runner.model.logits(hidden).cpu()


# -- tokens -------------------------------------------------------------------------------------------------------


def greedy_tokens(communicator: Communicator, case: Case, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` tokens of every prompt on the first rank, many requests at a time. The others are told of each token as
    of everything else in a step."""
    runner = runner_of(case, communicator)
    found: list[list[int]] = []
    for begin in range(0, len(prompts), ROWS):
        found += _generate(runner, prompts[begin : begin + ROWS], count)
    return found


def _generate(runner: ModelRunner, prompts: list[list[int]], count: int) -> list[list[int]]:
    tables, free = [], 1
    for prompt in prompts:
        blocks = -(-(len(prompt) + count) // BLOCK)
        tables.append(list(range(free, free + blocks)))
        free += blocks
    outputs: list[list[int]] = [[] for _ in prompts]
    for at in range(count):
        rows = []
        for prompt, output, table in zip(prompts, outputs, tables, strict=True):
            part, start = (prompt, 0) if at == 0 else (output[-1:], len(prompt) + at - 1)
            rows.append(BatchRow("r", part, start, table, True, plain() if runner.communicator.rank == 0 else None))
        results = step(runner, rows)
        tokens = torch.tensor(
            [-1 if row.token_id is None else row.token_id for row in results or [RowResult()] * len(rows)]
        )
        runner.communicator.broadcast_(tokens)
        for output, token in zip(outputs, tokens.tolist(), strict=True):
            output.append(token)
    return outputs


# -- what else a rank does -----------------------------------------------------------------------------------------


def facts(communicator: Communicator, case: Case) -> dict[str, Any]:
    """What a rank says of itself."""
    runner = runner_of(case, communicator)
    config = EngineConfig(
        role="prefill",
        model="m",
        prefill_graph=PrefillGraphSettings(enabled=True),
        tensor_parallel_size=communicator.size,
    )
    return {
        "group": runner.groups[0],
        "pool": tuple(runner.kv_layers[FULL_GROUP][0].shape),
        "read_bytes": runner.read_bytes,
        "fingerprint": runner.model_fingerprint,
        "prefill_graphs": ask(gate_facts(config, runner, cuda_graphs=True)).status.value,
        "blocks": runner.agreed_blocks(100 + communicator.rank),
    }


def load_error(communicator: Communicator, case: Case) -> str:
    try:
        case.make(communicator)
    except ModelLoadError as error:
        return str(error)
    return ""


def poisoned_step(communicator: Communicator, case: Case) -> Any:
    """A chunk that wants log-probabilities of its prompt, over KV that is not a number on the last rank alone; and the
    same again once every rank has wiped what the first one says. [error names], tokens."""
    runner = runner_of(case, communicator)
    tokens = random_prompt(20, 8)
    table = [4, 6]
    if communicator.rank == communicator.size - 1:
        runner.kv_layers[FULL_GROUP][0][table[0]] = torch.nan

    def rows(start: int) -> list[BatchRow]:
        sampling = plain() if communicator.rank == 0 else None
        asked = {"prompt_logprobs_from": 1, "prompt_next_ids": tokens[start + 1 : 17]}
        return [
            BatchRow("sound", tokens[:5], 0, [9], True, sampling),
            BatchRow("poisoned", tokens[start:16], start, table, False, **asked),
        ]

    batch = StepBatch(rows(8))
    failed: list[tuple[str, list[int]]] = []
    if communicator.rank == 0:
        results = runner.execute(batch).rows
        failed = runner.failed_blocks(batch, results)
    else:
        runner.follow(batch)
        results = None
    runner.wipe(FULL_GROUP, table)
    again = step(runner, rows(0))
    if results is None or again is None:
        return None
    return {
        "causes": [row.failure and row.failure.metadata["cause"] for row in results],
        "failed": failed,
        "again": [row.failure for row in again],
        "logprobs": [len(row.prompt_logprobs) for row in again],
        "tokens": [results[0].token_id, again[0].token_id],
    }


def decode_by_graphs(communicator: Communicator, case: Case, prompt: list[int], count: int) -> Any:
    """Number of graphs, greedy tokens whose decode steps are replayed, and the statuses of these on the first rank."""
    runner = runner_of(case, communicator)
    report = runner.capture_decode_graphs((2,))  # so that every row has one beside it that pads
    captured = 0 if report is None else report.count
    tokens, statuses = list(prompt), []
    for at in range(count):
        part, start = (prompt, 0) if at == 0 else (tokens[-1:], len(tokens) - 1)
        batch = StepBatch([BatchRow("r", part, start, [3, 2], True, plain() if communicator.rank == 0 else None)])
        token = torch.zeros(1, dtype=torch.int64)
        if communicator.rank == 0:
            result = runner.execute(batch)
            statuses.append(result.decode_status)
            token[0] = result.rows[0].token_id or 0
        else:
            runner.follow(batch)
        communicator.broadcast_(token)
        tokens.append(int(token))
    return captured, tokens[len(prompt) :], statuses
