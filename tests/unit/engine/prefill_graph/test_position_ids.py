"""Invariants 12, 20 of docs/cuda_graphs.md for models whose tokens have several positions (mRoPE): with and without a
graph, alone and beside embeddings, and for models without."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.input_embeddings import EmbeddingRows
from engine.layers.rotary import Rotary
from engine.loader.errors import ModelLoadError
from engine.models.config import parse_config
from engine.models.rope_config import RopeConfig
from engine.runner.batch import StepBatch
from engine.runner.model_runner import FULL_GROUP, ModelRunner
from engine.runner.position_ids import position_ids_of
from kernels import rotary
from kernels.jit import available
from tests.unit.engine.prefill_graph.graph_runners import BLOCK, GraphRunner, model_folder, prompt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECTIONS = [8, 12, 12]
MROPE = {"type": "mrope", "mrope_section": SECTIONS}
needs_triton = pytest.mark.skipif(not available(DEVICE), reason="needs Triton")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def folder(**changes):
    shape = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "layers": 1, "rope_scaling": MROPE}
    return model_folder.__wrapped__(**{**shape, **changes})


def ids_of(length: int, seed: int) -> list[int]:
    """Three axes, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, (3 * length,), generator=generator).tolist()


def rotated(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """keys: [tokens, head_dim], ids: [3, tokens]; written out pair by pair."""
    half = keys.shape[1] // 2
    out = keys.clone()
    axis = [index for index, count in enumerate(SECTIONS) for _ in range(count)]
    for pair in range(half):
        angle = ids[axis[pair]].double() / 10000.0 ** (2 * pair / keys.shape[1])
        low, high = keys[:, pair].double(), keys[:, pair + half].double()
        out[:, pair] = low * angle.cos() - high * angle.sin()
        out[:, pair + half] = high * angle.cos() + low * angle.sin()
    return out


class Eager:
    """The plain runner of a CPU."""

    def __init__(self, **changes) -> None:
        self.runner = ModelRunner(
            folder(**changes), "float32", BLOCK, load_format="dummy", attention_backend="torch", device="cpu"
        )
        self.runner.init_kv(9)

    def step(self, rows):
        return self.runner.execute(StepBatch(rows))

    def keys(self, block: int, length: int) -> torch.Tensor:
        return self.runner.kv_layers[FULL_GROUP][0][block, 0, 0, :length].clone()


def test_eager_step_when_ids_are_given_then_keys_turn_by_their_axes():
    eager = Eager()
    [row] = GraphRunner.rows(stub(), 12)
    keys = {}
    for name, ids in (("none", [0] * 36), ("own", ids_of(12, 1)), ("default", []), ("same", [*range(12)] * 3)):
        eager.step([dataclasses.replace(row, position_ids=ids)])
        keys[name] = eager.keys(row.block_table[0], 12)
    own = torch.tensor(ids_of(12, 1)).view(3, 12)
    torch.testing.assert_close(keys["own"], rotated(keys["none"], own).float(), rtol=0, atol=2e-4)
    torch.testing.assert_close(keys["default"], keys["same"], rtol=0, atol=0)
    text = torch.arange(12).repeat(3, 1)
    torch.testing.assert_close(keys["default"], rotated(keys["none"], text).float(), rtol=0, atol=2e-4)


def stub():
    """Rows are made without a runner."""
    maker = GraphRunner.__new__(GraphRunner)
    maker.blocks, maker._free = 8, 1
    return maker


def test_eager_step_when_ids_and_embeddings_are_given_then_both_count():
    eager = Eager()
    [row], [meant] = GraphRunner.rows(stub(), 12, seed=1), GraphRunner.rows(stub(), 12, seed=2)
    table = eager.runner.model.embedding.table.numpy()
    ids = ids_of(12, 3)

    def token(**changes) -> list[float]:
        changed = dataclasses.replace(row, **changes)
        inputs_row = [changed]
        eager.step(inputs_row)
        return eager.keys(row.block_table[0], 12).flatten().tolist()

    given = token(embeddings=(EmbeddingRows(0, table[meant.token_ids]),), position_ids=ids)
    assert given == token(token_ids=meant.token_ids, position_ids=ids)
    assert given != token(position_ids=ids)
    assert given != token(token_ids=meant.token_ids)


def test_eager_step_when_the_model_has_one_axis_then_ids_are_not_read():
    eager = Eager(rope_scaling=None)
    assert eager.runner.config.rope.axes == 0
    [row], [meant] = GraphRunner.rows(stub(), 12), GraphRunner.rows(stub(), 12, seed=4)
    table = eager.runner.model.embedding.table.numpy()
    expected = eager.step([meant]).rows[0].token_id
    row.embeddings, row.position_ids = (EmbeddingRows(0, table[meant.token_ids]),), ids_of(12, 5)
    assert eager.step([row]).rows[0].token_id == expected


def test_eager_step_when_a_row_brings_too_few_ids_then_it_is_refused():
    eager = Eager()
    [row] = GraphRunner.rows(stub(), 12)
    with pytest.raises(ValueError, match="35 position ids for 12 tokens on 3 axes"):
        eager.step([dataclasses.replace(row, position_ids=[0] * 35)])


# -- in a graph -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph() -> GraphRunner:
    with torch.inference_mode():
        return GraphRunner(device=DEVICE, folder=folder(), buckets=(16,))


@needs_triton
def test_replay_when_ids_are_given_then_it_is_what_an_eager_step_gives(graph):
    rows = graph.rows(5, 8, seed=1)
    plain = graph.eager(rows)
    rows[1].position_ids = ids_of(8, 6)
    graph.clear()
    replayed = graph.replay(rows)
    pools = graph.snapshot()
    arrays = graph.graphs.device_arrays(16)
    assert arrays.position_ids[:, :5].tolist() == [list(range(5))] * 3
    assert arrays.position_ids[:, 5:13].flatten().tolist() == list(rows[1].position_ids)
    assert not arrays.position_ids[:, 13:].any()  # the padded tail, and nothing else
    graph.clear()
    eager = graph.eager(rows)
    assert [row.token_id for row in replayed.rows] == [row.token_id for row in eager.rows]
    for left, right in zip(pools, graph.pools, strict=True):
        for row in rows:
            torch.testing.assert_close(left[row.block_table], right[row.block_table], rtol=0, atol=2e-4)
    rows[1].position_ids = ()
    graph.clear()
    again = graph.replay(rows)
    assert [row.token_id for row in again.rows] == [row.token_id for row in plain.rows]
    assert not torch.equal(pools[0][rows[1].block_table], graph.pools[0][rows[1].block_table])


@needs_triton
def test_replay_when_ids_and_embeddings_are_given_then_both_count_and_each_request_once(graph):
    [row], [meant] = graph.rows(14, seed=2), graph.rows(14, seed=3)
    table = graph.runner.model.embedding.table.float().cpu().numpy()
    row.position_ids = meant.position_ids = ids_of(14, 7)
    row.embeddings = (EmbeddingRows(0, table[meant.token_ids]),)
    decisions = [graph.graphs.can_run(StepBatch([row])) for _ in range(3)]
    assert decisions[0] == decisions[1] == decisions[2]
    assert graph.replay([row]).rows[0].token_id == graph.eager([meant]).rows[0].token_id


@needs_triton
def test_decision_when_the_number_of_ids_is_wrong_then_the_metadata_is_invalid(graph):
    [row] = graph.rows(16, seed=4)
    row.position_ids = [0] * 47
    assert graph.graphs.can_run(StepBatch([row])).status == "input_metadata_invalid"


@needs_triton
def test_angles_kernel_when_there_are_axes_then_it_is_the_layers_own_formula():
    layer = Rotary(RopeConfig(sections=tuple(SECTIONS)), 64)
    positions = torch.tensor(ids_of(10, 8), dtype=torch.int32).view(3, 10)
    cos, sin = rotary.angles(positions.to(DEVICE), layer.frequencies.to(DEVICE), axis_of=layer.axis_of.int().to(DEVICE))
    expected = rotary.reference(positions, layer.frequencies, axis_of=layer.axis_of)
    for found, wanted, own in zip((cos, sin), expected, layer.angles(positions), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=3e-5)
        torch.testing.assert_close(wanted, own, rtol=0, atol=0)


# -- configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [[8, 12, 11], [32, 0, 0], "8,12,12", [8.0, 12, 12], []])
def test_configuration_when_sections_do_not_fit_a_head_then_the_folder_is_refused(sections):
    source = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
    }
    with pytest.raises(ModelLoadError, match="mrope_section"):
        parse_config(source)
    assert parse_config(source | {"rope_scaling": MROPE}).rope.axes == 3


def test_ids_when_no_row_brings_any_or_the_model_has_none_then_there_are_none():
    [row] = GraphRunner.rows(stub(), 4)
    own = dataclasses.replace(row, position_ids=ids_of(4, 9))
    assert position_ids_of([row], 3) is None
    assert position_ids_of([own], 0) is None
    later = dataclasses.replace(row, start=5)
    found = position_ids_of([own, later], 3)
    assert found.dtype == np.int32
    assert found[:, 4:].tolist() == [[5, 6, 7, 8]] * 3
    assert prompt(4) != found[:, :4].tolist()
