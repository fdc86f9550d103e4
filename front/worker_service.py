"""The Worker service: what a server is, how it is, what its prefix cache holds, and how to drain it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from engine.messages import EngineReady
from front.drain import Drain, DrainState
from front.engine_link import EngineLink, EngineState
from front.kv_index import KvIndex
from front.reception import Reception
from front.settings import FrontSettings
from front.status_board import StatusBoard
from front.validation import out_of_range
from front.wire import kv_group, ledger_counts, rank_parts
from protos import worker_pb2, worker_pb2_grpc
from rpc.errors import BatonError, ErrorCode
from rpc.server import join_address
from rpc.version import PROTOCOL_VERSION, version

MAX_INTERVAL_S = 60.0

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class WorkerFacts:
    """What the service says about its server beside what the engine says."""

    role: int  # worker_pb2.ROLE_PREFILL or ROLE_DECODE
    settings: FrontSettings
    allows_local_prefill: bool
    http_address: Callable[[], str]

    def cache_store_addresses(self, ready: EngineReady) -> list[str]:
        """host:port of each rank's cache store as other hosts reach it, in order."""
        ports = [int(address.rpartition(":")[2]) for address in ready.cache_store_addresses]
        return [join_address(self.settings.advertised_host, port) for port in ports]


def worker_info(facts: WorkerFacts, ready: EngineReady) -> worker_pb2.WorkerInfo:
    """Facts of a server whose engine is up."""
    return worker_pb2.WorkerInfo(
        role=facts.role,  # type: ignore[arg-type]  # enum values are plain ints at run time
        engine_id=ready.engine_id,
        version=version(),
        protocol_version=PROTOCOL_VERSION,
        served_model_names=facts.settings.served_names,
        model_fingerprint=ready.model_fingerprint,
        dtype=ready.dtype,
        kv_dtype=ready.kv_cache_dtype,
        groups=[kv_group(group) for group in ready.groups],
        tp_size=facts.settings.tensor_parallel_size,
        cache_store_addresses=facts.cache_store_addresses(ready),
        transports=ready.transports,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=ready.eos_token_ids,
        max_num_seqs=facts.settings.max_num_seqs,
        max_num_batched_tokens=facts.settings.max_num_batched_tokens,
        num_kv_blocks=ready.num_blocks,
        allows_local_prefill=facts.allows_local_prefill,
        prefill_cuda_graph_init=ready.prefill_cuda_graph_init,
        attention_backend=ready.attention_backend,
        keeps_to_grammars=ready.grammars,
        http_address=facts.http_address(),
    )


def fill_status(
    status: worker_pb2.WorkerStatus,
    engine: EngineLink,
    drain: DrainState,
    reasons: list[str],
) -> None:
    """State, reasons and counts of a server, as they are now."""
    if engine.state is EngineState.STARTING:
        status.state = worker_pb2.WORKER_STATE_STARTING
    elif engine.state is EngineState.DEAD:
        status.state = worker_pb2.WORKER_STATE_UNHEALTHY
    elif drain is not DrainState.SERVING:
        status.state = worker_pb2.WORKER_STATE_DRAINING
    else:
        status.state = worker_pb2.WORKER_STATE_UNHEALTHY if reasons else worker_pb2.WORKER_STATE_READY
    status.reasons.extend(reasons)
    status.engine_id = engine.engine_id
    stats = engine.stats
    status.running, status.waiting, status.loading = stats.running, stats.waiting, stats.loading
    for part in rank_parts(stats):
        status.ledgers.extend(ledger_counts(part.rank, ledger) for ledger in stats.ledgers)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        *,
        facts: WorkerFacts,
        engine: EngineLink,
        reception: Reception,
        drain: Drain,
        board: StatusBoard,
        kv_index: KvIndex,
    ) -> None:
        self._facts = facts
        self._engine = engine
        self._reception = reception
        self._drain = drain
        self._board = board
        self._kv_index = kv_index

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> worker_pb2.WorkerInfo:
        ready, _ = self._engine.require()
        return worker_info(self._facts, ready)

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Context) -> worker_pb2.WorkerStatus:
        return self._board.status()

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        interval_s = request.interval_seconds if request.HasField("interval_seconds") else 1.0
        if not (0 < interval_s <= MAX_INTERVAL_S and math.isfinite(interval_s)):
            raise out_of_range("interval_seconds", interval_s, f"in (0, {MAX_INTERVAL_S:g}]")
        async for status in self._board.watch(interval_s):
            yield status

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.KvEventBatch]:
        ready, _ = self._engine.require()
        sequence = 0
        async for events in self._kv_index.subscribe():
            sequence += 1
            yield worker_pb2.KvEventBatch(sequence=sequence, engine_id=ready.engine_id, events=events)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        self._drain.begin()
        return worker_pb2.DrainResponse(remaining=self._reception.remaining())

    async def FlushCache(
        self, request: worker_pb2.FlushCacheRequest, context: Context
    ) -> worker_pb2.FlushCacheResponse:
        self._engine.require()
        self._engine.client.flush_cache()
        return worker_pb2.FlushCacheResponse()

    async def StartProfile(
        self, request: worker_pb2.StartProfileRequest, context: Context
    ) -> worker_pb2.StartProfileResponse:
        self._require_profiling()
        await self._engine.client.profile(start=True)
        return worker_pb2.StartProfileResponse(max_seconds=self._facts.settings.profile_max_seconds)

    async def StopProfile(
        self, request: worker_pb2.StopProfileRequest, context: Context
    ) -> worker_pb2.StopProfileResponse:
        self._require_profiling()
        news = await self._engine.client.profile(start=False)
        return worker_pb2.StopProfileResponse(
            path=news.path, seconds=news.seconds, size_bytes=news.size_bytes, ended_by_limit=news.by_limit
        )

    def _require_profiling(self) -> None:
        if not self._facts.settings.enable_profiling:
            raise BatonError(
                ErrorCode.INVALID_PARAMS, "profiles are switched off; start the server with --enable-profiling"
            )
        self._engine.require()
