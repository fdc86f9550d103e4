"""Every code of the error table, raised in one process and read by the client of another.

The way of a code: from a prefill or decode server through the router to HTTP and gRPC clients, and from a cache store
through the decode server and the router. Fault points of the real processes raise it, by the beginning of the
request's id; what the client must see is the documented table.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import grpc
import httpx
import pytest

from protos import generation_pb2
from rpc.errors import ErrorCode
from tests.conformance import refusals
from tests.conformance.live_cluster import COMPLETIONS, MODEL, PROMPT
from tests.conformance.refusals import Refusal, documented
from tests.extent import extent
from tests.integration.cluster import Cluster, wait_for
from tests.integration.generation_client import GenerationClient, request_of
from tests.standstill import standing_still
from tests.unit.engine.tiny_models import tiny_model

CODES = [code for code in ErrorCode if code is not ErrorCode.NONE_ERROR]
# Where a code is raised: the letter of the ids, the fault point with its fixed labels, the label that has the id.
PLACES = {
    "p": ("request.admit", "role=prefill,", "request_key"),
    "d": ("request.admit", "role=decode,", "request_key"),
    "c": ("cache_store.load_open", "", "key"),
}


def raised_at(letter: str) -> list[ErrorCode]:
    """The codes of a place. Those of the cache store take longest, for each is followed by a load that succeeds."""
    return CODES[:: extent(3, 1) if letter == "c" else 1]


def raised(letter: str, code: ErrorCode) -> str:
    """Beginning of the ids of requests that fail with `code` at this place."""
    return f"{letter}-{int(code)}-"


def faults() -> str:
    raises = [
        f"{point}:raise={code.name},{fixed}{label}={raised(letter, code)}*"
        for letter, (point, fixed, label) in PLACES.items()
        for code in CODES
    ]
    # The decode leg fails first: once the first token is out, a stream has its status.
    late = "engine.stage:raise=EXECUTION_EXCEPTION,stage=generate,request_key=late-*"
    delays = ["prefill.answer:delay=4,request_key=d-*", "prefill.answer:delay=0.03,request_key=c-*"]
    return ";".join([*raises, late, *delays])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    names = ("--served-model-name", MODEL)
    with Cluster(
        1, 1, model=tiny_model("llama"), env={"BATON_FAULTS": faults()},
        prefill_flags=names, decode_flags=(*names, "--kv-load-failure-policy", "fail", "--no-allow-local-prefill"),
        # What a server says is to be seen, not to be made good.
        router_flags=(
            *names, "--retry-max-retries", "0", "--migration-limit", "0", "--cb-failure-threshold", "10000",
        ),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{cluster.router.http}", timeout=15.0) as client:
        yield client


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[GenerationClient]:
    with GenerationClient(cluster.router.grpc) as found:
        yield found


def over_http(http: httpx.Client, request_id: str, stream: bool) -> Refusal:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    return refusals.of_response(http.post(COMPLETIONS, json=body, headers={"X-Request-Id": request_id}))


def over_grpc(client: GenerationClient, request_id: str) -> Refusal:
    request: generation_pb2.GenerateRequest = request_of([5, 6, 7, 8], 4, request_id=request_id)
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(request, timeout=15.0))
    return refusals.of_call(caught.value)


def seen_outside(letter: str, code: ErrorCode) -> ErrorCode:
    """What the client gets for a code that was raised at a place."""
    if letter == "c":
        return ErrorCode.LOAD_KV_CACHE_FAILED
    if letter == "d" and code is ErrorCode.MALLOC_FAILED:
        return ErrorCode.DECODE_MALLOC_FAILED
    return code


def error_lines(cluster: Cluster) -> dict[str, list[tuple[str, str]]]:
    """Process and code of the ERROR lines, by the request that they are about."""
    found: dict[str, list[tuple[str, str]]] = {}
    for process in (*cluster.servers, cluster.router):
        for line in process.log_lines():
            if line.get("level") in ("error", "critical"):
                found.setdefault(str(line.get("request_id")), []).append((process.name, str(line.get("code"))))
    return found


@pytest.mark.invariant("RPC-7", "RPC-8", "RPC-11")
@pytest.mark.parametrize("letter", PLACES, ids=["prefill", "decode", "cache_store"])
def test_code_when_it_is_raised_behind_the_router_then_every_client_gets_it_with_its_status(
    cluster: Cluster, http: httpx.Client, client: GenerationClient, letter: str
) -> None:
    addresses = [address for server in cluster.servers for address in (server.grpc, server.http, *server.cache_store)]
    for code in raised_at(letter):
        expected = seen_outside(letter, code)
        found = {}
        # The load of a cache store may fail after the first token.
        for surface in ("http", "grpc") if letter == "c" else ("http", "stream", "grpc"):
            request_id = f"{raised(letter, code)}{surface}"
            if surface == "grpc":
                refusal = over_grpc(client, request_id)
            else:
                refusal = over_http(http, request_id, surface == "stream")
            where = f"{code.name} from {letter} over {surface}: {refusal}"
            assert refusal.code == int(expected), where
            assert refusal.request_id == request_id, where
            # One clean sentence for the client: no address of a server in it.
            assert not any(address in refusal.message for address in addresses), where
            assert refusal.message.isprintable(), where
            found[surface] = refusal
        assert len({refusal.message for refusal in found.values()}) == 1
        metadata = found["grpc"].metadata
        if letter == "c":
            # It serves on; and several failures of its own in a row, with no load that succeeds, make a server unready.
            assert client.generate([5, 6, 7, 8], 2).finish_reason == "length"
        if letter == "c" and code is expected:
            assert metadata["fault"] == "cache_store.load_open"  # it is what it becomes
        elif letter == "c":
            assert (metadata["cause_code"], metadata["cause"]) == (str(int(code)), code.name)
            assert found["http"].metadata == {"cause_code": str(int(code)), "cause": code.name}
        else:
            assert metadata["fault"] == "request.admit"
            assert metadata["stage"] == "admit"
        # The server behind it says in its records with what it ended, once.
        server = cluster.prefill[0] if letter == "p" else cluster.decode[0]
        record = server.finished(f"{raised(letter, code)}grpc")
        assert record["code_name"] == expected.name
        assert record["error_stage"] == ("publish" if letter == "c" else "admit")  # of the process that failed first


@pytest.mark.invariant("RPC-12")
def test_log_when_every_code_was_raised_then_each_failure_of_the_servers_is_one_error_line(
    cluster: Cluster, http: httpx.Client
) -> None:
    def wrong() -> dict[str, list[tuple[str, str]] | None]:
        lines = error_lines(cluster)
        found = {}
        for letter in PLACES:
            for code in raised_at(letter):
                request_id, expected = f"{raised(letter, code)}http", seen_outside(letter, code)
                status = documented()[int(expected)].http
                # What is the client's own doing stands in the access log; how much time it had was its choice as well.
                silent = (status is not None and status < 500) or expected is ErrorCode.GENERATE_TIMEOUT
                if lines.get(request_id, []) != ([] if silent else [("router-0", expected.name)]):
                    found[request_id] = lines.get(request_id)
        return found

    with contextlib.suppress(TimeoutError):  # the last ones are on their way
        wait_for("the lines", lambda: not wrong(), 10.0, poll_s=0.1)
    assert wrong() == {}
    assert cluster.errors_without_code() == []


def test_cluster_when_every_code_was_raised_then_nothing_is_left_and_it_serves(
    cluster: Cluster, http: httpx.Client
) -> None:
    cluster.assert_clean_ledgers()
    cluster.wait_router_ready()
    answer = http.post(COMPLETIONS, json={"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    wait_for("no open request", lambda: not any(server.requests()["open"] for server in cluster.servers), 20.0)
    assert cluster.router.metric("baton_http_inflight_requests", route=COMPLETIONS) == 0


TIMELINE = "x-baton-timeline"
ALL_STAGES = {
    "router": {"validate", "tokenize", "queue", "choose", "first_token", "stream", "reserve", "prefill"},
    "prefill": {"admit", "queue", "match", "compute", "sample"},
    "decode": {"admit", "prepare", "allocate", "load", "wait_to_run", "generate", "release"},
}


def of_roles(seconds: dict[str, float]) -> dict[str, set[str]]:
    assert all(0 <= value < 15 for value in seconds.values())
    found: dict[str, set[str]] = {}
    for name in seconds.keys() - {"router.first_decode_token"}:  # a time between two events of other stages
        role, _, stage = name.partition(".")
        found.setdefault(role, set()).add(stage)
    return found


def trailers(client: GenerationClient, request_id: str, *asking: tuple[str, str]) -> dict[str, str | bytes]:
    call = client.stub.Generate(request_of([5, 6, 7, 8], 4, request_id=request_id), timeout=15.0, metadata=asking)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return dict(call.trailing_metadata())


def test_timeline_when_it_is_asked_for_then_it_has_the_stages_of_all_three_processes(
    http: httpx.Client, client: GenerationClient
) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    answer = http.post(COMPLETIONS, json=body, headers={TIMELINE: "1"})
    told = json.loads(answer.headers[TIMELINE])
    assert of_roles(told) == ALL_STAGES
    assert told.keys() == answer.json()["baton"]["timeline"].keys()
    assert of_roles(json.loads(trailers(client, "asked", (TIMELINE, "1"))[TIMELINE])) == ALL_STAGES
    assert TIMELINE not in http.post(COMPLETIONS, json=body).headers
    assert TIMELINE not in trailers(client, "not-asked")


def test_timeline_when_the_request_fails_then_it_says_how_far_each_process_got(
    cluster: Cluster, http: httpx.Client, client: GenerationClient
) -> None:
    asking = {TIMELINE: "1"}
    code = ErrorCode.MALLOC_FAILED
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    request_id = f"{raised('p', code)}timeline"
    failed = http.post(COMPLETIONS, json=body, headers={**asking, "X-Request-Id": request_id})
    over_grpc = trailers(client, request_id, (TIMELINE, "1"))
    # The decode leg may have come as far as to reserve, or not.
    for told in (json.loads(failed.headers[TIMELINE]), json.loads(over_grpc[TIMELINE])):
        found = of_roles(told)
        assert found["router"] == ALL_STAGES["router"] - {"stream"}
        assert found["prefill"] == {"admit"}
    refused = http.post(COMPLETIONS, json={**body, "max_tokens": 0}, headers=asking)
    assert refused.status_code == 400
    assert of_roles(json.loads(refused.headers[TIMELINE])) == {"router": {"validate"}}
    # In the middle of a stream there is no header any more. The decode server fails when the first token is out.
    late = {**asking, "X-Request-Id": "late-1"}
    with contextlib.ExitStack() as stack:
        with standing_still(cluster.decode[0].engine_pid):
            stream = stack.enter_context(http.stream("POST", COMPLETIONS, json={**body, "stream": True}, headers=late))
            lines = stream.iter_lines()
            events = [next(lines)]
        events.extend(lines)
    events = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])
    assert error["error"]["baton_code"] == int(ErrorCode.EXECUTION_EXCEPTION)
    found = of_roles(error["baton"]["timeline"])
    assert found["router"] >= {"first_token", "stream"}
    assert found["decode"] >= {"admit", "load", "wait_to_run"}


@pytest.mark.invariant("RPC-3")
def test_gauges_when_loads_stand_at_a_barrier_then_they_count_each_of_them_and_fall_to_zero(
    cluster: Cluster, client: GenerationClient
) -> None:
    decode = cluster.decode[0]
    method = "baton.v1.Decode/Decode"
    assert client.generate([5, 6, 7, 8], 2).finish_reason == "length"  # the cache stores know each other

    def counts() -> tuple[float | None, float | None]:
        return decode.metric("baton_num_requests_loading"), decode.metric("baton_rpc_inflight", method=method)

    with standing_still(cluster.prefill[0].engine_pid):
        opened = [client.open([5, 6, 7, number], 2, request_id=f"barrier-{number}") for number in range(6)]
        wait_for("six loads that nobody answers", lambda: counts() == (6.0, 6.0), 20.0)
    for generation in opened:
        assert len(generation.answer().token_ids) == 2
    wait_for("nothing in flight", lambda: counts() == (0.0, 0.0), 20.0)
    cluster.assert_clean_ledgers()
