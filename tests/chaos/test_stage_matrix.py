"""A request that fails, is cancelled, runs out of time or loses its server in any stage of any process: a typed code in
time, nothing left behind, one error in the logs.

The stages are those of the metrics. A fault point holds the request there, or fails it. `BATON_MATRIX=all` also kills a
server in each of its stages, which takes minutes; test_kills.py kills servers in two of them every time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from rpc.errors import ErrorCode
from tests.chaos.cases import ROUTER_FLAGS, wait_workers_ready
from tests.conformance.refusals import Refusal, of_call
from tests.integration.cluster import Cluster, ServerProcess, wait_for
from tests.integration.generation_client import Generation, GenerationClient, request_of
from tests.unit.engine.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(300)

PROMPT = list(range(3, 40))
TOKENS = 6
HOLD_S = 60.0  # unless the test lets go before, as it does
DEADLINE_S = 0.2
WORK_S = 0.4  # that the router itself computes beyond a deadline: it looks at its clock afterwards
OWN_DEADLINE_S = 2.0  # of a request that has to reach the router before
LIMIT_S = 20.0
SOON_S = 5.0  # where that it is soon is what matters
RAISED = ErrorCode.EXECUTION_EXCEPTION
LOAD_FAILED = ErrorCode.LOAD_KV_CACHE_FAILED


@dataclass(frozen=True)
class Stage:
    """`point`: the fault point in the stage, with the label that names the request, and further labels. `seen`: what
    the client gets for a failure there."""

    role: str
    name: str
    point: str
    label: str = "request_key"
    more: str = ""
    seen: ErrorCode = RAISED

    @property
    def id(self) -> str:
        return f"{self.role}-{self.name}"

    def fault(self, action: str, kind: str) -> str:
        return f"{self.point}:{action},{self.label}={self.id}-{kind}*{self.more}"


STAGES = (
    Stage("prefill", "admit", "request.admit", more=",role=prefill"),
    Stage("prefill", "queue", "engine.stage", more=",stage=queue"),
    Stage("prefill", "match", "engine.stage", more=",stage=match"),
    Stage("prefill", "compute", "engine.step", more=",kind=prefill"),
    Stage("prefill", "sample", "engine.stage", more=",stage=sample"),
    Stage("prefill", "publish", "cache_store.publish", "key", seen=LOAD_FAILED),
    Stage("prefill", "held", "cache_store.send_piece", "key", seen=LOAD_FAILED),
    Stage("decode", "admit", "request.admit", more=",role=decode"),
    Stage("decode", "prepare", "engine.stage", more=",stage=prepare"),
    Stage("decode", "allocate", "engine.stage", more=",stage=allocate"),
    Stage("decode", "load", "cache_store.load_start", "key", seen=LOAD_FAILED),
    Stage("decode", "wait_to_run", "engine.stage", more=",stage=wait_to_run"),
    Stage("decode", "generate", "engine.step", more=",kind=decode"),
    Stage("decode", "release", "engine.stage", more=",stage=release"),
    *(
        # Its queue has a test of its own, where requests stand before a busy server.
        Stage("router", name, "router.stage", "request_id", f",stage={name}")
        for name in ("validate", "tokenize", "choose", "first_token", "stream")
    ),
)
BEHIND = tuple(stage for stage in STAGES if stage.role != "router")


class Hold:
    """What stands in a stage stays there within the `with` body, or until `let_go`."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> Hold:
        self.file.touch()
        return self

    def __exit__(self, *unused: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        self.file.unlink(missing_ok=True)


def faults(role: str, file: Path) -> str:
    found, hold = [], f"delay={HOLD_S},while={file}"
    for stage in STAGES:
        if stage.role == role:
            found.append(stage.fault(f"raise={RAISED.name}", "error"))
            found.append(stage.fault(hold, "cancel"))
            found.append(stage.fault(f"delay={WORK_S}" if role == "router" else hold, "deadline"))
            found.append(stage.fault(hold, "kill"))
    found.append(f"engine.step:{hold},kind=prefill,request_key=turn*")
    return ";".join(found)


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    return Hold(tmp_path_factory.mktemp("stages") / "held")


@pytest.fixture(scope="module")
def cluster(hold: Hold) -> Iterator[Cluster]:
    armed = {role: {"BATON_FAULTS": faults(role, hold.file)} for role in ("prefill", "decode", "router")}
    with Cluster(
        1, 1, model=tiny_model("llama"),
        prefill_env=armed["prefill"], decode_env=armed["decode"], router_env=armed["router"],
        decode_flags=("--kv-load-failure-policy", "fail", "--no-allow-local-prefill"),
        # A failure is to be seen, not to be made good.
        router_flags=(*ROUTER_FLAGS, "--retry-max-retries", "0", "--migration-limit", "0",
                      "--cb-failure-threshold", "10000", "--max-concurrent-requests", "2"),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[GenerationClient]:
    with GenerationClient(cluster.router.grpc) as found:
        yield found


@pytest.fixture(scope="module")
def hasty_router(cluster: Cluster) -> ServerProcess:
    """A second router to the same servers, which itself allows requests no more than DEADLINE_S."""
    usual = cluster.router
    found = cluster.start_router(["--request-timeout-secs", str(DEADLINE_S)])
    cluster.wait_router_ready()
    cluster._router = usual
    return found


@pytest.fixture
def hasty(cluster: Cluster, hasty_router: ServerProcess) -> Iterator[GenerationClient]:
    """A client of it; it is the cluster's router meanwhile."""
    usual, cluster._router = cluster.router, hasty_router
    with GenerationClient(hasty_router.grpc) as found:
        yield found
    cluster._router = usual


def server_of(cluster: Cluster, role: str) -> ServerProcess:
    return cluster.prefill[0] if role == "prefill" else cluster.decode[0]


def call_of(client: GenerationClient, request_id: str, timeout_s: float = 15.0) -> grpc.RpcError | None:
    """How a call ended: its error, or None for a whole answer."""
    tokens = 0
    try:
        for message in client.stub.Generate(
            request_of(PROMPT, TOKENS, request_id=request_id, salt=request_id), timeout=timeout_s
        ):
            tokens += len(message.tokens)
    except grpc.RpcError as error:
        return error
    assert tokens == TOKENS
    return None


def assert_logged(cluster: Cluster, request_id: str, code: int) -> None:
    """One error about the request in all of the logs, where it ends."""
    expected = [f"router-0: {ErrorCode(code).name}"]
    wait_for(f"the error of {request_id} in the log", lambda: error_lines(cluster, request_id) == expected, LIMIT_S)


def error_lines(cluster: Cluster, request_id: str) -> list[str]:
    return [
        f"{process.name}: {line.get('code')}"
        for process in (*cluster.servers, cluster.router)
        for line in process.log_lines()
        if line.get("level") in ("error", "critical") and line.get("request_id") == request_id
    ]


def assert_nothing_is_left(cluster: Cluster) -> None:
    """No open request, no block that is held, no gauge above 0."""
    for server in cluster.servers:
        wait_for(f"no open request on {server.name}", lambda server=server: not server.requests()["open"], LIMIT_S)
    cluster.assert_clean_ledgers(LIMIT_S)

    def quiet() -> bool:
        for process in (*cluster.servers, cluster.router):
            text = process.metrics()
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                inflight = name.startswith("baton_rpc_inflight") and "Worker/" not in name and "Health" not in name
                queued = name.startswith(
                    ("baton_num_requests_", "baton_kv_leases_active", "baton_router_worker_inflight")
                )
                if (inflight or queued or name.startswith("baton_kv_transfer_inflight")) and float(value) != 0:
                    return False
        return True

    wait_for("every gauge of open work to be 0", quiet, LIMIT_S)


def cause_of(record: dict[str, Any]) -> str:
    """The cause of a load that failed."""
    return str(record.get("error_metadata", {}).get("cause", ""))


def code_counted(cluster: Cluster, code: ErrorCode) -> float:
    return sum(
        float(line.rpartition(" ")[2])
        for line in cluster.router.metrics().splitlines()
        if line.startswith("baton_request_errors_total{") and f'code="{code.name}"' in line
    )


@pytest.mark.invariant("RPC-3", "RPC-6", "RPC-32")
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)
def test_error_when_it_is_raised_in_a_stage_then_the_client_gets_it_and_it_is_logged_once(
    cluster: Cluster, client: GenerationClient, stage: Stage
) -> None:
    request_id = f"{stage.id}-error"
    began = time.monotonic()
    error = call_of(client, request_id)
    assert time.monotonic() - began < SOON_S
    assert error is not None
    refusal: Refusal = of_call(error)
    assert refusal.code == stage.seen, refusal
    if stage.seen is LOAD_FAILED:
        assert refusal.metadata["cause"] == RAISED.name
    assert refusal.metadata["stage"], refusal
    assert_nothing_is_left(cluster)
    if stage.role == "router":
        assert refusal.metadata["stage"] == stage.name
        assert_logged(cluster, request_id, refusal.code)
        return
    record = server_of(cluster, stage.role).finished(request_id)
    # What fails after the answer of the prefill server is the end of its KV, not of its request.
    late = stage.name in ("publish", "held")
    assert record["code"] == (0 if late else stage.seen) or record["code"] == RAISED, record
    assert record.get("source") == ("context_error" if record["code"] else None), record
    assert_logged(cluster, request_id, refusal.code)


@pytest.mark.invariant("RPC-3", "RPC-32")
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)
def test_cancel_when_the_client_leaves_in_a_stage_then_every_process_lets_go(
    cluster: Cluster, client: GenerationClient, hold: Hold, stage: Stage
) -> None:
    request_id = f"{stage.id}-cancel"
    before = code_counted(cluster, ErrorCode.CANCELLED)
    with hold:
        generation = Generation(client.stub, request_of(PROMPT, TOKENS, request_id=request_id, salt=request_id), 30.0)
        wait_for("the request to be open", lambda: cluster.router.page("/load")["inflight"] == 1, LIMIT_S)
        if stage.role != "router" and stage.name != "admit":  # there the server's front itself stands still
            wait_for("the request to arrive", lambda: server_of(cluster, stage.role).open_state(request_id), LIMIT_S)
        generation.cancel()
        wait_for("the router to let go", lambda: cluster.router.page("/load")["inflight"] == 0, LIMIT_S)
    assert_nothing_is_left(cluster)
    assert code_counted(cluster, ErrorCode.CANCELLED) == before + 1
    for server in cluster.servers:
        for record in server.requests()["finished"]:
            if record["request_id"] == request_id:
                # Its part may have been done by then, or it heard of the abort from the prefill server.
                assert record["code"] in (0, 8100, 8606) or cause_of(record) == "REQUEST_TOMBSTONED", record
    assert error_lines(cluster, request_id) == []


@pytest.mark.invariant("RPC-3", "RPC-32")
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.id)
def test_deadline_when_it_passes_in_a_stage_then_it_is_603_everywhere(
    cluster: Cluster, hasty: GenerationClient, hold: Hold, stage: Stage
) -> None:
    request_id = f"{stage.id}-deadline"
    before = code_counted(cluster, ErrorCode.GENERATE_TIMEOUT)
    with hold:
        began = time.monotonic()
        error = call_of(hasty, request_id)
        assert time.monotonic() - began < SOON_S
        assert error is not None
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert of_call(error).code == ErrorCode.GENERATE_TIMEOUT
        wait_for("the router to let go", lambda: cluster.router.page("/load")["inflight"] == 0, LIMIT_S)
    assert_nothing_is_left(cluster)
    assert code_counted(cluster, ErrorCode.GENERATE_TIMEOUT) == before + 1
    for server in cluster.servers:
        for record in server.requests()["finished"]:
            if record["request_id"] == request_id:
                # Done by then; or told by the router, which was the first to see it, or by the prefill server.
                told = cause_of(record) in ("REQUEST_TOMBSTONED", "GENERATE_TIMEOUT")
                assert record["code"] in (0, 603, 8606) or told, record
    assert error_lines(cluster, request_id) == []


@pytest.mark.invariant("RPC-32")
def test_deadline_when_it_is_the_clients_own_then_it_hears_of_it_and_every_process_lets_go(
    cluster: Cluster, client: GenerationClient, hold: Hold
) -> None:
    request_id = "prefill-sample-deadline-of-its-own"

    def ended() -> float:
        return sum(code_counted(cluster, code) for code in (ErrorCode.GENERATE_TIMEOUT, ErrorCode.CANCELLED))

    before = ended()
    with hold:
        error = call_of(client, request_id, OWN_DEADLINE_S)
        assert error is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for("the router to let go", lambda: cluster.router.page("/load")["inflight"] == 0, LIMIT_S)
    assert_nothing_is_left(cluster)
    # Where the request was long on its way, the call is cut off before the router's own clock says so.
    assert ended() == before + 1
    assert error_lines(cluster, request_id) == []


@pytest.mark.invariant("RPC-32")
@pytest.mark.parametrize("kind", ["cancel", "deadline", "full"])
def test_queue_of_the_router_when_a_request_ends_there_then_no_server_has_heard_of_it(
    cluster: Cluster, client: GenerationClient, hold: Hold, kind: str
) -> None:
    # Two turns, both taken by requests that the prefill server holds meanwhile.
    with hold:
        holders = [
            Generation(client.stub, request_of(PROMPT, TOKENS, request_id=f"turn-{kind}-{n}", salt=f"{kind}{n}"), 30.0)
            for n in range(2)
        ]
        for n in range(2):  # it has a turn, and does not only wait for one, when the server has heard of it
            name = f"turn-{kind}-{n}"
            wait_for(f"the turn of {name}", lambda name=name: cluster.prefill[0].open_state(name), LIMIT_S)
        request_id = f"router-queue-{kind}"
        waiting = Generation(
            client.stub, request_of(PROMPT, TOKENS, request_id=request_id), DEADLINE_S if kind == "deadline" else 30.0
        )
        wait_for("it to wait", lambda: cluster.router.page("/load")["inflight"] == 3 or waiting._ended, LIMIT_S)
        if kind == "cancel":
            waiting.cancel()
            wait_for("it to be gone", lambda: cluster.router.page("/load")["inflight"] == 2, LIMIT_S)
        elif kind == "deadline":
            wait_for("its end", lambda: waiting._ended, LIMIT_S)
            # Its own clock, without details, or the router's.
            assert waiting.error is None or waiting.error.code is ErrorCode.GENERATE_TIMEOUT
            assert waiting.token_ids == []
            wait_for("it to be gone", lambda: cluster.router.page("/load")["inflight"] == 2, LIMIT_S)
    if kind == "full":
        assert len(waiting.answer().token_ids) == TOKENS
    for holder in holders:
        assert len(holder.answer().token_ids) == TOKENS
    if kind != "full":
        for server in cluster.servers:
            assert request_id not in [record["request_id"] for record in server.requests()["finished"]]
    assert_nothing_is_left(cluster)
    assert error_lines(cluster, request_id) == []


@pytest.mark.invariant("RPC-32")
@pytest.mark.skipif(os.environ.get("BATON_MATRIX") != "all", reason="BATON_MATRIX=all kills a server in each stage")
@pytest.mark.parametrize("stage", BEHIND, ids=lambda stage: stage.id)
def test_kill_when_a_server_dies_in_a_stage_then_a_typed_code_comes_soon_and_the_other_lets_go(
    cluster: Cluster, client: GenerationClient, hold: Hold, stage: Stage
) -> None:
    request_id = f"{stage.id}-kill"
    victim = server_of(cluster, stage.role)
    found: list[grpc.RpcError | None] = []
    caller = threading.Thread(target=lambda: found.append(call_of(client, request_id)))
    with hold:
        caller.start()
        if stage.name == "admit":
            wait_for("the request to be open", lambda: cluster.router.page("/load")["inflight"] == 1, LIMIT_S)
        else:
            wait_for("the request to arrive", lambda: victim.open_state(request_id), LIMIT_S)
        victim.kill()
    began = time.monotonic()
    caller.join(LIMIT_S)
    assert not caller.is_alive(), "the client still waits"
    assert time.monotonic() - began < SOON_S
    (error,) = found
    if error is not None:  # a prefill server may have done its part
        refusal = of_call(error)
        assert refusal.code not in (0, int(ErrorCode.UNKNOWN_ERROR)), refusal
        assert_logged(cluster, request_id, refusal.code)
    else:
        assert stage.role == "prefill"
    cluster.restart(victim)
    wait_workers_ready(cluster)
    assert_nothing_is_left(cluster)
    assert call_of(client, f"after-{request_id}") is None


@pytest.mark.invariant("RPC-32")
@pytest.mark.skipif(os.environ.get("BATON_MATRIX") != "all", reason="BATON_MATRIX=all kills the router in each stage")
@pytest.mark.parametrize("stage", [s for s in STAGES if s.role == "router"], ids=lambda stage: stage.id)
def test_kill_when_the_router_dies_in_a_stage_then_the_client_knows_soon_and_the_servers_let_go(
    cluster: Cluster, client: GenerationClient, hold: Hold, stage: Stage
) -> None:
    request_id = f"{stage.id}-kill"
    router = cluster.router
    with hold:
        generation = Generation(client.stub, request_of(PROMPT, TOKENS, request_id=request_id, salt=request_id), 30.0)
        wait_for("the request to be open", lambda: router.page("/load")["inflight"] == 1, LIMIT_S)
        if stage.name in ("first_token", "stream"):
            wait_for("the request to arrive", lambda: cluster.prefill[0].finished(request_id), LIMIT_S)
        router.kill()
    wait_for("the client to know", lambda: generation._ended, LIMIT_S)
    assert len(generation.token_ids) < TOKENS  # by its transport: nobody is left to say more
    for server in cluster.servers:
        wait_for(f"no open request on {server.name}", lambda server=server: not server.requests()["open"], LIMIT_S)
    cluster.assert_clean_ledgers(LIMIT_S)
    ports = [part for flag, address in (("--port", router.http), ("--grpc-port", router.grpc))
             for part in (flag, address.rpartition(":")[2])]  # fmt: skip
    cluster.start_router(ports)
    cluster.wait_router_ready()
    assert call_of(client, f"after-{request_id}") is None


def test_matrix_when_all_of_it_is_done_then_the_cluster_serves_and_no_error_is_without_a_code(
    cluster: Cluster, client: GenerationClient
) -> None:
    assert call_of(client, "at-the-end") is None
    assert_nothing_is_left(cluster)
    assert cluster.errors_without_code() == []
