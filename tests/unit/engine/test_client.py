"""The front's end of an engine process: real processes, real sockets."""

import asyncio
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import pytest_asyncio

from engine.client import EngineClient, EngineConfig, RequestStream, socket_folder
from engine.messages import AddRequest, FinishReason, RequestOutput, RunMode, SamplingParams
from rpc.errors import BatonError, ErrorCode
from tests.extent import extended
from tests.standstill import standing_still
from tests.unit.engine.tiny_models import tiny_model

START_S = 60.0
PROMPT = [5 + (i * 37) % 370 for i in range(20)]


def config(**options):
    settings = {
        "role": "decode",
        "model": str(tiny_model("llama")),
        "dtype": "float32",
        "num_kv_blocks": 64,
        "max_model_len": 512,
        "threads": 1,
        **options,
    }
    return EngineConfig(**settings)


def request(key, max_tokens=8, prompt=PROMPT, **options):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return AddRequest(key, RunMode.LOCAL, list(prompt), sampling, arrival_ns=time.monotonic_ns(), **options)


async def read(stream):
    return [output async for output in stream]


async def collect(stream, seen):
    async for output in stream:
        seen.append(output)


def alive(pid):
    """Whether the process runs (one that has ended and was not collected yet does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, inspect.getsource(condition)
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def temporary_folder():
    """One of this module's own: tests that run beside it start engines too."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


def socket_folders():
    return set(Path(tempfile.gettempdir()).glob("baton-engine-*"))


# A request that no test sees the end of, however late what ends it comes: its steps take their time.
LONG = "long"


async def started():
    """A new engine."""
    engine = EngineClient(config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_FAULTS", f"engine.step:delay=0.05,request_key={LONG}*")
        await engine.start(START_S)
    return engine


# One engine serves all tests that leave it alive.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client():
    engine = await started()
    yield engine
    await engine.stop(START_S)


async def test_engine_when_it_serves_then_outputs_come_in_order_and_nothing_is_on_disk(client):
    before = socket_folders()
    assert client.ready.num_blocks == 64
    assert client.ready.max_model_len == 512
    outputs = await read(client.submit(request("a#0.00000000")))
    tokens = [token.index for output in outputs for token in output.tokens]
    assert tokens == list(range(8))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert client.open_requests == 0
    assert not any(str(client.pid) in folder.name for folder in before)
    assert client._folder is None


async def test_requests_when_many_run_at_once_then_each_reader_gets_its_own(client):
    steps = []
    client.on_step = steps.append
    streams = {i: client.submit(request(f"r{i}#0.00000000", 5 + i, PROMPT[i:])) for i in range(10)}
    async with asyncio.TaskGroup() as group:
        tasks = {i: group.create_task(read(stream)) for i, stream in streams.items()}
    for i, task in tasks.items():
        assert sum(len(output.tokens) for output in task.result()) == 5 + i
    client.on_step = None
    assert [step.seq for step in steps] == sorted(step.seq for step in steps)
    await until(lambda: client.stats.running == 0 and client.stats.ledgers[0].running == 0)


async def test_step_when_its_output_is_awaited_then_the_reader_has_it_before_the_step_is_booked(client):
    order = []
    client.on_step = lambda step: order.extend("step" for output in step.outputs)
    stream = client.submit(request("a#0.00000000", 2))
    async for _ in stream:
        order.append("reader")
    await until(lambda: order.count("step") == order.count("reader"))
    client.on_step = None
    booked = [order[: place + 1].count("step") - order[:place].count("reader") for place in range(len(order))]
    assert max(booked) == 0


async def test_stop_when_requests_are_open_then_they_end_with_draining_and_the_process_is_gone():
    engine = await started()
    pid = engine.pid
    stream = engine.submit(request(f"{LONG}#0.00000000", 400))
    first = await anext(stream)
    assert first.tokens
    await engine.stop(START_S)
    rest = await read(stream)
    assert rest[-1].error.code == ErrorCode.SERVER_DRAINING
    assert not alive(pid)
    assert engine.dead.is_set()
    assert engine.death.metadata["exit_status"] == "0"
    with pytest.raises(BatonError) as refusal:
        engine.submit(request("b#0.00000000"))
    assert refusal.value.code is ErrorCode.ENGINE_DEAD
    await engine.stop(START_S)


async def test_death_when_the_engine_is_killed_then_every_stream_fails_at_once():
    client = await started()
    streams = [client.submit(request(f"{LONG}{i}#0.00000000", 400)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    os.kill(client.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(BatonError) as failure:
            async with asyncio.timeout(START_S):
                await read(stream)
        assert failure.value.code is ErrorCode.ENGINE_DEAD
    assert client.dead.is_set()
    assert client.death.metadata["exit_status"] == "-9"
    with pytest.raises(BatonError):
        client.submit(request("x#0.00000000"))
    client.abort(f"{LONG}0#0.00000000")
    assert client.open_requests == 0
    await client.stop(5.0)


async def test_silence_when_the_engine_stands_still_then_it_grows_until_it_goes_on(client):
    """At rest it speaks once a second."""
    await until(lambda: client.silent_s < 0.5)
    with standing_still(client.pid):
        await until(lambda: client.silent_s > 1.5)
    await until(lambda: client.silent_s < 0.5)


async def test_signals_when_they_reach_the_engine_then_its_front_alone_decides(client):
    os.kill(client.pid, signal.SIGTERM)
    os.kill(client.pid, signal.SIGINT)
    outputs = await read(client.submit(request("a#0.00000000")))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert alive(client.pid)


async def test_abort_when_a_request_runs_then_its_stream_ends_with_the_cause(client):
    stream = client.submit(request(f"{LONG}#0.00000000", 400))
    await anext(stream)
    client.abort(f"{LONG}#0.00000000", ErrorCode.CANCELLED, "client")
    outputs = await read(stream)
    assert outputs[-1].error.code == ErrorCode.CANCELLED
    await until(lambda: client.stats.ledgers[0].running == 0)


async def test_submit_when_the_key_is_open_then_it_is_refused(client):
    stream = client.submit(request("a#0.00000000"))
    with pytest.raises(BatonError) as refusal:
        client.submit(request("a#0.00000000"))
    assert refusal.value.code is ErrorCode.DUPLICATE_REQUEST
    assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH


async def test_reader_when_it_is_too_slow_then_its_request_is_aborted_and_the_others_go_on(client):
    slow = client.submit(request("slow#0.00000000", 400))
    slow._capacity = 5
    assert (await read(client.submit(request("a#0.00000000", 60))))[-1].finish_reason is FinishReason.LENGTH
    seen = []
    with pytest.raises(BatonError) as failure:
        await collect(slow, seen)
    assert failure.value.code is ErrorCode.OUTPUT_QUEUE_FULL
    assert len(seen) == 5
    await until(lambda: client.stats.running == 0)


async def test_reader_when_its_wait_is_cancelled_then_no_output_is_lost():
    stream = RequestStream("a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    stream._put(RequestOutput("a"))
    stream._put(RequestOutput("a", last=True))
    assert [output.last for output in await read(stream)] == [False, True]


# -- starts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 2}, "--max-num-batched-tokens"),
        ({"model": "/nowhere"}, "--model"),
    ],
)
async def test_start_when_the_configuration_is_wrong_then_the_engine_names_the_flag(options, named):
    engine = EngineClient(config(**options))
    before = socket_folders()
    with pytest.raises(BatonError) as failure:
        await engine.start(START_S)
    assert failure.value.code is ErrorCode.INVALID_PARAMS
    assert named in failure.value.message
    assert engine.dead.is_set()
    assert not alive(engine.pid)
    assert socket_folders() <= before


async def test_start_when_the_cache_store_port_is_taken_then_it_says_which():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = EngineClient(config(cache_store_port=port))
        with pytest.raises(BatonError) as failure:
            await engine.start(START_S)
        assert str(port) in failure.value.message
        assert "--cache-store-port" in failure.value.message


async def test_start_when_it_takes_too_long_then_the_process_is_killed():
    engine = EngineClient(config())
    with pytest.raises(BatonError) as failure:
        await engine.start(0.05)
    assert failure.value.code is ErrorCode.ENGINE_DEAD
    assert engine.pid is None or not alive(engine.pid)


async def test_start_when_the_engine_dies_without_a_word_then_its_exit_is_the_cause():
    engine = EngineClient(config())
    started = asyncio.ensure_future(engine.start(START_S))
    await until(lambda: engine.pid is not None)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(BatonError) as failure:
        await started
    assert failure.value.code is ErrorCode.ENGINE_DEAD
    assert "signal 9" in failure.value.message


FRONT = """
import asyncio, sys
from engine.client import EngineClient, EngineConfig

async def main():
    engine = EngineClient(EngineConfig.from_json(sys.argv[1].encode()))
    await engine.start(60)
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

if len(sys.argv) > 2:
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", [extended([]), ["uvloop"]])
async def test_front_when_it_is_killed_then_its_engine_dies_with_it_and_leaves_nothing(loop):
    before = socket_folders()
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FRONT, config().to_json().decode(), *loop, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(START_S):
        pid = int(await front.stdout.readline())
    assert alive(pid)
    front.kill()
    await front.wait()
    await until(lambda: not alive(pid))
    assert socket_folders() <= before


async def test_sockets_when_the_folder_for_temporary_files_has_a_long_name_then_they_lie_elsewhere(
    monkeypatch,
):
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        await check_sockets(Path(above), monkeypatch)


async def check_sockets(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("short", "long" * 30):
        (above / name).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(above / name))
        folder = socket_folder()
        try:
            assert folder.is_dir() and (folder.parent == above / name) == (name == "short")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(folder / "from-engine"))
        finally:
            shutil.rmtree(folder)
