"""One prefill or decode server: its listening ports, its engine, and how all of it ends.

Order of a start: ports first (health answers NOT_SERVING, Worker answers ENGINE_DEAD), then the engine; with the engine
up the server is ready and prints its one line. Ends: a drain after SIGTERM (status 0), a second signal (143, 130), the
engine's death (1), a start that fails (one line, 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import grpc.aio

from engine.client import EngineClient
from engine.config import EngineConfig
from front.drain import Drain, DrainState
from front.engine_feed import EngineFeed
from front.engine_link import EngineLink, EngineState
from front.kv_index import KvIndex
from front.reception import Reception
from front.settings import FrontSettings
from front.status_board import StatusBoard
from front.transfer_health import OWN_FAILURES, READERS_FAILURES, TransferHealth
from front.wire import ledger_pages
from front.worker_service import WorkerFacts, WorkerService, fill_status
from protos import worker_pb2, worker_pb2_grpc
from rpc.errors import BatonError, ErrorCode
from rpc.http_side import SideCallbacks, SideServer
from rpc.lifecycle import Lifecycle, settle, watch_loop_lag
from rpc.logs import log_stats, setup_logging
from rpc.metrics import Registry
from rpc.server import GrpcServer, RefusedCall, join_address
from rpc.version import revision, version

WORKER_SERVICE = "baton.v1.Worker"
ENGINE_STOP_S = 2.0
RPC_STOP_S = 1.0
HEALTH_INTERVAL_S = 1.0
# What a second signal leaves for each step; the process is ended after 2 s whatever happens.
FAST_RPC_STOP_S = 0.5
FAST_ENGINE_STOP_S = 0.0
# The part of the drain's time limit that is kept for ending what is left.
ABORT_RESERVE_S = 1.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedRole:
    """What makes the two kinds of servers differ."""

    name: Literal["prefill", "decode"]
    wire_role: int  # worker_pb2.ROLE_…
    service_name: str
    add_service: Callable[[Any, grpc.aio.Server], None]
    make_service: Callable[[Reception], object]
    allows_local_prefill: bool


class FrontServer:
    """The front process of one server; `run` is its whole life."""

    def __init__(self, role: ServedRole, settings: FrontSettings, config: EngineConfig) -> None:
        self.role = role
        self.settings = settings
        self.metrics = Registry.for_process(
            role.name,
            colocated=role.allows_local_prefill,
            tensor_parallel=settings.tensor_parallel_size > 1,
            counting=not settings.disable_metrics,
        )
        self.engine = EngineLink(EngineClient(config), settings.served_names)
        self.lifecycle = Lifecycle()
        self.access_log = settings.open_access_log(role.name, self.log_dropped)
        self.tracer = settings.open_tracer(role.name)
        self.reception = Reception(
            role=role.name,
            engine=self.engine,
            metrics=self.metrics,
            drain=lambda: self.drain,
            access_log=self._write_access_line,
            arrival_log=self._write_arrival if self.access_log.arrivals else None,
            tracer=self.tracer,
            address=self.grpc_address,
            stop_wait_s=settings.stop_stream_wait_timeout_ms / 1000,
        )
        reserve_s = min(ABORT_RESERVE_S, settings.drain_timeout_secs / 10)
        self.drain = Drain(
            grace_s=min(settings.drain_grace_secs, settings.drain_timeout_secs - reserve_s),
            timeout_s=settings.drain_timeout_secs - reserve_s,
            remaining=self.reception.remaining,
            changed=self._state_changed,
        )
        self.kv_index = KvIndex()
        self.transfers = TransferHealth(own=OWN_FAILURES if role.name == "prefill" else READERS_FAILURES)
        self.board = StatusBoard(self._fill_status)
        self.feed = EngineFeed(
            tp_size=settings.tensor_parallel_size,
            model_name=settings.served_names[0],
            metrics=self.metrics,
            reception=self.reception,
            kv_index=self.kv_index,
            transfers=self.transfers,
        )
        self.engine.client.on_step = self.feed.on_step
        self.grpc = GrpcServer(self.metrics, max_rpc_s=settings.max_rpc_timeout_s, on_refused=self._write_refused_call)
        self.side = SideServer(
            self.metrics,
            SideCallbacks(
                ready=self.reasons,
                before_scrape=self._before_scrape,
                server_info=self._server_info,
                ledger=self._ledger_page,
                requests=self.reception.table.page,
            ),
        )
        self._changed = asyncio.Event()
        self.facts = WorkerFacts(
            role=role.wire_role,
            settings=settings,
            allows_local_prefill=role.allows_local_prefill,
            http_address=self.http_address,
        )

    # -- what it says about itself ------------------------------------------------------------------------------

    def reasons(self) -> list[str]:
        """Why the server is not ready; none means ready."""
        found = []
        if self.engine.state is EngineState.STARTING:
            found.append("the engine is loading the model")
        elif self.engine.state is EngineState.DEAD:
            found.append("the engine is dead")
        elif self.engine.client.silent_s > (limit_s := self.settings.tp_broadcast_timeout_seconds):
            found.append(f"the engine has said nothing for more than {limit_s:g} s")
        if self.drain.state is not DrainState.SERVING:
            found.append("draining")
        if self.transfers.failing:
            found.append("transfers of KV keep failing")
        return found

    def grpc_address(self) -> str:
        return join_address(self.settings.advertised_host, self.grpc.port)

    def http_address(self) -> str:
        """Empty when the HTTP side is switched off."""
        return join_address(self.settings.advertised_host, self.side.port) if self.side.port else ""

    def _fill_status(self, status: worker_pb2.WorkerStatus) -> None:
        fill_status(status, self.engine, self.drain.state, self.reasons())

    def _before_scrape(self) -> None:
        metrics = self.metrics
        metrics.set("baton_ready", 0 if self.reasons() else 1)
        metrics.set("baton_drain_state", self.drain.number)
        draining = self.drain.state is not DrainState.SERVING
        metrics.set("baton_drain_remaining_requests", self.reception.remaining() if draining else 0)
        metrics.set("baton_tombstones", len(self.reception.table.tombstones))
        self.feed.book_stats(self.engine.stats)

    def _server_info(self) -> dict[str, Any]:
        ready = self.engine.ready
        info: dict[str, Any] = {
            "role": self.role.name,
            "version": version(),
            "pid": os.getpid(),
            "engine_pid": self.engine.client.pid,
            "engine_pids": self.engine.client.pids,
            "engine_state": self.engine.state.value,
            "grpc": self.grpc_address(),
            "http": self.http_address(),
            "settings": self.settings.public_dict(),
            "access_log": self.access_log.get_stats(),
            "log": log_stats(),
        }
        if ready is not None:
            info["engine"] = {
                "engine_id": ready.engine_id,
                "model_fingerprint": ready.model_fingerprint,
                "dtype": ready.dtype,
                "kv_cache_dtype": ready.kv_cache_dtype,
                "max_model_len": ready.max_model_len,
                "vocab_size": ready.vocab_size,
                "num_blocks": ready.num_blocks,
                "tp_size": self.engine.client.size,
                "cache_store": self.facts.cache_store_addresses(ready),
                "transports": ready.transports,
                "attention_backend": ready.attention_backend,
                "prefill_cuda_graph_init": ready.prefill_cuda_graph_init,
                "torch": ready.torch_version,
                "load_seconds": round(ready.load_seconds, 3),
                "ranks": [
                    {
                        "rank": rank.rank,
                        "pid": rank.pid,
                        "cache_store": address,
                        "device": rank.device,
                        "load_seconds": round(rank.load_seconds, 3),
                        "read_bytes": rank.read_bytes,
                    }
                    for rank, address in zip(ready.ranks, self.facts.cache_store_addresses(ready), strict=True)
                ],
            }
        return info

    def _ledger_page(self) -> dict[str, Any]:
        return {
            "role": self.role.name,
            "engine_id": self.engine.engine_id,
            "ranks": ledger_pages(self.engine.stats),
        }

    def _write_access_line(self, line: Mapping[str, object]) -> None:
        fields: dict[str, Any] = {name: value for name, value in line.items() if name not in ("code", "code_name")}
        self.access_log.record(code=str(line["code_name"]), servers={self.role.name: self.grpc_address()}, **fields)

    def _write_refused_call(self, call: RefusedCall) -> None:
        self.access_log.record(
            request_id=call.request_id,
            code=call.error.code.name,
            private=call.private,
            error=call.error,
            method=call.method,
            servers={self.role.name: self.grpc_address()},
        )

    def _write_arrival(self, line: Mapping[str, Any]) -> None:
        self.access_log.arrived(servers={self.role.name: self.grpc_address()}, **line)

    def log_dropped(self) -> None:
        """A log line had no room in its writer's queue. May be called from any thread."""
        self.metrics.inc("baton_log_dropped_total")

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serves until told to stop, or until the engine is gone; returns the exit status."""
        self.lifecycle.install()
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(watch_loop_lag(self.metrics)),
                    group.create_task(self._publish_health()),
                ]
                try:
                    return await self._serve()
                finally:
                    for task in background:
                        task.cancel()
        finally:
            await self._close()

    async def _serve(self) -> int:
        settings = self.settings
        self.grpc.add_service(self.role.add_service, self.role.make_service(self.reception), self.role.service_name)
        worker = WorkerService(
            facts=self.facts,
            engine=self.engine,
            reception=self.reception,
            drain=self.drain,
            board=self.board,
            kv_index=self.kv_index,
        )
        self.grpc.add_service(worker_pb2_grpc.add_WorkerServicer_to_server, worker, WORKER_SERVICE)
        await self.grpc.start(settings.host, settings.port)
        if settings.metrics_port is not None:
            await self.side.start(settings.host, settings.metrics_port)
        _log.info("listening", extra={"grpc": self.grpc_address(), "http": self.http_address()})
        if not await self._start_engine():
            return self.lifecycle.exit_code
        settle()
        self._print_ready()
        stopping, dead = self.lifecycle.stopping, self.engine.client.dead
        await _first_of(stopping, dead)
        if not dead.is_set():
            await self._drain()
        if dead.is_set():
            await self._answer_engine_death()
            return self.lifecycle.exit_code or 1
        return self.lifecycle.exit_code

    async def _start_engine(self) -> bool:
        """Brings the engine up; False when the process was told to stop meanwhile. Raises SystemExit with one line."""
        client = self.engine.client
        who = f"{self.role.name}_server: error"
        try:
            ready = await _unless(self.lifecycle.stopping, client.start(self.settings.engine_start_timeout_secs))
        except BatonError as error:
            raise SystemExit(f"{who}: {error.code.name}: {error.message}") from None
        if ready is None:
            return False
        settings = self.settings
        if settings.kv_cache_dtype not in ("auto", ready.kv_cache_dtype):
            raise SystemExit(
                f"{who}: --kv-cache-dtype {settings.kv_cache_dtype}: the KV cache of this model has the dtype "
                f"{ready.kv_cache_dtype}; use auto or that"
            )
        if settings.kv_transport not in ("auto", *ready.transports):
            raise SystemExit(
                f"{who}: --kv-transport {settings.kv_transport}: this server has {', '.join(ready.transports)}; "
                "use auto or one of these"
            )
        self.engine.came_up(ready)
        self.feed.came_up(ready)
        self.metrics.set_build_info(version(), revision(), torch=ready.torch_version, cuda=ready.cuda_version)
        self._state_changed()
        return True

    def _print_ready(self) -> None:
        ready = self.engine.ready
        assert ready is not None
        line = {
            "event": "ready",
            "role": self.role.name,
            "grpc": self.grpc_address(),
            "http": self.http_address(),
            "cache_store": self.facts.cache_store_addresses(ready),
            "engine_id": ready.engine_id,
            "pid": os.getpid(),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        _log.info("ready", extra={"engine_id": ready.engine_id, "load_seconds": round(ready.load_seconds, 3)})

    # -- ends ---------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """After the first signal: until nothing is open, the time limit, a second signal, or the engine's death."""
        self.drain.begin()
        async with asyncio.TaskGroup() as group:
            drained = group.create_task(self.drain.wait())
            others = [
                group.create_task(self.lifecycle.fast.wait()),
                group.create_task(self.engine.client.dead.wait()),
            ]
            await asyncio.wait({drained, *others}, return_when=asyncio.FIRST_COMPLETED)
            for task in (drained, *others):
                task.cancel()
        if self.engine.client.dead.is_set():
            return
        if self.lifecycle.fast.is_set():
            self.reception.abort_all(_draining, "drain", 0.0)
        elif drained.cancelled() or not drained.result():
            _log.warning("drain: time is up", extra={"remaining": self.reception.remaining()})
            self.reception.abort_all(_draining, "drain", ABORT_RESERVE_S / 5)
            await self._wait_until_empty(ABORT_RESERVE_S / 2)
        else:
            _log.info("drained")

    async def _answer_engine_death(self) -> None:
        """Every open stream has failed already; this gives their handlers time to answer."""
        death = self.engine.client.death
        assert death is not None
        self.engine.died(
            BatonError(ErrorCode.ENGINE_DEAD, death.message, metadata={"cause": death.code.name, **death.metadata})
        )
        if not self.lifecycle.fast.is_set():
            _log.error("engine died: %s", death.message, extra={"code": death.code.name})
        self.feed.died()
        self.reception.engine_died()
        self._state_changed()
        await self._wait_until_empty(RPC_STOP_S)

    async def _wait_until_empty(self, limit_s: float) -> None:
        """Waits for the open RPCs to leave, so that each takes its answer with it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.reception.remaining():
                    await self.drain.request_gone()

    async def _close(self) -> None:
        """Ends everything that was started; also after a start that failed half-way."""
        fast = self.lifecycle.fast.is_set()
        error = self.engine.refusal() if self.engine.state is EngineState.DEAD else _draining()
        self.board.close(error)
        self.kv_index.close(error)
        await self.grpc.stop(FAST_RPC_STOP_S if fast else RPC_STOP_S)
        await self.engine.client.stop(FAST_ENGINE_STOP_S if fast else ENGINE_STOP_S)
        await self.side.stop(0.2)
        if self.tracer is not None:
            self.tracer.close(self.lifecycle.time_left(self.settings.drain_timeout_secs))
        self.access_log.close(self.lifecycle.time_left(self.settings.drain_timeout_secs))
        self.lifecycle.uninstall()

    # -- health -------------------------------------------------------------------------------------------------

    def _state_changed(self) -> None:
        self._changed.set()
        self.board.notify()

    async def _publish_health(self) -> None:
        """Keeps `grpc.health.v1` and the pushed status equal to readiness: at once after each change of state, and
        within HEALTH_INTERVAL_S for what changes with time alone."""
        serving = False
        while True:
            self._changed.clear()
            ready = not self.reasons()
            if ready is not serving:
                serving = ready
                await self.grpc.set_serving(serving)
                self.board.notify()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await self._changed.wait()


def _draining() -> BatonError:
    return BatonError(
        ErrorCode.SERVER_DRAINING, "the server is shutting down; send the request to another one", retry_after_s=1.0
    )


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the event came first, and then `work` was cancelled and has ended."""
    task, stop = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


async def _first_of(*events: asyncio.Event) -> None:
    """Until one of the events is set."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(event.wait()) for event in events]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def serve(role: ServedRole, settings: FrontSettings, config: EngineConfig) -> int:
    """The main coroutine of a server process. Raises SystemExit with one line when settings do not go together."""
    try:
        config.check()
    except BatonError as error:
        raise SystemExit(f"{role.name}_server: error: {error.message}") from None
    handler = setup_logging(role.name, settings.log_level, settings.log_format)
    server = FrontServer(role, settings, config)
    handler.on_drop = server.log_dropped
    return await server.run()
