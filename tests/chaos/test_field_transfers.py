"""Failures that transfers of other systems were reported with, each as the invariant that rules it out here.

One prefill and one decode server behind a router; fault points, armed for requests whose id begins with the case's
name, bring about what was reported. Every test ends with clean ledgers, living processes and an ordinary request that
is answered right.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from protos import decode_pb2
from rpc.errors import BatonError, ErrorCode
from tests.chaos.cases import ROUTER_FLAGS, burst, descriptors, events_of, failed, wait_workers_ready
from tests.chaos.raw_reader import RawReader
from tests.conformance.live_cluster import frozen
from tests.conformance.reference import clear_prompt, prompt_of, reference
from tests.extent import extent
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import GenerationClient
from tests.integration.wire_client import EventReader, Pair, generate_input, typed
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)

MODEL = "tiny"
BLOCK = 16
POOL = 64
LAYERS = 3
HEADS, HEAD_DIM = 2, 16
BLOCK_BYTES = 2 * HEADS * BLOCK * HEAD_DIM * 4  # K and V, heads, tokens, head_dim, float32
LONGEST_ON_P = 256  # of the 512 tokens that the model, the router and the decode server allow
PUBLISH_LIMIT_S = 6.0  # on a busy machine, too, a load begins, and its prompt comes, within it
LOAD_LIMIT_S = 30.0  # no load that a test holds is given up meanwhile
LIMIT_S = 20.0
SOON_S = 5.0  # where that it is soon is what matters
TOKENS = 4

PREFILL_FAULTS = (
    "cache_store.send_piece:delay=60,layer=1,key=k1-*",
    "cache_store.send_piece:delay=0.05,key=k9-slow-*",
    "cache_store.send_piece:delay=60,layer=2,key=k9-slow-cancelled*,while={held}",
    "cache_store.send_piece:delay=10,layer=1,key=k10-*",
    "cache_store.send_piece:delay=60,layer=2,block=0,key=o3*,while={held}",
    "cache_store.publish:delay=60,nth=3,key=h4-grpc*,while={held}",
    "cache_store.publish:delay=60,nth=3,key=h4-http*,while={held}",
    "cache_store.send_piece:raise=CACHE_STORE_STORE_FAILED,layer=2,key=h4*",
    "cache_store.send_piece:delay=60,layer=2,block=0,key=o4-load*,while={held}",
    "engine.layer:delay=0.003",
)
DECODE_FAULTS = (
    "cache_store.read_event:delay=60,key=k2-late*,while={held}",
    "engine.step:delay=60,kind=decode,request_key=o4-*,while={stuck}",
    "cache_store.release:delay=60,side=decode,key=k14*,while={held}",
    "cache_store.release:delay=0.5,side=decode,key=k14*",
    "decode.reserved:delay=0.15,request_key=k10-late*",
    "cache_store.load_start:raise=CACHE_STORE_LOAD_CONNECT_FAILED,every=2,key=k6*",
)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As long as this file is there, what is held by it stays so."""
    return tmp_path_factory.mktemp("transfers") / "held"


def stuck_of(held: Path) -> Path:
    """As long as this one is there, the decode server makes no step for certain requests."""
    return held.with_name("stuck")


@pytest.fixture(scope="module")
def cluster(held: Path) -> Iterator[Cluster]:
    sizes = ("--served-model-name", MODEL, "--block-size", str(BLOCK), "--num-kv-blocks", str(POOL),
             "--max-num-batched-tokens", "256", "--max-num-seqs", "16", "--kv-checksum", "all",
             "--kv-lease-seconds", "300", "--log-level", "debug",
             "--cache-store-publish-timeout-ms", str(int(1000 * PUBLISH_LIMIT_S)),
             "--load-cache-timeout-ms", str(int(1000 * LOAD_LIMIT_S)))  # fmt: skip
    with Cluster(
        1, 1, model=tiny_model("llama"),
        prefill_flags=(*sizes, "--max-model-len", str(LONGEST_ON_P)),
        # A failure is to be seen, not to be made good.
        decode_flags=(*sizes, "--kv-load-failure-policy", "fail", "--no-allow-local-prefill"),
        router_flags=(*ROUTER_FLAGS, "--retry-max-retries", "0", "--migration-limit", "0",
                      "--cb-failure-threshold", "10000"),
        prefill_env={"BATON_FAULTS": ";".join(PREFILL_FAULTS).replace("{held}", str(held))},
        decode_env={
            "BATON_FAULTS": ";".join(DECODE_FAULTS).replace("{held}", str(held)).replace("{stuck}", str(stuck_of(held)))
        },
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[GenerationClient]:
    with GenerationClient(cluster.router.grpc) as found:
        yield found


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[Pair]:
    with Pair(cluster.prefill[0], cluster.decode[0], MODEL) as both:
        yield both


@pytest.fixture(scope="module")
def known() -> tuple[list[int], list[int]]:
    """A prompt with its greedy answer."""
    model = reference(tiny_model("llama"))
    prompt = clear_prompt(model, 72, TOKENS)
    return prompt, model.greedy(prompt, TOKENS)


@pytest.fixture(autouse=True)
def _ends_well(cluster: Cluster, client: GenerationClient, known: tuple[list[int], list[int]]) -> Iterator[None]:
    yield
    cluster.assert_clean_ledgers()
    assert all(process.alive for process in (*cluster.servers, cluster.router)), "a process has ended"
    answer = client.generate(known[0], TOKENS)
    assert (answer.token_ids, answer.path) == (known[1], "pd")
    cluster.assert_clean_ledgers()
    assert cluster.errors_without_code() == []


def p_of(cluster: Cluster) -> ServerProcess:
    return cluster.prefill[0]


def d_of(cluster: Cluster) -> ServerProcess:
    return cluster.decode[0]


def staged(server: ServerProcess) -> int:
    return int(server.ledger()[0]["staged"])


def post(cluster: Cluster, prompt: list[int], request_id: str, max_tokens: int = TOKENS) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(
        f"http://{cluster.router.http}/v1/completions", json=body, headers={"X-Request-Id": request_id}, timeout=30.0,
        verify=False,
    )  # fmt: skip


# -- KV lifetime ---------------------------------------------------------------------------------------------------


def raw_reader(cluster: Cluster, key: str, prompt_tokens: int) -> RawReader:
    return RawReader(p_of(cluster), key, prompt_tokens, block_size=BLOCK, block_bytes=BLOCK_BYTES, layers=LAYERS)


@pytest.mark.parametrize("reference_to", ["blocks beyond the prompt", "kv released before", "kv of another prompt"])
def test_k2_load_through_d_when_the_reference_is_wrong_then_an_error_and_no_token(
    cluster: Cluster, pair: Pair, reference_to: str
) -> None:
    decode = d_of(cluster)
    request_id = f"k2-{reference_to.replace(' ', '-')}"
    prompt = prompt_of(60, salt=len(reference_to))
    asked = request = generate_input(request_id, prompt, model=MODEL, max_tokens=TOKENS)
    pair.open_prefill(request).result(LIMIT_S)
    cause = ErrorCode.DUPLICATE_REQUEST
    if reference_to == "blocks beyond the prompt":
        longer = [*prompt, *prompt_of(200)]
        asked = generate_input(request_id, longer, model=MODEL, max_tokens=TOKENS, key=request.request_key)
        cause = ErrorCode.KV_STALE_REFERENCE
    else:
        reader = raw_reader(cluster, request.request_key, len(prompt))
        reader.read_all()
        reader.release()
        if reference_to == "kv of another prompt":
            for salt in range(5):  # more than P's pool has room for, so that these take the blocks
                other = generate_input(f"{request_id}-{salt}", prompt_of(250, salt), model=MODEL, max_tokens=TOKENS)
                assert pair.generate(other).tokens
    before = decode.total("baton_kv_transfer_failures_total", reason=cause.name)
    error = failed(pair.open_decode(asked))
    assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
    assert error.spec.http == 502
    assert error.metadata["cause"] == cause.name

    def count() -> float:
        return decode.total("baton_kv_transfer_failures_total", reason=cause.name)

    wait_for("its count", lambda: count() == before + 1, LIMIT_S)
    pair.p.abort(request.request_key, source="peer")


def test_k2_read_of_p_s_memory_when_its_blocks_hold_other_prompts_by_then_then_an_error_and_no_token(
    cluster: Cluster, pair: Pair, held: Path
) -> None:
    """D is late: P has said everything, the request was aborted there, and its blocks have been written again."""
    prefill, decode = p_of(cluster), d_of(cluster)
    request = generate_input("k2-late", prompt_of(200, salt=2), model=MODEL, max_tokens=TOKENS)
    pieces = LAYERS * -(-200 // BLOCK)

    def sent() -> float:
        return prefill.total("baton_kv_transfer_bytes_total", direction="sent")

    cluster.assert_clean_ledgers()  # what was sent before is counted
    before = sent()
    held.touch()
    try:
        reader = pair.open_decode(request)
        pair.open_prefill(request).result(LIMIT_S)
        # Which it does on a thread of its own, after its answer; and not before D asks for it.
        wait_for("P to have said everything", lambda: sent() == before + pieces * BLOCK_BYTES, LIMIT_S)
        wait_for("the blocks of the lease", lambda: staged(prefill), LIMIT_S)
        assert pair.p.abort(request.request_key, source="peer")
        assert prefill.finished("k2-late")["kv"]["outcome"] == "aborted"
        wait_for("the end of the lease", lambda: not staged(prefill), LIMIT_S)
        for salt in range(5):  # more than the pool has room for
            other = generate_input(f"k2-other-{salt}", prompt_of(250, salt), model=MODEL, max_tokens=1)
            pair.open_prefill(other).result(LIMIT_S)
            pair.p.abort(other.request_key, source="peer")
    finally:
        held.unlink()
    error = failed(reader)
    assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
    assert error.metadata["cause"] == ErrorCode.REQUEST_TOMBSTONED.name
    assert error.metadata["delivered"] == str(pieces), "it was not read at all"
    wait_for("a count of ipc", lambda: decode.total("baton_kv_transfer_seconds_count", transport="ipc") > 0, LIMIT_S)


def test_k4_key_when_a_request_is_handed_over_then_router_servers_and_cache_stores_log_one_and_the_same(
    cluster: Cluster, client: GenerationClient
) -> None:
    client.generate(prompt_of(40, salt=4), TOKENS, request_id="k4")

    def keys(process: ServerProcess, message: str = "") -> list[str]:
        """Of the lines with this message; without one, of the access log."""
        lines = [line for line in process.log_lines() if str(line.get("request_key", "")).startswith("k4#")]
        return [line["request_key"] for line in lines if line.get("message", "") == message]

    def routed() -> list[str]:
        lines = [line for line in cluster.router.log_lines() if line.get("request_id") == "k4" and "servers" in line]
        return [attempt["request_key"] for line in lines for attempt in line["servers"]]

    found = {
        "router": wait_for("the router's line", routed, LIMIT_S),
        **{
            each.name: wait_for(f"the line of {each.name}", lambda e=each: keys(e), LIMIT_S) for each in cluster.servers
        },
        "load": wait_for("the end of the load", lambda: keys(d_of(cluster), "a load has ended"), LIMIT_S),
        "lease": wait_for("the end of the lease", lambda: keys(p_of(cluster), "a lease has ended"), LIMIT_S),
    }
    assert len(found) == 5
    assert {tuple(each) for each in found.values()} == {(found["router"][0],)}, found


@pytest.mark.parametrize("end", ["finished", "cancelled"])
def test_k9_sequence_when_it_ends_under_a_slow_reader_then_its_blocks_stay_until_the_reader_has_ended(
    cluster: Cluster, pair: Pair, held: Path, end: str
) -> None:
    """Other prompts fill the pool meanwhile, and two more wait for room: nobody is preempted for them."""
    prefill, prompt = p_of(cluster), prompt_of(extent(100, 230), salt=9)
    blocks = -(-len(prompt) // BLOCK)

    def stage(request_id: str) -> str:
        request = generate_input(request_id, prompt, model=MODEL, max_tokens=TOKENS)
        request.cache_salt = request_id
        pair.open_prefill(request).result(LIMIT_S)
        return request.request_key

    clean = raw_reader(cluster, stage(f"k9-clean-{end}"), len(prompt))
    right = clean.read_all()
    clean.release()
    key = stage(f"k9-slow-{end}")
    others = [generate_input(f"k9-{n}-{end}", prompt_of(250, n), model=MODEL, max_tokens=TOKENS) for n in range(5)]
    asked = [pair.open_prefill(other) for other in others]
    full = 3 * -(-250 // BLOCK) + blocks  # four more would not fit
    cut = contextlib.nullcontext() if end == "finished" else pytest.raises(grpc.RpcError)
    slow = raw_reader(cluster, key, len(prompt))
    held.touch()
    try:
        wait_for("a full pool", lambda: staged(prefill) == full, LIMIT_S)
        with cut as caught:
            for count in slow.read():
                if count <= blocks:
                    assert staged(prefill) >= full, "its blocks have left it under its reader"
                if end == "cancelled" and count == blocks:
                    assert pair.p.abort(key, source="peer")
                    wait_for("the lease to end", slow.ended, LIMIT_S)
                    held.unlink()
    finally:
        held.unlink(missing_ok=True)
        for request_key in (key, *(other.request_key for other in others)):
            pair.p.abort(request_key, source="peer")
    assert caught is None or typed(caught.value).code is ErrorCode.REQUEST_TOMBSTONED
    assert slow.done == (end == "finished") == (slow.pieces.keys() == right.keys())
    for (layer, block), data in slow.pieces.items():
        # Of the prompt; behind them there is whatever was there before.
        tokens = min(BLOCK, len(prompt) - block * BLOCK)
        both = (
            np.frombuffer(each, np.float32).reshape(2, HEADS, BLOCK, HEAD_DIM)[:, :, :tokens]
            for each in (data, right[layer, block])
        )
        assert np.allclose(*both, atol=1e-5), f"block {block} of layer {layer} has the KV of another prompt"
    for each in asked:
        each.exception(LIMIT_S)


def wait_loading(cluster: Cluster, request_ids: list[str]) -> None:
    decode = d_of(cluster)
    for request_id in request_ids:
        wait_for(f"the load of {request_id}", lambda key=request_id: decode.open_state(key) == "load", LIMIT_S)


@pytest.mark.parametrize("late", [False, True], ids=["at a random moment", "before D says reserved"])
def test_k10_client_leaves_between_prefill_and_first_token_then_p_holds_nothing_soon_after(
    cluster: Cluster, client: GenerationClient, late: bool
) -> None:
    """With leases of five minutes, so that none of them is what ends the KV."""
    numbers = random.Random(7)
    prefill = p_of(cluster)
    for number in range(extent(4, 10)):
        request_id = f"k10{'-late' if late else ''}-{number}"
        prompt = prompt_of(70 + number, salt=int(late))
        generation = client.open(prompt, 40, request_id=request_id, salt=request_id)
        wait_for(f"the answer of P to {request_id}", lambda key=request_id: prefill.open_state(key) == "held", LIMIT_S)
        threading.Event().wait(numbers.uniform(0.0, 0.1))
        wait_for("the KV that is held for the load", lambda: staged(prefill) > 0, LIMIT_S)
        generation.cancel()
        wait_for("no staged block on P", lambda: staged(prefill) == 0, SOON_S)


def test_k8_storms_of_cancels_then_the_capacity_is_what_it_was(cluster: Cluster, client: GenerationClient) -> None:
    numbers = random.Random(20250301)
    before = {server.name: server.total("baton_aborts_total", leg=server.role) for server in cluster.servers}
    stale = {server.name: server.total("baton_kv_stale_references_total") for server in cluster.servers}
    sent: list[str] = []
    for round_ in range(extent(2, 10)):
        with frozen(p_of(cluster)):  # none of them is over when the first one leaves
            opened = [
                client.open(prompt_of(240, salt=number), 16, request_id=f"k8-{round_}-{number}", salt=str(round_))
                for number in range(extent(20, 40))
            ]
            sent += [generation.request_id for generation in opened]
            for server in cluster.servers:
                wait_for(f"a request on {server.name}", lambda server=server: server.requests()["open"], LIMIT_S)
            timers = [threading.Timer(numbers.uniform(0.0, 0.8), generation.cancel) for generation in opened]
            for timer in timers:
                timer.start()
            opened[0].cancel()
        for timer in timers:
            timer.join(LIMIT_S)
        cluster.assert_clean_ledgers(LIMIT_S)
        began = time.monotonic()
        assert len(client.generate(prompt_of(20), TOKENS).token_ids) == TOKENS
        assert time.monotonic() - began < SOON_S
    for server in cluster.servers:
        # Records and count are read one after the other: nothing may end in between.
        wait_for(f"no open request on {server.name}", lambda server=server: not server.requests()["open"], LIMIT_S)
        ended = [each for each in server.requests()["finished"] if each["request_id"].startswith("k8-")]
        # An abort that meets the end of a request changes nothing.
        cut = [
            each
            for each in ended
            if each.get("abort_source") and (each["code"] or each.get("kv", {}).get("outcome") == "aborted")
        ]
        assert cut, f"{server.name}: nobody left in time"
        aborts = server.total("baton_aborts_total", leg=server.role) - before[server.name]
        assert aborts == len(cut) <= len(sent)
        assert server.total("baton_kv_stale_references_total") == stale[server.name]


def test_k6_loads_when_every_second_one_fails_then_nothing_they_took_is_missing_afterwards(cluster: Cluster) -> None:
    at_once, count = extent(12, 15), extent(120, 2000)  # as many as the pools have room for
    assert burst(cluster, "warm", at_once, at_once) == {"length": at_once}
    before = descriptors(cluster)
    found = burst(cluster, "k6", count, at_once)
    assert found == {"length": count // 2, ErrorCode.LOAD_KV_CACHE_FAILED.name: count // 2}
    assert burst(cluster, "after", at_once, at_once) == {"length": at_once}

    def grown() -> list[str]:
        found = descriptors(cluster)
        return [f"{name} had {count}, has {found[name]}" for name, count in before.items() if found[name] > count + 2]

    with contextlib.suppress(TimeoutError):  # connections that are being closed
        wait_for("no more open files", lambda: not grown(), LIMIT_S)
    assert grown() == []
    for server in cluster.servers:
        wait_for(f"no open request on {server.name}", lambda server=server: not server.requests()["open"], LIMIT_S)
        for state in ("running", "waiting"):  # which an engine without steps tells once a second
            name = f"baton_num_requests_{state}"
            wait_for(f"{name} of 0", lambda server=server, name=name: server.metric(name) == 0, LIMIT_S)


def test_k14_conversations_when_releases_come_late_then_each_turn_ends_and_the_pool_is_whole_again(
    cluster: Cluster, client: GenerationClient, held: Path
) -> None:
    """What is computed in half a second needs more than the pool of P, whose blocks stay staged for that long."""
    turns, talks = extent(2, 6), extent(12, 64)

    def talk(number: int) -> list[str]:
        prompt, ends = prompt_of(100, salt=number), []
        for turn in range(turns):
            request_id = f"k14-{number}-{turn}"
            try:
                answer = client.generate(prompt, 16, request_id=request_id, salt=str(number))
            except BatonError as error:
                ends.append(error.code.name)
                continue
            ends.append(answer.finish_reason)
            prompt = [*prompt, *answer.token_ids, *prompt_of(20, salt=turn)]
        return ends

    with ThreadPoolExecutor(talks) as pool:
        held.touch()  # no release comes at all until many are late
        try:
            asked = [pool.submit(talk, number) for number in range(talks)]
            wait_for("late releases", lambda: staged(p_of(cluster)) > POOL // 2, LIMIT_S)
        finally:
            held.unlink()
        ends = Counter(end for each in asked for end in each.result())
    assert ends.total() == turns * talks
    # Where there is no room in time that is said, and nothing else goes wrong.
    typed_ends = {ErrorCode.DECODE_MALLOC_FAILED.name, ErrorCode.LOAD_KV_CACHE_FAILED.name}
    assert set(ends) <= {"length"} | typed_ends
    assert ends["length"] > 0  # how many find room in time depends on the machine
    cluster.assert_clean_ledgers(LIMIT_S)


# -- handshake and rendezvous ---------------------------------------------------------------------------------------


def test_h2_address_when_it_leads_to_the_decode_server_itself_then_it_is_told_so_with_both_ids(
    cluster: Cluster, pair: Pair
) -> None:
    decode = d_of(cluster)
    source = pair.p.kv_source()
    del source.cache_store_addresses[:]
    source.cache_store_addresses.append(decode.cache_store[0])
    before = decode.total("baton_handshakes_total", result="restarted")
    request = generate_input("h2", prompt_of(40), model=MODEL, max_tokens=TOKENS)
    message = decode_pb2.DecodeRequest(input=request, kv_source=source)
    error = failed(EventReader(pair.d.decode.Decode(message, timeout=LIMIT_S)))
    assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
    assert error.metadata["cause"] in (ErrorCode.PEER_RESTARTED.name, ErrorCode.INCOMPATIBLE_PEER.name)
    assert {p_of(cluster).engine_id, decode.engine_id} <= set(error.metadata.values())
    wait_for("its count", lambda: decode.total("baton_handshakes_total", result="restarted") > before, LIMIT_S)


def test_h4_sender_when_it_fails_after_the_prefill_has_answered_then_the_client_gets_its_code_and_stage(
    cluster: Cluster, client: GenerationClient, held: Path
) -> None:
    prefill = p_of(cluster)
    held.touch()
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(post, cluster, prompt_of(50, salt=4), "h4-http")
        opened = client.open(prompt_of(50, salt=5), TOKENS, request_id="h4-grpc")
        try:
            for request_id in ("h4-http", "h4-grpc"):  # nothing but the last layer is missing
                wait_for(
                    f"the answer to {request_id}",
                    lambda key=request_id: prefill.open_state(key) in ("publish", "held"),
                    LIMIT_S,
                )
        finally:
            held.unlink()
        began = time.monotonic()
        response = posted.result(LIMIT_S)
        opened.wait_end(LIMIT_S)
        assert time.monotonic() - began < 4.0, "D found out by its own time limit"
    assert response.status_code == 502
    assert response.json()["error"]["baton_code"] == ErrorCode.LOAD_KV_CACHE_FAILED
    error = opened.error
    assert error is not None
    assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
    assert error.metadata["cause"] == ErrorCode.CACHE_STORE_STORE_FAILED.name
    assert error.stage == "publish"
    for request_id in ("h4-http", "h4-grpc"):
        assert p_of(cluster).finished(request_id)["code"] == 0, "the prompt was computed, and its answer sent"
    cluster.assert_clean_ledgers()


def test_h5_prefill_call_when_it_is_lost_then_the_load_ends_at_its_own_deadline_and_says_whom_it_waited_for(
    cluster: Cluster, pair: Pair
) -> None:
    decode = d_of(cluster)
    request = generate_input("h5", prompt_of(40), model=MODEL, max_tokens=TOKENS)
    began = time.monotonic()
    reader = pair.open_decode(request)
    reader.wait_for("reserved")

    def loading() -> dict[str, Any] | None:
        found = decode.requests()["open"]
        return next((each for each in found if (each["request_id"], each["state"]) == ("h5", "load")), None)

    # Who waits for whom, while it waits.
    waiting = wait_for("the load", loading, PUBLISH_LIMIT_S)
    assert waiting["waits_for"] == p_of(cluster).cache_store[0]
    assert waiting["state_seconds"] < PUBLISH_LIMIT_S
    error = failed(reader)
    assert PUBLISH_LIMIT_S <= time.monotonic() - began < PUBLISH_LIMIT_S + SOON_S
    assert error.code is ErrorCode.LOAD_KV_CACHE_FAILED
    assert error.metadata["cause"] in ("CACHE_STORE_CALL_PREFILL_TIMEOUT", "CACHE_STORE_LOAD_BUFFER_TIMEOUT")
    assert error.stage == "publish"
    assert error.metadata["peer"] == p_of(cluster).cache_store[0]

    def lines() -> list[dict[str, object]]:
        return [line for line in decode.log_lines() if f"request_key={request.request_key}" in line.get("message", "")]

    (line,) = wait_for("the line of the load", lines, LIMIT_S)
    assert f"peer={p_of(cluster).cache_store[0]}" in str(line["message"])


# -- ordering and backpressure --------------------------------------------------------------------------------------


@pytest.mark.extended
def test_o2_prompts_when_d_has_room_for_one_and_a_half_of_eight_then_each_ends_well_or_is_told_that_there_is_none() -> (
    None
):
    """P computes each in eight chunks, and waits for no room of D's. The scheduler alone is tested in every run."""
    sizes = ("--block-size", str(BLOCK), "--max-num-seqs", "16", "--served-model-name", MODEL)
    length = 15 * BLOCK
    with (
        Cluster(
            1, 1, model=tiny_model("llama"),
            prefill_flags=(*sizes, "--max-num-batched-tokens", str(length // 8), "--num-kv-blocks", "200"),
            decode_flags=(*sizes, "--num-kv-blocks", "23", "--no-allow-local-prefill"),
            router_flags=(*ROUTER_FLAGS, "--retry-max-retries", "0", "--cb-failure-threshold", "10000"),
            prefill_env={"BATON_FAULTS": "engine.layer:delay=0.003"},
        ) as small,
        GenerationClient(small.router.grpc) as client,
        ThreadPoolExecutor(8) as callers,
    ):  # fmt: skip

        def ask(number: int) -> str:
            try:
                return client.generate(prompt_of(length, number), TOKENS, request_id=f"o2-{number}").finish_reason
            except BatonError as error:
                return error.code.name

        ends = Counter(callers.map(ask, range(8)))
        assert set(ends) <= {"length", ErrorCode.DECODE_MALLOC_FAILED.name}
        assert ends["length"] >= 1 and ends.total() == 8
        small.assert_clean_ledgers()
        assert small.errors_without_code() == []


def test_o3_last_layer_when_it_is_published_after_the_prefill_has_answered_then_decoding_waits_for_it(
    cluster: Cluster, client: GenerationClient, known: tuple[list[int], list[int]], held: Path
) -> None:
    """It is sent when the client has P's token."""
    held.touch()
    try:
        generation = client.open(known[0], TOKENS, request_id="o3", salt="o3")
        generation.wait_tokens(1)
        wait_loading(cluster, ["o3"])
        sent_ns = time.monotonic_ns()
    finally:
        held.unlink()
    answer = generation.answer()
    assert answer.token_ids == known[1]
    assert answer.timeline["router.first_decode_token"] > 0
    # The engine's event comes first; the lease has one of that name, too, which may come after the answer.
    computed, *_ = (each["at_ns"] for each in p_of(cluster).finished("o3")["events"] if each["name"] == "computed")
    decode = events_of(d_of(cluster).finished("o3"))
    last = f"layer_received:{LAYERS - 1}"
    assert computed < sent_ns, "P had not answered"
    assert sent_ns < decode[last], "the last layer was not late"
    assert decode[last] <= decode["load_complete"] < decode["first_step"], "decoding began before its KV was there"


def test_o4_step_loop_when_it_is_stuck_then_open_loads_end_and_the_prefill_server_gets_its_blocks_back(
    cluster: Cluster, client: GenerationClient, held: Path
) -> None:
    prefill, standing = p_of(cluster), stuck_of(held)
    held.touch()
    standing.touch()  # the first step of decoding does not end
    try:
        loads = [
            client.open(prompt_of(60, salt=20 + n), TOKENS, request_id=f"o4-load-{n}", salt="o4") for n in range(4)
        ]
        wait_loading(cluster, [each.request_id for each in loads])
        for each in loads:
            each.wait_tokens(1)  # of P
        stuck = client.open(prompt_of(20), 3, request_id="o4-stuck", salt="o4")
        stuck.wait_tokens(1)
        prefill.finished(stuck.request_id)  # its load is over, and it alone can be in a step
        assert staged(prefill) > 0
        held.unlink()
        wait_for("no staged block on P", lambda: staged(prefill) == 0, LIMIT_S)
        assert [len(each.token_ids) for each in (stuck, *loads)] == [1] * 5, "the step loop did not stand still"
    finally:
        held.unlink(missing_ok=True)
        standing.unlink()
    for generation in (stuck, *loads):
        assert generation.answer().finish_reason == "length"


# -- failure policy -------------------------------------------------------------------------------------------------


def test_p1_prompt_when_the_prefill_server_refuses_it_then_400_and_its_neighbours_are_untouched(
    cluster: Cluster, client: GenerationClient, pair: Pair
) -> None:
    """The router knows the shortest of its servers' lengths; without it, D learns of the refusal from P."""
    prompts = [prompt_of(30 + n, salt=n) for n in range(8)]
    alone = [client.generate(prompt, TOKENS).token_ids for prompt in prompts]
    opened = [client.open(prompt, TOKENS, salt="neighbours") for prompt in prompts[:4]]
    response = post(cluster, prompt_of(LONGEST_ON_P + 40), "p1-router")
    request = generate_input("p1-long", prompt_of(LONGEST_ON_P + 40), model=MODEL, max_tokens=TOKENS)
    reader = pair.open_decode(request)
    refusal = typed(pair.open_prefill(request).exception(LIMIT_S))
    opened += [client.open(prompt, TOKENS, salt="neighbours") for prompt in prompts[4:]]
    assert response.status_code == 400
    assert response.json()["error"]["baton_code"] == ErrorCode.LONG_PROMPT_ERROR
    assert refusal.code is ErrorCode.LONG_PROMPT_ERROR
    assert refusal.spec.http == 400
    error = failed(reader)
    assert error.metadata["cause"] == ErrorCode.LONG_PROMPT_ERROR.name
    assert [generation.answer().token_ids for generation in opened] == alone


# -- the last one: it kills a server --------------------------------------------------------------------------------


def test_k1_client_that_leaves_when_the_prefill_server_has_died_in_mid_load_then_all_blocks_are_free(
    cluster: Cluster, client: GenerationClient
) -> None:
    """Four prompts at once fill D's pool, so that a leak would show in the next round."""
    decode = d_of(cluster)
    for round_ in range(extent(1, 20)):
        opened = [
            client.open(prompt_of(230, salt=n), 8, request_id=f"k1-{round_}-{n}", salt=str(round_)) for n in range(4)
        ]
        wait_loading(cluster, [generation.request_id for generation in opened])
        blocks = 4 * -(-230 // BLOCK)
        wait_for(f"{blocks} blocks to be received", lambda: decode.ledger()[0]["receiving"] == blocks, LIMIT_S)  # noqa: B023
        p_of(cluster).kill()
        for generation in opened:
            generation.cancel()
        cluster.assert_clean_ledgers()
        cluster.restart(p_of(cluster))
        wait_workers_ready(cluster)
