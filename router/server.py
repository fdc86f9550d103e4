"""The router process: its listening ports, its servers, and how all of it ends.

Order of a start: the servers are watched first, then the ports listen, then the one line of readiness is printed; that
some server can serve is another matter (`/ready`). Ends: a drain after SIGTERM (status 0), a second signal (143, 130),
a start that fails (one line, 1).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from typing import Any

from protos import generation_pb2_grpc
from router.admission import Admission
from router.attempt import AttemptLimits
from router.choice import Chooser
from router.failover import FailoverSettings
from router.fan_out import flush_caches, start_profiles, stop_profiles
from router.grammar.admission import GrammarAdmission
from router.grpc_service import SERVICE, GenerationService, GrpcServices, account_for_refused
from router.http.app import build_app
from router.http.services import HttpServices
from router.open_requests import OpenRequests
from router.orchestrator import Orchestrator, OrchestratorSettings
from router.pairing import ROLES
from router.prefix.feed import PrefixFeed
from router.registry import HealthSettings, WorkerRegistry
from router.settings import RouterSettings
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.tools.formats import FORMATS
from router.validation import RequestValidator
from rpc.channels import ChannelPool
from rpc.errors import BatonError, ErrorCode
from rpc.http_server import HttpServer
from rpc.http_side import SideCallbacks, SideServer
from rpc.lifecycle import DRAINING, SERVING, Lifecycle, OpenWork, settle, watch_loop_lag
from rpc.logs import log_stats, setup_logging
from rpc.metrics import Registry
from rpc.server import GrpcServer, join_address
from rpc.version import revision, version

RPC_STOP_S = 1.0
HTTP_STOP_S = 1.0
# What a second signal leaves for each step; the process is ended after 2 s whatever happens.
FAST_STOP_S = 0.3
# How long requests that were ended at the drain's time limit have to tell their clients.
ABORT_RESERVE_S = 1.0
HEALTH_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class RouterServer:
    """The router process; `run` is its whole life."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.metrics = Registry.for_process("router", counting=not settings.disable_metrics)
        self.metrics.set_build_info(version(), revision())
        self.lifecycle = Lifecycle()
        self.access_log = settings.open_access_log("router", self.log_dropped)
        self.tracer = settings.open_tracer("router")
        self.pool = ChannelPool(on_evict=self._evicted)
        self.registry = WorkerRegistry(
            self.pool,
            self.metrics,
            health=HealthSettings(
                settings.health_check_interval_secs,
                settings.health_check_timeout_secs,
                settings.health_failure_threshold,
                settings.health_success_threshold,
            ),
            breaker=settings.breaker,
        )
        for role, addresses in zip(ROLES, (settings.prefill, settings.decode), strict=True):
            for address in addresses:
                self.registry.add(role, address)
        self.chooser = Chooser(
            self.registry,
            self.metrics,
            prefill_policy=settings.prefill_policy or settings.policy,
            decode_policy=settings.decode_policy or settings.policy,
            disagg_min_prompt_tokens=settings.disagg_min_prompt_tokens,
            allow_pins=settings.allow_pins,
            tuning=settings.tuning,
            index_entries=settings.prefix_index_entries,
        )
        self.feed = PrefixFeed(self.registry, self.pool, self.metrics, self.chooser.index, self.chooser.index_roles)
        self.work = OpenWork()
        self.open_requests = OpenRequests(
            self.metrics,
            request_timeout_s=settings.request_timeout_secs,
            served_names=lambda: self.orchestrator.model().served_names,
            access_log=self.access_log,
            tracer=self.tracer,
            work=self.work,
        )
        self.admission = Admission(
            settings.max_concurrent_requests,
            queue_size=settings.queue_size,
            timeout_s=settings.queue_timeout_secs,
            on_depth=lambda depth: self.metrics.set("baton_router_queue_depth", depth),
        )
        self.orchestrator = Orchestrator(
            self.registry,
            self.chooser,
            self.pool,
            self.open_requests,
            self.metrics,
            OrchestratorSettings(
                root=settings.model,
                served_names=tuple(settings.served_model_name),
                failover=FailoverSettings(
                    max_retries=settings.retry_max_retries,
                    migration_limit=settings.migration_limit,
                    backoff=settings.backoff,
                ),
                limits=AttemptLimits(
                    max_rpc_s=settings.max_rpc_timeout_s or None,
                    reserve_s=settings.reserve_timeout_secs,
                    inactivity_s=settings.stream_inactivity_timeout_secs,
                    silence_s=settings.health_check_timeout_secs,
                ),
                retry_budget_ratio=settings.retry_budget_ratio,
            ),
            admission=self.admission,
        )
        try:
            tokenizer = Tokenizer.load(settings.model_folder)
            template = ChatTemplate.load(settings.model_folder, tokenizer.special_tokens)
        except BatonError as error:
            raise SystemExit(f"router: error: {error.message}") from None
        self.tokenizer = tokenizer
        self.grammars = GrammarAdmission(settings.grammars, self.metrics)
        validator = RequestValidator(
            tokenizer,
            template,
            self.orchestrator.model,
            grammars=self.grammars,
            tool_format=FORMATS.get(settings.tool_call_parser),
            log_content=settings.access_log_content,
            seed=settings.seed,
        )
        api_keys = (settings.api_key,) if settings.api_key else ()
        self.grpc = GrpcServer(
            self.metrics,
            max_rpc_s=settings.max_rpc_timeout_s,
            on_refused=lambda call: account_for_refused(call, self.open_requests, self.access_log),
        )
        service = GenerationService(
            GrpcServices(
                serving=self.orchestrator,
                open_requests=self.open_requests,
                validator=validator,
                api_keys=api_keys,
                created=self.created,
            )
        )
        self.grpc.add_service(generation_pb2_grpc.add_GenerationServicer_to_server, service, SERVICE)
        app = build_app(
            HttpServices(
                serving=self.orchestrator,
                open_requests=self.open_requests,
                validator=validator,
                workers=self.registry,
                metrics=self.metrics,
                flush_cache=lambda: flush_caches(self.registry),
                start_profile=(lambda: start_profiles(self.registry)) if settings.enable_profiling else None,
                stop_profile=(lambda: stop_profiles(self.registry)) if settings.enable_profiling else None,
                load=self.load,
                server_info=self.server_info,
                before_scrape=self._before_scrape,
                api_keys=api_keys,
                max_payload_bytes=int(settings.max_payload_size),
                created=self.created,
            )
        )
        self.http = HttpServer(app)
        # Figures and health on a port of their own, beside those of the API's port.
        self.side = SideServer(self.metrics, SideCallbacks(ready=self._not_ready, before_scrape=self._before_scrape))

    # -- what it says about itself

    def load(self) -> dict[str, Any]:
        return {
            "inflight": len(self.open_requests),
            "queued": self.admission.depth,
            "workers": [
                {"role": w.role, "address": w.address, "inflight": w.inflight, "load": w.load}
                for w in self.registry.workers()
            ],
        }

    def server_info(self) -> dict[str, Any]:
        return {
            "role": "router",
            "version": version(),
            "pid": os.getpid(),
            "created": self.created,
            "http": self.http_address(),
            "grpc": self.grpc_address(),
            "settings": self.settings.public_dict(),
            "access_log": self.access_log.get_stats(),
            "log": log_stats(),
            "channels": self.pool.statistics(),
            "grammars": self.grammars.statistics(),
        }

    def http_address(self) -> str:
        return join_address(self.settings.advertised_host, self.http.port)

    def grpc_address(self) -> str:
        return join_address(self.settings.advertised_host, self.grpc.port)

    def _not_ready(self) -> list[str]:
        ready, reasons = self.orchestrator.ready()
        return [] if ready else list(reasons)

    def _before_scrape(self) -> None:
        self.metrics.set("baton_ready", 0 if self._not_ready() else 1)
        remaining = self.work.count if self.lifecycle.stopping.is_set() else 0
        self.metrics.set("baton_drain_remaining_requests", remaining)
        self.feed.show()

    def log_dropped(self) -> None:
        """A log line had no room in its writer's queue. May be called from any thread."""
        self.metrics.inc("baton_log_dropped_total")

    def _evicted(self, address: str, state: str) -> None:
        for worker in self.registry.workers():
            if worker.address == address:
                self.metrics.inc("baton_channel_evictions_total", peer_role=worker.role, state=state)

    # -- life

    async def run(self) -> int:
        """Serves until told to stop; returns the exit status."""
        self.lifecycle.install()
        try:
            async with self.registry, self.feed, self.orchestrator, self.grammars:
                background = [
                    asyncio.create_task(watch_loop_lag(self.metrics)),
                    asyncio.create_task(self._publish_health()),
                ]
                try:
                    await self._serve()
                finally:
                    for task in background:
                        task.cancel()
                    await asyncio.gather(*background, return_exceptions=True)
                    await self._stop_listening()
        finally:
            await self.pool.close()
            self.tokenizer.close()
            if self.tracer is not None:
                self.tracer.close(self.lifecycle.time_left(self.settings.drain_timeout_secs))
            self.access_log.close(self.lifecycle.time_left(self.settings.drain_timeout_secs))
            self.lifecycle.uninstall()
        return self.lifecycle.exit_code

    async def _serve(self) -> None:
        settings = self.settings
        await self.grpc.start(settings.host, settings.grpc_port, flag="--grpc-port")
        await self.http.start(settings.host, settings.port)
        if settings.metrics_port is not None:
            await self.side.start(settings.host, settings.metrics_port)
        settle()
        line = {
            "event": "ready",
            "role": "router",
            "http": self.http_address(),
            "grpc": self.grpc_address(),
            "pid": os.getpid(),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        _log.info("listening", extra={"http": self.http_address(), "grpc": self.grpc_address()})
        self.metrics.set("baton_drain_state", SERVING)
        await self.lifecycle.stopping.wait()
        await self._drain()

    async def _drain(self) -> None:
        """After the first signal: until nothing is open, the time limit, or a second signal."""
        settings = self.settings
        draining = BatonError(
            ErrorCode.SERVER_DRAINING, "the router is shutting down; send the request to another one", retry_after_s=1.0
        )

        async def begin() -> None:
            self.orchestrator.drain()
            await self.grpc.set_serving(False)

        async def refuse() -> None:
            self.open_requests.refuse_new(draining)

        async def end_all() -> None:
            self.open_requests.refuse_new(draining)
            self.open_requests.stop_all(draining)
            limit_s = FAST_STOP_S if self.lifecycle.fast.is_set() else ABORT_RESERVE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self.work.wait_idle()

        self.metrics.set("baton_drain_state", DRAINING)
        reserve_s = min(ABORT_RESERVE_S, settings.drain_timeout_secs / 10)
        await self.lifecycle.drain(
            self.work,
            grace_s=settings.drain_grace_secs,
            timeout_s=settings.drain_timeout_secs - reserve_s,
            begin=begin,
            refuse=refuse,
            abort=end_all,
            registry=self.metrics,
        )

    async def _stop_listening(self) -> None:
        fast = self.lifecycle.fast.is_set()
        await asyncio.gather(
            self.http.stop(FAST_STOP_S if fast else HTTP_STOP_S),
            self.grpc.stop(FAST_STOP_S if fast else RPC_STOP_S),
            self.side.stop(FAST_STOP_S),
        )

    async def _publish_health(self) -> None:
        """Keeps `grpc.health.v1` equal to readiness: at once after a server's change of state."""
        serving = False
        while True:
            ready = self.orchestrator.ready()[0]
            if ready is not serving:
                serving = ready
                await self.grpc.set_serving(serving)
                self.metrics.set("baton_ready", int(serving))
            await self.registry.wait_change(HEALTH_INTERVAL_S)


async def serve(settings: RouterSettings) -> int:
    """The main coroutine of the router process."""
    server = RouterServer(settings)
    setup_logging("router", settings.log_level, settings.log_format, on_drop=server.log_dropped)
    return await server.run()
