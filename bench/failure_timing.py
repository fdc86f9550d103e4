"""How soon blocks are free again after a request was cancelled, ran out of time, or lost a process.

    python -m bench.failure_timing                   # a table in Markdown
    python -m bench.failure_timing --runs 20 --kills 5 --json results/failure_timing.json

A cluster of real processes: router, prefill and decode server, each with its engine. A request is struck while its
prompt is computed, when both servers hold blocks for it, or while tokens come, when only the decode server does. What
is timed is from the blow to the moment at which a server's `/debug/ledger` shows no block that is running, staged or
being received. The ledgers are read in turn, with a millisecond between, so a figure is late by that and a reading of
each at the most, the time of which stands beside the table.

* **cancel**: the client cancels its call.
* **deadline**: the client's deadline passes; it travels with the request, so every process knows it. Where KV is read
  in the prefill server's memory (ipc, nixl), the load is given up a moment before: its times are less than zero.
* **router killed**, **prefill server killed**, **decode server killed**: SIGKILL; what is timed is the servers that are
  left. The process is started again afterwards.

The kinds take turns within a round, and begin with another one in each. A run in which the request was not where it
should have been when it was struck does not count, and is made again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.circumstances import circumstances, save, sentence
from bench.comparison import MeasurementFailed
from bench.results import percentile
from bench.router_facts import NotReady, first_model
from cli.launch import Launcher, LaunchError, Process
from protos import common_pb2, generation_pb2, generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.channels import CLIENT_OPTIONS

PREFILL, DECODE = "prefill", "decode"
COMPUTING, GENERATING = "prompt computed", "tokens come"
HELD = ("running", "staged", "receiving", "quarantined")
PAUSE_S = 0.001  # between two readings: a reader that never rests takes a core from those it watches
READY_S = 60.0
STATE_S = 30.0  # for a request to be where it is to be struck
SURVIVED_S = 3.0  # after which a request that still generates was not struck
FREE_S = 60.0  # for its blocks to be free
SHOWN_TOKENS = 3
MOST_TOKENS = 512
ATTEMPTS = 20  # at a run before the measurement is given up
WARM_UPS = 3


@dataclass(frozen=True)
class Blow:
    """What happens to a request, when, and on which servers the blocks are waited for."""

    what: str
    when: str
    servers: tuple[str, ...]
    victim: str = ""  # the process that is killed


BLOWS = (
    Blow("cancel", COMPUTING, (PREFILL, DECODE)),
    Blow("cancel", GENERATING, (DECODE,)),
    Blow("deadline", COMPUTING, (PREFILL, DECODE)),
    Blow("deadline", GENERATING, (DECODE,)),
    Blow("router killed", COMPUTING, (PREFILL, DECODE), "router"),
    Blow("router killed", GENERATING, (DECODE,), "router"),
    Blow("prefill server killed", COMPUTING, (DECODE,), PREFILL),
    Blow("decode server killed", COMPUTING, (PREFILL,), DECODE),
)


class NotThere(Exception):
    """The request was not in the state in which it was to be struck."""


class LedgerReader:
    """Reads a server's ledger over one connection."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=10.0)

    def page(self, path: str) -> Any:
        self._connection.request("GET", path)
        return json.loads(self._connection.getresponse().read())

    def held(self) -> int:
        """Blocks that belong to requests."""
        ranks = self.page("/debug/ledger")["ranks"]
        return sum(group[state] for rank in ranks for group in rank["groups"] for state in HELD)

    def close(self) -> None:
        self._connection.close()


class Cluster:
    """Router, prefill and decode server; used by one thread."""

    def __init__(self, model: str, dtype: str, threads: int, chunk: int) -> None:
        flags = ["--dtype", dtype, "--threads", str(threads), "--max-num-seqs", "8"]
        flags += ["--max-num-batched-tokens", str(chunk)] if chunk else []
        self.launcher = Launcher(
            model=model,
            port=0,
            grpc_port=0,
            server_flags=flags,
            # A prefill server that is gone is to be seen, not to be made good by computing the prompt elsewhere.
            decode_flags=["--no-allow-local-prefill"],
            say=lambda _: None,
        )
        self.model = ""
        self.vocabulary = self.max_model_len = 0
        self.ledgers: dict[str, LedgerReader] = {}

    def start(self) -> None:
        self.launcher.start()
        self._connect()
        with grpc.insecure_channel(self.process(PREFILL).ready["grpc"], options=CLIENT_OPTIONS) as channel:
            info = worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=READY_S)
        self.vocabulary, self.max_model_len = info.vocab_size, info.max_model_len

    def _connect(self) -> None:
        """Readers of both ledgers, once the router has a pair."""
        self.close_ledgers()
        self.model = first_model(f"http://{self.launcher.router.ready['http']}", "", READY_S)
        self.ledgers = {server.role: LedgerReader(server.ready["http"]) for server in self.launcher.servers}

    def close_ledgers(self) -> None:
        for reader in self.ledgers.values():
            reader.close()

    def stop(self) -> None:
        self.close_ledgers()
        self.launcher.stop()

    def process(self, role: str) -> Process:
        return next(process for process in self.launcher.processes if process.role == role)

    def engine_pid(self, role: str) -> int:
        return int(self.ledgers[role].page("/server_info")["engine_pid"])

    def replace(self, role: str, engine_pid: int) -> None:
        """Starts a killed process again, once its engine, which has its ports, is gone too."""
        if engine_pid:
            until(f"the end of engine {engine_pid}", lambda: not Path(f"/proc/{engine_pid}/exe").exists(), READY_S)
        self.launcher.start_again(self.process(role))
        self._connect()

    def check_alive(self) -> None:
        for process in self.launcher.processes:
            if not process.alive():
                raise MeasurementFailed(f"{process.name} ended with status {process.status}: {process.last_words()}")


def until(what: str, probe: Callable[[], bool], limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    while not probe():
        if time.monotonic() > limit:
            raise MeasurementFailed(f"{what}: not within {limit_s:g} s")
        time.sleep(0.002)


@dataclass
class Readings:
    """Seconds that single readings of a ledger took: how late a figure can be."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=100_000))

    def held(self, reader: LedgerReader) -> int:
        began = time.monotonic()
        found = reader.held()
        self.seconds.append(time.monotonic() - began)
        return found


@dataclass
class Figures:
    """Seconds from the blow to free blocks, by blow and server, and what the prompt took before any blow."""

    freed: dict[tuple[Blow, str], list[float]]
    readings: Readings
    first_token_s: float = 0.0
    repeated: int = 0


class Striker:
    """Makes one run after the other."""

    def __init__(self, cluster: Cluster, prompt_tokens: int, seed: int) -> None:
        self.cluster = cluster
        self._prompt_tokens = prompt_tokens
        self._random = random.Random(seed)
        freed = {(blow, server): list[float]() for blow in BLOWS for server in blow.servers}
        self.figures = Figures(freed, Readings())
        self._computing_s = 0.0  # as it was last

    def _request(self) -> generation_pb2.GenerateRequest:
        prompt = [self._random.randrange(3, self.cluster.vocabulary) for _ in range(self._prompt_tokens)]  # in no cache
        most = min(MOST_TOKENS, self.cluster.max_model_len - self._prompt_tokens)
        sampling = common_pb2.SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        return generation_pb2.GenerateRequest(
            model=self.cluster.model, token_ids=generation_pb2.TokenIds(ids=prompt), sampling=sampling
        )

    def warm_up(self) -> None:
        """Some requests to their first token, the time of which says where the middle of a prompt is."""
        self.figures.first_token_s = statistics.median(self._first_token() for _ in range(WARM_UPS))
        self._computing_s = self.figures.first_token_s

    def _first_token(self) -> float:
        with self._channel() as channel:
            began = time.monotonic()
            call = self._send(channel, None)
            _read_tokens(call, 1)
            seconds = time.monotonic() - began
            call.cancel()
            self._wait_free(time.monotonic(), (PREFILL, DECODE))
        return seconds

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.cluster.launcher.router.ready["grpc"], options=CLIENT_OPTIONS)

    def _send(self, channel: grpc.Channel, timeout_s: float | None) -> Any:
        return generation_pb2_grpc.GenerationStub(channel).Generate(self._request(), timeout=timeout_s)

    def run(self, blow: Blow) -> None:
        """One run, booked. Raises MeasurementFailed when it cannot be made."""
        for _ in range(ATTEMPTS):
            self.cluster.check_alive()
            try:
                with self._channel() as channel:
                    found = self._strike(channel, blow)
            except MeasurementFailed as error:
                raise MeasurementFailed(f"{blow.what}, {blow.when}: {error}") from None
            except NotThere:
                self.figures.repeated += 1
                self._wait_free(time.monotonic(), (PREFILL, DECODE))
                self._computing_s = self._first_token()  # the machine may have become slower, or quicker
                continue
            for server, seconds in found.items():
                self.figures.freed[blow, server].append(seconds)
            return
        raise MeasurementFailed(f"{blow.what}: in {ATTEMPTS} attempts no request was there when it was to be struck")

    def _strike(self, channel: grpc.Channel, blow: Blow) -> dict[str, float]:
        """Seconds from the blow to free blocks, by server."""
        if blow.what == "deadline":
            return self._pass_deadline(channel, blow)
        engine = self.cluster.engine_pid(blow.victim) if blow.victim in (PREFILL, DECODE) else 0
        call = self._send(channel, None)
        try:
            self._wait_state(call, blow)
            struck = time.monotonic()
            if not blow.victim:
                call.cancel()
                return self._wait_free(struck, blow.servers)
            process = self.cluster.process(blow.victim)
            process.send_signal(signal.SIGKILL)
            try:
                return self._wait_free(struck, blow.servers, may_go_on=blow.victim == PREFILL)
            finally:
                process.wait(READY_S)
                call.cancel()
                self.cluster.replace(blow.victim, engine)
        finally:
            call.cancel()

    def _pass_deadline(self, channel: grpc.Channel, blow: Blow) -> dict[str, float]:
        computing = self._computing_s
        left = computing / 2 if blow.when == COMPUTING else computing * 1.5 + 0.5
        due = time.monotonic() + left
        call = self._send(channel, left)
        try:
            self._wait_state(call, blow)
            free: dict[str, float] = {}
            while time.monotonic() < due:
                free = self._free_now(blow.servers, due, free)
                time.sleep(min(PAUSE_S, max(0.0, due - time.monotonic())))
            if not free:
                return self._wait_free(due, blow.servers)
            if len(free) < len(blow.servers) or call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NotThere  # its prompt was computed, or it was answered
            return free
        except grpc.RpcError:  # the deadline passed before the tokens came
            raise NotThere from None
        finally:
            call.cancel()

    def _free_now(self, servers: Sequence[str], since: float, before: Mapping[str, float]) -> dict[str, float]:
        """Of the servers that hold nothing, since when: `before`, or now, in seconds after `since`."""
        held = {server: self.figures.readings.held(self.cluster.ledgers[server]) for server in servers}
        return {server: before.get(server, time.monotonic() - since) for server in servers if not held[server]}

    def _wait_state(self, call: Any, blow: Blow) -> None:
        """Until the request is where it is to be struck."""
        if blow.when == GENERATING:
            _read_tokens(call, SHOWN_TOKENS)
            return
        limit = time.monotonic() + STATE_S
        while not self._is_there(blow):
            if not call.is_active() or time.monotonic() > limit:
                raise NotThere
            time.sleep(PAUSE_S)

    def _is_there(self, blow: Blow) -> bool:
        """Whether each server that should hold blocks does. While a prompt is computed both do."""
        servers = (PREFILL, DECODE) if blow.when == COMPUTING else blow.servers
        return all(self.figures.readings.held(self.cluster.ledgers[server]) for server in servers)

    def _wait_free(self, struck: float, servers: Sequence[str], *, may_go_on: bool = False) -> dict[str, float]:
        """Seconds until each is free.

        may_go_on: the request is none of these runs if it is answered all the same.
        """
        found: dict[str, float] = {}
        while len(found) < len(servers):
            for server in servers:
                if server not in found and not self.figures.readings.held(self.cluster.ledgers[server]):
                    found[server] = time.monotonic() - struck
            time.sleep(PAUSE_S)
            if may_go_on and time.monotonic() - struck > SURVIVED_S and self._goes_on():
                raise NotThere  # it had got what it needs of the process that was killed
            if time.monotonic() - struck > FREE_S:
                raise MeasurementFailed(f"blocks are still held after {FREE_S:g} s: {self._state(servers, found)}")
        return found

    def _goes_on(self) -> bool:
        """Whether the decode server generates."""
        requests = self.cluster.ledgers[DECODE].page("/debug/requests")["open"]
        return any(request["generated_tokens"] for request in requests)

    def _state(self, servers: Sequence[str], free: Container[str]) -> str:
        """Ledger and open requests of those servers that are not free."""
        pages = {
            server: (reader.page("/debug/ledger")["ranks"], reader.page("/debug/requests")["open"])
            for server, reader in self.cluster.ledgers.items()
            if server in servers and server not in free
        }
        return json.dumps(pages)


def _read_tokens(call: Any, count: int) -> None:
    """Until so many tokens have come. Raises grpc.RpcError for a request that fails before."""
    while count > 0:
        count -= len(next(call).tokens)


def rounds(runs: int, kills: int) -> Iterator[Blow]:
    """Every blow as often as it is wanted, in turns that begin with another one each time."""
    for number in range(max(runs, kills)):
        shift = number % len(BLOWS)
        for blow in (*BLOWS[shift:], *BLOWS[:shift]):
            if number < (kills if blow.victim else runs):
                yield blow


def measure(arguments: argparse.Namespace, say: Callable[[str], None]) -> Figures:
    cluster = Cluster(arguments.model, arguments.dtype, arguments.threads, arguments.chunk)
    try:
        cluster.start()
        striker = Striker(cluster, arguments.prompt_tokens, arguments.seed)
        striker.warm_up()
        wanted = list(rounds(arguments.runs, arguments.kills))
        for number, blow in enumerate(wanted, 1):
            striker.run(blow)
            if number % 50 == 0:
                say(f"  {number} of {len(wanted)} runs")
        return striker.figures
    finally:
        cluster.stop()


def rows(figures: Figures) -> list[str]:
    """The table; p99 of few runs is between the two longest."""
    found = ["| blow | while | blocks of | runs | p50 ms | p99 ms | most |", "|---|---|---|---|---|---|---|"]
    for (blow, server), seconds in figures.freed.items():
        if seconds:
            shown = " | ".join(f"{1e3 * value:.1f}" for value in (*_cuts(seconds), max(seconds)))
            found.append(f"| {blow.what} | {blow.when} | {server} server | {len(seconds)} | {shown} |")
    return found


def _cuts(seconds: Sequence[float]) -> tuple[float, float]:
    return percentile(seconds, 50), percentile(seconds, 99)


def page(figures: Figures, found: dict[str, Any], arguments: argparse.Namespace) -> str:
    reading = _cuts(list(figures.readings.seconds))
    return "\n".join(
        [
            f"{sentence(found)} {Path(arguments.model).name}, {arguments.dtype}, {arguments.threads} threads of each "
            f"engine, prompts of {arguments.prompt_tokens} tokens, which take {1e3 * figures.first_token_s:.0f} ms to "
            f"their first token. Reading a ledger took {1e3 * reading[0]:.1f} ms (p99 {1e3 * reading[1]:.1f}). "
            f"Repeated runs: {figures.repeated}.",
            "",
            *rows(figures),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.failure_timing", description="How soon blocks are free again after a failure."
    )
    parser.add_argument("--model", default="", help="model folder (default: the embedded model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default 1)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="default 2048")
    parser.add_argument(
        "--chunk",
        type=int,
        default=256,
        help="tokens of a prefill step, after each of which the ledger is told (default 256)",
    )
    parser.add_argument("--runs", type=int, default=200, help="of cancel and deadline each (default 200)")
    parser.add_argument("--kills", type=int, default=200, help="of each process (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write every figure there")
    arguments = parser.parse_args(argv)
    if min(arguments.runs, arguments.kills) < 0 or min(arguments.prompt_tokens, arguments.threads) < 1:
        parser.error("--runs and --kills must be 0 or more, --prompt-tokens and --threads 1 or more")
    found = circumstances()
    try:
        if not arguments.model:
            from cli.model_prepare import prepare_model

            arguments.model = str(prepare_model(None, None, progress=False))
        figures = measure(arguments, lambda text: print(text, file=sys.stderr, flush=True))
    except (MeasurementFailed, LaunchError, NotReady, grpc.RpcError) as error:
        print(f"bench.failure_timing: {error}", file=sys.stderr)
        return 1
    print(page(figures, found, arguments))
    freed = [
        {"blow": blow.what, "while": blow.when, "server": server, "milliseconds": [1e3 * value for value in seconds]}
        for (blow, server), seconds in figures.freed.items()
    ]
    save(arguments.json, found, {"freed": freed, "first_token_ms": 1e3 * figures.first_token_s})
    return 0


if __name__ == "__main__":
    # Told to stop, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
