"""A server of two ranks, one of which dies, hangs or fails: the engine ends, everybody is told, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from protos import decode_pb2
from rpc.errors import BatonError, ErrorCode
from tests.extent import extended
from tests.integration.cluster import ROOT, SERVER_FLAGS, Cluster, ServerProcess, process_exists, wait_for
from tests.integration.test_servers_handoff import MODEL, prompt_of
from tests.integration.wire_client import TIMEOUT_S, Client, EventReader, Pair, generate_input, typed
from tests.standstill import stand_still
from tests.unit.engine.tiny_models import tiny_model

DEADLINE_S = 3.0  # between ranks
# Beyond the deadline: the others' last words, the answers to clients, and what a busy machine adds.
SLACK_S = 12.0
START_S = {"stop": 20.0, "kill": 60.0, "raise": 60.0}  # one that is stopped is missed at the end of this time
FLAGS = [
    *("--served-model-name", MODEL, "--tensor-parallel-size", "2", "--tp-broadcast-timeout-seconds", str(DEADLINE_S)),
    *("--max-num-batched-tokens", "32", "--max-num-seqs", "8"),
]  # fmt: skip
SLOW = "engine.layer:delay=0.05;engine.step:delay=0.02,kind=decode"  # long enough to be met while it computes

MEANS = ("kill", "stop", "raise")
SERVING = ("idle", "prefill", "decode")
# In every run: a rank that hangs while tokens flow, which takes the longest way to its end. That one which dies is
# noticed is tested in every run between hub and port.
ALWAYS = {("stop", 1, "decode")}


def cases(means: tuple[str, ...], states: tuple[str, ...]) -> list[object]:
    found = [(how, rank, state) for how in means for rank in (0, 1) for state in states]
    return [case if case in ALWAYS else extended(*case) for case in found]


def fault_of(rank: int, state: str) -> str:
    """What makes the rank raise in that state: not at once, so that the test can get there."""
    point = {
        ("idle", 0): "engine.rest:",
        ("idle", 1): "engine.rest:",
        ("prefill", 0): "engine.layer:",
        ("prefill", 1): "engine.step:kind=prefill,",
        ("decode", 0): "engine.ordered:kind=decode,",
        ("decode", 1): "engine.step:kind=decode,",
    }[state, rank]
    labels = "" if "ordered" in point else f"rank={rank},"
    return f"{point}raise=EXECUTION_EXCEPTION,{labels}nth={8 if state == 'idle' else 3}"


STRIKES = {"kill": lambda pid: os.kill(pid, signal.SIGKILL), "stop": stand_still}


@dataclass
class Server:
    """A colocated server of two ranks, alone."""

    cluster: Cluster
    process: ServerProcess
    pids: list[int]

    def act(self, how: str, rank: int) -> None:
        if how in STRIKES:
            STRIKES[how](self.pids[rank])

    def assert_gone(self) -> None:
        """No process of it, no file of it."""
        for pid in self.pids:
            wait_for(f"end of rank {pid}", lambda pid=pid: not process_exists(pid), SLACK_S)
        assert list(self.cluster.temporary.iterdir()) == []


def shared_memory(pids: list[int]) -> list[str]:
    """Files there that these processes have left. Others on this machine have theirs there too, under other pids."""
    marks = {"baton", *map(str, pids)}
    return [name for name in os.listdir("/dev/shm") if marks & set(re.split(r"[^A-Za-z0-9]+", name))]


@contextmanager
def server_of_two(faults: str) -> Iterator[Server]:
    with Cluster(
        0, 1, model=tiny_model("llama"), router=False, decode_flags=FLAGS, decode_env={"BATON_FAULTS": faults}
    ) as cluster:
        [process] = cluster.decode
        server = Server(cluster, process, [int(pid) for pid in process.page("/server_info")["engine_pids"]])
        assert len(server.pids) == 2
        try:
            yield server
            server.assert_gone()
            assert shared_memory([process.pid, *server.pids]) == []
        finally:
            for pid in server.pids:
                if process_exists(pid):
                    os.kill(pid, signal.SIGKILL)


def local_request(client: Client, prompt: int, max_tokens: int) -> EventReader:
    request = generate_input("victim", prompt_of(prompt), model=MODEL, max_tokens=max_tokens, ignore_eos=True)
    message = decode_pb2.DecodeRequest(input=request, local_prefill=decode_pb2.LocalPrefill())
    return EventReader(client.decode.Decode(message, timeout=3 * TIMEOUT_S))


def check_end(server: ServerProcess, rank: int, began: float) -> None:
    """The front ends with status 1 in time, and says in its log which rank it was."""
    assert server.wait(DEADLINE_S + SLACK_S) == 1
    assert time.monotonic() - began < DEADLINE_S + SLACK_S
    said = [line for line in server.log_lines() if line.get("logger") == "front.server" and line["level"] == "error"]
    assert [line["code"] for line in said] == ["ENGINE_DEAD"], said
    assert f"rank {rank} " in said[0]["message"], said


@pytest.mark.parametrize(("how", "rank", "state"), cases(MEANS, SERVING))
def test_rank_when_it_is_lost_while_the_engine_serves_then_all_end_and_open_requests_get_8609(
    how: str, rank: int, state: str
) -> None:
    faults = SLOW if how != "raise" else f"{SLOW};{fault_of(rank, state)}"
    with server_of_two(faults) as server, Client(server.process, MODEL) as client:
        reader = None
        if state != "idle":
            # 500 tokens are 16 steps of 0.1 s; 400 generated ones take 8 s.
            reader = local_request(client, *((500, 4) if state == "prefill" else (20, 400)))
            if state == "decode":
                reader.wait_for("tokens")
            elif how != "raise":
                wait_for("a prompt in the making", lambda: server.process.ledger()[0]["running"], SLACK_S)
        began = time.monotonic()
        server.act(how, rank)
        if reader is not None:
            reader.wait_end(DEADLINE_S + SLACK_S)
            error = typed(reader.error)
            assert error.code is ErrorCode.ENGINE_DEAD
            assert error.metadata["rank"] == str(rank), error.metadata
            assert error.metadata["cause"] in causes_of(how), error.metadata
        check_end(server.process, rank, began)


def causes_of(how: str) -> tuple[str, ...]:
    return {"kill": ("signal_9", "closed"), "stop": ("silent", "not_reading"), "raise": ("EXECUTION_EXCEPTION",)}[how]


@pytest.mark.extended
def test_front_when_it_is_killed_then_all_ranks_go_with_it() -> None:
    with server_of_two("") as server:
        server.process.kill()


# ---- start-up and shutdown


AT_START = [extended(how, rank) for how in MEANS for rank in (0, 1)]


@pytest.mark.parametrize(("how", "rank"), AT_START)
def test_rank_when_it_is_lost_while_the_engine_starts_then_one_line_says_so_and_nothing_is_left(
    how: str, rank: int
) -> None:
    folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
    fault = f"engine.load:raise=MALLOC_FAILED,rank={rank}" if how == "raise" else "engine.load:delay=3"
    argv = [sys.executable, "-m", "decode_server", "--model", str(tiny_model("llama")), *SERVER_FLAGS, *FLAGS]
    process = subprocess.Popen(
        [*argv, "--engine-start-timeout-secs", str(START_S[how])],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": folder.name, "OMP_NUM_THREADS": "1", "BATON_FAULTS": fault}, text=True,
    )  # fmt: skip
    try:
        ranks = wait_for("both ranks", lambda: engines_of(process.pid), 2 * SLACK_S)
        if how != "raise":
            STRIKES[how](ranks[rank])
        out, err = process.communicate(timeout=START_S[how] + SLACK_S)
        lines = [line for line in err.splitlines() if not line.startswith("{")]
        assert (process.returncode, out, len(lines)) == (1, "", 1), err
        assert f"rank {rank} " in lines[0] or (how == "raise" and "MALLOC_FAILED" in lines[0]), lines
        for pid in ranks:
            wait_for(f"end of {pid}", lambda pid=pid: not process_exists(pid), SLACK_S)
        assert list(Path(folder.name).iterdir()) == []
        assert shared_memory([process.pid, *ranks]) == []
    finally:
        process.kill()
        process.wait()
        folder.cleanup()


def engines_of(front: int) -> list[int]:
    """Process ids of the ranks of a front, in order, once both are there."""
    found = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    ranks = {}
    for pid in found:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"engine.process" in command:
            ranks[int(b"--leader" in command)] = int(pid)
    return [ranks[rank] for rank in sorted(ranks)] if len(ranks) == 2 else []


@pytest.mark.extended
@pytest.mark.parametrize("how", MEANS)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_when_it_is_lost_while_the_server_stops_then_the_server_ends_in_order(how: str, rank: int) -> None:
    action = "raise=EXECUTION_EXCEPTION" if how == "raise" else "delay=0.5"
    faults = f"engine.stop:{action},rank={rank}"
    with server_of_two(faults) as server:
        if how == "stop":
            server.act(how, rank)
        server.process.signal(signal.SIGTERM)
        if how == "kill":
            wait_for("the drain", lambda: not server.process.alive or _draining(server.process), SLACK_S)
            if process_exists(server.pids[rank]):
                server.act(how, rank)
        assert server.process.wait(SLACK_S) in (0, 1)  # 1: it was lost before its front had told it to leave


def _draining(process: ServerProcess) -> bool:
    try:
        return process.get("/ready", 1.0).status_code == 503
    except Exception:
        return True


# ---- transfer


DURING_TRANSFER = [*product(("kill", "stop"), ("prefill", "decode")), ("raise", "prefill")]


@pytest.mark.extended
@pytest.mark.parametrize(("how", "role"), DURING_TRANSFER)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_when_it_is_lost_during_a_transfer_then_the_other_server_gets_its_blocks_back(
    how: str, rank: int, role: str
) -> None:
    flags = [*FLAGS, "--kv-lease-seconds", "3", "--load-cache-timeout-ms", "2000"]
    # A load that fails is to be seen, not to be made good by computing the prompt anew.
    decode_flags = [*flags, "--kv-load-failure-policy", "fail"]
    faults = "cache_store.send_piece:delay=0.3,key=victim*"
    if how == "raise":  # the blocks of earlier chunks are on their way then
        faults += f";engine.layer:delay=0.05;engine.layer:raise=EXECUTION_EXCEPTION,rank={rank},nth=12"
    with Cluster(
        1, 1, model=tiny_model("llama"), router=False,
        prefill_flags=flags, decode_flags=decode_flags, prefill_env={"BATON_FAULTS": faults},
    ) as cluster:  # fmt: skip
        broken, other = (cluster.prefill[0], cluster.decode[0])[:: 1 if role == "prefill" else -1]
        pids = [int(pid) for pid in broken.page("/server_info")["engine_pids"]]
        with Pair(cluster.prefill[0], cluster.decode[0], MODEL) as pair:
            request = generate_input("victim", prompt_of(200), model=MODEL, max_tokens=50, ignore_eos=True)
            decode = pair.open_decode(request)
            prefill = pair.open_prefill(request)
            wait_for("a transfer", lambda: cluster.decode[0].ledger()[0]["receiving"], SLACK_S)
            began = time.monotonic()
            if how in STRIKES:
                STRIKES[how](pids[rank])
            check_end(broken, rank, began)
            decode.wait_end(DEADLINE_S + SLACK_S)
            assert isinstance(typed(decode.error), BatonError)
            wait_for("the end of the prefill call", prefill.done, DEADLINE_S + SLACK_S)
        for pid in pids:
            wait_for(f"end of rank {pid}", lambda pid=pid: not process_exists(pid), SLACK_S)
        cluster.assert_clean_ledgers(SLACK_S)
        assert other.alive
        again = cluster.restart(broken)
        assert again.engine_id != broken.engine_id
        with Pair(cluster.prefill[0], cluster.decode[0], MODEL) as pair:
            request = generate_input("next", prompt_of(40), model=MODEL, max_tokens=4, ignore_eos=True)
            decode = pair.open_decode(request)
            pair.open_prefill(request).result(TIMEOUT_S)
            assert len(decode.wait_end().tokens) == 4
        cluster.assert_clean_ledgers(SLACK_S)
