"""Invariant 20 of docs/cuda_graphs.md: embeddings of a request stand in place of its tokens' own, with and without a
graph, and what cannot is refused.

A prompt whose embeddings are those of other tokens must be computed as if it consisted of these.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.input_embeddings import EmbeddingRows, embeddings_of_chunk, read_embeddings
from engine.layers.override import override_of
from engine.messages import RunMode
from engine.models.llama import LlamaModel
from engine.runner.batch import StepBatch
from front.validation import ModelFacts, read_request
from front.validation import read_embeddings as read_wire
from kernels.jit import available
from protos import common_pb2
from rpc.channels import CONTROL_MESSAGE_BYTES
from rpc.errors import BatonError, ErrorCode
from rpc.faults import arm, disarm
from rpc.input_embeddings import MOST_BYTES, MOST_SEGMENTS, InputEmbedding, check_input_embeddings, digest_of
from tests.unit.engine.prefill_graph.graph_runners import GraphRunner, prompt
from tests.unit.engine.prefill_graph.test_engine import options
from tests.unit.engine.real_engine import RealEngine, pair, run_until, serve
from tests.unit.engine.tiny_models import VOCAB_SIZE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not available(DEVICE), reason="needs Triton")


def table_of(runner) -> torch.Tensor:
    return runner.model.embedding.table.float().cpu()


def segment(table: torch.Tensor, location: int, tokens: list[int], dtype: str = "float32") -> InputEmbedding:
    """What a client would send to have `tokens` at `location`."""
    rows = table[tokens]
    if dtype == "bfloat16":
        return InputEmbedding(location, rows.bfloat16().view(torch.int16).numpy().tobytes(), dtype)
    return InputEmbedding(location, rows.numpy().astype("<f4").tobytes(), dtype)


def tokens_for(length: int, seed: int) -> list[int]:
    return [token % VOCAB_SIZE for token in prompt(length, seed)]


# -- eagerly, on a CPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "llama-tied"])
def test_engine_when_embeddings_are_other_tokens_then_it_answers_as_to_these(name):
    written, meant = tokens_for(20, 1), tokens_for(20, 2)
    mixed = [*meant[:2], *written[2:5], *meant[5:9], *written[9:19], *meant[19:]]
    with RealEngine("decode", model=name) as engine:
        table = table_of(engine.core.runner)
        assert engine.ready.embedding_size == table.shape[1]
        # Out of order, at both ends, and in the middle.
        segments = [segment(table, 19, meant[19:]), segment(table, 0, meant[:2]), segment(table, 5, meant[5:9])]
        engine.add("given", written, embeddings=segments)
        engine.add("meant", mixed)
        engine.add("plain", written)
        engine.run()
        assert engine.tokens("given") == engine.tokens("meant")
        assert engine.tokens("given") != engine.tokens("plain")


def test_engine_when_the_prompt_comes_in_chunks_then_each_gets_its_part():
    written, meant = tokens_for(100, 3), tokens_for(100, 4)
    with RealEngine("decode", max_num_batched_tokens=16) as engine:
        table = table_of(engine.core.runner)
        engine.add("given", written, embeddings=[segment(table, 5, meant[5:90])])
        engine.run()
        engine.add("meant", [*written[:5], *meant[5:90], *written[90:]])
        engine.run()
        assert engine.tokens("given") == engine.tokens("meant")


def test_prefix_cache_when_embeddings_differ_then_blocks_are_not_shared_and_equal_ones_are():
    written, meant, other = tokens_for(40, 5), tokens_for(40, 6), tokens_for(40, 7)
    with RealEngine("decode") as engine:
        table = table_of(engine.core.runner)
        for key, embeddings, hit in (
            ("plain", [], 0),
            ("given", [segment(table, 0, meant[:10])], 0),
            ("other", [segment(table, 0, other[:10])], 0),
            ("elsewhere", [segment(table, 1, meant[:10])], 0),
            ("given again", [segment(table, 0, meant[:10])], 32),
            ("plain again", [], 32),
        ):
            engine.add(key, written, embeddings=embeddings)
            engine.run()
            assert (key, engine.cached_tokens(key)) == (key, hit)
        assert engine.tokens("given again") == engine.tokens("given") != engine.tokens("other")
        assert engine.tokens("plain again") == engine.tokens("plain")


def test_prefix_cache_when_a_salt_spells_the_digest_of_embeddings_then_it_finds_none_of_their_blocks():
    written, meant = tokens_for(40, 5), tokens_for(40, 6)
    with RealEngine("decode") as engine:
        given = [segment(table_of(engine.core.runner), 0, meant[:10])]
        digest = digest_of(given)
        engine.add("plain", written)
        engine.add("given", written, embeddings=given)
        engine.run()
        for number, salt in enumerate((digest.hex(), "\x1f" + digest.hex(), digest.decode("latin-1"))):
            key = f"salted {number}"
            engine.add(key, written, salt=salt)
            engine.run()
            assert (engine.cached_tokens(key), engine.tokens(key)) == (0, engine.tokens("plain"))


def test_preemption_when_a_request_with_embeddings_is_computed_again_then_they_are_there_again():
    written, meant = tokens_for(24, 8), tokens_for(24, 9)
    with RealEngine("decode", num_kv_blocks=8, max_model_len=64, enable_prefix_caching=False) as engine:
        table = table_of(engine.core.runner)
        embeddings = [segment(table, 3, meant[3:20])]
        engine.add("alone", written, embeddings=embeddings, max_tokens=30)
        engine.run()
        for key in ("a", "b"):
            engine.add(key, written, embeddings=embeddings, max_tokens=30)
        engine.run()
        assert engine.last("b").preemptions >= 1
        assert engine.tokens("a") == engine.tokens("b") == engine.tokens("alone")


def test_disaggregation_when_a_request_brings_embeddings_then_tokens_are_the_colocated_ones():
    written, meant = tokens_for(30, 10), tokens_for(30, 11)
    with pair() as (p, d):
        embeddings = [segment(table_of(p.core.runner), 0, meant[:25])]
        tokens = serve(p, d, "a#0.00000000", written, embeddings=embeddings)
        d.add("b#0.00000000", written, RunMode.LOCAL, embeddings=embeddings)
        run_until([d], lambda: d.ended("b#0.00000000"))
        assert d.tokens("b#0.00000000") == tokens
        d.add("c#0.00000000", [*meant[:25], *written[25:]], RunMode.LOCAL)
        run_until([d], lambda: d.ended("c#0.00000000"))
        assert d.tokens("c#0.00000000") == tokens


# -- in a graph -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph() -> GraphRunner:
    with torch.inference_mode():
        runner = GraphRunner(device=DEVICE)
        runner.runner.capture_decode_graphs((1,))
        return runner


@needs_triton
@torch.inference_mode()
def test_replay_when_rows_bring_embeddings_then_the_next_one_without_is_not_touched(graph):
    table = table_of(graph.runner).numpy()
    rows, meant = graph.rows(5, 8, seed=1), graph.rows(5, 8, seed=2)
    expected = [row.token_id for row in graph.eager(meant).rows]
    plain = [row.token_id for row in graph.eager(rows).rows]
    for row, other in zip(rows, meant, strict=True):
        row.embeddings = (EmbeddingRows(0, table[other.token_ids]),)
    assert [row.token_id for row in graph.eager(rows).rows] == expected
    assert [row.token_id for row in graph.replay(rows).rows] == expected
    part = np.array(rows[1].embeddings[0].values[2:4])
    rows[0].embeddings, rows[1].embeddings = (), (EmbeddingRows(2, part),)
    mixed = list(rows[1].token_ids)
    mixed[2:4] = meant[1].token_ids[2:4]
    replayed = [row.token_id for row in graph.replay(rows).rows]
    rows[1].embeddings, rows[1].token_ids[:] = (), mixed
    assert replayed == [row.token_id for row in graph.eager(rows).rows]
    rows = graph.rows(5, 8, seed=1)
    assert [row.token_id for row in graph.replay(rows).rows] == plain


@needs_triton
@torch.inference_mode()
def test_decode_when_the_prompt_brought_embeddings_then_its_steps_stay_in_their_graph(graph):
    table = table_of(graph.runner).numpy()
    [row] = graph.rows(8, seed=3)
    row.embeddings = (EmbeddingRows(0, table[prompt(8, 99)]),)
    first = graph.replay([row]).rows[0].token_id
    row.embeddings, row.token_ids, row.start = (), [first], 8
    result = graph.runner.execute(StepBatch([row]))
    assert result.decode_status == "replayed"


@needs_triton
@torch.inference_mode()
def test_prompt_of_one_token_when_it_brings_an_embedding_then_no_decode_graph_computes_it(graph):
    table = table_of(graph.runner).numpy()
    [row], [meant] = graph.rows(1, seed=4), graph.rows(1, seed=5)
    expected = graph.eager([meant]).rows[0].token_id
    row.embeddings = (EmbeddingRows(0, table[meant.token_ids]),)
    result = graph.eager([row])
    assert (result.decode_status, result.rows[0].token_id) == ("prefill_input", expected)


@needs_triton
@torch.inference_mode()
@pytest.mark.parametrize(("place", "shape"), [(-1, (2, 64)), (7, (2, 64)), (0, (2, 63)), (0, (2,))])
def test_decision_when_a_rows_embeddings_do_not_fit_it_then_its_metadata_is_invalid(graph, place, shape):
    [row] = graph.rows(8, seed=6)
    row.embeddings = (EmbeddingRows(place, np.zeros(shape, np.float32)),)
    assert graph.graphs.can_run(StepBatch([row])).status == "input_metadata_invalid"


@needs_triton
@torch.inference_mode()
def test_prepare_when_it_fails_at_the_embeddings_then_the_batch_runs_eagerly_with_them(graph):
    table = table_of(graph.runner).numpy()
    [row], [meant] = graph.rows(8, seed=7), graph.rows(8, seed=8)
    expected = graph.eager([meant]).rows[0].token_id
    row.embeddings = (EmbeddingRows(0, table[meant.token_ids]),)
    arm("prefill_graph.prepare:raise=EXECUTION_EXCEPTION,step=embeddings,times=1")
    try:
        result = graph.runner.execute(StepBatch([row]))
    finally:
        disarm()
    assert (result.prefill_status, result.rows[0].token_id) == ("error", expected)
    assert graph.replay([row]).rows[0].token_id == expected


@needs_triton
def test_engine_when_a_prompt_with_embeddings_fits_a_graph_then_it_is_replayed():
    written, meant = prompt(16, 1), prompt(16, 2)
    with RealEngine("decode", **options()) as engine:
        table = table_of(engine.core.runner)
        engine.add("given", written, max_tokens=2, embeddings=[segment(table, 0, meant)])
        engine.run()
        engine.add("meant", meant, max_tokens=2)
        engine.run()
        assert engine.tokens("given") == engine.tokens("meant")
        [info] = [output.prefill for output in engine.outputs["given"] if output.prefill is not None]
        assert info.cuda_graph_status == "replayed"


# -- refusals ---------------------------------------------------------------------------------------------------

HIDDEN = 4
ROW = HIDDEN * 4


def values(rows: int = 1, item: int = 4) -> bytes:
    return bytes(rows * HIDDEN * item)


ILLEGAL = [
    [InputEmbedding(10, values())],
    [InputEmbedding(-1, values())],
    [InputEmbedding(9, values(2))],
    [InputEmbedding(0, b"")],
    [InputEmbedding(0, values()[:-1])],
    [InputEmbedding(0, values()[:-4])],
    [InputEmbedding(0, values(), "float16")],
    [InputEmbedding(0, values(3)), InputEmbedding(2, values())],
    [InputEmbedding(0, values()), InputEmbedding(0, values())],
    [InputEmbedding(0, values(1, 2), "float32")],
    [InputEmbedding(0, np.array([0, np.nan, 0, 0], "<f4").tobytes())],
    [InputEmbedding(0, np.array([np.inf, 0, 0, 0], "<f4").tobytes())],
]


@pytest.mark.parametrize("segments", ILLEGAL)
def test_engine_when_segments_are_illegal_then_they_are_refused_by_name(segments):
    with pytest.raises(BatonError, match="input_embeddings") as refusal:
        read_embeddings(segments, 10, HIDDEN)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS


def test_segments_when_a_server_could_not_get_them_in_one_message_then_they_are_refused_before_it_is_asked():
    half = bytes(MOST_BYTES // 2)
    check_input_embeddings([InputEmbedding(0, half), InputEmbedding(1, half)], 10)
    with pytest.raises(BatonError, match=f"at most {MOST_BYTES} are allowed") as refusal:
        check_input_embeddings([InputEmbedding(0, half), InputEmbedding(1, half), InputEmbedding(2, bytes(4))], 10)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS
    assert MOST_BYTES + (1 << 20) == CONTROL_MESSAGE_BYTES


@pytest.mark.parametrize("count", [MOST_SEGMENTS, MOST_SEGMENTS + 1])
def test_segments_when_they_are_counted_then_64_pass(count):
    segments = [InputEmbedding(place, values()) for place in range(count)]
    if count <= MOST_SEGMENTS:
        assert len(read_embeddings(segments, 100, HIDDEN)) == count
        return
    with pytest.raises(BatonError, match="65 segments"):
        check_input_embeddings(segments, 100)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_segments_when_read_then_they_are_float32_rows_in_order(dtype):
    numbers = torch.tensor([[1.5, -2.0, 0.25, 3.0], [8.0, 0.0, -0.5, 1.0]])
    found = read_embeddings([segment(numbers, 5, [0, 1], dtype), segment(numbers, 1, [1], dtype)], 10, HIDDEN)
    assert [(item.place, item.end) for item in found] == [(1, 2), (5, 7)]
    assert np.array_equal(found[1].values, numbers.numpy())
    assert found[1].values.dtype == np.float32


def test_engine_when_its_model_takes_none_then_the_request_is_refused_and_others_are_not(monkeypatch):
    monkeypatch.setattr(LlamaModel, "takes_embeddings", False)
    with RealEngine("decode") as engine:
        assert engine.ready.embedding_size == 0
        engine.add("a", tokens_for(9, 1), embeddings=[segment(table_of(engine.core.runner), 0, [1])])
        engine.add("b", tokens_for(9, 1))
        engine.run()
        assert engine.last("a").error.code == ErrorCode.INVALID_PARAMS
        assert "takes no input embeddings" in engine.last("a").error.message
        assert engine.last("b").error is None


def wire(**changes: object) -> common_pb2.GenerateInput:
    message = common_pb2.GenerateInput(
        request_id="a", request_key="a#0.00000000", prompt_token_ids=range(1, 11), model="m"
    )
    message.sampling.CopyFrom(
        common_pb2.SamplingParams(max_tokens=1, seed=1, temperature=0, top_p=1, repetition_penalty=1)
    )
    message.input_embeddings.add(**{"location": 0, "values": values(), **changes})
    return message


def read(message: common_pb2.GenerateInput, size: int = HIDDEN):
    facts = ModelFacts(("m",), vocab_size=100, max_model_len=32, embedding_size=size)
    return read_request(message, facts, RunMode.LOCAL, arrival_ns=0, deadline_ns=0)


def test_front_when_segments_are_legal_then_the_engine_gets_them():
    assert read(wire(location=9)).input_embeddings == [InputEmbedding(9, values(), "float32")]
    assert read(wire(location=3, values=values(1, 2), dtype="bfloat16")).input_embeddings[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "size"),
    [({"location": 10}, HIDDEN), ({"values": values(10), "location": 1}, HIDDEN), ({}, 0), ({}, HIDDEN + 1)],
)
def test_front_when_segments_cannot_be_then_it_refuses_them(changes, size):
    with pytest.raises(BatonError) as refusal:
        read(wire(**changes), size)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS


def test_front_when_a_location_is_absent_then_it_is_not_read_as_zero():
    with pytest.raises(BatonError) as refusal:
        read_wire([common_pb2.InputEmbedding(values=values())])
    assert refusal.value.code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT


# -- pieces -----------------------------------------------------------------------------------------------------


def test_chunks_when_put_together_then_they_hold_every_row_once():
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    whole = (EmbeddingRows(3, rows[:5]), EmbeddingRows(12, rows[5:]))
    for size in range(1, 18):
        seen = np.zeros((17, 4), np.float32)
        for start in range(0, 17, size):
            end = min(17, start + size)
            for item in embeddings_of_chunk(whole, start, end):
                assert 0 <= item.place < item.end <= end - start
                seen[start + item.place : start + item.end] += item.values
        assert np.array_equal(seen[3:8], rows[:5])
        assert np.array_equal(seen[12:17], rows[5:])
        assert not seen[:3].any()
        assert not seen[8:12].any()


def test_override_when_no_row_brings_any_then_there_is_none():
    assert override_of([(0, ()), (3, ())], 5, 4, torch.device("cpu")) is None
    rows = np.ones((2, 4), np.float32)
    found = override_of([(0, ()), (3, (EmbeddingRows(0, rows),))], 5, 4, torch.device("cpu"))
    assert found.taken.tolist() == [0, 0, 0, 1, 1]
    assert found.over(torch.zeros(5, 4)).sum() == 8


def test_digest_when_there_are_no_embeddings_then_it_is_empty_and_their_order_does_not_matter():
    one, two = InputEmbedding(0, b"abcd"), InputEmbedding(3, b"efgh")
    assert digest_of([]) == b""
    assert digest_of([one, two]) == digest_of([two, one]) != digest_of([one])
    assert len(digest_of([one])) == 32
