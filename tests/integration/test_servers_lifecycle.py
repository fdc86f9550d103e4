"""Start and end of the server processes: ports, readiness, drain, signals, and a dead engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import common_pb2, decode_pb2, prefill_pb2, worker_pb2, worker_pb2_grpc
from rpc.errors import ErrorCode
from tests.extent import extended, extent
from tests.integration.cluster import (
    ROOT,
    SERVER_FLAGS,
    STOP_LIMIT_S,
    Cluster,
    ServerProcess,
    free_port,
    process_exists,
    wait_for,
)
from tests.integration.test_servers_handoff import MODEL, prompt_of
from tests.integration.wire_client import TIMEOUT_S, Client, EventReader, Pair, generate_input, statuses, typed
from tests.unit.engine.tiny_models import tiny_model

NAME = ["--served-model-name", MODEL]
# A prompt of 500 tokens takes 16 steps of at least 0.3 s.
SLOW = {"BATON_FAULTS": "engine.layer:delay=0.1"}
CHUNKS = [*NAME, "--max-num-batched-tokens", "32", "--max-num-seqs", "8"]
LIMIT_S = 20.0
SOON_S = 5.0  # where that it is soon is what matters
# What a busy machine may add before this process hears of an end. Less than what a drain would take.
SCHEDULING_S = 4.0


def health_of(channel: grpc.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S).status


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far: what its start costs, however busy the machine is."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def alone() -> Iterator[Cluster]:
    """A cluster of a decode server alone."""
    with Cluster(0, 1, model=tiny_model("llama"), router=False, decode_flags=NAME) as running:
        yield running


SECOND_SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@dataclass
class Ending:
    """Servers without a router that one test each ends; they start side by side. The prefill servers are slow."""

    cluster: Cluster
    with_a_stream: ServerProcess  # its stream makes no step as long as `stream` is there
    stream: Path
    by_rpc: ServerProcess
    in_a_second: ServerProcess  # its drain has no more
    by_signals: dict[signal.Signals, ServerProcess] = field(default_factory=dict)

    def temporary(self, number: signal.Signals) -> Path:
        """What such a server keeps for a while, and nobody else."""
        return self.cluster.temporary / number.name


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ending]:
    stream = tmp_path_factory.mktemp("ending") / "stream"
    held = {"BATON_FAULTS": f"engine.step:delay=60,kind=decode,request_key=stream*,while={stream}"}
    with Cluster(
        0, 0, model=tiny_model("llama"), router=False, prefill_flags=CHUNKS, prefill_env=SLOW, decode_flags=NAME
    ) as running:
        in_a_second = running.start_prefill(["--drain-timeout-secs", "1"])
        found = Ending(running, running.start_decode(env=held), stream, running.start_decode(), in_a_second)
        for number in extent([signal.SIGINT], list(SECOND_SIGNALS)):
            found.temporary(number).mkdir()
            found.by_signals[number] = running.start_prefill(env={"TMPDIR": str(found.temporary(number))})
        for server in running.servers:
            server.wait_ready()
        yield found


@pytest.fixture(scope="module")
def both(direct: Cluster) -> Cluster:
    """A prefill and a decode server, each for one test that ends it: nobody needs them any more."""
    return direct


def local_stream(client: Client, request: common_pb2.GenerateInput) -> EventReader:
    """A colocated request whose tokens have begun to come."""
    message = decode_pb2.DecodeRequest(input=request, local_prefill=decode_pb2.LocalPrefill())
    reader = EventReader(client.decode.Decode(message, timeout=TIMEOUT_S))
    reader.wait_for("tokens")
    return reader


@pytest.mark.parametrize("module", [extended("prefill_server"), "decode_server"])
def test_h7_start_when_the_engine_still_loads_then_the_ports_answer_within_two_seconds(
    module: str, tmp_path: Path
) -> None:
    port, http = free_port(), free_port()
    folder = tiny_model("llama")
    loading = tmp_path / "loading"  # as long as it is there
    loading.touch()
    argv = [sys.executable, "-m", module, "--model", str(folder), *SERVER_FLAGS]
    argv += ["--port", str(port), "--metrics-port", str(http)]
    temporary = tempfile.TemporaryDirectory(prefix="baton-start-")  # a socket's path must be short
    process = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": temporary.name, "BATON_FAULTS": f"engine.load:delay=100,while={loading}"},
    )  # fmt: skip
    try:
        # Its sockets stand there until the engine has begun.
        wait_for("the engine's folder", lambda: list(Path(temporary.name).iterdir()), 3 * LIMIT_S, 0.002)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(3 * LIMIT_S)
            listening_s = cpu_seconds(process.pid)
            status = health_of(channel)
            worker = worker_pb2_grpc.WorkerStub(channel)
            state = worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
            try:
                worker.GetInfo(worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
                info_error = None
            except grpc.RpcError as error:
                info_error = error
            ready = httpx.get(f"http://127.0.0.1:{http}/ready", timeout=TIMEOUT_S)
            live = httpx.get(f"http://127.0.0.1:{http}/live", timeout=TIMEOUT_S)
        assert listening_s < 2.0
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert state.state == worker_pb2.WORKER_STATE_STARTING
        assert info_error is not None
        assert info_error.code() is grpc.StatusCode.UNAVAILABLE
        assert typed(info_error).code is ErrorCode.ENGINE_DEAD
        assert (ready.status_code, live.status_code) == (503, 200)
        assert ready.json()["reasons"]
    finally:
        loading.unlink()
        process.terminate()
        assert process.wait(STOP_LIMIT_S) == 0  # told to stop while loading
        assert list(Path(temporary.name).iterdir()) == []
        temporary.cleanup()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "/nowhere"], "--model"),
        extended(["--max-model-len", "0"], "--max-model-len"),
        extended(["--kv-checksum", "perhaps"], "--kv-checksum"),
        extended(["--no-such-flag", "1"], "--no-such-flag"),
        (["--host", "0.0.0.0"], "--advertise-host"),
        extended(["--kv-cache-dtype", "bfloat16"], "--kv-cache-dtype"),
        (["--max-num-seqs", "100", "--max-num-batched-tokens", "10"], "--max-num-batched-tokens"),
    ],
)
def test_start_when_a_setting_cannot_work_then_one_line_names_it(flags: list[str], named: str) -> None:
    argv = [sys.executable, "-m", "prefill_server", "--model", str(tiny_model("llama")), *SERVER_FLAGS, *flags]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode not in (0, None)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, ended.stderr
    assert named in lines[0]
    assert ended.stdout == ""


@pytest.mark.parametrize("flag", [extended("--port"), "--metrics-port", extended("--cache-store-port")])
def test_start_when_a_port_is_taken_then_one_line_names_flag_and_port(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "decode_server", "--model", str(tiny_model("llama")), *SERVER_FLAGS, flag, port]
        ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode not in (0, None)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, ended.stderr
    assert port in lines[0]
    assert flag in lines[0]


@pytest.mark.extended
def test_start_when_the_weights_are_broken_then_one_line_names_the_cause(tmp_path: Path) -> None:
    source = tiny_model("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    argv = [sys.executable, "-m", "prefill_server", "--model", str(tmp_path), *SERVER_FLAGS]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, ended.stderr
    assert weights.name in lines[0]


@pytest.mark.extended
def test_stop_when_nothing_is_open_then_it_exits_with_0_and_leaves_nothing(alone: Cluster) -> None:
    [decode] = alone.decode
    engine = decode.engine_pid
    assert decode.terminate() == 0
    wait_for("end of the engine", lambda: not process_exists(engine), LIMIT_S)
    assert list(alone.temporary.iterdir()) == []


def test_drain_when_a_stream_is_open_then_it_finishes_and_new_requests_get_8608(ending: Ending) -> None:
    decode = ending.with_a_stream
    with Client(decode, MODEL) as client:
        watch = statuses(client, 30.0)
        assert next(watch).state == worker_pb2.WORKER_STATE_READY
        request = generate_input("stream", prompt_of(20), model=MODEL, max_tokens=60, ignore_eos=True)
        ending.stream.touch()  # the stream does not end meanwhile
        try:
            reader = local_stream(client, request)
            decode.signal(signal.SIGTERM)
            assert next(watch).state == worker_pb2.WORKER_STATE_DRAINING  # pushed, not polled
            with pytest.raises(grpc.RpcError) as caught:
                client.local(generate_input("late", prompt_of(5), model=MODEL))
        finally:
            ending.stream.unlink()
        error = typed(caught.value)
        assert error.code is ErrorCode.SERVER_DRAINING
        assert error.retry_after_s is not None
        assert len(reader.wait_end().tokens) == 60
        assert reader.error is None
        assert decode.wait() == 0


@pytest.mark.extended
def test_drain_when_in_the_grace_period_then_health_is_negative_and_requests_are_served() -> None:
    flags = [*NAME, "--drain-grace-secs", "4"]
    with Cluster(0, 1, model=tiny_model("llama"), router=False, decode_flags=flags) as cluster:
        decode = cluster.decode[0]
        with Client(decode, MODEL) as client:
            decode.signal(signal.SIGTERM)
            wait_for(
                "negative health",
                lambda: health_of(client.channel) == health_pb2.HealthCheckResponse.NOT_SERVING,
                2.0,
            )
            assert decode.get("/ready").status_code == 503
            assert decode.get("/live").status_code == 200
            assert client.local(generate_input("in-time", prompt_of(5), model=MODEL)).tokens
            assert decode.metric("baton_drain_state") == 1
            assert decode.wait() == 0


def test_drain_when_asked_for_by_rpc_then_requests_are_refused_and_the_process_stays_until_its_signal(
    ending: Ending,
) -> None:
    decode = ending.by_rpc
    with Client(decode, MODEL) as client:
        watch = statuses(client, 30.0)
        next(watch)
        assert client.worker.Drain(worker_pb2.DrainRequest(), timeout=TIMEOUT_S).HasField("remaining")
        assert next(watch).state == worker_pb2.WORKER_STATE_DRAINING
        assert client.worker.Drain(worker_pb2.DrainRequest(), timeout=TIMEOUT_S).remaining == 0  # idempotent
        with pytest.raises(grpc.RpcError) as caught:
            client.local(generate_input("late", prompt_of(5), model=MODEL))
        assert typed(caught.value).code is ErrorCode.SERVER_DRAINING
        assert health_of(client.channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert decode.metric("baton_drain_state") == 2
        assert decode.alive
    assert decode.terminate() == 0


def test_drain_when_kv_is_staged_then_it_is_served_until_it_is_released(both: Cluster) -> None:
    prefill = both.prefill[0]
    with Pair(prefill, both.decode[0], MODEL) as pair:
        request = generate_input("staged", prompt_of(60), model=MODEL, max_tokens=4, ignore_eos=True)
        source = pair.p.kv_source()
        pair.open_prefill(request).result(TIMEOUT_S)
        prefill.signal(signal.SIGTERM)
        wait_for("not ready", lambda: prefill.get("/ready").status_code == 503, LIMIT_S)
        pair.p.kv_source = lambda: source  # type: ignore[method-assign]
        assert len(pair.open_decode(request).wait_end().tokens) == 4
        assert prefill.wait() == 0


@pytest.mark.extended
def test_drain_when_staged_kv_is_never_read_then_its_lease_ends_the_drain() -> None:
    flags = [*NAME, "--kv-lease-seconds", "2.5"]
    with Cluster(1, 0, model=tiny_model("llama"), router=False, prefill_flags=flags) as cluster:
        prefill = cluster.prefill[0]
        with Client(prefill, MODEL) as client:
            request = generate_input("forgotten", prompt_of(60), model=MODEL)
            client.prefill.Prefill(prefill_pb2.PrefillRequest(input=request, hold_kv=True), timeout=TIMEOUT_S)
        began = time.monotonic()
        assert prefill.terminate() == 0
        assert 0.2 < time.monotonic() - began < 5.5


def test_drain_when_the_time_is_up_then_the_rest_gets_8608_and_the_status_is_0(ending: Ending) -> None:
    prefill = ending.in_a_second
    with Pair(prefill, prefill, MODEL) as pair:
        calls = [pair.open_prefill(generate_input(f"long-{n}", prompt_of(500, salt=n), model=MODEL)) for n in range(6)]
        wait_for("open requests", lambda: len(prefill.requests()["open"]) == 6, LIMIT_S)
        began = time.monotonic()
        prefill.signal(signal.SIGTERM)
        codes = {typed(call.exception(SOON_S)).code for call in calls if call.exception(SOON_S) is not None}
        assert codes == {ErrorCode.SERVER_DRAINING}
        assert prefill.wait() == 0
        assert time.monotonic() - began < 1.0 + 2 * SCHEDULING_S  # they would take half a minute


@pytest.mark.parametrize("second", [extended(signal.SIGTERM), signal.SIGINT])
def test_second_signal_when_requests_are_open_then_they_get_8608_and_it_ends_in_two_seconds(
    ending: Ending, second: signal.Signals
) -> None:
    prefill = ending.by_signals[second]
    engine = prefill.engine_pid
    with Pair(prefill, prefill, MODEL) as pair:
        # Several, so that the last one is open for long.
        calls = [pair.open_prefill(generate_input(f"cut-{n}", prompt_of(500, salt=n), model=MODEL)) for n in range(4)]
        wait_for("the open requests", lambda: prefill.open_state("cut-3"), LIMIT_S)
        prefill.signal(signal.SIGTERM)
        wait_for("drain", lambda: prefill.get("/ready").status_code == 503, LIMIT_S)
        began = time.monotonic()
        prefill.signal(second)
        assert typed(calls[-1].exception(SOON_S)).code is ErrorCode.SERVER_DRAINING
        assert prefill.wait() == SECOND_SIGNALS[second]
        assert time.monotonic() - began < 2.0 + SCHEDULING_S
    wait_for("end of the engine", lambda: not process_exists(engine), LIMIT_S)
    assert list(ending.temporary(second).iterdir()) == []


def test_engine_when_killed_then_open_requests_get_8609_and_the_front_exits_non_zero(both: Cluster) -> None:
    decode = both.decode[0]
    with Client(decode, MODEL) as client:
        engine = decode.engine_pid
        request = generate_input("victim", prompt_of(20), model=MODEL, max_tokens=450, ignore_eos=True)
        reader = local_stream(client, request)
        began = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        reader.wait_end(SOON_S)
        assert typed(reader.error).code is ErrorCode.ENGINE_DEAD
        assert decode.wait(SOON_S) == 1
        assert time.monotonic() - began < 5.0
    dead = [line for line in decode.log_lines() if line.get("level") == "error"]
    assert [line["code"] for line in dead] == ["ENGINE_DEAD"]
    access = [line for line in decode.log_lines() if line.get("request_id") == "victim"]
    assert [line["code"] for line in access] == ["ENGINE_DEAD"]


@pytest.mark.extended
def test_front_when_killed_then_its_engine_goes_too(alone: Cluster) -> None:
    [decode] = alone.decode
    engine = decode.engine_pid
    decode.kill()
    wait_for("end of the engine", lambda: not process_exists(engine), LIMIT_S)


@pytest.mark.extended
def test_start_when_the_ports_of_a_stopped_server_are_reused_then_it_is_a_new_engine() -> None:
    with Cluster(0, 1, model=tiny_model("llama"), router=False, decode_flags=NAME) as cluster:
        old = cluster.decode[0]
        old.terminate()
        fresh = cluster.restart(old)
        assert fresh.grpc == old.grpc
        assert fresh.engine_id != old.engine_id
        with Client(fresh, MODEL) as client:
            assert len(client.local(generate_input("new", prompt_of(20), model=MODEL, ignore_eos=True)).tokens) == 8
