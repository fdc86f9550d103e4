"""A prefill and a decode server that compute nothing: they answer at once, in the protocol in full, so that a router in
front of them is the slowest part.

A prompt that begins with HOLD gets no token until `let_go`, so that any number of requests can be held open.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.channels import SERVER_OPTIONS
from rpc.version import PROTOCOL_VERSION

HOLD = 7
MODEL = "echo"
VOCABULARY = 1000
START_S = 30.0
_Context = grpc.aio.ServicerContext[Any, Any]


class _Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, role: worker_pb2.Role, engine_id: str) -> None:
        self._engine_id = engine_id
        self._version = 0
        self._info = worker_pb2.WorkerInfo(
            role=role, engine_id=engine_id, version="0", protocol_version=PROTOCOL_VERSION, served_model_names=[MODEL],
            model_fingerprint="e" * 32, dtype="float32", kv_dtype="float32", tp_size=1, transports=["grpc"],
            groups=[common_pb2.KvGroup(
                tag="full", num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32"
            )],
            cache_store_addresses=["127.0.0.1:1"], max_model_len=8192, vocab_size=VOCABULARY, eos_token_ids=[2],
            max_num_seqs=4096, num_kv_blocks=1_000_000, allows_local_prefill=False,
        )  # fmt: skip

    def _status(self) -> worker_pb2.WorkerStatus:
        self._version += 1
        return worker_pb2.WorkerStatus(
            state=worker_pb2.WORKER_STATE_READY, engine_id=self._engine_id, version=self._version
        )

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: _Context) -> worker_pb2.WorkerInfo:
        return self._info

    async def GetStatus(self, request: worker_pb2.GetStatusRequest, context: _Context) -> worker_pb2.WorkerStatus:
        return self._status()

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.WorkerStatus]:
        while True:
            yield self._status()
            await asyncio.sleep(request.interval_seconds)


def _token(index: int) -> common_pb2.TokenOutput:
    return common_pb2.TokenOutput(index=index, token_id=10 + index % 500)


def _prefill_result() -> common_pb2.PrefillResult:
    return common_pb2.PrefillResult(first_token=_token(0), cached_tokens=0, prefill_cuda_graph_status="not_requested")


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, engine_id: str, gate: asyncio.Event) -> None:
        self._engine_id = engine_id
        self._gate = gate

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: _Context) -> prefill_pb2.PrefillResponse:
        if request.input.prompt_token_ids[0] == HOLD:
            await self._gate.wait()
        response = prefill_pb2.PrefillResponse(result=_prefill_result(), kv_generation=1, engine_id=self._engine_id)
        for stage in ("admit", "queue", "match", "compute", "sample"):
            response.timeline.stages[stage] = 0.001
        return response

    async def Abort(
        self, request: prefill_pb2.PrefillAbortRequest, context: _Context
    ) -> prefill_pb2.PrefillAbortResponse:
        return prefill_pb2.PrefillAbortResponse(found=True)


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: _Context
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        yield decode_pb2.DecodeEvent(reserved=decode_pb2.Reserved(blocks_in_cache=0))
        if request.input.prompt_token_ids[0] == HOLD:
            await self._gate.wait()
        yield decode_pb2.DecodeEvent(loaded=decode_pb2.Loaded(prefill=_prefill_result()))
        for index in range(request.input.sampling.max_tokens):
            yield decode_pb2.DecodeEvent(tokens=decode_pb2.Tokens(tokens=[_token(index)]))
        finished = decode_pb2.Finished(finish_reason=common_pb2.FINISH_REASON_LENGTH)
        for stage in ("admit", "prepare", "allocate", "load", "wait_to_run", "generate", "release"):
            finished.timeline.stages[stage] = 0.001
        yield decode_pb2.DecodeEvent(finished=finished)

    async def Abort(self, request: decode_pb2.DecodeAbortRequest, context: _Context) -> decode_pb2.DecodeAbortResponse:
        return decode_pb2.DecodeAbortResponse(found=True)


async def _serve(pipe: Connection) -> None:
    gate = asyncio.Event()
    addresses, servers = [], []
    for role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE):
        engine_id = uuid.uuid4().hex
        server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Worker(role, engine_id), server)
        if role == worker_pb2.ROLE_PREFILL:
            prefill_pb2_grpc.add_PrefillServicer_to_server(_Prefill(engine_id, gate), server)
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(_Decode(gate), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    pipe.send(addresses)
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    while True:
        await told.wait()
        told.clear()
        try:
            while pipe.poll():  # the loop may have noticed one message twice
                pipe.recv()
                gate.set()
        except EOFError:
            break
    for server in servers:
        await server.stop(None)


def _run(pipe: Connection) -> None:
    asyncio.run(_serve(pipe))


class EchoServers:
    """Addresses of the two servers, which run in one process of their own."""

    def __init__(self, prefill: str, decode: str, pipe: Connection) -> None:
        self.prefill = prefill
        self.decode = decode
        self._pipe = pipe

    def let_go(self) -> None:
        """What is held, and whatever comes later, is answered."""
        self._pipe.send(True)


@contextmanager
def echo_servers() -> Iterator[EchoServers]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not mine.poll(START_S):
            raise SystemExit(f"the echo servers did not listen within {START_S:g} s")
        prefill, decode = mine.recv()
        yield EchoServers(prefill, decode, mine)
    finally:
        mine.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
