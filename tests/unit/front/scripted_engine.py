"""A server's front in this process: the real services over real gRPC, with an engine that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import grpc.aio

from decode_server.service import DecodeService
from engine.client import EngineClient, RequestStream
from engine.config import EngineConfig
from engine.messages import (
    AddRequest,
    EngineError,
    EngineReady,
    EngineStats,
    FinishReason,
    KvGroupInfo,
    PrefillInfo,
    RequestOutput,
    StagedEnd,
    TimelineEvent,
    TokenOutput,
)
from front.drain import Drain
from front.engine_link import EngineLink
from front.reception import Reception
from prefill_server.service import PrefillService
from protos import decode_pb2_grpc, prefill_pb2_grpc
from rpc.errors import BatonError, ErrorCode
from rpc.metrics import Registry
from rpc.server import GrpcServer
from tests.unit.front.wire_requests import MODEL, REQUEST_KEY

ENGINE_ID = "cd" * 16
LIMIT_S = 20.0  # for what is certain to come; no test waits for as long


def engine_ready() -> EngineReady:
    return EngineReady(
        engine_id=ENGINE_ID,
        rank=0,
        model_fingerprint="f" * 32,
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=[0],
        groups=[KvGroupInfo("full", 2, 2, 16, 16, "float32")],
        num_blocks=8,
        cache_store_address="127.0.0.1:1",
        transports=["grpc"],
        attention_backend="torch",
        prefill_cuda_graph_init="not_requested",
        torch_version="2",
        load_seconds=0.0,
        stats=EngineStats(),
    )


class ScriptedEngine(EngineClient):
    """An engine without a process: takes requests and aborts down, and says what the test makes it say."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(role="decode", model="m"))
        self.streams: dict[str, RequestStream] = {}
        self.adds: list[AddRequest] = []
        self.aborts: list[tuple[str, ErrorCode, str]] = []
        self.obeys_aborts = True
        self.had_failed: EngineError | None = None  # of what it aborts, before it hears of that
        self._news = asyncio.Event()

    def submit(self, request: AddRequest) -> RequestStream:
        if self.death is not None:
            raise self.death
        self.adds.append(request)
        stream = self.streams[request.request_key] = RequestStream(request.request_key)
        self._tell()
        return stream

    def abort(self, request_key: str, code: ErrorCode = ErrorCode.CANCELLED, source: str = "client") -> None:
        self.aborts.append((request_key, code, source))
        if self.obeys_aborts:
            error = self.had_failed or EngineError(int(code), "aborted", stage="compute")
            self.emit(RequestOutput(request_key, last=True, error=error, stages={"queue": 0.25}))
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for something that submit() or abort() brings."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await self._news.wait()

    def emit(self, output: RequestOutput) -> None:
        stream = self.streams.get(output.request_key)
        if stream is not None:
            stream._put(output)

    def die(self) -> None:
        self.death = BatonError(ErrorCode.ENGINE_DEAD, "the engine process was killed by signal 9")
        for stream in self.streams.values():
            stream._fail(self.death)
        self.dead.set()


class Front:
    """One server's services on a free port, and what a test looks at."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        *,
        allow_local_prefill: bool = True,
        max_rpc_s: float = 60.0,
        grace_s: float = 0.0,
        stop_wait_s: float = LIMIT_S,
        why_s: float = LIMIT_S,
    ) -> None:
        self.role = role
        self.engine = ScriptedEngine()
        self.metrics = Registry(role, colocated=True, process_metrics=False)
        self.link = EngineLink(self.engine, (MODEL,))
        self.link.came_up(engine_ready())
        self.access: list[dict[str, Any]] = []
        self._record = asyncio.Event()
        self.reception = Reception(
            role=role,
            engine=self.link,
            metrics=self.metrics,
            drain=lambda: self.drain,
            access_log=self._write,
            stop_wait_s=stop_wait_s,
            why_s=why_s,
        )
        self.drain = Drain(grace_s=grace_s, timeout_s=60.0, remaining=self.reception.remaining, changed=lambda: None)
        self.grpc = GrpcServer(self.metrics, max_rpc_s=max_rpc_s)
        if role == "prefill":
            self.grpc.add_service(
                prefill_pb2_grpc.add_PrefillServicer_to_server, PrefillService(self.reception), "baton.v1.Prefill"
            )
        else:
            service = DecodeService(self.reception, allow_local_prefill=allow_local_prefill)
            self.grpc.add_service(decode_pb2_grpc.add_DecodeServicer_to_server, service, "baton.v1.Decode")
        self.stub: Any = None

    def _write(self, line: Any) -> None:
        self.access.append(dict(line))
        self._record.set()
        self._record = asyncio.Event()

    async def records(self, count: int = 1) -> list[dict[str, Any]]:
        """The access lines, once there are `count` of them."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.access) < count:
                await self._record.wait()
        return self.access

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Front]:
        port = await self.grpc.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = prefill_pb2_grpc.PrefillStub if self.role == "prefill" else decode_pb2_grpc.DecodeStub
            self.stub = stub(channel)  # type: ignore[no-untyped-call]
            async with asyncio.timeout(LIMIT_S):
                await channel.channel_ready()
            try:
                yield self
            finally:
                await self.grpc.stop(0.1)

    def staged_end(self, outcome: str = "released", key: str = REQUEST_KEY) -> None:
        self.reception.staged_end(StagedEnd(key, outcome, publish_seconds=0.5, held_seconds=1.5))


def first_token(key: str = REQUEST_KEY, **fields: Any) -> RequestOutput:
    """What the engine says when the prompt is computed."""
    info = PrefillInfo(cached_tokens=2, cuda_graph_status="not_requested", kv_generation=77)
    return RequestOutput(key, tokens=[TokenOutput(0, 42)], prefill=info, **fields)


def prefilled(key: str = REQUEST_KEY, **fields: Any) -> RequestOutput:
    """The last output of a request in mode PREFILL."""
    stages = {"queue": 0.1, "match": 0.0, "compute": 0.2, "sample": 0.01}
    return first_token(key, last=True, stages=stages, events=[TimelineEvent("computed", 5)], **fields)


def finished(key: str = REQUEST_KEY, reason: FinishReason = FinishReason.LENGTH, **fields: Any) -> RequestOutput:
    return RequestOutput(key, last=True, finish_reason=reason, stages={"generate": 1.0}, **fields)


def failed(code: ErrorCode, key: str = REQUEST_KEY, stage: str = "allocate") -> RequestOutput:
    return RequestOutput(key, last=True, error=EngineError(int(code), "it failed", stage=stage))


def stats(**fields: Any) -> EngineStats:
    return EngineStats(**fields)
