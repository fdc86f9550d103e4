"""The processes of a measurement: one that has computed prompts, and one that loads them for each way of loading.

Each is driven over a pipe and holds one agent, as an engine rank does. The decode process of a transport's first way
also does the transport's bare transfers, into the same pool; those of NIXL have two processes and two pools of their
own, since its agents use a processor all the time, and stand still while something else is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from bench.kv_transfer.baselines import BareNixl, Copier, SocketClient, SocketServer, StreamClient, serve_stream
from bench.kv_transfer.memory import TAG, Pool, Shape, block_ids
from cache_store.agent import AgentIdentity, AgentSettings, CacheStoreAgent, KvSourceRef, LoadDone, LoadFailed
from cache_store.transports import NIXL
from protos import common_pb2

WAIT_S = 120.0
START_S = 60.0
WARM_S = 10.0


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Way:
    """A transport with a checksum mode, which a decode process offers alone."""

    transport: str
    checksum: str

    @property
    def name(self) -> str:
        return f"{self.transport} {self.checksum}" if self.transport in ("grpc", "tcp") else self.transport


class _Agent:
    def __init__(self, engine_id: str, shape: Shape, pool: Pool, settings: AgentSettings) -> None:
        self._woken = threading.Event()
        self.agent = CacheStoreAgent(
            AgentIdentity(engine_id, "bench", shape.layout.dtype, (shape.layout,)),
            pool.kv,
            settings,
            wake=self._woken.set,
        )
        self.address = self.agent.start("127.0.0.1", 0)

    def events(self, count: int) -> list[Any]:
        found: list[Any] = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < count:
            self._woken.clear()
            found += self.agent.poll_events()
            if len(found) < count and not self._woken.wait(max(0.0, deadline - time.monotonic())):
                raise SystemExit("no event in time")
        return found


def _prefill(shape: Shape, threads: int, chunk_bytes: int | None, pipe: Connection) -> None:
    pool = Pool(shape, seed=1)
    # The stricter of two modes of the checksum decides.
    settings = AgentSettings(checksum="off", lease_seconds=600, threads=threads, chunk_bytes=chunk_bytes)
    side = _Agent("prefill", shape, pool, settings)
    server = SocketServer(pool, shape)
    end = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    ports: list[int] = []
    started = threading.Event()

    def ready(port: int) -> None:
        ports.append(port)
        started.set()

    async def stream() -> None:
        loops.append(asyncio.get_running_loop())
        await serve_stream(pool, shape, ready, end)

    thread = threading.Thread(target=lambda: asyncio.run(stream()), daemon=True)
    thread.start()
    if not started.wait(START_S):
        raise SystemExit("the bare stream's server does not start")
    pipe.send(
        {
            "address": side.address,
            "socket": server.port,
            "stream": ports[0],
            "memory": pool.kv.share().SerializeToString(),
        }
    )
    result = common_pb2.PrefillResult(first_token=common_pb2.TokenOutput(index=0, token_id=1), cached_tokens=0)
    while (command := pipe.recv()) is not None:
        what, argument = command
        if what == "socket":
            server.send(argument)
        elif what == "stage":
            for key, ids in argument:
                tokens = len(ids) * shape.block_size
                side.agent.admit(key, 1, tokens, {TAG: ids}, ready_tokens=tokens)
                side.agent.computed(key, result, hold=True)
        elif what == "digest":
            pipe.send(pool.digest(shape, argument))
            continue
        elif what == "ended":
            side.events(argument)
        side.agent.take_observations()
        pipe.send(_cpu_seconds())
    loops[0].call_soon_threadsafe(end.set)
    side.agent.close(5)
    pool.close()


class _Decode:
    def __init__(self, shape: Shape, way: Way, threads: int, chunk_bytes: int | None, offer: dict[str, Any]) -> None:
        self._shape, self._offer = shape, offer
        self._pool = Pool(shape, seed=1000)
        settings = AgentSettings(
            checksum=way.checksum,
            transport=way.transport,
            chunk_bytes=chunk_bytes,
            lease_seconds=600,
            threads=threads,
            connect_timeout_s=WARM_S,
        )
        self._way = way
        self._side = _Agent(f"decode-{way.name}", shape, self._pool, settings)
        self._bare: dict[str, Any] = {}

    def load(self, items: list[tuple[str, list[int]]]) -> dict[str, float]:
        """All at once: seconds from the first call to the last end, and of each by its own account."""
        shape, agent = self._shape, self._side.agent
        source = KvSourceRef("prefill", (self._offer["address"],), 1)
        began = time.perf_counter()
        for key, ids in items:
            agent.load(key, source, len(ids) * shape.block_size, {TAG: (0, ids)}, WAIT_S)
        events = self._side.events(len(items))
        seconds = time.perf_counter() - began
        for event in events:
            if isinstance(event, LoadFailed):
                raise SystemExit(f"{self._way.name}: load failed: {event.error} {event.error.metadata}")
            if not isinstance(event, LoadDone) or event.transport != self._way.transport:
                raise SystemExit(f"{self._way.name}: unexpected {event}")
        times = [dict(event.events) for event in events]
        first = min((each["layer_received:0"] - each["load_started"]) / 1e9 for each in times)
        agent.take_observations()
        return {"seconds": seconds, "load_s": sum(event.seconds for event in events) / len(events), "first_s": first}

    def bare(self, what: str, blocks: int, source: list[int], target: list[int]) -> dict[str, float]:
        client = self._bare.get(what)
        if what == "socket":
            client = client or SocketClient(self._pool, self._shape, self._offer["socket"])
            seconds = client.receive(blocks)
        elif what == "stream":
            client = client or StreamClient(self._pool, self._shape, self._offer["stream"])
            seconds = client.receive(blocks)
        else:
            client = client or Copier(self._pool, self._shape, self._offer["memory"])
            seconds = client.copy(source, target)
        self._bare[what] = client
        return {"seconds": seconds, "load_s": seconds, "first_s": 0.0}

    def serve(self, pipe: Connection) -> None:
        while (command := pipe.recv()) is not None:
            what, argument = command
            mine = _cpu_seconds()
            if what == "load":
                found = self.load(argument)
            elif what == "digest":
                pipe.send(self._pool.digest(self._shape, argument))
                continue
            else:
                found = self.bare(what, *argument)
            pipe.send({**found, "cpu_s": _cpu_seconds() - mine})
        if "stream" in self._bare:
            self._bare["stream"].close()
        self._side.agent.close(5)
        self._pool.close()


def _bare_nixl(shape: Shape, name: str, seed: int, pipe: Connection) -> None:
    pool = Pool(shape, seed)
    side = BareNixl.make(name, pool, shape)
    pipe.send(None if side is None else (side.metadata, side.addresses))
    while (command := pipe.recv()) is not None and side is not None:
        mine = _cpu_seconds()
        seconds = side.read(*command)
        pipe.send({"seconds": seconds, "load_s": seconds, "first_s": 0.0, "cpu_s": _cpu_seconds() - mine})
    os._exit(0)  # a regular end crashes in the library (tried: 1.5)


def _decode(
    shape: Shape, way: Way, threads: int, chunk_bytes: int | None, offer: dict[str, Any], pipe: Connection
) -> None:
    side = _Decode(shape, way, threads, chunk_bytes, offer)
    pipe.send("ready")
    side.serve(pipe)


class Processes:
    """All processes of one shape."""

    def __init__(self, shape: Shape, ways: list[Way], threads: int, chunk_bytes: int | None = None) -> None:
        self.shape = shape
        self._started: list[tuple[SpawnProcess, Connection]] = []
        self._resting: list[SpawnProcess] = []
        self._keys = 0
        try:
            self._prefill = self._start(_prefill, shape, threads, chunk_bytes)
            self.offer: dict[str, Any] = self._answer(self._prefill)
            self._decodes = {
                way.name: self._start(_decode, shape, way, threads, chunk_bytes, self.offer) for way in ways
            }
            for pipe in self._decodes.values():
                self._answer(pipe)
            if any(way.transport == NIXL for way in ways):
                self._start_bare_nixl()
        except BaseException:
            self.close()
            raise

    def _start(self, target: Callable[..., None], *arguments: object) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        self._started.append((process, ours))
        return ours

    def _start_bare_nixl(self) -> None:
        first = len(self._started)
        pipes = [
            self._start(_bare_nixl, self.shape, name, seed) for seed, name in enumerate(("prefill", "decode"), 2000)
        ]
        self._bare_nixl_offer, _ = map(self._answer, pipes)
        self._bare_nixl_pipe = pipes[1]
        self._resting = [process for process, _ in self._started[first:]]
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._resting:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # who needs its answer is told
                os.kill(process.pid, number)

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(WAIT_S):
            raise SystemExit("a process of the measurement does not answer")
        try:
            return pipe.recv()
        except EOFError:
            raise SystemExit("a process of the measurement has ended") from None

    def _ask(self, pipe: Connection, what: str, argument: object) -> Any:
        pipe.send((what, argument))
        return self._answer(pipe)

    def load(self, way: str, blocks: int, concurrency: int, scattered: bool) -> dict[str, float]:
        """`concurrency` loads at once, together of `blocks` blocks."""
        theirs, own = self._ids(blocks, scattered)
        share = blocks // concurrency
        keys = []
        for _ in range(concurrency):
            self._keys += 1
            keys.append(f"bench-{self._keys}#0.00000000")
        cuts = [slice(i * share, (i + 1) * share) for i in range(concurrency)]
        before = self._ask(self._prefill, "stage", [(key, theirs[cut]) for key, cut in zip(keys, cuts, strict=True)])
        found: dict[str, float] = self._ask(
            self._decodes[way], "load", [(key, own[cut]) for key, cut in zip(keys, cuts, strict=True)]
        )
        after = self._ask(self._prefill, "ended", concurrency)
        return {**found, "send_cpu_s": after - before}

    def bare(self, what: str, way: str, blocks: int, scattered: bool) -> dict[str, float]:
        """One of the baselines, into the pool of a way's process."""
        theirs, own = self._ids(blocks, scattered)
        if what == NIXL:
            self._signal(signal.SIGCONT)
            self._bare_nixl_pipe.send((*self._bare_nixl_offer, theirs, own))
            try:
                return {**self._answer(self._bare_nixl_pipe), "send_cpu_s": 0.0}
            finally:
                self._signal(signal.SIGSTOP)
        if what == "socket":
            self._prefill.send(("socket", blocks))
        found: dict[str, float] = self._ask(self._decodes[way], what, (blocks, theirs, own))
        if what == "socket":
            self._answer(self._prefill)
        return {**found, "send_cpu_s": 0.0}

    def _ids(self, blocks: int, scattered: bool) -> tuple[list[int], list[int]]:
        return block_ids(self.shape, blocks, scattered, 7), block_ids(self.shape, blocks, scattered, 8)

    def same(self, way: str, blocks: int, scattered: bool) -> bool:
        """Whether both pools have the same bytes after the last load of the way."""
        theirs, own = self._ids(blocks, scattered)
        return bool(self._ask(self._prefill, "digest", theirs) == self._ask(self._decodes[way], "digest", own))

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for process, pipe in self._started:
            with contextlib.suppress(BrokenPipeError, OSError):
                pipe.send(None)
            process.join(15)
            if process.is_alive():
                process.terminate()
