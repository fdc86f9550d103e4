"""A prefill and a decode server as processes, driven over the wire contract without a router."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import common_pb2, prefill_pb2, worker_pb2
from tests.integration.cluster import ROOT, Cluster, ServerProcess, wait_for
from tests.integration.wire_client import TIMEOUT_S, Pair, generate_input, key_of, statuses
from tests.unit.engine.tiny_models import VOCAB_SIZE

MODEL = "tiny"
BLOCK = 16


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i * i + 13 * i + 31 * salt) % (VOCAB_SIZE - 2) + 2 for i in range(length)]


@pytest.fixture(scope="module")
def cluster(direct: Cluster) -> Iterator[Cluster]:
    yield direct
    direct.assert_clean_ledgers()
    assert direct.errors_without_code() == []


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Iterator[Pair]:
    with Pair(cluster.prefill[0], cluster.decode[0], MODEL) as both:
        yield both


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_hand_off_when_prompts_have_any_length_then_tokens_equal_the_colocated_run(
    cluster: Cluster, pair: Pair, length: int
) -> None:
    prompt = prompt_of(length, salt=length)
    alone = pair.d.local(generate_input(f"alone-{length}", prompt, model=MODEL, max_tokens=12, ignore_eos=True))
    split = pair.generate(generate_input(f"split-{length}", prompt, model=MODEL, max_tokens=12, ignore_eos=True))
    again = pair.generate(generate_input(f"again-{length}", prompt, model=MODEL, max_tokens=12, ignore_eos=True))
    assert len(alone.token_ids) == 12
    assert split.token_ids == alone.token_ids
    assert again.token_ids == alone.token_ids  # with prefix hits on both sides
    assert split.prefill is not None
    assert split.prefill.result.first_token.token_id == alone.token_ids[0]
    assert split.kinds[:3] == ["reserved", "loaded", "tokens"]
    assert split.events[1].loaded.prefill.first_token == split.prefill.result.first_token
    assert split.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert 0 <= again.prefill.result.cached_tokens <= length
    cluster.assert_clean_ledgers()


def test_hand_off_when_sampling_is_seeded_then_tokens_equal_the_colocated_run(pair: Pair) -> None:
    prompt = prompt_of(40, salt=3)
    options = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 2**63 + 5, "frequency_penalty": 0.5}
    alone = pair.d.local(generate_input("seeded-1", prompt, model=MODEL, max_tokens=16, **options))
    split = pair.generate(generate_input("seeded-2", prompt, model=MODEL, max_tokens=16, **options))
    assert split.token_ids == alone.token_ids


def test_hand_off_when_logprobs_are_asked_for_then_every_token_has_them_and_the_prompt_too(pair: Pair) -> None:
    prompt = prompt_of(20, salt=4)
    result = pair.generate(generate_input("lp", prompt, model=MODEL, max_tokens=4, logprobs=3, prompt_logprobs=2))
    assert all(token.HasField("logprob") and len(token.top_logprobs) == 3 for token in result.tokens)
    assert result.tokens[0].logprob.token_id == result.tokens[0].token_id
    positions = [item.position for item in result.prefill.result.prompt_logprobs]
    assert positions == list(range(1, len(prompt)))
    assert result.events[1].loaded.prefill.prompt_logprobs == result.prefill.result.prompt_logprobs


def test_timeline_when_a_request_went_through_both_then_each_server_reports_its_own_stages(
    cluster: Cluster, pair: Pair
) -> None:
    request = generate_input("stages", prompt_of(50, salt=5), model=MODEL)
    result = pair.generate(request)
    assert set(result.prefill.timeline.stages) == {"admit", "queue", "match", "compute", "sample"}
    decode_stages = set(result.finished.timeline.stages)
    assert {"admit", "allocate", "load", "generate"} <= decode_stages
    assert not decode_stages & {"queue", "match", "compute", "sample"}
    record = cluster.prefill[0].finished("stages")
    assert record["code"] == 0
    assert record["kv"]["outcome"] == "released"
    assert {"publish", "held"} <= set(record["stages"])
    names = [event["name"] for event in record["events"]]
    assert "computed" in names
    on_decode = cluster.decode[0].finished("stages")
    assert on_decode["request_key"] == request.request_key == record["request_key"]
    assert "load_complete" in [event["name"] for event in on_decode["events"]]
    assert (on_decode["prompt_tokens"], on_decode["generated_tokens"]) == (50, 8)


def test_prefill_when_the_kv_is_not_held_then_one_server_serves_the_whole_request(cluster: Cluster, pair: Pair) -> None:
    prompt = prompt_of(30, salt=6)
    expected = pair.d.local(generate_input("one-0", prompt, model=MODEL, max_tokens=1))
    request = generate_input("one-1", prompt, model=MODEL, max_tokens=1)
    answer = pair.p.prefill.Prefill(prefill_pb2.PrefillRequest(input=request, hold_kv=False), timeout=TIMEOUT_S)
    assert answer.result.first_token.token_id == expected.token_ids[0]
    assert answer.result.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not answer.HasField("kv_generation")
    cluster.assert_clean_ledgers()


def test_hand_off_when_the_request_goes_on_after_a_fail_over_then_indices_and_tokens_continue(pair: Pair) -> None:
    prompt = prompt_of(25, salt=7)
    whole = pair.d.local(generate_input("fo-0", prompt, model=MODEL, max_tokens=10, ignore_eos=True)).token_ids
    rest = pair.generate(generate_input("fo-1", prompt, model=MODEL, max_tokens=10, output=whole[:4], ignore_eos=True))
    assert [token.index for token in rest.tokens] == list(range(4, 10))
    assert [token.token_id for token in rest.tokens] == whole[4:]


@pytest.mark.invariant("RPC-2")
def test_metrics_when_a_request_was_served_then_each_role_shows_its_own_series_only(
    cluster: Cluster, pair: Pair
) -> None:
    pair.generate(generate_input("m-1", prompt_of(33, salt=8), model=MODEL))
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    prefill.finished("m-1")
    assert prefill.metric("baton_stage_seconds_count", stage="compute") >= 1
    assert prefill.metric("baton_stage_seconds_count", stage="load") is None
    assert decode.metric("baton_stage_seconds_count", stage="load") >= 1
    assert decode.metric("baton_stage_seconds_count", stage="queue") is None
    assert prefill.metric("baton_rpc_requests_total", method="baton.v1.Prefill/Prefill", code="NONE_ERROR") >= 1
    # What an engine has to tell comes after its tokens; without steps it does once a second.
    for server, direction in ((prefill, "sent"), (decode, "received")):
        wait_for(
            f"the bytes {direction}",
            lambda of=server, way=direction: of.counted("baton_kv_transfer_bytes_total", direction=way),
            20.0,
        )
    wait_for("the end of the lease", lambda: prefill.metric("baton_kv_leases_active") == 0, 20.0)
    cluster.assert_clean_ledgers()
    states = ("free", "running", "staged", "receiving", "quarantined", "cached")

    def blocks(server: ServerProcess) -> dict[str, float | None]:
        return {state: server.metric("baton_kv_blocks", group="full", state=state) for state in states}

    for server in (prefill, decode):
        assert server.metric("baton_ready") == 1
        assert server.metric("baton_engine_up", rank="0") == 1
        assert server.metric("baton_kv_ledger_imbalance_blocks", rank="0", group="full") == 0
        counts = server.ledger()[0]
        wait_for(
            f"{counts} in the metrics of {server.name}",
            lambda server=server, counts=counts: blocks(server) == {state: counts[state] for state in states},
            20.0,
        )


# -- Worker, health, reflection, pages -----------------------------------------------------------------------


def test_get_info_when_servers_share_a_model_then_they_fit(pair: Pair, cluster: Cluster) -> None:
    prefill, decode = pair.p.info(), pair.d.info()
    assert (prefill.role, decode.role) == (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE)
    for field in ("protocol_version", "model_fingerprint", "kv_dtype", "tp_size", "vocab_size", "max_model_len"):
        assert getattr(prefill, field) == getattr(decode, field)
    assert list(prefill.groups) == list(decode.groups)
    assert prefill.groups[0].block_size == BLOCK
    assert prefill.engine_id != decode.engine_id
    assert list(prefill.served_model_names) == [MODEL]
    assert list(prefill.cache_store_addresses) == cluster.prefill[0].cache_store
    assert prefill.http_address == cluster.prefill[0].http
    assert decode.allows_local_prefill
    assert prefill.HasField("allows_local_prefill")
    assert not prefill.allows_local_prefill
    assert prefill.num_kv_blocks == cluster.prefill[0].ledger()[0]["total"]


def test_watch_status_when_nothing_happens_then_statuses_keep_coming_with_rising_versions(pair: Pair) -> None:
    stream = statuses(pair.d, 0.05)
    seen = [next(stream) for _ in range(4)]
    stream.cancel()
    assert [status.state for status in seen] == [worker_pb2.WORKER_STATE_READY] * 4
    versions = [status.version for status in seen]
    assert versions == sorted(set(versions))
    assert seen[0].ledgers[0].HasField("total")


@pytest.mark.parametrize("interval", [0.0, -1.0, 61.0, float("nan")])
def test_watch_status_when_the_interval_is_out_of_range_then_it_is_605(pair: Pair, interval: float) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(statuses(pair.p, interval))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_kv_events_when_a_prompt_is_cached_and_flushed_then_a_subscriber_can_follow(
    cluster: Cluster, pair: Pair
) -> None:
    pair.p.worker.FlushCache(worker_pb2.FlushCacheRequest(), timeout=TIMEOUT_S)
    wait_for("an empty cache", lambda: cluster.prefill[0].ledger()[0]["cached"] == 0, 20.0)
    stream = pair.p.worker.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=TIMEOUT_S)
    first = next(stream)
    assert (first.sequence, first.engine_id) == (1, cluster.prefill[0].engine_id)
    assert first.events[0].cleared
    pair.generate(generate_input("kv-1", prompt_of(3 * BLOCK, salt=9), model=MODEL))
    stored: list[bytes] = []
    sequence = 1
    while len(stored) < 2:
        batch = next(stream)
        sequence += 1
        assert batch.sequence == sequence
        stored += [block for event in batch.events for block in event.stored]
    assert {len(block) for block in stored} == {16}
    stream.cancel()
    # A later subscriber gets the same blocks as its snapshot.
    again = pair.p.worker.SubscribeKvEvents(worker_pb2.SubscribeKvEventsRequest(), timeout=TIMEOUT_S)
    snapshot = [block for event in next(again).events for block in event.stored]
    again.cancel()
    assert set(stored) <= set(snapshot)


def test_health_when_the_engine_is_up_then_every_service_is_serving(pair: Pair) -> None:
    for client, name in ((pair.p, "baton.v1.Prefill"), (pair.d, "baton.v1.Decode")):
        stub = health_pb2_grpc.HealthStub(client.channel)
        for service in ("", name, "baton.v1.Worker"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_when_asked_then_the_services_are_listed(pair: Pair) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(pair.d.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S))
    names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.Decode", "baton.v1.Worker", "grpc.health.v1.Health"} <= names


def test_pages_when_the_server_is_ready_then_each_answers(cluster: Cluster) -> None:
    for server in cluster.servers:
        for path in ("/live", "/ready", "/health", "/version", "/server_info", "/metrics"):
            assert server.get(path).status_code == 200, path
        assert server.get("/nowhere").json()["error"]["baton_code"] == 40401
        info = server.page("/server_info")
        assert info["settings"]["block_size"] == BLOCK
        assert info["engine"]["engine_id"] == server.engine_id


def test_request_when_the_key_was_served_then_it_is_8607(pair: Pair) -> None:
    request = generate_input("dup", prompt_of(8), model=MODEL, key=key_of("dup"))
    pair.generate(request)
    with pytest.raises(grpc.RpcError) as caught:
        pair.p.prefill.Prefill(prefill_pb2.PrefillRequest(input=request, hold_kv=True), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(grpc.RpcError) as caught:
        pair.d.local(request)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


def test_servers_when_running_then_they_are_small_and_without_torch(cluster: Cluster) -> None:
    for server in cluster.servers:
        status = Path(f"/proc/{server.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        assert int(resident.split()[1]) < 150 * 1024, resident
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        assert "libtorch" not in maps


def test_front_packages_when_imported_then_neither_torch_nor_transformers_comes_along() -> None:
    code = (
        "import sys, prefill_server.__main__, decode_server.__main__;"
        "print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert found.stdout.strip() == "[]"


def test_access_log_when_requests_end_then_each_has_one_line_without_content(cluster: Cluster, pair: Pair) -> None:
    pair.generate(generate_input("logged", prompt_of(20), model=MODEL))
    for server in cluster.servers:
        server.finished("logged")

        def lines(server: ServerProcess = server) -> list[dict[str, object]]:
            return [line for line in server.log_lines() if line.get("request_id") == "logged"]

        found = wait_for("the access line", lines, 20.0)
        assert len(found) == 1
        assert (found[0]["code"], found[0]["attempt"], found[0]["prompt_tokens"]) == ("NONE_ERROR", 0, 20)
        assert found[0]["stages"]
        assert not {"prompt", "output", "prompt_token_ids"} & set(found[0])
