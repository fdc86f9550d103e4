"""A model that is shared out over ranks, which are processes with gloo between them: beside the same model on one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kernels import jit
from kernels.cpu import library
from tests.unit.engine import sharded_steps as jobs
from tests.unit.engine.rank_processes import RankProcesses
from tests.unit.engine.sharded_steps import Case
from tests.unit.engine.tiny_models import TINY_MODELS, tiny_model

SIZES = (2, 4)
TOLERANCE = 1e-4
# Of bfloat16 logits of a size of about 3: what a step's rounding of activations does to them
BFLOAT16_TOLERANCE = 0.12
# One key head for all ranks, and a vocabulary that leaves the last rank less than the others
AWKWARD = (("num_key_value_heads", 1), ("vocab_size", 381))
CASES = [
    *(Case(name) for name in TINY_MODELS),
    Case("llama-bias", "torch"),
    Case("qwen3", "torch"),
    Case("mistral-window", "torch"),
    Case("llama", changed=AWKWARD),
    Case("qwen2", changed=AWKWARD),
]
DEVICE_CASES = [
    pytest.param(2, Case("llama-bias", "triton", short=True), id="llama-bias-2"),
    pytest.param(4, Case("qwen3", "triton", changed=AWKWARD, short=True), id="qwen3-awkward-4"),
]
interpreted = pytest.mark.skipif(
    not jit.available("cpu"), reason="needs Triton in its interpreter (TRITON_INTERPRET=1)"
)


def label(case: Case) -> str:
    return "-".join([case.name, case.path, case.dtype, *("awkward" for _ in case.changed[:1])])


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(max(SIZES)) as processes:
        yield processes


@pytest.fixture(scope="module")
def logits(ranks: RankProcesses) -> Any:
    """By size and case, of the first rank."""
    return functools.cache(lambda size, case: ranks.run(size, jobs.logits_of_steps, case)[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_logits_when_a_model_is_shared_out_then_equal_those_of_one_rank(logits: Any, size: int, case: Case) -> None:
    torch.testing.assert_close(logits(size, case), logits(1, case), rtol=0, atol=TOLERANCE)


@interpreted
@pytest.mark.extended
@pytest.mark.parametrize(("size", "case"), DEVICE_CASES)
def test_logits_when_a_model_is_shared_out_over_devices_then_equal_those_of_one_host(
    logits: Any, size: int, case: Case
) -> None:
    expected = logits(1, replace(case, path="kernels"))
    torch.testing.assert_close(logits(size, case), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_when_a_bfloat16_model_is_shared_out_then_are_as_near_as_its_rounding(
    logits: Any, size: int, path: str, name: str
) -> None:
    if path == "kernels" and library.load() is None:
        pytest.skip("this machine has no AVX-512 with AMX, or no C compiler")
    shared, alone = (logits(count, Case(name, path, "bfloat16")) for count in (size, 1))
    exact = logits(1, Case(name))
    torch.testing.assert_close(shared, alone, rtol=0, atol=BFLOAT16_TOLERANCE)
    # Sharing out adds no error to what the weights' rounding makes anyway
    assert (shared - exact).square().mean().sqrt() <= 1.1 * (alone - exact).square().mean().sqrt()


def prompts_of(count: int) -> list[list[int]]:
    return [jobs.random_prompt(1 + 7 * seed % 41, seed) for seed in range(count)]


def check_tokens(ranks: RankProcesses, case: Case, prompts: int, count: int) -> None:
    expected = ranks.run(1, jobs.greedy_tokens, case, prompts_of(prompts), count)[0]
    assert len(expected) == prompts and all(len(tokens) == count for tokens in expected)
    for size in SIZES:
        for found in ranks.run(size, jobs.greedy_tokens, case, prompts_of(prompts), count):
            assert found == expected


@pytest.mark.parametrize("case", [Case("llama"), Case("qwen3", "torch"), Case("qwen2", changed=AWKWARD)], ids=label)
def test_greedy_tokens_when_a_model_is_shared_out_then_are_those_of_one_rank(ranks: RankProcesses, case: Case) -> None:
    check_tokens(ranks, case, prompts=12, count=6)


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES, ids=label)
def test_greedy_tokens_of_a_hundred_prompts_when_a_model_is_shared_out_then_are_those_of_one_rank(
    ranks: RankProcesses, case: Case
) -> None:
    check_tokens(ranks, case, prompts=100, count=10)


@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "qwen3", "llama-tied"])
def test_loader_when_a_model_is_shared_out_then_reads_this_ranks_slices_alone(ranks: RankProcesses, name: str) -> None:
    shapes = tensor_shapes(tiny_model(name))
    whole = ranks.run(1, jobs.facts, Case(name))[0]
    assert whole["read_bytes"] == sum(4 * _product(shape) for shape in shapes.values())
    for size in SIZES:
        found = [rank["read_bytes"] for rank in ranks.run(size, jobs.facts, Case(name))]
        assert found == [own_bytes(shapes, rank, size) for rank in range(size)]


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping


def own_bytes(shapes: dict[str, list[int]], rank: int, size: int) -> int:
    """Of float32 tensors of which this rank reads its part, from the layout of checkpoints alone."""
    total = 0
    kv_heads = 2
    for name, shape in shapes.items():
        kind = name.split(".")[-2]
        if "norm" in kind:
            share = 1.0
        elif kind in ("k_proj", "v_proj"):
            share = 1 / min(size, kv_heads)
        elif kind in ("o_proj", "down_proj") and name.endswith("bias"):
            share = float(rank == 0)
        else:
            share = 1 / size
        total += int(4 * _product(shape) * share)
    return total


def _product(shape: list[int]) -> int:
    return int(torch.Size(shape).numel())


def test_ranks_when_a_model_is_shared_out_then_each_knows_what_it_holds(ranks: RankProcesses) -> None:
    alone = ranks.run(1, jobs.facts, Case("qwen2"))[0]
    assert (alone["group"].num_kv_heads, alone["group"].total_kv_heads) == (2, 2)
    assert alone["prefill_graphs"] != "unsupported_topology"
    for size, heads in ((2, 1), (4, 1)):
        found = ranks.run(size, jobs.facts, Case("qwen2"))
        # The first one digests the whole weights, and tells the others when all have read theirs
        assert [rank["fingerprint"] for rank in found] == [alone["fingerprint"], *[""] * (size - 1)]
        for rank in found:
            assert (rank["group"].num_kv_heads, rank["group"].total_kv_heads) == (heads, 2)
            assert rank["pool"] == (jobs.BLOCKS, 2, heads, jobs.BLOCK, 16)
            assert rank["prefill_graphs"] == "unsupported_topology"
            assert rank["blocks"] == 100  # the least of what the ranks had room for


def test_load_when_the_heads_do_not_divide_then_every_rank_names_the_flag_and_sizes_that_fit(
    ranks: RankProcesses,
) -> None:
    for error in ranks.run(3, jobs.load_error, Case("llama")):
        assert "--tensor-parallel-size 3 does not divide the model's 4 attention heads" in error
        assert "sizes that fit this model: 1, 2, 4" in error


@pytest.mark.parametrize("size", SIZES)
def test_step_when_one_ranks_numbers_are_not_finite_then_the_row_fails_and_all_ranks_go_on(
    ranks: RankProcesses, size: int
) -> None:
    found = ranks.run(size, jobs.poisoned_step, Case("llama"))[0]
    assert found["causes"] == [None, "hidden_states_not_finite"]
    assert found["failed"] == [("full", [4])]
    assert found["again"] == [None, None]
    assert found["logprobs"] == [0, 16]
    assert found["tokens"][0] == found["tokens"][1]


@interpreted
@pytest.mark.extended
def test_decode_graphs_when_a_model_is_shared_out_over_devices_then_replay_the_tokens_of_one_host(
    ranks: RankProcesses,
) -> None:
    prompt = jobs.random_prompt(5, 5)
    expected = ranks.run(1, jobs.greedy_tokens, Case("llama-bias"), [prompt], 3)[0][0]
    for captured, tokens, statuses in ranks.run(2, jobs.decode_by_graphs, Case("llama-bias", "triton"), prompt, 3):
        assert captured == 1
        assert tokens == expected
        assert statuses in ([], ["prefill_input", *["replayed"] * 2])  # the first rank has them


def test_dummy_weights_when_cut_out_then_are_parts_of_the_whole_tensor() -> None:
    from engine.loader.checkpoint import DummyCheckpoint
    from engine.parallel.shards import Part

    whole, rows, columns = torch.empty(12, 8), torch.empty(4, 8), torch.empty(12, 2)
    source = DummyCheckpoint()
    source.read_into("model.layers.0.mlp.up_proj.weight", whole)
    source.read_into("model.layers.0.mlp.up_proj.weight", rows, Part(12, 4, 8))
    source.read_into("model.layers.0.mlp.up_proj.weight", columns, Part(8, 6, 8), dim=1)
    assert torch.equal(rows, whole[4:8]) and torch.equal(columns, whole[:, 6:8])
