"""Invariants 10, 12, 15, 18, 21, 24, 27 and 30 of docs/cuda_graphs.md on the production runner.

On a host without a GPU the kernels run in Triton's interpreter and a replay is the recorded calls; with one, everything
is what serves.
"""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from engine.messages import KvGroupInfo
from engine.runner.batch import BatchRow, StepBatch
from engine.runner.prefill_graph.runner import pad_token_id
from kernels.jit import available
from rpc.faults import arm, disarm
from rpc.graph_status import GraphRole
from tests.extent import extended
from tests.unit.engine.prefill_graph.graph_runners import (
    BLOCK,
    CHANGES,
    PAD,
    VOCABULARY,
    GraphRunner,
    assert_only_written,
    assert_same_bits,
    check_replay,
    model_folder,
    prompt,
    sampling_row,
    used_blocks,
)
from tests.unit.engine.tiny_models import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-3 if DEVICE == "cuda" else 1e-4  # a GPU's float32 products may run in TensorFloat-32
pytestmark = pytest.mark.skipif(not available(DEVICE), reason="needs Triton")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def graph() -> GraphRunner:
    return GraphRunner(device=DEVICE)


def test_capture_when_it_is_done_then_the_pool_is_as_before_and_the_report_names_every_graph(graph):
    fresh = GraphRunner(device=DEVICE, buckets=(4,))
    assert not any(pool.any() for pool in fresh.pools)
    report = graph.graphs.report()
    assert (report.kind, report.count) == (GraphRole.GENERATIVE_PREFILL, 2)
    assert len(report.capture_seconds) == 2


def test_g1_replay_when_prompts_fill_a_bucket_in_part_then_it_is_what_an_eager_step_gives(graph):
    graph.clear()
    rows = graph.rows(5, 8)  # 13 tokens in a bucket of 16, with the default limit of padding
    result = graph.replay(rows)
    replayed = graph.snapshot()
    assert (result.replay.bucket, result.replay.tokens) == (16, 13)
    # Real blocks and, since there is padding, the first block of scratch; nothing else.
    assert_only_written(graph.pools, used_blocks(rows) | {graph.scratch[0]})
    arrays = graph.graphs.device_arrays(16)
    assert arrays.token_ids.tolist() == [*rows[0].token_ids, *rows[1].token_ids, PAD, PAD, PAD]
    assert arrays.block_tables["full"].tolist() == [*[row.block_table for row in rows], [0], [graph.scratch[0]]]
    graph.clear()
    eager = graph.eager(rows)
    assert [row.token_id for row in eager.rows] == [row.token_id for row in result.rows]
    for left, right in zip(replayed, graph.pools, strict=True):
        for row in rows:
            torch.testing.assert_close(left[row.block_table], right[row.block_table], rtol=0, atol=1e-4)
            # What lies behind the prompt's last token is not touched.
            assert not left[row.block_table[-1], :, :, len(row.token_ids) % BLOCK or BLOCK :].any()


def test_replay_when_the_same_batch_runs_eagerly_with_its_padding_then_every_bit_is_equal(graph):
    graph.clear()
    rows = graph.rows(3, 11, seed=1)
    graph.replay(rows)
    outputs = [graph.graphs.logits[:3].clone(), graph.runner.device_steps.prefill_graphs._hidden[:16].clone()]
    pools = graph.snapshot()
    graph.clear()
    graph.graphs.prepare_replay(StepBatch(rows), 16)
    graph.graphs.run_eager(16)
    assert_same_bits(graph.graphs.logits[:3], outputs[0])
    assert_same_bits(graph.graphs._hidden[:16], outputs[1])
    for left, right in zip(pools, graph.pools, strict=True):
        assert_same_bits(left, right)


def test_replay_when_the_bucket_is_full_then_scratch_is_not_written(graph):
    graph.clear()
    rows = graph.rows(16)
    graph.replay(rows)
    assert_only_written(graph.pools, used_blocks(rows))


def test_batch_when_two_prompts_are_replayed_together_then_each_is_as_it_is_alone(graph):
    rows = graph.rows(7, 6, seed=2)
    together = graph.replay(rows)
    assert (together.replay.bucket, together.replay.tokens) == (16, 13)
    for row, result in zip(rows, together.rows, strict=True):
        assert graph.replay([row]).rows[0].token_id == result.token_id


def test_prompt_when_it_has_one_token_then_it_is_replayed_too():
    graph = GraphRunner(device=DEVICE, buckets=(1, 4), max_requests=1)
    rows = graph.rows(1)
    result = graph.replay(rows)
    assert result.replay.bucket == 1
    assert result.rows[0].token_id == graph.eager(rows).rows[0].token_id


def test_sampling_when_it_is_not_greedy_then_a_replay_draws_what_an_eager_step_draws(graph):
    rows = graph.rows(5, 8, seed=3)
    rows[0].sampling = sampling_row(temperature=0.8, top_k=20, top_p=0.9, seed=11, logprobs=3)
    replayed, eager = graph.replay(rows), graph.eager(rows)
    for left, right in zip(replayed.rows, eager.rows, strict=True):
        assert left.token_id == right.token_id
    assert replayed.rows[0].logprob.logprob == pytest.approx(eager.rows[0].logprob.logprob, abs=1e-4)
    assert [t.token_id for t in replayed.rows[0].top_logprobs] == [t.token_id for t in eager.rows[0].top_logprobs]


def test_prompt_logprobs_when_wanted_then_a_replay_has_them(graph):
    rows = graph.rows(4, 10, seed=4)
    rows[1].prompt_logprobs_from, rows[1].prompt_next_ids, rows[1].num_prompt_logprobs = 1, rows[1].token_ids[1:], 2
    replayed, eager = graph.replay(rows), graph.eager(rows)
    assert not replayed.rows[0].prompt_logprobs
    assert [item.position for item in replayed.rows[1].prompt_logprobs] == list(range(1, 10))
    for left, right in zip(replayed.rows[1].prompt_logprobs, eager.rows[1].prompt_logprobs, strict=True):
        assert left.logprob.logprob == pytest.approx(right.logprob.logprob, abs=1e-4)


def test_layers_when_a_graph_was_replayed_then_each_is_announced_once_and_in_order(graph):
    seen: list[tuple[str, int]] = []
    rows = graph.rows(16, seed=5)
    graph.clear()
    graph.runner.execute(StepBatch(rows), lambda group, layer: seen.append((group, layer)))
    assert seen == [("full", 0), ("full", 1)]


# -- fall-backs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "change", "status"),
    [
        ((9,), {}, "padding_ratio_exceeded"),
        ((20,), {}, "input_tokens_exceed_capture_limit"),
        ((2, 2, 2, 2), {}, "request_capacity_exceeded"),
        ((16,), {"multimodal": True}, "multimodal_not_supported"),
        ((16,), {"sample": False, "sampling": None}, "input_tokens_exceed_capture_limit"),
        ((16,), {"position_ids": (1, 2, 3)}, "input_metadata_invalid"),
    ],
)
def test_batch_when_no_graph_takes_it_then_its_eager_output_is_right_and_the_status_tells_why(
    graph, lengths, change, status
):
    rows = graph.rows(*lengths, seed=6)
    changed = [dataclasses.replace(row, **change) for row in rows]
    expected = [row.token_id for row in graph.eager(rows).rows]
    before = graph.runner.device_steps.prefill_graphs.limits
    result = graph.runner.execute(StepBatch(changed))
    assert result.prefill_status == status
    assert result.replay is None
    assert graph.graphs.limits is before
    if "sample" not in change:
        assert [row.token_id for row in result.rows] == expected


def test_batch_when_a_row_has_a_prefix_or_decodes_then_it_runs_eagerly(graph):
    [row] = graph.rows(20, seed=7)
    whole = graph.eager([row]).rows[0].token_id
    first = dataclasses.replace(row, token_ids=row.token_ids[:16], sample=False, sampling=None)
    rest = dataclasses.replace(row, token_ids=row.token_ids[16:], start=16)
    graph.clear()
    graph.eager([first])
    other = graph.rows(16, seed=8)
    result = graph.runner.execute(StepBatch([rest, *other]))
    assert result.prefill_status == "prefix_not_supported"
    assert result.rows[0].token_id == whole
    last = dataclasses.replace(row, token_ids=row.token_ids[-1:], start=19)
    for rows in ([last], [last, *other]):
        result = graph.runner.execute(StepBatch(rows))
        assert result.prefill_status == "prefix_not_supported"
        assert result.rows[0].token_id == whole


def test_row_when_its_blocks_are_outside_the_pool_then_the_step_refuses_it(graph):
    [row] = graph.rows(16)
    for block in (0, graph.runner.num_blocks):
        with pytest.raises(ValueError, match="block"):
            graph.runner.execute(StepBatch([dataclasses.replace(row, block_table=[block])]))
    graph.replay([row])


# -- 18: padding's token ----------------------------------------------------------------------------------------


def test_pad_token_when_the_model_names_one_or_none_then_it_is_in_the_vocabulary(graph):
    config = graph.runner.config
    assert graph.graphs.pad_token_id == pad_token_id(config) == PAD
    for pad, eos, expected in [
        (None, (2, 3), 2),
        (VOCABULARY, (2,), 2),
        (VOCABULARY - 1, (2,), VOCABULARY - 1),
        (None, (), 0),
        (None, (VOCABULARY,), 0),
    ]:
        assert pad_token_id(dataclasses.replace(config, pad_token_id=pad, eos_token_ids=eos)) == expected


def test_pad_token_when_a_prompt_is_made_of_zeros_then_padding_makes_no_difference(graph):
    [row] = graph.rows(13, seed=9)
    zeros = dataclasses.replace(row, token_ids=[0] * 13)
    assert graph.replay([zeros]).rows[0].token_id == graph.eager([zeros]).rows[0].token_id


# -- both layouts of queries, keys and values -------------------------------------------------------------------


@pytest.mark.extended
def test_layout_when_there_are_as_many_key_heads_then_a_replay_is_right_as_well():
    graph = GraphRunner(device=DEVICE, folder=model_folder(heads=2, kv_heads=2), buckets=(16,))
    assert graph.runner.model.layers[0].attention.heads.packed
    rows = graph.rows(5, 8, seed=10)
    result = graph.replay(rows)
    assert_only_written(graph.pools, used_blocks(rows) | {graph.scratch[0]})
    assert [row.token_id for row in result.rows] == [row.token_id for row in graph.eager(rows).rows]


# -- 24: preparing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["wait", extended("fill"), extended("copy")])
def test_prepare_when_it_fails_at_any_point_then_the_batch_runs_eagerly_and_the_next_one_is_replayed(
    graph, step, caplog
):
    caplog.set_level(logging.ERROR)
    rows, others = graph.rows(5, 8, seed=11), graph.rows(16, seed=12)
    expected = [row.token_id for row in graph.eager(rows).rows]
    other = graph.eager(others).rows[0].token_id
    arm(f"prefill_graph.prepare:raise=EXECUTION_EXCEPTION,step={step},times=1")
    try:
        result = graph.runner.execute(StepBatch(rows))
    finally:
        disarm()
    assert result.prefill_status == "error"
    assert "EXECUTION_EXCEPTION" in result.prefill_detail
    assert result.replay is None
    assert [row.token_id for row in result.rows] == expected
    assert graph.replay(others).rows[0].token_id == other


def test_prepare_when_it_fails_then_nothing_is_left_to_be_replayed(graph):
    graph.graphs.prepare_replay(StepBatch(graph.rows(16)), 16)
    arm("prefill_graph.prepare:raise=EXECUTION_EXCEPTION,step=fill,times=1")
    try:
        with pytest.raises(Exception, match="EXECUTION_EXCEPTION"):
            graph.graphs.prepare_replay(StepBatch(graph.rows(16)), 16)
    finally:
        disarm()
    with pytest.raises(RuntimeError, match="no replay was prepared"):
        graph.graphs.replay()


# -- addresses --------------------------------------------------------------------------------------------------


def test_addresses_when_batches_change_then_every_array_keeps_its_own(graph):
    arrays = graph.graphs.device_arrays(16)
    views = [arrays.token_ids, arrays.positions, arrays.cu_seqlens, arrays.input_lengths, arrays.slots["full"]]
    before = [view.data_ptr() for view in views]
    for seed in range(10 if DEVICE == "cuda" else 3):
        rows = graph.rows(1 + seed, 15 - seed, seed=20 + seed)
        replayed = [row.token_id for row in graph.replay(rows).rows]
        assert replayed == [row.token_id for row in graph.eager(rows).rows]
    arrays = graph.graphs.device_arrays(16)
    views = [arrays.token_ids, arrays.positions, arrays.cu_seqlens, arrays.input_lengths, arrays.slots["full"]]
    assert [view.data_ptr() for view in views] == before


def test_parameters_when_they_change_in_place_then_a_replay_follows():
    graph = GraphRunner(device=DEVICE, folder=model_folder(layers=1), buckets=(4,), max_requests=1)
    rows = graph.rows(4)
    graph.replay(rows)
    before = graph.graphs.logits[:1].clone()
    for names in (["rope"], [name for name in CHANGES if name != "rope"]):
        for name in names:
            CHANGES[name](graph.runner.model)
        graph.replay(rows)
        after = graph.graphs.logits[:1].clone()
        assert (after - before).norm() > 0.01 * before.norm(), names
        graph.eager(rows)
        torch.testing.assert_close(after, graph.graphs.logits[:1], rtol=1e-3, atol=10 * TOLERANCE)
        before = after


@pytest.fixture(scope="module")
def small() -> GraphRunner:
    return GraphRunner(
        device=DEVICE, folder=model_folder(layers=1), buckets=(2, 5), max_requests=2, max_padding_ratio=1.0, blocks=4
    )


@pytest.mark.parametrize(("bucket", "tokens"), [(2, 1), (2, 2), (5, 1), (5, 4), (5, 5)])
def test_bucket_when_it_has_one_token_one_too_few_or_is_full_then_the_replay_is_what_an_eager_step_gives(
    small, bucket, tokens
):
    check_replay(small, bucket, tokens, TOLERANCE)


# -- 10: every class of models ----------------------------------------------------------------------------------


def test_family_with_norms_of_heads_when_its_graphs_are_captured_then_a_replay_is_what_an_eager_step_gives():
    """tests/gpu has all of them."""
    graph = GraphRunner(device=DEVICE, folder=tiny_model("qwen3"), buckets=(4,), max_requests=1, blocks=2)
    check_replay(graph, 4, 3, TOLERANCE)


# -- 30: the end ------------------------------------------------------------------------------------------------


def test_release_when_called_twice_then_scratch_returns_once_and_a_replay_says_what_is_wrong():
    graph = GraphRunner(device=DEVICE, buckets=(8,), max_requests=1)
    graphs, rows = graph.graphs, graph.rows(8)
    expected = graph.replay(rows).rows[0].token_id
    graphs.prepare_replay(StepBatch(rows), 8)
    assert graph.kv.ledgers()[0].reserved == 2
    graph.runner.release()
    graph.runner.release()
    assert graph.kv.ledgers()[0].reserved == 1
    for forward in (graphs.replay, lambda: graphs.prepare_replay(StepBatch(rows), 8), lambda: graphs.run_eager(8)):
        with pytest.raises(RuntimeError, match="released"):
            forward()
    result = graph.runner.execute(StepBatch(rows))
    assert result.prefill_status == "capture_unavailable"
    assert result.rows[0].token_id == expected


@pytest.mark.extended
def test_requests_when_more_are_wanted_than_a_step_has_rows_then_the_graphs_are_made_for_the_rows():
    graph = GraphRunner(device=DEVICE, buckets=(8,), max_requests=100, max_rows=2)
    assert graph.graphs.limits.max_requests == 2
    rows = graph.rows(4, 4)
    assert [r.token_id for r in graph.replay(rows).rows] == [r.token_id for r in graph.eager(rows).rows]


def test_rows_when_prompts_are_made_for_these_tests_then_their_blocks_are_their_own(graph):
    rows: list[BatchRow] = graph.rows(17, 16, 1)
    assert [len(row.block_table) for row in rows] == [2, 1, 1]
    assert len(used_blocks(rows)) == 4
    assert prompt(3, 1) != prompt(3, 2)
    assert isinstance(graph.runner.groups[0], KvGroupInfo)
