"""`baton bench serve`: arrival times, concurrency, and whole runs against a scripted server."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from bench.backends import OpenAiCompletions, Target
from bench.datasets import Prompt
from bench.router_facts import counters, grown, grpc_model_length, model_length
from bench.serve import Plan, arrival_times, main, parser, run, run_load
from protos import generation_pb2, generation_pb2_grpc
from tests.unit.bench.sse_server import DONE, SseServer, completion, event, final_usage, in_thread
from tests.unit.router.tokenizer_folders import byte_level

ANSWER = [completion("ab", 2), completion("cd", 4, "length", baton={"path": "pd"}), final_usage(4, cached=1), DONE]
WORKERS = {
    "workers": [
        {"role": "prefill", "state": "ready", "facts": {"transports": ["grpc"]}},
        {"role": "decode", "state": "ready", "facts": {"transports": ["grpc"]}},
        {"role": "decode", "state": "unhealthy"},
    ]
}
PAGES = {
    "/v1/models": json.dumps({"data": [{"id": "served"}]}).encode(),
    "/health": b"",
    "/workers": json.dumps(WORKERS).encode(),
    "/metrics": b'# TYPE baton_requests_total counter\nbaton_requests_total{api="completions"} 3\nbaton_ready 1\n',
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.fixture
def server() -> Iterator[SseServer]:
    with in_thread(SseServer(ANSWER, pages=dict(PAGES))) as running:
        yield running


def flags(server: SseServer, tokenizer: str, *more: str) -> list[str]:
    lengths = ["--random-input-len", "5", "--random-output-len", "4", "--ignore-eos"]
    return ["--base-url", server.url, "--tokenizer", tokenizer, "--num-prompts", "6", *lengths, *more]


def test_arrival_times_when_no_rate_is_given_then_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrival_times_when_a_rate_is_given_then_mean_and_spread_of_the_gaps_follow(burstiness: float) -> None:
    times = arrival_times(20_000, 8.0, burstiness, 1)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrival_times_when_made_twice_then_equal_and_with_another_seed_not() -> None:
    assert arrival_times(50, 3.0, 1.0, 7) == arrival_times(50, 3.0, 1.0, 7)
    assert arrival_times(50, 3.0, 1.0, 7) != arrival_times(50, 3.0, 1.0, 8)


@pytest.mark.parametrize(("rate", "burstiness", "flag"), [(0, 1, "rate"), (-math.inf, 1, "rate"), (1, 0, "burstiness")])
def test_arrival_times_when_a_value_is_wrong_then_the_flag_is_named(rate: float, burstiness: float, flag: str) -> None:
    with pytest.raises(ValueError, match=f"--(request-)?{flag}"):
        arrival_times(1, rate, burstiness, 0)


async def test_run_load_when_concurrency_is_limited_then_no_more_are_open_and_no_fewer() -> None:
    # The first answers wait until three requests are open, so fewer than three would never end.
    async with SseServer(ANSWER, together=3) as server:
        backend = OpenAiCompletions(Target(server.url, "/v1/completions", "m"))
        results, duration = await run_load(backend, [Prompt([1], "x", 4)] * 9, [0.0] * 9, 3)
        await backend.close()
    assert [r.error for r in results] == [""] * 9
    assert server.most_open == 3
    assert duration > 0


async def test_run_load_when_arrivals_are_planned_then_none_is_sent_before_its_time() -> None:
    planned = [0.0, 0.02, 0.05, 0.09]
    async with SseServer(ANSWER) as server:
        backend = OpenAiCompletions(Target(server.url, "/v1/completions", "m"))
        backend.restart_clock()
        results, _ = await run_load(backend, [Prompt([1], "x", 4)] * 4, planned, None)
        await backend.close()
    for at, result in zip(planned, results, strict=True):
        assert result.sent_at >= at
        assert result.lateness_s == pytest.approx(result.sent_at - at, abs=0.05)


def test_run_when_all_is_well_then_block_and_record(
    server: SseServer, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--metadata", "run=7"]
    status = main(flags(server, tokenizer, "--max-concurrency", "2", "--num-warmups", "2", *saved))
    assert status == 0
    printed = capsys.readouterr().out
    assert printed.startswith("============ Serving Benchmark Result ============\n")
    assert f"{'Successful requests:':<40} {'6':<10}" in printed
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["completed"] == 6
    assert record["failed"] == 0
    assert record["run"] == "7"
    assert record["model_id"] == "served"
    assert record["max_concurrency"] == 2
    assert record["request_rate"] == "inf"
    assert record["total_output_tokens"] == 24
    assert record["output_lens"] == [4] * 6
    assert record["generated_texts"] == ["abcd"] * 6
    assert record["errors"] == [""] * 6
    assert len(record["itls"][0]) == 2
    assert record["baton"]["topology"] == "1P1D"
    assert record["baton"]["transport"] == "grpc"
    assert record["baton"]["paths"] == {"pd": 6}
    assert record["baton"]["cached_share"] == pytest.approx(1 / 5)
    assert record["baton"]["metric_deltas"] == {}
    prompts = [tuple(r.body["prompt"]) for r in server.received]
    assert len(prompts) == 8
    assert not set(prompts[:2]) & set(prompts[2:]), "a warm-up must not fill the prefix cache for the run"


def test_run_when_run_again_with_the_seed_then_the_same_requests(server: SseServer, tokenizer: str) -> None:
    run(flags(server, tokenizer, "--seed", "5"))
    first = [r.body for r in server.received]
    server.received.clear()
    run(flags(server, tokenizer, "--seed", "5", "--max-concurrency", "1"))
    bodies = [r.body for r in server.received]
    assert sorted(map(str, bodies)) == sorted(map(str, first))


def test_run_when_a_trace_is_replayed_then_at_its_times_and_what_does_not_fit_is_left_out(
    server: SseServer, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pages["/v1/models"] = json.dumps({"data": [{"id": "served", "max_model_len": 100}]}).encode()
    rows = [(0, 200, 4), (1000, 30, 4), (1100, 96, 4), (1250, 97, 4)]  # time, prompt, answer
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": size, "output_length": output, "hash_ids": [7]})
            for at, size, output in rows
        )
    )
    replay = ["--dataset-name", "timed_trace", "--dataset-path", str(file), "--self-timed"]
    saved = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    main(flags(server, tokenizer, *replay, *saved))  # its status may be about a slow machine
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["completed"], record["failed"]) == (2, 0)
    assert record["baton"]["trace"] == {"dropped": 2, "length_scale": 1.0}
    assert "left out: 2 requests" in capsys.readouterr().err
    warm_up, first, second = [tuple(r.body["prompt"]) for r in server.received]
    assert (len(first), len(second)) == (30, 96)
    assert second[:30] == first != warm_up
    assert record["start_times"][1] >= 0.1


def test_model_length_when_asked_over_either_way_then_that_of_the_model_or_unknown(server: SseServer) -> None:
    server.pages["/v1/models"] = json.dumps({"data": [{"id": "a", "max_model_len": 5}, {"id": "b"}]}).encode()
    assert [model_length(server.url, "", name) for name in ("a", "b", "c")] == [5, 0, 0]

    class Models(generation_pb2_grpc.GenerationServicer):
        def ListModels(
            self, request: generation_pb2.ListModelsRequest, context: grpc.ServicerContext
        ) -> generation_pb2.ListModelsResponse:
            if ("authorization", "Bearer key") not in context.invocation_metadata():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
            models = [generation_pb2.Model(id="a", max_model_len=7), generation_pb2.Model(id="b", max_model_len=9)]
            return generation_pb2.ListModelsResponse(models=models)

    own = grpc.server(ThreadPoolExecutor(1))
    generation_pb2_grpc.add_GenerationServicer_to_server(Models(), own)
    address = f"http://127.0.0.1:{own.add_insecure_port('127.0.0.1:0')}"
    own.start()
    try:
        assert [grpc_model_length(address, "key", name) for name in ("", "b", "c")] == [7, 9, 0]
        assert grpc_model_length(address, "", "a") == 0
    finally:
        own.stop(None).wait()


def test_run_when_requests_fail_then_counted_named_and_status_one(
    server: SseServer, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.pieces = [completion("a", 1), event(error={"code": "ENGINE_DEAD", "message": "gone"}), DONE]
    assert main(flags(server, tokenizer, "--num-warmups", "0")) == 1
    shown = capsys.readouterr()
    assert f"{'Failed requests:':<40} {'6':<10}" in shown.out
    assert shown.err.count("failed: ENGINE_DEAD: gone") == 1


def test_run_when_the_warm_up_fails_then_nothing_is_measured(
    server: SseServer, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = "503 Service Unavailable"
    assert main(flags(server, tokenizer)) == 2
    assert "the warm-up request failed: HTTP 503" in capsys.readouterr().err
    assert len(server.received) == 1


def test_run_when_the_server_is_of_another_project_then_its_missing_pages_are_left_out(
    server: SseServer, tokenizer: str
) -> None:
    del server.pages["/workers"], server.pages["/metrics"]
    figures = run(flags(server, tokenizer))
    assert figures["completed"] == 6
    assert "topology" not in figures["baton"]


def test_grown_when_counters_rise_or_appear_then_by_how_much_and_the_others_are_left_out() -> None:
    before, after = {'a_total{x="1"}': 3.0, "c_total": 2.0}, {'a_total{x="1"}': 5.0, "b_total": 1.0, "c_total": 2.0}
    assert grown(before, after) == {'a_total{x="1"}': 2.0, "b_total": 1.0}


async def test_counters_when_read_then_only_totals(server: SseServer) -> None:
    assert await counters(server.url, "") == {'baton_requests_total{api="completions"}': 3.0}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics speed"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles x"),
        (["--metric-percentiles", "101"], "--metric-percentiles 101"),
        (["--max-concurrency", "0"], "--max-concurrency 0"),
        (["--num-warmups", "-1"], "--num-warmups -1"),
        (["--request-rate", "0"], "--request-rate 0"),
        (["--extra-body", "[1]"], "--extra-body [1]"),
        (["--extra-body", "{"], "--extra-body {"),
        (["--backend", "baton-grpc", "--extra-body", '{"top_k": 3}'], "--extra-body {'top_k': 3}"),
        (["--backend", "baton-grpc", "--endpoint", "/v2"], "--endpoint /v2"),
        (["--header", "x"], "--header x"),
        (["--metadata", "x"], "--metadata x"),
        (["--goodput", "ttft"], "--goodput ttft"),
        (["--num-prompts", "0"], "--num-prompts 0"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere"),
        (["--self-timed"], "--self-timed"),
        (["--dataset-name", "timed_trace", "--self-timed", "--request-rate", "3"], "--request-rate 3"),
        (["--dataset-name", "timed_trace"], "--dataset-path"),
    ],
)
def test_run_when_a_flag_is_wrong_then_one_line_names_it_before_anything_is_sent(
    server: SseServer, tokenizer: str, more: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(server, tokenizer, *more)) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert server.received == []


@pytest.mark.parametrize("backend", ["openai", "baton-grpc"])
def test_run_when_nothing_serves_then_one_line_names_the_address(
    tokenizer: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_thread(SseServer([])) as gone:
        url = gone.url
    arguments = ["--base-url", url, "--tokenizer", tokenizer, "--ready-check-timeout-sec", "0", "--backend", backend]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert url in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("backend", ["openai", "baton-grpc"])
def test_run_when_it_waits_for_a_server_then_said_once(
    tokenizer: str, backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.router_facts.SILENT_S", 0.0)
    with in_thread(SseServer([])) as gone:
        url = gone.url
    arguments = ["--base-url", url, "--tokenizer", tokenizer, "--ready-check-timeout-sec", "0.5", "--backend", backend]
    assert main(arguments) == 2
    waiting, given_up = capsys.readouterr().err.splitlines()
    assert waiting.startswith(f"waiting for {url} ") and "--ready-check-timeout-sec" in waiting
    assert "not ready within 0.5 s" in given_up


def test_port_when_not_given_then_that_of_the_back_end() -> None:
    assert Plan.of(parser().parse_args([])).base_url == "http://127.0.0.1:8000"
    assert Plan.of(parser().parse_args(["--backend", "baton-grpc"])).base_url == "http://127.0.0.1:8001"
    assert Plan.of(parser().parse_args(["--base-url", "http://h:1/v1/"])).base_url == "http://h:1"
