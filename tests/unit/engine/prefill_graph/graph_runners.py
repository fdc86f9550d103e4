"""Runners with captured prefill graphs over random weights: on a GPU, or in Triton's interpreter on the CPU.

On the CPU nothing is captured: a replay runs the recorded calls again, over the same buffers. Everything else is the
code that runs on a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.graph_settings import PrefillGraphSettings
from engine.kv_cache.cache import KvCache
from engine.messages import SamplingParams
from engine.runner.batch import BatchRow, StepBatch, StepResult
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.runner.prefill_graph.runner import PrefillGraphRunner
from engine.runner.prefill_graph.scratch import scratch_blocks
from engine.sampling import SamplingRow

PAD = 7
VOCABULARY = 320
BLOCK = 16


# Everything of a model that a graph reads, changed where it lies
CHANGES: dict[str, Callable[[Any], object]] = {
    "rope": lambda model: model.rotary.frequencies.mul_(0.5),
    "attention": lambda model: model.layers[0].attention.qkv.weight.mul_(-1.5),
    "mlp": lambda model: model.layers[-1].mlp.down.weight.mul_(3),
    "norm": lambda model: model.layers[-1].mlp_norm.weight.mul_(0.3),
    "embedding": lambda model: model.embedding.table.copy_(model.embedding.table.flip(0)),
    "head": lambda model: model.head.weight.neg_(),
}


@functools.cache
def model_folder(heads: int = 2, kv_heads: int = 1, layers: int = 2, hidden: int = 64, **changes: Any) -> Path:
    """A folder without weights, for `--load-format dummy`. Heads of 64, in whose vocabulary 0 is an ordinary token."""
    folder = Path(tempfile.mkdtemp(prefix=f"baton-graph-model-{os.getpid()}-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sampling_row(tokens: Sequence[int] = (), **params: Any) -> SamplingRow:
    settings = {"max_tokens": 8, "temperature": 0.0, **params}
    return SamplingRow(SamplingParams(**settings), 0, list(tokens), [], ())


class GraphRunner:
    """A model runner with its pool and, unless told otherwise, captured prefill graphs."""

    def __init__(
        self,
        *,
        device: str,
        folder: Path | None = None,
        buckets: Sequence[int] = (8, 16),
        max_requests: int = 3,
        max_padding_ratio: float = 0.25,
        dtype: str = "float32",
        blocks: int = 24,
        max_rows: int = 4,
        max_tokens: int = 64,
        capture: bool = True,
        **options: Any,
    ) -> None:
        self.runner = ModelRunner(
            folder or model_folder(),
            dtype,
            BLOCK,
            load_format="dummy",
            attention_backend="triton",
            device=device,
            max_num_seqs=max_rows,
            max_num_batched_tokens=max_tokens,
            **options,
        )
        self.settings = PrefillGraphSettings(
            enabled=True,
            max_requests=max_requests,
            buckets=tuple(buckets),
            max_padding_ratio=max_padding_ratio,
        )
        spare = scratch_blocks(self.runner.groups, max(buckets))
        self.runner.init_kv(1 + blocks + max(spare.values()))
        self.kv = KvCache(self.runner.groups, blocks, True, spare)
        self.blocks = blocks
        self._free = 1
        if capture:
            graphs, problem = self.runner.capture_prefill_graphs(self.kv, sorted(buckets), self.settings)
            assert graphs is not None, problem

    @property
    def graphs(self) -> PrefillGraphRunner:
        steps = self.runner.device_steps
        assert steps is not None
        assert steps.prefill_graphs is not None
        return steps.prefill_graphs

    @property
    def pools(self) -> list[torch.Tensor]:
        return self.runner.kv_layers[FULL_GROUP]

    @property
    def scratch(self) -> list[int]:
        return list(range(self.blocks + 1, self.runner.num_blocks))

    def rows(self, *lengths: int, seed: int = 0, **sampling: Any) -> list[BatchRow]:
        """Prompts of these lengths, over blocks that nobody has had yet; after the last one it begins anew."""
        made = []
        for index, length in enumerate(lengths):
            needed = -(-length // BLOCK)
            if self._free + needed > self.blocks + 1:
                self._free = 1
            table = list(range(self._free, self._free + needed))
            self._free += needed
            tokens = prompt(length, 100 * seed + index)
            made.append(BatchRow(f"r{index}", tokens, 0, table, True, sampling_row(tokens, **sampling)))
        return made

    def replay(self, rows: list[BatchRow]) -> StepResult:
        """One step, which must be a replay."""
        result = self.runner.execute(StepBatch(rows))
        assert result.prefill_status == "replayed", (result.prefill_status, result.prefill_detail)
        assert result.replay is not None
        return result

    def eager(self, rows: list[BatchRow]) -> StepResult:
        """One step without prefill graphs."""
        steps = self.runner.device_steps
        assert steps is not None
        graphs, steps.prefill_graphs = steps.prefill_graphs, None
        try:
            return self.runner.execute(StepBatch(rows))
        finally:
            steps.prefill_graphs = graphs

    def clear(self) -> None:
        """Zeroes the whole pool."""
        for pool in self.pools:
            pool.zero_()

    def snapshot(self) -> list[torch.Tensor]:
        return [pool.clone() for pool in self.pools]


def check_replay(graph: GraphRunner, bucket: int, tokens: int, tolerance: float) -> None:
    """One prompt of so many tokens in the graph of `bucket`: it is what an eager step computes, and no block but its
    own and scratch is written."""
    [row] = graph.rows(tokens, seed=bucket)
    own = used_blocks([row]) | set(graph.scratch)
    others = [block for block in range(graph.runner.num_blocks) if block not in own]
    for pool in graph.pools:
        pool.fill_(0)
        pool[others] = 1.5
    graph.graphs.prepare_replay(StepBatch([row]), bucket)
    output = graph.graphs.replay()
    logits, pools = output.logits.clone(), graph.snapshot()
    for pool in pools:
        assert bool((pool[others] == 1.5).all())
        assert bool(pool[graph.scratch].any()) is (tokens < bucket)
    for pool in graph.pools:
        pool[list(own)] = 0
    result = graph.eager([row])
    steps = graph.runner.device_steps
    assert steps is not None
    expected = steps.logits[:1]
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=tolerance)
    token = int(logits.argmax())
    # Another number of rows may round otherwise; a token may differ only where two are as likely
    assert token == result.rows[0].token_id or expected[0, result.rows[0].token_id] - expected[0, token] < 2 * tolerance
    for left, right in zip(pools, graph.pools, strict=True):
        torch.testing.assert_close(left[row.block_table], right[row.block_table], rtol=0.02, atol=tolerance)


def used_blocks(rows: Sequence[BatchRow]) -> set[int]:
    return {block for row in rows for block in row.block_table}


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.shape == right.shape
    kind = {2: torch.int16, 4: torch.int32}[left.element_size()]
    assert torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


def assert_only_written(pools: Sequence[torch.Tensor], blocks: set[int]) -> None:
    """Every one of `blocks` holds something, and no other block does."""
    for pool in pools:
        written = pool.flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert set(written) == blocks
