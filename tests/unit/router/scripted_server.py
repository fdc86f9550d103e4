"""Scripted prefill and decode servers: the real gRPC services on loopback, with an engine that follows a script.

They speak the protocol in full (reservation, load, staged KV that somebody must release, aborts with tombstones,
versioned status), and their "model" is a function of the tokens so far, so that every way to serve a request must
give the same answer. A test changes what they do at named points.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import grpc.aio

from protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc import status
from rpc.channels import SERVER_OPTIONS
from rpc.errors import BatonError, ErrorCode
from rpc.version import PROTOCOL_VERSION
from tests.integration.cluster import free_port

EOS = 2
MODEL = "tiny"
WAIT_S = 15.0

Action = Callable[[], Awaitable[None] | None]


def next_token(history: Sequence[int]) -> int:
    """The scripted model: the token that follows `history`. Never EOS, unless the prompt says so (see `answer`)."""
    return 10 + (sum((i + 1) * t for i, t in enumerate(history)) * 2654435761) % 400


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens after `prompt`. A prompt that starts with EOS is answered with EOS at once."""
    if prompt[0] == EOS:
        return [EOS]
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


def _output(index: int, token_id: int, logprobs: bool) -> common_pb2.TokenOutput:
    output = common_pb2.TokenOutput(index=index, token_id=token_id)
    if logprobs:
        output.logprob.CopyFrom(common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1))
        output.top_logprobs.append(common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, rank=1))
    return output


def prefill_result(request: common_pb2.GenerateInput) -> common_pb2.PrefillResult:
    index = len(request.output_token_ids)
    sampling = request.sampling
    token = answer([*request.prompt_token_ids, *request.output_token_ids], 1)[0]
    result = common_pb2.PrefillResult(
        first_token=_output(index, token, sampling.HasField("logprobs")),
        cached_tokens=len(request.prompt_token_ids) // 2,
        prefill_cuda_graph_status="not_requested",
    )
    if token == EOS:
        result.finish_reason = common_pb2.FINISH_REASON_STOP
        result.stop_token_id = EOS
    elif index + 1 >= sampling.max_tokens:
        result.finish_reason = common_pb2.FINISH_REASON_LENGTH
    return result


class RawFailure(Exception):
    """A call that ends with this status and these bytes in place of details, as no server of ours ends one."""

    def __init__(self, code: grpc.StatusCode, payload: bytes | None, text: str = "") -> None:
        self.code = code
        self.text = text
        self.trailing = () if payload is None else ((status.DETAILS_KEY, payload),)
        super().__init__(code)


class ScriptedServer:
    """One server. `at[point]` is run when a request gets there; it may wait, or raise BatonError.

    Points of prefill: start, answer. Of decode: start, reserved, loaded, token:<index>, finished. `staged` has the
    keys whose KV is held here, `open` those of calls now open, `aborted` every Abort that came.
    """

    def __init__(self, role: str, peers: dict[str, ScriptedServer] | None = None) -> None:
        self.role = role
        self.engine_id = uuid.uuid4().hex
        self.peers = peers if peers is not None else {}
        self.at: dict[str, Action] = {}
        self.seen: list[common_pb2.GenerateInput] = []
        self.metadata: list[dict[str, str]] = []
        self.timeouts: list[float | None] = []
        self.requests: list[object] = []
        self.aborted: list[tuple[str, int, str]] = []
        self.staged: set[str] = set()
        self.open: set[str] = set()
        self.state = worker_pb2.WORKER_STATE_READY
        self.running = 0
        self.version = 0
        # Changes of its prefix cache since its start, and how many batches were skipped on the way to readers.
        self.kv_changes: list[worker_pb2.KvCacheEvent] = []
        self.kv_lost = 0
        self.kv_readers = 0
        self.muted = False  # the process is stopped: it takes bytes but answers nothing
        self.loads = True  # a decode server; False: every load fails, and it computes the prompts itself
        self.info_changes: dict[str, object] = {}
        # What becomes of a message before it is sent: it may be changed; None leaves it out.
        self.twist: Callable[[object], object] = lambda message: message
        self.address = ""
        self.changed = asyncio.Condition()
        self._tombstones: set[str] = set()
        self._server: grpc.aio.Server | None = None

    # -- life

    async def start(self, address: str = "") -> str:
        """Without an address at a port that nobody else is given while the server is stopped."""
        address = address or f"127.0.0.1:{free_port()}"
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(_WorkerService(self), self._server)
        if self.role == "prefill":
            prefill_pb2_grpc.add_PrefillServicer_to_server(_PrefillService(self), self._server)
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(_DecodeService(self), self._server)
        port = self._server.add_insecure_port(address)
        assert port, address
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        self.peers[self.engine_id] = self
        return self.address

    async def stop(self) -> None:
        """As a process that is killed: every call and connection breaks at once, and what it held is gone."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        self.staged.clear()

    async def restart(self) -> None:
        """A new engine at the same address."""
        await self.stop()
        self.peers.pop(self.engine_id, None)
        self.engine_id, self.version = uuid.uuid4().hex, 0
        self.kv_changes = []
        await self.start(self.address)

    async def set_state(self, state: int) -> None:
        self.state = state
        await self.notify()

    async def cache(self, **change: object) -> None:
        """A change of its prefix cache: fields of KvCacheEvent."""
        self.kv_changes.append(worker_pb2.KvCacheEvent(**change))
        await self.notify()

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until `condition` holds for something that happened here."""
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(condition)

    # -- what it says of itself

    def info(self) -> worker_pb2.WorkerInfo:
        info = worker_pb2.WorkerInfo(
            role=worker_pb2.ROLE_PREFILL if self.role == "prefill" else worker_pb2.ROLE_DECODE,
            engine_id=self.engine_id,
            version="0",
            protocol_version=PROTOCOL_VERSION,
            served_model_names=[MODEL],
            model_fingerprint="f" * 32,
            dtype="float32",
            kv_dtype="float32",
            groups=[
                common_pb2.KvGroup(
                    tag="full", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32"
                )
            ],
            tp_size=1,
            cache_store_addresses=["127.0.0.1:1"],
            transports=["grpc"],
            max_model_len=4096,
            vocab_size=10_000,
            eos_token_ids=[EOS],
            max_num_seqs=64,
            num_kv_blocks=100,
            allows_local_prefill=False,
        )
        for name, value in self.info_changes.items():
            if value is None:
                info.ClearField(name)
            elif isinstance(value, list):
                del getattr(info, name)[:]
                getattr(info, name).extend(value)
            else:
                setattr(info, name, value)
        return info

    def status(self) -> worker_pb2.WorkerStatus:
        self.version += 1
        return worker_pb2.WorkerStatus(
            state=self.state,
            engine_id=self.engine_id,
            version=self.version,
            running=self.running,
            waiting=0,
            loading=0,
        )

    def told(self) -> tuple[object, ...]:
        """What a change of makes a status."""
        return self.state, self.engine_id, self.running

    # -- requests

    async def silence(self) -> None:
        if self.muted:
            await asyncio.get_running_loop().create_future()

    async def reach(self, point: str) -> None:
        action = self.at.get(point)
        if action is not None:
            result = action()
            if result is not None:
                await result
        await self.silence()

    async def admit(
        self, request: common_pb2.GenerateInput, message: object, context: grpc.aio.ServicerContext
    ) -> None:
        key = request.request_key
        if key in self._tombstones:
            raise BatonError(ErrorCode.REQUEST_TOMBSTONED)
        if key in self.open:
            raise BatonError(ErrorCode.DUPLICATE_REQUEST)
        self.seen.append(request)
        self.requests.append(message)
        self.metadata.append({str(k): str(v) for k, v in context.invocation_metadata() or ()})
        self.timeouts.append(context.time_remaining())
        self.open.add(key)
        await self.notify()

    async def leave(self, key: str) -> None:
        self.open.discard(key)
        await self.notify()

    async def abort(self, key: str, code: int, source: str) -> bool:
        await self.silence()
        self.aborted.append((key, code, source))
        found = key in self.open or key in self.staged
        self.staged.discard(key)
        if not found:
            self._tombstones.add(key)
        await self.notify()
        return found

    def release_at_source(self, message: decode_pb2.DecodeRequest) -> None:
        """The load is complete: the prefill server's copy goes."""
        source = self.peers.get(message.kv_source.engine_id)
        if source is not None:
            source.staged.discard(message.input.request_key)


class _WorkerService(worker_pb2_grpc.WorkerServicer):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    async def GetInfo(self, request, context):
        await self._server.silence()
        return self._server.info()

    async def GetStatus(self, request, context):
        await self._server.silence()
        return self._server.status()

    async def WatchStatus(self, request, context):
        server = self._server
        while True:
            await server.silence()
            yield server.status()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.interval_seconds), server.changed:
                    told = server.told()
                    await server.changed.wait_for(lambda told=told: server.told() != told)

    async def SubscribeKvEvents(self, request, context):
        server, sequence, sent = self._server, 1, len(self._server.kv_changes)
        server.kv_readers += 1
        try:
            snapshot = [worker_pb2.KvCacheEvent(cleared=True), *server.kv_changes]
            yield worker_pb2.KvEventBatch(sequence=sequence, engine_id=server.engine_id, events=snapshot)
            while True:
                async with server.changed:
                    await server.changed.wait_for(lambda sent=sent: len(server.kv_changes) > sent)
                await server.silence()
                batch, sent = server.kv_changes[sent:], len(server.kv_changes)
                sequence += 1 + server.kv_lost
                server.kv_lost = 0
                yield worker_pb2.KvEventBatch(sequence=sequence, engine_id=server.engine_id, events=batch)
        finally:
            server.kv_readers -= 1


class _PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    async def Prefill(self, request, context):
        server, key = self._server, request.input.request_key
        try:
            await server.admit(request.input, request, context)
            await server.reach("start")
            if request.hold_kv:
                server.staged.add(key)
            await server.reach("answer")
            response = prefill_pb2.PrefillResponse(
                result=prefill_result(request.input), kv_generation=1, engine_id=server.engine_id
            )
            response.timeline.stages["compute"] = 0.25
            return server.twist(response)
        except BatonError as error:
            server.staged.discard(key)
            await status.abort(context, error)
        except RawFailure as failure:
            server.staged.discard(key)
            await context.abort(failure.code, failure.text, failure.trailing)
        except asyncio.CancelledError:
            server.staged.discard(key)
            raise
        finally:
            server.open.discard(key)
            await asyncio.shield(server.notify())

    async def Abort(self, request, context):
        found = await self._server.abort(request.request_key, request.code, request.source)
        return prefill_pb2.PrefillAbortResponse(found=found)


class _DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    async def Decode(self, request, context):
        async for event in self._events(request, context):
            if (sent := self._server.twist(event)) is not None:
                yield sent

    async def _events(self, request, context):
        server, key = self._server, request.input.request_key
        local = request.HasField("local_prefill")
        try:
            await server.admit(request.input, request, context)
            await server.reach("start")
            result = prefill_result(request.input)
            if not local:
                await server.reach("reserved")
                yield decode_pb2.DecodeEvent(reserved=decode_pb2.Reserved(blocks_in_cache=0))
                if server.loads:
                    await self._load(request)
                    await server.reach("loaded")
                    server.release_at_source(request)
                    yield decode_pb2.DecodeEvent(loaded=decode_pb2.Loaded(prefill=result))
            async for event in self._generate(request.input, result, local or not server.loads):
                yield event
        except BatonError as error:
            await status.abort(context, error)
        except RawFailure as failure:
            await context.abort(failure.code, failure.text, failure.trailing)
        finally:
            server.open.discard(key)
            await asyncio.shield(server.notify())

    async def _load(self, request: decode_pb2.DecodeRequest) -> None:
        """Waits until the prompt is staged at its source, as a parked load does."""
        source = self._server.peers.get(request.kv_source.engine_id)
        if source is None:
            cause = BatonError(ErrorCode.CACHE_STORE_LOAD_CONNECT_FAILED)
            raise status.load_failed(cause)
        await source.until(lambda: request.input.request_key in source.staged)

    async def _generate(
        self, request: common_pb2.GenerateInput, result: common_pb2.PrefillResult, computed_here: bool
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        server, sampling = self._server, request.sampling
        logprobs = sampling.HasField("logprobs")
        history = [*request.prompt_token_ids, *request.output_token_ids]
        index = len(request.output_token_ids)
        reason = common_pb2.FINISH_REASON_LENGTH
        while True:
            await server.reach(f"token:{index}")
            token = answer(request.prompt_token_ids, 1)[0] if not index else next_token(history)
            history.append(token)
            tokens = decode_pb2.Tokens(tokens=[_output(index, token, logprobs)])
            if computed_here and index == len(request.output_token_ids):
                tokens.prefill.CopyFrom(result)
            yield decode_pb2.DecodeEvent(tokens=tokens)
            index += 1
            if token == EOS:
                reason = common_pb2.FINISH_REASON_STOP
                break
            if index >= sampling.max_tokens:
                break
        await server.reach("finished")
        finished = decode_pb2.Finished(finish_reason=reason)
        if reason == common_pb2.FINISH_REASON_STOP:
            finished.stop_token_id = EOS
        finished.timeline.stages["load"] = 0.5
        yield decode_pb2.DecodeEvent(finished=finished)

    async def Abort(self, request, context):
        found = await self._server.abort(request.request_key, request.code, request.source)
        return decode_pb2.DecodeAbortResponse(found=found)


class Hold:
    """An action that waits until it is let go, and says when somebody has come there."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.let_go.wait()

    async def wait_reached(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.reached.wait()


def fails(code: ErrorCode, *, times: int = 10**9, **metadata: str) -> Action:
    """An action that raises the first `times` times."""
    left = [times]

    def act() -> None:
        if left[0]:
            left[0] -= 1
            raise BatonError(code, "scripted failure", metadata=metadata)

    return act
