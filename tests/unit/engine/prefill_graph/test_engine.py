"""Invariants 1, 11, 17, 23, 26, 27, 28 and 31 of docs/cuda_graphs.md through whole engines.

With the Triton backend in its interpreter an engine on a CPU records its prefill graphs like one on a GPU, and replays
the recorded calls.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from contextlib import ExitStack

import pytest
import torch
import zmq

from engine.core import EngineLoop
from engine.graph_settings import PrefillGraphSettings
from engine.messages import RunMode
from engine.runner.capture import recorder_for
from kernels.jit import available
from rpc.errors import BatonError, ErrorCode
from rpc.faults import arm, disarm
from tests.unit.engine.prefill_graph.graph_runners import model_folder, prompt
from tests.unit.engine.real_engine import RealEngine, pair, run_until, serve

GRAPHS = PrefillGraphSettings(enabled=True, max_requests=2, buckets=(8, 16))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not available(DEVICE), reason="needs Triton")


def options(**changes: object) -> dict[str, object]:
    return {
        "model": model_folder(layers=1),
        "load_format": "dummy",
        "device": DEVICE,
        "attention_backend": "triton",
        "enable_cuda_graph": True,
        "prefill_graph": GRAPHS,
        "block_size": 16,
        "num_kv_blocks": 24,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        **changes,
    }


def answer(engine: RealEngine, key: str) -> tuple[list[int], str]:
    assert engine.last(key).error is None, engine.last(key).error
    [info] = [output.prefill for output in engine.outputs[key] if output.prefill is not None]
    return engine.tokens(key), info.cuda_graph_status


def statuses(engine: RealEngine) -> dict[str, float]:
    name = "baton_prefill_cuda_graph_requests_total"
    found: dict[str, float] = {}
    for item in engine.observations:
        if item.name == name:
            found[item.labels["status"]] = found.get(item.labels["status"], 0) + item.value
    return found


# -- start-up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "not_requested"),
        ({"prefill_graph": GRAPHS}, "feature_disabled"),
        ({"prefill_graph": GRAPHS, "enable_cuda_graph": False}, "feature_disabled"),
        ({"prefill_graph": GRAPHS, "enable_cuda_graph": True}, "unsupported_backend"),
        ({"prefill_graph": GRAPHS, "enable_cuda_graph": True, "attention_backend": "torch"}, "unsupported_backend"),
    ],
)
def test_engine_when_it_has_no_graphs_then_it_serves_and_every_answer_says_why(changes, status, caplog):
    caplog.set_level(logging.INFO)
    with RealEngine("decode", **changes) as engine:
        assert engine.ready.prefill_cuda_graph_init == status
        assert engine.ready.captured == []
        engine.add("a", prompt(9, 1), max_tokens=2)
        engine.run()
        assert answer(engine, "a")[1] == status
        assert statuses(engine) == {status: 1}
        decode = "unsupported_backend" if changes.get("enable_cuda_graph") else "not_requested"
        assert engine.counted("baton_decode_cuda_graph_steps_total", status=decode) == 1
        assert engine.core.kv.ledgers()[0].reserved == 1
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    if status == "not_requested":
        assert not warnings
    else:
        [warning] = warnings
        assert warning.reason == status
        assert warning.exc_info is None
        if status == "feature_disabled":
            assert "--enable-cuda-graph" in warning.getMessage()


@needs_triton
def test_engine_when_its_graphs_are_to_be_written_then_prefill_graphs_go_to_the_folder_that_the_log_names(
    monkeypatch, caplog, tmp_path
):
    caplog.set_level(logging.INFO)
    settings = options(cuda_graph_debug=True, prefill_graph=PrefillGraphSettings(enabled=True, buckets=(8,)))
    folders = []

    def recorded(device, debug_folder=None):
        folders.append(debug_folder)
        return recorder_for(device, debug_folder)

    monkeypatch.setattr("engine.runner.prefill_graph.runner.recorder_for", recorded)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RealEngine("prefill", **settings) as engine:
        assert engine.ready.prefill_cuda_graph_init == "captured"
    [folder] = folders
    assert folder.is_dir()
    assert any(str(folder) in record.getMessage() for record in caplog.records)


def test_engine_when_a_decode_server_computes_no_prompts_then_nothing_was_requested():
    with RealEngine("decode", prefill_graph=GRAPHS, allow_local_prefill=False, enable_cuda_graph=True) as engine:
        assert engine.ready.prefill_cuda_graph_init == "not_requested"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"prefill_graph": PrefillGraphSettings(strict=True)}, "not_requested"),
        ({"prefill_graph": PrefillGraphSettings(enabled=True, strict=True)}, "feature_disabled"),
        (
            {"prefill_graph": PrefillGraphSettings(enabled=True, strict=True), "enable_cuda_graph": True},
            "unsupported_backend",
        ),
    ],
)
def test_engine_when_graphs_are_a_must_and_there_are_none_then_it_does_not_start(changes, status):
    with pytest.raises(BatonError, match=status) as refusal:
        RealEngine("prefill", **changes)
    assert refusal.value.code is ErrorCode.PREFILL_GRAPH_UNSUPPORTED
    assert refusal.value.metadata["status"] == status
    assert "--prefill-cuda-graph-strict" in refusal.value.message


def test_engine_when_a_chosen_bucket_cannot_be_filled_then_it_fails_only_where_the_feature_has_an_effect():
    chosen = PrefillGraphSettings(enabled=True, buckets=(1, 65))
    small = {"prefill_graph": chosen, "max_model_len": 64, "num_kv_blocks": 16}
    with pytest.raises(BatonError, match="--prefill-cuda-graph-capture-config") as refusal:
        RealEngine("prefill", **small, enable_cuda_graph=True)
    assert refusal.value.code is ErrorCode.INVALID_PARAMS  # an error, and no `unsupported_backend`
    for changes in ({}, {"enable_cuda_graph": False}):
        with RealEngine("prefill", **small, **changes) as engine:
            assert engine.ready.prefill_cuda_graph_init == "feature_disabled"
    with RealEngine("prefill", **{**small, "prefill_graph": PrefillGraphSettings(buckets=(1, 65))}) as engine:
        assert engine.ready.prefill_cuda_graph_init == "not_requested"


@needs_triton
def test_engine_when_the_default_buckets_are_too_large_then_they_are_cut():
    defaults = PrefillGraphSettings(enabled=True, max_requests=1)
    with RealEngine("prefill", **options(prefill_graph=defaults, max_model_len=4)) as engine:
        assert engine.ready.prefill_cuda_graph_init == "captured"
        assert engine.core.runner.device_steps.prefill_graphs.limits.buckets == (1, 2, 3, 4)


@needs_triton
@pytest.mark.parametrize(
    ("fault", "strict", "code"),
    [
        ("phase=before", False, None),
        ("phase=before", True, ErrorCode.PREFILL_GRAPH_UNSUPPORTED),
        ("phase=during,bucket=16", False, ErrorCode.GRAPH_CAPTURE_DIRTY),
        ("phase=during,bucket=8", True, ErrorCode.GRAPH_CAPTURE_DIRTY),
    ],
)
def test_engine_when_a_capture_fails_then_it_serves_eagerly_or_does_not_start(fault, strict, code):
    settings = PrefillGraphSettings(enabled=True, max_requests=2, buckets=(8, 16), strict=strict)
    arm(f"prefill_graph.capture:raise=EXECUTION_EXCEPTION,{fault}")
    try:
        if code is not None:
            with pytest.raises(BatonError) as failure:
                RealEngine("prefill", **options(prefill_graph=settings))
            assert failure.value.code is code
            return
        with RealEngine("decode", **options(prefill_graph=settings)) as engine:
            assert engine.ready.prefill_cuda_graph_init == "capture_unavailable"
            assert engine.core.kv.ledgers()[0].reserved == 1
            assert engine.core.kv.ledgers()[0].total == 24
            engine.add("a", prompt(16, 1), max_tokens=2)
            engine.run()
            assert answer(engine, "a")[1] == "capture_unavailable"
    finally:
        disarm()


# -- steps ------------------------------------------------------------------------------------------------------


@needs_triton
def test_engine_when_prompts_of_every_kind_come_then_each_says_how_it_was_computed(caplog):
    caplog.set_level(logging.INFO)
    prompts = {
        "fits": (prompt(16, 1), "replayed"),
        "padding": (prompt(9, 2), "padding_ratio_exceeded"),
        "tokens": (prompt(17, 3), "input_tokens_exceed_capture_limit"),
        "chunks": (prompt(40, 4), "input_tokens_exceed_capture_limit"),
        "prefix": (prompt(16, 1) + prompt(8, 5), "prefix_not_supported"),
    }
    with (
        RealEngine("decode", **options()) as engine,
        RealEngine("decode", **options(prefill_graph=PrefillGraphSettings(), enable_cuda_graph=None)) as eager,
    ):
        assert engine.ready.prefill_cuda_graph_init == "captured"
        assert eager.ready.prefill_cuda_graph_init == "not_requested"
        for server in (engine, eager):
            for key, (tokens, _) in prompts.items():
                server.add(key, tokens, max_tokens=2)
                server.run()
            for key, seed in (("one", 7), ("two", 8), ("three", 9)):
                server.add(key, prompt(4, seed), max_tokens=1)
            server.run()
        for key, (_, status) in prompts.items():
            assert (key, answer(engine, key)) == (key, (answer(eager, key)[0], status))
        assert {answer(engine, key)[1] for key in ("one", "two", "three")} == {"request_capacity_exceeded"}
        assert statuses(engine) == {
            "replayed": 1,
            "padding_ratio_exceeded": 1,
            "input_tokens_exceed_capture_limit": 2,
            "prefix_not_supported": 1,
            "request_capacity_exceeded": 3,
        }
        assert engine.core.kv.ledgers()[0].reserved == 2
    logged = [record.reason for record in caplog.records if "without its prefill graph" in record.getMessage()]
    # The first and the second of a status, not the third.
    assert logged.count("request_capacity_exceeded") == 2
    assert logged.count("input_tokens_exceed_capture_limit") == 2
    assert "replayed" not in logged
    assert "not_requested" not in logged


@needs_triton
def test_engine_when_two_prompts_come_at_once_then_one_replay_computes_both():
    with RealEngine("decode", **options()) as engine:
        engine.add("a", prompt(6, 1), max_tokens=1)
        engine.add("b", prompt(8, 2), max_tokens=1)
        engine.step()
        assert answer(engine, "a")[1] == answer(engine, "b")[1] == "replayed"
        assert engine.counted("baton_prefill_cuda_graph_replays_total", bucket="16") == 1
        assert statuses(engine) == {"replayed": 2}
        assert engine.counted("baton_prefill_cuda_graph_tokens_total", kind="real") == 14
        assert engine.counted("baton_prefill_cuda_graph_tokens_total", kind="padding") == 2


@needs_triton
@pytest.mark.extended
def test_engine_when_preparing_fails_then_the_answer_is_right_and_says_error():
    with RealEngine("decode", **options()) as engine:
        engine.add("a", prompt(16, 1), max_tokens=1)
        engine.run()
        arm("prefill_graph.prepare:raise=EXECUTION_EXCEPTION,step=copy,times=1")
        try:
            engine.add("b", prompt(16, 1), max_tokens=1, salt="another")
            engine.run()
        finally:
            disarm()
        engine.add("c", prompt(16, 1), max_tokens=1, salt="a third")
        engine.run()
        tokens, _ = answer(engine, "a")
        assert answer(engine, "b") == (tokens, "error")
        assert answer(engine, "c") == (tokens, "replayed")


@needs_triton
def test_disaggregation_when_the_prompt_was_replayed_then_its_kv_is_published_and_both_ends_say_so():
    plain = options(prefill_graph=PrefillGraphSettings(), enable_cuda_graph=None)
    with pair(prefill=options(), decode=plain) as (p, d):
        tokens = serve(p, d, "a#0.00000000", prompt(16, 1), max_tokens=3)
        assert answer(p, "a#0.00000000")[1] == answer(d, "a#0.00000000")[1] == "replayed"
        d.add("b#0.00000000", prompt(16, 1), RunMode.LOCAL, max_tokens=3, salt="other")
        run_until([d], lambda: d.ended("b#0.00000000"))
        assert answer(d, "b#0.00000000") == (tokens, "not_requested")


# -- 31: the end ------------------------------------------------------------------------------------------------


def loop_of(stack: ExitStack, engine: RealEngine) -> EngineLoop:
    """A loop whose front says nothing and reads nothing."""
    context = zmq.Context()
    stack.callback(context.term)
    inbox, outbox, front = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PULL))
    for socket in (inbox, outbox, front):
        stack.callback(socket.close, 0)
    inbox.bind("inproc://inbox")
    outbox.bind("inproc://outbox")
    front.connect("inproc://outbox")
    return EngineLoop(engine.core, inbox, outbox, engine.wakeup)


@needs_triton
def test_stop_when_called_twice_while_a_replay_is_prepared_then_the_step_ends_before_its_buffers_go(monkeypatch):
    with ExitStack() as stack:
        engine = stack.enter_context(RealEngine("decode", **options()))
        loop = loop_of(stack, engine)
        graphs = engine.core.runner.device_steps.prefill_graphs
        preparing, go = threading.Event(), threading.Event()
        order: list[str] = []
        prepare, replay, release = graphs.prepare_replay, graphs.replay, graphs.release

        def held(batch, bucket):
            prepare(batch, bucket)
            preparing.set()
            assert go.wait(60)

        monkeypatch.setattr(graphs, "prepare_replay", held)
        monkeypatch.setattr(graphs, "replay", lambda: (order.append("replay"), replay())[1])
        monkeypatch.setattr(graphs, "release", lambda: (order.append("release"), release())[1])
        engine.add("a", prompt(16, 1), max_tokens=4)
        thread = threading.Thread(target=loop.run)
        thread.start()
        assert preparing.wait(60)
        assert not loop.stop(0.05)  # it waits for the step, which is held
        go.set()
        assert loop.stop(60)
        assert loop.stop(60)
        thread.join(60)
        assert not thread.is_alive()
        assert order == ["replay", "release"]
        assert engine.core.kv.ledgers()[0].reserved == 1
        assert not engine.core.scheduler.open


def test_stop_when_the_loop_is_idle_then_it_ends_at_once():
    with ExitStack() as stack:
        engine = stack.enter_context(RealEngine("decode"))
        loop = loop_of(stack, engine)
        thread = threading.Thread(target=loop.run)
        thread.start()
        assert loop.stop(60)
        thread.join(60)
        assert not thread.is_alive()
        assert loop.stop(0)


def test_stop_when_called_before_the_loop_runs_then_it_computes_nothing():
    with ExitStack() as stack:
        engine = stack.enter_context(RealEngine("decode"))
        loop = loop_of(stack, engine)
        engine.add("a", prompt(9, 1), max_tokens=4)
        assert not loop.stop(0)
        loop.run()
        assert loop.stop(0)
        engine.collect()
        assert engine.outputs == {}  # the loop has told them
        assert not engine.core.scheduler.open
